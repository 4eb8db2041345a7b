"""A comparison as text, Markdown, JSON and CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.text import Text

from backspot.comparison.changes import Change, Comparison
from backspot.errors import UsageError
from backspot.formatting import counted, decimals_for, duration, visible
from backspot.paths import path_text
from backspot.render._sentences import Part
from backspot.render._terminal import Column, fact_lines, lay_out
from backspot.render.files import check_target, writing
from backspot.render.json import encoded
from backspot.render.markdown import as_code, as_sentence, as_table, as_text
from backspot.render.tables import cell
from backspot.render.text import sentence, width_of, written

__all__ = [
    "recordings",
    "render_text",
    "said",
    "save",
    "shown_columns",
    "to_csv",
    "to_json",
    "to_markdown",
]

_STYLES = {"slower": "red", "faster": "green", "within the noise": "dim", "undecided": "dim"}
_MINUS = "\N{MINUS SIGN}"
_MOVES = 5  # how many are named
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
    width = width_of(width)
    shown, columns = shown_columns(comparison, top)
    verdicts = [change.verdict for change in (*shown, comparison.whole)]
    lines = [sentence(said(comparison), width), *fact_lines(recordings(comparison), width)]
    lines += [Text("! " + visible(note), "yellow") for note in comparison.notes]
    lines.append(Text())
    lines += lay_out(columns, width, [_STYLES.get(verdict, "") for verdict in verdicts])
    for parts in _left_out(comparison, shown):
        lines.append(Text(sentence(parts, width).plain, "dim"))
    return written(lines, width, color=color)


def to_markdown(comparison: Comparison, *, top: int | None = 30) -> bytes:
    """The comparison as GitHub's Markdown, in UTF-8: the answer, then the largest changes.

    No name can leave its cell, start a tag or a link, or call upon anybody.
    """
    shown, columns = shown_columns(comparison, top)
    sides = [f"{when}: {as_code(name)}, {steps}" for when, name, steps in _sides(comparison)]
    named = {0, len(columns) - 1} | {1 for column in columns if column.head == "class"}
    body = []
    for index, change in enumerate((*shown, comparison.whole)):
        name, *cells = (column.cells[index] for column in columns)
        is_name = change.kind in ("module", "node")
        cells = [
            as_code(cell) if column.head == "class" and cell else as_text(cell)
            for column, cell in zip(columns[1:], cells, strict=True)
        ]
        if change.claimed:
            cells[-1] = f"**{cells[-1]}**"
        body.append([as_code(name) if is_name else as_text(name), *cells])
    lines = [
        f"**{as_sentence(said(comparison))}**",
        "",
        f"Wall ms per step; {'; '.join(sides)}.",
        "",
        *(f"- Warning: {as_text(note)}" for note in comparison.notes),
        *([""] if comparison.notes else []),
        *as_table([column.head or "verdict" for column in columns], body, names=named),
        "",
        *(as_sentence(parts) for parts in _left_out(comparison, shown)),
    ]
    return ("\n".join(lines).rstrip("\n") + "\n").encode()


def recordings(comparison: Comparison) -> list[str]:
    """What the numbers are, and of which recordings, fact by fact."""
    sides = [f"{when}: {visible(name)}, {steps}" for when, name, steps in _sides(comparison)]
    return ["wall ms per step", *sides]


def _sides(comparison: Comparison) -> list[tuple[str, str, str]]:
    """When each was recorded, what it is called, and how many steps it holds."""
    sides = (("before", comparison.before), ("after", comparison.after))
    return [(when, side.label, counted(side.steps, "step")) for when, side in sides]


def _left_out(comparison: Comparison, shown: Sequence[Change]) -> Iterator[list[Part]]:
    """What stands below the table: changes that it leaves out, and modules that moved."""
    changes = _costly(comparison)
    hidden = changes[len(shown) :]
    if hidden:
        number = counted(len(hidden), f"more {comparison.by}")
        verb = "changes" if len(hidden) == 1 else "change"
        time = _signed_time(sum(change.change_ms for change in hidden))
        yield [("text", f"{number} {verb} by {time} in sum: --top {len(changes)}.")]
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


def said(comparison: Comparison) -> list[Part]:
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
    """Which part of it changed most, beyond the noise if there is one."""
    claimed = [change for change in comparison.changes if change.claimed]
    if not claimed and not (comparison.whole.claimed and comparison.changes):
        return
    first = (claimed or comparison.changes)[0]
    name: Part = ("node" if first.kind == "node" else "name", _node(first))
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


def shown_columns(comparison: Comparison, top: int | None) -> tuple[Sequence[Change], list[Column]]:
    """The largest changes that cost anything, and a table of them whose last row is the whole."""
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
    ".md": to_markdown,
    ".txt": _to_text,
}


def save(comparison: Comparison, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write a comparison in the form that the suffix names; whole or not at all."""
    shown = visible(path_text(path, "save"))
    render = _FORMS.get(Path(path).suffix.lower())
    if render is None:
        raise UsageError(
            f"{shown}: the name's end decides the form, "
            "and this one is none of .csv, .json, .md or .txt"
        )
    sources = (comparison.before.trace, comparison.after.trace)
    check_target(path, force=force, sources=sources)
    data = render(comparison)
    with writing(path, force=force, sources=sources) as file:
        file.write(data)
    return Path(path)
