"""A plan tries settings beside a training, says what they give, and leaves the training alone."""

import types
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import backspot
from backspot.live.acts import Living
from backspot.live.plan.planning import Planning
from backspot.results.report import changed
from support.trainings import Scaled, Training


@pytest.fixture(scope="module")
def report():
    """A report of a step that takes long enough for each of the models here."""
    model = nn.Linear(4, 4)
    found = backspot.profile(
        lambda: model(torch.ones(2, 4)).sum().backward(), model, steps=1, warmup=0, trials="none"
    )
    return changed(found, step_ns=50_000_000, recorded_step_ns=50_000_000)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Few rounds: what they measure matters in few tests."""
    monkeypatch.setattr("backspot.live.trials.measuring._MOST_ROUNDS", 6)
    monkeypatch.setattr("backspot.live.trials.measuring._LEAST_SAMPLE", 1)


@pytest.fixture
def uncompiled(monkeypatch):
    """Nothing is compiled, which takes longer than all else."""
    monkeypatch.setattr("backspot.live.plan.settings._compilers", lambda *_: iter(()))


def planned(report, step, *models, optimizers=(), seconds=20, **more):
    """The plan of a step that may be run once more."""
    named = {f"{number}" if number else "": one for number, one in enumerate(models)}
    live = Living(named, optimizers, step=step, **more)
    return Planning(seconds).after(report, live).plan


def stepping(model, *inputs, loss=lambda out: out.square().mean()):
    def step():
        for one in model.parameters():
            one.grad = None
        loss(model(*inputs)).backward()

    return step


def settings(plan):
    return {one.setting: one for one in plan.rungs}


pytestmark = pytest.mark.usefixtures("uncompiled")


# The training stays as it was ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Training, Scaled])
def test_a_training_goes_on_bit_for_bit_after_a_plan(report, kind):
    plain = kind()
    for _ in range(5):
        plain.step()
    expected = plain.state()
    tried = kind()
    tried.step()
    plan = planned(report, tried.step, tried.model, optimizers=[tried.optimizer])
    for _ in range(3):
        tried.step()
    assert any(one.step_ns for one in plan.rungs), plan.why_not
    assert tried.state() == expected


def test_each_setting_has_its_code_and_the_step_with_it(report):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    plan = planned(report, stepping(model, torch.randn(4, 3, 16, 16)), model)
    found = settings(plan)
    assert plan.step_ns == report.whole_ns
    assert plan.batch == 4
    for name, word in (("bf16", "bfloat16"), ("channels_last", "channels_last")):
        assert word in found[name].code
        assert 0 < found[name].low_ns <= found[name].step_ns <= found[name].high_ns
    assert 0 < found["bf16"].difference.outputs < 0.1
    assert found["channels_last"].difference.outputs < 1e-5
    assert found["bf16"].difference.outputs_again == 0
    assert found["batch 8"].code == "batch_size=8"
    assert not found["batch 8"].kept


def test_what_is_in_use_already_is_not_tried(report):
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 16, 16)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()

    found = settings(planned(report, step, model))
    for name in ("bf16", "channels_last"):
        assert found[name].verdict == "not tried"
        assert found[name].note == "in use already"


# What the model returns ---------------------------------------------------------------------------


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Returning(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.layer, self.made = nn.Linear(8, 8), made

    def forward(self, x):
        y = self.layer(x)
        return self.made(y.square().mean(), y)


@pytest.mark.parametrize(
    ("made", "loss"),
    [
        (lambda loss, y: {"loss": loss, "more": [y]}, lambda out: out["loss"]),
        (lambda loss, y: (loss, y), lambda out: out[0]),
        (Output, lambda out: out.loss),
        (lambda loss, y: types.SimpleNamespace(loss=loss, y=y), lambda out: out.loss),
        (lambda loss, y: (loss, y), lambda out: out[0] + out[1].mean()),
    ],
    ids=["dict", "tuple", "dataclass", "object", "both"],
)
def test_outputs_of_any_kind_are_replayed_and_a_loss_is_compared(report, made, loss):
    model = Returning(made)
    plan = planned(report, stepping(model, torch.randn(4, 8), loss=loss), model)
    difference = settings(plan)["bf16"].difference
    assert difference.gradients > 0
    assert difference.loss is not None


# Refusals -----------------------------------------------------------------------------------------


def why_not(report, model, *inputs, **more):
    return planned(report, stepping(model, *inputs), model, **more).why_not


def test_a_model_whose_forward_was_replaced_by_a_function_of_its_own_is_refused(report):
    model = nn.Linear(4, 4)
    forward = model.forward
    model.forward = lambda x: forward(x) * 2
    before = [p.clone() for p in model.parameters()]
    assert "trains the original" in why_not(report, model, torch.ones(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_module_that_cannot_be_copied_is_refused_with_its_error(report):
    class Once(nn.Identity):
        def __deepcopy__(self, memo):
            raise TypeError("one of a kind")

    model = nn.Sequential(nn.Linear(4, 4), Once())
    assert why_not(report, model, torch.ones(2, 4)) == "TypeError: one of a kind"


def test_an_optimizer_in_the_backward_is_refused(report):
    model = nn.Linear(4, 4)
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda p: None)
    assert "optimizer in the backward" in why_not(report, model, torch.ones(2, 4))


def test_a_model_that_the_step_does_not_call_is_refused(report):
    called, other = nn.Linear(4, 4), nn.Linear(4, 4)
    plan = planned(report, stepping(called, torch.ones(2, 4)), other)
    assert plan.why_not == "no call of the model was seen in the step"


def test_a_tiny_limit_leaves_settings_untried(report):
    model = nn.Linear(8, 8)
    watched = planned(report, stepping(model, torch.ones(2, 8)), model, seconds=0)
    assert {one.note for one in watched.rungs if one.axis != "loader"} == {"no time was left"}


def test_all_is_no_kind_of_trials_any_more_and_the_error_names_the_plan():
    with pytest.raises(backspot.UsageError, match='"plan" also tries the model'):
        backspot.profile(lambda: None, nn.Linear(1, 1), trials="all")


# How much it is asked for -------------------------------------------------------------------------


def test_profile_plans_where_it_is_asked_to():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    step = stepping(model, torch.randn(64, 64))
    assert backspot.profile(step, model, steps=2, stacks=False).plan is None
    plan = backspot.profile(step, model, steps=2, stacks=False, trials="plan").plan
    assert plan.what == "a copy of Sequential, forward and backward"
    assert "bf16" in settings(plan) or plan.why_not
