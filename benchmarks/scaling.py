"""Does any kind of trace take more than linear time? Ten times as much of each thing, compared.

    python benchmarks/scaling.py [--only steps,threads] [--base 4]

Makes each trace of ``_scaling_traces.py`` once and ten times as large, and compares the processor
time of ``locate``. A ratio that is more than twice that of the sizes is measured again, and where
it stays so the exit code is 1. Times of a busy machine vary: half as much again says nothing.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable

import _common  # noqa: F401 - finds backspot
from _scaling_traces import DIMENSIONS

import backspot
from backspot.errors import BackspotError

_TIMES = 10
_BEYOND = 2.0
"""How many times the growth of the text the growth of the time may be."""
_LEAST = 0.02
"""Seconds, below which a time says nothing of how it grows."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="comma-separated beginnings of dimensions")
    parser.add_argument("--base", type=int, default=1, help="the smaller of the two sizes")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for one reading")
    options = parser.parse_args()
    chosen = tuple(name.strip() for name in options.only.split(",") if name.strip())
    names = [name for name in DIMENSIONS if not chosen or name.startswith(chosen)]
    if not names:
        parser.error(f"no such dimension; there are {', '.join(DIMENSIONS)}")
    print(f"{'dimension':36} {'MB':>6} {'x 10':>6} {'s':>8} {'x 10':>8} {'growth':>7}")
    beyond = [name for name in names if not is_linear(name, options.base, options.patience)]
    if beyond:
        print(f"beyond linear: {', '.join(beyond)}")
    return 1 if beyond else 0


def is_linear(name: str, base: int, patience: float) -> bool:
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
    print(
        f"{name:36} {len(one) / 1e6:6.1f} {len(ten) / 1e6:6.1f} {short:8.3f} {long:8.3f} "
        f"{growth:6.2f}x{'  beyond linear' if growth > _BEYOND else ''}",
        flush=True,
    )
    return growth <= _BEYOND


def seconds(text: bytes) -> float:
    """Processor time to read and rank a trace."""
    begin = time.process_time()
    try:
        backspot.locate(io.BytesIO(text))
    except BackspotError:
        pass
    return time.process_time() - begin


if __name__ == "__main__":
    sys.exit(main())
