"""The parts that act on a training while it lives, in the order in which they add to its report.

A part is an ``Act``, and an entry in these lists.
"""

from __future__ import annotations

from backspot.live.acts import Act
from backspot.live.trials.attempts import Trying, with_earlier_trials
from backspot.results.report import Report


def acts_of(*, trials: object, ranks: object) -> list[Act]:
    """Return what ``profile`` was asked to do beside its report.

    Raises:
        UsageError: If one of the arguments is invalid.
    """
    acts: list[Act] = [Trying(trials)]
    if ranks is not None:
        from backspot.live.gathering import gathering_of  # one rank needs nothing of it

        acts.append(gathering_of(ranks))
    return acts


_AS_BEFORE = (with_earlier_trials,)


def as_before(report: Report, earlier: Report) -> Report:
    """Return a report with what was added to an earlier one of the same recording."""
    for add in _AS_BEFORE:
        report = add(report, earlier)
    return report
