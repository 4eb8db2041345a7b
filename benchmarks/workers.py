"""Worker processes that each do many jobs, and a driver that loses one job when one of them dies.

A worker is the same module started with ``--worker``; driver and worker exchange JSON lines. A job
is a dict with a ``"name"``. A worker that crashes, hangs, or takes too much memory is replaced, and
a job that failed is tried again in the next, less crowded phase; the last phase records what
happened.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.common import Budget, machine, write_json

__all__ = [
    "Child",
    "choose",
    "exclusive",
    "rank_environments",
    "resolve_device",
    "run_cases",
    "run_children",
    "turn",
]

Job = dict[str, Any]
Record = dict[str, Any]
Stage = Callable[[str, Record], None]

_GRACE_S = 20  # for the jobs in flight when the time is up
_START_S = 150  # for a new process to import what it needs, beside others that do so too
_PAGE = os.sysconf("SC_PAGE_SIZE")


def short(error: object, length: int = 300) -> str:
    """An error on one line."""
    name = f"{type(error).__name__}: " if isinstance(error, BaseException) else ""
    text = name + " ".join(str(error).split())
    return text if len(text) <= length else f"{text[: length - 1]}…"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had too little memory."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate" in text


def is_fatal(error: BaseException) -> bool:
    """Whether the process's device context is beyond use."""
    text = str(error)
    return "CUDA error" in text or "AcceleratorError" in type(error).__name__


def serve(handle: Callable[[Job, Stage], Record]) -> None:
    """Be a worker: read jobs from standard input, write records to standard output.

    Args:
        handle: does one job. It calls its second argument with the name of the stage that it
            enters and what is known so far, which is what remains if the worker dies there.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not come between

    def stage(name: str, record: Record) -> None:
        answers.write(json.dumps({"stage": name, "record": record}) + "\n")

    for line in sys.stdin:
        job = json.loads(line)
        entered = ["start"]

        def enter(name: str, record: Record, entered: list[str] = entered) -> None:
            entered[0] = name
            stage(name, record)

        fatal = False
        try:
            done: Record = {"record": handle(job, enter), "end": "done"}
        except Exception as error:
            fatal = is_fatal(error)
            end = "memory" if is_out_of_memory(error) else "crash" if fatal else "error"
            done = {"end": end, "stage": entered[0], "error": short(error)}
        answers.write(json.dumps(done) + "\n")
        if fatal:
            os._exit(3)
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Phase:
    """How crowded the machine is.

    Attributes:
        workers: how many at a time.
        timeout_s: for one job.
        host_gib: resident memory of one worker at most.
    """

    workers: int
    timeout_s: float
    host_gib: float


def _temporary() -> IO[str]:
    return tempfile.TemporaryFile("w+", errors="replace")


@dataclass
class _Worker:
    command: list[str]
    log: IO[str] = field(default_factory=_temporary)
    process: subprocess.Popen[bytes] | None = None
    buffer: bytes = b""

    def do(self, job: Job, phase: Phase, deadline: float) -> Record | None:
        """Do a job; ``None`` if the time is up."""
        limit = phase.timeout_s
        if self.process is None or self.process.poll() is not None:
            limit += _START_S
            self.log.truncate(0)
            self.buffer = b""
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log
            )
        began = time.monotonic()
        stage, record = "start", {}
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            return self._ended("crash", stage, record)
        while True:
            line = self._line()
            if line is not None:
                answer = json.loads(line)
                if answer.get("end") == "done":
                    return answer["record"] | {"end": "done"}
                if "end" in answer:
                    if answer["end"] == "crash":
                        self.close()  # it is about to end, and must not take another job along
                    return record | answer
                stage, record = answer["stage"], answer["record"]
            elif self.process.poll() is not None:
                return self._ended("crash", stage, record)
            elif time.monotonic() - began > limit:
                return self._ended("timeout", stage, record)
            elif self._resident() > phase.host_gib * 2**30:
                return self._ended("memory", stage, record)
            elif time.monotonic() > deadline + _GRACE_S:
                self.close()
                return None

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _line(self) -> bytes | None:
        if b"\n" not in self.buffer:
            descriptor = self.process.stdout.fileno()
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
            return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * _PAGE
        except (OSError, IndexError):
            return 0

    def _ended(self, end: str, stage: str, record: Record) -> Record:
        code = self.process.poll()
        self.close()
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - 2000))
        tail = " ".join(self.log.read().split())[-240:]
        said = {"timeout": "took too long", "memory": "took too much host memory"}
        error = said.get(end) or f"exit {code}: …{tail}"
        return record | {"end": end, "stage": stage, "error": error}


def run(
    jobs: Iterable[Job],
    command: Callable[[int], list[str]],
    phases: list[Phase],
    out: Path,
    *,
    seconds: float,
    late: Callable[[Job], bool] = lambda _: False,
) -> int:
    """Do the jobs whose names ``out`` does not hold yet, and append a line for each.

    Args:
        jobs: what to do.
        command: the command of a worker, given how many there are.
        phases: from crowded to lonely.
        out: the JSON lines.
        seconds: when to stop; what is in flight then gets a little longer.
        late: which jobs wait for the second phase.

    Returns:
        How many jobs are left to do.
    """
    started = time.monotonic()
    deadline = started + seconds
    done = {record["name"] for record in read_records([out])}
    todo = [job for job in jobs if job["name"] not in done]
    first = [job for job in todo if len(phases) == 1 or not late(job)]
    again = [job for job in todo if job not in first]
    lock = threading.Lock()
    count = [0]
    out.parent.mkdir(parents=True, exist_ok=True)

    def write(job: Job, record: Record) -> None:
        line = json.dumps({"name": job["name"]} | record, allow_nan=True)
        with out.open("a") as file:
            file.write(line + "\n")
        count[0] += 1
        end = record["end"] if record["end"] == "done" else f"{record['end']}: {record['error']}"
        print(
            f"[{time.monotonic() - started:6.1f} s, {count[0]}/{len(todo)}] {job['name']} {end}",
            flush=True,
        )

    def work(phase: Phase, queue: list[Job], unfinished: list[Job], is_last: bool) -> None:
        worker = _Worker(command(phase.workers))
        try:
            while time.monotonic() < deadline:
                with lock:
                    if not queue:
                        break
                    job = queue.pop(0)
                record = worker.do(job, phase, deadline)
                with lock:
                    if record is None or (not is_last and record["end"] != "done"):
                        unfinished.append(job)
                    else:
                        write(job, record)
        finally:
            worker.close()

    left: list[Job] = []
    for number, phase in enumerate(phases):
        queue, unfinished = first + left, []
        first, left = again, []
        again = []
        threads = [
            threading.Thread(
                target=work, args=(phase, queue, unfinished, number == len(phases) - 1)
            )
            for _ in range(min(phase.workers, len(queue)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        left = queue + unfinished
    print(f"{count[0]} done, {len(left)} left, {time.monotonic() - started:.0f} s", flush=True)
    return len(left)


def read_records(paths: Iterable[Path]) -> list[Record]:
    """The records in these files, the last one of each name; a line cut short is left out."""
    records: dict[str, Record] = {}
    for path in paths:
        if not path.exists():
            continue
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            records[record["name"]] = record
    return list(records.values())


@dataclass
class Child:
    """One case in processes of its own: a CUDA error poisons no other."""

    name: str
    commands: list[list[str]]
    environments: list[dict[str, str]]
    limit: float


def rank_environments(count: int) -> list[dict[str, str]]:
    """What tells each of ``count`` processes on this machine which rank it is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    return [{**common, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(count)]


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """One process at a time; the others may import and wait."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_children(
    children: Sequence[Child], *, jobs: int, budget: Budget, done: Callable[[str, str, str], None]
) -> None:
    """Run each child's commands, ``jobs`` children at a time.

    ``done(name, status, output)`` is called as each ends; status is ``ok``, ``failed`` or a reason.
    """
    waiting = list(children)
    running: list[tuple[Child, list[subprocess.Popen[str]], list[Any], float]] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            child = waiting.pop(0)
            if budget.left < 10:
                done(child.name, "no time left", "")
                continue
            logs = [_log_file() for _ in child.commands]
            processes = [
                subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                    text=True,
                )
                for command, environment, log in zip(
                    child.commands, child.environments, logs, strict=True
                )
            ]
            running.append((child, processes, logs, time.monotonic()))
        time.sleep(0.1)
        for entry in list(running):
            child, processes, logs, began = entry
            codes = [process.poll() for process in processes]
            late = time.monotonic() - began > child.limit or budget.left <= 0
            failed = any(code not in (None, 0) for code in codes)
            if None in codes and not late and not failed:
                continue
            if None in codes and failed and not late:
                time.sleep(3)  # the other ranks may have something to say
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
            running.remove(entry)
            output = ""
            for log in logs:
                log.seek(0)
                output += log.read()
                log.close()
            status = "out of time" if late else "failed" if failed else "ok"
            done(child.name, status, output)


def _log_file() -> Any:  # noqa: ANN401 - tempfile's type is private
    return tempfile.TemporaryFile("w+", errors="replace")


def resolve_device(arguments: argparse.Namespace) -> None:
    if not arguments.device:
        import torch

        arguments.device = "cuda" if torch.cuda.device_count() else "cpu"


def choose(arguments: argparse.Namespace, known: Sequence[str]) -> list[str]:
    """The cases asked for; ends the program where there is no such one, or with ``--list``."""
    wanted = arguments.cases.split(",") if arguments.cases else list(known)
    unknown = sorted(set(wanted) - set(known))
    if unknown or arguments.list:
        print("cases:", ", ".join(known))
        sys.exit(f"no such case: {', '.join(unknown)}" if unknown else 0)
    return wanted


@contextmanager
def turn(imports: Sequence[str] = ("torch", "timm", "torchvision")) -> Iterator[None]:
    """Import what is slow while others run, then wait for one's turn on the GPU."""
    for name in imports:
        try:
            __import__(name)
        except ImportError:
            print(f"{name} is not installed")
    with exclusive(Path(tempfile.gettempdir()) / f"benchmark-{os.getppid()}.lock"):
        yield


def run_cases(
    module: str,
    names: Sequence[str],
    arguments: argparse.Namespace,
    finish: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    limit: float = 200,
) -> dict[str, Any]:
    """Run each case as ``python -m module --child NAME --out PART``; gather what they write.

    ``finish`` makes the summary of the cases so far; ``--out`` is rewritten after each.
    """
    budget = Budget(arguments.seconds)
    began = time.monotonic()
    parts = Path(tempfile.mkdtemp(prefix="benchmark-"))
    cases: dict[str, Any] = {}
    # A process of its own: this one must not hold the GPU.
    described = subprocess.run(
        [sys.executable, "-c", "import json; from benchmarks.common import machine; "
         f"print(json.dumps(machine({arguments.device!r})))"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = described.stdout.strip().splitlines()
    hardware = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else machine("cpu")

    def done(name: str, status: str, output: str) -> None:
        part = parts / f"{name}.json"
        result = json.loads(part.read_text()) if part.exists() else {}
        cases[name] = {"status": status, **result}
        print(f"[{time.monotonic() - began:5.0f} s] {name}: {status}", flush=True)
        for line in output.strip().splitlines()[-30:]:
            if status != "ok" or line.startswith("  "):
                print(line, flush=True)
        write_json(
            arguments.out,
            {
                "benchmark": module.rpartition(".")[2],
                "hardware": hardware,
                "small": arguments.small,
                "seconds": time.monotonic() - began,
                **finish(cases),
                "cases": cases,
            },
        )

    children = []
    for name in names:
        command = [
            sys.executable,
            "-u",
            "-m",
            module,
            "--child",
            name,
            "--device",
            arguments.device,
        ]
        command += ["--out", str(parts / f"{name}.json")]
        children.append(
            Child(name, [command + (["--small"] if arguments.small else [])], [{}], limit)
        )
    run_children(children, jobs=arguments.jobs, budget=budget, done=done)
    print(f"written to {arguments.out}")
    return cases
