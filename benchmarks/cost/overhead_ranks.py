"""What do labels cost where ranks wait for each other? Steps of two ranks, by variant.

    python -m benchmarks.cost.overhead_ranks

As in ``overhead``: every variant runs in every round, in a new random order that is the same on
both ranks, and takes a few steps in a row between two synchronisations. With the profiler on, both
ranks record. A round's number is that of the slower rank. The result is the median ratio to the
plain step of the same round, with a 95% interval.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from benchmarks.common import (
    choose,
    command_line,
    parse,
    print_machine,
    print_table,
    script,
    spread,
    write_results,
)
from benchmarks.cost.overhead import percent, ratio_interval, timed_steps
from benchmarks.cost.overhead_models import PLAIN, UNPROFILED, VARIANTS, Training
from benchmarks.ranks import CASES, RANKS, member, run_ranks, training

_VARIANTS = (
    PLAIN,
    UNPROFILED,
    "call, no markers",
    "call",
    "node, no markers",
    "Lightning's labels",
    "with_stack=True",
)


def _train(
    rank: int, kind: str, folder: str, names: Sequence[str], rounds: int, small: bool
) -> None:
    """What each of the two processes does; rank 0 writes the times of the slower one."""
    found: dict[str, dict[str, list[float]]] = {}
    with member(rank, kind, folder) as device:
        for name in names:
            trained = Training(*training(name, device, small))
            order, random_order = list(_VARIANTS), random.Random(0)
            times: dict[str, list[float]] = {variant: [] for variant in order}
            for done in range(rounds + 1):  # in the first round caches fill
                for variant in order:
                    dist.barrier()
                    (mine,) = timed_steps(
                        trained, VARIANTS[variant], kind, recorded=True, steps=1 if small else 4
                    )
                    every = [0.0] * RANKS
                    dist.all_gather_object(every, mine)
                    if done:
                        times[variant].append(max(every))
                random_order.shuffle(order)
            found[name] = times
            del trained
        if rank == 0:
            (Path(folder) / "records.json").write_text(json.dumps(found))


@script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = command_line(__doc__, out="overhead_ranks_{device}.json")
    parser.add_argument("--rounds", type=int, default=20, help="rounds a case")
    arguments = parse(parser, argv)
    names = choose(arguments, CASES, ("ddp",))
    print_machine(arguments.device)
    rounds = 2 if arguments.small else arguments.rounds
    records = json.loads(run_ranks(_train, arguments.device, names, rounds, arguments.small))
    cases = {
        name: {
            variant: {
                "step_ms": spread(of),
                "round_ms": of,
                "added_percent": ratio_interval(of, times[PLAIN]),
            }
            for variant, of in times.items()
        }
        for name, times in records.items()
    }
    for name, variants in cases.items():
        print(f"\n{name}: {CASES[name]}")
        rows = [
            (
                variant,
                one["step_ms"]["median"],
                f"{one['step_ms']['low']:.2f}–{one['step_ms']['high']:.2f}",
                percent(one["added_percent"]),
            )
            for variant, one in variants.items()
        ]
        print_table(("variant", "ms", "quartiles", "added % (95%)"), rows)
    write_results(arguments, {"cases": cases, "rounds": rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
