"""Rules about computing itself: slower kernels than necessary, or work that need not be done."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from backspot.analysis.accounting.activity import NAMES
from backspot.analysis.accounting.amounts import operators_inside
from backspot.analysis.accounting.formulas import Inputs, Unknown
from backspot.analysis.findings.costs import LEAST_SHARE
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import (
    Stretches,
    accumulating,
    adds_to_others,
    anomaly_checks,
    both_ways,
    forward_of,
    is_filled,
    is_indexing,
    of_tiny_products,
    time_of,
    times_of_alike,
)
from backspot.analysis.findings.registry import Found, fallback_rule, finding, rule
from backspot.analysis.timeline import (
    FAR,
    NOTHING,
    distinct,
    grouped,
    is_in,
    median,
    merged,
    numbered,
    take,
)
from backspot.formatting import counted, gigabytes, percent
from backspot.results.costs import WITHOUT_GRADIENTS
from backspot.results.findings import Finding, Place
from backspot.trace import Category, Events, names, operations
from backspot.trace.events import Ints, Mask
from backspot.trace.operations import BATCHED_PRODUCTS, VIEWS, Kind, kind_of, of_node

_SOFTMAX = ("softmax", "safesoftmax")
_LAID_OUT = (*VIEWS, Kind.COPY, Kind.CAST)
_SCALED_OR_MASKED = ("mul", "div", "add", "sub", "maskedfill", "where")
_LEARNED = ("index", "indexselect", "embedding")
_DROPPED_OUT = ("nativedropout", "mul", "div", "maskedfill", "where")
_LEAST_WIDTH = 8
"""With fewer channels in queries and keys, or with fewer keys, there is little to fuse."""
_ALIKE = 4
"""Both products multiply as many numbers. Where one takes this many times the other, the scores are
no product of queries and keys: additive attention has products with a single column, for example.
"""
_WIDEST = 256
"""Channels of a head that fused kernels take; a router's scores come from all channels of a model.
"""
_SLIGHT = 10
"""A softmax reads what a product of up to 256 channels wrote, in a time like the product's. Beside
one of many times its time, it weighs a few experts.
"""
_MATH = "aten::_scaled_dot_product_attention_math"
_USE_SDPA = (
    "Use torch.nn.functional.scaled_dot_product_attention, which runs attention as one kernel"
)
_NEEDED_ON_CPU = (
    "inputs of four dimensions, equal head sizes of query, key and value, and a mask that needs no "
    "gradient"
)
_WARNS = "torch.nn.attention.sdpa_kernel warns why a backend cannot run."


@rule(
    "attention-math",
    tier="stable",
    sources=(
        "lyuwenyu/RT-DETR#678",
        "gnina/OMTRA#63",
        "timm",
    ),
    title="Attention is not fused into one kernel",
    link=(
        "https://docs.pytorch.org/docs/stable/generated/"
        "torch.nn.functional.scaled_dot_product_attention.html"
    ),
)
def attention_math(evidence: Evidence) -> Finding | None:
    """Attention runs as products and a softmax.

    **Cause.** Attention runs as product, softmax, product, which writes and reads the matrix of
    weights several times.

    **Found by** these three in the forward, with only views, a factor and a mask between the first
    two. Talking heads, the router of experts, weights that are used again and, on a CPU, a learned
    bias do not count.

    **Fix.** `torch.nn.functional.scaled_dot_product_attention`. If the model uses it already, it
    runs its math backend: on a GPU because of fp32 inputs, a mask or the head size; on a CPU
    because of `dropout_p > 0`, a mask that needs a gradient, or inputs without four dimensions.
    `torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)` warns why. `nn.MultiheadAttention`
    is fused only with `need_weights=False`.
    """
    costs, say = evidence.costs, evidence.wording
    nodes, softmax = _chains(evidence)
    if not softmax.any():
        return None
    names = costs.top_nodes(nodes)
    remedy, changes_training = _attention_remedy(evidence, softmax)
    products = evidence.nodes_named(lambda name: of_node(name) in BATCHED_PRODUCTS)
    return finding(
        costs.places_of_spans(nodes),
        seen=(
            f"{say.per_step(int(softmax.sum()), 'softmax', 'softmaxes')} between batched products: "
            f"{', '.join(names)} take {say.ms(costs.of_spans(nodes))} of the backward. Each of "
            "these nodes reads and writes the whole matrix of attention weights, and so do the "
            "products, whose gain is not counted."
        ),
        remedy=remedy,
        nodes=names,
        kernels=costs.top_kernels(evidence.work_of(nodes)),
        change={"free": evidence.with_forward(nodes & ~products)},
        changes_training=changes_training,
    )


def _chains(evidence: Evidence) -> tuple[Mask, Mask]:
    """Return the nodes of attention that fused attention could replace, and their softmaxes.

    Nodes are numbered in the order of the forward. From the scores to the softmax there may be what
    fused attention does itself: a factor, and a mask that fills in or is added. A layer or another
    function there makes it something else: talking heads, additive attention, the router of
    experts. The fused kernel for the CPU takes no mask that is learned.
    """
    join, node_operations = (
        evidence.ownership.join,
        [of_node(name) for name in evidence.spans.node_names],
    )
    laid_out = {operation for operation in node_operations if kind_of(operation) in _LAID_OUT}
    of_values = {
        operation for operation in node_operations if kind_of(operation) is Kind.PRODUCT
    } - BATCHED_PRODUCTS
    before = {*laid_out, *_SCALED_OR_MASKED, *(() if evidence.device == "cpu" else _LEARNED)}
    after = {*laid_out, *_DROPPED_OUT, *of_values}
    numbered = evidence.in_pass & evidence.spans.is_node & (join.sequence >= 0)
    nodes, softmax = np.zeros((2, len(numbered)), bool)
    summed = adds_to_others(evidence)
    by_owner: dict[int, list[tuple[Ints, int]]] = {}
    for _, members in grouped(join.builder, np.flatnonzero(numbered)):
        members = members[np.argsort(join.sequence[members], kind="stable")]
        steps = [node_operations[node] for node in evidence.spans.node[members].tolist()]
        for place in (index for index, step in enumerate(steps) if step in _SOFTMAX):
            first, last = _product(steps, place, -1, before), _product(steps, place, 1, after)
            used_again = summed[members[place + 1 : last]].any()  # as a router's gate is, say
            if first is not None and last is not None and not used_again:
                among = [
                    place_between
                    for place_between in range(first, last + 1)
                    if steps[place_between] not in of_values
                ]
                owner = int(evidence.ownership.owner[members[first]])
                by_owner.setdefault(owner, []).append((members[among], int(members[place])))
    spent = forward_of(evidence)
    for chains in by_owner.values():
        ends = np.array([(*chain[[0, -1]], middle) for chain, middle in chains])
        if _is_attention(evidence, ends, spent):
            for chain, middle in chains:
                nodes[chain] = softmax[middle] = True
    return nodes, softmax


def _product(steps: Sequence[str], place: int, way: int, between: Collection[str]) -> int | None:
    """Return the place of the nearest batched product, if only some operations come before."""
    place += way
    while 0 <= place < len(steps) and steps[place] in between:
        place += way
    return place if 0 <= place < len(steps) and steps[place] in BATCHED_PRODUCTS else None


def _is_attention(evidence: Evidence, ends: Ints, spent: Ints) -> bool:
    """Whether one product has the scores of queries and keys, and the other the mean of values.

    Args:
        ends: the nodes of both and of the softmax, one row for each time that a module computes
            them.
        spent: the time of the forward operator of each node.
    """
    # The least time is that without an interruption.
    *products, softmax = spent[ends].min(axis=0).tolist()
    low, high = sorted(products)
    if _SLIGHT * softmax < low:
        return False
    operators = evidence.ownership.join.operator[ends[0, :2]]
    scores, mean = (_shape_of_product(evidence, operator) for operator in operators.tolist())
    if scores and mean:
        return min(scores[1:]) >= _LEAST_WIDTH and scores[1] <= _WIDEST and scores[2] == mean[1]
    return bool(high <= _ALIKE * low)


def _shape_of_product(evidence: Evidence, operator: int) -> tuple[int, int, int] | None:
    """Return rows, inner size and columns of a batched product, where shapes are recorded."""
    events = evidence.events
    signature = int(events.signature[operator]) if operator >= 0 else NOTHING
    if signature < 0:
        return None
    matrices = [
        sizes for sizes in json.loads(events.signatures[signature].shapes) if len(sizes) == 3
    ]
    if len(matrices) < 2:
        return None
    (_, rows, inner), (_, _, columns) = matrices[-2:]
    return rows, inner, columns


def _attention_remedy(evidence: Evidence, softmax: Mask) -> tuple[str, bool]:
    """Return what to change, by the operators that ran in the forward around these softmaxes.

    The second value is whether something else is trained then.
    """
    events = evidence.events
    operator = evidence.ownership.join.operator[softmax]
    operator = operator[operator >= 0]
    thread, start, end = events.thread[operator], events.start[operator], events.end[operator]
    math = (evidence.around(thread, start, _MATH) >= 0).any()
    if evidence.device != "cpu":
        if not math:
            return f"{_USE_SDPA}.", False
        return (
            "Use half precision and a head size that the flash or efficient backend supports: "
            f"scaled_dot_product_attention falls back to its math backend here. {_WARNS}"
        ), False
    falls_back = "scaled_dot_product_attention falls back to its math backend here"
    if _drops_out(events, thread, end):
        because = f"{falls_back}, because dropout_p is not 0, and" if math else "Here"
        return (
            "Train without dropout of the attention weights, if that is as good (dropout in "
            "nn.MultiheadAttention): scaled_dot_product_attention then runs as one kernel. "
            f"{f'{because} the' if math else 'The'} fused kernel for the CPU has no dropout."
        ), True
    if math:
        return (
            f"Give scaled_dot_product_attention what its fused kernel for the CPU needs: "
            f"{_NEEDED_ON_CPU}. It falls back to its math backend here."
        ), False
    remedy = f"{_USE_SDPA} where dropout_p is 0. The fused kernel for the CPU needs"
    return f"{remedy} {_NEEDED_ON_CPU}.", False


def _drops_out(events: Events, thread: Ints, end: Ints) -> bool:
    """Whether what runs next after one of these moments, products aside, is a dropout."""
    random = events.named(Category.OPERATOR, "aten::bernoulli_", "aten::native_dropout")
    product = events.named(Category.OPERATOR, "aten::bmm", "aten::baddbmm")

    def following(index: Ints) -> Ints:
        """Return the start of the next of these operators after each moment; ``FAR`` for none."""
        result = np.full(len(end), FAR)
        of_thread = dict(grouped(events.thread, index))
        for number, members in grouped(thread):
            times = np.append(np.sort(events.start[of_thread.get(number, index[:0])]), FAR)
            result[members] = times[np.searchsorted(times[:-1], end[members])]
        return result

    return bool((following(random) < following(product)).any())


_RATIO_HIGH = 10.0
"""A backward computes two gradients where its forward computes one value, so it usually takes twice
as long. Fused attention takes seven to twelve times its forward, copies included, and is skipped.
"""
_RATIO_LEAST = 0.03  # of the step, for each module
_LEAST_ON_HOST = 1_000_000
_LEAST_STEPS_ON_HOST = 3
"""Without a GPU: nanoseconds of backward in the median step, and how many steps must agree. On a
busy machine, the host loses the processor for milliseconds, and any module is held up in a few
steps. (Measured on healthy MLPs beside two busy processes: in up to 2 of 3 steps and 4 of 10.)
"""
_MATRICES = ("addmm", "mm", *BATCHED_PRODUCTS, "linear")
"""Products of matrices."""
_LOOP = 100
"""Operators of one name in one node: so many come from a loop."""
_AGAIN = 3
"""The same: the gradients of two inputs take one or two of a kind."""
_COMPILED = (
    "The region is compiled already. TORCH_LOGS=output_code shows the kernels of its backward: "
    "move the operation that makes them slow out of the region, or rewrite it."
)
_CONVOLUTIONS = ("Convolution", "Cudnn", "Mkldnn", "Miopen", "SlowConv", "ConvDepthwise")
_SLOW_KINDS = "grouped, dilated or transposed"
_TUNED = (
    "Set torch.backends.cudnn.benchmark = True, and use memory_format=torch.channels_last for the "
    "model and its inputs. "
)
_PLAIN = "The convolution is neither grouped nor dilated nor transposed: compiling it can help."
_TABLE = (
    "Use torch.nn.Embedding(..., sparse=True) with torch.optim.SparseAdam, which writes only the "
    "rows that the batch used: this is a lookup in a large table, whose gradient is mostly zeros."
)
_RATIO_INDEX = (
    "For rows of a table, use torch.nn.functional.embedding or x.index_select(dim, index), which "
    "add faster than x[index] and gather: backward adds into a tensor as large as the indexed one. "
    "Slices, multiplying by a mask and torch.where need no index."
)
_RATIO_OTHER = (
    "Rewrite the operation behind these nodes: sums over expanded dimensions and atomic additions "
    "often have a slow backward. Or compile the module, or write its backward as a "
    "torch.autograd.Function."
)


@fallback_rule(
    "backward-ratio",
    tier="stable",
    sources=(
        "timm",
        "scripts",
    ),
    title="A backward takes many times its forward",
    link="https://docs.pytorch.org/docs/stable/notes/extending.html",
)
def backward_ratio(evidence: Evidence, findings: Sequence[Finding]) -> Finding | None:
    """A backward takes many times its forward.

    **Cause.** A backward usually takes twice its forward; this one takes more than ten times, and
    at least 3% of the step, and no other finding explains it. Fused attention (seven to twelve
    times) does not count, nor do products of matrices on a CPU.

    **Found by** the GPU time of the module's own nodes and forward, in most steps, where the
    typical step has at least half of that; without a GPU by
    host time, from 1 ms in at least three steps. A custom Function is found by its own node and
    forward, where the operator that takes most of its backward runs three times or more in a node;
    its price is that of all but the first, at best.

    **Fix.** It depends on the most expensive node:

    - A custom Function that calls one operator hundreds of times: use operators on whole tensors,
      or save in the forward what the backward computes again.
    - A lookup in a large table: see [dense-embedding-gradient](#dense-embedding-gradient).
      `x.index_select(dim, index)` adds faster than `x[index]` and `gather`.
    - Convolutions on a GPU: `memory_format=torch.channels_last`, and
      `torch.backends.cudnn.benchmark = True`. Grouped, dilated and transposed ones have slow
      gradients.
    - A compiled region: `TORCH_LOGS=output_code` shows its kernels.
    - Elsewhere, look for sums over expanded dimensions and for atomic additions, or compile the
      module.
    """
    costs, say, owner = evidence.costs, evidence.wording, evidence.ownership.owner
    forward, backward, wall = _times(evidence)
    holds = (
        (backward > _RATIO_HIGH * forward) & (forward > 0) & (wall > _RATIO_LEAST * costs.step_ns)
    )
    least = 1
    if not evidence.report.has_gpu:
        holds &= backward > _LEAST_ON_HOST
        least = _LEAST_STEPS_ON_HOST
    often = holds.sum(axis=1)
    odd = (2 * often > holds.shape[1]) & (often >= least)
    # Where calls are interrupted now and then, the typical step contradicts the single ones.
    typical_forward, typical_backward = map(evidence.typical.mean, (forward, backward))
    odd &= 2 * typical_backward > _RATIO_HIGH * typical_forward
    fused = evidence.nodes_named(lambda name: "ScaledDotProduct" in name)
    odd[owner[fused]] = False
    odd &= ~_estimated(evidence)
    spent = evidence.typical.mean(wall)
    explained: dict[str, int] = {}
    for other in findings:
        for place in other.places:
            explained[place.path] = explained.get(place.path, 0) + place.wall_ns
    # What full backward hooks do is no operation's backward. On a CPU that of a product is two
    # products: where it takes longer, the processor was held up, or memory is new to the process.
    ordinary = evidence.nodes_named(
        lambda name: (
            name.startswith(names.BACKWARD_HOOK_FUNCTION)
            or (not evidence.report.has_gpu and of_node(name) in _MATRICES)
        )
    )
    for module in np.flatnonzero(odd).tolist():
        explained_ns = explained.get(evidence.ownership.owners.path(module), 0)
        explained_ns += costs.of_spans(ordinary & (owner == module))
        odd[module] = 2 * explained_ns < spent[module]
    if not odd.any():
        return _of_one_function(evidence, findings)
    worst = int(np.argmax(np.where(odd, spent, 0)))
    computes = evidence.in_pass & evidence.spans.is_node & ~accumulating(evidence)
    nodes = computes & _working_for(evidence, odd)
    of_worst = computes & _working_for(evidence, np.arange(len(odd)) == worst)
    heaviest = costs.top_nodes(of_worst)
    label = Place(*evidence.ownership.owners.named(worst), 0, 0).label
    first, second = int(typical_forward[worst]), int(typical_backward[worst])
    return finding(
        costs.places_by_step(np.where(odd[:, None], wall, 0)),
        seen=(
            f"{label}: the forward takes {say.ms(first)} and the backward {say.ms(second)}, which "
            f"is {second / max(first, 1):.0f} times as long; "
            f"twice is usual. The backward takes more than {_RATIO_HIGH:.0f} times its forward "
            f"{say.in_steps(int(often[worst]))}. Most of it is {', '.join(heaviest)}."
        ),
        remedy=_ratio_remedy(evidence, of_worst, heaviest[0]),
        nodes=costs.top_nodes(nodes),
        **_priced(evidence, _run_again(evidence, of_worst)),
    )


def _of_one_function(evidence: Evidence, findings: Sequence[Finding]) -> Finding | None:
    """Find a Function whose backward takes long beside what else its module does.

    A Function may do little in its forward, as one that only reverses a gradient. What its backward
    does once may be needed; what it does again and again is what can be saved.
    """
    costs, say = evidence.costs, evidence.wording
    nodes = evidence.nodes_named(names.is_custom_function)
    for other in findings:
        if isinstance(other, Found) and other.removable:
            nodes &= ~other.removable.spans
    # Hooks that shard or exchange run in nodes, too, and say so by marks.
    nodes &= ~evidence.spans_around(evidence.events.of(Category.ANNOTATION))
    if not nodes.any():
        return None
    forward, backward = times_of_alike(evidence, nodes)
    nodes &= (forward > 0) & (backward > _RATIO_HIGH * forward)
    again = _run_again(evidence, nodes)
    nodes &= evidence.spans_around(again)
    by_step = costs.owned_by_step(nodes, evidence.work_of(nodes)).sum(axis=0)
    often = by_step > _RATIO_LEAST * costs.step_ns
    least = 1
    if not evidence.report.has_gpu:
        often &= by_step > _LEAST_ON_HOST
        least = _LEAST_STEPS_ON_HOST
    if int(often.sum()) < least or not costs.holds_in_most_steps(by_step, _RATIO_LEAST):
        return None
    (first, *_) = heaviest = costs.top_nodes(nodes)
    own_nodes = nodes & evidence.nodes_named(lambda name: name == first)
    times = int((backward[own_nodes] / np.maximum(forward[own_nodes], 1)).max())
    return finding(
        costs.places_of_spans(nodes),
        seen=(
            f"{', '.join(heaviest)}: {say.ms(costs.of_spans(nodes))} in "
            f"{say.per_step(int(nodes.sum()), 'node')} of a Function. {first} takes {times:,} "
            f"times its forward; twice is usual. "
            f"{', '.join(costs.top_operators(evidence.names_of(again), time_of(evidence, again)))} "
            "runs again and again in it."
        ),
        remedy=_of_function(evidence, own_nodes),
        nodes=heaviest,
        **_priced(evidence, again),
    )


def _run_again(evidence: Evidence, nodes: Mask) -> Ints:
    """Return what the backward of a Function runs again and again: all but the first, as events.

    Of each node it is the operator that takes most of its time.
    """
    events = evidence.events
    nodes = nodes & evidence.nodes_named(names.is_custom_function)
    index, span = operators_inside(events, evidence.ownership)
    index, span = (column[take(nodes, span, False)] for column in (index, span))
    again = [index[:0]]
    if not len(index):
        return index
    spent = time_of(evidence, index)
    for _, inside_node in grouped(span):
        called, name_of = numbered(events.name[index[inside_node]].astype(np.int64))
        most = np.argmax(np.bincount(name_of, spent[inside_node], len(called)))
        those = index[inside_node[name_of == most]]
        if len(those) >= _AGAIN:
            again.append(those[np.argsort(events.start[those], kind="stable")][1:])
    return merged(*again)


def _priced(evidence: Evidence, again: Ints) -> dict[str, Any]:
    """Return the price of what a Function runs again and again, as fields of a finding."""
    if not len(again):
        return {}
    removable = evidence.costs.removable(None, None, operators=again)
    return {"at_best": True, "change": {"free": removable}}


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
    is_chosen: Mask = chosen[ownership.owner]
    return is_chosen | evidence.spans_with(ownership.compiled.span[working])


def _estimated(evidence: Evidence) -> Mask:
    """Whether most of each owner's device time is estimated, and says little about its own work.

    That is its share of kernels that serve several owners, and what it has as the owner of a
    compiled region: kernels inside for which no module is known.
    """
    shares, owners = evidence.ownership.work_shares, len(evidence.ownership.owners)
    work = np.arange(len(evidence.work.start))
    place, share, divided = shares.split(work, evidence.costs.device_ns)
    compiled = evidence.ownership.compiled
    nobodys = np.append(compiled.shares.largest < 0, False)
    split = (shares.is_split | nobodys[compiled.of_work])[place]
    sums = np.zeros((2, owners), np.int64)
    np.add.at(sums, (split.astype(np.int64), shares.owner[share]), divided)
    is_estimated: Mask = sums[1] > sums[0]
    return is_estimated


# What to do --------------------------------------------------------------------------------------


def _ratio_remedy(evidence: Evidence, nodes: Mask, name: str) -> str:
    """Return what to do, by the most expensive node and by what runs in it."""
    regions = evidence.ownership.owners.mask(lambda module: module.is_region)
    nodes = nodes & evidence.nodes_named(lambda other: other == name)
    if name.startswith(names.COMPILED_FUNCTION) or regions[evidence.ownership.owner[nodes]].all():
        return _COMPILED
    if names.is_custom_function(name):
        return _of_function(evidence, nodes)
    if name.startswith(_CONVOLUTIONS):
        return _of_convolutions(evidence, nodes)
    if is_indexing(name):
        return _TABLE if is_filled(evidence, nodes) else _RATIO_INDEX
    return _RATIO_OTHER


def _of_convolutions(evidence: Evidence, nodes: Mask) -> str:
    """Return what to do about convolutions, by their settings where shapes are recorded."""
    tuned = _TUNED if evidence.device == "cuda" else ""
    events = evidence.events
    index = events.named(Category.OPERATOR, "aten::convolution_backward")
    span = evidence.spans.of(events, index)
    operators = index[take(nodes, span, False)]
    kinds = set[str]()
    for signature in distinct(events.signature[operators]):
        try:
            inputs = Inputs.of(events.signatures[signature]) if signature >= 0 else None
            if inputs is None:
                raise Unknown
            dilation, transposed, groups = (inputs.value(place) for place in (6, 7, 9))
        except Unknown:
            kinds.add(_SLOW_KINDS)
            continue
        kinds |= {"grouped"} if groups != 1 else set()
        kinds |= {"dilated"} if set(dilation) - {1} else set()
        kinds |= {"transposed"} if transposed else set()
    if not len(operators) or _SLOW_KINDS in kinds:
        return (
            f"{tuned}If the convolution is {_SLOW_KINDS}, another one in its place may have a "
            "faster gradient."
        )
    if not kinds:
        return f"{tuned}{_PLAIN}"
    return (
        f"{tuned}The convolution is {' and '.join(sorted(kinds))}: another one in its place may "
        "have a faster gradient."
    )


def _of_function(evidence: Evidence, nodes: Mask) -> str:
    """Return what to do about custom Functions, by the operators that their backward calls."""
    events = evidence.events
    index, span = operators_inside(events, evidence.ownership)
    called, name_of = numbered(events.name[index[nodes[span]]].astype(np.int64))
    if not len(called):
        return "Rewrite the backward of this Function with operators on whole tensors."
    count = np.bincount(name_of)
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


_NEEDED = [NAMES.index(name) for name in WITHOUT_GRADIENTS if name != "evaluation"]
"""The phases of calls without gradients whose results a training uses, in this step or later."""


@rule(
    "forward-only",
    tier="stable",
    sources=(
        "pytorch/examples:gat/main.py",
        "tkipf/pygcn:pygcn/train.py",
        "Diego999/pyGAT:train.py",
    ),
    least=0.1,
    whole_calls=True,
    title="The model runs without a backward",
    remedy=(
        "If these calls evaluate the model, evaluate every few steps or epochs, not in each. "
        "Where the training needs their outputs, run them under torch.no_grad()."
    ),
    link="https://docs.pytorch.org/docs/stable/notes/autograd.html#locally-disabling-gradient-computation",
)
def forward_only(evidence: Evidence) -> Finding | None:
    """The model runs without a backward.

    **Cause.** The trained model also runs without a backward in each step, for an evaluation or for
    a number to print.

    **Found by** outermost calls without a backward, from 10% of the step, of modules that also have
    calls with one: a frozen teacher or encoder does not count, nor a rollout before a backward,
    from whose outputs values are drawn, or what scores one. Where a backward follows in the same
    step, or values are drawn for the next one, it may need the outputs, and leaving the calls out
    has no price.

    **Fix.** Evaluate every few steps or epochs. Keep what the training needs (rollouts, targets,
    samples for a discriminator), under `torch.no_grad()`.
    """
    # A teacher or a frozen encoder is another module, and a model that is only evaluated has no
    # calls with a backward.
    spans, costs, say = evidence.spans, evidence.costs, evidence.wording
    outermost = np.flatnonzero((spans.module >= 0) & (spans.parent < 0) & ~evidence.in_pass)
    followed = _followed(evidence, outermost)
    trained = is_in(spans.module[outermost], spans.module[outermost[followed]])
    alone = outermost[trained & ~followed]
    before = _come_before(evidence, alone, np.flatnonzero(evidence.in_pass))
    drawn = is_in(evidence.recording.activity.host.at(spans.start[alone]), _NEEDED)
    kept = ~(before & drawn)
    alone, before, drawn = alone[kept], before[kept], drawn[kept]
    inside = np.zeros(len(spans.start), bool)
    inside[alone] = True
    inside = inside[_roots(spans.parent)] & ~evidence.in_pass
    calls = counted(int(trained.sum()), "call")
    seen = (
        f"No backward follows {len(alone):,} of {calls} of the model in "
        f"{counted(evidence.report.steps, 'step')}: {say.ms(costs.of_spans(inside))} of each step."
    )
    if before.any():
        seen += " A backward comes after them in the step, and may need what they return."
    elif drawn.any():
        seen += " Values are drawn from what they return, which the next step may need."
    may_be_needed = bool((before | drawn).any())
    return finding(costs.places_of_spans(inside), seen=seen, priced=not may_be_needed)


def _come_before(evidence: Evidence, some: Ints, others: Ints) -> Mask:
    """Whether each of some spans comes before one of the others in its step."""
    start, steps = evidence.spans.start, evidence.ledger.steps
    last = np.full(evidence.report.steps, NOTHING)
    step = steps.at(start[others])
    np.maximum.at(last, step[step >= 0], start[others][step >= 0])
    step = steps.at(start[some])
    comes_before: Mask = start[some] < take(last, step, NOTHING)
    return comes_before


def _followed(evidence: Evidence, calls: Ints) -> Mask:
    """Whether an operator in each of these calls made a node that the backward executes."""
    spans, events, join = evidence.spans, evidence.events, evidence.ownership.join
    makers = merged(join.operator[(join.operator >= 0) & evidence.in_pass])
    of_thread = dict(grouped(events.thread, makers))
    is_followed = np.zeros(len(calls), bool)
    for thread, members in grouped(spans.thread[calls]):
        times = np.sort(events.start[of_thread.get(thread, makers[:0])])
        first = np.searchsorted(times, spans.start[calls[members]])
        is_followed[members] = first < np.searchsorted(times, spans.end[calls[members]])
    return is_followed


def _roots(parent: Ints) -> Ints:
    """Return the outermost ancestor of each span."""
    root = np.arange(len(parent))
    while (above := take(parent, root, NOTHING)).max(initial=NOTHING) >= 0:
        root = np.where(above >= 0, above, root)
    return root


@rule(
    "anomaly-mode",
    tier="stable",
    sources=(
        "stanford-iprl-lab/nerf_shared#10",
        "icon-lab/SynDiff#43",
    ),
    title="Autograd's anomaly mode is on",
    remedy=(
        "Leave out torch.autograd.set_detect_anomaly(True), detect_anomaly() or a trainer's "
        "detect_anomaly=True, and turn it on only to look for a NaN."
    ),
    link="https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection",
)
def anomaly_mode(evidence: Evidence) -> Finding | None:
    """Autograd looks for NaN in every gradient.

    **Cause.** `torch.autograd.set_detect_anomaly(True)` looks for NaN in each gradient, for whose
    answer the host waits, and keeps the Python stack of each operator in the forward.

    **Found by** the operators of this check in the backward, at their cost, with that of keeping
    stacks in the forward, as views show it. What else the engine keeps for each node is not known,
    so a step gains more than the finding says.

    **Fix.** Turn it on only to look for a NaN. Trainers have an option of that name
    (`detect_anomaly`).
    """
    # In the forward it keeps the Python stack of each operator that makes a node, within the
    # operator, before it launches anything. How long that takes is known of views, which do nothing
    # else.
    costs, say, events = evidence.costs, evidence.wording, evidence.events
    checks, none = anomaly_checks(evidence), np.zeros(len(evidence.spans.start), bool)
    makers = evidence.ownership.join.operator[evidence.in_pass & evidence.spans.is_node]
    views = makers[take(events.names_where(operations.is_view), evidence.names_of(makers), False)]
    if not len(checks):
        return None
    kept_views = merged(views)
    others = merged(makers[makers >= 0])
    others = others[~is_in(others, kept_views)] if len(kept_views) else kept_views
    stretches = _of_stacks(evidence, checks, kept_views, others)
    gone = np.concatenate([checks, kept_views])
    placed = both_ways(evidence, none, gone, LEAST_SHARE, whole=True, stretches=stretches)
    return finding(
        placed,
        seen=(
            f"{say.per_step(len(checks) // 3, 'gradient')} are looked through for NaN: "
            f"{say.ms(placed.wall_ns)}, with the Python stacks that are kept in the forward: of "
            f"{say.per_step(len(kept_views), 'view')}, and for as long of "
            f"{say.per_step(len(others), 'other operator')}."
        ),
        operators=costs.top_operators(evidence.names_of(checks), events.duration[checks]),
        at_least=True,
        change={"free": placed.removable},
    )


def _of_stacks(evidence: Evidence, checks: Ints, views: Ints, others: Ints) -> Stretches:
    """Return where the host looks for NaN, and where it keeps a stack.

    Args:
        checks: operators that look for NaN, as indices into the events.
        views: operators of the forward that do nothing but keep their stack.
        others: operators that keep it first, which takes as long as the usual view.
    """
    events = evidence.events
    usual = int(median(events.duration[views])) if len(views) else 0
    index = np.concatenate([checks, views, others])
    length = events.duration[index].copy()
    length[len(index) - len(others) :] = np.minimum(events.duration[others], usual)
    order = np.lexsort((events.start[index], events.thread[index]))
    index, length = index[order], length[order]
    start = events.start[index]
    end = start + length
    same = events.thread[index[1:]] == events.thread[index[:-1]]
    end[:-1] = np.where(same, np.minimum(end[:-1], start[1:]), end[:-1])
    return Stretches(start, end, evidence.spans.of(events, index))


_FP32 = (
    "Run the forward under torch.autocast('cuda', dtype=torch.bfloat16) (float16 before Ampere). "
    "To stay in fp32, use torch.set_float32_matmul_precision('high') and "
    "torch.backends.cudnn.allow_tf32 = True."
)
_FP64 = (
    "Unless the result needs fp64, call model.float() and convert the batch likewise: tensors made "
    "from NumPy arrays are float64 by default. Then use torch.autocast('cuda', "
    "dtype=torch.bfloat16)."
)


@rule(
    "no-tensor-cores",
    tier="stable",
    sources=("microsoft/retrochimera#36", "timm"),
    least=0.03,
    devices=("cuda",),
    link=(
        "https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#tensorfloat-32-tf32-on-ampere-and-later-devices"
    ),
)
def no_tensor_cores(evidence: Evidence) -> Finding | None:
    """Matrix products run in fp32 without tensor cores.

    **Cause.** Matrix products or convolutions run in fp32 (or fp64) without tensor cores, which are
    several times as fast in TF32 or bf16.

    **Found by** the names of kernels (`…sgemm…`, `…_ffma…`, `f32f32_f32f32`), in forward and
    backward, from 3% of the step, unless a replay says that tensor cores save nothing, as the host
    is late anyway. [Products of tiny matrices](#tiny-products) do not count. A convolution beside
    others in TF32 has no price: cuDNN may use it there, and has no such kernel for these sizes.

    **Fix.** `torch.autocast("cuda", dtype=torch.bfloat16)`; before Ampere, float16 with a
    `GradScaler`. Or stay in fp32, with inputs rounded to the ten bits of TF32:
    `torch.set_float32_matmul_precision("high")` and `torch.backends.cudnn.allow_tf32 = True`.
    """
    costs, say = evidence.costs, evidence.wording
    work = evidence.work_named(names.is_without_tensor_cores)
    work &= ~of_tiny_products(evidence)[0]  # these have hardly any arithmetic
    double = evidence.work_named(names.is_double) & work
    wide = 2 * costs.of_work(double) > costs.of_work(work)
    known = work & (double | ~_without_a_kernel(evidence))
    placed = replace(
        costs.places_of_work(work), removable=replace(costs.removable(None, known), with_host=False)
    )
    unknown = work & ~known
    return finding(
        placed,
        title=f"Matrix products run in {'fp64' if wide else 'fp32'} without tensor cores",
        seen=(
            f"{say.per_step(int(work.sum()), 'kernel')}, {say.ms(costs.of_work(work))} of the "
            "step. In half precision, tensor cores run such products several times as fast."
            + (
                f" {say.per_step(int(unknown.sum()), 'kernel')}, {say.ms(costs.of_work(unknown))}, "
                "are of convolutions beside others in TF32: cuDNN has no kernel in TF32 for their "
                "sizes, and whether it has a faster one in half precision is not known."
                if unknown.any()
                else ""
            )
        ),
        remedy=_FP64 if wide else _FP32,
        nodes=costs.top_nodes(evidence.spans_of_work(work)),
        kernels=costs.top_kernels(work),
        at_best=wide,
        priced=bool(known.any()),
        change={} if wide else {"dtype": ("bf16", placed.removable)},
    )


_CONVOLVING = ("aten::conv*", "aten::_conv*", "aten::cudnn_conv*", "aten::miopen_conv*")


def _without_a_kernel(evidence: Evidence) -> Mask:
    """Whether each piece of work is of a convolution, while others in the steps run in TF32.

    PyTorch allows TF32 for all convolutions or for none.
    """
    convolving = evidence.launched_in(*_CONVOLVING) >= 0
    convolving |= evidence.work_of(evidence.nodes_named(lambda name: "Convolution" in name))
    allowed = (convolving & evidence.work_named(names.is_tf32)).any()
    return convolving & bool(allowed)


_LITTLE = 0.5
"""Share of the device's memory; where no more was ever reserved, more can be kept."""


@rule(
    "recompute",
    tier="stable",
    sources=("huggingface/diffusers#10611", "bghira/SimpleTuner#1184"),
    whole_calls=True,
    link="https://docs.pytorch.org/docs/stable/checkpoint.html",
)
def recompute(evidence: Evidence) -> Finding | None:
    """Activation checkpointing runs forward work again.

    **Cause.** Activation checkpointing runs part of the forward again inside backward, to save
    memory.

    **Found by** forward labels and operators inside backward nodes, with the Python of the
    checkpoint around them and in the forward, which keeps the state of random numbers and sets it
    again. In a training that Backspot recorded, it also says whether half of the GPU's memory was
    never reserved.

    **Fix.** Nothing, if you need the memory. Otherwise checkpoint fewer blocks, or keep expensive
    results (`create_selective_checkpoint_contexts`).
    """
    costs = evidence.costs
    again = evidence.in_pass & ~evidence.spans.is_node
    if not costs.of_spans(again):
        return None
    around = _around_recomputing(evidence, again)
    start, end = around.start, around.end
    held_by = costs.idle_within if evidence.report.has_gpu else costs.elapsed
    owner = np.maximum(evidence.ownership.owner[around.span], 0)
    by_step = costs.owned_by_step(again, evidence.work_of(again))
    by_step = by_step + costs.operators_by_step(start, held_by(start, end), owner)
    removable = replace(
        costs.removable(again, evidence.work_of(again)), stretches=np.stack([start, end])
    )
    placed = replace(
        costs.places_by_step(by_step, evidence.ownership.owner[again]), removable=removable
    )
    cost = placed.wall_ns
    share = percent(cost / evidence.report.wall_ns if evidence.report.wall_ns else 0.0)
    used, total = evidence.reserved_bytes or (0, 0)
    left = 0 < used <= _LITTLE * total
    most = f" At most {gigabytes(used, total)} of memory were reserved." if left else ""
    return finding(
        placed,
        title=(
            "Activation checkpointing runs the forward again"
            f"{', while memory is left' if left else ''}"
        ),
        seen=(
            f"{evidence.wording.ms(cost)}, as much as {share} of the backward, is forward work "
            f"that runs a second time, with what the checkpoint does around it.{most}"
        ),
        remedy=(
            f"{'C' if left else 'If memory is left, c'}heckpoint fewer blocks, or keep the results "
            "of matmuls with torch.utils.checkpoint.create_selective_checkpoint_contexts. This is "
            "the price of the memory that checkpointing saves."
        ),
        kernels=costs.top_kernels(evidence.work_of(again)),
        change={"free": removable},
    )


def _around_recomputing(evidence: Evidence, again: Mask) -> Stretches:
    """Return where the host prepares forward work that runs again, and cleans up after it.

    In a node, that is from the operator before to the work, and from there to what the node does
    next; in the forward, from the operator before to the one that keeps the inputs.
    """
    events, spans = evidence.events, evidence.spans
    operators = events.chosen(events.names_where(names.is_operator), Category.OPERATOR)
    inner = np.flatnonzero(again & take(spans.is_node, spans.parent, False))
    stretches = [np.empty((3, 0), np.int64)]
    for thread, members in grouped(spans.thread[inner]):
        span, node = inner[members], spans.parent[inner[members]]
        on_thread = operators[events.thread[operators] == thread]
        begins = np.concatenate([events.start[on_thread], spans.start[spans.thread == thread]])
        ends = np.concatenate([events.end[on_thread], spans.end[spans.thread == thread]])
        before = _before(ends, spans.start[span], spans.start[node])
        after = np.sort(begins)
        after = np.append(after, FAR)[np.searchsorted(after, spans.end[span])]
        of = _first_call_in(evidence, span, spans.start[span])
        stretches.append(np.stack([before, spans.start[span], of]))
        stretches.append(np.stack([spans.end[span], np.minimum(after, spans.end[node]), of]))
    saves = events.prefixed(Category.OPERATOR, names.CHECKPOINT_SAVES)
    call = spans.of(events, saves)
    saves, call = saves[call >= 0], call[call >= 0]
    # The state of random numbers is kept in empty tensors first.
    operators = operators[~events.prefix_mask("aten::empty")[events.name[operators]]]
    for thread, members in grouped(events.thread[saves]):
        on_thread = operators[events.thread[operators] == thread]
        before = _before(
            events.end[on_thread], events.start[saves[members]], spans.start[call[members]]
        )
        of = _first_call_in(evidence, call[members], events.end[saves[members]])
        stretches.append(np.stack([before, events.end[saves[members]], of]))
    return Stretches(*np.concatenate(stretches, axis=1))


def _first_call_in(evidence: Evidence, outer: Ints, times: Ints) -> Ints:
    """Return the first module's call directly in each span from a time on, else the span itself.

    Of what is checkpointed within a module, that is what runs again.
    """
    spans = evidence.spans
    calls = np.flatnonzero((spans.module >= 0) & (spans.parent >= 0))
    calls = calls[np.lexsort((spans.start[calls], spans.parent[calls]))]
    parent, start = spans.parent[calls], spans.start[calls]
    found: Ints = outer.copy()
    for at, (one, time) in enumerate(zip(outer.tolist(), times.tolist(), strict=True)):
        first, last = np.searchsorted(parent, [one, one + 1])
        first += np.searchsorted(start[first:last], time)
        if first < last:
            found[at] = calls[first]
    return found


def _before(ends: Ints, times: Ints, least: Ints) -> Ints:
    """Return the last of some ends before each time, or ``least`` where that is later."""
    ends = np.sort(ends)
    last = np.append(ends, 0)[np.searchsorted(ends, times, side="right") - 1]
    ends_before: Ints = np.maximum(last, least)
    return ends_before
