"""``hooks="module"``: the published technique, with its limits told."""

import pytest
import torch
from torch import nn

import backspot


def step(model):
    return lambda: model(torch.randn(3, 4, requires_grad=True)).sum().backward()


def test_both_ends_of_each_module_are_marked_and_nest(record):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with backspot.instrument(model, hooks="module"):
        assert record(step(model)).names == [
            "forward: (Sequential)",
            "forward: 0 (Linear)",
            "forward: 1 (Tanh)",
            "backward: (Sequential)",
            "backward: 1 (Tanh)",
            "backward end: 1 (Tanh)",
            "backward: 0 (Linear)",
            "backward end: 0 (Linear)",
            "backward end: (Sequential)",
        ]


def test_nothing_is_written_without_a_profiler(record):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with backspot.instrument(model, hooks="module"):
        step(model)()
        assert len(record(step(model)).names) == 9


@pytest.mark.parametrize("recorded", [True, False])
def test_an_in_place_failure_names_the_module_and_the_way_out(recorded, record):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True)))

    def run():
        with pytest.raises(RuntimeError, match="BackwardHookFunction") as failure:
            step(model)()
        told = "\n".join([str(failure.value), *getattr(failure.value, "__notes__", [])])
        assert told.count("Backspot: ") == 1
        assert "'1.0' (ReLU)" in told
        assert "hooks='call'" in told

    with backspot.instrument(model, hooks="module"):
        record(run) if recorded else run()
    with backspot.instrument(model, markers=True):
        assert "backward: 1.0 (ReLU)" in record(step(model)).names


def test_an_old_backward_hook_excludes_a_module_and_is_said_to(record):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[1].register_backward_hook(lambda *_: None)
    with backspot.instrument(model, hooks="module") as instrumentation:
        assert list(instrumentation.skipped) == ["1"]
        assert "forward: 0 (Linear)" in record(step(model)).names
    assert model[1]._is_full_backward_hook is False
    assert model[0]._is_full_backward_hook is None
