"""Tensors that leave their device: to the host, or to another device."""

from __future__ import annotations

import re

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import rule
from backspot.results.findings import Finding

__all__ = ["find"]

_LARGE = 1 << 14  # bytes: a smaller copy is a value that is read, not a tensor that moves
_LEAVES = re.compile(r"Memcpy (DtoH|PtoP|Peer)|Memcpy DtoD \(Device -> Device \d")


@rule("device-copies")
def find(evidence: Evidence) -> Finding | None:
    """Find copies from a device that nothing hides."""
    work = evidence.work_named(lambda name: _LEAVES.match(name) is not None)
    size = evidence.events.size[evidence.work.event]
    work &= (size < 0) | (size >= _LARGE)
    if not work.any():
        return None
    to_host = evidence.work_named(lambda name: name.startswith("Memcpy DtoH")) & work
    cost = int(evidence.work_ns[work].sum())
    if 2 * int(evidence.work_ns[to_host].sum()) > cost:
        where, remedy = (
            "to the host",
            "Do on the GPU what is done with it on the host; keep what is only logged for every "
            "hundredth step, and copy it with non_blocking=True into pinned memory.",
        )
    else:
        where, remedy = (
            "between devices",
            "Place modules that talk to each other on one device; send activations once, and cut "
            "the model where they are smallest.",
        )
    return evidence.finding(
        title=f"Tensors are copied {where}",
        seen=(
            f"{evidence.per_step(int(work.sum()), 'copy', 'copies')}{evidence.volume(work)}: "
            f"{evidence.ms(cost)} in which nothing else runs."
        ),
        remedy=remedy,
        link="https://docs.pytorch.org/docs/stable/notes/cuda.html#best-practices",
        places=evidence.places_of_work(work),
        nodes=evidence.top_nodes(evidence.spans_of_work(work)),
        kernels=evidence.top_kernels(work),
    )
