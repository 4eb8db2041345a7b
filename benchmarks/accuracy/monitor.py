"""Does the monitor tell the truth, at what cost, and does it raise the right alarms?

For each model: what a sampled step and an unsampled one cost beside a step without a monitor; the
backward time of each block beside that of a profile, for blocks of at least 2% of the backward.
Then a long run of a small model: no alarm in 5,000 steady steps, and one for a block that becomes
slower in step 500.

    python -m benchmarks monitor
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import backspot
from benchmarks.common import (
    choose,
    command_line,
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
_NEVER = 1 << 30


class _Wasteful(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, times: int) -> torch.Tensor:
        ctx.weight, ctx.times = weight.detach(), times
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        for _ in range(ctx.times):
            gradient @ ctx.weight
        return gradient, None, None


class Planted(nn.Module):
    """A block of which the backward can be made slower by needless products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.waste = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Wasteful.apply(torch.relu(self.linear(x)), self.linear.weight, self.waste)


def cost(
    step: Callable[[], None], model: nn.Module, device: str, *, rounds: int, inner: int
) -> dict[str, Any]:
    """Milliseconds of a step without a monitor, with an idle one, and sampled; in turns."""
    times: dict[str, list[float]] = {"plain": [], "idle": [], "sampled": []}
    for number in range(rounds):
        names = list(times) if number % 2 == 0 else list(times)[::-1]
        for name in names:
            every = {"plain": 0, "idle": _NEVER, "sampled": 1}[name]
            monitor = backspot.Monitor(model, every=every, slower_by=None) if every else None
            for _ in range(2):
                step()
            synchronize(device)
            begin = time.perf_counter()
            for _ in range(inner):
                step()
            synchronize(device)
            times[name].append((time.perf_counter() - begin) * 1e3 / inner)
            if monitor is not None:
                monitor.remove()
    pairs = zip(times["plain"], times["idle"], times["sampled"], strict=True)
    ratios = [(idle / plain - 1, sampled / plain - 1) for plain, idle, sampled in pairs]
    return {
        "plain_ms": spread(times["plain"]),
        "idle": spread([idle for idle, _ in ratios]),
        "sampled": spread([sampled for _, sampled in ratios]),
    }


def agreement(
    step: Callable[[], None], model: nn.Module, device: str, *, steps: int
) -> dict[str, Any]:
    """Each heavy block's backward: the monitor's median over the profile's time, total of both."""
    with backspot.Monitor(model, every=1, slower_by=None) as monitor:
        for _ in range(steps + 1):
            step()
        synchronize(device)
        monitor.flush()
    frame = monitor.to_pandas().groupby("path")["backward_ms"].median()
    report = backspot.profile(step, model, steps=5, warmup=3, depth=1, lines=False)
    whole = report.wall_ns / 1e6
    blocks = {}
    rows = {row.path: row for row in report.modules}
    for path, ours in frame.items():
        if path not in rows:  # an Identity, which has no backward of its own
            continue
        theirs = rows[str(path)].total_wall_ns / 1e6
        if theirs >= _HEAVY * whole:
            blocks[str(path)] = {"monitor_ms": ours, "profile_ms": theirs, "ratio": ours / theirs}
    ratios = [found["ratio"] for found in blocks.values()]
    return {
        "blocks": blocks,
        "off": spread([abs(ratio - 1) for ratio in ratios]),
        "farthest": max((abs(ratio - 1) for ratio in ratios), default=None),
        "gpu_share": report.gpu_ns / report.wall_ns if report.has_gpu else None,
    }


def alarms(device: str, *, steady: int, at: int, small: bool) -> dict[str, Any]:
    """The alarms of a steady run, and of one with a block that becomes slower."""
    torch.manual_seed(0)
    width, count = (64, 4) if small else (2048, 64)
    model = nn.Sequential(*(Planted(width) for _ in range(6))).to(device)
    inputs = torch.randn(count * 8, width, device=device)
    step = training_step(model, lambda: model(inputs).square().mean())
    for _ in range(10):
        step()

    def run(steps: int, slower_at: int | None) -> list[str]:
        with backspot.Monitor(model, every=10, on_alarm=lambda _: None) as monitor:
            for number in range(steps):
                if number == slower_at:
                    model[3].waste = 20
                step()
            synchronize(device)
            monitor.flush()
        return [f"{alarm}, raised in step {alarm.step}" for alarm in monitor.alarms]

    return {"steady": run(steady, None), "planted": run(2 * at, at)}


@script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the results."""
    arguments = parse(command_line(__doc__, "monitor"), argv)
    names = choose(arguments, dict.fromkeys(CASES, ""), small=("resnet50_channels_last",))
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
        synchronize(device)
        found[name] = {
            **agreement(step, build.model, device, steps=2 if small else 30),
            **cost(step, build.model, device, rounds=2 if small else 12, inner=1 if small else 10),
        }
        del build, step
    rows = [
        (
            name,
            one["plain_ms"]["median"],
            100 * (one["gpu_share"] or 0),
            100 * one["idle"]["median"],
            100 * one["sampled"]["median"],
            len(one["blocks"]),
            100 * one["off"]["median"],
            100 * (one["farthest"] or 0),
        )
        for name, one in found.items()
    ]
    print_table(
        (
            "model",
            "step ms",
            "GPU busy %",
            "idle %",
            "sampled %",
            "blocks",
            "median off %",
            "farthest off %",
        ),
        rows,
    )
    steady, at = (60, 200) if small else (5000, 500)
    heard = alarms(device, steady=steady, at=at, small=small)
    print(f"{len(heard['steady'])} alarms in {steady} steady steps")
    print(f"a block slower from step {at} on: {'; '.join(heard['planted']) or 'no alarm'}")
    write_results(arguments, {"models": found, "alarms": heard})
    wrong = not small and (
        bool(heard["steady"]) or len(heard["planted"]) != 1 or _too_far(found, device)
    )
    return int(wrong)


def _too_far(found: dict[str, Any], device: str) -> bool:
    """Whether a GPU-bound model is off by more than 5%, or a sampled step costs more than 1%."""
    bound = [one for one in found.values() if (one["gpu_share"] or 0) > 0.9]
    return device.startswith("cuda") and any(
        (one["farthest"] or 0) > 0.05 or one["sampled"]["median"] > 0.01 for one in bound
    )
