"""What modules, nodes, kernels, lines, passes, devices and phases cost, and the work they do.

All times are integer nanoseconds of a typical step: the mean over the steps that count.
What ends in ``_by_step`` has one entry a recorded step, and is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from backspot.errors import UsageError
from backspot.formatting import labelled, quoted, visible
from backspot.presented import public
from backspot.results import memory, work
from backspot.results.findings import Saving
from backspot.results.quantities import Count, Measure, Ratio


@public
@dataclass(frozen=True, slots=True)
class Hiccup:
    """A recorded step that was held up, and is left out of the typical step.

    Attributes:
        step: Index of the step, from 0.
        longer_ns: How much longer it took while it was recorded, in nanoseconds.
        where: The module or phase that took at least half of that, or ``""``.
    """

    step: Count
    longer_ns: Count
    where: str


Sort = Literal["wall", "gpu", "cpu", "saves"]
"""What rows are ranked by: a time, or what a step would save without them."""


@public
@dataclass(frozen=True, slots=True)
class NodeCost:
    """Cost of one kind of autograd node within one module.

    Times are nanoseconds of a typical step.

    Attributes:
        name: Autograd's name (``GatherBackward0``). ``(recompute)`` is forward work that runs
            again, ``(before a graph's replay)`` idle GPU time before a CUDA graph, ``(all_reduce)``
            and the like are collectives.
        count: Number of such nodes.
        wall_ns: Clock time.
        gpu_ns: Summed durations of the device work that they launch.
        cpu_ns: Time of the host in them, without nested nodes.

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
    """Cost of the autograd nodes that one line of forward code created within one module.

    Times are nanoseconds of a typical step. Nodes without a known line are left out, so lines can
    sum to less than their row.

    Attributes:
        file: File, relative to its package or to the working folder.
        line: Line number.
        function: The function around it.
        text: The line itself, ``""`` if it could not be read.
        node: Name of the nodes, as in ``Row.nodes``.
        exact: True if the line created the nodes, false if it called the module that did (before
            torch 2.14).
        count: Number of such nodes.
        wall_ns: Clock time.
        gpu_ns: Summed durations of the device work that they launch.
        cpu_ns: Time of the host in them, without nested nodes.
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
        count: How often it runs in a typical step.
        spent_ns: Summed durations in nanoseconds of a typical step.
    """

    name: str
    count: Count
    spent_ns: Count


@public
@dataclass(frozen=True, slots=True, order=True)
class FusedPart:
    """What a compiled kernel that works for several modules does for one of them.

    Attributes:
        path: Path of the row that this part counts for.
        share: Part (0 to 1) of the kernel's time, estimated by the bytes that the module's
            operations read and write. The parts sum to 1.
        recomputes: Whether it is forward work that runs again.
        line: ``file:line`` of the forward behind most of it, or ``""``.
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
        count: How often it runs in a typical step.
        spent_ns: Summed durations in nanoseconds of a typical step.
        parts: The modules, the largest share first.
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

    Times are nanoseconds of a typical step.

    Attributes:
        gpu_ns: A kernel, copy or memset runs.
        communication_ns: Only communication runs.
        queued_ns: The GPU idles although work is launched.
        sync_ns: The GPU idles because the host waited until it ran empty.
        host_ns: The GPU waits for the host; all time if the trace has no device work.
    """

    gpu_ns: Count = 0
    communication_ns: Count = 0
    queued_ns: Count = 0
    sync_ns: Count = 0
    host_ns: Count = 0

    def __add__(self, other: WallKinds) -> WallKinds:
        return WallKinds(
            self.gpu_ns + other.gpu_ns,
            self.communication_ns + other.communication_ns,
            self.queued_ns + other.queued_ns,
            self.sync_ns + other.sync_ns,
            self.host_ns + other.host_ns,
        )


@dataclass(frozen=True)
class _Cost:
    """What each row has whatever was recorded.

    Attributes:
        path: Module path, ``""`` for the root; the name of a group; in parentheses, time that no
            module owns: ``(outside model)``, ``(autograd engine)``, …
        class_name: Class of the module.
        root: Path of the outermost instrumented module around this one.
        is_module: False for time that no module owns.
        calls: Forward calls, without those that checkpointing repeats; in compiled code, calls of
            that code.
        wall_ns: Clock time of the backward that this row is responsible for.
        recorded_wall_ns: This time as it was recorded.
        gpu_ns: Summed durations of the device work that it launched in backward.
        cpu_ns: Time of the host in its nodes.
        forward_ns: Clock time of its forward.
        recompute_ns: Part of ``wall_ns`` that is forward work run again, by checkpointing or
            compiled code.
        total_wall_ns: This time with all modules inside.
        total_gpu_ns: This time with all modules inside.
        total_cpu_ns: This time with all modules inside.
        total_forward_ns: This time with all modules inside.
        total_recompute_ns: This time with all modules inside.
        nodes: Its autograd nodes by name, most wall time first.
        wall_ns_by_step: This time in each recorded step.
        gpu_ns_by_step: This time in each recorded step.
        cpu_ns_by_step: This time in each recorded step.
        forward_ns_by_step: This time in each recorded step.
        members: Number of modules in this row: more than 1 in a group.
        split_ns: Part of ``wall_ns`` that is estimated: its share of compiled kernels that work for
            several rows.
        kernels: Kernels, copies and memsets that its nodes launched, most device time first;
            without device work, operators.
        wall_on: What ``wall_ns`` is spent on.
        lines: Lines of the forward that created its nodes, most wall time first; only with
            ``instrument(model, lines=True)``.
        saves: How much less a step would take without this row: its forward, its backward, what
            runs again, and its share of the update, as far as that is known; ``None`` for a group,
            if the recording cannot be replayed, and for the cheaper rows of a model with thousands
            of modules.
        total_saves: How much less without all modules inside, too. Savings do not add up.
    """

    __slots__ = ()

    path: str
    class_name: str
    root: str
    is_module: bool
    calls: Measure
    wall_ns: Count
    recorded_wall_ns: Count
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


@public
@dataclass(frozen=True, slots=True)
class Row(work.InRow, memory.InRow, _Cost):
    """Cost of one module, or of one group of modules, in the backward.

    The rows of a report are a partition: no nanosecond is in two rows. Times are nanoseconds of a
    typical step; those of a group are sums.

    Example:
        >>> row = report.modules[0]
        >>> row
        <Row patch_drop (PatchDropout): wall 5.868, GPU 4.836, CPU 2.374 ms per step>
        >>> row.wall_ns, row.wall_ns_by_step
        (5868072, (5571520, 6164624))
    """

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
            f"<Row {visible(self.label)}: wall {self.wall_ns / 1e6:.3f}, "
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
        """Half of the distance between the quartiles of ``wall_ns_by_step``, in nanoseconds."""
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
        position, quarter = divmod(number * last, 4)
        return 4 * ordered[position] + (
            quarter * (ordered[position + 1] - ordered[position]) if quarter else 0
        )

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

    Times are nanoseconds of a typical step.

    Attributes:
        name: Autograd's name.
        count: Number of such nodes.
        wall_ns: Clock time.
        gpu_ns: Summed durations of the device work that they launch.
        cpu_ns: Time of the host in them, without nested nodes.
        path: The row with most of the clock time.
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

    ``duration_ns == wall_ns + forward_ns + other_ns``, exactly, in nanoseconds.

    Attributes:
        start_ns: Start, from the first event of the trace.
        duration_ns: From its first node until host and device are done, without what overlaps an
            earlier pass.
        wall_ns: Part that is backward.
        forward_ns: Part in which the forward still ran on the device.
        other_ns: Part in which other device work ran, such as the optimizer's.
        gpu_ns: Summed durations of the device work that it launched.
        cpu_ns: Time of the host in its nodes.
        nodes: Number of autograd nodes, ``AccumulateGrad`` included.
        step: Index of its step.
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
    """One device's part of the backward, in nanoseconds of a typical step.

    Attributes:
        device: Its index.
        wall_ns: Clock time by row path, as if the pass had waited for this device alone.
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
    "data",
    "host",
    "copy",
    "forward",
    "loss",
    "metrics",
    "backward",
    "scaler",
    "clipping",
    "optimizer",
    "zero_grad",
    "averaging",
    "rollout",
    "scoring",
    "reference",
    "teacher",
    "evaluation",
    "saving",
    "trainer",
    "other",
    "idle",
]
WITHOUT_GRADIENTS: tuple[PhaseName, ...] = (
    "rollout",
    "scoring",
    "reference",
    "teacher",
    "evaluation",
)
"""The phases in which models run without gradients inside a step."""


@public
@dataclass(frozen=True, slots=True)
class Phase:
    """One part of the step, in nanoseconds. The phases sum to the typical step exactly.

    Attributes:
        name: ``data`` (a loader fetches a batch), ``host`` (the host before the first operator,
            without a loader's marks), ``copy`` (copies to the device that no kernel hides),
            ``forward``, ``loss``, ``metrics`` (values that the host reads outside of modules, and
            what computes them), ``backward``, ``scaler`` (a gradient scaler unscales and updates),
            ``clipping`` (work on the gradients before the optimizer's step), ``optimizer``,
            ``zero_grad``, ``averaging`` (an average of the weights), ``rollout`` (the model runs
            without gradients to generate what it is trained on), ``scoring`` (this is scored for
            the training), ``reference`` (a frozen model of this name scores it), ``teacher`` (a
            model of this name runs without gradients), ``evaluation`` (any other forward of a
            trained model without gradients), ``saving`` (a checkpoint), ``trainer`` (Lightning's
            own work and its callbacks), ``other`` (recorded, none of these) or ``idle`` (nothing
            recorded).
        wall_ns: Clock time.
        busy_ns: Part in which any device was busy.
        wall_ns_by_step: Clock time in each recorded step.
        recorded_wall_ns: ``wall_ns`` as it was recorded.

    Example:
        >>> {phase.name: f"{phase.wall_ns / 1e6:.1f} ms" for phase in report.phases}
        {'forward': '8.8 ms', 'loss': '0.3 ms', 'backward': '20.9 ms', 'optimizer': '0.1 ms',
         'idle': '0.3 ms'}
    """

    name: PhaseName
    wall_ns: Count
    busy_ns: Count
    wall_ns_by_step: tuple[Count, ...]
    recorded_wall_ns: Count

    def __repr__(self) -> str:
        return f"<Phase {self.name}: wall {self.wall_ns / 1e6:.3f} ms per step>"

    @property
    def unprofiled_ns(self) -> int:
        """The same as ``wall_ns``."""
        return self.wall_ns

    @property
    def utilisation(self) -> float:
        """Share (0 to 1) of the phase in which a device was running something."""
        return self.busy_ns / self.wall_ns if self.wall_ns else 0.0


class LineOfStep(Protocol):
    """A line of the user's Python that the host runs in a step; times are nanoseconds of it."""

    @property
    def phase(self) -> PhaseName:
        """The phase of the step in which it runs."""

    @property
    def place(self) -> str:
        """``file:line``."""

    @property
    def wall_ns(self) -> int:
        """Clock time of the host."""

    @property
    def idle_ns(self) -> int:
        """The part of it in which no device has work."""


@public
@dataclass(frozen=True, slots=True)
class Launches:
    """What one module launches in one phase of the step: kernels, copies and memsets.

    Attributes:
        phase: Phase of the step.
        path: Path of the module, or a name in parentheses.
        class_name: Class of the module, ``""`` if there is none.
        count: Number of kernels, copies and memsets in a typical step.
        late: Number of them that the device waits for: it has nothing left when the host launches.
        idle_ns: Clock time in nanoseconds for which the device waits so, at most 0.2 ms each time:
            a longer wait is for something else.
    """

    phase: PhaseName
    path: str
    class_name: str
    count: Count
    late: Count
    idle_ns: Count
