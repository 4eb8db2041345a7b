"""Compare jobs of many ranks, by the typical rank and rank by rank.

The times of a job are medians over its ranks, in each step. So a rank that is held up in one of the
recordings changes them little, and the noise of two jobs is that of two recordings of one rank or
less: the same rules decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TypeAlias

import numpy as np

from backspot.analysis.typical import typical_step
from backspot.comparison.judge import (
    Comparer,
    Cost,
    Noise,
    build,
    by_size,
    of_whole,
    side_of,
    warnings_of_sides,
)
from backspot.comparison.noise import Times
from backspot.formatting import counted, duration
from backspot.results.comparison import Change, ChangeKind, Comparison, Side
from backspot.results.job import JobReport, ModuleSpread, RankCost

_LEAST = 0.01
"""Share of the step below which a change of a wait, a transfer or a rank is not claimed."""
_PARTS = (
    ("own time", "own_ns_by_step"),
    ("communication", "exposed_ns_by_step"),
    ("waits for ranks", "wait_ns_by_step"),
    ("transfers", "transfer_ns_by_step"),
)
"""What the typical rank does in a step: its own time, and communication that nothing hides. Waits
and transfers can overlap with its own time."""

Jobs: TypeAlias = Sequence[JobReport]


def compare_jobs(before: Jobs, after: Jobs, names: tuple[str, str]) -> Comparison:
    """Compare two jobs, or several of each side, each by its typical rank."""
    sides = (before, after)
    by_path = [[{module.path: module for module in job.modules} for job in jobs] for jobs in sides]
    paths = [{path: None for modules in side for path in modules} for side in by_path]

    def costs_of(path: str) -> tuple[Cost, Cost]:
        old, new = (
            Cost.of_clock(
                [
                    _of_module(modules.get(path), job)
                    for modules, job in zip(side, jobs, strict=True)
                ]
            )
            for side, jobs in zip(by_path, sides, strict=True)
        )
        return old, new

    all_paths = list(dict.fromkeys([*paths[0], *paths[1]]))
    noise = Noise(
        Cost.of_clock([_all_modules(job) for job in before]),
        Cost.of_clock([_all_modules(job) for job in after]),
        by_gpu=False,
        wholes=1 + len(_PARTS),
    ).with_modules([costs_of(path) for path in paths[0] if path in paths[1]], len(all_paths))
    changes = []
    for path in all_paths:
        costs = costs_of(path)
        class_name = next(
            modules[path].class_name for side in by_path for modules in side if path in modules
        )
        changes.append(
            build(
                "module",
                path,
                path if path in paths[0] else None,
                class_name,
                costs,
                noise.of_part(*costs, held_up=False),
                noise,
                gone=path not in paths[1],
            )
        )
    least = _LEAST * max(fmean(job.step_ns for job in jobs) for jobs in sides)

    def typical(kind: ChangeKind, name: str, by: str, least: float) -> Change:
        old, new = ([_typical_rank(job.ranks, by) for job in jobs] for jobs in sides)
        return of_whole(kind, name, old, new, noise, least)

    return Comparison(
        step=typical("step", "", "step_ns_by_step", 0.0),
        phases=tuple(typical("phase", name, by, least) for name, by in _PARTS),
        whole=of_whole("modules", "", noise.before.wall, noise.after.wall, noise),
        changes=tuple(sorted(changes, key=by_size)),
        by="module",
        moves=(),
        before=_side(before, names[0]),
        after=_side(after, names[1]),
        notes=tuple(_notes(before, after, noise, shared=bool(paths[0].keys() & paths[1].keys()))),
        ranks=tuple(_ranks(before, after, noise, least)),
        about=noise.about,
    )


def _times(by_step: np.ndarray) -> Times:
    typical = typical_step(by_step)
    left_out = frozenset(np.flatnonzero(~typical.chosen).tolist())
    return Times(typical.value(by_step), by_step.tolist(), left_out)


def _all_modules(job: JobReport) -> Times:
    module_times = np.array([module.ns_by_step for module in job.modules], np.int64)
    return _times(module_times.reshape(-1, len(job.steps)).sum(axis=0))


def _of_module(spread: ModuleSpread | None, job: JobReport) -> Times:
    if spread is None:
        return Times(0, (0,) * len(job.steps))
    return _times(np.array(spread.ns_by_step, np.int64))


def _typical_rank(ranks: Sequence[RankCost], name: str) -> Times:
    """Return the median over the ranks in each step."""
    return _times(np.median([getattr(rank, name) for rank in ranks], axis=0).astype(np.int64))


def _ranks(before: Jobs, after: Jobs, noise: Noise, least: float) -> Iterator[Change]:
    """Yield the change of the own time of each rank that all jobs have, the largest first."""
    by_rank = [
        [{rank_cost.rank: rank_cost for rank_cost in job.ranks} for job in jobs]
        for jobs in (before, after)
    ]
    changes = []
    for rank in by_rank[0][0]:
        if all(rank in ranks for side in by_rank for ranks in side):
            old, new = (
                [_typical_rank([ranks[rank]], "own_ns_by_step") for ranks in side]
                for side in by_rank
            )
            changes.append(of_whole("rank", f"rank {rank}", old, new, noise, least))
    yield from sorted(changes, key=by_size)


def _side(jobs: Jobs, name: str) -> Side:
    traces = [counted(len(job.ranks), "rank") for job in jobs]
    return side_of(traces, sum(len(job.steps) for job in jobs), "profiler step", name)


def _notes(before: Jobs, after: Jobs, noise: Noise, *, shared: bool) -> Iterator[str]:
    """Yield what to know before trusting the numbers, and which causes came and went."""
    if not shared:
        yield "The two jobs share no module: they are of different models."
    if len(before[0].ranks) != len(after[0].ranks):
        yield (
            f"The jobs have {len(before[0].ranks)} and {len(after[0].ranks)} ranks: work for each "
            "rank and transfers differ by that alone."
        )
    yield from noise.common()
    old, new = (
        [
            {(finding.rule, finding.rank, finding.path): finding for finding in job.findings}
            for job in jobs
        ]
        for jobs in (before, after)
    )
    for state, own, others in (("New", new, old), ("Gone", old, new)):
        for cause, finding in own[0].items():
            # Of several jobs, only what all of one side have and none of the other has.
            if all(cause in job for job in own) and not any(cause in job for job in others):
                cost = duration(finding.cost_ns)
                yield f"{state}: {finding.title}, {finding.bound} {cost} of a step."
    yield from warnings_of_sides(before, after)
    if min(len(job.steps) for job in (*before, *after)) < 4:
        yield "Fewer than four steps show only large changes. profile(steps=10) records more."


COMPARERS = (
    Comparer(
        JobReport,
        compare_jobs,
        "one is a job of many ranks and the other is a report of one: compare two jobs, or the "
        "same rank of both",
    ),
)
