"""On a real GPU: graphs that are captured and replayed, and models that are compiled."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import backspot  # noqa: E402
from support.gpu_models import DEVICE, KEEPS_SITES, Planted, gpu_profile, needs_gpu  # noqa: E402
from support.leftovers import hooks_on, left_in_torch  # noqa: E402
from support.training import check, owners, same, train  # noqa: E402

pytestmark = needs_gpu


def made():
    torch.manual_seed(0)
    return Planted(nn.Tanh()).to(DEVICE)


def captured(model, x, *, recorded=False):
    """A graph of a whole training step, as PyTorch's documentation captures it."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step():
        model(x).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    profiler = gpu_profile()
    if recorded:
        profiler.start()
    with torch.cuda.graph(graph):
        step()
    if recorded:
        profiler.stop()
    return graph


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("recorded", [False, True], ids=["", "while a profiler records"])
def test_a_step_of_an_instrumented_model_is_captured_and_replayed(recorded, tmp_path):
    x = torch.randn(16, 64, device=DEVICE)
    plain = made()
    graph = captured(plain, x)
    for _ in range(3):
        graph.replay()

    model = made()
    with backspot.instrument(model):
        graph = captured(model, x, recorded=recorded)
        graph.replay()
        with gpu_profile() as profiler:
            graph.replay()
            graph.replay()
    assert hooks_on(model) == left_in_torch() == []
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "cudaGraphLaunch" for event in events) == 2
    # No Python runs in a replay: there is no backward on the host to find.
    with pytest.raises(backspot.BackspotError, match="no backward"):
        backspot.locate(tmp_path / "trace.json")


@pytest.mark.usefixtures("deterministic")
def test_a_part_that_is_replayed_as_a_graph_owns_its_backward():
    def make():
        model = Planted(nn.Sequential(nn.Linear(64, 64), nn.Tanh())).to(DEVICE)
        sample = torch.randn(16, 64, device=DEVICE, requires_grad=True)
        torch.cuda.make_graphed_callables(model.plant, (sample,))
        return model

    def step(model):
        loss = model(torch.randn(16, 64, device=DEVICE)).square().mean()
        loss.backward()
        return loss

    report = check(make, step, profiled=gpu_profile, warm_up=1)
    found = owners(report)
    nodes = {name: n for name, n in found["plant"].items() if not name.startswith("(")}
    assert nodes == {"GraphedBackward": 1}
    assert report["plant"].row.gpu_ns > 0
    assert found["head"].keys() == {"AddmmBackward0", "TBackward0"}
    assert not any("GraphedBackward" in nodes for path, nodes in found.items() if path != "plant")


def test_a_model_that_inductor_compiles_trains_the_same():
    torch._dynamo.reset()

    def make():
        return torch.compile(made())

    def step(model):
        loss = model(torch.ones(16, 64, device=DEVICE)).square().mean()
        loss.backward()
        return loss

    try:
        plain = train(make, step, instrumented=False, warm_up=2)
    except (ImportError, RuntimeError) as error:  # of Dynamo's and inductor's own
        pytest.skip(f"inductor does not work here: {str(error).splitlines()[0][:80]}")
    run = train(make, step, warm_up=2, profiled=gpu_profile)
    torch._dynamo.reset()
    same(plain, run)
    assert owners(run.report)[""].keys() == {"CompiledFunctionBackward"}


def test_a_model_that_is_compiled_into_graphs_is_undisturbed():
    torch._dynamo.reset()

    def make():
        return torch.compile(made(), mode="reduce-overhead")

    def step(model):
        torch.compiler.cudagraph_mark_step_begin()
        for parameter in model.parameters():
            parameter.grad = None  # they lie in the memory of the graph that is replayed next
        loss = model(torch.ones(16, 64, device=DEVICE)).square().mean()
        loss.backward()
        return loss.detach().clone()

    try:
        plain = train(make, step, instrumented=False, warm_up=3)
    except (ImportError, RuntimeError) as error:  # of Dynamo's and inductor's own
        pytest.skip(f"inductor does not work here: {str(error).splitlines()[0][:80]}")
    run = train(make, step, warm_up=3, profiled=gpu_profile)
    torch._dynamo.reset()
    same(plain, run)
    report = run.report
    assert "CompiledFunctionBackward" in owners(report)[""]
    assert not report.fused
    if KEEPS_SITES:  # the graph was captured before the model was instrumented
        assert any("it was compiled before" in warning for warning in report.warnings)
