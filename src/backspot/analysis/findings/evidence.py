"""What the rules look at: a trace with its owners, and what each of its parts costs on the clock.

Every moment has one holder (see ``clock``): a piece of device work that runs or waits to run, else
a span of the host. A rule picks holders; their times are what the finding costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from backspot.analysis.accounting.clock import Clock
from backspot.analysis.accounting.pieces import take
from backspot.analysis.accounting.steps import StepWindows
from backspot.analysis.attribution.launches import DeviceWork
from backspot.analysis.attribution.ownership import OUTSIDE, SPECIAL, Ownership
from backspot.analysis.attribution.spans import Spans
from backspot.analysis.timeline import (
    NOTHING,
    Timeline,
    first_started,
    grouped,
    layered,
    numbered,
    pieces,
)
from backspot.formatting import counted, duration, percent
from backspot.results.costs import Phase
from backspot.results.findings import Finding, Place
from backspot.results.report import Report
from backspot.trace import Category, Events
from backspot.trace.events import Ints

__all__ = ["Evidence", "Mask", "once"]

Mask = NDArray[np.bool_]

_NOWHERE = SPECIAL[OUTSIDE]
_NAMED = 3  # how many nodes, operators or kernels a finding names


_Asked = TypeVar("_Asked")


def once(ask: Callable[[Evidence], _Asked]) -> Callable[[Evidence], _Asked]:
    """Work out once what several rules ask of the evidence."""

    @wraps(ask)
    def asked(evidence: Evidence) -> _Asked:
        if ask not in evidence.answers:
            evidence.answers[ask] = ask(evidence)
        answer: _Asked = evidence.answers[ask]
        return answer

    return asked


@dataclass(frozen=True)
class Evidence:
    """What every rule is a function of.

    Attributes:
        events: the trace.
        ownership: its owners.
        clock: who holds each moment.
        report: its costs, all depths, without findings.
        windows: its steps on the clock; ``None`` where it tells of backward passes only.
    """

    events: Events
    ownership: Ownership
    clock: Clock
    report: Report
    windows: StepWindows | None
    answers: dict[Callable[[Evidence], Any], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    # What there is ---------------------------------------------------------------------------

    @property
    def spans(self) -> Spans:
        """Module calls and nodes."""
        return self.ownership.spans

    @property
    def work(self) -> DeviceWork:
        """What the devices did."""
        return self.ownership.work

    @cached_property
    def in_pass(self) -> Mask:
        """Whether each span runs in a backward pass."""
        return self.ownership.passes.of_span >= 0

    @cached_property
    def of_loss(self) -> Mask:
        """Whether each span belongs to no module, or to a loss."""
        losses = [module.class_name.endswith("Loss") for module in self.spans.modules]
        kept: Mask = np.array([True] * len(SPECIAL) + losses, bool)[self.ownership.owner]
        return kept

    @cached_property
    def backward(self) -> Mask:
        """Whether each piece of device work was launched by a node, or by what runs within one."""
        return take(self.in_pass, self.work.span, False).astype(bool)

    @cached_property
    def recorded(self) -> Mask:
        """Whether each piece of device work runs in the steps, not only before or between them."""
        steps, work = self.windows or self.ownership.windows, self.work
        at = np.searchsorted(steps.end, work.start, side="right")
        begins = np.append(steps.start, np.iinfo(np.int64).max)[at]
        kept: Mask = (begins < work.end) | (begins == work.start)
        return kept

    @property
    def step_ns(self) -> int:
        """The clock time of all recorded steps, as far as the trace tells it."""
        return self.report.whole_ns

    def phase(self, name: str) -> Phase | None:
        """One phase of the step, where the report has phases."""
        return next((p for p in self.report.phases if p.name == name), None)

    # The clock -------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> Timeline:
        """Which step each moment belongs to."""
        steps = self.windows or self.ownership.windows
        return first_started(steps.start, steps.end, np.arange(len(steps.start)))

    @cached_property
    def idle(self) -> Timeline:
        """When in the steps no device has anything to do, running or queued: 0, else nothing."""
        line = self.clock.whole.cut(self.steps.edges)
        free = (line.values < len(self.spans.start)) & (self.steps.over(line.edges) >= 0)
        # What is not free is one stretch, however many hold it one after the other.
        turns = np.append(True, free[1:] != free[:-1]) if len(free) else free
        return Timeline(line.edges[turns], np.where(free[turns], 0, NOTHING))

    @cached_property
    def _held(self) -> Ints:
        held = np.zeros(len(self.spans.start) + len(self.work.start), np.int64)
        _, holder, length = pieces(self.clock.whole, self.steps)
        np.add.at(held, holder[holder >= 0], length[holder >= 0])
        return held

    @property
    def work_ns(self) -> Ints:
        """For each piece of device work the time of the steps that it holds, its wait included."""
        held: Ints = self._held[len(self.spans.start) :]
        return held

    @property
    def host_ns(self) -> Ints:
        """For each span the steps' time that it holds on the host, no device having anything."""
        held: Ints = self._held[: len(self.spans.start)]
        return held

    @cached_property
    def span_ns(self) -> Ints:
        """For each span the clock time of the host's work in it and of what it launched."""
        spent: Ints = self.host_ns.copy()
        mine = self.work.span >= 0
        np.add.at(spent, self.work.span[mine], self.work_ns[mine])
        return spent

    @cached_property
    def busy_ns(self) -> int:
        """The steps' clock time in which any device ran something."""
        if not self._busy:
            return 0
        _, holder, length = pieces(layered(*self._busy), self.steps)
        return int(length[holder >= 0].sum())

    @cached_property
    def _busy(self) -> tuple[Timeline, ...]:
        return tuple(device.busy for device in self.clock.devices.values())

    # Names -----------------------------------------------------------------------------------

    def nodes_named(self, matches: Callable[[str], bool]) -> Mask:
        """Whether each span is a node of the backward whose name matches."""
        good = np.array([matches(name) for name in self.spans.node_names] + [False], bool)
        chosen: Mask = good[self.spans.node] & self.in_pass & self.spans.is_node
        return chosen

    def work_named(self, matches: Callable[[str], bool]) -> Mask:
        """Whether each piece of the steps' device work has a name that matches."""
        names, inverse = self._work_names
        good = np.array([matches(self.events.names[name]) for name in names.tolist()], bool)
        return good[inverse] & self.recorded if len(names) else np.zeros(0, bool)

    @cached_property
    def _work_names(self) -> tuple[Ints, Ints]:
        """The names of all device work, each once, and which of them each piece has."""
        return numbered(self.work.name)

    @property
    def accumulates(self) -> Mask:
        """Whether each span hands a gradient over to its parameter."""
        return self.nodes_named(lambda name: name.endswith("AccumulateGrad"))

    def work_of(self, spans: Mask) -> Mask:
        """Whether each piece of device work was launched directly in one of ``spans``."""
        chosen: Mask = np.append(spans, False)[np.maximum(self.work.span, NOTHING)]
        return chosen

    def spans_of_work(self, chosen: Mask) -> Mask:
        """Whether each span launched any of this device work."""
        return self._spans_at(self.work.span[chosen])

    def spans_around(self, index: Ints) -> Mask:
        """Whether each span is the innermost around the start of any of these events."""
        return self._spans_at(self.spans.of(self.events, index))

    def _spans_at(self, span: Ints) -> Mask:
        mask = np.zeros(len(self.spans.start), bool)
        mask[span[span >= 0]] = True
        return mask

    def launched_in(self, *operators: str, category: Category = Category.OPERATOR) -> Ints:
        """For each piece of the steps' device work the event of these names around its launch.

        Args:
            operators: whole names, or beginnings of names that end in ``*``.
            category: what kind of event.

        Returns:
            Indices into the events, of the outermost one; ``NOTHING`` for none.
        """
        found = self.around(self.work.thread, self.work.launch, *operators, category=category)
        return np.where(self.recorded, found, NOTHING)

    def around(
        self,
        threads: Ints,
        times: Ints,
        *operators: str,
        category: Category = Category.OPERATOR,
    ) -> Ints:
        """As ``launched_in``, for any times on any threads."""
        whole = frozenset(operators)
        starts = tuple(name[:-1] for name in operators if name.endswith("*"))
        good = np.array(
            [
                name in whole or (bool(starts) and name.startswith(starts))
                for name in self.events.names
            ],
            bool,
        )
        index = self.events.chosen(good, category)
        found = np.full(len(times), NOTHING, np.int64)
        asked = dict(grouped(threads))
        for thread, those in grouped(self.events.thread[index]):
            mine, here = index[those], asked.get(thread, those[:0])
            line = first_started(self.events.start[mine], self.events.end[mine], mine)
            found[here] = line.at(times[here])
        return found

    def owner_of_work(self) -> Ints:
        """Each piece of device work's owner (see ``Ownership.owner``), ``NOTHING`` for none."""
        return take(self.ownership.owner, self.work.span)

    # What a finding says ---------------------------------------------------------------------

    def ms(self, ns: float) -> str:
        """A time over all steps as a text: per step."""
        return duration(ns / self.report.steps)

    def share(self, ns: float) -> str:
        """A time over all steps as a text: its share of the step."""
        return percent(ns / self.step_ns) if self.step_ns else "0%"

    def volume(self, chosen: Mask) -> str:
        """What these copies move in a step, as a text to insert: `` of 77 MB``."""
        size = self.events.size[self.work.event[chosen]]
        moved = int(size[size > 0].sum()) / self.report.steps
        together = " together" if int(chosen.sum()) > self.report.steps else ""
        return f" of {moved / 1e6:,.{0 if moved >= 1e7 else 1}f} MB{together}" if moved else ""

    def per_step(self, count: int, thing: str, things: str = "") -> str:
        """A number over all steps as a text: ``12 kernels per step``, ``1 wait in 5 steps``."""
        steps = self.report.steps
        if steps == 1 or count % steps == 0:
            return counted(count // steps, thing, things) + " per step"
        if count < steps:
            return f"{counted(count, thing, things)} in {steps:,} steps"
        return f"{count / steps:,.1f} {things or thing + 's'} per step"

    def places(self, owner: Ints, wall_ns: Ints, count: Ints | None = None) -> tuple[Place, ...]:
        """Sum costs by owner, most expensive first; ``NOTHING`` stands for no module's.

        Args:
            owner: as in ``Ownership.owner``; arrays of equal length.
            wall_ns: nanoseconds.
            count: how many things each entry stands for; one where left out.
        """
        counts = np.ones(len(owner), np.int64) if count is None else count
        owners, inverse = numbered(np.maximum(owner, OUTSIDE))
        spent = np.zeros(len(owners), np.int64)
        times = np.zeros(len(owners), np.int64)
        np.add.at(spent, inverse, wall_ns)
        np.add.at(times, inverse, counts)
        found = [
            Place(*self._named(number), int(many), int(cost))
            for number, many, cost in zip(owners.tolist(), times, spent, strict=True)
        ]
        return tuple(sorted(found, key=lambda place: (-place.wall_ns, -place.count, place.path)))

    def places_of_spans(self, chosen: Mask) -> tuple[Place, ...]:
        """The places of whole spans: the host's time in them and that of what they launched."""
        return self.places(self.ownership.owner[chosen], self.span_ns[chosen])

    def places_of_work(self, chosen: Mask, elsewhere: str = "") -> tuple[Place, ...]:
        """The places of device work; ``elsewhere`` names what was launched in no module's call."""
        found = self.places(self.owner_of_work()[chosen], self.work_ns[chosen])
        if not elsewhere:
            return found
        return tuple(replace(p, path=elsewhere) if p.path == _NOWHERE else p for p in found)

    def _named(self, owner: int) -> tuple[str, str]:
        if owner < len(SPECIAL):
            return SPECIAL[owner], ""
        module = self.spans.modules[owner - len(SPECIAL)]
        return module.path, module.class_name

    def top_nodes(self, chosen: Mask) -> tuple[str, ...]:
        """The names of the nodes among these spans, the most expensive first."""
        mine = chosen & self.spans.is_node
        return _top(self.spans.node[mine], self.span_ns[mine], self.spans.node_names)

    def top_kernels(self, chosen: Mask) -> tuple[str, ...]:
        """The names of this device work, the most expensive first."""
        length = (self.work.end - self.work.start)[chosen]
        return _top(self.work.name[chosen], length, self.events.names)

    def top_operators(self, index: Ints, wall_ns: Ints) -> tuple[str, ...]:
        """The names of these events, the most expensive first; ``NOTHING`` is left out."""
        mine = index >= 0
        return _top(self.events.name[index[mine]], wall_ns[mine], self.events.names)

    def finding(
        self,
        *,
        title: str,
        seen: str,
        remedy: str,
        link: str,
        places: Sequence[Place],
        nodes: tuple[str, ...] = (),
        operators: tuple[str, ...] = (),
        kernels: tuple[str, ...] = (),
    ) -> Finding | None:
        """A finding that costs what its places cost; none where there is no place."""
        if not places:
            return None
        return Finding(
            rule="",  # filled in by the registered name
            title=title,
            seen=seen,
            remedy=remedy,
            wall_ns=sum(place.wall_ns for place in places),
            places=tuple(places),
            nodes=nodes,
            operators=operators,
            kernels=kernels,
            link=link,
        )


def _top(name: Ints, spent: Ints, names: Sequence[str]) -> tuple[str, ...]:
    which, inverse = numbered(name)
    sums = np.zeros(len(which), np.int64)
    np.add.at(sums, inverse, spent)
    ranked = np.argsort(-sums, kind="stable")[:_NAMED]
    return tuple(names[index] for index in which[ranked].tolist())
