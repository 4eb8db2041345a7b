"""Source lines as text for a terminal: that of the answer, and the table of those of modules."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from backspot.formatting import visible
from backspot.render._columns import Column, numbers
from backspot.render._terminal import keep_end, keep_start, lay_out
from backspot.render._words import Part, made_by
from backspot.render.view import heaviest_line
from backspot.results.costs import LineCost, Row, Sort
from backspot.trace.names import short_node_name

__all__ = ["line_of_answer", "lines_table"]

_LINES = 5  # how many lines of source are shown


def line_of_answer(row: Row, sort: Sort, width: int, *, whole: bool) -> list[Text]:
    """Below the answer, the source line that made its node."""
    line = heaviest_line(row, sort)
    if line is None:
        return []
    lead = "  ← " + made_by(line).removesuffix(line.place)
    shown = visible(line.place)
    if not whole:
        shown = keep_end(shown, width - len(lead))
    text = Text(lead, no_wrap=True)
    text.append(shown, "green")
    left = width - cell_len(lead + shown) - 2
    if line.text and left >= 12:
        text.append("  " + keep_start(visible(line.text), left), "dim")
    return [text]


def lines_table(shown: Sequence[Row], sort: Sort, width: int, *, whole: bool) -> list[Text]:
    """The source lines that made the heaviest nodes of the first modules."""
    ranks: dict[tuple[str, str], list[int]] = {}
    known: dict[tuple[str, str], LineCost] = {}
    for rank, row in enumerate(shown, 1):
        line = heaviest_line(row, sort)
        if line is not None and ((line.node, line.place) in known or len(known) < _LINES):
            known[line.node, line.place] = line
            ranks.setdefault((line.node, line.place), []).append(rank)
    if not known:
        return []
    lines = known.values()
    head = "made by" if all(line.exact for line in lines) else "called at"
    rows = numbers(map(_spans, ranks.values()))
    nodes: list[Part] = [("node", short_node_name(line.node)) for line in lines]
    places: list[Part] = [("name", line.place) for line in lines]
    texts: list[Part] = [("name", line.text) for line in lines]
    columns = [
        Column("rank", "#", rows, least=6, left=True, style="dim"),
        Column("node", "heaviest node", nodes, least=14, left=True),
        Column("line", head, places, least=20, left=True, cut_start=True, style="green"),
        Column("line", "source", texts, need=1, least=24, left=True),
    ]
    return [Text(), *lay_out(columns, width, whole=whole)]


def _spans(ranks: Sequence[int]) -> str:
    """Ascending numbers as people write them: ``1,3–5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return ",".join("–".join(map(str, span)) for span in spans)
