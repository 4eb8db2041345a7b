"""What does it cost to put the ranks of a job together? Time and memory against their number.

    python -m benchmarks ranks

Summaries of 16 to 1,024 ranks are generated from a recorded rank of two H200s: each rank has its
own noise, clock and host, and one rank has 10 ms more in one module. The memory is that of all
processes together, read every 50 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from backspot.testing import Summary, from_json, to_bytes
from benchmarks.cost.startup import environment
from benchmarks.harness import TEST_DATA, Figures, Run

_SUMMARY = TEST_DATA / "ranks" / "fsdp_even.rank0.json"
_SLOW = "model.layers.2.mlp.down_proj"
_PLANTED_NS = 10_000_000
_SUMMARIES = """
import json, sys, time
from pathlib import Path
from backspot.testing import answer, from_bytes
begin = time.perf_counter()
read = [from_bytes(path.read_bytes()) for path in sorted(Path(sys.argv[1]).iterdir())]
decoded = time.perf_counter()
job = answer(read)
first = job.findings[0] if job.findings else None
print(json.dumps({
    "read_s": decoded - begin, "answer_s": time.perf_counter() - decoded,
    "findings": len(job.findings), "first": [first.rank, first.path] if first else None,
}))
"""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", help="numbers of ranks, comma-separated")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds for one reading")


def _numbers(run: Any, small: Sequence[int], full: Sequence[int]) -> list[int]:
    given = [int(one) for one in (run.ranks or "").split(",") if one]
    return given or [*(small if run.small else full)]


def answer(run: Run) -> Figures:
    """From summaries."""
    recorded = from_json(_SUMMARY.read_bytes())
    cases: dict[str, Any] = {}
    for ranks in _numbers(run, (4, 16), (16, 64, 256, 1024)):
        with tempfile.TemporaryDirectory() as folder:
            sizes = [
                (Path(folder) / f"{rank:05}").write_bytes(
                    to_bytes(generated(recorded, rank, ranks))
                )
                for rank in range(ranks)
            ]
            read = _read(_SUMMARIES, folder, run.patience)
        found = json.loads(read["said"])
        named = found.pop("first") == [slow_rank(ranks), _SLOW]
        found |= {"summary_kb": sum(sizes) / ranks / 1000, "peak_mb": read["peak_mb"]}
        cases[str(ranks)] = {**found, "named": named}
    return {"cases": cases, "wrong": not all(found["named"] for found in cases.values())}


def _read(code: str, folder: str, seconds: float) -> dict[str, Any]:
    """Let one tool read, in processes of its own, for so many seconds at most."""
    spent, begin = os.times(), time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", code, folder],
            stdout=out,
            env=environment(),
            start_new_session=True,
        )
        peak, failed = 0, ""
        while process.poll() is None:
            peak = max(peak, _bytes_of(process.pid))
            if time.perf_counter() - begin > seconds:
                failed = f"more than {seconds:.0f} s"
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.05)
        took, used = time.perf_counter() - begin, os.times()
        out.seek(0)
        said = out.read().strip()
    if process.returncode and not failed:
        failed = f"exit code {process.returncode}"
    processor = used.children_user + used.children_system
    processor -= spent.children_user + spent.children_system
    return {
        "seconds": took,
        "processor_seconds": None if failed else processor,  # of killed processes it is not known
        "peak_mb": peak / 1e6,
        "said": said,
        "failed": failed,
    }


def _bytes_of(session: int) -> int:
    """Return the memory of all processes of a session; what they share counts once."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                    text = (entry / "smaps_rollup").read_text()
                    total += int(text.partition("Pss:")[2].split()[0]) * 1024
    return total


def slow_rank(ranks: int) -> int:
    return ranks // 3


def generated(summary: Summary, rank: int, ranks: int) -> Summary:
    """A rank with noise of its own, of 1% for each module and 50 µs for each collective."""
    chance = random.Random(rank)

    def noisy(times: Sequence[int], more: int = 0) -> tuple[int, ...]:
        factor = chance.gauss(1, 0.01)
        return tuple(max(round(time * factor), 0) + more for time in times)

    modules = []
    for module in summary.modules:
        more = _PLANTED_NS if rank == slow_rank(ranks) and module.path == _SLOW else 0
        modules.append(
            msgspec.structs.replace(
                module,
                forward_gpu=noisy(module.forward_gpu, more),
                forward_host=noisy(module.forward_host),
                forward_hidden=noisy(module.forward_hidden),
                backward_gpu=noisy(module.backward_gpu),
                backward_host=noisy(module.backward_host),
                backward_hidden=noisy(module.backward_hidden),
            )
        )
    groups = []
    for group in summary.groups:
        begins = [time + round(chance.gauss(0, 50_000)) for time in group.start]
        start = tuple(min(pair) for pair in zip(begins, group.end, strict=True))
        groups.append(msgspec.structs.replace(group, ranks=tuple(range(ranks)), start=start))
    return msgspec.structs.replace(
        summary,
        source=f"rank {rank}",
        rank=rank,
        world_size=ranks,
        host=f"node{rank // 8}",
        origin_ns=summary.origin_ns + round(chance.gauss(0, 1e6)),
        modules=tuple(modules),
        groups=tuple(groups),
    )
