"""A plan compiles copies, and the training compiles as often as without a plan."""

import shlex
import signal
import sys
import threading
from functools import partial

import pytest
import torch
import torch._inductor.config
from torch import nn

import backspot
from backspot.live.acts import Living
from backspot.live.plan import settings as plan_settings, time_limit
from backspot.live.plan.planning import Planning
from backspot.live.plan.time_limit import TimeUp, ended_after
from backspot.live.torch_internals import lookup
from backspot.live.torch_internals.dynamo import end_compile_workers, functions_of_compiling
from backspot.results.report import changed
from support import preloaded
from support.trainings import SmallNet, Training
from support.unbuilt import unbuilt  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("dynamo"),  # one worker has the built code
    pytest.mark.usefixtures("short"),
]


@pytest.fixture(scope="module")
def report():
    """A report of a step that takes long enough for each of the models here."""
    model = nn.Linear(4, 4)
    found = backspot.profile(
        lambda: model(torch.ones(2, 4)).sum().backward(), model, steps=1, warmup=0, trials="none"
    )
    return changed(found, step_ns=50_000_000, recorded_step_ns=50_000_000)


def planned(report, step, model, seconds):
    return Planning(seconds).after(report, Living({"": model}, step=step)).plan


def compiled(plan):
    (found,) = [one for one in plan.rungs if one.setting == "torch.compile"]
    return found


def graphs_of(model, shapes):
    """How many graphs a training compiles of a model that is called with some shapes."""
    made = []

    def backend(graph, _):
        made.append(graph)
        return graph.forward

    called = torch.compile(model, backend=backend, dynamic=False)
    for one in shapes:
        called(torch.ones(one, 8)).sum().backward()
    torch._dynamo.reset()
    return len(made)


# Started with PyTorch in memory. It looks whether its parent is still the one that it was given.
START_OF_WORKERS = """
import os, runpy, sys
parent = next(int(word.removeprefix("--parent=")) for word in sys.argv if "--parent=" in word)
own, os.getppid = os.getppid, lambda: parent
os.register_at_fork(after_in_child=lambda: setattr(os, "getppid", own))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def workers_start_soon(tmp_path, monkeypatch):
    """The processes in which Inductor compiles do not import PyTorch once more."""
    (tmp_path / "start.py").write_text(START_OF_WORKERS)
    path = tmp_path / "workers"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(preloaded.python())} {tmp_path}/start.py "$@"\n')
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.posix
@torch._inductor.config.patch(compile_threads=2)
def test_a_training_goes_on_bit_for_bit_after_a_copy_was_compiled(
    report, forget_graphs, workers_start_soon
):
    async_compile = pytest.importorskip("torch._inductor.async_compile")
    expected = Training(network=SmallNet)
    for _ in range(4):
        expected.step()
    tried = Training(network=SmallNet)
    tried.step()
    pool = async_compile.AsyncCompile.process_pool()
    plan = planned(report, tried.step, tried.model, 240)
    tried.step()
    tried.step()
    assert compiled(plan).compile_ns > 0, compiled(plan).note
    assert tried.state() == expected.state()
    # Its processes that compile have ended, and others can be started.
    assert pool.process.wait(60) is not None
    other = async_compile.AsyncCompile.process_pool()
    assert other is not pool
    assert other.submit(abs, -3).result(60) == 3
    end_compile_workers()
    assert other.process.wait(60) is not None


@pytest.mark.usefixtures("unbuilt")
def test_a_training_that_compiles_later_does_so_as_often_as_without_a_plan(report, forget_graphs):
    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    model, x = made(), torch.ones(4, 8)
    plan = planned(report, lambda: model(x).sum().backward(), model, 240)
    assert compiled(plan).compile_ns > 0, compiled(plan).note
    assert graphs_of(model, range(2, 9)) == graphs_of(made(), range(2, 9)) == 7


def test_a_compiled_loss_is_compiled_as_often_as_without_a_plan(report, forget_graphs):
    made = []

    def backend(graph, _):
        made.append(graph)
        return graph.forward

    loss = torch.compile(lambda out: out.square().mean(), backend=backend)
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    step = lambda: loss(model(x)).backward()  # noqa: E731
    step()
    plan = planned(report, step, model, 20)
    step()
    assert not plan.why_not
    assert plan.what == "a copy of Linear, forward and backward"
    assert len(made) == 1


class Pointwise(nn.Linear):
    """Many operators in a row, which compiled code puts together."""

    def forward(self, x):
        y = super().forward(x)
        for _ in range(12):
            y = y.sigmoid() * 1.5 - y.tanh() * 0.5
        return y


def test_max_autotune_is_tried_in_place_of_the_default_where_that_helps(
    report, forget_graphs, monkeypatch
):
    of_gpu = partial(plan_settings._compilers, device=torch.device("cuda"))
    monkeypatch.setattr(plan_settings, "_compilers", lambda watched, _: of_gpu(watched))
    model, x = Pointwise(64, 64), torch.randn(1024, 64)
    plan = planned(report, lambda: model(x).sum().backward(), model, 240)
    found = {one.setting: one for one in plan.rungs}
    autotuned = found["max-autotune"]
    assert "max-autotune-no-cudagraphs" in autotuned.code
    if compiled(plan).kept:
        assert autotuned.on[-1] == "torch.compile", autotuned.note
        assert autotuned.compile_ns > 0
        assert autotuned.before_ns == compiled(plan).step_ns
    else:
        assert autotuned.note == "torch.compile is no part of the plan"


class Layers(nn.Sequential):
    """Layers that take some seconds to compile."""

    def __init__(self, layers=60):
        super().__init__(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(layers)))


def test_compiling_ends_when_the_time_is_up(report, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is built there
    before = signal.getsignal(signal.SIGALRM)
    model = Layers()
    step = lambda: model(torch.ones(4, 8)).sum().backward()  # noqa: E731
    plan = planned(report, step, model, 4)
    assert compiled(plan).verdict == "not tried"
    assert "s that were left" in compiled(plan).note or "no time was left" in compiled(plan).note
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    step()


def ended_in(model, seconds):
    """In which function a first step was ended; ``None`` if it came to its end."""
    try:
        with ended_after(seconds):
            torch.compile(model)(torch.ones(4, 8)).sum().backward()
    except TimeUp as up:
        return str(up)
    return None


def is_wrapped(function):
    return function.__code__.co_filename == lookup.__file__


@pytest.mark.posix
@pytest.mark.parametrize(
    "function",
    [
        *("step", "_match", "find_anchor_nodes", "eliminate_dead_code", "python_code"),
        *("run_node", "can_fuse", "codegen", "communicate"),
    ],
)
@torch._inductor.config.patch(compile_threads=1)  # so this process waits for the compiler of C++
def test_an_end_in_any_function_leaves_pytorch_as_it_was(
    function, tmp_path, monkeypatch, forget_graphs, capfd
):
    def alone():
        places = functions_of_compiling()
        return {name: place for name, place in places.items() if name.endswith(f".{function}")}

    monkeypatch.setattr(time_limit, "functions_of_compiling", alone)
    # Else it comes where torch.fx starts the thread of a progress bar, in a process that has none.
    waiting = {one for one in time_limit._WAITING if one[1] == function}
    monkeypatch.setattr(time_limit, "_WAITING", waiting)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is built there
    assert ended_in(Layers(2), 0.01) == function
    assert torch.is_grad_enabled()
    assert not torch.is_anomaly_enabled()
    places = functions_of_compiling()
    assert not [name for name, place in places.items() if is_wrapped(place.get())]
    torch._dynamo.reset()
    capfd.readouterr()
    model, x = Layers(1), torch.ones(4, 8)
    assert torch.allclose(torch.compile(model)(x), model(x), atol=1e-5)
    assert "Error" not in capfd.readouterr().err


def test_a_library_that_takes_it_for_another_error_does_not_go_on():
    def step():
        try:
            threading.Event().wait(60)
        except TimeUp:
            raise ValueError("something failed") from None

    with pytest.raises(TimeUp), ended_after(0.01):
        step()


@pytest.mark.posix
def test_compiling_is_not_begun_where_it_could_not_be_ended(report):
    model = nn.Linear(8, 8)
    signal.setitimer(signal.ITIMER_REAL, 600)
    try:
        plan = planned(report, lambda: model(torch.ones(4, 8)).sum().backward(), model, 60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert compiled(plan).verdict == "not tried"
    assert compiled(plan).note == "the training has an alarm of its own"


def test_a_step_that_runs_compiled_code_is_refused(report):
    model = nn.Linear(8, 8)
    called = torch.compile(model, backend="eager")
    called(torch.ones(2, 8)).sum().backward()
    plan = planned(report, lambda: called(torch.ones(2, 8)).sum().backward(), model, 5)
    assert plan.why_not == "the step runs compiled code"
    torch._dynamo.reset()
