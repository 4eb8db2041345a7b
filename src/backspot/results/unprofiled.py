"""Results in the time of real steps, as people read them where steps were timed unrecorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from backspot.results.costs import Phase, Row, WallKinds
from backspot.results.findings import Finding
from backspot.results.grouping import Subtree, add_totals, ranked_rows, subtree_of
from backspot.results.report import Report, changed

Cost = TypeVar("Cost", bound=Any)
STEP = "(step)"
"""The key of the whole step in ``real_parts``."""


def real_parts(report: Report) -> dict[str, float]:
    """Return how long each place takes in a real step, as a part of its recorded time.

    A place is the path of a row, a phase as ``(loss)``, or ``STEP``, which holds for all others.
    Empty where no real step was timed, and where the times are those of one already.
    """
    if report.unprofiled_step_ns is None or not report.phases or not report.step_ns:
        return {}
    whole = report.unprofiled_step_ns / report.step_ns
    if whole == 1 and all(one.unprofiled_ns is None for one in report.phases):
        return {}

    def part(one: Any) -> float:
        known = one.wall_ns and one.unprofiled_ns is not None
        return float(one.unprofiled_ns / one.wall_ns) if known else whole

    phases = {f"({one.name})": part(one) for one in report.phases}
    return {STEP: whole, **phases, **{row.path: part(row) for row in report.modules}}


def real_cost(finding: Finding, parts: Mapping[str, float], step_ns: int | None = None) -> Finding:
    """Return a finding with the times that it has in a real step.

    Args:
        parts: as ``real_parts`` has them.
        step_ns: the real step, which the finding does not exceed: the parts of rows are those of
            the backward, so a cause that is in the forward as well can come out too long.
    """
    places = tuple(
        replace(one, wall_ns=int(one.wall_ns * parts.get(one.path, parts[STEP])))
        for one in finding.places
    )
    recorded = sum(one.wall_ns for one in finding.places)
    part = sum(one.wall_ns for one in places) / recorded if recorded else parts[STEP]
    wall_ns = int(finding.wall_ns * part)
    most = wall_ns if step_ns is None else step_ns
    return replace(finding, places=places, wall_ns=min(wall_ns, most))


def in_real_time(report: Report) -> Report:
    """Return the report with all times as parts of a real step, for people to read.

    Work of devices keeps its length. What is known of a row by node, by line and by step is scaled
    as the row is. Where no real step was timed, the report is as it is: recorded.
    """
    known: Report | None = getattr(report, "_real", None)
    if known is None:
        known = _in_real_time(report)
        if known is not report:
            object.__setattr__(report, "_real", known)
    return known


def subtree_in_real_time(subtree: Subtree) -> Subtree:
    """Return a module with those inside it as ``in_real_time`` has it."""
    rows, left = [], [subtree]
    while left:
        one = left.pop()
        left += one.children
        row, ns = one.row, one.row.unprofiled_ns
        part = 1.0 if ns is None else ns / max(1, row.wall_ns)
        rows.append(replace(_scaled(row, part), wall_ns=row.wall_ns if ns is None else ns))
    real = {row.path: row for row in add_totals(rows)}
    return subtree_of(real[subtree.row.path], real)


def _in_real_time(report: Report) -> Report:
    parts = real_parts(report)
    if not parts:
        return report
    forward = parts.get("(forward)", parts[STEP])
    real = [_real_row(row, parts[row.path], forward, report.has_gpu) for row in report.modules]
    rows = ranked_rows(add_totals(real))
    wall = sum(row.wall_ns for row in rows)
    was, now = Counter[str](), Counter[str]()
    for into, some in ((was, report.modules), (now, rows)):
        for row in some:
            into.update({node.name: node.wall_ns for node in row.nodes})
    fields = _times(report, wall / max(1, report.wall_ns)) | {
        "modules": rows,
        "operators": tuple(
            _scaled(one, now[one.name] / max(1, was[one.name])) for one in report.operators
        ),
        "phases": tuple(_real_phase(one, parts[f"({one.name})"]) for one in report.phases),
        "launches": tuple(
            replace(one, idle_ns=int(one.idle_ns * parts.get(f"({one.phase})", parts[STEP])))
            for one in report.launches
        ),
        "findings": tuple(
            real_cost(one, parts, report.unprofiled_step_ns) for one in report.findings
        ),
        "step_ns": report.unprofiled_step_ns,
        "step_ns_by_step": _each(report.step_ns_by_step, parts[STEP]),
        # Rows are scaled each by its own part, so the whole is their sum, in each step too.
        "wall_ns": wall,
        "cpu_ns": sum(row.cpu_ns for row in rows),
        **{
            name: tuple(map(sum, zip(*(getattr(row, name) for row in rows), strict=True)))
            for name in ("wall_ns_by_step", "cpu_ns_by_step")
        },
    }
    return changed(report, **fields)


def _real_phase(phase: Phase, part: float) -> Phase:
    wall = round(phase.wall_ns * part)  # exactly, as phases sum to the step
    busy = min(phase.busy_ns, wall)
    return replace(_scaled(phase, part), wall_ns=wall, busy_ns=busy, unprofiled_ns=None)


def _real_row(row: Row, part: float, forward: float, has_gpu: bool) -> Row:
    wall, on = round(row.wall_ns * part), row.wall_on
    of_devices, of_hosts = (on.gpu_ns, on.communication_ns, on.queued_ns), (on.sync_ns, on.host_ns)
    device = sum(of_devices)
    of_device = min(1.0, wall / max(1, device))
    of_host = max(0.0, wall - device * of_device) / max(1, sum(of_hosts))
    spent = 1.0 if has_gpu else part
    return replace(
        _scaled(row, part),
        wall_ns=wall,
        forward_ns=int(row.forward_ns * forward),
        forward_ns_by_step=_each(row.forward_ns_by_step, forward),
        nodes=tuple(_scaled(one, part) for one in row.nodes),
        lines=tuple(_scaled(one, part) for one in row.lines),
        kernels=tuple(replace(one, spent_ns=int(one.spent_ns * spent)) for one in row.kernels),
        wall_on=WallKinds(*_each(of_devices, of_device), *_each(of_hosts, of_host)),
        unprofiled_ns=None,
    )


_TIMES = ("wall_ns", "cpu_ns", "recompute_ns", "split_ns")


def _times(one: Any, part: float) -> dict[str, Any]:
    """The clock time of a cost and the host's, scaled."""
    found: dict[str, Any] = {
        name: int(getattr(one, name) * part) for name in _TIMES if hasattr(one, name)
    }
    for name in ("wall_ns_by_step", "cpu_ns_by_step"):
        if hasattr(one, name):
            found[name] = _each(getattr(one, name), part)
    return found


def _scaled(one: Cost, part: float) -> Cost:
    scaled: Cost = replace(one, **_times(one, part))
    return scaled


def _each(by_step: tuple[int, ...], part: float) -> tuple[int, ...]:
    return tuple(int(ns * part) for ns in by_step)
