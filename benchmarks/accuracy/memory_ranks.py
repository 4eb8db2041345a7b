"""Is the memory of ranks true? The peak, and what modules keep, against each rank's own allocator.

Two processes train a model with DistributedDataParallel or FSDP2. As in ``memory_truth``, on every
rank: (a) the peak of a recorded step against ``torch.cuda.max_memory_allocated``, which must agree
to the byte; (b) what each module keeps for the backward, against the allocator's own snapshot of
the same step: within 1%.

    python -m benchmarks.accuracy.memory_ranks
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from benchmarks.accuracy.memory_truth import is_true, peak, split
from benchmarks.common import (
    choose,
    command_line,
    parse,
    print_machine,
    print_table,
    script,
    write_results,
)
from benchmarks.ranks import CASES, RANKS, member, run_ranks, training


def _train(rank: int, kind: str, folder: str, names: Sequence[str], small: bool) -> None:
    """What each of the two processes does; rank 0 writes the records of both."""
    found = {}
    with member(rank, kind, folder) as device:
        for name in names:
            model, step = training(name, device, small)
            step()
            trace = Path(folder) / f"rank{rank}.json"
            found[name] = {
                "memory": peak(step, model, kind, trace),
                "split": split(step, model, trace) if kind == "cuda" else None,
            }
            del model, step
        every = [None] * RANKS
        dist.all_gather_object(every, found)
        if rank == 0:
            (Path(folder) / "records.json").write_text(json.dumps(every))


@script
def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print and write."""
    parser = command_line(__doc__, out="memory_ranks_{device}.json")
    arguments = parse(parser, argv)
    names = choose(arguments, CASES, ("ddp",))
    print_machine(arguments.device)
    records = json.loads(run_ranks(_train, arguments.device, names, arguments.small))
    rows = [
        (name, rank, one["memory"]["peak"], one["memory"]["measured"], *kept(one["split"]))
        for name in names
        for rank, one in enumerate(of_rank[name] for of_rank in records)
    ]
    print_table(("case", "rank", "peak", "measured", "kept", "apart"), rows)
    write_results(arguments, {"ranks": records})
    return 0 if all(is_true(one) for of_rank in records for one in of_rank.values()) else 1


def kept(split: dict[str, int] | None) -> tuple[object, object]:
    """What modules keep, and by how much that differs from the snapshot."""
    return ("", "") if split is None else (split["kept"], split["apart"])


if __name__ == "__main__":
    sys.exit(main())
