"""Does anything grow? Many small steps, instrumented, with the profiler off and on in turns.

    python -m benchmarks.cost.leaks [--steps 10000] [--every 1000] [--hooks node]

Prints resident memory, Python objects and the autograd nodes that can still be reached after each
stretch, for the same steps plain and instrumented. PyTorch's profiler keeps memory of its own: what
counts is the difference between the two.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import backspot

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
    pages = int(Path("/proc/self/statm").read_text().split()[1])
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
    rows: list[dict[str, Any]] = []
    with backspot.instrument(model, hooks=hooks) if hooks else nullcontext():
        done = 0
        while done < steps:
            for recorded in (True, False):
                with profile(activities=[ProfilerActivity.CPU]) if recorded else nullcontext():
                    for _ in range(PROFILED):
                        optimizer.zero_grad()
                        model(torch.randn(4, 8)).square().mean().backward()
                        optimizer.step()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1_000)
    parser.add_argument("--hooks", choices=("node", "module", "none"))
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args()

    def say(row: dict[str, Any]) -> None:
        print("  ".join(f"{row[key]:>10}" for key in row), flush=True)

    if options.hooks:
        kind = None if options.hooks == "none" else options.hooks
        rows = measure(options.steps, options.every, hooks=kind, say=say)
        if options.json:
            options.json.write_text(json.dumps(rows))
        return
    # Each in a process of its own, that memory be compared fairly.
    print("  ".join(f"{key:>10}" for key in ("steps", "hooks", "rss KiB", "objects", "nodes")))
    gathered = []
    for kind in ("none", "node"):
        target = Path(f"{options.json or Path(tempfile.mkdtemp()) / 'leaks'}.{kind}")
        command = [
            sys.executable,
            "-m",
            "benchmarks.cost.leaks",
            "--hooks",
            kind,
            "--json",
            str(target),
        ]
        command += ["--steps", str(options.steps), "--every", str(options.every)]
        subprocess.run(command, check=True)
        gathered += json.loads(target.read_text())
        target.unlink()
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": gathered}))


if __name__ == "__main__":
    main()
