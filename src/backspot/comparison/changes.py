"""Two reports side by side: what got slower, what got faster, and what is only noise.

Everything is per step, and wall time. Whether a difference counts is decided by a Welch-type
interval over the steps, which ``noise`` describes: conservative with two or three steps,
and with a single step on either side nothing is claimed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from backspot.cautions import alike, cautions, named
from backspot.comparison.align import Move, aligned
from backspot.comparison.noise import Interval, interval, typical_spread
from backspot.errors import UsageError
from backspot.formatting import quoted
from backspot.results.report import Report, Row, StepUnit

__all__ = ["SCHEMA", "Change", "Comparison", "Kind", "Move", "Side", "Verdict", "compare"]

SCHEMA = "backspot.comparison/1"
"""The version of the JSON form."""

Kind = Literal["whole", "module", "node", "unowned"]
Verdict = Literal["slower", "faster", "within the noise", "undecided", "new", "gone", "moved"]

_LEAST = 0.005  # of the whole: a module's change below this is not worth a claim

LEFT_OUT = "(rows left out)"
NO_NODE = "(no autograd node)"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two recordings.

    Attributes:
        trace: what was read.
        steps: how many steps it holds.
        step_unit: what counts as one.
        name: what to call it, as given to ``compare``; empty where nothing was.
    """

    trace: str
    steps: int
    step_unit: StepUnit
    name: str = ""

    @property
    def label(self) -> str:
        """Its name, and what it is of where the name does not say so."""
        if not self.name:
            return self.trace or "a report"
        told = not self.trace or f"/{self.trace}".endswith(f"/{self.name}")
        return self.name if told else f"{self.name} ({self.trace})"


@dataclass(frozen=True, slots=True)
class Change:
    """What became of one module, or of the whole backward.

    Attributes:
        kind: ``whole``, ``module``, ``node`` (an autograd node by name, where modules have no
            labels) or ``unowned`` (what no module owns).
        path: the path after, or before where it is gone; a node's name; ``""`` for a root.
        before_path: the path before; differs from ``path`` where it moved; null where it is new.
        class_name: the module's class.
        before_ms: clock time in the backward per step before, in milliseconds.
        after_ms: the same after.
        change_ms: ``after_ms - before_ms``.
        percent: the change as a percentage of ``before_ms``; null where that is 0.
        low_ms: the least change that the steps allow; null where they have no spread.
        high_ms: the largest change that the steps allow; null where they have no spread.
        verdict: ``slower`` and ``faster`` are beyond the noise; ``undecided`` lacks the steps to
            tell; ``moved`` is at another path and not clearly slower or faster.
        before_ns_by_step: the times before, one a step; empty where they are not known by step.
        after_ns_by_step: the times after, one a step; empty where they are not known by step.
    """

    kind: Kind
    path: str
    before_path: str | None
    class_name: str
    before_ms: float
    after_ms: float
    change_ms: float
    percent: float | None
    low_ms: float | None
    high_ms: float | None
    verdict: Verdict
    before_ns_by_step: tuple[int, ...]
    after_ns_by_step: tuple[int, ...]

    @property
    def name(self) -> str:
        """The path as people say it: the root is called by its class."""
        return self.path or self.class_name or "(root)"

    @property
    def claimed(self) -> bool:
        """Whether it is slower or faster beyond the noise."""
        return self.verdict in ("slower", "faster")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed between two reports.

    Attributes:
        whole: the whole backward.
        changes: its parts, the largest change first; their changes sum to the whole's.
        by: ``module``, or ``node`` where a side has no module labels.
        moves: the changes of paths by which modules moved.
        before: the first recording.
        after: the second.
        notes: what to know before trusting the numbers.
        schema: version of this form.
    """

    whole: Change
    changes: tuple[Change, ...]
    by: Literal["module", "node"]
    moves: tuple[Move, ...]
    before: Side
    after: Side
    notes: tuple[str, ...]
    schema: str = SCHEMA

    def __getitem__(self, path: str) -> Change:
        """The change of the module at ``path``, as it is called after, or before if it is gone.

        Raises:
            KeyError: where neither report has such a module.
            UsageError: where ``path`` is no text. A loop over the comparison itself ends here too:
                ``changes`` holds what changed.
        """
        if not isinstance(path, str):
            raise UsageError(
                f"comparison[{quoted(path)}]: give a module's path; comparison.changes has all"
            )
        found = [change for change in self.changes if change.path == path]
        if not found:
            raise KeyError(f"no module {path!r} in this comparison")
        return min(found, key=lambda change: change.verdict == "gone")

    def slower_than(self, percent: float) -> bool:
        """Whether the whole got slower beyond the noise, and by more than ``percent`` percent.

        Raises:
            UsageError: on what is no percentage of at least 0.
        """
        number = isinstance(percent, (int, float)) and not isinstance(percent, bool)
        if not number or not 0 <= percent < math.inf:
            raise UsageError(f"slower_than({quoted(percent)}): give a percentage of at least 0")
        whole = self.whole
        return whole.verdict == "slower" and (whole.percent is None or whole.percent > percent)

    def __str__(self) -> str:
        from backspot.render.comparison import render_text

        return render_text(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ANN401 - IPython's
        printer.text(str(self))

    def _repr_html_(self) -> str:
        from backspot.render.notebook import comparison_html

        return comparison_html(self)

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the comparison; the suffix decides the form.

        ``.md``, ``.txt``, ``.csv`` and ``.json`` are known. The file appears whole or not at all.

        Raises:
            OutputExistsError: where the file exists and ``force`` is false.
            UsageError: on a suffix that names no form.
        """
        from backspot.render.comparison import save

        return save(self, path, force=force)


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
    by: Literal["module", "node"] = "module" if named(before) and named(after) else "node"
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
        (*alike(changes), *cautions(before, after, by)),
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
