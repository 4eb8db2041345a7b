"""Findings as annotations of GitHub Actions, which shows them beside the lines of a change.

Source: "Workflow commands for GitHub Actions", setting a warning message, and the escapes of its
toolkit (`@actions/core`, `command.ts`).
"""

from __future__ import annotations

from collections.abc import Mapping

from backspot.formatting import visible
from backspot.render._answer import sentences
from backspot.render._findings import cost_of, listed, place_name
from backspot.render.formats import Format
from backspot.render.view import View
from backspot.results.findings import Finding
from backspot.results.report import Report

_IN_TEXT = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_IN_PROPERTY = {**_IN_TEXT, ":": "%3A", ",": "%2C"}


def to_annotations(report: Report, view: View | None = None, *, preview: bool = False) -> bytes:
    """The answer and the findings as workflow commands in UTF-8, one a line.

    A finding stands at the line of its first place that has one, else beside the whole run, as the
    answer does.
    """
    view = view or View(preview=preview)
    answer_text = " ".join(
        "".join(text for _, text in clauses) for clauses in sentences(report, view)
    )
    lines = [f"::notice title=Backspot::{_escaped(answer_text, _IN_TEXT)}"]
    lines += [_annotation(report, finding) for finding in listed(report, view)]
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")


def _annotation(report: Report, finding: Finding) -> str:
    place = next((place for place in finding.places if place.line), finding.places[0])
    file, _, number = place.line.rpartition(":")
    properties = {"file": file, "line": number} if file else {}
    properties["title"] = f"{finding.title} ({finding.rule})"
    cost_text = ", ".join(cost_of(report, finding))
    text = f"{place_name(place)}: {cost_text}. {finding.remedy}"
    named = ",".join(
        f"{name}={_escaped(value, _IN_PROPERTY)}" for name, value in properties.items()
    )
    return f"::warning {named}::{_escaped(text, _IN_TEXT)}"


def _escaped(text: str, escapes: Mapping[str, str]) -> str:
    return visible(text).translate({ord(character): code for character, code in escapes.items()})


FORMATS = (Format(".github.txt", {Report: to_annotations}, name="github", has_warnings=False),)
