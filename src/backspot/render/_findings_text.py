"""A finding as text for a terminal: in full, or in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from backspot.formatting import visible
from backspot.render._findings import advice_of, cost_of, overlap, place_name, worth
from backspot.render._terminal import keep_end, paragraph
from backspot.render.parts import remarks_on
from backspot.results.findings import Finding
from backspot.results.report import Report
from backspot.styled import Text, cell_len

_BETWEEN_SENTENCES = re.compile(r"(?<=\.) (?=[A-Z(])")


def finding(
    report: Report,
    number: int,
    cause: Finding,
    width: int,
    *,
    before: Sequence[Finding] = (),
    whole: bool = False,
    evidence: int | None = None,
    remark: int | None = None,
) -> list[Text]:
    """A finding as a paragraph: its cost and place, what was seen, the remedy, remarks of parts.

    Of the findings ``before``, those that may count the same time are named.
    ``evidence`` and ``remark`` say how many sentences there are at most; ``None`` has all.
    """
    text = Text(visible(cause.title), "bold")
    text.append(f": {', '.join(cost_of(report, cause))}", "not bold")
    places, more = worth(cause, 1)
    for place in places:
        label, line = visible(place_name(place)), visible(place.line)
        if not whole:
            label, line = keep_end(label, min(width - 8, 70)), keep_end(line, min(width - 8, 60))
        text.append(" in ", "not bold")
        text.append(label, "not bold cyan")
        if line:
            text.append(f", {line}", "not bold")
    text.append(f" and {more}." if more else ".", "not bold")
    lines = [*paragraph(text, width, f"{number}. ", whole=whole)]
    if evidence_text := _sentences(cause.seen, evidence):
        lines += paragraph(Text(evidence_text, "dim"), width, "   ", whole=whole)
    if advice := advice_of(cause):
        lines += paragraph(Text(visible(advice)), width, "   → ", whole=whole)
    for said in remarks_on(cause):
        remark_text = Text(_sentences(said.said, remark))
        lines += paragraph(remark_text, width, f"   {said.mark} ", whole=whole)
    if same := overlap(report, cause, before):
        lines += paragraph(Text(visible(same), "dim"), width, "   ", whole=whole)
    return lines


def brief_finding(
    report: Report, number: int, cause: Finding, width: int, *, whole: bool = False
) -> list[Text]:
    """A finding in a line: its price, and its place if there is room."""
    title, room = visible(cause.title), width - len(f"{number}. ")
    price = ", ".join(cost_of(report, cause))
    if cell_len(f"{title}: {price}") > room:
        price = ", ".join(cost_of(report, replace(cause, saves=None)))
    text = Text(title, "bold")
    text.append(f": {price}", "not bold")
    for remark in remarks_on(cause):
        if remark.brief:
            text.append(f" ({remark.brief})", "not bold")
    if len(cause.places) == 1 and worth(cause, 1)[0]:
        name = f" in {visible(cause.path or cause.places[0].label)}"
        if cell_len(text.plain + name) <= room:
            text.append(name, "not bold cyan")
    return [*paragraph(text, width, f"{number}. ", whole=whole)]


def _sentences(text: str, most: int | None) -> str:
    """The first sentences of a text from a finding; ``None`` has all."""
    return " ".join(_BETWEEN_SENTENCES.split(visible(text))[:most])
