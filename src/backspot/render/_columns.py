"""The tables of a report: their columns, in order, with every cell.

Each output lays out the same columns in its own way and may leave some out. A column that is added
here appears in all of them; for CSV and pandas, add its field to ``FIELDS``. Those of a part are
with what it says: ``parts.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from backspot.formatting import percent
from backspot.render._sections import UNKNOWN, Column, Fields, Value, milliseconds_of, numbers
from backspot.render._words import Part, made_by
from backspot.render.parts import columns_of_parts, fields_of_parts
from backspot.render.view import (
    Cost,
    View,
    heaviest,
    heaviest_line,
    node_sort,
    share_of,
)
from backspot.results.costs import OperatorCost, Row, Sort, half_spread, time_of
from backspot.results.report import Report
from backspot.trace.names import short_node_name

TITLES: dict[Sort, str] = {"wall": "wall", "gpu": "GPU", "cpu": "CPU", "saves": "saves"}


def module_columns(
    report: Report, shown: Sequence[Row], unowned: Sequence[Row], view: View
) -> list[Column]:
    """The table of modules (or of groups of modules), with rows that no module owns below them."""
    rows = [*shown, *unowned]
    sort = view.sort
    largest = max((max(row.wall_ns, time_of(row, sort)) for row in rows), default=0)
    ms = milliseconds_of(largest)
    unknown = [UNKNOWN if row.is_module else "" for row in rows]
    saving = numbers(
        dash if row.saves is None else ms(row.saves.ns)
        for row, dash in zip(rows, unknown, strict=True)
    )

    def of_modules(value: Callable[[Row], object]) -> list[Part]:
        return numbers(value(row) if row.is_module else "" for row in rows)

    # Layers of several classes may have one pattern: netD.* (Conv2d) and netD.* (LeakyReLU).
    alike = Counter(row.name for row in shown)
    columns = [
        Column(
            "rank",
            "#",
            numbers(index + 1 if index < len(shown) else "" for index in range(len(rows))),
            style="dim",
        ),
        Column(
            "name",
            "class" if view.by == "class" else "module",
            [
                ("name", row.label if alike[row.name] > 1 else row.name)
                if row.is_module
                else ("text", row.name)
                for row in rows
            ],
            least=20,
            left=True,
            cut_start=True,
            outlasts=3,
            style="cyan",
        ),
    ]
    if view.by != "class":
        classes: list[Part] = [("name", row.class_name if row.is_module else "") for row in rows]
        columns.append(Column("class", "class", classes, need=5, least=11, left=True))
    if view.by != "path":
        columns.append(Column("members", "modules", of_modules(lambda row: row.members), need=3))
    of_parts = columns_of_parts(report, rows, view, ms)
    columns += [column for column in of_parts if column.leads]
    time, share, *costs = _cost_columns(report, rows, sort, ms, bar_need=7, other_need=2)
    if sort == "saves":
        time = replace(time, cells=saving)
    columns += [time, *_spread_column(report, rows, sort, ms), share]
    if sort != "saves" and (report.replayed_step or report.not_replayed):
        # A column of dashes gives way to all others; the note below the table says as much.
        need = 1 if any(row.saves for row in shown) else 20
        columns.append(Column("saves", "saves", saving, full_head="saves ms", need=need))
    columns += costs
    columns += [column for column in of_parts if not column.leads]
    if any(row.recompute_ns for row in rows):
        again = numbers(ms(row.recompute_ns) for row in rows)
        columns.append(Column("recompute", "recompute", again, full_head="recompute ms", need=9))
    if any(row.split_ns for row in rows):
        exact = of_modules(lambda row: percent(row.exact_share))
        columns.append(Column("exact", "exact", exact, need=8))
    columns.append(Column("calls", "calls", of_modules(lambda row: _calls(row.calls)), need=6))
    if any(row.forward_ns for row in rows):
        forward = of_modules(lambda row: ms(row.forward_ns))
        need = 1 if _forward_decides(report) else 8
        columns.append(Column("forward", "forward", forward, full_head="forward ms", need=need))
    return columns + _node_columns(rows, sort, ms)


def _forward_decides(report: Report) -> bool:
    """Whether the answer is a module of which the time of its backward is the smaller part."""
    subject = report.answer
    place = subject.path, subject.class_name
    rows = (*report.modules, *report.top(by="pattern"))
    row = next((row for row in rows if (row.path, row.class_name) == place), None)
    return subject.kind == "module" and row is not None and row.wall_ns < row.forward_ns


_FEWEST = 3
"""From this number of steps, the table shows how much they vary."""


def _spread_column(
    report: Report, rows: Sequence[Row], sort: Sort, ms: Callable[[int], str]
) -> list[Column]:
    """How much the time to rank by varies: half the width of the middle half of the steps."""
    if report.steps < _FEWEST or sort == "saves":
        return []
    spreads = numbers(ms(half_spread(getattr(row, f"{sort}_ns_by_step"))) for row in rows)
    return [Column("spread", "±", spreads, full_head="± ms", need=10, gap=1, style="dim")]


def operator_columns(report: Report, operators: Sequence[OperatorCost], sort: Sort) -> list[Column]:
    """The table of autograd nodes by name, for traces that name no modules."""
    sort = node_sort(sort)
    largest = max((time_of(operator, sort) for operator in operators), default=0)
    ms = milliseconds_of(largest)
    names: list[Part] = [("node", short_node_name(operator.name)) for operator in operators]
    return [
        Column("rank", "#", numbers(range(1, len(operators) + 1)), style="dim"),
        Column("name", "autograd node", names, least=20, left=True),
        *_cost_columns(report, operators, sort, ms, bar_need=4, other_need=1),
        Column("count", "count", numbers(operator.count for operator in operators), need=2),
    ]


def _cost_columns(
    report: Report,
    costs: Sequence[Cost],
    sort: Sort,
    ms: Callable[[int], str],
    *,
    bar_need: int,
    other_need: int,
) -> list[Column]:
    """The time to rank by, its share, the share as a bar, and the other times."""
    shares = [share_of(report, cost, sort) for cost in costs]
    longest = max(shares, default=0.0) or 1.0

    def times(kind: Sort) -> list[Part]:
        return numbers(ms(time_of(cost, kind)) for cost in costs)

    columns = [
        Column("time", TITLES[sort], times(sort), full_head=f"{TITLES[sort]} ms", style="bold"),
        Column("share", "share", numbers(map(percent, shares)), gap=1),
        Column(
            "bar",
            "",
            numbers("" for _ in costs),
            bars=[share / longest for share in shares],
            need=bar_need,
            least=6,
            gap=1,
            style="red",
        ),
    ]
    others = [kind for kind in TITLES if kind not in (sort, "saves")]
    for index, kind in enumerate(others):
        if kind != "gpu" or report.has_gpu:
            title, need = TITLES[kind], other_need + 2 * index
            columns.append(
                Column("other time", title, times(kind), full_head=f"{title} ms", need=need)
            )
    return columns


def _node_columns(rows: Sequence[Row], sort: Sort, ms: Callable[[int], str]) -> list[Column]:
    """Each row's heaviest node, its time, and the source line that made it."""
    sort = node_sort(sort)
    nodes = [heaviest(row, sort) for row in rows]
    lines = [heaviest_line(row, sort) for row in rows]
    times = numbers(ms(time_of(node, sort)) if node else "" for node in nodes)
    columns = [
        Column(
            "node",
            "slowest node",
            node_cells(rows, sort),
            need=3,
            least=14,
            left=True,
            outlasts=6,
            ample=20,
        ),
        Column("node time", "", times, full_head="ms", need=3, gap=1),
    ]
    if any(lines):
        line_names: list[Part] = [("name", made_by(line) if line else "") for line in lines]
        hints = [line.text if line else "" for line in lines]
        columns.append(Column("line", "made by", line_names, hints, left=True))
    return columns


def _calls(calls: float) -> str:
    return f"{calls:,.0f}" if calls == int(calls) else f"{calls:,.1f}"


def node_cells(rows: Sequence[Row], sort: Sort) -> list[Part]:
    """The name of each row's heaviest node."""
    nodes = [heaviest(row, sort) for row in rows]
    return [("node", short_node_name(node.name) if node else "") for node in nodes]


_OF_ROW = (
    "path",
    "class_name",
    "root",
    "is_module",
    "members",
    "calls",
    "wall_ns",
    "recorded_wall_ns",
    "gpu_ns",
    "cpu_ns",
    "forward_ns",
    "recompute_ns",
    "total_wall_ns",
    "total_gpu_ns",
    "total_cpu_ns",
    "total_forward_ns",
    "total_recompute_ns",
)
_IN_MS = ("wall", "gpu", "cpu", "forward")
_OF_SAVES = ("saves_ns", "saves_low_ns", "saves_high_ns", "total_saves_ns")
FIELDS = (
    *_OF_ROW,
    *(f"{time}_ms" for time in _IN_MS),
    "wall_spread_ns",
    "exact_share",
    *_OF_SAVES,
    "wall_share",
    "heaviest_node",
    "heaviest_node_wall_ns",
    "heaviest_node_line",
)
"""The columns for programs (CSV and pandas), in order."""


def fields_of(report: Report) -> tuple[str, ...]:
    """``FIELDS``, and those that only some reports have."""
    return (*FIELDS, *(name for fields in fields_of_parts(report) for name in fields.names))


def records(report: Report, rows: Iterable[Row]) -> Iterator[tuple[Value, ...]]:
    """The values of ``fields_of(report)`` for each row."""
    of_parts = fields_of_parts(report)
    return (_record(report, row, of_parts) for row in rows)


def _record(report: Report, row: Row, of_parts: Sequence[Fields]) -> tuple[Value, ...]:
    node, line = heaviest(row, "wall"), heaviest_line(row, "wall")
    name, time = (node.name, node.wall_ns) if node else ("", 0)
    values = [getattr(row, field) for field in _OF_ROW]
    values += [getattr(row, f"{time}_ns") / 1e6 for time in _IN_MS]
    values += [row.wall_spread_ns, row.exact_share]
    values += [getattr(row.saves, end, None) for end in ("ns", "low_ns", "high_ns")]
    values.append(getattr(row.total_saves, "ns", None))
    values += [report.share(row), name, time, line.place if line else ""]
    return (*values, *(value for fields in of_parts for value in fields.values(row)))
