"""Replays of real recordings: what holds of every one."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from backspot.analysis.recording import Recording
from backspot.analysis.replay.host import MEASURED, ZERO
from backspot.analysis.replay.replay import fit
from backspot.analysis.replay.replayable import Refusal
from backspot.analysis.replay.saving import free_owners, scaled_owners
from support.choice import slow_except
from support.recordings import IN_ONE_WORKER
from support.replays import PATHS, recorded, replay, saved_by_step, unfitted

pytestmark = IN_ONE_WORKER

SOME = ("two_streams", "sync_in_backward", "fsdp2.rank0", "vit_patch_drop", "plain_recommender")


def lengths(recording) -> np.ndarray:
    return recording.steps.end - recording.steps.start


@pytest.mark.parametrize("name", slow_except(SOME, PATHS))
def test_without_costs_the_recording_comes_out(name):
    recording = recorded(name)
    replayed = replay(recording, ZERO)
    np.testing.assert_allclose(replayed.step_ns, lengths(recording), rtol=0.005)
    np.testing.assert_array_equal(replayed.events.start, recording.events.start)
    np.testing.assert_array_equal(replayed.events.duration, recording.events.duration)


@pytest.mark.parametrize("name", slow_except(SOME, PATHS))
def test_without_the_profiler_a_step_takes_no_longer_and_all_owners_stay(name):
    recording = recorded(name)
    replayed = replay(recording, MEASURED)
    assert (np.array(replayed.step_ns).sum()) <= lengths(recording).sum()
    assert (replayed.events.duration >= 0).all()
    again = Recording.of(replayed.events)
    np.testing.assert_array_equal(again.ownership.owner, recording.ownership.owner)
    windows = again.windows
    # Some windows begin with other work when launches move: the sum of all steps stays.
    between = recording.steps.start[1:] - recording.steps.end[:-1]
    total = windows.end[-1] - windows.start[0] - between.sum()
    assert sum(replayed.step_ns) == pytest.approx(total, rel=0.03)


@pytest.mark.parametrize("name", slow_except(SOME, PATHS))
def test_a_free_module_saves_no_more_than_the_step_and_all_of_them_no_less_than_one(name):
    recording = recorded(name)
    free = free_owners(recording)
    everything = scaled_owners(recording, dict.fromkeys(free, 0.0))
    changes = [*free.values(), everything]
    sums = saved_by_step(recording, ZERO, changes).sum(axis=0)
    assert (sums >= -1).all()
    assert (sums <= sums[-1] + 1).all()
    assert sums[-1] <= lengths(recording).sum() + 1
    _, savings = unfitted(recording, ZERO).savings(changes)
    assert all(0 <= saving.low_ns <= saving.ns <= saving.high_ns for saving in savings)


@pytest.mark.parametrize("name", SOME)
def test_a_smaller_factor_never_saves_less(name):
    recording = recorded(name)
    owners = list(free_owners(recording))
    factors = (1.0, 0.7, 0.5, 0.2, 0.0)
    changes = [scaled_owners(recording, {o: f}) for o in owners for f in factors]
    sums = saved_by_step(recording, MEASURED, changes).sum(axis=0)
    table = sums.reshape(len(owners), len(factors))
    assert (np.diff(table, axis=1) >= -1).all()
    np.testing.assert_allclose(table[:, 0], 0.0, atol=1)


@pytest.mark.parametrize("name", SOME)
def test_changes_at_once_save_as_much_as_each_alone(name):
    """The table of many variants gives what one variant gives."""
    recording = recorded(name)
    changes = list(free_owners(recording).values())
    together = saved_by_step(recording, MEASURED, changes)
    for number, change in enumerate(changes[:3]):
        alone = saved_by_step(recording, MEASURED, [change])
        np.testing.assert_array_equal(together[:, number], alone[:, 0])


@pytest.mark.parametrize("name", SOME)
def test_all_work_is_scheduled_once_and_after_what_it_waits_for(name):
    recording = recorded(name)
    graph, schedule = recording.graph, recording.schedule
    batches, place = schedule.batches, schedule.place
    assert [batch.first for batch in batches[1:]] == [batch.last for batch in batches[:-1]]
    assert (batches[0].first, batches[-1].last) == (0, schedule.last[-1] + 1)
    np.testing.assert_array_equal(schedule.work[place], np.arange(len(graph.launch)))
    begun = 0
    for batch in batches:
        waited = [cause for _, cause, *_ in batch.waits]
        assert (np.append(batch.room, waited) < begun).all()
        for first, last, before in batch.runs:
            assert first == begun
            works, rows = schedule.work[first:last], schedule.row[first:last]
            assert (rows < batch.last).all()  # it can wait for what is launched later
            np.testing.assert_array_equal(
                place[graph.before[works[1:]]], np.arange(first, last - 1)
            )
            assert before < first
            causes = [cause for work in works for cause in graph.other.get(work, ())]
            assert (place[np.array(causes, int)] < first).all()
            begun = last
    assert begun == len(graph.launch)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("factor", slow_except([1.4], [0.4, 1.0, 1.4]))
def test_costs_are_fitted_to_a_real_step(name, factor):
    recording = recorded(name)
    real = float(np.median(replay(recording, MEASURED.scaled(factor)).step_ns))
    cost = fit(recording, real)
    assert not isinstance(cost, Refusal)
    assert np.median(replay(recording, cost).step_ns) == pytest.approx(real, rel=0.01)
    assert 0 < cost.uncertainty < MEASURED.uncertainty


def test_what_the_costs_do_not_explain_is_a_slower_host():
    recording = recorded("launch_bound")
    cost = fit(recording, 0.5 * float(np.median(lengths(recording))))
    assert not isinstance(cost, Refusal)
    assert cost.operator_ns == pytest.approx(1.5 * MEASURED.operator_ns)
    assert cost.slowdown > 1.2


def test_where_the_device_limits_the_step_its_host_is_as_fast_as_usual():
    """Any host explains the step. A slow one would hide what less work of the device saves."""
    recording = recorded("fp32_convnet")
    steps = [replay(recording, MEASURED.scaled(factor)).step_ns for factor in (0.5, 1.0, 1.5)]
    np.testing.assert_allclose(steps[0], steps[2], rtol=0.005)
    cost = fit(recording, float(np.mean(steps[1])))
    assert not isinstance(cost, Refusal)
    assert cost.operator_ns == pytest.approx(1.5 * MEASURED.operator_ns)
    assert cost.slowdown == pytest.approx(2.5 / 1.5)


def test_a_real_step_that_no_cost_explains_is_refused():
    refused = fit(recorded("fp32_convnet"), 1_000_000.0)
    assert isinstance(refused, Refusal)
    assert "A real step takes 1.0 ms" in refused.reason


def test_a_real_step_that_is_longer_than_any_replay_says_nothing_against_the_recording():
    recording = recorded("launch_bound")
    assert fit(recording, 1.2 * float(lengths(recording).mean())) is MEASURED
    assert fit(recording, 1.02 * float(lengths(recording).mean())) is not MEASURED


@pytest.mark.parametrize("longer", [1.2, 3.0])
def test_on_a_host_alone_a_longer_real_step_makes_what_is_saved_as_much_longer(longer):
    recording = recorded("chain_norm_function")
    usual = float(np.mean(replay(recording, MEASURED).step_ns))
    real = longer * float(lengths(recording).mean())
    cost = fit(recording, real)
    assert np.mean(replay(recording, cost).step_ns) == pytest.approx(real, rel=0.02)
    assert cost.uncertainty == MEASURED.uncertainty  # it is of another machine, as before
    half = {"factors": {"": 0.5}}
    saves = unfitted(recording, MEASURED).what_if(half).saves_ns
    on_busy_host = unfitted(recording, cost).what_if(half).saves_ns
    assert on_busy_host == pytest.approx(saves * real / usual, rel=0.02)


def test_uncertain_costs_widen_the_range():
    recording = recorded("launch_bound")
    change = list(free_owners(recording).values())[3]
    sure, unsure = (
        unfitted(recording, cost).savings([change])[1][0]
        for cost in (replace(MEASURED, uncertainty=0.0), MEASURED)
    )
    assert unsure.ns == sure.ns
    assert unsure.high_ns - unsure.low_ns > sure.high_ns - sure.low_ns


def test_what_if_takes_paths_with_the_modules_in_them():
    found = unfitted(recorded("two_streams"), ZERO)

    def saved(**factors):
        return found.what_if({"factors": factors}).saves_ns

    half, free = saved(main=0.5, side=0.5), saved(main=0.0, side=0.0)
    inner = saved(**{"main": 0.0, "main.layers.0": 1.0, "side": 0.0})
    assert 0 < half < free
    assert inner <= free
    assert saved(main=1.0) == 0


# Planted causes, recorded beside the same model without them --------------------------------------

PLANTED = (
    ("duplicates_skewed_recommender", "items", "plain_recommender", 0.03),
    ("trip_gradient_gpt", "extra", "plain_gpt", 0.05),
)


@pytest.mark.parametrize(("name", "path", "plain", "tolerance"), PLANTED)
def test_a_free_cause_saves_what_the_model_without_the_cause_takes_less(
    name, path, plain, tolerance
):
    recording = recorded(name)
    saves = unfitted(recording, MEASURED).what_if({"factors": {path: 0.0}}).saves_ns
    step = np.median(lengths(recording))
    real = step - np.median(lengths(recorded(plain)))
    assert saves == pytest.approx(real, abs=tolerance * step)
