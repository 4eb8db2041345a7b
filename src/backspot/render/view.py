"""A view of a report: which rows it shows, and by which time it ranks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from backspot.results.costs import LineCost, NodeCost, OperatorCost, Row, Sort, time_of
from backspot.results.report import RANKINGS, By, Order, Report

Cost: TypeAlias = Row | NodeCost | OperatorCost | LineCost
"""What has a wall, a GPU and a CPU time."""

SCREEN_ROWS = 5
"""Modules for which a screen has room."""


@dataclass(frozen=True, slots=True)
class View:
    """How to look at a report; most are arguments of ``Report.top``.

    Attributes:
        top: how many modules (or autograd nodes, or changes) to show at most; ``None`` shows all.
        by: what makes a row: a module, a class, or a pattern of repeated layers.
        match: patterns of the module paths to keep.
        order: another thing than a time to rank by; then ``sort`` is the time that is shown first.
        preview: whether findings of preview rules are shown too.
        fewest: how many modules a screen shows at least, where it lacks room for what to do.
    """

    top: int | None = SCREEN_ROWS
    depth: int | None = None
    sort: Sort = "wall"
    by: By = "path"
    match: Sequence[str] | None = None
    order: Order | None = None
    fewest: int = 3
    preview: bool = False

    @property
    def is_of_time(self) -> bool:
        """Whether it ranks by a time."""
        ranking = RANKINGS.get(self.order or "")
        return ranking is None or ranking.is_time

    def ranked(self, report: Report) -> tuple[Row, ...]:
        """Return all rows, the most expensive first."""
        return report.top(
            depth=self.depth, sort=self.order or self.sort, by=self.by, match=self.match
        )

    def rows(self, report: Report) -> tuple[Row, ...]:
        """The ranked rows, with at most ``top`` modules; rows without an owner are all kept."""
        ranked = self.ranked(report)
        hidden = set()
        if self.top is not None:
            hidden = {id(row) for row in [row for row in ranked if row.is_module][self.top :]}
        return tuple(row for row in ranked if id(row) not in hidden)


DEFAULT_VIEW = View()


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows that a table shows, and what it leaves out.

    Attributes:
        shown: the ranked modules (or groups of modules).
        hidden: modules that cost something but rank below the limit.
        idle: number of modules that take no time in the backward.
        unowned: time that no module owns; it is not ranked among the modules.
    """

    shown: tuple[Row, ...]
    hidden: tuple[Row, ...]
    idle: int
    unowned: tuple[Row, ...]


def select(report: Report, view: View) -> Selection:
    """Choose the rows of a table; raises what ``Report.top`` does."""
    # Without rows this costs nothing, and it checks the view.
    replace(report, modules=()).top(view.top, depth=view.depth, sort=view.sort, by=view.by)
    ranked = view.ranked(report)
    worth = partial(_is_worth_a_line, report, view)
    modules = [row for row in ranked if row.is_module and worth(row)]
    limit = len(modules) if view.top is None else view.top
    return Selection(
        shown=tuple(modules[:limit]),
        hidden=tuple(modules[limit:]),
        idle=sum(row.members for row in ranked if row.is_module and not worth(row)),
        unowned=unowned_rows(ranked),
    )


def _is_worth_a_line(report: Report, view: View, row: Row) -> bool:
    ranking = RANKINGS.get(view.order or "")
    return costs_anything(row) or (ranking is not None and ranking.weight(report, row) > 0)


def unowned_rows(ranked: Sequence[Row]) -> tuple[Row, ...]:
    """The rows without a module that people should see, in the order of ``ranked``."""
    return tuple(row for row in ranked if not row.is_module and costs_anything(row))


def costs_anything(row: Row) -> bool:
    """Whether the row has any time of its own."""
    return bool(row.wall_ns or row.gpu_ns or row.cpu_ns)


def only_nodes(report: Report) -> bool:
    """Whether no module has any cost, so that only autograd nodes can be ranked."""
    return not any(row.is_module and costs_anything(row) for row in report.modules)


def operators_by(report: Report, sort: Sort) -> list[OperatorCost]:
    """The autograd nodes by name, the most expensive first."""
    sort = node_sort(sort)
    return sorted(report.operators, key=lambda op: (-time_of(op, sort), -op.wall_ns, op.name))


def share_of(report: Report, cost: Cost, sort: Sort) -> float:
    """The part (0 to 1) of the backward's time that a cost takes, or of the step that it saves."""
    if isinstance(cost, Row):
        return report.share(cost, sort)
    total_ns = time_of(report, sort)
    return time_of(cost, sort) / total_ns if total_ns else 0.0


def heaviest(row: Row, sort: Sort) -> NodeCost | None:
    """The node that takes most of the row's time, or ``None`` if it has no node."""
    by = node_sort(sort)
    return max(row.nodes, key=lambda node: time_of(node, by), default=None)


def heaviest_line(row: Row, sort: Sort) -> LineCost | None:
    """The source line that made most of the row's heaviest node, if the trace has lines."""
    node = heaviest(row, sort)
    lines = [line for line in row.lines if node is not None and line.node == node.name]
    return max(lines, key=lambda line: time_of(line, node_sort(sort)), default=None)


def node_sort(sort: Sort) -> Sort:
    """The time to rank nodes and lines by: what one of these saves is not known."""
    return "wall" if sort == "saves" else sort
