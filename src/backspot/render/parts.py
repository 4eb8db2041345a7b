"""The parts that say something of a report beside its rows, in the order in which outputs have it.

A part is a file here with its ``Saying``, and an entry in this list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from backspot.render import _limits, _memory, _out_of_memory, _plan, _trials, host, training
from backspot.render._sections import Amount, Column, Cost, Fields, Lead, Remark, Saying, Section
from backspot.render.view import DEFAULT_VIEW, View
from backspot.results.comparison import Comparison
from backspot.results.costs import Row
from backspot.results.findings import Finding, FirstRemedy
from backspot.results.report import Report

PARTS: tuple[Saying, ...] = (
    *(_out_of_memory.SAYING, training.SAYING, host.SAYING, _memory.SAYING),
    *(_limits.SAYING, _trials.SAYING, _plan.SAYING),
)


class Sections(NamedTuple):
    """What the parts say of a report, by the kind of section."""

    facts: Sequence[Section]
    sentences: Sequence[Section]
    tables: Sequence[Section]
    last: Sequence[Section]


def sections_of(report: Report, view: View = DEFAULT_VIEW) -> Sections:
    """Return what the parts say of a report."""
    all_sections = [section for part in PARTS for section in part.sections(report, view)]
    return Sections(
        *(
            [section for section in all_sections if section.kind == kind]
            for kind in Sections._fields
        )
    )


def columns_of_parts(
    report: Report, rows: Sequence[Row], view: View, ms: Callable[[int], str]
) -> list[Column]:
    """Return what the parts add to the table of modules."""
    return [column for part in PARTS for column in part.columns(report, rows, view, ms)]


def fields_of_parts(report: Report) -> list[Fields]:
    """Return what the parts add to the table for programs."""
    all_fields = [part.fields(report) for part in PARTS]
    return [fields for fields in all_fields if fields is not None]


def page_of_parts(report: Report) -> dict[str, Any]:
    """Return what the script of a page needs of the parts."""
    return {name: value for part in PARTS for name, value in part.page(report).items()}


def amounts_of_parts(report: Report) -> list[Amount]:
    """Return what else than time a page can measure rows by."""
    return [amount for part in PARTS for amount in part.amounts(report)]


def needs_of_parts() -> dict[str, str]:
    """Return what the rules of parts need, in words."""
    return {need: words for part in PARTS for need, words in part.needs.items()}


def remarks_on(finding: Finding) -> list[Remark]:
    """Return what the parts say of a finding, beside its remedy."""
    all_remarks = [part.remark(finding) for part in PARTS]
    return [remark for remark in all_remarks if remark is not None]


def costs_of_parts(report: Report) -> list[Cost]:
    """Return what else than modules, phases and findings may cost most in the step."""
    return [cost for part in PARTS for cost in part.costs(report)]


def remedies_of_parts(report: Report) -> list[FirstRemedy]:
    """Return what can be done beside the remedies of findings, with its price."""
    return [remedy for part in PARTS for remedy in part.remedies(report)]


def compared_by_parts(comparison: Comparison) -> list[Sequence[str]]:
    """Return what the parts say of a comparison, each a heading and the sentences below it."""
    all_texts = [part.compared(comparison) for part in PARTS]
    return [texts for texts in all_texts if texts]


def leads(report: Report) -> list[Lead]:
    """Return what a screen can begin with in place of the time."""
    all_leads = [part.lead(report) for part in PARTS]
    return [lead for lead in all_leads if lead is not None]


def first_view(report: Report) -> View:
    """Return what a terminal shows first: what was asked for at recording, else who is slow."""
    views = (View(order=lead.order) for lead in leads(report) if lead.is_asked)
    return next(views, DEFAULT_VIEW)
