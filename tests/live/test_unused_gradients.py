"""Parameters that no optimizer holds are told, whatever optimizers there are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

import backspot
from support.choice import slow_except


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))


def findings(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 2):
    data = torch.randn(1024, 512)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(data).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    with backspot.instrument(model):
        step()
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            for _ in range(steps):
                step()
    report = backspot.locate(prof)
    return {f.rule: f for f in report.findings}


def sgd(*modules: nn.Module, **options: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=1e-3, **options)


def test_a_prefix_left_out_of_the_optimizer_is_found_with_its_whole_backward():
    model = network()
    found = findings(model, sgd(model[2], model[3]))["unused-gradient"]
    assert {place.path for place in found.places} == {"0", "1"}
    report_total = sum(place.wall_ns for place in found.places)
    assert found.wall_ns == report_total > 0


@pytest.mark.slow
def test_a_layer_in_the_middle_counts_half_for_it_hands_its_gradient_on():
    model = network()
    found = findings(model, sgd(model[0], model[1], model[3]))["unused-gradient"]
    assert [place.path for place in found.places] == ["2"]


@pytest.mark.parametrize("split", slow_except([2], [1, 2, 3]))
def test_several_optimizers_together_hold_everything(split):
    model = network()
    optimizers = sgd(*model[:split]), sgd(*model[split:])
    assert "unused-gradient" not in findings(model, *optimizers, steps=1)


@pytest.mark.slow
def test_an_optimizer_with_all_parameters_leaves_nothing_to_say():
    model = network()
    assert "unused-gradient" not in findings(model, sgd(model))


@pytest.mark.slow
def test_an_optimizer_over_copies_of_the_parameters_tells_nothing():
    model = network()
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=1e-3)
    assert "unused-gradient" not in findings(model, optimizer)


@pytest.mark.slow
def test_frozen_before_the_forward_there_is_no_gradient_to_waste():
    model = network()
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    assert "unused-gradient" not in findings(model, sgd(model[2], model[3]))


def test_nothing_watches_optimizers_when_nothing_is_instrumented():
    from torch.optim import optimizer as module

    before = len(module._global_optimizer_post_hooks)
    with backspot.instrument(network()):
        assert len(module._global_optimizer_post_hooks) == before + 1
    assert len(module._global_optimizer_post_hooks) == before


def test_a_mode_of_the_script_sees_no_look_at_its_gradients():
    seen: list[object] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    model = nn.Linear(8, 8)
    optimizer = sgd(model)

    def functions() -> list[object]:
        seen.clear()
        with Mode():
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        return list(seen)

    plain = functions()
    with backspot.instrument(model), profile(activities=[ProfilerActivity.CPU]):
        assert functions() == plain


class Halves(nn.Module):
    """One large weight, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(64, 75))
        self.small = nn.Parameter(torch.randn(64, 25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x @ self.large, x @ self.small], -1)


@pytest.mark.parametrize(
    ("left_out", "label"),
    [("small", "(Halves) #25"), ("large", "(Halves) #75"), ("", "(Halves)")],
)
def test_of_a_module_it_is_told_which_part_of_its_gradients_nobody_uses(left_out, label):
    model, other = Halves(), nn.Linear(100, 4)
    kept = [p for name, p in model.named_parameters() if left_out and name != left_out]
    optimizer = torch.optim.SGD([*kept, *other.parameters()], lr=1e-3)
    whole = nn.Sequential(model, other)
    with backspot.instrument(whole), profile(activities=[ProfilerActivity.CPU]) as prof:
        whole(torch.randn(8, 64)).sum().backward()
        optimizer.step()
    told = {event.name for event in prof.events() if event.name.startswith("unused gradient")}
    assert told == {f"unused gradient: 0 {label}"}
