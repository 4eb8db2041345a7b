"""Text for a terminal: source lines, and a module with those inside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backspot.formatting import duration, percent, visible
from backspot.render._columns import node_cells
from backspot.render._facts import told_apart
from backspot.render._sections import Column, milliseconds_of, numbers
from backspot.render._terminal import (
    keep_end,
    keep_start,
    lay_out,
    paragraph,
    space_for,
    written,
)
from backspot.render._words import Part, made_by
from backspot.render.view import heaviest_line
from backspot.results.costs import LineCost, Row, Sort
from backspot.results.grouping import Subtree
from backspot.styled import Text, cell_len
from backspot.trace.names import short_node_name

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
    shown_lines: dict[tuple[str, str], LineCost] = {}
    for rank, row in enumerate(shown, 1):
        line = heaviest_line(row, sort)
        if line is not None and (
            (line.node, line.place) in shown_lines or len(shown_lines) < _LINES
        ):
            shown_lines[line.node, line.place] = line
            ranks.setdefault((line.node, line.place), []).append(rank)
    if not shown_lines:
        return []
    lines = shown_lines.values()
    head = "made by" if all(line.exact for line in lines) else "called at"
    rows = numbers(map(_spans, ranks.values()))
    nodes: list[Part] = [("node", short_node_name(line.node)) for line in lines]
    places: list[Part] = [("name", line.place) for line in lines]
    texts: list[Part] = [("name", line.text) for line in lines]
    columns = [
        Column("rank", "#", rows, least=6, left=True, style="dim"),
        Column("node", "slowest node", nodes, least=14, left=True),
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


_INDENT = 24


def render_subtree(subtree: Subtree, *, width: int | None = None) -> str:
    """A module with the modules inside it, as a tree; shares are of its total with these."""
    width, uncut = space_for(width)
    placed = [(subtree.row.name, subtree.row), *_placed(subtree)]
    rows = [row for _, row in placed]
    subtree_ns = subtree.row.total_wall_ns
    ms = milliseconds_of(subtree_ns)
    names: list[Part] = [("name", name) for name, _ in placed]
    classes: list[Part] = [("name", row.class_name) for row in rows]
    total = numbers(ms(row.total_wall_ns) for row in rows)
    shares = numbers(percent(row.total_wall_ns / subtree_ns if subtree_ns else 0) for row in rows)
    own = numbers(ms(row.wall_ns) for row in rows)
    gpu = numbers(ms(row.total_gpu_ns) for row in rows)
    cpu = numbers(ms(row.total_cpu_ns) for row in rows)
    nodes = node_cells(rows, "wall")
    columns = [
        Column("name", "module", names, least=24, left=True, outlasts=3, style="cyan"),
        Column("class", "class", classes, need=4, least=10, left=True),
        Column("time", "total ms", total, style="bold"),
        Column("share", "share", shares, need=1),
        Column("other time", "own", own, full_head="own ms", need=2),
        Column("other time", "GPU", gpu, full_head="GPU ms", need=5),
        Column("other time", "CPU", cpu, full_head="CPU ms", need=6),
        Column("node", "slowest node", nodes, need=3, least=15, left=True),
    ]
    if not subtree.row.total_gpu_ns:
        columns = [column for column in columns if column.cells is not gpu]
    label = visible(subtree.row.label)
    if not uncut:
        label = keep_end(label, min(width, 80))
    heading = f"{label}: {duration(subtree_ns)} of the backward per step"
    if subtree.children:
        heading += f", {duration(subtree.row.wall_ns)} of it in the module itself"
    lines = [*paragraph(Text(heading, "bold"), width, whole=uncut)]
    if saves := told_apart(subtree.row.total_saves):
        lines += paragraph(Text(f"Without it, a step would take {saves}."), width, whole=uncut)
    lines += [Text(), *lay_out(columns, width, whole=uncut)]
    return written(lines, width, color=False)


def _placed(subtree: Subtree) -> Iterator[tuple[str, Row]]:
    """Each module below, as its branch and the part of its name that its parent does not have."""
    left = _branches("", subtree)
    while left:
        lead, parent, child, last = left.pop()
        fork, below = ("└─ ", "   ") if last else ("├─ ", "│  ")
        name = child.row.path.removeprefix(f"{parent.row.path}.")
        yield lead + fork + name, child.row
        lead += below
        if len(lead) > _INDENT:  # else the branches leave no room for names
            lead = "…" + lead[1 - _INDENT :]
        left += _branches(lead, child)


def _branches(lead: str, of: Subtree) -> list[tuple[str, Subtree, Subtree, bool]]:
    """The direct children, the last one first: their indent, parent, child, whether it is last."""
    return [(lead, of, child, child is of.children[-1]) for child in reversed(of.children)]
