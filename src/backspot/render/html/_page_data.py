"""The data of a page, for its script: the rows of the report as its JSON has them.

With them goes what only Python knows of them. The data is deflated and in base64, so that it is
small and nothing in it can end the element around it.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import replace
from typing import Any

from backspot.render._answer import answered
from backspot.render._words import KINDS
from backspot.render.html._findings import findings_data
from backspot.render.json import compact
from backspot.render.parts import amounts_of_parts, page_of_parts
from backspot.render.view import unowned_rows
from backspot.results.costs import Row
from backspot.results.grouping import fold, parents_of
from backspot.results.report import By, Report
from backspot.trace.labels import Kind, Label, readable_label

_MODULES = 2_400
"""The largest number of modules that a page shows one by one: it stays below 1 MB."""
_STEPS = 60
"""The number of steps that are drawn one by one."""
_GROUPS: tuple[By, ...] = ("pattern", "class")


def page_data(report: Report, *, preview: bool = False) -> str:
    """The report for the page's script: JSON, deflated, in base64."""
    modules = _modules(report)
    around = parents_of(modules)
    place = {row.path: index for index, row in enumerate(modules)}
    answer = answered(report)
    data = {
        "rows": [
            *(
                _row(report, row, -1 if (outer := around[row.path]) is None else place[outer])
                for row in modules
            ),
            *(_row(report, row, -1) for row in unowned_rows(report.modules)),
        ],
        "whole": [report.wall_ns, report.gpu_ns, report.cpu_ns],
        "steps": report.steps,
        "per": report.per,
        "gpu": report.has_gpu,
        "kinds": KINDS,
        "saves": bool(report.replayed_step or report.not_replayed),
        "labelled": report.source == "backspot",
        "modules": sum(row.is_module for row in report.modules),
        **page_of_parts(report),
        "amounts": amounts_of_parts(report),
        "groups": {
            # Limits and savings of modules do not add up to those of their group.
            by: [
                [row.path, row.class_name, report.limit(row), row.saves]
                for row in report.top(by=by)
                if row.is_module and (row.saves or report.limit(row))
            ]
            for by in _GROUPS
        },
        "answer": None if answer is None else [answer.path, answer.members > 1],
        "findings": findings_data(report, place, preview=preview),
    }
    return base64.b64encode(zlib.compress(compact(data), 9)).decode()


def _modules(report: Report) -> list[Row]:
    """The modules to show; of very many, the smallest are added to the modules around them."""
    rows = [row for row in report.modules if row.is_module]
    if len(rows) <= _MODULES:
        return rows
    totals_of_report = [
        max(1, total_of_report)
        for total_of_report in (report.wall_ns, report.gpu_ns, report.cpu_ns)
    ]

    def weight(row: Row) -> float:  # a parent's total is at least that of its children
        totals = (row.total_wall_ns, row.total_gpu_ns, row.total_cpu_ns)
        return max(
            total / total_of_report
            for total, total_of_report in zip(totals, totals_of_report, strict=True)
        )

    rows.sort(key=lambda row: (-weight(row), len(row.path)))
    shown_paths = {row.path for row in rows[:_MODULES]}
    return list(fold(rows, None, shown_paths.__contains__))


def _row(report: Report, row: Row, parent: int) -> dict[str, Any]:
    """A row, the index of the row around it, and what the page says of it."""
    steps = row.wall_ns_by_step
    shown = replace(
        row,
        wall_ns_by_step=steps[:_STEPS],
        gpu_ns_by_step=(),
        cpu_ns_by_step=(),
        forward_ns_by_step=(),
    )
    label = readable_label(Label(Kind.BACKWARD, row.path, row.class_name))
    return {
        "row": shown,
        "parent": parent,
        "label": label if row.is_module else "",
        "limit": report.limit(row) if row.work is not None else None,
        "spread": [min(steps, default=0), max(steps, default=0)],
    }
