"""A finding as text for a terminal: in full, or in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from backspot.formatting import visible
from backspot.render._findings import cost_of, has_advice, overlap, place_name, worth
from backspot.render._terminal import keep_end, paragraph
from backspot.render.parts import remarks_on
from backspot.results.findings import Finding
from backspot.results.report import Report
from backspot.styled import Text, cell_len

_BETWEEN_SENTENCES = re.compile(r"(?<=\.) (?=[A-Z(])")


def finding(
    report: Report,
    number: int,
    found: Finding,
    width: int,
    *,
    before: Sequence[Finding] = (),
    whole: bool = False,
    evidence: int | None = None,
    remedy: int | None = None,
) -> list[Text]:
    """A finding as a paragraph: its cost and place, what was seen, the remedy, remarks of parts.

    Of the findings ``before``, those that may count the same time are named.
    ``evidence`` and ``remedy`` say how many sentences there are at most; ``None`` has all.
    """
    text = Text(visible(found.title), "bold")
    text.append(f": {', '.join(cost_of(report, found))}", "not bold")
    places, more = worth(found, 1)
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
    if seen := _sentences(found.seen, evidence):
        lines += paragraph(Text(seen, "dim"), width, "   ", whole=whole)
    if has_advice(found):
        advice = Text(_sentences(found.remedy, remedy))
        lines += paragraph(advice, width, "   → ", whole=whole)
    for one in remarks_on(found):
        said = Text(_sentences(one.said, remedy))
        lines += paragraph(said, width, f"   {one.mark} ", whole=whole)
    if same := overlap(report, found, before):
        lines += paragraph(Text(visible(same), "dim"), width, "   ", whole=whole)
    return lines


def brief_finding(
    report: Report, number: int, found: Finding, width: int, *, whole: bool = False
) -> list[Text]:
    """A finding in a line: its price, and its place if there is room."""
    title, room = visible(found.title), width - len(f"{number}. ")
    price = ", ".join(cost_of(report, found))
    if cell_len(f"{title}: {price}") > room:
        price = ", ".join(cost_of(report, replace(found, saves=None)))
    text = Text(title, "bold")
    text.append(f": {price}", "not bold")
    for one in remarks_on(found):
        if one.brief:
            text.append(f" ({one.brief})", "not bold")
    if len(found.places) == 1 and worth(found, 1)[0]:
        name = f" in {visible(found.path or found.places[0].label)}"
        if cell_len(text.plain + name) <= room:
            text.append(name, "not bold cyan")
    return [*paragraph(text, width, f"{number}. ", whole=whole)]


def _sentences(text: str, most: int | None) -> str:
    """The first sentences of a text from a finding; ``None`` has all."""
    return " ".join(_BETWEEN_SENTENCES.split(visible(text))[:most])
