"""What a report says about the limit of the device, beside the times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

from backspot.formatting import percent
from backspot.render._sections import Column, Fields, Saying, Section, Value, numbers
from backspot.render._words import Part
from backspot.render.view import View
from backspot.results.costs import Row
from backspot.results.limits import REACHABLE_COMPUTE, REACHABLE_MEMORY, LimitOfModule
from backspot.results.report import Report
from backspot.results.work import COUNTS_OF_WORK


def _sections(report: Report, view: View) -> list[Section]:
    """What the device can do; on a screen only where that ranks the rows."""
    facts = _facts(report)
    terms = []
    if facts and report.has_work:
        terms.append(("of peak", "the part of the device's peak that the module's kernels reach"))
    brief = len(facts) if view.order == "headroom" else 0
    return [Section("facts", "limits", facts, brief, terms=terms)] if facts else []


def _facts(report: Report) -> list[str]:
    """What shares of the peak are shares of, and how much of it the step uses; or nothing."""
    if report.peaks is None:
        return []
    peaks = report.peaks
    used: Counter[str] = Counter()
    for row in report.modules:
        if row.work is not None:
            used.update(row.work.flops_by_type)
    kinds = [kind for kind, _ in used.most_common(2) if kind in peaks.tflops]
    named = ", ".join(f"{peaks.tflops[kind]:,.0f} TFLOP/s {kind}" for kind in kinds)
    facts = [
        f"peaks of {peaks.device}: {f'{named}, ' if named else ''}{peaks.gbps:,.0f} GB/s "
        f"({peaks.source})"
    ]
    if report.mfu is not None:
        facts.append(f"MFU {percent(report.mfu)}")
    reachable = f"{percent(REACHABLE_COMPUTE)} and {percent(REACHABLE_MEMORY)}"
    facts.append(f"headroom: up to {reachable} of these")
    return facts


def _columns(
    report: Report, rows: Sequence[Row], view: View, ms: Callable[[int], str]
) -> list[Column]:
    """How fast each row runs on its device, what that is of the peak, and what could be saved."""
    limits = [report.limit(row) if row.work is not None else None for row in rows]
    if not any(limits):
        return []
    need = 1 if view.order == "headroom" else 12

    def cells(value: Callable[[LimitOfModule], object]) -> list[Part]:
        return numbers("" if limit is None else value(limit) for limit in limits)

    columns = [
        Column(
            "detail",
            "TFLOP/s",
            cells(lambda limit: "" if limit.tflops is None else f"{limit.tflops:.1f}"),
            need=need + 1,
        )
    ]
    if report.peaks is not None:
        shares = cells(lambda limit: "" if limit.of_peak is None else percent(limit.of_peak))
        saved = cells(lambda limit: "" if limit.headroom_ns is None else ms(limit.headroom_ns))
        columns += [
            Column("detail", "of peak", shares, need=need),
            Column("detail", "headroom", saved, full_head="headroom ms", need=need),
        ]
    return columns


def _fields(report: Report) -> Fields | None:
    """The work of each row and its limit, for programs."""
    if not report.has_work:
        return None
    of_work = (*COUNTS_OF_WORK, "unknown_share")
    of_limit = [field.name for field in fields(LimitOfModule)]

    def values(row: Row) -> Iterator[Value]:
        limit = report.limit(row)
        yield from (getattr(row.work, name, None) for name in of_work)
        yield from (getattr(limit, name, None) for name in of_limit)

    return Fields((*of_work, *of_limit), values)


SAYING = Saying(
    _sections,
    _columns,
    _fields,
    page=lambda report: {"limits": report.peaks is not None and report.has_work},
)
