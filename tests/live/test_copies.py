"""A copy of an instrumented model is a plain model."""

import copy
import copyreg
import gc
import io
import pickle
import subprocess

import pytest
import torch
from torch import nn

import backspot
from support import preloaded
from support.hooks import MODES, instrument


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def others(*_):
    return None


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("hooks", MODES)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch])
def test_a_copy_is_a_plain_model(duplicate, hooks, record):
    model = net()
    model[1].register_forward_hook(others)
    with instrument(model, hooks=hooks):
        twin = duplicate(model)
        for module in twin.modules():
            assert not module._forward_pre_hooks
            assert not module._forward_pre_hooks_with_kwargs
            assert not module._forward_hooks_with_kwargs
            assert not module._forward_hooks_always_called
            assert not module._backward_hooks
            assert not module._backward_pre_hooks
            assert module._is_full_backward_hook is None
        assert list(twin[1]._forward_hooks.values()) == [others]
        recording = record(lambda: twin(torch.randn(2, 4)).sum().backward())
        assert recording.names == []
        with backspot.instrument(twin, name="twin"):
            recording = record(lambda: twin(torch.randn(2, 4)).sum().backward())
        assert "forward: twin.1 (Tanh)" in recording.names
        # The original is as instrumented as before.
        assert len(record(lambda: model(torch.randn(2, 4))).forward()) == 3
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), model(x))


def test_copying_is_pythons_own_again_after_removal():
    model, other = net(), net()
    before = dict(copyreg.dispatch_table)
    with (
        instrument(model, hooks="node"),
        instrument(other, name="other", hooks="node"),
    ):
        assert copyreg.dispatch_table != before
    assert copyreg.dispatch_table == before
    instrument(model, hooks="node")
    del model
    gc.collect()
    assert copyreg.dispatch_table == before


def lazy(model):
    model[0] = nn.LazyLinear(4)
    return lambda: model(torch.randn(2, 3))


def parametrized(model):
    parametrize = nn.utils.parametrize
    return lambda: parametrize.register_parametrization(model[0], "weight", nn.Identity())


@pytest.mark.parametrize("change", [lazy, parametrized])
def test_a_copy_is_plain_where_a_module_has_changed_its_class(change):
    model = net()
    happens = change(model)
    with instrument(model, hooks="node"):
        was = type(model[0])
        happens()
        assert type(model[0]) is not was
        twin = copy.deepcopy(model)
        assert model[0]._forward_pre_hooks
        for module in twin.modules():
            for name, held in vars(module).items():
                assert not (name.endswith(("hooks", "kwargs", "called")) and held), (name, held)


def test_other_ordered_dictionaries_are_copied_as_ever():
    model = net()
    with backspot.instrument(model):
        state = model.state_dict()
        for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state, protocol=1))):
            assert list(twin) == list(state)
            assert twin._metadata == state._metadata


class Particular(nn.Linear):
    """Copies itself, attribute by attribute."""

    def __deepcopy__(self, memo):
        twin = Particular(4, 4)
        for key, value in vars(self).items():
            vars(twin)[key] = copy.deepcopy(value, memo)
        return twin


def test_a_class_with_its_own_way_to_copy_has_plain_copies_too(record):
    model = Particular(4, 4)
    with backspot.instrument(model):
        twin = copy.deepcopy(model)
        assert not twin._forward_pre_hooks
        assert record(lambda: twin(torch.randn(2, 4)).sum().backward()).names == []
        with backspot.instrument(twin, name="twin"):
            pass


@pytest.mark.slow
def test_the_call_of_a_module_is_pickled_as_ever_while_a_profiler_records(record):
    model, other, x = net(), net(), torch.randn(2, 4)
    model.append(OwnCall(4, 4))  # has the wrapper put on the classes of the other modules
    for labelled in (net(), model):
        for module in (labelled[0], other):
            pickles = []

            def keep(module=module, pickles=pickles):
                pickles.append(pickle.dumps(module.__call__))

            with backspot.instrument(labelled, hooks="call"):
                record(keep)
            assert b"backspot" not in pickles[0]
            assert torch.equal(pickle.loads(pickles[0])(x), module(x))


class OwnCall(nn.Linear):
    def __call__(self, x):
        return super().__call__(x)


@pytest.mark.slow
def test_a_pickle_loads_where_backspot_is_not(tmp_path):
    model = net()
    with backspot.instrument(model):
        path = tmp_path / "model.pickle"
        path.write_bytes(pickle.dumps(model))
    script = f"""
import pickle, sys
sys.modules["backspot"] = None
import torch
with open({str(path)!r}, "rb") as file:
    model = pickle.load(file)
model(torch.randn(2, 4)).sum().backward()
"""
    done = subprocess.run([*preloaded.python(), "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
