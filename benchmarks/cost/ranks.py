"""What does it cost to put the ranks of a job together? Time and memory against their number.

    python -m benchmarks ranks

Summaries of 16 to 1,024 ranks are generated from a recorded rank of two H200s: each rank has its
own noise, clock and host, and one rank has 10 ms more in one module. A process of its own reads the
summaries and answers; the memory is the most that this process had. The traces themselves are read
elsewhere, one by one (``cost.read``), so their size does not matter here.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from backspot.job.summary import Summary, from_json, to_bytes
from benchmarks.common import (
    TEST_DATA,
    command_line,
    parse,
    print_machine,
    print_table,
    script,
    write_results,
)
from benchmarks.cost.startup import environment

_RECORDED = TEST_DATA / "ranks" / "fsdp_even.rank0.json"
_SLOW = "model.layers.2.mlp.down_proj"
_PLANTED_NS = 10_000_000
_ANSWER = """
import json, resource, sys, time
from pathlib import Path
from backspot.job.answer import answer
from backspot.job.summary import from_bytes
import backspot.render.json
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin = time.perf_counter()
read = [from_bytes(path.read_bytes()) for path in sorted(Path(sys.argv[1]).iterdir())]
decoded = time.perf_counter()
job = answer(read)
answered = time.perf_counter()
first = job.findings[0] if job.findings else None
print(json.dumps({
    "read_s": decoded - begin,
    "answer_s": answered - decoded,
    "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "without_ranks_mb": before / 1024,
    "findings": len(job.findings),
    "first": [first.rank, first.path] if first else None,
}))
"""


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, "ranks", device=False)
    options = parse(parser, argv)
    recorded = from_json(_RECORDED.read_bytes())
    cases: dict[str, Any] = {}
    rows = []
    for ranks in (4, 16) if options.small else (16, 64, 256, 1024):
        with tempfile.TemporaryDirectory() as folder:
            sizes = [
                (Path(folder) / f"{rank:05}").write_bytes(
                    to_bytes(generated(recorded, rank, ranks))
                )
                for rank in range(ranks)
            ]
            found = json.loads(
                subprocess.run(
                    [sys.executable, "-c", _ANSWER, folder],
                    check=True,
                    capture_output=True,
                    env=environment(),
                ).stdout
            )
        found["summary_kb"] = sum(sizes) / ranks / 1000
        found["named"] = found.pop("first") == [slow_rank(ranks), _SLOW]
        cases[str(ranks)] = found
        keys = ("summary_kb", "read_s", "answer_s", "memory_mb", "findings", "named")
        rows.append([ranks, *(found[key] for key in keys)])
    print_machine()
    head = ["ranks", "kB each", "read, s", "answer, s", "memory, MB", "findings", "plant named"]
    print_table(head, rows)
    modules = sum(module.is_module for module in recorded.modules)
    write_results(options, {"modules": modules, "steps": recorded.steps, "cases": cases})
    return 0 if all(found["named"] for found in cases.values()) else 1


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
