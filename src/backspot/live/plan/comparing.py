"""One copy beside another: what both need, in turns, and how far their results are apart."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from backspot.formatting import duration
from backspot.live.plan.account import NOTHING, Step, Times
from backspot.live.plan.copies import Copy, relative
from backspot.live.plan.watching import Call, random_states
from backspot.live.trials.measuring import clock_of_thread, interval, sleep_before, verdict_of
from backspot.live.trials.twins import Refused
from backspot.results.plan import Difference, PlanVerdict, Rung
from backspot.threads import thread_count

Turns = Sequence[tuple[Times, Times]]
"""What two copies need, in each round."""
LEAST_ROUNDS, _CLEAR_ROUNDS, _MOST_ROUNDS = 6, 15, 41
"""From six rounds on there is an interval of 95%; from 15 on, narrow ones end a comparison."""
_ROUNDS_OF_LOSS = 5
_MOST_SLEEP = 1_000_000_000
"""Nanoseconds that a GPU sleeps at most: longer than a model's host needs, and not as long as one
that compiles again."""
_NARROW = 0.005
_AHEAD = 1.25
"""How many times as long as the host needs a GPU sleeps: a quarter longer."""
_MOSTLY = 0.8
"""Share of a run that the host needs to issue it, from which on the host decides how long it
takes: the last kernels end soon after they are issued."""
_CHUNK = 1 << 28
"""In such blocks memory is taken and given back to have PyTorch's statistics as they were."""


def times_of(copy: Copy) -> Times:
    """Return what a copy needs for the calls of a step, each as often as the step makes it.

    On a GPU each call runs once for the host's time, with nothing queued before it, and once for
    the device's: the GPU sleeps until the host has issued all, so that it never waits for the host.
    Where the host decides how long the first run takes, two more follow upon each other at once, as
    steps of a training do, and the second of them is the host's time: after a wait a host needs up
    to a third more.
    """
    of_calls = [(call.count, _of_call(copy, call)) for call in copy.watched.calls]
    return Times(*(sum(n * times[index] for n, times in of_calls) for index in range(3)))


def host_limits(times: Times) -> bool:
    """Whether the host decides how long a run takes, from one that nothing was queued before."""
    return times.host > _MOSTLY * times.whole


def _of_call(copy: Copy, call: Call) -> Times:
    on_gpu = copy.device.type == "cuda"
    alone = not on_gpu and thread_count() == 1
    clock = clock_of_thread() if alone else time.perf_counter_ns
    copy.wait()
    begin, start = time.perf_counter_ns(), clock()
    copy.run(call)
    host = clock() - start
    copy.wait()
    wall_ns = time.perf_counter_ns() - begin
    if not on_gpu:
        return Times(host, 0.0, wall_ns)
    asleep = _AHEAD * host
    if host_limits(Times(host, whole=wall_ns)):
        copy.run(call)
        start = clock()
        copy.run(call)
        host = clock() - start
        copy.wait()
    # On the stream that the copy runs on, as the current GPU may be another one.
    sleep_before(copy.device, asleep, _MOST_SLEEP)
    stream = torch.cuda.current_stream(copy.device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record(stream)
    copy.run(call)
    last.record(stream)
    copy.wait()
    return Times(host, 1e6 * first.elapsed_time(last), wall_ns)


def in_turns(now: Copy, new: Copy, step_ns: int, seconds: float) -> Turns:
    """Return what two copies need, round by round, in a random order in each.

    A first run of each does not count. A machine that changes changes both alike.
    """
    end = time.perf_counter() + seconds
    both = (now, new)
    for copy in both:
        times_of(copy)
    rounds: list[tuple[Times, Times]] = []
    shuffle = random.Random(0)  # noqa: S311 - no secret; the global generator is the training's
    longest = 0.0
    while len(rounds) < _MOST_ROUNDS:
        begin = time.perf_counter()
        times = {copy: times_of(copy) for copy in shuffle.sample(both, 2)}
        rounds.append((times[now], times[new]))
        longest = max(longest, time.perf_counter() - begin)
        if time.perf_counter() + longest > end or (
            len(rounds) >= _CLEAR_ROUNDS and _are_narrow(rounds, step_ns)
        ):
            break
    return rounds


def _are_narrow(rounds: Turns, step_ns: int) -> bool:
    for clock in (0, 1):
        _, low, high = interval([now[clock] - new[clock] for now, new in rounds])
        if high - low >= _NARROW * step_ns:
            return False
    return True


def with_copy(
    rung: Rung, step: Step, rounds: Turns, more: Times = NOTHING, steps: int = 1
) -> tuple[Rung, Step]:
    """Return a rung, and its step, with a copy in place of another one.

    Args:
        step: the step without it.
        rounds: what both copies need.
        more: what the step with it needs beside that.
        steps: how many steps the one with it does the work of.
    """
    now, new = _typical(rounds)
    with_new = step.with_copy(now, new, more)
    saves = step.ns - with_new.ns / steps
    # A single run of a few microseconds may be held up for milliseconds.
    usual = now.whole / max(1.0, now.host)
    savings = [
        step.ns - step.with_copy(Times(a.host, a.device, usual * a.host), b, more).ns / steps
        for a, b in rounds
    ]
    _, low, high = interval(savings)
    rung = predicted(rung, step.ns, (saves, min(low, saves), max(high, saves)))
    host, device = round(with_new.host / steps), round(with_new.device / steps)
    return replace(rung, host_ns=host, device_ns=device), with_new


def _typical(rounds: Turns) -> tuple[Times, Times]:
    """Return what two copies need: the median of one, and by what factor the other one differs.

    Other programs make a host half as fast for some seconds, in which it is so for both copies.
    """
    now, new = [], []
    for index in range(3):
        now.append(statistics.median(a[index] for a, _ in rounds))
        factor = statistics.median(b[index] / max(1.0, a[index]) for a, b in rounds)
        new.append(now[-1] * factor)
    return Times(*now), Times(*new)


def predicted(rung: Rung, before: float, saves: Sequence[float], measured: str = "") -> Rung:
    """Return a rung with the step as it is without what it saves.

    Args:
        before: the step without it.
        saves: the middle, the lower and the upper end; infinite of too few rounds for an interval.
        measured: what a trial says; ``"undecided"`` stays so, whatever the step is.
    """
    verdict = cast(PlanVerdict, measured if measured == "undecided" else verdict_of(saves, before))
    step, high, low = (max(1, round(before - ns)) if math.isfinite(ns) else 0 for ns in saves)
    if verdict == "undecided" and low == high:
        low = high = 0
    return replace(
        rung, before_ns=round(before), step_ns=step, low_ns=low, high_ns=high, verdict=verdict
    )


def with_unknown_loss(rung: Rung, loss: int, why: str) -> Rung:
    """Return a rung that is as uncertain as what its setting does to a loss that no copy ran.

    That can take half as long in another precision, or half as long again with the casts. A rung of
    too few rounds for an interval has none afterwards, either.

    Args:
        loss: how long the loss takes, in nanoseconds.
        why: why no copy ran it.
    """
    not_tried = f"the loss, {duration(loss)} outside of the model, was not tried: {why}"
    rung = replace(rung, note="; ".join(filter(None, (rung.note, not_tried))))
    if not rung.high_ns:
        return rung
    low, high = max(1, rung.low_ns - loss // 2), rung.high_ns + loss // 2
    sure = rung.verdict != "helps" or high < rung.before_ns
    return replace(rung, low_ns=low, high_ns=high, verdict=rung.verdict if sure else "undecided")


def loss_of(copy: Copy, step: Step) -> Times:
    """Return what the loss that runs with a copy takes of a step that has the copy's settings.

    The copy runs in turns with its loss and without it. A first run of each does not count.
    """
    watched, has_loss = copy.watched, copy.watched.has_loss
    rounds: list[tuple[Times, Times]] = []
    try:
        for _ in range(_ROUNDS_OF_LOSS + 1):
            watched.has_loss = True
            with_loss = times_of(copy)
            watched.has_loss = False
            rounds.append((with_loss, times_of(copy)))
    finally:
        watched.has_loss = has_loss
    return step.share_of(*_typical(rounds[1:]))


class Results:
    """What a run of the copy as it is gives, to hold those of other copies against.

    Attributes:
        draws: whether the models draw random numbers.
    """

    def __init__(self, base: Copy) -> None:
        self._first = _results(base)
        before, after = base.watched.calls[0].random, random_states()
        pairs = zip([before[0], *(before[1] or ())], [after[0], *(after[1] or ())], strict=True)
        self.draws = any(not torch.equal(output, other) for output, other in pairs)
        self._again = _apart(_results(base), self._first)

    def difference(self, new: Copy) -> Difference:
        """Return how far the results of another copy are from those of the copy as it is."""
        far = _apart(_results(new), self._first)
        return Difference(*far, *self._again)


_All = list[tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]]


def _results(copy: Copy) -> _All:
    """Return outputs, gradients and losses of each call, as copies."""
    copy.reset()
    results: _All = []
    for call in copy.watched.calls:
        outputs = [output.detach().clone() for output in copy.run(call, seen={})]
        gradients = [p.grad for p in copy.parameters() if p.grad is not None]
        copy.forget_gradients()
        losses = [output for output in outputs if not output.dim()]
        results.append((outputs, gradients, losses))
    return results


def _apart(results: _All, others: _All) -> tuple[float, float, float | None]:
    """Return the largest difference of outputs, of gradients, and of losses if there are any."""
    pairs = list(zip(results, others, strict=True))
    if any(len(a[1]) != len(b[1]) for a, b in pairs):
        raise Refused("with it, other parameters get gradients")
    far = [max(relative(a[kind], b[kind]) for a, b in pairs) for kind in range(3)]
    return far[0], far[1], far[2] if any(losses for *_, losses in others) else None


def memory_of(copy: Copy) -> int:
    """Return the most that a run of a copy has on its GPU at once; 0 on a CPU.

    PyTorch's statistics of the process have the same peak afterwards as before.
    """
    if copy.device.type != "cuda":
        return 0
    cuda, device = torch.cuda, copy.device
    peak = cuda.max_memory_allocated(device)
    copy.forget_gradients()
    cuda.reset_peak_memory_stats(device)
    before = cuda.memory_allocated(device)
    copy.run_all()
    most = int(cuda.max_memory_allocated(device) - before)
    copy.forget_gradients()
    _raise_peak(device, peak)
    return most


def _raise_peak(device: torch.device, peak: int) -> None:
    """Have the statistics say a peak that was before; as near to it as memory allows."""
    blocks: list[Any] = []
    while (missing := peak - torch.cuda.memory_allocated(device)) > 0:
        if torch.cuda.max_memory_allocated(device) >= peak:
            break
        try:
            size = min(missing, _CHUNK)
            blocks.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            break
