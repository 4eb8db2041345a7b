"""Whether a recording tells which row comes first by a time, although its steps disagree."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev

from backspot.render.view import View
from backspot.results.costs import Row, Sort
from backspot.results.report import Report

_STEADY = 0.1
"""Share of a time that may belong to other rows, up to which it ranks them; as of ``is_noisy``."""
_RIVALS = 8
"""How many of the other rows a first row is compared with: those that take most."""
_ERRORS = 2.0
"""Standard errors by which a first row must exceed each of them."""


def is_steady(report: Report, sort: Sort) -> bool:
    """Return whether the steps agree on which rows have a time, whatever the clock says."""
    shares = [_shares(report, row, sort) for row in report.modules]
    varying = [
        shares_of_row for shares_of_row in shares if len(shares_of_row) > 1 and any(shares_of_row)
    ]
    noise = sum(stdev(shares_of_row) / sqrt(len(shares_of_row)) for shares_of_row in varying) / 2
    return bool(varying) and noise <= _STEADY


def is_clearly_first(report: Report, first: Row, view: View, *, forward: bool = False) -> bool:
    """Return whether a row takes more than each other one by more than the steps disagree.

    Args:
        first: a row of the report, or some rows as one.
        view: by which time, and what makes a row.
        forward: whether the clock time of the forward counts, too, so that it is of the step.
    """
    sort: Sort = "wall" if view.sort == "saves" else view.sort
    by = "pattern" if first.members > 1 else view.by
    ranked = report.top(depth=view.depth, sort=sort, by=by, match=view.match)
    if forward:
        ranked = tuple(sorted(ranked, key=lambda row: -(row.wall_ns + row.forward_ns)))
    own, me = _shares(report, first, sort, forward=forward), (first.path, first.class_name)
    rivals = [row for row in ranked if (row.path, row.class_name) != me][:_RIVALS]
    least = report.noise if sort == "wall" else 0.0
    return len(own) > 1 and all(
        _is_more(own, _shares(report, row, sort, forward=forward), least)
        for row in rivals
        if row.is_module or row.is_exchange
    )


def _shares(report: Report, row: Row, sort: Sort, *, forward: bool = False) -> list[float]:
    """Return the share that a row has in each step that counts: of the backward, or of the step."""
    times, totals = (getattr(costs, f"{sort}_ns_by_step") for costs in (row, report))
    if forward and report.step_ns_by_step:
        totals = report.step_ns_by_step
        if row.forward_ns_by_step:
            times = [sum(both) for both in zip(times, row.forward_ns_by_step, strict=True)]
    return [times[step] / totals[step] for step in report.typical_steps if totals[step]]


def _is_more(own: Sequence[float], other: Sequence[float], least: float) -> bool:
    apart = [share - others for share, others in zip(own, other, strict=True)]
    return mean(apart) > max(least, _ERRORS * stdev(apart) / sqrt(len(apart)))
