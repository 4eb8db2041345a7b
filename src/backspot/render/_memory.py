"""What a report says about memory and about the device's limit, beside the times."""

from __future__ import annotations

from collections import Counter

from backspot.formatting import percent, size
from backspot.results.limits import REACHABLE_COMPUTE, REACHABLE_MEMORY
from backspot.results.memory import MemoryKind, MemoryOfDevice
from backspot.results.report import Report

__all__ = ["limit_facts", "memory_facts", "memory_sentences"]

_SAID: dict[MemoryKind, str] = {
    "before": "from before the recording",
    "activation": "activations",
    "recomputed": "recomputed activations",
    "gradient": "gradients of parameters",
    "backward": "gradients of activations and workspace",
    "forward": "workspace of the forward",
    "optimizer": "the optimizer's",
    "other": "other",
}
_LEAST = 0.01
"""What has a smaller share of the peak is left out."""
_HOLDERS = 3
"""How many of the modules that hold the most are named."""


def memory_facts(report: Report) -> list[list[str]]:
    """For each device with recorded memory: its peak, what is live then, and who holds the most.

    A host that has next to nothing beside the GPUs is left out.
    """
    most = max((one.peak_bytes for one in report.memory), default=0)
    return [_facts(report, one) for one in report.memory if one.peak_bytes >= _LEAST * most]


def limit_facts(report: Report) -> list[str]:
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


def memory_sentences(report: Report) -> list[str]:
    """The same facts, and those of the limit, as one text for each device."""
    every = [*memory_facts(report), limit_facts(report)]
    return ["; ".join(facts) for facts in every if facts]


def _facts(report: Report, one: MemoryOfDevice) -> list[str]:
    names = {row.path: row.name for row in report.modules}
    of = f" of {size(one.reserved_at_peak_bytes)} reserved" if one.reserved_at_peak_bytes else ""
    where = names.get(one.peak_path, one.peak_path)
    facts = [
        f"memory of {one.name}: peak {size(one.peak_bytes)}{of}, in the {one.peak_phase} of {where}"
    ]
    least = _LEAST * one.peak_bytes
    facts += [f"{size(held)} {_SAID[kind]}" for kind, held in one.kinds.items() if held > least]
    held_by: Counter[str] = Counter()
    for share in one.live:
        if share.kind != "before":
            held_by[share.path] += share.bytes
    holders = [(path, held) for path, held in held_by.most_common(_HOLDERS) if held > least]
    if holders:
        named = [f"{names.get(path, path)} {size(held)}" for path, held in holders]
        facts.append(f"most in {', '.join(named)}")
    return facts
