"""torch.compile, torch.func, and what else looks at a model while it runs."""

import warnings

import pytest
import torch
from torch import nn

import backspot
from support.unbuilt import unbuilt  # noqa: F401

pytestmark = pytest.mark.xdist_group("dynamo")  # one worker imports it


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x):
        return x + self.act(self.fc(x))


class Net(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = block(x)
        return x


def net():
    return Net(Block(), Block())


@pytest.fixture
def compiled():
    """torch.compile that forgets everything and counts what it compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counted = CompileCounterWithBackend("aot_eager")
    yield lambda model, **kwargs: (torch.compile(model, backend=counted, **kwargs), counted)
    torch._dynamo.reset()


# What torch 2.8 to 2.11 say at a profile, whoever takes it.
PROFILERS_OWN = "Warning: Profiler clears events"


def step(model):
    return lambda: model(torch.randn(3, 4)).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hooks_on_wrapper", [False, True])
def test_compiling_is_undisturbed(when, hooks_on_wrapper, compiled, record):
    model = net()
    if when == "before":
        instrumentation = backspot.instrument(model)
        fast, counted = compiled(model, fullgraph=True)
    else:
        fast, counted = compiled(model, fullgraph=True)
        step(fast)()
        instrumentation = backspot.instrument(fast if hooks_on_wrapper else model)
    with instrumentation, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=PROFILERS_OWN)
        step(fast)()
        frames = counted.frame_count
        recordings = [record(step(fast)) for _ in range(3)]
        step(fast)()
    assert counted.frame_count == frames <= 2
    assert instrumentation.paths == ("", "0", "0.fc", "0.act", "1", "1.fc", "1.act")
    for recording in recordings:
        assert recording.forward() == ["forward: (Net)"]
        root = recording.labels[0]
        region = [x for x in recording.events if x.name.startswith("Torch-Compiled Region")]
        assert region
        assert all(root.contains(x) for x in region)


@pytest.mark.slow
def test_a_compiled_root_that_dynamo_inlines_is_undisturbed(compiled, record, default_hooks):
    # A root of a class of torch.nn is traced together with its hooks. The wrapper is around it.
    labels = {"call": ["forward: (Sequential)", "backward: (Sequential)"], "node": []}
    model = nn.Sequential(Block())
    fast, counted = compiled(model, fullgraph=True)
    with backspot.instrument(model, markers=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=PROFILERS_OWN)
        step(fast)()
        assert record(step(fast)).names == labels[default_hooks]
    assert counted.frame_count == 1


@pytest.mark.slow
def test_blocks_compiled_one_by_one_keep_their_labels(compiled, record):
    model = net()
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    with backspot.instrument(model):
        for _ in range(2):
            recording = record(step(model))
    assert recording.forward()[0] == "forward: (Net)"


@pytest.mark.slow
def test_blocks_wrapped_by_compile_have_their_own_paths(compiled, record):
    model = net()
    model[1], _ = compiled(model[1])
    with backspot.instrument(model, markers=True) as instrumentation:
        step(model)()
        recording = record(step(model))
    assert instrumentation.paths[-3:] == ("1", "1.fc", "1.act")
    assert "forward: 1 (Block)" in recording.forward()
    assert "backward: 1 (Block)" in recording.backward()


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_functional_transforms_are_left_alone(transform, record):
    model = net()
    x = torch.randn(3, 4)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).sum()

    def run():
        if transform == "grad":
            return torch.func.grad(loss)(parameters, x)["0.fc.weight"]
        if transform == "vmap":
            return torch.func.vmap(model)(x)
        return torch.func.jvp(model, (x,), (x,))[1]

    expected = run()
    results = []
    with backspot.instrument(model, markers=True):
        assert record(lambda: results.append(run())).names == []
        labels = record(step(model)).names
    assert torch.equal(results[0], expected)
    assert len(labels) > 7


def test_a_torch_function_mode_hears_nothing_of_us(record):
    class Heard(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.calls = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.calls.append(function)
            return function(*args, **(kwargs or {}))

    model = net()

    def run():
        with Heard() as run.mode:
            model(torch.randn(3, 4))

    record(run)
    expected = list(run.mode.calls)
    with backspot.instrument(model):
        assert record(run).forward()
    assert run.mode.calls == expected


def test_tensor_subclasses_are_passed_through(record):
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if "grad_fn" in str(function) or "requires_grad" in str(function):
                raise ValueError("do not ask")
            return super().__torch_function__(function, types, args, kwargs or {})

    model = net()
    x = torch.randn(3, 4).as_subclass(Loud)
    with backspot.instrument(model, markers=True):
        recording = record(lambda: model(x).as_subclass(torch.Tensor).sum().backward())
    assert "backward: 1 (Block)" in recording.backward()


def test_odd_tensors_are_passed_through(record):
    model = nn.Identity()
    odd = [
        torch.eye(3).to_sparse().requires_grad_(),
        torch.eye(3).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True) * 2,
        torch.eye(3, device="meta", requires_grad=True) * 2,
        torch.ones(2, dtype=torch.complex64, requires_grad=True) * 2,
        [[[[[[[[torch.ones(1)]]]]]]]],
        list(range(10_000)),
        {"a": None, "b": "text", "c": {1, 2}},
        model,
    ]
    with backspot.instrument(model):
        recording = record(lambda: [model(value) for value in odd])
    assert len(recording.forward()) == len(odd)


def test_fake_tensors_are_passed_through(record):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = net()
        with backspot.instrument(model):
            assert len(record(lambda: model(torch.randn(3, 4))).forward()) == 7


@pytest.mark.slow
def test_an_exported_program_holds_nothing_of_us():
    model = net()
    plain = str(torch.export.export(model, (torch.randn(3, 4),)).graph)
    with backspot.instrument(model):
        assert str(torch.export.export(model, (torch.randn(3, 4),)).graph) == plain


@pytest.mark.slow
def test_an_export_that_is_profiled_is_not_labelled(record):
    model = net()
    with backspot.instrument(model):
        recording = record(lambda: torch.export.export(model, (torch.randn(3, 4),), strict=False))
        assert recording.names == []
        assert len(record(step(model)).forward()) == 7


def test_double_backward_is_labelled_too(record):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def run():
        x = torch.randn(3, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    with backspot.instrument(model, markers=True):
        names = record(run).backward()
    assert names[:2] == ["backward: 1 (Tanh)", "backward: 0 (Linear)"]
    assert names[2:] == ["backward: 1 (Tanh)", "backward: 0 (Linear)"]


def test_all_threads_may_be_profiled(record):
    model = net()
    with backspot.instrument(model):
        assert len(record(step(model), all_threads=True).forward()) == 7


@pytest.mark.slow
@pytest.mark.usefixtures("unbuilt")
def test_inductor_compiles_an_instrumented_model(record):
    torch._dynamo.reset()
    model = net()
    with backspot.instrument(model):
        fast = torch.compile(model, fullgraph=True)
        step(fast)()
        recording = record(step(fast))
    assert recording.forward() == ["forward: (Net)"]
    assert any(x.name == "CompiledFunctionBackward" for x in recording.events)
