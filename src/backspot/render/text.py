"""Results as text for a terminal: the answer, its warnings, the ranked table, and what to do."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from backspot.comparison.changes import Comparison
from backspot.formatting import counted, duration, percent, visible
from backspot.render._columns import (
    Column,
    milliseconds_of,
    module_columns,
    node_cells,
    numbers,
    operator_columns,
)
from backspot.render._comparison import (
    change_columns,
    comparison_answer,
    left_out,
    of_step,
    rank_columns,
    recordings,
    step_columns,
)
from backspot.render._memory import limit_facts, memory_facts
from backspot.render._sentences import (
    Part,
    answer,
    answered,
    coverage,
    explained,
    made_by,
    notes,
    remedies,
    savings,
    setting,
    units,
)
from backspot.render._terminal import (
    fact_lines,
    finding_lines,
    keep_end,
    keep_start,
    lay_out,
    phase_facts,
)
from backspot.render.formats import Format
from backspot.render.view import (
    DEFAULT_VIEW,
    Selection,
    View,
    heaviest_line,
    only_nodes,
    operators_by,
    select,
)
from backspot.results.report import LineCost, Report, Row, Sort, Subtree
from backspot.trace.names import short_node_name

__all__ = ["FORMATS", "render_comparison", "render_subtree", "render_text"]

_NARROWEST = 40
_INDENT = 24
_LINES = 5  # how many lines of source are shown
_STYLES = {"text": "", "name": "bold cyan", "node": "bold", "number": "bold"}
_VERDICTS = {"slower": "red", "faster": "green", "within the noise": "dim", "undecided": "dim"}


def render_text(
    report: Report,
    view: View = DEFAULT_VIEW,
    *,
    width: int | None = None,
    color: bool = False,
) -> str:
    """The report for a terminal.

    Args:
        report: the report.
        view: which rows to show.
        width: number of cells in a line; ``None`` takes the terminal's.
        color: whether to write colours as escape sequences.

    Raises:
        UsageError: If the view has a value that ``Report.top`` refuses.
    """
    width = _width(width)
    chosen = select(report, view)
    by_time = replace(view, order=None)
    lines = [_sentence(answer(report, by_time), width)]
    row = answered(report, by_time)
    if row is not None:
        lines += _line_of_answer(row, view.sort, width)
    lines += fact_lines([*setting(report), units(report)], width)
    if phases := phase_facts(report):
        lines += fact_lines([f"{report.per}: {phases[0]}", *phases[1:]], width)
    for facts in (*memory_facts(report), limit_facts(report)):
        if facts:
            lines += fact_lines(facts, width)
    lines += map(Text, explained(report))
    lines += [Text("! " + visible(text), "yellow") for text in remedies(report)]
    lines.append(Text())
    if only_nodes(report):
        operators = operators_by(report, view.sort)
        shown = operators[: view.top]
        if shown:
            lines += lay_out(operator_columns(report, shown, view.sort), width)
        if len(operators) > len(shown):
            hidden = counted(len(operators) - len(shown), "more node name")
            lines.append(Text(f"{hidden}; see --top {len(operators)}.", "dim"))
    else:
        lines += _module_table(report, chosen, view, width)
        lines += _lines_table(chosen.shown, view.sort, width)
        lines += [Text(), Text(coverage(report))]
        said = [*notes(report, chosen, view), *savings(report, chosen)]
        lines += [Text(visible(note), "dim") for note in said]
    lines += finding_lines(report, width)
    return _written(lines, width, color=color)


def render_subtree(subtree: Subtree, *, width: int | None = None, color: bool = False) -> str:
    """A module with the modules inside it, as a tree; shares are of the module's own total."""
    width = _width(width)
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
    label = keep_end(visible(subtree.row.label), min(width, 80))
    what = (
        f"{label}: {duration(whole)} of the backward per step, "
        f"{duration(subtree.row.wall_ns)} of it in the module itself"
    )
    lines = [Text(what, "bold"), Text(), *lay_out(columns, width)]
    return _written(lines, width, color=color)


def render_comparison(
    comparison: Comparison,
    view: View = DEFAULT_VIEW,
    *,
    width: int | None = None,
    color: bool = False,
) -> str:
    """The comparison for a terminal: the answer, then the ``view.top`` largest changes."""
    width = _width(width)
    shown, columns = change_columns(comparison, view.top)
    verdicts = [change.verdict for change in (*shown, comparison.whole)]
    lines = [_sentence(comparison_answer(comparison), width)]
    lines += fact_lines(recordings(comparison), width)
    lines += [Text("! " + visible(note), "yellow") for note in comparison.notes]
    if phases := of_step(comparison):
        styles = [_VERDICTS.get(phase.verdict, "") for phase in phases]
        lines += [Text(), *lay_out(step_columns(comparison), width, styles)]
    ranks, of_ranks = rank_columns(comparison)
    if ranks:
        styles = [_VERDICTS.get(rank.verdict, "") for rank in ranks]
        lines += [Text(), *lay_out(of_ranks, width, styles)]
    lines.append(Text())
    lines += lay_out(columns, width, [_VERDICTS.get(verdict, "") for verdict in verdicts])
    for parts in left_out(comparison, shown):
        lines.append(Text(_sentence(parts, width).plain, "dim"))
    return _written(lines, width, color=color)


def _comparison_file(comparison: Comparison) -> bytes:
    return (render_comparison(comparison, View(top=None), width=100) + "\n").encode()


FORMATS = (Format(".txt", {Comparison: _comparison_file}),)


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


def _module_table(report: Report, chosen: Selection, view: View, width: int) -> list[Text]:
    columns = module_columns(report, chosen.shown, chosen.unowned, view)
    columns = [column for column in columns if column.kind != "line"]  # they have their own table
    styles = [*("" for _ in chosen.shown), *("dim" for _ in chosen.unowned)]
    table = lay_out(columns, width, styles)
    if chosen.unowned:
        margin = " " * (len(str(len(chosen.shown))) + 2)
        table.insert(
            1 + len(chosen.shown), Text(margin + "owned by no module:", "dim", no_wrap=True)
        )
    return table


def _line_of_answer(row: Row, sort: Sort, width: int) -> list[Text]:
    """Below the answer, the source line that made its node."""
    line = heaviest_line(row, sort)
    if line is None:
        return []
    lead = "  ← " + made_by(line).removesuffix(line.place)
    shown = keep_end(visible(line.place), width - len(lead))
    text = Text(lead, no_wrap=True)
    text.append(shown, "green")
    left = width - cell_len(lead + shown) - 2
    if line.text and left >= 12:
        text.append("  " + keep_start(visible(line.text), left), "dim")
    return [text]


def _lines_table(shown: Sequence[Row], sort: Sort, width: int) -> list[Text]:
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
    return [Text(), *lay_out(columns, width)]


def _spans(ranks: Sequence[int]) -> str:
    """Ascending numbers as people write them: ``1,3–5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return ",".join("–".join(map(str, span)) for span in spans)


def _sentence(parts: Sequence[Part], width: int) -> Text:
    """One sentence with styled names, which are cut if they are longer than a line."""
    # A path may be longer than the line; its end and its class identify it.
    sentence = Text()
    for kind, text in parts:
        shown = visible(text)
        if kind == "name":
            shown = keep_end(shown, min(width, 80))
        elif kind == "node":
            shown = keep_start(shown, min(width, 60))
        sentence.append(shown, _STYLES[kind])
    return sentence


def _width(width: int | None) -> int:
    """The number of cells in a line; ``None`` takes the terminal's."""
    return max(_NARROWEST, shutil.get_terminal_size().columns if width is None else width)


def _written(lines: Sequence[Text], width: int, *, color: bool) -> str:
    """Lines as a string, whatever the environment says about colours and terminals."""
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
