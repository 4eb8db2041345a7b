"""Compares two reports, module by module and as a whole, and says what to mistrust."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal

from backspot.comparison.align import aligned
from backspot.comparison.changes import Change, Comparison, Kind, Move, Side, Verdict
from backspot.comparison.noise import Interval, interval, typical_spread
from backspot.errors import UsageError
from backspot.formatting import quoted
from backspot.results.report import Report, Row

__all__ = ["compare"]


_LEAST = 0.005  # of the whole: a module's change below this is not worth a claim

LEFT_OUT = "(rows left out)"
NO_NODE = "(no autograd node)"


def compare(before: Report, after: Report, *, names: tuple[str, str] = ("", "")) -> Comparison:
    """Compare two reports, module by module and as a whole, per step.

    Modules are aligned by path; one that moved or was renamed is recognised where the match is
    unambiguous. Where a side has no module labels, autograd nodes are compared by name, without a
    claim about each: a report does not hold their times by step.

    A change is claimed (``slower``, ``faster``) where it lies outside a Welch-type 95% interval for
    the difference of the means over steps, never narrower than 2% of the larger mean either way;
    for a module than 8%, and than half a percent of the whole. For modules the level is divided by
    their number, and their variances count as no less than what is typical of all; with eight or
    more steps on both sides a module's own variance is enough. What the steps of a recording share,
    such as another load on the machine, no interval over them can show: where most modules changed
    alike, a note says so.
    With a single step on either side nothing is claimed.

    Args:
        before: the first report.
        after: the second.
        names: what to call the two, such as ``("main", "branch")``; where one is empty, the
            recording is called by what was read.

    Raises:
        UsageError: where one of the two is no report, or ``names`` are no two texts.
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
    sides = [_whole(before), _whole(after)]
    whole = _change("whole", "", "", "", sides[0], sides[1], interval(sides[0], sides[1]))
    by: Literal["module", "node"] = (
        "module" if _names_modules(before) and _names_modules(after) else "node"
    )
    moves: tuple[Move, ...] = ()
    if by == "node":
        changes = _by_node(before, after)
    else:
        changes, moves = _by_module(before, after, sides)
    changes.sort(key=lambda change: (-abs(change.change_ms), -change.after_ms, change.path))
    return Comparison(
        whole,
        tuple(changes),
        by,
        moves,
        Side(before.trace, before.steps, before.step_unit, names[0]),
        Side(after.trace, after.steps, after.step_unit, names[1]),
        (*_alike(changes), *_cautions(before, after, by)),
    )


def _whole(report: Report) -> tuple[int, ...]:
    """The backward's time in each step."""
    steps = [0] * report.steps
    for row in report.modules:
        for step, time in enumerate(row.wall_ns_by_step):
            steps[step] += time
    if sum(steps) != report.wall_ns:  # a report that was saved with some of its rows
        steps = [0] * report.steps
        for one in report.passes:
            steps[min(one.step, report.steps - 1)] += one.wall_ns
    if sum(steps) != report.wall_ns:
        each = report.wall_ns // report.steps
        steps = [*[each] * (report.steps - 1), report.wall_ns - each * (report.steps - 1)]
    return tuple(steps)


def _by_module(
    before: Report, after: Report, sides: Sequence[tuple[int, ...]]
) -> tuple[list[Change], tuple[Move, ...]]:
    old, new = _by_path(before, after)
    pairs, moves = aligned(old, new)
    others = [
        {row.path: row.wall_ns_by_step for row in report.modules if not row.is_module}
        for report in (before, after)
    ]
    for report, whole, rest in zip((before, after), sides, others, strict=True):
        left = [whole[at] - _column(report.modules, at) for at in range(report.steps)]
        if any(left):
            rest[LEFT_OUT] = tuple(left)
    names = sorted({*others[0], *others[1]})
    typical = typical_spread(row.wall_ns_by_step for row in (*old.values(), *new.values()))
    among = len(pairs) + len(names)
    reach = _LEAST * max(sum(side) / len(side) for side in sides)
    changes = []
    for was, now in pairs:
        start = () if was is None else old[was].wall_ns_by_step
        end = () if now is None else new[now].wall_ns_by_step
        row = new[now] if now is not None else old[was or ""]
        found = (
            None
            if was is None or now is None
            else interval(start, end, typical=typical, among=among, reach=reach)
        )
        path = None if was is None else old[was].path
        changes.append(
            _change("module", row.path, path, row.class_name, start, end, found, gone=now is None)
        )
    for name in names:
        start = others[0].get(name, (0,) * before.steps)
        end = others[1].get(name, (0,) * after.steps)
        found = interval(start, end, typical=typical, among=among, reach=reach)
        changes.append(_change("unowned", name, name, "", start, end, found))
    return changes, moves


def _by_path(*reports: Report) -> list[dict[str, Row]]:
    """Each report's modules by path; where rows were grouped, two kinds can share a pattern."""
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
        kind: Kind = "unowned" if name == NO_NODE else "node"
        before_name = name if name in sides[0] or name == NO_NODE else None
        gone = name not in sides[1] and name != NO_NODE
        verdict = _verdict(before_name, name, now - was, None, gone=gone)
        changes.append(_made(kind, name, before_name, "", was, now, None, verdict))
    return changes


def _change(
    kind: Kind,
    path: str,
    before_path: str | None,
    class_name: str,
    before: tuple[int, ...],
    after: tuple[int, ...],
    found: Interval | None,
    *,
    gone: bool = False,
) -> Change:
    was, now = (sum(times) / len(times) if times else 0.0 for times in (before, after))
    verdict = _verdict(before_path, path, now - was, found, gone=gone)
    return _made(kind, path, before_path, class_name, was, now, found, verdict, before, after)


def _verdict(
    before_path: str | None, path: str, change: float, found: Interval | None, *, gone: bool
) -> Verdict:
    if before_path is None:
        return "new"
    if gone:
        return "gone"
    if found is not None and found.clear:
        return "slower" if change > 0 else "faster"
    if before_path != path:
        return "moved"
    return "undecided" if found is None and change else "within the noise"


def _made(
    kind: Kind,
    path: str,
    before_path: str | None,
    class_name: str,
    was: float,
    now: float,
    found: Interval | None,
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
        low_ms=None if found is None else found.low / 1e6,
        high_ms=None if found is None else found.high / 1e6,
        verdict=verdict,
        before_ns_by_step=before,
        after_ns_by_step=after,
    )


# How many modules, and changed by which part, make a change of everything.
_MANY = 8
_DRIFT = 0.05


def _names_modules(report: Report) -> bool:
    """Whether the trace told of modules."""
    return any(row.is_module for row in report.modules)


def _alike(changes: Iterable[Change]) -> Iterable[str]:
    """What to think where not this or that module changed, but everything."""
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
            f"Most modules changed alike, half of them by {(middle - 1) * 100:+.0f}% or more: a "
            "change of everything (batch, precision), or another load or clock of the machine."
        )


def _cautions(before: Report, after: Report, by: str) -> Iterable[str]:
    """What to know before trusting the numbers, a sentence each."""
    for name, report in (("Before", before), ("After", after)):
        for warning in report.warnings:
            if by == "module" or "names no modules" not in warning:
                yield f"{name}: {warning}"
    if by == "node":
        without = [
            name for name, r in (("before", before), ("after", after)) if not _names_modules(r)
        ]
        where = "Neither recording names" if len(without) == 2 else f"The one {without[0]} names no"
        yield (
            f"{where} modules: autograd nodes are compared by name, each without a claim, because "
            "a report does not hold their times by step."
        )
    if min(before.steps, after.steps) < 2:
        yield "One step has no spread: record several on both sides to tell a change from noise."
    elif min(before.steps, after.steps) < 4:
        yield "Of two or three steps only large changes can be told from noise: profile(steps=10)."
    if before.step_unit != after.step_unit:
        yield (
            f"The steps differ in kind: before, a {before.step_unit}; after, a {after.step_unit}. "
            "Times per step may not compare."
        )
    if before.has_gpu != after.has_gpu:
        yield f"Only the recording {'before' if before.has_gpu else 'after'} holds GPU work."
