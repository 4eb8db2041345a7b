"""Does the monitor tell the truth, at what cost, and does it raise the right alarms?

    python -m benchmarks monitor

For each model: what a sampled step and an unsampled one cost beside a step without a monitor; the
backward time of each block beside that of a profile, for blocks of at least 2% of the backward.
Then a long run of a small model: no alarm in 5,000 steady steps, and one for a block that becomes
slower in step 500.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import backspot
from benchmarks.accuracy.changes import Repeating
from benchmarks.common import (
    choose,
    command_line,
    milliseconds,
    parse,
    print_machine,
    print_table,
    script,
    spread,
    synchronize,
    write_results,
)
from benchmarks.models import Context, training_step

CASES = ("vit", "resnet50_channels_last", "convnext", "swin")
_HEAVY = 0.02
_EVERY = {"plain": 0, "idle": 1 << 30, "sampled": 1}
"""The steps from one sample to the next; 0: no monitor."""

Step = Callable[[], None]


def _cost(step: Step, model: nn.Module, device: str, rounds: int, inner: int) -> dict[str, Any]:
    """Milliseconds of a step without a monitor, with an idle one, and sampled; in turns."""
    times: dict[str, list[float]] = {name: [] for name in _EVERY}
    for number in range(rounds):
        for name in list(times) if number % 2 == 0 else list(times)[::-1]:
            every = _EVERY[name]
            monitor = backspot.Monitor(model, every=every, slower_by=None) if every else None
            for _ in range(2):
                step()
            times[name].append(milliseconds(step, device, inner))
            if monitor is not None:
                monitor.remove()
    added = {
        name: spread([a / b - 1 for a, b in zip(times[name], times["plain"], strict=True)])
        for name in ("idle", "sampled")
    }
    return {"plain_ms": spread(times["plain"]), **added}


def _agreement(step: Step, model: nn.Module, device: str, steps: int) -> dict[str, Any]:
    """Each heavy block's backward: the monitor's median over the profile's time, total of both."""
    with backspot.Monitor(model, every=1, slower_by=None) as monitor:
        for _ in range(steps + 1):
            step()
        synchronize(device)
        monitor.flush()
    frame = monitor.to_pandas().groupby("path")["backward_ms"].median()
    report = backspot.profile(step, model, steps=5, warmup=3, depth=1)
    rows = {row.path: row.total_wall_ns / 1e6 for row in report.modules}
    blocks = {}
    for path, ours in frame.items():
        theirs = rows.get(str(path), 0.0)  # an Identity has no backward of its own
        if theirs and theirs >= _HEAVY * report.wall_ns / 1e6:
            blocks[path] = {"monitor_ms": ours, "profile_ms": theirs, "ratio": ours / theirs}
    off = [abs(found["ratio"] - 1) for found in blocks.values()]
    busy = report.gpu_ns / report.wall_ns if report.has_gpu else 0.0
    return {
        "blocks": blocks,
        "off": spread(off),
        "farthest": max(off, default=0),
        "gpu_share": busy,
    }


def _alarms(device: str, *, steady: int, at: int, small: bool) -> dict[str, list[str]]:
    """The alarms of a steady run, and of one with a block that becomes slower."""
    torch.manual_seed(0)
    width, rows = (64, 32) if small else (2048, 512)
    blocks = (
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), Repeating(width, 0)) for _ in range(6)
    )
    model = nn.Sequential(*blocks).to(device)
    inputs = torch.randn(rows, width, device=device)
    step = training_step(model, lambda: model(inputs).square().mean())
    for _ in range(10):
        step()

    def run(steps: int, slower_at: int | None) -> list[str]:
        with backspot.Monitor(model, every=10, on_alarm=lambda _: None) as monitor:
            for number in range(steps):
                if number == slower_at:
                    model[3][2].times = 20
                step()
            synchronize(device)
            monitor.flush()
        return [f"{alarm}, raised in step {alarm.step}" for alarm in monitor.alarms]

    return {"steady": run(steady, None), "planted": run(2 * at, at)}


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(command_line(__doc__, "monitor"), argv)
    names = choose(arguments, dict.fromkeys(CASES), small=("resnet50_channels_last",))
    from benchmarks.accuracy.truth_models import MODELS

    logging.getLogger("backspot").setLevel(logging.ERROR)
    device, small = arguments.device, arguments.small
    print_machine(device)
    found: dict[str, Any] = {}
    for name in names:
        build = MODELS[name](Context(device, small))
        step = training_step(build.model, build.loss)
        for _ in range(1 if small else 10):
            step()
        found[name] = {
            **_agreement(step, build.model, device, 2 if small else 30),
            **_cost(step, build.model, device, *((2, 1) if small else (12, 10))),
        }
        del build, step
    rows = []
    for name, one in found.items():
        added = one["idle"]["median"], one["sampled"]["median"]
        off = one["off"]["median"], one["farthest"]
        percents = [100 * value for value in (one["gpu_share"], *added, *off)]
        rows.append((name, one["plain_ms"]["median"], *percents, len(one["blocks"])))
    head = ("model", "step ms", "GPU busy %", "idle %", "sampled %", "median off %")
    print_table((*head, "farthest off %", "blocks"), rows)
    steady, at = (60, 60) if small else (5000, 500)
    heard = _alarms(device, steady=steady, at=at, small=small)
    print(f"{len(heard['steady'])} alarms in {steady} steady steps")
    print(f"a block slower from step {at} on: {'; '.join(heard['planted']) or 'no alarm'}")
    write_results(arguments, {"models": found, "alarms": heard})
    # Of a step that the GPU limits: within 5%, and a sampled step costs at most 1%.
    bound = [one for one in found.values() if one["gpu_share"] > 0.9]
    far = any(one["farthest"] > 0.05 or one["sampled"]["median"] > 0.01 for one in bound)
    return int(not small and (bool(heard["steady"]) or len(heard["planted"]) != 1 or far))
