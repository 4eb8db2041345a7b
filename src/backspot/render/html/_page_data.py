"""The data of a page, for its script: small, with text that is safe to show.

Times are whole multiples of a unit that keeps eight digits of the total. Each string is stored
once. If there are very many modules, the smallest are added up, with one sum in each parent.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any, Literal

from backspot.formatting import visible
from backspot.render._answer import answered
from backspot.render._findings import cost_of, cost_of_place
from backspot.render._memory import peak_bytes
from backspot.render._words import KINDS
from backspot.render.view import unowned_rows
from backspot.results.costs import KernelCost, LineCost, NodeCost, Row
from backspot.results.findings import Finding
from backspot.results.grouping import parents_of
from backspot.results.report import By, Report
from backspot.trace.labels import Kind, Label, readable_label
from backspot.trace.names import short_node_name

__all__ = ["page_data"]

_ROWS = 2_500
"""The largest number of modules that a page shows one by one."""
_FEWEST = 50
_BYTES = 215_000
_BYTES_A_MODULE = 250
_MOST_BYTES = 900_000
"""The size of the data: the first is for up to 1,000 modules; more modules get more, to a limit."""
_STEPS = 60
"""The number of steps that are drawn one by one."""
_LONGEST = 160
"""Characters of a kernel's name or a source line; template names can have thousands."""


def page_data(report: Report) -> str:
    """The report as JSON that is safe inside a ``script`` element of a page."""
    room = min(_MOST_BYTES, _BYTES + _BYTES_A_MODULE * max(0, len(report.modules) - 1_000))
    for limit, detailed in _sizes(len(report.modules)):
        whole = _data(report, limit, detailed)
        data = json.dumps(whole, separators=(",", ":"), ensure_ascii=False)
        if len(data.encode()) <= room:
            break
    # Nothing in it can end the element, open another, or start a comment.
    return data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _sizes(modules: int) -> Iterator[tuple[int, int]]:
    """Numbers of modules to include, and of those with details: all, then fewer and fewer."""
    limit = detailed = _ROWS
    last = None
    while True:
        size = min(limit, modules), min(detailed, modules)
        if size != last:
            yield size
        if limit < _FEWEST:
            return
        last = size
        # First the small modules lose details, then fewer modules are included.
        detailed //= 2
        if detailed < _FEWEST:
            limit //= 2


class _Strings:
    """Stores each string once, under a number."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._index.setdefault(text, len(self._index))

    def all(self) -> list[str]:
        return list(self._index)


def _data(report: Report, limit: int, detailed: int) -> dict[str, Any]:
    """The data with at most ``limit`` modules, ``detailed`` of them with all their details."""
    unit = 10 ** max(0, len(str(max(report.wall_ns, report.gpu_ns, report.cpu_ns))) - 8)
    strings = _Strings()
    modules = {row.path: row for row in report.modules if row.is_module}
    kept = _kept(report, limit)
    place = {path: index for index, path in enumerate(kept)}

    around: dict[str, str | None] = {}  # the nearest path that the page has
    for path, parent in parents_of(modules.values()).items():
        around[path] = parent if parent is None or parent in place else around[parent]
    rows = [
        _row(report, modules[path], around[path], place, strings, unit, full=index < detailed)
        for index, path in enumerate(kept)
    ]
    rest: dict[int, list[Row]] = defaultdict(list)
    for path, row in modules.items():
        if path not in place:
            holder = around[path]
            rest[-1 if holder is None else place[holder]].append(row)
    rows += [_rest(holder, members, unit) for holder, members in rest.items()]
    rows += [
        _row(report, row, None, place, strings, unit, full=True)
        for row in unowned_rows(report.modules)
    ]
    answer = answered(report)
    return {
        "unit": unit,
        "steps": report.steps,
        "per": report.per,
        "gpu": report.has_gpu,
        "kinds": KINDS,
        "labelled": report.source == "backspot",
        "whole": [_in(unit, ns) for ns in (report.wall_ns, report.gpu_ns, report.cpu_ns)],
        "modules": len(modules),
        "peak": peak_bytes(report),
        "limits": report.peaks is not None and report.has_work,
        "groups": _limits_of_groups(report, unit),
        "answer": None if answer is None else [visible(answer.path), answer.members > 1],
        "findings": [_finding(report, one, place) for one in report.findings],
        "strings": strings.all(),
        "rows": rows,
    }


def _kept(report: Report, limit: int) -> list[str]:
    """The modules to include; with each module come its parents.

    Modules are ranked by their totals, and a parent's total is at least that of its children.
    """
    wholes = [max(1, whole) for whole in (report.wall_ns, report.gpu_ns, report.cpu_ns)]

    def weight(row: Row) -> float:
        totals = (row.total_wall_ns, row.total_gpu_ns, row.total_cpu_ns)
        return max(total / whole for total, whole in zip(totals, wholes, strict=True))

    rows = [row for row in report.modules if row.is_module]
    rows.sort(key=lambda row: (-weight(row), len(row.path), -row.wall_ns, row.path))
    return [row.path for row in rows[:limit]]


def _in(unit: int, ns: int) -> int:
    return round(ns / unit)


def _row(
    report: Report,
    row: Row,
    parent: str | None,
    place: dict[str, int],
    strings: _Strings,
    unit: int,
    *,
    full: bool,
) -> list[Any]:
    within = 0 if not parent else len(parent) + 1
    label = readable_label(Label(Kind.BACKWARD, row.path, row.class_name))
    plain = f"backward: {row.path} ({row.class_name})"
    costs = _costs(row)
    return [
        -1 if parent is None else place[parent],
        visible(row.path[within:]),
        strings(visible(row.class_name)),
        1 if row.is_module else 0,
        strings(visible(row.root)),
        _calls(row.calls),
        [_in(unit, ns) for ns in costs],
        [_in(unit, ns) for ns in astuple(row.wall_on)],
        _steps(row.wall_ns_by_step, unit),
        _nodes(row.nodes, strings, unit, 6 if full else 2),
        _kernels(row.kernels, strings, unit, 5 if full else 1),
        label if row.is_module and label != plain else 0,
        _lines(row.lines, strings, unit, 5 if full else 1),
        [one and _in(unit, one.ns) for one in (row.saves, row.total_saves)],
        _memory(row),
        _limit(report, row, unit),
    ]


def _memory(row: Row) -> list[int] | Literal[0]:
    """What the row has at the peak, what it keeps, and what checkpointing it would free."""
    held = row.memory
    if held is None:
        return 0
    return [held.at_peak_bytes, held.kept_bytes, held.checkpoint_frees_bytes]


def _limit(report: Report, row: Row, unit: int) -> list[Any] | Literal[0]:
    """TFLOP/s, share of the peak, headroom, which peak bounds the row, and the measured GB/s."""
    limit = report.limit(row) if row.work is not None else None
    if limit is None:
        return 0
    tflops = None if limit.tflops is None else round(limit.tflops, 1)
    of_peak = None if limit.of_peak is None else round(limit.of_peak, 4)
    headroom = None if limit.headroom_ns is None else _in(unit, limit.headroom_ns)
    measured = None if limit.measured_gbps is None else round(limit.measured_gbps)
    gbps = None if limit.gbps is None else round(limit.gbps)
    return [tflops, of_peak, headroom, limit.bound, gbps, measured]


def _limits_of_groups(report: Report, unit: int) -> dict[By, list[list[Any]]]:
    """The limits of the groups of modules that a table can show: they do not add up."""
    kinds: tuple[By, ...] = ("pattern", "class")
    return {
        by: [
            [visible(row.path), visible(row.class_name), limit]
            for row in report.top(by=by)
            if row.is_module and (limit := _limit(report, row, unit))
        ]
        for by in kinds
    }


def _finding(report: Report, finding: Finding, place: dict[str, int]) -> list[Any]:
    """The title, the cost, the remedy, and what it costs in each row."""
    time, _ = cost_of(report, finding)
    costs = [
        [place[one.path] if one.class_name else visible(one.path), cost_of_place(one)]
        for one in finding.places
        if not one.class_name or one.path in place
    ]
    return [visible(finding.title), time, visible(finding.remedy), costs]


def _costs(row: Row) -> tuple[int, ...]:
    return (
        row.wall_ns,
        row.gpu_ns,
        row.cpu_ns,
        row.forward_ns,
        row.recompute_ns,
        row.split_ns,
    )


def _calls(calls: float) -> float:
    """Calls per step, as a whole number where they are one."""
    return int(calls) if calls == int(calls) else round(calls, 2)


def _steps(by_step: Sequence[int], unit: int) -> list[int]:
    """The smallest and the largest time of all steps, and the times of the first steps."""
    if len(by_step) < 2:
        return []
    return [_in(unit, ns) for ns in (min(by_step), max(by_step), *by_step[:_STEPS])]


def _nodes(nodes: Sequence[NodeCost], strings: _Strings, unit: int, limit: int) -> list[list[int]]:
    """The heaviest nodes, and the others in one sum."""
    data = [
        [
            strings(visible(short_node_name(node.name))),
            node.count,
            *(_in(unit, ns) for ns in (node.wall_ns, node.gpu_ns, node.cpu_ns)),
        ]
        for node in nodes[:limit]
    ]
    if rest := nodes[limit:]:
        sums = [sum(column) for column in zip(*(astuple(node)[1:] for node in rest), strict=True)]
        data.append([-len(rest), sums[0], *(_in(unit, ns) for ns in sums[1:])])
    return data


def _kernels(
    kernels: Sequence[KernelCost], strings: _Strings, unit: int, limit: int
) -> list[list[int]]:
    """The heaviest kernels, and the others in one sum."""
    data = []
    for kernel in kernels[:limit]:
        name = visible(kernel.name)
        name = name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
        data.append([strings(name), kernel.count, _in(unit, kernel.spent_ns)])
    if rest := kernels[limit:]:
        spent = _in(unit, sum(one.spent_ns for one in rest))
        data.append([-len(rest), sum(one.count for one in rest), spent])
    return data


def _lines(lines: Sequence[LineCost], strings: _Strings, unit: int, limit: int) -> list[list[int]]:
    """The heaviest lines of the forward's source."""
    return [
        [
            strings(visible(line.place)),
            strings(visible(line.text.strip()[:_LONGEST])),
            strings(visible(short_node_name(line.node))),
            _in(unit, line.wall_ns),
            1 if line.exact else 0,
        ]
        for line in lines[:limit]
    ]


def _rest(holder: int, members: Sequence[Row], unit: int) -> list[Any]:
    """Modules that are not included, added up."""

    def summed(columns: Sequence[Sequence[int]]) -> list[int]:
        return [_in(unit, sum(column)) for column in zip(*columns, strict=True)]

    costs = [_costs(row) for row in members]
    return [
        holder,
        "",
        -1,
        len(members) + 1,
        -1,
        _calls(sum(row.calls for row in members)),
        summed(costs),
        summed([astuple(row.wall_on) for row in members]),
        [],
        [],
        [],
        0,
        [],
        [None, None],
        [sum(held) for held in zip(*filter(None, map(_memory, members)), strict=True)] or 0,
        0,
    ]
