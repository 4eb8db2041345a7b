"""What a comparison says, in every output: the answer, the table of changes, and what it omits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backspot.comparison.changes import Change, Comparison
from backspot.errors import UsageError
from backspot.formatting import counted, decimals_for, duration, visible
from backspot.render._columns import Column, numbers
from backspot.render._sentences import Part
from backspot.trace.names import short_node_name

__all__ = ["FIELDS", "change_columns", "comparison_answer", "left_out", "recordings", "sides"]

_MINUS = "\N{MINUS SIGN}"
_MOVES = 5  # how many are named

FIELDS = (
    "kind",
    "path",
    "before_path",
    "class_name",
    "before_ms",
    "after_ms",
    "change_ms",
    "percent",
    "low_ms",
    "high_ms",
    "verdict",
)

"""The columns for programs (CSV), in order."""


def recordings(comparison: Comparison) -> list[str]:
    """The unit of the numbers and the two recordings, as a list of facts."""
    recorded = [f"{when}: {visible(name)}, {steps}" for when, name, steps in sides(comparison)]
    return ["wall ms per step", *recorded]


def sides(comparison: Comparison) -> list[tuple[str, str, str]]:
    """For each side: ``before`` or ``after``, its name, and its number of steps."""
    sides = (("before", comparison.before), ("after", comparison.after))
    return [(when, side.label, counted(side.steps, "step")) for when, side in sides]


def left_out(comparison: Comparison, shown: Sequence[Change]) -> Iterator[list[Part]]:
    """The sentences below the table: changes that it leaves out, and modules that moved."""
    changes = _costly(comparison)
    hidden = changes[len(shown) :]
    if hidden:
        number = counted(len(hidden), f"more {comparison.by}")
        verb = "changes" if len(hidden) == 1 else "change"
        time = _signed_time(sum(change.change_ms for change in hidden))
        yield [("text", f"{number} {verb} by {time} in total; see --top {len(changes)}.")]
    for move in comparison.moves[:_MOVES]:
        yield [
            ("text", "Moved: "),
            ("name", move.before or "(root)"),
            ("text", " → "),
            ("name", move.after or "(root)"),
            ("text", f" ({counted(move.modules, 'module')})."),
        ]
    if len(comparison.moves) > _MOVES:
        yield [("text", f"{counted(len(comparison.moves) - _MOVES, 'more move')}.")]


def comparison_answer(comparison: Comparison) -> list[Part]:
    """The answer in a sentence."""
    whole = comparison.whole
    was, now = duration(whole.before_ms * 1e6), duration(whole.after_ms * 1e6)
    share = "" if whole.percent is None else _signed_percent(whole.percent)
    if whole.verdict == "undecided":
        change = ", ".join(filter(None, [share, _signed_time(whole.change_ms)]))
        return [
            ("text", "The backward took "),
            ("number", was),
            ("text", " per step before and "),
            ("number", now),
            ("text", f" after ({change}): too few steps to tell it from noise."),
        ]
    if whole.claimed:
        parts: list[Part] = [("text", f"The backward got {whole.verdict}")]
        if whole.percent is not None:
            parts += [("text", " by "), ("number", _percent(abs(whole.percent)))]
        parts.append(("text", f": {was} before, {now} after, per step"))
    else:
        change = f" ({share})" if share else ""
        parts = [
            ("text", "No difference beyond the noise: the backward took "),
            ("number", was),
            ("text", " before, "),
            ("number", now),
            ("text", f" after{change}"),
        ]
    return [*parts, *_first_change(comparison), ("text", ".")]


def _first_change(comparison: Comparison) -> Iterator[Part]:
    """The part that changed most; a part that changed beyond the noise comes first."""
    claimed = [change for change in comparison.changes if change.claimed]
    if not claimed and not (comparison.whole.claimed and comparison.changes):
        return
    first = (claimed or comparison.changes)[0]
    name: Part = ("node" if first.kind == "node" else "name", short_node_name(first.name))
    if claimed:
        yield from (("text", "; "), name, ("text", f" got {first.verdict} by "))
        yield ("number", duration(abs(first.change_ms) * 1e6))
        if len(claimed) > 1:
            yield ("text", f", {counted(len(claimed) - 1, 'other')} changed too")
        return
    how = f" ({first.verdict})" if first.verdict in ("new", "gone") else ""
    yield from (("text", "; the largest change is "), name, ("text", f"{how}, "))
    yield ("number", _signed_time(first.change_ms))


def _costly(comparison: Comparison) -> list[Change]:
    return [change for change in comparison.changes if change.before_ms or change.after_ms]


def change_columns(
    comparison: Comparison, top: int | None
) -> tuple[Sequence[Change], list[Column]]:
    """The ``top`` largest changes, and their table; its last row is the whole backward."""
    if top is not None and top < 0:
        raise UsageError(f"top={top}: give a number of rows of at least 0, or None for all")
    shown = _costly(comparison)[:top]
    rows = [*shown, comparison.whole]
    decimals = decimals_for(max(max(c.before_ms, c.after_ms) for c in rows) * 1e6)

    def ms(value: float) -> str:
        return f"{value:.{decimals}f}" if value else "0"

    def signed(value: float) -> str:
        return f"{value:+.{decimals}f}".replace("-", _MINUS) if value else "0"

    def spread(change: Change) -> str:
        if change.low_ms is None or change.high_ms is None:
            return ""
        return f"±{(change.high_ms - change.low_ms) / 2:.{decimals}f}"

    names: list[Part] = [
        ("name" if change.kind in ("module", "node") else "text", short_node_name(change.name))
        for change in shown
    ]
    classes: list[Part] = [*(("name", change.class_name) for change in shown), ("name", "")]
    before = numbers(ms(c.before_ms) if c.verdict != "new" else "" for c in rows)
    after = numbers(ms(c.after_ms) if c.verdict != "gone" else "" for c in rows)
    percents = numbers("" if c.percent is None else _signed_percent(c.percent) for c in rows)
    columns = [
        Column(
            "name",
            comparison.by,
            [*names, ("text", "the whole backward")],
            least=18,
            left=True,
            cut_start=comparison.by == "module",  # the end of a path identifies it
            outlasts=3,
            style="cyan",
        ),
        Column("class", "class", classes, need=3, least=10, left=True),
        Column("other time", "before", before),
        Column("other time", "after", after),
        Column("change", "change", numbers(signed(c.change_ms) for c in rows), style="bold"),
        Column("change", "noise", numbers(map(spread, rows)), need=2, gap=1),
        Column("share", "%", percents, need=1),
        Column("verdict", "", [("text", c.verdict) for c in rows], least=16, left=True),
    ]
    if comparison.by != "module":
        columns = [column for column in columns if column.kind != "class"]
    return shown, columns


def _percent(value: float) -> str:
    return f"{value:.1f}%" if value < 9.95 else f"{value:.0f}%"


def _signed_percent(value: float) -> str:
    if not value:
        return "0%"
    return f"{'+' if value > 0 else _MINUS}{_percent(abs(value))}"


def _signed_time(ms: float) -> str:
    return f"{'+' if ms > 0 else _MINUS if ms < 0 else ''}{duration(abs(ms) * 1e6)}"
