"""What is kept of one rank's trace: numbers by module and step, and the collectives in order.

A summary of 1,000 modules and ten steps has less than 400 kB, and the kernels of 200 modules add
less than 90 kB. It does not refer to its trace.

A saved summary can be damaged, or of any origin. Its ranges are those of its types, and what is of
one step, or of one collective, is checked in ``_problems``: what is read here can be put together.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from operator import gt, le, sub
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec.structs import astuple

from backspot.errors import NotATraceError
from backspot.formatting import labelled
from backspot.results.report import StepUnit

SCHEMA = "backspot.rank/4"
"""Version of a saved summary."""
WAITING, COLLECTING = "(waiting for the GPU)", "(in Python's garbage collector)"
"""Places that are no part of the training loop."""
SUFFIX = ".rank"
"""How the name of a file ends that has a summary in the small form."""
KERNELS = 4
"""How many kernels a summary names for a module and direction: at most two are named to people, and
each costs a time for each step. Chosen, not measured."""
LONGEST_NAME = 160
"""Characters of a kernel's name that a summary keeps; those of templates have thousands."""
Purpose: TypeAlias = Literal["", "gradients", "parameters", "activations", "attention"]
"""What a collective moves."""
_HEAD = re.compile(rb'x[\x01\x5e\x9c\xda]|\s*\{\s*"schema"\s*:\s*"backspot\.rank/')
"""How a summary begins, and no trace: as zlib writes it, or as JSON."""
_MOST_BYTES = 1 << 28
"""What a summary may unpack to: far more than 10,000 modules in 100 steps take."""


_Time: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
"""Nanoseconds, less than two weeks, so that sums over all modules and ranks fit in 64 bits."""
_Times: TypeAlias = tuple[_Time, ...]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Numbers: TypeAlias = tuple[_Number, ...]


class PhaseTimes(msgspec.Struct, frozen=True, array_like=True):
    """The clock time of one phase in each step, in nanoseconds."""

    name: str
    by_step: _Times


class ModuleTimes(msgspec.Struct, frozen=True, array_like=True):
    """The clock time of one owner in each step, in nanoseconds.

    Each moment of a step counts at most once, for what holds the clock. Time in which a collective
    holds the clock is no time of a module.

    Attributes:
        path: path of the module, or a name in parentheses for time that no module owns.
        forward_gpu: its forward kernels and copies run.
        forward_host: its forward holds up the device, or has no device.
        forward_hidden: the host executes its forward while the device runs nothing but a
            collective. This time is in addition to that of the clock.
        backward_gpu: its backward kernels and copies run.
        backward_host: its backward holds up the device, or has no device.
        backward_hidden: as ``forward_hidden``.
        forward_beside: the host executes its forward while kernels or copies run: it holds up
            nothing. In addition to the clock, too; empty in summaries of earlier versions.
        backward_beside: as ``forward_beside``.
    """

    path: str
    class_name: str
    is_module: bool
    forward_gpu: _Times
    forward_host: _Times
    forward_hidden: _Times
    backward_gpu: _Times
    backward_host: _Times
    backward_hidden: _Times
    forward_beside: _Times = ()
    backward_beside: _Times = ()

    @property
    def label(self) -> str:
        """Path and class of the module."""
        return labelled(self.path or self.class_name, self.class_name)

    def on_gpu(self, backward: bool) -> _Times:
        """Return for how long the kernels of one direction hold the clock in each step."""
        return self.backward_gpu if backward else self.forward_gpu


class KernelTimes(msgspec.Struct, frozen=True, array_like=True):
    """The kernels and copies of one module in one direction that hold the clock longest.

    Attributes:
        module: index into ``Summary.modules``.
        backward: whether they are those of its backward.
        kernel: for each, an index into ``Summary.kernel_names``; at most ``KERNELS``, the longest
            in all steps together first.
        time: for each, its clock time in each step, in nanoseconds.
        unnamed: in each step, the clock time of the longest of its other kernels; 0 if there is
            none.
    """

    module: _Number
    backward: bool
    kernel: _Numbers
    time: tuple[_Times, ...]
    unnamed: _Times


class OutsideTimes(msgspec.Struct, frozen=True, array_like=True):
    """The clock time of each step in which the host does one thing outside of modules.

    Time in which it waits for its batch, the device or a collective does not count.

    Attributes:
        place: where in the training loop, in parentheses as for an owner that is no module:
            ``(between forward and backward)``; or, within modules too, ``WAITING`` for idle time of
            the device after the host waited for it, and ``COLLECTING`` for pauses.
        doing: the operator or the node of autograd; ``""`` for Python alone.
        host: holds up the device, or has no device.
        hidden: as ``ModuleTimes.forward_hidden``.
        line: the line of Python, ``file:line``; ``""`` without stacks.
        beside: as ``ModuleTimes.forward_beside``.
    """

    place: str
    doing: str
    host: _Times
    hidden: _Times
    line: str = ""
    beside: _Times = ()


class Call(msgspec.Struct, frozen=True, array_like=True):
    """What a collective is, which most steps repeat.

    Attributes:
        kind: as ``torch.distributed`` calls it: ``all_reduce``.
        purpose: what it moves: ``gradients``; ``parameters`` that are sharded; ``activations``
            or their gradients, in a module's call or its backward; ``attention``, which are
            activations that an operator of attention exchanges, or that go to it and come from it
            by all-to-all; or ``""``.
        module: the module whose parameters it gathers, ``""`` if the trace does not say so; or in
            whose call it is launched.
        bytes: what each rank puts in, -1 if the trace does not say so.
        backward: whether a backward pass launches it.
        to, of: of a transfer, the ranks that it goes to and comes from; both empty if the trace
            does not say so.
    """

    kind: str
    purpose: Purpose = ""
    module: str = ""
    bytes: Annotated[int, msgspec.Meta(ge=-1, le=1 << 50)] = -1
    backward: bool = False
    to: _Numbers = ()
    of: _Numbers = ()


class Group(msgspec.Struct, frozen=True):
    """The collectives of one process group on one rank, in the order of their launch.

    The tuples have one entry for each collective. Times are nanoseconds from ``origin_ns``.

    Attributes:
        name: the process group, ``""`` if the trace does not say so.
        ranks: its ranks, empty if the trace does not say so.
        call: index into ``calls``.
        launch: when the host launches it.
        start: when it begins to run on this rank.
        end: when it has ended on this rank.
        exposed: clock time in nanoseconds in which it runs alone and launched work, or the host,
            waits.
        launching: clock time in nanoseconds in which the host launches it, and the device runs
            nothing, or collectives alone.
        is_one: whether this is one process group. The rank has several, and the trace does not say
            to which of them each of these collectives belongs, otherwise.
    """

    name: str
    ranks: _Numbers
    calls: tuple[Call, ...]
    call: _Numbers
    step: _Numbers
    launch: _Times
    start: _Times
    end: _Times
    exposed: _Times
    launching: _Times
    is_one: bool = True


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's trace, reduced.

    Attributes:
        rank: the rank; ``None`` if the trace does not say so.
        world_size: number of ranks of the job, 1 if the trace does not say so.
        host: name of the host, ``""`` if it is not known.
        origin_ns: time of the rank's own clock at which all other times are 0.
        step_unit: what counts as a step.
        step_numbers: the profiler's numbers of the steps; without these, 0, 1, 2, …
        begin: when each step begins on the clock, in nanoseconds.
        end: when each step ends.
        exposed: clock time of each step in which ranks communicate and nothing else goes on.
        stalled: the part of ``exposed`` in which a transfer between two ranks is under way, as
            between the stages of a pipeline.
        phases: the phases in the order of a step.
        outside: what the host does outside of modules.
        kernel_names: the names that ``kernels`` refers to, each once.
        kernels: the longest kernels of modules; empty in summaries of earlier versions.
    """

    schema: Literal["backspot.rank/4"] = "backspot.rank/4"
    source: str
    rank: _Number | None
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    host: str
    origin_ns: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    step_unit: StepUnit
    step_numbers: _Numbers
    begin: _Times
    end: _Times
    exposed: _Times
    stalled: _Times
    phases: tuple[PhaseTimes, ...]
    modules: tuple[ModuleTimes, ...]
    groups: tuple[Group, ...]
    outside: tuple[OutsideTimes, ...] = ()
    warnings: tuple[str, ...] = ()
    kernel_names: tuple[str, ...] = ()
    kernels: tuple[KernelTimes, ...] = ()

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        return len(self.begin)


def to_bytes(summary: Summary) -> bytes:
    """Return the summary as compressed MessagePack, the small form."""
    return zlib.compress(msgspec.msgpack.encode(summary))


def from_bytes(data: bytes) -> Summary:
    """Return the summary that ``to_bytes`` wrote; raises ``NotATraceError`` for anything else."""
    try:
        unpacked = zlib.decompressobj().decompress(data, _MOST_BYTES)
        return _checked(msgspec.msgpack.decode(unpacked, type=Summary))
    except (zlib.error, msgspec.DecodeError) as error:
        raise NotATraceError(f"no summary of version {SCHEMA}: {error}") from None


def _checked(summary: Summary) -> Summary:
    """Return a summary that was read; ``ValidationError`` if its parts do not fit together."""
    for problem in _problems(summary):
        raise msgspec.ValidationError(f"the summary is damaged: {problem}")
    return summary


def _problems(summary: Summary) -> Iterator[str]:
    """What does not fit together. Each check relies on those before it."""
    steps = summary.steps
    if not steps:
        yield "it has no step"
    of_steps = (summary.step_numbers, summary.end, summary.exposed, summary.stalled)
    if any(len(column) != steps for column in of_steps):
        yield "its lists of steps differ in length"
    if not _ascends(summary.begin) or any(map(gt, summary.begin, summary.end)):
        yield "its steps are in no order of time"
    if len(set(summary.step_numbers)) < steps:
        yield "two steps have one number"
    lengths = tuple(map(sub, summary.end, summary.begin))
    times = [("the collectives", summary.exposed), ("the transfers", summary.stalled)]
    times += [(f"the phase {phase.name}", phase.by_step) for phase in summary.phases]
    times += [
        (f"the module {module.path}", times_of)
        for module in summary.modules
        for times_of in (*astuple(module)[3:-2], *filter(None, astuple(module)[-2:]))
    ]
    times += [
        (outside.place, times_of)
        for outside in summary.outside
        for times_of in (outside.host, outside.hidden, *filter(None, [outside.beside]))
    ]
    for place, place_times in times:
        if len(place_times) != steps or any(map(gt, place_times, lengths)):
            yield f"{place} and the steps do not fit together"
    if len(set(summary.kernel_names)) < len(summary.kernel_names):
        yield "two kernels have one name"
    if len({(one.module, one.backward) for one in summary.kernels}) < len(summary.kernels):
        yield "it has the kernels of a module twice"
    for kernels in summary.kernels:
        yield from _problems_of_kernels(summary, kernels)
    for group in summary.groups:
        columns = (group.step, group.launch, group.start, group.end, group.exposed, group.launching)
        if any(len(column) != len(group.call) for column in columns):
            yield f"the lists of the process group {group.name} differ in length"
        if max(group.call, default=-1) >= len(group.calls) or max(group.step, default=-1) >= steps:
            yield f"the process group {group.name} has a collective of no kind or of no step"
        if not (_ascends(group.step) and _ascends(group.launch)) or any(
            map(gt, group.start, group.end)
        ):
            yield f"the collectives of the process group {group.name} are in no order of time"


def _problems_of_kernels(summary: Summary, kernels: KernelTimes) -> Iterator[str]:
    columns = (*kernels.time, kernels.unnamed)
    if len(kernels.kernel) != len(kernels.time) or len(kernels.kernel) > KERNELS:
        yield "the lists of its kernels differ in length"
    elif any(len(column) != summary.steps for column in columns):
        yield "its kernels and its steps do not fit together"
    elif kernels.module >= len(summary.modules):
        yield "it has kernels of no module"
    elif max(kernels.kernel, default=-1) >= len(summary.kernel_names):
        yield "it has a kernel without a name"
    elif len(set(kernels.kernel)) < len(kernels.kernel):
        yield "it has a kernel of a module twice"
    else:
        module = summary.modules[kernels.module]
        if any(map(gt, map(sum, zip(*columns, strict=True)), module.on_gpu(kernels.backward))):
            yield f"the module {module.path} and its kernels do not fit together"


def _ascends(values: Sequence[int]) -> bool:
    return all(map(le, values, values[1:]))


def to_json(summary: Summary) -> bytes:
    """Return the summary as JSON."""
    return msgspec.json.encode(summary)


def from_json(data: bytes) -> Summary:
    """Return the summary that ``to_json`` wrote; raises ``NotATraceError`` for anything else."""
    try:
        return _checked(msgspec.json.decode(data, type=Summary))
    except msgspec.DecodeError as error:
        raise NotATraceError(f"no summary of version {SCHEMA}: {error}") from None


def from_file(path: Path) -> Summary | None:
    """Return the summary that a file has in either form; ``None`` if the file has something else.

    Raises:
        NotATraceError: If it is a summary, and not of this version, or a damaged one.
        OSError: If the file cannot be read.
    """
    with path.open("rb") as file:
        if not _HEAD.match(file.read(64)):
            return None
        file.seek(0)
        data = file.read()
    try:
        return from_bytes(data) if data.startswith(b"x") else from_json(data)
    except NotATraceError as error:
        raise NotATraceError(f"{path} is {error}; make it again from its trace") from None
