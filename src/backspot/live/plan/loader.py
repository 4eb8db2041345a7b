"""The data set in worker processes: what a step then waits for its batch.

All of it runs in a process that is forked, so what the data set changes in itself is lost with it.
Open files alone are shared with it, with the position in them.
"""

from __future__ import annotations

import copy
import gc
import io
import json
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

from backspot.live.torch_internals.batches import Loading
from backspot.live.trials.measuring import verdict_of
from backspot.live.trials.twins import Refused
from backspot.results.trials import Tried, Variant

LATEST_S = 2.0
"""How long the last batch may take when the time is up."""
_BATCHES, _FIRST = 10, 3
"""How many batches of a block count, and how many before do not: they wait for workers to start."""
_BLOCKS = 3
_OPEN = (io.IOBase, socket.socket, mmap.mmap)
_OPEN_ELSEWHERE = ("h5py", "lmdb", "sqlite3", "pyodbc", "psycopg2", "zipfile", "tarfile")
_MOST_VISITED = 20_000


def workers(loading: Loading | None, step_ns: int, computes: int, seconds: float) -> Tried:
    """Try other numbers of workers, beside a step that computes for so long.

    Args:
        loading: how the training loads its batches, if that is known.
        step_ns: how long a step takes.
        computes: what of it is not spent waiting for a batch.
        seconds: how long the blocks of batches may take.

    Raises:
        Refused: If the loader cannot be read apart from the training.
    """
    if loading is None:
        raise Refused("no DataLoader is known")
    _check(loading)
    now = loading.workers
    numbers = [
        now,
        *(number for number in (1, 2, 4) if number != now and number <= (os.cpu_count() or 1)),
    ]
    times = _in_child(loading, numbers, computes, seconds)
    waits = {number: times.get(str(number), []) for number in numbers}
    if len(waits[now]) < _BATCHES:
        raise Refused("the data set is too slow for the time that is left")
    variants = [
        _variant(waits[number], f"num_workers={number}", waits[now], step_ns) for number in numbers
    ]
    title = f"{type(loading.dataset).__name__}, beside {computes / 1e6:.1f} ms of computing"
    return Tried(title, tuple(variants), min(map(len, waits.values())))


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


def _in_child(
    loading: Loading, numbers: Sequence[int], computes: int, seconds: float
) -> Mapping[str, list[int]]:
    """Return the times of the steps of each number of workers, measured in another process."""
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()  # with the workers, in a group that can be ended
            os.close(read)
            torch.set_num_threads(1)
            times = _steps(loading, numbers, computes, seconds)
            _tell(write, times)
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


def _steps(
    loading: Loading, numbers: Sequence[int], computes: int, seconds: float
) -> dict[str, list[int]]:
    """Go through blocks of batches, of each number in turn, until the time is up."""
    sampler = copy.deepcopy(loading.sampler, {id(loading.dataset): loading.dataset})
    indices = list(islice(iter(sampler), _BATCHES + _FIRST))
    times: dict[str, list[int]] = {str(number): [] for number in numbers}
    end = time.monotonic() + seconds
    order = random.Random(0)  # noqa: S311 - no secret
    for _ in range(_BLOCKS):
        for number in order.sample(list(numbers), len(numbers)):
            more: dict[str, Any] = {"prefetch_factor": loading.prefetched}
            loader = DataLoader(
                loading.dataset,
                batch_sampler=indices,
                collate_fn=loading.collate,
                num_workers=number,
                worker_init_fn=loading.begin_worker,
                generator=torch.Generator().manual_seed(0),
                **(more if number else {}),
            )
            batches = iter(loader)
            for place in range(len(indices)):
                begin = time.perf_counter_ns()
                if next(batches, None) is None:
                    break
                _compute(computes)
                if place >= _FIRST:
                    times[str(number)].append(time.perf_counter_ns() - begin - computes)
                if time.monotonic() > end:
                    return times
            del batches
    return times


def _compute(ns: int) -> None:
    """Compute for so long of this thread's own time, which workers may take cores from."""
    x = torch.ones(64, 64)
    end = time.thread_time_ns() + ns
    while time.thread_time_ns() < end:
        torch.mm(x, x)


def _variant(waits: list[int], name: str, now: list[int], step_ns: int) -> Variant:
    if len(waits) < _BATCHES:
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
