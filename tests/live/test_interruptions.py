"""Errors and interrupts in forward and backward: labels close, and the process lives."""

import subprocess
import textwrap
import threading

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import backspot
from support import preloaded
from support.hooks import MODES


class Acting(nn.Module):
    """Does once what it is told to."""

    action = None

    def forward(self, x):
        action, self.action = self.action, None
        return action(x) if action else torch.relu(x)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient today")


def raises(x):
    raise ValueError("no output today")


def interrupts(x):
    raise KeyboardInterrupt


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Acting()), nn.Tanh())


def step(model):
    return lambda: model(torch.randn(3, 4)).sum().backward()


def failing(model, action, error):
    def run():
        model[1][1].action = action
        with pytest.raises(error):
            step(model)()

    return run


WHOLE = [
    "forward: (Sequential)",
    "forward: 0 (Linear)",
    "forward: 1 (Sequential)",
    "forward: 1.0 (Linear)",
    "forward: 1.1 (Acting)",
    "forward: 2 (Tanh)",
    "backward: 2 (Tanh)",
    "backward: 1.1 (Acting)",
    "backward: 1.0 (Linear)",
    "backward: 0 (Linear)",
]


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (raises, ValueError),
        (RaisesInBackward.apply, ValueError),
        (interrupts, KeyboardInterrupt),
    ],
)
def test_the_steps_after_a_failure_are_labelled_rightly(action, error, record):
    model = net()
    with backspot.instrument(model, markers=True):
        fail = failing(model, action, error)
        within = record(lambda: (fail(), step(model)()))
        assert within.names[-len(WHOLE) :] == WHOLE
        assert within.parent(within.labels[-len(WHOLE)]) is None
        record(fail)
        assert record(step(model)).names == WHOLE


def test_another_call_after_an_interrupt_does_not_stand_in_the_interrupted_one(record):
    model, loss = net(), nn.MSELoss()

    def run():
        failing(model, interrupts, KeyboardInterrupt)()
        x = torch.randn(3, 4, requires_grad=True)
        loss(x, torch.zeros(3, 4)).backward()

    with backspot.instrument(model), backspot.instrument(loss, name="loss"):
        recording = record(run)
    label = next(x for x in recording.labels if x.name == "forward: loss (MSELoss)")
    assert recording.parent(label) is None


def test_a_failing_hook_of_another_does_not_end_the_callers_label(record, default_hooks):
    model = net()

    def refuse(*_):
        raise ValueError("refused")

    def forward(x):
        with pytest.raises(ValueError):
            model[1][0](x)
        return x * 2

    with backspot.instrument(model):
        handle = model[1][0].register_forward_pre_hook(refuse, prepend=True)

        def run():
            model[1][1].action = forward
            handle.remove()
            x = model[0](torch.randn(3, 4))
            model[1][0].register_forward_pre_hook(refuse, prepend=True)
            with pytest.raises(ValueError):
                model[1](x)

        recording = record(run)
    # A hook that comes before Backspot's is inside the wrapper.
    refused = ["forward: 1.0 (Linear)"] if default_hooks == "call" else []
    assert recording.forward() == ["forward: 0 (Linear)", "forward: 1 (Sequential)", *refused]


class Handles(nn.Module):
    def __init__(self):
        super().__init__()
        self.fails = Acting()

    def forward(self, x):
        self.fails.action = raises
        with pytest.raises(ValueError):
            self.fails(x)
        return x.exp()


def test_a_failure_that_its_caller_handles_ends_the_label_of_what_failed(record):
    model = nn.Sequential(nn.Linear(4, 4), Handles())
    with backspot.instrument(model, markers=True):
        recording = record(step(model))
    (failed,) = (x for x in recording.labels if x.name == "forward: 1.fails (Acting)")
    (exp,) = (event for event in recording.events if event.name == "aten::exp")
    assert not failed.contains(exp)
    assert recording.backward() == ["backward: 1 (Handles)", "backward: 0 (Linear)"]


class Recursive(nn.Module):
    def forward(self, x, deeper=True):
        if deeper:
            with pytest.raises(ValueError):
                self(x, deeper=False)
        return x.exp()


def test_a_recursive_call_that_never_began_does_not_end_its_callers_label(record, default_hooks):
    model = Recursive()

    def refuse(_, args, kwargs):
        if kwargs:
            raise ValueError("refused")

    with backspot.instrument(model):
        model.register_forward_pre_hook(refuse, prepend=True, with_kwargs=True)
        recording = record(lambda: model(torch.randn(3, 4)))
    refused = ["forward: (Recursive) #2"] if default_hooks == "call" else []
    assert recording.forward() == ["forward: (Recursive)", *refused]
    (exp,) = (event for event in recording.events if event.name == "aten::exp")
    assert recording.labels[0].contains(exp)


def test_an_interrupt_before_a_later_backward_keeps_no_label_open(record):
    model = net()
    with backspot.instrument(model):
        record(failing(model, interrupts, KeyboardInterrupt))
        step(model)()
    assert record(step(model)).names == []


CRASH = """
    import threading
    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile
    import backspot
    from backspot.live.sessions import sessions

    class Acting(nn.Module):
        action = None
        def forward(self, x):
            action, self.action = self.action, None
            return action(x) if action else torch.relu(x)

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, action):
            ctx.action = action
            return x.clone()
        @staticmethod
        def backward(ctx, gradient):
            ctx.action()
            return gradient, None

    def fail(error):
        raise error

    acting = Acting()
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), acting), nn.Tanh())

    def step():
        model(torch.randn(3, 4)).sum().backward()

    def new():
        return profile(activities=[ProfilerActivity.CPU])

    def labels(profiler):
        return [e.name for e in profiler.events() if "ward: " in e.name]

    def attempt():
        try:
            step()
        except (ValueError, KeyboardInterrupt):
            pass

    sessions.watches_starts = HOOKS != "node"  # else there are node hooks
    backspot.instrument(model, hooks="module" if HOOKS == "module" else "call", markers=MARKERS)
    with new() as profiler:
        step()
    expected = labels(profiler)
    assert len(expected) > (6 if MARKERS else 3)

    for _ in range(3):
        acting.action = lambda x: InBackward.apply(x, lambda: fail(ValueError()))
        with new():
            attempt()
        acting.action = lambda x: InBackward.apply(x, lambda: fail(KeyboardInterrupt()))
        with new():
            attempt()
        acting.action = lambda x: fail(KeyboardInterrupt())
        with new():
            attempt()

        first = new()
        first.start()
        acting.action = lambda x: (first.stop(), torch.relu(x))[1]
        step()

        def stopped_in_backward():
            # Stopped within a backward, a profiler is never quite off on that thread again.
            second = new()
            second.start()
            acting.action = lambda x: InBackward.apply(x, second.stop)
            step()
            step()

        thread = threading.Thread(target=stopped_in_backward)
        thread.start()
        thread.join()

        third, fourth = new(), new()
        third.start()
        acting.action = lambda x: (third.stop(), fourth.start(), torch.relu(x))[2]
        step()
        step()
        fourth.stop()
        assert labels(fourth)[-len(expected):] == expected

    for _ in range(50):
        with new() as profiler:
            step()
    assert labels(profiler) == expected, labels(profiler)
    print("alive")
"""


@pytest.mark.slow
@pytest.mark.parametrize("markers", [True, False])
@pytest.mark.parametrize("hooks", MODES)
def test_the_process_survives_ranges_that_outlive_their_session(hooks, markers):
    script = f"HOOKS, MARKERS = {hooks!r}, {markers}\n{textwrap.dedent(CRASH)}"
    done = subprocess.run(
        [*preloaded.python(), preloaded.WHOLE, "-c", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("alive")


@pytest.mark.parametrize("where", ["in a forward", "in a hook", "on another thread"])
def test_a_profiler_may_stop_within_a_forward(where, record):
    model = net()
    x = torch.randn(3, 4)
    expected = model(x)
    profiler = profile(activities=[ProfilerActivity.CPU])

    def stop(*_):
        if where == "on another thread":
            inside.set()
            assert stopped.wait(60)
        else:
            profiler.stop()

    def forward():
        outputs.append(model(x))
        outputs[0].sum().backward()

    inside, stopped, outputs = threading.Event(), threading.Event(), []
    with backspot.instrument(model, markers=True):
        if where == "in a forward":
            model[1][1].action = lambda x: (stop(), torch.relu(x))[1]
        else:
            handle = model[1][1].register_forward_hook(stop)
        profiler.start()
        if where == "on another thread":
            thread = threading.Thread(target=forward)
            thread.start()
            assert inside.wait(60)
            profiler.stop()
            stopped.set()
            thread.join()
        else:
            forward()
        if where != "in a forward":
            handle.remove()
        assert torch.equal(outputs[0], expected)
        assert record(step(model)).names == WHOLE


class MineError(Exception):
    """The user's own error."""


@pytest.mark.parametrize("ends", ["the profiler", "the instrumentation"])
def test_an_error_stays_the_users_where_a_hook_ends(ends):
    model = nn.Sequential(Acting())
    profiler = profile(activities=[ProfilerActivity.CPU])
    instrumentation = backspot.instrument(model)

    def end(*_):
        profiler.stop() if ends == "the profiler" else instrumentation.remove()

    def fails(x):
        raise MineError

    handle = model[0].register_forward_hook(end, always_call=True)
    model[0].action = fails
    profiler.start()
    with pytest.raises(MineError):
        model(torch.ones(1))
    if ends == "the instrumentation":
        profiler.stop()
    instrumentation.remove()
    handle.remove()
    # A hook that could not be taken away then has gone with the next call that succeeds.
    model(torch.ones(1))
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
