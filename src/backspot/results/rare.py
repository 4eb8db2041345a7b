"""Rare work: what recurs in some of a training's steps only."""

from __future__ import annotations

from dataclasses import dataclass

from backspot.presented import public
from backspot.results.quantities import Count, Measure, Ratio


@public
@dataclass(frozen=True, slots=True)
class RareWork:
    """Work that recurs in some steps only: a rollout, an evaluation, a checkpoint, a late batch.

    It is part of the training, so a mean step has its share of it, however rare it is. Times are
    integer nanoseconds.

    Attributes:
        name: What the work is, as people read it: ``forward without gradients``.
        period: Mean number of steps from one time to the next, at least 1.
        wall_ns: Clock time of each time it happens, the mean.
        per_step_ns: Its part of the mean step: ``wall_ns`` over ``period``, rounded down.
        share: Its share (0 to 1) of the mean step.
        steps: Indices of the recorded steps that have it, from 0; empty where they are not known.
    """

    name: str
    period: Measure
    wall_ns: Count
    per_step_ns: Count
    share: Ratio
    steps: tuple[Count, ...] = ()

    def __repr__(self) -> str:
        each_ms, mean = self.wall_ns / 1e6, self.per_step_ns / 1e6
        often = f"once in {self.period:.4g} steps"
        return f"<RareWork {self.name}: {often}, {each_ms:.3f} ms, {mean:.3f} ms a step>"


@dataclass(frozen=True, kw_only=True)
class InReport:
    """What each report has.

    Attributes:
        rare: What recurs in some of the recorded steps only, the largest part of a mean step first.
    """

    __slots__ = ()

    rare: tuple[RareWork, ...] = ()
