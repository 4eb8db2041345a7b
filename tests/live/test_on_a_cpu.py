"""What a report of a CPU says that one of a GPU says with kernels."""

from __future__ import annotations

import pytest
import torch

import backspot
from backspot import Report
from backspot.analysis.findings import all_rules


@pytest.fixture(scope="module")
def report() -> Report:
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))

    def step() -> None:
        model(torch.randn(8, 16)).square().mean().backward()

    return backspot.profile(step, model, steps=3, warmup=1)


def test_rules_that_need_a_gpu_do_not_look(report: Report) -> None:
    needy = {rule.name for rule in all_rules() if "cpu" not in rule.devices}
    assert needy == {rule for rule, state in report.rules.items() if state == "needs a GPU"}
    asked = {rule.name for rule in all_rules()} - needy
    assert {report.rules[rule] for rule in asked} <= {"found", "nothing"}


def test_the_operators_inside_a_modules_nodes_are_listed(report: Report) -> None:
    linear = report["2"].row
    listed = {operator.name: operator for operator in linear.kernels}
    assert listed["aten::mm"].count == 2  # for its input and for its weight
    assert all(operator.spent_ns <= linear.cpu_ns for operator in linear.kernels)
    # aten::mm calls no other of PyTorch's operators that is listed by itself.
    assert sum(operator.spent_ns for operator in linear.kernels) <= linear.cpu_ns
    assert [operator.name for operator in report["1"].row.kernels] == ["aten::gelu_backward"]
