"""What a report says about memory: one list of facts for each device that was recorded."""

from __future__ import annotations

from collections import Counter

from backspot.formatting import size
from backspot.results.memory import MemoryKind, MemoryOfDevice
from backspot.results.report import Report

__all__ = ["memory_facts", "memory_sentences"]

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


def memory_sentences(report: Report) -> list[str]:
    """The same facts as one text for each device."""
    return ["; ".join(facts) for facts in memory_facts(report)]


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
