"""Results as text, pages, tables and files.

A result (``Report``, ``Subtree``, ``Comparison`` or that of a part) comes in; text or bytes come
out. Renderers see results and nothing else: no trace, no model. The package's root hands the
functions of this file to ``presented.py``, so that results can print and save themselves.

In the order in which they build on each other:

- ``view.py``: which rows to show, and the time to rank them by
- ``_words.py``: what sentences are made of
- ``_phases.py``: the phases of a step in words
- ``_sections.py``: columns, tables and sections, which each output lays out in its own way
- ``_memory.py``, ``_limits.py``, ``_plan.py``, ``host.py`` and ``training.py``: what one part
  says, each; ``parts.py`` lists them
- ``_costliest.py``: chooses what costs most in the step
- ``_answer.py``, ``_findings.py`` and ``_facts.py``: what is said of a report in words;
  ``_comparison.py``: the same for a comparison
- ``_columns.py``: the columns of each table, with their cells
- ``_terminal.py``: lays out columns, paragraphs and sentences in a given width
- ``text.py``: a report as text; ``text_parts.py``: source lines, and a module with those inside it;
  ``_findings_text.py``: a finding; ``comparison.py``: a comparison
- ``markdown.py``, ``tables.py`` (CSV and pandas), ``html/``, ``flamegraph.py``,
  ``json.py`` (with ``_consistency.py``, which checks what is read back), ``annotations.py`` (for
  GitHub Actions) and ``notebook.py``: one output each
- ``job.py``: many ranks, in each format; ``_job_words.py`` says it, ``html/_job.py`` is the page
- ``out_of_memory.py``: a training that died of memory; ``_out_of_memory.py`` says it
- ``labelled_trace.py``: a copy of a trace with added tracks
- ``anonymous.py``: a report to share
- ``formats.py``: finds the format for a suffix; ``files.py``: writes a file whole or not at all

Each sentence and each table is written once, as parts and columns, and each output styles them in
its own way. A *part* is a piece of text and what it is: a name, a node, a number or plain text. A
*view* says which rows are shown. A *format* is a kind of file. A module of this folder declares the
formats that it writes in ``FORMATS``, and nothing else has to name them.

Every name comes from a trace and is foreign: each output escapes it. Importing this package is
cheap; an output is imported when it is asked for.
"""

from __future__ import annotations

import os
from html import escape
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from backspot.presented import Presented
from backspot.render.files import check_target, writing
from backspot.render.formats import Renderer, format_for, formats_of, text_of
from backspot.results.comparison import Comparison
from backspot.results.grouping import Subtree
from backspot.results.report import Answer, Report

if TYPE_CHECKING:
    import pandas as pd

Saved = TypeVar("Saved")

__all__ = [
    "as_frame",
    "as_html",
    "as_text",
    "find_answer",
    "read",
    "renderer_for",
    "show",
    "suffixes",
    "write",
]


def suffixes() -> tuple[str, ...]:
    """The suffixes of the formats that a report can be saved in."""
    return tuple(one.suffix for one in formats_of(Report))


def renderer_for(path: str | os.PathLike[str]) -> Renderer:
    """The renderer for a file of a report; ``UsageError`` if no format has the suffix."""
    return format_for(path, Report).renderer(Report)


def as_text(result: Presented | Subtree) -> str:
    """A result as text for a terminal."""
    if isinstance(result, Comparison):
        from backspot.render.comparison import render_comparison

        return render_comparison(result)
    if isinstance(result, Subtree):
        from backspot.render.text_parts import render_subtree

        return render_subtree(result)
    if isinstance(result, Report):
        from backspot.render.text import render_text

        return render_text(result)
    return text_of(type(result))(result)


def find_answer(report: Report) -> Answer:
    """What costs most in the step of a report."""
    from backspot.render._costliest import costliest

    return costliest(report)


def as_html(result: Presented) -> str:
    """A result as HTML for a notebook's cell."""
    from backspot.render.notebook import comparison_html, report_html

    if isinstance(result, Comparison):
        return comparison_html(result)
    if isinstance(result, Report):
        return report_html(result)
    return f"<pre>{escape(as_text(result))}</pre>"


def show(report: Report, height: int, *, preview: bool = False) -> None:
    """Display a report's page in a notebook; the arguments are those of ``Report.show``."""
    from backspot.render.notebook import show_page

    show_page(report, height, preview=preview)


def write(
    result: Presented,
    path: str | os.PathLike[str],
    *,
    force: bool = False,
    preview: bool = False,
) -> Path:
    """Write a result in the format of the path's suffix; the file appears whole or not at all.

    A page or a text has the findings of preview rules only where ``preview`` asks for them.

    Raises what ``check_target`` does, and ``UsageError`` if no format has the suffix.
    """
    kind, sources = type(result), result._made_of()
    render = format_for(path, kind).renderer(kind)
    check_target(path, force=force, sources=sources)
    shows_findings = preview and "preview" in signature(render).parameters
    data = render(result, preview=True) if shows_findings else render(result)
    with writing(path, force=force, sources=sources) as file:
        file.write(data)
    return Path(path)


def read(path: str | os.PathLike[str], kind: type[Saved]) -> Saved:
    """Read a report of one kind that was saved as JSON."""
    from backspot.render.json import load

    return load(path, kind)


def as_frame(report: Report) -> pd.DataFrame:
    """A report's rows as a data frame."""
    from backspot.render.tables import to_frame

    return to_frame(report)
