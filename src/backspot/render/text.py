"""A report as text: the answer, what to mistrust in it, the ranked table, and what to do."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from backspot.formatting import counted, decimals_for, duration, milliseconds, percent, visible
from backspot.render._sentences import (
    Part,
    answer,
    answered,
    by_operator,
    coverage,
    heaviest,
    heaviest_line,
    made_by,
    node_name,
    notes,
    operators_by,
    remedies,
    select,
    setting,
    time_of,
)
from backspot.render._terminal import (
    Column,
    fact_lines,
    finding_lines,
    keep_end,
    keep_start,
    lay_out,
    phase_facts,
)
from backspot.results.report import By, LineCost, OperatorCost, Report, Row, Sort, Subtree

__all__ = ["render_subtree", "render_text", "sentence", "width_of", "written"]

_NARROWEST = 40
_INDENT = 24
_LINES = 5  # how many lines of source are shown
_STYLES = {"text": "", "name": "bold cyan", "node": "bold", "number": "bold"}
_TITLES: dict[Sort, str] = {"wall": "wall", "gpu": "GPU", "cpu": "CPU"}


def render_text(
    report: Report,
    *,
    width: int | None = None,
    top: int | None = 15,
    depth: int | None = None,
    sort: Sort = "wall",
    by: By = "path",
    color: bool = False,
) -> str:
    """The report for a terminal.

    Args:
        report: what to show.
        width: how many cells a line may take; ``None`` takes the terminal's.
        top: how many modules at most; ``None`` shows all.
        depth: fold everything deeper than this into its ancestor.
        sort: by which time the modules are ranked.
        by: what makes a row, as in ``Report.top``.
        color: whether to write colours as escape sequences.

    Raises:
        UsageError: on what ``Report.top`` would not take either.
    """
    width = width_of(width)
    chosen = select(report, top=top, depth=depth, sort=sort, by=by)
    lines = [sentence(answer(report, depth=depth, sort=sort, by=by), width)]
    row = answered(report, depth=depth, sort=sort, by=by)
    if row is not None:
        lines += _line_of_answer(row, sort, width)
    per = "pass" if report.step_unit == "backward pass" else "step"
    lines += fact_lines([*setting(report), f"times in ms per {per}"], width)
    if phases := phase_facts(report):
        lines += fact_lines([f"{per}: {phases[0]}", *phases[1:]], width)
    lines += [Text("! " + visible(text), "yellow") for text in remedies(report)]
    lines.append(Text())
    if by_operator(report):
        operators = operators_by(report, sort)
        if operators[:top]:
            lines += _operator_table(report, operators[:top], sort, width)
        if top is not None and len(operators) > top:
            hidden = counted(len(operators) - top, "more node name")
            lines.append(Text(f"{hidden}: --top {len(operators)}.", "dim"))
    else:
        lines += _module_table(report, chosen.shown, chosen.unowned, sort, by, width)
        lines += _lines_table(chosen.shown, sort, width)
        lines += [Text(), Text(coverage(report))]
        lines += [Text(note, "dim") for note in notes(report, chosen, sort=sort, by=by)]
    lines += finding_lines(report, width)
    return written(lines, width, color=color)


def render_subtree(subtree: Subtree, *, width: int | None = None, color: bool = False) -> str:
    """A module with what is inside it, as a tree; shares are of the module's own total."""
    width = width_of(width)
    placed = [(visible(subtree.row.name), subtree.row), *_placed(subtree)]
    rows = [row for _, row in placed]
    steps, whole = subtree.row.steps, subtree.row.total_wall_ns
    decimals = decimals_for(whole / steps)

    def times(values: Sequence[int]) -> list[str]:
        return [milliseconds(value / steps, decimals) for value in values]

    columns = [
        Column(
            "module",
            [name for name, _ in placed],
            least=24,
            left=True,
            outlasts=4,
            style="cyan",
        ),
        Column("class", [visible(row.class_name) for row in rows], 4, least=10, left=True),
        Column("total ms", times([row.total_wall_ns for row in rows]), style="bold"),
        Column("share", [percent(row.total_wall_ns / whole if whole else 0) for row in rows], 1),
        Column("own", times([row.wall_ns for row in rows]), 2, wide_head="own ms"),
    ]
    if subtree.row.total_gpu_ns:
        gpu = times([row.total_gpu_ns for row in rows])
        columns.append(Column("GPU", gpu, 5, wide_head="GPU ms"))
    cpu = times([row.total_cpu_ns for row in rows])
    columns.append(Column("CPU", cpu, 6, wide_head="CPU ms"))
    nodes = [_node_name(row, "wall") for row in rows]
    columns.append(Column("heaviest node", nodes, 3, least=15, left=True))
    label = keep_end(visible(subtree.row.label), min(width, 80))
    what = (
        f"{label}: {duration(whole / steps)} of the backward per step, "
        f"{duration(subtree.row.wall_ns / steps)} of it its own"
    )
    lines = [Text(what, "bold"), Text(), *lay_out(columns, width)]
    return written(lines, width, color=color)


def _placed(subtree: Subtree) -> Iterator[tuple[str, Row]]:
    """Each module below with its branch and its name, as far as its parent does not say it."""
    left = _branches("", subtree)
    while left:
        lead, parent, child, last = left.pop()
        fork, below = ("└─ ", "   ") if last else ("├─ ", "│  ")
        name = child.row.path.removeprefix(f"{parent.row.path}.")
        yield lead + fork + visible(name), child.row
        lead += below
        if len(lead) > _INDENT:  # so deep that the branches would leave no room for the names
            lead = "…" + lead[1 - _INDENT :]
        left += _branches(lead, child)


def _branches(lead: str, of: Subtree) -> list[tuple[str, Subtree, Subtree, bool]]:
    """The modules directly inside, the last first: what stands before it, what it is in, itself."""
    return [(lead, of, child, child is of.children[-1]) for child in reversed(of.children)]


def _module_table(
    report: Report, shown: Sequence[Row], unowned: Sequence[Row], sort: Sort, by: By, width: int
) -> list[Text]:
    rows = [*shown, *unowned]
    steps = report.steps
    largest = max((max(row.wall_ns, time_of(row, sort)) for row in rows), default=0)
    decimals = decimals_for(largest / steps)

    def times(values: Sequence[int]) -> list[str]:
        return [milliseconds(value / steps, decimals) for value in values]

    ranks = [str(index + 1) if index < len(shown) else "" for index in range(len(rows))]
    names = [visible(row.name) for row in rows]
    columns = [
        Column("#", ranks, style="dim"),
        Column(
            "class" if by == "class" else "module",
            names,
            least=20,
            left=True,
            cut_start=True,
            outlasts=4,
            style="cyan",
        ),
    ]
    if by != "class":
        classes = [visible(row.class_name) if row.is_module else "" for row in rows]
        columns.append(Column("class", classes, 5, least=11, left=True))
    if by != "path":
        columns.append(
            Column("modules", [str(row.members) if row.is_module else "" for row in rows], 3)
        )
    columns += _ranked_columns(report, rows, times, sort)
    others: tuple[Sort, ...] = ("wall", "gpu", "cpu")
    for index, other in enumerate(kind for kind in others if kind != sort):
        if other != "gpu" or report.has_gpu:
            title = _TITLES[other]
            cells = times([time_of(row, other) for row in rows])
            columns.append(Column(title, cells, 2 + 2 * index, wide_head=f"{title} ms"))
    if any(row.recompute_ns for row in rows):
        again = times([row.recompute_ns for row in rows])
        columns.append(Column("recompute", again, 9, wide_head="recompute ms"))
    columns.append(Column("calls", [f"{row.calls}" if row.is_module else "" for row in rows], 6))
    if any(row.forward_ns for row in rows):
        spent = times([row.forward_ns for row in rows])
        forward = [time if row.is_module else "" for row, time in zip(rows, spent, strict=True)]
        columns.append(Column("forward", forward, 8, wide_head="forward ms"))
    columns += _node_columns(rows, times, sort)
    table = lay_out(columns, width, ["" if row.is_module else "dim" for row in rows])
    if unowned:
        margin = " " * (len(str(len(shown))) + 2)
        table.insert(1 + len(shown), Text(margin + "no module owns:", "dim", no_wrap=True))
    return table


def _ranked_columns(
    report: Report, rows: Sequence[Row], times: Callable[[Sequence[int]], list[str]], sort: Sort
) -> list[Column]:
    """The time that the ranking goes by, its share, and the share drawn."""
    shares = [report.share(row, sort) for row in rows]
    longest = max(shares, default=0.0) or 1.0
    return [
        Column(
            _TITLES[sort],
            times([time_of(row, sort) for row in rows]),
            style="bold",
            wide_head=f"{_TITLES[sort]} ms",
        ),
        Column("share", [percent(share) for share in shares], gap=1),
        Column(
            "",
            [""] * len(rows),
            7,
            least=6,
            gap=1,
            style="red",
            bars=[share / longest for share in shares],
        ),
    ]


def _node_columns(
    rows: Sequence[Row], times: Callable[[Sequence[int]], list[str]], sort: Sort
) -> list[Column]:
    spent = [heaviest(row, sort) for row in rows]
    costs = times([time_of(node, sort) if node else 0 for node in spent])
    cells = [cost if node else "" for cost, node in zip(costs, spent, strict=True)]
    names = [_node_name(row, sort) for row in rows]
    return [
        Column("heaviest node", names, 3, least=14, left=True, outlasts=6, ample=20),
        Column("", cells, 3, gap=1, wide_head="ms"),
    ]


def _node_name(row: Row, sort: Sort) -> str:
    node = heaviest(row, sort)
    return visible(node_name(node.name)) if node else ""


def _line_of_answer(row: Row, sort: Sort, width: int) -> list[Text]:
    """Below the answer, the line of source that made its node."""
    line = heaviest_line(row, sort)
    if line is None:
        return []
    lead = "  ← " + made_by(line).removesuffix(line.place)
    shown = keep_end(visible(line.place), width - len(lead))
    told = Text(lead, no_wrap=True)
    told.append(shown, "green")
    left = width - cell_len(lead + shown) - 2
    if line.text and left >= 12:
        told.append("  " + keep_start(visible(line.text), left), "dim")
    return [told]


def _lines_table(shown: Sequence[Row], sort: Sort, width: int) -> list[Text]:
    """The lines of source that made the heaviest nodes of the first modules."""
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
    nodes = [visible(node_name(line.node)) for line in lines]
    places = [visible(line.place) for line in lines]
    columns = [
        Column("#", [_spans(found) for found in ranks.values()], least=6, left=True, style="dim"),
        Column("heaviest node", nodes, least=14, left=True),
        Column(head, places, least=20, left=True, cut_start=True, style="green"),
        Column("source", [visible(line.text) for line in lines], 1, least=24, left=True),
    ]
    return [Text(), *lay_out(columns, width)]


def _spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as people write them: ``1,3–5``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("–".join(map(str, span)) for span in spans)


def _operator_table(
    report: Report, operators: Sequence[OperatorCost], sort: Sort, width: int
) -> list[Text]:
    steps = report.steps
    whole = {"wall": report.wall_ns, "gpu": report.gpu_ns, "cpu": report.cpu_ns}[sort]
    decimals = decimals_for(max((time_of(op, sort) for op in operators), default=0) / steps)

    def times(kind: Sort) -> list[str]:
        return [milliseconds(time_of(op, kind) / steps, decimals) for op in operators]

    shares = [time_of(op, sort) / whole if whole else 0.0 for op in operators]
    longest = max(shares, default=0.0) or 1.0
    columns = [
        Column("#", [str(index + 1) for index in range(len(operators))], style="dim"),
        Column("node", [visible(node_name(op.name)) for op in operators], least=20, left=True),
        Column(_TITLES[sort], times(sort), style="bold", wide_head=f"{_TITLES[sort]} ms"),
        Column("share", [percent(share) for share in shares], gap=1),
        Column(
            "",
            [""] * len(operators),
            4,
            least=6,
            gap=1,
            style="red",
            bars=[share / longest for share in shares],
        ),
    ]
    others: tuple[Sort, ...] = ("wall", "gpu", "cpu")
    for index, other in enumerate(kind for kind in others if kind != sort):
        if other != "gpu" or report.has_gpu:
            title = _TITLES[other]
            columns.append(Column(title, times(other), 1 + 2 * index, wide_head=f"{title} ms"))
    columns.append(Column("count", [str(op.count) for op in operators], 2))
    return lay_out(columns, width)


def sentence(parts: Sequence[Part], width: int) -> Text:
    """One sentence with its names set apart, and cut where they are longer than a line."""
    # A path may be longer than the line; its end and the class are what tell it apart.
    told = Text()
    for kind, text in parts:
        shown = visible(text)
        if kind == "name":
            shown = keep_end(shown, min(width, 80))
        elif kind == "node":
            shown = keep_start(shown, min(width, 60))
        told.append(shown, _STYLES[kind])
    return told


def width_of(width: int | None) -> int:
    """How many cells a line may take: the terminal's where ``width`` is ``None``."""
    return max(_NARROWEST, shutil.get_terminal_size().columns if width is None else width)


def written(lines: Sequence[Text], width: int, *, color: bool) -> str:
    """Lines as a string; nothing of the environment has a say in it."""
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        color_system="standard" if color else None,
        force_terminal=color,
        no_color=not color,
        force_jupyter=False,
        force_interactive=False,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
        _environ={},
    )
    for line in lines:
        for part in [line] if line.no_wrap else line.wrap(console, width):
            part.rstrip()
            console.print(part, soft_wrap=True)
    return file.getvalue().rstrip("\n")
