"""Rules about the calls by which allocators get memory from the driver, and give it back."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from backspot.analysis.accounting.amounts import summed
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import NOTHING, enclosing, grouped, is_in, merged, take
from backspot.results.findings import Finding
from backspot.trace import Category, names
from backspot.trace.events import Ints


class _Kind(IntEnum):
    """Why an allocator calls the driver."""

    ASKED = 0
    EMPTIED = 1
    FULL = 2
    SEARCHED = 3
    PINNED = 4
    ALONE = 5


_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_SEEN = {
    _Kind.ASKED: "No memory is given back in between: the steps need blocks that are new to it.",
    _Kind.EMPTIED: "The cache is emptied, as torch.cuda.empty_cache() does, and then filled again.",
    _Kind.FULL: "The memory is full: the allocator gives cached blocks back, and asks again.",
    _Kind.SEARCHED: "A convolution tries its kernels for a new size, and empties the cache then.",
    _Kind.PINNED: "Most of it is for pinned memory of the host.",
    _Kind.ALONE: (
        "Memory is given back piece by piece, as a library does that has no cache of its own."
    ),
}
_REMEDY = {
    _Kind.ASKED: (
        "Give batches a few sizes (pad, or group by size) and the largest one first: then the "
        f"cache has a block for each. Else {_SEGMENTS} lets blocks grow."
    ),
    _Kind.EMPTIED: (
        "Leave torch.cuda.empty_cache() out of the step: what it gives back is asked for again "
        "in the next one. Once after an evaluation is enough."
    ),
    _Kind.FULL: (
        f"Set {_SEGMENTS}, so that blocks of other sizes are not kept beside each other, and pad "
        "batches to a few sizes. If that is not enough, the step needs less memory: a smaller "
        "batch, or checkpointing."
    ),
    _Kind.SEARCHED: (
        "Turn torch.backends.cudnn.benchmark off, or give inputs a few sizes (pad, or group by "
        "size)."
    ),
    _Kind.PINNED: (
        "Keep pinned buffers: allocate each once, as large as the largest batch, and copy_() into "
        "it, in place of pin_memory() on new sizes in each step."
    ),
    _Kind.ALONE: (
        "Have the library take its memory from PyTorch's allocator, or keep its buffers. If it is "
        "torch.cuda.empty_cache() with little in the cache, leave it out of the step."
    ),
}


@rule(
    "allocator-calls",
    devices=("cuda",),
    title="The GPU is idle while an allocator calls the driver for memory",
    link="https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",
)
def allocator_calls(evidence: Evidence) -> Finding | None:
    """Memory is asked of the driver, or given back to it, in each step.

    **Cause.** PyTorch keeps the memory that it has asked the driver for, so that a step like the
    one before needs no call. `torch.cuda.empty_cache()`, an allocation without room, and
    `torch.backends.cudnn.benchmark` give it back; a batch of a new size needs new blocks.
    `cudaMalloc` and `cudaHostAlloc` take 0.1 to some milliseconds each, and `cudaFree` waits for
    the GPU.

    **Found by** these calls of the driver (in HIP's names too), in most steps, at the cost of the
    time in which the GPU is idle meanwhile; after a `cudaFree` also until the host is ahead of the
    GPU again. The memory was full where calls give back right between two that ask; the cache was
    emptied where several give back one after the other. With expandable segments most calls are not
    in a trace; with `cudaMallocAsync` they are cheap, and do not count.

    **Fix.** Leave out `empty_cache()`. If the memory is full or batches differ in size:
    `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` (`PYTORCH_ALLOC_CONF` in newer PyTorch),
    batches of a few sizes, and pinned buffers that are kept.
    """
    costs, say, events = evidence.costs, evidence.wording, evidence.events
    calls = _calls(evidence)
    if not len(calls):
        return None
    span, idle = evidence.spans.of(events, calls), _idle(evidence, calls)
    operators = events.chosen(events.names_where(names.is_operator), Category.OPERATOR)
    caller = enclosing(events, operators, events.thread[calls], events.start[calls])
    kind = _why(_kinds(evidence, calls, caller), idle)
    start, took = events.start[calls], costs.elapsed(events.start[calls], events.end[calls])
    long, lost = (evidence.typical.value(costs.times_by_step(start, ns)) for ns in (took, idle))
    name, count = np.unique(events.name[calls], return_counts=True)
    listed = ", ".join(
        f"{events.names[name[index]]} {count[index]:,}"
        for index in np.argsort(-count, kind="stable").tolist()
    )
    return finding(
        costs.places_at(take(evidence.ownership.owner, span, NOTHING), start, idle),
        seen=(
            f"{say.per_step(len(calls), 'call')} ({listed} in {evidence.report.steps:,} steps) "
            f"take {say.ms(long)}, and the GPU is idle for {say.ms(lost)} of it or right after it. "
            f"{_SEEN[kind]}"
        ),
        remedy=_REMEDY[kind],
        operators=costs.top_operators(events.name[caller[caller >= 0]], idle[caller >= 0]),
        nodes=costs.top_nodes(evidence.spans_with(span)),
        change={"free": costs.removable(None, None, calls, calls)},
    )


def _calls(evidence: Evidence) -> Ints:
    """Return the allocators' calls in the steps by start, on threads that have devices work.

    A thread that pins batches beside the training keeps no device waiting.
    """
    events = evidence.events
    calls = events.of(Category.RUNTIME)
    is_allocator = events.names_where(
        lambda name: names.is_allocation(name) or names.is_release(name)
    )
    launch = events.names_where(names.is_launch)[events.name[calls]]
    threads = merged(events.thread[calls[launch]])
    calls = calls[is_allocator[events.name[calls]]]
    calls = calls[is_in(events.thread[calls], threads)]
    calls = calls[evidence.ledger.steps.at(events.start[calls]) >= 0]
    return calls[np.argsort(events.start[calls], kind="stable")]


def _idle(evidence: Evidence, calls: Ints) -> Ints:
    """Return for how long no device has work in each call, and after it if it has waited.

    The time after a call that waits, until the host is ahead again, is partly that of calls which
    follow. These have it then.
    """
    events, waits = evidence.events, evidence.recording.waits
    idle_ns = evidence.costs.idle_within(events.start[calls], events.end[calls])
    own_waits = np.flatnonzero(is_in(waits.event, calls))
    if not len(own_waits):
        return idle_ns
    order = np.argsort(events.start[waits.event[own_waits]], kind="stable")
    own_waits = own_waits[order]
    place = np.flatnonzero(is_in(calls, waits.event[own_waits]))
    others = np.setdiff1d(np.arange(len(calls)), place)
    before = np.searchsorted(waits.start[own_waits], events.start[calls[others]], side="right") - 1
    step = evidence.ledger.steps.at(events.start[calls[others]])
    same = (before >= 0) & (take(waits.step[own_waits], before, NOTHING) == step)
    following = summed(before[same], idle_ns[others[same]], len(own_waits))
    idle_ns[place] = np.maximum(idle_ns[place], waits.idle[own_waits] - following)
    return idle_ns


def _kinds(evidence: Evidence, calls: Ints, caller: Ints) -> Ints:
    """Return why each call is made, as far as it says so by itself.

    Args:
        caller: the outermost operator around each, ``NOTHING`` for none.
    """
    events = evidence.events
    kind = np.full(len(calls), int(_Kind.ASKED))
    released = events.names_where(names.is_release)[events.name[calls]]
    kind[released] = _Kind.ALONE
    kind[released & _beside_a_release(evidence, calls)] = _Kind.EMPTIED
    searches = events.names_where(lambda name: name.startswith(_CONVOLUTIONS))
    kind[released & (caller >= 0) & searches[events.name[caller]]] = _Kind.SEARCHED
    kind[released & _between_allocations(evidence, calls)] = _Kind.FULL
    kind[events.names_where(names.is_of_pinned_memory)[events.name[calls]]] = _Kind.PINNED
    return kind


_CONVOLUTIONS = ("aten::conv", "aten::cudnn_conv", "aten::miopen_conv")


def _between_allocations(evidence: Evidence, calls: Ints) -> np.ndarray:
    """Whether the program asks for memory directly before and directly after each call."""
    asks = evidence.events.names_where(names.is_allocation)
    before, after = _neighbours(evidence, calls, asks)
    both: np.ndarray = before & after
    return both


def _beside_a_release(evidence: Evidence, calls: Ints) -> np.ndarray:
    """Whether the program gives memory back directly before or directly after each call."""
    releases = evidence.events.names_where(names.is_release)
    before, after = _neighbours(evidence, calls, releases)
    either: np.ndarray = before | after
    return either


def _neighbours(
    evidence: Evidence, calls: Ints, wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return whether the call before each, and the one after it, has a wanted name.

    Calls that launch, ask for memory or are wanted count, each thread's by themselves.
    """
    events = evidence.events
    runtime = events.of(Category.RUNTIME)
    counts = events.names_where(lambda name: names.is_allocation(name) or names.is_launch(name))
    runtime = runtime[(counts | wanted)[events.name[runtime]]]
    runtime = runtime[np.argsort(events.start[runtime], kind="stable")]
    of_thread = dict(grouped(events.thread[runtime]))
    before, after = np.zeros(len(calls), bool), np.zeros(len(calls), bool)
    for thread, members in grouped(events.thread[calls]):
        others = runtime[of_thread.get(thread, runtime[:0])]
        is_wanted = np.append(wanted[events.name[others]], False)
        start, begun = events.start[others], events.start[calls[members]]
        before[members] = is_wanted[np.searchsorted(start, begun, side="left") - 1]
        following = np.searchsorted(start, begun, side="right")
        after[members] = is_wanted[following]
    return before, after


def _why(kind: Ints, idle: Ints) -> _Kind:
    """Return the reason that costs the most; what was asked for after a release is due to it.

    Where far more is asked for than given back, the few releases are not why.
    """
    spent = summed(kind, idle, len(_Kind))
    count = np.bincount(kind, minlength=len(_Kind))
    released = spent.copy()
    released[[_Kind.ASKED, _Kind.PINNED]] = 0
    if 2 * spent[_Kind.PINNED] > spent.sum():
        return _Kind.PINNED
    count_asked = count[_Kind.ASKED]
    if not released.any() or 2 * (count.sum() - count_asked - count[_Kind.PINNED]) < count_asked:
        return _Kind.ASKED
    return _Kind(int(released.argmax()))
