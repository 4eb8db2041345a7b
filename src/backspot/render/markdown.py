"""Results as Markdown, for an issue or a pull request, in the order of the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from backspot.formatting import counted, visible
from backspot.render._answer import sentences
from backspot.render._columns import module_columns, operator_columns
from backspot.render._comparison import comparison_answer, left_out, sides, tables
from backspot.render._facts import coverage, notes, remedies, savings, setting, units
from backspot.render._findings import (
    HEADING,
    advice_of,
    cost_of,
    listed,
    overlap,
    place_name,
    searched,
    unlisted,
    worth,
)
from backspot.render._phases import explained, kept_phases, phase_text
from backspot.render._remedies import remedy_sentence
from backspot.render._sections import Column, Section
from backspot.render._words import Part
from backspot.render.formats import Format
from backspot.render.parts import compared_by_parts, remarks_on, sections_of
from backspot.render.view import View, only_nodes, operators_by, select
from backspot.results.comparison import Comparison
from backspot.results.report import Report

_TOP = 30
_FINDINGS = 5
_LEFT_OUT = ("bar", "recompute", "forward")


def to_markdown(report: Report, view: View | None = None, *, preview: bool = False) -> bytes:
    """The report as GitHub's Markdown, in UTF-8; ``None`` shows the first 30 modules.

    No name can leave its cell, start a tag or a link, or mention a user.
    """
    view = view or View(top=_TOP, preview=preview)
    chosen = select(report, view)
    sections = sections_of(report, view)
    facts = "; ".join([*setting(report), units(report, sections.facts)])
    first, *others = sentences(report, replace(view, order=None))
    lines = [
        f"**{_sentence(first)}**",
        "",
        *(text for clauses in others for text in (_sentence(clauses), "")),
        *([_sentence(remedy), ""] if (remedy := remedy_sentence(report)) else []),
        f"{facts[0].upper()}{facts[1:]}.",
        "",
    ]
    if phases := [phase_text(report, phase) for phase in kept_phases(report)]:
        goes = ", ".join(f"{name} {time} ({share})" for name, time, share in phases)
        lines += [_text(f"Time in a {report.per}: {goes}."), ""]
    for section in sections.sentences:
        lines += [_text(" ".join(section.said)), ""]
    for section in sections.facts:
        lines += [_facts(section.said), ""]
    for meaning in explained(report):
        lines += [_text(meaning), ""]
    if warnings := remedies(report):
        lines += [*(f"- Warning: {_text(text)}" for text in warnings), ""]
    if only_nodes(report):
        operators = operators_by(report, view.sort)[: view.top]
        lines += _table(operator_columns(report, operators, view.sort))
    else:
        lines += _table(module_columns(report, chosen.shown, chosen.unowned, view))
        lines += ["", *map(_text, [coverage(report), *notes(report, chosen, view)])]
        lines += ["", *map(_text, savings(report, chosen))]
    return _joined(
        [*lines, *_findings(report, view), *_tables(sections.tables), *_last(sections.last)]
    )


def _tables(sections: Sequence[Section]) -> list[str]:
    """The tables of parts, and what these say beside them."""
    lines = []
    for section in sections:
        lines += ["", _facts(section.said)] if section.said else []
        for table in section.tables:
            lines += ["", f"**{table.heading}**", "", *_table(table.columns), "", _text(table.note)]
    return lines


def _last(sections: Sequence[Section]) -> list[str]:
    """What parts say below all else: with a title also tables, sentences and code."""
    lines = []
    for section in sections:
        lines += ["", f"**{_text(section.title)}**"] if section.title else []
        for table in section.tables:
            lines += ["", *_table(table.columns)]
            lines += ["", _text(table.note)] if table.note else []
        for sentence in section.said:
            lines += ["", _text(sentence)]
        for number, (purpose, code) in enumerate(section.code, 1):
            lines += ["", f"{number}. {_text(purpose)}", "", *_block(code)]
    return lines


_BACKTICKS = re.compile(r"`+")


def _block(code: str) -> list[str]:
    """Code in a fence that nothing in it can end."""
    longest = max((len(run) for run in _BACKTICKS.findall(code)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"   {line}" for line in (f"{fence}python", *map(visible, code.splitlines()), fence)]


def comparison_to_markdown(comparison: Comparison, view: View | None = None) -> bytes:
    """The comparison as GitHub's Markdown, in UTF-8; ``None`` shows the 30 largest changes.

    No name can leave its cell, start a tag or a link, or mention a user.
    """
    top = _TOP if view is None else view.top
    recorded = [f"{when}: {_code(name)}, {size}" for when, name, size in sides(comparison)]
    lines = [
        f"**{_sentence(comparison_answer(comparison))}**",
        "",
        f"{comparison.clock.capitalize()} times in ms per step; {'; '.join(recorded)}.",
        "",
        *(f"- Warning: {_text(note)}" for note in comparison.notes),
        *([""] if comparison.notes else []),
    ]
    for texts in compared_by_parts(comparison):
        lines += [_text(texts[0]), "", *(f"- {_text(text)}" for text in texts[1:]), ""]
    for rows, columns in tables(comparison, top):
        lines += [*_table(columns, [change.differs for change in rows]), ""]
    return _joined([*lines, *map(_sentence, left_out(comparison, top))])


FORMATS = (
    Format(".md", {Report: to_markdown, Comparison: comparison_to_markdown}, name="md", top=_TOP),
)


def _joined(lines: Sequence[str]) -> bytes:
    return ("\n".join(lines).rstrip("\n") + "\n").encode()


def _findings(report: Report, view: View) -> list[str]:
    """The findings, with what to do, and how many rules looked."""
    told = [_text(sentence) for sentence in (*unlisted(report, view), searched(report)) if sentence]
    findings = listed(report, View(preview=view.preview))
    if not findings:
        return ["", *told]
    lines = ["", f"**{HEADING}**", ""]
    for number, finding in enumerate(findings[:_FINDINGS], 1):
        places, more = worth(finding, 3)
        named = [
            _code(place_name(place)) + (f", {_code(place.line)}" if place.line else "")
            for place in places
        ]
        place = "; ".join([*named, more] if more else named)
        place = f" in {place}" if place else ""
        cost = _text(", ".join(cost_of(report, finding)))
        lines.append(f"{number}. **{_text(finding.title)}**: {cost}{place}.")
        remedy = advice_of(finding)
        same = overlap(report, finding, findings[: number - 1])
        remarks = [remark.said for remark in remarks_on(finding)]
        texts = [_text(sentence) for sentence in (finding.seen, remedy, *remarks, same) if sentence]
        lines.append(f"   {' '.join(texts)}")
    if len(findings) > _FINDINGS:
        rest = counted(len(findings) - _FINDINGS, "more finding")
        lines += ["", f"{rest}; report.findings lists all."]
    return [*lines, "", *told]


def _table(columns: Sequence[Column], bold_verdicts: Sequence[bool] = ()) -> list[str]:
    """A table's lines; names are aligned left, numbers right."""
    columns = [column for column in columns if column.kind not in _LEFT_OUT]
    heads = [
        "verdict" if column.kind == "verdict" else column.full_head or column.head
        for column in columns
    ]
    rules = ["---" if column.left else "--:" for column in columns]
    rows = [
        [_sentence([cell]) for cell in cells]
        for cells in zip(*(column.cells for column in columns), strict=True)
    ]
    for row, bold in zip(rows, bold_verdicts, strict=False):
        if bold:
            row[-1] = f"**{row[-1]}**"
    return [f"| {' | '.join(cells)} |" for cells in (heads, rules, *rows)]


# Characters that a code span can hold in any reader of Markdown, in tables too.
_PLAIN = re.compile(r"[\w .,:()*/+#%=^-]+\Z")


def _text(text: str) -> str:
    """Text, with all markup escaped."""
    return re.sub(r"[\\`*_\[\]{}<>&|~@$#!^]", lambda match: f"&#{ord(match[0])};", visible(text))


def _code(name: str) -> str:
    """A name as code, or as plain text if not every reader can show it as code."""
    shown = visible(name)
    if _PLAIN.match(shown) and shown == shown.strip():
        return f"`{shown}`"
    return "".join(
        character if character.isalnum() or character == " " else f"&#{ord(character)};"
        for character in shown
    )


def _facts(facts: Sequence[str]) -> str:
    """Facts in one sentence."""
    text = "; ".join(facts)
    return _text(f"{text[0].upper()}{text[1:]}.")


def _sentence(clauses: Sequence[Part]) -> str:
    """A sentence, with names as code."""
    return "".join(
        _code(text) if kind in ("name", "node") else _text(text) for kind, text in clauses
    )
