"""Compiled models: instrumenting breaks no graph, recompiles nothing, and keeps the owners."""

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import backspot  # noqa: E402
from support.training import check, cpu_profile, owners, same, train  # noqa: E402

pytestmark = pytest.mark.xdist_group("dynamo")  # one worker imports it

EAGER = {"backend": "aot_eager"}
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6)
records_regions = pytest.mark.skipif(OLD, reason="this PyTorch records no compiled regions")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.act = nn.GELU()

    def forward(self, x):
        return x + self.act(self.fc(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Broken(Net):
    def forward(self, x):
        x = self.stem(x)
        torch._dynamo.graph_break()
        return self.head(self.blocks[0](x))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def step(model):
    loss = model(torch.randn(3, 6)).square().sum()
    loss.backward()
    return loss


def counted(kind):
    return dict(torch._dynamo.utils.counters[kind])


def counted_graphs():
    """How many graphs there are and how many breaks, after which Dynamo knows no code."""
    found = counted("stats").get("unique_graphs"), counted("graph_break")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return found


def whole(**options):
    return lambda: torch.compile(Net(), **EAGER, **options)


def in_place():
    model = Net()
    model.compile(**EAGER)
    return model


def parts():
    model = Net()
    for block in model.blocks:
        block.compile(**EAGER, fullgraph=True)
    return model


def wrapped_parts():
    model = Net()
    for index in range(2):
        model.blocks[index] = torch.compile(model.blocks[index], **EAGER)
    return model


KINDS = {
    "whole": whole(),
    "whole, one graph": whole(fullgraph=True),
    "in place": in_place,
    "parts in place": parts,
    "parts": wrapped_parts,
    "graph break": lambda: torch.compile(Broken(), **EAGER),
}
compiled = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.slow
@compiled
def test_training_is_the_same_and_no_graph_breaks_that_did_not_break_before(kind):
    plain, graphs = train(KINDS[kind], step, instrumented=False, warm_up=1), counted_graphs()
    run = train(KINDS[kind], step, warm_up=1)
    assert counted_graphs() == graphs
    same(plain, run)
    assert run.said <= plain.said
    found = owners(run.report)
    owner = {"blocks.0", "blocks.1"} if "parts" in kind else {""}
    assert {path for path in found if "CompiledFunctionBackward" in found[path]} == owner
    if "parts" in kind:
        assert "AddmmBackward0" in found["head"]
        assert not any("_orig_mod" in path for path in found)
    else:
        assert found.keys() <= {"", "(outside model)"}
        assert found[""].keys() == {"CompiledFunctionBackward"}


@pytest.mark.slow
@compiled
def test_no_step_compiles_again_with_the_profiler_on_or_off(kind):
    model = KINDS[kind]()
    with backspot.instrument(model):
        step(model)
        with torch._dynamo.config.patch(error_on_recompile=True):
            step(model)
            for _ in range(2):
                with cpu_profile():
                    step(model)
                step(model)


@pytest.mark.slow
@compiled
def test_a_compiled_model_can_be_instrumented_late_and_go_on_afterwards(kind):
    model = KINDS[kind]()
    step(model)
    with backspot.instrument(model), cpu_profile() as profiler:
        step(model)
        step(model)
    assert "CompiledFunctionBackward" not in owners(backspot.locate(profiler))["(outside model)"]
    step(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        step(model)


@pytest.mark.parametrize(("kind", "owner"), [("whole", ""), ("parts", "blocks.0")])
def test_compiled_code_owns_its_backward_and_leaves_nothing_behind(kind, owner):
    found = owners(check(KINDS[kind], step, warm_up=1))
    assert "CompiledFunctionBackward" in found[owner]
    assert "CompiledFunctionBackward" not in found["(outside model)"]


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(12)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.skipif(OLD, reason="this PyTorch compiles each block anew without hooks too")
@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_blocks_go_on_sharing_what_was_compiled_for_one_of_them(late):
    model = Deep()
    for block in model.blocks:
        block.compile(**EAGER, fullgraph=True)
    if late:
        step(model)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    with backspot.instrument(model):
        step(model)
        with cpu_profile() as profiler, torch._dynamo.config.patch(error_on_recompile=True):
            step(model)
    # One for an input that needs a gradient, one for an input that needs none.
    assert counted("stats")["unique_graphs"] == 2
    found = owners(backspot.locate(profiler))
    assert all("CompiledFunctionBackward" in found[f"blocks.{i}"] for i in range(12))


@pytest.mark.slow
def test_instrumented_first_and_compiled_then():
    model = Net()
    with backspot.instrument(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        quick = torch.compile(model, **EAGER, fullgraph=True)
        step(quick)
        with cpu_profile() as profiler, torch._dynamo.config.patch(error_on_recompile=True):
            step(quick)
    assert counted("graph_break") == {}
    assert owners(backspot.locate(profiler)).keys() <= {"", "(outside model)"}
    assert "CompiledFunctionBackward" in owners(backspot.locate(profiler))[""]


@pytest.mark.slow
@records_regions
def test_a_compiled_function_around_an_instrumented_model():
    model = Net()
    with backspot.instrument(model):

        @torch.compile(**EAGER, fullgraph=True)
        def loss_of(x):
            return model(x).square().sum()

        loss_of(torch.randn(3, 6)).backward()
        with cpu_profile() as profiler, torch._dynamo.config.patch(error_on_recompile=True):
            loss_of(torch.randn(3, 6)).backward()
    stands_in_a_row_of_its_own(backspot.locate(profiler))


def stands_in_a_row_of_its_own(report):
    """No hook runs there, so no module may be named: the region bears the profiler's name."""
    (path,) = (
        path for path, nodes in owners(report).items() if "CompiledFunctionBackward" in nodes
    )
    assert path.startswith("Torch-Compiled Region: ")
    assert not any(row.is_module for row in report.modules if row.path == path)
    assert any("no module's label" in warning for warning in report.warnings)


@records_regions
def test_a_compiled_module_of_pytorchs_own_classes_is_no_other_modules(default_hooks):
    def make():
        return torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), **EAGER)

    report = check(make, step, warm_up=1)
    if default_hooks == "call":
        assert "CompiledFunctionBackward" in owners(report)[""]
    else:
        stands_in_a_row_of_its_own(report)


def test_such_a_part_belongs_to_the_module_that_calls_it_or_to_itself(default_hooks):
    def make():
        model = Net()
        model.blocks[1] = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), **EAGER)
        return model

    found = owners(check(make, step, warm_up=1))
    path = "blocks.1" if default_hooks == "call" else ""
    assert "CompiledFunctionBackward" in found[path]
    assert found["head"].keys() == found["stem"].keys() == {"AddmmBackward0", "TBackward0"}


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="this PyTorch has another compiled autograd")
def test_compiled_autograd_still_works():
    autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    reference = train(Net, step, instrumented=False, steps=3)
    torch.manual_seed(0)
    model = Net()
    with backspot.instrument(model):
        for profiled in (False, True, True):
            enable = autograd._enable(torch.compile(backend="eager"))
            with enable:
                if profiled:
                    with cpu_profile():
                        step(model)
                else:
                    step(model)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, reference.gradients[name])


@pytest.mark.slow
def test_a_model_compiled_with_inductor():
    def make():
        return torch.compile(Block(), backend="inductor")

    def small(model):
        loss = model(torch.randn(3, 6)).sum()
        loss.backward()
        return loss

    try:
        plain = train(make, small, instrumented=False)
    except Exception as error:
        pytest.skip(f"inductor does not work here: {str(error).splitlines()[0][:80]}")
    run = train(make, small)
    same(plain, run)
    assert "CompiledFunctionBackward" in owners(run.report)[""]
