"""A typical step: the mean over the steps that the machine did not hold up.

A mean over whole steps adds up: what the modules take in a typical step is what the backward takes,
and the phases are the step. What happens in some of the steps only keeps its share: an optimizer's
step after four passes, a layer that is dropped at random, a rollout before sixteen updates. Where
the training is known to have a kind of step more often, or less, than the recording, the steps of
that kind count for their share of the training.

A *hiccup* is what the machine did to a step. It would change the mean by as much as it lasts, and
says nothing of the program, so steps with one are left out, and named. Only a step that ran the
same work as others can have one: a step with work of its own is as long as that work is, however
rare it is. A step is expected to take as long as the median of the steps with the same work, times
what it has in common with them: a sequence that is twice as long makes all modules slower alike, as
a busy machine does, and neither is a hiccup. What a module or a phase takes beyond that is its
*excess*, and so is what the whole step takes beyond that. A step has a hiccup

- if its excess is a fifth of the step and five standard deviations, or
- if that of one module or phase is a tenth of the step and five standard deviations of its own,
  although the whole step hides it.

A wait for a batch is a wait of the training, in each step or in one of many, and no excess. Nor is
a rollout that is longer than others, or what exceeds the expectation in the same place in several
steps: what recurs is what the training does. Where more than a quarter of the steps with the same
work are held up, the machine is busy all the time. A hiccup is then what stands out of that alone:
all kinds of steps are held up, and leaving out those of one kind would shift the shares of the
kinds. The other steps with the same work stand for those that are left out, so that a hiccup does
not change how often its kind of work is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from backspot.analysis.timeline import median
from backspot.results.costs import Hiccup
from backspot.results.training import WAITING, Training
from backspot.trace.events import Ints, Mask

_FEWEST = 3
"""Steps from which one of them can be told to be held up; also steps with the same work."""
_LONGER, _PLACE_LONGER = 0.2, 0.1
"""Shares of a step from which its excess is a hiccup: of the whole step, and of one place."""
_DEVIATIONS = 5
_NORMAL = 1.4826
"""Standard deviation of a normal distribution in median absolute deviations."""
_OFTEN = 4
"""What exceeds the expectation in one of so many steps is no hiccup."""
_SEVERAL, _ALIKE = 3, 2
"""What exceeds it in so many steps is no hiccup either, if in none of them it does so by so many
times as much as in another."""
_STANDS_OUT = 3
"""A hiccup of a busy machine is so many times what one in four of the steps exceeds."""
_PARTS = 10_000
"""The weight of a step that stands for no other."""
_LEAST = 0.003
"""Share of the step from which a place says what a step has in common with the others."""
_MOSTLY = 0.5
_NEARLY = 0.8
"""Share of the longest part's excess from which another one is as long."""


class RareSteps(msgspec.Struct, frozen=True):
    """Recorded steps of one kind, and how often the training has this kind.

    Attributes:
        steps: indices of the recorded steps of this kind, from 0.
        share: share (0 to 1) of the training's steps that are of this kind.
        waits: whether steps of this kind are longer as they wait for data.
    """

    steps: tuple[int, ...]
    share: float
    waits: bool = False

    def behind(self, first: int) -> RareSteps:
        """Return the same of a recording that begins with this step."""
        steps = tuple(step - first for step in self.steps if step >= first)
        return msgspec.structs.replace(self, steps=steps)

    def waiting(self, length: Ints, waited: Ints) -> RareSteps:
        """Return the same without steps that are longer for another reason than a wait for data.

        Args:
            length: the time of each recorded step, in nanoseconds.
            waited: the part of it in which the step waits for data.
        """
        if not self.waits or not len(length):
            return self
        longer, more = length - np.median(length), waited - np.median(waited)
        is_wait = more >= _WAITED * longer
        steps = tuple(step for step in self.steps if step < len(length) and is_wait[step])
        return msgspec.structs.replace(self, steps=steps)


_INEXACT = 0.25
"""Share by which a period that was noted can differ from a regular one."""
_WAITED = 0.25
"""Share of a step's excess from which it is a wait for data. Half of it is, as the host has it; a
device may work on meanwhile."""
_LEAST_ALIKE, _MOST_ALIKE = 0.5, 4.0
"""Rare work takes this many times as long in a recorded step as in the others, between these."""


def rare_steps(length: Ints, training: Training) -> tuple[RareSteps, ...]:
    """Return which recorded steps have the rare work of a training, and how often that has it.

    A recorded step has the work whose time is nearest to that by which the step is longer than
    most. Recording makes it longer than it is.

    Args:
        length: the time of each recorded step, in nanoseconds.
    """
    if len(length) < 2:
        return ()
    longer = length - np.median(length)
    by_nearest: dict[int, list[int]] = {}
    for step in np.flatnonzero(longer > 0).tolist():
        ratios = [longer[step] / max(1, work.wall_ns) for work in training.rare]
        nearest = min(
            range(len(ratios)), key=lambda index: abs(np.log(ratios[index])), default=None
        )
        if nearest is not None and _LEAST_ALIKE <= ratios[nearest] <= _MOST_ALIKE:
            by_nearest.setdefault(nearest, []).append(step)
    return tuple(
        RareSteps(tuple(steps), 1 / _period(steps, work.period), work.name == WAITING)
        for work, steps in ((training.rare[at], steps) for at, steps in sorted(by_nearest.items()))
    )


def _period(steps: Sequence[int], noted: float) -> float:
    """Return the period of rare work: that of the recorded steps, if it is regular.

    Args:
        steps: the recorded steps that have it.
        noted: number of steps so far for each that had it, which few steps make inexact.
    """
    gaps = set(np.diff(steps).tolist())
    if len(steps) > 2 and len(gaps) == 1 and abs(noted / min(gaps) - 1) < _INEXACT:
        return float(min(gaps))
    return noted


class TypicalStep(msgspec.Struct, frozen=True):
    """The steps that count, and means over them in whole nanoseconds.

    Attributes:
        weight: how much each recorded step counts, relative to the others; 0 for not at all.
        hiccups: the steps that do not count, those with the largest excess first.
        work: a number for each step; steps with the same number do the same work.
    """

    weight: Ints
    hiccups: tuple[Hiccup, ...] = ()
    work: Ints | None = None

    @property
    def chosen(self) -> Mask:
        """Whether each recorded step counts; at least one does."""
        chosen: Mask = self.weight > 0
        return chosen

    def mean(self, by_step: Ints) -> Ints:
        """Return the mean over the last axis, which has one entry a step, rounded down."""
        quotient, rest = np.divmod(by_step, self._sum)
        # Not the sum divided, because the sum of large times can exceed 63 bits.
        mean: Ints = quotient @ self.weight + rest @ self.weight // self._sum
        return mean

    def value(self, by_step: Ints) -> int:
        """Return the mean of one series, rounded down."""
        return int(self.mean(by_step))

    def lacking(self, by_step: Ints, value: int, step: int) -> int:
        """Return what one step that counts takes too little for the mean to be ``value``.

        It is below 0 where the step takes too much.
        """
        have = sum(int(ns) * int(weight) for ns, weight in zip(by_step, self.weight, strict=True))
        weight, least = int(self.weight[step]), value * self._sum
        if have < least:
            return -(-(least - have) // weight)
        return -max(0, -(-(have - (least + self._sum - 1)) // weight))

    def count(self, by_step: Ints) -> Ints:
        """Return the mean of counts over the last axis, rounded up: what happens is not none."""
        mean: Ints = -(-(by_step @ self.weight) // self._sum)
        return mean

    def apportioned(self, amount: Ints, step: Ints, *keys: Ints) -> Ints:
        """Return what a typical step has of each of these amounts. They sum to the mean exactly.

        The parts of any set sum to the set's mean but for the rounding. All of them sum to the mean
        rounded down, and those with one value of the first keys are at most one off.

        Args:
            amount: nanoseconds, of any steps.
            step: the step of each.
            keys: what the amounts are summed by, the most important first.
        """
        order = np.lexsort((step, *reversed(keys)))
        weight = self.weight[step[order]]
        quotient, rest = np.divmod(amount[order], self._sum)
        apportioned = np.zeros_like(amount)
        of_rests = np.diff(np.cumsum(rest * weight) // self._sum, prepend=0)
        apportioned[order] = quotient * weight + of_rests
        return apportioned

    def noise(self, times: Ints) -> float:
        """Return the share (0 to 1) of a whole that may belong to other parts than it seems to.

        This is the standard error of the shares of the parts: by how much the steps that count and
        do the same work disagree. It is 0 where there are no two such steps.

        Args:
            times: nanoseconds, with one row a part of the whole and one column a step.
        """
        totals = times.sum(axis=0)
        share = times / np.where(totals > 0, totals, 1)
        squares, compared = np.zeros(len(times)), 0
        work = np.zeros(len(totals), np.int64) if self.work is None else self.work
        for number in sorted(set(work[self.chosen].tolist())):
            of_kind = self.chosen & (work == number)
            count = np.count_nonzero(of_kind)
            if count > 1:
                squares += share[:, of_kind].var(axis=1, ddof=1) * count
                compared += count
        noise = np.sqrt(squares).sum() / 2 / compared if compared else 0.0
        return min(1.0, float(noise))

    def within(self, first: int, count: int) -> TypicalStep:
        """Return the same of some successive steps; of all of them if none of them counts."""
        weight = self.weight[first : first + count]
        return TypicalStep(weight) if weight.any() else every_step(count)

    @property
    def _sum(self) -> int:
        return int(self.weight.sum())


def every_step(count: int) -> TypicalStep:
    """Return the typical step that is the mean over all of the recorded ones."""
    return TypicalStep(np.ones(count, np.int64))


def typical_step(
    length: Ints,
    work: Ints | None = None,
    places: Ints | None = None,
    names: Sequence[str] = (),
    *,
    never: Sequence[str] = (),
    rare: Sequence[RareSteps] = (),
) -> TypicalStep:
    """Choose the steps that a typical step is the mean of, and how much each counts.

    Args:
        length: the clock time of each step, in nanoseconds, of one step at least.
        work: a number for each step; steps with the same number do the same work. ``None`` where
            that is not known: all steps count as alike.
        places: the clock time of each part of the step, with one row a part and one column a step.
            Parts may lie inside each other.
        names: what each part is called.
        never: the names of parts that hold up no step, however long they take.
        rare: the steps of which it is known how often the training has such steps.
    """
    steps = len(length)
    work = np.zeros(steps, np.int64) if work is None else work
    places = np.zeros((0, steps), np.int64) if places is None else places
    counts = _shares(steps, rare)
    kinds = _kinds(work, rare)
    excess, severity = np.zeros((1 + len(places), steps)), np.zeros(steps)
    if any(len(kind) >= _FEWEST for kind in kinds):
        # What is always this short holds up no step, and most modules of a large model are.
        long = np.flatnonzero(places.max(axis=1, initial=0) >= _LEAST * length.min())
        places, names = places[long], [names[place] for place in long.tolist()]
        times = np.concatenate([length[None], places]).astype(float)
        excused = np.array([False, *(name in never for name in names)], bool)
        excess, severity = _excess(times, kinds, excused)
    held_up = severity > 1
    for kind in kinds:
        usually = np.sort(severity[kind])[::-1][: 1 + max(1, len(kind) // _OFTEN)][-1]
        if usually > 1:  # the machine is busy all the time: only what stands out is a hiccup
            held_up[kind] = severity[kind] > _STANDS_OUT * usually
    for kind in (*kinds, np.arange(steps)):  # the calmest quarter is what others are held against
        calmest = kind[np.argsort(severity[kind], kind="stable")]
        held_up[calmest[: max(2, -(-len(kind) // _OFTEN))]] = False
    for kind in kinds:
        counts[kind] *= len(kind) / np.count_nonzero(~held_up[kind])
    counts[held_up] = 0
    weight = np.where(counts > 0, np.maximum(1, np.round(_PARTS * counts)), 0).astype(np.int64)
    hiccups = [_hiccup(step, excess[:, step], names) for step in np.flatnonzero(held_up).tolist()]
    ranked = sorted(hiccups, key=lambda hiccup: (-hiccup.longer_ns, hiccup.step))
    return TypicalStep(weight // np.gcd.reduce(weight), tuple(ranked), work)


def _shares(steps: int, rare: Sequence[RareSteps]) -> np.ndarray:
    """Return how much each step counts before any is left out; 1 where nothing more is known."""
    counts, is_known = np.ones(steps), np.zeros(steps, bool)
    for kind in rare:
        index = [step for step in kind.steps if 0 <= step < steps and not is_known[step]]
        if index and 0 < kind.share < 1:
            counts[index] = steps * kind.share / len(index)
            is_known[index] = True
    left = steps - counts[is_known].sum()
    if is_known.any() and not is_known.all() and left > 0:
        counts[~is_known] = left / np.count_nonzero(~is_known)
    return counts


def _kinds(work: Ints, rare: Sequence[RareSteps]) -> list[Ints]:
    """Return the steps of each kind: with the same work, and known to be rare or not."""
    group = np.zeros(len(work), np.int64)
    for number, kind in enumerate(rare, 1):
        group[[step for step in kind.steps if 0 <= step < len(work)]] = number
    pairs, pair_of = np.unique(np.stack([work, group]), axis=1, return_inverse=True)
    return [np.flatnonzero(pair_of.ravel() == kind) for kind in range(pairs.shape[1])]


def _excess(
    times: np.ndarray, kinds: Sequence[Ints], excused: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return by how much the step and its parts exceed what is expected, and how severe that is.

    Args:
        times: the clock time of the step, and of each part in a row of its own.
        kinds: the steps of each kind.
        excused: whether each row holds up no step.

    Returns:
        Nanoseconds, shaped as ``times``; and for each step its largest excess in units of what a
        hiccup has at least.
    """
    steps = times.shape[1]
    is_known = np.zeros(steps, bool)
    usual = times.copy()  # a step with work of its own takes what it takes
    for kind in kinds:
        if len(kind) >= _FEWEST:
            usual[:, kind] = median(times[:, kind], 1)[:, None]
            is_known[kind] = True
    usual *= np.where(is_known, _common(times[1:], usual), 1)
    excess = times - usual
    share = excess / np.maximum(usual[0], 1)
    deviation = _NORMAL * median(np.abs(share[:, is_known]), 1)[:, None]
    least = np.full((len(times), 1), _PLACE_LONGER)
    least[0] = _LONGER
    least = np.maximum(least, _DEVIATIONS * deviation)
    beyond = share > least
    recurs = _recurs(share, beyond, int(np.count_nonzero(is_known)))
    recurs[0] = False  # what is slow in the whole step may be slow in another place each time
    # What recurs, or is excused, is no part of what holds up the whole step.
    share[0] -= (share * beyond)[recurs & ~excused].sum(axis=0)
    share[0] -= np.maximum(share[excused], 0).sum(axis=0)
    share[recurs | excused] = 0
    excess[recurs | excused] = 0
    severity: np.ndarray = (share / least).max(axis=0)
    return excess, severity


def _recurs(share: np.ndarray, beyond: np.ndarray, steps: int) -> np.ndarray:
    """Return which places exceed the expectation often, or several times by as much."""
    times = beyond.sum(axis=1)
    least = np.where(beyond, share, np.inf).min(axis=1)
    most = np.where(beyond, share, 0).max(axis=1)
    alike = (times >= _SEVERAL) & (most <= _ALIKE * least)
    recurs: np.ndarray = (times >= max(2, steps / _OFTEN)) | alike
    return recurs


def _common(places: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """Return how many times as long as usual all parts of a step take alike, 1 at least."""
    step_usual, usual = usual[0], usual[1:]
    counts = (usual >= _LEAST * step_usual) & (usual > 0)
    ratios = np.where(counts, places / np.where(counts, usual, 1), np.nan)
    enough = counts.sum(axis=0) >= _FEWEST
    factors = np.ones(places.shape[1])
    factors[enough] = median(ratios[:, enough])
    shared: np.ndarray = np.maximum(factors, 1)
    return shared


def _hiccup(step: int, excess: np.ndarray, names: Sequence[str]) -> Hiccup:
    """Name a step that was held up, with the part that took at least half of the excess."""
    longest = max(float(excess[0]), float(excess.max()))
    place = ""
    if len(excess) > 1:
        most = float(excess[1:].max())
        if most >= _MOSTLY * longest and most > 0:
            # Of parts that lie inside each other, the last is the innermost.
            place = names[np.flatnonzero(excess[1:] >= _NEARLY * most)[-1]]
    return Hiccup(step, max(0, round(longest)), place)
