"""The owner of each autograd node, and through the nodes of each piece of device work.

A node belongs to the innermost module call around the forward operator that made the node. Device
work belongs to the span that the host was in when it launched the work, except for communication
between ranks, which belongs to owners of its own: how long it lasts depends on the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

import msgspec
import numpy as np

from backspot.analysis.attribution.communication import Communication, find_communication
from backspot.analysis.attribution.compiled import Compiled, find_compiled_launches
from backspot.analysis.attribution.join import Join, find_lines_of_nodes, join_nodes
from backspot.analysis.attribution.launches import (
    DeviceWork,
    Precedence,
    Waits,
    Windows,
    find_device_work,
    find_waits,
    find_windows,
    pass_at,
)
from backspot.analysis.attribution.passes import Passes, Steps, find_steps
from backspot.analysis.attribution.recompute import NO_CALLER, find_recomputation
from backspot.analysis.attribution.shares import Shares
from backspot.analysis.attribution.spans import Module, Spans, find_spans
from backspot.analysis.attribution.wrapping import find_wrapped
from backspot.analysis.timeline import NOTHING, take
from backspot.results.costs import (
    GRADIENT_EXCHANGE,
    OTHER_COMMUNICATION,
    PARAMETER_GATHER,
)
from backspot.trace import Events
from backspot.trace.events import Ints, Mask
from backspot.trace.source_lines import SourceLine


class Special(IntEnum):
    """The owners of time that belongs to no module.

    The value of each is its index in ``Owners``.

    Attributes:
        path: what rows call the owner.
    """

    path: str

    OUTSIDE = 0, "(outside model)"
    UNRECORDED = 1, "(forward not recorded)"
    AMBIGUOUS = 2, "(ambiguous thread)"
    ENGINE = 3, "(autograd engine)"
    NO_LAUNCH = 4, "(no launch record)"
    GRADIENTS = 5, GRADIENT_EXCHANGE
    PARAMETERS = 6, PARAMETER_GATHER
    COMMUNICATION = 7, OTHER_COMMUNICATION

    def __new__(cls, index: int, path: str) -> Special:
        """Make the member with this index."""
        member = int.__new__(cls, index)
        member._value_ = index
        member.path = path
        return member


class Owners(msgspec.Struct, frozen=True):
    """All owners of time: the special ones, then the modules. An owner is an index into these.

    Attributes:
        modules: the modules that labels name, compiled regions, and modules inside these.
    """

    modules: tuple[Module, ...]

    def __len__(self) -> int:
        """How many owners there are."""
        return len(Special) + len(self.modules)

    def each_module(self) -> Iterator[tuple[int, Module]]:
        """Each module and its index as an owner."""
        return enumerate(self.modules, len(Special))

    def of_modules(self, module: Ints) -> Ints:
        """The owners that these indices into ``modules`` stand for."""
        return module + len(Special)

    def module(self, owner: int) -> Module | None:
        """The module that this owner is, ``None`` for a special owner."""
        return None if owner < len(Special) else self.modules[owner - len(Special)]

    def path(self, owner: int) -> str:
        """What rows call this owner."""
        module = self.module(owner)
        return module.path if module else list(Special)[owner].path

    def named(self, owner: int) -> tuple[str, str]:
        """The path and the class name of this owner's row; a special owner has no class."""
        module = self.module(owner)
        return self.path(owner), module.class_name if module else ""

    @property
    def is_module(self) -> Mask:
        """Whether each owner is a module, and neither special nor a compiled region."""
        return self.mask(lambda module: not module.is_region)

    @property
    def is_special(self) -> Mask:
        """Whether each owner is a special one."""
        return np.arange(len(self)) < len(Special)

    def mask(self, matches: Callable[[Module], bool], *, special: bool = False) -> Mask:
        """Whether the module of each owner matches; special owners have the value ``special``."""
        return np.array(
            [special] * len(Special) + [matches(module) for module in self.modules], bool
        )


class Ownership(msgspec.Struct, frozen=True):
    """A trace with an owner for everything in its backward.

    Attributes:
        spans: module calls and nodes.
        join: the forward operator and the thread that made each node.
        owners: all owners of the trace.
        owner: the owner of each span, an index into ``owners``.
        work_owner: the owner of each piece of device work; of fused kernels, the largest.
        work_shares: the owners of each piece of device work, with their shares.
        launch_shares: the owners of each launch in ``compiled``, with their shares.
        compiled: what is known inside compiled regions.
        passes: the backward passes.
        windows: the clock time of each pass.
        steps: the step of each pass.
        work: what the devices did.
        communication: what the communication between ranks is for.
        waits: where the host waited for a device.
        line: for each span the index in ``lines`` of what made the node, ``NOTHING`` where that is
            not known.
        lines: the source lines that the trace names.
        exact_lines: whether these lines made the nodes, or called the modules that did.
    """

    spans: Spans
    join: Join
    owners: Owners
    owner: Ints
    work_owner: Ints
    work_shares: Shares
    launch_shares: Shares
    compiled: Compiled
    passes: Passes
    windows: Windows
    steps: Steps
    work: DeviceWork
    communication: Communication
    waits: Waits
    line: Ints
    lines: Sequence[SourceLine] = ()
    exact_lines: bool = True

    @property
    def noted(self) -> Ints:
        """The operator that made each node whose own line was noted, which takes the host time."""
        return self.join.operator[(self.line >= 0) & (self.join.operator >= 0) & self.exact_lines]


def attribute(events: Events) -> Ownership:
    """Find the owner of everything that a trace's backward did."""
    spans = find_recomputation(events, find_spans(events))
    join, passes = join_nodes(events, spans)
    work = find_device_work(events, spans, passes)
    windows = find_windows(passes, work)
    lost = work.launch == NOTHING
    work.run[lost] = pass_at(windows, work.start[lost])
    communication = find_communication(events, spans, work)
    owner = _owner_of_spans(events, spans, join, Owners(spans.modules))
    module = np.where(owner >= len(Special), owner - len(Special), NOTHING)
    compiled = find_compiled_launches(events, spans, module, work)
    line = find_lines_of_nodes(events, spans, join)
    shares = compiled.shares.over(
        np.where(work.precedence == Precedence.COMMUNICATION, NOTHING, compiled.of_work),
        _owner_of_work(owner, work, communication),
        np.where(communication.collective >= 0, NOTHING, take(line, work.span)),
        owner_offset=len(Special),
        line_offset=len(events.lines.lines),
    )
    launches = compiled.shares.over(
        np.arange(len(compiled.event)),
        take(owner, compiled.span, Special.ENGINE),
        take(line, compiled.span),
        owner_offset=len(Special),
        line_offset=len(events.lines.lines),
    )
    return Ownership(
        spans=spans,
        join=join,
        owners=Owners(spans.modules + compiled.modules),
        owner=owner,
        work_owner=shares.largest,
        work_shares=shares,
        launch_shares=launches,
        compiled=compiled,
        passes=passes,
        windows=windows,
        steps=find_steps(events, spans, passes, join.operator),
        work=work,
        communication=communication,
        waits=find_waits(events, spans),
        line=line,
        lines=events.lines.lines + events.compiled.lines,
        exact_lines=events.lines.exact,
    )


def _owner_of_spans(events: Events, spans: Spans, join: Join, owners: Owners) -> Ints:
    count = len(spans.start)
    owner = np.full(count, Special.UNRECORDED, np.int64)
    owner[join.captured] = Special.ENGINE
    owner[join.ambiguous] = Special.AMBIGUOUS
    called = spans.module >= 0
    owner[called] = owners.of_modules(spans.module[called])
    # The span that decides: the one around the forward operator, or the node that fed this one.
    decides = join.feeder.copy()
    joined = np.flatnonzero(join.operator >= 0)
    operator = join.operator[joined]
    around = spans.of(events, operator)
    wrapped = find_wrapped(events, spans, operator)
    around = np.where(wrapped >= 0, wrapped, around)
    owner[joined[around < 0]] = Special.OUTSIDE
    # No recorded operator made these nodes, but the live half marked them with their modules.
    marked = (spans.marked >= 0) & (join.operator < 0)
    owner[marked] = owners.of_modules(spans.marked[marked])
    decides[joined] = around
    again = ~called & ~spans.is_node
    decides[again] = np.where(spans.caller >= 0, spans.caller, spans.parent)[again]
    unowned = again & (spans.caller == NO_CALLER)
    owner[unowned], decides[unowned] = Special.OUTSIDE, NOTHING
    # A node can decide, too (double backward, AccumulateGrad); it started before this one.
    up = np.where((decides >= 0) & ~called, decides, np.arange(count))
    for _ in range(count.bit_length()):  # each round doubles the distance covered
        further = up[up]
        if (further == up).all():
            break
        up = further
    owned: Ints = owner[up]
    return owned


def _owner_of_work(owner: Ints, work: DeviceWork, communication: Communication) -> Ints:
    """Return the owner of each piece of device work, from the owners of the spans."""
    owners = take(owner, work.span, Special.ENGINE)
    owners[work.launch == NOTHING] = Special.NO_LAUNCH
    owners[work.precedence == Precedence.COMMUNICATION] = Special.COMMUNICATION
    owners[communication.of_gradients] = Special.GRADIENTS
    owners[communication.of_parameters] = Special.PARAMETERS
    return owners
