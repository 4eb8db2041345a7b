"""What a report says about memory and about the device's limit, beside the times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from backspot.formatting import percent, size
from backspot.results.grouping import numberless
from backspot.results.limits import REACHABLE_COMPUTE, REACHABLE_MEMORY
from backspot.results.memory import MemoryKind, MemoryOfDevice, MemoryTimeline
from backspot.results.report import Report

__all__ = [
    "layers_over_time",
    "limit_facts",
    "memory_facts",
    "memory_sentences",
    "shown_devices",
]

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
    """For each device with recorded memory: its peak, what is live then, and who holds the most."""
    return [_facts(report, one) for one in shown_devices(report)]


def shown_devices(report: Report) -> list[MemoryOfDevice]:
    """The devices with recorded memory, without a host that has next to nothing beside the GPUs."""
    most = max((one.peak_bytes for one in report.memory), default=0)
    return [one for one in report.memory if one.peak_bytes >= _LEAST * most]


def layers_over_time(report: Report, line: MemoryTimeline) -> list[tuple[str, list[int]]]:
    """What each name of a timeline has at each moment, and what all others have."""
    names = {row.path: row.name for row in report.modules}
    layers = [
        (names.get(path, path), list(held))
        for path, held in zip(line.paths, line.bytes_by_path, strict=True)
    ]
    known = [sum(held) for held in zip(*line.bytes_by_path, strict=True)]
    others = [max(0, all_ - some) for all_, some in zip(line.allocated_bytes, known, strict=True)]
    return [*layers, ("all others", others)]


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
    holders = [(name, held) for name, held in _holders(one, names) if held > least]
    if holders:
        facts.append(f"most in {', '.join(f'{name} {size(held)}' for name, held in holders)}")
    return facts


def _holders(one: MemoryOfDevice, names: Mapping[str, str]) -> list[tuple[str, int]]:
    """Who holds the most at the peak: modules, repeated layers as one."""
    held_by: Counter[tuple[str, str]] = Counter()
    paths: dict[tuple[str, str], set[str]] = {}
    for share in one.live:
        if share.kind != "before":
            key = numberless(share.path), share.class_name
            held_by[key] += share.bytes
            paths.setdefault(key, set()).add(share.path)
    found = []
    for key, held in held_by.most_common(_HOLDERS):
        (path, *more) = paths[key]
        name = f"{1 + len(more)} × {key[0]}" if more else names.get(path, path)
        found.append((name, held))
    return found
