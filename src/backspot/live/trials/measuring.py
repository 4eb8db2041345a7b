"""Times variants in turn, in random order, until the answer is clear or the time is spent.

What is compared is measured within moments: in each *round* every variant runs once. A variant that
is measured after the other one also measures how the machine changed meanwhile: the same code twice
differs by up to 39% then.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from backspot.formatting import duration
from backspot.interrupts import pass_on
from backspot.live.torch_internals.process import sleep_on_gpu
from backspot.live.trials.trial import AS_IT_IS, Piece, Trial
from backspot.live.trials.twins import Refused, Run
from backspot.results.trials import Tried, Variant, Verdict

LEAST_SHARE = 0.01
"""A remedy helps if a step saves this share of its time."""
_LEAST_SAMPLE = 500_000  # nanoseconds: shorter work is repeated within a sample
_MOST_REPEATS = 200
_LEAST_ROUNDS, _CLEAR_ROUNDS, _MOST_ROUNDS = 6, 15, 41
"""From six rounds on there is an interval of 95%. After 15, a clear answer ends the trial."""
_DOUBT_OF_GPU = 0.06
"""Share of a step by which a remedy must be slower on a GPU to be told off: beside the training, a
trial of short kernels was up to that much slower than the same kernels within real steps."""
_HOPELESS = 5
"""A variant that takes this many times as long in its first call is not run again, on a CPU: on a
GPU the first call can look for the fastest kernel."""
_CACHES = 64 << 20
_CACHES_OF_GPU = 256 << 20
_MOST_SLEEP = 20_000_000


class Clock:
    """How long some work takes.

    On a CPU with one thread that is the CPU time of the thread, which other processes do not
    lengthen. On a GPU it is the time of the device alone, measured by events while the host is
    ahead; or where the host decides how long a step takes, until all of the work has ended.

    Args:
        device: where the work runs.
        host_decides: whether the steps of the training wait for the host.
        may_wait: whether the work can wait for something; PyTorch's operators on one thread do not.

    Attributes:
        doubt: share of a step by which a slower remedy may be no slower in real steps.
        first_is_slow: whether the first call of anything says nothing of the others.
    """

    def __init__(self, device: torch.device, *, host_decides: bool, may_wait: bool) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._by_events = self._is_cuda and not host_decides
        alone = torch.get_num_threads() == 1 and not torch.cuda.is_initialized()
        self._now = time.thread_time_ns if alone else time.perf_counter_ns
        self._may_wait = may_wait
        self.doubt = _DOUBT_OF_GPU if self._is_cuda else 0.0
        self.first_is_slow = self._is_cuda
        self._host_ns: dict[Run, int] = {}
        self._paused = 0  # how often the thread itself has waited
        self._buffer: torch.Tensor | None = None

    def of(self, run: Run, times: int, *, cold: bool) -> tuple[float, float]:
        """Return what one call takes, and what it takes by the clock of the wall, in nanoseconds.

        Args:
            cold: put other data into the caches before, as the rest of a step does.
        """
        if cold:
            self._cool()
        if self._by_events:
            return self._of_device(run, times)
        self._wait()
        wall, start, before = time.perf_counter_ns(), self._now(), _pauses()
        for _ in range(times):
            run()
        self._wait()
        took, wall = self._now() - start, time.perf_counter_ns() - wall
        self._paused += _pauses() - before
        return took / times, wall / times

    def _of_device(self, run: Run, times: int) -> tuple[float, float]:
        """The device sleeps until the host has launched all, so that it never waits for the host.

        The first call only says how long the host takes.
        """
        wall = time.perf_counter_ns()
        if run in self._host_ns:
            sleep_on_gpu(2 * min(times * self._host_ns[run], _MOST_SLEEP))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        host = time.perf_counter_ns()
        for _ in range(times):
            run()
        self._host_ns[run] = (time.perf_counter_ns() - host) // times
        end.record()
        self._wait()
        return 1e6 * begin.elapsed_time(end) / times, (time.perf_counter_ns() - wall) / times

    def _cool(self) -> None:
        if self._buffer is None:
            size = _CACHES_OF_GPU if self._is_cuda else _CACHES
            self._buffer = torch.zeros(size // 4, dtype=torch.float32, device=self._device)
        self._buffer.add_(1.0)

    def check(self, took: float, wall: float) -> bool:
        """Take the clock of the wall if this thread waited; return whether it was taken.

        A thread that other processes interrupt does not wait.
        """
        waited = self._may_wait and self._paused and took < 0.6 * wall
        if waited and self._now is time.thread_time_ns:
            self._now = time.perf_counter_ns
            return True
        return False

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)


def _pauses() -> int:
    """Return how often this thread has given up its core by itself; ever more where unknown."""
    with suppress(ImportError, AttributeError):  # Windows, macOS
        import resource

        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    return time.perf_counter_ns()


@dataclass
class _Timed:
    """A variant that is measured: the repeats of each of its pieces, and its samples."""

    pieces: Sequence[Piece]
    repeats: list[int] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    wall_ns: float = 0.0

    def sample(self, clock: Clock, *, cold: bool) -> float:
        """Return what all pieces take in a step."""
        total = walls = 0.0
        for piece, times in zip(self.pieces, self.repeats or [1] * len(self.pieces), strict=True):
            if piece.before is not None:
                piece.before()
            took, wall = clock.of(piece.run, times, cold=cold)
            total += piece.calls * took
            walls += wall * times
        self.wall_ns = min(self.wall_ns or walls, walls)
        return total


def measure(trial: Trial, clock: Clock, step_ns: int, seconds: float) -> Tried:
    """Run each variant in turn, in an order of its own in each round.

    Args:
        step_ns: how long a step takes.
        seconds: how long the trial may take.

    Raises:
        Refused: If one call takes too long.
    """
    end = time.perf_counter_ns() + round(1e9 * max(seconds, trial.allowed_s))
    running, failed = _started(trial, clock, end)
    if AS_IT_IS not in running:
        raise Refused(failed[AS_IT_IS].note)
    _leave_the_best(running, failed, end - time.perf_counter_ns())
    number = _rounds(running, trial, clock, step_ns, end) if len(running) > 1 else 0
    now = statistics.median(running[AS_IT_IS].samples)
    scale = trial.known_ns / now if trial.known_ns and now else 1.0
    # Where both differ much, the recording is not about exactly this.
    scale = scale if 0.4 < scale < 2.5 else 1.0
    variants = []
    for name in trial.variants:
        if name in running:
            note = trial.notes.get(name, "")
            found = _judged(name, running, scale, (step_ns, clock.doubt), note)
        else:
            found = failed[name]
            if found.verdict == "does not help":
                found = _hopeless(name, scale * found.ns, scale * now, trial.notes.get(name, ""))
        variants.append(found)
    return Tried(trial.what, tuple(variants), number)


def _started(trial: Trial, clock: Clock, end: int) -> tuple[dict[str, _Timed], dict[str, Variant]]:
    """Run each variant for the first times: some fail, and some are so slow that once is enough."""
    order = len(trial.variants)
    running: dict[str, _Timed] = {}
    failed: dict[str, Variant] = {}
    for name, pieces in trial.variants.items():
        one = _Timed(pieces)
        left = end - time.perf_counter_ns()
        if running and left < order * running[AS_IT_IS].wall_ns:
            failed[name] = Variant(name, verdict="undecided", note="no time was left")
            continue
        try:
            took = one.sample(clock, cold=trial.cold)  # the first call may also compile
            if name == AS_IT_IS:
                _check_time(one, left, calls=2)
            elif (
                took > _HOPELESS * running[AS_IT_IS].samples[-1]
                and 20 * one.wall_ns > left
                and not (trial.first_is_slow or clock.first_is_slow)
            ):
                failed[name] = Variant(name, round(took), verdict="does not help")
                continue
            took = one.sample(clock, cold=trial.cold)
            if name == AS_IT_IS:
                _check_time(one, end - time.perf_counter_ns(), calls=2 * _LEAST_ROUNDS)
                if clock.check(took, one.wall_ns):
                    took = one.sample(clock, cold=trial.cold)
        except Refused:
            raise
        except Exception as error:
            pass_on(error)
            failed[name] = Variant(name, verdict="fails", note=reason(error))
            if name == AS_IT_IS:
                break
            continue
        one.samples.append(took)
        running[name] = one
    return running, failed


def _leave_the_best(running: dict[str, _Timed], failed: dict[str, Variant], left: int) -> None:
    """Where the time is too short for all variants, go on with the one that was fastest so far."""
    others = [name for name in running if name != AS_IT_IS]
    others.sort(key=lambda name: running[name].samples[-1])
    if _LEAST_ROUNDS * sum(one.wall_ns for one in running.values()) > left:
        for name in others[1:]:
            del running[name]
            failed[name] = Variant(name, verdict="undecided", note="no time was left")


def _check_time(one: _Timed, left: int, calls: int) -> None:
    if calls * one.wall_ns > left:
        raise Refused(
            f"one call takes {duration(one.wall_ns)}, too long for the time that a trial may take"
        )


def reason(error: BaseException) -> str:
    """Return the first line of an error, for a note."""
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}{': ' if first else ''}{first[:120]}"


def _rounds(
    running: Mapping[str, _Timed], trial: Trial, clock: Clock, step_ns: int, end: int
) -> int:
    """Measure, and return how many rounds that were."""
    for one in running.values():
        count = 1
        if not trial.cold:
            shortest = min(other.wall_ns for other in running.values()) or 1
            count = min(math.ceil(_LEAST_SAMPLE / shortest), _MOST_REPEATS)
        one.repeats = [count] * len(one.pieces)
        one.samples.clear()
    # The global generator is the training's.
    order, shuffle = list(running.values()), random.Random(0)  # noqa: S311 - no secret
    for number in range(1, _MOST_ROUNDS + 1):
        shuffle.shuffle(order)
        for one in order:
            one.samples.append(one.sample(clock, cold=trial.cold))
        cost = sum(one.wall_ns * one.repeats[0] for one in order)
        if time.perf_counter_ns() + cost > end:
            break
        if number >= _CLEAR_ROUNDS and number % 2:
            said = (
                verdict_of(_saved(running, name, 1.0), step_ns, clock.doubt)
                for name in running
                if name != AS_IT_IS
            )
            if "undecided" not in said:
                break
    return number


def _saved(running: Mapping[str, _Timed], name: str, scale: float) -> tuple[int, int, int]:
    now, new = running[AS_IT_IS].samples, running[name].samples
    return interval([scale * (a - b) for a, b in zip(now, new, strict=True)])


def interval(differences: Sequence[float]) -> tuple[int, int, int]:
    """Return the median of differences, and the interval that holds it at 95%.

    The interval is between two of the sorted differences: as many come before it as a coin falls on
    one side with a probability of 2.5%. With less than six, it is as wide as numbers go.
    """
    ordered = sorted(differences)
    count, tail, outside = len(ordered), 0.0, 0
    while outside < count // 2:
        tail += math.comb(count, outside) / 2**count
        if tail > 0.025:
            break
        outside += 1
    middle = round(statistics.median(ordered))
    if not outside:
        return middle, -(1 << 62), 1 << 62
    return middle, round(ordered[outside - 1]), round(ordered[count - outside])


def verdict_of(saves: tuple[int, int, int], step_ns: int, doubt: float = 0.0) -> Verdict:
    """Return what a saving means for a step, where a loss up to a share of it may be none."""
    middle, low, high = saves
    least = LEAST_SHARE * step_ns
    if middle >= least and low >= least / 2:
        return "helps"
    against = -doubt * step_ns if doubt else least
    return "does not help" if high < against else "undecided"


def _judged(
    name: str,
    running: Mapping[str, _Timed],
    scale: float,
    step: tuple[int, float],
    note: str,
) -> Variant:
    """Return what a variant takes and saves; of a step its time and the doubt."""
    times = sorted(scale * one for one in running[name].samples)
    quarter = len(times) // 4
    ends = statistics.median(times), times[quarter], times[-1 - quarter]
    middle, low, high = (round(one) for one in ends)
    if name == AS_IT_IS:
        return Variant(name, middle, low, high, note=note)
    saves = _saved(running, name, scale)
    verdict = verdict_of(saves, *step)
    if saves[1] < -(1 << 61):
        saves = saves[0], saves[0], saves[0]
    return Variant(name, middle, low, high, *saves, verdict, note)


def _hopeless(name: str, took: float, now: float, note: str) -> Variant:
    ns, saves = round(took), round(now - took)
    once = f"{note}; one call" if note else "one call"
    return Variant(name, ns, ns, ns, saves, saves, saves, "does not help", once)
