"""``hooks="call"``: labels by a wrapper around module calls, which is there only while needed."""

import gc
import subprocess
import sys
import threading
import warnings
from itertools import product

import pytest
import torch
from torch import nn
from torch.autograd import profiler as autograd_profiler, profiler_legacy
from torch.profiler import ProfilerActivity, profile

import backspot
from backspot.live import call_wrapper as wrapping
from backspot.live.sessions import sessions
from support.hooks import MODES, instrument
from support.leftovers import hooks_on, left_in_torch

WITHOUT_HOOKS = True

CALL = nn.Module.__call__
REPLICATE = nn.Module._replicate_for_data_parallel


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x).tanh()


def net(block=Block):
    return nn.Sequential(block(), block())


def step(model):
    return lambda: model(torch.randn(3, 4)).sum().backward()


ALL = [
    "forward: (Sequential)",
    "forward: 0 (Block)",
    "forward: 0.fc (Linear)",
    "forward: 1 (Block)",
    "forward: 1.fc (Linear)",
]


def pytorch_is_its_own():
    return nn.Module.__call__ is CALL and nn.Module._replicate_for_data_parallel is REPLICATE


@pytest.fixture(autouse=True)
def as_before():
    limit = sys.getrecursionlimit()
    yield
    assert pytorch_is_its_own()
    assert sys.getrecursionlimit() == limit


# Nothing is there without a profiler -------------------------------------------------------------


def test_nothing_is_on_the_model_or_its_calls_while_no_profiler_records(record):
    model = net()
    seen = []

    def looks(*_):
        seen.append((pytorch_is_its_own(), hooks_on(model)))

    with backspot.instrument(model):
        assert pytorch_is_its_own()
        limit = sys.getrecursionlimit()
        for _ in range(2):
            step(model)()
            assert record(lambda: (step(model)(), looks())).forward() == ALL
            assert pytorch_is_its_own()
            assert sys.getrecursionlimit() == limit
            assert hooks_on(model) == []
    assert left_in_torch() == []
    assert seen == [(False, [])] * 2


def test_nothing_is_left_after_an_error_in_the_profile():
    model = net()
    with backspot.instrument(model):
        for error in (ValueError, KeyboardInterrupt):

            def fail(*_, error=error):
                raise error

            handle = model[1].fc.register_forward_hook(fail)
            with pytest.raises(error), profile(activities=[ProfilerActivity.CPU]):
                step(model)()
            assert pytorch_is_its_own()
            handle.remove()


def test_nothing_is_left_by_a_profiler_that_fails_to_start(monkeypatch):
    def fail(*_):
        raise RuntimeError("no device")

    monkeypatch.setattr(autograd_profiler, "_enable_profiler", fail)
    with backspot.instrument(net()):
        with pytest.raises(RuntimeError, match="no device"):
            autograd_profiler.emit_itt().__enter__()
        assert pytorch_is_its_own()
    autograd_profiler._run_on_profiler_stop()


def test_removal_within_a_profile_leaves_nothing(record):
    model, other = net(), nn.Tanh()
    instrumentation = backspot.instrument(model)

    def run():
        step(model)()
        with backspot.instrument(other, name="other"):
            instrumentation.remove()
            assert not pytorch_is_its_own()
            step(model)()
            other(torch.randn(2))
        assert pytorch_is_its_own()
        step(model)()

    assert record(run).forward() == [*ALL, "forward: other (Tanh)"]


def test_a_dropped_model_leaves_nothing():
    model = net()
    backspot.instrument(model)
    with profile(activities=[ProfilerActivity.CPU]):
        step(model)()
        assert len(wrapping.call_wrapper.owners) == 5
        del model
        gc.collect()
        assert wrapping.call_wrapper.owners == {}
    assert pytorch_is_its_own()
    assert sessions.live_scopes() == []


def test_a_new_module_at_the_place_of_a_dropped_one_has_no_label(record):
    model = net()

    def run():
        for _ in range(50):
            model[1] = nn.Sequential()
            gc.collect()
            model[1] = Block()
            model(torch.randn(2, 4))

    with backspot.instrument(model):
        assert not any(name.startswith("forward: 1") for name in record(run).names)


# Every start of a profiler -----------------------------------------------------------------------


def legacy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return profiler_legacy.profile()


STARTS = {
    "torch.profiler": lambda: profile(activities=[ProfilerActivity.CPU]),
    "torch.autograd.profiler": lambda: autograd_profiler.profile(),
    "emit_itt": lambda: autograd_profiler.emit_itt(),
    "legacy": legacy,
}


@pytest.mark.parametrize("start", STARTS)
def test_each_way_to_start_a_profiler_is_noticed(start):
    model = net()
    with backspot.instrument(model):
        for _ in range(2):
            with STARTS[start]() as profiler:
                assert not pytorch_is_its_own()
                step(model)()
            assert pytorch_is_its_own()
    if start == "legacy":
        names = [event.name for event in profiler.function_events]
        assert [name for name in names if name.startswith("forward: ")] == ALL


def test_a_schedule_has_labels_in_each_cycle():
    model, found = net(), []

    def ready(profiler):
        found.append([e.name for e in profiler.events() if e.name.startswith("forward: ")])

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2)
    with (
        backspot.instrument(model),
        profile(
            activities=[ProfilerActivity.CPU], schedule=schedule, on_trace_ready=ready
        ) as profiler,
    ):
        for _ in range(7):
            step(model)()
            profiler.step()
    assert [names[-len(ALL) :] for names in found] == [ALL, ALL]  # torch 2.4 keeps earlier cycles


def test_where_starts_cannot_be_noticed_there_are_node_hooks(monkeypatch, record):
    monkeypatch.setattr(sessions, "watches_starts", False)
    model = net()
    with backspot.instrument(model) as instrumentation:
        assert instrumentation.hooks == "node"
        assert record(step(model)).forward() == ALL


def test_after_many_sessions_there_are_node_hooks_while_a_profiler_records(monkeypatch, record):
    monkeypatch.setattr(wrapping, "_MOST_SESSIONS", 0)
    monkeypatch.setattr(sys, "version_info", (3, 13))
    model = net()
    with backspot.instrument(model):
        assert record(lambda: (step(model)(), pytorch_is_its_own() or 1 / 0)).forward() == ALL
        assert hooks_on(model) == []


# Calls that take another way ---------------------------------------------------------------------


class Own(Block):
    """A call of its own, which does not call that of its base."""

    def __call__(self, x):
        return self._call_impl(x) + 1


class Through(Block):
    def __call__(self, x):
        return super().__call__(x) + 1


class Forwards(Block):
    """A call of its own that no hook sees, as GPyTorch has it."""

    def __call__(self, x):
        return self.forward(x)


class Inherits(Forwards):
    pass


class Chained(Forwards):
    def __call__(self, x):
        return super().__call__(x) + 1


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(self.inner(x))


def test_the_call_of_all_modules_stays_where_a_model_has_such_a_class(record):
    inner = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    model = nn.Sequential(Through(), nn.Tanh(), inner)
    with backspot.instrument(model):
        recording = record(lambda: (step(model)(), nn.Module.__call__ is CALL or 1 / 0))
        assert hooks_on(model) == []
    assert left_in_torch() == []
    assert recording.forward() == [
        "forward: (Sequential)",
        "forward: 0 (Through)",
        "forward: 0.fc (Linear)",
        "forward: 1 (Tanh)",
        "forward: 2 (Sequential)",
        "forward: 2.0 (Linear)",
    ]


@pytest.mark.parametrize("kind", [Own, Through, Forwards, Inherits, Chained])
@pytest.mark.parametrize("markers", [True, False])
def test_a_class_with_a_call_of_its_own_has_labels(kind, markers, record):
    model, calls = Around(kind()), [vars(cls).get("__call__") for cls in kind.__mro__]
    with backspot.instrument(model, markers=markers):
        recording = record(step(model))
        assert hooks_on(model) == left_in_torch()[:0] == []
    name = kind.__name__
    assert recording.forward() == [
        "forward: (Around)",
        f"forward: inner ({name})",
        "forward: inner.fc (Linear)",
        f"forward: inner ({name}) #2",
        "forward: inner.fc (Linear) #2",
    ]
    assert [vars(cls).get("__call__") for cls in kind.__mro__] == calls


class Borrows(nn.Module):
    """A part calls a module that is not inside of it, as kernels of GPyTorch do."""

    def __init__(self, kind):
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.part = kind()
        borrowed = [self.base]
        self.part.forward = lambda x: self.part.fc(borrowed[0](x)).tanh()

    def forward(self, x):
        return self.part(x)


@pytest.mark.parametrize("kind", [Block, Own, Through, Forwards, Inherits, Chained])
def test_a_call_goes_on_after_a_call_of_a_module_that_is_not_inside_of_it(kind, record):
    model = Borrows(kind)
    with backspot.instrument(model):
        recording = record(step(model))
    part = f"forward: part ({kind.__name__})"
    around = {one.name: recording.parent(one) for one in recording.labels if "rd: " in one.name}
    assert around["forward: base (Linear)"] == part
    assert around["forward: part.fc (Linear)"] == part
    assert around[part] == "forward: (Borrows)"


def test_calls_of_their_own_may_fail_repeat_and_be_of_several_classes(record):
    class Fails(Forwards):
        def forward(self, x):
            raise KeyError

    model = nn.Sequential(Forwards(), Chained(), Inherits(), Through())
    failing = nn.Sequential(Forwards(), Fails())

    def run():
        with pytest.raises(KeyError):
            failing(torch.randn(3, 4))
        step(model)()

    with backspot.instrument(model), backspot.instrument(failing, name="failing"):
        recording = record(run)
    assert [label.removeprefix("forward: ") for label in recording.forward()] == [
        *("failing (Sequential)", "failing.0 (Forwards)", "failing.0.fc (Linear)"),
        *("failing.1 (Fails)", "(Sequential)", "0 (Forwards)", "0.fc (Linear)"),
        *("1 (Chained)", "1.fc (Linear)", "2 (Inherits)", "2.fc (Linear)"),
        *("3 (Through)", "3.fc (Linear)"),
    ]
    assert left_in_torch() == []


def test_a_graph_module_has_labels_and_no_hook(record):
    model = torch.fx.symbolic_trace(net())
    seen = []
    with backspot.instrument(model):
        recording = record(lambda: (step(model)(), seen.extend(hooks_on(model))))
    assert recording.forward()[0].startswith("forward: (")
    assert "forward: 1.fc (Linear)" in recording.forward()
    assert seen == []


def test_replicas_are_the_module_that_they_are_of(record):
    model = net()

    def run():
        replica = model[0]._replicate_for_data_parallel()
        replica._parameters = dict(model[0]._parameters)
        model(torch.randn(2, 4))
        thread = threading.Thread(target=replica, args=(torch.randn(2, 4),))
        thread.start()
        thread.join()
        assert len(wrapping.call_wrapper.owners) == 6
        del replica, thread
        gc.collect()
        assert len(wrapping.call_wrapper.owners) == 5

    with backspot.instrument(model):
        names = record(run, all_threads=True).forward()
    assert sorted(names) == sorted([*ALL, "forward: 0 (Block)", "forward: 0.fc (Linear)"])


def test_kineto_finds_modules_as_without_labels(tmp_path):
    model, x = net(), torch.randn(2, 4)

    def modules():
        path = tmp_path / "t.json"
        with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
            model(x)
        profiler.export_chrome_trace(str(path))
        return path.read_text().count("nn.Module: ")

    plain = modules()
    assert plain >= 5
    for markers in (True, False):
        with backspot.instrument(model, markers=markers):
            assert modules() == plain
    assert modules() == plain


# Other tools -------------------------------------------------------------------------------------


class Tool:
    """Another tool that replaces the call of all modules for a while."""

    def __init__(self):
        self.calls = 0

    def start(self):
        self.before = nn.Module.__call__

        def call(module, *args, **kwargs):
            self.calls += 1
            return self.before(module, *args, **kwargs)

        nn.Module.__call__ = call

    def stop(self):
        nn.Module.__call__ = self.before


def test_a_tool_that_was_there_before_is_called_and_stays(record):
    model, tool = net(), Tool()
    tool.start()
    theirs = nn.Module.__call__
    with backspot.instrument(model):
        for _ in range(2):
            assert record(step(model)).forward() == ALL
            assert nn.Module.__call__ is theirs
    assert tool.calls == 10
    tool.stop()


def test_a_tool_that_comes_and_goes_within_a_profile(record):
    model, tool = net(), Tool()

    def run():
        tool.start()
        step(model)()
        tool.stop()

    with backspot.instrument(model):
        assert record(run).forward() == ALL
    assert tool.calls == 5


def test_a_tool_that_comes_within_a_profile_and_goes_after_it(record):
    model, tool = net(), Tool()
    with backspot.instrument(model):
        for _ in range(3):
            assert record(lambda: (tool.start(), step(model)())).forward() == ALL
            calls = tool.calls
            step(model)()
            assert tool.calls == calls + 5
            tool.stop()
            step(model)()  # the first call finds that PyTorch's own should be there
            assert pytorch_is_its_own()


def test_a_tool_that_stays_over_several_profiles_sees_each_call_once(record):
    model, tool = net(), Tool()
    with backspot.instrument(model):
        assert record(lambda: (tool.start(), step(model)())).forward() == ALL
        for _ in range(3):
            calls = tool.calls
            assert record(step(model)).forward() == ALL
            assert tool.calls == calls + 5
        tool.stop()
        assert record(step(model)).forward() == ALL


def counting(calls):
    """A call of all modules that knows nothing of the one that was there before."""

    def call(module, *args, **kwargs):
        calls.append(module)
        return module._call_impl(*args, **kwargs)

    return call


@pytest.fixture
def untouched(record):
    """A profile ends with no tool around the wrapper: what tests before have left is forgotten."""
    model = net()
    with backspot.instrument(model):
        record(step(model))


@pytest.fixture
def replace(untouched):
    """Replace a class's ``__call__``; at the end it is PyTorch's, or none, again."""
    classes = []

    def put(cls, call):
        classes.append(cls)
        cls.__call__ = call

    yield put
    for cls in classes:
        if cls is nn.Module:
            cls.__call__ = CALL
        elif "__call__" in vars(cls):
            del cls.__call__


def trained(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda: (step(model)(), optimizer.step())


def test_a_tool_that_takes_the_place_of_the_wrapper_stays_and_labels_go_on(record, replace):
    model, calls = net(), []
    theirs, train = counting(calls), trained(model)

    def run():
        replace(nn.Module, theirs)
        train()  # unseen
        train()
        train()

    with backspot.instrument(model):
        recording = record(run)
        assert nn.Module.__call__ is theirs
        assert hooks_on(model) == []
        assert record(train).forward() == ALL
        assert nn.Module.__call__ is theirs
    assert recording.forward() == 2 * ALL
    assert len(calls) == 4 * len(ALL)


def test_a_tool_that_was_there_before_may_go_within_a_profile(record, untouched):
    model, tool = net(), Tool()
    train = trained(model)

    def run():
        train()
        tool.stop()
        train()  # unseen
        train()

    tool.start()
    with backspot.instrument(model):
        assert record(run).forward() == 2 * ALL
        assert pytorch_is_its_own()
        seen = []
        assert record(lambda: (train(), seen.extend(hooks_on(model)))).forward() == ALL
    assert seen == []
    assert tool.calls == len(ALL)


def test_a_tool_whose_code_looks_like_pytorchs_is_called(record, replace):
    model, calls = net(), [0]

    def call(module, *args, **kwargs):
        calls[0] += 1
        run = module._call_impl if module._compiled_call_impl is None else None
        return run(*args, **kwargs)

    replace(nn.Module, call)
    with backspot.instrument(model):
        assert record(step(model)).forward() == ALL
    assert calls == [len(ALL)]


def test_a_tool_that_comes_while_wrappers_are_on_classes_is_called(record, replace):
    model, calls = nn.Sequential(Forwards(), Block()), []
    theirs = counting(calls)

    def run():
        replace(nn.Module, theirs)
        step(model)()

    with backspot.instrument(model):
        for _ in range(2):
            assert len(record(run).forward()) == len(ALL)
            assert nn.Module.__call__ is theirs
    assert len(calls) == 2 * (len(ALL) - 1)  # none of the class whose call goes nowhere else


def test_a_tool_that_keeps_the_wrapper_of_a_class_makes_no_second_label(record, replace):
    model, calls = nn.Sequential(Forwards(), Block()), []

    def run():
        if not calls:
            before = nn.Linear.__call__

            def call(module, *args, **kwargs):
                calls.append(module)
                return before(module, *args, **kwargs)

            replace(nn.Linear, call)
        step(model)()

    with backspot.instrument(model):
        for _ in range(2):
            assert len(record(run).forward()) == len(ALL)
    assert len(calls) == 4


def test_a_tool_may_put_the_wrapper_of_a_class_back_after_the_profile(record, replace):
    model, kept = nn.Sequential(Forwards(), Block()), []

    def run():
        kept.append(nn.Linear.__call__)
        replace(nn.Linear, lambda module, *args: kept[0](module, *args))
        step(model)()

    with backspot.instrument(model):
        assert len(record(run).forward()) == len(ALL)
        nn.Linear.__call__ = kept[0]
        step(model)()
        assert "__call__" not in vars(nn.Linear)
        assert len(record(step(model)).forward()) == len(ALL)


IMPORTED = """
import sys, torch, backspot
from torch import nn
from torch.profiler import ProfilerActivity, profile
from backspot.live.call_wrapper import labelled_call

model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
call = nn.Module.__call__
assert "torch._dynamo" not in sys.modules
with backspot.instrument(model):
    with profile(activities=[ProfilerActivity.CPU]):
        import torch._dynamo
        fast = torch.compile(model, backend="aot_eager", fullgraph=True)
        fast(torch.randn(2, 4)).sum().backward()
assert nn.Module.__call__ is call
for name, module in list(sys.modules.items()):
    if not name.startswith(("backspot", "__m")):
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            assert value is not labelled_call, (name, attribute)
print("clean")
"""


@pytest.mark.slow
def test_what_was_imported_within_a_profile_keeps_nothing():
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "clean"


# Markers are for viewers -------------------------------------------------------------------------


@pytest.mark.parametrize("hooks", MODES)
def test_without_markers_no_node_has_a_hook(hooks, record):
    model = net()
    losses = []
    with instrument(model, hooks=hooks, markers=False) as instrumentation:
        recording = record(lambda: losses.append(model(torch.randn(3, 4)).sum()))
        pending, seen = [losses[0].grad_fn], set()
        while pending:
            node = pending.pop()
            if node is not None and node not in seen:
                seen.add(node)
                assert "backspot" not in node.metadata
                pending.extend(following for following, _ in node.next_functions)
        assert record(losses[0].backward).names == []
        assert "markers=False" in repr(instrumentation)
    assert recording.names == ALL


def test_owners_are_the_same_without_markers():
    model, x = net(), torch.randn(3, 4)
    found = []
    for markers in (True, False):
        with (
            backspot.instrument(model, markers=markers),
            profile(activities=[ProfilerActivity.CPU]) as profiler,
        ):
            model(x).sum().backward()
        report = backspot.locate(profiler)
        found.append(
            {row.path: [(node.name, node.count) for node in row.nodes] for row in report.modules}
        )
    assert {path: sorted(nodes) for path, nodes in found[0].items()} == {
        path: sorted(nodes) for path, nodes in found[1].items()
    }


# Compiled regions --------------------------------------------------------------------------------


in_one_worker = pytest.mark.xdist_group("dynamo")  # which imports what compiles


class PassedOn(Block):
    """A layer as those of transformers."""

    def __call__(self, x):
        return super().__call__(x)


# Before torch 2.15, Dynamo makes frames of their own of what a compiled container calls.
METHOD = "method" if hasattr(torch.autograd.graph, "node_creation_hook") else "whole"


@pytest.mark.slow
@in_one_worker
@pytest.mark.parametrize(
    ("block", "when", "how"),
    [
        *product([Block], ["before", "during"], sorted({"whole", METHOD, "blocks"})),
        *product([PassedOn, Forwards], ["before", "during"], ["whole"]),
        *product([PassedOn, Forwards], ["before"], {METHOD} - {"whole"}),
    ],
)
def test_a_region_keeps_its_graph_and_is_compiled_once(block, when, how, record):
    pytest.importorskip("torch._dynamo")
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model, counter = net(block), CompileCounterWithBackend("aot_eager")
    options = {"backend": counter, "fullgraph": True}
    own_call = vars(torch._dynamo.OptimizedModule).get("__call__")
    x = torch.randn(3, 4)
    expected = model(x)

    def compiled():
        if how == "whole":
            return torch.compile(model, **options)
        for module in model if how == "blocks" else [model]:
            module.compile(**options)
        return model

    def run(called):
        assert torch.equal(called(x), expected)
        called(x).sum().backward()

    with backspot.instrument(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # Dynamo's
        called = compiled()
        if when == "before":
            run(called)
        names = record(lambda: run(called)).forward()
        frames = counter.frame_count
        run(called)
        assert record(lambda: run(called)).forward() == names
        run(called)
        assert counter.frame_count == frames <= 2
        assert vars(torch._dynamo.OptimizedModule).get("__call__") is own_call
        assert names[0] == "forward: (Sequential)"
        # A call that never gets to PyTorch's does not get to what ``compile`` has made, either.
        inside_of_blocks = 10 if block is Forwards else 6
        assert len(names) == (2 if how != "blocks" else inside_of_blocks)


@pytest.mark.slow
@in_one_worker
def test_no_class_has_the_wrapper_while_dynamo_compiles(record):
    pytest.importorskip("torch._dynamo")
    torch._dynamo.reset()
    model, seen = net(PassedOn), []

    def look():
        seen.append("__call__" in vars(nn.Linear))

    def backend(graph, _inputs):
        look()
        return graph.forward

    def run():
        fast = torch.compile(model, backend=backend, fullgraph=True)
        look()
        fast(torch.randn(3, 4)).sum().backward()
        look()

    with backspot.instrument(model):
        record(run)
        look()
    assert seen == [True, False, True, False]


@pytest.mark.slow
@in_one_worker
def test_a_model_that_is_wrapped_within_a_profile_has_one_label_a_call(record):
    pytest.importorskip("torch._dynamo")
    torch._dynamo.reset()
    model = net()

    def run():
        fast = torch.compile(model, backend="aot_eager", fullgraph=True)
        fast(torch.randn(3, 4)).sum().backward()
        kept.append(fast)

    kept = []
    with backspot.instrument(model):
        assert record(run).forward() == ["forward: (Sequential)"]
        step(kept[0])()
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert record(step(kept[0])).forward() == ["forward: (Sequential)"]
