"""``profile``: one call from a step function to a report."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

import backspot
from backspot.errors import (
    AlreadyInstrumentedError,
    NoBackwardError,
    OutputExistsError,
    UsageError,
)
from backspot.trace import read_events
from support import preloaded
from support.hooks import MODES, instrument
from support.leftovers import hooks_on, left_in_torch
from support.tracks import added_of, assert_nested, text_of
from support.training import cpu_profile

TIMES = 50
profile = partial(backspot.profile, trials="none")
"""For what has nothing to do with trials, which take most of the time."""


class Slow(nn.Module):
    """Many small operations for one of autograd's."""

    def forward(self, x):
        for _ in range(TIMES):
            x = x * 1.0
        return x


class Case:
    """A model, a loss and a step that counts itself."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), Slow()))
        self.loss = nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x = torch.randn(4, 8)
        self.steps = 0
        self.batches = []

    def step(self):
        self.steps += 1
        self.optimizer.zero_grad()
        self.loss(self.model(self.x), self.x).backward()
        self.optimizer.step()

    def step_on(self, batch):
        self.batches.append(batch)
        self.x = torch.full((4, 8), float(batch))
        self.step()


@pytest.fixture
def case():
    made = Case()
    yield made
    assert hooks_on(made.model) == hooks_on(made.loss) == left_in_torch() == []


def found(report):
    """Whether the slow module is told from the others by what autograd did for it."""
    nodes = {node.name: node.count for node in report["1.1"].row.nodes}
    return nodes == {"MulBackward0": TIMES}


# What it does.


def test_one_call_names_the_slow_module(case):
    report = backspot.profile(case.step, case.model, steps=4, warmup=2, unprofiled=3, stacks=False)
    assert found(report)
    assert case.steps == 9
    assert report["1.1"].row.recorded_calls == 4
    assert (report.step_unit, report.steps) == ("profiler step", 4)
    assert report.source == "backspot"
    assert "step()" in report.trace
    assert any(row.lines for row in report.modules)


@pytest.mark.parametrize("warmup", [0, 3])
def test_the_steps_train_as_they_would_without_it(case, warmup):
    trials = "operators" if warmup else "none"  # a trial takes a second, and puts all back
    backspot.profile(case.step, case.model, steps=2, warmup=warmup, unprofiled=3, trials=trials)
    plain = Case()
    for _ in range(5 + warmup + 3):  # three with stacks
        plain.step()
    for ours, theirs in zip(case.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_further_steps_tell_which_lines_of_python_run(case):
    def compute():
        total = 0
        for number in range(200_000):
            total += number % 7

    def step():
        case.step()
        compute()

    report = profile(step, case.model, steps=2, warmup=1, unprofiled=2)
    (line,) = (
        one for one in report.host if one.function.endswith("compute") and one.python_ns > 1_000_000
    )
    assert line.file.endswith("test_profiling.py")
    assert line.python_ns > 0.5 * sum(one.python_ns for one in report.host)
    assert "python-code" in {finding.rule for finding in report.findings}
    assert not profile(step, case.model, steps=2, unprofiled=0, stacks=False).host


def test_a_batch_that_is_made_of_lists_holds_up_the_step(case):
    lists = [[float(number) for number in range(300)] for _ in range(300)]

    def collated():
        return torch.tensor(lists)

    def step():
        collated()
        case.step()

    report = profile(step, case.model, steps=2, warmup=1, unprofiled=2)
    lines = [one for one in report.host if one.function.endswith("collated")]
    line = max(lines, key=lambda one: one.torch_ns)
    (found,) = (one for one in report.findings if one.rule == "python-code")
    assert line.phase == "host"
    assert line.torch_ns > line.python_ns
    assert found.places[0].line == line.place
    assert found.saves.ns > 0.5 * line.wall_ns


def test_a_loop_before_the_model_takes_its_python_and_its_operators(case):
    def totals():
        total = torch.zeros_like(case.x)
        for _ in range(3_000):
            total = torch.add(case.x, total)
        return total

    def step():
        totals()
        case.step()

    report = profile(step, case.model, steps=2, warmup=1, unprofiled=2)
    lines = [one for one in report.host if one.function.endswith("totals")]
    (found,) = (one for one in report.findings if one.rule == "code-around-model")
    assert {line.phase for line in lines} >= {"host", "other"}
    named = [place.line for one in report.findings for place in one.places]
    assert found.places[0].line in {line.place for line in lines}
    assert named.count(found.places[0].line) == 1
    assert found.saves.ns > sum(line.python_ns for line in lines)


def test_a_hook_within_the_backward_is_python_that_holds_up_the_step(case):
    def compute(_):
        total = 0
        for number in range(300_000):
            total += number % 7

    next(case.model.parameters()).register_hook(compute)
    report = profile(case.step, case.model, steps=2, warmup=1, unprofiled=2)
    lines = [one for one in report.host if one.function.endswith("compute")]
    assert {line.phase for line in lines} == {"backward"}
    assert sum(one.python_ns for one in lines) > 0.5 * sum(one.python_ns for one in report.host)


def test_of_more_calls_than_pytorch_can_record_no_lines_are_known(case, monkeypatch):
    monkeypatch.setattr("backspot.live.recording.MOST_CALLS", 1_000)
    monkeypatch.setattr("backspot.live.profiling.MOST_CALLS", 1_000)

    def step():
        case.step()
        for _ in range(1_000):
            len("")

    report = profile(step, case.model, steps=1, unprofiled=0)
    assert not report.host
    assert any("Python functions" in warning for warning in report.warnings)
    report = profile(step, case.model, steps=1, unprofiled=0, warmup=1)  # not counted
    assert report.host


@pytest.mark.parametrize(("groups", "settings"), [(60, 2), (60, 60), (2, 2)])
def test_groups_of_an_optimizer_that_could_be_one_are_found(groups, settings):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(30)))
    parts = [[] for _ in range(groups)]
    for number, parameter in enumerate(model.parameters()):
        parts[number % groups].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": part, "lr": 1e-4 * (1 + number % settings), "name": f"group {number}"}
            for number, part in enumerate(parts)
        ],
        fused=True,
    )

    def step():
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()

    report = profile(step, model, steps=4, unprofiled=2, stacks=False)
    found = [one for one in report.findings if one.rule == "optimizer-kernels"]
    assert [f"{groups} groups" in one.seen for one in found] == [True] * (groups > settings)
    for one in found:
        assert "2 different settings" in one.seen
        assert one.path == "(optimizer)"
        assert 0 < one.saves.ns < report.step_ns


def _same_arithmetic(optimizer):
    """Update as Adam does without the forms of PyTorch's."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            mean = state.setdefault("mean", torch.zeros_like(parameter))
            mean.lerp_(parameter.grad, 0.1)
            square = state.setdefault("square", torch.zeros_like(parameter))
            square.mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)
            parameter.data.addcdiv_(mean, square.sqrt().add_(1e-8), value=-1e-3)


def _named_adamw(kind):
    """Classes of the name of PyTorch's."""

    class PassesOn(torch.optim.AdamW):
        def __init__(self, params, lr=1e-3, **options):
            super().__init__(params, lr=lr, **options)

        def step(self, closure=None):
            return super().step(closure)

    class TakesNone(torch.optim.AdamW):
        def __init__(self, params, lr=1e-3):
            super().__init__(params, lr=lr)

    class StepsItself(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            _same_arithmetic(self)

    class Other(torch.optim.Optimizer):
        def __init__(self, params, **options):
            super().__init__(params, options)

        @torch.no_grad()
        def step(self, closure=None):
            _same_arithmetic(self)

    classes = {"own": torch.optim.AdamW, "passes on": PassesOn}
    classes |= {"takes none": TakesNone, "steps itself": StepsItself, "other": Other}
    for cls in classes.values():
        cls.__name__ = "AdamW"
    return classes[kind]


@pytest.mark.parametrize(
    ("kind", "mark"),
    [
        ("own", []),
        ("passes on", ["AdamW"]),
        ("takes none", ["no class"]),
        ("steps itself", ["no class"]),
        ("other", ["no class"]),
    ],
)
def test_whose_arguments_an_optimizer_takes_is_in_the_trace(kind, mark, tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = _named_adamw(kind)(model.parameters())
    with backspot.instrument(model), cpu_profile() as recorded:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    begin = "optimizer with the arguments of "
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    # PyTorch calls its hooks once more for a step that goes on with that of its base.
    assert {name.removeprefix(begin) for name in names if name.startswith(begin)} == {*mark}
    assert "Optimizer.step#AdamW.step" in names


def test_a_profiling_function_of_the_program_stays(case):
    seen = []

    def watch(frame, event, argument):
        seen.append(event)

    sys.setprofile(watch)
    try:
        report = profile(case.step, case.model, steps=1, unprofiled=0)
        assert sys.getprofile() is watch
    finally:
        sys.setprofile(None)
    assert seen
    assert not report.host


def test_real_steps_are_timed_before_the_recording(case):
    begun = []

    def step():
        begun.append(torch.autograd._profiler_enabled())
        case.step()

    report = profile(step, case.model, steps=2, warmup=2, unprofiled=5, stacks=False)
    # The last warm-up runs under a profiler that is prepared, and does not record yet.
    assert begun.count(True) == 2
    assert begun[-2:] == [True, True]
    steps = report.unprofiled_step_ns_by_step
    assert len(steps) == 5
    assert min(steps) <= report.unprofiled_step_ns <= max(steps)
    assert "A step takes" in str(report)
    # On a busy machine the recorded steps can be of another kind than the real ones.
    replayed = report.replayed_step
    assert report.not_replayed or replayed.fitted or replayed.ns <= report.unprofiled_step_ns


def test_without_real_steps_the_report_does_not_know_how_long_they_take(case):
    report = profile(case.step, case.model, steps=2, warmup=0, unprofiled=0)
    assert report.unprofiled_step_ns is None
    assert "with the profiler" in str(report)


def test_several_modules_go_by_name(case):
    report = profile(case.step, {"net": case.model, "loss": case.loss}, depth=1)
    paths = {row.path for row in report.modules if row.is_module}
    assert paths == {"net", "net.0", "net.1", "loss"}
    assert not any("No call" in warning for warning in report.warnings)


def test_batches_come_from_data_in_order_and_begin_again(case, tmp_path):
    trace = tmp_path / "t.json"
    profile(
        case.step_on,
        case.model,
        data=[1, 2, 3],
        steps=3,
        warmup=2,
        unprofiled=0,
        trace=trace,
        depth=0,
        stacks=False,
    )
    assert case.batches == [1, 2, 3, 1, 2]
    assert trace.read_bytes().count(b'"enumerate(DataLoader)#') == 3


def test_waiting_for_a_batch_is_a_phase_of_the_step(case):
    report = backspot.profile(case.step_on, case.model, data=range(10), trials="none")
    assert "data" in {phase.name for phase in report.phases}
    report = profile(case.step, case.model)
    assert not any(phase.wall_ns for phase in report.phases if phase.name == "data")


def test_data_that_ends_too_early_is_told(case):
    with pytest.raises(UsageError, match="ended after 4 batches"):
        profile(case.step_on, case.model, data=iter(range(4)))
    with pytest.raises(UsageError, match="ended after 0 batches"):
        profile(case.step_on, case.model, data=[])


# The labelled trace.


def test_the_trace_is_labelled_and_tells_the_same(case, tmp_path):
    trace = tmp_path / "x.trace.json.gz"
    report = profile(case.step, case.model, trace=trace, unprofiled=0, stacks=False)
    text = text_of(trace)
    assert_nested(text)
    names = {event["name"] for event in added_of(text) if event["ph"] == "B"}
    assert "backward: 1.1 (Slow)" in names
    assert {event["ph"] for event in added_of(text)} == {"B", "E", "M", "s", "f"}
    # Only the recording knows of its warm-up, and so warns of none, and of all steps.
    located = backspot.locate(trace)
    assert (report.clock, located.clock) == ("real", "recorded")
    assert located.step_ns == report.recorded_step_ns
    assert {row.label: (row.wall_ns, row.gpu_ns) for row in located.modules} == {
        row.label: (row.recorded_wall_ns, row.gpu_ns) for row in report.modules
    }


@pytest.mark.parametrize("hooks", MODES)
def test_names_in_any_script_are_found_and_can_be_read(hooks, tmp_path):
    class Größe(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("层", nn.Linear(4, 4))

        def forward(self, x):
            return self.层(x)

    model, trace = nn.Sequential(Größe()), tmp_path / "t.json"
    with instrument(model, hooks=hooks), cpu_profile() as prof:
        model(torch.randn(2, 4)).sum().backward()
    modules = {("", "Sequential"), ("0", "Größe"), ("0.层", "Linear")}
    report = backspot.locate(prof, trace=trace)
    for found in (report, backspot.locate(trace)):
        assert {(row.path, row.class_name) for row in found.modules if row.is_module} == modules
    spans = {event["name"] for event in added_of(text_of(trace)) if event["ph"] == "B"}
    assert "backward: 0.层 (Linear)" in spans


def test_what_is_there_stays_and_no_step_runs_unless_forced(case, tmp_path):
    trace = tmp_path / "t.json"
    trace.write_text("precious")
    for wrong, error in [(trace, OutputExistsError), (tmp_path / "t.txt", UsageError)]:
        with pytest.raises(error):
            profile(case.step, case.model, trace=wrong)
    assert (case.steps, trace.read_text()) == (0, "precious")
    profile(case.step, case.model, trace=trace, force=True)
    assert_nested(trace.read_bytes())


def test_a_profile_of_ones_own_gives_its_labelled_trace_too(case, tmp_path):
    with backspot.instrument(case.model), cpu_profile() as prof:
        case.step()
    before = backspot.locate(prof)
    assert backspot.locate(prof, trace=tmp_path / "o.json") == before
    assert_nested((tmp_path / "o.json").read_bytes())
    assert backspot.locate(prof) == before
    with pytest.raises(UsageError, match="exported already"):
        backspot.locate(prof, trace=tmp_path / "again.json")
    with pytest.raises(UsageError, match="trace="):
        before.save(tmp_path / "again.trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["o.json"]


# What goes wrong.


# One step of each kind: left alone, timed, prepared, two recorded, timed, three in detail.
@pytest.mark.parametrize("at", range(1, 10))
def test_what_the_step_raises_passes_through_and_the_next_profile_works(case, at):
    error = RuntimeError("the user's own")

    def step():
        case.step()
        if case.steps == at:
            raise error

    with pytest.raises(RuntimeError) as raised:
        profile(step, case.model, warmup=2, unprofiled=2, steps=2, memory=True)
    assert raised.value is error
    assert case.steps == at
    assert not hooks_on(case.model)
    assert not torch.autograd._profiler_enabled()
    assert found(profile(case.step, case.model, steps=1, warmup=0, unprofiled=0, stacks=False))


def test_an_interrupt_in_backward_leaves_nothing_behind(case):
    def interrupt(_):
        raise KeyboardInterrupt

    def step():
        y = case.model(case.x)
        y.register_hook(interrupt)
        y.sum().backward()

    with pytest.raises(KeyboardInterrupt):
        backspot.profile(step, case.model, warmup=0)
    assert found(profile(case.step, case.model))


@pytest.mark.parametrize("step", ["forward_only", "nothing"])
def test_a_step_without_backward_is_said_to_have_none(case, step):
    def forward_only():
        case.model(case.x)

    def nothing():
        pass

    with pytest.raises(NoBackwardError) as caught:
        profile(locals()[step], case.model)
    assert str(caught.value) == (
        f"the profile of {step}() holds no backward pass: none ran while the profiler recorded; "
        "record a whole training step, with loss.backward()"
    )


def test_a_profiler_that_runs_already_is_told_and_runs_on(case):
    with cpu_profile() as prof:
        with pytest.raises(UsageError, match="profiler is running already"):
            profile(case.step, case.model)
        with backspot.instrument(case.model):
            case.step()
    assert found(backspot.locate(prof))


def test_a_model_that_is_instrumented_already_is_told_and_stays_so(case):
    with backspot.instrument(case.model) as mine:
        with pytest.raises(AlreadyInstrumentedError, match="remove"):
            profile(case.step, {"loss": case.loss, "": case.model})
        assert mine.active
        assert not hooks_on(case.loss)
    assert case.steps == 0


def test_models_that_the_step_never_calls_are_named(case):
    other = nn.Linear(2, 2)
    for model, who in [(other, "Linear"), ({"": case.model, "critic": other}, "'critic' (Linear)")]:
        warnings = profile(case.step, model).warnings
        assert [who in warning for warning in warnings if "No call of" in warning] == [True]
        assert not any("instrument" in warning for warning in warnings)


@pytest.mark.slow
@pytest.mark.xdist_group("dynamo")  # one worker imports what compiles
def test_a_model_whose_labels_were_compiled_away_is_not_called_unused(case):
    compiled = torch.compile(case.model, backend="aot_eager")

    def step():
        case.loss(compiled(case.x), case.x).backward()

    warnings = profile(step, compiled).warnings
    if not any("compiled regions" in warning for warning in warnings):
        pytest.skip("this PyTorch does not record where it runs what it compiled")
    assert not any("No call" in warning for warning in warnings)


def plain_step():
    raise AssertionError("no step runs")


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((None, nn.Tanh()), {}, "without calling it"),
        ((nn.Tanh(), plain_step), {}, "function that runs a training step first"),
        ((plain_step, [nn.Tanh()]), {}, "not list; several go into a dict"),
        ((plain_step, {"a": 1}), {}, "model['a'] must be"),
        ((plain_step, {}), {}, "empty"),
        ((plain_step, nn.Tanh()), {"steps": 0}, "steps=0"),
        ((plain_step, nn.Tanh()), {"steps": True}, "steps=True"),
        ((plain_step, nn.Tanh()), {"warmup": -1}, "warmup=-1"),
        ((plain_step, nn.Tanh()), {"unprofiled": -1}, "unprofiled=-1"),
        ((plain_step, nn.Tanh()), {"depth": -1}, "depth"),
        ((plain_step, nn.Tanh()), {"data": 3}, "data must be iterable"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_told_in_a_line(arguments, options, said):
    with pytest.raises(UsageError) as raised:
        backspot.profile(*arguments, **options)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


# Who sees how far it is.

LONG = """
import time, torch, backspot
model = torch.nn.Linear(2, 2)
def step():
    time.sleep(0.2)
    model(torch.ones(1, 2)).sum().backward()
backspot.profile(step, model, steps=2, warmup=1, unprofiled=1, stacks=False)
"""


@pytest.mark.slow
@pytest.mark.posix
def test_a_terminal_sees_how_far_it_is_and_a_file_does_not():
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    command = [*preloaded.python(), preloaded.WHOLE, "-c", LONG]
    quiet = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    subprocess.run(command, stderr=theirs, env=environment, check=True)
    os.close(theirs)
    told = b""
    try:
        while piece := os.read(ours, 1 << 16):
            told += piece
    except OSError:  # how Linux tells that nobody holds the other end
        pass
    os.close(ours)
    assert b"profiling: 4 of 4 steps" in told
    printed, said = quiet.communicate()
    assert quiet.returncode == 0
    assert printed == b""
    assert b"profiling" not in said


@pytest.mark.slow
def test_a_notebook_sees_how_far_it_is_and_keeps_nothing_of_it(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    preloaded.write_kernel(tmp_path)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    shown = []

    class Client(nbclient.NotebookClient):
        def process_message(self, message, cell, index):
            if "display" in message["msg_type"]:
                shown.append(message["content"]["data"])
            return super().process_message(message, cell, index)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LONG)])
    Client(notebook, kernel_name="python3", startup_timeout=300).execute()
    assert {"text/plain": "profiling: 4 of 4 steps"} in shown
    left = [o.data for o in notebook.cells[0].outputs if o.output_type == "display_data"]
    assert left == [{"text/plain": ""}]


# On a GPU.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_that_the_step_uses_is_recorded(case):
    case.model.cuda()
    case.x = case.x.cuda()
    report = profile(case.step, case.model)
    assert report.has_gpu
    assert found(report)
    assert not any("launch record" in warning for warning in report.warnings)


def test_the_trace_tells_whose_parameters_an_optimizer_updates(tmp_path):
    """Each parameter once, and none that is frozen or has gradients of a few rows only."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 4))
    model.add_module("table", nn.Embedding(50, 8, sparse=True))
    model[1][0].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model[:3].parameters(), lr=0.1)

    def step():
        model[:3](torch.randn(4, 8)).sum().backward()
        optimizer.step()

    path = tmp_path / "trace.json"
    profile(step, model, steps=2, unprofiled=0, stacks=False, trace=path)
    told = read_events(path).compiled.parameters
    assert {one.path for one in told} == {"0", "1.0", "2"}
    assert sum(one.tensors for one in told) == 4
    assert sum(one.numbers for one in told) == 64 + 8 + 8 + 4


@pytest.mark.slow
def test_an_export_that_lives_to_the_end_warns_of_nothing():
    code = (
        "import torch; from backspot.trace.profiler import Export\n"
        "with torch.profiler.profile() as prof: torch.ones(2).sum()\n"
        "import warnings; warnings.simplefilter('error'); kept = Export(prof)"
    )
    command = [*preloaded.python(), preloaded.WHOLE, "-c", code]  # with what it does at its end
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert b"ResourceWarning" not in done.stderr


class _Watched(nn.Conv2d):
    """A convolution whose forward takes many times its backward."""

    def forward(self, x):
        with torch.no_grad():
            for _ in range(40):
                super().forward(x)
        return super().forward(x)


def _block(inputs, layer=nn.Conv2d):
    return nn.Sequential(layer(inputs, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


@pytest.mark.slow
@pytest.mark.parametrize("layer", [_Watched, nn.Conv2d])
def test_a_layer_whose_forward_takes_most_is_the_first_line(layer):
    model = nn.Sequential(_block(3), _block(8, layer), _block(8))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    x = torch.randn(8, 3, 16, 16)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    made = backspot.profile(step, model, steps=6, warmup=1, trials="none")
    first = " ".join(str(made).split()).startswith("1.0 (_Watched) takes ")
    assert first is (layer is _Watched)
