"""On a real GPU: the same training bit for bit, the same memory, no wait, and true owners."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import backspot  # noqa: E402
from support.gpu_models import (  # noqa: E402
    ASKED,
    DEVICE,
    MODELS,
    Asks,
    Planted,
    Slow,
    gpu_profile,
    needs_gpu,
    on_device,
)
from support.leftovers import hooks_on, left_in_torch  # noqa: E402
from support.modules import Checkpointed, Custom  # noqa: E402
from support.sums import assert_phases_add_up  # noqa: E402
from support.training import (  # noqa: E402
    assert_true_owners,
    check,
    owners,
    tells_creation,
)

pytestmark = needs_gpu


def stepping(inputs, *, autocast=False):
    """A step with an optimizer of its own, for ``check``."""

    def step(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = model(inputs()).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


# The same training -------------------------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_the_same_bits(name, autocast):
    make, inputs = MODELS[name]
    step = stepping(inputs, autocast=autocast)
    report = check(on_device(make), step, profiled=gpu_profile, steps=3, warm_up=1, lines=True)
    assert report.has_gpu
    assert report.gpu_ns > 0
    assert len(report.passes) == 3
    assert not {"(ambiguous thread)", "(forward not recorded)"} & owners(report).keys()


@pytest.mark.usefixtures("deterministic")
def test_mixed_precision_with_a_scaler_trains_the_same():
    scalers = {}

    def step(model):
        scaler = scalers.setdefault(model, torch.amp.GradScaler(DEVICE, init_scale=2.0**8))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = model(torch.randn(16, 64, device=DEVICE)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    found = owners(check(on_device(lambda: Planted(nn.Tanh())), step, profiled=gpu_profile))
    # The casts are the module's whose operator asked for them.
    assert found["stem"]["ToCopyBackward0"] >= 1
    assert found["blocks.1.0"]["ToCopyBackward0"] >= 1
    assert found["plant"]["TanhBackward0"] == 1


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_checkpointed_training_is_the_same_and_what_runs_again_is_told(reentrant):
    step = stepping(lambda: torch.randn(3, 4, device=DEVICE))
    make = on_device(lambda: Checkpointed(reentrant=reentrant))
    report = check(make, step, profiled=gpu_profile)
    again = {row.path for row in report.modules if row.recompute_ns}
    assert {"blocks.0.fc", "blocks.1.fc"} <= again
    assert again <= {"", *(f"blocks.{i}{part}" for i in range(2) for part in ("", ".fc", ".act"))}
    found = owners(report)
    assert {found[f"blocks.{i}.fc"]["AddmmBackward0"] for i in range(2)} == {1}
    assert {found[f"blocks.{i}.act"]["ReluBackward0"] for i in range(2)} == {1}
    assert found["stem"].keys() == {"AddmmBackward0", "TBackward0"}


class TwoStreams(nn.Module):
    """Two branches, the second on a stream of its own; autograd keeps to these in backward."""

    def __init__(self):
        super().__init__()
        self.near = nn.Linear(64, 64)
        self.far = Slow()
        self.stream = torch.cuda.Stream()

    def forward(self, x):
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            far = self.far(x)
        x.record_stream(self.stream)
        near = self.near(x)
        current.wait_stream(self.stream)
        far.record_stream(current)
        return near + far


@pytest.mark.usefixtures("deterministic")
def test_work_on_a_second_stream_belongs_to_the_module_that_launched_it():
    step = stepping(lambda: torch.randn(16, 64, device=DEVICE))
    report = check(on_device(TwoStreams), step, profiled=gpu_profile, warm_up=1)
    assert report.top(1, sort="gpu")[0].path == "far"
    found = owners(report)
    assert found["far"] == {"SlowFunctionBackward": 1}
    linear = {"AddmmBackward0", "TBackward0"}
    assert found["near"].keys() == found["far.fc"].keys() == linear


# Memory and waits --------------------------------------------------------------------------------


def peak_of(step):
    """The most memory that a step takes, in bytes."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("name", MODELS)
def test_a_step_takes_the_same_memory_to_the_byte(name):
    make, make_inputs = MODELS[name]
    model, inputs = make().to(DEVICE), make_inputs()

    def step():
        for parameter in model.parameters():
            parameter.grad = None
        model(inputs).square().mean().backward()

    for _ in range(3):
        step()
    plain = peak_of(step)
    assert plain > 0
    with gpu_profile():
        profiled = peak_of(step)
    with backspot.instrument(model, lines=True):
        idle = peak_of(step)
        with gpu_profile():
            labelled = peak_of(step)
        after = peak_of(step)
    removed = peak_of(step)
    assert labelled == profiled
    assert {idle, after, removed} == {plain}


@pytest.fixture
def no_wait():
    """PyTorch raises where the host would wait for the GPU."""

    class NoWait:
        def __enter__(self):
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    yield NoWait()
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", MODELS)
def test_a_labelled_step_never_waits_for_the_gpu(name, no_wait):
    make, make_inputs = MODELS[name]
    model, inputs = make().to(DEVICE), make_inputs()
    step = stepping(lambda: inputs, autocast=True)
    step(model)
    with no_wait, pytest.raises(RuntimeError, match="synchroniz"):
        step(model).item()
    with backspot.instrument(model, lines=True):
        with no_wait:
            step(model)
        with gpu_profile() as profiler, no_wait:
            step(model)
    assert len(backspot.locate(profiler).passes) == 1


def test_a_wait_that_is_planted_in_a_backward_is_found_there():
    model = Planted(Asks(), 1024).to(DEVICE)
    x = torch.randn(2048, 1024, device=DEVICE)

    def step():
        model(x).square().mean().backward()

    report = backspot.profile(step, model, steps=3, warmup=2)
    (found,) = (finding for finding in report.findings if finding.rule == "host-waits")
    assert [place.path for place in found.places] == ["plant"]
    assert found.places[0].count == ASKED
    assert "AsksFunctionBackward" in found.nodes


# Owners ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_node_on_a_gpu_belongs_to_the_module_that_made_it(name, tmp_path):
    make, inputs = MODELS[name]
    model = make().to(DEVICE)

    def step():
        model(inputs()).square().mean().backward()

    step()
    assert_true_owners(model, step, tmp_path, least=20, profiled=gpu_profile)


@pytest.mark.parametrize("name", ["custom function", "checkpoints", "reentrant checkpoints"])
def test_every_node_of_an_odd_model_on_a_gpu_belongs_to_the_module_that_made_it(name, tmp_path):
    if name == "reentrant checkpoints" and not tells_creation:
        pytest.skip("the truth about nodes made within nodes needs torch 2.14")
    model = (
        Custom() if name == "custom function" else Checkpointed(reentrant=name != "checkpoints")
    ).to(DEVICE)

    def step():
        model(torch.randn(3, 4, device=DEVICE)).sum().backward()

    step()
    assert_true_owners(model, step, tmp_path, least=7, profiled=gpu_profile)


@pytest.mark.parametrize("path", ["stem", "blocks.1.0", "blocks.2.1", "plant", "head"])
def test_work_that_is_planted_into_a_module_makes_it_the_first_row(path):
    model = Planted(nn.Tanh())
    kept = model.get_submodule(path)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.Sequential(kept, Slow()))
    model.to(DEVICE)
    x = torch.randn(16, 64, device=DEVICE)
    report = backspot.profile(lambda: model(x).sum().backward(), model, steps=2, warmup=2)
    for sort in ("gpu", "wall"):
        first = report.top(1, sort=sort)[0]
        assert first.path == f"{path}.1"
        assert first.nodes[0].name == "SlowFunctionBackward"
        assert report.share(first, sort) > 0.5
    assert report.top(1, match=path, sort="gpu")[0].path == path


# The whole way -----------------------------------------------------------------------------------


def test_one_call_owns_all_of_the_gpus_time(tmp_path):
    model, loss = Planted(Slow()).to(DEVICE), nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch):
        batch = batch.to(DEVICE)
        optimizer.zero_grad()
        loss(model(batch), batch).backward()
        optimizer.step()

    data = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=16)
    trace = tmp_path / "trace.json.gz"
    models = {"": model, "loss": loss}
    # The lines of waits come with stacks, which are not in the trace, and trials neither.
    options = {"steps": 3, "warmup": 2, "unprofiled": 0, "stacks": False, "trials": "none"}
    report = backspot.profile(step, models, data=data, trace=trace, **options)
    assert (report.step_unit, report.steps, len(report.passes)) == ("profiler step", 3, 3)
    assert report.has_gpu
    assert report.coverage.gpu == 1
    assert report.top(1)[0].path == "plant"
    assert report["loss"].row.gpu_ns > 0
    assert {"data", "forward", "backward", "optimizer"} <= {phase.name for phase in report.phases}
    assert_phases_add_up(report)
    assert not any("launch record" in warning for warning in report.warnings)
    # Only the recording knows of its warm-up, and so warns of none.
    located = backspot.locate(trace)
    assert replace(located, trace="", warnings=()) == replace(report, trace="", warnings=())
    assert hooks_on(model) == hooks_on(loss) == left_in_torch() == []


def test_a_live_profile_of_a_gpu_reads_like_its_export(tmp_path):
    make, inputs = MODELS["ViT"]
    model = make().to(DEVICE)
    step = stepping(inputs)
    with backspot.instrument(model):
        step(model)
        with gpu_profile() as profiler:
            step(model)
            step(model)
    live = backspot.locate(profiler)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    exported = backspot.locate(tmp_path / "trace.json")
    assert live.gpu_ns > 0
    # An export tells more of copies and streams, so that findings may say more.
    for part in ("modules", "operators", "passes", "devices", "step_ns", "phases", "coverage"):
        assert getattr(live, part) == getattr(exported, part), part


@pytest.mark.parametrize("where", ["in the forward", "before the backward"])
def test_a_profiler_that_stops_in_the_middle_of_a_step_leaves_the_next_one_right(where):
    model = Planted(nn.Tanh()).to(DEVICE)
    x = torch.randn(16, 64, device=DEVICE)
    profilers = [gpu_profile()]

    def stop(*_):
        if profilers:
            profilers.pop().stop()

    with backspot.instrument(model):
        model(x).sum().backward()
        expected = model(x).detach()
        profilers[0].start()
        handle = model.plant.register_forward_hook(stop) if where == "in the forward" else None
        out = model(x)
        stop()
        out.sum().backward()
        if handle is not None:
            handle.remove()
        assert torch.equal(out, expected)
        with gpu_profile() as profiler:
            model(x).sum().backward()
    report = backspot.locate(profiler)
    found = owners(report)
    assert found["plant"] == {"TanhBackward0": 1}
    assert found["stem"] == found["head"] == {"AddmmBackward0": 1, "TBackward0": 1}
    assert {row.recorded_calls for row in report.modules if row.is_module} == {1}
    assert hooks_on(model) == left_in_torch() == []


def test_recordings_that_follow_at_once_have_all_kernels_and_leave_the_environment():
    model, x = nn.Linear(64, 64).to(DEVICE), torch.randn(8, 64, device=DEVICE)

    def step():
        model(x).square().mean().backward()

    before = os.environ.get("TEARDOWN_CUPTI")
    for _ in range(4):
        report = backspot.profile(step, model, steps=2, warmup=1, unprofiled=0, trials="none")
        assert report.gpu_ns > 0
        with gpu_profile() as profiler:
            step()
        assert backspot.locate(profiler).gpu_ns > 0
    assert os.environ.get("TEARDOWN_CUPTI") == before
