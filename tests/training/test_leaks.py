"""Nothing grows: not Python objects, not autograd nodes, not what Backspot keeps."""

import gc
import weakref
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import backspot  # noqa: E402
from support.hooks import instrument  # noqa: E402
from support.training import cpu_profile  # noqa: E402


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.fc(x)
        y += x
        return self.act(y)


def counted():
    gc.collect()
    return Counter(type(thing).__module__ for thing in gc.get_objects())


@pytest.mark.slow
def test_five_hundred_steps_with_the_profiler_off_and_on_leave_nothing_behind():
    model = nn.Sequential(Block(), Block(), nn.Linear(4, 1))

    def train(rounds):
        for _ in range(rounds):
            with cpu_profile():
                for _ in range(5):
                    model(torch.randn(2, 4)).sum().backward()
            for _ in range(5):
                model(torch.randn(2, 4)).sum().backward()

    with backspot.instrument(model):
        train(5)
        before = counted()
        train(50)
        after = counted()
    grown = {
        module: after[module] - before[module]
        for module in after
        if after[module] > before[module] + 5 and module.startswith(("torch", "backspot"))
    }
    assert grown == {}
    assert sum(after.values()) < sum(before.values()) + 500


@pytest.mark.parametrize("fails", [False, True])
def test_graph_and_tensors_die_with_the_step(fails):
    model = nn.Sequential(Block(), nn.Linear(4, 1))
    with backspot.instrument(model), cpu_profile():
        hidden = model[0](torch.randn(2, 4))
        loss = model[1](hidden).sum()
        tensors = [weakref.ref(hidden), weakref.ref(loss)]
        if not fails:
            loss.backward()
        del hidden, loss
        assert all(reference() is None for reference in tensors)


def test_a_model_dies_while_it_is_instrumented():
    model = nn.Sequential(Block(), nn.Linear(4, 1))
    instrumentation = backspot.instrument(model)
    with cpu_profile():
        model(torch.randn(2, 4)).sum().backward()
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None
    instrumentation.remove()


def test_instrumenting_again_and_again_leaves_the_model_as_it_was():
    model = nn.Sequential(Block(), nn.Linear(4, 1))
    state = {name: dict(vars(module)) for name, module in model.named_modules()}
    sizes = {
        (name, key): len(value)
        for name, kept in state.items()
        for key, value in kept.items()
        if isinstance(value, dict)
    }
    for hooks in ("call", "node", "module") * 20:
        with instrument(model, hooks=hooks):
            if hooks != "module":
                model(torch.randn(2, 4))
    for name, module in model.named_modules():
        assert vars(module).keys() == state[name].keys()
        for key, value in vars(module).items():
            if isinstance(value, dict):
                assert len(value) == sizes[name, key], (name, key)
