"""``instrument(model, lines=True)``: which line made each node, and nothing else changed."""

import gc
import json
import linecache
import subprocess
import textwrap
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.profiler import ProfilerActivity, profile, schedule  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import backspot  # noqa: E402
from backspot.errors import UsageError  # noqa: E402
from backspot.live.source_lines import place_of_frame  # noqa: E402
from support import preloaded  # noqa: E402

# Whatever it holds must come through the profiler whole.
FIRST = 'x = self.fc(x)  # "quotes", \\\\, % and ü'
creation = getattr(torch.autograd.graph, "node_creation_hook", None)
needs_creation = pytest.mark.skipif(creation is None, reason="exact lines need torch 2.14")


class Net(nn.Module):
    """Does once, in the middle of its forward, what it is told to."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.action = None

    def forward(self, x):
        x = self.fc(x)  # "quotes", \\, % and ü
        if self.action is not None:
            action, self.action = self.action, None
            action()
        return x.tanh()


def cpu(**options):
    return profile(activities=[ProfilerActivity.CPU], **options)


def step(model):
    model(torch.randn(3, 4)).sum().backward()


def texts(report):
    """The text of each line that the report names, by node."""
    return {line.node: line.text for row in report.modules for line in row.lines}


def interrupt():
    raise KeyboardInterrupt


def hooks_on_this_thread():
    """Takes what hears of new nodes off this thread and counts it."""
    count = 0
    while True:
        try:
            torch._C._autograd._pop_node_creation_hook()
        except RuntimeError:
            return count
        count += 1


def whole(report):
    """What a profiled step of ``Net`` should tell."""
    told = texts(report)
    assert told["AddmmBackward0"] == FIRST
    if creation is not None:
        assert told["TanhBackward0"] == "return x.tanh()"
    return True


def test_a_line_stands_with_its_file_function_and_costs():
    model = Net()
    with backspot.instrument(model, lines=True), cpu() as profiler:
        step(model)
        step(model)
    report = backspot.locate(profiler)
    (line,) = (line for line in report["fc"].row.lines if line.node == "AddmmBackward0")
    (node,) = (node for node in report["fc"].row.nodes if node.name == "AddmmBackward0")
    assert line.place.endswith(f"test_source_lines.py:{Net.forward.__code__.co_firstlineno + 1}")
    assert line.function.endswith("forward")
    assert line.exact == (creation is not None)
    assert (line.count, line.wall_ns, line.cpu_ns) == (1, node.wall_ns, node.cpu_ns)


def test_without_lines_there_are_none(tmp_path):
    model = Net()
    with backspot.instrument(model), cpu() as profiler:
        step(model)
    assert texts(backspot.locate(profiler)) == {}
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "backspot.lines" not in json.loads((tmp_path / "trace.json").read_text())


def test_lines_reach_the_exported_trace(tmp_path):
    model = Net()
    with backspot.instrument(model, lines=True), cpu() as profiler:
        step(model)
    live = backspot.locate(profiler)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text())["backspot.lines"]["version"] == 1
    assert texts(backspot.locate(tmp_path / "trace.json")) == texts(live)
    assert whole(live)


def test_each_profile_keeps_its_own_lines(tmp_path):
    one, other = Net(), nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    unlabelled = cpu()
    with backspot.instrument(one, lines=True), backspot.instrument(other, name="b", lines=True):
        with cpu() as first:
            step(one)
        with cpu() as second:
            step(other)
    with unlabelled:
        step(one)
    assert whole(backspot.locate(first))
    assert set(texts(backspot.locate(second)).values()) == {
        "model(torch.randn(3, 4)).sum().backward()"
    }
    assert texts(backspot.locate(unlabelled)) == {}


def test_each_cycle_of_a_schedule_has_lines():
    model, found = Net(), []
    plan = schedule(wait=1, warmup=1, active=2, repeat=3)
    ready = lambda profiler: found.append(backspot.locate(profiler))  # noqa: E731
    with (
        backspot.instrument(model, lines=True),
        cpu(schedule=plan, on_trace_ready=ready) as profiler,
    ):
        for _ in range(12):
            step(model)
            profiler.step()
    assert [whole(report) for report in found] == [True] * 3
    assert all(line.count == 1 for report in found for line in report["fc"].row.lines)


def test_an_instrumentation_within_a_profile_leaves_its_lines_there(tmp_path):
    model = Net()
    before = torch.autograd.profiler._disable_profiler
    with cpu() as profiler, backspot.instrument(model, lines=True):
        step(model)
    assert torch.autograd.profiler._disable_profiler is before
    assert whole(backspot.locate(profiler))
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert whole(backspot.locate(tmp_path / "trace.json"))


@needs_creation
def test_nothing_is_heard_while_no_profiler_records():
    heard = []
    model = Net()
    model.action = lambda: heard.append(hooks_on_this_thread())
    with backspot.instrument(model, lines=True):
        step(model)
    assert heard == [0]


@needs_creation
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_in_forward_the_next_step_is_told_and_nothing_stays(error):
    def fail():
        raise error

    model = Net()
    with backspot.instrument(model, lines=True), cpu() as profiler:
        model.action = fail
        with pytest.raises(error):
            step(model)
        step(model)
    assert whole(backspot.locate(profiler))
    assert hooks_on_this_thread() == 0


@needs_creation
def test_what_an_interrupt_left_goes_with_the_instrumentation():
    model = Net()
    instrumentation = backspot.instrument(model, lines=True)
    model.action = interrupt
    with cpu(), pytest.raises(KeyboardInterrupt):
        step(model)
    instrumentation.remove()
    assert hooks_on_this_thread() == 0


@needs_creation
def test_an_interrupt_within_recomputation_takes_no_hook_of_the_users():
    heard = []
    model = Net()
    with backspot.instrument(model, lines=True), creation(lambda node: heard.append(node.name())):
        with cpu() as profiler:
            x = torch.randn(3, 4, requires_grad=True)
            out = checkpoint(model, x, use_reentrant=False)
            model.action = interrupt
            with pytest.raises(KeyboardInterrupt):
                out.sum().backward()
            step(model)
        heard.clear()
        step(model)
        assert "TanhBackward0" in heard
    assert whole(backspot.locate(profiler))
    assert hooks_on_this_thread() == 0


@needs_creation
def test_a_hook_of_the_users_goes_on_hearing():
    heard = []
    model = Net()
    with backspot.instrument(model, lines=True), cpu() as profiler:
        with creation(lambda node: heard.append(node.name())):
            step(model)
        step(model)
    assert heard.count("TanhBackward0") == 1
    assert texts(backspot.locate(profiler)).keys() >= {"AddmmBackward0", "TanhBackward0"}
    assert hooks_on_this_thread() == 0


def test_threads_do_not_mix_their_lines():
    class Other(Net):
        def forward(self, x):
            return self.fc(x).tanh()

    one, other = Net(), Other()
    with backspot.instrument(one, lines=True), backspot.instrument(other, name="b", lines=True):
        try:
            config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        except TypeError:
            pytest.skip("this PyTorch cannot profile all threads")
        with cpu(experimental_config=config) as profiler:
            thread = threading.Thread(target=lambda: [step(other) for _ in range(20)])
            thread.start()
            for _ in range(20):
                step(one)
            thread.join()
    report = backspot.locate(profiler)
    for path, text in (("fc", FIRST), ("b.fc", "return self.fc(x).tanh()")):
        assert {line.text for line in report[path].row.lines} <= {text}
    # On a busy machine, the passes of one thread can be taken for recorded in part.
    assert report["fc"].row.lines or report["b.fc"].row.lines


@pytest.mark.slow
def test_no_tensor_frame_or_class_outlives_its_step():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            forward = staticmethod(lambda ctx, x: x.clone())
            backward = staticmethod(lambda ctx, gradient: gradient)
            methods = {"forward": forward, "backward": backward}
            self.function = type("Passing", (torch.autograd.Function,), methods)

        def forward(self, x):
            held = x * 2
            kept.append(weakref.ref(held))
            return self.function.apply(held)

    kept = []
    model = Model()
    x = torch.randn(3, requires_grad=True)
    with backspot.instrument(model, lines=True):
        with cpu() as profiler:
            model(x).sum().backward()
        gc.collect()
        assert kept[0]() is None
    passing = weakref.ref(model.function)
    del model
    gc.collect()
    backspot.locate(profiler)
    assert passing() is None


def test_what_is_kept_for_a_profile_goes_with_it():
    from backspot.trace.source_lines import live_tables

    model, others = Net(), len(live_tables)  # of profiles that other tests have kept
    with backspot.instrument(model, lines=True), cpu() as profiler:
        step(model)
    assert any(results is profiler.profiler.kineto_results for results in live_tables)
    of_ours = weakref.ref(profiler.profiler.kineto_results)
    del profiler
    gc.collect()
    assert of_ours() is None
    assert len(live_tables) <= others


def run_source(source, name):
    scope = {"__name__": "elsewhere"}
    exec(compile(source, name, "exec"), scope)
    with backspot.instrument(scope["model"], lines=True), cpu() as profiler:
        scope["step"]()
    return backspot.locate(profiler)


SOURCE = textwrap.dedent(
    """
    import torch
    class Made(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)
        def forward(self, x):
            return self.fc(x)
    model = Made()
    def step():
        model(torch.randn(2, 4)).sum().backward()
    """
)


@pytest.mark.parametrize("name", ["<string>", "<made up>", "/nowhere/there.py"])
def test_code_without_a_file_has_lines_without_text(name):
    (line,) = {
        (line.file, line.line, line.text) for line in run_source(SOURCE, name)["fc"].row.lines
    }
    assert line == (name, 8, "")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("<ipython-input-3-0123456789ab>", "<cell 3>"),
        ("/tmp/ipykernel_4711/1234567890.py", "<notebook cell>"),
    ],
)
def test_a_notebooks_cell_is_named_and_its_text_is_shown(name, shown):
    linecache.cache[name] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), name)
    try:
        lines = run_source(SOURCE, name)["fc"].row.lines
    finally:
        del linecache.cache[name]
    assert {(line.place, line.text) for line in lines} == {(f"{shown}:8", "return self.fc(x)")}


@pytest.mark.slow
def test_a_script_is_named_within_the_working_folder(tmp_path):
    (tmp_path / "pack").mkdir()
    script = tmp_path / "pack" / "train.py"
    script.write_text(
        SOURCE
        + textwrap.dedent(
            """
            import backspot
            with backspot.instrument(model, lines=True), torch.profiler.profile() as profiler:
                step()
            for line in backspot.locate(profiler)["fc"].row.lines:
                print(line.place, line.text)
            report = backspot.profile(step, model, steps=1, warmup=1, unprofiled=0)
            print({line.file for line in report.host})
            """
        )
    )
    ran = subprocess.run(
        [*preloaded.python(), str(script)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    lines = {"pack/train.py:8 return self.fc(x)", "{'pack/train.py'}"}
    assert set(ran.stdout.splitlines()) == lines  # also of stacks, which PyTorch names otherwise


def test_a_profile_too_long_for_all_of_its_nodes_says_so(monkeypatch):
    monkeypatch.setattr("backspot.live.source_lines.MOST_NODES", 20)
    model = Net()
    with backspot.instrument(model, lines=True), cpu() as profiler:
        for _ in range(20):
            step(model)
    report = backspot.locate(profiler)
    (warning,) = (text for text in report.warnings if "Source lines" in text)
    assert "profile fewer steps" in warning
    known = sum(line.wall_ns for line in report["fc"].row.lines)
    assert 0 < known < report["fc"].row.wall_ns


@pytest.mark.parametrize("lines", ["yes", None, 1])
def test_what_is_neither_true_nor_false_is_refused(lines):
    with pytest.raises(UsageError, match="give True or False"):
        backspot.instrument(Net(), lines=lines)


def test_a_function_that_runs_when_stacks_begin_has_the_line_at_which_it_begins(
    tmp_path, monkeypatch
):
    lines = [
        "import torch",
        "",
        "@torch.no_grad()",
        "def main():",
        "    x = 1",
        "    return x",
        "y = 2",
    ]
    (tmp_path / "begun_already.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert place_of_frame("begun_already.py", 5, "main") == ("begun_already.py", 3)
    assert place_of_frame("begun_already.py", 3, "main") == ("begun_already.py", 3)
    assert place_of_frame("begun_already.py", 7, "<module>") == ("begun_already.py", 1)
    assert place_of_frame("begun_already.py", 5, "") == ("begun_already.py", 5)
    assert place_of_frame("elsewhere.py", 5, "main") == ("elsewhere.py", 5)
