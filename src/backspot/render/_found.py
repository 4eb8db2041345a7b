"""What was found to be wrong with the step, as lines for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from backspot.render._diagnosis import HEADING, cost_of, kept_phases, phase_text, worth
from backspot.render._table import keep_end
from backspot.report import Finding, Report
from backspot.words import counted, visible

__all__ = ["finding_lines", "phase_facts"]

_MOST = 5


def phase_facts(report: Report) -> list[str]:
    """The step's phases, a fact each: ``22% forward``."""
    texts = [phase_text(report, phase) for phase in kept_phases(report)]
    return [f"{share} {name}" for name, _, share in texts]


def finding_lines(report: Report, width: int) -> Iterator[Text]:
    """A heading, and a paragraph for each of the most expensive findings."""
    if not report.findings:
        return
    yield Text()
    yield Text(HEADING, "bold")
    for number, finding in enumerate(report.findings[:_MOST], 1):
        yield from _hanging(f"{number}. ", _seen(report, finding, width), width)
        yield from _hanging("   ", Text(visible(finding.remedy)), width)
    rest = len(report.findings) - _MOST
    if rest > 0:
        yield Text(f"   {counted(rest, 'more finding')}: report.findings has all.", "dim")


def _seen(report: Report, finding: Finding, width: int) -> Text:
    """What, for how much, and where."""
    text = Text(visible(finding.title), "bold")
    text.append(f": {', '.join(cost_of(report, finding))}", "not bold")
    (place, *_), more = worth(finding, 1)
    text.append(" in ", "not bold")
    text.append(keep_end(visible(place.label), min(width - 8, 70)), "not bold cyan")
    if place.line:
        text.append(f", {keep_end(visible(place.line), min(width - 8, 60))}", "not bold")
    text.append(f" and {more}." if more else ".", "not bold")
    return text


def _hanging(lead: str, text: Text, width: int) -> Iterator[Text]:
    """A paragraph whose lines all begin below the first one's text."""
    console = Console(file=io.StringIO(), width=width, _environ={})
    for index, part in enumerate(text.wrap(console, width - len(lead))):
        part.rstrip()
        line = Text(" " * len(lead) if index else lead, no_wrap=True)
        line.append_text(part)
        yield line
