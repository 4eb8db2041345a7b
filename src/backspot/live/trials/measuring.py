"""Times variants in turn, in random order, until the answer is clear or the time is spent.

What is compared is measured within moments: in each *round* every variant runs once. A variant that
is measured after the other one also measures how the machine changed meanwhile: the same code twice
differs by up to 39% then. The code as it is runs twice in each round: how far these two differ is
the *noise* of the trial, and a difference within the noise says nothing.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from backspot.formatting import duration
from backspot.interrupts import pass_on
from backspot.live.torch_internals.allocator import OutOfMemoryError
from backspot.live.torch_internals.process import sleep_on_gpu
from backspot.live.trials.trial import AS_IT_IS, Piece, Times, Trial, Worth
from backspot.live.trials.twins import Refused, Run
from backspot.results.trials import Tried, Variant, Verdict
from backspot.threads import thread_count

Now = Callable[[], int]
"""A clock, in nanoseconds."""
LEAST_SHARE = 0.01
"""A remedy helps if a step saves this share of its time."""
_AGAIN = "as it is, again"
_LEAST_SAMPLE = 500_000  # nanoseconds: shorter work is repeated within a sample
_MOST_REPEATS = 200
_FEWEST_ROUNDS = 3
"""From three rounds on, the range of all differences to both runs of the code as it is holds the
difference at 97.6%: of nine times, three come first by chance in one of 84 orders."""
_LEAST_ROUNDS, _CLEAR_ROUNDS, _MOST_ROUNDS = 6, 15, 41
"""From six rounds on, differences within rounds have a narrower interval of 95%. From 15 on, narrow
intervals end the trial."""
_NARROW = 0.005
_FIRST_CALLS = 5_000_000_000
"""What first calls on a GPU may take beside the other ones: libraries look for kernels in them."""
_LATE = 3
_HOPELESS = 5
"""A variant that takes this many times as long, and too long to be run again, does not help."""
_MOST_OF_SAMPLE = 10.0
"""How many times as long as a sample of it in the caches the recorded work may take: twice the five
times by which the samples of a masked language model's last layer and loss were too fast."""
_CACHES = {"cpu": 64 << 20, "cuda": 256 << 20}
_MOST_SLEEP = 60_000_000  # nanoseconds
_OWN_TIME: Now | None = getattr(time, "thread_time_ns", None)  # not every system has it
_FINE = 1_000_000
"""Nanoseconds at which a clock may tick. The one of a thread's own time ticks 64 times a second on
Windows, which says of itself that it tells 100 ns."""


def tick_of(clock: Now) -> int:
    """Return in what steps a clock of this thread goes forward: the shortest of three."""

    def tick() -> int:
        start = now = clock()
        while now == start:
            now = clock()
        return now - start

    return min(tick() for _ in range(3))


@cache
def clock_of_thread(own: Now | None = _OWN_TIME) -> Now:
    """Return the clock of a thread's own time, or clock time where that is too coarse for a sample.

    Args:
        own: the system's clock of a thread's own time, in nanoseconds.
    """
    return time.perf_counter_ns if own is None or tick_of(own) > _FINE else own


def sleep_before(device: torch.device, ns: float, most: int = _MOST_SLEEP) -> None:
    """Have a GPU sleep before what is issued next, so that the host gets ahead of it.

    Args:
        device: the GPU, which need not be the current one.
        ns: how long, at 2 GHz; a slower clock makes it longer.
        most: it sleeps no longer, whatever is asked for, as nothing ends a kernel that runs.
    """
    with torch.cuda.device(device):
        sleep_on_gpu(round(2 * min(ns, most)))


class Clock:
    """How long some work takes the host, and how long the device.

    On a CPU with one thread that is the CPU time of the thread, which other processes do not
    lengthen. On a GPU the device sleeps until the host has launched all, so that it never waits for
    the host; where the host waits for the device within the work, all of it is the host's time.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.is_cuda = device, device.type == "cuda"
        self.cpu_time = thread_count() == 1 and not torch.cuda.is_initialized()
        self._now = clock_of_thread() if self.cpu_time else time.perf_counter_ns
        self._ahead: dict[Run, int] = {}
        self._late: Counter[Run] = Counter()
        self.waits = False
        self._buffer: torch.Tensor | None = None

    def of(self, run: Run, times: int, *, cold: bool) -> Times:
        """Return what one call takes.

        Args:
            cold: put other data into the caches before, as the rest of a step does.
        """
        if cold:
            self._cool()
        if self.is_cuda:
            return self._on_gpu(run, times)
        start = self._now()
        for _ in range(times):
            run()
        return (self._now() - start) / times, 0.0

    def _cool(self) -> None:
        if self._buffer is None:
            size = _CACHES["cuda" if self.is_cuda else "cpu"]
            self._buffer = torch.zeros(size // 4, device=self._device, dtype=torch.float32)
        self._buffer.add_(1.0)

    def _on_gpu(self, run: Run, times: int) -> Times:
        torch.cuda.synchronize(self._device)
        ahead = 0 if self.waits else min(2 * times * self._ahead.get(run, 0), _MOST_SLEEP)
        if ahead:
            sleep_before(self._device, ahead)
        stream = torch.cuda.current_stream(self._device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        start = time.perf_counter_ns()
        for _ in range(times):
            run()
        host = time.perf_counter_ns() - start
        end.record(stream)
        torch.cuda.synchronize(self._device)
        if self.waits:
            return (time.perf_counter_ns() - start) / times, 0.0
        self._late[run] += 0 < ahead < host
        self._ahead[run] = min(self._ahead.get(run, 1 << 62), host // times)
        return host / times, 1e6 * begin.elapsed_time(end) / times

    def settle(self) -> None:
        """See whether the host waits within the work: then it always waits for the sleep too."""
        self.waits = any(count >= _LATE for count in self._late.values())


@dataclass
class _Timed:
    """A variant that is measured: the repeats of each of its pieces, and its samples."""

    pieces: Sequence[Piece]
    repeats: int = 1
    samples: list[Times] = field(default_factory=list)
    wall_ns: int = 0

    def sample(self, clock: Clock, *, cold: bool) -> Times:
        """Return what all pieces take in a step."""
        host = device = 0.0
        start = time.perf_counter_ns()
        for piece in self.pieces:
            if piece.before is not None:
                piece.before()
            took = clock.of(piece.run, self.repeats, cold=cold)
            host, device = host + piece.calls * took[0], device + piece.calls * took[1]
        wall = time.perf_counter_ns() - start
        self.wall_ns = min(self.wall_ns or wall, wall)
        return host, device

    @property
    def typical(self) -> Times:
        """The medians of the samples."""
        host, device = zip(*self.samples, strict=True)
        return statistics.median(host), statistics.median(device)


def measure(
    trial: Trial,
    clock: Clock,
    step_ns: int,
    seconds: float,
    worth: Worth,
    *,
    most_seconds: float = 0.0,
) -> Tried:
    """Run each variant in turn, in an order of its own in each round.

    Args:
        step_ns: how long a step takes.
        seconds: how long the trial may take.
        worth: what a step saves.
        most_seconds: how long it may take where three rounds, which can tell, need more than that.

    Raises:
        Refused: If one call takes too long.
    """
    begin = time.perf_counter_ns()
    last = begin + round(1e9 * max(seconds, most_seconds))
    running, left_out, end = _started(trial, clock, begin + round(1e9 * seconds))
    number = 0
    if len(running) > 1:
        running[_AGAIN] = _Timed(trial.variants[AS_IT_IS], running[AS_IT_IS].repeats)
        number = _rounds(running, trial, clock, step_ns, (end, max(end, last)))
    factor = trial.known_ns / max(*running[AS_IT_IS].typical, 1.0)
    # Where both differ much, the recording is not about exactly this.
    most = _MOST_OF_SAMPLE if trial.of_sample else 2.5
    scale = factor if 0.4 < factor < most else 1.0
    direct = clock.waits or not clock.is_cuda

    def saves_of(timed: _Timed) -> list[float]:
        if _FEWEST_ROUNDS <= number < _LEAST_ROUNDS:
            differences = _ranges(running, timed)
        else:
            differences = _differences(running[AS_IT_IS], timed)
        ends = list(zip(*differences, strict=True))
        if not math.isfinite(differences[0][1]):
            ends = ends[:1]
        if trial.worth is not None and timed is not running.get(_AGAIN):
            saves = sorted(trial.worth([(scale * host, scale * device) for host, device in ends]))
        else:
            saved = [host for host, _ in ends] if direct else worth(ends)
            saves = sorted(scale * ns for ns in saved)
        return saves if len(saves) > 1 else [-math.inf, *saves, math.inf]

    noise = 0.0
    if number >= _FEWEST_ROUNDS:
        low, _, high = saves_of(running[_AGAIN])
        noise = max(-low, high)
    host, device = running[AS_IT_IS].typical

    def judged(name: str) -> Variant:
        """What takes longer as it is, host or device, is what a variant is said to take."""
        times = sorted(scale * sample[int(device > host)] for sample in running[name].samples)
        quarter = len(times) // 4
        takes = round(statistics.median(times)), round(times[quarter]), round(times[-1 - quarter])
        if name == AS_IT_IS:
            return Variant(name, *takes)
        low, middle, high = saves_of(running[name])
        verdict = verdict_of((middle, low, high), step_ns, noise)
        least, most = (round(ns if math.isfinite(ns) else middle) for ns in (low, high))
        return Variant(name, *takes, round(middle), least, most, verdict)

    outcomes = (left_out.get(name) or judged(name) for name in trial.variants)
    variants = (
        replace(
            variant,
            note=variant.note or trial.notes.get(variant.name, ""),
            changes_training=variant.name in trial.changing,
        )
        for variant in outcomes
    )
    return Tried(trial.what, tuple(variants), number, cpu_time=clock.cpu_time)


def _started(
    trial: Trial, clock: Clock, end: int
) -> tuple[dict[str, _Timed], dict[str, Variant], int]:
    """Run each variant for the first times: some fail, and some are so slow that once is enough."""
    running: dict[str, _Timed] = {}
    left_out: dict[str, Variant] = {}
    first_calls = _FIRST_CALLS
    for name, pieces in trial.variants.items():
        timed, begin = _Timed(pieces), time.perf_counter_ns()
        now = running.get(AS_IT_IS, timed)
        if now is not timed and end - begin < len(trial.variants) * now.wall_ns:
            left_out[name] = Variant(name, verdict="undecided", note="no time was left")
            continue
        try:
            timed.samples = [timed.sample(clock, cold=trial.cold)]
            if now is timed:
                _check_time(timed, end, calls=2)
            elif 4 * timed.wall_ns > end - begin and not clock.is_cuda:
                left_out[name] = _too_long(name, timed, now)
                continue
            if clock.is_cuda:
                more = min(time.perf_counter_ns() - begin, first_calls)
                end, first_calls = end + more, first_calls - more
            # The host is ahead from now on.
            for _ in range(_LATE if clock.is_cuda else 1):
                timed.samples = [timed.sample(clock, cold=trial.cold)]
            if now is timed:
                _check_time(timed, end, calls=2 * _LEAST_ROUNDS)
            running[name] = timed
        except Refused:
            raise
        except OutOfMemoryError as error:  # of copies, beside the training: it may have room
            if now is timed:
                raise Refused(reason(error)) from None
            left_out[name] = Variant(name, verdict="undecided", note="no memory was left")
        except Exception as error:
            pass_on(error)
            if now is timed:
                raise Refused(reason(error)) from None
            left_out[name] = Variant(name, verdict="fails", note=reason(error))
    clock.settle()
    _leave_the_best(running, left_out, end - time.perf_counter_ns())
    return running, left_out, end


def _leave_the_best(running: dict[str, _Timed], left_out: dict[str, Variant], left: int) -> None:
    """Leave out the slowest variants as long as six rounds of all take more time than is left."""
    while len(running) > 2:
        cost = running[AS_IT_IS].wall_ns + sum(timed.wall_ns for timed in running.values())
        if _LEAST_ROUNDS * cost <= left:
            break
        name = max(list(running)[1:], key=lambda name: sum(running[name].samples[-1]))
        left_out[name] = _too_long(name, running.pop(name), running[AS_IT_IS])


def _too_long(name: str, timed: _Timed, now: _Timed) -> Variant:
    """Return a variant that cannot be run again, by the calls so far."""
    took, as_it_is = round(sum(timed.typical)), round(sum(now.typical))
    if took < _HOPELESS * as_it_is:
        return Variant(name, verdict="undecided", note="no time was left")
    return Variant(name, *(took,) * 3, *(as_it_is - took,) * 3, "does not help", "one call")


class TooLong(Refused):
    """One call takes too long for the time that a trial may take."""


def _check_time(timed: _Timed, end: int, calls: int) -> None:
    if calls * timed.wall_ns > end - time.perf_counter_ns():
        raise TooLong(
            f"one call takes {duration(timed.wall_ns)}, too long for the time that a trial may take"
        )


def reason(error: BaseException) -> str:
    """Return the first line of an error, for a note."""
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}{': ' if first else ''}{first[:120]}"


def _rounds(
    running: Mapping[str, _Timed],
    trial: Trial,
    clock: Clock,
    step_ns: int,
    ends: tuple[int, int],
) -> int:
    """Measure, and return how many rounds that were.

    Args:
        ends: when to end, and when to end before there are three rounds.
    """
    shortest = min(timed.wall_ns for timed in running.values() if timed.wall_ns) or 1
    for timed in running.values():
        if not trial.cold:
            timed.repeats = min(math.ceil(_LEAST_SAMPLE / shortest), _MOST_REPEATS)
        timed.samples, timed.wall_ns = [], 0
    # The global generator is the training's.
    order, shuffle = list(running.values()), random.Random(0)  # noqa: S311 - no secret
    for number in range(1, _MOST_ROUNDS + 1):
        shuffle.shuffle(order)
        for timed in order:
            timed.samples.append(timed.sample(clock, cold=trial.cold))
        left = ends[number < _FEWEST_ROUNDS] - time.perf_counter_ns()
        if sum(timed.wall_ns for timed in order) > left:
            break
        if number >= _CLEAR_ROUNDS and number % 2 and _all_narrow(running, step_ns):
            break
    return number


def _all_narrow(running: Mapping[str, _Timed], step_ns: int) -> bool:
    now = running[AS_IT_IS]
    return all(
        high - low < _NARROW * step_ns
        for timed in running.values()
        for _, low, high in _differences(now, timed)
    )


def _differences(now: _Timed, new: _Timed) -> list[tuple[float, float, float]]:
    """Return the intervals of what the host saves, and of what the device saves."""
    pairs = list(zip(now.samples, new.samples, strict=True))
    return [interval([a[clock] - b[clock] for a, b in pairs]) for clock in (0, 1)]


def _ranges(running: Mapping[str, _Timed], new: _Timed) -> list[tuple[float, float, float]]:
    """Return the medians and ranges of all differences to the code as it is, as ``_differences``.

    The code as it is runs twice in each round, and both runs count.
    """
    again = running[_AGAIN]
    now = [*running[AS_IT_IS].samples, *(again.samples if new is not again else ())]
    ranges = []
    for clock in (0, 1):
        apart = [a[clock] - b[clock] for a in now for b in new.samples]
        ranges.append((statistics.median(apart), min(apart), max(apart)))
    return ranges


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of differences, and the interval that holds it at 95%.

    The interval is between two of the sorted differences: as many come before it as a coin falls on
    one side with a probability of 2.5%. With less than six, it has no ends.
    """
    ordered = sorted(differences)
    count, tail, outside = len(ordered), 0.0, 0
    while outside < count // 2:
        tail += math.comb(count, outside) / 2**count
        if tail > 0.025:
            break
        outside += 1
    middle = statistics.median(ordered)
    if not outside:
        return middle, -math.inf, math.inf
    return middle, ordered[outside - 1], ordered[count - outside]


def verdict_of(saves: Sequence[float], step_ns: float, noise: float = 0.0) -> Verdict:
    """Return what a saving and its interval mean for a step; less than the noise means nothing."""
    middle, low, high = saves
    least = LEAST_SHARE * step_ns
    if middle >= least and low > max(least / 2, noise):
        return "helps"
    return "does not help" if high + noise < least else "undecided"
