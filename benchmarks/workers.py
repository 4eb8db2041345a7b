"""Worker processes, and the one driver that all benchmarks use.

A worker is the same benchmark started with ``--worker``. Driver and worker exchange JSON lines: a
job goes in (a dict with a ``"name"``), and its record comes out. A worker that crashes, hangs or
takes too much memory costs the job that it was doing: the driver reports what happened, starts
another worker and goes on. Every record has an ``"end"``:

- ``done``: the record is complete.
- ``error``, ``memory``, ``crash``, ``timeout``: the job failed. The record holds what was known by
  the last stage, the stage's name, and the error in one line.
- ``no time left``: the job was not done.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

Job = dict[str, Any]
Record = dict[str, Any]
Stage = Callable[[str, Record], None]
"""Takes the name of the stage that a job enters, and what is known so far."""
Handler = Callable[[Job, Stage], Record]
"""Does one job."""

NO_TIME = "no time left"
_GRACE_S = 20  # for the jobs in flight when the time is up
_START_S = 150  # for a new process to import what it needs, beside others that do the same
_ROOT = Path(__file__).parents[1]


def short(error: object, length: int = 300) -> str:
    """Return an error on one line."""
    name = f"{type(error).__name__}: " if isinstance(error, BaseException) else ""
    text = name + " ".join(str(error).split())
    return text if len(text) <= length else f"{text[: length - 1]}…"


# In the worker -----------------------------------------------------------------------------------


def serve(handle: Handler) -> None:
    """Be a worker: read jobs from standard input and write records to standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not come between the answers
    ranked = int(os.environ.get("WORLD_SIZE", "1")) > 1

    def answer(**said: Any) -> None:
        answers.write(json.dumps(said, default=str) + "\n")

    for line in sys.stdin:
        done, error = _attempt(
            handle, json.loads(line), lambda name, record: answer(stage=name, record=record)
        )
        answer(**done)
        # After this the device's context is beyond use, and other ranks wait for this one.
        if error is not None and (ranked or _is_fatal(error)):
            os._exit(3)
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _attempt(handle: Handler, job: Job, stage: Stage) -> tuple[Record, Exception | None]:
    entered = "start"

    def enter(name: str, record: Record) -> None:
        nonlocal entered
        entered = name
        stage(name, record)

    try:
        return {"record": handle(job, enter), "end": "done"}, None
    except Exception as error:
        traceback.print_exc()
        end = "memory" if _is_out_of_memory(error) else "crash" if _is_fatal(error) else "error"
        return {"end": end, "stage": entered, "error": short(error)}, error


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate" in text


def _is_fatal(error: BaseException) -> bool:
    """Whether the process's device context is beyond use."""
    return "CUDA error" in str(error) or "AcceleratorError" in type(error).__name__


def _keep(known: Record, _: str, record: Record) -> None:
    known.update(record)


# In the driver -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """How crowded the machine is.

    Attributes:
        workers: how many workers at a time; 0: the driver does the jobs itself.
        timeout_s: time limit of one job.
        host_gib: resident memory of one worker at most.
        start_s: what a new worker may take beyond ``timeout_s``.
    """

    workers: int
    timeout_s: float
    host_gib: float = float("inf")
    start_s: float = _START_S


def _log_file() -> IO[bytes]:
    return tempfile.TemporaryFile("a+b")  # appending: reading it does not move the writers


@dataclass
class _Worker:
    """One process, or one for each rank; the first rank's process answers."""

    command: Sequence[str]
    ranks: int = 1
    log: IO[bytes] = field(default_factory=_log_file)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    buffer: bytes = b""

    def do(self, job: Job, phase: Phase, is_over: Callable[[], bool]) -> Record | None:
        """Do a job; ``None`` if the time is up."""
        limit = phase.timeout_s
        self.log.truncate(0)
        if not self.processes or self._is_dead():
            limit += phase.start_s
            self._start()
        began = time.monotonic()
        stage, record = "start", {}
        try:
            for process in self.processes:
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
        except OSError:
            return self._ended("crash", stage, record)
        while True:
            line = self._line()
            if line is not None:
                answer = json.loads(line)
                if answer.get("end") == "done":
                    return answer["record"] | {"end": "done"}
                if "end" in answer:
                    if answer["end"] == "crash" or self.ranks > 1:
                        self.close()  # it is about to end, and must not take another job along
                    return record | answer
                stage, record = answer["stage"], answer["record"]
            elif self._is_dead():
                time.sleep(self.ranks - 1)  # the other ranks may have something to say
                return self._ended("crash", stage, record)
            elif time.monotonic() - began > limit:
                return self._ended("timeout", stage, record)
            elif self._resident() > phase.host_gib * 2**30:
                return self._ended("memory", stage, record)
            elif is_over():
                self.close()
                return None

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            process.stdin.close()
            if process.stdout is not None:
                process.stdout.close()
        self.processes = []

    def said(self) -> list[str]:
        """The lines of the log since the job began."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace").strip().splitlines()

    def _start(self) -> None:
        self.close()
        self.buffer = b""
        path = os.pathsep.join(p for p in (str(_ROOT), os.environ.get("PYTHONPATH", "")) if p)
        for rank, environment in enumerate(_rank_environments(self.ranks)):
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=self.log if rank else subprocess.PIPE,
                stderr=self.log,
                env={**os.environ, "PYTHONPATH": path, **environment},
            )
            self.processes.append(process)

    def _is_dead(self) -> bool:
        return any(process.poll() is not None for process in self.processes)

    def _line(self) -> bytes | None:
        if b"\n" not in self.buffer:
            descriptor = self.processes[0].stdout.fileno()
            if not select.select([descriptor], [], [], 0.2)[0]:
                return None
            self.buffer += os.read(descriptor, 1 << 20)
        line, found, rest = self.buffer.partition(b"\n")
        if not found:
            return None
        self.buffer = rest
        return line

    def _resident(self) -> int:
        try:
            usage = Path(f"/proc/{self.processes[0].pid}/statm")
            return int(usage.read_text(encoding="utf-8").split()[1]) * mmap.PAGESIZE
        except (OSError, IndexError):
            return 0

    def _ended(self, end: str, stage: str, record: Record) -> Record:
        codes = [process.poll() for process in self.processes]
        self.close()
        tail = " ".join(" ".join(self.said()).split())[-240:]
        why = {"timeout": "took too long", "memory": "took too much host memory"}
        code = next((code for code in codes if code), 0)
        return record | {"end": end, "stage": stage, "error": why.get(end, f"exit {code}: …{tail}")}


def _rank_environments(count: int) -> list[dict[str, str]]:
    """Return the environment of each of ``count`` ranks on this machine."""
    if count == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def worker_command(run: Any) -> list[str]:
    """Return the command of a worker: this command again, which ends with the number of workers."""
    return [sys.executable, "-u", "-m", "benchmarks", run.question, *run.argv, "--worker"]


def do_alone(job: Job, command: Sequence[str], timeout_s: float) -> Record:
    """Do one job in a process of its own, started for it."""
    worker = _Worker([*command, "1"])
    try:
        record = worker.do(job, Phase(1, timeout_s, start_s=0), lambda: False)
    finally:
        worker.close()
    return record or {"end": NO_TIME}


def run_jobs(
    jobs: Iterable[Job],
    command: Sequence[str],
    start: Callable[[], Handler],
    phases: Sequence[Phase],
    *,
    seconds: float = float("inf"),
    ranks: int = 1,
    fresh: bool = False,
    late: Callable[[Job], bool] = lambda _: False,
    ended: Callable[[Job, Record], None] = lambda _, __: None,
    quiet: bool = False,
) -> list[Record]:
    """Do jobs; those that fail are tried again in the next phase.

    Args:
        jobs: what to do.
        command: starts a worker; the number of workers is appended.
        start: gives the handler for a phase without workers.
        phases: from crowded to lonely.
        seconds: when to stop; what is in flight then gets a little longer.
        ranks: how many processes do each job together.
        fresh: whether each job gets a process of its own.
        late: which jobs wait for the second phase.
        ended: called with each job and its final record, one at a time.
        quiet: whether to print nothing.

    Returns:
        A record a job, in the order of the jobs.
    """
    todo = list(jobs)
    records: dict[int, Record] = {}
    began = time.monotonic()
    stop, lock = threading.Event(), threading.Lock()

    def is_over(grace: float = _GRACE_S) -> bool:
        return stop.is_set() or time.monotonic() > began + seconds + grace

    def finish(index: int, record: Record, said: Sequence[str]) -> None:
        records[index] = record
        if not quiet:
            end = record["end"]
            what = end if end == "done" else f"{end}: {record['error']}"
            spent = time.monotonic() - began
            name = todo[index]["name"]
            print(f"[{spent:6.1f} s, {len(records)}/{len(todo)}] {name} {what}", flush=True)
            for line in said[-12:] if end != "done" else ():
                print(f"    {line}", flush=True)
        ended(todo[index], record)

    def work(phase: Phase, queue: deque[int], is_last: bool) -> None:
        worker = _Worker([*command, str(phase.workers)], ranks)
        try:
            while not is_over(0):
                with lock:
                    if not queue:
                        return
                    index = queue.popleft()
                record = worker.do(todo[index], phase, is_over)
                if fresh:
                    worker.close()
                with lock:
                    if record is not None and (is_last or record["end"] == "done"):
                        finish(index, record, worker.said())
        except BaseException:
            stop.set()
            raise
        finally:
            worker.close()

    for number, phase in enumerate(phases):
        waits = late if number == 0 and len(phases) > 1 else lambda _: False
        queue = deque(i for i, job in enumerate(todo) if i not in records and not waits(job))
        is_last = number == len(phases) - 1
        if phase.workers == 0:
            handle = start()
            while queue and not is_over(0):
                index = queue.popleft()
                known: Record = {}
                done, _ = _attempt(handle, todo[index], partial(_keep, known))
                finish(index, known | done.pop("record", {}) | done, ())
            continue
        count = min(phase.workers, len(queue))
        with ThreadPoolExecutor(max(1, count)) as pool:
            threads = [pool.submit(work, phase, queue, is_last) for _ in range(count)]
            try:
                for thread in threads:
                    thread.result()
            except BaseException:
                stop.set()
                raise
    if not quiet:
        left = len(todo) - len(records)
        print(f"{len(records)} done, {left} left, {time.monotonic() - began:.0f} s", flush=True)
    return [records.get(index, {"end": NO_TIME}) for index in range(len(todo))]
