"""What a comparison says, in every output: the answer, the table of changes, and what it omits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from backspot.errors import UsageError
from backspot.formatting import (
    MANY_PERCENT,
    MINUS,
    counted,
    decimals_for,
    duration,
    times_as_long,
    visible,
)
from backspot.render._phases import PHASES
from backspot.render._sections import Column, numbers
from backspot.render._words import Part, said
from backspot.results.comparison import Change, Comparison, Side
from backspot.trace.names import short_node_name

_MOVES = 5  # how many are named
_RANKS = 8  # how many are shown
_LEAST = 0.005  # share of the step from which a phase is shown
_LEAST_PERCENT = 0.05  # from which a percentage is not shown as 0
_PART = 0.1  # share of a change from which the answer names a part as what changed

FIELDS = (
    "kind",
    "path",
    "before_path",
    "class_name",
    "before_ms",
    "after_ms",
    "change_ms",
    "percent",
    "before_gpu_ms",
    "after_gpu_ms",
    "judged_by",
    "low_ms",
    "high_ms",
    "verdict",
)
"""The columns for programs (CSV), in order."""


def recordings(comparison: Comparison) -> list[str]:
    """The unit of the numbers and the two recordings, as a list of facts."""
    recorded = [f"{when}: {visible(name)}, {size}" for when, name, size in sides(comparison)]
    return [f"{comparison.clock} times in ms per step", *recorded]


def sides(comparison: Comparison) -> list[tuple[str, str, str]]:
    """For each side: ``before`` or ``after``, its name, and its number of recordings and steps."""
    sides = (("before", comparison.before), ("after", comparison.after))
    return [(when, side.label, _size(side)) for when, side in sides]


def _size(side: Side) -> str:
    steps = counted(side.steps, "step")
    return steps if side.recordings == 1 else f"{side.recordings} recordings, {steps}"


def left_out(comparison: Comparison, top: int | None) -> Iterator[list[Part]]:
    """The sentences below the tables: changes that they leave out, and modules that moved."""
    changes = _costly(comparison)
    if top is not None and (hidden := changes[top:]):
        number = counted(len(hidden), f"more {comparison.by}")
        verb = "changes" if len(hidden) == 1 else "change"
        time = _signed_time(sum(change.change_ms for change in hidden))
        yield [("text", f"{number} {verb} by {time} in total; see --top {len(changes)}.")]
    for move in comparison.moves[:_MOVES]:
        ends: list[Part] = [("name", path or "(root)") for path in (move.before, move.after)]
        yield said(f"Moved: {{}} → {{}} ({counted(move.modules, 'module')}).", *ends)
    if len(comparison.moves) > _MOVES:
        yield [("text", f"{counted(len(comparison.moves) - _MOVES, 'more move')}.")]
    all_changes = (comparison.step, *comparison.phases, comparison.whole, *comparison.changes)
    if comparison.about == "recordings" and any(change.differs for change in all_changes):
        yield [("text", _OF_THE_CODE)]


_OF_THE_CODE = (
    "Whether the code is slower, one recording on each side cannot tell: make three of each, in "
    "turns, and run backspot diff before*.json -- after*.json."
)


def comparison_answer(comparison: Comparison) -> list[Part]:
    """The answer in a sentence: the step, or the backward if nothing else is recorded."""
    first = comparison.step if comparison.phases else comparison.whole
    unit = "step" if comparison.phases else "backward"
    before, now = duration(first.before_ms * 1e6), duration(first.after_ms * 1e6)
    share = "" if first.percent is None else _signed_percent(first.percent)
    if first.claimed:
        sentence: list[Part] = [("text", f"The {unit} got {first.verdict}")]
        if first.percent is not None:
            times = times_as_long(first.percent)
            by = times or _give_or_take(abs(first.percent), first)
            sentence += said(", {} as long" if times else " by {}", by)
        sentence.append(("text", f": {before} before, {now} after, per step"))
    elif first.differs:
        sentence = [("text", f"{_which(comparison)} differ by ")]
        if first.percent is None or abs(first.percent) < _LEAST_PERCENT:
            sentence.append(("number", _signed_time(first.change_ms) + _give(first)))
        elif times := times_as_long(first.percent):
            sentence.append(("number", times))
        else:
            sign = "+" if first.percent > 0 else MINUS
            sentence.append(("number", sign + _give_or_take(abs(first.percent), first)))
        sentence.append(("text", f": the {unit} took {before} before, {now} after, per step"))
    elif first.verdict == "undecided":
        change = ", ".join(filter(None, [share, _signed_time(first.change_ms) + _give(first)]))
        steps = min(comparison.before.steps, comparison.after.steps)
        why = "too few steps to tell it from noise" if steps < 2 else "which may be the machine"
        sentence = said(
            f"The {unit} took {{}} per step before and {{}} after ({change}): {why}", before, now
        )
    else:
        noise = f", and the noise is{_give(first)}" if first.is_noisy else ""
        tell = "Too noisy to tell" if noise else f"No difference beyond the noise{_of(first)}"
        change = f" ({share})" if share else ""
        sentence = said(
            f"{tell}: the {unit} took {{}} before, {{}} after{change}{noise}", before, now
        )
    return [*sentence, *_first_change(comparison, first), ("text", ".")]


def _which(comparison: Comparison) -> str:
    number = comparison.before.recordings + comparison.after.recordings
    return "These two recordings" if number == 2 else "The recordings of the two sides"


def _give_or_take(percent: float, change: Change) -> str:
    """A share of the time before, and its noise: ``40% ± 9``."""
    if not change.noise_ms or not change.before_ms:
        return _percent(percent)
    noise = change.noise_ms / change.before_ms * 100
    if noise >= MANY_PERCENT:
        return f"{_percent(percent)} ± {_percent(noise)}"
    decimals = 0 if noise >= 1.95 else 1 if noise >= 0.05 else 2
    return f"{percent:.{decimals}f}% ± {noise:.{decimals}f}"


def _give(change: Change) -> str:
    """The noise as a time after a change: `` ±39 ms``."""
    return "" if change.noise_ms is None else f" ±{duration(change.noise_ms * 1e6)}"


def _of(change: Change) -> str:
    """The noise as a share of the time before: `` of ±4.1%``."""
    if not change.noise_ms or not change.before_ms:
        return ""
    return f" of ±{_percent(change.noise_ms / change.before_ms * 100)}"


def _first_change(comparison: Comparison, whole_change: Change) -> Iterator[Part]:
    """The parts that changed beyond the noise; if there are none, what changed most."""
    phases = sorted(
        (phase for phase in comparison.phases if phase.differs and phase.path != "backward"),
        key=_by_size,
    )
    claimed = [change for change in comparison.changes if change.differs]
    candidates = sorted([*phases[:1], *claimed[:1]], key=_by_size)
    if whole_change.differs:
        large = [
            change
            for change in candidates
            if -_by_size(change) >= _PART * abs(whole_change.change_ms)
        ]
        candidates, small = large, [] if large else candidates[:1]
    else:
        small = []
    for change in candidates:
        yield from (("text", "; "), *_claim(change))
    for change in small:
        yield from (("text", "; the largest part beyond the noise is "), *_change(change))
    candidates += small
    if candidates and (more := len(claimed) + len(phases) - len(candidates)):
        yield ("text", f", {counted(more, 'other')} changed too")
    if not candidates and whole_change.differs and comparison.changes:
        yield ("text", "; the largest change is ")
        yield from _change(comparison.changes[0])


def _by_size(change: Change) -> float:
    return -abs(change.judged_ms[2])


def _change(change: Change) -> Iterator[Part]:
    """A part and by how much it changed: ``head (new), +2 ms``."""
    how = f" ({change.verdict})" if change.verdict in ("new", "gone") else ""
    yield from (_named(change), ("text", f"{how}, "))
    yield ("number", _signed_time(change.judged_ms[2]) + _of_gpu(change))


def _claim(change: Change) -> Iterator[Part]:
    """What a change says: ``head got slower by 2 ms``, ``head took 2 ms longer``."""
    time = duration(abs(change.judged_ms[2]) * 1e6)
    yield _named(change)
    if change.verdict in ("new", "gone"):
        yield from (("text", f" is {change.verdict}, "), ("number", time + _of_gpu(change)))
    elif change.claimed:
        yield from (("text", f" got {change.verdict} by "), ("number", time + _of_gpu(change)))
    else:
        more, less = ("longer", "less")
        if change.judged_by == "gpu":
            more, less = ("more GPU time", "less GPU time")
        how = more if change.verdict == "longer" else less
        yield from (("text", " took "), ("number", time), ("text", f" {how}"))


def _named(change: Change) -> Part:
    if change.kind == "phase":
        return "text", title_of(change)
    return "node" if change.kind == "node" else "name", short_node_name(change.name)


def plain(sentence: Sequence[Part]) -> str:
    """A sentence as a text."""
    return "".join(text for _, text in sentence)


def title_of(change: Change) -> str:
    """What a row is called; a phase as in a report."""
    if change.kind != "phase":
        return change.title
    return next((text for name, text in PHASES.items() if name == change.name), change.title)


def _of_gpu(change: Change) -> str:
    return " of GPU time" if change.judged_by == "gpu" else ""


def _costly(comparison: Comparison) -> list[Change]:
    return [
        change
        for change in comparison.changes
        if change.before_ms or change.after_ms or change.before_gpu_ms or change.after_gpu_ms
    ]


Table: TypeAlias = tuple[Sequence[Change], list[Column]]
"""A table, and the change in each of its rows."""


def tables(comparison: Comparison, top: int | None) -> list[Table]:
    """The step, the ranks of jobs, and the ``top`` first changes; without those that are empty."""
    all_tables = (_step(comparison), _ranks(comparison), _changes(comparison, top))
    return [(rows, columns) for rows, columns in all_tables if rows]


def _step(comparison: Comparison) -> Table:
    """The phases that take any time worth a line, and the step itself. In clock time."""
    if not comparison.phases:
        return (), []
    least = _LEAST * max(comparison.step.before_ms, comparison.step.after_ms)
    rows = [
        phase
        for phase in comparison.phases
        if phase.differs or max(abs(phase.before_ms), abs(phase.after_ms)) >= least
    ]
    return _named_rows("typical rank" if comparison.ranks else "phase", [*rows, comparison.step])


def _ranks(comparison: Comparison) -> Table:
    """The ranks of jobs whose own time changed beyond the noise, or most."""
    claimed = [change for change in comparison.ranks if change.differs]
    return _named_rows("own time of", (claimed or comparison.ranks)[:_RANKS])


def _named_rows(head: str, rows: Sequence[Change]) -> Table:
    names: list[Part] = [("text", title_of(change)) for change in rows]
    return rows, [Column("name", head, names, least=18, left=True, style="cyan"), *_times(rows)]


def _changes(comparison: Comparison, top: int | None) -> Table:
    """The first changes, and the whole backward; each in the time that its verdict is about."""
    if top is not None and top < 0:
        raise UsageError(f"top={top}: give a number of rows of at least 0, or None for all")
    shown = _costly(comparison)[:top]
    rows = [*shown, comparison.whole]
    names: list[Part] = [
        ("name" if change.kind in ("module", "node") else "text", short_node_name(change.name))
        for change in shown
    ]
    classes: list[Part] = [*(("name", change.class_name) for change in shown), ("name", "")]
    by: list[Part] = [("text", "GPU" if c.judged_by == "gpu" else "wall") for c in rows]
    columns = [
        Column(
            "name",
            comparison.by,
            [*names, ("text", comparison.whole.title)],
            least=18,
            left=True,
            cut_start=comparison.by == "module",  # the end of a path identifies it
            outlasts=3,
            style="cyan",
        )
    ]
    if comparison.by == "module":
        columns.append(Column("class", "class", classes, need=3, least=10, left=True))
    if any(change.judged_by == "gpu" for change in rows):
        columns.append(Column("time", "time", by, left=True))
    return rows, [*columns, *_times(rows)]


def _times(rows: Sequence[Change]) -> list[Column]:
    """The columns of numbers, and the verdicts."""
    times = [change.judged_ms for change in rows]
    decimals = decimals_for(max((max(before, now) for before, now, _ in times), default=0) * 1e6)

    def ms(value: float) -> str:
        return f"{value:.{decimals}f}".replace("-", MINUS) if value else "0"

    def signed(value: float) -> str:
        shown = f"{value:+.{decimals}f}".replace("-", MINUS)
        return shown if shown.strip(f"+{MINUS}0.") else "0"  # too little for these decimals

    def spread(change: Change) -> str:
        if change.low_ms is None or change.high_ms is None:
            return ""
        return f"±{(change.high_ms - change.low_ms) / 2:.{decimals}f}"

    before = ("" if change.verdict == "new" else ms(change.judged_ms[0]) for change in rows)
    after = ("" if change.verdict == "gone" else ms(change.judged_ms[1]) for change in rows)
    percents = (change.judged_percent for change in rows)
    return [
        Column("other time", "before", numbers(before)),
        Column("other time", "after", numbers(after)),
        Column("change", "change", numbers(signed(by) for _, _, by in times), style="bold"),
        Column("change", "noise", numbers(map(spread, rows)), need=2, gap=1),
        Column(
            "share",
            "%",
            numbers("" if percent is None else _signed_percent(percent) for percent in percents),
            need=1,
        ),
        Column("verdict", "", [("text", change.verdict) for change in rows], least=16, left=True),
    ]


def _percent(value: float) -> str:
    """A share; one of noise can exceed any number, where the time before is nearly 0."""
    if value >= MANY_PERCENT:
        return f">{MANY_PERCENT:,}%"
    return f"{value:.1f}%" if value < 9.95 else f"{value:.0f}%"


def _signed_percent(value: float) -> str:
    if abs(value) < _LEAST_PERCENT:
        return "0%"
    return times_as_long(value) or f"{'+' if value > 0 else MINUS}{_percent(abs(value))}"


def _signed_time(ms: float) -> str:
    return f"{'+' if ms > 0 else MINUS if ms < 0 else ''}{duration(abs(ms) * 1e6)}"
