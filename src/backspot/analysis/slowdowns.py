"""Whether a part of the step has become slower than its own past.

Steps that follow each other are taken together to *pieces*, each with what its typical step takes
by part. So neither a step that the machine held up nor a change in rare work makes a part slower.
A part is slower when it is so in several pieces that follow each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backspot.analysis.training import BACKWARD, DATA, MARKS, OPTIMIZER, TOTAL

PARTS = ("data", "forward", "backward", "optimizer")
_SAID = {"data": "waiting for data", "step": "the step"}

_LEAST_STEPS, _MOST_STEPS = 20, 4096
_LEAST_NS = 2_000_000_000
"""A piece has so many steps, and lasts so long: what is over sooner is the machine's."""
_RECENT = 5
"""Pieces that must all be slow."""
_PAST = 10
"""Pieces that are needed to compare with."""
_MOST_PAST = 512
_TYPICAL = 0.4
"""The quantile of a typical step, below the median: in every second step may be rare work."""
_USUAL = 0.9
"""The quantile of the past that is still usual."""
_NOTABLE = 0.05
"""Share of the step from which a part counts, and by which it has to grow."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A part of the training's step that has become slower than its own past.

    Attributes:
        part: ``"data"``, ``"forward"``, ``"backward"`` or ``"optimizer"``; ``"step"`` if all of
            them are slower.
        before_ms: What it took of a typical step before, in milliseconds.
        now_ms: What it takes now, in milliseconds.
        since: The first step of those that are slower.
        step: The step of the alarm.

    Example:
        >>> print(backspot.Alarm("backward", 1.8, 2.9, since=41_000, step=41_400))
        backward 1.80 → 2.90 ms since step 41,000
    """

    __module__ = "backspot"

    part: str
    before_ms: float
    now_ms: float
    since: int
    step: int

    def __str__(self) -> str:
        place = _SAID.get(self.part, self.part)
        return f"{place} {self.before_ms:.2f} → {self.now_ms:.2f} ms since step {self.since:,}"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some steps that follow each other: the first one, and nanoseconds of each part."""

    first: int
    parts: NDArray[np.float64]


class Slowdowns:
    """Compares the steps of a training with those before.

    Args:
        slower_by: by how much a part must be slower, as a share.
    """

    def __init__(self, slower_by: float) -> None:
        self._slower_by = slower_by
        self._first = 0
        self._steps: list[Sequence[int]] = []
        self._lasted = 0
        self._recent: deque[_Piece] = deque(maxlen=_RECENT)
        self._past: list[_Piece] = []
        self._past_every = 1
        self._past_seen = 0

    def add(self, step: int, times: Sequence[int]) -> Sequence[Alarm]:
        """Add a step, and return what has become slower by now.

        Args:
            step: its number.
            times: as ``StepTimes.add`` takes them.
        """
        if not self._steps:
            self._first = step
        self._steps.append(times)
        self._lasted += times[TOTAL]
        count = len(self._steps)
        if count < _LEAST_STEPS or (self._lasted < _LEAST_NS and count < _MOST_STEPS):
            return ()
        steps = np.array(self._steps)
        self._steps.clear()
        self._lasted = 0
        steps = steps[steps[:, MARKS] == 0]
        if not len(steps):
            return ()
        if len(self._recent) == _RECENT:
            self._add_to_past(self._recent[0])
        self._recent.append(_Piece(self._first, _typical(steps)))
        return [*self._compare(step)] if self._is_enough else ()

    @property
    def _is_enough(self) -> bool:
        return len(self._recent) == _RECENT and len(self._past) >= _PAST

    def _add_to_past(self, piece: _Piece) -> None:
        self._past_seen += 1
        if self._past_seen % self._past_every == 0:
            self._past.append(piece)
        if len(self._past) >= _MOST_PAST:
            del self._past[1::2]
            self._past_every *= 2

    def _compare(self, step: int) -> Iterator[Alarm]:
        past = np.array([piece.parts for piece in self._past])
        recent = np.array([piece.parts for piece in self._recent])
        # The whole step is the last column.
        past, recent = (np.column_stack([times, times.sum(axis=1)]) for times in (past, recent))
        before, now = np.median(past, axis=0), np.median(recent, axis=0)
        least = _NOTABLE * before[-1]
        usual = np.quantile(past, _USUAL, axis=0)
        grown = (recent > np.maximum(before * (1 + self._slower_by), usual)).all(axis=0)
        slower = grown & (recent > before + least).all(axis=0)
        # Where time only moved from one part to another, nothing is slower.
        slower[:-1] &= now[-1] - before[-1] >= (now - before)[:-1] / 2
        if not slower.any():
            return
        since = self._recent[0].first
        notable = (before[:-1] >= least) | slower[:-1]
        is_common = bool(notable.sum() > 1 and grown[:-1][notable].all())
        is_whole = is_common or not slower[:-1].any()
        for name, is_slower, was, takes in zip(
            (*PARTS, "step"), slower, before / 1e6, now / 1e6, strict=True
        ):
            if (name == "step") if is_whole else (name != "step" and is_slower):
                yield Alarm(name, float(was), float(takes), since, step)
        self._past = [*self._recent]
        self._recent.clear()
        self._past_every = 1


def _typical(steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return what each part takes of a typical step.

    Of waiting for data it is the mean: late batches come now and then, such as one of each worker.
    """
    data, backward, optimizer = steps[:, DATA], steps[:, BACKWARD], steps[:, OPTIMIZER]
    forward = steps[:, TOTAL] - data - backward - optimizer
    others = np.quantile([forward, backward, optimizer], _TYPICAL, axis=1)
    return np.append(data.mean(), others)
