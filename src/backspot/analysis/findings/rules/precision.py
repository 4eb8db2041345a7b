"""Rules about number formats that take longer than necessary."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from backspot.analysis.findings.costs import LEAST_SHARE
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import both_ways, forward_operators, of_doubles
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import enclosing, take
from backspot.results.findings import Finding
from backspot.trace import names
from backspot.trace.events import Signature


@rule(
    "double-precision",
    least=0.03,
    devices=("cpu", "cuda"),
    title="Modules compute in double precision",
    remedy=(
        "Train in fp32 unless the results need fp64: model.float(), and inputs by .float(), as "
        "arrays of NumPy are in fp64 by default. Where only a part needs fp64, such as a sum, cast "
        "that part alone."
    ),
    link="https://docs.pytorch.org/docs/stable/tensor_attributes.html",
)
def double_precision(evidence: Evidence) -> Finding | None:
    """Modules compute in double precision.

    **Cause.** Parameters or inputs are in fp64, often because an array of NumPy was: twice the
    bytes, half of a CPU's speed or less, and on most GPUs a small part of it.

    **Found by** modules with parameters in fp64, tensors of operators (with shapes), or kernels
    that say so, from 3% of the step. A single number does not count. It has no price: many results
    need fp64.

    **Fix.** `model.float()`, and `.float()` for inputs.
    """
    events, costs, say = evidence.events, evidence.costs, evidence.wording
    index, span = forward_operators(evidence)
    owners = of_doubles(evidence)
    double = np.array([*map(_has_doubles, events.signatures), False], bool)[events.signature[index]]
    operators = index[double | take(owners[np.maximum(evidence.ownership.owner, 0)], span, False)]
    made_nodes = np.flatnonzero(evidence.ownership.join.operator >= 0)
    makers = evidence.ownership.join.operator[made_nodes]
    inside = enclosing(events, operators, events.thread[makers], events.start[makers]) >= 0
    nodes = evidence.spans_with(made_nodes[inside]) & evidence.in_pass & evidence.spans.is_node
    work = evidence.work_named(names.is_double)
    placed = both_ways(evidence, nodes, operators, LEAST_SHARE, others=work)
    return finding(
        replace(placed, removable=None),
        seen=(
            f"{say.ms(placed.wall_ns)} of each step, {say.share(placed.wall_ns)}, forward and "
            "backward, are of modules with parameters in double precision, or of such tensors."
        ),
        nodes=costs.top_nodes(nodes),
        operators=costs.top_operators(evidence.names_of(operators), events.duration[operators]),
        kernels=costs.top_kernels(work),
        priced=False,
    )


def _has_doubles(signature: Signature) -> bool:
    """Whether an operator reads a tensor of several numbers in double precision."""
    if "double" not in signature.types:
        return False
    types, shapes = (
        msgspec.json.decode(text) for text in (signature.types, signature.shapes or "[]")
    )
    if not (isinstance(types, list) and isinstance(shapes, list)):
        return False  # another program may write anything here
    return any(kind == "double" and bool(shape) for kind, shape in zip(types, shapes, strict=False))
