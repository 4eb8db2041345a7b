"""Does the same step, profiled again and again, get the same first answer, and the planted one?

    python -m benchmarks steady_answer --device cpu --busy 2
    python -m benchmarks steady_answer --device cuda

Each case is a step in which it is known by construction what costs most. It is profiled ten times
as ``backspot.profile`` does by default, without trials. A report counts as right if its answer is
about what was planted, and as steady if its answer is about the same as most of the case's other
reports. Aimed at: nine of ten. ``--busy`` keeps cores busy with other processes meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.harness import Figures, Run, done, each
from benchmarks.workers import Job, Record, Stage

if TYPE_CHECKING:
    from benchmarks.models import Context

_ENOUGH = 0.9
"""Share of the reports that must be right, and alike."""
_MOST_NOISY = "Too noisy"


class Case(NamedTuple):
    """A step in which it is known what costs most.

    Attributes:
        step: one step of the training.
        model: what is profiled.
        planted: the paths that an answer can have which is about what was planted.
    """

    step: Callable[[], Any]
    model: Any
    planted: tuple[str, ...]


def _trained(model: Any, x: Any, device: str) -> Callable[[], None]:
    """A step of SGD on the mean of the squares of what a model returns."""
    import torch

    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    batch = x.to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def _again(layer: type, times: int) -> type:
    """A class of layers whose forward computes the same so many times more, without a backward."""
    import torch

    class Again(layer):  # type: ignore[misc] # a class that is given
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for _ in range(times):
                    super().forward(x)
            made: torch.Tensor = super().forward(x)
            return made

    return Again


def _heavy_forward(context: Context) -> Case:
    """A convolution among others of its kind whose forward takes most of the step."""
    import torch
    from torch import nn

    def block(inputs: int, layer: type = nn.Conv2d) -> nn.Sequential:
        return nn.Sequential(layer(inputs, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())

    heavy = _again(nn.Conv2d, 24)
    model = nn.Sequential(block(3), block(32, heavy), block(32), nn.AdaptiveAvgPool2d(1))
    size = 8 if context.small else 32
    step = _trained(model, torch.randn(8, 3, size, size), context.device)
    return Case(step, model, ("1.0",))


def _heavy_layers(context: Context) -> Case:
    """A layer of each block costs in its forward alone; the costliest backward is another."""
    import torch
    from torch import nn

    class Watch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for _ in range(6):
                    x @ x.mT
            return x

    width = 64 if context.small else 256
    parts = ({"linear": nn.Linear(width, width), "watch": Watch()} for _ in range(6))
    model = nn.Sequential(*(nn.Sequential(OrderedDict(part)) for part in parts))
    step = _trained(model, torch.randn(width, width), context.device)
    return Case(step, model, ("*.watch",))


def _python(context: Context) -> Case:
    """Python between the forward and the backward takes most of the step."""
    import torch
    from torch import nn

    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))).to(context.device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    batch = torch.randn(32, 128, device=context.device)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        sum(number * number for number in range(20_000 if context.small else 200_000))
        loss.backward()
        optimizer.step()

    return Case(step, model, ("(loss)",))


def _launches(context: Context) -> Case:
    """A module launches hundreds of small operators, in forward and backward."""
    import torch
    from torch import nn

    class Rounds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(150):
                x = x * 1.01 - 0.01
            return x

    model = nn.Sequential(nn.Linear(64, 64), Rounds(), nn.Linear(64, 64))
    step = _trained(model, torch.randn(16, 64), context.device)
    return Case(step, model, ("1",))


def _apart(context: Context) -> Case:
    """Two modules that run products of one size, of which the first runs 21 and the second 20."""
    import torch
    from torch import nn

    class Products(nn.Module):
        def __init__(self, width: int, times: int) -> None:
            super().__init__()
            self.weight, self.times = nn.Parameter(torch.eye(width)), times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = x @ self.weight
            return x

    width = 128 if context.small else 256 if context.device == "cpu" else 4096
    # Behind a layer, both have a gradient for what they are given.
    model = nn.Sequential(nn.Linear(width, width), Products(width, 21), Products(width, 20))
    step = _trained(model, torch.randn(width, width), context.device)
    return Case(step, model, ("1",))


CASES: dict[str, Callable[[Context], Case]] = {
    "heavy forward": _heavy_forward,
    "heavy forward of layers": _heavy_layers,
    "Python in the step": _python,
    "small operators": _launches,
    "5% apart": _apart,
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=10, help="reports of each case (default: 10)")


def _examine(job: Job, stage: Stage, run: Run) -> Record:
    import torch

    import backspot
    from benchmarks.measuring import synchronize

    stage("build", {})
    torch.manual_seed(0)
    case = CASES[job["name"]](run.context)
    times = []
    for _ in range(8):
        synchronize(run.device)
        begin = time.perf_counter()
        case.step()
        synchronize(run.device)
        times.append(1e3 * (time.perf_counter() - begin))
    said: list[str] = []
    right = noisy = 0
    for number in range(2 if run.small else run.times):
        stage("profile", {"reports": number})
        report = backspot.profile(case.step, case.model, trials="none")
        found = report.answer
        said.append(f"{found.kind} {found.path}")
        right += found.path in case.planted
        noisy += _MOST_NOISY in str(report)
    (most, alike), *_ = Counter(said).most_common()
    return {
        "right": right,
        "alike": alike,
        "of": len(said),
        "most": most,
        "noisy": noisy,
        "step_ms": round(statistics.median(times[2:]), 2),
        "answers": dict(Counter(said)),
    }


def answer(run: Run) -> Figures:
    def known() -> dict[str, Any]:
        return {name: case.__doc__ or "" for name, case in CASES.items()}

    cases = each(run, known, lambda job, stage: _examine(job, stage, run), fresh=False)
    return {"cases": cases, "summary": summary_of_lines([*done(cases).values()])}


def summary_of_lines(ended: Sequence[Mapping[str, Any]], _: str = "") -> dict[str, Any]:
    """Count the cases that are steady, and the reports that are right."""
    steady = [one for one in ended if min(one["right"], one["alike"]) >= _ENOUGH * one["of"]]
    return {
        "steady and right": f"{len(steady)} of {len(ended)}",
        "reports that name what was planted": f"{sum(one['right'] for one in ended)} of "
        f"{sum(one['of'] for one in ended)}",
        "reports that say that steps are too noisy": sum(one["noisy"] for one in ended),
    }
