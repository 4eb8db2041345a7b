"""A function of single elements that is written out as many operators, where PyTorch has one."""

from __future__ import annotations

import re

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import grouped
from backspot.results.findings import Finding
from backspot.trace.events import Mask

__all__ = ["find"]

_LEAST = 0.03
_LETTERS = {"Pow": "P", "Mul": "M", "Div": "D", "Add": "A", "Tanh": "T", "Erf": "E"}
_FUNCTIONS = {
    'torch.nn.functional.gelu(x, approximate="tanh")': re.compile(r"[PMD]+AMTAM+"),
    "torch.nn.functional.gelu(x)": re.compile(r"[PMD]+EAM+"),
}
"""The nodes of each function in the order of its forward, which is that of their numbers."""


@rule("written-out-function", devices=("cpu",))
def find(evidence: Evidence) -> Finding | None:
    """Find the nodes of a GELU that is computed by products, sums and a tanh or an erf."""
    costs, say = evidence.costs, evidence.wording
    written = _written_out(evidence)
    nodes = np.any(list(written.values()), axis=0)
    if not costs.holds_in_most_steps(costs.of_spans_by_step(nodes), _LEAST):
        return None
    function = max(written, key=lambda one: costs.of_spans(written[one]))
    return finding(
        costs.places_of_spans(nodes),
        title="GELU is written out as many operators",
        seen=(
            f"{say.per_step(int(nodes.sum()), 'node')} of products, sums and tanh or erf take "
            f"{say.ms(costs.of_spans(nodes))} of the backward. Each of them reads and writes a "
            "whole tensor, in the forward too."
        ),
        remedy=f"Use {function}, which is one operator forward and backward.",
        link="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.gelu.html",
        nodes=costs.top_nodes(nodes),
    )


def _written_out(evidence: Evidence) -> dict[str, Mask]:
    """Return whether each span is a node of each function."""
    spans, join = evidence.spans, evidence.ownership.join
    letters = [_LETTERS.get(name.partition("Backward")[0], ".") for name in spans.node_names]
    numbered = np.flatnonzero(evidence.in_pass & spans.is_node & (join.sequence >= 0))
    found = {function: np.zeros(len(spans.start), bool) for function in _FUNCTIONS}
    for _, mine in grouped(join.builder, numbered):
        mine = mine[np.argsort(join.sequence[mine], kind="stable")]
        text = "".join(letters[node] for node in spans.node[mine].tolist())
        for function, chain in _FUNCTIONS.items():
            for match in chain.finditer(text):
                found[function][mine[match.start() : match.end()]] = True
    return found
