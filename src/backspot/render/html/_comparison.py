"""A comparison as a page: the answer, each recording as a dot, and the tables of changes.

All of it is there without a script. Notebooks show the same answer and tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backspot._version import __version__
from backspot.formatting import duration, visible
from backspot.render._comparison import (
    comparison_answer,
    left_out,
    plain,
    recordings,
    tables,
    title_of,
)
from backspot.render._sections import Column
from backspot.render.html._fragments import facts_list, page, sentence, shown, warnings_list
from backspot.render.parts import compared_by_parts
from backspot.results.comparison import Change, Comparison

_ROWS = 60
_DOTS = 12
"""Changes whose recordings are drawn."""
_CLASSES = {"slower": "slower", "longer": "slower", "faster": "faster", "shorter": "faster"}


def comparison_to_html(comparison: Comparison) -> bytes:
    """The comparison as a page in UTF-8, which loads nothing."""
    answer = comparison_answer(comparison)
    left_out_text = "".join(
        f"<p>{sentence(clauses)}</p>" for clauses in left_out(comparison, _ROWS)
    )
    main = (
        f'<section class="answer" aria-label="The answer"><h1>{sentence(answer)}</h1>'
        f"{facts_list([*recordings(comparison), f'Backspot {__version__}'])}"
        f"{warnings_list(comparison.notes)}</section>",
        said_by_parts(comparison),
        _recordings(comparison),
        f'<section id="modules"><h2>Changes</h2>{"".join(change_tables(comparison, _ROWS))}'
        f"{left_out_text}</section>",
    )
    return page(
        f"{visible(plain(answer))[:100]} · Backspot",
        f"{comparison.before.label} and {comparison.after.label}",
        "".join(main),
        "Times are means per step, in ms; noise is half of the interval of the change.",
        styles=("comparison.css",),
    )


def said_by_parts(comparison: Comparison) -> str:
    """What parts say of a comparison: lists with their headings."""
    return "".join(
        f'<section class="told"><p>{shown(heading)}</p>'
        f"<ul>{''.join(f'<li>{shown(text)}</li>' for text in sentences)}</ul></section>"
        for heading, *sentences in compared_by_parts(comparison)
    )


def change_tables(comparison: Comparison, top: int) -> Iterator[str]:
    """The tables of a comparison."""
    for rows, columns in tables(comparison, top):
        yield _table(rows, columns)


def _table(changes: Sequence[Change], columns: Sequence[Column]) -> str:
    """A row for each change; the first column is its name. It may be wider than its place."""
    head = "".join(
        f'<th scope="col"{_class(column)}>{shown(column.head)}</th>' for column in columns
    )
    lines = []
    for index, change in enumerate(changes):
        cells = "".join(
            f"<td{_class(column)}>{shown(column.cells[index][1])}</td>" for column in columns[1:]
        )
        name = f'<th scope="row"><code>{shown(columns[0].cells[index][1])}</code></th>'
        usual = "" if change.verdict in ("new", "gone") else "muted"
        kind = _CLASSES.get(change.verdict, usual)
        lines.append(f'<tr class="{kind}">{name}{cells}</tr>')
    return (
        f'<div class="scroll"><table class="changes"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _class(column: Column) -> str:
    """Numbers are aligned right; classes of modules go where a cell is narrow."""
    return ' class="o2"' if column.kind == "class" else "" if column.left else ' class="n"'


def _recordings(comparison: Comparison) -> str:
    """What the step and the largest changes take in each recording, if a side has several."""
    if comparison.before.recordings == comparison.after.recordings == 1:
        return ""
    changes = [change for change in comparison.changes if change.differs] or [*comparison.changes]
    drawn = [comparison.step, comparison.whole, *changes][:_DOTS]
    rows = "".join(_dots(change) for change in drawn if change.before_ms_by_recording)
    return (
        '<section class="recordings"><h2>Each recording</h2><ul class="legend">'
        '<li><i class="before"></i>before</li><li><i class="after"></i>after</li></ul>'
        f"<dl>{rows}</dl></section>"
    )


def _dots(change: Change) -> str:
    """A line from 0 to the longest, with a dot for each recording."""
    sides = (("before", change.before_ms_by_recording), ("after", change.after_ms_by_recording))
    longest = max((ms for _, times in sides for ms in times), default=0.0)
    if not longest:
        return ""
    drawn = "".join(
        f'<circle class="{side}" cx="{ms / longest * 100:.2f}%" cy="{row}" r="5">'
        f"<title>{side}: {shown(duration(ms * 1e6))}</title></circle>"
        for row, (side, times) in zip((9, 21), sides, strict=True)
        for ms in times
    )
    label = "; ".join(
        f"{side} {', '.join(duration(ms * 1e6) for ms in times)}" for side, times in sides
    )
    return (
        f"<dt>{shown(title_of(change))}</dt><dd>"
        f'<svg role="img" aria-label="{shown(label)}">'
        f'<line x1="0" x2="100%" y1="15" y2="15"/>{drawn}</svg>'
        f'<span class="muted n">{shown(duration(longest * 1e6))}</span></dd>'
    )
