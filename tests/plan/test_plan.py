"""A plan tries settings beside a training, says what they give, and leaves the training alone."""

import os
import random
import signal
import threading
import time
import types
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import backspot
from backspot.live.acts import Living
from backspot.live.plan import loader as loader_trial, planning
from backspot.live.plan.account import Account
from backspot.live.plan.around import on_graphs
from backspot.live.plan.copies import Copy
from backspot.live.plan.planning import Planning
from backspot.live.plan.watching import Watching
from backspot.live.trials.twins import Refused
from backspot.results.costs import Phase
from backspot.results.findings import Finding, Place
from backspot.results.report import changed
from backspot.results.trials import Tried, Variant
from backspot.threads import thread_count
from support import h200
from support.planning import planned, report_of, settings, stepping
from support.trainings import Scaled, Training

pytestmark = pytest.mark.usefixtures("short", "uncompiled")


@pytest.fixture(scope="module")
def report():
    """A report of a step that takes long enough for each of the models here."""
    return report_of(forward=20, backward=30)


class Drawing(nn.Linear):
    """Draws random numbers when it is copied, and from a generator of its class in its forward."""

    own = torch.Generator()

    def __deepcopy__(self, memo):
        made = Drawing(self.in_features, self.out_features)
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x):
        return super().forward(x) + torch.rand(x.shape[0], 1, generator=Drawing.own)


@dataclass
class Batch:
    h: torch.Tensor


class OfBatches(nn.Linear):
    def forward(self, batch):
        batch.h = 0.9 * batch.h + 0.1
        return super().forward(batch.h)


# The training stays as it was ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Training, Scaled])
def test_a_training_goes_on_bit_for_bit_after_a_plan(report, kind):
    plain = kind()
    for _ in range(5):
        plain.step()
    expected = plain.state()
    tried = kind()
    tried.step()
    plan = planned(report, tried.step, tried.model, optimizers=[tried.optimizer])
    for _ in range(3):
        tried.step()
    assert any(one.step_ns for one in plan.rungs), plan.why_not
    assert tried.state() == expected


def test_a_module_that_draws_numbers_when_it_is_copied_leaves_all_generators_as_they_were(report):
    model, x = Drawing(4, 4), torch.randn(8, 4)
    step = stepping(model, x)
    torch.manual_seed(1)
    Drawing.own.manual_seed(1)
    step()
    step()
    expected = torch.get_rng_state(), Drawing.own.get_state()
    torch.manual_seed(1)
    Drawing.own.manual_seed(1)
    step()
    planned(report, step, model)
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert torch.equal(Drawing.own.get_state(), expected[1])


def test_an_object_that_the_model_writes_to_is_the_training_s_alone(report):
    model, batches = OfBatches(4, 4), [Batch(torch.zeros(8, 4)) for _ in range(2)]
    model(batches[0])
    plan = planned(report, stepping(model, batches[1]), model)
    assert plan.why_not == "the model writes to the Batch that it is given"
    assert torch.equal(batches[1].h, batches[0].h)


def test_what_a_model_appends_to_is_the_same_in_each_run(report):
    lengths = []

    class Appending(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.losses = []

        def forward(self, x):
            out = super().forward(x)
            lengths.append(len(self.losses))
            self.losses.append(out.sum())
            return out

    model = Appending()
    step = stepping(model, torch.randn(8, 4))
    plan = planned(report, step, model)
    assert not plan.why_not
    assert len(model.losses) == 1
    assert set(lengths) == {0}


def test_a_call_that_fails_and_is_made_again_with_less_counts_alone(report):
    class Choosy(nn.Linear):
        def forward(self, x):
            if len(x) > 4:
                raise RuntimeError("too much")
            return super().forward(x)

    model = Choosy(4, 4)

    def step():
        model.zero_grad()
        try:
            out = model(torch.randn(8, 4))
        except RuntimeError:
            out = model(torch.randn(4, 4))
        out.sum().backward()

    plan = planned(report, step, model)
    assert not plan.why_not
    assert plan.batch == 4


def test_attention_that_is_not_trained_is_not_watched(report):
    frozen = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    head = nn.Linear(8, 1)
    step = lambda: head(frozen(torch.randn(2, 3, 8))).sum().backward()  # noqa: E731
    plan = planned(report, step, frozen, head)
    assert "the fast path" in plan.why_not


def test_twice_the_batch_is_not_tried_where_the_first_dimension_is_another(report):
    model = nn.LSTM(4, 4)
    step = lambda: model(torch.randn(6, 2, 4))[0].sum().backward()  # noqa: E731
    batch = next(one for one in planned(report, step, model).rungs if one.axis == "batch")
    assert batch.verdict == "not tried"
    assert "first dimension" in batch.note


def test_samples_of_all_calls_of_a_step_count(report):
    model = nn.Linear(4, 4)

    def step():
        for _ in range(4):
            model(torch.randn(8, 4)).sum().backward()

    assert planned(report, step, model).batch == 32


class Recomputing(nn.Linear):
    """Its forward takes much longer than its backward, and runs twice with a checkpoint."""

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.computed, x, use_reentrant=False)

    def computed(self, x):
        with torch.no_grad():
            for _ in range(5):
                x.T @ x
        return super().forward(x)


@pytest.mark.parametrize("verdict", ["helps", "does not help"])
def test_twice_the_batch_has_the_loss_of_the_best_copy_where_a_setting_is_below_it(
    report, monkeypatch, verdict
):
    losses = []
    more = Account.more

    def spied(account, has_device, loss=None):
        losses.append(loss)
        return more(account, has_device, loss)

    monkeypatch.setattr(Account, "more", spied)
    monkeypatch.setattr("backspot.live.plan.comparing.verdict_of", lambda *_: verdict)
    monkeypatch.setattr("backspot.live.plan.settings._precisions", lambda *_: iter(()))
    model, weight = Recomputing(256, 4), torch.randn(4, 2_000)
    step = stepping(model, torch.ones(64, 256), loss=lambda out: (out @ weight).sin().mean())
    plan = planned(report, step, model)
    (loss,) = losses
    assert [one.setting for one in plan.ladder] == ["no checkpointing"] * (verdict == "helps")
    assert (loss is not None and loss.host > 0) == (verdict == "helps")


def test_too_few_rounds_say_nothing(report, monkeypatch):
    monkeypatch.setattr("backspot.live.plan.comparing._MOST_ROUNDS", 2)
    model = nn.Linear(64, 64)
    plan = planned(report, stepping(model, torch.randn(64, 64)), model)
    tried = [one for one in plan.rungs if one.step_ns]
    assert tried
    assert {one.verdict for one in tried} == {"undecided"}
    assert {(one.low_ns, one.high_ns) for one in tried} == {(0, 0)}
    assert not plan.ladder


def test_each_setting_has_its_code_and_the_step_with_it(report):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    plan = planned(report, stepping(model, torch.randn(4, 3, 16, 16)), model)
    found = settings(plan)
    assert plan.step_ns == report.whole_ns
    assert plan.batch == 4
    for name, word in (("bf16", "bfloat16"), ("channels_last", "channels_last")):
        assert word in found[name].code
        assert 0 < found[name].low_ns <= found[name].step_ns <= found[name].high_ns
    assert 0 < found["bf16"].difference.outputs < 0.1
    assert found["channels_last"].difference.outputs < 1e-5
    assert found["bf16"].difference.outputs_again == 0
    assert found["batch 8"].code == "batch_size=8"
    assert not found["batch 8"].kept


class Striding(nn.Conv2d):
    """Notes the strides of its weight and input."""

    def forward(self, x):
        _seen.add((self.weight.stride(), x.stride()))
        return super().forward(x)


_seen: set[tuple] = set()


@pytest.mark.parametrize(("channels", "kernel"), [(16, 1), (1, 3), (16, 3)])
def test_a_model_is_tried_in_the_layout_that_its_code_gives(report, channels, kernel):
    # A convolution chooses its layout from strides, and they can say two where a size is 1.
    first, x = Striding(channels, 8, kernel), torch.randn(4, channels, 16, 16)
    model = nn.Sequential(first, nn.Conv2d(8, 8, 3))
    _seen.clear()
    assert settings(planned(report, stepping(model, x), model))["channels_last"].step_ns
    as_it_is = first.weight.stride(), x.stride()
    model.to(memory_format=torch.channels_last)
    last = first.weight.stride(), x.to(memory_format=torch.channels_last).stride()
    assert _seen == {as_it_is, last}


def test_what_is_in_use_already_is_not_tried(report):
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 16, 16)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()

    found = settings(planned(report, step, model))
    for name in ("bf16", "channels_last"):
        assert found[name].verdict == "not tried"
        assert found[name].note == "in use already"


# What the model returns ---------------------------------------------------------------------------


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Returning(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.layer, self.made = nn.Linear(8, 8), made

    def forward(self, x):
        y = self.layer(x)
        return self.made(y.square().mean(), y)


@pytest.mark.parametrize(
    ("made", "loss"),
    [
        (lambda loss, y: {"loss": loss, "more": [y]}, lambda out: out["loss"]),
        (lambda loss, y: (loss, y), lambda out: out[0]),
        (Output, lambda out: out.loss),
        (lambda loss, y: types.SimpleNamespace(loss=loss, y=y), lambda out: out.loss),
        (lambda loss, y: (loss, y), lambda out: out[0] + out[1].mean()),
    ],
    ids=["dict", "tuple", "dataclass", "object", "both"],
)
def test_outputs_of_any_kind_are_replayed_and_a_loss_is_compared(report, made, loss):
    model = Returning(made)
    plan = planned(report, stepping(model, torch.randn(4, 8), loss=loss), model)
    difference = settings(plan)["bf16"].difference
    assert difference.gradients > 0
    assert difference.loss is not None


# Refusals -----------------------------------------------------------------------------------------


def why_not(report, model, *inputs, **more):
    return planned(report, stepping(model, *inputs), model, **more).why_not


def test_a_model_whose_forward_was_replaced_by_a_function_of_its_own_is_refused(report):
    model = nn.Linear(4, 4)
    forward = model.forward
    model.forward = lambda x: forward(x) * 2
    before = [p.clone() for p in model.parameters()]
    assert "trains the original" in why_not(report, model, torch.ones(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_module_that_cannot_be_copied_is_refused_with_its_error(report):
    class Once(nn.Identity):
        def __deepcopy__(self, memo):
            raise TypeError("one of a kind")

    model = nn.Sequential(nn.Linear(4, 4), Once())
    assert why_not(report, model, torch.ones(2, 4)) == "TypeError: one of a kind"


def test_an_optimizer_in_the_backward_is_refused(report):
    model = nn.Linear(4, 4)
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda p: None)
    assert "optimizer in the backward" in why_not(report, model, torch.ones(2, 4))


def test_a_model_that_the_step_does_not_call_is_refused(report):
    called, other = nn.Linear(4, 4), nn.Linear(4, 4)
    plan = planned(report, stepping(called, torch.ones(2, 4)), other)
    assert plan.why_not == "no step came that called the model"


def test_a_copy_on_several_devices_is_refused():
    model = nn.Linear(4, 4)
    watching = Watching({"": model})
    watching.begin()
    model(torch.ones(2, 4)).sum().backward()
    watching.end()
    Copy(watching).check()
    for one in watching.copies.values():
        one.elsewhere = nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
    with pytest.raises(Refused, match="the model is on several devices: cpu, meta"):
        Copy(watching).check()


def planned_in_a_thread(report, before):
    """The plan of a training in a thread of its own, and its threads before and after it."""
    found = []

    def train():
        before()
        model = nn.Linear(4, 4)
        first = thread_count()
        plan = planned(report, stepping(model, torch.ones(2, 4)), model)
        found.extend([plan, first, thread_count()])

    training = threading.Thread(target=train)
    training.start()
    training.join()
    return found


@pytest.mark.posix  # where OpenMP can be asked how many threads a thread has
def test_a_training_in_a_thread_whose_sums_a_plan_would_change_is_refused(report):
    count = torch.get_num_threads()
    try:
        (initial,) = in_a_thread(thread_count)
        torch.set_num_threads(initial + 1)
        refused, first, last = planned_in_a_thread(report, lambda: None)
        assert (first, last) == (initial, initial)
        assert f"{initial + 1} after a plan: call torch.set_num_threads" in refused.why_not
        made, first, last = planned_in_a_thread(report, lambda: torch.set_num_threads(initial))
        assert (first, last) == (initial, initial)
        assert made.rungs, made.why_not
    finally:
        torch.set_num_threads(count)


def in_a_thread(ask):
    found = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found


def test_a_tiny_limit_leaves_settings_untried(report):
    model = nn.Linear(8, 8)
    watched = planned(report, stepping(model, torch.ones(2, 8)), model, seconds=0)
    assert watched.why_not == "no time was left"


def test_data_parallel_of_one_gpu_is_planned_as_what_it_holds_and_of_several_is_not(report):
    parallel = nn.DataParallel(nn.Linear(8, 8))  # without GPUs, too, it only calls its module
    step = stepping(parallel, torch.ones(2, 8))
    plan = planned(report, step, parallel)
    assert plan.why_not == ""
    assert plan.what.startswith("a copy of Linear")
    inside = nn.Sequential(parallel, nn.Linear(8, 8))
    assert planned(report, stepping(inside, torch.ones(2, 8)), inside).why_not == ""
    parallel.device_ids = [0, 1]
    refused = planned(report, step, parallel)
    assert refused.why_not == "DataParallel splits each batch over several GPUs"


class Computing(nn.Conv2d):
    """Takes a third less time with bf16, and with channels_last, on each machine."""

    def forward(self, x):
        last = self.weight.is_contiguous(memory_format=torch.channels_last)
        takes = 0.03 - 0.01 * torch.is_autocast_enabled("cpu") - 0.01 * last
        until = time.thread_time() + takes
        while time.thread_time() < until:
            pass
        return super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2, 3, 4])
def test_what_helps_is_a_rung_or_says_why_not_however_short_the_time(report, seconds):
    model = Computing(3, 4, 3)
    plan = planned(report, stepping(model, torch.ones(2, 3, 8, 8)), model, seconds=seconds)
    helps = [rung for rung in plan.rungs if rung.verdict == "helps" and rung.axis != "batch"]
    assert bool(helps) == bool(plan.ladder), plan
    axes = {rung.axis for rung in plan.ladder}
    assert all("no part of the ladder" in rung.note for rung in helps if rung.axis not in axes)


def test_all_is_no_kind_of_trials_any_more_and_the_error_names_the_plan():
    with pytest.raises(backspot.UsageError, match='"plan" also tries the model'):
        backspot.profile(lambda: None, nn.Linear(1, 1), trials="all")


# How much it is asked for -------------------------------------------------------------------------


def test_profile_plans_where_it_is_asked_to():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    step = stepping(model, torch.randn(64, 64))
    assert backspot.profile(step, model, steps=2, stacks=False).plan is None
    plan = backspot.profile(step, model, steps=2, stacks=False, trials="plan").plan
    assert plan.what == "a copy of Sequential with its loss, forward and backward"
    assert "bf16" in settings(plan) or plan.why_not


# What models are like -----------------------------------------------------------------------------


def tried(plan):
    """The names of what was tried, or why nothing was."""
    return plan.why_not or {one.setting for one in plan.rungs if one.step_ns}


class Recurrent(nn.Module):
    """Keeps its state from step to step, as a graph until the training detaches it."""

    def __init__(self):
        super().__init__()
        self.cell, self.state = nn.LSTMCell(4, 8), None

    def forward(self, x):
        self.state = self.cell(x, self.state)
        return self.state[0]


def test_a_state_that_is_kept_between_steps_is_the_same_in_each_run(report):
    model = Recurrent()
    plain = stepping(model, torch.randn(2, 4))

    def step():
        plain()
        model.state = tuple(one.detach() for one in model.state)

    step()
    before = [one.clone() for one in model.state]
    assert "bf16" in tried(planned(report, step, model))
    assert not torch.equal(before[0], model.state[0])  # by the one real step


class Tied(nn.Module):
    """Uses a table twice, and never trains a part."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.out.weight = self.table.weight
        self.frozen, self.unused = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)

    def forward(self, index):
        return self.out(self.frozen(self.table(index)))


def test_tied_frozen_and_unused_parameters_are_so_in_the_copies(report):
    model = Tied()
    plan = planned(report, stepping(model, torch.randint(0, 20, (4, 6))), model)
    assert "bf16" in tried(plan)
    assert model.unused.weight.grad is None
    assert model.frozen.weight.grad is None


def test_calls_of_one_kind_are_tried_once_and_count_as_often_as_they_come(report):
    model, other, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.randn(4, 8)

    def step(times=3):
        for _ in range(times):
            other(model(x)).sum().backward()
        with torch.no_grad():
            model(x)

    watching = planning._begun(report, Living({"a": model, "b": other}))
    step()
    watching.end()
    assert [(call.module, call.grad, call.count) for call in watching.calls] == [
        (0, True, 3),
        (1, True, 3),
        (0, False, 1),
    ]
    assert "bf16" in tried(planned(report, step, model, other))


def test_an_output_that_is_written_in_place_has_the_gradient_of_what_the_model_returned(report):
    model, x = nn.Linear(4, 4), torch.randn(3, 4)

    def step():
        out = model(x)
        out.mul_(2)
        out.sum().backward()

    watching = planning._begun(report, Living({"": model}))
    step()
    watching.end()
    assert watching.calls[0].gradients[0].tolist() == torch.full((3, 4), 2.0).tolist()
    assert "bf16" in tried(planned(report, step, model))


def test_parts_are_tried_where_a_trainer_calls_a_method_of_the_model(report):
    class Lit(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.loss = nn.Linear(8, 4), nn.CrossEntropyLoss()

        def training_step(self, x, y):
            return self.loss(self.net(x), y)

    model, x, y = Lit(), torch.randn(6, 8), torch.zeros(6, dtype=torch.long)
    plan = planned(report, lambda: model.training_step(x, y).backward(), model)
    assert plan.what == "a copy of Linear, CrossEntropyLoss, forward and backward"
    assert "bf16" in tried(plan)


def test_a_model_whose_outputs_a_copy_does_not_give_is_refused(report):
    class Changing(nn.Linear):
        calls = 0

        def forward(self, x):
            Changing.calls += 1
            return super().forward(x) * Changing.calls

    assert "the outputs of a copy differ" in why_not(report, Changing(4, 4), torch.ones(2, 4))


def test_checkpoints_are_left_out_where_the_model_makes_them(report):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.b, self.a(x), use_reentrant=False)

    model = Checkpointed()
    assert "no checkpointing" in tried(planned(report, stepping(model, torch.ones(2, 8)), model))
    assert "no checkpointing" not in tried(
        planned(report, stepping(model.a, torch.ones(2, 8)), model.a)
    )


class Attending(nn.Module):
    def __init__(self, **more):
        super().__init__()
        self.qkv, self.more = nn.Linear(32, 96), more

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).transpose(1, 3).unbind(2)
        return nn.functional.scaled_dot_product_attention(q, k, v, **self.more)


def test_other_kernels_of_attention_are_tried_where_a_step_calls_it(report):
    flags = torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.math_sdp_enabled
    before = [flag() for flag in flags]
    found = settings(planned(report, stepping(Attending(), torch.randn(4, 16, 32)), Attending()))
    assert "math attention" not in found  # of a model that the step does not call
    model = Attending()
    found = settings(planned(report, stepping(model, torch.randn(4, 16, 32)), model))
    assert found["flash attention"].note == "in use already"
    assert found["math attention"].step_ns > 0, found["math attention"].note
    assert "SDPBackend.MATH" in found["math attention"].code
    assert [flag() for flag in flags] == before
    model = nn.Linear(8, 8)
    assert "math attention" not in settings(
        planned(report, stepping(model, torch.ones(4, 8)), model)
    )


def test_kernels_that_cannot_take_the_inputs_are_named_and_nothing_warns(report, recwarn):
    model = Attending(dropout_p=0.1)  # on a CPU, only what is written out drops anything
    found = settings(planned(report, stepping(model, torch.randn(4, 16, 32)), model))
    assert found["flash attention"].note == "no kernel for these inputs"
    assert found["math attention"].note == "in use already"
    assert not [one for one in recwarn if "attention" in str(one.message).lower()]


@pytest.mark.slow
def test_attention_that_a_model_of_transformers_writes_out_is_fused_in_a_copy(report):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=20, attn_implementation="eager"
    )
    model = transformers.GPT2LMHeadModel(config)
    index = torch.randint(0, 20, (2, 8))
    step = lambda: model(index, labels=index).loss.backward()  # noqa: E731
    found = settings(planned(report, step, model))
    fused = found["sdpa attention"]
    assert fused.step_ns > 0, fused.note
    assert fused.difference.outputs < 0.5
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    assert "sdpa attention" not in settings(planned(report, step, model))


# Ends ---------------------------------------------------------------------------------------------


def test_an_interrupt_ends_the_plan_with_what_is_known_and_the_training_goes_on(report):
    class Interrupting(nn.Linear):
        left = 30

        def forward(self, x):
            Interrupting.left -= 1
            if Interrupting.left == 0:
                raise KeyboardInterrupt
            return super().forward(x)

    model = Interrupting(8, 8)
    step = stepping(model, torch.randn(4, 8))
    plan = planned(report, step, model)
    assert not plan.why_not
    assert "interrupted" in {one.note for one in plan.rungs}
    step()


def test_a_step_that_raises_leaves_no_hook(report):
    model = nn.Linear(4, 4)

    def step():
        model(torch.ones(2, 4))
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        planned(report, step, model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_write_into_the_training_is_found(report):
    shared = torch.zeros(1)

    class Writing(nn.Linear):
        def forward(self, x):
            shared.add_(1)
            return super().forward(x)

        def __deepcopy__(self, memo):
            made = Writing(8, 8)
            made.load_state_dict(self.state_dict())
            made.own = shared
            return made

    model = Writing(8, 8)
    model.register_buffer("own", shared, persistent=False)
    plan = planned(report, stepping(model, torch.randn(4, 8)), model)
    assert "changed the training" in plan.why_not


# Again after a change -----------------------------------------------------------------------------


def again(report, earlier, model, x):
    """The plan of a training whose earlier plan is known."""
    live = Living({"": model}, step=stepping(model, x))
    return Planning(20, changed(report, plan=earlier)).after(report, live).plan


def lost(plan, setting, on=()):
    """The plan with one setting that did not help, on top of others, and these on its ladder."""
    rungs = [
        replace(one, verdict="does not help", on=on, kept=False)
        if one.setting == setting
        else replace(
            one, verdict="undecided" if one.step_ns else one.verdict, kept=one.setting in on
        )
        for one in plan.rungs
    ]
    return replace(plan, rungs=tuple(rungs))


def images():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))


def test_what_did_not_help_is_not_tried_again_where_nothing_has_changed(report):
    model, x = images(), torch.randn(4, 3, 16, 16)
    before = lost(planned(report, stepping(model, x), model), "bf16")
    assert before.inputs == ("4x3x16x16 float32",)
    plan = again(report, before, model, x)
    taken, old = settings(plan)["bf16"], settings(before)["bf16"]
    assert (taken.step_ns, taken.before_ns, taken.note) == (
        old.step_ns,
        old.before_ns,
        "as the earlier report says",
    )
    assert plan.earlier == "1 setting that did not help in the earlier report is not tried again."
    assert settings(plan)["channels_last"].note != taken.note


@pytest.mark.parametrize(("on", "is_taken"), [(("channels_last",), True), ((), False)])
def test_what_did_not_help_is_tried_again_once_a_rung_below_it_is_made(report, on, is_taken):
    model, x = images(), torch.randn(4, 3, 16, 16)
    before = lost(planned(report, stepping(model, x), model), "bf16", ("channels_last",))
    before = replace(
        before,
        rungs=tuple(replace(one, on=on) if one.setting == "bf16" else one for one in before.rungs),
    )
    plan = again(report, before, images().to(memory_format=torch.channels_last), x)
    found = settings(plan)
    assert found["channels_last"].note == "in use already"
    assert (found["bf16"].note == "as the earlier report says") == is_taken
    assert "channels_last is made" in plan.earlier


ELSEWHERE = {
    "inputs": {},
    "modules": {},
    "device": {"device": "NVIDIA H100"},
    "torch": {"torch": "2.4.0"},
    "host": {"host": "load 0.1, 64 threads of PyTorch, 128 CPUs"},
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_all_is_tried_again_of_another_model_or_machine_or_with_other_inputs(report, what):
    model, x = images(), torch.randn(4, 3, 16, 16)
    before = lost(planned(report, stepping(model, x), model), "bf16")
    earlier = changed(report, plan=before, recorded={**report.recorded, **ELSEWHERE[what]})
    if what == "modules":
        earlier = changed(earlier, modules=())
    live = Living({"": model}, step=stepping(model, x[:2] if what == "inputs" else x))
    plan = Planning(20, earlier).after(report, live).plan
    assert plan.earlier.startswith("All is tried anew")
    said = ELSEWHERE[what].get(what, "this model with these inputs").partition(", ")
    assert (said[2] or said[0]) in plan.earlier
    assert settings(plan)["bf16"].note != "as the earlier report says"


def test_an_earlier_plan_counts_whatever_the_load_was(report):
    model, x = images(), torch.randn(4, 3, 16, 16)
    before = lost(planned(report, stepping(model, x), model), "bf16")
    busy = report.recorded["host"].replace("load ", "load 1", 1)
    earlier = changed(report, plan=before, recorded={**report.recorded, "host": busy})
    live = Living({"": model}, step=stepping(model, x))
    plan = Planning(20, earlier).after(report, live).plan
    assert "not tried again" in plan.earlier


# The loader ---------------------------------------------------------------------------------------


class Slow(torch.utils.data.Dataset):
    """Takes time for each item, and counts them."""

    def __init__(self, seconds):
        self.seconds, self.read = seconds, 0

    def __len__(self):
        return 400

    def __getitem__(self, index):
        self.read += 1
        random.random()
        time.sleep(self.seconds)
        return torch.rand(8) * index


@pytest.mark.slow
@pytest.mark.posix
def test_workers_are_tried_in_processes_of_their_own(report, monkeypatch):
    monkeypatch.setattr(loader_trial, "cores", lambda: 2)
    data = Slow(0.02)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model = nn.Linear(8, 8)
    step = stepping(model, torch.randn(4, 8))
    before = torch.get_rng_state().tolist(), random.getstate()
    whole, waits = 45_000_000, 40_000_000
    waiting = Phase("data", waits, 0, (waits,), waits)
    late = changed(report, step_ns=whole, recorded_step_ns=whole, phases=(waiting,))
    plan = planned(late, step, model, loader=loader, seconds=30)
    assert {"num_workers=1", "num_workers=2"} <= tried(plan)
    assert [one.setting for one in plan.ladder][:1] == ["num_workers=2"]
    assert plan.ladder[0].before_ns == whole
    assert "The loader with num_workers=2 then limits" in plan.next_limit
    assert plan.loader_ns == plan.planned_ns
    assert data.read == 0
    assert (torch.get_rng_state().tolist(), random.getstate()) == before


class Interrupting(Slow):
    """Interrupts the process that has made it as soon as another one reads it."""

    def __init__(self):
        super().__init__(0.02)
        self.process = os.getpid()

    def __getitem__(self, index):
        if os.getpid() != self.process and not self.read:
            os.kill(self.process, signal.SIGINT)
        return super().__getitem__(index)


def late_for_its_batches(report):
    """The report of a training that waits for batches, and copies them to a GPU."""
    faster = Variant("pinned", 1_000_000, 0, 0, 2_000_000, 1_900_000, 2_100_000, "helps")
    tried = Tried("2 copies", (Variant("as it is", 4_000_000), faster))
    places = (Place("(data)", "", 1, 9),)
    finding = Finding("pageable-copy", "Pageable", "copies", "pin", 9, places, 1, tried=tried)
    waits = 20_000_000
    return changed(report, findings=(finding,), phases=(Phase("data", waits, 0, (waits,), waits),))


@pytest.mark.posix
def test_an_interrupt_while_workers_are_tried_leaves_all_else_beside_the_loader(report):
    model = nn.Linear(8, 8)
    loader = torch.utils.data.DataLoader(Interrupting(), batch_size=2, num_workers=2)
    step = stepping(model, torch.randn(4, 8))
    plan = planned(late_for_its_batches(report), step, model, loader=loader)
    found = settings(plan)
    assert found["workers"].note == "interrupted"
    assert found["pinned memory"].note.endswith("if batches were ready")
    assert plan.loader_ns == plan.step_ns
    assert not plan.ladder


@pytest.mark.posix
def test_an_error_while_workers_are_tried_leaves_all_else_beside_the_loader(report, monkeypatch):
    def no_process():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_process)
    model = nn.Linear(8, 8)
    loader = torch.utils.data.DataLoader(Slow(0.02), batch_size=2, num_workers=2)
    step = stepping(model, torch.randn(4, 8))
    plan = planned(late_for_its_batches(report), step, model, loader=loader)
    assert "Resource temporarily unavailable" in settings(plan)["workers"].note
    assert plan.loader_ns == plan.step_ns
    assert not plan.ladder


@pytest.mark.slow
@pytest.mark.posix
def test_the_loader_that_delivered_the_batch_is_known_where_each_epoch_makes_a_new_one():
    model, data = nn.Linear(8, 8), Slow(0)
    others = [torch.utils.data.DataLoader(data, batch_size=3) for _ in range(2)]

    def epochs():
        while True:
            yield from torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

    batches = epochs()

    def step():
        model.zero_grad()
        model(next(batches)).square().mean().backward()

    report = backspot.profile(step, model, steps=3, warmup=1, stacks=False, trials="plan")
    found = settings(report.plan)
    assert "num_workers=1" in found, (found, others)
    assert "batch 8" in found


def test_pinned_memory_saves_what_its_trial_says(report):
    places = (Place("(data)", "", 1, 9),)

    def plan_with(tried):
        finding = Finding("pageable-copy", "Pageable", "copies", "pin", 9, places, 1, tried=tried)
        model = nn.Linear(8, 8)
        found = changed(report, findings=(finding,))
        return settings(planned(found, stepping(model, torch.randn(4, 8)), model))

    faster = Variant("pinned", 1_000_000, 0, 0, 3_000_000, 2_900_000, 3_100_000, "helps")
    pinned = plan_with(Tried("2 copies", (Variant("as it is", 4_000_000), faster)))["pinned memory"]
    assert pinned.before_ns - pinned.step_ns == 3_000_000
    assert "pin_memory=True" in pinned.code
    assert pinned.kept
    assert plan_with(Tried("", why_not="no copy was seen"))["pinned memory"].note == (
        "no copy was seen"
    )
    model = nn.Linear(8, 8)
    assert "pinned memory" not in settings(
        planned(report, stepping(model, torch.ones(4, 8)), model)
    )


def test_graphs_have_what_a_replay_saves_at_most_where_the_step_runs_on_a_gpu(report):
    reason = "a capture that fails cannot be undone"
    assert on_graphs(report) == reason
    recorded = h200.report_of("vit_patch_drop")
    said = on_graphs(recorded)
    assert said.startswith(f"{reason}; by a replay of the step as it is, at most ")


@pytest.mark.posix  # where nothing can be forked, that is why
def test_a_data_set_with_an_open_file_is_refused(report, tmp_path):
    data = Slow(0)
    data.file = (tmp_path / "file").open("w")
    model = nn.Linear(8, 8)
    with data.file:
        loader = torch.utils.data.DataLoader(data)
        plan = planned(report, stepping(model, torch.randn(4, 8)), model, loader=loader)
    assert settings(plan)["workers"].note == "the data set holds an open TextIOWrapper"
