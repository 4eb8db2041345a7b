"""Remedies that are tried beside a training: the training stays as it was, and the verdict fits."""

import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import backspot
from backspot.live.torch_internals.allocator import OutOfMemoryError
from backspot.live.trials import attempts, lookups
from backspot.live.trials.attempts import chains_of, with_trials
from backspot.live.trials.chains import Chains
from backspot.live.trials.measuring import Clock, measure
from backspot.live.trials.trial import Live, Piece, Request, Trial
from backspot.live.trials.twins import Refused, touched
from backspot.render.text import render_text
from backspot.results import Finding, Phase
from backspot.results.findings import Place, Saving
from backspot.results.report import changed
from support import preloaded
from support.gloo import TRAINING, train
from support.trainings import Scaled, Training

RULES = (
    *("optimizer-kernels", "clipping", "zero-grad-fill", "gradients-kept"),
    *("attention-math", "kept-softmax"),
    *("dense-embedding-gradient", "duplicate-indices", "sorted-indexing"),
)


def finding(rule, wall_ns=1_000_000, form=""):
    path = "(clipping)" if rule == "clipping" else "(optimizer)"
    places = (Place(path, "", 1, wall_ns),)
    return Finding(rule, rule, "", "Do it.", wall_ns, places, 1, form=form)


@pytest.fixture(scope="module")
def report():
    """A report, whose findings each test replaces."""
    model = nn.Linear(4, 4)
    return backspot.profile(
        lambda: model(torch.ones(2, 4)).sum().backward(), model, steps=1, warmup=0, trials="none"
    )


def asked(report, *rules, form=""):
    """The report with a finding of each rule, of a step that takes 5 ms."""
    findings = tuple(finding(rule, form=form) for rule in rules)
    return changed(report, findings=findings, step_ns=5_000_000)


def trained(report, *rules, steps=3, kind=Training):
    """A training, with trials after its second step; the findings with what came out."""
    training = kind()
    training.step()
    if not rules:
        training.step()
    else:
        report = asked(report, *rules)
        live = chains_of(training.step, training.live())
        report = with_trials(report, live, "operators")
    for _ in range(steps):
        training.step()
    return training, report.findings


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Trials of few rounds: what they measure matters in few tests."""
    monkeypatch.setattr("backspot.live.trials.measuring._MOST_ROUNDS", 6)
    monkeypatch.setattr("backspot.live.trials.measuring._LEAST_SAMPLE", 1)
    monkeypatch.setattr("backspot.live.trials.measuring._CACHES", {"cpu": 1 << 12})


@pytest.mark.parametrize("rule", RULES)
def test_a_training_goes_on_bit_for_bit_after_a_trial(report, rule):
    plain, _ = trained(report)
    tried, (found,) = trained(report, rule)
    assert found.tried.variants, found.tried.why_not
    assert tried.state() == plain.state()


def test_a_training_goes_on_bit_for_bit_after_all_trials_together(report):
    plain, _ = trained(report)
    tried, findings = trained(report, *RULES)
    assert all(one.tried for one in findings)
    assert tried.state() == plain.state()


def test_a_training_in_autocast_with_scaled_gradients_goes_on_bit_for_bit(report):
    plain, _ = trained(report, kind=Scaled)
    tried, findings = trained(report, *RULES, kind=Scaled)
    assert any(one.tried.variants for one in findings)
    assert tried.state() == plain.state()


def test_a_step_that_raises_is_watched_no_longer(report):
    def step():
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        chains_of(step, Training().live())
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_step_with_a_function_in_place_of_pytorchs_is_not_watched(monkeypatch):
    """PyTorch hands that to a mode, and what it calls within to nobody: it would run twice."""
    original = functional.relu
    monkeypatch.setattr(functional, "relu", lambda *args: original(*args))
    live = chains_of(lambda: functional.relu(torch.ones(2)), Training().live())
    assert live.chains is None
    assert live.why_no_chains.endswith("relu is not PyTorch's own, and would run twice")


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_step_is_watched_as_long_as_somebody_can_end_it(goes_on, report):
    training, modes = Training(), torch.overrides._get_current_function_mode_stack
    training.step()
    rest = attempts.Trying("operators").begin(asked(report, "pointwise-chain"), training.live())
    assert len(modes()) == 1
    if goes_on:
        rest()
    del rest  # as an interrupt does before anybody has it
    assert not modes()


def test_a_step_that_is_watched_frees_what_it_frees_otherwise(report):
    linear, dead = nn.Linear(8, 8), []

    def step():
        y = linear(torch.ones(2, 8)).view(4, 4)
        seen = weakref.ref(y)
        z = (y + 1).tanh() * 2
        del y
        dead.append(seen() is None)
        z.sum().backward()

    step()
    chains_of(step, Live({}, []))
    assert dead == [True, True]


def test_trials_end_when_the_time_of_all_is_up(report, monkeypatch):
    monkeypatch.setattr(attempts, "_SECONDS_IN_ALL", -1.0)
    training = Training()
    training.step()
    assert why_not(report, training.live()) == "the time for trials was up"


def test_without_the_guard_a_training_goes_on_differently(report, monkeypatch):
    """The test above could find a difference."""
    plain, _ = trained(report)
    monkeypatch.setattr(attempts, "untouched", lambda _: nullcontext())
    tried, (found,) = trained(report, "attention-math")
    assert found.tried.variants
    assert tried.state() != plain.state()


def test_hooks_of_the_process_do_not_see_a_trial_and_are_there_afterwards(report):
    training, seen = Training(), []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        training.step()
        with_trials(asked(report, "optimizer-kernels"), training.live(), "operators")
        assert len(seen) == 1
        training.step()
        assert len(seen) == 2
    finally:
        handle.remove()


@pytest.mark.parametrize("error", [ValueError("boom"), RuntimeError("no memory")])
def test_an_error_in_a_trial_is_its_result_and_changes_nothing(report, monkeypatch, error):
    plain, _ = trained(report)

    def raises(*_, **__):
        torch.rand(3)
        raise error

    monkeypatch.setattr(attempts, "measure", raises)
    tried, (found,) = trained(report, "optimizer-kernels")
    assert str(error) in found.tried.why_not
    assert tried.state() == plain.state()


def test_an_interrupt_in_a_trial_is_passed_on_and_changes_nothing(report, monkeypatch):
    plain, _ = trained(report)
    training = Training()
    training.step()
    training.step()
    calls = []

    def interrupted(_self):
        torch.rand(3)
        calls.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr("backspot.live.trials.measuring.Clock._cool", interrupted)
    with pytest.raises(KeyboardInterrupt):
        with_trials(asked(report, "optimizer-kernels"), training.live(), "operators")
    assert calls
    for _ in range(3):
        training.step()
    assert training.state() == plain.state()


# Python drops an interrupt that comes while the callback of a weak reference runs.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.posix
def test_an_interrupt_at_any_moment_changes_nothing(report):
    import _thread

    # A shell that starts the tests in its background has them ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    plain, _ = trained(report)
    hit = 0
    for delay in range(1, 13):
        training = Training()
        training.step()
        live = chains_of(training.step, training.live())
        timer = threading.Timer(delay / 250, _thread.interrupt_main)
        try:
            timer.start()
            with_trials(asked(report, *RULES), live, "operators")
            timer.join()
            time.sleep(0.05)
        except KeyboardInterrupt:
            hit += 1
        for _ in range(3):
            training.step()
        assert training.state() == plain.state(), delay
    signal.signal(signal.SIGINT, before)
    assert hit


def test_nothing_of_a_trial_is_left(report):
    def tensors():
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    training = Training()
    training.step()
    asked_for = asked(report, *RULES)
    left = []
    for _ in range(2):
        live = chains_of(training.step, training.live())
        assert all(one.tried for one in with_trials(asked_for, live, "operators").findings)
        del live
        left.append(tensors())
    assert left[0] == left[1]


def test_a_write_into_the_training_is_found(report, monkeypatch):
    training = Training()
    training.step()

    def writes(*_):
        with torch.no_grad():
            training.model.qkv.bias.add_(1)
        return Trial("a write", {"as it is": [Piece(lambda: None)]})

    monkeypatch.setattr(attempts, "remedies_of", lambda *_, **__: [attempts.Entry(writes)])
    (found,) = with_trials(
        asked(report, "optimizer-kernels"), training.live(), "operators"
    ).findings
    assert "changed the training" in found.tried.why_not


# What is refused ----------------------------------------------------------------------------------


def why_not(report, live, rule="optimizer-kernels"):
    (found,) = with_trials(asked(report, rule), live, "operators").findings
    assert not found.tried.variants
    return found.tried.why_not


@pytest.mark.parametrize("kind", [TorchFunctionMode, TorchDispatchMode])
def test_a_mode_of_the_training_sees_no_trial(report, kind):
    class Counting(kind):
        calls = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **kwargs or {})

        __torch_dispatch__ = __torch_function__

    training = Training()
    training.step()
    live = training.live()
    with Counting() as mode:
        assert why_not(report, live) == "a mode of the training sees its functions"
    assert mode.calls == 0


def test_the_default_device_forbids_no_trial(report):
    training = Training()
    training.step()
    with torch.device("cpu"):
        (found,) = with_trials(
            asked(report, "optimizer-kernels"), training.live(), "operators"
        ).findings
    assert found.tried.variants


def test_an_optimizer_of_the_users_is_refused(report):
    class Mine(torch.optim.SGD):
        pass

    Mine.__module__ = "mine"
    training = Training(Mine)
    training.step()
    assert why_not(report, training.live()) == "Mine is no optimizer of PyTorch"


def test_an_optimizer_whose_step_was_replaced_is_refused(report):
    training = Training()
    training.step()
    training.optimizer.step = lambda: None
    assert why_not(report, training.live()) == "the step of AdamW was replaced"


def test_lbfgs_is_refused(report):
    model = nn.Linear(4, 4)
    live = Live({"": model}, [torch.optim.LBFGS(model.parameters())])
    assert why_not(report, live) == "a step of LBFGS runs the model"


def test_a_tensor_of_a_class_of_its_own_is_refused(report):
    class Sharded(torch.Tensor):
        pass

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"] = [
        model.weight.detach().as_subclass(Sharded).requires_grad_()
    ]
    assert "a Sharded cannot be copied" in why_not(report, Live({}, [optimizer]))


def test_copies_that_do_not_fit_are_refused(report, monkeypatch):
    training = Training()
    training.step()
    for module in ("twins", "chains", "optimizer"):
        monkeypatch.setattr(f"backspot.live.trials.{module}.free_bytes", lambda _: 100)
    assert "MiB, and a trial may take 0" in why_not(report, training.live())
    live = chains_of(training.step, training.live())
    assert "more than is left for trials" in why_not(report, live, "attention-math")


def test_compiled_code_is_left_alone(report, monkeypatch):
    monkeypatch.setattr(attempts, "compilations", lambda: [("0/0", "f", "f.py", 1, "")])
    training = Training()
    live = chains_of(lambda: pytest.fail("a step was watched"), training.live())
    assert why_not(report, live, "attention-math") == "the step runs compiled code"


def test_a_call_that_takes_long_is_refused(report, monkeypatch):
    def slow(_):
        return Trial("a wait", {"as it is": [Piece(lambda: time.sleep(0.3))], "other": []})

    monkeypatch.setattr(attempts, "remedies_of", lambda *_, **__: [attempts.Entry(slow)])
    begin = time.monotonic()
    assert "too long" in why_not(report, Training().live())
    assert time.monotonic() - begin < 30


# What it says -------------------------------------------------------------------------------------


def test_the_real_operators_are_tried_with_the_step_s_own_mask(report):
    _, (found,) = trained(report, "attention-math")
    names = [one.name for one in found.tried.variants]
    assert names[0] == "as it is"
    assert "scaled_dot_product_attention(is_causal=True)" in names


def test_a_table_that_is_used_twice_stays_dense(report):
    table = nn.Embedding(50, 8)
    optimizer = torch.optim.Adam(table.parameters())

    def step():
        optimizer.zero_grad()
        functional.linear(table(torch.tensor([1, 2])), table.weight).sum().backward()
        optimizer.step()

    live = chains_of(step, Live({"": table}, [optimizer]))
    assert "used elsewhere" in why_not(report, live, "dense-embedding-gradient")


@pytest.mark.parametrize("padding", [None, 49, -1])
def test_of_a_table_that_is_too_large_for_copies_some_rows_are_tried(report, monkeypatch, padding):
    table = nn.Embedding(50, 8, padding_idx=padding)
    optimizer = torch.optim.Adam(table.parameters())

    def step():
        optimizer.zero_grad()
        table(torch.tensor([1, 49])).sum().backward()
        optimizer.step()

    live = chains_of(step, Live({"": table}, [optimizer]))
    sizes = []
    twin = lookups.twin
    monkeypatch.setattr(lookups, "twin", lambda one: sizes.append(len(one)) or twin(one))
    for free, rows in ((1 << 30, 50), (8 * 50 * 8 * 4 // 4, 13)):
        monkeypatch.setattr(lookups, "free_bytes", lambda _, free=free: free)
        found = with_trials(asked(report, "dense-embedding-gradient"), live, "operators").findings
        assert len(found[0].tried.variants) == 2, found[0].tried.why_not
        assert {*sizes} == {rows}
        sizes.clear()


def attended(report, scores_of):
    """What the trial of attention with such scores says."""
    h, v = nn.Parameter(torch.randn(2, 12, 8)), nn.Parameter(torch.randn(2, 12, 4))

    def step():
        (functional.softmax(scores_of(h), dim=-1) @ v).sum().backward()

    live = chains_of(step, Live({}, []))
    (found,) = with_trials(asked(report, "attention-math"), live, "operators").findings
    return found.tried


def test_scores_that_are_sums_of_columns_are_tried_as_a_mask(report):
    column = torch.randn(8, 1)
    tried = attended(report, lambda h: functional.leaky_relu(h @ column + (h @ column).mT))
    assert tried.variants[1].name.endswith("the scores as a mask")
    tried = attended(report, lambda h: h @ column + (h @ column).mT)
    assert tried.variants[1].name.endswith("the scores as a mask")


@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention_is_tried_without_its_weights_if_it_returns_them(report, weights):
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)

    def step():
        attention(x, x, x, need_weights=weights)[0].sum().backward()

    live = chains_of(step, Live({"": attention}, []))
    before = [one.grad.clone() for one in attention.parameters()]
    (found,) = with_trials(asked(report, "attention-math"), live, "operators").findings
    names = [one.name for one in found.tried.variants]
    assert names == (["as it is", "need_weights=False"] if weights else [])
    assert all(map(torch.equal, before, (one.grad for one in attention.parameters())))


@pytest.mark.parametrize(("dropout", "tried"), [(0.1, True), (0.0, False)])
@pytest.mark.parametrize("kind", ["module", "function"])
def test_attention_that_is_one_function_already_is_tried_without_its_dropout(
    report, kind, dropout, tried
):
    attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
    x = torch.randn(2, 5, 8, requires_grad=True)

    def step():
        if kind == "module":
            attention(x, x, x, need_weights=False)[0].sum().backward()
        else:
            functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout).sum().backward()

    live = chains_of(step, Live({"": attention}, []))
    before = x.grad.clone()
    (found,) = with_trials(asked(report, "attention-math"), live, "operators").findings
    names = [one.name for one in found.tried.variants]
    assert names == (["as it is", "dropout_p=0"] if tried else [])
    if not tried:
        assert found.tried.why_not == "it is PyTorch's attention already, without dropout"
    assert torch.equal(before, x.grad)


def test_scores_that_are_made_in_an_unknown_way_are_not_tried(report):
    """They may be a product of queries and keys all the same."""
    tried = attended(report, lambda h: (h @ h.mT).view(24, 12).cosh().view(2, 12, 12))
    assert tried.why_not == "how the scores of its softmax are made is not known"


@pytest.fixture
def measured(monkeypatch):
    """By the CPU time of this thread, in enough rounds for an interval without the ends."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr("backspot.live.trials.measuring._MOST_ROUNDS", 15)
    monkeypatch.setattr(attempts, "_SECONDS_IN_ALL", 60.0)


class _Work:
    """A piece of work of a known length."""

    def __init__(self, milliseconds):
        self.seconds = milliseconds / 1e3

    def __call__(self):
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass


def verdict_of(report, monkeypatch, now, new, rule="optimizer-kernels", seconds=20.0):
    pieces = {"as it is": [Piece(_Work(now))], "other": [Piece(_Work(new))]}
    trial = Trial("work", pieces, allowed_s=seconds)
    monkeypatch.setattr(attempts, "remedies_of", lambda *_, **__: [attempts.Entry(lambda _: trial)])
    (found,) = with_trials(asked(report, rule), Live({}, []), "operators").findings
    return found


@pytest.mark.usefixtures("measured")
def test_the_verdict_says_whether_it_helps(report, monkeypatch):
    good = verdict_of(report, monkeypatch, 4, 1)
    assert good.tried.best.name == "other"
    assert " with other; a step takes at least " in str(good.tried)
    bad = verdict_of(report, monkeypatch, 1, 4)
    assert bad.tried.verdict == "does not help"
    assert "does not help" in str(bad.tried)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("now", "new", "said"),
    [(4, 0.1, {"helps"}), (1, 4, {"does not help"}), (2, 2, {"does not help", "undecided"})],
)
def test_three_rounds_tell_what_differs_by_far_and_nothing_else(
    report, monkeypatch, now, new, said
):
    monkeypatch.setattr("backspot.live.trials.measuring._MOST_ROUNDS", 3)
    tried = verdict_of(report, monkeypatch, now, new).tried
    assert tried.rounds == 3
    assert tried.verdict in said


@pytest.mark.usefixtures("measured")
def test_two_rounds_tell_nothing(report, monkeypatch):
    monkeypatch.setattr("backspot.live.trials.measuring._MOST_ROUNDS", 2)
    assert verdict_of(report, monkeypatch, 4, 0.1).tried.verdict == "undecided"


@pytest.mark.usefixtures("measured")
def test_no_round_is_begun_that_the_time_of_all_trials_has_no_room_for(report, monkeypatch):
    """Before the first round, each runs twice; then 0.5 of the second are left."""
    monkeypatch.setattr(attempts, "_SECONDS_IN_ALL", 1.0)
    assert verdict_of(report, monkeypatch, 5, 240).tried.rounds < 3


def _failing():
    raise NotImplementedError("not for these numbers")


def _without_room():
    raise OutOfMemoryError("no room for copies")


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("other", "third", "said", "price"),
    [
        (_failing, None, "fails", 0),
        (_failing, _Work(4), "does not help", 0),
        (_failing, _Work(0.1), "helps", 1),
        # What has no room beside the training may have it in its place.
        (_without_room, None, "undecided", 1),
        # The first one is the remedy that the price is for.
        (_failing, _without_room, "undecided", 0),
        (_without_room, _failing, "undecided", 1),
    ],
)
def test_a_price_by_replay_goes_where_its_remedy_fails_and_not_where_another_one_does(
    report, monkeypatch, other, third, said, price
):
    pieces = {"as it is": [Piece(_Work(1))], "other": [Piece(other)]}
    pieces |= {"third": [Piece(third)]} if third else {}
    trial = Trial("work", pieces, allowed_s=20.0)
    monkeypatch.setattr(attempts, "remedies_of", lambda *_, **__: [attempts.Entry(lambda _: trial)])
    with_price = asked(report, "clipping")
    priced = replace(with_price.findings[0], saves=Saving(2_000_000, 0, 3_000_000))
    with_price = changed(with_price, findings=(priced,))
    (found,) = with_trials(with_price, Live({}, []), "operators").findings
    assert found.tried.verdict == said
    assert (found.saves is not None) is bool(price)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(("tier", "tried"), [("preview", False), ("stable", True)])
def test_the_advice_of_a_preview_rule_is_not_tried(report, monkeypatch, tier, tried):
    trial = Trial("work", {"as it is": [Piece(_Work(4))], "other": [Piece(_Work(1))]})
    monkeypatch.setattr(attempts, "remedies_of", lambda *_, **__: [attempts.Entry(lambda _: trial)])
    (found,) = asked(report, "clipping").findings
    preview = changed(report, findings=(replace(found, tier=tier),))
    with_tried = with_trials(preview, Live({}, []), "operators")
    assert (with_tried.findings[0].tried is not None) is tried


@pytest.mark.usefixtures("measured")
def test_findings_that_no_remedy_helps_go_last_and_lose_their_advice(report, monkeypatch):
    pieces = {"as it is": [Piece(_Work(1))], "other": [Piece(_Work(4))]}
    trial = Trial("work", pieces, allowed_s=20.0)
    entries = {"clipping": [attempts.Entry(lambda _: trial)]}
    monkeypatch.setattr(attempts, "remedies_of", lambda rule, **_: entries.get(rule, []))
    found = with_trials(asked(report, "clipping", "casts"), Live({}, []), "operators")
    assert [one.rule for one in found.findings] == ["casts", "clipping"]
    text = render_text(found, full=True)
    assert "✗ Tried here, does not help" in text
    assert text.count("→ Do it.") == 1


@pytest.mark.usefixtures("measured")
def test_a_phase_is_a_finding_where_another_form_of_it_helps(report, monkeypatch):
    phases = tuple(
        Phase(name, 2_000_000, 0, (2_000_000,), 2_000_000)
        for name in ("backward", "optimizer", "clipping")
    )
    slow = changed(report, phases=phases, findings=(), step_ns=5_000_000)
    for new, count in ((1, 2), (6, 0)):
        pieces = {"as it is": [Piece(_Work(4))], "fused=True": [Piece(_Work(new))]}
        trial = Trial("it", pieces, allowed_s=20.0)
        entries = [attempts.Entry(lambda _, trial=trial: trial)]
        monkeypatch.setattr(attempts, "remedies_of", lambda *_, entries=entries, **__: entries)
        found = with_trials(slow, Live({}, []), "operators").findings
        assert len(found) == count
        assert all(one.remedy == "Pass fused=True." for one in found)


def test_nothing_is_tried_where_nothing_may_be(report):
    (found,) = with_trials(asked(report, "optimizer-kernels"), Training().live(), "none").findings
    assert found.tried is None
    phase = Phase("optimizer", 2_000_000, 0, (2_000_000,), 2_000_000)
    assert not with_trials(changed(report, phases=(phase,)), Training().live(), "none").findings
    with pytest.raises(backspot.UsageError, match='"operators", "plan" or "none"'):
        backspot.profile(lambda: None, nn.Linear(1, 1), trials="some")


@pytest.mark.slow
def test_profile_tries_what_its_findings_advise():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(60)])
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()

    found = backspot.profile(step, model, steps=3, unprofiled=4)
    (one,) = [one for one in found.findings if one.rule == "optimizer-kernels"]
    assert {variant.name for variant in one.tried.variants} >= {"as it is", "fused=True"}


class Written(nn.Module):
    """Norms and an activation, written out."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))
        self.linear = nn.Linear(16, 16)


class Rms(Written):
    def forward(self, x):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.linear(self.weight * (x * scale).to(x.dtype))


class Centred(Written):
    def forward(self, x):
        far = x - x.mean(-1, keepdim=True)
        spread = (far * far).mean(-1, keepdim=True)
        return x + self.linear(self.weight * far / torch.sqrt(spread + 1e-5) + self.bias)


class Tanh(Written):
    def forward(self, x):
        inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3))
        return x + self.linear(0.5 * x * (1 + torch.tanh(inner)))


class Erf(Written):
    def forward(self, x):
        return x + self.linear(x * 0.5 * (1 + torch.erf(x / 2**0.5)))


class Other(Written):
    def forward(self, x):
        return x + self.linear(x * 0.4 * (1 + torch.erf(x / 2**0.5)) ** 2)


def stepped(report, rule, run, x, form=""):
    """What the trial says of a step that runs this."""
    live = chains_of(lambda: run(x).square().mean().backward(), Live({}, []))
    (found,) = with_trials(asked(report, rule, form=form), live, "operators").findings
    return found.tried


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Rms, "F.rms_norm"),
        (Centred, "F.layer_norm"),
        (Tanh, 'F.gelu(approximate="tanh")'),
        (Erf, "F.gelu"),
        (Other, None),
    ],
)
def test_a_chain_is_known_by_what_it_computes(report, kind, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), kind(), kind())
    tried = stepped(report, "pointwise-chain", model, torch.randn(3, 16))
    names = [one.name for one in tried.variants]
    assert names == (["as it is", name] if name else []), tried.why_not


def test_tiny_products_and_distances_are_written_out(report):
    linear, turn = nn.Linear(8, 8), torch.rand(4, 2, 2)

    def turned(x):
        return turn @ linear(x).view(-1, 4, 2, 1)

    tried = stepped(report, "tiny-products", turned, torch.randn(5, 8))
    assert tried.variants[1].name == "element-wise products and sums"
    for p, count in ((1.0, 2), (2.0, 3)):
        tried = stepped(
            report,
            "pairwise-distance",
            lambda x, p=p: torch.cdist(linear(x), x, p=p),
            torch.rand(5, 8),
        )
        assert len(tried.variants) == count


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"padding": 1}, 3),
        ({"padding": (1, 0, 2), "kernel_size": (3, 1, 5), "bias": False}, 3),
        ({"padding": "same"}, 2),  # in other forms than the frames alone
        ({"stride": 2}, 2),
        ({"out_channels": 12}, 2),
        ({"groups": 2}, 0),
    ],
)
def test_a_depthwise_convolution_of_volumes_is_tried_in_other_forms(report, options, count):
    same = {"in_channels": 6, "out_channels": 6, "kernel_size": 3, "groups": 6}
    model = nn.Sequential(nn.Conv3d(2, 6, 1), nn.Conv3d(**same | options))
    tried = stepped(report, "slow-convolution", model, torch.randn(2, 2, 5, 6, 7))
    assert len(tried.variants) == count
    assert not any(one.note for one in tried.variants)
    assert ("no 3-D depthwise convolution" in tried.why_not) == (not count)


@pytest.mark.parametrize(
    ("labels", "options", "count"),
    [
        (3, {}, 2),
        (3, {"ignore_index": 0}, 0),  # of which there is none: all have a label
        (20, {}, 0),
        (0, {}, 0),
        (3, {"weight": torch.ones(16)}, 2),
    ],
)
def test_a_loss_that_ignores_positions_is_tried_without_them(report, labels, options, count):
    body, head = nn.Linear(8, 8), nn.Linear(8, 16)
    target = torch.randint(1, 16, (20,))
    if "ignore_index" not in options:
        target[labels:] = -100

    def loss(x):
        scores = head(body(x)).float().view(-1, 16)
        return nn.functional.cross_entropy(scores, target, **options)

    check_fewer_labels(stepped(report, "loss-passes", loss, torch.randn(4, 5, 8)), count)


def check_fewer_labels(tried, count):
    names = [one.name for one in tried.variants] if tried else []
    assert names == ["as it is", "only positions with a label"][:count], tried.why_not
    assert not count or "last layer of 16 classes" in tried.what
    assert not count or "15% of the positions" in tried.what


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "beside", "is_scaled"),
    [
        (4096, "", True),  # a sample of the positions, which can take a part of the time
        (4096, "a layer of these sizes", False),
        (4096, "a loss with weights", False),
    ],
)
def test_positions_without_a_label_cost_their_share_of_the_recorded_loss_and_last_layer(
    classes, beside, is_scaled
):
    body, head, other = nn.Linear(8, 8), nn.Linear(8, classes), nn.Linear(8, classes + 64)
    if beside == "a layer of these sizes":
        other = nn.Linear(8, classes)
    # Of a layer that only has to be there, few rows: the loss stays well above the least share.
    x, target = torch.randn(1024, 8), torch.randint(classes, (1024,))
    target[100:] = -100
    weight = torch.ones(classes + 64)

    def step():
        h = body(x)
        loss = functional.cross_entropy(head(h), target)
        if beside == "a layer of these sizes":
            loss = loss + other(h[:64]).square().mean()
        if beside == "a loss with weights":
            loss = loss + functional.cross_entropy(other(h), target.clamp(min=0), weight=weight)
        loss.backward()

    model = nn.Sequential(body, head, other)
    few = {"warmup": 1, "unprofiled": 2, "stacks": False, "trials": "none"}
    shown = backspot.profile(step, model, steps=3, **few)
    (found,) = (one for one in shown.findings if one.rule == "loss-passes")
    live = chains_of(step, Live({"": model}, []))
    report = with_trials(shown, live, "operators")
    (tried,) = (one.tried for one in report.findings if one.rule == "loss-passes")
    (row,) = (row for row in shown.modules if row.path == "1")
    together = found.wall_ns + row.forward_ns + row.wall_ns
    known_ns = together * min(1, (report.recorded_step_ns or report.whole_ns) / report.whole_ns)
    assert (tried.variants[0].ns == pytest.approx(known_ns, rel=1e-6)) is is_scaled


@pytest.mark.parametrize(
    ("layer", "count"),
    [
        (lambda x, weight: x @ weight.t(), 2),
        (lambda x, weight: torch.matmul(x, weight.t().contiguous()), 2),
        # A batch of matrices is no layer.
        (lambda x, weight: x @ weight.t().expand(len(x), 8, 16), 0),
    ],
)
def test_a_last_layer_can_be_a_product_with_its_weights(report, layer, count):
    body, weight = nn.Linear(8, 8), nn.Parameter(torch.randn(16, 8))
    target = torch.randint(1, 16, (20,))
    target[3:] = -100

    def loss(x):
        return nn.functional.cross_entropy(layer(body(x), weight).view(-1, 16), target)

    check_fewer_labels(stepped(report, "loss-passes", loss, torch.randn(4, 5, 8)), count)


@pytest.mark.parametrize(
    ("logarithm", "names"),
    [
        (lambda x: (x.softmax(-1) + 1e-9).log(), ["as it is", "log_softmax"]),
        (lambda x: torch.log(nn.functional.softmax(x, dim=1)), ["as it is", "log_softmax"]),
        (lambda x: x.softmax(0).clamp_min(1e-9).log(), ["as it is", "log_softmax"]),
        (lambda x: x.sigmoid().log(), []),
        (lambda x: (x.softmax(-1) + x.sigmoid()).log(), []),
    ],
)
def test_a_logarithm_of_a_softmax_is_tried_as_one_operator(report, logarithm, names):
    body, target = nn.Linear(8, 16), torch.randint(16, (20, 1))

    def loss(x):
        return -logarithm(body(x)).gather(1, target).mean()

    tried = stepped(report, "loss-passes", loss, torch.randn(20, 8), "log_softmax")
    assert [one.name for one in tried.variants] == names
    assert bool(tried.why_not) == (not names)


def entropy(p):
    return ((p + 1e-9).log() * p).sum(-1)


def distance(p):
    """Of each distribution to the mean of all."""
    return (p * (p.log() - p.mean(0, keepdim=True).log())).sum(-1)


def kept_before(p):
    return p.square().sum(-1) + p.log().sum(-1)


def kept_within(p):
    limited = p.clamp_min(1e-9)
    return limited.log().sum(-1) + torch.cat([limited, limited]).sum()


@pytest.mark.parametrize("loss", [entropy, distance, kept_before, kept_within])
def test_a_softmax_that_is_used_beside_its_logarithm_is_not_tried_without_it(report, loss):
    body, x = nn.Linear(8, 16), torch.randn(20, 8)
    tried = stepped(report, "loss-passes", lambda x: loss(body(x).softmax(-1)), x, "log_softmax")
    assert tried.variants == ()
    assert "the softmax is used beside its logarithm" in tried.why_not


def test_of_two_logarithms_that_one_is_tried_whose_softmax_is_not_used_again(report):
    """Both are of the same shapes, and so copied once."""
    body, other = nn.Linear(8, 16), nn.Linear(8, 16)

    def loss(x):
        return entropy(body(x).softmax(-1)) + (other(x).softmax(-1) + 1e-9).log().sum(-1)

    live = chains_of(lambda: loss(torch.randn(20, 8)).sum().backward(), Live({}, []))
    (chain,) = live.chains.of("logarithm")
    assert (chain.count, len(chain.staying)) == (2, 1)
    (found,) = with_trials(
        asked(report, "loss-passes", form="log_softmax"), live, "operators"
    ).findings
    assert [one.name for one in found.tried.variants] == ["as it is", "log_softmax"]


def test_a_logarithm_that_needs_no_gradient_is_not_tried(report):
    body = nn.Linear(8, 16)

    def loss(x):
        return functional.kl_div(x.softmax(-1).log(), body(x[:, :8]), None, None, "batchmean", True)

    tried = stepped(report, "loss-passes", loss, torch.randn(20, 16), "log_softmax")
    assert tried.variants == ()


@pytest.mark.parametrize(
    "softmax",
    [
        lambda x: torch.softmax(x, -1, dtype=torch.float32),
        lambda x: x.softmax(-1, torch.float32),
        lambda x: functional.softmax(x, -1, 3, torch.float32),
        lambda x: functional.softmax(x, dim=-1, dtype=torch.float32),
    ],
)
def test_a_softmax_in_another_type_is_tried_in_that_type(report, softmax, monkeypatch):
    """In bf16, as the scores are, it would take half of the memory, and be another loss."""
    made, original = [], torch.log_softmax
    body = nn.Linear(8, 16)

    def noted(*args, **kwargs):
        made.append(original(*args, **kwargs))
        return made[-1]

    def loss(x):
        return softmax(body(x).bfloat16()).log().sum(-1)

    live = chains_of(lambda: loss(torch.randn(20, 8)).sum().backward(), Live({}, []))
    monkeypatch.setattr(torch, "log_softmax", noted)
    with_trials(asked(report, "loss-passes", form="log_softmax"), live, "operators")
    assert {one.dtype for one in made} == {torch.float32}


@pytest.mark.parametrize(
    ("form", "name"), [("", "only positions with a label"), ("log_softmax", "log_softmax")]
)
def test_a_finding_is_proved_by_a_trial_of_its_own_remedy_alone(report, form, name):
    """A step with labels that are ignored, and with a logarithm of a softmax elsewhere."""
    body, head, target = nn.Linear(8, 8), nn.Linear(8, 16), torch.randint(1, 16, (20,))
    target[3:] = -100

    def loss(x):
        scores = head(body(x))
        ignored = functional.cross_entropy(scores, target)
        return ignored + ((scores / 2).softmax(-1) + 1e-9).log().mean()

    tried = stepped(report, "loss-passes", loss, torch.randn(20, 8), form)
    assert [one.name for one in tried.variants] == ["as it is", name]


# Ranks and compiled code --------------------------------------------------------------------------

OF_RANKS = """
import backspot
from backspot.live.trials.attempts import chains_of, with_trials
from backspot.live.trials.trial import Live
from backspot.results import Finding
from backspot.results.findings import Place, Saving
from backspot.results.report import changed
from torch.distributed.fsdp import fully_shard

if sys.argv[1] == "fsdp":
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    fully_shard(model, mesh=mesh)
    wrapped, optimizer = model, torch.optim.SGD(model.parameters(), 0.01)
places = (Place("(optimizer)", "", 1, 10**6),)
rules = ("optimizer-kernels", "zero-grad-fill")
findings = tuple(Finding(rule, rule, "", "Do it.", 10**6, places, 1) for rule in rules)
plain = nn.Linear(4, 4)
report = backspot.profile(
    lambda: plain(torch.ones(2, 4)).sum().backward(), plain, steps=1, warmup=0, trials="none"
)
report = changed(report, findings=findings, step_ns=10**7)
for number in range(6):
    live = Live({"": wrapped}, [optimizer])
    if number == 3 and rank == 0 and sys.argv[2] == "tried":
        live = chains_of(step, live)
        found = with_trials(report, live, "operators").findings
        for one in sorted(found, key=lambda one: rules.index(one.rule)):
            print("#", one.rule, one.tried.why_not or [v.name for v in one.tried.variants])
    else:
        step()
print([p.double().sum().item() for p in
       (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())])
dist.barrier()
sys.stdout.flush()
os._exit(0)  # PyTorch can abort a process that ends its groups on a busy machine
"""


@pytest.mark.slow
@pytest.mark.posix
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_train_on_bit_for_bit_while_rank_0_tries(tmp_path, kind):
    ended = {}
    for how in ("plain", "tried"):
        folder = tmp_path / how
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(f"import sys\nsys.argv[1:] = ['{kind}', '{how}']\n{TRAINING}{OF_RANKS}")
        ended[how] = [out.splitlines() for out, _ in train(script.name, 2, folder)]
    said = [line for line in ended["tried"][0] if line.startswith("#")]
    assert [lines[-1] for lines in ended["tried"]] == [lines[-1] for lines in ended["plain"]]
    assert len(said) == 2
    assert ("DTensor" in said[0]) == (kind == "fsdp")


COMPILED = """
import torch
from torch import nn
import backspot
from torch._dynamo.utils import counters

model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
def step():
    optimizer.zero_grad()
    compiled(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()

step()
found = backspot.profile(step, model, steps=2, trials="none")
before = counters["stats"]["unique_graphs"]
from backspot.live.trials.attempts import chains_of, with_trials
from backspot.live.trials.trial import Live
from backspot.results import Finding
from backspot.results.findings import Place, Saving
from backspot.results.report import changed

places = (Place("(optimizer)", "", 1, 10**6),)
rules = ("optimizer-kernels", "zero-grad-fill", "attention-math")
findings = tuple(Finding(rule, rule, "", "Do it.", 10**6, places, 1) for rule in rules)
report = changed(found, findings=findings)
live = chains_of(step, Live({"": model}, [optimizer]))
found = with_trials(report, live, "operators").findings
for one in sorted(found, key=lambda one: rules.index(one.rule)):
    print(one.tried.why_not or "tried")
step()
print(counters["stats"]["unique_graphs"] - before)
"""


@pytest.mark.slow
def test_compiled_code_is_not_compiled_again_after_trials(tmp_path):
    done = subprocess.run(
        [*preloaded.python(), "-c", COMPILED],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    refused = "the step runs compiled code"
    assert done.stdout.splitlines() == ["tried", "tried", refused, "0"], done.stderr


def test_without_trials_nothing_is_said_that_only_a_trial_can_know():
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(300)])
    optimizer = torch.optim.RMSprop(model.parameters(), foreach=False)

    def step():
        optimizer.zero_grad()
        torch.stack(list(model)).sum().backward()
        optimizer.step()

    report = backspot.profile(step, model, steps=2, trials="none")
    (optimizing,) = (phase for phase in report.phases if phase.name == "optimizer")
    assert optimizing.wall_ns > 0.05 * report.whole_ns  # from here on trials look at it
    assert all(finding.remedy for finding in report.findings)


def test_what_trials_look_for_is_known_once_though_its_module_is_imported_again(report):
    # As after an interrupt in the middle of the first import.
    name = "backspot.live.trials.lookups"
    module = sys.modules.pop(name, None) or importlib.import_module(name)
    sys.modules.pop(name, None)
    importlib.import_module(name)
    sys.modules[name] = module
    _, (found,) = trained(report, "dense-embedding-gradient")
    assert found.tried.variants, found.tried.why_not


def pageable_copies(*megabytes):
    """Copies of these sizes to a GPU, as a step that was watched has them."""
    chains = Chains()
    for size in megabytes:
        tensor = torch.empty(0)
        given = {
            "shape": torch.Size([size, 1 << 20]),
            "dtype": torch.uint8,
            "pinned": False,
            "device": torch.device("cuda"),
        }
        chains.keep("copy", chains.node(tensor), given, key=size)
    return Live({}, [], chains=chains)


@pytest.mark.parametrize("megabytes", [(300, 301), (700,), (1 << 24,)])
def test_batches_for_pinned_memory_are_refused_before_they_are_made(report, megabytes):
    """Together, and in both kinds of memory: each of the first two would have room alone."""
    request = Request(finding("pageable-copy"), report, pageable_copies(*megabytes))
    with pytest.raises(Refused, match="a trial may take"):
        lookups.pinned(request)


@pytest.mark.parametrize(
    "name", ["float32", "bool", "int64", "complex64", "bits8", "uint1", "int4", "float4_e2m1fn_x2"]
)
def test_a_batch_of_any_dtype_can_be_made_in_memory_of_its_own(name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    for shape in ((), (0, 3), (2, 3)):
        batch = touched(torch.Size(shape), dtype)
        assert (tuple(batch.shape), batch.dtype) == (shape, dtype)
        assert all(batch.untyped_storage())


def test_a_remedy_that_does_more_for_a_step_than_its_pieces_show_is_worth_what_the_step_says():
    """As copies for which the host no longer waits; the code as it is, run again, is worth 0."""
    long, short = torch.ones(1 << 20), torch.ones(1 << 10)
    variants = {
        "as it is": [Piece(partial(torch.exp, long))],
        "less": [Piece(partial(torch.exp, short))],
    }
    trials = (
        Trial("exponentials", variants, worth=worth)
        for worth in (None, lambda less: [host + 1e9 for host, _ in less])
    )
    step_ns = 10_000_000_000
    plain, with_step = (
        measure(trial, Clock(torch.device("cpu")), step_ns, 0.5, lambda less: [0.0] * len(less))
        for trial in trials
    )
    assert plain.variants[1].saves_ns < 500_000_000 < 1_000_000_000 < with_step.best.saves_ns
