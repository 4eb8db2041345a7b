"""The data set in worker processes: what a step then waits for its batch.

All of it runs in a process that is forked, so what the data set changes in itself is lost with it.
Open files alone are shared with it, with the position in them.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import math
import mmap
import os
import random
import select
import signal
import socket
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from backspot.live.surroundings import cpus_of_process
from backspot.live.torch_internals.batches import Loading
from backspot.live.trials.measuring import verdict_of
from backspot.live.trials.twins import Refused
from backspot.results.trials import Tried, Variant

LATEST_S = 2.0
"""How long the last batch may take when the time is up."""
_BATCHES, _FIRST = 10, 3
"""How many batches of a block count at least, and how many before do not: they wait for workers to
start. Of many workers, which deliver in turn, these are three rounds, and one before."""
_ROUNDS = 3
_BLOCKS = 3
_LOADS = "loads"
_LEAST = 3
"""Of how many rounds there is a mean with its error."""
_SHARE_OF_BLOCK = 0.6
"""Of the time, what the first block may take."""
_PROBE = 8
"""Samples that tell how long a batch takes to load."""
_ENOUGH = 1.2
"""How many times the workers are tried that would just keep up."""
_OPEN = (io.IOBase, socket.socket, mmap.mmap)
_OPEN_ELSEWHERE = ("h5py", "lmdb", "sqlite3", "pyodbc", "psycopg2", "zipfile", "tarfile")
_MOST_VISITED = 20_000


def workers(
    loading: Loading | None, step_ns: int, computes: int, seconds: float
) -> tuple[Tried, float]:
    """Try other numbers of workers, beside a step that computes for so long.

    Args:
        loading: how the training loads its batches, if that is known.
        step_ns: how long a step takes.
        computes: what of it is not spent waiting for a batch.
        seconds: how long the blocks of batches may take.

    Returns:
        What was tried, and how many nanoseconds one process takes to load a batch.

    Raises:
        Refused: If the loader cannot be read apart from the training.
    """
    if loading is None:
        raise Refused("no DataLoader is known")
    _check(loading)
    found = _in_child(loading, computes, seconds)
    now = loading.workers
    if len(found.get(str(now), ())) < _LEAST:
        raise Refused("the data set is too slow for the time that is left")
    numbers = [now, *sorted(int(one) for one in found if one not in (str(now), _LOADS))]
    waits = {number: found[str(number)] for number in numbers}
    variants = [_variant(waits[one], f"num_workers={one}", waits[now], step_ns) for one in numbers]
    what = f"{type(loading.dataset).__name__}, beside {computes / 1e6:.1f} ms of computing"
    return Tried(what, tuple(variants), min(map(len, waits.values()))), found[_LOADS][0]


def cores() -> int:
    """Return how many processes can run at a time."""
    return max(1, math.ceil(cpus_of_process() or os.cpu_count() or 1))


def numbers_of(now: int, loads: float, computes: float, most: int) -> list[int]:
    """Return what numbers of workers to try: as it is, what keeps up, half of it and twice as many.

    Args:
        now: how many there are.
        loads: how long one process loads a batch.
        computes: how long a step computes.
        most: how many processes can run at a time.
    """
    enough = min(most, max(1, math.ceil(_ENOUGH * loads / max(1.0, computes))))
    others = {max(1, enough // 2), enough, min(most, 2 * enough)}
    return [now, *sorted(others - {now})]


def _check(loading: Loading) -> None:
    """Refuse what cannot be read without a trace."""
    if isinstance(loading.dataset, IterableDataset):
        raise Refused("an IterableDataset cannot be read ahead without losing batches")
    if not hasattr(os, "fork") or loading.sampler is None:
        raise Refused("the data set cannot be read in another process")
    if name := _open_in(loading.dataset):
        raise Refused(f"the data set holds an open {name}")


def _open_in(root: object) -> str:
    """Return the class of something open that an object refers to, or ``""``."""
    visited: set[int] = set()
    pending = [root]
    while pending and len(visited) < _MOST_VISITED:
        referent = pending.pop()
        if id(referent) in visited or isinstance(
            referent, (type, torch.Tensor, ModuleType, FunctionType)
        ):
            continue
        visited.add(id(referent))
        home = type(referent).__module__.partition(".")[0]
        if isinstance(referent, _OPEN) or home in _OPEN_ELSEWHERE:
            return type(referent).__name__
        pending += gc.get_referents(referent)
    return ""


def _in_child(loading: Loading, computes: int, seconds: float) -> Mapping[str, list[int]]:
    """Return the waits of the steps of each number of workers, measured in another process."""
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()  # with the workers, in a group that can be ended
            os.close(read)
            torch.set_num_threads(1)
            found = _steps(loading, computes, seconds)
            _tell(write, found)
        except BaseException as error:
            _tell(write, {"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(0)
    try:
        os.close(write)
        answer = _told(read, time.monotonic() + seconds + LATEST_S)
    finally:
        os.close(read)
        try:
            os.killpg(child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if "error" in answer:
        raise Refused(answer["error"])
    return answer


def _tell(write: int, times: Mapping[str, Any]) -> None:
    """Write what a process has found, and that this is all of it."""
    left = memoryview(json.dumps(times).encode() + b"\n")
    while left:
        left = left[os.write(write, left) :]


def _told(read: int, until: float) -> dict[str, Any]:
    """Return what another process has found; nothing where it has not told all in time.

    The end of a pipe does not tell that: its workers have the other end, too.

    Args:
        until: in seconds of ``time.monotonic``.
    """
    poll = select.poll()  # ``select`` takes no large descriptors
    poll.register(read, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        if not poll.poll(1000 * max(0.0, until - time.monotonic())):
            return {}
        if not (more := os.read(read, 1 << 16)):
            return {}
        line += more
    times: dict[str, Any] = json.loads(line)
    return times


def _steps(loading: Loading, computes: int, seconds: float) -> dict[str, list[int]]:
    """Go through blocks of batches, of each number in turn, until the time is up.

    Of batches that take long to load, a part is loaded, beside as small a part of the step.

    Returns:
        For each number of workers the mean wait of a step in each round of them, and how long one
        process takes to load a batch.
    """
    end = time.monotonic() + seconds
    sampler = copy.deepcopy(loading.sampler, {id(loading.dataset): loading.dataset})
    batches = iter(sampler)
    first = next(batches)
    loads = _loads(loading, first)
    numbers = numbers_of(loading.workers, loads, computes, cores())
    takes = [max(computes, loads / one) if one else computes + loads for one in numbers]
    whole = sum(
        (skipped + counted) * ns + loads
        for (skipped, counted), ns in zip(map(_of_block, numbers), takes, strict=True)
    )
    part = min(1.0, _SHARE_OF_BLOCK * 1e9 * seconds / whole)
    if can_be_cut := isinstance(first, (list, tuple)) and len(first) > 0:
        size = max(1, round(part * len(first)))
        part = size / len(first)
    else:
        part = 1.0
    most = sum(max(map(_of_block, numbers)))
    indices = [one[:size] if can_be_cut else one for one in (first, *islice(batches, most - 1))]
    waits: dict[str, list[int]] = {str(number): [] for number in numbers}
    waits[_LOADS] = [round(loads)]
    order = random.Random(0)  # noqa: S311 - no secret
    for _ in range(_BLOCKS):
        for number in order.sample(numbers, len(numbers)):
            skipped, counted = _of_block(number)
            times = _block(loading, indices[: skipped + counted], number, part * computes, end)
            each = max(1, number)
            waits[str(number)] += [
                round(statistics.fmean(times[at : at + each]) / part)
                for at in range(skipped, len(times) - each + 1, each)
            ]
            if time.monotonic() > end:
                return waits
    return waits


def _of_block(workers: int) -> tuple[int, int]:
    """Return how many batches of a block do not count, and how many do: whole rounds."""
    each = max(1, workers)
    rounds = max(_ROUNDS, -(-_BATCHES // each))
    return max(_FIRST, each), rounds * each


def _loads(loading: Loading, batch: Any) -> float:
    """Return how long one process takes to load a batch, in nanoseconds, by a part of it."""
    can_be_cut = isinstance(batch, (list, tuple)) and len(batch) > _PROBE
    probe = batch[:_PROBE] if can_be_cut else batch
    takes = []
    for one in _loader(loading, [probe] * 3, 0):
        del one
        takes.append(time.perf_counter_ns())
    return (takes[2] - takes[1]) * (len(batch) / _PROBE if can_be_cut else 1.0)


def _block(
    loading: Loading, indices: Sequence[Any], workers: int, computes: float, end: float
) -> list[int]:
    """Return how long each batch lets a step wait, of some batches, until the time is up."""
    times: list[int] = []
    batches = iter(_loader(loading, indices, workers))
    while True:
        begin = time.perf_counter_ns()
        if next(batches, None) is None:
            return times
        times.append(time.perf_counter_ns() - begin)
        if time.monotonic() > end:
            return times
        _compute(computes)


def _loader(loading: Loading, indices: Sequence[Any], workers: int) -> DataLoader[Any]:
    more: dict[str, Any] = {"prefetch_factor": loading.prefetched} if workers else {}
    return DataLoader(
        loading.dataset,
        batch_sampler=indices,
        collate_fn=loading.collate,
        num_workers=workers,
        worker_init_fn=loading.begin_worker,
        generator=torch.Generator().manual_seed(0),
        **more,
    )


def _compute(ns: float) -> None:
    """Compute for so long of this thread's own time, which workers may take cores from."""
    x = torch.ones(64, 64)
    end = time.thread_time_ns() + ns
    while time.thread_time_ns() < end:
        torch.mm(x, x)


def _variant(waits: list[int], name: str, now: list[int], step_ns: int) -> Variant:
    if len(waits) < _LEAST:
        return Variant(name, verdict="undecided", note="no time was left")
    # Means, as workers deliver in turn.
    low, _, high = (max(0, round(quantile)) for quantile in statistics.quantiles(waits, n=4))
    takes = max(0, round(statistics.fmean(waits))), low, high
    if waits is now:
        return Variant(name, *takes)
    saves = statistics.fmean(now) - statistics.fmean(waits)
    spread = statistics.variance(now) / len(now) + statistics.variance(waits) / len(waits)
    middle, least, most = (round(saves + ends * spread**0.5) for ends in (0, -2, 2))
    verdict = verdict_of((middle, least, most), step_ns)
    return Variant(name, *takes, middle, least, most, verdict)
