"""Rules about tensors that are copied, cast or laid out again."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from backspot.analysis.attribution.launches import Precedence
from backspot.analysis.findings.costs import LEAST_SHARE, Placed
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import (
    accumulating,
    backward_of,
    both_ways,
    forward_of,
    is_convolution,
    made_in,
    norms_that_keep_nchw,
    runs_of_nodes,
    sorting,
)
from backspot.analysis.findings.registry import Found, finding, rule
from backspot.analysis.timeline import distinct, is_in
from backspot.results.findings import Finding
from backspot.trace import names, operations
from backspot.trace.events import Mask
from backspot.trace.operations import Kind

_CASTS_REMEDY = (
    "Remove .float() and .to(dtype) around single operations, and put operations that autocast "
    "runs in fp32 next to each other; or keep the whole module in bf16."
)
_CASTS_REMEDY_ON_CPU = (
    "Remove .float(), .double() and .to(dtype) around single operations, and keep the module in "
    "one dtype."
)


@rule(
    "casts",
    tier="stable",
    sources=(
        "axolotl-ai-cloud/axolotl#3732",
        "timm",
        "scripts",
    ),
    least=0.03,
    devices=("cpu", "cuda"),
    title="Gradients are cast between dtypes",
    link="https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference",
)
def casts(evidence: Evidence) -> Finding | None:
    """Gradients are cast between dtypes.

    **Cause.** Gradients of activations are converted between fp32 and half precision again and
    again. Some of this is normal.

    **Found by** `ToCopyBackward` nodes, from 3% of the step. Gradients of parameters, which
    autocast must cast, and the loss do not count.

    **Fix.** Remove `.float()` and `.to(dtype)` from the middle of the model, and put operations
    that need fp32 next to each other. Or keep a module's weights in bf16 on a GPU, and in one dtype
    on a CPU.
    """
    costs, say = evidence.costs, evidence.wording
    nodes = evidence.nodes_named(lambda name: name.startswith("ToCopyBackward"))
    of_parameters = evidence.spans_with(evidence.ownership.join.feeder[accumulating(evidence)])
    # A loss belongs in fp32, and so may what belongs to no module.
    owners = evidence.ownership.owners
    losses = owners.mask(lambda module: module.class_name.endswith("Loss"), special=True)
    nodes &= ~of_parameters & ~losses[evidence.ownership.owner]
    # The same nodes also copy between devices, which is not a cast.
    work = evidence.work_of(nodes)
    work &= ~evidence.work_named(lambda name: name.startswith(names.MEMCPY))
    if evidence.report.has_gpu:
        nodes &= evidence.spans_of_work(work)
    cost = costs.of_spans(nodes)
    return finding(
        costs.places_of_spans(nodes),
        seen=(
            f"{say.per_step(int(nodes.sum()), 'cast')} of the gradients of activations, "
            f"{say.ms(cost)}. Each of them reverses a cast in the forward."
        ),
        remedy=_CASTS_REMEDY if evidence.device == "cuda" else _CASTS_REMEDY_ON_CPU,
        nodes=costs.top_nodes(nodes),
        kernels=costs.top_kernels(work),
        change={"free": evidence.with_forward(nodes)},
    )


_DEVICE_LARGE = 1 << 14  # bytes: a smaller copy reads a value rather than moving a tensor


@rule(
    "device-copies",
    sources=("ultralytics/ultralytics#26150",),
    devices=("cuda",),
    link="https://docs.pytorch.org/docs/stable/notes/cuda.html#best-practices",
)
def device_copies(evidence: Evidence) -> Finding | None:
    """Tensors are copied to the host or to another device.

    **Cause.** Tensors are copied to the host, or between devices, while nothing else runs.

    **Found by** copies `DtoH` and `PtoP` of at least 16 kB, with the time that they take alone.

    **Fix.** Do the host's work on the GPU. Log every hundredth step, into pinned memory. Split a
    model where activations are smallest.
    """
    costs, say = evidence.costs, evidence.wording
    size = evidence.events.size[evidence.work.event]
    work = evidence.work_named(names.is_copy_from_device) & ((size < 0) | (size >= _DEVICE_LARGE))
    if not work.any():
        return None
    to_host = evidence.work_named(lambda name: name.startswith(names.TO_HOST)) & work
    cost = costs.of_work(work)
    if 2 * costs.of_work(to_host) > cost:
        direction, remedy = (
            "to the host",
            "Do on the GPU what the host does with these tensors. If they are only logged, copy "
            "them every hundred steps, into pinned memory with non_blocking=True.",
        )
    else:
        direction, remedy = (
            "between devices",
            "Put modules that exchange tensors on the same device. Send each activation once, and "
            "split the model where activations are smallest.",
        )
    return finding(
        replace(costs.places_of_work(work), removable=costs.removable(None, work)),
        title=f"Tensors are copied {direction}",
        seen=f"{say.copies(size[work])}: {say.ms(cost)} in which nothing else runs.",
        remedy=remedy,
        nodes=costs.top_nodes(evidence.spans_of_work(work)),
        kernels=costs.top_kernels(work),
    )


_VOLUME_LARGE = 4_000_000  # bytes: a smaller copy is not a batch of images
_MULTIPROCESSORS = 120  # of a data centre's GPU, within a third: enough to tell 1 byte from 4
_PER_BLOCK = 512  # elements for each block of a casting kernel
_NARROW = 2.5  # bytes for each element, between the 1 of a byte and the 4 of a float
_AS_MANY = 1.5  # elements for each byte, if a byte is an element and the GPU is a larger one
_A_BATCH = 10_000  # as Events.size: of a cast of some 600,000 elements, more than of indices
_OF_FLOATS = 0.75  # of the bytes of a float go where a byte stands for it


@rule(
    "host-to-device-volume",
    tier="stable",
    sources=("Kaixhin/Rainbow#48", "scripts"),
    devices=("cuda",),
    title="Large batches travel to the GPU at full width",
    remedy=(
        "Copy the next batch on a stream of its own while the GPU computes. Images can "
        "travel as uint8, a quarter of the bytes, and be cast and normalised on the GPU."
    ),
    link="https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
)
def host_to_device_volume(evidence: Evidence) -> Finding | None:
    """Batches are copied as floats.

    **Cause.** The batch is large on the bus: images as float32 take four times the bytes of uint8.

    **Found by** copies of at least 4 MB to the device, outside of modules, that nothing hides. A
    batch of uint8 is no finding: a kernel casts it, right behind the copy or first of all in the
    model. The price is that of a quarter of the bytes.

    **Fix.** Copy uint8, and cast and normalise on the GPU. Or copy the next batch on a stream of
    its own while the GPU computes, which hides all of it.
    """
    # A trace without shapes does not record the dtype. But bytes that arrive as uint8 are cast to
    # floats by the next kernel, and its number of thread blocks gives the number of elements.
    # Without such a cast the batch arrived in full width. Copies inside a module's call are left
    # out.
    costs, say = evidence.costs, evidence.wording
    size = evidence.events.size[evidence.work.event]
    work = evidence.work_named(lambda name: name.startswith(names.CUDA_TO_DEVICE))
    work &= (size >= _VOLUME_LARGE) & (evidence.work.span < 0)
    work &= ~_narrow(evidence, work)
    if not work.any():
        return None
    return finding(
        costs.places_of_work(work, elsewhere="(data)"),
        seen=(
            f"{say.copies(size[work])}: {say.ms(costs.of_work(work))} in which nothing else runs. "
            "As uint8, three quarters of it go; behind what the GPU computes, all."
        ),
        kernels=costs.top_kernels(work),
        change={"parts": [(costs.removable(None, work), _OF_FLOATS)]},
    )


def _narrow(evidence: Evidence, copies: Mask) -> Mask:
    """Whether each of these copies seems to move less than half a float for each element.

    The kernel behind it says that by a cast, or else the first cast of the step behind it, as that
    of a model which takes bytes and casts them itself.
    """
    work, steps = evidence.work, evidence.ledger.steps
    in_cast = evidence.launched_in("aten::to", "aten::_to_copy") >= 0
    size = evidence.events.size[work.event]
    elements = size / 1000 * _MULTIPROCESSORS * _PER_BLOCK
    result = np.zeros(len(copies), bool)
    for device in distinct(work.device[copies]):
        copied = np.flatnonzero(copies & (work.device == device))
        kernels = np.flatnonzero((work.precedence == Precedence.COMPUTE) & (work.device == device))
        kernels = kernels[np.argsort(work.start[kernels], kind="stable")]
        for candidates, first_of_all in (
            (kernels, True),
            (kernels[in_cast[kernels] & (size[kernels] >= _A_BATCH)], False),
        ):
            after = np.searchsorted(work.start[candidates], work.end[copied])
            known = copied[after < len(candidates)]
            following = candidates[after[after < len(candidates)]]
            # A trace without block counts leaves it open, so the copy counts as narrow.
            small = (size[known] < _NARROW * elements[following]) | (size[following] < 0)
            if first_of_all:
                small &= in_cast[following] & (work.span[following] < 0)
            else:  # the cast of something else can be of any size
                small &= elements[following] < _AS_MANY * size[known]
                small &= steps.at(work.start[known]) == steps.at(work.start[following])
            result[known] |= small
    return result


_LAYOUT_LEAST = 0.055
"""Every attention copies the gradients of queries, keys and values into one tensor; below this
share of the step copies are as usual."""
_LEAST_OF_CONVOLUTIONS = 0.03


@rule(
    "layout-copies",
    tier="stable",
    sources=(
        "pytorch/pytorch#76012",
        "pytorch/pytorch#111824",
        "AMD-AGI/Primus#1049",
        "timm",
    ),
    devices=("cpu", "cuda"),
)
def layout_copies(evidence: Evidence) -> Finding | None:
    """Tensors are copied into another memory layout.

    **Cause.** Backward copies tensors only to change their memory layout.

    **Found by** `contiguous` and `clone` inside nodes (a saving counts those of the forward, too),
    cuDNN's conversions between NCHW and NHWC, and compiled kernels that only copy: from 5.5% of the
    step, as every attention has to join three gradients; for convolutions 3%; and from 1% by
    permute, `contiguous`, one operator (and a cast before it), permute and `contiguous` in one
    module. Convolutions of sequences have no other layout and do not count. Other ones have no
    price unless a plan tries it: on an H200 channels_last took 41% off a step, or added 23%.

    **Fix.** Convolutions: time `memory_format=torch.channels_last` (`channels_last_3d` of volumes)
    for model and batch; but with half as many group or instance norms, which a GPU computes in NCHW
    alone up to PyTorch 2.14, compile the model. Elsewhere: fewer `permute` and `transpose`.
    """
    if evidence.device == "cpu":
        return _there_and_back(evidence, None)
    work, converts = _copying(evidence)
    return _there_and_back(evidence, work) or _many_copies(evidence, work, converts)


_FASTER_KERNELS = (
    " Convolutions and norms also have faster kernels for channels_last, above all in half "
    "precision, which is not counted and can be more than the copies."
)
_OTHER_KERNELS = (
    " Convolutions and norms have faster kernels for channels_last, above all in half precision. "
    "Depthwise ones, interpolation and products have slower ones, so only a trial gives a price."
)
_THERE_AND_BACK = re.compile(r"p[pvc]*C[pvc]*[^pvcC][pvc]*p[pvc]*C")
_LETTERS = {Kind.PERMUTE: "p", Kind.VIEW: "v", Kind.PART: "v", Kind.COPY: "C", Kind.CAST: "c"}
"""Autocast casts before an operator, and not after it."""


def _there_and_back(evidence: Evidence, others: Mask | None) -> Found | None:
    """Find permute, contiguous, one operator, permute and contiguous in one module.

    Args:
        others: device work that copies into another layout too; it counts where these do.
    """
    say, spans, ownership = evidence.wording, evidence.spans, evidence.ownership
    kinds = [operations.kind_of(operations.of_node(name)) for name in spans.node_names]
    letters = [_LETTERS.get(kind, ".") if kind else "." for kind in kinds]
    copies, between = np.zeros((2, len(spans.start)), bool)
    for run in runs_of_nodes(evidence):
        text = "".join(letters[node] for node in spans.node[run].tolist())
        for match in _THERE_AND_BACK.finditer(text):
            inside = run[match.start() : match.end()]
            copies[inside] = [text[index] == "C" for index in range(*match.span())]
            between[inside] = [text[index] == "." for index in range(*match.span())]
    makers = ownership.join.operator[copies]
    # In one layout no operator copies: the host has nothing to launch there either.
    placed = both_ways(evidence, copies, makers, LEAST_SHARE, whole=True)
    if placed.places and others is not None:
        placed = both_ways(evidence, copies, makers, LEAST_SHARE, others=others, whole=True)
    pointwise = np.array([kind is Kind.POINTWISE for kind in kinds] + [False], bool)
    placed, change, longer = _read_across(evidence, placed, copies, between & pointwise[spans.node])
    convolved = evidence.costs.of_running(evidence.nodes_named(is_convolution))
    in_nchw = norms_that_keep_nchw(evidence).any()
    return finding(
        placed,
        title="Tensors are copied into another memory layout and back",
        seen=(
            f"{say.per_step(int(copies.sum()), 'copy', 'copies')} around single operators, and as "
            f"many in the backward: {say.ms(placed.wall_ns - longer)} in which nothing is "
            "computed. The gradients of the operators between them are read across the memory, "
            + (
                f"which makes element-wise ones slower by {say.ms(longer)}: this counts."
                if longer
                else "which is slower and not counted."
            )
            + _FASTER_KERNELS * (convolved >= LEAST_SHARE * evidence.step_ns and not in_nchw)
        ),
        remedy=(
            f"Stay in one layout: {'' if in_nchw else 'channels_last for the whole model, '}norms "
            "over the last dimension and linear layers in place of 1x1 convolutions; or a norm "
            "that takes the layout as it is, such as GroupNorm(1, …)."
        ),
        link="https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
        nodes=evidence.costs.top_nodes(copies),
        kernels=evidence.costs.top_kernels(evidence.work_of(copies)),
        at_least=True,
        change=change,
    )


_BACK = 1.5
"""An element-wise forward moves at least two tensors in all. Each kernel of its backward reads at
most two and writes one: the product of two tensors has two such kernels where both need gradients.
"""


def _read_across(
    evidence: Evidence, placed: Placed, copies: Mask, between: Mask
) -> tuple[Placed, dict[str, Any], int]:
    """Return what copies cost with what they make slower, the change without both, and the latter.

    The gradient of an element-wise operator between two copies comes in the other layout, and is
    read with strides. In one layout it takes at most as long as the bytes that its kernels can
    move say.

    Args:
        placed: what the copies cost.
        copies: their nodes.
        between: the nodes of element-wise operators between them.
    """
    costs, gone, span = evidence.costs, placed.removable, evidence.work.span
    kernels = np.bincount(span[span >= 0], minlength=len(between))
    forward, backward = forward_of(evidence), backward_of(evidence)
    in_one_layout = _BACK * kernels * forward
    between &= (forward > 0) & (backward > in_one_layout)
    if gone is None or not placed.places or not between.any() or not evidence.report.has_gpu:
        return placed, {}, 0
    part = 1.0 - in_one_layout[between].sum() / backward[between].sum()
    across, none = evidence.work_of(between), np.zeros_like(between)
    longer = (part * costs.owned_by_step(none, across)).astype(np.int64)
    both = costs.places_by_step(costs.owned_by_step(copies, gone.work) + longer)
    change = {"parts": [(gone, 1.0), (costs.removable(None, across), float(part))]}
    return replace(both, removable=gone), change, evidence.typical.value(longer.sum(axis=0))


_COPYING = ("aten::contiguous", "aten::clone")


def _copying(evidence: Evidence) -> tuple[Mask, Mask]:
    """Return the work of ``contiguous`` and ``clone`` in nodes, and of convolutions that convert.

    In compiled code these are generated kernels that do nothing else.

    Returns:
        All of it, and that of convolutions.
    """
    copying = evidence.launched_in(*_COPYING)
    generated = evidence.work_named(operations.is_generated_copy)
    converts = evidence.work_named(names.is_layout_conversion)
    # Copies of indices belong to the indexing, those of gradients to their parameters, and for
    # convolutions of sequences there is no other layout.
    others = accumulating(evidence) | sorting(evidence)
    convolutions = evidence.nodes_named(is_convolution)
    others |= made_in(evidence, convolutions, "aten::conv1d", "aten::conv_transpose1d")
    work = ((copying >= 0) | generated | converts) & evidence.backward & ~evidence.work_of(others)
    converts |= evidence.work_of(convolutions)
    return work, work & converts


def _many_copies(evidence: Evidence, work: Mask, converts: Mask) -> Found | None:
    costs, say = evidence.costs, evidence.wording
    copying = evidence.launched_in(*_COPYING)
    if not costs.holds_in_most_steps(costs.of_work_by_step(work), _LAYOUT_LEAST):
        least = _LEAST_OF_CONVOLUTIONS
        if not costs.holds_in_most_steps(costs.of_work_by_step(converts), least):
            return None
        work = converts
    cost, norms = costs.of_work(work), norms_that_keep_nchw(evidence)
    of_layers = 2 * costs.of_work(work & (converts | evidence.work_of(norms))) > cost
    if of_layers and norms.any():
        known = say.per_step(int(norms.sum()), "group or instance norm", "group or instance norms")
        not_counted = (
            f" {known} work in NCHW alone, up to PyTorch 2.14: in channels_last there is more to "
            "copy."
        )
        remedy = (
            "Leave the model in NCHW, and compile it: torch.compile makes one kernel of these "
            "norms and what is around them."
        )
    elif of_layers:
        convolutions = evidence.nodes_named(is_convolution)
        volumes = made_in(evidence, convolutions, "aten::conv3d", "aten::conv_transpose3d")
        most = 2 * costs.of_work(work & evidence.work_of(volumes)) > cost
        layout = "channels_last" + "_3d" * bool(most)
        remedy = (
            f"Time the model in one layout: model.to(memory_format=torch.{layout}), and the batch "
            "likewise. Look for a layer that falls back to NCHW."
        )
        not_counted = _OTHER_KERNELS
    else:
        remedy = (
            "Use the layout that the next operation reads: fewer permute and transpose between "
            "operations, and reshape at the end. Fused attention and einsum keep the strides."
        )
        not_counted = ""
    # A copy of the forward has a node of its own, which copies nothing.
    both = evidence.with_forward(evidence.nodes_named(lambda name: name.startswith("Clone")))
    return finding(
        costs.places_of_work(work),
        title="Gradients are copied into another memory layout",
        seen=(
            f"{say.per_step(int(work.sum()), 'copy', 'copies')}: {say.ms(cost)} of the backward in "
            f"which nothing is computed.{not_counted}"
        ),
        remedy=remedy,
        link="https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
        nodes=costs.top_nodes(evidence.spans_of_work(work)),
        operators=costs.top_operators(
            evidence.names_of(copying[work]), np.maximum(costs.work_ns[work], 1)
        ),
        kernels=costs.top_kernels(work),
        priced=not of_layers,  # other kernels run in the other layout
        change={"free": replace(both, work=both.work | work)},
    )


@rule(
    "pageable-copy",
    tier="stable",
    sources=(
        "metatensor/metatrain#1273",
        "scripts",
    ),
    devices=("cuda",),
    title="Copies to the GPU come from pageable memory",
    remedy=(
        "Use DataLoader(..., pin_memory=True) and batch.to(device, non_blocking=True). If the "
        "step makes the tensors itself, create them on the device."
    ),
    link="https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
)
def pageable_copy(evidence: Evidence) -> Finding | None:
    """Copies to the GPU come from memory that is not pinned.

    **Cause.** A copy from ordinary (pageable) memory goes through a buffer of the driver, and the
    host waits, even with `non_blocking=True`.

    **Found by** copies named `Memcpy HtoD (Pageable -> Device)`, while nothing else runs, and what
    the GPU is idle after the host has waited for them. The price is that of the copies and the
    waits; copies from pinned memory keep a part of their time, which a [trial](tried.md) measures.

    **Fix.** `DataLoader(..., pin_memory=True)` and `batch.to(device, non_blocking=True)`. Create
    the step's own tensors on the device.
    """
    costs, say = evidence.costs, evidence.wording
    work = evidence.work_named(lambda name: name.startswith(names.PAGEABLE_TO_DEVICE))
    if not work.any():
        return None
    events, copies, waits = evidence.events, evidence.work.event[work], evidence.recording.waits
    waits = waits.where(is_in(events.correlation[waits.event], events.correlation[copies]))
    none = np.zeros(len(evidence.spans.start), bool)
    idle = costs.operators_by_step(waits.start, waits.idle, np.maximum(waits.owner, 0))
    lost = evidence.typical.value(idle.sum(axis=0))
    return finding(
        costs.elsewhere(costs.places_by_step(costs.owned_by_step(none, work) + idle), "(data)"),
        seen=(
            f"{say.copies(events.size[copies])}: {say.ms(costs.of_work(work))} in which nothing "
            "else runs. The driver copies pageable memory twice, and the host waits"
            + (f": the GPU is then idle for {say.ms(lost)}." if lost else ".")
        ),
        kernels=costs.top_kernels(work),
        change={"free": costs.removable(None, work, waits.event)},
    )
