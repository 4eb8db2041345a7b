"""What ``instrument`` takes and refuses, and that nothing of it remains."""

import gc
import weakref

import pytest
import torch
from torch import nn

import backspot
from backspot.errors import AlreadyInstrumentedError, UsageError
from support.hooks import MODES, instrument
from support.leftovers import hooks_on, labels_of, left_in_torch


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))


def step(model):
    return lambda: model(torch.randn(3, 4)).sum().backward()


def state_of(model):
    return [
        {key: dict(value) if isinstance(value, dict) else value for key, value in vars(m).items()}
        for m in model.modules()
    ]


@pytest.mark.parametrize("hooks", MODES)
def test_removal_leaves_the_model_as_it_was(hooks, record):
    model = net()
    model[0].register_forward_hook(print_nothing)
    before = state_of(model)
    with instrument(model, hooks=hooks) as instrumentation:
        record(step(model))
        model.zero_grad()
        assert (state_of(model) == before) == (hooks == "call")
        assert instrumentation.active
    assert state_of(model) == before
    assert not instrumentation.active
    assert record(step(model)).names == []
    instrumentation.remove()


@pytest.mark.parametrize("hooks", MODES)
def test_nothing_is_left_on_the_model_or_in_pytorch_after_removal(hooks, record):
    model = net()
    during = []
    with instrument(model, hooks=hooks):
        record(lambda: (step(model)(), during.extend(hooks_on(model) + left_in_torch())))
    assert during
    assert hooks_on(model) == left_in_torch() == []
    assert labels_of(step(model)) == set()


def test_with_node_hooks_a_module_has_one_while_no_profiler_records(record):
    model = net()
    during = []

    def count():
        return [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]

    with instrument(model, hooks="node"):
        step(model)()
        assert count() == [(1, 0)] * 5
        for _ in range(2):
            record(lambda: (step(model)(), during.append(count())))
            assert count() == [(1, 0)] * 5
        # A second one while a profiler records.
        assert during == [[(1, 1)] * 5] * 2
    assert count() == [(0, 0)] * 5


def print_nothing(*_):
    return None


@pytest.mark.parametrize("hooks", MODES)
def test_hooks_that_a_graph_still_holds_do_nothing_after_removal(hooks, record):
    model = net()
    instrumentation = instrument(model, hooks=hooks)
    losses = []
    assert record(lambda: losses.append(model(torch.randn(3, 4)).sum())).names
    instrumentation.remove()
    assert record(losses[0].backward).names == []


def test_removal_within_a_forward_closes_its_labels(record):
    model = net()
    instrumentation = backspot.instrument(model, markers=True)

    def remove(*_):
        instrumentation.remove()

    model[1][0].register_forward_hook(remove)
    recording = record(step(model))
    assert len(recording.forward()) == 4
    assert "forward: 1.1 (Linear)" not in recording.names
    assert not recording.backward()
    after = next(event for event in recording.events if event.name == "aten::sum")
    assert not any(label.contains(after) for label in recording.labels)


def test_a_handle_can_be_made_anew_but_not_entered_again():
    model = net()
    instrumentation = backspot.instrument(model)
    instrumentation.remove()
    with pytest.raises(UsageError, match="call instrument"), instrumentation:
        pass
    with backspot.instrument(model):
        pass


def test_the_handle_says_what_it_did():
    with backspot.instrument(net(), depth=1, name="student", hooks="module") as instrumentation:
        assert instrumentation.paths == ("student", "student.0", "student.1")
        assert repr(instrumentation) == (
            "Instrumentation(3 modules, hooks='module', name='student', depth=1)"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "resnet"}, "takes a torch.nn.Module, not str"),
        ({"model": nn.Linear}, "takes a torch.nn.Module, not type"),
        ({"depth": -1}, "depth=-1: give a whole number of at least 0, or None for all"),
        ({"depth": True}, "depth=True"),
        ({"depth": 1.0}, "depth=1.0"),
        ({"hooks": "full"}, "hooks='full': choose one of call, module"),
        ({"hooks": "node"}, "hooks='node': choose one of call, module"),
        ({"hooks": None}, "hooks=None"),
        ({"name": 3}, "name must be a str"),
        ({"name": ".loss"}, "name must be a module path"),
        ({"name": "loss."}, "name must be a module path"),
        ({"name": "a..b"}, "name must be a module path"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments, message):
    model = net()
    before = state_of(model)
    with pytest.raises(UsageError, match=message):
        backspot.instrument(**{"model": model, **arguments})
    assert state_of(model) == before


@pytest.mark.parametrize("hooks", MODES)
def test_what_is_instrumented_is_not_instrumented_again(hooks):
    model = net()
    with instrument(model[1][1], hooks=hooks, name="inner"):
        before = state_of(model)
        with pytest.raises(AlreadyInstrumentedError, match=r"its module '1.1' \(Linear\)"):
            backspot.instrument(model, depth=0)
        assert state_of(model) == before
        with pytest.raises(AlreadyInstrumentedError, match="it "):
            backspot.instrument(model[1][1], name="other")
    with backspot.instrument(model):
        pass


def test_two_models_need_names_of_their_own():
    first, second = net(), nn.Tanh()
    with backspot.instrument(first):
        with pytest.raises(UsageError, match="pass name="):
            backspot.instrument(second)
        with pytest.raises(UsageError, match="path '1' is in use"):
            backspot.instrument(second, name="1")
        assert not second._forward_hooks
        with backspot.instrument(second, name="second"):
            pass
    with backspot.instrument(second):
        pass


def test_a_model_that_is_gone_leaves_its_paths():
    backspot.instrument(nn.Tanh())
    gc.collect()
    with backspot.instrument(nn.Tanh()):
        pass


def test_a_scripted_model_is_refused_with_the_way_out():
    with pytest.raises(UsageError, match="before scripting"):
        backspot.instrument(torch.jit.script(nn.Tanh()))


class Probe:
    pass


@pytest.mark.parametrize("hooks", MODES)
def test_nothing_is_kept_alive(hooks, record):
    model = net()
    instrument(model, hooks=hooks)
    gone = [weakref.ref(model), weakref.ref(model[1][0])]

    def run(model=model):
        x = torch.randn(3, 4)
        out = model(x)
        # A node takes no weak reference; what its metadata holds dies with it.
        probe = out.grad_fn.metadata["probe"] = Probe()
        gone.extend([weakref.ref(x), weakref.ref(out), weakref.ref(probe)])
        out.sum().backward()
        gone.append(weakref.ref(model(x)))  # a forward without its backward

    record(run)
    run.__defaults__ = ()
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)


def test_steps_do_not_pile_up_objects(record):
    model = net()

    def steps():
        for _ in range(40):
            step(model)()

    def cycle():
        with torch.autograd.profiler.profile():
            steps()
        steps()

    with backspot.instrument(model):
        for _ in range(2):
            cycle()
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(4):
            cycle()
        gc.collect()
        assert len(gc.get_objects()) - before < 50


def test_the_watch_on_the_profiler_ends_with_the_last_instrumentation():
    from torch.autograd import profiler

    model, other = net(), nn.Tanh()
    # A model that was dropped while instrumented leaves the watch to the next one that is removed.
    backspot.instrument(net()).remove()
    before = profiler._enable_profiler
    with backspot.instrument(model):
        with backspot.instrument(other, name="tanh"):
            pass
        assert profiler._enable_profiler is not before
    assert profiler._enable_profiler is before
