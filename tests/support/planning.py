"""Plans of small trainings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import backspot
from backspot.live.acts import Living
from backspot.live.plan.planning import Planning
from backspot.results.plan import Plan, Rung
from backspot.results.report import Report, changed

_MS = 1_000_000


def report_of(**phases: int) -> Report:
    """Return a report of a step of 50 ms, whose phases take so many milliseconds."""
    model = nn.Linear(4, 4)
    found = backspot.profile(
        lambda: model(torch.ones(2, 4)).sum().backward(), model, steps=1, warmup=0, trials="none"
    )
    step = 50 * _MS
    known = tuple(replace(one, wall_ns=phases.get(one.name, 0) * _MS) for one in found.phases)
    return changed(found, step_ns=step, recorded_step_ns=step, phases=known)


def planned(
    report: Report,
    step: Callable[[], object],
    *models: nn.Module,
    optimizers: Any = (),
    seconds: int = 20,
    **more: Any,
) -> Plan:
    """Return the plan of a step that may be run once more."""
    named = {f"{number}" if number else "": one for number, one in enumerate(models)}
    live = Living(named, optimizers, step=step, **more)
    plan = Planning(seconds).after(report, live).plan
    assert plan is not None
    return plan


def stepping(
    model: nn.Module, *inputs: Any, loss: Callable[..., Any] = lambda out: out.square().mean()
) -> Callable[[], None]:
    """Return a step without an optimizer."""

    def step() -> None:
        for one in model.parameters():
            one.grad = None
        loss(model(*inputs)).backward()

    return step


def settings(plan: Plan) -> dict[str, Rung]:
    """Return the rungs by their settings."""
    return {one.setting: one for one in plan.rungs}
