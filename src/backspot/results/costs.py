"""What modules, nodes, kernels, lines, passes, devices and phases cost, and the work they do.

All times are integer nanoseconds of a typical step: the mean over the steps that count.
What ends in ``_by_step`` has one entry a recorded step, and is exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from operator import add
from typing import Any, Literal, Protocol

from backspot.errors import UsageError
from backspot.formatting import labelled, quoted, visible
from backspot.presented import public
from backspot.results.findings import Saving
from backspot.results.memory import MemoryOfModule
from backspot.results.quantities import Count, Measure, Ratio


@public
@dataclass(frozen=True, slots=True)
class WorkOfModule:
    """The work of one module in a typical step, without the modules inside it.

    ``None`` is unknown: no operator of this kind has a formula, so the work is not nothing.

    Attributes:
        forward_flops: Floating point operations of its forward: those of products of matrices,
            convolutions and fused attention, by the definitions of ``torch.utils.flop_counter``.
            What an optimizer computes is no forward.
        recompute_flops: The same, of forward work that activation checkpointing runs again.
        flops: The same, of its backward, without ``recompute_flops``.
        forward_bytes: Bytes that its forward reads and writes at least: each element of an input
            once, and each element of an output.
        recompute_bytes: The same, of forward work that runs again.
        bytes: The same, of its backward.
        flops_by_type: ``flops`` and ``recompute_flops`` together, by the type of the numbers that
            are multiplied: ``bf16``, ``fp16``, ``fp32``, ``tf32`` (fp32 on tensor cores), ``fp64``,
            ``fp8``.
        forward_flops_by_type: The same, of the forward.
        unknown_share: Share (0 to 1) of its time in backward in operators that no formula covers:
            device time, or host time without a device.
    """

    forward_flops: Count | None
    recompute_flops: Count | None
    flops: Count | None
    forward_bytes: Count | None
    recompute_bytes: Count | None
    bytes: Count | None
    flops_by_type: dict[str, Count]
    forward_flops_by_type: dict[str, Count]
    unknown_share: Ratio


COUNTS_OF_WORK = (
    *("forward_flops", "recompute_flops", "flops"),
    *("forward_bytes", "recompute_bytes", "bytes"),
)


def summed_work(
    parts: Iterable[tuple[WorkOfModule | None, int]],
) -> WorkOfModule | None:
    """Return the work of several modules together, ``None`` where none is known.

    The time of each in backward weighs its unknown share.
    """
    known = [(one, time) for one, time in parts if one is not None]
    if not known:
        return None
    whole = sum(time for _, time in known)
    unknown = sum(one.unknown_share * time for one, time in known) / whole if whole else 0.0
    counts: dict[str, Any] = {}
    for name in COUNTS_OF_WORK:
        some = [count for one, _ in known if (count := getattr(one, name)) is not None]
        counts[name] = sum(some) if some else None
    for name in ("flops_by_type", "forward_flops_by_type"):
        sums: Counter[str] = Counter()
        for one, _ in known:
            sums.update(getattr(one, name))
        counts[name] = dict(sums)
    return WorkOfModule(**counts, unknown_share=min(1.0, unknown))


@public
@dataclass(frozen=True, slots=True)
class Hiccup:
    """A recorded step that was held up, and is left out of the typical step.

    Attributes:
        step: Index of the step, from 0, as in ``wall_ns_by_step``.
        longer_ns: How much longer the step took than such steps do, or what held it up, in
            nanoseconds.
        where: Name of the module, row or phase that took at least half of that, or ``""``.
    """

    step: Count
    longer_ns: Count
    where: str


Sort = Literal["wall", "gpu", "cpu", "saves"]
"""What rows are ranked by: a time, or what a step would save without them."""
Order = Literal["wall", "gpu", "cpu", "saves", "memory", "headroom"]
"""The same, or what rows have in memory, or how much faster the device could run them."""


@public
@dataclass(frozen=True, slots=True)
class NodeCost:
    """Cost of one kind of autograd node within one module.

    All times are integer nanoseconds of a typical step.

    Attributes:
        name: Name that autograd gives the node (``GatherBackward0``). ``(recompute)`` is forward
            work that activation checkpointing or compiled code ran again inside backward.
            ``(before a graph's replay)`` is time in which the GPU idles until a node replays a
            captured CUDA graph.
            ``(all_reduce)`` and the like are collectives, in rows of communication.
        count: Number of such nodes that run in a typical step.
        wall_ns: Clock time, divided by the same rule as the report's ``wall_ns``.
        gpu_ns: Summed durations of the kernels, copies and memsets that the nodes launched.
        cpu_ns: Time the host spent in the nodes, excluding nodes nested in them.

    Example:
        >>> report["patch_drop"].row.nodes[0]
        NodeCost(name='GatherBackward0', count=1, wall_ns=5647360, gpu_ns=4649842, cpu_ns=2136660)
    """

    name: str
    count: Count
    wall_ns: Count
    gpu_ns: Count
    cpu_ns: Count


@public
@dataclass(frozen=True, slots=True)
class LineCost:
    """Cost of the autograd nodes that one line of forward source code made within one module.

    Nodes without a known line are in no ``LineCost``, so lines may sum to less than their row.
    All times are integer nanoseconds of a typical step.

    Attributes:
        file: File name, relative to its package or to the working folder.
        line: Line number, from 1.
        function: Function that contains the line.
        text: The source line itself, ``""`` if it could not be read.
        node: Name of the nodes, as in the row's ``nodes``.
        exact: True if this line made the nodes, false if it called the module that made them.
        count: Number of such nodes that run in a typical step.
        wall_ns: Clock time, divided by the same rule as the report's ``wall_ns``.
        gpu_ns: Summed durations of the kernels, copies and memsets that the nodes launched.
        cpu_ns: Time the host spent in the nodes, excluding nodes nested in them.
    """

    file: str
    line: Count
    function: str
    text: str
    node: str
    exact: bool
    count: Count
    wall_ns: Count
    gpu_ns: Count
    cpu_ns: Count

    @property
    def place(self) -> str:
        """``file:line``, as editors and terminals take it."""
        return f"{self.file}:{self.line}"


@public
@dataclass(frozen=True, slots=True)
class KernelCost:
    """Cost of one kernel, copy or memset, by name, that a module's nodes launched.

    In a trace without device work it is an operator that the nodes called.

    Attributes:
        name: Name in the trace.
        count: Number of times it runs in a typical step.
        spent_ns: Summed durations in nanoseconds in a typical step: on the device, or on the host
            for an operator.
    """

    name: str
    count: Count
    spent_ns: Count


@public
@dataclass(frozen=True, slots=True, order=True)
class FusedPart:
    """What a compiled kernel that works for several modules does for one of them.

    Attributes:
        path: Path of the row that pays for this part.
        share: Part (0 to 1) of the kernel's time that the row pays, estimated: by the bytes that
            the module's operations in the kernel read and write. All parts sum to 1.
        recomputes: Whether the part is forward work that the backward runs again.
        line: ``file:line`` of the forward that made most of the part, ``""`` if not known.
    """

    path: str
    share: Ratio
    recomputes: bool
    line: str


@public
@dataclass(frozen=True, slots=True)
class FusedKernel:
    """A kernel of compiled code in which ``torch.compile`` fused the work of several modules.

    Attributes:
        name: Name in the trace.
        count: Number of times it runs in a typical step for these modules.
        spent_ns: Summed durations in nanoseconds in a typical step: on the device, or on the host
            in a trace without device work.
        parts: The modules that it works for, the largest share first.
    """

    name: str
    count: Count
    spent_ns: Count
    parts: tuple[FusedPart, ...]


GRADIENT_EXCHANGE = "(gradient exchange)"
PARAMETER_GATHER = "(parameter gather)"
OTHER_COMMUNICATION = "(communication)"
"""The paths of the rows that own the communication between ranks."""


@public
@dataclass(frozen=True, slots=True)
class WallKinds:
    """What a row's clock time is spent on. The kinds sum to the row's time exactly.

    All times are integer nanoseconds of a typical step.

    Attributes:
        gpu_ns: A kernel, copy or memset is running.
        communication_ns: A communication kernel is running, and nothing else.
        queued_ns: The GPU idles although work is launched: it waits for a dependency, for another
            stream, or for the launch itself.
        sync_ns: The GPU idles because the host waited until the GPU ran empty, up to the next
            launch.
        host_ns: The GPU idles with nothing queued and waits for the host. All of the time if the
            trace has no device work.
    """

    gpu_ns: Count = 0
    communication_ns: Count = 0
    queued_ns: Count = 0
    sync_ns: Count = 0
    host_ns: Count = 0

    def __add__(self, other: WallKinds) -> WallKinds:
        return WallKinds(*map(add, astuple(self), astuple(other)))


@public
@dataclass(frozen=True, slots=True)
class Row:
    """Cost of one module, or of one group of modules, in the backward.

    The rows of a report are a partition: no nanosecond is in two rows. ``total_*`` adds the modules
    inside. All times ending in ``_ns`` are integer nanoseconds of a typical step: the mean over the
    steps that count. The times of a group are the sums of its modules' times.

    Attributes:
        path: Module path, ``""`` for the root. The group's name if rows were grouped. Time that no
            module owns has a path in parentheses: ``(outside model)``, ``(autograd engine)``, …
        class_name: Class of the module.
        root: Path of the outermost instrumented module that contains this one.
        is_module: False for time that no module owns.
        calls: Forward calls per step, without those that checkpointing ran again. Of a module
            inside compiled code: calls of the code that has it.
        wall_ns: Clock time of the backward that this row accounts for.
        gpu_ns: Summed durations of the device work that the row launched in backward.
        cpu_ns: Time the host spent executing the row's nodes.
        forward_ns: Clock time of the module's forward, by the same rule as ``wall_ns``.
        recompute_ns: Part of ``wall_ns`` that is forward work run again: by checkpointing, or by
            compiled code that computes a value again in place of keeping it.
        total_wall_ns: ``wall_ns`` of this module and all modules inside it.
        total_gpu_ns: ``gpu_ns`` of this module and all modules inside it.
        total_cpu_ns: ``cpu_ns`` of this module and all modules inside it.
        total_forward_ns: ``forward_ns`` of this module and all modules inside it.
        total_recompute_ns: ``recompute_ns`` of this module and all modules inside it.
        nodes: The module's autograd nodes by name, most wall time first.
        wall_ns_by_step: Clock time in each recorded step. In each step the rows sum to the
            report's ``wall_ns_by_step`` exactly.
        gpu_ns_by_step: Device time in each recorded step.
        cpu_ns_by_step: Host time in each recorded step.
        forward_ns_by_step: Clock time of the forward in each recorded step.
        members: Number of modules in this row, more than 1 only if rows were grouped.
        split_ns: Part of ``wall_ns`` that is estimated: the row's share of compiled kernels that
            work for several rows, by the bytes that each reads and writes.
        kernels: Kernels, copies and memsets that the row's nodes launched, by name, most device
            time first. In a trace without device work: the operators that the nodes called.
        wall_on: What ``wall_ns`` is spent on.
        lines: Lines of forward source code that made the row's nodes, most wall time first. Empty
            unless the trace was recorded with ``instrument(model, lines=True)``.
        saves: How much less time a step would take if the backward of this row alone were free,
            ``None`` where it is not known: if the report could not be replayed, or for a group of
            modules.
        total_saves: How much less time a step would take if the backward of this module and of all
            modules inside it were free. Savings do not add up: work that hides behind two modules
            shows only if both are free.
        memory: What the module has in memory, ``None`` unless the trace was recorded with
            ``profile_memory=True``.
        work: How much work the module does, ``None`` unless the trace was recorded with
            ``record_shapes=True``.

    Example:
        >>> row = report.modules[0]
        >>> row
        <Row patch_drop (PatchDropout): wall 5.868, GPU 4.836, CPU 2.374 ms per step>
        >>> row.wall_ns, row.wall_ns_by_step
        (5868072, (5571520, 6164624))
    """

    path: str
    class_name: str
    root: str
    is_module: bool
    calls: Measure
    wall_ns: Count
    gpu_ns: Count
    cpu_ns: Count
    forward_ns: Count
    recompute_ns: Count
    total_wall_ns: Count
    total_gpu_ns: Count
    total_cpu_ns: Count
    total_forward_ns: Count
    total_recompute_ns: Count
    nodes: tuple[NodeCost, ...]
    wall_ns_by_step: tuple[Count, ...]
    gpu_ns_by_step: tuple[Count, ...]
    cpu_ns_by_step: tuple[Count, ...]
    forward_ns_by_step: tuple[Count, ...]
    members: Count = 1
    split_ns: Count = 0
    kernels: tuple[KernelCost, ...] = ()
    wall_on: WallKinds = WallKinds()
    lines: tuple[LineCost, ...] = ()
    saves: Saving | None = None
    total_saves: Saving | None = None
    memory: MemoryOfModule | None = None
    work: WorkOfModule | None = None

    @property
    def is_exchange(self) -> bool:
        """Whether the row is communication between ranks, such as ``(gradient exchange)``."""
        return not self.is_module and self.path in (
            GRADIENT_EXCHANGE,
            PARAMETER_GATHER,
            OTHER_COMMUNICATION,
        )

    def __repr__(self) -> str:
        return (
            f"<Row {visible(self.label)}: wall {self.wall_ms:.3f}, "
            f"GPU {self.gpu_ns / 1e6:.3f}, CPU {self.cpu_ns / 1e6:.3f} ms per step>"
        )

    @property
    def exact_share(self) -> float:
        """Share (0 to 1) of ``wall_ns`` that is not estimated, as ``split_ns`` is."""
        return 1 - self.split_ns / self.wall_ns if self.split_ns else 1.0

    @property
    def name(self) -> str:
        """The path, or the class for the root, which has an empty path."""
        return self.path or self.class_name or "(root)"

    @property
    def label(self) -> str:
        """Path and class, ``blocks.3.attn (Attention)``, as the labels in a trace have them."""
        return labelled(self.name, self.class_name) if self.is_module else self.name

    @property
    def steps(self) -> int:
        """Number of recorded steps, at least 1."""
        return max(1, len(self.wall_ns_by_step))

    @property
    def wall_spread_ns(self) -> int:
        """How much ``wall_ns`` varies: half the width of the middle half of the recorded steps.

        Half of all steps lie between two quartiles, and this is half of their difference, in
        nanoseconds, rounded down. Quartiles are interpolated linearly. One step has a spread of 0.
        """
        return half_spread(self.wall_ns_by_step)

    @property
    def recorded_calls(self) -> int:
        """Number of recorded forward calls."""
        return round(self.calls * self.steps)

    @property
    def saves_ns(self) -> int | None:
        """``saves.ns``, or ``None`` where that is not known."""
        return None if self.saves is None else self.saves.ns

    @property
    def wall_ms(self) -> float:
        """``wall_ns`` in milliseconds."""
        return self.wall_ns / 1e6


def half_spread(by_step: Sequence[int]) -> int:
    """Return half of the difference between the quartiles, as ``Row.wall_spread_ns`` has it."""
    ordered, last = sorted(by_step), len(by_step) - 1

    def quartile(number: int) -> int:
        """Four times the quartile, in whole nanoseconds."""
        at, part = divmod(number * last, 4)
        return 4 * ordered[at] + (part * (ordered[at + 1] - ordered[at]) if part else 0)

    return (quartile(3) - quartile(1)) // 8 if ordered else 0


def line_of(row: Row, node_name: str) -> str:
    """Return the source line that made most of a row's nodes of one name, by wall time.

    Args:
        row: A row of a report.
        node_name: Name of a node, as in the row's ``nodes``.

    Returns:
        ``file:line``, or ``""`` if the line is not known.

    Raises:
        UsageError: If ``row`` is not a row.
    """
    if not isinstance(row, Row):
        raise UsageError(f"line_of({quoted(row)}): give a row of a report")
    return next((line.place for line in row.lines if line.node == node_name), "")


class _Timed(Protocol):
    """A report, a row, or the cost of a node or a line."""

    @property
    def wall_ns(self) -> int: ...
    @property
    def gpu_ns(self) -> int: ...
    @property
    def cpu_ns(self) -> int: ...


def time_of(cost: _Timed, sort: Sort) -> int:
    """Return the time that a ranking goes by, in nanoseconds of a typical step.

    Only rows save something that is known; all else counts as 0.
    """
    if sort == "saves":
        return cost.saves.ns if isinstance(cost, Row) and cost.saves else 0
    return {"wall": cost.wall_ns, "gpu": cost.gpu_ns, "cpu": cost.cpu_ns}[sort]


@public
@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Cost of one kind of autograd node, over all modules.

    All times are integer nanoseconds of a typical step.

    Attributes:
        name: Name that autograd gives the node.
        count: Number of such nodes that run in a typical step.
        wall_ns: Clock time, divided by the same rule as the report's ``wall_ns``.
        gpu_ns: Summed durations of the device work that the nodes launched.
        cpu_ns: Time the host spent in the nodes, excluding nodes nested in them.
        path: Path of the row that pays most of the clock time.
    """

    name: str
    count: Count
    wall_ns: Count
    gpu_ns: Count
    cpu_ns: Count
    path: str


@public
@dataclass(frozen=True, slots=True)
class Pass:
    """One backward pass.

    ``duration_ns == wall_ns + forward_ns + other_ns``, exactly. All times are integer nanoseconds.

    Attributes:
        start_ns: Start, relative to the first event of the trace.
        duration_ns: From the start of the first node on the host to the later of the end on the
            host and the end of the last device work that the nodes launched. Time that overlaps an
            earlier pass counts for the earlier pass.
        wall_ns: Part that is backward. Over all passes it sums to the rows' ``wall_ns_by_step``.
        forward_ns: Part in which device work of the forward was still running.
        other_ns: Part in which other device work was running, such as the optimizer's or a
            prefetch on another stream.
        gpu_ns: Summed durations of the device work that the pass launched.
        cpu_ns: Time the host spent inside the nodes of the pass.
        nodes: Number of autograd nodes executed, ``AccumulateGrad`` included.
        step: Index of the step that contains the pass.
    """

    start_ns: Count
    duration_ns: Count
    wall_ns: Count
    forward_ns: Count
    other_ns: Count
    gpu_ns: Count
    cpu_ns: Count
    nodes: Count
    step: Count


@public
@dataclass(frozen=True, slots=True)
class DeviceCost:
    """One device's part of the backward.

    All times are integer nanoseconds of a typical step.

    Attributes:
        device: Index of the device.
        wall_ns: Clock time by row path, computed as if the pass had waited for this device alone.
        gpu_ns: Device time by row path.
    """

    device: int
    wall_ns: dict[str, Count]
    gpu_ns: dict[str, Count]


@public
@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the backward is owned by modules.

    Attributes:
        wall: Share (0 to 1) of the clock time.
        gpu: Share (0 to 1) of the device time.
        cpu: Share (0 to 1) of the host time.
    """

    wall: Ratio
    gpu: Ratio
    cpu: Ratio


PhaseName = Literal[
    "data", "copy", "forward", "loss", "backward", "clipping", "optimizer", "other", "idle"
]


@public
@dataclass(frozen=True, slots=True)
class Phase:
    """One part of the step. The phases of a report sum to its typical step exactly.

    All times are integer nanoseconds of a typical step.

    Attributes:
        name: ``data`` (the step waits for its next batch), ``copy`` (host-to-device copies outside
            the backward that no kernel hides), ``forward``, ``loss``, ``backward``,
            ``clipping`` (all that is done with the gradients before the optimizer's step: clipping,
            unscaling, norms), ``optimizer`` (with ``zero_grad``), ``other`` (recorded work that is
            none of these) or ``idle`` (nothing recorded, neither on the host nor on a device).
        wall_ns: Clock time. Each moment counts for one phase, by the same rule as the rows'
            ``wall_ns``.
        busy_ns: Part of ``wall_ns`` in which any device was running something.
        wall_ns_by_step: Clock time in each recorded step. In each step the phases sum to the
            report's ``step_ns_by_step`` exactly.

    Example:
        >>> {phase.name: f"{phase.wall_ns / 1e6:.1f} ms" for phase in report.phases}
        {'forward': '8.8 ms', 'loss': '0.3 ms', 'backward': '20.9 ms', 'optimizer': '0.1 ms',
         'idle': '0.3 ms'}
    """

    name: PhaseName
    wall_ns: Count
    busy_ns: Count
    wall_ns_by_step: tuple[Count, ...]

    def __repr__(self) -> str:
        return f"<Phase {self.name}: wall {self.wall_ns / 1e6:.3f} ms per step>"

    @property
    def utilisation(self) -> float:
        """Share (0 to 1) of the phase in which a device was running something."""
        return self.busy_ns / self.wall_ns if self.wall_ns else 0.0
