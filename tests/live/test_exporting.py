"""Backward labels come with the export: PyTorch's own file, and the spans of ``show -o`` in it."""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import gc
import gzip
import inspect
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from functools import partial, wraps
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.utils.checkpoint import checkpoint

import backspot
from backspot.commands import main
from backspot.trace.profiler import exported as exported_for_reading
from support import preloaded
from support.leftovers import left_in_torch
from support.modules import Residual
from support.tracks import added_of, assert_nested, original_within, slices_of, text_of

WITHOUT_HOOKS = True  # labels come later with the default hooks alone
CPU = [ProfilerActivity.CPU]
KINETO = torch.autograd.profiler.profile


@pytest.fixture
def untouched(tmp_path, monkeypatch):
    """The files that PyTorch itself has written, in order: copied before anything else happens."""
    copies = []
    export = KINETO.export_chrome_trace

    @wraps(export)
    def copying(self, path, *args, **kwargs):
        result = export(self, path, *args, **kwargs)
        copies.append(tmp_path / f"untouched{len(copies)}.json")
        shutil.copy(path, copies[-1])
        return result

    monkeypatch.setattr(KINETO, "export_chrome_trace", copying)
    return copies


def spans(text):
    """Of each track: every span's name, start, end and depth."""
    found = {}
    for track, slices in slices_of(added_of(text)).items():
        depth = {}
        for one in slices:
            depth[id(one)] = 1 + depth[id(one.around)] if one.around else 0
        found[track] = [(one.name, one.start, one.end, depth[id(one)]) for one in slices]
    return found


def names(path):
    """The names of all spans that were added to a file."""
    return [span[0] for track in spans(text_of(path)).values() for span in track]


def markers(path):
    """The backward labels that were written while the profiler recorded."""
    events = json.loads(text_of(path))["traceEvents"]
    return [e["name"] for e in events if e["ph"] == "X" and e["name"].startswith("backward: ")]


def assert_labelled_as_by_show(exported, plain, tmp_path):
    """The file has the spans and arrows of ``backspot show PLAIN -o``, and else PyTorch's bytes."""
    shown = tmp_path / "shown.trace.json"
    assert main(["show", str(plain), "-o", str(shown), "--force"]) == 0
    text, told = text_of(exported), shown.read_bytes()
    assert spans(text) == spans(told)
    assert any(spans(text).values())
    assert_nested(text)

    def without_costs(events):
        return [{k: v for k, v in e.items() if k != "args" or e["ph"] == "M"} for e in events]

    assert without_costs(added_of(text)) == without_costs(added_of(told))
    assert original_within(text)[0] == plain.read_bytes()


# Models ------------------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return self.head(x)


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x, depth=2):
        return self.fc(x) if not depth else torch.sigmoid(self(self.fc(x), depth - 1))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Parts(nn.Module):
    """Outputs in containers, used far from where they were made."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.join = nn.Linear(6, 3), nn.Linear(6, 3), nn.Bilinear(3, 3, 2)

    def forward(self, x):
        made = {"left": self.left(x), "right": [self.right(x)]}
        return self.join(made["left"], made["right"][0]) + made["left"].sum()


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells, self.head = kind(6, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.cells(x.unsqueeze(0))[0])


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.norm, self.fc = nn.Embedding(9, 6), nn.LayerNorm(6), nn.Linear(6, 9)

    def forward(self, x):
        return self.fc(self.norm(self.tokens(torch.arange(8) % 9)))


class Named(nn.Module):
    """Paths with letters that PyTorch cannot write, and with what the grammar uses."""

    def __init__(self):
        super().__init__()
        self.add_module("层", nn.Linear(6, 6))
        self.add_module("a (b) #2", nn.Linear(6, 2))

    def forward(self, x):
        return self.get_submodule("a (b) #2")(self.get_submodule("层")(x))


def image_net(*layers):
    return nn.Sequential(*layers, nn.Flatten())


MODELS = {
    "nested": lambda: nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())),
    "residual, in place": lambda: image_net(Residual(), Residual()),
    "shared": Shared,
    "recursive": Recursive,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "parts": Parts,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "embedding": Embeds,
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 12, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0), 2, enable_nested_tensor=False
    ),
    "parametrized": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.PReLU()
    ),
    "groups": lambda: image_net(nn.Conv2d(3, 6, 3, groups=3), nn.GroupNorm(2, 6), nn.MaxPool2d(2)),
    "transposed": lambda: image_net(nn.ConvTranspose2d(3, 3, 2, stride=2), nn.AvgPool2d(2)),
    "identities": lambda: nn.Sequential(nn.Identity(), nn.Linear(6, 2), nn.Dropout(0.0)),
    "names": Named,
    "alone": lambda: nn.Linear(6, 2),
}
QUICK = ("nested", "checkpointed, reentrant", "shared", "names")
TIMM = ("vit_tiny_patch16_224", "resnet18", "convnext_atto", "mobilenetv3_small_050")


def inputs_of(name, model):
    is_image = name in TIMM or any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))
                                   for m in model.modules())  # fmt: skip
    return torch.randn(2, 3, 8, 8) if is_image else torch.randn(8, 6)


def stepping(model, x):
    def step():
        model(x.clone().requires_grad_()).square().sum().backward()

    return step


def net():
    torch.manual_seed(0)
    return MODELS["nested"]()


def step_of(model):
    return stepping(model, torch.randn(8, 6))


WHOLE = [  # of ``net``
    "backward: (outside model)",
    "backward: (Sequential)",
    "backward: 1 (Sequential)",
    "backward: 1.1 (Tanh)",
    "backward: 1.0 (Linear)",
    "backward: 0 (Linear)",
]


@pytest.mark.parametrize(
    "name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in MODELS]
)
def test_the_exported_spans_are_those_of_show(name, untouched, tmp_path, capsys):
    torch.manual_seed(0)
    model = MODELS[name]()
    step = stepping(model, inputs_of(name, model))
    with backspot.instrument(model), profile(activities=CPU) as profiler:
        for _ in range(2):
            step()
            profiler.step()
    exported = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(exported))
    assert_labelled_as_by_show(exported, *untouched, tmp_path)
    assert markers(exported) == []
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("depth", [None, 2])
@pytest.mark.parametrize("name", TIMM)
def test_the_exported_spans_of_a_real_model_are_those_of_show(name, depth, untouched, tmp_path):
    timm = pytest.importorskip("timm")
    options = {"img_size": 32} if name.startswith("vit") else {}
    model = timm.create_model(name, num_classes=5, **options)
    images = torch.randn(2, 3, 32, 32)
    with backspot.instrument(model, depth=depth), profile(activities=CPU) as profiler:
        model(images).sum().backward()
    exported = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(exported))
    assert_labelled_as_by_show(exported, *untouched, tmp_path)
    paths = [one.rpartition(" (")[0].removeprefix("backward: ") for one in names(exported)]
    assert max(path.count(".") for path in paths) > 1 if depth is None else paths


# When and how it is exported ---------------------------------------------------------------------


def test_a_packed_export_has_them_too(untouched, tmp_path):
    model = net()
    with backspot.instrument(model), profile(activities=CPU) as profiler:
        step_of(model)()
    exported = tmp_path / "trace.json.gz"
    assert profiler.export_chrome_trace(str(exported)) is None
    assert gzip.decompress(exported.read_bytes())
    assert_labelled_as_by_show(exported, *untouched, tmp_path)


def test_each_cycle_of_a_schedule_has_its_own(untouched, tmp_path):
    model, exported = net(), []
    step = step_of(model)

    def ready(profiler):
        exported.append(tmp_path / f"cycle{len(exported)}.json")
        profiler.export_chrome_trace(str(exported[-1]))

    cycles = schedule(wait=1, warmup=1, active=1, repeat=3)
    with (
        backspot.instrument(model),
        profile(activities=CPU, schedule=cycles, on_trace_ready=ready) as profiler,
    ):
        for _ in range(9):
            step()
            profiler.step()
    assert len(exported) == len(untouched) == 3
    for file, plain in zip(exported, untouched, strict=True):
        assert_labelled_as_by_show(file, plain, tmp_path)
        assert names(file) == WHOLE


@pytest.mark.parametrize("packed", [False, True])
def test_the_handler_of_tensorboard_writes_them(packed, tmp_path):
    model = net()
    handler = tensorboard_trace_handler(str(tmp_path), use_gzip=packed)
    with backspot.instrument(model), profile(activities=CPU, on_trace_ready=handler):
        step_of(model)()
    (file,) = tmp_path.iterdir()
    assert names(file) == WHOLE


@pytest.mark.parametrize("compiled", [True, False])
def test_a_model_that_is_instrumented_within_a_profile_and_removed_before_its_end(
    compiled, tmp_path
):
    model = net()
    step = step_of(model)
    with profile(activities=CPU) as profiler:
        step()
        handle = backspot.instrument(model, compiled=compiled)
        step()
        handle.remove()
        step()
        assert left_in_torch() != []  # the end of this profile is waited for
    assert left_in_torch() == []
    del model, step, handle
    gc.collect()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert [one for one in names(tmp_path / "trace.json") if "outside" not in one] == WHOLE[1:]
    with profile(activities=CPU) as profiler:
        step_of(net())()
    profiler.export_chrome_trace(str(tmp_path / "later.json"))
    assert names(tmp_path / "later.json") == []


def test_the_profiler_of_autograd_exports_them_itself(untouched, tmp_path):
    model = net()
    with backspot.instrument(model), KINETO() as profiler:
        step_of(model)()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert_labelled_as_by_show(tmp_path / "trace.json", *untouched, tmp_path)


@pytest.mark.skipif(
    "acc_events" not in inspect.signature(profile).parameters,
    reason="this PyTorch keeps those of one cycle",
)
def test_a_profiler_that_keeps_the_events_of_all_cycles_has_them_in_each_export(tmp_path):
    model, exported = net(), []
    step = step_of(model)

    def ready(profiler):
        exported.append(tmp_path / f"cycle{len(exported)}.json")
        profiler.export_chrome_trace(str(exported[-1]))

    cycles = schedule(wait=0, warmup=1, active=1, repeat=2)
    options = {"schedule": cycles, "on_trace_ready": ready, "acc_events": True}
    with backspot.instrument(model), profile(activities=CPU, **options) as profiler:
        for _ in range(4):
            step()
            profiler.step()
    assert [names(file) for file in exported] == [WHOLE, WHOLE]


def test_a_profile_of_all_threads_has_them_too(tmp_path):
    config = torch._C._profiler._ExperimentalConfig
    try:
        options = {"experimental_config": config(profile_all_threads=True)}
    except TypeError:
        pytest.skip("this PyTorch cannot profile all threads")
    model = net()
    with backspot.instrument(model), profile(activities=CPU, **options) as profiler:
        step_of(model)()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert names(tmp_path / "trace.json") == WHOLE
    assert markers(tmp_path / "trace.json") == []


def test_two_profilers_and_two_instrumentations_do_not_mix(tmp_path):
    first, second = net(), nn.Sequential(nn.Linear(6, 6))
    with backspot.instrument(first):
        with profile(activities=CPU) as one:
            step_of(first)()
        with backspot.instrument(second, name="second"), profile(activities=CPU) as two:
            step_of(second)()
            step_of(first)()
    with profile(activities=CPU) as three:
        step_of(first)()
    for name, profiler in (("three", three), ("two", two), ("one", one)):
        profiler.export_chrome_trace(str(tmp_path / f"{name}.json"))
    assert names(tmp_path / "one.json") == WHOLE
    assert "backward: second.0 (Linear)" in names(tmp_path / "two.json")
    assert set(WHOLE) < set(names(tmp_path / "two.json"))
    assert names(tmp_path / "three.json") == []


def test_where_no_label_was_written_an_export_is_pytorchs_own(untouched, tmp_path):
    model, other = net(), nn.Linear(6, 2)
    for instrumented, run in (
        (lambda: backspot.instrument(model), step_of(other)),  # another model trains
        (lambda: backspot.instrument(model), lambda: model(torch.randn(8, 6))),  # no backward
        (lambda: backspot.instrument(model, markers=False), step_of(model)),
    ):
        with instrumented(), profile(activities=CPU) as profiler:
            run()
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
        assert (tmp_path / "trace.json").read_bytes() == untouched[-1].read_bytes()


def test_what_shows_a_trace_again_writes_costs_into_the_same_spans(tmp_path):
    model = net()
    with backspot.instrument(model), profile(activities=CPU) as profiler:
        step_of(model)()
    exported, shown = tmp_path / "trace.json", tmp_path / "shown.json"
    report = backspot.locate(profiler)
    profiler.export_chrome_trace(str(exported))
    assert backspot.locate(exported, trace=shown).coverage == report.coverage
    assert spans(shown.read_bytes()) == spans(exported.read_bytes())
    assert any("share of the backward" in one.get("args", ()) for one in added_of(text_of(shown)))


def test_locate_labels_a_profile_with_costs_by_its_one_export(tmp_path):
    model = net()
    with backspot.instrument(model), profile(activities=CPU) as profiler:
        step_of(model)()
    backspot.locate(profiler, trace=tmp_path / "trace.json")
    assert names(tmp_path / "trace.json") == WHOLE
    text = (tmp_path / "trace.json").read_bytes()
    assert any("share of the backward" in one.get("args", ()) for one in added_of(text))
    with pytest.raises(backspot.UsageError, match="exported already"):
        backspot.locate(profiler, trace=tmp_path / "again.json")


def test_whoever_reads_an_export_gets_pytorchs_own_file():
    model = net()
    with backspot.instrument(model), profile(activities=CPU) as profiler:
        step_of(model)()
    with exported_for_reading(profiler) as path:
        assert names(path) == []


# The profiler is as before -----------------------------------------------------------------------


@pytest.fixture
def own_export(monkeypatch):
    """PyTorch's own export, whatever profilers of other tests wait for theirs."""
    gc.collect()
    monkeypatch.setattr(KINETO, "export_chrome_trace", inspect.unwrap(KINETO.export_chrome_trace))


@pytest.mark.usefixtures("own_export")
def test_a_profiler_keeps_no_model_alive_and_nothing_keeps_a_profiler():
    model = net()
    with backspot.instrument(model), KINETO() as profiler:
        step_of(model)()
    gone, held = weakref.ref(model), weakref.ref(profiler)
    del model
    gc.collect()
    assert gone() is None
    plain = KINETO.export_chrome_trace.__wrapped__
    gc.disable()  # a circle would live on
    try:
        del profiler
        assert held() is None
        assert KINETO.export_chrome_trace is plain
    finally:
        gc.enable()


def recorded():
    """A profiler of autograd, with labels in its trace."""
    model = net()
    with backspot.instrument(model), KINETO() as profiler:
        step_of(model)()
    return profiler


@pytest.mark.parametrize(
    "taken",
    [
        lambda profiler: profiler.export_chrome_trace,
        lambda profiler: copy.copy(profiler).export_chrome_trace,
        lambda profiler: partial(KINETO.export_chrome_trace, profiler),
    ],
    ids=["method", "copy", "function"],
)
def test_what_was_taken_from_a_profiler_exports_after_it_is_gone(taken, tmp_path):
    export = taken(recorded())
    gc.collect()
    export(str(tmp_path / "trace.json"))
    assert names(tmp_path / "trace.json") == WHOLE


@pytest.mark.usefixtures("own_export")
def test_nothing_is_on_a_profiler_and_nothing_is_left_after_its_export(tmp_path):
    plain = KINETO.export_chrome_trace
    with KINETO() as other:
        step_of(net())()
    profiler = recorded()
    assert vars(profiler).keys() == vars(other).keys()
    assert inspect.signature(profiler.export_chrome_trace) == inspect.signature(
        plain.__get__(profiler)
    )
    other.export_chrome_trace(str(tmp_path / "other.json"))
    assert names(tmp_path / "other.json") == []
    assert KINETO.export_chrome_trace is not plain
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert KINETO.export_chrome_trace is plain


def test_other_code_may_wrap_the_export_and_put_back_what_it_found(tmp_path):
    plain, calls = KINETO.export_chrome_trace, []

    def counting(self, *args, **kwargs):
        calls.append(args)
        return within(self, *args, **kwargs)

    first = recorded()
    within = KINETO.export_chrome_trace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KINETO, "export_chrome_trace", counting)
        first.export_chrome_trace(str(tmp_path / "first.json"))
        second = recorded()
        second.export_chrome_trace(str(tmp_path / "second.json"))
        patch.setattr(KINETO, "export_chrome_trace", plain)
        third = recorded()
        third.export_chrome_trace(str(tmp_path / "third.json"))
        patch.setattr(KINETO, "export_chrome_trace", plain)
    assert len(calls) == 2
    for name in ("first", "second", "third"):
        assert names(tmp_path / f"{name}.json") == WHOLE
    KINETO.export_chrome_trace = plain  # what the block has put back was ours


def test_a_copy_of_a_profiler_exports_as_the_profiler(tmp_path):
    model = net()
    with backspot.instrument(model):
        assert pickle.loads(pickle.dumps(profile(activities=CPU))).profiler is None
        with profile(activities=CPU) as profiler:
            step_of(model)()
    copied = copy.copy(profiler)
    del profiler
    copied.export_chrome_trace(str(tmp_path / "trace.json"))
    assert names(tmp_path / "trace.json") == WHOLE


def test_an_export_raises_what_it_did(tmp_path):
    def outcomes(around):
        model = net()
        with around(model), profile(activities=CPU) as profiler:
            step_of(model)()
        for arguments in ((), (str(tmp_path / "a.json"), 1, 2, 3), (7,)):
            with pytest.raises(TypeError) as refused:
                profiler.profiler.export_chrome_trace(*arguments)
            yield str(refused.value).partition("Invoked with")[0]
        profiler.export_chrome_trace(str(tmp_path / "a.json"))
        before = (tmp_path / "a.json").read_bytes()
        with pytest.raises(RuntimeError) as refused:
            profiler.export_chrome_trace(str(tmp_path / "a.json"))
        assert (tmp_path / "a.json").read_bytes() == before
        yield str(refused.value)
        yield inspect.signature(type(profiler.profiler).export_chrome_trace)

    plain = list(outcomes(lambda model: backspot.instrument(model, markers=False)))
    assert list(outcomes(backspot.instrument)) == plain


def test_what_else_a_profiler_tells_is_as_without_backward_labels(tmp_path):
    told = {}
    for kind in (None, False):
        model = net()
        with backspot.instrument(model, markers=kind), profile(activities=CPU) as profiler:
            step_of(model)()
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
        averages = {one.key: one.count for one in profiler.key_averages()}
        told[kind] = averages, sorted(event.name for event in profiler.events())
    assert told[None] == told[False]
    assert "forward: 1.1 (Tanh)" in told[None][0]
    assert not [name for name in told[None][1] if name.startswith("backward: ")]


def test_stacks_are_exported_as_before(tmp_path):
    model = net()
    with backspot.instrument(model), profile(activities=CPU, with_stack=True) as profiler:
        step_of(model)()
    profiler.export_stacks(str(tmp_path / "stacks.txt"))
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert (tmp_path / "stacks.txt").exists()
    assert names(tmp_path / "trace.json") == WHOLE


# Live markers ------------------------------------------------------------------------------------


def marked(tensor):
    """Whether the node that made a tensor has a marker."""
    return "backspot" in tensor.grad_fn.metadata


def test_what_writes_no_trace_has_markers_while_it_records(tmp_path):
    model, x = net(), torch.randn(8, 6)
    with backspot.instrument(model), torch.autograd.profiler.emit_itt():
        assert marked(model(x))
    with backspot.instrument(model), profile(activities=CPU) as profiler:
        assert not marked(model(x))  # the session of another kind has left nothing
        model(x).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "backward: 1.1 (Tanh)" in names(tmp_path / "trace.json")
    assert left_in_torch() == []


def test_the_profiler_before_kineto_has_markers_in_its_events():
    model = net()
    with backspot.instrument(model), torch.autograd.profiler_legacy.profile() as profiler:
        step_of(model)()
    told = {event.name for event in profiler.function_events}
    assert {"forward: 1.1 (Tanh)", "backward: 1.1 (Tanh)"} <= told


@pytest.mark.parametrize("options", [{"markers": True}, {"hooks": "module"}])
def test_who_asks_for_markers_gets_them_and_pytorchs_own_file(options, untouched, tmp_path):
    model = net()
    with backspot.instrument(model, **options), profile(activities=CPU) as profiler:
        step_of(model)()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "backward: 1.1 (Tanh)" in markers(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_bytes() == untouched[0].read_bytes()
    assert any(one.key == "backward: 1.1 (Tanh)" for one in profiler.key_averages())


def test_a_handle_says_when_backward_labels_are_written():
    model = net()
    for options, told in (
        ({}, (None, "")),
        ({"markers": True}, (True, ", markers=True")),
        ({"markers": False}, (False, ", markers=False")),
        ({"hooks": "module"}, (True, "")),
    ):
        with backspot.instrument(model, **options) as handle:
            assert (handle.markers, repr(handle).partition("'")[2].partition("'")[2]) == (
                told[0],
                f"{told[1]})",
            )


# What goes wrong ---------------------------------------------------------------------------------


def assert_own_file(path, untouched, err, why):
    """PyTorch's file is there, nothing lies beside it, and one line says why."""
    assert path.read_bytes() == untouched.read_bytes()
    assert not list(path.parent.glob(".backspot*"))
    assert err.count("\n") == 1
    assert err.startswith(f"backspot: {path} stays as PyTorch wrote it, without backward labels: ")
    assert why in err
    assert f"`backspot show {path} -o " in err


@pytest.mark.skipif(
    "use_python_export" not in inspect.signature(KINETO.export_chrome_trace).parameters,
    reason="this PyTorch has one way to export",
)
def test_an_export_by_python_has_pytorchs_own_file_and_says_so_once(untouched, tmp_path, capsys):
    model, path = net(), tmp_path / "trace.json"
    said = []
    with backspot.instrument(model):
        for _ in range(2):
            with profile(activities=CPU) as profiler:
                step_of(model)()
            profiler.export_chrome_trace(str(path), use_python_export=True)
            said.append(capsys.readouterr().err)
    assert said[1] == ""
    if said[0]:  # else another test has had the line in this process
        assert_own_file(path, untouched[1], said[0], "use_python_export")
    assert path.read_bytes() == untouched[1].read_bytes()


def test_a_file_that_the_cupti_monitor_completes_is_left_to_it(untouched, tmp_path, capsys):
    """The monitor itself needs a GPU; this is the part of the export that it builds on."""
    config = torch._C._profiler._ExperimentalConfig
    try:
        options = {"experimental_config": config(custom_profiler_config="cupti_monitor")}
    except TypeError:
        pytest.skip("this PyTorch has no CUPTI monitor")
    if not hasattr(options["experimental_config"], "custom_profiler_config"):
        pytest.skip(
            "this PyTorch does not say which profiler is asked for, and has no CUPTI monitor"
        )
    model, path = net(), tmp_path / "trace.json"
    with backspot.instrument(model), KINETO(**options) as profiler:
        step_of(model)()
    profiler.export_chrome_trace(str(path))
    assert_own_file(path, untouched[0], capsys.readouterr().err, "CUPTI monitor")


def signal_main_thread(number):
    """Send a signal as a system does, from another thread, and let the main thread take it."""
    main_thread = threading.main_thread().ident

    def stack():
        frame, places = sys._current_frames()[main_thread], []
        while frame is not None:
            places.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        return places

    before = last = stack()
    signal.pthread_kill(main_thread, number)
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        time.sleep(0.005)
        now = stack()
        if now == last != before:  # it has taken the signal, and waits somewhere else
            return
        last = now


@pytest.mark.posix
def test_what_a_signals_handler_raises_meanwhile_reaches_the_script(untouched, tmp_path, capsys):
    def handler(*_):
        raise TimeoutError("of the script")

    def at_the_spans(frame, event, arg):
        if frame.f_code.co_name == "label_in_place":
            sys.settrace(None)
            signal_main_thread(signal.SIGALRM)

    model, path, tracing = net(), tmp_path / "trace.json", threading.gettrace()
    with backspot.instrument(model), profile(activities=CPU) as profiler:
        step_of(model)()
    before = signal.signal(signal.SIGALRM, handler)
    threading.settrace(at_the_spans)
    try:
        with pytest.raises(TimeoutError, match="of the script"):
            profiler.export_chrome_trace(str(path))
    finally:
        threading.settrace(tracing)
        signal.signal(signal.SIGALRM, before)
    said = capsys.readouterr().err
    assert_own_file(path, untouched[0], said, "interrupted")


def signal_actions():
    """What the system has for each signal: the function in C, and the flags."""
    libc, found = ctypes.CDLL(None), {}
    for number in signal.valid_signals():
        action = ctypes.create_string_buffer(512)
        libc.sigaction(int(number), None, action)
        found[number] = action.raw[:8], action.raw[136:140]  # before and after 1024 bits of mask
    return found


@pytest.mark.posix
def test_an_export_leaves_the_handling_of_signals_as_it_is(tmp_path):
    model, path = net(), tmp_path / "trace.json"
    with backspot.instrument(model), profile(activities=CPU) as profiler:
        step_of(model)()
    handled = signal.SIGUSR1, signal.SIGUSR2
    before = [signal.signal(number, lambda *_: None) for number in handled]
    with (tmp_path / "stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks)  # behind the back of ``signal``
        signal.siginterrupt(signal.SIGUSR1, False)
        try:
            actions = signal_actions()
            profiler.export_chrome_trace(str(path))
            assert signal_actions() == actions
        finally:
            faulthandler.unregister(signal.SIGUSR2)
            for number, handler in zip(handled, before, strict=True):
                signal.signal(number, handler)
    assert names(path) == WHOLE


def test_a_trace_that_is_too_large_has_pytorchs_own_file(tmp_path, capsys, monkeypatch):
    export = KINETO.export_chrome_trace

    def lengthened(self, path):
        export(self, path)
        os.truncate(path, (1 << 30) + 1)  # it takes no room on the disk

    monkeypatch.setattr(KINETO, "export_chrome_trace", lengthened)
    model, path = net(), tmp_path / "trace.json"
    with backspot.instrument(model), profile(activities=CPU) as profiler:
        step_of(model)()
    profiler.profiler.export_chrome_trace(str(path))
    said = capsys.readouterr().err
    assert "1.07 GB" in said
    assert said.count("\n") == 1
    assert path.stat().st_size == (1 << 30) + 1


def test_ranks_that_export_together_need_memory_for_all_their_traces(
    untouched, tmp_path, capsys, monkeypatch
):
    path, profiler = tmp_path / "trace.json", recorded()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10**9))
    profiler.export_chrome_trace(str(path))
    assert_own_file(path, untouched[0], capsys.readouterr().err, "of memory are needed")


def test_a_file_that_other_code_has_packed_stays_packed(tmp_path, capsys, monkeypatch):
    export = KINETO.export_chrome_trace

    def packing(self, path):
        export(self, path)
        Path(path).write_bytes(gzip.compress(Path(path).read_bytes()))
        shutil.copy(path, tmp_path / "packed.json.gz")

    monkeypatch.setattr(KINETO, "export_chrome_trace", packing)
    path, profiler = tmp_path / "trace.json.gz", recorded()
    profiler.export_chrome_trace(str(path))
    assert_own_file(path, tmp_path / "packed.json.gz", capsys.readouterr().err, "packed it already")


def test_a_line_names_no_file_that_is_soon_gone(tmp_path, capsys, monkeypatch):
    """PyTorch packs a temporary file."""
    model, path = net(), tmp_path / "trace.json.gz"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10**9))
    with backspot.instrument(model), profile(activities=CPU) as profiler:
        step_of(model)()
    profiler.export_chrome_trace(str(path))
    said = capsys.readouterr().err
    assert said.startswith("backspot: the exported trace stays as PyTorch wrote it, without ")
    assert "`backspot show TRACE -o " in said
    assert names(path) == []


def test_without_standard_error_nothing_is_said(tmp_path, capsys, monkeypatch):
    profiler = recorded()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10**9))
    monkeypatch.setattr(sys, "stderr", None)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert capsys.readouterr().out == ""
    assert names(tmp_path / "trace.json") == []


def test_a_file_that_pytorch_could_not_write_whole_stays_as_it_is(tmp_path, capsys, monkeypatch):
    export = KINETO.export_chrome_trace

    def cut(self, path):
        export(self, path)
        os.truncate(path, Path(path).stat().st_size - 300)
        shutil.copy(path, tmp_path / "cut.json")

    monkeypatch.setattr(KINETO, "export_chrome_trace", cut)
    model, path = net(), tmp_path / "trace.json"
    with backspot.instrument(model), profile(activities=CPU) as profiler:
        step_of(model)()
    profiler.profiler.export_chrome_trace(str(path))
    assert_own_file(path, tmp_path / "cut.json", capsys.readouterr().err, "cut short")


def test_an_older_trace_stays_as_it_is_where_an_export_writes_nothing(tmp_path, capsys):
    """PyTorch raises nothing then."""
    model, path = net(), tmp_path / "trace.json"
    with profile(activities=CPU) as profiler:
        step_of(model)()
    profiler.export_chrome_trace(str(path))
    older = path.read_bytes()
    path.with_name("trace.json.tmp").mkdir()  # the name that Kineto writes to
    with backspot.instrument(model), profile(activities=CPU) as profiler:
        step_of(model)()
    profiler.export_chrome_trace(str(path))
    assert path.read_bytes() == older
    assert capsys.readouterr().err == ""
    path.with_name("trace.json.tmp").rmdir()
    with backspot.instrument(model), profile(activities=CPU) as profiler:
        step_of(model)()
    profiler.export_chrome_trace(str(path))  # this one is written, in the older one's place
    assert names(path) == WHOLE


def test_a_file_that_is_named_by_its_url_has_them_too(tmp_path):
    model, path = net(), tmp_path / "trace.json"
    with backspot.instrument(model), profile(activities=CPU) as profiler:
        step_of(model)()
    profiler.export_chrome_trace(f"file://{path}")
    assert names(path) == WHOLE


FULL = """
    import os, resource, shutil, sys
    import torch
    import backspot

    kineto = torch.autograd.profiler.profile
    export = kineto.export_chrome_trace

    def then_full(self, path, *args, **kwargs):
        result = export(self, path, *args, **kwargs)
        shutil.copy(path, "untouched.json")
        room = os.path.getsize(path) + 200
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        return result

    kineto.export_chrome_trace = then_full
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh())
    with backspot.instrument(model), torch.profiler.profile() as profiler:
        model(torch.randn(8, 6)).sum().backward()
    profiler.export_chrome_trace(sys.argv[1])
    print("the training goes on")
"""


@pytest.mark.slow
@pytest.mark.posix
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_disk_that_is_full_keeps_pytorchs_own_file(name, tmp_path):
    command = [*preloaded.python(), preloaded.WHOLE, "-c", textwrap.dedent(FULL), name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == "the training goes on\n"
    said = [line for line in done.stderr.splitlines() if line.startswith("backspot: ")]
    assert len(said) == 1
    assert "without backward labels" in said[0]
    assert "too large" in said[0]  # as the system says of a file beyond the limit
    assert text_of(tmp_path / name) == (tmp_path / "untouched.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "untouched.json"]


@pytest.mark.posix
@pytest.mark.parametrize("every", [pytest.param(5, marks=pytest.mark.slow), 67])
def test_an_interrupt_at_any_line_leaves_a_whole_file(every, untouched, tmp_path, capsys, request):
    """PyTorch's own or the labelled one, and nothing beside it; the interrupt goes on."""
    if every == 5 and request.config.getoption("--every-bytecode"):
        every = 1
    home = Path(backspot.__file__).parent
    files = {str(home / name) for name in ("live/exporting.py", "render/labelled_trace.py",
                                           "render/files.py", "pipeline.py")}  # fmt: skip

    def interrupting(number):
        def enter(frame, event, arg):
            return count if frame.f_code.co_filename in files else None

        def count(frame, event, arg):
            nonlocal number
            number -= event == "line"
            if number == 0 and event == "line":
                sys.settrace(None)
                if threading.current_thread() is threading.main_thread():
                    raise KeyboardInterrupt
                signal_main_thread(signal.SIGINT)
            return count

        return enter

    # What starts tests in the background may have them ignore it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    model, path = nn.Linear(6, 2), tmp_path / "trace.json"
    tracing = sys.gettrace(), threading.gettrace()
    step, outcomes, number, interrupted = step_of(model), set(), 1 - every, True
    while interrupted:
        number += every
        with backspot.instrument(model), profile(activities=CPU) as profiler:
            step()
        path.unlink(missing_ok=True)
        written = len(untouched)
        at_lines = interrupting(number)
        threading.settrace(at_lines)
        sys.settrace(at_lines)
        try:
            profiler.export_chrome_trace(str(path))
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(tracing[0])
            threading.settrace(tracing[1])
        if len(untouched) == written:  # before the export itself
            assert not path.exists()
            continue
        own = path.read_bytes() == untouched[-1].read_bytes()
        assert own or names(path)
        assert not list(tmp_path.glob(".backspot*"))
        outcomes.add((interrupted, own))
        assert capsys.readouterr().err.count("\n") <= 1
    assert (False, False) in outcomes
    if every <= 5:  # longer strides may miss the lines at which PyTorch's file alone is there
        assert (True, True) in outcomes
    assert left_in_torch() == []
