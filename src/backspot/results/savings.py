"""What a step would save if part of its work took less time.

All times are integer nanoseconds of a typical step without the profiler's cost, as a replay of the
recording predicts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from backspot.formatting import duration
from backspot.results.public import public

__all__ = ["Predictor", "ReplayedStep", "Saving", "WhatIf"]


@public
@dataclass(frozen=True, slots=True)
class Saving:
    """How much less time a typical step would take without some work.

    All times are integer nanoseconds. The range is the error of such predictions: see
    ``docs/evidence.md``.

    Attributes:
        ns: How much less time the step would take. Work that other work hides saves nothing.
        low_ns: Lower end of the range.
        high_ns: Upper end of the range.
    """

    ns: int
    low_ns: int
    high_ns: int


@public
@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """How long a typical step takes without the profiler's cost, as the replay predicts it.

    All times are integer nanoseconds.

    Attributes:
        ns: The typical step.
        low_ns: The typical step at the highest likely cost of the profiler.
        high_ns: The typical step at the lowest likely cost of the profiler.
        fitted: Whether the profiler's cost was fitted to steps that were timed without the
            profiler. If not, the cost was measured on another machine, and the range is wider.
    """

    ns: int
    low_ns: int
    high_ns: int
    fitted: bool


@public
@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a typical step would take if some modules were faster, as ``Report.what_if`` returns it.

    All times are integer nanoseconds.

    Attributes:
        step_ns: What the step would take, without the profiler's cost.
        saves_ns: How much less time the step would take.
        low_ns: Lower end of the range of ``saves_ns``.
        high_ns: Upper end of the range of ``saves_ns``.

    Example:
        >>> print(report.what_if({"patch_drop": 0.5}))
        A step would take 24.7 ms: 1.9 ms less (0.43 ms to 3.4 ms), by a replay without the profiler
    """

    step_ns: int
    saves_ns: int
    low_ns: int
    high_ns: int

    def __str__(self) -> str:
        """Return one sentence."""
        saves = f"{duration(self.saves_ns)} less" if self.saves_ns > 0 else "hardly less"
        least, most = (duration(max(ns, 0)) for ns in (self.low_ns, self.high_ns))
        return (
            f"A step would take {duration(self.step_ns)}: {saves} ({least} to {most}), by a replay "
            "without the profiler"
        )


class Predictor(Protocol):
    """A recording that can be replayed again and again."""

    def what_if(self, factors: Mapping[str, float]) -> WhatIf:
        """Return the step if the backward of these modules, by path, takes so much of its time."""
