"""What do memory and shapes add to a recorded step, and to its trace?

    python -m benchmarks.cost.detail

The same labelled step is recorded plain, with ``profile_memory``, with ``record_shapes`` and with
both, in turns. ``profile(memory=True, shapes=True)`` records them in steps of their own, so this is
the cost of those steps alone. Medians over the rounds.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
    Budget,
    choose,
    command_line,
    parse,
    print_table,
    profiling,
    script,
    synchronize,
    write_results,
)

_VARIANTS: dict[str, dict[str, bool]] = {
    "plain": {},
    "memory": {"profile_memory": True},
    "shapes": {"record_shapes": True},
    "both": {"profile_memory": True, "record_shapes": True},
}
_CASES = ("vit", "resnet50_128", "gpt2", "vit_launch_bound")
_SMALL = ("mlp_launch_bound",)
_STEPS = 5


def _case(name: str, device: str, small: bool, seconds: float, folder: Path) -> dict[str, Any]:
    import backspot
    from benchmarks.accuracy.truth_models import MODELS
    from benchmarks.models import Context

    build = MODELS[name](Context(device, small))

    def step() -> None:
        build.model.zero_grad()
        build.loss().backward()

    times: dict[str, list[float]] = {variant: [] for variant in _VARIANTS}
    sizes: dict[str, int] = {}
    read_ms: dict[str, float] = {}
    budget = Budget(seconds)
    step()
    with backspot.instrument(build.model):
        for number in range(2 if small else 8):
            for variant, options in _VARIANTS.items():
                path = folder / f"{variant}.json"
                with profiling(device, **options) as prof:
                    step()
                    synchronize(device)
                    begin = time.perf_counter()
                    for _ in range(_STEPS):
                        step()
                    synchronize(device)
                    times[variant].append((time.perf_counter() - begin) * 1e3 / _STEPS)
                if not number:
                    prof.export_chrome_trace(str(path))
                    sizes[variant] = path.stat().st_size
                    begin = time.perf_counter()
                    backspot.locate(path)
                    read_ms[variant] = (time.perf_counter() - begin) * 1e3
            if not budget.left and number >= 2:
                break
    plain = times["plain"]
    return {
        variant: {
            "step_ms": statistics.median(found),
            "added_percent": statistics.median(
                100 * (one / other - 1) for one, other in zip(found, plain, strict=True)
            ),
            "trace_bytes": sizes[variant],
            "locate_ms": read_ms[variant],
            "rounds": len(found),
        }
        for variant, found in times.items()
    }


@script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = command_line(__doc__, out="detail_{device}.json", seconds=120)
    arguments = parse(parser, argv)
    names = choose(arguments, dict.fromkeys((*_CASES, *_SMALL), ""), _SMALL)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            share = arguments.seconds / len(names)
            results[name] = _case(name, arguments.device, arguments.small, share, Path(folder))
    head = ("model", "recorded with", "ms per step", "added %", "trace MB", "locate ms")
    rows = [
        (
            name,
            variant,
            one["step_ms"],
            one["added_percent"],
            one["trace_bytes"] / 1e6,
            one["locate_ms"],
        )
        for name, found in results.items()
        for variant, one in found.items()
    ]
    print_table(head, rows)
    write_results(arguments, {"cases": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
