"""Tensors that leave their device: to the host, or to another device."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding
from backspot.trace import names

__all__ = ["find"]

_LARGE = 1 << 14  # bytes: a smaller copy reads a value rather than moving a tensor


@rule("device-copies", devices=("cuda",))
def find(evidence: Evidence) -> Finding | None:
    """Find copies from a device that no other work hides."""
    costs, say = evidence.costs, evidence.wording
    size = evidence.events.size[evidence.work.event]
    work = evidence.work_named(names.is_copy_from_device) & ((size < 0) | (size >= _LARGE))
    if not work.any():
        return None
    to_host = evidence.work_named(lambda name: name.startswith(names.TO_HOST)) & work
    cost = costs.of_work(work)
    if 2 * costs.of_work(to_host) > cost:
        where, remedy = (
            "to the host",
            "Do on the GPU what the host does with these tensors. If they are only logged, copy "
            "them every hundred steps, into pinned memory with non_blocking=True.",
        )
    else:
        where, remedy = (
            "between devices",
            "Put modules that exchange tensors on the same device. Send each activation once, and "
            "split the model where activations are smallest.",
        )
    return finding(
        costs.places_of_work(work),
        title=f"Tensors are copied {where}",
        seen=f"{say.copies(size[work])}: {say.ms(cost)} in which nothing else runs.",
        remedy=remedy,
        link="https://docs.pytorch.org/docs/stable/notes/cuda.html#best-practices",
        nodes=costs.top_nodes(evidence.spans_of_work(work)),
        kernels=costs.top_kernels(work),
    )
