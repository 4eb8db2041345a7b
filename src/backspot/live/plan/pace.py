"""What a loader leaves of what settings save: a step takes no less than its next batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from backspot.formatting import duration
from backspot.live.plan.comparing import predicted
from backspot.results.plan import Rung

LATE = 0.05
"""Share of the step from which its wait for a batch is said to limit it."""
_FAR = 0.2
"""Share of the step from which a wait for a batch is not for its handover alone."""
_SHOWN = 0.5
"""Share of a real wait that a trial must show, or it says nothing of that wait: the larger part."""
IF_READY = "if batches were ready"
"""How the note of a rung ends that helps as soon as the loader is faster."""
_LOADS_ALL_THE_TIME = 0.8
"""Share of a step that workers need for a batch, from which a wait is for them. Below it, a wait is
what handing over a batch takes, which a faster model leaves as it is."""


@dataclass(frozen=True)
class LoaderPace:
    """How fast a loader delivers.

    Attributes:
        name: what its workers are, such as ``num_workers=4``.
        ns: of workers, the time from one batch to the next.
        beside: what a batch adds to any step: without workers all of its loading.
    """

    name: str
    ns: float
    beside: float = 0.0

    @classmethod
    def of_wait(
        cls, workers: int, waits: float, computes: float, loads: float, cores: int
    ) -> LoaderPace:
        """Return the pace of which a wait is known, beside a step that computes for so long.

        Args:
            workers: how many processes load.
            waits: for how long such a step waits.
            computes: for how long it does not.
            loads: how long one process takes to load a batch by itself.
            cores: how many processes can run at a time.
        """
        name = f"num_workers={workers}"
        if not workers:
            return cls(name, 0.0, waits)
        needs = loads * max(1.0, (workers + 1) / cores) / workers
        if needs >= _LOADS_ALL_THE_TIME * computes and waits >= LATE * (computes + waits):
            return cls(name, computes + waits)
        return cls(name, min(needs, computes), waits)

    @classmethod
    def of_step(
        cls, workers: int, step: float, waits: float, trial: WorkersTrial | None
    ) -> LoaderPace | None:
        """Return the pace that real steps show; ``None`` where that is not known.

        Args:
            workers: how many processes load.
            step: how long a real step takes.
            waits: for how long of it a batch is not there.
            trial: what was tried of the loader, if anything.
        """
        if trial is None or (waits >= _FAR * step and trial.misses(workers, step, waits)):
            # A wait of this much is not for the handover alone.
            late = cls.of_wait(workers, waits, step - waits, step, 1)
            return late if waits >= _FAR * step else None
        pace = cls.of_wait(workers, waits, step - waits, trial.loads, trial.cores)
        if pace.ns > step - waits:
            return pace
        # The trial has timed workers that a faster step would wait for.
        return replace(pace, ns=min(step, max(trial.pace(workers).ns, trial.limit)))

    def step(self, computes: float) -> float:
        """Return how long a step takes that computes for so long."""
        return max(computes + self.beside, self.ns)

    def is_late(self, computes: float) -> bool:
        """Return whether the loader limits such a step."""
        step = self.step(computes)
        return step - computes >= LATE * step and (not self.ns or self.ns >= step)


def limit_of(waits: Mapping[int, float]) -> float:
    """Return the time from one batch to the next, where only a faster step waits for that; or 0.

    What one process takes to load a batch does not tell: a disk, a lock or the cores may end before
    the workers do. Handing over a batch takes no longer beside a faster step, so what that waits
    longer is for the workers.

    Args:
        waits: of the workers as they are, the wait of a step by how long it computes.
    """
    slowest, fastest = max(waits), min(waits)
    step = fastest + waits[fastest]
    return min(slowest, step) if waits[fastest] - waits[slowest] >= LATE * step else 0.0


@dataclass(frozen=True)
class WorkersTrial:
    """What numbers of workers let a step wait that computes for so long, in nanoseconds.

    The trial is not the training: files that were just read come from memory, and nothing is put
    into pinned memory. So only what its numbers differ by among themselves counts.

    Attributes:
        waits: the wait by the number of workers.
        computes: for how long the step computes.
        loads: how long one process takes to load a batch by itself.
        cores: how many processes can run at a time.
        limit: the time from one batch to the next of the workers as they are, where only a faster
            step waits for that; or 0.
    """

    waits: Mapping[int, float]
    computes: float
    loads: float
    cores: int
    limit: float = 0.0

    def pace(self, workers: int) -> LoaderPace:
        """Return the pace of a number of workers as the trial by itself says."""
        waits = self.waits[workers]
        return LoaderPace.of_wait(workers, waits, self.computes, self.loads, self.cores)

    def misses(self, workers: int, step: float, waits: float) -> str:
        """Return why the trial says nothing of what real steps wait for; ``""`` if it does.

        Args:
            workers: how many processes load in the training.
            step: how long a real step takes.
            waits: for how long of it a batch is not there.
        """
        real = LoaderPace.of_wait(workers, waits, step - waits, self.loads, self.cores)
        is_late = real.ns > step - waits
        expected = real.ns - self.computes if is_late else waits
        is_late_here = self.pace(workers).ns > self.computes
        shows = self.waits[workers] >= _SHOWN * expected and (is_late_here or not is_late)
        if waits < LATE * step or shows:
            return ""
        return (
            f"a trial beside the step does not show what real steps wait for: "
            f"{duration(round(self.waits[workers]))} of {duration(round(expected))}"
        )

    def paces(self, workers: int, step: float, waits: float) -> dict[str, LoaderPace]:
        """Return the pace of each number of workers beside real steps, by its name.

        None saves more of a real step than it saves in the trial, whatever the step computes.

        Args:
            workers: how many processes load in the training.
            step: how long a real step takes.
            waits: for how long of it a batch is not there.
        """
        real = LoaderPace.of_step(workers, step, waits, self)
        found = {workers: real or self.pace(workers)}
        now = found[workers]
        for number in self.waits.keys() - {workers}:
            saves = self.waits[workers] - self.waits[number]
            pace = self.pace(number)
            found[number] = replace(
                pace, ns=max(pace.ns, now.ns - saves), beside=max(pace.beside, now.beside - saves)
            )
        return {pace.name: pace for pace in found.values()}


@dataclass(frozen=True)
class BesideLoader:
    """How a step as it is gets its batches, in nanoseconds.

    Attributes:
        step: the step.
        waits: what of it is spent waiting for a batch.
        pace: that of the loader; ``None`` where it is not known, or batches are never late.
    """

    step: float
    waits: float
    pace: LoaderPace | None

    def computes(self, step_ns: float) -> float:
        """Return what a step computes that waits as the step as it is."""
        return max(1.0, step_ns - self.waits)

    def place(self, ladder: Sequence[Rung]) -> int:
        """Return after how many rungs the loader limits the step; of all where it never does."""
        steps = (self.step, *(one.step_ns for one in ladder))
        for number, ns in enumerate(steps):
            if self.pace is not None and self.pace.is_late(self.computes(ns)):
                return number
        return len(ladder)

    def paced(self, rung: Rung, pace: LoaderPace | None, on: tuple[str, ...]) -> Rung:
        """Return a rung with the time that a step takes beside a loader of some pace.

        Where that leaves nothing of what it saves, it is no rung of the ladder.
        """
        if pace is None or not rung.step_ns:
            return replace(rung, on=on)
        before, step, low, high = (
            pace.step(self.computes(ns)) if ns else 0.0
            for ns in (rung.before_ns, rung.step_ns, rung.low_ns, rung.high_ns)
        )
        saves = (
            before - step,
            before - high if high else -math.inf,
            before - low if low else math.inf,
        )
        kept = "undecided" if rung.verdict == "undecided" else ""
        found = predicted(replace(rung, on=on), before, saves, kept)
        if rung.verdict != "helps" or found.verdict == "helps":
            return found
        without, with_it = (self.computes(ns) / 1e6 for ns in (rung.before_ns, rung.step_ns))
        if_ready = f"{without:.1f} → {with_it:.1f} ms {IF_READY}"
        note = "; ".join(filter(None, (rung.note, if_ready)))
        return replace(found, kept=False, verdict="does not help", note=note)

    def rungs(
        self,
        ladder: Sequence[Rung],
        others: Sequence[Rung],
        faster: Rung | None,
        pace: LoaderPace | None,
    ) -> tuple[list[Rung], list[Rung]]:
        """Return the ladder and the other rungs beside the loader, each with what it saves so.

        Args:
            ladder: rungs of which each computes less than the one before.
            others: the other rungs.
            faster: the rung of a faster loader, if one helps; it is made once this one is late.
            pace: that of the faster loader.
        """
        place = self.place(ladder)
        first = [self.paced(one, self.pace, one.on) for one in ladder[:place]]
        if faster is None or pace is None:
            rest = [self.paced(one, self.pace, one.on) for one in ladder[place:]]
            more = [self.paced(one, self.pace, one.on) for one in others]
        else:
            names = tuple(one.setting for one in ladder[:place])
            made = (*names, faster.setting)

            def on(rung: Rung) -> tuple[str, ...]:
                is_later = rung.on[:place] == names
                return (*made, *rung.on[place:]) if is_later else rung.on

            rest = [replace(faster, on=names, kept=True)]
            rest += [self.paced(one, pace, on(one)) for one in ladder[place:]]
            more = [
                self.paced(one, pace if faster.setting in on(one) else self.pace, on(one))
                for one in others
            ]
        paced = [*first, *rest]
        return [one for one in paced if one.kept], [*(one for one in paced if not one.kept), *more]
