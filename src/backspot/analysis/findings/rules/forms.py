"""Rules about operations that PyTorch also has in a faster form."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from backspot.analysis.findings.costs import LEAST_SHARE
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import (
    accumulating,
    both_ways,
    compiled,
    is_indexing,
    runs_of_nodes,
    shapes_of,
    times_of_alike,
)
from backspot.analysis.findings.registry import Found, fallback_rule, finding, rule
from backspot.results.findings import Finding
from backspot.trace import Category, names, operations
from backspot.trace.operations import Kind, kind_of, of_node

# One node ----------------------------------------------------------------------------------------

_TIMES = 10.0
"""A backward of one operation takes as long as its forward, or twice as long."""
_LEAST_ON_HOST = 1_000_000
"""Nanoseconds of such nodes in a step on a CPU: less may be an interruption."""
_AS_LONG = (
    *operations.VIEWS,
    Kind.CAST,
    Kind.COPY,
    Kind.POINTWISE,
    Kind.COMPARISON,
    Kind.PRODUCT,
    Kind.JOIN,
)
"""Operations whose backward moves and computes as much as their forward; what takes longer in such
a node is memory that is new to the process, or a hook."""
_SUMS = ("sum", "mean")
_READ_ONCE = (*_SUMS, "norm", "linalgvectornorm")
"""Reductions that only read, and whose gradient is one pass that writes all elements."""
_SPARSE = ("nllloss", "embedding", "embeddingbag", "index", "take")
"""Operations that read a few elements, and whose gradient has all of them."""
_VALUE = (
    "Write x.flatten().{0}(0).values, which keeps the index of one element, and whose backward "
    "writes this one: that of {0}() looks for all elements that are equal to the result. If the "
    "result only scales, take it under torch.no_grad() or .detach() it."
)
_EXTREME = (
    "Write x.{0}(dim).values, which keeps the index of one element, and whose backward writes this "
    "one: a{0}() shares its gradient among all elements that are equal to the result, for which it "
    "compares all of them."
)
_BETTER = {
    "max": _VALUE.format("max"),
    "min": _VALUE.format("min"),
    "amax": _EXTREME.format("max"),
    "amin": _EXTREME.format("min"),
    "prod": "Where all elements are positive, x.log().sum(dim).exp() has a backward of simple "
    "operators.",
}
"""Another form of some operations, by their node. (On one core of a CPU, forward and backward for a
million elements: ``max`` 7.2 ms and 1.4; ``amax(1)`` 7.2 and 1.3; ``prod(1)`` 7.1 and 1.7.
``median`` and ``cumprod`` have no other form that is faster.)"""
_OF_ALL = ("max", "min")
"""Operations that have this other form only without ``dim``."""
_REWRITE = (
    "Use another form of this operation, or write its backward as a torch.autograd.Function. If "
    "its result needs no gradient, .detach() its input."
)


@fallback_rule(
    "slow-node",
    least=0.05,
    devices=("cpu", "cuda"),
    title="The backward of one operation takes many times its forward",
    link="https://docs.pytorch.org/docs/stable/notes/extending.html",
)
def slow_node(evidence: Evidence, findings: Sequence[Finding]) -> Finding | None:
    """The backward of one operation takes many times its forward.

    **Cause.** Some operations have a backward that does much more than their forward: `x.max()` of
    a whole tensor looks for all elements that are equal to the result, `prod` looks for zeros.

    **Found by** nodes that take more than ten times the operator that made them, from 5% of the
    step (on a CPU also 1 ms), in most steps. Lookups, views, casts, convolutions, attention, sums,
    element-wise operations, compiled code, a Function of the program, and what another finding
    explains do not count.

    **Fix.** For one value of a whole tensor, `x.flatten().max(0).values` (on one core of a CPU, a
    million elements 1.4 ms, where `max()` took 7.2); likewise `x.max(1).values` for `amax(1)`. If
    the value only scales something, take it under `torch.no_grad()`.
    """
    costs, say = evidence.costs, evidence.wording
    nodes = evidence.nodes_named(_is_judged) & ~accumulating(evidence) & ~compiled(evidence)
    for other in findings:
        if isinstance(other, Found) and other.removable:
            nodes &= ~other.removable.spans
    ratios = (other for other in findings if other.rule == "backward-ratio")
    explained = {place.path for other in ratios for place in other.places}
    is_explained = evidence.ownership.owners.mask(
        lambda owner_module: owner_module.path in explained
    )
    # Hooks that shard or exchange run in nodes, too, and say so by marks.
    marks = evidence.spans_around(evidence.events.of(Category.ANNOTATION))
    nodes &= ~is_explained[evidence.ownership.owner] & ~marks
    if not nodes.any():
        return None
    forward, backward = times_of_alike(evidence, nodes)
    nodes &= (forward > 0) & (backward > _TIMES * forward)
    by_step = costs.owned_by_step(nodes, evidence.work_of(nodes)).sum(axis=0)
    least = 0 if evidence.report.has_gpu else _LEAST_ON_HOST
    if not nodes.any() or 2 * int((by_step > least).sum()) <= len(by_step):
        return None
    (first, *_) = heaviest = costs.top_nodes(nodes)
    own_nodes = nodes & evidence.nodes_named(lambda name: name == first)
    slowest = np.flatnonzero(own_nodes)[np.argmax(backward[own_nodes])]
    times = int(backward[slowest] / max(1, forward[slowest]))
    return finding(
        costs.places_of_spans(nodes),
        seen=(
            f"{', '.join(heaviest)}: {say.ms(costs.of_spans(nodes))} in "
            f"{say.per_step(int(nodes.sum()), 'node')}. {first} takes {times:,} times the operator "
            "that made it; once or twice is usual."
        ),
        remedy=_better(first),
        nodes=heaviest,
        kernels=costs.top_kernels(evidence.work_of(nodes)),
        at_best=True,
    )


def _better(name: str) -> str:
    """Return another form of the operation of a node."""
    operation = of_node(name)
    if operation in _OF_ALL and not names.is_extreme_of_all(name):
        return _REWRITE  # its gradient goes to the values that it picks
    return _BETTER.get(operation, _REWRITE)


def _is_judged(name: str) -> bool:
    """Whether a node of this name has as much work as its operator, and no other rule is for it."""
    operation = of_node(name)
    return not (
        kind_of(operation) in _AS_LONG
        or operation in _READ_ONCE
        or operation.startswith(_SPARSE)
        or is_indexing(name)
        or "::" in name  # a Function of an extension
        or names.is_custom_function(name)
        or "ScaledDotProduct" in name
        or "onvolution" in name
        or name.startswith(names.BACKWARD_HOOK_FUNCTION)
    )


# A product of matrices ---------------------------------------------------------------------------

_WIDER = 4
"""A product by broadcasting that has so many times the elements of its larger input is no longer
bound by reading that input."""


@rule(
    "written-out-product",
    least=0.05,
    devices=("cpu", "cuda"),
    title="A product of matrices is written as broadcasting and a sum",
    remedy=(
        "Write it as a product: torch.einsum, x @ w, or torch.matmul of the same tensors without "
        "the expanded dimensions. It never writes the expanded tensor, and neither does its "
        "backward."
    ),
    link="https://docs.pytorch.org/docs/stable/generated/torch.einsum.html",
)
def written_out_product(evidence: Evidence) -> Finding | str | None:
    """A product of matrices is written as broadcasting and a sum.

    **Cause.** `(x[:, :, None] * w).sum(1)` computes what `x @ w` does, but writes a tensor of all
    single products, reads it for the sum, and in the backward does the same twice.

    **Found by** a product of element by element whose result has at least four times the elements
    of its larger input, and the sum or the mean of this result right after it, with the nodes of
    both, from 5% of the step. That needs shapes (`profile(shapes=True)`, `record_shapes=True`).
    Products of tensors of one shape, as of a cosine, do not count.

    **Fix.** `torch.einsum("bi,ij->bj", x, w)`, `x @ w`, `torch.bmm`. On one core of a CPU, a layer
    of 64 by 64 for 1,024 rows took 2 ms as a product, and 13 to 26 ms without. The price is a
    bound.
    """
    costs, say = evidence.costs, evidence.wording
    pairs = _summed_products(evidence)
    detailed = evidence
    if evidence.recording.detailed is not evidence.recording:
        detailed = Evidence(evidence.recording.detailed, evidence.report)
    wide = _wide(detailed, _summed_products(detailed) if detailed is not evidence else pairs)
    wide_keys = {key for key, _, _ in pairs if wide.get(key)}
    unknown = any(key not in wide for key, _, _ in pairs)
    chosen = wide_keys or ({key for key, _, _ in pairs} if unknown else set())
    chosen_pairs = [(multiplied, total) for key, multiplied, total in pairs if key in chosen]
    nodes = evidence.spans_with(np.array(chosen_pairs, np.int64).reshape(-1))
    makers = evidence.ownership.join.operator[nodes]
    placed = both_ways(evidence, nodes, makers, LEAST_SHARE, whole=True)
    if not wide_keys:
        by_step = placed.by_step
        often = by_step is not None and costs.holds_in_most_steps(by_step, _LEAST_UNKNOWN)
        return "needs shapes" if placed.places and often else None
    return finding(
        placed,
        seen=(
            f"{say.per_step(len(chosen_pairs), 'product')} by broadcasting and the sum of each, "
            f"forward and backward: {say.ms(placed.wall_ns)}. The product has at least {_WIDER} "
            "times the elements of its inputs."
        ),
        nodes=costs.top_nodes(nodes),
        operators=costs.top_operators(evidence.names_of(makers), evidence.events.duration[makers]),
        kernels=costs.top_kernels(evidence.work_of(nodes)),
        at_best=True,
    )


_LEAST_UNKNOWN = 0.05
_Key = tuple[str, str, int]


def _summed_products(evidence: Evidence) -> list[tuple[_Key, int, int]]:
    """Return the nodes of products whose next operator, views aside, is a sum, and that of it.

    Each comes with what has it in all steps: the path and the class of its module, and its number
    in the nodes that follow each other there.
    """
    node_operations = [of_node(name) for name in evidence.spans.node_names]
    named, owner = evidence.ownership.owners.named, evidence.ownership.owner
    products = []
    for run in runs_of_nodes(evidence):
        steps = [node_operations[node] for node in evidence.spans.node[run].tolist()]
        for number, index in enumerate(place for place, step in enumerate(steps) if step == "mul"):
            then = index + 1
            while then < len(steps) and kind_of(steps[then]) in operations.VIEWS:
                then += 1
            if then < len(steps) and steps[then] in _SUMS:
                key = (*named(int(owner[run[index]])), number)
                products.append((key, int(run[index]), int(run[then])))
    return products


def _wide(evidence: Evidence, pairs: list[tuple[_Key, int, int]]) -> dict[_Key, bool]:
    """Return which of these products have a result that is much larger than their inputs.

    Products whose shapes are not recorded are left out.
    """
    operator = evidence.ownership.join.operator
    is_wide: dict[_Key, bool] = {}
    for key, multiplied, total in pairs:
        inputs, summed = (shapes_of(evidence, int(operator[node])) for node in (multiplied, total))
        if len(inputs) < 1 or not summed:
            continue
        size = prod(summed[0])
        larger = max(prod(sizes) for sizes in inputs)
        is_wide[key] = is_wide.get(key, False) or (len(inputs) > 1 and size >= _WIDER * larger)
    return is_wide
