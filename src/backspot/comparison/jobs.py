"""Compare two jobs of many ranks, by the typical rank and rank by rank.

The times of a job are medians over its ranks, in each step. So a rank that is held up in one of the
recordings changes them little, and the noise of two jobs is that of two recordings of one rank or
less: the same rules decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from backspot.analysis.typical import typical_step
from backspot.comparison.judge import Cost, Noise, build, by_size, of_whole, warnings_of_both
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


def compare_jobs(before: JobReport, after: JobReport, names: tuple[str, str]) -> Comparison:
    """Compare two jobs, each by its typical rank."""
    jobs = (before, after)
    old, new = ({one.path: one for one in job.modules} for job in jobs)
    nothing = Cost.nothing(len(before.steps)), Cost.nothing(len(after.steps))
    wholes = [
        _clock(
            np.array([one.ns_by_step for one in job.modules], np.int64)
            .reshape(-1, len(job.steps))
            .sum(axis=0)
        )
        for job in jobs
    ]
    noise = Noise(wholes[0], wholes[1], by_gpu=False).with_shifts(
        [(_of_module(old[path]), _of_module(new[path])) for path in old if path in new]
    )
    changes = []
    for path in dict.fromkeys([*old, *new]):
        was, now = old.get(path), new.get(path)
        start = _of_module(was) if was else nothing[0]
        end = _of_module(now) if now else nothing[1]
        judged = noise.of_part(start, end, held_up=False)
        class_name = (now or was or next(iter(old.values()))).class_name
        before_path = path if was else None
        changes.append(
            build("module", path, before_path, class_name, (start, end), judged, gone=now is None)
        )
    least = _LEAST * max(before.step_ns, after.step_ns)

    def typical(kind: ChangeKind, name: str, by: str, least: float) -> Change:
        was, now = (_typical_rank(job.ranks, by) for job in jobs)
        return of_whole(kind, name, was, now, noise, least)

    return Comparison(
        step=typical("step", "", "step_ns_by_step", 0.0),
        phases=tuple(typical("phase", name, by, least) for name, by in _PARTS),
        whole=of_whole("modules", "", wholes[0].wall, wholes[1].wall, noise),
        changes=tuple(sorted(changes, key=by_size)),
        by="module",
        moves=(),
        before=_side(before, names[0]),
        after=_side(after, names[1]),
        notes=tuple(_notes(before, after, noise, shared=any(path in new for path in old))),
        ranks=tuple(_ranks(before, after, noise, least)),
    )


def _clock(by_step: np.ndarray) -> Cost:
    return Cost.of_clock(by_step.tolist(), typical_step(by_step).value(by_step))


def _of_module(one: ModuleSpread) -> Cost:
    return _clock(np.array(one.ns_by_step, np.int64))


def _typical_rank(ranks: Sequence[RankCost], name: str) -> Times:
    """Return the median over the ranks in each step."""
    by_step = np.median([getattr(one, name) for one in ranks], axis=0).astype(np.int64)
    return Times(typical_step(by_step).value(by_step), by_step.tolist())


def _ranks(before: JobReport, after: JobReport, noise: Noise, least: float) -> Iterator[Change]:
    """Yield the change of the own time of each rank that both jobs have, the largest first."""
    old, new = ({one.rank: one for one in job.ranks} for job in (before, after))
    changes = []
    for rank in old:
        if rank in new:
            was, now = (_typical_rank([job[rank]], "own_ns_by_step") for job in (old, new))
            changes.append(of_whole("rank", f"rank {rank}", was, now, noise, least))
    yield from sorted(changes, key=by_size)


def _side(job: JobReport, name: str) -> Side:
    return Side(counted(len(job.ranks), "rank"), len(job.steps), "profiler step", name)


def _notes(before: JobReport, after: JobReport, noise: Noise, *, shared: bool) -> Iterator[str]:
    """Yield what to know before trusting the numbers, and which causes came and went."""
    if not shared:
        yield "The two jobs share no module: they are of different models."
    if len(before.ranks) != len(after.ranks):
        yield (
            f"The jobs have {len(before.ranks)} and {len(after.ranks)} ranks: work for each rank "
            "and transfers differ by that alone."
        )
    yield from noise.common()
    old, new = (
        {(one.rule, one.rank, one.path): one for one in job.findings} for job in (before, after)
    )
    for what, mine, others in (("New", new, old), ("Gone", old, new)):
        for cause, one in mine.items():
            if cause not in others:
                yield f"{what}: {one.title}, {one.bound} {duration(one.cost_ns)} of a step."
    yield from warnings_of_both(before.warnings, after.warnings)
    if min(len(before.steps), len(after.steps)) < 4:
        yield "Fewer than four steps show only large changes. profile(steps=10) records more."
