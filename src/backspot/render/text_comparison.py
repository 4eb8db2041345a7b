"""A comparison as text for a terminal: the answer, and the largest changes."""

from __future__ import annotations

from rich.text import Text

from backspot.formatting import visible
from backspot.render._comparison import (
    change_columns,
    comparison_answer,
    left_out,
    of_step,
    rank_columns,
    recordings,
    step_columns,
)
from backspot.render._terminal import fact_lines, lay_out, paragraph, sentence, space_for, written
from backspot.render.formats import Format
from backspot.render.view import DEFAULT_VIEW, View
from backspot.results.comparison import Comparison

__all__ = ["FORMATS", "render_comparison"]

_VERDICTS = {"slower": "red", "faster": "green", "within the noise": "dim", "undecided": "dim"}


def render_comparison(
    comparison: Comparison,
    view: View = DEFAULT_VIEW,
    *,
    width: int | None = None,
    color: bool = False,
) -> str:
    """The comparison for a terminal: the answer, then the ``view.top`` largest changes."""
    width, whole = space_for(width)
    shown, columns = change_columns(comparison, view.top)
    verdicts = [change.verdict for change in (*shown, comparison.whole)]
    said = sentence(comparison_answer(comparison), width, whole=whole)
    lines = [*paragraph(said, width, whole=whole), *fact_lines(recordings(comparison), width)]
    for note in comparison.notes:
        lines += paragraph(Text("! " + visible(note), "yellow"), width)
    if phases := of_step(comparison):
        styles = [_VERDICTS.get(phase.verdict, "") for phase in phases]
        lines += [Text(), *lay_out(step_columns(comparison), width, styles)]
    ranks, of_ranks = rank_columns(comparison)
    if ranks:
        styles = [_VERDICTS.get(rank.verdict, "") for rank in ranks]
        lines += [Text(), *lay_out(of_ranks, width, styles)]
    lines.append(Text())
    styles = [_VERDICTS.get(verdict, "") for verdict in verdicts]
    lines += lay_out(columns, width, styles, whole=whole)
    for parts in left_out(comparison, shown):
        text = Text(sentence(parts, width, whole=whole).plain, "dim")
        lines += paragraph(text, width, whole=whole)
    return written(lines, width, color=color)


def _comparison_file(comparison: Comparison) -> bytes:
    return (render_comparison(comparison, View(top=None), width=100) + "\n").encode()


FORMATS = (Format(".txt", {Comparison: _comparison_file}),)
