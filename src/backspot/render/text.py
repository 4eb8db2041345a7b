"""A report as text for a terminal: the answer, its warnings, the ranked table, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from backspot.formatting import counted, percent, visible
from backspot.render._answer import answer, answered, sentences
from backspot.render._columns import module_columns, operator_columns
from backspot.render._facts import (
    between_nodes,
    coverage,
    has_repeats,
    hidden_work,
    notes,
    remedies,
    savings,
    setting,
    units,
    unknown_savings,
)
from backspot.render._findings import HEADING, asked_for, has_advice, listed, searched, unlisted
from backspot.render._findings_text import brief_finding, finding
from backspot.render._phases import explained, first_look, kept_phases, phase_text
from backspot.render._remedies import remedy_sentence
from backspot.render._sections import Column, Lead, Table
from backspot.render._terminal import (
    fact_lines,
    keep_start,
    lay_out,
    paragraph,
    sentence,
    space_for,
    unbroken,
    written,
)
from backspot.render.formats import Format
from backspot.render.parts import first_view, leads, sections_of
from backspot.render.text_parts import line_of_answer, lines_table
from backspot.render.view import (
    SCREEN_ROWS,
    Selection,
    View,
    only_nodes,
    operators_by,
    select,
)
from backspot.results.costs import Row
from backspot.results.report import Report
from backspot.styled import Text

_SCREEN = 23  # lines: those of a small terminal, without that of the prompt
_SCROLLED = 6  # lines that may scroll away rather than that a finding is unseen
_WARNINGS = 2
_LEAST_PHASE = 0.01  # share of the step from which a screen shows a phase
_LEAST_MODEL = 0.05  # share of the backward from which a model counts as one of several
_MODELS = 6  # number of models up to which a screen shows their shares
_LEAST_UNOWNED = 0.05  # share of the backward from which a screen shows a row without a module


_NOUNS = {"path": "module", "class": "class", "pattern": "row"}
"""What a row of the table is."""
_Choice = tuple[int, int, int, "int | None"]
_CHOICES: tuple[_Choice, ...] = (
    *((4, 4, 1, None), (4, 3, 1, None), (4, 2, 1, None), (4, 1, 1, None), (4, 1, 0, None)),
)
"""How many findings a screen names, of how many it has the remedy, and how many sentences each of
these has about what was seen, and about what a part remarks (``None``: all). The best comes first.
A remedy is never cut, as its last way may be the one that helps most."""
_FEWER_CHOICES: tuple[_Choice, ...] = ((4, 1, 0, 1), (3, 1, 0, None), (3, 1, 0, 1))
"""Those for which the last modules have given way."""


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
        view: which rows to show; ``None`` ranks by what a part ranks them by, else by time.
        width: number of cells in a line; ``None`` takes the terminal's. Without a terminal, that is
            80 (or ``COLUMNS``); a path in a table loses its start only where it is longer than
            the line, and in a sentence it stays whole.
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
    return written(page.full() if full else page.screen(more), width, color=color)


class _Page:
    """The sections of a report, each as its lines.

    Args:
        whole: whether no path is cut.
        regroup: whether the table has repeated layers as one where they are the answer.
    """

    def __init__(
        self, report: Report, view: View, width: int, *, whole: bool, regroup: bool
    ) -> None:
        self._report, self._view, self._width, self._whole = report, view, width, whole
        self._answered = answered(report, replace(view, order=None))
        self._sections = sections_of(report, view)
        self._leads = leads(report)
        self._lead = next((lead for lead in self._leads if lead.order == view.order), None)
        if self._lead:
            repeats = self._lead.is_repeated
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
        lines = self._answer()
        facts = [*setting(report), units(report, self._sections.facts)]
        lines += fact_lines(_packed(facts), width)
        lines += self._phases()
        for section in self._sections.sentences:
            for text in section.said:
                lines += self._paragraph(Text(text))
        for section in self._sections.facts:
            lines += fact_lines(section.said, width)
        for text in explained(report):
            lines += self._paragraph(Text(text))
        for section in self._sections.tables:
            lines += fact_lines(section.said, width)
        for text in remedies(report):
            lines += self._paragraph(Text("! " + visible(text), "yellow"))
        lines += [Text(), *self._table(self._chosen, "owned by no module:")]
        if not only_nodes(report):
            lines += lines_table(self._chosen.shown, self._view.sort, width, whole=self._whole)
            lines += [Text(), *self._paragraph(Text(coverage(report)))]
            said = [*notes(report, self._chosen, self._view), *savings(report, self._chosen)]
            for text in said:
                lines += self._paragraph(Text(visible(text), "dim"))
        elif hidden := len(self._nodes[self._view.top :] if self._view.top is not None else ()):
            more = f"{counted(hidden, 'more node name')}; see --top {len(self._nodes)}."
            lines.append(Text(more, "dim"))
        for table in (table for section in self._sections.tables for table in section.tables):
            lines += self._below(table)
        if self._found:
            lines += [Text(), Text(HEADING, "bold")]
        for number, cause in enumerate(self._found, 1):
            before = self._found[: number - 1]
            lines += finding(report, number, cause, width, before=before, whole=self._whole)
        for note_text in filter(None, (*unlisted(report, self._view), searched(report))):
            lines += [Text(), *self._paragraph(Text(note_text, "dim"))]
        return [*lines, *self._last(lines)]

    def _last(self, above: Sequence[Text]) -> list[Text]:
        """What parts say below all else; what has no title is a hint."""
        lines: list[Text] = []
        for section in self._sections.last:
            if not section.title:
                for text in section.said:
                    lines += self._paragraph(Text(visible(text), "dim"))
                continue
            last = lines or above
            lines += [Text()] if last and last[-1].plain else []
            lines += self._paragraph(Text(visible(section.title), "bold"))
            for table in section.tables:
                lines += lay_out(_with_units(table.columns), self._width, whole=self._whole)
                lines += self._paragraph(Text(table.note, "dim")) if table.note else []
            for text in section.said:
                lines += self._paragraph(Text(visible(text)))
            for number, (purpose, code) in enumerate(section.code, 1):
                lines += self._paragraph(Text(f"{number}. {visible(purpose)}", "dim"))
                # Whole lines, so that they can be copied.
                lines += [Text(f"   {visible(line)}", no_wrap=True) for line in code.splitlines()]
        return lines

    def _below(self, table: Table) -> list[Text]:
        """A table of a part, with its heading and its note."""
        lines = [Text(), Text(table.heading, "bold")]
        lines += lay_out(table.columns, self._width, whole=self._whole)
        return [*lines, *self._paragraph(Text(table.note, "dim"))]

    def screen(self, more: str) -> list[Text]:
        """What matters most, on one screen unless ``view`` wants many rows; then what to ask for.

        The first finding and its remedy are always there, unless there is advice above the table.
        The next three have a line each before the last modules have one, if need be beyond it.
        """
        lines = self._top()
        rows = len(self._nodes[: self._view.top] or self._chosen.shown)
        room = _SCREEN + max(0, rows - SCREEN_ROWS)
        chosen, table = self._chosen, self._ranked(self._chosen)
        fewest = self._view.fewest if self._view.top == SCREEN_ROWS else len(chosen.shown)
        most, few = len(chosen.shown), min(len(chosen.shown), fewest)
        choices = [(most, choice) for choice in _CHOICES]
        choices += [(modules, _CHOICES[-1]) for modules in range(most - 1, few - 1, -1)]
        choices += [(few, choice) for choice in _FEWER_CHOICES]
        if self._lead:  # what it is about comes before findings
            choices += [(few, (named, 1, 0, 1)) for named in (2, 1)]
        if self._lead and self._lead.advice:
            choices.append((few, (1, 0, 0, 1)))
        room += len(self._last(lines))
        screen: list[Text] = []
        for modules, choice in choices:
            if hidden := chosen.shown[modules:]:
                left = (*hidden, *chosen.hidden)
                chosen = replace(chosen, shown=chosen.shown[:modules], hidden=left)
                table = self._ranked(chosen)
            more_room = 0
            if choice in _FEWER_CHOICES:  # rather a line that scrolls than a finding unseen
                lines = self._top(full=False)
                more_room = (
                    _SCROLLED if min(choice[0], len(self._found)) > 1 and not self._lead else 0
                )
            screen = [*lines, Text(), *table, *self._findings(*choice)]
            screen += self._last(screen)
            screen += fact_lines(self._next(chosen, choice[:2], more), self._width)
            if len(screen) <= room + more_room:
                break
        return screen

    def _top(self, *, full: bool = True) -> list[Text]:
        """What stands above the table; without the sentences that give way if it is not full."""
        lines = self._led(self._lead) if self._lead else self._above_the_table(full=full)
        for text in remedies(self._report)[:_WARNINGS]:
            lines += self._paragraph(Text("! " + visible(text), "yellow"))
        return lines

    def _ranked(self, chosen: Selection) -> list[Text]:
        """The table, and what surprises in it."""
        unowned = [row for row in chosen.unowned if self._share(row) >= _LEAST_UNOWNED]
        lines = self._table(replace(chosen, unowned=tuple(unowned)))
        surprises = [
            *between_nodes(self._report),
            *hidden_work(self._report, chosen),
            *unknown_savings(self._report, chosen),
        ]
        for text in () if self._lead or self._nodes else surprises:
            lines += self._paragraph(Text(visible(text), "dim"))
        return lines

    def _share(self, row: Row) -> float:
        """The share that a row has of the backward, or of what rows are ranked by."""
        return self._lead.share(row) if self._lead else self._report.share(row)

    def _led(self, lead: Lead) -> list[Text]:
        """What is first of what ranks the rows, what it is about, what to do; and the time."""
        report, width = self._report, self._width
        lines = [*self._paragraph(sentence(lead.answer, width, whole=self._whole))]
        for facts in lead.facts:
            lines += fact_lines(facts, width)
        if lead.advice:
            lines += paragraph(Text(visible(lead.advice)), width, "→ ", whole=self._whole)
        clauses = answer(report, replace(self._view, order=None))
        short = takewhile(lambda clause: clause[0] != "text" or clause[1][0] not in ",;", clauses)
        return [*lines, *self._paragraph(sentence([*short], width, whole=self._whole))]

    def _above_the_table(self, *, full: bool) -> list[Text]:
        report, width = self._report, self._width
        facts = setting(report)
        if report.source in ("backspot", "none"):
            facts.pop()  # as recommended, or said by the answer
        # Without findings, each long phase is explained below.
        look = first_look(report) if self._found else ""
        lines = [*self._answer(look), *fact_lines(_packed(facts), width)]
        lines += self._phases(_LEAST_PHASE)
        for section in self._sections.sentences:
            for text in section.said[0 if full else section.gives_way : section.brief]:
                lines += self._paragraph(Text(text))
        lines += self._models()
        for section in (*self._sections.tables, *self._sections.facts):
            lines += fact_lines(section.said[: section.brief], width)
        if not self._found:
            for text in explained(report):
                lines += self._paragraph(Text(text))
        return lines

    def _findings(self, named: int, detailed: int, evidence: int, remark: int | None) -> list[Text]:
        """The first findings; the arguments are those of a choice."""
        report, width = self._report, self._width
        lines = [Text()]
        if not self._found and (searched_text := searched(report)):
            lines += self._paragraph(Text(searched_text))
        for number, cause in enumerate(self._found[:named], 1):
            arguments = (report, number, cause, width)
            if number <= detailed:
                lines += finding(
                    *arguments,
                    before=self._found[: number - 1],
                    whole=self._whole,
                    evidence=evidence,
                    remark=remark,
                )
            else:
                lines += brief_finding(*arguments, whole=self._whole)
        if self._view.is_of_time and (aside := unlisted(report, self._view)):
            lines += self._paragraph(Text(" ".join(aside), "dim"))
        return lines

    def _next(self, chosen: Selection, findings: tuple[int, int], more: str) -> list[str]:
        """What to ask for next: ``more`` has everything.

        Args:
            findings: how many are named, and of how many of these the remedy is shown.
        """
        named, detailed = findings
        report, by = self._report, self._table_view.by
        plurals = {"more class": "more classes", "more remedy": "more remedies"}
        hidden = {
            f"more {_NOUNS[by]}": len(chosen.hidden),
            "more node name": len(self._nodes) - len(self._nodes[: self._view.top]),
            "more remedy": sum(map(has_advice, self._found[detailed:named])),
            "more finding": len(self._found) - named,
            "more warning": len(remedies(report)) - _WARNINGS,
        }
        rest = [
            counted(number, noun, plurals.get(noun, ""))
            for noun, number in hidden.items()
            if number > 0
        ]
        facts = [f"next: {unbroken(more)} for {', '.join(rest) or 'all details'}"]
        ask = "--{} {}" if "--full" in more else 'report.top({}="{}")'
        others = [(lead.order, lead.order) for lead in self._leads]
        for sort, amount in [("wall", "time")] if self._lead else others:
            facts.append(f"{unbroken(ask.format('sort', sort))} for {amount}")
        if by != self._view.by:
            facts.append(f"{unbroken(ask.format('by', 'path'))} for single modules")
        elif by == "path" and has_repeats(chosen):
            facts.append(f"{unbroken(ask.format('by', 'pattern'))} for repeated layers")
        if self._found:
            explain = f"backspot explain {visible(self._found[0].rule)}"
            facts.append(unbroken(keep_start(explain, self._width)))
        elif not self._lead and (asked_text := asked_for(report)):
            facts.append(asked_text)
        return facts

    def _answer(self, look: str = "") -> list[Text]:
        """The answer, what it is of the modules, and the source line that made their node.

        Args:
            look: what to look at first in the phase that the answer is about.
        """
        row, lines = self._answered, []
        answers = sentences(self._report, replace(self._view, order=None))
        if look:
            answers[0].append(("text", f" {look}"))
        for clauses in answers:
            lines += self._paragraph(sentence(clauses, self._width, whole=self._whole))
        if row is not None:
            lines += line_of_answer(row, self._view.sort, self._width, whole=self._whole)
        if self._view.sort == "wall" and (remedy := remedy_sentence(self._report)):
            text = sentence(remedy, self._width, whole=self._whole)
            lines += paragraph(text, self._width, "→ ", whole=self._whole)
        return lines

    def _models(self) -> list[Text]:
        """The share of each model, where several take part in the backward, as in a GAN."""
        roots = [row for row in self._report.top(depth=0) if row.is_module]
        large = [row for row in roots if self._report.share(row) >= _LEAST_MODEL]
        if not 1 < len(large) <= _MODELS:
            return []
        facts = [f"{percent(self._report.share(row))} {visible(row.name)}" for row in large]
        return [*fact_lines([f"backward: {facts[0]}", *facts[1:]], self._width)]

    def _phases(self, least: float = 0) -> list[Text]:
        phases = _phase_facts(self._report, least)
        if not phases:
            return []
        return [*fact_lines([f"{self._report.per}: {phases[0]}", *phases[1:]], self._width)]

    def _table(self, chosen: Selection, heading: str = "") -> list[Text]:
        """The ranked modules, or autograd nodes; ``heading`` stands above what no module owns."""
        report, view, width = self._report, self._table_view, self._width
        if only_nodes(report):
            shown = self._nodes[: view.top]
            columns = operator_columns(report, shown, view.sort)
            return lay_out(_with_units(columns), width, whole=self._whole) if shown else []
        columns = module_columns(report, chosen.shown, chosen.unowned, view)
        left_out = {"line"}  # they have their own table
        if not heading and view.order != "headroom":
            left_out.add("detail")
        columns = [column for column in columns if column.kind not in left_out]
        styles = [*("" for _ in chosen.shown), *("dim" for _ in chosen.unowned)]
        table = lay_out(_with_units(columns), width, styles, whole=self._whole)
        if chosen.unowned and heading:
            margin = " " * (len(str(len(chosen.shown))) + 2)
            table.insert(1 + len(chosen.shown), Text(margin + heading, "dim", no_wrap=True))
        return table

    def _paragraph(self, text: Text) -> list[Text]:
        return [*paragraph(text, self._width, whole=self._whole)]


def _with_units(columns: Sequence[Column]) -> list[Column]:
    """The columns with their unit in the heads of the first time and of the amounts."""
    return [
        replace(column, head=column.full_head) if column.kind in ("time", "amount") else column
        for column in columns
    ]


def _packed(facts: Sequence[str]) -> list[str]:
    """Facts with the short ones before the others, which takes fewer lines."""
    return [*facts[:1], *sorted(facts[1:], key=len)]


def _phase_facts(report: Report, least: float = 0) -> list[str]:
    """The phases with at least a share of the step, one fact each: ``22% forward``."""
    phases = [
        phase for phase in kept_phases(report) if abs(phase.wall_ns) >= least * report.step_ns
    ]
    texts = [phase_text(report, phase) for phase in phases]
    return [f"{share} {name}" for name, _, share in texts]


def _report_file(report: Report, *, preview: bool = False) -> bytes:
    view = replace(first_view(report), top=None, preview=preview)
    return (render_text(report, view, width=100, full=True) + "\n").encode()


FORMATS = (Format(".txt", {Report: _report_file}),)
