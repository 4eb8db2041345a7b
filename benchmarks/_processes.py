"""Cases in processes of their own, so that a CUDA error in one poisons no other."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import Budget, machine, write_json

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
            logs = [_temporary() for _ in child.commands]
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


def _temporary() -> Any:  # noqa: ANN401 - tempfile's type is private
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
    script: str,
    names: Sequence[str],
    arguments: argparse.Namespace,
    finish: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    limit: float = 200,
) -> dict[str, Any]:
    """Run each case as ``script --child NAME --out PART``; gather what they write.

    ``finish`` makes the summary of the cases so far; ``--out`` is rewritten after each.
    """
    budget = Budget(arguments.seconds)
    began = time.monotonic()
    parts = Path(tempfile.mkdtemp(prefix="benchmark-"))
    cases: dict[str, Any] = {}
    # A process of its own: this one must not hold the GPU.
    described = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(script).parent)!r}); "
         f"import json, _common; "
         f"print(json.dumps(_common.machine({arguments.device!r})))"],
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
                "benchmark": Path(script).stem,
                "hardware": hardware,
                "small": arguments.small,
                "seconds": time.monotonic() - began,
                **finish(cases),
                "cases": cases,
            },
        )

    children = []
    for name in names:
        command = [sys.executable, "-u", script, "--child", name, "--device", arguments.device]
        command += ["--out", str(parts / f"{name}.json")]
        children.append(
            Child(name, [command + (["--small"] if arguments.small else [])], [{}], limit)
        )
    run_children(children, jobs=arguments.jobs, budget=budget, done=done)
    print(f"written to {arguments.out}")
    return cases
