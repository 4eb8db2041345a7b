"""A module with a backward that takes many times its forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backspot.analysis.accounting.inside import operators_inside
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import accumulating, is_indexing
from backspot.analysis.findings.registry import fallback_rule, finding
from backspot.analysis.timeline import numbered, take
from backspot.formatting import duration
from backspot.results.findings import Finding
from backspot.trace import Category, names
from backspot.trace.events import Ints, Mask

__all__ = ["find"]

_HIGH = 10.0
"""A backward computes two gradients where its forward computes one value, so it usually takes twice
as long. Fused attention takes seven to twelve times its forward, copies included, and is skipped.
"""
_LEAST = 0.03  # of the step, for each module
_LEAST_ON_HOST = 1_000_000
_LEAST_STEPS_ON_HOST = 3
"""Without a GPU: nanoseconds of backward in the median step, and how many steps must agree. On a
busy machine, the host loses the processor for milliseconds, and any module is held up in a few
steps. (Measured on healthy MLPs beside two busy processes: in up to 2 of 3 steps and 4 of 10.)
"""
_LOOP = 100
"""Operators of one name in one node: so many come from a loop."""
_FILLED = 0.25
"""A lookup that spends this share on zeros picks few of many rows."""
_COMPILED = (
    "The region is compiled already. TORCH_LOGS=output_code shows the kernels of its backward: "
    "move the operation that makes them slow out of the region, or rewrite it."
)
_CONVOLUTIONS = ("Convolution", "Cudnn", "Mkldnn", "Miopen", "SlowConv", "ConvDepthwise")
_CONVOLUTION = (
    "Grouped, dilated and transposed convolutions have slow gradients: try others in their place."
)
_CONVOLUTION_ON_GPU = (
    "Set torch.backends.cudnn.benchmark = True, and use memory_format=torch.channels_last for the "
    f"model and its inputs. {_CONVOLUTION}"
)
_TABLE = (
    "This is a lookup in a large table, whose gradient is mostly zeros: use "
    "torch.nn.Embedding(..., sparse=True) with torch.optim.SparseAdam, which writes only the rows "
    "that the batch used."
)
_INDEX = (
    "Backward adds into a tensor as large as the indexed one. For rows of a table, use "
    "torch.nn.functional.embedding or x.index_select(dim, index), which add faster than x[index] "
    "and gather. Slices, multiplying by a mask and torch.where need no index."
)
_OTHER = (
    "Rewrite the operation behind these nodes: sums over expanded dimensions and atomic additions "
    "often have a slow backward. Or compile the module, or write its backward as a "
    "torch.autograd.Function."
)


@fallback_rule("backward-ratio")
def find(evidence: Evidence, found: Sequence[Finding]) -> Finding | None:
    """Find modules with nodes that take far more device time than the module's own forward.

    Args:
        evidence: the trace.
        found: what the other rules found. A ratio says that something is odd, but not what: a
            module is skipped when another finding explains half of its backward.
    """
    costs, say, owner = evidence.costs, evidence.wording, evidence.ownership.owner
    forward, backward, wall = _times(evidence)
    holds = (backward > _HIGH * forward) & (forward > 0) & (wall > _LEAST * costs.step_ns)
    least = 1
    if not evidence.report.has_gpu:
        holds &= backward > _LEAST_ON_HOST
        least = _LEAST_STEPS_ON_HOST
    often = holds.sum(axis=1)
    odd = (2 * often > holds.shape[1]) & (often >= least)
    fused = evidence.nodes_named(lambda name: "ScaledDotProduct" in name)
    odd[owner[fused]] = False
    odd &= ~_estimated(evidence)
    spent = evidence.typical.mean(wall)
    explained: dict[str, int] = {}
    for other in found:
        for place in other.places:
            explained[place.path] = explained.get(place.path, 0) + place.wall_ns
    for module in np.flatnonzero(odd).tolist():
        path = evidence.ownership.owners.path(module)
        odd[module] = 2 * explained.get(path, 0) < spent[module]
    if not odd.any():
        return None
    worst = int(np.argmax(np.where(odd, spent, 0)))
    computes = evidence.in_pass & evidence.spans.is_node & ~accumulating(evidence)
    nodes = computes & _working_for(evidence, odd)
    of_worst = computes & _working_for(evidence, np.arange(len(odd)) == worst)
    heaviest = costs.top_nodes(of_worst)
    label = costs.label_of(worst)
    ratio = backward[worst] / np.maximum(forward[worst], 1) * (forward[worst] > 0)
    median = int(np.argsort(ratio, kind="stable")[(len(ratio) - 1) // 2])
    return finding(
        costs.places_by_step(np.where(odd[:, None], wall, 0)),
        title="A backward takes many times its forward",
        seen=(
            f"{label}: the forward takes {duration(forward[worst, median])} and the backward "
            f"{duration(backward[worst, median])}, which is {ratio[median]:.0f} times as long; "
            f"twice is usual. The backward takes more than {_HIGH:.0f} times its forward "
            f"{say.in_steps(int(often[worst]))}. Most of it is {', '.join(heaviest)}."
        ),
        remedy=_remedy(evidence, of_worst, heaviest[0]),
        link="https://docs.pytorch.org/docs/stable/notes/extending.html",
        nodes=costs.top_nodes(nodes),
    )


def _times(evidence: Evidence) -> tuple[Ints, Ints, Ints]:
    """Return each owner's own time in forward and in backward, and its backward's clock time.

    All three have one row an owner and one column a step. The first two are device time, or host
    time where the trace has no device.
    """
    spans, costs = evidence.spans, evidence.costs
    owners = evidence.ownership.owners
    # Adding a gradient to its parameter is not part of computing it.
    computes = spans.is_node & ~accumulating(evidence) & evidence.in_pass
    wall = costs.owned_by_step(computes, evidence.work_of(computes))
    if evidence.report.has_gpu:
        # Communication has owners of its own, whatever node launches it.
        span = evidence.work.span
        forward = costs.running_by_step(take(~evidence.in_pass, span, False))
        backward = costs.running_by_step(take(computes, span, False))
    else:
        calls = (spans.module >= 0) & ~evidence.in_pass
        forward, backward = costs.owned_by_step(calls, evidence.work_of(calls)), wall
    forward[owners.is_special] = 0
    return forward, backward, wall


def _working_for(evidence: Evidence, chosen: Mask) -> Mask:
    """Whether each span belongs to a chosen owner, or launched compiled code for one."""
    ownership = evidence.ownership
    launch = np.repeat(np.arange(len(ownership.compiled.event)), ownership.launch_shares.count)
    working = launch[chosen[ownership.launch_shares.owner]]
    found: Mask = chosen[ownership.owner]
    return found | evidence.spans_with(ownership.compiled.span[working])


def _estimated(evidence: Evidence) -> Mask:
    """Whether most of each owner's device time is estimated, and says little about its own work.

    That is its share of kernels that serve several owners, and what it has as the owner of a
    compiled region: kernels inside for which no module is known.
    """
    shares, owners = evidence.ownership.work_shares, len(evidence.ownership.owners)
    work = np.arange(len(evidence.work.start))
    place, share, part = shares.split(work, evidence.costs.device_ns)
    compiled = evidence.ownership.compiled
    nobodys = np.append(compiled.shares.largest < 0, False)
    split = (shares.is_split | nobodys[compiled.of_work])[place]
    sums = np.zeros((2, owners), np.int64)
    np.add.at(sums, (split.astype(np.int64), shares.owner[share]), part)
    found: Mask = sums[1] > sums[0]
    return found


# What to do --------------------------------------------------------------------------------------


def _remedy(evidence: Evidence, nodes: Mask, name: str) -> str:
    """Return what to do, by the kind of the most expensive node and by what runs in it.

    Args:
        evidence: the trace.
        nodes: the nodes of one module.
        name: the name of those that take most of the time.
    """
    regions = evidence.ownership.owners.mask(lambda module: module.is_region)
    nodes = nodes & evidence.nodes_named(lambda other: other == name)
    if name.startswith(names.COMPILED_FUNCTION) or regions[evidence.ownership.owner[nodes]].all():
        return _COMPILED
    if names.is_custom_function(name):
        return _of_function(evidence, nodes)
    if name.startswith(_CONVOLUTIONS):
        return _CONVOLUTION_ON_GPU if evidence.device == "cuda" else _CONVOLUTION
    if is_indexing(name):
        return _TABLE if _filled(evidence, nodes) >= _FILLED else _INDEX
    return _OTHER


def _of_function(evidence: Evidence, nodes: Mask) -> str:
    """Return what to do about custom Functions, by the operators that their backward calls."""
    events = evidence.events
    index, span = operators_inside(events, evidence.ownership)
    called, which = numbered(events.name[index[nodes[span]]].astype(np.int64))
    if not len(called):
        return "Rewrite the backward of this Function with operators on whole tensors."
    count = np.bincount(which)
    most = int(np.argmax(count))
    number = round(int(count[most]) / int(nodes.sum()))
    if number < _LOOP:
        return (
            "Rewrite the backward of this Function with fewer operators on whole tensors, and save "
            "in its forward what it computes a second time."
        )
    return (
        f"The backward of this Function calls {events.names[called[most]]} {number:,} times, which "
        "is a Python loop. Replace the loop by operators on whole tensors."
    )


def _filled(evidence: Evidence, nodes: Mask) -> float:
    """Return the share of these nodes' time in which they fill memory with zeros."""
    if evidence.report.has_gpu:
        work = evidence.work_of(nodes)
        length = evidence.costs.device_ns
        fills = work & evidence.work_named(names.is_zero_fill)
        return float(length[fills].sum() / max(1, length[work].sum()))
    events = evidence.events
    fill = events.name_mask("aten::zero_")[events.name]
    index = _inside(evidence, nodes)
    spent = events.duration[index[fill[index]]].sum()
    return float(spent / max(1, (evidence.spans.end - evidence.spans.start)[nodes].sum()))


def _inside(evidence: Evidence, nodes: Mask) -> Ints:
    """Return PyTorch's operators in these nodes; events."""
    index = evidence.events.named(Category.OPERATOR, names.ATEN)
    found: Ints = index[take(nodes, evidence.spans.of(evidence.events, index), False)]
    return found
