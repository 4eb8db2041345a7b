"""A process that is held up once: a Function whose backward sleeps in one step of ten."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import backspot
from backspot import Report
from support.sleeping import Sleep

HELD_UP = 0.2  # seconds


class Hiccup(nn.Module):
    """Does nothing, and is held up once in a step that the test chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def forward(self, x):
        return Sleep.apply(x, lambda: self.seconds)


@pytest.fixture(scope="module")
def report() -> Report:
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), Hiccup(), nn.Linear(512, 512))
    x, steps = torch.randn(256, 512), 0

    def step() -> None:
        nonlocal steps
        model[2].seconds = HELD_UP if steps == 2 + 4 else 0.0
        model(x).square().mean().backward()
        steps += 1

    return backspot.profile(step, model, steps=10, warmup=2, unprofiled=0)


def test_a_module_that_is_held_up_once_is_not_what_makes_the_step_slow(report: Report) -> None:
    row = report["2"].row
    assert row.wall_ns_by_step[4] >= HELD_UP * 1e9, "nothing is hidden"
    assert row.wall_ns < 0.1 * HELD_UP * 1e9
    first, second = [one for one in report.modules if one.is_module][:2]
    assert "2" not in (first.path, second.path)
    assert not any(finding.path == "2" for finding in report.findings)


def test_the_step_that_was_held_up_is_named_with_the_module(report: Report) -> None:
    found = next(one for one in report.hiccups if one.step == 4)
    assert 4 not in report.typical_steps
    assert found.where == "2"
    # Its other work can take less than a typical step does, on a busy machine.
    assert found.longer_ns >= HELD_UP * 1e9 - report.step_ns
    assert re.search(r"[Ss]tep 5 took [\d.]+ ms longer, in 2\b", str(report))
