"""Put the ranks of a job together: who is late, where, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean, median

import numpy as np

from backspot.analysis.typical import TypicalStep, typical_step
from backspot.errors import UsageError
from backspot.formatting import counted, visible
from backspot.job.align import RankClock, align
from backspot.job.findings import Evidence, find_all
from backspot.job.matching import are_mixed, common_steps, match_collectives, members
from backspot.job.modules import PARTS, Table, find_spreads
from backspot.job.noise import Limits
from backspot.job.replay import JobReplay
from backspot.job.roles import Roles, role_of
from backspot.job.scatter import Others, is_clear, least
from backspot.job.summary import Group, Summary
from backspot.job.transfers import aligned_by, match_transfers
from backspot.job.waiting import GroupWaits, find_waits
from backspot.results.job import (
    EXPLAINS,
    GroupCost,
    JobReport,
    LostRank,
    RankCost,
    RankLane,
    SlowestRank,
)
from backspot.trace.events import Ints
from backspot.trace.names import POINT_TO_POINT

_DEVIATIONS = 4.0
"""Standard deviations of a rank's clock from which it is late."""
_UNCERTAIN = 0.1
"""Share of the step from which the clocks are too uncertain to say who waits for whom."""


def answer(summaries: Iterable[Summary], lost: Sequence[LostRank] = ()) -> JobReport:
    """Put the summaries of a job together.

    Ranks that are not known are numbered in the order of their sources' names.

    Raises:
        UsageError: If there are fewer than two ranks, two summaries of one rank, no step that all
            ranks recorded, or nothing by which they are ranks of one job.
    """
    ranks = _by_rank(summaries)
    doubts = _doubts(ranks)
    numbers = common_steps(ranks.values())
    if not numbers:
        raise UsageError("the ranks have no recorded step in common: record the same steps on all")
    places = {
        rank: [summary.step_numbers.index(number) for number in numbers]
        for rank, summary in ranks.items()
    }
    lengths = {
        rank: np.subtract(summary.end, summary.begin)[places[rank]]
        for rank, summary in ranks.items()
    }
    typical = _typical_step(ranks, places, lengths)
    step_ns = int(median(typical.value(length) for length in lengths.values()))
    matching = match_collectives(ranks)
    clocks = align(matching.groups, list(ranks))
    warnings = [*doubts, *matching.problems, *_alignment_problems(ranks, clocks, step_ns)]
    certain = _certain(clocks, step_ns)
    waits = find_waits(matching.groups, certain)
    late = _lateness(waits, certain, len(numbers))
    sums = _sums(waits, len(numbers))
    table = Table(ranks, places)
    modules, claims = find_spreads(table, step_ns)
    roles = _roles(ranks)
    world = max([len(ranks), *(summary.world_size for summary in ranks.values())])
    missing = world - len(ranks)
    if missing:
        warnings.append(
            f"{counted(missing, 'rank')} of {world} {'is' if missing == 1 else 'are'} not part of "
            "the answer. The ranks here may have waited for them."
        )
    # Of all waits: with any of them missing, waits would pass for transfers.
    is_certain = not (missing or matching.problems) and len(certain) == len(ranks)
    costs = tuple(
        _rank_cost(ranks[rank], rank, places[rank], lengths[rank], typical, sums, late, clocks)
        for rank in ranks
    )
    lane_step = _step_to_show(lengths)
    replay = None
    transfers = match_transfers(ranks, numbers)
    if transfers and not missing and not matching.problems:
        with_transfers = _certain(aligned_by(transfers, certain), step_ns)
        if len(with_transfers) == len(ranks) and (waits or transfers.links):
            with suppress(ValueError):
                replay = JobReplay(ranks, places, waits, with_transfers, transfers)
    replayed = typical.value(replay.steps(())[0]) if replay else None
    return JobReport(
        ranks=costs,
        world_size=world,
        steps=numbers,
        step_ns=step_ns,
        slowest=_slowest(ranks, places, numbers, late, table),
        late=_late_ranks(late, costs, step_ns),
        groups=_group_costs(ranks, places, waits, roles, typical),
        lane_step=numbers[lane_step],
        lanes=_lanes(ranks, places, waits, certain, lane_step),
        modules=modules,
        findings=find_all(
            Evidence(
                ranks,
                places,
                typical,
                step_ns,
                table,
                claims,
                costs,
                waits if is_certain else (),
                roles,
                replay,
            )
        ),
        replayed_step_ns=replayed,
        lost=tuple(lost),
        warnings=tuple(warnings),
    )


def _by_rank(summaries: Iterable[Summary]) -> dict[int, Summary]:
    in_order = sorted(summaries, key=lambda summary: (summary.source, summary.rank or 0))
    if len(in_order) < 2:
        raise UsageError(
            f"{counted(len(in_order), 'rank')} can be read: give the traces of two or more"
        )
    unknown = [summary for summary in in_order if summary.rank is None]
    if unknown and len(unknown) < len(in_order):
        raise UsageError(
            f"{visible(unknown[0].source)} does not say which rank it is of: put rank0, rank1, … "
            "into the names"
        )
    by_rank: dict[int, Summary] = {}
    for position, summary in enumerate(in_order):
        rank = position if summary.rank is None else summary.rank
        if rank in by_rank:
            raise UsageError(
                f"{visible(by_rank[rank].source)} and {visible(summary.source)} are both of rank "
                f"{rank}: give one trace for each rank"
            )
        by_rank[rank] = summary
    return dict(sorted(by_rank.items()))


def _doubts(ranks: Mapping[int, Summary]) -> list[str]:
    """Return why the ranks may not be those of one job; ``UsageError`` if nothing shows it."""
    models = {
        rank: {module.path: module.class_name for module in summary.modules if module.is_module}
        for rank, summary in ranks.items()
    }
    first = next(iter(ranks))
    differing = (_difference(models[first], models[rank], first, rank) for rank in ranks)
    differs = next(filter(None, differing), "")
    is_job = any(summary.world_size > 1 or summary.groups for summary in ranks.values())
    is_pipeline = any(any(summary.stalled) for summary in ranks.values())
    if not is_job and (differs or all(summary.rank is None for summary in ranks.values())):
        reason = f", and {differs}" if differs else ""
        raise UsageError(
            f"{_sources(ranks)} are not of one job: they record no process group and no "
            f"collective{reason}. Give the traces of processes that train together; "
            "backspot diff compares two recordings"
        )
    return [f"{differs[0].upper()}{differs[1:]}."] if differs and not is_pipeline else []


def _sources(ranks: Mapping[int, Summary]) -> str:
    first, second, *rest = (visible(summary.source) for summary in ranks.values())
    return f"{first}, {second} and {len(rest)} more" if rest else f"{first} and {second}"


def _difference(
    model: Mapping[str, str], other: Mapping[str, str], rank: int, other_rank: int
) -> str:
    """Say how the models of two ranks differ; ``""`` if they do not."""
    for path in sorted(model.keys() & other.keys()):
        if model[path] != other[path]:
            module = visible(path) or "the model"
            classes = visible(model[path]), visible(other[path])
            return f"{module} is a {classes[0]} on rank {rank} and a {classes[1]} on {other_rank}"
    return ""


# Who waits for whom ------------------------------------------------------------------------------


def _certain(clocks: Mapping[int, RankClock], step_ns: int) -> dict[int, RankClock]:
    most = _UNCERTAIN * step_ns
    return {rank: clock for rank, clock in clocks.items() if clock.uncertainty_ns <= most}


def _alignment_problems(
    ranks: Mapping[int, Summary], clocks: Mapping[int, RankClock], step_ns: int
) -> list[str]:
    problems = []
    alone = [rank for rank in ranks if rank not in clocks]
    if alone and not are_mixed(ranks):
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
    """Return how much later than the others' median a rank enters collectives, by rank and step.

    This is a mean: of ranks that wait in each of their collectives, one is late in a single one.
    """
    late: dict[int, list[list[float]]] = {rank: [[] for _ in range(steps)] for rank in clocks}
    for group_waits in waits:
        # A wait is the time to the last entry, so differences of waits are those of entries.
        apart = Others(group_waits.wait).of(group_waits.wait) - group_waits.wait
        for step in range(steps):
            of_step = apart[:, group_waits.group.step == step].tolist()
            for rank, late_ns in zip(group_waits.ranks, of_step, strict=True):
                late[rank][step] += late_ns
    return {
        rank: [fmean(late_ns) if late_ns else 0.0 for late_ns in by_step]
        for rank, by_step in late.items()
    }


def _sums(waits: Sequence[GroupWaits], steps: int) -> dict[int, tuple[Ints, Ints]]:
    """Return the waits and the transfers of each rank in each step, over all process groups."""
    sums: dict[int, tuple[Ints, Ints]] = {}
    for group_waits in waits:
        for rank, wait, transfer in zip(
            group_waits.ranks, *group_waits.by_step(steps), strict=True
        ):
            waited, moved = sums.get(rank, (0, 0))
            sums[rank] = waited + wait, moved + transfer
    return sums


def _slowest(
    ranks: Mapping[int, Summary],
    places: Mapping[int, Sequence[int]],
    numbers: Sequence[int],
    late: Mapping[int, Sequence[float]],
    table: Table,
) -> tuple[SlowestRank, ...]:
    slowest = []
    for step, number in enumerate(numbers):
        if len(late) < 2 or not table.modules:
            break
        rank = max(sorted(late), key=lambda of_rank: late[of_rank][step])
        longer = table.longer(rank)[:, :, step]
        module = int(longer.sum(axis=1).argmax())
        most = int(longer[module].sum())
        row = table.modules[module]
        if most < EXPLAINS * late[rank][step]:  # an innocent one, that happens to be the first
            most = 0
        slowest.append(
            SlowestRank(
                step=number,
                rank=rank,
                late_ns=round(late[rank][step]),
                part=PARTS[int(longer[module].argmax())] if most > 0 else "",
                path=row.path if most > 0 else "",
                class_name=row.class_name if most > 0 else "",
                longer_ns=max(most, 0),
                line=_line(ranks[rank], row.path, places[rank][step], most),
            )
        )
    return tuple(slowest)


def _line(summary: Summary, place: str, step: int, most: int) -> str:
    """Return the line with most of a place's time in a step, ``""`` if none has half of it."""
    longest = {
        outside.host[step]: outside.line for outside in summary.outside if outside.place == place
    }
    time = max(longest, default=0)
    return longest[time] if most and time >= EXPLAINS * most else ""


def _late_ranks(
    late: Mapping[int, Sequence[float]], costs: Sequence[RankCost], step_ns: int
) -> tuple[int, ...]:
    """Return the ranks that enter collectives later than the others, beyond the noise."""
    worth = float(least(np.array([cost.late_ns for cost in costs]), len(costs), step_ns))
    late_ranks = []
    for cost in costs:
        limits = Limits.of_whole(max(worth, _DEVIATIONS * cost.uncertainty_ns))
        by_step = np.array(late.get(cost.rank, ()))
        if len(by_step) and is_clear(np.zeros_like(by_step), by_step, None, limits):
            late_ranks.append(cost.rank)
    return tuple(late_ranks)


def _rank_cost(
    summary: Summary,
    rank: int,
    places: Sequence[int],
    length: Ints,
    typical: TypicalStep,
    sums: Mapping[int, tuple[Ints, Ints]],
    late: Mapping[int, Sequence[float]],
    clocks: Mapping[int, RankClock],
) -> RankCost:
    wait, transfer = sums.get(rank, (np.zeros(len(places), np.int64),) * 2)
    clock = clocks.get(rank)
    exposed, stalled = np.array(summary.exposed)[places], np.array(summary.stalled)[places]
    return RankCost(
        rank=rank,
        source=summary.source,
        host=summary.host,
        step_ns=typical.value(length),
        exposed_ns=typical.value(exposed),
        stalled_ns=typical.value(stalled),
        wait_ns=typical.value(wait),
        transfer_ns=typical.value(transfer),
        late_ns=round(median(late[rank])) if rank in late else 0,
        offset_ns=clock.offset_ns if clock else None,
        drift_ppm=clock.drift * 1e6 if clock else 0.0,
        uncertainty_ns=math.ceil(clock.uncertainty_ns) if clock else 0,
        step_ns_by_step=tuple(length.tolist()),
        own_ns_by_step=tuple((length - exposed).tolist()),
        wait_ns_by_step=tuple(wait.tolist()),
        transfer_ns_by_step=tuple(transfer.tolist()),
    )


def _roles(ranks: Mapping[int, Summary]) -> Roles:
    classes = {
        module.path: module.class_name for summary in ranks.values() for module in summary.modules
    }
    return {
        (name, of_group): role_of(
            name, {call for group in groups.values() for call in group.calls}, classes
        )
        for (name, of_group), groups in members(ranks).items()
    }


def _group_costs(
    ranks: Mapping[int, Summary],
    places: Mapping[int, Sequence[int]],
    waits: Sequence[GroupWaits],
    roles: Roles,
    typical: TypicalStep,
) -> tuple[GroupCost, ...]:
    """Return the process groups whose collectives are matched, or that transfer between ranks."""
    steps = len(next(iter(places.values())))
    waited = {
        (group_waits.group.name, group_waits.group.all_ranks): group_waits for group_waits in waits
    }
    group_costs = []
    for (name, of_group), groups in members(ranks).items():
        group_waits = waited.get((name, of_group))
        transfers = (
            median(_transfers(group, places[rank]) for rank, group in groups.items()) / steps
        )
        if group_waits is None and not transfers:
            continue
        of_ranks = group_waits.ranks if group_waits else tuple(groups)
        sums = (
            group_waits.by_step(steps)
            if group_waits
            else (np.zeros((len(of_ranks), steps), np.int64),) * 2
        )
        wait, transfer = map(typical.mean, sums)
        most = int(wait.argmax())
        group_costs.append(
            GroupCost(
                name=name,
                ranks=of_ranks,
                absent=tuple(rank for rank in of_group if rank not in groups),
                collectives=len(group_waits.group.step) / steps if group_waits else 0.0,
                wait_ns=int(np.median(wait)),
                transfer_ns=int(np.median(transfer)),
                most_waiting=of_ranks[most],
                most_wait_ns=int(wait[most]),
                role=roles[name, of_group],
                transfers=transfers,
            )
        )
    return tuple(group_costs)


def _transfers(group: Group, steps: Sequence[int]) -> int:
    """Return how many transfers between two ranks a group has in these steps."""
    in_steps = np.isin(group.step, steps)
    is_one = np.array([call.kind == POINT_TO_POINT for call in group.calls], bool)
    return int((in_steps & is_one[np.array(group.call, np.int64)]).sum())


def _typical_step(
    ranks: Mapping[int, Summary],
    places_of: Mapping[int, Sequence[int]],
    lengths: Mapping[int, Ints],
) -> TypicalStep:
    """Choose the steps that count on all ranks, by what most ranks take, wait and stall in them."""
    columns = [[*lengths.values()]]
    columns += [
        [np.array(getattr(summary, name))[places_of[rank]] for rank, summary in ranks.items()]
        for name in ("exposed", "stalled")
    ]
    length, *places = (np.median(column, axis=0).astype(np.int64) for column in columns)
    return typical_step(length, None, np.stack(places), ("exposed", "stalled"))


def _step_to_show(lengths: Mapping[int, Ints]) -> int:
    """Return the index of the step whose length is nearest to the typical one."""
    by_step = np.median(np.array(list(lengths.values())), axis=0)
    return int(np.abs(by_step - np.median(by_step)).argmin())


def _lanes(
    ranks: Mapping[int, Summary],
    places: Mapping[int, Sequence[int]],
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
        times = np.array([own.begin[places[rank][step]], own.end[places[rank][step]]], np.int64)
        bounds[rank] = clocks[rank].to_job(times + own.origin_ns).tolist()
        spans[rank] = list[tuple[int, int, int, int]]()
    for group_waits in waits:
        in_step = np.flatnonzero(group_waits.group.step == step)
        last = group_waits.last[in_step].tolist()
        for row, rank in enumerate(group_waits.ranks):
            own_row = group_waits.group.ranks.index(rank)
            start = clocks[rank].to_job(group_waits.group.start[own_row, in_step])
            end = clocks[rank].to_job(group_waits.group.end[own_row, in_step])
            entered = start + group_waits.wait[row, in_step]
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
