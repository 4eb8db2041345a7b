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
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

import backspot
from benchmarks.harness import Figures, Run, each
from benchmarks.measuring import profiling
from benchmarks.models import training_step
from benchmarks.workers import Job, Record, Stage

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


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="default: 10000; with --small 20")
    parser.add_argument("--every", type=int, help="steps of a row (default: 1000; with --small 10)")


def answer(run: Run) -> Figures:
    steps = run.steps or (20 if run.small else 10_000)
    every = run.every or (10 if run.small else 1_000)
    kinds = {hooks or "none": {"hooks": hooks} for hooks in (None, "call")}
    cases = each(run, lambda: kinds, _train, timeout_s=3600, steps=steps, every=every)
    tables = [case.get("rows", ()) for case in cases.values()]
    rows = [dict(zip(_HEAD, row, strict=True)) for table in tables for row in table]
    summary = {"steps": min((table[-1][0] for table in tables if table), default=0)}
    for name, table in zip(cases, tables, strict=True):
        # What the first steps fill stays: growth counts from the second row on.
        settled = table[1:] or table
        for place, what in enumerate(_HEAD[2:], 2):
            more = settled[-1][place] - settled[0][place] if settled else None
            summary[f"more {what}, {'labelled' if kinds[name]['hooks'] else 'plain'}"] = more
    lines = [{"hooks": row["hooks"], **row} for row in rows]
    return {"cases": cases, "rows": rows, "lines": lines, "summary": summary}
