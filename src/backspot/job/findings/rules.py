"""The rules over ranks. This is how to write one.

A rule is a pure function of the evidence that returns any number of findings::

    @rule("slow-network")
    def slow_network(evidence: Evidence) -> Iterator[JobFinding]:
        ...

1. Compare a rank with the other ranks, not with a fixed time. ``scatter.py`` says from which
   difference a claim is made. What concerns all ranks has ``rank=None``.
2. Return nothing where a little is normal, and where the summaries lack what the rule needs.
   ``evidence.waits`` is empty if any wait may be missing: then a wait would pass for a transfer.
3. ``title`` says what goes on, ``seen`` what was seen, with times, and ``remedy`` one thing to do.
   ``cost_ns`` is what the job loses at most, or with ``at_least`` what it loses at least.
   ``find_all`` fills in the name of the rule.
4. Nothing lists the rules. A rule that needs the other findings is a ``fallback_rule``.
5. The docstring is the page of the rule, of which ``python docs/make_findings.py`` makes
   ``docs/findings.md``. Tests demand a planted case that the rule finds, and its silence on even
   ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median_low

import numpy as np

from backspot.formatting import counted, duration, labelled, percent, visible
from backspot.job.findings import Evidence, fallback_rule, rule
from backspot.job.kernels import Difference, KernelsOfRanks, LongerKernel
from backspot.job.modules import PARTS, Claim
from backspot.job.noise import Limits
from backspot.job.scatter import (
    MANY,
    Others,
    in_middle_steps,
    is_clear,
    least,
    middle,
    reach,
    shift_of,
)
from backspot.job.summary import COLLECTING, WAITING, Purpose
from backspot.results.job import ROLES, JobFinding, Role
from backspot.trace.names import short_kernel_names

_found = partial(JobFinding, rule="", rank=None, path="", title="", remedy="")
"""``find_all`` fills in what the head of the rule says."""
_EXPOSED = 0.1
"""Share of the step from which exposed transfers are worth a claim."""
_GATHERS = (
    "Gather parameters earlier (FSDP2: set_modules_to_forward_prefetch and "
    "set_modules_to_backward_prefetch), or in larger groups of layers."
)
_REDUCES = (
    "Let the exchange run beside the backward: larger or smaller buckets, fewer bytes (bf16), or "
    "fewer exchanges (gradient accumulation with no_sync)."
)
_OF_ACTIVATIONS = (
    "The module needs what the others send, so nothing can run beside: use fewer ranks for it, on "
    "one host, or send fewer bytes (bf16)."
)
_OF_ROLE: dict[Role, str] = {
    "tensor": (
        "The next layer needs the activations, so nothing can run beside: split layers over fewer "
        "ranks, on one host, or add sequence parallelism."
    ),
    "expert": (
        "The experts need their tokens, so nothing can run beside: spread experts over fewer ranks,"
        " on one host, or send fewer bytes (bf16, fewer experts a token)."
    ),
}


@fallback_rule("exposed-transfer", tier="stable")
def exposed_transfer(evidence: Evidence, findings: Sequence[JobFinding]) -> Iterator[JobFinding]:
    """Data moves between ranks while nothing else runs.

    **Cause.** Data moves between ranks while nothing else runs, in at least 10% of the step on half
    of the ranks, and no rank is to blame.

    **Found by** the time of collectives that nothing hides, without waits for other ranks and what
    other rules explain.

    **Fix.** Gradients: other sizes of `bucket_cap_mb`, fewer bytes (bf16), or fewer exchanges
    (`no_sync()` while gradients accumulate). Parameters of FSDP2: gather earlier, as for
    [late-gather](#late-gather), or in larger groups of layers.
    """
    # Waits that nothing hides count as exposed, and others do not. So what all waits, and twice the
    # uncertainty of the clock, leave of the exposed time is transfer for certain.
    certain = median_low(
        cost.exposed_ns - cost.stalled_ns - cost.wait_ns - 2 * cost.uncertainty_ns
        for cost in evidence.costs
    )
    certain -= sum(finding.cost_ns for finding in findings if finding.kind == "transfer")
    if not evidence.waits or certain < _EXPOSED * evidence.step_ns:
        return
    sums: dict[tuple[str, Purpose, Role], int] = {}
    for group_waits in evidence.waits:
        role = evidence.roles[group_waits.group.name, group_waits.group.all_ranks]
        for column, call in enumerate(group_waits.group.call):
            key = call.kind, call.purpose, role
            sums[key] = sums.get(key, 0) + int(np.median(group_waits.transfer[:, column]))
    kind, purpose, role = max(sorted(sums), key=lambda key: sums[key])
    data = "activations" if purpose == "attention" else purpose
    if data == "activations":
        remedy = _OF_ROLE.get(role, _OF_ACTIVATIONS)
    else:
        gathers = purpose == "parameters" or (not purpose and "gather" in kind)
        remedy = _GATHERS if gathers else _REDUCES
    within = f" ({ROLES[role]})" if role in _OF_ROLE else f" of {data}" if data else ""
    yield _found(
        kind="transfer",
        title=f"Transfers hold up all ranks, mostly {kind}{within}",
        seen=(
            f"In at least {duration(certain)} of a step, data moves between the ranks "
            "and nothing else runs, on the typical rank, waits for other ranks left out."
        ),
        remedy=remedy,
        cost_ns=certain,
        at_least=True,
    )


@rule(
    "late-gather",
    tier="stable",
    remedy=(
        "Prefetch them: set_modules_to_forward_prefetch and "
        "set_modules_to_backward_prefetch of the FSDP2 module that runs before."
    ),
)
def late_gather(evidence: Evidence) -> Iterator[JobFinding]:
    """Parameters are gathered when they are needed already.

    **Cause.** FSDP2 gathers the parameters of a module when its kernels need them, and the device
    waits.

    **Found by** gathers that nothing hides and that could have begun when the gather before was
    done.

    **Fix.** `set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch` on the FSDP2
    module that runs before.
    """
    # A gather could have begun as soon as the one before it was done. The first one of a step needs
    # the parameters that the optimizer has just changed.
    gathers = evidence.transfers("parameters")
    late = np.minimum(gathers.cost, gathers.idle_before)
    cost = gathers.typical_ns(late)
    if cost < evidence.worth_ns:
        return
    by_module: dict[str, int] = {}
    for call, time in zip(gathers.calls, late.tolist(), strict=True):
        by_module[call.module] = by_module.get(call.module, 0) + time
    worst = max(sorted(by_module), key=lambda module: by_module[module])
    concerned = sum(time > 0 for time in by_module.values())
    classes = {module.path: module.class_name for module in evidence.table.modules}
    name = visible(labelled(worst or "the root", classes.get(worst, "")))
    yield _found(
        kind="transfer",
        path=worst,
        title=f"Parameters are gathered too late, most of all those of {name}",
        seen=(
            f"For {duration(cost)} of a step, parameters of {counted(concerned, 'module')} are "
            "gathered and nothing else runs, waits for other ranks left out; "
            f"{duration(by_module[worst] // evidence.steps)} of that for {name}. The gathers "
            "could have begun earlier."
        ),
        cost_ns=cost,
    )


_NORMAL = 0.1
"""Share of the step that a pipeline with enough microbatches may lose."""
_LONGER = 0.1
"""Share of its own time by which the longest stage takes longer than the typical one."""
_STARVED = 0.7
"""Share of the time in which a stage does not wait, below which its kernels leave the GPU idle."""
_EQUAL = "All stages have about the same work."


@rule("pipeline-bubble", tier="stable")
def pipeline_bubble(evidence: Evidence) -> Iterator[JobFinding]:
    """The stages of a pipeline wait for each other.

    **Cause.** The stages of a pipeline wait for each other in at least 10% of the step.

    **Found by** the time in which the typical rank computes nothing and waits for a transfer from
    another stage. The stage that waits least takes longest. Its price is what equal work on all
    stages gains, all ranks replayed.

    **Fix.** If one stage has more work, move layers to others. If the host limits the stages, use
    fewer, larger microbatches, or `torch.compile`. Otherwise use more microbatches, or several
    smaller stages on each rank (`ScheduleInterleaved1F1B`).
    """
    # The stage that stalls least takes longest. If it takes much longer than the others, these wait
    # for it, and more microbatches do not help. On GPUs it must also have more work than the
    # others: kernels. Otherwise its host is slow, as it is when microbatches are very small.
    stalled = evidence.stalled
    if not (stalled.any(axis=1)).sum() > 1:
        return
    ranks = list(evidence.ranks)
    of_rank = evidence.typical.mean(stalled)
    cost = int(np.median(of_rank))
    if cost < _NORMAL * evidence.step_ns:
        return
    busy = evidence.step_ns - of_rank
    longest = int(busy.argmax())
    usual = int(np.median(np.delete(busy, longest)))
    kernels = evidence.typical.mean(evidence.kernels)
    unequal = all(
        of_stage[longest] > (1 + _LONGER) * np.median(np.delete(of_stage, longest))
        for of_stage in (busy, kernels)
        if of_stage.any()
    )
    starved = bool(kernels.any()) and np.median(kernels) < _STARVED * np.median(busy)
    slowest = (
        f"Rank {ranks[longest]} is busy for {duration(int(busy[longest]))}, the others for "
        f"{duration(usual)}."
    )
    shares = (
        f"Their kernels run for {duration(int(np.median(kernels)))} in the "
        f"{duration(int(np.median(busy)))} in which they do not wait: the host limits the stages."
    )
    yield _found(
        kind="pipeline",
        rank=ranks[longest] if unequal else None,
        title=(
            f"The pipeline waits for the stage of rank {ranks[longest]}"
            if unequal
            else "The stages of the pipeline wait for each other"
        ),
        seen=(
            f"For {duration(cost)} of a step ({percent(cost / evidence.step_ns)}) the typical "
            "rank computes nothing while it waits for another stage. "
            f"{slowest if unequal else shares if starved else _EQUAL}"
        ),
        remedy=(
            "Move layers from this stage to others."
            if unequal
            else "Use fewer, larger microbatches, or make the host faster (torch.compile, "
            "CUDA graphs)."
            if starved
            else "Divide the batch into more microbatches, or give each rank several smaller "
            "stages (ScheduleInterleaved1F1B)."
        ),
        cost_ns=cost,
    )


@rule(
    "slow-data",
    tier="stable",
    remedy="Compare the loader's workers, the storage and the samples of this rank.",
)
def slow_data(evidence: Evidence) -> Iterator[JobFinding]:
    """A rank waits longer for its batches.

    **Cause.** One rank waits longer for its batches, and the others wait for it.

    **Found by** the `data` phase of each rank, as in [waiting-for-data](#waiting-for-data).

    **Fix.** Compare the DataLoader's workers, the storage and the samples of this rank. More
    workers and `prefetch_factor` help if single samples are slow.
    """
    # The later stages of a pipeline wait for other stages, not for data.
    data = np.maximum(evidence.phase("data") - evidence.stalled, 0)
    others = Others(data)
    worth = float(least(middle(data), len(data), evidence.step_ns))
    for now, rank in zip(data, evidence.ranks, strict=True):
        usual_ns = others.of(now)
        if is_clear(usual_ns, now, None, Limits.of_whole(worth)):
            usual, taken_ns = int(middle(usual_ns)), int(middle(now))
            yield _found(
                kind="data",
                rank=rank,
                title=f"Rank {rank} waits longer for its data",
                seen=(
                    f"Its steps wait {duration(taken_ns)} for the next batch, those of the other "
                    f"ranks {duration(usual)}."
                ),
                cost_ns=taken_ns - usual,
            )


_CLOCK, _CLOCK_OF_MANY = 0.05, 0.01
"""Share by which the forward kernels of a slower GPU take longer, of few ranks and of many."""


@rule(
    "slow-gpu",
    tier="stable",
    remedy=(
        "Compare the shapes of its batches first. If they are alike, check the clock, the "
        "temperature and the power limit of this GPU (nvidia-smi)."
    ),
)
def slow_gpu(evidence: Evidence) -> Iterator[JobFinding]:
    """The kernels of all modules take longer on one rank.

    **Cause.** The kernels of all modules take longer on one rank: it has larger batches, or a
    slower GPU.

    **Found by** forward kernels of all modules together that take at least 5% longer in each step,
    where that costs the job something.

    **Fix.** Compare the batches' shapes. If they are alike, look at clock, temperature and power
    limit with `nvidia-smi -q -d CLOCK,TEMPERATURE,POWER`.
    """
    # Kernels of the backward run beside collectives, which slows them down on ranks that wait. With
    # FSDP those of the forward do, too: then the rank costs nothing.
    table, forward = evidence.table, PARTS.index("forward_gpu")
    times = table.times[:, :, forward]
    total = middle(times.sum(axis=1))
    noise = reach(total, len(total))
    slow: dict[int, tuple[int, int]] = {}
    for row, rank in enumerate(table.ranks):
        others_ns, now = table.others(rank)[:, forward], times[row]
        usual, taken_ns = (int(middle(kernels_ns.sum(axis=0))) for kernels_ns in (others_ns, now))
        if not usual:
            continue
        clock = _CLOCK if noise is None else max(_CLOCK_OF_MANY, float(noise) / usual)
        if taken_ns <= (1 + clock) * usual:  # most ranks end here
            continue
        shifts = [shift_of(others_ns[:, [step]], now[:, [step]]) for step in range(evidence.steps)]
        if len(shifts) > 1 and all(
            shift and math.expm1(shift.common) > max(clock, 2 * shift.scatter)
            for shift in (shift_of(others_ns, now), *shifts)
        ):
            slow[rank] = taken_ns, usual
    costly = evidence.costly({rank: taken_ns - usual for rank, (taken_ns, usual) in slow.items()})
    for rank in sorted(costly):
        taken_ns, usual = slow[rank]
        yield _found(
            kind="gpu",
            rank=rank,
            title=f"All forward kernels take longer on rank {rank}",
            seen=(
                f"Those of all modules together take {duration(taken_ns)} of a step there, and "
                f"{duration(usual)} on the other ranks ({percent(taken_ns / usual - 1)} more)."
            ),
            cost_ns=taken_ns - usual,
        )


_MOST = 0.5
"""Share of the difference from which one operator, or one line, is what takes longer."""
_BESIDE = {
    WAITING: (
        "Read values of the GPU (.item(), print, .cpu()) in fewer steps, and on all ranks alike."
    ),
    COLLECTING: (
        "Call gc.collect() and then gc.freeze() before the first step, and collect on all ranks in "
        "the same step."
    ),
}
"""What to do about places that are no part of the training loop."""


@rule("slow-loop", tier="stable")
def slow_loop(evidence: Evidence) -> Iterator[JobFinding]:
    """The host of a rank takes longer outside of modules.

    **Cause.** The host of one rank takes longer outside of modules, the loader and collectives: in
    the training loop, the loss, a hook or the optimizer; or, in modules too, because it waits for
    the GPU or Python's garbage collector runs.

    **Found by** the host's time in each place of the loop, the idle time that follows waits, and
    the pauses. The finding says how much is Python, or which operator takes longer; with stacks,
    which line.

    **Fix.** Look for what only this rank does there: logging, saving, a metric, a wait for a file
    or a lock. Do it less often, or in a thread. A busy core makes Python slower, too.
    """
    for claim in evidence.claims:
        if claim.module.is_module:
            continue
        place, longer = claim.module.path.strip("()"), claim.taken_ns - claim.usual_ns
        doing, most, line = _longest(evidence, claim)
        beside = _BESIDE.get(claim.module.path, "")
        place_text = "" if beside else ", in no module, collective or loader"
        evidence_text = (
            f"It takes {duration(claim.taken_ns)} of a step there, and {duration(claim.usual_ns)} "
            f"on the other ranks{place_text}."
        )
        if line and most >= _MOST * longer:
            evidence_text += f" {duration(most)} of the difference are in {visible(doing)}."
            place = f"in {visible(doing)}, {'' if beside else 'in no module, '}{place}"
        if beside:
            remedy = beside
        elif most < _MOST * longer:
            remedy = "Look for what only this rank does there, or for a busy core."
        elif doing and not line:
            evidence_text += f" {duration(most)} of the difference are in {visible(doing)}."
            remedy = "Look for what this rank alone computes there, or computes on more data."
        else:
            if not line:
                evidence_text += (
                    f" {duration(most)} of the difference are Python: no operator runs."
                )
            remedy = (
                "Look for what only this rank does there: logging, saving, a metric, a wait for a "
                "file or a lock, or a busy core."
            )
        yield _found(
            kind="host",
            rank=claim.rank,
            title=f"Rank {claim.rank} takes longer {place}",
            seen=evidence_text,
            remedy=remedy,
            cost_ns=longer,
        )


def _longest(evidence: Evidence, claim: Claim) -> tuple[str, int, bool]:
    """Return what takes longer there most, a line if that is known, by how much, and whether."""
    times: dict[tuple[str, bool], dict[int, int]] = {}
    for rank, summary in evidence.ranks.items():
        there = [outside for outside in summary.outside if outside.place == claim.module.path]
        if not there:
            continue
        by_step = np.array([outside.host for outside in there])
        if rank != claim.rank:  # all that the other hosts do there, whatever hides it
            by_step += [np.add(outside.hidden, outside.beside or 0) for outside in there]
        by_step = by_step[:, list(evidence.at[rank])]
        # In the steps that the claim is made of: what ran in another one is no cause of it.
        taken = in_middle_steps(by_step, by_step.sum(axis=0)).tolist()
        for outside, taken_ns in zip(there, taken, strict=True):
            by_rank = times.setdefault((outside.line or outside.doing, bool(outside.line)), {})
            by_rank[rank] = by_rank.get(rank, 0) + taken_ns
    others = [rank for rank in evidence.ranks if rank != claim.rank]
    longer = {
        doing: by_rank.get(claim.rank, 0)
        - int(np.median([by_rank.get(rank, 0) for rank in others]))
        for doing, by_rank in times.items()
    }
    doing = max(sorted(longer), key=lambda key: longer[key])
    return doing[0], longer[doing], doing[1]


@rule("slow-module", tier="stable")
def slow_module(evidence: Evidence) -> Iterator[JobFinding]:
    """A module takes longer on one rank.

    **Cause.** One rank takes longer in a module than the others, which wait for it in the next
    collective.

    **Found by** the time of each module on each rank: kernels, and what the host does in it. What
    all modules of a rank have in common is not claimed. The finding names the kernels that make
    most of the difference.

    **Fix.** The finding says which takes longer. Kernels that run on one rank alone: look for code
    that only this rank runs, such as a debug check. The same kernels for longer, or other kernels
    in their place: compare the shapes and types of the module's inputs (sequence lengths, experts,
    shards) and the GPU's clock. Host: look for what only this rank does there, such as I/O, logging
    or a wait.
    """
    kernels = KernelsOfRanks(evidence.ranks, evidence.at)
    for claim in evidence.claims:
        if claim.module.is_module:
            yield _finding(claim, evidence.table.has_gpu, _difference(evidence, kernels, claim))


def _difference(evidence: Evidence, kernels: KernelsOfRanks, claim: Claim) -> Difference | None:
    direction, _, kind = claim.part.partition("_")
    if kind != "gpu":
        return None
    peers = evidence.table.peers_of(claim.rank, claim.module.path)
    longer_ns = claim.taken_ns - claim.usual_ns
    return kernels.difference(
        claim.module.path, direction == "backward", claim.rank, peers, longer_ns
    )


_ALONE = (
    "Look for code that only this rank runs in the module: a check, a log, a condition on the rank "
    "or on its data"
)
_REPLACED = (
    "Compare the shapes and types of the module's inputs on both ranks, which choose its kernels: "
    "unequal sequence lengths, experts or shards"
)
_SAME = (
    "Compare the shapes of the module's inputs on both ranks: unequal sequence lengths, experts or "
    "shards; if they are alike, the clock of this GPU (nvidia-smi)"
)
_EITHER = (
    "Look for code that only this rank runs in the module (a check, a log, a condition on the rank "
    "or on its data), and compare the shapes of the module's inputs on both ranks"
)


def _of_kernels(difference: Difference) -> tuple[str, str]:
    """Return what is said of the kernels that differ, and what to do."""
    short = {name: visible(called) for name, called in short_kernel_names(difference.known).items()}
    said = [_of_kernel(kernel, short[kernel.name]) for kernel in difference.longer]
    if difference.replaced:
        how = "instead" if difference.is_instead else "instead, or for longer"
        said.append(f"the other ranks run {', '.join(short[n] for n in difference.replaced)} {how}")
    if difference.replaced:
        remedy = _REPLACED
    elif all(kernel.is_alone for kernel in difference.longer):
        remedy = _ALONE
    elif all(kernel.is_alone is False and kernel.usual_ns for kernel in difference.longer):
        remedy = _SAME
    else:
        remedy = _EITHER
    return f" {'; '.join(said)}.", remedy


def _of_kernel(kernel: LongerKernel, name: str) -> str:
    taken, usual = duration(kernel.taken_ns), duration(kernel.usual_ns)
    if kernel.is_alone:
        return f"{name} takes {taken} of it, on this rank alone"
    if not kernel.usual_ns:
        return f"{name} takes {taken} there, and nothing on most of the other ranks"
    most = f"at most {usual}" if kernel.is_bound else usual
    known = ", if they run it" if kernel.is_alone is None else ""
    return f"{name} takes {taken} there, and {most} on the other ranks{known}"


def _finding(claim: Claim, has_gpu: bool, kernels: Difference | None) -> JobFinding:
    direction, _, kind = claim.part.partition("_")
    on_host = kind == "host"
    on_gpu = ", where the host holds up the GPU" if on_host and has_gpu else ""
    look = (
        "Look for what only this rank does in the module on the host: I/O, logging, a wait, a busy "
        "core"
    )
    compare = (
        "Compare the shapes and the kernels of the module on both ranks: unequal sequence lengths, "
        "experts or shards"
    )
    of_kernels, compare = _of_kernels(kernels) if kernels else ("", compare)
    name = visible(claim.module.label)
    return _found(
        kind="host" if on_host else "gpu",
        rank=claim.rank,
        path=claim.module.path,
        title=f"{name} is slow on rank {claim.rank}",
        seen=(
            f"It takes {duration(claim.taken_ns)} of a step there, and {duration(claim.usual_ns)} "
            f"on the other ranks. The difference is in its {direction}"
            f"{on_gpu if on_host else ', in kernels'}.{of_kernels}"
        ),
        remedy=(f"{look if on_host else compare}{'' if has_gpu else '; or for unequal work'}."),
        cost_ns=claim.taken_ns - claim.usual_ns,
    )


_SMALL = 1_000_000
"""Bytes below which starting an exchange takes longer than moving its bytes; the default bucket of
DistributedDataParallel has 26 times as many."""
_MANY = 8
"""Small exchanges that a step may have: first, last and odd buckets."""


@rule(
    "small-buckets",
    tier="stable",
    title="Gradients are exchanged in many small pieces",
)
def small_buckets(evidence: Evidence) -> Iterator[JobFinding]:
    """Gradients are exchanged in many small pieces.

    **Cause.** Starting an exchange takes longer than moving less than 1 MB, so many small exchanges
    cost more than few large ones.

    **Found by** more than eight exchanges of gradients of less than 1 MB in a step, half of all or
    more, for which the device waits. This needs NCCL, whose kernels say how many bytes they move.

    **Fix.** With DistributedDataParallel, larger buckets (`bucket_cap_mb`, 25 by default). With
    FSDP2, larger groups of layers for `fully_shard`.
    """
    # What else each exchange costs, such as the copies into its bucket, is not counted.
    exchanges = evidence.transfers("gradients")
    small = (exchanges.bytes >= 0) & (exchanges.bytes < _SMALL)
    number = int(small.sum()) / evidence.steps
    cost, launching = (
        exchanges.typical_ns(np.where(small, time, 0))
        for time in (exchanges.cost + exchanges.launching, exchanges.launching)
    )
    if number <= _MANY or 2 * small.sum() < len(small) or cost < evidence.worth_ns:
        return
    sharded = any(call.kind == "reduce_scatter" for call in exchanges.calls)
    size = int(np.median(exchanges.bytes[small]))
    yield _found(
        kind="transfer",
        seen=(
            f"A step has {counted(round(number), 'exchange')} of less than 1 MB, half of them "
            f"of {size / 1000:,.0f} kB or less. For {duration(cost)} of the step, the host "
            "launches one of them or one of them runs, and the device does nothing else, "
            f"waits for other ranks left out; {duration(launching)} of that are launches."
        ),
        remedy=(
            "Give fully_shard larger groups of layers, so that each exchange has more bytes."
            if sharded
            else "Use larger buckets: DistributedDataParallel(bucket_cap_mb=…), 25 by default."
        ),
        cost_ns=cost,
        at_least=True,
    )


@rule(
    "unequal-work",
    tier="stable",
    remedy=(
        "Balance the work: sequences of similar length in each batch, or the routing "
        "of experts (auxiliary loss, capacity)."
    ),
)
def unequal_work(evidence: Evidence) -> Iterator[JobFinding]:
    """A module has unequal work on many ranks.

    **Cause.** In a job of eight ranks or more, the slowest rank takes much longer in a module than
    the typical one, but it is not always the same rank.

    **Found by** the forward kernels of a module on the slowest and on the typical rank, in each
    step.

    **Fix.** Balance the work: sequences of similar length in one step, and balanced routing of
    experts (auxiliary loss, capacity).
    """
    # The ranks wait for the slowest one, so the job pays its distance from the typical rank.
    table = evidence.table
    claimed = {claim.module.path for claim in evidence.claims}
    for modules, rows in table.peers:
        if len(rows) < MANY:
            continue
        times = table.times[rows][:, modules, PARTS.index("forward_gpu")]
        middle = np.median(times, axis=0)
        costs = evidence.typical.mean((times.max(axis=0) - middle).astype(np.int64))
        usual = evidence.typical.mean(middle.astype(np.int64))
        for place in np.flatnonzero(costs >= evidence.worth_ns).tolist():
            module = table.modules[modules[place]]
            if module.path in claimed:
                continue
            name = visible(module.label)
            cost = int(costs[place])
            yield _found(
                kind="gpu",
                path=module.path,
                title=f"{name} has unequal work on the ranks",
                seen=(
                    f"In a step, its forward kernels take {duration(int(usual[place]))} on the "
                    f"typical rank and {duration(int(usual[place]) + cost)} on the slowest one, "
                    "which is not always the same, or one of several."
                ),
                cost_ns=cost,
            )
