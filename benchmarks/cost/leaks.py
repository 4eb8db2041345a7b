"""Does anything grow? Many small steps, instrumented, with the profiler off and on in turns.

    python -m benchmarks leaks [--steps 10000] [--every 1000]

Prints resident memory, Python objects and the autograd nodes that can still be reached after every
so many steps, for the same steps plain and instrumented. PyTorch's profiler keeps memory of its
own: what counts is the difference between the two.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import backspot
from benchmarks.cases import exit_code
from benchmarks.common import command_line, parse, print_table, profiling, script, write_results
from benchmarks.models import training_step
from benchmarks.workers import Handler, Job, Phase, Record, Stage, run, serve, worker_command

PROFILED = 5  # steps under one profiler, then as many without


class Block(nn.Module):
    """A residual block with in-place operations."""

    def __init__(self) -> None:
        """Two layers."""
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give the input back with what the layers add."""
        y = self.fc(x)
        y += x
        return self.act(y)


def resident() -> int:
    """This process's resident memory in KiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def nodes() -> int:
    """Autograd nodes that Python objects still hold."""
    # By type: some objects complain when they are asked for their class.
    return sum(issubclass(type(thing), torch.autograd.graph.Node) for thing in gc.get_objects())


def measure(
    steps: int, every: int, *, hooks: str | None, say: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Train and count; ``hooks=None`` trains plainly."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = training_step(model, lambda: model(torch.randn(4, 8)).square().mean(), optimizer)
    rows: list[dict[str, Any]] = []
    with backspot.instrument(model, hooks=hooks) if hooks else nullcontext():
        done = 0
        while done < steps:
            for recorded in (True, False):
                with profiling("cpu") if recorded else nullcontext():
                    for _ in range(PROFILED):
                        step()
                done += PROFILED
            if done % every < 2 * PROFILED:
                gc.collect()
                rows.append(
                    {
                        "steps": done,
                        "hooks": hooks or "none",
                        "rss_kib": resident(),
                        "objects": len(gc.get_objects()),
                        "nodes": nodes(),
                    }
                )
                say(rows[-1])
    return rows


def _measuring(arguments: argparse.Namespace) -> Handler:
    def handle(job: Job, stage: Stage) -> Record:
        rows: list[dict[str, Any]] = []

        def say(row: dict[str, Any]) -> None:
            rows.append(row)
            stage("training", {"rows": rows})

        measure(job["steps"], job["every"], hooks=job["hooks"], say=say)
        return {"rows": rows}

    return handle


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, "leaks", device=False, cases=False, jobs=1)
    parser.add_argument("--steps", type=int, help="default: 10000; with --small 20")
    parser.add_argument("--every", type=int, help="steps of a row (default: 1000; with --small 10)")
    arguments = parse(parser, argv)
    if arguments.worker:
        serve(_measuring(arguments))
        return 0
    steps = arguments.steps or (20 if arguments.small else 10_000)
    every = arguments.every or (10 if arguments.small else 1_000)
    # Each in a process of its own, so that memory is compared fairly.
    records = run(
        [
            {"name": hooks or "none", "hooks": hooks, "steps": steps, "every": every}
            for hooks in (None, "call", "node")
        ],
        worker_command(arguments),
        lambda: _measuring(arguments),
        [Phase(arguments.jobs, timeout_s=3600)],
        fresh=True,
    )
    rows = [row for record in records for row in record.get("rows", ())]
    head = {"steps": "steps", "hooks": "hooks", "rss_kib": "rss KiB", "objects": "objects",
            "nodes": "nodes"}  # fmt: skip
    print_table(list(head.values()), [[row[key] for key in head] for row in rows])
    write_results(arguments, {"rows": rows})
    return exit_code(records)
