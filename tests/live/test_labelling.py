"""Which labels a trace holds, where they stand, and whose they are."""

import re
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import backspot
from backspot.errors import UsageError
from backspot.live.calls import current_thread
from support.blocks import Block, Net, step
from support.leftovers import hooks_on
from support.training import cpu_profile


def test_forward_labels_nest_as_the_calls_do(record):
    model = Net()
    with backspot.instrument(model):
        recording = record(step(model))
    parents = {
        label.name: recording.parent(label)
        for label in recording.labels
        if label.name.startswith("forward: ")
    }
    assert parents == {
        "forward: (Net)": None,
        "forward: blocks (Sequential)": "forward: (Net)",
        "forward: blocks.0 (Block)": "forward: blocks (Sequential)",
        "forward: blocks.0.fc (Linear)": "forward: blocks.0 (Block)",
        "forward: blocks.0.act (GELU)": "forward: blocks.0 (Block)",
        "forward: blocks.1 (Block)": "forward: blocks (Sequential)",
        "forward: blocks.1.fc (Linear)": "forward: blocks.1 (Block)",
        "forward: blocks.1.act (GELU)": "forward: blocks.1 (Block)",
        "forward: head (Linear)": "forward: (Net)",
    }


def test_depth_limits_the_levels_of_modules(record):
    model = Net()
    with backspot.instrument(model, depth=1, markers=True) as instrumentation:
        assert instrumentation.paths == ("", "blocks", "head")
        assert record(step(model)).names == [
            "forward: (Net)",
            "forward: blocks (Sequential)",
            "forward: head (Linear)",
            "backward: head (Linear)",
            "backward: (Net)",
            "backward: blocks (Sequential)",
        ]
    with backspot.instrument(model, depth=0, markers=True) as instrumentation:
        assert instrumentation.paths == ("",)


class Decoder(nn.Module):
    """The layers lie in a list and a dict, as in many models of transformers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norms = nn.ModuleDict({"last": nn.LayerNorm(4)})

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norms["last"](x)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Decoder()
        self.lm_head = nn.Linear(4, 2)

    def forward(self, x):
        return self.lm_head(self.model(x))


@pytest.mark.parametrize("depth", range(4))
def test_a_list_of_layers_that_is_never_called_is_no_level(depth):
    blocks = {"model.layers.0", "model.layers.1", "model.norms.last"}
    inner = {f"model.layers.{number}.{name}" for number in range(2) for name in ("fc", "act")}
    levels = [{""}, {"model", "lm_head"}, blocks, inner]
    expected = set().union(*levels[: depth + 1])
    model = Language()
    with backspot.instrument(model, depth=depth) as instrumentation:
        assert {path for path in instrumentation.paths if path[-6:] != "layers"} - {
            "model.norms"
        } == expected
    whole = backspot.profile(step(model), model, steps=1, warmup=1)
    folded = whole.top(depth=depth)
    assert {row.path for row in folded if row.is_module} == expected
    assert sum(row.wall_ns for row in folded) == whole.wall_ns
    less = backspot.profile(step(model), model, steps=1, warmup=1, depth=depth)
    assert {row.path for row in less.modules if row.is_module} == expected


def test_a_pattern_chooses_modules_and_the_rest_is_the_models(record):
    model = Language()
    with backspot.instrument(model, match="model.layers.*") as instrumentation:
        assert instrumentation.paths == ("", "model.layers.0", "model.layers.1")
        assert instrumentation.match == ("model.layers.*",)
        assert "match=['model.layers.*']" in repr(instrumentation)
        assert record(step(model)).forward() == [
            "forward: (Language)",
            "forward: model.layers.0 (Block)",
            "forward: model.layers.1 (Block)",
        ]
    with backspot.instrument(model, match=["**.fc", "net.lm_*"], name="net", depth=2) as labels:
        assert labels.paths == ("net", "net.lm_head")


def test_a_pattern_labels_what_it_shows():
    model = Language()

    def located(**options):
        with backspot.instrument(model, **options), cpu_profile() as profiler:
            step(model)()
        return backspot.locate(profiler)

    for match in ("model.layers.*", ["**.act", "model"], "**", "lm_head"):
        chosen, whole = located(match=match), located()
        shown = whole.top(match=match)
        assert sum(row.wall_ns for row in shown) == whole.wall_ns

        def counts(rows):
            return {row.path: {node.name: node.count for node in row.nodes} for row in rows}

        assert counts(chosen.modules) == counts(shown)


@pytest.mark.parametrize(
    ("match", "said"),
    [
        ("model.layer.*", "match='model.layer.*' matches no module; did you mean 'model.layers.*'"),
        ("model.layers", "match='model.layers' matches no module; did you mean 'model.layers.*'"),
        (["**", "x"], "match='x' matches no module"),
        (3, "match=3: give a pattern"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(match, said):
    model = Language()
    with pytest.raises(UsageError, match=re.escape(said)):
        backspot.instrument(model, match=match)
    assert not hooks_on(model)


def test_a_list_with_a_forward_of_its_own_is_a_level():
    class Chain(nn.ModuleList):
        def forward(self, x):
            return self[0](x)

    model = nn.Sequential(Chain([nn.Linear(4, 4)]), nn.ModuleList([nn.Linear(4, 4)]))
    model[1].forward = model[1][0].forward
    with backspot.instrument(model, depth=1) as instrumentation:
        assert instrumentation.paths == ("", "0", "1")


def test_a_name_tells_instrumented_modules_apart(record):
    model, loss = Net(), nn.MSELoss()
    with (
        backspot.instrument(model, markers=True),
        backspot.instrument(loss, name="loss", markers=True),
    ):
        recording = record(lambda: loss(model(torch.randn(3, 4)), torch.zeros(3, 2)).backward())
    assert recording.forward()[-1] == "forward: loss (MSELoss)"
    assert recording.backward()[:2] == ["backward: loss (MSELoss)", "backward: head (Linear)"]


def test_nothing_is_written_without_a_profiler_and_labels_come_with_the_next(record):
    model = Net()
    with backspot.instrument(model):
        step(model)()
        assert len(record(step(model)).forward()) == 9


def test_a_backward_without_its_forward_in_the_window_has_no_labels(record):
    model = Net()
    with backspot.instrument(model):
        loss = model(torch.randn(3, 4)).sum()
        assert record(loss.backward).names == []


def test_repeated_calls_are_numbered_within_one_outermost_forward(record):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(self.fc(self.fc(x)))

    model = Shared()
    with backspot.instrument(model):
        recording = record(lambda: [step(model)() for _ in range(2)])
    assert recording.forward() == 2 * [
        "forward: (Shared)",
        "forward: fc (Linear)",
        "forward: fc (Linear) #2",
        "forward: fc (Linear) #3",
    ]


def test_a_shared_module_has_its_first_path(record):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh())
    model[2] = model[0]
    with backspot.instrument(model) as instrumentation:
        assert instrumentation.paths == ("", "0", "1")
        assert record(step(model)).forward() == [
            "forward: (Sequential)",
            "forward: 0 (Linear)",
            "forward: 1 (Tanh)",
            "forward: 0 (Linear) #2",
        ]


def test_recursion_is_followed(record):
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, times=3):
            x = self.fc(x)
            return x if times == 1 else self(x, times - 1) * 2

    model = Recursive()
    with backspot.instrument(model, markers=True):
        recording = record(step(model))
    assert recording.forward() == [
        "forward: (Recursive)",
        "forward: fc (Linear)",
        "forward: (Recursive) #2",
        "forward: fc (Linear) #2",
        "forward: (Recursive) #3",
        "forward: fc (Linear) #3",
    ]
    inner = next(x for x in recording.labels if x.name == "forward: (Recursive) #3")
    assert recording.parent(inner) == "forward: (Recursive) #2"
    assert recording.backward().count("backward: fc (Linear)") == 3


def test_each_thread_has_its_own_calls(record):
    model = Net()
    meet = threading.Barrier(2, timeout=20)

    def interleave(*_):
        meet.wait()

    model.blocks[0].register_forward_pre_hook(interleave)
    model.head.register_forward_pre_hook(interleave)

    def run():
        threads = [threading.Thread(target=step(model)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with backspot.instrument(model, markers=True):
        recording = record(run, all_threads=True)
    assert recording.forward().count("forward: blocks.0.fc (Linear)") == 2
    assert not [name for name in recording.names if "#" in name]
    assert recording.backward().count("backward: blocks.0.fc (Linear)") == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_labelled_again_when_they_run_again(reentrant, record):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = Checkpointed()
    with backspot.instrument(model, markers=True):
        recording = record(step(model, torch.randn(3, 4, requires_grad=True)))
        assert not current_thread().calls
    assert recording.forward().count("forward: blocks.1 (Block)") == 2
    assert recording.forward().count("forward: blocks.0.fc (Linear)") == 2
    assert "backward: blocks.0.act (GELU)" in recording.backward()
    assert recording.backward()[-1] == "backward: blocks.0.fc (Linear)"


def test_no_grad_and_inference_mode_have_forward_labels_only(record):
    model = Net()
    with backspot.instrument(model):
        with torch.no_grad():
            assert len(record(lambda: model(torch.randn(3, 4))).names) == 9
        with torch.inference_mode():
            assert len(record(lambda: model(torch.randn(3, 4))).names) == 9


def test_lazy_modules_are_labelled(record):
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh())
    with backspot.instrument(model, markers=True):
        names = record(step(model)).names
        assert {"forward: 0 (Linear)", "backward: 1 (Tanh)"} <= {*names}
        assert model[0].weight.shape == (3, 4)


def test_a_parametrized_module_keeps_the_name_of_its_class(record):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    with backspot.instrument(model, markers=True):
        names = record(step(model)).names
    assert {
        "forward: 0 (Linear)",
        "forward: 0.parametrizations.weight (ParametrizationList)",
        "backward: 0.parametrizations.weight.0 (_WeightNorm)",
    } <= {*names}


def test_what_wrappers_add_is_left_out_of_paths(record):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = Net()
    inner.blocks[1] = checkpoint_wrapper(inner.blocks[1])
    # Without devices it calls what it wraps; with some it wants the model on the first.
    model = (
        nn.DataParallel(inner.cuda(), [0]) if torch.cuda.is_available() else nn.DataParallel(inner)
    )
    with backspot.instrument(model) as instrumentation:
        assert not model._forward_hooks
        assert "forward: blocks.1.fc (Linear)" in record(step(model)).names
    assert instrumentation.paths == tuple(path for path, _ in Net().named_modules())


def test_a_scripted_part_is_skipped_and_said_to_be(record):
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Tanh()))
    with backspot.instrument(model) as instrumentation:
        assert instrumentation.paths == ("", "0")
        assert list(instrumentation.skipped) == ["1"]
        assert "1 skipped" in repr(instrumentation)
        assert len(record(step(model)).forward()) == 2


def test_hooks_of_others_run_in_between(record):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[1].register_forward_pre_hook(lambda m, a, k: ((a[0].exp(),), dict(k)), with_kwargs=True)
    model[1].register_forward_hook(lambda m, a, out: out * 2)
    with backspot.instrument(model):
        recording = record(step(model))
        assert not current_thread().calls
    tanh = next(x for x in recording.labels if x.name == "forward: 1 (Tanh)")
    for theirs in ("aten::exp", "aten::mul"):
        assert any(x.name == theirs and tanh.contains(x) for x in recording.events)
