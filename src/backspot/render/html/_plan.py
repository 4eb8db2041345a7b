"""The ladder of a plan on a page: a bar for the step as it is, and one for each rung."""

from __future__ import annotations

from backspot.render._plan import code_of, heading, hint, ladder_columns, note_of, sentences_on
from backspot.render._sections import Column, Section
from backspot.render.html._fragments import code_list, shown
from backspot.results.plan import Plan
from backspot.results.report import Report

_NARROW = {"loss": " o2", "gradients": " o2", "memory": " o1", "±": " o1"}
"""The columns that go where it is narrow, ``o2`` first. How far outputs are stays."""


def plan_ladder(report: Report) -> str:
    """The plan with its ladder, or that one can be made; nothing where it cannot."""
    plan = report.plan
    if plan is None:
        hint_text = hint(report)
        return f'<p class="muted plan-hint">{shown(hint_text)}</p>' if hint_text else ""
    sentences = "".join(f"<p>{shown(text)}</p>" for text in sentences_on(report, plan))
    code = code_list(Section("last", "plan", code=code_of(plan)))
    return (
        f'<section class="laddered"><h2>{shown(heading(plan))}</h2>{_table(plan)}'
        f'<div class="laddered-said">{sentences}</div>{code}</section>'
    )


def _table(plan: Plan) -> str:
    """The ladder as a table whose second column is the picture."""
    if not plan.ladder:
        return ""
    columns = [column for column in ladder_columns(plan) if column.head != "before"]
    head = "".join(
        f'<th scope="col"{_class(column)}>{shown(column.full_head or column.head)}</th>'
        for column in columns[1:]
    )
    bars = _bars(plan)
    rows = "".join(
        f'<tr><th scope="row">{shown(columns[0].cells[index][1])}</th><td class="b">{bar}</td>'
        + "".join(
            f"<td{_class(column)}>{shown(column.cells[index][1])}</td>" for column in columns[1:]
        )
        + "</tr>"
        for index, bar in enumerate(bars)
    )
    note = f'<p class="muted small">{shown(text)}</p>' if (text := note_of(plan)) else ""
    drawn = '<th scope="col"><span class="unseen">drawn</span></th>'
    return (
        f'<div class="table-box"><table class="ladder"><thead><tr><th scope="col">setting</th>'
        f"{drawn}{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"{note}"
    )


def _class(column: Column) -> str:
    return f' class="n{_NARROW.get(column.head, "")}"'


def _bars(plan: Plan) -> list[str]:
    """A bar for each step, with its interval; the longest fills the column."""
    steps = [(plan.step_ns, plan.step_ns, plan.step_ns)]
    steps += [(rung.step_ns, rung.low_ns, rung.high_ns) for rung in plan.ladder]
    longest = max(max(step) for step in steps) or 1
    return [
        '<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{ns:.2f}" height="10"/>'
        f'<path d="M{low:.2f} 2V8M{low:.2f} 5H{high:.2f}M{high:.2f} 2V8"/></svg>'
        for ns, low, high in (
            (100 * nanoseconds / longest for nanoseconds in step) for step in steps
        )
    ]
