"""Rules about lookups, and gradients that are added by index."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import (
    added_in_turn,
    by_masks,
    crowded,
    forward_of,
    is_filled,
    sorting,
)
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding
from backspot.trace import Category, names
from backspot.trace.events import Mask

_WHOLE_LEAST = 0.02
"""Of the step, for a gradient of all rows: the optimizer takes several times as long for them."""
_IN_TURN_LEAST = 0.04
"""Of the step, for gradients of few rows: every language model has some."""


_WHOLE_TABLE = (
    "Embedding backward writes a gradient for the whole table",
    "Each node fills a gradient of the table's size with zeros, and then adds to the rows that the "
    "batch used.",
    "If each batch uses few rows of a large table, use Embedding(..., sparse=True) with "
    "torch.optim.SparseAdam.",
)
_FEW_ROWS = (
    "Embedding backward adds many gradients to few rows",
    "This adds up the parts of each row's gradient, one after the other.",
    "If a few tokens fill the batch, pass padding_idx for padding, or look up each distinct token "
    "once. A small table is faster as a matmul with one-hot rows.",
)
"""Title, what is seen, and remedy."""


@rule(
    "dense-embedding-gradient",
    tier="stable",
    sources=(
        "pytorch/pytorch#5309",
        "timm",
    ),
    link="https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html",
)
def dense_embedding_gradient(evidence: Evidence) -> Finding | None:
    """The gradient of a lookup is as large as its table.

    **Cause.** The gradient of an embedding is as large as its table: filled with zeros, a few rows
    added, and all of it updated. Or many gradients are added to few rows, one after the other,
    which the title says.

    **Found by** embedding nodes without `sparse=True` that fill the whole table, from 2% of the
    step; on a GPU by the kernel that adds the parts of a row, from 4%, where that takes longer than
    to read each gradient once. An embedding's other work is as usual.

    **Fix.** If batches use few rows of a large table: `sparse=True` with `torch.optim.SparseAdam`.
    Weights tied to the output layer have a dense gradient anyway. `padding_idx` leaves padding out
    of the sum.
    """
    costs, say = evidence.costs, evidence.wording
    nodes = evidence.nodes_named(lambda name: name.startswith("Embedding") and "Sparse" not in name)
    # The node of a table with sparse=True has the same name.
    sparse = ("aten::embedding_sparse_backward", "aten::_embedding_bag_sparse_backward")
    nodes &= ~evidence.spans_around(evidence.events.named(Category.OPERATOR, *sparse))
    cost, by_step = costs.of_spans(nodes), costs.of_spans_by_step(nodes)
    if costs.holds_in_most_steps(by_step, _WHOLE_LEAST) and is_filled(evidence, nodes):
        placed, at_best = costs.places_of_spans(nodes), False
        change = {"free": placed.removable, "update": [place.path for place in placed.places]}
        title, why, remedy = _WHOLE_TABLE
    else:
        in_turn = added_in_turn(evidence, nodes)
        if not costs.holds_in_most_steps(costs.of_work_by_step(in_turn), _IN_TURN_LEAST):
            return None
        nodes &= evidence.spans_of_work(in_turn)
        placed, at_best, change = costs.places_of_work(in_turn), True, {}
        title, why, remedy = _FEW_ROWS
        cost = costs.of_work(in_turn)
    node_names = costs.top_nodes(nodes)
    return finding(
        placed,
        title=title,
        seen=(
            f"{', '.join(node_names)}: {say.ms(cost)} in "
            f"{say.per_step(int(nodes.sum()), 'node')}. {why}"
        ),
        remedy=remedy,
        nodes=node_names,
        kernels=costs.top_kernels(evidence.work_of(nodes)),
        at_best=at_best,
        change=change,
    )


_EMPTY = ("aten::empty*", "aten::new_empty*", "aten::resize_", "aten::_efficientzerotensor")


@rule(
    "deterministic-fill",
    devices=("cuda",),
    title="Deterministic mode fills memory that is overwritten anyway",
    remedy=(
        "Set torch.utils.deterministic.fill_uninitialized_memory = False. Results stay "
        "reproducible, unless the program reads memory that it never wrote."
    ),
    link=(
        "https://docs.pytorch.org/docs/stable/deterministic.html"
        "#torch.utils.deterministic.fill_uninitialized_memory"
    ),
)
def deterministic_fill(evidence: Evidence) -> Finding | None:
    """Deterministic mode fills memory that is overwritten.

    **Cause.** With `torch.use_deterministic_algorithms(True)`, PyTorch fills every new tensor with
    NaN, to expose reads of uninitialized memory.

    **Found by** fill kernels that `aten::empty` and similar operators launch.

    **Fix.** `torch.utils.deterministic.fill_uninitialized_memory = False`. Results stay
    reproducible, unless a bug reads such memory.
    """
    costs, say = evidence.costs, evidence.wording
    empty = evidence.launched_in(*_EMPTY)
    work = (empty >= 0) & evidence.work_named(lambda name: names.FILL_FUNCTOR in name)
    if not work.any():
        return None
    return finding(
        costs.places_of_work(work),
        seen=(
            f"{say.per_step(int(work.sum()), 'kernel')} to fill new tensors, "
            f"{say.ms(costs.of_work(work))}: torch.use_deterministic_algorithms(True) fills empty "
            "memory with NaN."
        ),
        operators=costs.top_operators(evidence.names_of(empty[work]), costs.work_ns[work]),
        kernels=costs.top_kernels(work),
    )


@rule(
    "duplicate-indices",
    devices=("cuda",),
    title="Many gradients are added into few rows",
    remedy=(
        "Look up a small table by a matmul with one-hot rows, which adds in parallel; or "
        "combine the positions that share a row before the lookup. "
        "torch.nn.functional.embedding has a faster backward than x[index]."
    ),
    link="https://docs.pytorch.org/docs/stable/generated/torch.Tensor.index_put_.html",
)
def duplicate_indices(evidence: Evidence) -> Finding | None:
    """Many gradients are added into few rows, one after the other.

    **Cause.** Many positions read the same few rows (classes, a codebook), so many gradients are
    added into one row, one after the other.

    **Found by** an adding kernel that takes more than twelve times as long as the lookup in the
    forward; three times is normal.

    **Fix.** Look up a small table by a matmul with one-hot rows, combine positions that share a row
    first, or use `torch.nn.functional.embedding`, which splits long runs of one index.
    """
    costs, say = evidence.costs, evidence.wording
    nodes = crowded(evidence)
    if not nodes.any():
        return None
    work = evidence.work_of(nodes)
    backward = costs.of_device(work)
    times = int(costs.device_ns[work].sum()) / max(1, int(forward_of(evidence)[nodes].sum()))
    names = costs.top_nodes(nodes)
    return finding(
        costs.places_of_spans(nodes),
        seen=(
            f"{', '.join(names)}: {say.ms(backward)} of GPU time, "
            f"{times:.0f} times the {say.ms(backward / times)} of the forward. "
            "Gradients with equal indices are added one after the other."
        ),
        nodes=names,
        kernels=costs.top_kernels(work),
        at_best=True,
    )


@rule(
    "masked-indexing",
    devices=("cuda",),
    title="Rows are picked by boolean masks",
    remedy=(
        "Where the masks together pick most rows, compute all rows and choose by "
        "torch.where(mask[:, None], a, b), which has no indices and no wait. Else sort the "
        "rows once by what the masks ask for, and split them, as mixtures of experts do."
    ),
    link="https://docs.pytorch.org/docs/stable/generated/torch.where.html",
)
def masked_indexing(evidence: Evidence) -> Finding | None:
    """Many boolean masks pick rows.

    **Cause.** `x[mask]` turns a mask into indices: kernels that count, a host that waits for the
    number, and in the backward the same again with a sort. With a head or an expert for each mask,
    the step is made of that.

    **Found by** at least four operators a step in the forward that index by a mask, from 5% of the
    step, with their nodes and the GPU's idle time in them; with the element-wise operators and sums
    that follow each mask alike. One or two masks, which pick the tokens of a loss, are as usual.

    **Fix.** If the masks together pick most rows, compute all rows and choose: `torch.where(mask[:,
    None], a, b)`. Else sort the rows once by what the masks ask for, and split them.
    """
    costs, say = evidence.costs, evidence.wording
    nodes, operators, placed = by_masks(evidence)
    return finding(
        placed,
        seen=(
            f"{say.per_step(len(operators), 'mask')} in the forward, and those of "
            f"{say.per_step(int(nodes.sum()), 'node')}: {say.ms(placed.wall_ns)}. Each mask is "
            "turned into indices, for whose number the host waits, in forward and backward. What "
            "is done alike for the rows of each mask counts, too, where it is light."
        ),
        nodes=costs.top_nodes(nodes),
        kernels=costs.top_kernels(evidence.work_of(nodes)),
        at_best=True,
        change={"free": placed.removable},
    )


_GATHER = (
    "Index whole rows, x[torch.arange(len(x))[:, None], keep]: an index that was expanded over the "
    "features sorts each element by itself. Without "
    "torch.use_deterministic_algorithms(True) nothing is sorted."
)
_SELECT = (
    "Leave out torch.use_deterministic_algorithms(True): nothing is sorted here then. A slice, or "
    "multiplying by a mask, needs no index at all."
)
_INDEX = (
    "If one dimension is indexed, time x.index_select(dim, index), which adds without a sort (in "
    "an order that varies from run to run): where many indices are equal, it can be slower. "
    "Slices, multiplying by a mask and torch.where need no index."
)


@rule(
    "sorted-indexing",
    tier="stable",
    sources=("deepmodeling/deepmd-kit#4747", "timm"),
    devices=("cuda",),
    title="Indexing backward sorts its indices",
    link="https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html",
)
def sorted_indexing(evidence: Evidence) -> Finding | None:
    """Gather, scatter or index backward sorts its indices.

    **Cause.** Where the order of sums must be fixed, PyTorch sorts indices before it adds: always
    in the backward of `x[index]`, and of `gather` and `scatter` under
    `torch.use_deterministic_algorithms(True)`.

    **Found by** gather, scatter or index nodes that launch a sort. The cost is the whole node.

    **Fix.** If the index of a `gather` was expanded over features, every element is sorted: index
    whole rows, `x[torch.arange(len(x))[:, None], keep]`. For one dimension, `index_select` does not
    sort (and its order varies): faster in some models, slower in others, so it has no price unless
    it is tried. Leave deterministic mode off, unless runs must be reproducible bit by bit.
    """
    # A floating-point sum over equal indices is reproducible only in a fixed order, so PyTorch
    # sorts the indices first: always where the forward was ``x[index]``, and for ``gather`` and
    # ``scatter`` with deterministic algorithms.
    costs, say = evidence.costs, evidence.wording
    nodes = sorting(evidence)
    if not nodes.any():
        return None
    work = evidence.work_of(nodes)
    sorts = work & evidence.work_named(names.is_sort)
    remedy = _remedy(evidence, nodes)
    return finding(
        costs.places_of_spans(nodes),
        seen=(
            f"{', '.join(costs.top_nodes(nodes))}: {say.ms(costs.of_spans(nodes))} in "
            f"{say.per_step(int(nodes.sum()), 'node')}, with "
            f"{say.per_step(int(sorts.sum()), 'kernel')} to sort indices "
            f"({say.ms(costs.of_device(sorts))}) before anything is added."
        ),
        remedy=remedy,
        nodes=costs.top_nodes(nodes),
        kernels=costs.top_kernels(work),
        # Additions in any order can take longer than the sort: on an H200 they did in two models.
        priced=remedy is not _INDEX,
    )


def _remedy(evidence: Evidence, nodes: Mask) -> str:
    """Return the remedy for the kind of node that takes most of the time."""

    def spent(*kinds: str) -> int:
        own_nodes = evidence.nodes_named(lambda name: name.startswith(kinds)) & nodes
        return evidence.costs.of_spans(own_nodes)

    gathered, selected = spent("Gather", "Scatter"), spent("IndexSelect")
    rest = evidence.costs.of_spans(nodes) - gathered - selected
    return max((rest, _INDEX), (gathered, _GATHER), (selected, _SELECT))[1]
