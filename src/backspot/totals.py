"""What stands in a report beside its rows: operators, passes, devices, and how much has an owner.

Times are integer nanoseconds summed over the recorded steps, as everywhere in a report.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Coverage", "DeviceCost", "OperatorCost", "Pass"]


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
