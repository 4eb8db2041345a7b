"""Rules about parameters that are sharded over the ranks: what their hooks cost the host."""

from __future__ import annotations

import msgspec
import numpy as np

from backspot.analysis.accounting.amounts import summed, summed_by_step
from backspot.analysis.attribution.launches import Precedence
from backspot.analysis.attribution.ownership import Special
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import FAR, NOTHING, first_started, grouped, take
from backspot.results.findings import Finding
from backspot.trace import Category, names
from backspot.trace.events import Ints, Mask

_FEW = 8
"""Fewer sharded modules than this are not worth another wrapping."""
_MUCH = 1000
"""A forward that takes this many times less launches nothing to speak of."""


@rule(
    "sharded-small-modules",
    needs=("labels",),
    least=0.05,
    title="Modules are sharded one by one that are too small for it",
    remedy=(
        "Shard blocks, not their layers: call fully_shard(block) for each block of the model, and "
        "for nothing within it. Small blocks that follow each other can be sharded together: "
        "fully_shard([first, second])."
    ),
    link="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
)
def sharded_small_modules(evidence: Evidence) -> Finding | None:
    """FSDP2's hooks take the host longer than the modules that they are around.

    **Cause.** Each module that `fully_shard` is called for gathers its parameters before its
    forward and its backward, and reduces its gradients after it. These hooks are Python, and take
    the host as long for a LayerNorm as for a whole block.

    **Found by** the marks of FSDP2's hooks, for 8 modules or more whose hooks take longer than
    their forward, from 5% of the step. The cost is the time of the hooks in which the GPU computes
    nothing; without a GPU, that in which no operator runs and no exchange runs beside them. Where
    exchanges are slow, [exposed-communication](#exposed-communication) can name the same time.
    FSDP1 does not say in a trace which module its marks are of.

    **Fix.** Call `fully_shard` for whole blocks, and for several small ones at once:
    `fully_shard([first, second])`. Larger groups need more memory.
    """
    hooks = _hooks(evidence)
    if not len(hooks.index):
        return None
    events, costs, say = evidence.events, evidence.costs, evidence.wording
    start, count = events.start[hooks.index], len(hooks.owner)
    lost, recorded = _lost(evidence, hooks.index)
    forward = _forward(evidence, hooks)
    called = _by_step(evidence, hooks, hooks.before.astype(np.int64)) > 0
    # What else the machine does only adds to a time: the best step is the least disturbed one.
    best, computed = (
        np.where(called, starts, FAR).min(axis=1, initial=FAR)
        for starts in (_by_step(evidence, hooks, recorded), _by_step(evidence, hooks, forward))
    )
    small = (best > computed) & called.any(axis=1) & (hooks.owner >= len(Special))
    if small.sum() < _FEW:
        return None
    is_small = small[hooks.unit]
    placed = costs.places_at(
        hooks.owner[hooks.unit[is_small]],
        start[is_small],
        lost[is_small],
        hooks.before[is_small].astype(np.int64),
    )
    meanwhile = ", and the GPU computes nothing" if evidence.report.has_gpu else ""
    ratio = best[small].sum() / max(1, computed[small].sum())
    compared = f"That is {ratio:,.1f} times what their forward takes. " if ratio < _MUCH else ""
    return finding(
        placed,
        seen=(
            f"For {say.ms(placed.wall_ns)} of each step, {say.share(placed.wall_ns)}, the host "
            f"runs FSDP's hooks of {int(small.sum()):,} modules{meanwhile}. {compared}In all, "
            f"{count:,} modules are sharded by themselves."
        ),
    )


class _Hooks(msgspec.Struct, frozen=True):
    """FSDP2's hooks in the steps; one entry for each of the outermost, by thread and start.

    Attributes:
        index: indices into the events.
        unit: which of the sharded modules each is of.
        before: whether it runs before the forward.
        after: whether it runs after the forward.
        owner: the owner of each sharded module, ``NOTHING`` where no call of it was recorded.
    """

    index: Ints
    unit: Ints
    before: Mask
    after: Mask
    owner: Ints


def _hooks(evidence: Evidence) -> _Hooks:
    """Find the hooks, and the modules that they are of.

    FSDP2 names modules from the root that it shards, which is not always the model that has labels:
    the call around the hook before the forward says which module has that name.
    """
    events = evidence.events
    index = events.chosen(events.names_where(_is_hook), Category.ANNOTATION)
    index = index[evidence.ledger.steps.at(events.start[index]) >= 0]
    outermost = [index[:0]]
    for _, members in grouped(events.thread, index):
        line = first_started(events.start[members], events.end[members], members)
        outermost.append(line.values[line.values >= 0])
    index = np.concatenate(outermost)
    stages = [names.sharding_hook(events.names[name]) or ("", "") for name in events.name[index]]
    _, unit = np.unique(np.array([path for _, path in stages], str), return_inverse=True)
    before, after = (
        np.array([stage == wanted for stage, _ in stages], bool)
        for wanted in (names.BEFORE_FORWARD, names.AFTER_FORWARD)
    )
    owner = np.full(unit.max(initial=NOTHING) + 1, NOTHING, np.int64)
    around = take(evidence.ownership.owner, evidence.spans.of(events, index), NOTHING)
    owner[unit[before]] = around[before]
    return _Hooks(index, unit, before, after, owner)


def _is_hook(name: str) -> bool:
    return names.sharding_hook(name) is not None


def _by_step(evidence: Evidence, hooks: _Hooks, amount: Ints) -> Ints:
    """Sum what each hook has by its module and step."""
    step = evidence.ledger.steps.at(evidence.events.start[hooks.index])
    steps = evidence.report.steps
    return summed_by_step(hooks.unit, step, amount, len(hooks.owner), steps)


def _lost(evidence: Evidence, hooks: Ints) -> tuple[Ints, Ints]:
    """Return for how long each of these hooks has the host alone at work: in a step, and recorded.

    With a GPU, exchanges that run beside a hook mostly wait for the hooks of other ranks. Without
    one, operators in a hook copy parameters, and threads of gloo exchange them: that is not what
    the hook itself costs.
    """
    events, costs, work = evidence.events, evidence.costs, evidence.work
    start, end = events.start[hooks], events.end[hooks]
    exchanges = work.precedence == Precedence.COMMUNICATION
    if evidence.report.has_gpu:
        begin, finish = work.start[~exchanges], work.end[~exchanges]
    else:
        operators = events.chosen(events.names_where(names.is_operator), Category.OPERATOR)
        begin = np.concatenate([events.start[operators], work.start[exchanges]])
        finish = np.concatenate([events.end[operators], work.end[exchanges]])
    windows = first_started(start, end, np.arange(len(start)))
    line = first_started(begin, finish, np.zeros(len(begin), np.int64)).cut(windows.edges)
    number = windows.over(line.edges[:-1])
    host_alone = np.flatnonzero((number >= 0) & (line.values[:-1] < 0))
    low, high = line.edges[host_alone], line.edges[host_alone + 1]
    count = len(hooks)
    return summed(number[host_alone], costs.elapsed(low, high), count), summed(
        number[host_alone], high - low, count
    )


def _forward(evidence: Evidence, hooks: _Hooks) -> Ints:
    """Return how long the forward after each hook takes, 0 for hooks that are not before one.

    It is the time of its kernels, or of the host where the trace has no device work.
    """
    events, work = evidence.events, evidence.work
    forward_ns = np.zeros(len(hooks.index), np.int64)
    thread = events.thread[hooks.index]
    order = np.lexsort((events.start[hooks.index], thread, hooks.unit))
    order = order[(hooks.before | hooks.after)[order]]
    first, second = order[:-1], order[1:]
    pair = hooks.before[first] & hooks.after[second] & (hooks.unit[first] == hooks.unit[second])
    pair &= thread[first] == thread[second]
    first, second = first[pair], second[pair]
    start, end = events.end[hooks.index[first]], events.start[hooks.index[second]]
    if not evidence.report.has_gpu:
        forward_ns[first] = end - start
        return forward_ns
    computes = np.flatnonzero((work.precedence == Precedence.COMPUTE) & (work.launch >= 0))
    for number, members in grouped(thread[first]):
        launched = computes[work.thread[computes] == number]
        launched = launched[np.argsort(work.launch[launched], kind="stable")]
        total = np.append(0, np.cumsum(evidence.costs.device_ns[launched]))
        low, high = (
            np.searchsorted(work.launch[launched], moments[members]) for moments in (start, end)
        )
        forward_ns[first[members]] = total[high] - total[low]
    return forward_ns
