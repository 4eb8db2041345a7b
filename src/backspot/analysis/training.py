"""The account of all steps of a training, in memory that does not grow with their number.

Each step is a row of whole numbers. Rows wait in a buffer of some thousands. From there they go
into two summaries: sums by *kind*, which are steps of about the same length with the same marks,
and sums by *stretch*, which are steps that follow each other.

Kinds are an eighth of an octave wide. Most steps are of neighbouring kinds: these are the typical
steps. Kinds that no other one joins to them, or that have a mark, are rare work, or steps that the
machine held up: then the thread did not run for as long as the step was longer.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from backspot.results.rare import RareWork
from backspot.results.training import (
    WAITING,
    Apart,
    LoaderUse,
    MemoryGrowth,
    Stretch,
    Training,
)

Rows: TypeAlias = NDArray[np.int64]

TOTAL, DATA, BACKWARD, OPTIMIZER, THREAD, MARKS = range(6)
"""The columns of a row: nanoseconds of the step, in loaders, in the backward, in the optimizers,
and for which the thread ran; then ``Marks``."""
_COLUMNS = 6


class Marks(enum.IntFlag):
    """What happened in a step."""

    NONE = 0
    SAVED = 1
    """``torch.save`` was called."""
    OTHER_DATA = 2
    """Batches that were not trained on came from a loader that most steps do not use."""
    COMPILED = 4
    """Code was compiled."""


_FULL = 4096 * _COLUMNS
_FINENESS = 3
"""Kinds in an octave, as a power of two."""
_APART = 3
"""Kinds without a step between them, from which steps are no longer of about the same length."""
_STRETCHES = 256
_SHOWN = 64
_FIRST_STEPS = 64
"""Steps among which the slow first ones are."""
_SLOW_START = 1.5
"""So many times as long as a typical step is a slow first one."""
_LEAST_SHARE = 0.01
"""Share of the time from which rare work is worth a line."""
_RAN = 0.5
"""Share of a step's excess for which the thread waited for data, if it is work; or ran, relative to
how much of a typical step it ran, and at most as long as for a typical step."""
_AT_LEAST = 0.3
"""The part of that share which a busy machine lets a thread run that has much more work."""
_MEMORY_SAMPLES = 512
_TREND_PIECES = 12
"""Stretches from which it is known whether steps became slower."""
_SLOWER, _ERRORS = 0.05, 4.0
"""Slower by this share, and by so many standard errors, is slower."""
_GROWTH, _GROWTH_BYTES = 0.05, 50e6
"""Memory that grows by this share and these bytes grows."""

_NO_STEPS = np.zeros(_COLUMNS, np.int64)
SAVING = "saving a checkpoint"
EVALUATION = "evaluation"
OUTSIDE = "work outside backward and optimizer"
BOTH = f"{EVALUATION} and {SAVING}"
_NAMES = {
    Marks.OTHER_DATA | Marks.SAVED: BOTH,
    Marks.OTHER_DATA: EVALUATION,
    Marks.SAVED: SAVING,
}


class StepTimes:
    """What is known of the steps of a training so far.

    Attributes:
        steps: how many steps have ended, with those that are not counted.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._buffer: list[int] = []  # faster than an array
        self._emptying = threading.RLock()  # the training, and who reads its account
        self._kinds: dict[tuple[int, int], Rows] = {}  # by marks and length: count, then sums
        self._longest = 0
        self._first_rows = np.zeros((0, _COLUMNS), np.int64)
        self._stretches = np.zeros((_STRETCHES, 4), np.int64)
        """Of each stretch: steps, their time, typical steps, their time."""
        self._length = 1
        """How many steps a stretch has."""
        self._memory: list[tuple[int, int]] = []
        self._memory_every = 1
        self._memory_seen = 0

    def add(
        self, total: int, data: int, backward: int, optimizer: int, thread: int, marks: int
    ) -> None:
        """Add a step that has ended; times in nanoseconds."""
        self.steps += 1
        self._buffer += total, data, backward, optimizer, thread, marks
        if len(self._buffer) >= _FULL:
            self._empty_buffer()

    def pass_over(self) -> None:
        """Add a step whose time is not the training's."""
        self._empty_buffer()  # of which the steps follow each other
        self.steps += 1

    def add_memory(self, size: int) -> None:
        """Note how many bytes the process holds now."""
        self._memory_seen += 1
        if self._memory_seen % self._memory_every:
            return
        self._memory.append((self.steps, size))
        if len(self._memory) >= _MEMORY_SAMPLES:
            del self._memory[1::2]
            self._memory_every *= 2

    @property
    def counted(self) -> int:
        """How many steps were added with their time."""
        buffered = len(self._buffer) // _COLUMNS
        return buffered + sum(int(sums[0]) for sums in self._kinds.values())

    # From rows to summaries ----------------------------------------------------------------------

    def _empty_buffer(self) -> None:
        if self._buffer:
            with self._emptying:
                self._take_rows()

    def _take_rows(self) -> None:
        numbers = self._buffer.copy()  # at once
        rows = np.fromiter(numbers, np.int64, len(numbers)).reshape(-1, _COLUMNS)
        del self._buffer[: rows.size]  # a step may have been added meanwhile
        if not len(rows):
            return
        missing = _FIRST_STEPS - len(self._first_rows)
        if missing > 0:
            self._first_rows = np.concatenate([self._first_rows, rows[:missing]])
        self._longest = max(self._longest, int(rows[:, TOTAL].max()))
        self._add_to_kinds(rows)
        self._add_to_stretches(rows)

    def _add_to_kinds(self, rows: Rows) -> None:
        keys = rows[:, MARKS] << 32 | _kind_of(rows[:, TOTAL])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        begins = np.flatnonzero(np.diff(keys, prepend=-1))
        counts = np.diff(begins, append=len(keys))
        sums = np.add.reduceat(rows[order, :MARKS], begins, axis=0)
        for key, count, summed in zip(keys[begins].tolist(), counts, sums, strict=True):
            kind = key >> 32, key & 0xFFFFFFFF
            self._kinds[kind] = self._kinds.get(kind, _NO_STEPS) + np.append(count, summed)

    def _add_to_stretches(self, rows: Rows) -> None:
        steps = self.steps
        while steps > _STRETCHES * self._length:
            pairs = self._stretches.reshape(-1, 2, self._stretches.shape[1]).sum(axis=1)
            self._stretches = np.concatenate([pairs, np.zeros_like(pairs)])
            self._length *= 2
        stretch = np.arange(steps - len(rows), steps) // self._length
        total = rows[:, TOTAL]
        typical = (total <= np.median(total) * 1.4) & (rows[:, MARKS] == 0)
        columns = np.stack([np.ones_like(total), total, typical, total * typical], axis=1)
        begins = np.flatnonzero(np.diff(stretch, prepend=-1))
        self._stretches[stretch[begins]] += np.add.reduceat(columns, begins, axis=0)

    # From summaries to the account ---------------------------------------------------------------

    def training(
        self,
        loaders: Sequence[LoaderUse] = (),
        apart: Sequence[Apart] = (),
        *,
        has_device: bool = False,
    ) -> Training | None:
        """Return what is known so far; ``None`` if no step was counted.

        Args:
            loaders: what was asked of loaders.
            apart: time that is no step, beside slow first steps and compilation.
            has_device: whether a device works for the training, for which its thread may wait.
        """
        self._empty_buffer()
        kinds = dict(self._kinds)
        once = [*apart]
        compiled = [key for key in kinds if key[0] & Marks.COMPILED]
        if compiled and len(compiled) < len(kinds):
            removed = _sum(kinds, compiled)
            kinds = {key: sums for key, sums in kinds.items() if key not in compiled}
            once.append(Apart("compilation", int(removed[0]), int(removed[1])))
        if not kinds:
            return None
        start = self._slow_start(kinds)
        if start is not None:
            once.append(start)
        sums = _sum(kinds, kinds)
        count, total, data, backward, optimizer, _ = (int(value) for value in sums)
        step_ns = total // count
        data_ns, backward_ns, optimizer_ns = (
            total // count for total in (data, backward, optimizer)
        )
        forward_ns = step_ns - data_ns - backward_ns - optimizer_ns
        typical = _typical(kinds)
        usual = _sum(kinds, typical)
        rare, held_up = self._rare(kinds, typical, step_ns, has_device=has_device)
        return Training(
            steps=self.steps,
            counted=count,
            step_ns=step_ns,
            data_ns=data_ns,
            forward_ns=max(forward_ns, 0),
            backward_ns=backward_ns,
            optimizer_ns=optimizer_ns,
            typical_ns=int(usual[1]) // int(usual[0]),
            longest_ns=self._longest,
            held_up_ns=held_up[1] // count,
            held_up=held_up[0],
            rare=rare,
            change=self._change(),
            stretches=tuple(self._shown_stretches()),
            loaders=tuple(sorted(loaders, key=lambda use: -use.batches)),
            memory=self._memory_growth(),
            apart=tuple(sorted(once, key=lambda time: -time.wall_ns)),
        )

    def _slow_start(self, kinds: dict[tuple[int, int], Rows]) -> Apart | None:
        """Take the slow first steps out of the kinds, and return them."""
        usual = _sum(kinds, _typical(kinds))
        limit = _SLOW_START * int(usual[1]) / int(usual[0])
        rows = self._first_rows[self._first_rows[:, MARKS] & Marks.COMPILED == 0]
        slow = rows[:, TOTAL] > limit
        count = len(rows) if slow.all() else int(np.argmin(slow))
        everything = int(sum(sums[0] for sums in kinds.values()))
        if not 0 < count < min(len(rows), everything):
            return None
        for row in rows[:count]:
            key = int(row[MARKS]), int(_kind_of(row[TOTAL : TOTAL + 1])[0])
            kinds[key] = kinds[key] - np.append(1, row[:MARKS])
            if not kinds[key][0]:
                del kinds[key]
        return Apart("start", count, int(rows[:count, TOTAL].sum()))

    def _rare(
        self,
        kinds: dict[tuple[int, int], Rows],
        typical: Sequence[tuple[int, int]],
        step_ns: int,
        *,
        has_device: bool,
    ) -> tuple[tuple[RareWork, ...], tuple[int, int]]:
        """Return work of some steps only, and how many steps were held up, by how much in all."""
        usual = _sum(kinds, typical)
        usual_mean = usual[1:] / usual[0]
        # On a busy machine a thread does not run all the time, whatever it works at.
        ran = _RAN * min(1.0, usual[1 + THREAD] / max(1, usual[1 + TOTAL]))
        everything = sum(int(sums[0]) for sums in kinds.values())
        rare: list[RareWork] = []
        held_up, held_up_ns = 0, 0
        for group in _groups(kinds, typical):
            sums = _sum(kinds, group)
            count = int(sums[0])
            excess = sums[1:] / count - usual_mean
            longer, data, backward, optimizer, thread = excess.tolist()
            if longer <= 0:
                continue
            marks = Marks(group[0][0])
            in_data = data >= _RAN * longer
            # Of more work, a busy machine lets only a part run. A step that was held up has no
            # more work: its thread ran hardly longer than in others, and for little of the excess.
            worked = thread >= ran * max(min(longer, usual_mean[TOTAL]), _AT_LEAST * longer)
            is_work = bool(marks) or in_data or has_device or worked
            if not is_work:
                held_up, held_up_ns = held_up + count, held_up_ns + round(count * longer)
                continue
            per_step = count * longer / everything
            if count < 2 or per_step < _LEAST_SHARE * step_ns:
                continue
            name = _name_of(marks, longer, data=data, backward=backward, optimizer=optimizer)
            share = min(1.0, per_step / step_ns)
            rare.append(RareWork(name, everything / count, round(longer), round(per_step), share))
        rare.sort(key=lambda work: -work.per_step_ns)
        return tuple(rare), (held_up, held_up_ns)

    def _filled(self) -> Rows:
        filled = np.flatnonzero(self._stretches[:, 0])
        return self._stretches[: filled[-1] + 1] if len(filled) else self._stretches[:0]

    def _shown_stretches(self) -> Iterator[Stretch]:
        filled = self._filled()
        size = -(-len(filled) // _SHOWN) if len(filled) else 1
        for begin in range(0, len(filled), size):
            steps, total, typical, typical_total = filled[begin : begin + size].sum(axis=0).tolist()
            if steps:
                first = begin * self._length + 1
                usual = typical_total // typical if typical else total // steps
                yield Stretch(first, steps, total // steps, usual)

    def _change(self) -> float:
        """Return by how much the last quarter is slower than the first one, if that is certain.

        The error is that of the differences between neighbouring stretches, so that a trend within
        the training does not count as noise (von Neumann's mean square successive difference).
        """
        filled = self._filled()
        filled = filled[filled[:, 2] > 0]
        if len(filled) < _TREND_PIECES:
            return 0.0
        means = filled[:, 3] / filled[:, 2]
        quarter = len(means) // 4
        first, last = np.median(means[1 : quarter + 1]), np.median(means[-quarter:])
        middle = np.median(means[quarter : len(means) - quarter])
        error = np.sqrt(np.mean(np.diff(means) ** 2) / 2) * np.sqrt(2 / quarter)
        change = float(last / first - 1) if first else 0.0
        grows = first < middle < last
        return change if change >= _SLOWER and grows and last - first > _ERRORS * error else 0.0

    def _memory_growth(self) -> MemoryGrowth | None:
        if len(self._memory) < 2:
            return None
        steps, size = np.array(self._memory, np.int64).T
        after_start = len(size) // 4
        growth = 0.0
        if len(size) >= _TREND_PIECES and steps[-1] > steps[after_start]:
            quarter = len(size) // 4
            second, last = size[quarter : 2 * quarter], size[-quarter:]
            grown = float(np.median(last) - np.median(second))
            rises = second.max() < last.min() and np.mean(np.diff(size[quarter:]) >= 0) > 0.5
            if rises and grown > max(_GROWTH_BYTES, _GROWTH * float(np.median(second))):
                between = np.median(steps[-quarter:]) - np.median(steps[quarter : 2 * quarter])
                growth = grown / max(1.0, float(between))
        return MemoryGrowth(int(size[min(1, after_start)]), int(size[-1]), growth)


def _kind_of(total: Rows) -> Rows:
    """Return the kind of each time: an eighth of an octave."""
    octaves = np.log2(np.maximum(total, 1))
    kinds: Rows = np.floor(octaves * (1 << _FINENESS)).astype(np.int64)
    return kinds


def _sum(kinds: dict[tuple[int, int], Rows], chosen: Iterable[tuple[int, int]]) -> Rows:
    """Return how many steps some kinds have, and the sums of their columns."""
    sums: Rows = np.sum([kinds[key] for key in chosen], axis=0)
    return sums


def _typical(kinds: dict[tuple[int, int], Any]) -> list[tuple[int, int]]:
    """Return the kinds of most steps: those around the median, with all that join them."""
    plain = sorted(key for key in kinds if not key[0]) or sorted(kinds)
    clusters = list(_clusters(plain))
    counts = [sum(int(kinds[key][0]) for key in cluster) for cluster in clusters]
    passed, half = 0, sum(counts) / 2
    for cluster, count in zip(clusters, counts, strict=True):
        passed += count
        if passed >= half:
            return cluster
    return clusters[-1]


def _groups(
    kinds: dict[tuple[int, int], Any], typical: Sequence[tuple[int, int]]
) -> Iterator[list[tuple[int, int]]]:
    """Iterate over the other kinds: with one mark together, without one as they join."""
    for marks in sorted({key[0] for key in kinds}):
        others = sorted(key for key in kinds if key[0] == marks and key not in typical)
        if marks and others:
            yield others
        elif others:
            yield from _clusters(others)


def _clusters(keys: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Cut sorted kinds where too many have no step."""
    cluster = [keys[0]]
    for before, key in pairwise(keys):
        if key[0] != before[0] or key[1] - before[1] > _APART:
            yield cluster
            cluster = []
        cluster.append(key)
    yield cluster


def _name_of(marks: Marks, longer: float, *, data: float, backward: float, optimizer: float) -> str:
    """Name rare work by its marks, else by the part of the step that is longer."""
    for mark, name in _NAMES.items():
        if marks & mark == mark:
            return name
    longer_by = {WAITING: data, "backward": backward, "optimizer": optimizer}
    part, most = max(longer_by.items(), key=lambda item: item[1])
    return part if most >= longer / 2 else OUTSIDE
