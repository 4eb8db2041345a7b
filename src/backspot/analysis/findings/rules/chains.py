"""Rules about many operators that should be one, or none: chains, loops, copies, the same again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import msgspec
import numpy as np

from backspot.analysis.findings.costs import LEAST_SHARE
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import (
    Stretches,
    adds_to_others,
    both_ways,
    forward_of,
    forward_operators,
    nodes_of,
    passes_of_nodes,
    runs_of_nodes,
    shapes_of,
    time_of,
)
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.recording import once
from backspot.analysis.timeline import NOTHING, enclosing, grouped, is_in, median, merged, take
from backspot.formatting import labelled
from backspot.results.findings import Finding
from backspot.trace import names, operations
from backspot.trace.events import Ints, Mask
from backspot.trace.operations import Kind

# Loops -------------------------------------------------------------------------------------------

_TURNS = 32
"""Turns of a loop in one call of a module, from which it is worth a change."""
_BODY = 16
"""Operators between two turns; a module that runs more between them is no loop of small ones."""
_SMALL = 30_000
"""Nanoseconds of one operator; launching it, or calling it on a CPU, takes some thousand."""
_CALLS, _OF_A_CALL = 16, 3
"""Calls of one module in a call of another, and the operators of each, from which these are a loop.
What a model uses often in a row, such as one activation for all layers, is one operator."""


@rule(
    "operator-loop",
    tier="stable",
    sources=(
        "johnma2006/mamba-minimal#18",
        "facebookresearch/tbsm#1",
        "wutong16/Density_aware_Chamfer_Distance#3",
    ),
    least=0.05,
    devices=("cpu", "cuda"),
    title="A Python loop runs many small operators",
    link="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
)
def operator_loop(evidence: Evidence) -> Finding | None:
    """A Python loop runs many small operators.

    **Cause.** A Python loop over time steps, parts, tiles or rounds calls small operators, and
    starting them takes longer than what they compute. Often it is the slow path of a layer whose
    package with a fused kernel is missing.

    **Found by** one call of a module, from 5% of the step, that runs the same operator at least 32
    times, with at most 16 others in between, half of them within 30 µs; or that calls the same
    module at least 16 times, of three or more such operators each. A few heads, groups or experts
    do not count, nor one activation for all layers. The cost is that of the loop: its operators of
    up to 30 µs, the Python between them, and the nodes that they make.

    **Fix.** Where no call needs what another returns, one call for all of them. Else operators on
    whole tensors, larger tiles, the parallel form of the recurrence, or the package. Else compile
    the body of the loop. The price is a bound, unless longer operators run in each turn.
    """
    # Each operator takes a short time.
    costs, say, owners = evidence.costs, evidence.wording, evidence.ownership.owners
    loops, again = _loops(evidence), _called_again(evidence)
    owner = evidence.ownership.owner
    operators = merged(loops.operators, again.operators)
    nodes = nodes_of(evidence, operators)
    placed = both_ways(
        evidence, nodes, operators, LEAST_SHARE, whole=True, stretches=_united(loops, again)
    )
    if not placed.places:
        return None
    first = [owners.path(number) == placed.places[0].path for number in owner[loops.calls].tolist()]
    subject = f"{placed.places[0].label} runs the same operators"
    most = int(loops.turns[first].max(initial=0))
    if not most and len(again.calls):
        call, most = int(again.calls[np.argmax(again.turns)]), int(again.turns.max())
        outer, inner = (
            labelled(*owners.named(int(owner[span])))
            for span in (evidence.spans.parent[call], call)
        )
        subject = f"{outer} calls {inner}"
    around = enclosing(evidence.events, operators, evidence.work.thread, evidence.work.launch)
    kernels = int(((around >= 0) & evidence.recorded).sum())
    launched = f"{kernels // evidence.report.steps:,} kernels in its forward of a step. "
    removed, has_longer = placed.removable, loops.has_longer or again.has_longer
    return finding(
        placed,
        seen=(
            f"One call of {subject} {most:,} times: "
            f"{launched if kernels else ''}The loop takes {say.ms(placed.wall_ns)}, forward and "
            "backward, most of it to start operators rather than to compute."
            + " Longer operators of its turns are not counted; they can get faster, too."
            * has_longer
        ),
        remedy=(
            ("Do not synchronize in the loop. " if removed and len(removed.waits) else "")
            + "Where no call needs what another returns, call the module once for all of them. "
            * bool(len(again.calls))
            + "Replace the loop over time steps, parts or tiles by operators on whole tensors, "
            "with larger tiles, or by the parallel form of the recurrence. If a package has a "
            "fused kernel for this layer, install it: this may be its slow path. Else compile the "
            "body of the loop."
        ),
        nodes=costs.top_nodes(nodes),
        operators=costs.top_operators(
            evidence.names_of(operators), evidence.events.duration[operators]
        ),
        at_best=not has_longer,
    )


class _Loops(msgspec.Struct, frozen=True):
    """Loops of the forward.

    Attributes:
        calls: the module calls that loop, or a call of each module that is called in a loop.
        turns: how often, one entry for each of ``calls``.
        operators: what runs in the loops, as indices into the events.
        stretches: where, with the Python between them.
        has_longer: whether their turns run longer operators, too, which are not among ``operators``
            and which other code for the loop can make faster.
    """

    calls: Ints
    turns: Ints
    operators: Ints
    stretches: Stretches
    has_longer: bool = False


def _no_loops() -> _Loops:
    none = np.empty(0, np.int64)
    return _Loops(none, none, none, Stretches(none, none, none))


def _united(*loops: _Loops) -> Stretches:
    """Return the stretches of these loops; of those that overlap, the outermost count once."""
    start, end, span = (
        np.concatenate([getattr(loop.stretches, name) for loop in loops])
        for name in ("start", "end", "span")
    )
    order = np.lexsort((-end, start))
    start, end, span = start[order], end[order], span[order]
    before = np.append(0, np.maximum.accumulate(end)[:-1])[: len(end)]
    has_length = end > before
    return Stretches(np.maximum(start, before)[has_length], end[has_length], span[has_length])


@once
def _loops(evidence: Evidence) -> _Loops:
    """Return the module calls that loop, how often each does, and what is in the loop.

    A call can do other things, too: in the loop is what runs again and again and is short, with
    what is as short or a view between two of these.
    """
    events = evidence.events
    operators, spans = forward_operators(evidence)
    views = events.names_where(operations.is_view)[events.name[operators]]
    index, span = operators[~views], spans[~views]
    keys = span * len(events.names) + events.name[index]
    pairs, count = np.unique(keys, return_counts=True)
    call_of = pairs // len(events.names)
    begins = np.flatnonzero(np.append(True, call_of[1:] != call_of[:-1])[: len(call_of)])
    if not len(begins):
        return _no_loops()
    calls, turns = call_of[begins], np.maximum.reduceat(count, begins)
    loops = (turns >= _TURNS) & (np.add.reduceat(count, begins) <= _BODY * turns)
    of_call = dict(grouped(spans, np.flatnonzero(is_in(spans, calls[loops]))))
    first, last, inside, around = [], [], [], []
    has_longer = False
    for at in np.flatnonzero(loops).tolist():
        in_call = of_call[int(calls[at])]
        in_call = in_call[np.argsort(events.start[operators[in_call]], kind="stable")]
        times = time_of(evidence, operators[in_call])
        # The median: some of the operators of a loop can be held up.
        loops[at] = float(median(times[~views[in_call]])) <= _SMALL
        if not loops[at]:
            continue
        name, is_view = events.name[operators[in_call]], views[in_call]
        least = min(_TURNS, int(turns[at]) // 2)
        runs = _turning(name, times, is_view, least)
        if runs:
            whole = slice(runs[0][0], runs[-1][1] + 1)  # with what is longer between two of them
            has_longer |= _has_longer(name[whole], times[whole], is_view[whole], least)
        for low, high in runs:
            inside.append(operators[in_call[low : high + 1]])
            first.append(operators[in_call[low]])
            last.append(operators[in_call[high]])
            around.append(int(calls[at]))
    if not first:
        return _no_loops()
    stretches = Stretches(events.start[first], events.end[last], np.array(around, np.int64))
    return _Loops(calls[loops], turns[loops], merged(*inside), stretches, has_longer)


def _has_longer(name: Ints, times: Ints, is_view: Mask, least: int) -> bool:
    """Whether an operator runs as often as the loop turns, and longer than its operators.

    Args: as those of ``_turning``.
    """
    return any(
        len(members) >= least and float(median(times[members])) > _SMALL
        for _, members in grouped(name, np.flatnonzero(~is_view))
    )


def _turning(name: Ints, times: Ints, is_view: Mask, least: int) -> list[tuple[int, int]]:
    """Return where operators of a call, in their order, are a loop: pairs of first and last.

    Args:
        name: the name of each.
        times: how long each works.
        is_view: whether each only looks at memory.
        least: how often an operator runs in the call that is one of the loop.
    """
    _, name_of, count = np.unique(name, return_inverse=True, return_counts=True)
    spent = np.zeros(len(count))
    for number, members in grouped(name_of):
        spent[number] = float(median(times[members]))
    again = ((count >= least) & (spent <= _SMALL))[name_of] & ~is_view
    short = is_view | again | ((times <= _SMALL) & (spent <= _SMALL)[name_of])
    loops = []
    for run_of_short in _parts_between(~short):
        turning = run_of_short[again[run_of_short]]
        for run in np.split(turning, np.flatnonzero(np.diff(turning) > 2 * _BODY) + 1):
            if len(run) > 1:
                low = int(run[0])
                while low > run_of_short[0] and is_view[low - 1]:
                    low -= 1
                loops.append((low, int(run[-1])))
    return loops


@once
def _called_again(evidence: Evidence) -> _Loops:
    """Find modules that one call of another module calls again and again."""
    spans, owner, events = evidence.spans, evidence.ownership.owner, evidence.events
    root = np.full(len(owner), NOTHING)
    calls = np.flatnonzero((spans.module >= 0) & (spans.parent >= 0) & ~evidence.in_pass)
    pair = spans.parent[calls] * len(evidence.ownership.owners) + owner[calls]
    _, pair_of, count = np.unique(pair, return_inverse=True, return_counts=True)
    calls, times = calls[count[pair_of] >= _CALLS], count[pair_of][count[pair_of] >= _CALLS]
    if not len(calls):
        return _no_loops()
    root[calls] = calls
    while (more := (root < 0) & (take(root, spans.parent) >= 0)).any():
        root[more] = root[spans.parent[more]]
    index, span = forward_operators(evidence)
    within = root[span]
    index, within = index[within >= 0], within[within >= 0]
    works = ~events.names_where(operations.is_view)[events.name[index]]
    owners_kept, is_long = [], np.zeros(len(index), bool)
    for number, members in grouped(owner[within], np.flatnonzero(works)):
        spent = time_of(evidence, index[members])
        often = len(members) >= _OF_A_CALL * len(np.unique(within[members]))
        if often and float(median(spent)) <= _SMALL:
            owners_kept.append(number)
            for _, same in grouped(events.name[index[members]]):
                is_long[members[same]] = float(median(spent[same])) > _SMALL
    chosen = is_in(owner[calls], np.array(owners_kept, np.int64))
    calls, times = calls[chosen], times[chosen]
    inside = is_in(within, calls)
    index, within, is_long = index[inside], within[inside], is_long[inside]
    stretches = _short(evidence, calls, index, within, is_long)
    has_longer = bool(0 < len(calls) <= is_long.sum())
    return _Loops(calls, times, index[~is_long], stretches, has_longer)


def _short(evidence: Evidence, calls: Ints, index: Ints, within: Ints, is_long: Mask) -> Stretches:
    """Return these calls, without what they do beside short operators.

    Args:
        index: the operators in them, as indices into the events.
        within: the call that each is in.
        is_long: whether it computes longer than it takes to start.
    """
    spans, events = evidence.spans, evidence.events
    cut = np.unique(within[is_long])
    uncut = calls[~is_in(calls, cut)]
    start, end, span = [*spans.start[uncut]], [*spans.end[uncut]], [*uncut]
    for call, members in grouped(within, np.flatnonzero(is_in(within, cut))):
        members = members[np.argsort(events.start[index[members]], kind="stable")]
        for short_part in _parts_between(is_long[members]):
            start.append(events.start[index[members[short_part[0]]]])
            end.append(events.end[index[members[short_part[-1]]]])
            span.append(call)
    return Stretches(*(np.array(column, np.int64) for column in (start, end, span)))


def _parts_between(is_long: Mask) -> list[Ints]:
    """Return the places of short operators that follow each other, in the order of a call."""
    pieces = np.split(np.arange(len(is_long)), np.flatnonzero(is_long))
    return [short for piece in pieces if len(short := piece[~is_long[piece]])]


# Chains ------------------------------------------------------------------------------------------

_CHAIN = 4
"""Operators of a chain that read and write a whole tensor each; one kernel would do it once."""
_KINDS = 3
"""Kinds of operators in a chain: those of one or two kinds may work on different tensors."""
_IN_CACHE = 100_000
"""Nanoseconds of a node on a CPU, from which its tensors, of a megabyte, leave the cache of a core.
Compiled, longer chains took a quarter to a half of their time, shorter ones 65% to 100%."""
_LETTERS = {
    "pow": "P",
    "mul": "M",
    "div": "D",
    "add": "A",
    "sub": "S",
    "rsub": "S",
    "tanh": "T",
    "erf": "E",
    "neg": "N",
    "rsqrt": "R",
    "sqrt": "R",
    "mean": "m",
    "var": "m",
    "cat": "K",
    "repeat": "c",
}
"""Operations by which ``_FUNCTIONS`` are known."""
_LETTERS_OF_KINDS = {
    **dict.fromkeys(operations.VIEWS, "_"),
    Kind.CAST: "c",
    Kind.COPY: "c",
    Kind.POINTWISE: "f",
    Kind.REDUCTION: "f",
    Kind.JOIN: "f",
}
"""What other nodes of a chain do: ``_`` computes nothing, ``c`` only copies; no letter ends it."""
_OF_ALL = "w"
"""One number from all: the last of its chain, as it is whole before anything can read it."""
_RUN = re.compile(rf"[^.{_OF_ALL}]+{_OF_ALL}?")
_COMPILE = (
    "torch.compile of this module makes one kernel of them, forward and backward. If there is a "
    "function for it (torch.nn.functional.{rms_norm, layer_norm, gelu, silu}), call that one."
)
_FUNCTIONS = (
    (
        "GELU",
        re.compile(r"[PMD]+AMTAM+"),
        'Use torch.nn.functional.gelu(x, approximate="tanh"), which is one operator forward and '
        "backward.",
    ),
    (
        "GELU",
        re.compile(r"[PMD]+EAM+"),
        "Use torch.nn.functional.gelu(x), which is one operator forward and backward.",
    ),
    (
        "LayerNorm",
        re.compile(r"m[_cf]*S[_cf]*(P|M)[_cf]*m[_cfA]*R|[_cf]*m[_cf]*Sm?[_cf]*[mA_cf]*R"),
        "Use torch.nn.functional.layer_norm over the last axes, which is one operator forward and "
        "backward. It divides the variance by n, as var(unbiased=False) does.",
    ),
    ("RMSNorm", re.compile(r"[PM][_cf]*m[_cf]*A?[_cf]*R[_cf]*M"), ""),
    ("A rotary position embedding", re.compile(r"M[_cf]*N[_cf]*K[_cf]*MA"), ""),
)
"""What a chain computes, by its nodes in the order of the forward, and what is better."""
_RMS_NORM = (
    "Use torch.nn.functional.rms_norm, which is one kernel forward and backward on a GPU, or "
    "compile the module."
)


@rule(
    "pointwise-chain",
    tier="stable",
    sources=(
        "huggingface/transformers#48915",
        "timm",
        "scripts",
    ),
    least=0.05,
    devices=("cpu", "cuda"),
    link="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
)
def pointwise_chain(evidence: Evidence) -> Finding | None:
    """A chain of element-wise operators that one kernel could compute.

    **Cause.** A norm, an activation or a rotary embedding is written as products, sums and roots.
    Each reads and writes a whole tensor, forward and backward, where one kernel would do it once.

    **Found by** at least four nodes of at least three kinds that follow each other in one module,
    from 5% of the step; a sum or a mean of all elements is the last of its chain. Forms of GELU,
    LayerNorm, RMSNorm and rotary embeddings are named. On a CPU, other chains count if a node takes
    0.1 ms or more: smaller tensors stay in the cache. Nodes of a [loop](#operator-loop) do not
    count.

    **Fix.** `torch.nn.functional.gelu` and `layer_norm`, and on a GPU `rms_norm`, are one operator
    each. Elsewhere, compile the module: on a CPU, chains over 8 MB took 22% to 57% of their time,
    over 0.8 MB 65% to 100%.
    """
    costs, say = evidence.costs, evidence.wording
    chains, kinds = _chains(evidence)
    operator = evidence.ownership.join.operator
    placed = both_ways(evidence, chains, operator[chains], LEAST_SHARE)
    if not placed.places:
        return None
    chains &= ~nodes_of(evidence, _loops(evidence).operators)  # of a loop, another rule says more
    spent = {name: costs.of_spans(nodes & chains) for name, nodes in kinds.items()}
    kind = max(spent, key=lambda function: spent[function])
    name, remedy, others = "", "", ""
    if 2 * spent[kind] > (chains_ns := costs.of_spans(chains)):
        (name, remedy), chains = kind, chains & kinds[kind]
        if 2 * (chains_ns - spent[kind]) > spent[kind]:
            others = f" Other chains take {say.ms(chains_ns - spent[kind])} of the backward."
    placed = both_ways(evidence, chains, operator[chains], LEAST_SHARE)
    if name == "RMSNorm" and evidence.device == "cuda":
        remedy = _RMS_NORM
    length = (evidence.spans.end - evidence.spans.start)[chains]
    if not placed.places or (
        not remedy and evidence.device == "cpu" and median(length) < _IN_CACHE
    ):
        return None
    return finding(
        placed,
        title=(
            f"{name} is written out as many operators"
            if name
            else "Element-wise operators run one by one"
        ),
        seen=(
            f"{say.per_step(int(chains.sum()), 'node')} of products, sums and the like in a row "
            f"({', '.join(costs.top_nodes(chains))}), {say.ms(placed.wall_ns)} forward and "
            f"backward. Each of them reads and writes a whole tensor.{others} The price is that of "
            "one kernel in their place. That it needs no new memory between them is not counted."
        ),
        remedy=remedy or _COMPILE,
        nodes=costs.top_nodes(chains),
        kernels=costs.top_kernels(evidence.work_of(chains)),
        change={"fuse": evidence.with_forward(chains)},
    )


def _letter(node: str) -> str:
    if names.is_of_all(node):
        return _OF_ALL
    operation = operations.of_node(node)
    kind = operations.kind_of(operation)
    return _LETTERS.get(operation) or (_LETTERS_OF_KINDS.get(kind, ".") if kind else ".")


def _chains(evidence: Evidence) -> tuple[Mask, dict[tuple[str, str], Mask]]:
    """Return the nodes of chains, and of those that compute a known function.

    A chain is in one module, and its nodes follow each other in the order of the forward.
    """
    spans = evidence.spans
    letters = [_letter(name) for name in spans.node_names]
    chains = np.zeros(len(spans.start), bool)
    by_function = {(name, remedy): np.zeros(len(chains), bool) for name, _, remedy in _FUNCTIONS}
    views = np.array([letter == "_" for letter in letters] + [True])
    for run in runs_of_nodes(evidence):
        if len(run) >= _CHAIN:
            text = "".join(letters[node] for node in spans.node[run].tolist())
            for chain in _RUN.finditer(text):
                works = re.sub("[_c]", "", chain[0])
                if len(works) < _CHAIN or len(set(works)) < _KINDS:
                    continue
                chains[run[chain.start() : chain.end()]] = True
                for name, pattern, remedy in _FUNCTIONS:
                    if pattern.search(chain[0]):
                        by_function[name, remedy][run[chain.start() : chain.end()]] = True
                        break
    return chains & ~views[spans.node], by_function


# Copies ------------------------------------------------------------------------------------------


@rule(
    "repeated-tensor",
    sources=("mosaicml/llm-foundry#628",),
    devices=("cpu", "cuda"),
    title="Tensors are copied many times by repeat",
    remedy=(
        "Broadcast instead: x[:, None] or expand has no copies, and products and sums take "
        "it as it is. For heads of attention that share keys and values, "
        "scaled_dot_product_attention(enable_gqa=True)."
    ),
    link="https://docs.pytorch.org/docs/stable/notes/broadcasting.html",
)
def repeated_tensor(evidence: Evidence) -> Finding | None:
    """`repeat` copies what broadcasting would not.

    **Cause.** `repeat` writes every copy to memory, and its backward sums the copies again.

    **Found by** `repeat`, `tile` and `repeat_interleave` in modules, and their nodes.

    **Fix.** Broadcast: `x[:, None]` or `expand` copies nothing. For keys and values that heads
    share, `scaled_dot_product_attention(enable_gqa=True)`.
    """
    # Without a gradient, too, each is made. Without copies, the backward of what broadcasts has the
    # sums, so these stay; and what reads the copies reads less, by what is not known.
    costs, say = evidence.costs, evidence.wording
    index, _ = forward_operators(evidence)
    repeats = evidence.events.names_where(names.is_repeat)
    operators = index[repeats[evidence.events.name[index]]]
    # Others are inside of an operator, such as those of instance_norm.
    nodes = evidence.nodes_named(lambda name: name.startswith("Repeat"))
    nodes &= is_in(evidence.ownership.join.operator, operators)
    placed = both_ways(evidence, nodes, operators, LEAST_SHARE)
    return finding(
        placed,
        seen=(
            f"{say.per_step(len(operators), 'call')} of repeat and the sums of their backward "
            f"take {say.ms(placed.wall_ns)}. Each call writes every copy to memory, and its "
            "backward reads all of them. What reads the copies reads less without them, which is "
            "not counted and can be more than the copies."
        ),
        nodes=costs.top_nodes(nodes),
        kernels=costs.top_kernels(evidence.work_of(nodes)),
        at_least=True,
        change={"free": costs.removable(None, None, operators=operators)},
    )


# The same again ----------------------------------------------------------------------------------

_TABLES = (Kind.FACTORY, Kind.POINTWISE, Kind.COMPARISON, Kind.JOIN, Kind.CAST, Kind.COPY)
_TABLES_TOO = frozenset(
    ("tril", "triu", "outer", "ger", "einsum", "matmul", "repeat", "meshgrid", "flip", "cumsum")
)
"""What makes tables and masks: nothing that is random, or that depends on what a layer learns."""
_AGAIN, _OPERATORS = 4, 3
"""Modules that compute the same in a step, and its operators."""


@rule(
    "repeated-work",
    least=0.02,
    devices=("cpu", "cuda"),
    title="Layers compute the same tables again",
    remedy=(
        "Compute positions, masks and tables of sines once in a step, before the first layer, "
        "and pass them on; or keep them in a buffer (register_buffer(…, persistent=False))."
    ),
    link=(
        "https://docs.pytorch.org/docs/stable/generated/"
        "torch.nn.Module.html#torch.nn.Module.register_buffer"
    ),
)
def repeated_work(evidence: Evidence) -> Finding | None:
    """Layers make the same tables and masks again.

    **Cause.** Each layer makes the same tensors in its forward: positions, a causal mask, sines of
    rotary embeddings, buckets of distances.

    **Found by** at least three operators in a row without a gradient that begin with `arange`,
    `ones` and the like, or take a cosine; that are neither random nor read by index; and that four
    or more modules run alike. The cost is all but the first of a step, with the Python between,
    from 2% of it. What is computed twice from activations is not seen.

    **Fix.** Make it once in a step and pass it on, or keep it in a buffer (`register_buffer(…,
    persistent=False)`).
    """
    # No gradient flows through them. All but the first of a step are needless.
    costs, say, events = evidence.costs, evidence.wording, evidence.events
    index, times, stretches = _again(evidence)
    none = np.zeros(len(evidence.spans.start), bool)
    placed = both_ways(evidence, none, index, LEAST_SHARE, whole=True, stretches=stretches)
    operators = costs.top_operators(evidence.names_of(index), events.duration[index])
    return finding(
        placed,
        seen=(
            f"{times:,} calls of a step make the same tensors, without a gradient "
            f"({', '.join(operators)}): {say.ms(placed.wall_ns)} for all but the first."
        ),
        operators=operators,
        change={"free": placed.removable},
    )


def _again(evidence: Evidence) -> tuple[Ints, int, Stretches]:
    """Return operators that do what others did in the step before, and how many calls do so.

    Returns:
        Indices into the events, the number of calls, and where these operators are, with the Python
        between them: there the memory of what they no longer need is given back.
    """
    events = evidence.events
    index, span = forward_operators(evidence)
    makers = evidence.ownership.join.operator
    makers = makers[makers >= 0]
    learned = enclosing(events, index, events.thread[makers], events.start[makers])
    works = ~events.names_where(operations.is_view)[events.name[index]]
    index, span = index[works], span[works]
    order = np.lexsort((events.start[index], span))
    index, span = index[order], span[order]
    table = events.names_where(_makes_tables)[events.name[index]]
    table &= ~is_in(index, learned)
    step = evidence.ledger.steps.at(events.start[index])
    in_table = np.flatnonzero(table)
    breaks = (np.diff(in_table) > 1) | (np.diff(span[in_table]) != 0)
    groups: dict[tuple[int, ...], list[Ints]] = {}
    begins = events.names_where(_begins_table)[events.name[index]]
    for piece in np.split(in_table, np.flatnonzero(breaks) + 1):
        if len(piece) >= _OPERATORS and begins[piece].any():
            content = (int(step[piece[0]]), *events.name[index[piece]].tolist())
            groups.setdefault(content, []).append(piece)
    owner = evidence.ownership.owner[span]  # one module called again gets other inputs
    repeated = [
        pieces for pieces in groups.values() if len({owner[piece[0]] for piece in pieces}) >= _AGAIN
    ]
    again = [piece for pieces in repeated for piece in pieces[1:]]
    first, last = np.array([(piece[0], piece[-1]) for piece in again], np.int64).reshape(-1, 2).T
    stretches = Stretches(events.start[index[first]], events.end[index[last]], span[first])
    repeated_places = np.concatenate([index[:0], *again])
    return index[repeated_places], max(map(len, repeated), default=0), stretches


def _makes_tables(operator: str) -> bool:
    operation = operations.of_operator(operator)
    return operations.kind_of(operation) in _TABLES or operation in _TABLES_TOO


def _begins_table(operator: str) -> bool:
    operation = operations.of_operator(operator)
    return operations.kind_of(operation) is Kind.FACTORY or operation == "cos"


# The loss ----------------------------------------------------------------------------------------


_NEAR_ZERO = ("add", "clamp", "clampmin", "maximum")
"""What keeps the logarithm of a probability from being infinite."""
_OR_CROSS_ENTROPY = "torch.nn.functional.cross_entropy on the scores themselves, or "
_STAYS = " The softmax is used again: it stays, and so does its backward."
_OF_A_LAYER = {*operations.VIEWS, Kind.PRODUCT, Kind.CAST}
_PICKED = ("nllloss", "gather", "index")
"""What reads the score of the label."""


@rule(
    "loss-passes",
    tier="stable",
    sources=(
        "timm",
        "scripts",
    ),
    least=0.08,
    devices=("cpu", "cuda"),
    title="The loss reads and writes its scores many times",
    remedy=(
        "Leave positions without a label out before the last layer, if there are some: it is not "
        "computed for them then. Compile the loss, with its cast to fp32: torch.compile reads the "
        "scores once forward and once backward. If memory is short, too, fuse the last layer into "
        "the loss (a fused or chunked cross-entropy)."
    ),
    link="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
)
def loss_passes(evidence: Evidence) -> Finding | None:
    """The loss reads and writes the scores of many classes.

    **Cause.** The scores of a large vocabulary are cast to fp32, and `log_softmax`, `nll_loss` and
    their backward read and write all of them, up to nine times. A softmax whose logarithm is taken
    afterwards does that once more.

    **Found by** the nodes of `log_softmax` with a cast before them, `nll_loss` or an index behind
    them, and their operators, from 8% of the step; or those of a softmax and its logarithm. A few
    scores, for which a softmax takes no longer than to start it, do not count. How many positions
    have no label is not in a trace, so only a [trial](tried.md) gives that remedy a price: the same
    share of the loss and of the last layer. Without recorded shapes, or where the softmax is used
    again, one operator in place of both has no price; else it is a bound.

    **Fix.** Compile the loss with its cast; on one core of a CPU, for 32,000 words, last layer and
    loss took 16% less. Give the last layer only the positions that have a label. Cross-entropy in
    chunks saves memory, and no time on a CPU. A softmax with a logarithm behind it is
    `log_softmax`; with the label's score picked out of that, `cross_entropy`.
    """
    costs, say = evidence.costs, evidence.wording
    operations_of = [operations.of_node(name) for name in evidence.spans.node_names]
    nodes, written = np.zeros((2, len(evidence.spans.start)), bool)
    is_known, picks = True, False
    for nodes_of_pass in passes_of_nodes(evidence):
        steps = [operations_of[node] for node in evidence.spans.node[nodes_of_pass].tolist()]
        for place, last in _logarithms(steps):
            if _is_as_short_as_its_start(evidence, int(nodes_of_pass[place])):
                continue
            is_one = _is_one(evidence, nodes_of_pass[place : last + 1]) if place < last else True
            if is_one is False or (is_one is None and _adds_two(steps, place, last)):
                continue
            is_known &= bool(is_one)
            before = place - 1
            while before >= 0 and operations.kind_of(steps[before]) in operations.VIEWS:
                before -= 1
            nodes[nodes_of_pass[place : last + 1]] = True
            written[nodes_of_pass[place + 1 : last + 1]] = True
            nodes[nodes_of_pass[before]] |= (
                before >= 0 and operations.kind_of(steps[before]) is Kind.CAST
            )
            picked = last + 1
            while picked < len(steps) and operations.kind_of(steps[picked]) in operations.VIEWS:
                picked += 1
            if picked < len(steps) and steps[picked] in _PICKED:
                nodes[nodes_of_pass[picked]] = True
                picks |= place < last
    if not nodes.any():
        return None
    makers = evidence.ownership.join.operator[nodes]
    placed = both_ways(evidence, nodes, makers, LEAST_SHARE)
    passes = (
        f"{', '.join(costs.top_nodes(nodes))}: {say.ms(placed.wall_ns)} forward and backward, "
        "each of which reads or writes the scores of all classes, mostly in fp32."
    )
    if written.any():
        stays = bool((written & adds_to_others(evidence)).any())
        return finding(
            placed,
            title="The loss takes the logarithm of a softmax",
            seen=f"{passes} {say.ms(costs.of_spans(written))} of it are the backward of "
            "what comes between the softmax and its logarithm, and of that.",
            remedy=(
                f"{'Use' if is_known else 'If the logarithm is of the softmax, use'} "
                f"{_OR_CROSS_ENTROPY if picks else ''}log_softmax in place of "
                f"{'its logarithm' if stays else 'the softmax and its logarithm'}: one operator "
                "forward and one backward, and no small number is needed against the logarithm "
                f"of 0.{_STAYS if stays else ''}"
            ),
            link="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional."
            f"{'cross_entropy' if picks else 'log_softmax'}.html",
            form="log_softmax",
            priced=is_known and not stays,
            nodes=costs.top_nodes(nodes),
            kernels=costs.top_kernels(evidence.work_of(nodes)),
            at_best=True,  # log_softmax and its backward take longer than softmax
            change={"free": evidence.with_forward(written)},
        )
    return finding(
        replace(placed, removable=None),  # some of the passes stay
        seen=passes,
        nodes=costs.top_nodes(nodes),
        kernels=costs.top_kernels(evidence.work_of(nodes)),
    )


def _is_as_short_as_its_start(evidence: Evidence, node: int) -> bool:
    """Whether the operator that made a node computes no longer than it takes to start one."""
    maker = int(evidence.ownership.join.operator[node])
    return maker >= 0 and bool(forward_of(evidence)[node] <= _SMALL)


def _logarithms(steps: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield where a softmax is, and where its logarithm, which can be one operation.

    Args:
        steps: operations in the order of the forward.
    """
    for index, step in enumerate(steps):
        if step == "logsoftmax":
            yield index, index
        elif step == "softmax":
            last = index + 1
            while last < len(steps) and (
                steps[last] in _NEAR_ZERO or operations.kind_of(steps[last]) in operations.VIEWS
            ):
                last += 1
            if last < len(steps) and steps[last] == "log":
                yield index, last


def _is_one(evidence: Evidence, nodes: Ints) -> bool | None:
    """Return whether each node has what the one before has made, by the sizes of their inputs.

    A second input of many numbers is another tensor, such as another softmax.

    Args:
        nodes: of a softmax, of what comes after it, and of its logarithm.

    Returns:
        ``None`` where the sizes are not recorded.
    """
    operators = evidence.ownership.join.operator[nodes].tolist()
    shapes = [shapes_of(evidence, operator) for operator in operators]
    if not all(shapes):
        return None
    sizes = [
        [size for sizes_of_input in inputs if (size := prod(sizes_of_input)) > 1]
        for inputs in shapes
    ]
    return all(size_list == sizes[0][:1] for size_list in sizes)


def _adds_two(steps: Sequence[str], place: int, last: int) -> bool:
    """Return whether a softmax is added to another one that only a layer is between."""
    before = place - 1
    while before >= 0 and operations.kind_of(steps[before]) in _OF_A_LAYER:
        before -= 1
    is_second = before >= 0 and steps[before] == "softmax"
    return is_second and not {"add", "maximum"}.isdisjoint(steps[place:last])
