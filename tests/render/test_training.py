"""A whole training in words."""

from __future__ import annotations

from dataclasses import replace

from backspot.analysis.training import StepTimes
from backspot.render.training import rescaled, training_facts, training_line
from backspot.results import LoaderUse, RareWork
from support.report_parts import report, row

MS = 1_000_000


def facts(*uses):
    account = StepTimes()
    for _ in range(40):
        account.add(10 * MS, 0, MS, MS, 10 * MS, 0)
    return list(training_facts(account.training(uses)))


def test_beside_a_gpu_the_shares_of_a_step_are_said_to_be_of_the_host():
    account = StepTimes()
    for _ in range(40):
        account.add(10 * MS, 0, 3 * MS, MS, 10 * MS, 0)
    shares = "60% forward and all else, 30% backward, 10% optimizer)."
    assert training_line(account.training(())).endswith(f"10.0 ms ({shares}")
    assert training_line(account.training(()), has_gpu=True).endswith(
        f"10.0 ms (the host: {shares}"
    )


def test_loaders_that_are_made_anew_in_each_epoch_are_told_in_one_sentence():
    assert facts(*[LoaderUse(2, 10, 4, 40 * MS)] * 50) == [
        "200 of 500 batches were late: the 2 workers of their loaders cannot keep up, by 10.0 ms "
        "each time."
    ]


def test_loaders_with_other_numbers_of_workers_have_a_sentence_each():
    assert facts(LoaderUse(2, 10, 4, 40 * MS), LoaderUse(1, 10, 5, 40 * MS)) == [
        "4 of 10 batches were late: the 2 workers of their loader cannot keep up, by 10.0 ms each "
        "time.",
        "5 of 10 batches were late: the 1 worker of their loader cannot keep up, by 8.0 ms each "
        "time.",
    ]


def test_of_loaders_that_keep_up_nothing_is_told():
    assert facts(LoaderUse(2, 1000, 4, 40 * MS), LoaderUse(2, 10, 0, 0)) == []


def test_late_batches_of_which_the_recording_knows_the_cost_are_told_once():
    """The recording's are all that are longer than most, and the training's those alike."""
    account = StepTimes()
    for at in range(400):
        late = 50 * MS * (at % 20 == 19)
        account.add(10 * MS + late, late, MS, MS, 10 * MS, 0)
    training = account.training(())
    (told,) = training_facts(training)
    assert told == "Once in 20 steps: waiting for data, 50.0 ms, 2.5 ms a step."
    recorded = RareWork("data", 10.0, 30 * MS, 3 * MS, 0.2, (4,))
    assert list(training_facts(training, [recorded])) == []
    assert list(training_facts(training, [replace(recorded, name="evaluation")])) == [told]


def test_a_report_that_is_completed_says_that_its_times_are_no_longer_those_on_the_screen():
    printed = replace(step_of(3_213_000_000), clock="real")
    assert rescaled(printed, printed) == ""
    completed = replace(step_of(1_781_000_000), clock="real")
    said = ", and its times: those that were printed are of a step of 3213 ms, not 1781 ms"
    assert rescaled(printed, completed) == said
    assert rescaled(printed, replace(completed, clock="recorded")) == ""


def step_of(ns):
    return replace(report([row("fc", wall=ns)]), step_ns=ns)
