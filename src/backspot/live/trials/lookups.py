"""Rows of a table in another way, sparse gradients of embeddings, and copies from pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from backspot.live.trials.chains import Chain, Chains, Node, seen
from backspot.live.trials.trial import (
    AS_IT_IS,
    CHAINS_S,
    MOST_CHAINS,
    Piece,
    Request,
    Times,
    Trial,
    Worth,
    remedy,
)
from backspot.live.trials.twins import (
    Refused,
    check_plain,
    check_room,
    copied,
    free_bytes,
    numbers_like,
    size_of,
    touched,
    twin,
)
from backspot.results.report import predictor_of

_MOST_ONE_HOT = 1 << 26
"""Numbers in a one-hot matrix: a larger one is no remedy."""


@seen(torch.Tensor.__getitem__)
def _indexed(chains: Chains, end: Node) -> None:
    table, index = end.parts
    if isinstance(index, tuple) and len(index) == 1 and isinstance(index[0], torch.Tensor):
        index = chains.node(index[0])
    output, indices = end.tensor(), index.tensor() if isinstance(index, Node) else None
    if output is None or indices is None or indices.dtype != torch.long or not output.requires_grad:
        return
    chains.keep("index", end, {"table": table, "index": index})


@remedy("duplicate-indices", "sorted-indexing", chains=True)
def indexing(request: Request) -> Trial | None:
    """Try other operators for ``table[index]``, with the step's own indices."""
    missing = "no table[index] with one tensor of indices was recognised"
    chains = request.seen("index", missing, lambda chain: chain.given["index"].shape.numel())
    chains = chains[:MOST_CHAINS]
    variants = request.variants(chains, _ways_to_index, room=4)
    first = chains[0]
    (index,) = first.again(first.given["index"])()
    distinct = int(index.unique().numel())
    return Trial(
        f"table[index] of {index.numel():,} positions, {distinct:,} distinct, in a table of "
        f"{tuple(first.given['table'].shape)}, forward and backward",
        variants,
        allowed_s=CHAINS_S,
    )


def _ways_to_index(chain: Chain) -> dict[str, Callable[[], torch.Tensor]]:
    (index,) = chain.again(chain.given["index"])()
    again = chain.again(chain.given["table"])

    def table() -> torch.Tensor:
        return again()[0]

    rows, *width = chain.given["table"].shape
    flat = index.reshape(-1)
    positive = torch.where(flat < 0, flat + rows, flat)
    shape, dtype = (*index.shape, *width), table().dtype
    ways: dict[str, Callable[[], torch.Tensor]] = {
        AS_IT_IS: lambda: table()[index],
        "index_select": lambda: table().index_select(0, positive).view(shape),
    }
    if len(width) == 1:
        ways["F.embedding"] = lambda: functional.embedding(positive, table()).view(shape)
        if rows * flat.numel() <= _MOST_ONE_HOT:
            hot = functional.one_hot(positive, rows).to(dtype)
            ways["a one-hot matrix that is kept"] = lambda: (hot @ table()).view(shape)
            ways["a one-hot matrix"] = lambda: (
                functional.one_hot(positive, rows).to(dtype) @ table()
            ).view(shape)
    return ways


_SPARSE: dict[type, type] = {
    torch.optim.Adam: torch.optim.SparseAdam,
    torch.optim.AdamW: torch.optim.SparseAdam,
    torch.optim.SGD: torch.optim.SGD,
    torch.optim.Adagrad: torch.optim.Adagrad,
}
_COPIES = 8  # as large as the table: two forms, each with a gradient and what Adam keeps
_KEPT = ("lr", "betas", "eps", "lr_decay", "initial_accumulator_value")
"""Options that both forms have; a sparse step has no momentum and no decay of weights."""


@seen(functional.embedding)
def _embedded(chains: Chains, end: Node) -> None:
    index, table = end.parts[0], end.parts[1].tensor()
    if table is not None and table.requires_grad:
        inputs = {"index": index, "table": table, "padding": end.option("padding_idx", 2, None)}
        chains.keep("embedding", end, inputs, key=id(table))


@seen(functional.linear)
def _projected(chains: Chains, end: Node) -> None:
    table = end.parts[1].tensor()
    if table is not None and table.is_leaf:
        chains.uses[table] = chains.uses.get(table, 0) + 1


@remedy("dense-embedding-gradient", chains=True)
def sparse_embedding(request: Request) -> Trial | None:
    """Try ``sparse=True``: the lookup, its backward, and the optimizer's step of this table."""
    missing = "no embedding that is trained was recognised"
    chains = request.seen("embedding", missing, lambda chain: chain.given["table"].numel())
    chain = max(chains, key=lambda chain: chain.given["table"].numel())
    table, (index,) = chain.given["table"], chain.again(chain.given["index"])()
    check_plain(table)
    if request.live.chains is not None and table in request.live.chains.uses:
        raise Refused("the table is used elsewhere too, so that its gradient stays dense")
    alike = [chain for chain in chains if chain.given["table"] is table]
    if sum(chain.count for chain in alike) > 1:
        raise Refused("the step looks the table up more than once")
    optimizer, group = _optimizer_of(table, request)
    sparse = _SPARSE.get(type(optimizer))
    if sparse is None:
        raise Refused(f"{type(optimizer).__name__} has no form for sparse gradients")
    # Of a table that is too large, some of the rows: what is dense takes as many times longer.
    stride = -(-_COPIES * size_of(table) // free_bytes(table.device))
    dense_options = {key: group[key] for key in group if key not in ("params", "initial_lr")}
    sparse_options = {key: group[key] for key in _KEPT if key in group}
    name = f"sparse=True and {sparse.__name__}"
    variants = {
        AS_IT_IS: [_step(type(optimizer), dense_options, chain, stride, sparse=False)],
        name: [_step(sparse, sparse_options, chain, stride, sparse=True)],
    }
    lost = [key for key in ("momentum", "weight_decay") if group.get(key)]
    rows = int(index.unique().numel())
    return Trial(
        f"Embedding{tuple(table.shape)}, of which a step uses {rows:,} rows, with its part of "
        f"{type(optimizer).__name__}.step()",
        variants,
        notes={name: f"without {' and '.join(lost)}"} if lost else {},
    )


def _optimizer_of(
    table: torch.Tensor, request: Request
) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    for optimizer in request.live.optimizers:
        for group in optimizer.param_groups:
            if any(parameter is table for parameter in group["params"]):
                return optimizer, group
    raise Refused("no optimizer that took a step holds the table")


def _step(cls: Any, options: dict[str, Any], chain: Chain, stride: int, *, sparse: bool) -> Piece:
    rows = -(-len(chain.given["table"]) // stride)
    table = torch.nn.Parameter(twin(chain.given["table"].detach()[:rows]))
    optimizer = cls([{"params": [table], **copied(options)}])
    (index,), padding = chain.again(chain.given["index"])(), chain.given["padding"]
    index, padding = index % rows, None if padding is None else padding % rows
    seeds: list[torch.Tensor] = []

    def run() -> None:
        out = functional.embedding(index, table, padding, sparse=sparse)
        if not seeds:
            seeds.append(numbers_like(out))
        out.backward(seeds[0])
        optimizer.step()
        optimizer.zero_grad()

    return Piece(run, 1 if sparse else stride)


@seen(torch.Tensor.to, torch.Tensor.cuda)
def _moved(chains: Chains, end: Node) -> None:
    source, output = end.parts[0].tensor(), end.tensor()
    if (
        source is not None
        and output is not None
        and (source.is_cpu, output.is_cuda) == (True, True)
    ):
        inputs = {"shape": output.shape, "dtype": output.dtype, "pinned": source.is_pinned()}
        chains.keep("copy", end, {**inputs, "device": output.device}, key=tuple(inputs.values()))


@remedy("pageable-copy", chains=True)
def pinned(request: Request) -> Trial | None:
    """Try copies of the step's sizes from pinned memory, which the host does not wait for."""
    missing = "no copy of a tensor to the GPU was recognised"
    copies = request.seen("copy", missing, lambda chain: chain.given["shape"].numel())
    pageable = [chain for chain in copies if not chain.given["pinned"]]
    if not pageable:
        return None
    # All sources stay until the trial ends, each of them in both kinds of memory.
    sizes = [chain.given["shape"].numel() * chain.given["dtype"].itemsize for chain in pageable]
    check_room(torch.device("cpu"), 2 * sum(sizes))
    variants: dict[str, list[Piece]] = {AS_IT_IS: [], "pinned memory, non_blocking=True": []}
    for chain in pageable:
        inputs = chain.given
        source = touched(inputs["shape"], inputs["dtype"])
        for pieces, tensor in zip(variants.values(), (source, source.pin_memory()), strict=True):
            move = partial(tensor.to, inputs["device"], non_blocking=tensor.is_pinned())
            pieces.append(Piece(move, chain.count))
    count = sum(chain.count for chain in pageable)
    what = f"{count} copies of the step's sizes to the GPU"
    return Trial(what, variants, known_ns=request.known_ns, worth=_unblocked(request))


def _unblocked(request: Request) -> Worth | None:
    """Return what a step saves if copies take less and the host does not wait in them.

    The host waits in a copy as long as the device needs for it. What a copy of its own does not
    show is that a device has nothing queued afterwards.
    """
    predictor = predictor_of(request.report)
    if predictor is None:
        return None
    paths, rule = {place.path for place in request.finding.places}, request.finding.rule

    def saved(less: Sequence[Times]) -> Sequence[float]:
        of_copies = [(0.0, max(host, device, key=abs)) for host, device in less]
        return predictor.with_less(paths, of_copies, unblocked=rule)

    return saved
