"""PyTorch's allocator on CUDA devices: when it has no memory left, and who has it then."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from inspect import signature
from typing import Any, NamedTuple, TypeAlias

import torch

from backspot.interrupts import contained
from backspot.live.torch_internals.lookup import find, no, nothing
from backspot.live.torch_internals.references import TensorRef

OutOfMemoryError: type[BaseException] = (
    find("OutOfMemoryError") or torch.cuda.OutOfMemoryError  # before torch 2.5
)

# Calls a function at the moment at which a device has no memory left, in the thread that asks for
# it, and cannot be undone. Without it, sizes are those when the error has ended the script.
_attach: Callable[[Callable[..., None]], None] | None = find(
    "_C", "_cuda_attach_out_of_memory_observer"
)

# Calls a function once CUDA is initialized, which ``_attach`` would do by itself. Without it,
# nothing is attached.
_once_initialized: Callable[[Callable[[], None]], None] | None = find("cuda", "_lazy_call")

# Has the allocator keep the stack of each live block. Without it, modules have no activations.
_record_history: Callable[..., None] | None = find("cuda", "memory", "_record_memory_history")

# Whether the allocator keeps a history already, which another one would replace, as that of the
# script. Without it, the script's is replaced if it began before CUDA was initialized.
_keeps_history: Callable[[], bool] = find("_C", "_cuda_isHistoryEnabled") or no

# The node of the backward that this thread runs. Without it, no module of a backward is known.
_current_node: Callable[[], Any] = find("_C", "_current_autograd_node") or nothing

_MOST_NODES = 200
"""How many nodes of a graph are looked at for the nearest parameter: it is a few nodes away, and no
search through a whole graph holds up an allocator that has failed."""
_SAME_VALUES = (
    *("TBackward", "Transpose", "Permute", "View", "Reshape", "Unsafe", "Expand", "ToCopy"),
    *("Unsqueeze", "Squeeze", "Alias", "Slice", "AsStrided", "Detach", "Clone"),
)
"""How nodes begin that are between a parameter and the operator that uses it."""

Line: TypeAlias = tuple[str, str, int]
"""A file, the function that runs in it, and the number of its line."""


class Block(NamedTuple):
    """Memory in use.

    Attributes:
        address: where it begins.
        bytes: its size.
        stack: the lines of Python that allocated it, the innermost first; empty where no Python
            ran, and where the allocator kept no history.
    """

    address: int
    bytes: int
    stack: tuple[Line, ...]


class Snapshot(NamedTuple):
    """What the allocator has on one device.

    Attributes:
        blocks: those in use; none where the allocator does not tell them.
        in_use: their sum, or what the allocator counts without telling them.
        reserved: what it has from the device; 0 where it does not tell.
        pieces: what is free in segments that cannot grow, and that all may use: not in the pool of
            a CUDA graph.
        largest_piece: the largest of these.
    """

    blocks: tuple[Block, ...]
    in_use: int
    reserved: int
    pieces: int
    largest_piece: int


_began_history = False


def watch_allocator(short: Callable[[int, int, int, int], None], *, history: bool) -> None:
    """Call a method whenever a CUDA device has no memory left, as long as its object lives.

    Args:
        short: called with the device, what was asked for, what there is, and what is free.
        history: whether the allocator keeps the stack of each live block from now on. A history
            of the script's own stays as it is.
    """
    method = weakref.WeakMethod(short)

    def observe(device: int, requested: int, total: int, free: int) -> None:
        with contained():  # the allocator's own error is to come
            if (call := method()) is not None:
                call(device, requested, total, free)

    def begin() -> None:
        global _began_history
        with contained():
            if history and _record_history is not None and not _keeps_history():
                _record_history("state", context="state", stacks="python")
                _began_history = True
            if _attach is not None:
                _attach(observe)

    if _attach is not None and _once_initialized is not None:
        _once_initialized(begin)


def snapshot_of(device: int) -> Snapshot:
    """Return what the allocator has on a CUDA device now.

    Without blocks where it does not tell them, as ``cudaMallocAsync`` and most pluggable ones; and
    where PyTorch would hand over all events of a history of the script's, which can take seconds.
    """
    with suppress(Exception):
        take: Any = torch.cuda.memory_snapshot
        fewer = {"include_traces": False} if "include_traces" in signature(take).parameters else {}
        if fewer or _began_history or not _keeps_history():
            return read_snapshot(take(**fewer), device)
    counts: Mapping[str, int] = {}
    with suppress(Exception):
        counts = torch.cuda.memory_stats(device)
    in_use = counts.get("allocated_bytes.all.current", 0)
    return Snapshot((), in_use, counts.get("reserved_bytes.all.current", 0), 0, 0)


def read_snapshot(segments: Iterable[Mapping[str, Any]], device: int) -> Snapshot:
    """Return what segments, as ``torch.cuda.memory_snapshot`` returns them, have on a device."""
    stacks_seen: dict[tuple[Line, ...], tuple[Line, ...]] = {}
    blocks: list[Block] = []
    reserved = pieces = largest = 0
    for segment in segments:
        if segment["device"] != device:
            continue
        reserved += segment["total_size"]
        address = segment["address"]
        grows, is_private = segment.get("is_expandable"), any(segment.get("segment_pool_id", ()))
        for block in segment["blocks"]:
            size = block["size"]
            if block["state"].startswith("active"):
                stack = tuple(
                    (frame["filename"], frame["name"], frame["line"]) for frame in block["frames"]
                )
                stack = stacks_seen.setdefault(stack, stack)
                blocks.append(Block(block.get("address", address), size, stack))
            elif not grows and not is_private:
                pieces += size
                largest = max(largest, size)
            address += size
    in_use = sum(block.bytes for block in blocks)
    return Snapshot(tuple(blocks), in_use, reserved, pieces, largest)


def errors_caught(device: int) -> int:
    """Return how often the allocator had no memory left so far on a CUDA device."""
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0))


class NodeAtWork(NamedTuple):
    """The node of a backward that this thread runs.

    Attributes:
        name: of its operator.
        parameter: of the module that it belongs to, or of one next to it in the graph.
        is_nearby: whether it is of one next to it.
    """

    name: str
    parameter: TensorRef | None
    is_nearby: bool


def node_at_work() -> NodeAtWork | None:
    """Return the node that this thread runs; ``None`` outside of a backward."""
    node = _current_node()
    return None if node is None else looked_at(node)


def looked_at(node: Any) -> NodeAtWork:
    """Return what a node is, without a reference to it."""
    visited, pending = {node}, deque([(node, False)])
    while pending and len(visited) < _MOST_NODES:
        one, is_nearby = pending.popleft()
        if isinstance(tensor := getattr(one, "variable", None), torch.Tensor):
            return NodeAtWork(node.name(), TensorRef(tensor), is_nearby)
        for other, _ in one.next_functions:
            if other is not None and other not in visited:
                visited.add(other)
                own = hasattr(other, "variable") or other.name().startswith(_SAME_VALUES)
                pending.append((other, is_nearby or not own))
    return NodeAtWork(node.name(), None, is_nearby=True)
