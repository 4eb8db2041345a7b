"""A comparison as text for a terminal: the answer, and the largest changes."""

from __future__ import annotations

from itertools import chain

from backspot.formatting import visible
from backspot.render._comparison import comparison_answer, left_out, recordings, tables
from backspot.render._terminal import fact_lines, lay_out, paragraph, sentence, space_for, written
from backspot.render.formats import Format
from backspot.render.parts import compared_by_parts
from backspot.render.view import DEFAULT_VIEW, View
from backspot.results.comparison import Comparison
from backspot.styled import Text

_VERDICTS = {
    "slower": "red",
    "longer": "red",
    "faster": "green",
    "shorter": "green",
    "within the noise": "dim",
    "undecided": "dim",
}


def render_comparison(
    comparison: Comparison,
    view: View = DEFAULT_VIEW,
    *,
    width: int | None = None,
    color: bool = False,
) -> str:
    """The comparison for a terminal: the answer, then the ``view.top`` largest changes."""
    width, whole = space_for(width)
    answer_text = sentence(comparison_answer(comparison), width, whole=whole)
    lines = [
        *paragraph(answer_text, width, whole=whole),
        *fact_lines(recordings(comparison), width),
    ]
    for note in comparison.notes:
        lines += paragraph(Text("! " + visible(note), "yellow"), width)
    for note_text in chain.from_iterable(compared_by_parts(comparison)):
        lines += paragraph(Text(visible(note_text)), width, whole=whole)
    for rows, columns in tables(comparison, view.top):
        styles = [_VERDICTS.get(change.verdict, "") for change in rows]
        lines += [Text(), *lay_out(columns, width, styles, whole=whole)]
    for clauses in left_out(comparison, view.top):
        text = Text(sentence(clauses, width, whole=whole).plain, "dim")
        lines += paragraph(text, width, whole=whole)
    return written(lines, width, color=color)


def _comparison_file(comparison: Comparison) -> bytes:
    return (render_comparison(comparison, View(top=None), width=100) + "\n").encode()


FORMATS = (Format(".txt", {Comparison: _comparison_file}),)
