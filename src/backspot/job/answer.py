"""Put the ranks of a job together: who is late, where, and what follows from it.

A module's time on a rank is compared with the median of its times on the other ranks. Ranks differ
from each other for no reason, as recordings do: one process has a busier host, and kernels that run
beside a waiting collective take longer. So a difference is claimed by the rules of
``comparison/noise.py`` only: it exceeds what all modules of that rank have in common, the scatter
of the modules, the uncertainty of the steps and their range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import get_args

import numpy as np

from backspot.analysis.typical import typical, typical_value
from backspot.comparison.noise import Limits, Shift, Times, common_shift, interval
from backspot.errors import UsageError
from backspot.formatting import counted, duration, percent, visible
from backspot.job.align import RankClock, align
from backspot.job.matching import common_steps, match_collectives
from backspot.job.others import Others
from backspot.job.summary import ModuleTimes, PhaseTimes, Summary
from backspot.job.waiting import GroupWaits, find_waits
from backspot.results.job import (
    GroupCost,
    JobFinding,
    JobReport,
    LostRank,
    ModuleSpread,
    Part,
    RankCost,
    RankLane,
    SlowestRank,
)
from backspot.trace.events import Ints

__all__ = ["answer"]

PARTS: tuple[Part, ...] = get_args(Part)
_ON_GPU = [part.endswith("_gpu") for part in PARTS]
_ON_HOST = [part.endswith("_host") for part in PARTS]
_MATTERS = 0.02
"""Share of the step from which a difference is worth a claim."""
_CLOCK = 0.05
"""Share by which the forward kernels of a slower GPU take longer."""
_EXPOSED = 0.1
"""Share of the step from which exposed transfers are worth a claim."""
_UNCERTAIN = 0.1
"""Share of the step from which the clocks are too uncertain to say who waits for whom."""


def answer(summaries: Iterable[Summary], lost: Sequence[LostRank] = ()) -> JobReport:
    """Put the summaries of a job together.

    Args:
        summaries: one for each rank, in any order. Ranks that are not known are numbered in the
            order of their sources' names.
        lost: traces that could not be read.

    Raises:
        UsageError: If there are fewer than two ranks, two summaries of one rank, or no step that
            all ranks recorded.
    """
    ranks = _by_rank(summaries)
    numbers = common_steps(ranks.values())
    if not numbers:
        raise UsageError("the ranks have no recorded step in common: record the same steps on all")
    at = {
        rank: [summary.step_numbers.index(number) for number in numbers]
        for rank, summary in ranks.items()
    }
    lengths = {
        rank: np.subtract(summary.end, summary.begin)[at[rank]] for rank, summary in ranks.items()
    }
    step_ns = int(median(typical_value(length) for length in lengths.values()))
    matching = match_collectives(ranks)
    clocks = align(matching.groups, list(ranks))
    warnings = [*matching.problems, *_alignment_problems(ranks, clocks, step_ns)]
    certain = {
        rank: clock
        for rank, clock in clocks.items()
        if clock.uncertainty_ns <= _UNCERTAIN * step_ns
    }
    waits = find_waits(matching.groups, certain)
    late = _lateness(waits, certain, len(numbers))
    sums = _sums(waits, len(numbers))
    table = _Table(ranks, at)
    modules, claims = _spreads(table, step_ns)
    world = max([len(ranks), *(summary.world_size for summary in ranks.values())])
    missing = world - len(ranks)
    if missing:
        warnings.append(
            f"{counted(missing, 'rank')} of {world} {'is' if missing == 1 else 'are'} not part of "
            "the answer. The ranks here may have waited for them."
        )
    # Of all waits: with any of them missing, waits would pass for transfers.
    known = not (missing or matching.problems) and len(certain) == len(ranks)
    costs = tuple(
        _rank_cost(ranks[rank], rank, at[rank], lengths[rank], sums, late, clocks) for rank in ranks
    )
    lane_step = _typical_step(lengths)
    return JobReport(
        ranks=costs,
        world_size=world,
        steps=numbers,
        step_ns=step_ns,
        slowest=_slowest(numbers, late, table),
        groups=tuple(_group_cost(one, len(numbers)) for one in waits),
        lane_step=numbers[lane_step],
        lanes=_lanes(ranks, at, waits, certain, lane_step),
        modules=modules,
        findings=_findings(table, claims, costs, waits if known else (), ranks, at, step_ns),
        lost=tuple(lost),
        warnings=tuple(warnings),
    )


def _by_rank(summaries: Iterable[Summary]) -> dict[int, Summary]:
    every = sorted(summaries, key=lambda one: (one.source, one.rank or 0))
    if len(every) < 2:
        raise UsageError(
            f"{counted(len(every), 'rank')} can be read: give the traces of two or more"
        )
    unknown = [one for one in every if one.rank is None]
    if unknown and len(unknown) < len(every):
        raise UsageError(
            f"{visible(unknown[0].source)} does not say which rank it is of: put rank0, rank1, … "
            "into the names"
        )
    found: dict[int, Summary] = {}
    for position, one in enumerate(every):
        rank = position if one.rank is None else one.rank
        if rank in found:
            raise UsageError(
                f"{visible(found[rank].source)} and {visible(one.source)} are both of rank {rank}: "
                "give one trace for each rank"
            )
        found[rank] = one
    return dict(sorted(found.items()))


# Who waits for whom ------------------------------------------------------------------------------


def _alignment_problems(
    ranks: Mapping[int, Summary], clocks: Mapping[int, RankClock], step_ns: int
) -> list[str]:
    problems = []
    alone = [rank for rank in ranks if rank not in clocks]
    if alone:
        problems.append(
            f"The clock of {_listed(alone)} cannot be aligned, because no collective is shared "
            "with the other ranks: the waits do not count there."
        )
    doubtful = [
        rank for rank, clock in clocks.items() if clock.uncertainty_ns > _UNCERTAIN * step_ns
    ]
    if doubtful:
        problems.append(
            f"{_listed(sorted(doubtful)).capitalize()} and the others do not end the same "
            "collectives together. The recordings may be of different steps, or the machine is "
            "too busy: the waits do not count there."
        )
    return problems


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:5]))
    more = f" and {len(ranks) - 5} more" if len(ranks) > 5 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _lateness(
    waits: Sequence[GroupWaits], clocks: Mapping[int, RankClock], steps: int
) -> dict[int, list[float]]:
    """Return how much later than the others' median a rank enters collectives, by rank and step."""
    late: dict[int, list[list[float]]] = {rank: [[] for _ in range(steps)] for rank in clocks}
    for one in waits:
        # A wait is the time to the last entry, so differences of waits are those of entries.
        apart = Others(one.wait).of(one.wait) - one.wait
        for step in range(steps):
            of_step = apart[:, one.group.step == step].tolist()
            for rank, some in zip(one.ranks, of_step, strict=True):
                late[rank][step] += some
    return {
        rank: [median(some) if some else 0.0 for some in by_step] for rank, by_step in late.items()
    }


def _sums(waits: Sequence[GroupWaits], steps: int) -> dict[int, tuple[Ints, Ints]]:
    """Return the waits and the transfers of each rank in each step, over all process groups."""
    found: dict[int, tuple[Ints, Ints]] = {}
    for one in waits:
        for rank, wait, transfer in zip(one.ranks, *one.by_step(steps), strict=True):
            waited, moved = found.get(rank, (0, 0))
            found[rank] = waited + wait, moved + transfer
    return found


def _slowest(
    numbers: Sequence[int], late: Mapping[int, Sequence[float]], table: _Table
) -> tuple[SlowestRank, ...]:
    found = []
    for step, number in enumerate(numbers):
        if len(late) < 2:
            break
        rank = max(sorted(late), key=lambda one: late[one][step])
        longer = table.longer(rank)[:, :, step]
        module = int(longer.sum(axis=1).argmax())
        most = int(longer[module].sum())
        row = table.modules[module]
        found.append(
            SlowestRank(
                step=number,
                rank=rank,
                late_ns=round(late[rank][step]),
                part=PARTS[int(longer[module].argmax())] if most > 0 else "",
                path=row.path if most > 0 else "",
                class_name=row.class_name if most > 0 else "",
                longer_ns=max(most, 0),
            )
        )
    return tuple(found)


def _rank_cost(
    summary: Summary,
    rank: int,
    at: Sequence[int],
    length: Ints,
    sums: Mapping[int, tuple[Ints, Ints]],
    late: Mapping[int, Sequence[float]],
    clocks: Mapping[int, RankClock],
) -> RankCost:
    wait, transfer = sums.get(rank, (np.zeros(len(at), np.int64),) * 2)
    clock = clocks.get(rank)
    return RankCost(
        rank=rank,
        source=summary.source,
        host=summary.host,
        step_ns=typical_value(length),
        exposed_ns=typical_value(np.array(summary.exposed)[at]),
        wait_ns=typical_value(wait),
        transfer_ns=typical_value(transfer),
        late_ns=round(median(late[rank])) if rank in late else 0,
        offset_ns=clock.offset_ns if clock else None,
        drift_ppm=clock.drift * 1e6 if clock else 0.0,
        uncertainty_ns=math.ceil(clock.uncertainty_ns) if clock else 0,
    )


def _group_cost(one: GroupWaits, steps: int) -> GroupCost:
    wait, transfer = (typical(by_step) for by_step in one.by_step(steps))
    most = int(wait.argmax())
    return GroupCost(
        name=one.group.name,
        ranks=one.ranks,
        absent=one.group.absent,
        collectives=len(one.group.step) / steps,
        wait_ns=int(np.median(wait)),
        transfer_ns=int(np.median(transfer)),
        most_waiting=one.ranks[most],
        most_wait_ns=int(wait[most]),
    )


def _typical_step(lengths: Mapping[int, Ints]) -> int:
    """Return the index of the step whose length is nearest to the typical one."""
    by_step = np.median(np.array(list(lengths.values())), axis=0)
    return int(np.abs(by_step - np.median(by_step)).argmin())


def _lanes(
    ranks: Mapping[int, Summary],
    at: Mapping[int, Sequence[int]],
    waits: Sequence[GroupWaits],
    clocks: Mapping[int, RankClock],
    step: int,
) -> tuple[RankLane, ...]:
    """Return what each rank does in one step, on the job's clock."""
    if len(clocks) < 2:
        return ()
    bounds, spans = {}, {}
    for rank in sorted(clocks):
        own = ranks[rank]
        times = np.array([own.begin[at[rank][step]], own.end[at[rank][step]]], np.int64)
        bounds[rank] = clocks[rank].to_job(times + own.origin_ns).tolist()
        spans[rank] = list[tuple[int, int, int, int]]()
    for one in waits:
        here = np.flatnonzero(one.group.step == step)
        last = one.last[here].tolist()
        for row, rank in enumerate(one.ranks):
            own_row = one.group.ranks.index(rank)
            start = clocks[rank].to_job(one.group.start[own_row, here])
            end = clocks[rank].to_job(one.group.end[own_row, here])
            entered = start + one.wait[row, here]
            spans[rank] += zip(start.tolist(), entered.tolist(), end.tolist(), last, strict=True)
    first = min(begin for begin, _ in bounds.values())
    return tuple(
        RankLane(
            rank,
            begin - first,
            end - first,
            tuple((a - first, b - first, c - first, d) for a, b, c, d in sorted(spans[rank])),
        )
        for rank, (begin, end) in bounds.items()
    )


# Modules over the ranks --------------------------------------------------------------------------


class _Table:
    """The times of all modules on all ranks, in the steps that all ranks have.

    Attributes:
        ranks: the ranks, ascending.
        modules: the modules that any rank has, by path.
        times: clock time in nanoseconds, by rank, module, part and step.
        taken: the same, with what the host executes while collectives hide it.
        has_gpu: whether kernels of any module run on a GPU.
    """

    def __init__(self, ranks: Mapping[int, Summary], at: Mapping[int, Sequence[int]]) -> None:
        self.ranks = tuple(ranks)
        known = {
            module.path: module
            for summary in ranks.values()
            for module in summary.modules
            if module.is_module
        }
        self.modules: tuple[ModuleTimes, ...] = tuple(known[path] for path in sorted(known))
        place = {module.path: index for index, module in enumerate(self.modules)}
        steps = len(next(iter(at.values())))
        self.times = np.zeros((len(ranks), len(self.modules), len(PARTS), steps), np.int64)
        self.taken = np.zeros_like(self.times)
        for row, (rank, summary) in enumerate(ranks.items()):
            for module in summary.modules:
                if module.is_module:
                    parts = np.array([getattr(module, part) for part in PARTS])[:, at[rank]]
                    hidden = np.array([module.forward_hidden, module.backward_hidden])[:, at[rank]]
                    index = place[module.path]
                    self.times[row, index] = self.taken[row, index] = parts
                    self.taken[row, index, _ON_HOST] += hidden
        self.has_gpu = bool(self.times[:, :, _ON_GPU].any())
        self._others = Others(self.taken)

    def others(self, rank: int) -> Ints:
        """Return the median over the other ranks, by module, part and step.

        The host of a rank that waits works beside the collective, and holds up nothing. This time
        counts here: the rank that they wait for does the same work, and holds up its device.
        """
        return self._others.of(self.taken[self.ranks.index(rank)])

    def longer(self, rank: int) -> Ints:
        """Return by how much a rank exceeds the median of the others, by module, part and step."""
        found: Ints = self.times[self.ranks.index(rank)] - self.others(rank)
        return found


@dataclass(frozen=True, slots=True)
class _Claim:
    """A module that takes longer on a rank beyond the noise."""

    rank: int
    module: ModuleTimes
    part: Part
    usual_ns: int
    taken_ns: int


def _spreads(table: _Table, step_ns: int) -> tuple[tuple[ModuleSpread, ...], list[_Claim]]:
    """Compare each module on each rank with the other ranks; list its worst rank."""
    if not len(table.modules):
        return (), []
    total = typical(table.taken.sum(axis=2))  # by rank and module
    middle = np.median(total, axis=0).astype(np.int64)
    held = typical(table.times.sum(axis=2))
    usual = np.array([typical(table.others(rank).sum(axis=1)) for rank in table.ranks])
    gaps = held - usual
    worst = gaps.argmax(axis=0)
    least = _MATTERS * step_ns
    spreads, claims = [], []
    for row, rank in enumerate(table.ranks):
        gap, large = gaps[row], gaps[row] >= least
        chosen = np.flatnonzero((gap > 0) & (large | (worst == row))).tolist()
        if not chosen:
            continue
        before, after = table.others(rank), table.times[row]
        was, now = before.sum(axis=1), after.sum(axis=1)
        shift = _shift(was, now) if large.any() else None
        for index in chosen:
            module = table.modules[index]
            part = PARTS[int((typical(after[index]) - typical(before[index])).argmax())]
            clear = bool(large[index]) and _is_clear(was[index], now[index], shift, least)
            if clear:
                taken = int(held[row, index])
                claims.append(_Claim(rank, module, part, int(usual[row, index]), taken))
            if worst[index] == row:
                spreads.append(
                    ModuleSpread(
                        path=module.path,
                        class_name=module.class_name,
                        median_ns=int(middle[index]),
                        worst_ns=int(total[row, index]),
                        worst_rank=rank,
                        part=part,
                        cost_ns=int(gap[index]),
                        clear=clear,
                        ns_by_rank=tuple(total[:, index].tolist()),
                    )
                )
    return tuple(sorted(spreads, key=lambda one: (-one.cost_ns, one.path))), claims


def _shift(was: Ints, now: Ints) -> Shift | None:
    before, after = typical(was), typical(now)
    pairs = zip(before.tolist(), after.tolist(), strict=True)
    return common_shift(pairs, (float(before.sum()), float(after.sum())))


def _is_clear(was: Ints, now: Ints, shift: Shift | None, least: float) -> bool:
    """Whether a time is longer beyond the noise."""
    before, after = (Times(typical_value(some), some.tolist()) for some in (was, now))
    change = interval(before, after, shift, Limits(least=least))
    return change is not None and change.clear and after.typical > before.typical


# Findings ----------------------------------------------------------------------------------------


def _findings(
    table: _Table,
    claims: Sequence[_Claim],
    costs: Sequence[RankCost],
    waits: Sequence[GroupWaits],
    ranks: Mapping[int, Summary],
    at: Mapping[int, Sequence[int]],
    step_ns: int,
) -> tuple[JobFinding, ...]:
    found = [_slow_module(claim, table.has_gpu) for claim in claims]
    found += _exposed_transfer(costs, waits, step_ns)
    data = np.array([_phase(one.phases, "data", at[rank]) for rank, one in ranks.items()])
    usual = Others(data).of(data)
    for row, rank in enumerate(ranks):
        found += _slow_gpu(table, rank)
        found += _slow_data(rank, data[row], usual[row], step_ns)
    return tuple(
        sorted(
            found, key=lambda one: (-one.cost_ns, -1 if one.rank is None else one.rank, one.path)
        )
    )


def _slow_module(claim: _Claim, has_gpu: bool) -> JobFinding:
    direction, _, kind = claim.part.partition("_")
    on_host = kind == "host"
    where = ", where the host holds up the GPU" if on_host and has_gpu else ""
    look = (
        "Look for what only this rank does in the module on the host: I/O, logging, a wait, a busy "
        "core"
    )
    compare = (
        "Compare the shapes and the kernels of the module on both ranks: unequal sequence lengths, "
        "experts or shards"
    )
    name = visible(claim.module.path or claim.module.class_name)
    return JobFinding(
        rule="slow-module",
        kind="host" if on_host else "gpu",
        rank=claim.rank,
        path=claim.module.path,
        title=f"{name} is slow on rank {claim.rank}",
        seen=(
            f"It takes {duration(claim.taken_ns)} of a step there, and {duration(claim.usual_ns)} "
            f"on the other ranks. The difference is in its {direction}"
            f"{where if on_host else ', in kernels'}."
        ),
        remedy=(f"{look if on_host else compare}{'' if has_gpu else '; or for unequal work'}."),
        cost_ns=claim.taken_ns - claim.usual_ns,
    )


def _slow_gpu(table: _Table, rank: int) -> list[JobFinding]:
    """Find a rank whose forward kernels all take longer.

    Kernels of the backward run beside collectives, which slows them down on ranks that wait.
    """
    forward = PARTS.index("forward_gpu")
    was = table.others(rank)[:, forward]
    now = table.times[table.ranks.index(rank)][:, forward]
    usual, taken = (typical_value(times.sum(axis=0)) for times in (was, now))
    if taken <= (1 + _CLOCK) * usual:  # most ranks end here
        return []
    shifts = [_shift(was, now)]
    shifts += [_shift(was[:, [step]], now[:, [step]]) for step in range(was.shape[1])]
    if was.shape[1] < 2 or not all(
        shift and math.expm1(shift.common) > max(_CLOCK, 2 * shift.scatter) for shift in shifts
    ):
        return []
    return [
        JobFinding(
            rule="slow-gpu",
            kind="gpu",
            rank=rank,
            path="",
            title=f"All forward kernels take longer on rank {rank}",
            seen=(
                f"Those of all modules together take {duration(taken)} of a step there, and "
                f"{duration(usual)} on the other ranks ({percent(taken / usual - 1)} more)."
            ),
            remedy=(
                "Compare the shapes of its batches first. If they are alike, check the clock, the "
                "temperature and the power limit of this GPU (nvidia-smi)."
            ),
            cost_ns=taken - usual,
        )
    ]


def _slow_data(rank: int, now: Ints, was: Ints, step_ns: int) -> list[JobFinding]:
    """Find a rank that waits longer for its batches."""
    if not _is_clear(was, now, None, _MATTERS * step_ns):
        return []
    usual, taken = typical_value(was), typical_value(now)
    return [
        JobFinding(
            rule="slow-data",
            kind="data",
            rank=rank,
            path="",
            title=f"Rank {rank} waits longer for its data",
            seen=(
                f"Its steps wait {duration(taken)} for the next batch, those of the other ranks "
                f"{duration(usual)}."
            ),
            remedy="Compare the loader's workers, the storage and the samples of this rank.",
            cost_ns=taken - usual,
        )
    ]


def _exposed_transfer(
    costs: Sequence[RankCost], waits: Sequence[GroupWaits], step_ns: int
) -> list[JobFinding]:
    """Find transfers that hold the clock of all ranks, so that no rank is to blame.

    Waits that nothing hides count as exposed, and others do not. So what all waits, and twice the
    uncertainty of the clock, leave of the exposed time is transfer for certain.
    """
    certain = [cost.exposed_ns - cost.wait_ns - 2 * cost.uncertainty_ns for cost in costs]
    if not waits or min(certain) < _EXPOSED * step_ns:
        return []
    sums: dict[str, int] = {}
    for one in waits:
        for column, kind in enumerate(one.group.kind):
            sums[kind] = sums.get(kind, 0) + int(np.median(one.transfer[:, column]))
    most = max(sorted(sums), key=lambda kind: sums[kind])
    gathers = "gather" in most
    return [
        JobFinding(
            rule="exposed-transfer",
            kind="transfer",
            rank=None,
            path="",
            title=f"Transfers hold up all ranks, mostly {most}",
            seen=(
                f"In at least {duration(min(certain))} of a step, data moves between the ranks "
                "and nothing else runs, on every rank, waits for other ranks left out."
            ),
            remedy=(
                "Gather parameters earlier (FSDP2: set_modules_to_forward_prefetch and "
                "set_modules_to_backward_prefetch), or in larger groups of layers."
                if gathers
                else "Let the exchange run beside the backward: larger or smaller buckets, fewer "
                "bytes (bf16), or fewer exchanges (gradient accumulation with no_sync)."
            ),
            cost_ns=min(certain),
        )
    ]


def _phase(phases: Sequence[PhaseTimes], name: str, at: Sequence[int]) -> Ints:
    for phase in phases:
        if phase.name == name:
            return np.array(phase.by_step, np.int64)[list(at)]
    return np.zeros(len(at), np.int64)
