"""A module with the modules inside it as text for a terminal: a tree of times."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from backspot.formatting import duration, percent, visible
from backspot.render._columns import Column, milliseconds_of, node_cells, numbers
from backspot.render._terminal import keep_end, lay_out, paragraph, space_for, written
from backspot.render._words import Part
from backspot.results.costs import Row
from backspot.results.grouping import Subtree

__all__ = ["render_subtree"]

_INDENT = 24


def render_subtree(subtree: Subtree, *, width: int | None = None, color: bool = False) -> str:
    """A module with the modules inside it, as a tree; shares are of the module's own total."""
    width, uncut = space_for(width)
    placed = [(subtree.row.name, subtree.row), *_placed(subtree)]
    rows = [row for _, row in placed]
    whole = subtree.row.total_wall_ns
    ms = milliseconds_of(whole)
    names: list[Part] = [("name", name) for name, _ in placed]
    classes: list[Part] = [("name", row.class_name) for row in rows]
    total = numbers(ms(row.total_wall_ns) for row in rows)
    shares = numbers(percent(row.total_wall_ns / whole if whole else 0) for row in rows)
    own = numbers(ms(row.wall_ns) for row in rows)
    gpu = numbers(ms(row.total_gpu_ns) for row in rows)
    cpu = numbers(ms(row.total_cpu_ns) for row in rows)
    nodes = node_cells(rows, "wall")
    columns = [
        Column("name", "module", names, least=24, left=True, outlasts=4, style="cyan"),
        Column("class", "class", classes, need=4, least=10, left=True),
        Column("time", "total ms", total, style="bold"),
        Column("share", "share", shares, need=1),
        Column("other time", "own", own, full_head="own ms", need=2),
        Column("other time", "GPU", gpu, full_head="GPU ms", need=5),
        Column("other time", "CPU", cpu, full_head="CPU ms", need=6),
        Column("node", "heaviest node", nodes, need=3, least=15, left=True),
    ]
    if not subtree.row.total_gpu_ns:
        columns = [column for column in columns if column.cells is not gpu]
    label = visible(subtree.row.label)
    if not uncut:
        label = keep_end(label, min(width, 80))
    what = (
        f"{label}: {duration(whole)} of the backward per step, "
        f"{duration(subtree.row.wall_ns)} of it in the module itself"
    )
    lines = [*paragraph(Text(what, "bold"), width, whole=uncut), Text()]
    lines += lay_out(columns, width, whole=uncut)
    return written(lines, width, color=color)


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
