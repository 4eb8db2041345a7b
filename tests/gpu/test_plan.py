"""On a real GPU: a plan tries settings beside a training, which goes on bit for bit."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import backspot  # noqa: E402
from backspot.live.acts import Living  # noqa: E402
from backspot.live.plan.planning import Planning  # noqa: E402
from backspot.results.report import changed  # noqa: E402
from support.gpu_models import DEVICE, needs_gpu  # noqa: E402

pytestmark = [*needs_gpu]


@pytest.fixture(autouse=True)
def repeatable():
    """Kernels whose results are the same each time, so that bits can be compared."""
    torch._dynamo.reset()
    utils = torch._dynamo.utils
    utils.clear_compilation_metrics()
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before
    torch._dynamo.reset()


class Images:
    """A small convolutional network that trains on noise, with dropout and batch statistics."""

    def __init__(self, batch=64, size=64):
        torch.manual_seed(0)
        torch.cuda.manual_seed_all(0)
        layers = []
        for inside, outside in ((3, 64), (64, 128), (128, 256)):
            layers += [nn.Conv2d(inside, outside, 3, 2, 1), nn.BatchNorm2d(outside), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, 10)]
        self.model = nn.Sequential(*layers).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, foreach=False)
        self.x = torch.randn(batch, 3, size, size, device=DEVICE)
        self.y = torch.arange(batch, device=DEVICE) % 10
        self.losses = []

    def step(self):
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def state(self):
        values = [*self.model.state_dict().values(), *self.losses]
        for one in self.optimizer.state.values():
            values += [part for part in one.values() if torch.is_tensor(part)]
        return [*(one.tolist() for one in values), torch.cuda.get_rng_state().tolist()]


def planned(training, report, seconds=120):
    live = Living({"": training.model}, [training.optimizer], step=training.step)
    return Planning(seconds).after(report, live).plan


def recorded(training, **more):
    return backspot.profile(
        training.step, training.model, steps=3, stacks=False, trials="none", **more
    )


def said(plan):
    """The plan in lines, for the output of a test that is run by hand."""
    print(f"{plan.step_ns / 1e6:.2f} ms -> {plan.planned_ns / 1e6:.2f}; {plan.took_ns / 1e9:.0f} s")
    for one in plan.rungs:
        print(one.setting, one.on, one.verdict, one.before_ns, one.step_ns, one.note, one.kept)
        print("  ", one.memory_bytes >> 20, one.before_memory_bytes >> 20, one.difference)
    return {one.setting: one for one in plan.rungs}


def test_settings_of_a_gpu_are_tried_and_the_training_goes_on_bit_for_bit():
    plain = Images()
    report = recorded(plain)
    for _ in range(4):
        plain.step()
    expected = plain.state()
    training = Images()
    report = recorded(training)
    peak = torch.cuda.max_memory_allocated()
    plan = planned(training, report)
    found = said(plan)
    assert torch.cuda.max_memory_allocated() >= peak
    for _ in range(3):
        training.step()
    assert training.state() == expected
    assert not plan.why_not
    for name in ("TF32", "bf16", "channels_last", "torch.compile", "batch 128"):
        assert found[name].step_ns > 0, found[name].note
    assert found["bf16"].memory_bytes > 0
    assert found["torch.compile"].compile_ns > 0
    assert found["cudnn.benchmark"].verdict == "not tried"


def test_nothing_of_a_plan_stays_on_the_device():
    training = Images()
    report = recorded(training)
    training.step()
    gc.collect()
    before = torch.cuda.memory_allocated()
    planned(training, report, seconds=60)
    training.step()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_a_setting_that_runs_out_of_memory_is_refused_and_the_training_goes_on():
    training = Images(batch=256, size=224)
    report = recorded(training)
    report = changed(report, step_ns=10**9, recorded_step_ns=10**9)
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(DEVICE).total_memory
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.set_per_process_memory_fraction(1.35 * peak / whole)
    try:
        plan = planned(training, report, seconds=60)
        training.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    found = said(plan)
    assert plan.why_not or found["batch 512"].note == "out of memory"
    assert torch.isfinite(training.losses[-1])
