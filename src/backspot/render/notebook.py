"""Results in a notebook: a small static table in the notebook's own colours, without a script.

``report.show()`` shows the whole page, in a frame.
"""

from __future__ import annotations

import sys
from html import escape
from typing import Any

from backspot.checks import is_whole
from backspot.errors import UsageError
from backspot.formatting import counted, quoted
from backspot.render._answer import sentences, view_of_answer
from backspot.render._comparison import comparison_answer, recordings
from backspot.render._facts import coverage, remedies, savings
from backspot.render._words import KINDS
from backspot.render.html import asset, to_html
from backspot.render.html._comparison import change_tables, said_by_parts
from backspot.render.html._findings import findings_list, first_to_do
from backspot.render.html._fragments import (
    facts_list,
    facts_of,
    last_of,
    line_of_answer,
    module_table,
    operator_table,
    phases_bar,
    sentence,
    shown,
    tables_of,
    warnings_list,
)
from backspot.render.parts import sections_of
from backspot.render.view import only_nodes, select
from backspot.results.comparison import Comparison
from backspot.results.report import Report

_ROWS = 10
_FINDINGS = 3


def report_html(report: Report, *, preview: bool = False) -> str:
    """A report for a cell of a notebook: the answer, the first rows, and what to do."""
    first, *others = sentences(report)
    sections = sections_of(report)
    fragments = [
        f'<p class="said">{sentence(first)}</p>',
        *(f"<p>{sentence(clauses)}</p>" for clauses in others),
        line_of_answer(report),
        first_to_do(report),
        facts_of(report, sections.facts),
        warnings_list(remedies(report)),
        phases_bar(report),
    ]
    if only_nodes(report):
        fragments.append(_scroll(operator_table(report, _ROWS)))
    else:
        view = view_of_answer(report, _ROWS)
        chosen = select(report, view)
        fragments.append(_scroll(module_table(report, chosen, view, lines=True) + _legend(report)))
        more = counted(len(chosen.hidden), "more module" if view.by == "path" else "more row")
        rest = f" {more}: see report.show()." if chosen.hidden else ""
        fragments.append(f'<p class="muted">{shown(coverage(report) + rest)}</p>')
        fragments += [f'<p class="muted">{shown(text)}</p>' for text in savings(report, chosen)]
    findings = findings_list(report, shown_first=_FINDINGS, preview=preview)
    last = last_of(sections.last)
    return _whole([*fragments, findings, tables_of(sections.tables), last])


def show_page(report: Report, height: int, *, preview: bool = False) -> None:
    """Display the page of a report in a frame; raises what ``Report.show`` raises."""
    if not is_whole(height, 1):
        raise UsageError(f"height={quoted(height)}: give a whole number of pixels of at least 1")
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        raise UsageError(
            'show() is for notebooks; report.save("report.html") writes the page as a file'
        )
    from IPython.display import display

    show: Any = display  # untyped
    # Two forms: IPython in a terminal shows the text.
    show(
        {"text/html": page_frame(report, height, preview=preview), "text/plain": str(report)},
        raw=True,
    )


def page_frame(report: Report, height: int, *, preview: bool = False) -> str:
    """The page of a report in a frame, which keeps its styles and scripts apart."""
    page = escape(to_html(report, preview=preview).decode(), quote=True)
    return (
        f'<iframe title="Backspot\'s report" srcdoc="{page}" sandbox="allow-scripts allow-popups" '
        f'width="100%" height="{height}" style="border: 0"></iframe>'
    )


def comparison_html(comparison: Comparison) -> str:
    """A comparison for a cell of a notebook: the answer, and the largest changes."""
    return _whole(
        [
            f'<p class="said">{sentence(comparison_answer(comparison))}</p>',
            facts_list(recordings(comparison)),
            warnings_list(comparison.notes),
            said_by_parts(comparison),
            *change_tables(comparison, _ROWS),
        ]
    )


def _scroll(table: str) -> str:
    """A table that may be wider than the cell, and leaves out columns where that is narrow."""
    return f'<div class="scroll">{table}</div>'


def _legend(report: Report) -> str:
    """The colours that occur in the bars."""
    used = [
        (kind, name)
        for kind, name in KINDS.items()
        if any(getattr(row.wall_on, f"{kind}_ns") for row in report.modules)
    ]
    if not report.has_gpu or not used:
        return ""
    entries = "".join(f'<li><i class="k-{kind}"></i>{name}</li>' for kind, name in used)
    return f'<ul class="legend" aria-label="Colours">{entries}</ul>'


def _whole(fragments: list[str]) -> str:
    style = f"<style>{asset('notebook.css')}</style>"
    return f'<div class="backspot">{style}{"".join(fragments)}</div>'
