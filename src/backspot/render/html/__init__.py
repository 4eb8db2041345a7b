"""A report as a page: one file that needs no network, and shows what matters without a script.

A ``Report`` comes in, and the bytes of one HTML file come out, in which everything is inlined:

1. ``_fragments.py`` writes the HTML that needs no script: answer, warnings, phases, findings and
   tables. Notebooks use it too.
2. What parts draw, if it is recorded, with ``plots.css``: ``_step.py`` one step of host and GPU,
   ``_training.py`` all steps of a training, ``_plan.py`` the ladder of a plan, ``_memory.py``
   memory over time and ``_roofline.py`` the roofline, both by ``_plots.py``; ``_findings.py``
   writes the findings.
3. ``_page_data.py`` writes the rows of the report for the script: their JSON, deflated.
4. ``to_html`` puts all into ``report.html``, with ``explorer.html``, and adds the scripts in the
   order of ``_SCRIPTS``: ``model.js`` (the data as a tree), ``icicle.js`` (the module tree),
   ``table.js``, ``details.js`` (one module) and ``report.js`` (the state of the page). With a
   script, the *explorer* (tree, filter, table, details) replaces the static table.

``_job.py`` writes the page of many ranks, with ``job.css``, and ``_comparison.py`` that of a
comparison, with ``comparison.css``. All pages have one frame, ``page.html`` with ``report.css``,
and ``theme.js`` for the choice of light or dark.

Every name comes from a trace. Python escapes it in ``_fragments.shown``; the scripts insert it as
text only; the content security policy forbids every other script and every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import Template

from backspot._version import __version__
from backspot.formatting import counted, visible
from backspot.render._answer import sentences, view_of_answer
from backspot.render._facts import coverage, recording, remedies, savings
from backspot.render._sections import Section
from backspot.render._words import Part
from backspot.render.formats import Format
from backspot.render.html._comparison import comparison_to_html
from backspot.render.html._findings import findings_list, first_to_do, verdict_of_answer
from backspot.render.html._fragments import (
    asset,
    facts_of,
    line_of_answer,
    module_table,
    operator_table,
    page,
    phases_bar,
    sentence,
    shown,
    tables_of,
    warnings_list,
)
from backspot.render.html._memory import memory_over_time
from backspot.render.html._page_data import page_data
from backspot.render.html._plan import plan_ladder
from backspot.render.html._roofline import roofline
from backspot.render.html._step import step_lanes
from backspot.render.html._training import training_picture
from backspot.render.parts import sections_of
from backspot.render.view import only_nodes, select
from backspot.results.comparison import Comparison
from backspot.results.report import Report

__all__ = ["FORMATS", "asset", "to_html"]

_SCRIPTS = ("model.js", "icicle.js", "table.js", "details.js", "report.js")
_STEP = (plan_ladder, step_lanes, training_picture)
"""What parts draw above the findings."""
_PLOTS = (memory_over_time, roofline)
"""What parts draw below the modules."""
_STATIC_ROWS = 25
_FINDINGS = 5
_OPERATORS = 200


def to_html(report: Report, *, preview: bool = False) -> bytes:
    """The report as a page in UTF-8, with the findings of preview rules where these are wanted."""
    plain = only_nodes(report)
    sections = sections_of(report)
    tables = tables_of(sections.tables)
    step, plots = ("".join(draw(report) for draw in drawings) for drawings in (_STEP, _PLOTS))
    first, *others = sentences(report)
    rows, notes = _operators(report) if plain else _modules(report)
    main = Template(asset("report.html")).substitute(
        recorded=shown(" · ".join([*recording(report), f"Backspot {__version__}"])),
        answer=sentence(first),
        more="".join(f'<p class="more-said">{sentence(clauses)}</p>' for clauses in others),
        line=line_of_answer(report),
        first=first_to_do(report),
        verdict=verdict_of_answer(report),
        setting=facts_of(report, sections.facts),
        warnings=warnings_list(remedies(report)),
        phases=phases_bar(report),
        step=step,
        host=tables,
        findings=findings_list(report, shown_first=_FINDINGS, preview=preview),
        plots=f'<div class="plots">{plots}</div>' if plots else "",
        heading="Autograd nodes" if plain else "Modules",
        explorer="" if plain else asset("explorer.html"),
        table=rows,
        notes=notes,
        reading="" if plain else _reading(report, sections.facts),
    )
    data = "" if plain else page_data(report, preview=preview)
    return page(
        _title(first),
        report.trace,
        main,
        f"Times are those of a typical {report.per}, in ms: the mean over the recorded ones "
        "that nothing held up.",
        styles=("plots.css",) if plots or step or tables else (),
        scripts=_SCRIPTS,
        data=f'<script type="text/plain" id="report">{data}</script>',
    )


FORMATS = (Format(".html", {Report: to_html, Comparison: comparison_to_html}),)


def _title(title: Sequence[Part]) -> str:
    text = visible("".join(text for _, text in title))
    return f"{text[:100]} · Backspot"


def _modules(report: Report) -> tuple[str, str]:
    """The table for pages without a script, and the notes below it."""
    view = view_of_answer(report, _STATIC_ROWS)
    chosen = select(report, view)
    hidden = ""
    if chosen.hidden or chosen.idle:
        rest = counted(len(chosen.hidden) + chosen.idle, "more module")
        hidden = f' <span class="no-script">{rest} if scripts may run.</span>'
    notes = f'<p class="muted">{shown(coverage(report))}{hidden}</p>'
    savings_text = "".join(
        f'<p class="muted">{shown(text)}</p>' for text in savings(report, chosen)
    )
    return module_table(report, chosen, view), notes + savings_text


def _operators(report: Report) -> tuple[str, str]:
    rest = len(report.operators) - _OPERATORS
    more = f'<p class="muted">{counted(rest, "more node name")} in the JSON report.</p>'
    return operator_table(report, _OPERATORS), more if rest > 0 else ""


def _reading(report: Report, sections: Sequence[Section]) -> str:
    """The terms of the page's table and tree, folded away; only those that the report has.

    What a module saves is in the notes above, which also say how exact it is.
    """
    known = [
        ("tree", "a block is as wide as its module's time, with the modules inside it"),
        (
            "wall",
            "the clock time that a module is responsible for; all rows add up to the backward",
        ),
    ]
    if report.has_gpu:
        known.append(("GPU", "the time of the module's kernels and copies, added up"))
    known += [
        ("CPU", "the time that the host spends in the module's autograd nodes"),
        ("bwd ÷ fwd", "the wall time over the clock time of the module's forward; 2 is common"),
    ]
    known += [term for section in sections for term in section.terms]
    terms = "<br>".join(f"<b>{term}</b>: {meaning}" for term, meaning in known)
    return f'<details class="reading"><summary>How to read this</summary><p>{terms}</p></details>'
