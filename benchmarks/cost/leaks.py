"""Does anything grow? Many small steps, instrumented, with the profiler off and on in turns.

    python -m benchmarks leaks [--steps 10000] [--every 1000]

Prints resident memory, Python objects and the autograd nodes that can still be reached after every
so many steps, for the same steps plain and instrumented. PyTorch's profiler keeps memory of its
own: what counts is the difference between the two.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

import backspot
from benchmarks.cases import exit_code
from benchmarks.common import command_line, parse, print_table, profiling, script, write_results
from benchmarks.models import training_step
from benchmarks.workers import Job, Phase, Record, Stage, run, serve, worker_command

_PROFILED = 5  # steps under one profiler, then as many without
_HEAD = ("steps", "hooks", "rss KiB", "objects", "nodes")


class Block(nn.Module):
    """A residual block with in-place operations."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        y += x
        return self.act(y)


def _resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def _train(job: Job, stage: Stage) -> Record:
    """Train and count; without ``hooks`` it trains plainly."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = training_step(model, lambda: model(torch.randn(4, 8)).square().mean(), optimizer)
    rows: list[tuple[int, str, int, int, int]] = []
    hooks = job["hooks"]
    with backspot.instrument(model, hooks=hooks) if hooks else nullcontext():
        for done in range(2 * _PROFILED, job["steps"] + 1, 2 * _PROFILED):
            for recorded in (True, False):
                with profiling("cpu") if recorded else nullcontext():
                    for _ in range(_PROFILED):
                        step()
            if done % job["every"] < 2 * _PROFILED:
                gc.collect()
                objects = gc.get_objects()
                # By type: some objects complain when they are asked for their class.
                nodes = sum(issubclass(type(it), torch.autograd.graph.Node) for it in objects)
                rows.append((done, job["name"], _resident_kib(), len(objects), nodes))
                del objects
                stage("training", {"rows": rows})
    return {"rows": rows}


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, "leaks", device=False, cases=False, jobs=1)
    parser.add_argument("--steps", type=int, help="default: 10000; with --small 20")
    parser.add_argument("--every", type=int, help="steps of a row (default: 1000; with --small 10)")
    arguments = parse(parser, argv)
    if arguments.worker:
        serve(_train)
        return 0
    steps = arguments.steps or (20 if arguments.small else 10_000)
    every = arguments.every or (10 if arguments.small else 1_000)
    # Each in a process of its own, so that memory is compared fairly.
    records = run(
        [
            {"name": hooks or "none", "hooks": hooks, "steps": steps, "every": every}
            for hooks in (None, "call")
        ],
        worker_command(arguments),
        lambda: _train,
        [Phase(arguments.jobs, timeout_s=3600)],
        fresh=True,
    )
    rows = [row for record in records for row in record.get("rows", ())]
    print_table(_HEAD, rows)
    write_results(arguments, {"rows": [dict(zip(_HEAD, row, strict=True)) for row in rows]})
    return exit_code(records)
