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
import pickle
import random
import select
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from backspot.interrupts import later
from backspot.live.plan.room import room_on
from backspot.live.surroundings import cpus_of_process
from backspot.live.torch_internals.batches import Loading
from backspot.live.trials.measuring import reason, verdict_of
from backspot.live.trials.twins import Refused
from backspot.results.trials import Tried, Variant

resource: Any
try:
    import resource
except ImportError:  # Windows
    resource = None

LATEST_S = 2.0
"""How long the last batch may take when the time is up."""
_BATCHES, _FIRST = 10, 3
"""How many batches of a block count at least, and how many before do not: they wait for workers to
start. Of many workers, which deliver in turn, these are three rounds, and two before. In the first
of these nothing is computed, or what is ready at the start would hide that workers are late."""
_ROUNDS = 3
_BLOCKS = 3
_LEAST = 3
"""Of how many rounds there is a mean with its error."""
_SHARE_OF_BLOCK = 0.6
"""Of the time, what the first block may take."""
_PROBE = 8
"""Samples that tell how long a batch takes to load."""
_ENOUGH = 1.2
"""How many times the workers are tried that would just keep up."""
_OF_WORKER_BYTES = 128 * 2**20
"""What a worker takes beside its batches: pages that it changes are its own, and libraries."""
_BEING_MADE = 2
"""How many batches a worker holds beside those that are ready: samples, and the batch of them."""
_OF_WORKER_FILES = 8
"""How many descriptors a worker takes beside those of tensors: its queues and its end."""
_SHARED_MEMORY, _FILES_OPEN = Path("/dev/shm"), Path("/proc/self/fd")  # noqa: S108 - Linux's own
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_OPEN = (io.IOBase, socket.socket, mmap.mmap)
_OPEN_ELSEWHERE = ("h5py", "lmdb", "sqlite3", "pyodbc", "psycopg2", "zipfile", "tarfile")
_MOST_VISITED = 20_000


class OfWorkers(NamedTuple):
    """What was found of a loader's workers, in nanoseconds.

    Attributes:
        tried: the waits of a step with each number of workers.
        loads: how long one process takes to load a batch by itself.
        waits: of the workers as they are, the wait of a step by how long it computes.
    """

    tried: Tried
    loads: float
    waits: Mapping[int, float]


def workers(
    loading: Loading | None,
    step_ns: int,
    computes: int,
    seconds: float,
    others: Collection[int] = (),
) -> OfWorkers:
    """Try other numbers of workers, beside a step that computes for so long.

    Args:
        loading: how the training loads its batches, if that is known.
        step_ns: how long a step takes.
        computes: what of it is not spent waiting for a batch.
        seconds: how long the blocks of batches may take.
        others: for how long other steps compute; the workers as they are are tried beside each.

    Raises:
        Refused: If the loader cannot be read apart from the training.
    """
    if loading is None:
        raise Refused("no DataLoader is known")
    _check(loading)
    trial = _in_child(loading, (computes, *others), seconds)
    now, waits = loading.workers, trial.beside(computes)
    if now in trial.errors:
        raise Refused(trial.errors[now])
    if len(waits.get(now, ())) < _LEAST:
        raise Refused("the data set is too slow for the time that is left")
    numbers = [now, *sorted(waits.keys() - {now})]
    variants = [
        _variant(waits[one], f"num_workers={one}", waits[now], step_ns, trial.errors.get(one, ""))
        for one in numbers
    ]
    what = f"{type(loading.dataset).__name__}, beside {computes / 1e6:.1f} ms of computing"
    tried = Tried(what, tuple(variants), min(map(len, waits.values())))
    of_now = {step: of for (number, step), of in trial.waits.items() if number == now}
    means = {step: statistics.fmean(of) for step, of in of_now.items() if len(of) >= _LEAST}
    return OfWorkers(tried, trial.loads, means)


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


@dataclass
class _Trial:
    """What a process has told of its loaders.

    Attributes:
        loads: how long one process takes to load a batch, in nanoseconds.
        waits: for each number of workers, and how long a step computes beside them, the mean wait
            of the step in each round of them.
        errors: why a number of workers cannot be used.
    """

    loads: float = 0.0
    waits: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def beside(self, computes: int) -> dict[int, list[int]]:
        """Return the waits by number of workers, beside a step that computes for so long."""
        return {number: of for (number, step), of in self.waits.items() if step == computes}


def _in_child(loading: Loading, steps: Sequence[int], seconds: float) -> _Trial:
    """Return the waits of the steps of each number of workers, measured in another process.

    Args:
        steps: how long a step computes: first beside all numbers, then beside that of now.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    ends = list(os.pipe())
    child = None
    try:
        with later():
            child = os.fork()
        if child == 0:
            os.close(ends[0])
            _read(loading, steps, seconds, lambda block: _tell(ends[1], block))
            os._exit(0)
        os.close(ends.pop())
        return _trial(_told(ends[0], time.monotonic() + seconds + LATEST_S))
    finally:
        if child == 0:  # an error or a signal came before it could end above
            os._exit(0)
        for end in ends:
            os.close(end)
        if child is not None:
            _end(child)


def _read(
    loading: Loading,
    steps: Sequence[int],
    seconds: float,
    tell: Callable[[Mapping[str, Any]], None],
) -> None:
    """Go through blocks of batches in a process that has just been forked, and tell their waits."""
    try:
        os.setsid()  # with the workers, in a group that can be ended
        with suppress(OSError):  # where memory ends, this process goes, not the training
            _OOM_SCORE.write_text("1000", "utf-8")
        gc.freeze()  # a collection would write to all that the processes share
        torch.set_num_threads(1)
        _steps(loading, steps, seconds, tell)
    except BaseException as error:
        tell({"error": str(error) if isinstance(error, Refused) else reason(error)})
    else:
        tell({})


def _end(child: int) -> None:
    """End a process, and those that it has started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _trial(blocks: Iterator[Mapping[str, Any]]) -> _Trial:
    """Return what blocks of batches say together."""
    trial = _Trial()
    for block in blocks:
        trial.loads = block.get("loads", trial.loads)
        for number, step in block.get("beside", ()):
            trial.waits[number, step] = []
        number, error = block.get("workers"), block.get("error")
        if number is not None and error:
            trial.errors[number] = error
        elif number is not None:
            trial.waits[number, block["step"]] += block["waits"]
        elif error and not any(trial.waits.values()):
            raise Refused(error)
    return trial


def _tell(write: int, block: Mapping[str, Any]) -> None:
    """Write a line with what a process has found; an empty one ends it."""
    left = memoryview(json.dumps(block).encode() + b"\n")
    while left:
        left = left[os.write(write, left) :]


def _told(read: int, until: float) -> Iterator[dict[str, Any]]:
    """Yield what another process finds, one line after the other, until its end or a time.

    The end of a pipe does not tell that: its workers have the other end, too.

    Args:
        until: in seconds of ``time.monotonic``.
    """
    poll = select.poll()  # ``select`` takes no large descriptors
    poll.register(read, select.POLLIN)
    content = b""
    while poll.poll(1000 * max(0.0, until - time.monotonic())):
        if not (more := os.read(read, 1 << 16)):
            return
        *lines, content = (content + more).split(b"\n")
        for line in lines:
            if not (block := json.loads(line)):
                return
            yield block


def _steps(
    loading: Loading,
    steps: Sequence[int],
    seconds: float,
    tell: Callable[[Mapping[str, Any]], None],
) -> None:
    """Go through blocks of batches, of each number in turn, until the time is up.

    Of batches that take long to load, a part is loaded, beside as small a part of the step. The
    first block is that of the number as it is: without it, the others say nothing.

    Args:
        tell: called with what is known after each block.
    """
    end, computes = time.monotonic() + seconds, steps[0]
    sampler = copy.deepcopy(loading.sampler, {id(loading.dataset): loading.dataset})
    batches = iter(sampler)
    if (first := next(batches, None)) is None:
        raise Refused("an epoch has no batch")
    batch = _probed(loading, first)
    forks = _fork()
    can_be_cut = isinstance(first, (list, tuple)) and len(first) > 0
    for most in range(cores(), 0, -1):
        numbers = numbers_of(loading.workers, batch.loads, computes, most)
        beside = [(number, computes) for number in numbers]
        beside += [(loading.workers, step) for step in steps[1:]]
        takes = (_takes(number, batch.loads, each, forks) for number, each in beside)
        part = min(1.0, _SHARE_OF_BLOCK * 1e9 * seconds / sum(takes))
        size = max(1, round(part * len(first))) if can_be_cut else 0
        part = size / len(first) if can_be_cut else 1.0
        room = most_workers(batch, part, loading.prefetched)
        if max(numbers) <= room:
            break
    else:
        raise Refused("worker processes do not fit into what this machine has free")
    tell({"loads": batch.loads, "beside": beside})
    counts = [sum(_of_block(number)) for number in numbers]
    epoch = [first, *islice(batches, max(counts) - 1)]
    indices = [one[:size] if can_be_cut else one for one in islice(cycle(epoch), max(counts))]
    order = random.Random(0)  # noqa: S311 - no secret
    for block in range(_BLOCKS):
        first_of_all = beside[:1] if block == 0 else []
        others = beside[len(first_of_all) :]
        for number, step in [*first_of_all, *order.sample(others, len(others))]:
            skipped, counted = _of_block(number)
            each = max(1, number)
            try:
                times = _block(loading, indices[: skipped + counted], number, part * step, end)
            except Exception as error:
                tell({"workers": number, "error": reason(error)})
                if number == loading.workers:
                    return
                beside.remove((number, step))
                continue
            rounds = [
                round(statistics.fmean(times[at : at + each]) / part)
                for at in range(skipped, len(times) - each + 1, each)
            ]
            tell({"workers": number, "step": step, "waits": rounds})
            if time.monotonic() > end:
                return


def _takes(workers: int, loads: float, computes: float, forks: float) -> float:
    """Return how long a block of whole batches takes, in nanoseconds."""
    each = max(computes, loads / workers) if workers else computes + loads
    return sum(_of_block(workers)) * each + loads + workers * forks


def _fork() -> float:
    """Return how long a worker takes to start from this process, in nanoseconds."""
    begin = time.perf_counter_ns()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return float(time.perf_counter_ns() - begin)


def most_workers(batch: Batch, part: float, prefetched: int) -> int:
    """Return how many workers fit into what is free: memory, shared memory and descriptors.

    Args:
        part: of the batch, what is loaded.
        prefetched: how many batches each worker keeps ready.
    """
    content = part * batch.bytes
    of_worker = (prefetched + _BEING_MADE) * content + _OF_WORKER_BYTES
    fit = [room_on(torch.device("cpu")) / of_worker]
    with suppress(OSError, AttributeError):  # not all systems have it
        space = os.statvfs(_SHARED_MEMORY)
        fit.append(space.f_bavail * space.f_frsize / 2 / max(1.0, prefetched * content))
    if resource is not None:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = sum(1 for _ in _FILES_OPEN.iterdir()) if _FILES_OPEN.exists() else 0
        # A part of a batch has as many tensors, or fewer.
        files = prefetched * batch.tensors + _OF_WORKER_FILES
        fit.append(math.inf if most == resource.RLIM_INFINITY else (most - taken) / 2 / files)
    return int(min(10**6, *fit))


def _of_block(workers: int) -> tuple[int, int]:
    """Return how many batches of a block do not count, and how many do: whole rounds."""
    each = max(1, workers)
    rounds = max(_ROUNDS, -(-_BATCHES // each))
    return workers + max(_FIRST, each), rounds * each


class Batch(NamedTuple):
    """What a batch is to a process that loads it.

    Attributes:
        loads: how long one process takes to load it, in nanoseconds.
        bytes: what it takes of memory.
        tensors: how many tensors it has.
    """

    loads: float
    bytes: float
    tensors: float


def _probed(loading: Loading, batch: Any) -> Batch:
    """Return what a batch is by a part of it, which is loaded three times."""
    can_be_cut = isinstance(batch, (list, tuple)) and len(batch) > _PROBE
    probe = batch[:_PROBE] if can_be_cut else batch
    times = len(batch) / _PROBE if can_be_cut else 1.0
    content = _Content()
    takes: list[int] = []
    for one in _loader(loading, [probe] * 3, 0):
        takes.append(time.perf_counter_ns())
        if len(takes) == 1:
            with suppress(Exception):  # what cannot be pickled fails in the workers
                content.dump(one)
    loads = times * (takes[2] - takes[1])
    return Batch(loads, times * (content.bytes + content.file.tell()), times * content.tensors)


class _Content(pickle.Pickler):
    """Counts the tensors of a batch, which share memory, and writes what is sent beside them."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, pickle.HIGHEST_PROTOCOL)
        self.tensors = self.bytes = 0

    def persistent_id(self, obj: Any) -> int | None:
        """Count a tensor, by its whole storage."""
        if not isinstance(obj, torch.Tensor):
            return None
        self.tensors += 1
        is_dense = obj.layout == torch.strided
        self.bytes += obj.untyped_storage().nbytes() if is_dense else obj.nbytes
        return self.tensors


def _block(
    loading: Loading, indices: Sequence[Any], workers: int, computes: float, end: float
) -> list[int]:
    """Return by how much each batch makes a step longer, of some batches, until the time is up.

    That is the wait for it, and what the computing takes longer beside the workers.
    """
    times: list[int] = []
    for_batch = iter(_loader(loading, indices, workers))
    while True:
        begin = time.perf_counter_ns()
        if next(for_batch, None) is None:
            return times
        waited = time.perf_counter_ns()
        beside = 0.0
        if len(times) >= workers:
            _compute(computes)
            beside = time.perf_counter_ns() - waited - computes
        times.append(round(waited - begin + max(0.0, beside)))
        if time.monotonic() > end:
            return times


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


def _variant(waits: list[int], name: str, now: list[int], step_ns: int, error: str) -> Variant:
    if error:
        return Variant(name, verdict="fails", note=error)
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
