"""Runs of a benchmark over its cases: each case alone, or as lines in a file that a run resumes."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import backspot
from benchmarks.common import machine, profile_default, write_json, write_results
from benchmarks.workers import NO_TIME, Handler, Job, Phase, Record, run, serve, worker_command

if TYPE_CHECKING:
    import torch


def join_ranks(device: str) -> tuple[str, int, int]:
    """Join the other ranks of this job, if there are any.

    Returns:
        This rank's device, the rank, and the number of ranks.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return device, rank, world
    import torch
    import torch.distributed as dist

    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return device, rank, world


# One worker at a time ----------------------------------------------------------------------------


@contextmanager
def turn(*imports: str) -> Iterator[None]:
    """Import what is slow while other workers of the driver run; then wait for one's turn."""
    for name in imports:
        try:
            __import__(name)
        except ImportError:
            print(f"{name} is not installed")
    with _turns().open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def profile_in_turn(
    step: Callable[[], None],
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    *,
    steps: int,
    **options: Any,
) -> backspot.Report:
    """Run ``backspot.profile`` with its defaults when it is this worker's turn.

    The turn ends with the last step: the analysis of one recording runs beside the steps of the
    next. The arguments are those of ``backspot.profile``.
    """
    left = profile_default("warmup") + steps
    with _turns().open("w") as file:

        def counted() -> None:
            nonlocal left
            step()
            left -= 1
            if not left:
                fcntl.flock(file, fcntl.LOCK_UN)

        fcntl.flock(file, fcntl.LOCK_EX)
        return backspot.profile(counted, model, steps=steps, **options)


def _turns() -> Path:
    """Return the lock among the workers of one driver."""
    return Path(tempfile.gettempdir()) / f"benchmark-{os.getppid()}.lock"


# Runs --------------------------------------------------------------------------------------------


def run_cases(
    arguments: Namespace,
    names: Callable[[], Sequence[str]],
    handle: Handler,
    *,
    summarise: Callable[[dict[str, Record]], Record],
    describe: Callable[[Record], Iterable[str]],
    timeout_s: float = 200,
) -> dict[str, Record]:
    """Run each case in a process of its own; a CUDA error in one poisons no other.

    The results are written after each case. In a worker, this serves the driver and ends.

    Args:
        arguments: the parsed command line.
        names: gives the cases.
        handle: does one.
        summarise: makes a summary of the cases so far, for the results.
        describe: gives lines to print of a case that is done.
        timeout_s: time limit of one case.

    Returns:
        The record of each case by its name, in the order of ``names``.
    """
    if arguments.worker:
        serve(handle)
        raise SystemExit(0)
    began = time.monotonic()
    cases: dict[str, Record] = {}

    def write(*, last: bool) -> None:
        spent = {"seconds": time.monotonic() - began}
        write_results(arguments, {**spent, **summarise(cases), "cases": cases}, last=last)

    def ended(job: Job, record: Record) -> None:
        cases[job["name"]] = record
        if record["end"] == "done":
            for line in describe(record):
                print(f"  {line}", flush=True)
        write(last=False)

    chosen = names()
    records = run(
        [{"name": name} for name in chosen],
        worker_command(arguments),
        lambda: handle,
        [Phase(arguments.jobs, timeout_s)],
        seconds=arguments.seconds,
        fresh=True,
        ended=ended,
    )
    cases = dict(zip(chosen, records, strict=True))
    write(last=True)
    return cases


def exit_code(records: Iterable[Record]) -> int:
    """Return 3 if the time ran out before a case was done, else 1 if a case failed, else 0."""
    ends = {record["end"] for record in records}
    return 3 if NO_TIME in ends else 1 if ends - {"done"} else 0


def run_resumed(
    arguments: Namespace,
    jobs: Iterable[Job],
    start: Callable[[], Handler],
    phases: Sequence[Phase],
    summarise: Callable[[list[Record]], Record],
    *,
    late: Callable[[Job], bool] = lambda _: False,
) -> int:
    """Do the jobs that are not done yet, write a line for each, and summarise all lines.

    The lines are in a file beside the results (``.jsonl``), which a later run continues. The other
    arguments are those of ``workers.run``.

    Returns:
        The exit code.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = arguments.out or Path(folder) / "results.json"
        lines = out.with_suffix(".jsonl")
        write_json(_machine_beside(lines), machine(arguments.device))
        known = {record["name"] for record in read_records([lines])}

        def ended(job: Job, record: Record) -> None:
            with lines.open("a") as file:
                file.write(json.dumps({"name": job["name"]} | record) + "\n")

        records = run(
            [job for job in jobs if job["name"] not in known],
            worker_command(arguments),
            start,
            phases,
            seconds=arguments.seconds,
            late=late,
            ended=ended,
        )
        summarise_lines(arguments, [lines], summarise)
    return exit_code(records)


def summarise_lines(
    arguments: Namespace, paths: Sequence[Path], summarise: Callable[[list[Record]], Record]
) -> int:
    """Print and write the summary of lines, with the machine that they were measured on."""
    about: Record = {}
    for path in map(_machine_beside, paths):
        if path.exists():
            about |= json.loads(path.read_text())
    write_results(arguments, {"hardware": about, **summarise(read_records(paths))})
    return 0


def read_records(paths: Iterable[Path]) -> list[Record]:
    """Return the records in JSON lines, the last one of each name; a line cut short is left out."""
    records: dict[str, Record] = {}
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            records[record["name"]] = record
    return list(records.values())


def _machine_beside(lines: Path) -> Path:
    return lines.with_suffix(".machine.json")
