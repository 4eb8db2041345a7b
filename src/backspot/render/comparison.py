"""A comparison as text, JSON and CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.text import Text

from backspot.comparison import Change, Comparison
from backspot.errors import UsageError
from backspot.render._table import Column, keep_end, lay_out
from backspot.render._writing import writing
from backspot.render.csv import cell
from backspot.render.json import encoded
from backspot.render.text import width_of, written
from backspot.words import counted, decimals_for, duration, visible

__all__ = ["render_text", "said", "save", "shown_columns", "table_note", "to_csv", "to_json"]

_STYLES = {"slower": "red", "faster": "green", "within the noise": "dim", "undecided": "dim"}
_MINUS = "\N{MINUS SIGN}"
_COLUMNS = (
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


def render_text(
    comparison: Comparison, *, width: int | None = None, top: int | None = 15, color: bool = False
) -> str:
    """The comparison for a terminal: the answer in a sentence, then the largest changes."""
    if top is not None and top < 0:
        raise UsageError(f"top={top}: give a number of rows of at least 0, or None for all")
    width = width_of(width)
    changes = [c for c in comparison.changes if c.before_ms or c.after_ms]
    hidden = [] if top is None else changes[top:]
    lines = [Text(said(comparison), "bold"), Text(table_note(comparison), "dim"), Text()]
    shown, columns = shown_columns(comparison, top)
    verdicts = [change.verdict for change in (*shown, comparison.whole)]
    lines += lay_out(columns, width, [_STYLES.get(verdict, "") for verdict in verdicts])
    if hidden:
        what = f"more {comparison.by}"
        lines.append(
            Text(
                f"{counted(len(hidden), what)} "
                f"{'changes' if len(hidden) == 1 else 'change'} by "
                f"{_signed_time(sum(c.change_ms for c in hidden))} in sum: --top {len(changes)}.",
                "dim",
            )
        )
    for move in comparison.moves[:5]:
        lines.append(
            Text(
                f"Moved: {visible(move.before) or '(root)'} → {visible(move.after) or '(root)'} "
                f"({counted(move.modules, 'module')})",
                "dim",
            )
        )
    if len(comparison.moves) > 5:
        lines.append(Text(f"{counted(len(comparison.moves) - 5, 'more move')}.", "dim"))
    lines += [Text("! " + visible(note), "yellow") for note in comparison.notes]
    return written(lines, width, color=color)


def table_note(comparison: Comparison) -> str:
    """What the numbers are, and of which recordings."""
    before, after = comparison.before, comparison.after
    return (
        f"Wall ms per step · before: {visible(before.trace) or 'a report'}, "
        f"{counted(before.steps, 'step')} · after: {visible(after.trace) or 'a report'}, "
        f"{counted(after.steps, 'step')}"
    )


def said(comparison: Comparison) -> str:
    """The answer in a sentence."""
    whole = comparison.whole
    was, now = duration(whole.before_ms * 1e6), duration(whole.after_ms * 1e6)
    share = "" if whole.percent is None else f"{_signed_percent(whole.percent)}, "
    if whole.verdict == "undecided":
        return (
            f"The backward took {was} per step before and {now} after ({share}"
            f"{_signed_time(whole.change_ms)}): too few steps to tell it from noise."
        )
    if not whole.claimed:
        text = f"No difference beyond the noise: the backward took {was} before, {now} after"
        text += f" ({share.removesuffix(', ')})" if share else ""
    else:
        by = f" by {_percent(abs(whole.percent))}" if whole.percent is not None else ""
        text = f"The backward got {whole.verdict}{by}: {was} before, {now} after, per step"
    same = [c for c in comparison.changes if c.claimed]
    if same:
        first = same[0]
        name = keep_end(visible(first.name), 60)
        text += f"; {name} got {first.verdict} by {duration(abs(first.change_ms) * 1e6)}"
        text += f", {counted(len(same) - 1, 'other')} changed too" if len(same) > 1 else ""
    elif whole.claimed and comparison.changes:
        first = comparison.changes[0]
        how = f" ({first.verdict})" if first.verdict in ("new", "gone") else ""
        text += (
            f"; the largest change is {keep_end(visible(_node(first)), 60)}{how}, "
            f"{_signed_time(first.change_ms)}"
        )
    return text + "."


def shown_columns(comparison: Comparison, top: int | None) -> tuple[Sequence[Change], list[Column]]:
    """The largest changes that cost anything, and a table of them whose last row is the whole."""
    shown = [c for c in comparison.changes if c.before_ms or c.after_ms][:top]
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

    names = [visible(_node(c)) for c in shown]
    columns = [
        Column(
            comparison.by,
            [*names, "the whole backward"],
            least=18,
            left=True,
            cut_start=comparison.by == "module",  # the end tells paths apart
            outlasts=3,
            style="cyan",
        ),
        Column("before", [ms(c.before_ms) if c.verdict != "new" else "" for c in rows]),
        Column("after", [ms(c.after_ms) if c.verdict != "gone" else "" for c in rows]),
        Column("change", [signed(c.change_ms) for c in rows], style="bold"),
        Column("noise", [spread(c) for c in rows], 2, gap=1),
        Column("%", ["" if c.percent is None else _signed_percent(c.percent) for c in rows], 1),
        Column("", [c.verdict for c in rows], least=16, left=True),
    ]
    if comparison.by == "module":
        classes = [*(visible(c.class_name) for c in shown), ""]
        columns.insert(1, Column("class", classes, 3, least=10, left=True))
    return shown, columns


def _node(change: Change) -> str:
    return change.name.removeprefix("torch::autograd::")


def _percent(value: float) -> str:
    return f"{value:.1f}%" if value < 9.95 else f"{value:.0f}%"


def _signed_percent(value: float) -> str:
    if not value:
        return "0%"
    return f"{'+' if value > 0 else _MINUS}{_percent(abs(value))}"


def _signed_time(ms: float) -> str:
    return f"{'+' if ms > 0 else _MINUS if ms < 0 else ''}{duration(abs(ms) * 1e6)}"


def to_json(comparison: Comparison) -> bytes:
    """The comparison as JSON in UTF-8, indented."""
    return encoded(comparison)


def to_csv(comparison: Comparison) -> bytes:
    """A header, the whole backward, and a line for each of its parts."""
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for change in (comparison.whole, *comparison.changes):
        values = [getattr(change, column) for column in _COLUMNS]
        writer.writerow(["" if value is None else cell(value) for value in values])
    return file.getvalue().encode()


def _to_text(comparison: Comparison) -> bytes:
    return (render_text(comparison, width=100, top=None) + "\n").encode()


_FORMS: dict[str, Callable[[Comparison], bytes]] = {
    ".csv": to_csv,
    ".json": to_json,
    ".txt": _to_text,
}


def save(comparison: Comparison, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write a comparison in the form that the suffix names; whole or not at all."""
    render = _FORMS.get(Path(path).suffix.lower())
    if render is None:
        raise UsageError(
            f"{visible(os.fspath(path))}: the name's end decides the form, "
            "and this one is none of .csv, .json or .txt"
        )
    with writing(path, force=force) as file:
        file.write(render(comparison))
    return Path(path)
