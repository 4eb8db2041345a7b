"""On a real GPU: the modules inside code that Inductor compiles."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import backspot  # noqa: E402
from backspot.analysis.attribution.ownership import attribute  # noqa: E402
from backspot.trace import read_events  # noqa: E402
from support.gpu_models import (  # noqa: E402
    DEVICE,
    KEEPS_SITES,
    MODELS,
    Planted,
    gpu_profile,
    needs_gpu,
)
from support.sums import assert_adds_up, assert_phases_add_up  # noqa: E402

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(not KEEPS_SITES, reason="this PyTorch keeps no launch sites"),
]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def recorded(model, called, x, steps=2):
    """A profile of some steps, after two that compile."""

    def step():
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = called(x).float().square().mean()
        loss.backward()

    with backspot.instrument(model):
        step()
        step()
        with gpu_profile() as profiler:
            for _ in range(steps):
                step()
    return profiler


def graphed(model, x):
    """A training step of a model that is compiled into CUDA graphs."""
    called = torch.compile(model, mode="reduce-overhead")

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        for parameter in model.parameters():
            parameter.grad = None  # they lie in the memory of the graph that is replayed next
        called(x).square().mean().backward()

    return step


@pytest.mark.parametrize(("name", "regional"), [("ViT", False), ("ResNet", False), ("GPT", True)])
def test_every_launch_has_its_site_and_every_layer_its_time(name, regional):
    make, inputs = MODELS[name]
    model = make().to(DEVICE)
    called = model
    if regional:
        for block in model.blocks:
            block.compile()
    else:
        called = torch.compile(model)
    profiler = recorded(model, called, inputs())
    events = read_events(profiler)
    ownership = attribute(events)
    assert not ownership.compiled.unmatched
    assert len(ownership.compiled.event)
    in_pass = ownership.passes.of_span[ownership.compiled.span] >= 0
    assert in_pass.any()
    assert not in_pass.all()
    report = backspot.locate(profiler)
    assert_adds_up(report)
    assert_phases_add_up(report)
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            row = report[path].row
            assert row.gpu_ns > 0, path
            assert row.forward_ns > 0, path
            assert row.calls == 1, path


def test_slow_work_inside_compiled_code_comes_first():
    plant = nn.Sequential(nn.Linear(64, 8192), nn.GELU(), nn.Linear(8192, 64))
    model = Planted(plant).to(DEVICE)
    x = torch.randn(65536, 64, device=DEVICE)  # the GPU works longer than the host launches
    # In the first step, what the profiler does for the first time takes longest.
    report = backspot.locate(recorded(model, torch.compile(model), x, steps=6))
    # By the GPU: on a busy machine the host may take longer than it.
    heaviest = max(report.modules, key=lambda row: row.gpu_ns)
    assert heaviest.path.startswith("plant.")
    assert report["plant"].row.total_gpu_ns > 0.5 * report.gpu_ns


def test_a_kernel_that_reduces_in_two_directions_has_its_modules():
    # The backward of a layer norm: one kernel for its input and, partly, for its weight and bias.
    width = 1024
    model = nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 8)
    ).to(DEVICE)
    x = torch.randn(8192, width, device=DEVICE, requires_grad=True)
    torch._inductor.metrics.reset()
    profiler = recorded(model, torch.compile(model), x)
    if not getattr(torch._inductor.metrics, "codegen_mix_order_reduction", 0):
        pytest.skip("this PyTorch makes no such kernel")
    ownership = attribute(read_events(profiler))
    compiled = ownership.compiled
    assert not compiled.unmatched
    assert (compiled.shares.owner[compiled.shares.first[:-1]] >= 0).all()
    report = backspot.locate(profiler)
    assert_adds_up(report)
    for path in ("0", "2"):
        assert report[path].row.gpu_ns > 0.5 * report["3"].row.gpu_ns, path


def test_kernels_of_a_replayed_cuda_graph_have_their_modules():
    plant = nn.Sequential(nn.Linear(64, 8192), nn.GELU(), nn.Linear(8192, 64))
    model = Planted(plant).to(DEVICE)
    step = graphed(model, torch.randn(65536, 64, device=DEVICE))
    with backspot.instrument(model):
        for _ in range(4):
            step()
        with gpu_profile() as profiler:
            step()
            step()
    launches = {event.name() for event in profiler.profiler.kineto_results.events()}
    assert "cudaGraphLaunch" in launches
    replayed = backspot.locate(profiler)
    assert_adds_up(replayed)
    assert replayed.modules[0].path.startswith("plant")
    assert replayed["plant"].row.total_gpu_ns > 0.5 * replayed.gpu_ns
    assert replayed["head"].row.total_gpu_ns > 0
