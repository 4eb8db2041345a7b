"""Rules about operators that PyTorch has no fast kernel for, or that do not run it.

What they move and compute is little beside the time that they take: a thread or a block for each
tiny piece of work, additions that wait for each other, gradients that only a slow algorithm has.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from backspot.analysis.attribution.launches import Precedence
from backspot.analysis.findings.costs import LEAST_SHARE
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import (
    backward_of,
    both_ways,
    filled_forward_of,
    forward_of,
    forward_operators,
    is_indexing,
    of_tiny_products,
)
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import NOTHING, enclosing, is_in, merged, numbered
from backspot.results.findings import Finding
from backspot.trace import Category, names
from backspot.trace.events import Ints, Mask

_SLOW_CONVOLUTION = 6
"""A convolution has two gradients with as much arithmetic as its forward. With this many times the
forward's time, both run at a third of its speed. (Healthy networks: up to five times.)"""
_DEPTHWISE_REMEDY = (
    "Time other forms of this convolution, as which of them is faster depends on the sizes and the "
    "GPU: 2-D depthwise convolutions summed over the frames of the kernel, a dense or a factorized "
    "one. PyTorch's kernel for depthwise convolutions in three dimensions is slow, above all its "
    "gradients."
)
_CONVOLUTION_REMEDY = (
    "Set torch.backends.cudnn.benchmark = True, and time this layer in bf16 and with channels_last "
    "(channels_last_3d), and with fewer groups and filters in multiples of 8: cuDNN has no fast "
    "gradient for these sizes, or has not looked for it."
)


@rule(
    "slow-convolution",
    least=0.03,
    devices=("cuda",),
    link="https://docs.pytorch.org/docs/stable/backends.html#torch-backends-cudnn",
)
def slow_convolution(evidence: Evidence) -> Finding | None:
    """The gradients of a convolution have no fast kernel.

    **Cause.** cuDNN or PyTorch has no fast gradient for these sizes: 3-D depthwise convolutions,
    some with few channels or many tiny filters.

    **Found by** kernels for 3-D depthwise convolutions, and convolutions whose gradients take more
    than six times their forward (healthy networks: up to five), from 3% of the step. 2-D depthwise
    ones do not count.

    **Fix.** 3-D depthwise: a dense convolution, or 2-D depthwise ones that are summed over the
    frames of the kernel: time both, as on many sizes neither is faster. Others:
    `torch.backends.cudnn.benchmark = True`, channels last and bf16, or the layer without cuDNN.
    """
    # 2-D depthwise ones are left out: all kernels for the gradient of their weights are slow.
    say = evidence.wording
    nodes = evidence.nodes_named(lambda name: name.startswith("Convolution"))
    if not nodes.any():
        return None
    deep, flat = (
        nodes & evidence.spans_of_work(evidence.work_named(lambda name: kernel in name))  # noqa: B023
        for kernel in (names.DEPTHWISE_3D, names.DEPTHWISE_2D)
    )
    forward, backward = _times(evidence, nodes)
    slow = nodes & (backward > _SLOW_CONVOLUTION * forward) & (forward > 0) & ~flat | deep
    placed = both_ways(evidence, slow, evidence.ownership.join.operator[deep], LEAST_SHARE)
    if not placed.places:
        return None
    in_depth = 2 * evidence.costs.of_spans(deep) > evidence.costs.of_spans(slow)
    times = backward[slow].max() / max(1, forward[slow].max())
    return finding(
        placed,
        title=(
            "A 3-D depthwise convolution runs on a slow kernel"
            if in_depth
            else "The gradients of a convolution have no fast kernel"
        ),
        seen=(
            f"{say.per_step(int(slow.sum()), 'convolution')}: {say.ms(placed.wall_ns)}. The "
            f"gradients take {times:.0f} times the forward; twice is usual."
        ),
        remedy=_DEPTHWISE_REMEDY if in_depth else _CONVOLUTION_REMEDY,
        nodes=evidence.costs.top_nodes(slow),
        kernels=evidence.costs.top_kernels(evidence.work_of(slow)),
        priced=False,  # other forms and layouts lose on some sizes, and gain on others
    )


def _times(evidence: Evidence, nodes: Mask, forward: Ints | None = None) -> tuple[Ints, Ints]:
    """Return how long the device works for the forward of these nodes, and for them.

    Each has the times of all nodes of its name and its owner.

    Args:
        forward: another time of each node's forward.
    """
    of_forward = forward_of(evidence) if forward is None else forward
    key = evidence.ownership.owner * len(evidence.spans.node_names) + evidence.spans.node
    _, alike = numbered(np.where(nodes, key, NOTHING))
    sums = np.zeros((2, int(alike.max(initial=0)) + 1), np.int64)
    for row, spent in enumerate((of_forward, backward_of(evidence))):
        np.add.at(sums[row], alike[nodes], spent[nodes])
    return sums[0][alike], sums[1][alike]


_SPREADING = ("Upsample", "GridSampler", "RoiAlign")
"""Nodes whose forward can read an element any number of times, and which therefore add to it. Pools
read it once for each window that it is in, which are few."""
_CROWDED = 4
"""Forward and backward of these move as many bytes, and the backward of a sampling grid twice as
many. With this many times the forward's time, additions wait for each other."""


_OF_FEW = 8
"""Blocks of threads that add, for each that sets the sums to zero: one of the first has up to 1,024
gradients, one of the others 512 sums. Twice the side has two of them."""


def _of_few(evidence: Evidence, nodes: Mask) -> Mask:
    """Whether each of these nodes adds many gradients to each element, by its thread blocks."""
    work, blocks = evidence.work, evidence.events.size[evidence.work.event]
    zeros = evidence.work_named(names.is_zero_fill)
    most = np.zeros((2, len(nodes)), np.int64)
    for row, chosen in enumerate((zeros, ~zeros & (work.precedence == Precedence.COMPUTE))):
        own_work = np.flatnonzero(chosen & evidence.work_of(nodes))
        np.maximum.at(most[row], work.span[own_work], blocks[own_work])
    is_of_few: Mask = (most[0] > 0) & (most[1] >= _OF_FEW * most[0])
    return is_of_few


@rule(
    "atomic-additions",
    tier="stable",
    sources=(
        "pytorch/pytorch#64977",
        "timm",
    ),
    least=0.03,
    devices=("cuda",),
    title="Atomic additions of a backward wait for each other",
    link="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.interpolate.html",
)
def atomic_additions(evidence: Evidence) -> Finding | None:
    """A backward adds many gradients to the same elements.

    **Cause.** The backward of interpolation or of a sampling grid adds many gradients to the same
    elements, one after the other; in half precision each addition may be repeated.

    **Found by** such nodes, from 3% of the step, that take more than four times their forward (not
    pooling, where few windows share an element); of indexing, only those in half precision. A
    forward that runs on few multiprocessors counts as if it filled the device.

    **Fix.** From a few cells, interpolate by two products with small matrices, in any precision.
    Else in half precision, time the operator in fp32, which gained nothing on an H200.
    """
    # Half precision has no atomic addition of its own for single elements: threads try until nobody
    # came between. Indexing is looked at for that alone.
    say = evidence.wording
    half = evidence.work_named(names.is_half_atomic)
    nodes = evidence.nodes_named(lambda name: name.startswith(_SPREADING))
    halves = evidence.nodes_named(is_indexing) & evidence.spans_of_work(half)
    nodes |= halves
    if not nodes.any():
        return None
    forward, backward = _times(evidence, nodes)
    # A forward with a thread for each place of the result, which goes through all channels, can be
    # as slow: then it is no measure.
    filled, _ = _times(evidence, nodes, filled_forward_of(evidence))
    shared = nodes & (filled > 0) & (backward > _CROWDED * filled) & _of_few(evidence, nodes)
    nodes &= (forward > 0) & (backward > _CROWDED * forward) | shared
    shared &= backward <= _CROWDED * forward
    makers = evidence.ownership.join.operator[shared]
    placed = both_ways(evidence, nodes, makers, LEAST_SHARE)
    if not placed.places:
        return None
    costs = evidence.costs
    times = backward[nodes].max() / max(1, forward[nodes].max())
    in_half = 2 * costs.of_spans(nodes & evidence.spans_of_work(half)) > costs.of_spans(nodes)
    of_few = 2 * costs.of_spans(nodes & _of_few(evidence, nodes)) > costs.of_spans(nodes)
    measure = f"{times:.0f} times the forward, which moves as many bytes"
    if 2 * costs.of_spans(shared) > costs.of_spans(nodes):
        measure = "and the forward, which has a thread for each place of all channels together"
    return finding(
        placed,
        seen=(
            f"{', '.join(costs.top_nodes(nodes))}: {say.ms(placed.wall_ns)} in "
            f"{say.per_step(int(nodes.sum()), 'node')}, {measure}. Many threads add to the same "
            f"elements{', and in half precision' if in_half else ''}."
        ),
        remedy=(
            "Time this operator in fp32 (disable autocast around it, .float() before it): "
            "additions in half precision are repeated until no other thread interferes, but fp32 "
            "moves twice the bytes. Which is faster depends on the GPU."
            if in_half and not of_few
            else "Interpolate from a few cells by two small products with the matrices of the "
            "interpolation (one a side), whose backward are products too, or by mode='nearest' or "
            "expand. For grids and boxes, sample fewer points or a larger map."
        ),
        nodes=evidence.costs.top_nodes(nodes),
        kernels=evidence.costs.top_kernels(evidence.work_of(nodes)),
        at_best=True,
        # The same in fp32 moves twice the bytes, and was no faster for interpolation on an H200.
        priced=of_few or not in_half,
    )


@rule(
    "tiny-products",
    least=0.03,
    devices=("cuda",),
    needs=("blocks",),
    title="Batched products of tiny matrices",
    remedy=(
        "Write small products (2x2, 3x3, matrix times vector) out as element-wise products and "
        "sums, which torch.compile makes one kernel of; or put the batch into one dimension of "
        "a single large product."
    ),
    link="https://docs.pytorch.org/docs/stable/generated/torch.bmm.html",
)
def tiny_products(evidence: Evidence) -> Finding | None:
    """Batched products of tiny matrices.

    **Cause.** A batched product of 2 by 2 matrices or of vectors, such as a rotation: its
    bookkeeping costs far more than its arithmetic.

    **Found by** kernels of `bmm` for vectors, and kernels whose blocks of threads end within 150 ns
    of a multiprocessor (300 ns where a product takes several launches), from 3% of the step:
    starting one takes half of that.

    **Fix.** Write the product out as element-wise products and sums, and compile it; or make one
    large product.
    """
    costs, say = evidence.costs, evidence.wording
    tiny, inside = of_tiny_products(evidence)
    return finding(
        costs.places_of_work(tiny),
        seen=(
            f"{say.per_step(int(tiny.sum()), 'kernel')} of batched products, "
            f"{say.ms(costs.of_work(tiny))}, work on matrices so small, or so thin, that their "
            "bookkeeping costs more than their arithmetic."
        ),
        nodes=costs.top_nodes(evidence.spans_of_work(tiny)),
        operators=costs.top_operators(
            evidence.names_of(inside[tiny]), np.maximum(costs.work_ns[tiny], 1)
        ),
        kernels=costs.top_kernels(tiny),
        at_best=True,
    )


@rule(
    "pairwise-distance",
    least=0.03,
    devices=("cuda",),
    title="cdist computes one pair of points at a time",
    remedy=(
        "For points of a few coordinates, broadcast: (a[:, None] - b[None]).abs().sum(-1) for "
        "p=1, which torch.compile makes one kernel of. For p=2, "
        "cdist(compute_mode='use_mm_for_euclid_dist') is a product of matrices."
    ),
    link="https://docs.pytorch.org/docs/stable/generated/torch.cdist.html",
)
def pairwise_distance(evidence: Evidence) -> Finding | None:
    """`cdist` computes one pair of points at a time.

    **Cause.** `cdist` and `pdist` compute one pair of points at a time, in fp32.

    **Found by** their kernels, from 3% of the step. `cdist` with `p=2` and many points is a product
    of matrices and does not run them.

    **Fix.** With few coordinates, broadcast: `(a[:, None] - b[None]).abs().sum(-1)`.
    """
    # With ``p=2`` and many points they are a product of matrices, and run another kernel.
    costs, say = evidence.costs, evidence.wording
    work = evidence.work_named(names.is_pairwise_distance)
    return finding(
        costs.places_of_work(work),
        seen=(
            f"{say.per_step(int(work.sum()), 'kernel')} of cdist or pdist, "
            f"{say.ms(costs.of_work(work))}: a group of threads for each pair, in fp32."
        ),
        kernels=costs.top_kernels(work),
        at_best=True,
    )


_SLOW_CONVOLUTIONS = ("aten::_slow_conv2d_forward", "aten::slow_conv_dilated2d")
"""Convolutions by copies and a product."""
_SLOW_ON_GPU = ("aten::slow_conv_dilated3d", "aten::slow_conv_transpose")
"""Others of that kind; a CPU has nothing else for them."""
_OTHER_FLOATS = re.compile(r"double|Half")
_RECURRENT: dict[str, tuple[str, ...]] = {
    "cpu": ("aten::lstm",),
    "cuda": ("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"),
}
_PACKED = (
    "oneDNN has no kernel for a PackedSequence. Give the layer the padded batch, and mask what "
    "comes behind each end, or take the state there: in one direction, that changes nothing before "
    "it. Batches of sequences of about one length have little to pad."
)
_PROJECTED = (
    "oneDNN has no kernel for LSTM(proj_size=…): a Linear behind an LSTM without it projects the "
    "outputs, though not what the next time step is given."
)
_WHOLE_LAYERS = ("aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn")
"""What a recurrent layer runs for all time steps at once."""
_FAST = {
    "cpu": (
        "oneDNN has it for fp32, and for bf16 on processors that compute in it; not for fp16 and "
        "fp64, for LSTM(proj_size=…), or with torch.backends.mkldnn.enabled = False"
    ),
    "cuda": (
        "cuDNN has it for fp16, bf16, fp32 and fp64, unless torch.backends.cudnn.enabled is False, "
        "or a tensor has more than 2³¹ elements"
    ),
}


@rule(
    "slow-path",
    least=0.05,
    devices=("cpu", "cuda"),
    title="A layer does not run its fast kernel",
    link="https://docs.pytorch.org/docs/stable/backends.html",
)
def slow_path(evidence: Evidence) -> Finding | str | None:
    """A layer does not run its fast kernel.

    **Cause.** A convolution or a recurrent layer runs a general way in place of the kernel that
    oneDNN or cuDNN has for it: on a CPU fp16 and fp64, `LSTM(proj_size=…)` and packed sequences, or
    a library that is switched off.

    **Found by** `aten::_slow_conv2d_forward` and its like within a convolution (on a CPU only in
    fp16 and fp64, which needs shapes: in fp32, PyTorch takes this way on purpose for some sizes),
    and by recurrent layers without an operator for all time steps, from 5% of the step. Attention
    has [its own rule](#attention-math).

    **Fix.** A number format that the kernel takes. On one core, a convolution in fp64 took 3.8
    times as long as in fp32, in fp16 22 times; an LSTM with a projection 6 times.
    """
    costs, say, events = evidence.costs, evidence.wording, evidence.events
    index, _ = forward_operators(evidence)
    on_cpu, lacks = evidence.device == "cpu", ""
    slow_ones = (*_SLOW_CONVOLUTIONS, *(() if on_cpu else _SLOW_ON_GPU))
    inner, whole_layers = (
        events.prefixed(Category.OPERATOR, *layer_names)
        for layer_names in (slow_ones, _WHOLE_LAYERS)
    )
    if on_cpu:
        lacks = "needs shapes" if (events.signature[inner] < 0).any() else ""
        # In fp32, PyTorch takes this way on purpose for some sizes: 1x1 on one thread, say.
        wide = [
            _OTHER_FLOATS.search(signature.types) is not None for signature in events.signatures
        ]
        inner = inner[np.array([*wide, False], bool)[events.signature[inner]]]
    around = enclosing(events, index, events.thread[inner], events.start[inner])
    layers = events.names_where(_RECURRENT[evidence.device].__contains__)
    cells = index[layers[events.name[index]]]
    fast = enclosing(events, cells, events.thread[whole_layers], events.start[whole_layers])
    slow = merged(around[around >= 0], cells[~is_in(cells, fast)])
    makers = evidence.ownership.join.operator
    made_nodes = np.flatnonzero((makers >= 0) & evidence.in_pass)
    inside = (
        enclosing(events, slow, events.thread[makers[made_nodes]], events.start[makers[made_nodes]])
        >= 0
    )
    nodes = evidence.spans_with(made_nodes[inside])
    placed = both_ways(evidence, nodes, slow, LEAST_SHARE)
    operators = costs.top_operators(evidence.names_of(slow), events.duration[slow])
    cause = finding(
        replace(placed, removable=None),  # the fast kernel takes its time, too
        seen=(
            f"{say.per_step(len(slow), 'call')} of {', '.join(operators)} take "
            f"{say.ms(placed.wall_ns)}, forward and backward, by a general way: copies and "
            "products, or a loop over time steps."
        ),
        remedy=_of_recurrent(evidence, slow)
        or f"Give the layer what the fast kernel takes: {_FAST[evidence.device]}.",
        nodes=costs.top_nodes(nodes),
        operators=operators,
    )
    return cause or lacks or None


def _of_recurrent(evidence: Evidence, slow: Ints) -> str:
    """Return what helps recurrent layers on a CPU that run a general way for one known reason.

    For a packed sequence they cut each time step out of the others, and a projection is a product
    of its own, beside the linear layers. ``""`` where neither is the reason of all.
    """
    events = evidence.events
    if (
        evidence.device != "cpu"
        or not events.names_where(_RECURRENT["cpu"].__contains__)[events.name[slow]].all()
    ):
        return ""

    def has(name: str, besides: str) -> bool:
        """Whether each layer runs this operator otherwise than within another one."""
        index, others = (events.named(Category.OPERATOR, operator) for operator in (name, besides))
        within = [
            enclosing(events, outer, events.thread[index], events.start[index])
            for outer in (slow, others)
        ]
        runs_it = within[0][(within[0] >= 0) & (within[1] < 0)]
        return bool(is_in(slow, merged(runs_it)).all())

    if has("aten::narrow", "aten::unsafe_chunk"):
        return _PACKED
    if has("aten::matmul", "aten::linear"):
        return _PROJECTED
    return ""
