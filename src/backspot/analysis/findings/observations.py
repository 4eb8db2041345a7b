"""What several rules look for: masks of spans and of device work, as functions of the evidence."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np

from backspot.analysis.attribution.launches import Precedence
from backspot.analysis.findings.costs import Placed
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.recording import once
from backspot.analysis.timeline import (
    NOTHING,
    enclosing,
    first_started,
    grouped,
    is_in,
    merged,
    numbered,
    take,
)
from backspot.trace import Category, names, operations
from backspot.trace.events import Ints, Mask
from backspot.trace.labels import Kind as LabelKind
from backspot.trace.operations import FOREACH, FUSED, Kind

UPDATED_BY_HAND = (
    "Update many parameters in one kernel: torch._foreach_ functions in place of a loop over "
    "parameters, one batched product for matrices of one shape, or torch.compile of the update."
)
"""The remedy for an optimizer that has no other form."""


def at_once(forms: Sequence[str]) -> str:
    """Return how optimizers of some classes update many parameters at once, ``""`` if they cannot.

    Args:
        forms: the classes of ``torch.optim`` whose forms they have, as of ``forms_of``.
    """
    classes = sorted(set(forms))
    if not classes or not FOREACH.issuperset(classes):
        return ""
    advice = f"Pass foreach=True to {classes[0]}" if len(classes) == 1 else "Pass foreach=True"
    fused = [class_name for class_name in classes if class_name in FUSED]
    if not fused:
        return f"{advice}, which updates many parameters in one kernel."
    of_classes = "" if fused == classes else f" of {' and '.join(fused)}"
    return (
        f"{advice}, which updates many parameters in one kernel, or fused=True{of_classes}, which "
        "runs the whole step in a few kernels."
    )


# Nodes ------------------------------------------------------------------------------------------


@once
def adds_to_others(evidence: Evidence) -> Mask:
    """Whether each node adds its gradient to one that another node gave for the same tensor.

    The engine does that behind the node, within its span: the tensor is used more than once.
    """
    events, spans = evidence.events, evidence.spans
    own = events.chosen(events.names_where(set(spans.node_names).__contains__), Category.OPERATOR)
    adds = events.named(Category.OPERATOR, "aten::add", "aten::add_")
    behind = enclosing(events, own, events.thread[adds], events.start[adds]) < 0
    span = spans.of(events, adds[behind])
    return evidence.spans_with(span[span >= 0]) & spans.is_node


def shapes_of(evidence: Evidence, operator: int) -> list[list[int]]:
    """Return the sizes of an operator's inputs that are tensors, ``[]`` where not recorded."""
    events = evidence.events
    signature = int(events.signature[operator]) if operator >= 0 else NOTHING
    if signature < 0:
        return []
    return [sizes for sizes in json.loads(events.signatures[signature].shapes) if sizes]


# Device work -------------------------------------------------------------------------------------


def fills(evidence: Evidence) -> Mask:
    """Whether each piece of device work in the steps sets gradients to zero."""
    within = evidence.launched_in(f"{names.ZERO_GRAD}*", category=Category.ANNOTATION) >= 0
    # model.zero_grad() is not annotated.
    within |= evidence.launched_in("aten::_foreach_zero_") >= 0
    # New tensors are zeroed too, by the same operator within another one.
    outer = evidence.launched_in(f"{names.ATEN}*")
    zeroes = take(evidence.events.name_mask("aten::zero_"), evidence.names_of(outer), False)
    alone = zeroes & (evidence.work.span < 0)
    within |= alone & ~evidence.work.optimizer.astype(bool)
    return within & evidence.work_named(names.is_zero_fill)


def zeroing(evidence: Evidence) -> Ints:
    """Return the calls of ``zero_grad`` that set gradients to zero on the host, as events."""
    events = evidence.events
    marks = events.prefixed(Category.ANNOTATION, names.ZERO_GRAD)
    fill = events.named(Category.OPERATOR, "aten::zero_", "aten::_foreach_zero_")
    calls = merged(enclosing(events, marks, events.thread[fill], events.start[fill]))
    return calls[calls >= 0]


# Nodes -------------------------------------------------------------------------------------------


def accumulating(evidence: Evidence) -> Mask:
    """Whether each span adds a gradient to its parameter."""
    return evidence.nodes_named(names.is_accumulate_grad)


def made_in(evidence: Evidence, nodes: Mask, *operators: str) -> Mask:
    """Whether each of these spans is of an operator that ran within one of others.

    Args:
        evidence: of the recording.
        nodes: the spans of nodes.
        operators: names of the operators around.
    """
    events = evidence.events
    outer = events.named(Category.OPERATOR, *operators)
    makers = evidence.ownership.join.operator[nodes]
    inside = enclosing(events, outer, events.thread[makers], events.start[makers]) >= 0
    result: Mask = nodes.copy()
    result[nodes] = inside & (makers >= 0)
    return result


def is_convolution(node: str) -> bool:
    """Whether a node has this name of a convolution's."""
    return "Convolution" in node


def norms_that_keep_nchw(evidence: Evidence) -> Mask:
    """Whether each span is of a norm for which a model has to stay in NCHW.

    Up to PyTorch 2.14, a GPU has no kernel of group and instance norms for other layouts: they copy
    a tensor that is channels_last, return one in NCHW, and the next convolution copies that. With
    half as many of them as convolutions, there is more to copy in channels_last than in NCHW.
    """
    norms = evidence.nodes_named(lambda name: name.startswith("NativeGroupNorm"))
    batches = evidence.nodes_named(lambda name: "BatchNorm" in name)
    norms |= made_in(evidence, batches, "aten::instance_norm")
    enough = 2 * norms.sum() >= evidence.nodes_named(is_convolution).sum()
    result: Mask = norms & (enough and evidence.device == "cuda")
    return result


def compiled(evidence: Evidence) -> Mask:
    """Whether each span is the backward of a region that torch.compile compiled."""
    return evidence.nodes_named(lambda name: name.startswith(names.COMPILED_FUNCTION))


def graph_breaks(evidence: Evidence) -> tuple[str, ...]:
    """Return the lines at which the code that runs in the trace leaves a compiled graph; at most 3.

    They are known where the live half recorded what Dynamo compiled.
    """
    event_names = evidence.events.names
    regions = {name.removeprefix(names.COMPILED_REGION) for name in event_names}
    lines = (
        f"{compilation.file}:{compilation.line}"
        for compilation in evidence.events.compiled.compilations
        if compilation.region in regions and compilation.function.startswith(names.RESUMED)
    )
    return tuple(dict.fromkeys(lines))[:3]


_INDEXING = re.compile(r"(Gather|Scatter|Index|Take|UnsafeIndex|UnsafeMaskedIndex)\w*Backward\d*$")
_CROWDED = 12
"""The backward of an index takes about three times its forward. When the backward takes this many
times the forward, many gradients are added into the same rows, one after the other."""


def is_indexing(name: str) -> bool:
    """Whether this is the node of an operator that reads or writes by an index."""
    return _INDEXING.match(name) is not None


def sorting(evidence: Evidence) -> Mask:
    """Whether each span is the node of an index that sorts on a device."""
    index = evidence.nodes_named(is_indexing)
    if index.any():
        index &= evidence.spans_of_work(evidence.work_named(names.is_sort))
    return index


def crowded(evidence: Evidence) -> Mask:
    """Whether each span is the node of an index that duplicate indices slow down."""
    # A slow gather has an expanded index, which has no duplicates.
    index = evidence.nodes_named(is_indexing) & ~evidence.nodes_named(
        lambda name: name.startswith(("Gather", "Scatter"))
    )
    if not index.any():
        return index
    adds = evidence.work_named(lambda name: names.INDEXING_BACKWARD in name)
    adds &= evidence.work_of(index)
    spent = np.zeros(len(index), np.int64)
    np.add.at(spent, evidence.work.span[adds], evidence.costs.device_ns[adds])
    forward = forward_of(evidence)
    slow: Mask = (forward > 0) & (spent > _CROWDED * forward)
    return slow


def of_doubles(evidence: Evidence) -> Mask:
    """Whether each owner is a module with parameters in double precision."""
    labelled = {
        (label.path, label.class_name)
        for label in evidence.events.labels
        if label is not None and label.kind is LabelKind.DOUBLE
    }
    return evidence.ownership.owners.mask(
        lambda module: (module.path, module.class_name) in labelled
    )


def added_in_turn(evidence: Evidence, nodes: Mask) -> Mask:
    """Return the device work that adds many gradients to few rows, in nodes of embeddings.

    Each gradient is read once, and added up with some others of its row. What adds these parts of
    each row in turn takes longer than that only where rows have many parts.
    """
    of_nodes = evidence.work_of(nodes)

    def named(part: str) -> tuple[Mask, Ints]:
        """Return the kernels of a name, and how long those of each node run."""
        work = of_nodes & evidence.work_named(lambda name: part in name)
        spent = np.zeros(len(nodes), np.int64)
        np.add.at(spent, evidence.work.span[work], evidence.costs.device_ns[work])
        return work, spent

    _, once_each = named(names.ROWS_IN_PARTS)
    work, in_turn = named(names.PARTS_OF_ROWS)
    slow: Mask = work & evidence.work_of(in_turn > once_each)
    return slow


@once
def forward_of(evidence: Evidence) -> Ints:
    """Return the time of the forward operator that made each node; 0 where unknown.

    It is device time, or host time where the trace has no device work.
    """
    if not evidence.report.has_gpu:
        return take(evidence.events.duration, evidence.ownership.join.operator, 0)
    return _of_forward(evidence, evidence.costs.device_ns)


@once
def filled_forward_of(evidence: Evidence) -> Ints:
    """Return what the forward of each node would take with work for the whole device.

    A kernel with thread blocks for a part of the multiprocessors counts by this part.
    """
    blocks = evidence.events.size[evidence.work.event]
    fraction = np.where(blocks < 0, 1.0, np.minimum(1.0, blocks / ONE_EACH))
    return _of_forward(evidence, (evidence.costs.device_ns * fraction).astype(np.int64))


ONE_EACH = 1000  # Events.size of a kernel with one thread block for each multiprocessor


def _of_forward(evidence: Evidence, ns: Ints) -> Ints:
    """Return the sum of some times of device work over the forward operator of each node."""
    events, work, operator = evidence.events, evidence.work, evidence.ownership.join.operator
    made_nodes = np.flatnonzero(operator >= 0)
    made_by = dict(grouped(events.thread[operator], made_nodes))
    spent = np.zeros(len(operator), np.int64)
    for thread, members in grouped(work.thread):
        if thread < 0:
            continue
        members = members[work.launch[members] >= 0]
        members = members[np.argsort(work.launch[members], kind="stable")]
        total = np.append(0, np.cumsum(ns[members]))
        nodes = made_by.get(thread, members[:0])
        low = np.searchsorted(work.launch[members], events.start[operator[nodes]], side="left")
        high = np.searchsorted(work.launch[members], events.end[operator[nodes]], side="left")
        spent[nodes] = total[high] - total[low]
    return spent


_FILLED = 0.25
"""A lookup that spends this share on zeros picks few of many rows."""


def is_filled(evidence: Evidence, nodes: Mask) -> bool:
    """Whether these nodes fill memory with zeros for much of their time."""
    if evidence.report.has_gpu:
        work, length = evidence.work_of(nodes), evidence.costs.device_ns
        fills = work & evidence.work_named(names.is_zero_fill)
        return bool(length[fills].sum() >= _FILLED * max(1, length[work].sum()))
    events, spans = evidence.events, evidence.spans
    index = events.named(Category.OPERATOR, "aten::zero_")
    index = index[take(nodes, spans.of(events, index), False)]
    nodes_ns = max(1, int((spans.end - spans.start)[nodes].sum()))
    return bool(events.duration[index].sum() >= _FILLED * nodes_ns)


def backward_of(evidence: Evidence) -> Ints:
    """Return how long the device work of each node runs."""
    work = evidence.work
    launched = np.flatnonzero(work.span >= 0)
    spent = np.zeros(len(evidence.spans.start), np.int64)
    np.add.at(spent, work.span[launched], evidence.costs.device_ns[launched])
    return spent


_BATCHED = ("aten::bmm", "aten::baddbmm")
_BLOCK = 150
"""Nanoseconds of one multiprocessor for each block of threads: a GPU starts about one block a
clock, so that one of a hundred multiprocessors gets one in 60 to 100 ns. A kernel with so short
blocks spends its time on starting them; reading 5 KB takes as long."""
_MANY_BLOCKS = 16_000
"""Thousandths of a block for each multiprocessor: fewer fit on the device at the same time."""
_SPLIT = 2
"""Times as long may blocks last where one product takes several launches with many blocks each, as
one launch takes at most 65,535 matrices: there each matrix has a block of its own. (Of fp32
matrices of 2 by 2 on an H200, at most 250 ns.)"""


@once
def of_tiny_products(evidence: Evidence) -> tuple[Mask, Ints]:
    """Whether each piece of device work is a batched product of tiny matrices, and its operator.

    That is a kernel for vectors, or one that ends its blocks of threads as soon as they start.
    """
    work, length = evidence.work, evidence.costs.device_ns
    inside = evidence.launched_in(*_BATCHED)
    blocks = evidence.events.size[work.event]
    is_product = (inside >= 0) & (work.precedence == Precedence.COMPUTE) & evidence.recorded
    many = is_product & (blocks >= _MANY_BLOCKS)
    split, many_products = np.zeros(len(is_product), bool), np.flatnonzero(many)
    if len(many_products):
        _, alike = numbered(
            inside[many_products] * len(evidence.events.names) + work.name[many_products]
        )
        split[many_products] = np.bincount(alike)[alike] > 1
    least = np.where(split, _SPLIT * _BLOCK, _BLOCK)
    short = many & (1000 * length < least * blocks)
    return is_product & (short | evidence.work_named(names.is_vector_product)), inside


def times_of_alike(evidence: Evidence, nodes: Mask) -> tuple[Ints, Ints]:
    """Return how long the forward operators of each node and of its like take, and the nodes.

    Alike are nodes of one name and one owner. A lookup of the time of a single one can be held up.
    """
    spans = evidence.spans
    key = evidence.ownership.owner * len(spans.node_names) + spans.node
    _, alike = numbered(np.where(nodes, key, NOTHING))
    sums = np.zeros((2, int(alike.max(initial=0)) + 1), np.int64)
    of_nodes = backward_of(evidence) if evidence.report.has_gpu else spans.end - spans.start
    for row, spent in enumerate((forward_of(evidence), of_nodes)):
        np.add.at(sums[row], alike[nodes], spent[nodes])
    return sums[0][alike], sums[1][alike]


def made_by_nodes(evidence: Evidence) -> tuple[Ints, Ints]:
    """Return the nodes that another node made, with ``create_graph=True``, and these other nodes.

    Checkpointing makes nodes in a pass, too, but from calls of modules that run again.
    """
    spans, operator = evidence.spans, evidence.ownership.join.operator
    made_nodes = np.flatnonzero((operator >= 0) & evidence.in_pass & spans.is_node)
    within = spans.of(evidence.events, operator[made_nodes])
    inner = take(evidence.in_pass & spans.is_node, within, False)
    return made_nodes[inner], within[inner]


@once
def runs_of_nodes(evidence: Evidence) -> list[Ints]:
    """Return the nodes that follow each other in one module, in the order of its forward.

    What the forward did not write, but another node made, is left out.
    """
    owner, runs = evidence.ownership.owner, []
    for nodes in passes_of_nodes(evidence):
        runs += np.split(nodes, np.flatnonzero(np.diff(owner[nodes])) + 1)
    return runs


@once
def passes_of_nodes(evidence: Evidence) -> list[Ints]:
    """Return the nodes of each pass in the order of its forward, otherwise as ``runs_of_nodes``."""
    ownership = evidence.ownership
    sequence, run = ownership.join.sequence, ownership.passes.of_span
    written = evidence.in_pass & evidence.spans.is_node & (sequence >= 0)
    written[made_by_nodes(evidence)[0]] = False
    passes = []
    for _, members in grouped(ownership.join.builder, np.flatnonzero(written)):
        members = members[np.lexsort((sequence[members], run[members]))]
        passes += np.split(members, np.flatnonzero(np.diff(run[members])) + 1)
    return passes


# The forward -------------------------------------------------------------------------------------


@once
def forward_operators(evidence: Evidence) -> tuple[Ints, Ints]:
    """Return PyTorch's outermost operators in module calls before the backward.

    Returns:
        Indices into the events, and the module call that each operator runs in.
    """
    events, spans = evidence.events, evidence.spans
    index = events.prefixed(Category.OPERATOR, names.ATEN)
    span = spans.of(events, index)
    index = index[take(~evidence.in_pass & (spans.module >= 0), span, False)]
    outermost = [index[:0]]
    for _, members in grouped(events.thread, index):
        line = first_started(events.start[members], events.end[members], members)
        outermost.append(merged(line.values[line.values >= 0]))
    index = np.sort(np.concatenate(outermost))
    return index, spans.of(events, index)


def only_read(evidence: Evidence, reads: Ints) -> Ints:
    """Return operators of the forward that compute a value for nothing but to be read.

    Such run in one module call from ``detach`` to the operator that reads, and change nothing.

    Args:
        reads: operators that return a value to Python, as indices into the events.
    """
    events = evidence.events
    index, span = forward_operators(evidence)
    order = np.lexsort((events.start[index], span))
    index, span = index[order], span[order]
    kinds = [operations.kind_of(operations.of_operator(name)) for name in events.names]
    pure = np.array(
        [
            kind is not None and not name.endswith("_")
            for kind, name in zip(kinds, events.names, strict=True)
        ],
        bool,
    )[events.name[index]]
    detached = events.name_mask("aten::detach", "aten::detach_")[events.name[index]]
    read_only: list[int] = []
    for place in np.flatnonzero(is_in(index, reads)).tolist():
        before = place - 1
        while before >= 0 and span[before] == span[place] and pure[before] and not detached[before]:
            before -= 1
        if before >= 0 and span[before] == span[place] and detached[before]:
            read_only += index[before:place].tolist()
    return merged(np.array(read_only, np.int64))


def time_of(evidence: Evidence, index: Ints) -> Ints:
    """Return how long the work of each operator runs, on the device if it launched any."""
    events, work = evidence.events, evidence.work
    if not evidence.report.has_gpu:
        return events.duration[index]
    spent = np.zeros(len(index), np.int64)
    for thread, those in grouped(events.thread[index]):
        launched = np.flatnonzero((work.thread == thread) & (work.launch >= 0))
        launched = launched[np.argsort(work.launch[launched], kind="stable")]
        total = np.append(0, np.cumsum(evidence.costs.device_ns[launched]))
        low, high = (
            np.searchsorted(work.launch[launched], times[index[those]])
            for times in (events.start, events.end)
        )
        spent[those] = total[high] - total[low]
    return spent


class Stretches(msgspec.Struct, frozen=True):
    """Host time of a forward from the first of some operators to the end of the last.

    Attributes:
        start: nanoseconds.
        end: nanoseconds.
        span: the span that each stretch is in.
    """

    start: Ints
    end: Ints
    span: Ints


def both_ways(
    evidence: Evidence,
    nodes: Mask,
    operators: Ints,
    least: float,
    *,
    others: Mask | None = None,
    whole: bool = False,
    stretches: Stretches | None = None,
) -> Placed:
    """Return the places of what a remedy takes away: nodes, and operators of the forward.

    Work of devices holds the clock by itself. Without a device, operators cost their own time.

    Args:
        nodes: which nodes.
        operators: which operators, as indices into the events; none within another.
        least: the share of the step that both take in most steps; else there are no places.
        others: device work that counts, too.
        whole: whether the operators are not done at all: what a device waits for in them counts.
        stretches: where all of these operators are, with the Python between them, which goes too.
    """
    events, costs, work = evidence.events, evidence.costs, evidence.work
    operators = merged(operators[operators >= 0])
    if not len(operators) and not nodes.any() and others is None:
        return Placed((), 0, 0)
    spans = evidence.spans.of(events, operators) if stretches is None else stretches.span
    owner = np.maximum(take(evidence.ownership.owner, spans, NOTHING), 0)
    around = enclosing(events, operators, work.thread, work.launch)
    launched = (around >= 0) & evidence.recorded | evidence.work_of(nodes)
    if others is not None:
        launched |= others
    by_step = costs.owned_by_step(nodes, launched)
    start, end = events.start[operators], events.end[operators]
    if stretches is not None:
        start, end = stretches.start, stretches.end
    ns = costs.elapsed(start, end)
    if whole and evidence.report.has_gpu:
        ns = costs.idle_within(start, end)
    if whole or not evidence.report.has_gpu:
        by_step = by_step + costs.operators_by_step(start, ns, owner)
    if not costs.holds_in_most_steps(by_step.sum(axis=0), least):
        return Placed((), 0, 0)
    placed = costs.places_by_step(by_step, owner)
    if whole:
        waits = evidence.recording.waits.event
        waits = waits[enclosing(events, operators, events.thread[waits], events.start[waits]) >= 0]
        removable = costs.removable(nodes, launched, waits, operators)
        if stretches is not None:
            removable = replace(removable, stretches=np.stack([start, end]))
        return replace(placed, removable=removable)
    # What an operator launches goes with its work; the host's time in it is only without a device.
    alone = operators if not evidence.report.has_gpu else None
    return replace(placed, removable=costs.removable(nodes, launched, operators=alone))


def nodes_of(evidence: Evidence, operators: Ints) -> Mask:
    """Whether each span is a node of the backward that one of these operators made.

    Args:
        operators: indices into the events; none within another.
    """
    events, makers = evidence.events, evidence.ownership.join.operator
    made_nodes = np.flatnonzero((makers >= 0) & evidence.in_pass & evidence.spans.is_node)
    inside = enclosing(
        events, operators, events.thread[makers[made_nodes]], events.start[makers[made_nodes]]
    )
    return evidence.spans_with(made_nodes[inside >= 0])


BY_MASK = (
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::masked_select",
)
"""Operators that read or write by a mask, where ``aten::nonzero`` runs in them."""
_MASKS = 4
"""Indexing by a mask in a step, from which it is a pattern. One or two pick the tokens of a loss,
say, which saves the work of the others."""
_MASKS_LEAST = 0.05
_ASKS = (("aten::is_nonzero", "aten::item"), ("aten::gt", "aten::ne"), ("aten::any", "aten::sum"))
"""How a program asks whether a mask picks anything, the last first: ``if mask.sum() > 0``."""


@once
def by_masks(evidence: Evidence) -> tuple[Mask, Ints, Placed]:
    """Return nodes that index by a mask, such operators of the forward, and what both cost.

    The cost includes what asks, directly before, whether the mask picks anything: without an index
    nobody asks. It includes what the forward does for each mask alike, forward and backward, if
    that is light: it is done once for all rows then. There are none where they are few, or take
    little.
    """
    events = evidence.events
    index, span = forward_operators(evidence)
    order = np.lexsort((events.start[index], span))
    index, span = index[order], span[order]
    named = events.names_where(BY_MASK.__contains__)[events.name[index]]
    counting = events.named(Category.OPERATOR, "aten::nonzero")
    around = enclosing(events, index[named], events.thread[counting], events.start[counting])
    operators = merged(around[around >= 0])
    owner = take(evidence.ownership.owner, evidence.spans.of(events, operators), NOTHING)
    operators = operators[~take(of_synchronized(evidence), owner, False)]
    if len(operators) < _MASKS * evidence.report.steps:
        operators = operators[:0]
    is_made = np.isin(evidence.ownership.join.operator, operators)
    nodes = evidence.spans_around(counting) & evidence.in_pass & is_made
    goes, same = np.isin(index, operators), np.diff(span, append=NOTHING) == 0
    for kind in _ASKS:
        goes |= np.append(goes[1:], False) & same & events.name_mask(*kind)[events.name[index]]
    of_each, loops = _of_each_mask(evidence, index, span, np.isin(index, operators))
    alone = goes & ~of_each
    stretches = Stretches(
        np.concatenate([events.start[index[alone]], loops.start]),
        np.concatenate([events.end[index[alone]], loops.end]),
        np.concatenate([span[alone], loops.span]),
    )
    goes |= of_each
    priced = nodes | nodes_of(evidence, merged(index[of_each]))
    placed = both_ways(evidence, priced, index[goes], _MASKS_LEAST, whole=True, stretches=stretches)
    if not placed.places:
        nodes, operators = np.zeros_like(nodes), operators[:0]
    return nodes, operators, placed


_LIGHT = (*operations.VIEWS, Kind.CAST, Kind.POINTWISE, Kind.COMPARISON, Kind.REDUCTION)
"""What all rows together take hardly longer for than some of them; not so products."""


def _of_each_mask(
    evidence: Evidence, index: Ints, span: Ints, masked: Mask
) -> tuple[Mask, Stretches]:
    """Return operators of loops over masks, and where these are, with the Python between them.

    In a loop the same light operators follow most masks, in one call of a module that calls no
    other one meanwhile.

    Args:
        index: operators of the forward, sorted by span and start.
        span: the span of each.
        masked: whether each indexes by a mask.
    """
    events, spans = evidence.events, evidence.spans
    kinds = [operations.kind_of(operations.of_operator(name)) for name in events.names]
    asks = np.isin(events.names, [name for kind in _ASKS for name in kind])[events.name[index]]
    light = np.array([kind in _LIGHT for kind in kinds], bool)[events.name[index]] & ~asks
    works = (
        light & ~np.array([kind in operations.VIEWS for kind in kinds], bool)[events.name[index]]
    )
    light |= asks | masked
    is_in_loop, stretches = np.zeros(len(index), bool), list[tuple[int, int, int]]()
    for number in merged(span[masked]).tolist():
        first, last = np.searchsorted(span, [number, number + 1])
        places = first + np.flatnonzero(masked[first:last])
        names_of = events.name[index]
        bodies = Counter(tuple(names_of[a:b].tolist()) for a, b in pairwise(places.tolist()))
        if len(places) < _MASKS or not bodies:
            continue
        body, count = bodies.most_common(1)[0]
        # What follows the last mask is of the loop as far as it is the same.
        after = names_of[places[-1] : last].tolist()
        stop = int(places[-1]) + next(
            (
                n
                for n, (first_name, other) in enumerate(zip(body, after, strict=False))
                if first_name != other
            ),
            min(len(body), len(after)),
        )
        start, end = int(events.start[index[places[0]]]), int(events.end[index[stop - 1]])
        inside = (spans.parent == number) & (spans.start >= start) & (spans.start < end)
        alike = 2 * count >= len(places) - 1 and light[places[0] : stop].all()
        if alike and works[places[0] : stop].any() and not inside.any():
            is_in_loop[places[0] : stop] = True
            stretches.append((start, end, number))
    return is_in_loop, Stretches(*np.array(stretches, np.int64).reshape(-1, 3).T)


_CHECK = ("aten::isnan", "aten::_is_any_true", "aten::item")
"""What the engine runs for each gradient of a node in anomaly mode; the second is its alone."""


@once
def of_synchronized(evidence: Evidence) -> Mask:
    """Whether each owner is a SyncBatchNorm, which picks ranks by a mask that nobody can change."""
    return evidence.ownership.owners.mask(lambda owner: owner.class_name == names.SYNC_BATCH_NORM)


@once
def anomaly_checks(evidence: Evidence) -> Ints:
    """Return the operators by which the engine looks for NaN in the gradients of each node."""
    events, spans = evidence.events, evidence.spans
    index = events.named(Category.OPERATOR, *_CHECK)
    span = spans.of(events, index)
    is_check = events.name_mask(_CHECK[1])[events.name[index]]
    checked = evidence.spans_with(span[is_check]) & evidence.in_pass & spans.is_node
    return index[take(checked, span, False)]


# The host ----------------------------------------------------------------------------------------

_LONG = 200_000  # nanoseconds: launching a kernel does not take an operator this long
LEAST_LAUNCHING = 0.15
"""A backward is launch-bound when the GPU is idle for launches in this share of its time."""


@once
def host_operators(evidence: Evidence) -> Ints:
    """Return the outermost operators that take long and never call the driver.

    Returns:
        Indices into the events; none where the trace has no calls of the driver, because any
        operator may then have launched something.
    """
    events = evidence.events
    calls = events.of(Category.RUNTIME)
    if not len(calls):
        return calls
    index = np.flatnonzero((events.duration >= _LONG) & (events.category == Category.OPERATOR))
    # A view computes nothing: a long one was held up, or keeps its stack in anomaly mode.
    skipped = events.is_label | events.prefix_mask(*names.HOST_MARKS)
    skipped |= events.names_where(operations.is_view)
    index = index[~skipped[events.name[index]]]
    long_operators = []
    called = dict(grouped(events.thread, calls))
    for thread, members in grouped(events.thread, index):
        times = np.sort(events.start[called.get(thread, members[:0])], kind="stable")
        quiet = np.searchsorted(times, events.start[members]) == np.searchsorted(
            times, events.end[members]
        )
        members = members[quiet]
        line = first_started(events.start[members], events.end[members], members)
        long_operators.append(merged(line.values[line.values >= 0]))
    return np.concatenate([np.empty(0, np.int64), *long_operators])


def launching(evidence: Evidence) -> Mask:
    """Whether each span runs in a backward that is launch-bound, and neither waits nor computes.

    Where it is known how long a step takes without the profiler, the device must also be idle in
    that step: the profiler makes launches slower than they are.

    Returns:
        A mask without any span where the backward is not launch-bound.
    """
    none = np.zeros(len(evidence.spans.start), bool)
    least, of_host = LEAST_LAUNCHING * evidence.report.wall_ns, evidence.costs.of_host
    working = evidence.in_pass & ~evidence.spans_with(evidence.ownership.waits.span)
    if not evidence.report.has_gpu or not least or of_host(working) < least:
        return none
    if evidence.costs.busy_ns > (1 - LEAST_LAUNCHING) * evidence.step_ns:
        return none
    working &= ~evidence.spans_around(host_operators(evidence))
    return working if of_host(working) >= least else none
