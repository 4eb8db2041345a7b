"""The check that nothing of Backspot is left finds whatever could be left."""

from functools import partial, wraps

import pytest
import torch
from torch import nn

import backspot
from support.hooks import instrument
from support.leftovers import hooks_on, left_in_torch

WITHOUT_HOOKS = True


def wrapped(original):
    """A function of ours in the clothes of another, as ``functools.wraps`` makes it."""
    ours = partial(backspot.locate)
    wraps(original)(ours)
    return ours


THINGS = {
    "function": backspot.locate,
    "bound method": backspot.Report.load,
    "partial": partial(backspot.locate, depth=1),
    "wrapper": wrapped(nn.Linear.forward),
    "object": backspot.BackspotError("left"),
}


@pytest.mark.parametrize("thing", THINGS)
def test_whatever_of_ours_is_on_a_model_is_found(thing):
    model = nn.Sequential(nn.Linear(2, 2))
    assert hooks_on(model) == []
    handles = [
        model[0].register_forward_pre_hook(THINGS[thing]),
        model[0].register_forward_hook(THINGS[thing]),
        model[0].register_full_backward_hook(THINGS[thing]),
    ]
    assert len(hooks_on(model)) == 3
    for handle in handles:
        handle.remove()
    assert hooks_on(model) == []
    model[0].forward = THINGS[thing]
    assert hooks_on(model) == ["0.forward"]


@pytest.mark.parametrize("thing", THINGS)
def test_whatever_of_ours_is_in_pytorch_is_found(thing, monkeypatch):
    assert left_in_torch() == []
    monkeypatch.setattr(nn.Module, "__call__", THINGS[thing])
    monkeypatch.setattr(torch.autograd.profiler, "_run_on_profiler_start", THINGS[thing])
    found = left_in_torch()
    assert len(found) == 2
    assert found[0].endswith("_run_on_profiler_start")
    assert found[1].endswith("__call__")
    monkeypatch.undo()
    handle = nn.modules.module.register_module_forward_hook(THINGS[thing])
    assert len(left_in_torch()) == 1
    handle.remove()
    assert left_in_torch() == []


def test_hooks_of_others_are_not_ours():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda *_: None)
    model[0].register_forward_pre_hook(partial(print))
    assert hooks_on(model) == []


@pytest.mark.parametrize("hooks", ["node", "module"])
def test_the_hooks_of_an_instrumented_model_are_found(hooks):
    model = nn.Sequential(nn.Linear(2, 2))
    with instrument(model, hooks=hooks):
        found = hooks_on(model)
        assert {place.partition(".")[0] for place in found} == {"", "0"}
    assert hooks_on(model) == []


def test_the_wrapper_around_the_calls_of_a_recorded_model_is_found(record):
    model, found = nn.Sequential(nn.Linear(2, 2)), []
    with backspot.instrument(model, hooks="call"):
        record(lambda: found.extend(left_in_torch()))
    assert [place for place in found if place.endswith("__call__")]
    assert left_in_torch() == []
