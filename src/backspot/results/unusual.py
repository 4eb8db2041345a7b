"""Steps that took far longer than the typical one, and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from backspot.results.costs import UNSTEADY
from backspot.results.public import public
from backspot.results.report import Report

__all__ = ["UnusualStep", "unusual_steps"]

_FEWEST = 3
_LONGER = 0.2
_DEVIATIONS = 5
_NORMAL = 1.4826  # a normal distribution's standard deviation is this many times its MAD


@public
@dataclass(frozen=True, slots=True)
class UnusualStep:
    """A recorded step that took far longer than the typical one.

    Attributes:
        step: Number of the step among the recorded ones, from 1.
        longer_ns: How much longer it took, in nanoseconds.
        where: Label of the module, row or phase that took at least half of that, or ``""``.
    """

    step: int
    longer_ns: int
    where: str


def unusual_steps(report: Report) -> tuple[UnusualStep, ...]:
    """Return the steps that took at least a fifth longer than the typical one, longest first.

    Where the steps vary much anyway, a step must also be five standard deviations longer. The
    deviation is that of a normal distribution with the median absolute deviation of the steps.
    A report of fewer than three steps has no unusual ones.
    """
    times = report.step_ns_by_step if report.phases else report.wall_ns_by_step
    if len(times) < _FEWEST:
        return ()
    usual = report.step_ns if report.phases else report.wall_ns
    deviation = _NORMAL * median(abs(time - usual) for time in times)
    least = max(_LONGER * usual, _DEVIATIONS * deviation)
    found = [
        UnusualStep(index + 1, time - usual, _where(report, index, time - usual))
        for index, time in enumerate(times)
        if time - usual > least
    ]
    return tuple(sorted(found, key=lambda one: (-one.longer_ns, one.step)))


def _where(report: Report, index: int, longer_ns: int) -> str:
    longer, where = max(_longer_in(report, index), default=(0, ""))
    return where if 2 * longer >= longer_ns else ""


def _longer_in(report: Report, index: int) -> Iterator[tuple[int, str]]:
    """How much longer each row and each phase but the backward took in a step."""
    for row in report.modules:
        if row.path != UNSTEADY or row.is_module:
            yield row.wall_ns_by_step[index] - row.wall_ns, row.name
    for phase in report.phases:
        if phase.name not in ("backward", "unsteady"):
            yield phase.wall_ns_by_step[index] - phase.wall_ns, f"({phase.name})"
