"""A row of the report: what one module costs in the backward, and by which nodes.

Times are integer nanoseconds summed over the recorded steps, so that sums are exact; properties
give milliseconds, and milliseconds per step where that is what people compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from backspot.errors import UsageError
from backspot.formatting import quoted

__all__ = [
    "Coverage",
    "DeviceCost",
    "KernelCost",
    "LineCost",
    "NodeCost",
    "OperatorCost",
    "Pass",
    "Phase",
    "PhaseName",
    "Row",
    "WallKinds",
    "line_of",
    "parts",
]


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One kind of autograd node within one module: what it cost there.

    Attributes:
        name: the node's name as autograd gives it (``GatherBackward0``); or ``(recompute)`` for
            forward work that activation checkpointing ran again inside backward; or ``(before a
            graph's replay)`` for the time in which the GPU idles until a node replays a captured
            CUDA graph.
        count: how many such nodes ran.
        wall_ns: clock time, dealt out as the report's ``wall``.
        gpu_ns: summed durations of the kernels, copies and memsets that they launched.
        cpu_ns: time the host spent in them, less what is nested in others.
    """

    name: str
    count: int
    wall_ns: int
    gpu_ns: int
    cpu_ns: int


@dataclass(frozen=True, slots=True)
class LineCost:
    """One line of the forward's source within one module: what the nodes that it made cost.

    A node whose line is not known stands in no line, so that lines may sum to less than their row.

    Attributes:
        file: the file's name: within its package, or within the working folder.
        line: the line's number in it, from 1.
        function: the function that it stands in.
        text: the line itself, ``""`` where it could not be read.
        node: the name of the nodes, as in the row's ``nodes``.
        exact: true where this line made the nodes; false where it called the module that did.
        count: how many such nodes ran.
        wall_ns: clock time, dealt out as the report's ``wall``.
        gpu_ns: summed durations of the kernels, copies and memsets that they launched.
        cpu_ns: time the host spent in them, less what is nested in others.
    """

    file: str
    line: int
    function: str
    text: str
    node: str
    exact: bool
    count: int
    wall_ns: int
    gpu_ns: int
    cpu_ns: int

    @property
    def place(self) -> str:
        """``file:line``, as editors and terminals take it."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class KernelCost:
    """One kernel, copy or memset that a module's nodes launched, by name.

    Attributes:
        name: the name that the device's profiler gives it.
        count: how often it ran.
        gpu_ns: summed durations.
    """

    name: str
    count: int
    gpu_ns: int


@dataclass(frozen=True, slots=True)
class WallKinds:
    """What a row's clock time is spent on; the kinds sum to its ``wall_ns`` exactly.

    Attributes:
        gpu_ns: a kernel, copy or memset runs.
        communication_ns: a communication kernel runs, and nothing else does.
        queued_ns: the GPU idles before work that is launched already: a dependency, another stream,
            or the launch itself.
        sync_ns: the GPU idles because the host waited for it until it ran empty, and until the host
            launches the next.
        host_ns: the GPU idles with nothing queued, and waits for what the host executes; all of it
            where the trace holds no device work.
    """

    gpu_ns: int = 0
    communication_ns: int = 0
    queued_ns: int = 0
    sync_ns: int = 0
    host_ns: int = 0

    def __add__(self, other: WallKinds) -> WallKinds:
        return WallKinds(
            self.gpu_ns + other.gpu_ns,
            self.communication_ns + other.communication_ns,
            self.queued_ns + other.queued_ns,
            self.sync_ns + other.sync_ns,
            self.host_ns + other.host_ns,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """What one module (or one group of modules) costs in the backward.

    The rows of a report partition it: no nanosecond stands in two rows. ``total_*`` adds the
    modules inside.

    Attributes:
        path: module path, ``""`` for the root; a group's name where rows were grouped; or what no
            module owns, in parentheses: ``(outside model)``, ``(autograd engine)``, …
        class_name: the module's class.
        root: the path of the outermost instrumented module that this one lies in.
        is_module: false for what no module owns.
        calls: forward calls recorded, without those that checkpointing ran again.
        wall_ns: clock time of the backward that this row is the reason for.
        gpu_ns: summed durations of the device work that it launched in backward.
        cpu_ns: time the host spent executing its nodes.
        forward_ns: clock time of its forward, by the same rule as ``wall_ns``.
        recompute_ns: the part of ``wall_ns`` that is forward work run again by checkpointing.
        total_wall_ns: ``wall_ns`` of this module and all inside it.
        total_gpu_ns: ``gpu_ns`` of this module and all inside it.
        total_cpu_ns: ``cpu_ns`` of this module and all inside it.
        total_forward_ns: ``forward_ns`` of this module and all inside it.
        total_recompute_ns: ``recompute_ns`` of this module and all inside it.
        nodes: its autograd nodes by name, the heaviest first.
        wall_ns_by_step: ``wall_ns`` in each recorded step.
        members: how many modules stand in this row (more than 1 only where rows were grouped).
        kernels: what its nodes launched on devices, by name, the most device time first.
        wall_on: what ``wall_ns`` is spent on.
        lines: the lines of the forward's source that made its nodes, the heaviest first; empty
            where the trace does not tell (``instrument(model, lines=True)`` has it told).
    """

    path: str
    class_name: str
    root: str
    is_module: bool
    calls: int
    wall_ns: int
    gpu_ns: int
    cpu_ns: int
    forward_ns: int
    recompute_ns: int
    total_wall_ns: int
    total_gpu_ns: int
    total_cpu_ns: int
    total_forward_ns: int
    total_recompute_ns: int
    nodes: tuple[NodeCost, ...]
    wall_ns_by_step: tuple[int, ...]
    members: int = 1
    kernels: tuple[KernelCost, ...] = ()
    wall_on: WallKinds = WallKinds()
    lines: tuple[LineCost, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<Row {self.label}: wall {self.wall_ms_per_step:.3f}, GPU {self.gpu_ms_per_step:.3f}, "
            f"CPU {self.cpu_ms_per_step:.3f} ms per step>"
        )

    @property
    def name(self) -> str:
        """The path as people say it: the root is called by its class."""
        return self.path or self.class_name or "(root)"

    @property
    def label(self) -> str:
        """Path and class, ``blocks.3.attn (Attention)``: what to search a trace for."""
        if not self.is_module or not self.class_name or self.class_name == self.name:
            return self.name
        return f"{self.name} ({self.class_name})"

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return max(1, len(self.wall_ns_by_step))

    @property
    def wall_us(self) -> float:
        """``wall_ns`` in microseconds."""
        return self.wall_ns / 1e3

    @property
    def gpu_us(self) -> float:
        """``gpu_ns`` in microseconds."""
        return self.gpu_ns / 1e3

    @property
    def cpu_us(self) -> float:
        """``cpu_ns`` in microseconds."""
        return self.cpu_ns / 1e3

    @property
    def wall_ms_per_step(self) -> float:
        """Clock time in milliseconds, per step."""
        return self.wall_ns / 1e6 / self.steps

    @property
    def gpu_ms_per_step(self) -> float:
        """Device time in milliseconds, per step."""
        return self.gpu_ns / 1e6 / self.steps

    @property
    def cpu_ms_per_step(self) -> float:
        """Host time in milliseconds, per step."""
        return self.cpu_ns / 1e6 / self.steps

    @property
    def forward_ms_per_step(self) -> float:
        """Clock time of the forward in milliseconds, per step."""
        return self.forward_ns / 1e6 / self.steps

    @property
    def depth(self) -> int:
        """How far below its root the module lies: 0 for the root itself."""
        return parts(self.path) - parts(self.root) if self.is_module else 0


def line_of(row: Row, node_name: str) -> str:
    """``file:line`` of the line that made most of a row's nodes of a name, by their wall time.

    Args:
        row: a row of a report.
        node_name: a node's name, as in the row's ``nodes``.

    Returns:
        ``""`` where the line is not known.

    Raises:
        UsageError: where ``row`` is no row.
    """
    if not isinstance(row, Row):
        raise UsageError(f"line_of({quoted(row)}): give a row of a report")
    return next((line.place for line in row.lines if line.node == node_name), "")


def parts(path: str) -> int:
    """How many names a path is made of; the root's has none."""
    return path.count(".") + 1 if path else 0


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """One kind of autograd node over all modules.

    Attributes:
        name: the node's name as autograd gives it.
        count: how many such nodes ran.
        wall_ns: clock time, dealt out as the report's ``wall``.
        gpu_ns: summed durations of the device work that they launched.
        cpu_ns: time the host spent in them, less what is nested in others.
        path: the row that pays most of it.
    """

    name: str
    count: int
    wall_ns: int
    gpu_ns: int
    cpu_ns: int
    path: str


@dataclass(frozen=True, slots=True)
class Pass:
    """One backward pass.

    ``duration_ns == wall_ns + forward_ns + other_ns``, exactly.

    Attributes:
        start_ns: from the trace's first event.
        duration_ns: from the first node's start on the host to the later of the host's end and the
            end of the last device work that its nodes launched. Time that an earlier pass still
            holds is the earlier one's.
        wall_ns: the part that is backward; the rows' ``wall_ns`` sum to it over all passes.
        forward_ns: device work of the forward that was still running then.
        other_ns: device work of neither (the optimizer's, another stream's prefetch).
        gpu_ns: summed durations of the device work launched by the pass.
        cpu_ns: time the host spent inside its nodes.
        nodes: autograd nodes executed, AccumulateGrad included.
        step: index of the step that it belongs to.
    """

    start_ns: int
    duration_ns: int
    wall_ns: int
    forward_ns: int
    other_ns: int
    gpu_ns: int
    cpu_ns: int
    nodes: int
    step: int


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """One device's part of the backward.

    Attributes:
        device: the device's index.
        wall_ns: its own wall time by row path, as if the pass had waited for this device alone.
        gpu_ns: its device time by row path.
    """

    device: int
    wall_ns: dict[str, int]
    gpu_ns: dict[str, int]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the backward has a module as its owner.

    Attributes:
        wall: the share (0 to 1) of its wall time.
        gpu: the share of its device time.
        cpu: the share of the host's time in it.
    """

    wall: float
    gpu: float
    cpu: float


PhaseName = Literal["data", "copy", "forward", "loss", "backward", "optimizer", "other", "idle"]


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of the step; the phases of a report sum to its steps exactly.

    Attributes:
        name: ``data`` (the step waits for its next batch), ``copy`` (host-to-device copies that no
            kernel hides, those of the backward left out), ``forward``, ``loss``, ``backward``,
            ``optimizer`` (``zero_grad`` and clipping included), ``other`` (known
            work that is none of these) or ``idle`` (nothing recorded, on the host or on a device).
        wall_ns: clock time, each moment dealt to one phase by the same rule as the rows' ``wall``.
        busy_ns: the part of it in which any device was running something.
    """

    name: PhaseName
    wall_ns: int
    busy_ns: int

    @property
    def utilisation(self) -> float:
        """The share (0 to 1) of the phase in which a device was running something."""
        return self.busy_ns / self.wall_ns if self.wall_ns else 0.0
