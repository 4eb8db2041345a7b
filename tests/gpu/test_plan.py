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
from backspot.live.trials.attempts import own_memory  # noqa: E402
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


class Attending(nn.Module):
    """Attention over a short sequence, between two products."""

    def __init__(self, words=256, width=512, heads=8):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Sequences(Images):
    """Trains attention on noise."""

    def __init__(self, batch=64, length=256, width=512):
        torch.manual_seed(0)
        torch.cuda.manual_seed_all(0)
        self.model = nn.Sequential(*(Attending() for _ in range(4))).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)
        self.x = torch.randn(batch, length, width, device=DEVICE)
        self.losses = []

    def step(self):
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())


def test_kernels_of_attention_are_tried_once_it_is_known_what_attention_gets():
    training = Sequences()
    flags = (
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.cudnn_sdp_enabled,
        torch.backends.cuda.math_sdp_enabled,
    )
    before = [flag() for flag in flags]
    plan = planned(training, recorded(training))
    found = said(plan)
    assert [flag() for flag in flags] == before
    names = ("flash attention", "memory-efficient attention", "cuDNN attention")
    assert any(found[name].step_ns or found[name].note == "in use already" for name in names)
    for name in names:
        one = found[name]
        assert one.step_ns or one.note, name
        if any(rung.setting == "bf16" for rung in plan.ladder) and one.step_ns:
            assert "bf16" in one.on
    in_bf16 = {rung.setting for rung in plan.ladder} >= {"bf16"}
    assert in_bf16 or found["flash attention"].note == "no kernel for these inputs"


def test_max_autotune_is_tried_in_place_of_the_default_where_its_time_is_left():
    training = Sequences()
    plan = planned(training, recorded(training), seconds=400)
    found = said(plan)
    training.step()
    assert torch.isfinite(training.losses[-1])
    default, autotuned = found["torch.compile"], found["max-autotune"]
    assert autotuned.step_ns or autotuned.note
    if default.kept and autotuned.step_ns:
        assert autotuned.compile_ns > 0
        assert autotuned.on[-1] == "torch.compile"
    print(
        "compiling:", default.compile_ns / 1e9, "s; max-autotune:", autotuned.compile_ns / 1e9, "s"
    )


def test_graphs_are_named_with_what_a_replay_says_of_them():
    training = Images(batch=2, size=32)  # limited by the host
    found = said(planned(training, recorded(training), seconds=30))
    assert "a capture that fails cannot be undone" in found["CUDA graphs"].note
    assert "at most" in found["CUDA graphs"].note


def test_what_a_plan_leaves_on_the_device_is_little_and_is_printed():
    training = Sequences()
    report = recorded(training)
    training.step()
    gc.collect()
    torch.cuda.synchronize()

    def state():
        free, whole = torch.cuda.mem_get_info()
        reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        return {"allocated": allocated, "reserved": reserved, "outside": whole - free - reserved}

    before = state()
    plan = planned(training, report, seconds=120)
    gc.collect()
    after = state()
    for name, value in after.items():
        print(f"{name}: {before[name] / 2**20:.0f} -> {value / 2**20:.0f} MiB")
    print("tried:", [one.setting for one in plan.rungs if one.step_ns])
    assert after["allocated"] <= before["allocated"] + (64 << 20)  # workspaces of cuBLAS
    assert after["reserved"] <= before["reserved"] + (96 << 20)


def test_pinned_memory_is_a_rung_where_batches_come_from_ordinary_memory():
    training = Images(batch=256, size=64)
    on_host = training.x.cpu()

    def step():
        training.x = on_host.to(DEVICE, non_blocking=True)
        Images.step(training)

    report = backspot.profile(step, training.model, steps=3, stacks=False)
    live = Living({"": training.model}, [training.optimizer], step=step)
    found = said(Planning(60).after(report, live).plan)
    if any(one.rule == "pageable-copy" for one in report.findings):
        assert found["pinned memory"].step_ns or found["pinned memory"].note


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


def test_memory_that_ran_out_goes_back_while_other_copies_live_in_the_pool():
    torch.ones(1, device=DEVICE)
    whole = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.empty_cache()
    with own_memory(torch.device(DEVICE, 0)) as give_back:
        best = torch.ones(64 << 20, dtype=torch.uint8, device=DEVICE)
        before = torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction((before + (1 << 30)) / whole)
        blocks = []
        try:
            size, kind = 128 << 20, torch.uint8
            blocks.extend(torch.ones(size, dtype=kind, device=DEVICE) for _ in range(9))
        except torch.OutOfMemoryError:
            pass
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert len(blocks) < 9
        blocks.clear()
        full = torch.cuda.memory_reserved()
        give_back()
        after = torch.cuda.memory_reserved()
        again = torch.ones(128 << 20, dtype=torch.uint8, device=DEVICE)
        assert torch.cuda.memory_reserved() >= after + again.numel()
        del again
    print("reserved:", before >> 20, "->", full >> 20, "->", after >> 20, "MiB")
    assert full > before + (512 << 20)
    assert after <= before + (2 << 20)
    assert best.sum() == best.numel()


@pytest.mark.parametrize(("batch", "size", "limit"), [(2, 32, "host"), (256, 128, "device")])
def test_host_and_device_of_a_step_are_told_apart(batch, size, limit):
    training = Images(batch, size)
    plan = planned(training, recorded(training), seconds=40)
    said(plan)
    print(f"host {plan.host_ns / 1e6:.2f} ms, device {plan.device_ns / 1e6:.2f} ms of the step")
    for one in plan.rungs:
        print(one.setting, "host", one.host_ns / 1e6, "device", one.device_ns / 1e6, "ms")
    assert (plan.device_ns > plan.host_ns) == (limit == "device")
    assert plan.step_ns >= max(plan.host_ns, plan.device_ns) > 0


def test_an_autocast_to_float32_leaves_bf16_to_be_tried():
    model = nn.Linear(256, 256).to(DEVICE)
    x = torch.randn(64, 256, device=DEVICE)

    def step():
        model.zero_grad()
        with torch.autocast("cuda", torch.float32):  # as of a script whose type is an option
            loss = model(x).square().mean()
        loss.backward()

    plan = backspot.profile(step, model, steps=3, trials="plan").plan
    assert plan.why_not == ""
    bf16 = next(rung for rung in plan.rungs if rung.setting == "bf16")
    assert bf16.note != "in use already"
