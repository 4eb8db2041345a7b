"""Results as text for a terminal: the answer, its warnings, the ranked table, and what to do."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

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
from backspot.render._memory import (
    checkpointing,
    layers_hold_most,
    limit_facts,
    memory_answer,
    memory_facts,
)
from backspot.render._sentences import (
    HEADING,
    Part,
    answer,
    answered,
    coverage,
    explained,
    has_repeats,
    hidden_work,
    listed,
    longer_phase,
    made_by,
    notes,
    remedies,
    savings,
    searched,
    setting,
    units,
)
from backspot.render._terminal import (
    brief_finding,
    fact_lines,
    finding,
    keep_end,
    keep_start,
    lay_out,
    paragraph,
    phase_facts,
    space_for,
)
from backspot.render.formats import Format
from backspot.render.view import (
    DEFAULT_VIEW,
    SCREEN_ROWS,
    Selection,
    View,
    first_view,
    heaviest_line,
    only_nodes,
    operators_by,
    select,
)
from backspot.results.report import LineCost, Report, Row, Sort, Subtree
from backspot.trace.names import short_node_name

__all__ = ["FORMATS", "render_comparison", "render_subtree", "render_text"]

_INDENT = 24
_LINES = 5  # how many lines of source are shown
_SCREEN = 23  # lines: those of a small terminal, without that of the prompt
_WARNINGS = 2
_MARGIN = 8  # what breaking lines between words can cost in two lines
_LEAST_PHASE = 0.01  # share of the step from which a screen shows a phase
_LEAST_UNOWNED = 0.05  # share of the backward from which a screen shows a row without a module


class _Choice(NamedTuple):
    """What a screen says about findings.

    Attributes:
        named: how many it names.
        detailed: of how many it has the remedy.
        evidence: how many sentences about what was seen each of these has.
        remedy: how many sentences about what to do each of these has; ``None`` has all.
        fewer: how many of the last modules in the table give way.
    """

    named: int
    detailed: int
    evidence: int
    remedy: int | None = None
    fewer: int = 0


_CHOICES = (
    *(_Choice(3, 3, 1), _Choice(3, 2, 1), _Choice(2, 2, 1), _Choice(3, 1, 1), _Choice(2, 1, 1)),
    *(_Choice(1, 1, 1), _Choice(1, 1, 0), _Choice(1, 1, 0, 1)),
)
"""The best first. Each has the remedy of the first finding."""
_STYLES = {"text": "", "name": "bold cyan", "node": "bold", "number": "bold"}
_VERDICTS = {"slower": "red", "faster": "green", "within the noise": "dim", "undecided": "dim"}


def render_text(
    report: Report,
    view: View | None = None,
    *,
    width: int | None = None,
    color: bool = False,
    full: bool = False,
    regroup: bool = True,
    more: str = 'report.save("report.txt")',
) -> str:
    """The report for a terminal: by default, what fits on one screen.

    Args:
        report: the report.
        view: which rows to show; ``None`` ranks by memory if it was recorded, else by time.
        width: number of cells in a line; ``None`` takes the terminal's. Without a terminal, that is
            80 (or ``COLUMNS``), and no path is cut, so that a line may be longer.
        color: whether to write colours as escape sequences.
        full: whether to show all warnings, facts and findings, the source lines, and the rows of
            no module that take little. How many modules there are is up to ``view``.
        regroup: whether one screen shows repeated layers as one where they are the answer.
        more: what to ask for everything, for the end of the screen: an option of ``backspot show``,
            or a call.

    Raises:
        UsageError: If the view has a value that ``Report.top`` refuses.
    """
    width, whole = space_for(width)
    page = _Page(
        report, view or first_view(report), width, whole=whole, regroup=regroup and not full
    )
    return _written(page.full() if full else page.screen(more), width, color=color)


class _Page:
    """The sections of a report, each as its lines.

    Args:
        report: the report.
        view: which rows to show.
        width: number of cells in a line.
        whole: whether no path is cut.
        regroup: whether the table has repeated layers as one where they are the answer.
    """

    def __init__(
        self, report: Report, view: View, width: int, *, whole: bool, regroup: bool
    ) -> None:
        self._report, self._view, self._width, self._whole = report, view, width, whole
        self._answered = answered(report, replace(view, order=None))
        self._is_memory = view.order == "memory" and bool(report.memory)
        self._advice = checkpointing(report) if self._is_memory else ""
        if self._is_memory:
            repeats = layers_hold_most(report)
        else:
            repeats = self._answered is not None and self._answered.members > 1
        if regroup and view.by == "path" and view.order != "headroom" and repeats:
            view = replace(view, by="pattern")
        self._table_view = view
        self._found = listed(report, view)
        self._chosen = select(report, view)
        self._nodes = operators_by(report, view.sort) if only_nodes(report) else []

    def full(self) -> list[Text]:
        """Everything."""
        report, width = self._report, self._width
        lines = [*self._answer(), *fact_lines(_packed([*setting(report), units(report)]), width)]
        lines += self._phases()
        for facts in (*memory_facts(report), limit_facts(report)):
            if facts:
                lines += fact_lines(facts, width)
        for text in explained(report):
            lines += self._paragraph(Text(text))
        for text in remedies(report):
            lines += self._paragraph(Text("! " + visible(text), "yellow"))
        lines += [Text(), *self._table(self._chosen, "owned by no module:")]
        if not only_nodes(report):
            lines += _lines_table(self._chosen.shown, self._view.sort, width, whole=self._whole)
            lines += [Text(), *self._paragraph(Text(coverage(report)))]
            said = [*notes(report, self._chosen, self._view), *savings(report, self._chosen)]
            for text in said:
                lines += self._paragraph(Text(visible(text), "dim"))
        elif hidden := len(self._nodes[self._view.top :] if self._view.top is not None else ()):
            more = f"{counted(hidden, 'more node name')}; see --top {len(self._nodes)}."
            lines.append(Text(more, "dim"))
        if self._found:
            lines += [Text(), Text(HEADING, "bold")]
        for number, found in enumerate(self._found, 1):
            lines += finding(report, number, found, width, whole=self._whole)
        if told := searched(report):
            lines += [Text(), *self._paragraph(Text(told, "dim"))]
        return lines

    def screen(self, more: str) -> list[Text]:
        """What matters most, on one screen unless ``view`` wants many rows; then what to ask for.

        The first finding and its remedy are always there, unless there is advice above the table;
        as many others as there is room for, with their evidence and remedies before their number.
        """
        report = self._report
        lines = self._memory() if self._is_memory else self._above_the_table()
        for text in remedies(report)[:_WARNINGS]:
            shown = keep_start(visible(text), 2 * self._width - _MARGIN)
            lines += self._paragraph(Text("! " + shown, "yellow"))
        rows = len(self._nodes[: self._view.top] or self._chosen.shown)
        room = _SCREEN + max(0, rows - SCREEN_ROWS)
        fewest = self._view.fewest if self._view.top == SCREEN_ROWS else len(self._chosen.shown)
        spare = range(1, 1 + len(self._chosen.shown) - fewest)
        choices = [*_CHOICES, *(_CHOICES[-1]._replace(fewer=number) for number in spare)]
        if self._advice:
            choices.append(choices[-1]._replace(detailed=0))
        chosen, table = self._chosen, self._ranked(self._chosen)
        screen: list[Text] = []
        for choice in choices:
            if choice.fewer:
                chosen = self._without_last(choice.fewer)
                table = self._ranked(chosen)
            screen = [*lines, Text(), *table, *self._findings(choice)]
            screen += fact_lines(self._next(chosen, choice.named, more), self._width)
            if len(screen) <= room:
                break
        return screen

    def _without_last(self, number: int) -> Selection:
        """The modules, of which the last ones are hidden."""
        chosen = self._chosen
        kept = len(chosen.shown) - number
        hidden = (*chosen.shown[kept:], *chosen.hidden)
        return replace(chosen, shown=chosen.shown[:kept], hidden=hidden)

    def _ranked(self, chosen: Selection) -> list[Text]:
        """The table, and what surprises in it."""
        unowned = [row for row in chosen.unowned if self._share(row) >= _LEAST_UNOWNED]
        lines = self._table(replace(chosen, unowned=tuple(unowned)))
        for text in () if self._is_memory else hidden_work(self._report, chosen):
            lines += self._paragraph(Text(visible(text), "dim"))
        return lines

    def _share(self, row: Row) -> float:
        """The share of the backward, or of the peak of memory, that a row has."""
        if not self._is_memory:
            return self._report.share(row)
        held = 0 if row.memory is None else row.memory.at_peak_bytes
        return held / max(1, self._report.memory[0].peak_bytes)

    def _memory(self) -> list[Text]:
        """Who fills the memory, what is in it, what to do about it; and the answer about time."""
        report, width = self._report, self._width
        lines = [*self._paragraph(_sentence(memory_answer(report), width, whole=self._whole))]
        first, *others = memory_facts(report)
        lines += fact_lines(first[:-1], width)  # the table has the modules
        for facts in others:
            lines += fact_lines(facts[:1], width)
        if self._advice:
            lines += paragraph(Text(visible(self._advice)), width, "→ ", whole=self._whole)
        parts = answer(report, replace(self._view, order=None))
        short = takewhile(lambda part: part[0] != "text" or part[1][0] not in ",;", parts)
        return [*lines, *self._paragraph(_sentence([*short], width, whole=self._whole))]

    def _above_the_table(self) -> list[Text]:
        report, width = self._report, self._width
        facts = setting(report)
        if report.source in ("backspot", "none"):
            facts.pop()  # as recommended, or said by the answer
        lines = [*self._answer(), *fact_lines(_packed(facts), width), *self._phases(_LEAST_PHASE)]
        for facts in memory_facts(report):
            lines += [*fact_lines(facts[:1], width)]
        if self._view.order == "headroom" and (limits := limit_facts(report)):
            lines += fact_lines(limits, width)
        if not report.findings:
            for text in explained(report):
                lines += self._paragraph(Text(text))
        return lines

    def _findings(self, choice: _Choice) -> list[Text]:
        """The first findings."""
        report, width = self._report, self._width
        lines = [Text()]
        if not report.findings and (told := searched(report)):
            lines += self._paragraph(Text(told))
        for number, found in enumerate(self._found[: choice.named], 1):
            at = (report, number, found, width)
            if number <= choice.detailed:
                evidence, remedy = choice.evidence, choice.remedy
                lines += finding(*at, whole=self._whole, evidence=evidence, remedy=remedy)
            else:
                lines += brief_finding(*at, whole=self._whole)
        return lines

    def _next(self, chosen: Selection, named: int, more: str) -> list[str]:
        """What to ask for next: ``more`` has everything, ``named`` findings are named."""
        report, by = self._report, self._table_view.by
        things = {"path": ("module",), "class": ("class", "more classes"), "pattern": ("row",)}[by]
        hidden = {
            f"more {things[0]}": len(chosen.hidden),
            "more node name": len(self._nodes) - len(self._nodes[: self._view.top]),
            "more finding": len(report.findings) - named,
            "more warning": len(remedies(report)) - _WARNINGS,
        }
        rest = [
            counted(number, what, *things[1:] if what == f"more {things[0]}" else ())
            for what, number in hidden.items()
            if number > 0
        ]
        facts = [f"next: {more} for {', '.join(rest) or 'all details'}"]
        ask = "--{} {}" if "--full" in more else 'report.top({}="{}")'
        if report.memory:
            sort, what = ("wall", "time") if self._is_memory else ("memory", "memory")
            facts.append(f"{ask.format('sort', sort)} for {what}")
        if by != self._view.by:
            facts.append(f"{ask.format('by', 'path')} for single modules")
        elif by == "path" and has_repeats(chosen):
            facts.append(f"{ask.format('by', 'pattern')} for repeated layers")
        if self._found:
            facts.append(f"backspot explain {visible(self._found[0].rule)}")
        return facts

    def _answer(self) -> list[Text]:
        """The answer, and below it the source line that made its node."""
        row, lines = self._answered, []
        answers = [answer(self._report, replace(self._view, order=None))]
        if self._view.sort == "wall":
            answers.insert(0, longer_phase(self._report, row))
        for parts in filter(None, answers):
            lines += self._paragraph(_sentence(parts, self._width, whole=self._whole))
        if row is not None:
            lines += _line_of_answer(row, self._view.sort, self._width, whole=self._whole)
        return lines

    def _phases(self, least: float = 0) -> list[Text]:
        phases = phase_facts(self._report, least)
        if not phases:
            return []
        return [*fact_lines([f"{self._report.per}: {phases[0]}", *phases[1:]], self._width)]

    def _table(self, chosen: Selection, heading: str = "") -> list[Text]:
        """The ranked modules, or autograd nodes where no module is known.

        Args:
            chosen: the modules.
            heading: the heading of the rows without a module, ``""`` on the screen.
        """
        report, view, width = self._report, self._table_view, self._width
        if only_nodes(report):
            shown = self._nodes[: view.top]
            columns = operator_columns(report, shown, view.sort)
            return lay_out(_with_units(columns), width, whole=self._whole) if shown else []
        columns = module_columns(report, chosen.shown, chosen.unowned, view)
        left_out = {"line"}  # they have their own table
        if not heading and view.order != "headroom":
            left_out.add("limit")
        columns = [one for one in columns if one.kind not in left_out]
        styles = [*("" for _ in chosen.shown), *("dim" for _ in chosen.unowned)]
        table = lay_out(_with_units(columns), width, styles, whole=self._whole)
        if chosen.unowned and heading:
            margin = " " * (len(str(len(chosen.shown))) + 2)
            table.insert(1 + len(chosen.shown), Text(margin + heading, "dim", no_wrap=True))
        return table

    def _paragraph(self, text: Text) -> list[Text]:
        return [*paragraph(text, self._width, whole=self._whole)]


def _with_units(columns: Sequence[Column]) -> list[Column]:
    """The columns with their unit in the heads of the first time and of the memory."""
    return [
        replace(one, head=one.full_head) if one.kind in ("time", "memory") else one
        for one in columns
    ]


def _packed(facts: Sequence[str]) -> list[str]:
    """Facts with the short ones before the others, which takes fewer lines."""
    return [*facts[:1], *sorted(facts[1:], key=len)]


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
    return _written(lines, width, color=color)


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
    said = _sentence(comparison_answer(comparison), width, whole=whole)
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
        text = Text(_sentence(parts, width, whole=whole).plain, "dim")
        lines += paragraph(text, width, whole=whole)
    return _written(lines, width, color=color)


def _report_file(report: Report) -> bytes:
    view = replace(first_view(report), top=None)
    return (render_text(report, view, width=100, full=True) + "\n").encode()


def _comparison_file(comparison: Comparison) -> bytes:
    return (render_comparison(comparison, View(top=None), width=100) + "\n").encode()


FORMATS = (Format(".txt", {Report: _report_file, Comparison: _comparison_file}),)


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


def _line_of_answer(row: Row, sort: Sort, width: int, *, whole: bool) -> list[Text]:
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


def _lines_table(shown: Sequence[Row], sort: Sort, width: int, *, whole: bool) -> list[Text]:
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


def _sentence(parts: Sequence[Part], width: int, *, whole: bool) -> Text:
    """One sentence with styled names, which are cut if they are longer than a line."""
    # A path may be longer than the line; its end and its class identify it.
    sentence = Text()
    for kind, text in parts:
        shown = visible(text)
        if kind == "name" and not whole:
            shown = keep_end(shown, min(width, 80))
        elif kind == "node" and not whole:
            shown = keep_start(shown, min(width, 60))
        sentence.append(shown, _STYLES[kind])
    return sentence


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
        line.rstrip()
        console.print(line, soft_wrap=True)
    return file.getvalue().rstrip("\n")
