"""What is said of a step from what host and device of two copies need."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from itertools import accumulate, chain

import pytest
from hypothesis import assume, given, strategies as st

from backspot.live.plan.account import Account, Step, Times
from backspot.live.plan.comparing import with_copy, with_unknown_loss
from backspot.results import Rung
from backspot.results.report import predictor_of
from support import h200

MS = 1_000_000

times = st.integers(0, 200).map(lambda ms: float(ms * MS))


def needs(host: float, device: float = 0.0) -> Times:
    """What a copy needs whose host and device work at once."""
    return Times(host, device, max(host, device))


copies = st.builds(needs, times, times)
steps = st.builds(Step, times, times, times, times)
shares = st.integers(0, 10).map(lambda tenths: tenths / 10)


# Any numbers --------------------------------------------------------------------------------------


@given(steps, copies)
def test_a_copy_that_needs_the_same_changes_nothing(step, copy):
    assert step.with_copy(copy, copy) == step


@given(steps, copies, copies)
def test_no_copy_makes_a_step_shorter_than_what_no_copy_changes(step, now, new):
    found = step.with_copy(now, new)
    assert found.host >= -1
    assert found.device >= -1
    assert found.ns >= step.beside - 1
    assert found.beside == step.beside


@given(steps, copies, copies, times)
def test_more_work_never_makes_a_step_shorter(step, now, new, more):
    for longer in (new._replace(host=new.host + more), new._replace(device=new.device + more)):
        assert step.with_copy(now, longer).ns >= step.with_copy(now, new).ns


@given(steps, shares, shares, copies, copies)
def test_two_settings_in_turn_make_what_both_make_at_once(step, of_host, of_device, middle, last):
    """Where the copies fit into the step."""
    assume(step.outside <= step.host)
    now = needs(of_host * (step.host - step.outside), of_device * step.device)
    apart = step.with_copy(now, middle).with_copy(middle, last)
    assert apart.ns == pytest.approx(step.with_copy(now, last).ns, abs=2)


@given(steps, copies, st.floats(1, 3))
def test_a_machine_that_is_slower_now_than_in_the_step_changes_nothing(step, new, slower):
    """Where the copies are all of the step that they can be, their ratio counts."""
    now = needs(max(0.0, step.host - step.outside), step.device)
    later = (needs(*(slower * ns for ns in one[:2])) for one in (now, new))
    assert step.with_copy(*later).ns == pytest.approx(step.with_copy(now, new).ns, rel=1e-6)


# One of the two limits ----------------------------------------------------------------------------


def test_a_thread_s_own_time_is_clock_time_of_a_step_that_other_programs_held_up():
    """Each copy takes a quarter of the clock time for itself, as the step did."""
    step = Step(120 * MS, outside=40 * MS)
    found = step.with_copy(Times(20 * MS, whole=80 * MS), Times(10 * MS, whole=70 * MS))
    assert found.ns == 80 * MS


def test_a_faster_device_helps_until_the_host_limits_the_step():
    step = Step(30 * MS, 100 * MS, 1 * MS)
    now = needs(20 * MS, 90 * MS)
    assert step.with_copy(now, needs(20 * MS, 40 * MS)).ns == 51 * MS
    assert step.with_copy(now, needs(20 * MS, 10 * MS)).ns == 31 * MS
    assert step.with_copy(now, needs(25 * MS, 10 * MS)).ns == 36 * MS


def test_a_faster_host_does_not_help_where_the_device_limits_the_step():
    step = Step(30 * MS, 100 * MS)
    assert step.with_copy(needs(20 * MS, 90 * MS), needs(5 * MS, 90 * MS)).ns == 100 * MS


@pytest.mark.parametrize(
    ("faster", "limit", "verdict"),
    [(needs(20, 85), "device", "helps"), (needs(40, 10), "host", "helps"),
     (needs(25, 99), "device", "does not help"), (needs(95, 10), "host", "does not help")],
)  # fmt: skip
def test_a_rung_says_which_of_the_two_limits_its_step(faster, limit, verdict):
    step, now = Step(30 * MS, 100 * MS), needs(20 * MS, 90 * MS)
    new = needs(faster.host * MS, faster.device * MS)
    rung, _ = with_copy(Rung("bf16", "precision"), step, [(now, new)] * 8)
    assert (rung.limit, rung.verdict) == (limit, verdict)
    assert rung.low_ns == rung.step_ns == rung.high_ns == step.with_copy(now, new).ns


@given(st.lists(st.tuples(copies, copies), min_size=1, max_size=12), steps)
def test_the_step_is_within_its_interval_which_few_rounds_do_not_have(rounds, step):
    rung, found = with_copy(Rung("bf16", "precision"), step, rounds)
    assert rung.step_ns == pytest.approx(found.ns, abs=1)
    if len(rounds) < 6:
        assert (rung.low_ns, rung.high_ns) == (0, 0)
        assert rung.verdict == "undecided"
    elif rung.high_ns:
        assert rung.low_ns <= rung.step_ns <= rung.high_ns


@pytest.mark.parametrize(
    ("apart", "copy", "expected"),
    [
        ((30, 48), needs(16, 40), Step(30, 48, 2, 6)),
        ((30, 48), needs(32, 40), Step(40, 48, 2, 8)),
        ((30, 48), needs(44, 40), Step(50, 48, 0, 10)),
        ((48, 49), needs(20, 40), Step(48, 49, 1, 9.6)),
        ((60, 55), needs(20, 40), Step(50, 50, 0, 10)),
        (None, needs(20, 40), Step(25, 50, 0, 5)),
        (None, needs(45, 40), Step(50, 40, 0, 10)),
        (None, needs(30), Step(50, outside=20)),
    ],
    ids=[
        *("known", "slower copy", "copy of another time", "near", "too long"),
        *("limited by device", "limited by host", "CPU"),
    ],
)
def test_the_host_s_part_of_a_step_is_what_a_copy_shows_and_at_least_what_a_replay_says(
    apart, copy, expected
):
    """Four fifths of the host's time are the models'."""
    account = Account(50, 30, 0, 0, 0, apart, (0.8, 0.9))
    found = account.needs(copy, has_loss=False)
    assert asdict(found) == pytest.approx(asdict(expected))


def test_what_of_the_host_no_copy_runs_is_the_step_s_where_no_replay_knows_it():
    """Of 50 ms, 30 are the model's, and 10 its loss's."""
    account = Account(50, 30, 10, 0, 0)
    assert account.needs(needs(15, 40), has_loss=False).outside == pytest.approx(10)
    assert account.needs(needs(16, 40), has_loss=True).outside == pytest.approx(4)


@pytest.mark.parametrize("slow", [1, 2, 5])
def test_a_host_that_is_slow_for_a_while_is_so_for_both_copies(slow):
    """In three of seven rounds all takes as many times as long; the copies differ by a half."""
    step = Step(20 * MS, 100 * MS, outside=2 * MS)
    speeds = [1, slow, 1, slow, 1, slow, 1]
    rounds = [(needs(18 * MS * x, 98 * MS), needs(27 * MS * x, 8 * MS)) for x in speeds]
    rung, found = with_copy(Rung("bf16", "precision"), step, rounds)
    assert found.host == pytest.approx(29 * MS)
    assert rung.limit == "host"
    assert rung.low_ns <= 29 * MS <= rung.high_ns


def test_twice_the_batch_takes_what_two_steps_take_less_than_a_rest_that_does_not_grow():
    """Of 50 ms on a CPU, 30 are the model's, 5 the loss's and the loader's each."""
    account = Account(50 * MS, 30 * MS, 5 * MS, 5 * MS, 10 * MS)
    now, twice = needs(30 * MS), needs(60 * MS)
    step = account.needs(now, has_loss=False)
    rung, _ = with_copy(
        Rung("batch", "batch"), step, [(now, twice)] * 8, account.more(has_device=False), steps=2
    )
    assert rung.step_ns == (60 + 2 * 5 + 2 * 5 + 10) * MS // 2


@given(steps, copies, copies)
def test_no_part_of_a_copy_takes_less_than_nothing_or_more_than_the_step(step, whole, rest):
    part = step.share_of(whole, rest)
    assert 0 <= part.host <= max(step.host, 0) + 1
    assert 0 <= part.device <= step.device + 1


@pytest.mark.parametrize("busy", [1, 2, 0.5])
def test_a_part_has_its_share_of_the_host_and_its_time_on_the_device(busy):
    """The copy is 60 of 70 ms of the host and 90 of 100 of the device, however busy the host is."""
    step = Step(70 * MS, 100 * MS, outside=10 * MS)
    part = step.share_of(needs(60 * MS * busy, 90 * MS), needs(40 * MS * busy, 60 * MS))
    assert part[:2] == pytest.approx((20 * MS, 30 * MS))


def test_twice_the_batch_has_the_loss_that_the_settings_below_it_leave():
    """Of 70 ms on a CPU, the loss takes 40 as it is, and 20 in bf16: the model takes 30."""
    account = Account(70 * MS, 30 * MS, 40 * MS, 0, 0)
    as_it_is = account.needs(needs(70 * MS), has_loss=True)
    step = as_it_is.with_copy(needs(70 * MS), needs(50 * MS))
    loss = step.share_of(needs(50 * MS), needs(30 * MS))
    more = account.more(has_device=False, loss=loss)
    twice = [(needs(30 * MS), needs(60 * MS))] * 8
    rung, _ = with_copy(Rung("batch", "batch"), step, twice, more, steps=2)
    assert (step.ns, rung.step_ns) == (50 * MS, 50 * MS)


def test_of_a_loss_a_device_works_twice_as_long_for_twice_the_batch_and_the_host_does_not():
    account = Account(70 * MS, 30 * MS, 40 * MS, 5 * MS, 0)
    assert account.more(has_device=True) == Times(5 * MS, 40 * MS)
    assert account.more(True, Times(9 * MS, 20 * MS)) == Times(5 * MS, 20 * MS)


def test_an_undecided_rung_of_few_rounds_has_no_interval_whatever_its_loss_is():
    few = Rung("bf16", "precision", before_ns=50, step_ns=40, verdict="undecided")
    rung = with_unknown_loss(few, 20, "no backward of it was seen")
    assert (rung.low_ns, rung.high_ns, rung.verdict) == (0, 0, "undecided")
    assert "was not tried: no backward of it was seen" in rung.note


@pytest.mark.parametrize(("loss", "verdict"), [(10, "helps"), (30, "undecided")])
def test_a_rung_is_as_uncertain_as_the_loss_that_it_was_not_tried_with(loss, verdict):
    known = Rung(
        "bf16", "precision", before_ns=50, step_ns=40, low_ns=39, high_ns=41, verdict="helps"
    )
    rung = with_unknown_loss(known, loss, "")
    assert (rung.low_ns, rung.high_ns) == (39 - loss // 2, 41 + loss // 2)
    assert rung.verdict == verdict


# A recording --------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["apart", "of_models"])
def test_a_recording_that_cannot_be_replayed_leaves_the_account_without_what_that_says(
    asked, monkeypatch
):
    def fails(*_, **__):
        raise IndexError("out of bounds")

    report = h200.report_of("gpt2_checkpointed")
    known = Account.of(report)
    assert known.apart
    monkeypatch.setattr(type(predictor_of(report)), asked, fails)
    assert Account.of(report) == replace(known, apart=None, of_models=(0.0, 0.0))


# A host that runs ahead of its device -------------------------------------------------------------


def queued(issued, works, start=0.0):
    """When the host has issued all work, and when the device has ended each piece of it."""
    moments = [start + after for after in accumulate(issued)]
    ends = []
    for moment, work in zip(moments, works, strict=True):
        ends.append(max(moment, ends[-1] if ends else 0.0) + work)
    return moments[-1], ends


def usual_step(parts):
    """How long a step takes in a training of many steps, of which the host waits in none."""
    issued, works = ([*chain(*one)] for one in zip(*parts * 30, strict=True))
    _, ends = queued(issued, works)
    last = ends[len(ends) // 30 - 1 :: len(ends) // 30]
    return (last[-1] - last[9]) / 20


def kernels(draw, count, host, device):
    return [draw.uniform(0.5, 1.5) * host for _ in range(count)], [
        draw.uniform(0.2, 1.8) * device for _ in range(count)
    ]


def measured(part):
    """What a copy of it needs: the host from an idle device, the device with all issued before."""
    issued, works = part
    return needs(sum(issued), sum(works))


@pytest.mark.parametrize("of_device", [0.3, 0.8, 1.1, 2.0, 4.0])
@pytest.mark.parametrize("faster", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("of_host", [0.2, 1.0, 1.4])
def test_the_step_of_a_host_that_runs_ahead_is_what_was_said(of_device, faster, of_host):
    """Also where it is host or device by turns, and an optimizer that no copy runs comes last."""
    draw = random.Random(0)
    model = kernels(draw, 200, 1.0, of_device)
    optimizer = kernels(draw, 60, 1.5, 0.2)
    new = [of_host * one for one in model[0]], [faster * one for one in model[1]]
    real = usual_step([model, optimizer])
    host, device = (sum(map(sum, one)) for one in zip(model, optimizer, strict=True))
    step = Step(min(host, real), min(device, real), real - max(host, device))
    said = step.with_copy(measured(model), measured(new))
    truth = usual_step([new, optimizer])
    assert max(said.host, said.device) + said.beside == pytest.approx(truth, rel=0.02)


def test_a_difference_of_copies_that_wait_for_their_device_is_not_that_step():
    """What the two ways differ by where a faster device leaves the host as the limit."""
    draw = random.Random(0)
    model, optimizer = kernels(draw, 200, 1.0, 4.0), kernels(draw, 60, 1.5, 0.2)
    new = model[0], [0.1 * one for one in model[1]]
    real, truth = usual_step([model, optimizer]), usual_step([new, optimizer])
    before, after = (queued(*one)[1][-1] for one in (model, new))
    assert abs(real - (before - after) - truth) > 0.1 * truth
