"""What it costs to record an event."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["MEASURED", "ZERO", "ProfilerCost"]


@dataclass(frozen=True, slots=True)
class ProfilerCost:
    """What the profiler and the labels add to a step.

    Attributes:
        operator_ns: nanoseconds for each operator and annotation.
        runtime_ns: nanoseconds for each call of the device's runtime.
        label_ns: nanoseconds for each label around a module's call.
        marker_ns: nanoseconds for each marker of a node.
        peer_wait: the share of the waits for other ranks that is due to the profiler, 0 to 1. A
            rank that is recorded is slower at some moments, and the others wait for it.
        slowdown: how many times slower the host ran while it was recorded, beside these costs.
        uncertainty: by which share of themselves the four costs may be wrong.
    """

    operator_ns: float
    runtime_ns: float
    label_ns: float
    marker_ns: float
    peer_wait: float = 1.0
    slowdown: float = 1.0
    uncertainty: float = 0.0

    def scaled(self, factor: float) -> ProfilerCost:
        """Return the cost of each event and of waits for ranks times a factor."""
        return replace(
            self,
            operator_ns=self.operator_ns * factor,
            runtime_ns=self.runtime_ns * factor,
            label_ns=self.label_ns * factor,
            marker_ns=self.marker_ns * factor,
            peer_wait=min(1.0, self.peer_wait * factor),
        )

    def range(self) -> tuple[ProfilerCost, ...]:
        """Return the costs, and where they are uncertain the least and the greatest likely ones."""
        if not self.uncertainty:
            return (self,)
        low, high = 1 - self.uncertainty, 1 + self.uncertainty
        return self, self.scaled(low), self.scaled(high)


ZERO = ProfilerCost(0.0, 0.0, 0.0, 0.0, peer_wait=0.0)
"""No cost: the recorded step."""

MEASURED = ProfilerCost(1_200.0, 1_200.0, 8_000.0, 9_500.0, uncertainty=0.3)
"""Measured on the host of an H200 with torch 2.11, on three models that wait for the host.

Microbenchmarks give less (0.7 to 1 µs for an operator), because their caches are warm. Another host
has other costs: fit them to a step measured without profiler.
"""
