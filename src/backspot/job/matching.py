"""The same collective on all ranks of its process group.

All ranks of a process group launch its collectives in the same order. So the k-th collective of a
step is one event on all ranks, if they launch the same kinds in that step. A recording can begin or
end within a step: then the first or the last step has fewer collectives on that rank, and these are
matched from the other end. Steps with other differences are left out, because any choice could be
wrong.

Point-to-point transfers are no collectives: their two ranks launch them, and the others do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from backspot.formatting import counted
from backspot.job.summary import Call, Group, Summary
from backspot.trace.events import Ints
from backspot.trace.names import POINT_TO_POINT


@dataclass(frozen=True, slots=True)
class Matched:
    """The collectives of one process group, with one row a rank and one column a collective.

    Attributes:
        name: the process group, ``""`` if the traces do not say so.
        ranks: the ranks of the rows, ascending.
        all_ranks: the ranks of the group, ``()`` if the traces do not say so.
        step: the step of each collective, an index into the common steps.
        start: when it begins to run, in nanoseconds of each rank's own clock.
        end: when it has ended.
        exposed: clock time in nanoseconds in which it runs alone and launched work waits.
        launching: clock time in nanoseconds in which the host launches it, and the device runs
            nothing, or collectives alone.
    """

    name: str
    ranks: tuple[int, ...]
    all_ranks: tuple[int, ...]
    call: tuple[Call, ...]
    step: Ints
    start: Ints
    end: Ints
    exposed: Ints
    launching: Ints


@dataclass(frozen=True, slots=True)
class Matching:
    """The collectives that are the same on several ranks; in words, what is not matched."""

    groups: tuple[Matched, ...]
    problems: tuple[str, ...]


def common_steps(summaries: Iterable[Summary]) -> tuple[int, ...]:
    """Return the numbers of the steps that all ranks have recorded."""
    numbers = [set(summary.step_numbers) for summary in summaries]
    return tuple(sorted(set.intersection(*numbers))) if numbers else ()


def are_mixed(summaries: Mapping[int, Summary]) -> bool:
    """Return whether it is not known of collectives to which process group they belong."""
    return any(
        not group.is_one and any(call.kind != POINT_TO_POINT for call in group.calls)
        for summary in summaries.values()
        for group in summary.groups
    )


def members(
    summaries: Mapping[int, Summary],
) -> dict[tuple[str, tuple[int, ...]], dict[int, Group]]:
    """Return the process groups of two ranks or more, by name and ranks, on each of their ranks."""
    groups_of: dict[tuple[str, tuple[int, ...]], dict[int, Group]] = {}
    for rank in sorted(summaries):
        for group in summaries[rank].groups:
            if group.is_one:
                groups_of.setdefault((group.name, group.ranks), {})[rank] = group
    return {key: groups for key, groups in sorted(groups_of.items()) if len(groups) > 1}


def match_collectives(summaries: Mapping[int, Summary]) -> Matching:
    """Match the collectives of a job."""
    steps = common_steps(summaries.values())
    groups_matched, problems = [], []
    if are_mixed(summaries):
        problems.append(
            "The ranks use several process groups, and the traces do not say to which of them a "
            "collective belongs, as those of gloo do not: the waits do not count."
        )
    for (name, ranks), groups in members(summaries).items():
        matched, lost = _match(name, ranks, groups, summaries, steps)
        shown = f"process group {name}" if name else "the process group"
        if len(matched.step):
            groups_matched.append(matched)
            several = any(len(summaries[rank].groups) > 1 for rank in groups)
            if not ranks and several and len(groups) > 2:
                problems.append(
                    f"The traces do not say which ranks {shown} has: it is taken to have all "
                    "ranks that use one of this name."
                )
        if lost:
            problems.append(
                f"{counted(len(lost), 'step')} of {shown} cannot be matched, because the ranks "
                f"launch different collectives: {', '.join(map(str, lost))}"
            )
    return Matching(tuple(groups_matched), tuple(problems))


def _match(
    name: str,
    ranks: tuple[int, ...],
    groups: Mapping[int, Group],
    summaries: Mapping[int, Summary],
    steps: Sequence[int],
) -> tuple[Matched, list[int]]:
    """Match one group; also return the numbers of the steps in which that fails."""
    columns: dict[int, list[int]] = {rank: [] for rank in groups}
    calls: list[Call] = []
    step_of: list[int] = []
    lost = []
    by_step = {rank: _by_step(group, summaries[rank]) for rank, group in groups.items()}
    for index, number in enumerate(steps):
        in_step = {rank: by_step[rank].get(number, []) for rank in groups}
        calls_of = {
            rank: [groups[rank].calls[groups[rank].call[index]] for index in indices]
            for rank, indices in in_step.items()
        }
        kinds = [[call.kind for call in of_rank] for of_rank in calls_of.values()]
        shared = _shared(kinds, index == 0, index == len(steps) - 1)
        if shared is None:
            lost.append(number)
            continue
        count, from_end = shared
        for rank, indices in in_step.items():
            columns[rank] += indices[len(indices) - count :] if from_end else indices[:count]
        any_rank = next(iter(calls_of.values()))
        calls += any_rank[len(any_rank) - count :] if from_end else any_rank[:count]
        step_of += [index] * count
    rows = sorted(groups)
    own = [(summaries[rank].origin_ns, groups[rank], columns[rank]) for rank in rows]
    return Matched(
        name=name,
        ranks=tuple(rows),
        all_ranks=ranks,
        call=tuple(calls),
        step=np.array(step_of, np.int64),
        start=_matrix([(origin, group.start, chosen) for origin, group, chosen in own]),
        end=_matrix([(origin, group.end, chosen) for origin, group, chosen in own]),
        exposed=_matrix([(0, group.exposed, chosen) for _, group, chosen in own]),
        launching=_matrix([(0, group.launching, chosen) for _, group, chosen in own]),
    ), lost


def _matrix(rows: Sequence[tuple[int, Sequence[int], list[int]]]) -> Ints:
    """Return times by rank: of each row what to add, its times, and which of them count."""
    return np.array(
        [np.array(times, np.int64)[counting] + origin for origin, times, counting in rows]
    )


def _by_step(group: Group, summary: Summary) -> dict[int, list[int]]:
    """Return the collectives of each step, by the step's number."""
    by_step: dict[int, list[int]] = {}
    for index, (step, call) in enumerate(zip(group.step, group.call, strict=True)):
        if group.calls[call].kind != POINT_TO_POINT:
            by_step.setdefault(summary.step_numbers[step], []).append(index)
    return by_step


def _shared(kinds: Sequence[Sequence[str]], first: bool, last: bool) -> tuple[int, bool] | None:
    """Return how many collectives of a step all ranks share, and whether at its end.

    Args:
        kinds: the kinds that each rank launches in the step.
        first: whether recordings can begin in the step.
        last: whether recordings can end in the step.
    """
    fewest, most = min(kinds, key=len), max(kinds, key=len)
    count = len(fewest)
    if all(list(of_rank) == list(most) for of_rank in kinds):
        return count, False
    if (
        count
        and first
        and all(list(of_rank[len(of_rank) - count :]) == list(fewest) for of_rank in kinds)
    ):
        return count, True
    if count and last and all(list(of_rank[:count]) == list(fewest) for of_rank in kinds):
        return count, False
    return None
