"""Does any kind of trace take more than linear time? Ten times as much of each thing, compared.

    python -m benchmarks.robustness.scaling [--cases 'steps with marks'] [--base 4]

Makes each trace of ``scaling_traces.py`` once and ten times as large, and compares the processor
time of ``locate``. A ratio of more than twice that of the sizes is measured again; if it remains,
the exit code is 1. Times on a busy machine vary: a difference of a half says nothing.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import backspot
from backspot.errors import BackspotError
from benchmarks.common import choose, command_line, parse, print_table, script, write_results
from benchmarks.robustness.scaling_traces import DIMENSIONS

_TIMES = 10
_BEYOND = 2.0
"""How many times the growth of the text the growth of the time may be."""
_LEAST = 0.02
"""Seconds; a shorter time does not show how it grows."""


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, device=False)
    parser.add_argument("--base", type=int, default=1, help="the smaller of the two sizes")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for one reading")
    options = parse(parser, argv)
    names = choose(options, dict.fromkeys(DIMENSIONS, ""), ("steps with marks",))
    found = []
    for name in names:
        found.append(growth_of(name, options.base, options.patience))
        print(f"{name}: {found[-1]['growth']:.2f}", file=sys.stderr, flush=True)
    head = ["dimension", "MB", "x 10", "s", "x 10", "growth", ""]
    marks = ["beyond linear" if one["growth"] > _BEYOND else "" for one in found]
    print_table(head, [[*one.values(), mark] for one, mark in zip(found, marks, strict=True)])
    write_results(options, {"dimensions": found})
    return 1 if any(marks) and not options.small else 0


def growth_of(name: str, base: int, patience: float) -> dict[str, Any]:
    """Compare the times of two sizes; a growth beyond linear is measured again."""
    maker = DIMENSIONS[name]
    one, ten = maker(base), maker(_TIMES * base)
    sizes = len(ten) / len(one)
    growth = 0.0
    for attempt in range(3):
        short = min(seconds(one) for _ in range(3 if attempt else 2))
        long = min(seconds(ten) for _ in range(2 if attempt and patience > 10 else 1))
        growth = long / max(short, _LEAST) / sizes
        if growth <= _BEYOND or long > patience:
            break
    return {
        "dimension": name,
        "megabytes": len(one) / 1e6,
        "megabytes_of_ten": len(ten) / 1e6,
        "seconds": short,
        "seconds_of_ten": long,
        "growth": growth,
    }


def seconds(text: bytes) -> float:
    """Processor time to read and rank a trace."""
    begin = time.process_time()
    with suppress(BackspotError):
        backspot.locate(io.BytesIO(text))
    return time.process_time() - begin


if __name__ == "__main__":
    sys.exit(main())
