"""The modules inside compiled code, recorded on the CPU with Inductor.

The generated C++ code is shown in traces by a setting of Inductor, which these tests turn on.
"""

import gc
import json
import re
import sys
import warnings
from contextlib import nullcontext
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import backspot  # noqa: E402
from backspot.analysis.attribution.ownership import Ownership, attribute  # noqa: E402
from backspot.analysis.caveats import warnings_of  # noqa: E402
from backspot.errors import UsageError  # noqa: E402
from backspot.live.frames import SiteTables, bytes_of, place_of, write_frames  # noqa: E402  # noqa: E402
from backspot.live.torch_internals import inductor  # noqa: E402
from backspot.live.torch_internals.inductor import hint_of  # noqa: E402
from backspot.trace import read_events  # noqa: E402
from backspot.trace.events import Events  # noqa: E402
from backspot.trace.names import COMPILED_GRAPH  # noqa: E402
from support.sums import assert_adds_up  # noqa: E402
from support.training import cpu_profile  # noqa: E402
from support.unbuilt import unbuilt  # noqa: E402, F401

pytestmark = pytest.mark.xdist_group("dynamo")  # one worker imports it

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
slow = pytest.mark.slow
with_inductor = pytest.mark.skipif(VERSION < (2, 10), reason="this PyTorch keeps no launch sites")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.relu(self.fc(self.norm(x)))


class Net(nn.Module):
    """Two of four products have a bias: the C++ compiler builds a kernel for the sum of each."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 2, bias=False)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Product(nn.Module):
    """Compiled, it only calls a library: no C++ is built for it, which takes seconds."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.fc(x)


class Broken(nn.Module):
    """Two products, with a graph for each."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = Product(), Product()

    def forward(self, x):
        x = self.stem(x)
        torch._dynamo.graph_break()
        return self.head(x)


class Checkpointed(nn.Module):
    """The backward computes the products of the block once more."""

    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Sequential(Product(), Product()), Product()

    def forward(self, x):
        return self.head(torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False))


def start_over():
    """Make Dynamo know no code, and give the next graph the number of a process's first.

    The names of kernels have that number in them, so equal graphs have equal C++ code, which is
    built once.
    """
    torch._dynamo.reset()
    compile_fx = sys.modules["torch._inductor.compile_fx"]
    if hasattr(compile_fx, "_graph_counter"):
        compile_fx._graph_counter = count()


@pytest.fixture(autouse=True)
def fresh(request):
    if request.node.get_closest_marker("slow") is None:
        yield
        return
    config = pytest.importorskip("torch._inductor.config")
    pytest.importorskip("torch._inductor.compile_fx")
    request.getfixturevalue("forget_graphs")
    start_over()
    with (
        config.patch({"cpp.enable_kernel_profile": True, "cpp.simdlen": 1, "cpp.vec_isa_ok": True}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def train(model, x=None, *, around=None):
    called = model if around is None else around
    called(torch.ones(3, 8) if x is None else x).square().sum().backward()


def recorded(model, around=None, x=None, **options):
    """Ownership of one recorded step, after one that compiles."""
    with backspot.instrument(model, **options):
        train(model, x, around=around)
        with cpu_profile() as profiler:
            train(model, x, around=around)
    events = read_events(profiler)
    return events, attribute(events)


class Recording(NamedTuple):
    """A step of a compiled model, recorded with the shapes of its tensors."""

    model: nn.Module
    trace: Path
    events: Events
    ownership: Ownership
    report: backspot.Report


@cache
def _recording(folder, kind):
    model = kind()
    around = torch.compile(model, fullgraph=True)
    with backspot.instrument(model):
        train(model, around=around)
        with torch._dynamo.config.patch(error_on_recompile=True):
            train(model, around=around)
            with cpu_profile(record_shapes=True) as profiler:
                train(model, around=around)
    events = read_events(profiler)
    trace = folder / f"{kind.__name__}.json"
    profiler.export_chrome_trace(str(trace))
    return Recording(model, trace, events, attribute(events), backspot.locate(profiler))


@pytest.fixture
def recording(fresh, tmp_path_factory):
    """Record a step of a model, once in a worker: no step compiles again."""
    return lambda kind=Net: _recording(tmp_path_factory.getbasetemp(), kind)


def launches_of(events, ownership):
    """For each matched launch its name and the paths of its owners; "-" is the region's owner."""
    found = ownership.compiled
    modules = [m.path for m in (*ownership.spans.modules, *found.modules)]
    names = [events.names[name] for name in events.name[found.event].tolist()]
    return [
        (
            re.sub(r"graph_\d+_", "", name),
            [
                "-" if owner < 0 else modules[owner]
                for owner in found.shares.owner[begin:end].tolist()
            ],
        )
        for name, begin, end in zip(
            names, found.shares.first[:-1], found.shares.first[1:], strict=True
        )
    ]


def owners_of_products(launches):
    """The owners of all matrix products, which are never fused."""
    return sorted(
        path for name, paths in launches if name in ("aten::mm", "aten::addmm") for path in paths
    )


ALL = ["stem", "blocks.0.fc", "blocks.1.fc", "head"]
# Backward: the input of each but the first needs a gradient, and each weight.
PRODUCTS = sorted([*ALL, *ALL, *ALL[1:]])


def checked(events, ownership, products=PRODUCTS):
    assert not ownership.compiled.unmatched
    launches = launches_of(events, ownership)
    assert owners_of_products(launches) == products
    norms = {path for name, paths in launches if "norm" in name for path in paths}
    assert {"blocks.0.norm", "blocks.1.norm"} <= norms
    return launches


@slow
@with_inductor
@pytest.mark.parametrize("kind", ["whole", "method", "function"])
def test_every_launch_has_its_modules(kind, recording):
    if kind == "whole":
        found = recording()
        checked(found.events, found.ownership)
        return
    model = Net()
    if kind == "method":
        model.compile()
    checked(*recorded(model, torch.compile(lambda x: model(x)) if kind == "function" else None))


@slow
@with_inductor
def test_every_launch_of_code_with_a_graph_break_has_its_modules():
    model = Broken()
    events, ownership = recorded(model, torch.compile(model))
    assert not ownership.compiled.unmatched
    expected = ["head.fc"] * 3 + ["stem.fc"] * 2  # the first input needs no gradient
    assert owners_of_products(launches_of(events, ownership)) == expected


@slow
@with_inductor
@pytest.mark.usefixtures("unbuilt")
def test_equal_blocks_that_share_code_come_out_one_by_one():
    model = Net()
    for block in model.blocks:
        block.compile()
    events, ownership = recorded(model)
    assert not ownership.compiled.unmatched
    launches = launches_of(events, ownership)
    assert owners_of_products(launches) == sorted(["blocks.0.fc", "blocks.1.fc"] * 3)
    assert any("-" in paths for _, paths in launches)  # what the block itself computes
    calls = {name for name in events.names if name.startswith(COMPILED_GRAPH)}
    assert len(calls) == 2  # one forward and one backward graph for both


class SharedIn(nn.Module):
    """Two blocks that have a module in common, or not; the second block's is the first one's."""

    def __init__(self):
        super().__init__()
        fc = Product()
        self.blocks = nn.ModuleList(nn.Sequential(Product(), fc) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@slow
@with_inductor
def test_a_module_that_compiled_blocks_share_has_the_work_of_both():
    model = SharedIn()
    for block in model.blocks:
        block.compile()
    events, ownership = recorded(model)
    assert not ownership.compiled.unmatched
    # A product in the forward and two in the backward; the first input needs no gradient.
    expected = ["blocks.0.0.fc"] * 2 + ["blocks.1.0.fc"] * 3 + ["blocks.0.1.fc"] * 6
    assert owners_of_products(launches_of(events, ownership)) == sorted(expected)


@slow
@with_inductor
@pytest.mark.parametrize("options", [{"depth": 1}, {"match": "0"}], ids=["depth", "match"])
def test_work_below_the_labels_belongs_to_the_module_around_it(options):
    below = Block()  # before 2.14, PyTorch compiles no module of its own
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), below))
    below.compile()
    events, ownership = recorded(model, **options)
    assert not ownership.compiled.unmatched
    assert owners_of_products(launches_of(events, ownership)) == ["0"] * 3


@slow
@pytest.mark.skipif(VERSION < (2, 13), reason="this PyTorch does not say what made such a product")
@pytest.mark.usefixtures("unbuilt")
def test_a_product_that_takes_a_sum_of_gradients_in_keeps_its_module():
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("start", "q", "k", "v")})

    def step(x):
        x = torch.tanh(model["start"](x))
        return sum(torch.sin(model[name](x)) for name in "qkv")

    around = torch.compile(step)
    events, ownership = recorded(model, around)
    assert not ownership.compiled.unmatched
    launches = launches_of(events, ownership)
    assert "aten::addmm" in {name for name, _ in launches}
    assert owners_of_products(launches) == sorted(["start", "start", *"qqqkkkvvv"])


@slow
@with_inductor
def test_checkpointed_code_that_runs_again_is_told_apart(recording):
    ownership, report = recording(Checkpointed)[-2:]
    assert not ownership.compiled.unmatched
    shares = ownership.compiled.shares
    modules = (*ownership.spans.modules, *ownership.compiled.modules)
    again = {modules[owner].path for owner in shares.owner[shares.again].tolist() if owner >= 0}
    assert again == {"block.0.fc", "block.1.fc"}
    one = 2 * 3 * 8 * 8
    works = {path: report[path].row.work for path in (*again, "head.fc")}
    assert {path: work.recompute_flops or 0 for path, work in works.items()} == {
        "block.0.fc": one,
        "block.1.fc": one,
        "head.fc": 0,
    }
    assert [works[path].forward_flops for path in sorted(works)] == [one, one, one]
    # The input of the first needs no gradient.
    assert [works[path].flops for path in sorted(works)] == [one, 2 * one, 2 * one]


@slow
@with_inductor
@pytest.mark.usefixtures("unbuilt")
def test_what_changes_a_tensor_in_place_has_its_module_in_the_backward():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(inplace=True), nn.Conv2d(4, 4, 3),
        nn.SiLU(inplace=True), nn.Dropout(inplace=True), nn.Conv2d(4, 2, 1),
    )  # fmt: skip
    with backspot.instrument(model):
        torch.compile(model)(torch.ones(2, 3, 8, 8)).square().mean().backward()
        tables = SiteTables()
        graphs = [tables.graph(code) for code in inductor.compiled_code()]
    (backward,) = (graph for graph in graphs if graph.backward)
    parts = [part for site in backward.sites for part in site.parts]
    assert {backward.places[part.place].path for part in parts} == set("0123456")
    assert not any(part.place < 0 for part in parts)
    # The SiLU is fused with the dropout behind it, whose forward has the same number.
    assert any(
        {backward.places[part.place].path for part in site.parts} >= {"4", "5"}
        for site in backward.sites
    )


@slow
@with_inductor
def test_the_work_of_compiled_code_belongs_to_its_modules(recording):
    model, _, _, _, report = recording()
    with FlopCounterMode(display=False) as counter:
        train(model)
    rows = {path: report[path].row for path in ALL}
    one = 2 * 3 * 8 * 8
    assert rows["stem"].work.flops == one  # its input needs no gradient
    assert [rows[f"blocks.{at}.fc"].work.flops for at in (0, 1)] == [2 * one, 2 * one]
    assert {path: row.work.forward_flops for path, row in rows.items()} == {
        "stem": one,
        "blocks.0.fc": one,
        "blocks.1.fc": one,
        "head": one // 4,
    }
    works = [row.work for row in report.modules if row.work]
    assert not any(work.recompute_flops for work in works)
    known = sum((work.forward_flops or 0) + (work.flops or 0) for work in works)
    assert known == counter.get_total_flops()
    norm = report["blocks.1.norm"].row
    assert (norm.work.flops, norm.work.unknown_share) == (None, 0)
    # At least the gradient of the output, the input and the gradient of the input.
    assert norm.work.bytes >= 3 * 4 * 3 * 8


@slow
@with_inductor
@pytest.mark.usefixtures("unbuilt")
def test_dynamic_shapes_and_autocast():
    model = Product()
    around = torch.compile(model, dynamic=True)
    with torch.autocast("cpu", torch.bfloat16):
        events, ownership = recorded(model, around, torch.ones(5, 8))
    assert not ownership.compiled.unmatched
    assert owners_of_products(launches_of(events, ownership)) == ["fc", "fc"]


@slow
@with_inductor
@pytest.mark.usefixtures("unbuilt")
def test_labels_of_some_modules_only():
    model = Net()
    events, ownership = recorded(model, torch.compile(model), depth=1)
    launches = launches_of(events, ownership)
    assert {"blocks.0", "blocks.1", "stem", "head"} <= {p for _, paths in launches for p in paths}
    assert not any(path.endswith(".fc") for _, paths in launches for path in paths)


@slow
@with_inductor
def test_code_that_gc_freeze_hides_is_known_if_it_came_while_instrumented():
    model = Product()
    around = torch.compile(model)
    with backspot.instrument(model):
        train(model, around=around)
        gc.freeze()
        try:
            with cpu_profile() as profiler:
                train(model, around=around)
        finally:
            gc.unfreeze()
    events = read_events(profiler)
    assert owners_of_products(launches_of(events, attribute(events))) == ["fc", "fc"]


@slow
@with_inductor
def test_the_table_travels_with_an_exported_trace(recording):
    _, trace, live, _, _ = recording()
    events = read_events(trace)
    assert events.compiled == live.compiled
    checked(events, attribute(events))
    report = backspot.locate(trace)
    assert_adds_up(report)
    for path in ALL:
        assert report[path].row.is_module
        assert report[path].row.calls == 1
        assert report[path].row.cpu_ns > 0
        assert "aten::mm" in {kernel.name for kernel in report[path].row.kernels}
    assert {row.path for row in report.top(None, depth=1)} >= {"blocks.0", "blocks.1"}
    assert all(len({part.path for part in one.parts}) > 1 for one in report.fused)


@slow
@with_inductor
def test_a_model_that_was_compiled_before_says_how_to_get_it():
    model = Product()
    around = torch.compile(model)
    train(model, around=around)
    events, ownership = recorded(model, around)
    assert not len(ownership.compiled.event)
    assert any("torch.compiler.reset()" in warning for warning in warnings_of(events, ownership))
    torch.compiler.reset()
    assert owners_of_products(launches_of(*recorded(model, around))) == ["fc", "fc"]


@slow
@with_inductor
def test_without_compiled_inductor_stays_as_it_is():
    from torch._inductor import config

    model = Product()
    with backspot.instrument(model, compiled=False):
        assert config.post_grad_custom_post_pass is None
        assert not config.trace.provenance_tracking_level
    events, ownership = recorded(model, torch.compile(model), compiled=False)
    assert not events.compiled.recorded
    assert not ownership.compiled.unmatched


@slow
@with_inductor
def test_a_step_that_compiles_again_says_which_line_and_why():
    model = Product()
    around = torch.compile(model, dynamic=False)
    with backspot.instrument(model):
        train(model, around=around)
        with cpu_profile() as profiler:
            train(model, torch.ones(5, 8), around=around)
    events = read_events(profiler)
    (warning,) = (w for w in warnings_of(events, attribute(events)) if "compile code" in w)
    assert re.search(r"forward \(.*test_compiled.py:\d+\) again, because .*size mismatch", warning)


# The same training -------------------------------------------------------------------------------


def code_and_gradients(compiled):
    """The code that Inductor generates, without comments, and what the training computes.

    Args:
        compiled: as in ``instrument``; ``None``: not instrumented.
    """
    from torch._functorch import config as autograd_config
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    start_over()
    torch.manual_seed(0)
    model = Net()
    around = torch.compile(model)

    def step():
        loss = around(torch.ones(3, 8)).square().sum()
        loss.backward()
        return loss.detach()

    # No graph comes from a cache, but what the C++ compiler built may.
    with config.patch(fx_graph_cache=False), autograd_config.patch(enable_autograd_cache=False):
        handle = None if compiled is None else backspot.instrument(model, compiled=compiled)
        with handle or nullcontext():
            loss, code = run_and_get_code(step)
    # Inductor numbers all graphs of a process, in the names that profilers see.
    plain = [re.sub(r"(#|//)[^\n]*|graph_\d+", "", text) for text in code]
    lines = [[line for line in text.splitlines() if line.strip()] for text in plain]
    return lines, loss, [parameter.grad for parameter in model.parameters()]


@slow
@with_inductor
def test_code_loss_and_gradients_are_the_same():
    _, loss, gradients = code_and_gradients(compiled=None)
    # Dynamo traces a module with hooks by another way, which can number the inputs differently.
    code, _, _ = code_and_gradients(compiled=False)
    code_with, loss_with, gradients_with = code_and_gradients(compiled=True)
    assert len(code) == 2  # forward and backward
    assert code == code_with
    assert torch.equal(loss, loss_with)
    assert all(map(torch.equal, gradients, gradients_with))


# The user's settings ------------------------------------------------------------------------------


def user_pass(uuid=b"theirs"):
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Theirs(CustomGraphPass):
        graphs = 0

        def __call__(self, graph):
            self.graphs += 1

        def uuid(self):
            return uuid

    return Theirs()


@slow
@with_inductor
def test_a_pass_of_the_users_runs_and_is_there_again_afterwards():
    from torch._inductor import config

    theirs = user_pass()
    model = Product()
    with config.patch(post_grad_custom_post_pass=theirs):
        with backspot.instrument(model):
            ours = config.post_grad_custom_post_pass
            assert ours is not theirs
            train(model, around=torch.compile(model))
        assert config.post_grad_custom_post_pass is theirs
    assert theirs.graphs == 2


@slow
@with_inductor
def test_a_pass_of_the_users_is_part_of_the_key_of_the_caches():
    from torch._inductor import config

    ran = []
    for uuid in (b"theirs", b"theirs", b"another"):
        start_over()
        model, theirs = Product(), user_pass(uuid)
        with config.patch(post_grad_custom_post_pass=theirs), backspot.instrument(model):
            train(model, around=torch.compile(model))
        ran.append(theirs.graphs)
    assert ran == [2, 0, 2]


@slow
@with_inductor
def test_a_pass_that_cannot_be_cached_stays_so():
    from torch._inductor import config

    model = Product()
    for theirs in (user_pass(uuid=None), lambda graph: None):
        with config.patch(post_grad_custom_post_pass=theirs), backspot.instrument(model):
            assert config.post_grad_custom_post_pass.uuid() is None


@slow
@with_inductor
def test_settings_are_restored_with_the_last_model_only():
    from torch._inductor import config

    models = Product(), Product()
    first, second = (backspot.instrument(m, name=f"m{i}") for i, m in enumerate(models))
    first.remove()
    assert config.trace.provenance_tracking_level
    second.remove()
    assert not config.trace.provenance_tracking_level
    assert config.post_grad_custom_post_pass is None


@slow
@with_inductor
def test_a_setting_that_others_changed_meanwhile_is_left_alone():
    from torch._inductor import config

    theirs = user_pass()
    model = Product()
    with config.patch(post_grad_custom_post_pass=None):
        instrumentation = backspot.instrument(model)
        config.post_grad_custom_post_pass = theirs
        instrumentation.remove()
        assert config.post_grad_custom_post_pass is theirs


@slow
@with_inductor
def test_a_model_that_is_gone_takes_the_settings_back():
    from torch._inductor import config

    backspot.instrument(Product())
    assert config.post_grad_custom_post_pass is None


class Chain(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


@slow
@with_inductor
@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("renamed", ["layer", "activation"])
def test_equal_code_with_other_names_does_not_come_from_the_caches(renamed):
    found = []
    for suffix in ("", "", "_2"):
        start_over()
        torch._dynamo.utils.counters.clear()
        names = {name: name + suffix * (name == renamed) for name in ("layer", "activation")}
        layer, activation = nn.Linear(8, 8, bias=False), nn.Softmax(-1)
        parts = {names["layer"]: layer, names["activation"]: activation}
        model = Chain(**parts)
        launches = launches_of(*recorded(model, torch.compile(model)))
        known = {path for _, paths in launches for path in paths} - {"-"}
        hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
        found.append((known == set(parts), hits))
    assert found == [(True, 0), (True, 2), (True, 0)]


# Without Inductor ---------------------------------------------------------------------------------


def test_eager_code_has_no_table():
    _, ownership = recorded(Net())
    assert not len(ownership.compiled.event)
    assert not ownership.compiled.unmatched


def test_compiled_is_true_or_false():
    with pytest.raises(UsageError, match="compiled=1: give True or False"):
        backspot.instrument(Net(), compiled=1)


def test_what_torch_lacks_is_not_missed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.config", object())
    assert inductor.inductor_settings() is None
    with backspot.instrument(Net()):
        pass


def test_nothing_watches_imports_afterwards():
    before = list(sys.meta_path)
    with backspot.instrument(Net()):
        pass
    assert sys.meta_path == before


# Frames -------------------------------------------------------------------------------------------


def frame(node, amount, reads="", users="", place="L['self'].a", base=0):
    return (
        f'  File "backspot:f:Linear:{place}", line {amount}, in {base}/{node}<{reads}>{users}\n'
        '  File "/x/site-packages/lib/model.py", line 12, in forward\n    y = self.a(x)\n'
    )


def graph_of(sites):
    tables = SiteTables()
    code = inductor.CompiledCode("key", False, json.dumps(sites))
    return tables.graph(code), tables


def test_what_stays_inside_a_kernel_does_not_count():
    graph, tables = graph_of(
        {
            "triton_0:1": [
                frame(3, 100, reads="1.40", users="4"),
                frame(4, 100, reads="3.100,2.8", users="9", place="L['self'].b"),
            ]
        }
    )
    ((site,),) = (graph.sites,)
    weights = {graph.places[part.place].path: part.weight for part in site.parts}
    assert weights == {"a": 40, "b": 108}
    ((line, index),) = tables.lines.items()
    assert (line.file, line.line, line.text, index) == ("lib/model.py", 12, "y = self.a(x)", 0)


def test_a_call_of_a_library_works_for_its_own_node_only():
    made_before = frame(3, 100, reads="1.40", users="4")
    call = frame(4, 8, reads="3.100,2.8", users="9", place="L['self'].b")
    graph, _ = graph_of(
        {
            "torch.ops.aten.convolution_backward.default:1": [made_before, call],
            "extern_kernels.mm:2": [call, made_before],
        }
    )
    parts = [[(graph.places[one.place].path, one.weight) for one in s.parts] for s in graph.sites]
    assert parts == [[("b", 116)], [("b", 116)]]


def test_sites_that_an_earlier_graph_left_behind_are_dropped():
    graph, _ = graph_of(
        {
            "triton_0:2": [frame(1, 8, base=1)],
            "extern_kernels.mm:1": [frame(1, 8, base=0)],
            "triton_0:3": [],
        }
    )
    assert [site.name for site in graph.sites] == ["triton_0", "triton_0"]


def test_a_graph_without_frames_was_not_recorded():
    graph, _ = graph_of({"triton_0:1": ['  File "m.py", line 1, in forward\n']})
    assert graph.sites is None


@pytest.mark.parametrize(
    ("expression", "root", "path"),
    [
        ("L['self'].blocks.0.fc", "L['self']", "blocks.0.fc"),
        ("L['self'].blocks[0].fc", "L['self']", "blocks.0.fc"),
        ("L['self']._modules['blocks']._modules['0']", "L['self']", "blocks.0"),
        ("G['model']", "G['model']", ""),
        ("L['fn'].__self__.0.fc", "L['fn'].__self__", "0.fc"),
        ("L['self']._orig_mod.a._checkpoint_wrapped_module.b", "L['self']", "a.b"),
    ],
)
def test_expressions_of_dynamo_are_paths(expression, root, path):
    place = place_of("Linear", expression)
    assert (place.root, place.path) == (root, path)


def test_a_look_up_reads_no_more_than_it_finds():
    make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx
    table, rows = torch.ones(1000, 4), torch.tensor([1, 2, 3])
    graph = make_fx(lambda table, rows: torch.embedding(table, rows))(table, rows).graph
    write_frames(graph, {})
    (trace,) = (n.meta["stack_trace"] for n in graph.nodes if n.op == "call_function")
    graph, _ = graph_of({f"triton_0:{1 << 40}": [trace]})  # behind all sites of this process
    assert graph.sites[0].parts[0].weight == 48 + 48 + 24  # written, read, and the indices


def test_sizes_of_tensors():
    node = type("Node", (), {"meta": {"val": (torch.ones(3, 4), torch.ones(2, dtype=torch.int8))}})
    assert bytes_of(node) == 50
    assert np.prod([hint_of(3)]) == 3
