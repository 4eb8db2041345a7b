"""A report in the time of real steps, as people read it where steps were timed unrecorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from backspot.results.costs import Row, WallKinds
from backspot.results.findings import Finding
from backspot.results.grouping import add_totals, ranked_rows
from backspot.results.report import Report, changed

Cost = TypeVar("Cost", bound=Any)
STEP = "(step)"


def real_parts(report: Report) -> dict[str, float]:
    """Return how long each place takes in a real step, as a part of its recorded time.

    A place is the path of a row, a phase as ``(loss)``, or the whole ``STEP``. Empty where no real
    step was timed.
    """
    if report.unprofiled_step_ns is None or not _has_real_times(report):
        return {}
    return {
        STEP: report.unprofiled_step_ns / max(1, report.step_ns),
        **{f"({one.name})": _part(one) for one in report.phases},
        **{row.path: _part(row) for row in report.modules if row.wall_ns},
    }


def _has_real_times(report: Report) -> bool:
    return any(one.unprofiled_ns is not None for one in report.phases)


def _part(one: Any) -> float:
    return float((one.unprofiled_ns or 0) / one.wall_ns) if one.wall_ns else 1.0


def real_cost(finding: Finding, parts: Mapping[str, float]) -> Finding:
    """Return a finding with the times that it has in a real step."""
    places = tuple(
        replace(one, wall_ns=int(one.wall_ns * parts.get(one.path, parts[STEP])))
        for one in finding.places
    )
    recorded = sum(one.wall_ns for one in finding.places)
    part = sum(one.wall_ns for one in places) / recorded if recorded else parts[STEP]
    return replace(finding, places=places, wall_ns=int(finding.wall_ns * part))


def in_real_time(report: Report) -> Report:
    """Return the report with all times as parts of a real step, for people to read.

    Work of devices keeps its length. What is known of a row by node, by line and by step is scaled
    as the row is. Where no real step was timed, the report is as it is: recorded.
    """
    parts = real_parts(report)
    if not parts:
        return report
    forward = parts.get("(forward)", parts[STEP])
    rows = ranked_rows(
        add_totals([_real_row(row, _part(row), forward, report.has_gpu) for row in report.modules])
    )
    was, now = Counter[str](), Counter[str]()
    for into, some in ((was, report.modules), (now, rows)):
        for row in some:
            into.update({node.name: node.wall_ns for node in row.nodes})
    backward = sum(row.wall_ns for row in rows)
    part = backward / max(1, report.wall_ns)
    return changed(
        report,
        modules=rows,
        operators=tuple(
            _scaled(one, now[one.name] / was[one.name] if was[one.name] else part)
            for one in report.operators
        ),
        phases=tuple(
            replace(
                one,
                wall_ns=one.unprofiled_ns or 0,
                busy_ns=min(one.busy_ns, one.unprofiled_ns or 0),
                wall_ns_by_step=_each(one.wall_ns_by_step, _part(one)),
                unprofiled_ns=None,
            )
            for one in report.phases
        ),
        launches=tuple(
            replace(one, idle_ns=int(one.idle_ns * parts.get(f"({one.phase})", parts[STEP])))
            for one in report.launches
        ),
        findings=tuple(real_cost(one, parts) for one in report.findings),
        step_ns=report.unprofiled_step_ns,
        wall_ns=backward,
        cpu_ns=sum(row.cpu_ns for row in rows),
        step_ns_by_step=_each(report.step_ns_by_step, parts[STEP]),
        wall_ns_by_step=_each(report.wall_ns_by_step, part),
        cpu_ns_by_step=_each(report.cpu_ns_by_step, part),
    )


def _real_row(row: Row, part: float, forward: float, has_gpu: bool) -> Row:
    on = row.wall_on
    wall = int(row.unprofiled_ns or 0)
    device = on.gpu_ns + on.communication_ns + on.queued_ns
    host = on.sync_ns + on.host_ns
    of_device = min(1.0, wall / device) if device else 1.0
    of_host = max(0.0, wall - device * of_device) / host if host else 0.0
    return replace(
        row,
        wall_ns=wall,
        cpu_ns=int(row.cpu_ns * part),
        forward_ns=int(row.forward_ns * forward),
        recompute_ns=int(row.recompute_ns * part),
        split_ns=int(row.split_ns * part),
        nodes=tuple(_scaled(one, part) for one in row.nodes),
        lines=tuple(_scaled(one, part) for one in row.lines),
        kernels=row.kernels
        if has_gpu
        else tuple(replace(one, spent_ns=int(one.spent_ns * part)) for one in row.kernels),
        wall_on=WallKinds(
            int(on.gpu_ns * of_device),
            int(on.communication_ns * of_device),
            int(on.queued_ns * of_device),
            int(on.sync_ns * of_host),
            int(on.host_ns * of_host),
        ),
        wall_ns_by_step=_each(row.wall_ns_by_step, part),
        cpu_ns_by_step=_each(row.cpu_ns_by_step, part),
        forward_ns_by_step=_each(row.forward_ns_by_step, forward),
        unprofiled_ns=None,
    )


def _scaled(one: Cost, part: float) -> Cost:
    """The cost of a node or of a line, scaled."""
    scaled: Cost = replace(one, wall_ns=int(one.wall_ns * part), cpu_ns=int(one.cpu_ns * part))
    return scaled


def _each(by_step: tuple[int, ...], part: float) -> tuple[int, ...]:
    return tuple(int(ns * part) for ns in by_step)
