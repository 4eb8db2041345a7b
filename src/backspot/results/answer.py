"""What costs most in a step: one module, a phase, waits for a device, or another cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Literal

from backspot.presented import public
from backspot.results.costs import Phase, Row, Sort, time_of
from backspot.results.findings import Finding, Saving
from backspot.results.grouping import numberless
from backspot.results.quantities import Count, Ratio

if TYPE_CHECKING:
    from backspot.results.report import By, Report

_STANDS_OUT = 0.1
"""Share of the step from which something stands out."""
_VAGUE = 0.5
"""What counts of a phase without a known cause, and of a cause all over the step: neither says
where to look."""
_MOSTLY = 0.5
"""Share of a phase from which one line or one cause has most of it."""
_NEARLY = 0.75
"""Share from which a cause is of one place, or its saving that of the whole phase."""
_DIFFUSE = 0.10
"""If the first row has a smaller share than this, repeated layers may take more together."""
_UNUSUAL = 1.5
"""A layer that takes this many times as long as the median of its like stands out among them."""


@public
@dataclass(frozen=True, slots=True)
class Answer:
    """What costs most in a typical step, wherever it is.

    Attributes:
        kind: ``module`` (or repeated layers, or communication of ranks), a ``phase`` without
            modules, ``waits`` of the host for a device, another ``cause``, or ``nothing`` if
            nothing stands out.
        path: Path or pattern of the modules, ``(data)`` and the like for a phase, or the first
            place of a cause; ``""`` for waits and for nothing.
        class_name: Class of the modules, or ``""``.
        line: Line of Python that takes most of it, ``file:line``, or ``""``.
        wall_ns: Its clock time, in nanoseconds; of waits, what a step would take less. If nothing
            stands out, that of the longest.
        share: Its share (0 to 1) of the step.
        saves: How much less a step would take without it; ``None`` if not known.
        rule: Rule of the finding about it, or ``""``.

    Example:
        >>> report.answer.kind, report.answer.path, round(report.answer.share, 2)
        ('module', 'patch_drop', 0.19)
    """

    kind: Literal["module", "phase", "waits", "cause", "nothing"]
    path: str
    class_name: str
    line: str
    wall_ns: Count
    share: Ratio
    saves: Saving | None
    rule: str


def find_answer(report: Report) -> Answer:
    """Return what costs most in a step."""
    found = sorted(_candidates(report), key=lambda one: -one[0])
    if found and found[0][0] >= _STANDS_OUT:
        return found[0][1]
    # A cause that no replay prices, in no one place, comes last.
    rest = sorted((_cause(report, one) for one in report.findings), key=lambda one: -one.wall_ns)
    if rest and rest[0].share >= _STANDS_OUT:
        return rest[0]
    longest = max((one for _, one in found), key=lambda one: one.share, default=None)
    nothing = Answer("nothing", "", "", "", 0, 0.0, None, "")
    return replace(nothing, wall_ns=longest.wall_ns, share=longest.share) if longest else nothing


def _candidates(report: Report) -> Iterator[tuple[float, Answer]]:
    """Everything that may cost most, each with the share of the step for which it counts."""
    row, whole = heaviest_row(report), max(1, report.whole_ns)
    causes = [one for one in report.findings if one.wall_ns]
    if row is not None:
        share = row.wall_ns / whole
        at = _about(causes, row.path, 0)
        rule = at.rule if at else ""
        yield (
            share,
            Answer("module", row.path, row.class_name, "", row.wall_ns, share, row.saves, rule),
        )
    of_step = max(1, sum(phase.wall_ns for phase in report.phases))
    for phase in report.phases:
        if phase.name not in ("forward", "backward"):
            share = phase.wall_ns / of_step
            cause = _about(causes, f"({phase.name})", _MOSTLY * phase.wall_ns)
            yield share * (1 if cause else _VAGUE), _phase(report, phase, share, cause)
    for one in causes:
        place = one.places[0]
        if one.saves is not None or (place.path.startswith("(") and not place.class_name):
            found = _cause(report, one)
            yield found.share * (1 if found.path or found.class_name else _VAGUE), found
    saves, replayed = report.without_waits, report.replayed_step
    if saves is not None and replayed is not None and saves.ns and report.waits:
        share = min(1.0, saves.ns / max(1, replayed.ns))
        wait = max(report.waits, key=lambda one: one.saves.ns if one.saves else 0)
        found = Answer("waits", "", "", wait.line, saves.ns, share, saves, "host-waits")
        yield share, found


def _cause(report: Report, one: Finding) -> Answer:
    """A cause, with its place where it has most of its time in one."""
    place, share = one.places[0], min(1.0, one.wall_ns / max(1, report.whole_ns))
    concentrated = place.wall_ns >= _NEARLY * one.wall_ns
    at_place = (place.path, place.class_name, place.line) if concentrated else ("", "", "")
    return Answer("cause", *at_place, one.wall_ns, share, one.saves, one.rule)


def _phase(report: Report, phase: Phase, share: float, cause: Finding | None) -> Answer:
    """A phase with the function that takes most of it, and with what its cause saves."""
    spent: dict[tuple[str, str], int] = {}
    lines = [line for line in report.host if line.phase == phase.name]
    for line in lines:
        function = line.file, line.function
        spent[function] = spent.get(function, 0) + line.idle_ns
    at = cause.places[0].line if cause else ""
    if not at and spent and max(spent.values()) >= _MOSTLY * sum(spent.values()):
        function = max(spent, key=lambda one: spent[one])
        at = next(line.place for line in lines if (line.file, line.function) == function)
    whole = cause is not None and cause.wall_ns >= _NEARLY * phase.wall_ns
    return Answer(
        kind="phase",
        path=f"({phase.name})",
        class_name="",
        line=at,
        wall_ns=phase.wall_ns,
        share=share,
        saves=cause.saves if cause and whole else None,
        rule=cause.rule if cause else "",
    )


def _about(causes: Sequence[Finding], path: str, least: float) -> Finding | None:
    """The first finding that has this one place, and at least so much time."""
    return next(
        (
            one
            for one in causes
            if [place.path for place in one.places] == [path] and one.wall_ns >= least
        ),
        None,
    )


def heaviest_row(
    report: Report,
    sort: Sort = "wall",
    by: By = "path",
    depth: int | None = None,
    match: Sequence[str] | None = None,
) -> Row | None:
    """The module or the repeated layers that take most; arguments as of ``Report.top``.

    Where communication between ranks takes more clock time, it is that; ``None`` without any.
    """
    ranked = report.top(sort=sort, by=by, depth=depth, match=match)
    modules = [row for row in ranked if row.is_module and _costs(row)]
    if not modules:
        return None
    first: Row | None = modules[0] if time_of(modules[0], sort) else None
    if first is not None and by == "path":
        patterns = report.top(sort=sort, by="pattern", depth=depth, match=match)
        layers = next(row for row in patterns if row.is_module)
        if layers.members > 1 and time_of(layers, sort) >= 2 * time_of(first, sort):
            is_little = report.share(first, sort) < _DIFFUSE
            if is_little or _is_around(first, layers) or _is_like_others(first, modules, sort):
                first = layers
    exchanges = [row for row in ranked if row.is_exchange and sort == "wall"]
    longest = max(exchanges, key=lambda row: row.wall_ns, default=None)
    if longest and longest.wall_ns > (first.wall_ns if first else 0):
        return longest
    return first


def _costs(row: Row) -> bool:
    return bool(row.wall_ns or row.gpu_ns or row.cpu_ns)


def _is_around(row: Row, layers: Row) -> bool:
    """Whether a module contains these layers, so that it takes what they leave over."""
    return layers.path.startswith(f"{numberless(row.path)}." if row.path else "")


def _is_like_others(first: Row, modules: Sequence[Row], sort: Sort) -> bool:
    """Whether the first row is a repeated layer that takes hardly longer than the others."""
    kind = numberless(first.path), first.class_name
    times = [
        time_of(row, sort) for row in modules if (numberless(row.path), row.class_name) == kind
    ]
    slowest = time_of(first, sort)
    return sum(times) >= 2 * slowest and slowest < _UNUSUAL * median(times)
