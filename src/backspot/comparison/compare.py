"""Compare two reports, module by module and as a whole, and say what not to trust."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from statistics import median
from typing import Literal

from backspot.comparison.align import aligned
from backspot.comparison.changes import Change, ChangeKind, Comparison, Move, Side, Verdict
from backspot.comparison.noise import Interval, interval, typical_spread
from backspot.errors import UsageError
from backspot.formatting import quoted
from backspot.results.report import Report, Row

__all__ = ["compare"]


_LEAST = 0.005
"""Share of the whole below which a module's change is not claimed."""

LEFT_OUT = "(rows left out)"
NO_NODE = "(no autograd node)"


def compare(before: Report, after: Report, *, names: tuple[str, str] = ("", "")) -> Comparison:
    """Compare two reports, module by module and as a whole, in wall time per step.

    Modules are matched by path. A module that moved or was renamed is recognised if the match is
    unambiguous. If a side has no module labels, autograd nodes are compared by name, and no change
    of a node is claimed, because a report does not have the times of nodes by step.

    A change is claimed (``slower`` or ``faster``) if it lies outside a Welch-type 95% interval for
    the difference of the means over steps. The interval extends at least 2% of the larger mean
    either way. For a module it extends at least 8%, and at least 0.5% of the whole. The level is
    divided by the number of modules (Bonferroni), and the variance of a module counts as at least
    what is typical of all modules. With eight or more steps on both sides, a module's own variance
    is sufficient. With a single step on either side nothing is claimed.

    No interval over steps can show what all steps of a recording share, such as another load on the
    machine. If most modules changed by a similar factor, a note says so.

    Args:
        before: The first report.
        after: The second report.
        names: Names of the two, such as ``("main", "branch")``. Without a name (default), a
            recording is named by what was read.

    Returns:
        The comparison, with times in milliseconds per step.

    Raises:
        UsageError: If ``before`` or ``after`` is not a report, or ``names`` is not two strings.

    Example:
        >>> before = backspot.locate("main.trace.json.gz")
        >>> after = backspot.locate("branch.trace.json.gz")
        >>> print(backspot.compare(before, after))
        The backward got slower by 14%: 21.3 ms before, 24.4 ms after, per step; ...
    """
    for report in (before, after):
        if not isinstance(report, Report):
            raise UsageError(
                f"compare takes two reports, not {type(report).__name__}: backspot.locate(trace) "
                "or backspot.Report.load(path) gives one"
            )
    if (
        not isinstance(names, (tuple, list))
        or len(names) != 2
        or not all(isinstance(name, str) for name in names)
    ):
        raise UsageError(f"names={quoted(names)}: give two texts, what to call before and after")
    wholes = start, end = _whole(before), _whole(after)
    whole = _change("whole", "", "", "", start, end, interval(start, end))
    by: Literal["module", "node"] = (
        "module" if _names_modules(before) and _names_modules(after) else "node"
    )
    moves: tuple[Move, ...] = ()
    if by == "node":
        changes = _by_node(before, after)
    else:
        changes, moves = _by_module(before, after, wholes)
    changes.sort(key=lambda change: (-abs(change.change_ms), -change.after_ms, change.path))
    return Comparison(
        whole,
        tuple(changes),
        by,
        moves,
        Side(before.trace, before.steps, before.step_unit, names[0]),
        Side(after.trace, after.steps, after.step_unit, names[1]),
        (*_common_change(changes), *_cautions(before, after, by)),
    )


def _whole(report: Report) -> tuple[int, ...]:
    """Return the time of the backward in each step."""
    steps = [0] * report.steps
    for row in report.modules:
        for step, time in enumerate(row.wall_ns_by_step):
            steps[step] += time
    if sum(steps) != report.wall_ns:  # the report was saved with only some of its rows
        steps = [0] * report.steps
        for backward in report.passes:
            steps[min(backward.step, report.steps - 1)] += backward.wall_ns
    if sum(steps) != report.wall_ns:
        each = report.wall_ns // report.steps
        steps = [*[each] * (report.steps - 1), report.wall_ns - each * (report.steps - 1)]
    return tuple(steps)


def _by_module(
    before: Report, after: Report, wholes: Sequence[tuple[int, ...]]
) -> tuple[list[Change], tuple[Move, ...]]:
    """Compare module by module; ``wholes`` are the times of the backward in each step."""
    old, new = _by_path(before, after)
    pairs, moves = aligned(old, new)
    unowned = [
        {row.path: row.wall_ns_by_step for row in report.modules if not row.is_module}
        for report in (before, after)
    ]
    for report, whole, times in zip((before, after), wholes, unowned, strict=True):
        left_out = tuple(whole[at] - _column(report.modules, at) for at in range(report.steps))
        if any(left_out):
            times[LEFT_OUT] = left_out
    names = sorted({*unowned[0], *unowned[1]})
    noise_of = partial(
        interval,
        typical=typical_spread(row.wall_ns_by_step for row in (*old.values(), *new.values())),
        among=len(pairs) + len(names),
        reach=_LEAST * max(sum(whole) / len(whole) for whole in wholes),
    )
    changes = []
    for old_path, new_path in pairs:
        was = None if old_path is None else old[old_path]
        now = None if new_path is None else new[new_path]
        row = next(row for row in (now, was) if row is not None)
        start = was.wall_ns_by_step if was else ()
        end = now.wall_ns_by_step if now else ()
        noise = noise_of(start, end) if was and now else None
        path = was.path if was else None
        changes.append(
            _change("module", row.path, path, row.class_name, start, end, noise, gone=now is None)
        )
    for name in names:
        start = unowned[0].get(name, (0,) * before.steps)
        end = unowned[1].get(name, (0,) * after.steps)
        changes.append(_change("unowned", name, name, "", start, end, noise_of(start, end)))
    return changes, moves


def _by_path(*reports: Report) -> list[dict[str, Row]]:
    """Return the modules of each report by path, or by label if two groups share a pattern."""
    modules = [[row for row in report.modules if row.is_module] for report in reports]
    shared: set[str] = set()
    for rows in modules:
        known: set[str] = set()
        for row in rows:
            (shared if row.path in known else known).add(row.path)
    return [
        {row.label if row.path in shared else row.path: row for row in rows} for rows in modules
    ]


def _column(rows: Iterable[Row], step: int) -> int:
    return sum(row.wall_ns_by_step[step] for row in rows)


def _by_node(before: Report, after: Report) -> list[Change]:
    sides = [{op.name: op.wall_ns for op in report.operators} for report in (before, after)]
    for report, times in zip((before, after), sides, strict=True):
        rest = report.wall_ns - sum(times.values())
        if rest:
            times[NO_NODE] = times.get(NO_NODE, 0) + rest
    changes = []
    for name in sorted({*sides[0], *sides[1]}):
        was, now = (
            times.get(name, 0) / report.steps
            for times, report in zip(sides, (before, after), strict=True)
        )
        kind: ChangeKind = "unowned" if name == NO_NODE else "node"
        before_name = name if name in sides[0] or name == NO_NODE else None
        gone = name not in sides[1] and name != NO_NODE
        verdict = _verdict(before_name, name, now - was, None, gone=gone)
        changes.append(_build(kind, name, before_name, "", was, now, None, verdict))
    return changes


def _change(
    kind: ChangeKind,
    path: str,
    before_path: str | None,
    class_name: str,
    before: tuple[int, ...],
    after: tuple[int, ...],
    noise: Interval | None,
    *,
    gone: bool = False,
) -> Change:
    was, now = (sum(times) / len(times) if times else 0.0 for times in (before, after))
    verdict = _verdict(before_path, path, now - was, noise, gone=gone)
    return _build(kind, path, before_path, class_name, was, now, noise, verdict, before, after)


def _verdict(
    before_path: str | None, path: str, change: float, noise: Interval | None, *, gone: bool
) -> Verdict:
    if before_path is None:
        return "new"
    if gone:
        return "gone"
    if noise is not None and noise.clear:
        return "slower" if change > 0 else "faster"
    if before_path != path:
        return "moved"
    return "undecided" if noise is None and change else "within the noise"


def _build(
    kind: ChangeKind,
    path: str,
    before_path: str | None,
    class_name: str,
    was: float,
    now: float,
    noise: Interval | None,
    verdict: Verdict,
    before: tuple[int, ...] = (),
    after: tuple[int, ...] = (),
) -> Change:
    return Change(
        kind=kind,
        path=path,
        before_path=before_path,
        class_name=class_name,
        before_ms=was / 1e6,
        after_ms=now / 1e6,
        change_ms=now / 1e6 - was / 1e6,
        percent=(now - was) / was * 100 if was else None,
        low_ms=None if noise is None else noise.low / 1e6,
        high_ms=None if noise is None else noise.high / 1e6,
        verdict=verdict,
        before_ns_by_step=before,
        after_ns_by_step=after,
    )


_MANY = 8
"""Modules from which a common change is looked for."""
_DRIFT = 0.05
"""Median change of the modules beyond which a note says that everything changed."""


def _names_modules(report: Report) -> bool:
    """Return whether the trace names modules."""
    return any(row.is_module for row in report.modules)


def _common_change(changes: Iterable[Change]) -> Iterable[str]:
    """Yield a note if most modules changed by a similar factor."""
    ratios = [
        change.after_ms / change.before_ms
        for change in changes
        if change.kind == "module" and change.before_ms and change.after_ms
    ]
    if len(ratios) < _MANY:
        return
    middle = median(ratios)
    if max(middle, 1 / middle) > 1 + _DRIFT:
        yield (
            f"Most modules changed alike, half of them by {(middle - 1) * 100:+.0f}% or more. "
            "Look for a common cause: batch size, precision, or the machine's load or clock."
        )


def _cautions(before: Report, after: Report, by: str) -> Iterable[str]:
    """Yield what to know before trusting the numbers, one note at a time."""
    for name, report in (("Before", before), ("After", after)):
        for warning in report.warnings:
            if by == "module" or "names no modules" not in warning:
                yield f"{name}: {warning}"
    if by == "node":
        if _names_modules(before) or _names_modules(after):
            unnamed = "after" if _names_modules(before) else "before"
            yield f"The recording {unnamed} names no modules, so {_BY_NODE}"
        else:
            yield f"Neither recording names modules, so {_BY_NODE}"
    if min(before.steps, after.steps) < 2:
        yield "One step has no spread: record several on both sides to tell a change from noise."
    elif min(before.steps, after.steps) < 4:
        yield "Two or three steps show only large changes. profile(steps=10) records more."
    if before.step_unit != after.step_unit:
        yield (
            f"The steps differ in kind: {before.step_unit} before, {after.step_unit} after. "
            "Times per step may not be comparable."
        )
    if before.has_gpu != after.has_gpu:
        yield f"Only the recording {'before' if before.has_gpu else 'after'} has GPU work."


_BY_NODE = (
    "autograd nodes are compared by name. No change of a node is claimed, because a report does "
    "not have the times of nodes by step."
)
