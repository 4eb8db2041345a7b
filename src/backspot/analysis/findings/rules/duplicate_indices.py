"""Index backward that adds many gradients into few rows, one after the other."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import crowded, forward_of
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding

__all__ = ["find"]


@rule("duplicate-indices", devices=("cuda",))
def find(evidence: Evidence) -> Finding | None:
    """Find index nodes that take far longer than the indexing that made them."""
    costs, say = evidence.costs, evidence.wording
    nodes = crowded(evidence)
    if not nodes.any():
        return None
    work = evidence.work_of(nodes)
    backward = costs.of_device(work)
    times = int(costs.device_ns[work].sum()) / max(1, int(forward_of(evidence)[nodes].sum()))
    names = costs.top_nodes(nodes)
    return finding(
        costs.places_of_spans(nodes),
        title="Many gradients are added into few rows",
        seen=(
            f"{', '.join(names)}: {say.ms(backward)} of GPU time, "
            f"{times:.0f} times the {say.ms(backward / times)} of the forward. "
            "Gradients with equal indices are added one after the other."
        ),
        remedy=(
            "Look up a small table by a matmul with one-hot rows, which adds in parallel; or "
            "combine the positions that share a row before the lookup. "
            "torch.nn.functional.embedding has a faster backward than x[index]."
        ),
        link="https://docs.pytorch.org/docs/stable/generated/torch.Tensor.index_put_.html",
        nodes=names,
        kernels=costs.top_kernels(work),
    )
