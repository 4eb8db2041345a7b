"""Replays of traces made by hand, where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from backspot.analysis.attribution.ownership import attribute
from backspot.analysis.findings import Removable
from backspot.analysis.recording import Recording
from backspot.analysis.replay.changes import free
from backspot.analysis.replay.host import ZERO, ProfilerCost
from backspot.analysis.replay.replay import fit, host_times
from backspot.analysis.replay.replayable import Refusal, Replayable, prepare
from backspot.analysis.replay.saving import Change, change_of_paths, replays
from backspot.analysis.replay.simulation import simulate
from backspot.trace.names import batch_mark
from support.replays import BACKWARD, MS, STEPS, US, Program, replay, saved_by_step, unfitted

NO_WAITS = np.empty(0, np.int64)


def saves(recording: Replayable, **factors: float) -> float:
    """Milliseconds of the second step, which has one before and one after."""
    change = change_of_paths(recording, factors)
    return saved_by_step(recording, ZERO, [change])[1, 0] / MS


def test_a_module_hidden_behind_another_on_its_own_stream_saves_nothing(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 100 * US)
        program.node(step, "a", at + 100 * US, at + 300 * US)
        program.trace.kernel(at + 20 * US, at + 5 * MS, launch=at + 10 * US, stream=8)
        program.trace.kernel(at + 120 * US, at + 9 * MS, launch=at + 110 * US, stream=7)
        program.call("cudaStreamWaitEvent", at + 400 * US, at + 401 * US)
        program.trace.kernel(at + 9 * MS, at + 28 * MS, launch=at + 410 * US, stream=7)
        program.call("cudaDeviceSynchronize", at + 500 * US, at + 28 * MS + 5 * US)
    found = program.recording(tmp_path)
    assert saves(found, b=0.0) == pytest.approx(0.15, abs=0.02)  # its host time alone
    # Then the work of the other stream holds the step.
    assert saves(found, a=0.0) == pytest.approx(4.0, abs=0.25)
    assert saves(found, a=0.0, b=0.0) == pytest.approx(8.9, abs=0.25)


@pytest.mark.parametrize(("blocks", "b", "a"), [(8.0, 6.1, 7.1), (0.5, 0.1, 4.1)])
def test_kernels_of_two_queues_that_fill_a_device_follow_one_another(tmp_path, blocks, b, a):
    """Each starts as the last blocks of the one before end. Others stay where they are."""
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 100 * US)
        program.node(step, "a", at + 100 * US, at + 200 * US)
        kernels = [(0, 4, 8, 10), (3, 8, 7, 110), (7, 12, 8, 20), (11, 16, 7, 120)]
        for begin, end, stream, launch in kernels:
            program.trace.kernel(
                at + begin * MS + 150 * US,
                at + end * MS + 150 * US,
                launch=at + launch * US,
                stream=stream,
                blocks=blocks,
            )
        for small in range(1, 6):  # as in most queues, one directly after the other
            begin = at + 16 * MS + (150 + 2 * small) * US
            program.trace.kernel(begin, begin + US, launch=at + (130 + small) * US)
        program.call("cudaDeviceSynchronize", at + 300 * US, at + 16 * MS + 170 * US)
    found = program.recording(tmp_path)
    assert saves(found, b=0.0) == pytest.approx(b, abs=0.3)
    assert saves(found, a=0.0) == pytest.approx(a, abs=0.3)


def test_in_a_step_that_waits_for_the_host_a_kernel_saves_nothing_and_a_node_saves_all(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 8 * MS)
        program.trace.kernel(at + 1_010 * US, at + 2 * MS, launch=at + 1 * MS)
        program.node(step, "a", at + 8 * MS, at + 16 * MS)
        program.trace.kernel(at + 9_010 * US, at + 10 * MS, launch=at + 9 * MS)
    found = program.recording(tmp_path)
    ownership = found.ownership
    none = np.zeros(len(ownership.spans.start), bool)
    work = np.ones(len(ownership.work.start), bool)
    kernels = saved_by_step(found, ZERO, [free(found, Removable(none, work, NO_WAITS))])
    assert kernels[1, 0] == pytest.approx(0, abs=1)
    # A call of 50 microseconds in the forward goes with each node.
    assert saves(found, b=0.0) == pytest.approx(8.05, abs=0.01)
    assert saves(found, a=0.5) == pytest.approx(4.025, abs=0.01)


def b_waits_for_its_kernel(program, step, at):
    program.node(step, "b", at, at + 6 * MS)
    program.trace.kernel(at + 20 * US, at + 5 * MS, launch=at + 10 * US)
    program.call("cudaStreamSynchronize", at + 30 * US, at + 5_010 * US)


def test_the_host_that_waits_for_a_kernel_saves_the_kernel(tmp_path):
    program = Program()
    for step, at in program.steps():
        b_waits_for_its_kernel(program, step, at)
        program.node(step, "a", at + 6 * MS, at + 14 * MS)
        program.trace.kernel(at + 6_020 * US, at + 8 * MS, launch=at + 6_010 * US)
    found = program.recording(tmp_path)
    ownership = found.ownership
    none = np.zeros(len(ownership.spans.start), bool)
    long = ownership.work.end - ownership.work.start > 4 * MS
    kernel = saved_by_step(found, ZERO, [free(found, Removable(none, long, NO_WAITS))])
    assert kernel[1, 0] == pytest.approx(4.98 * MS, abs=0.05 * MS)
    assert saves(found, b=0.0) == pytest.approx(6.05, abs=0.02)
    assert saves(found, a=0.0) == pytest.approx(8.05, abs=0.02)


def test_a_wait_that_is_left_out_lets_the_host_go_on(tmp_path):
    program = Program()
    for step, at in program.steps():
        b_waits_for_its_kernel(program, step, at)
        program.node(step, "a", at + 6 * MS, at + 14 * MS)
    found = program.recording(tmp_path)
    ownership = found.ownership
    none = np.zeros(len(ownership.spans.start), bool)
    nothing = np.zeros(len(ownership.work.start), bool)
    change = free(found, Removable(none, nothing, ownership.waits.event))
    assert saved_by_step(found, ZERO, [change])[1, 0] == pytest.approx(4.98 * MS, abs=0.05 * MS)


def test_communication_hidden_behind_a_module_saves_nothing_until_it_is_exposed(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 100 * US)
        program.trace.kernel(at + 20 * US, at + 2 * MS, launch=at + 10 * US)
        program.call("cudaStreamWaitEvent", at + 60 * US, at + 61 * US)
        program.trace.kernel(
            at + 2_001 * US, at + 6 * MS, launch=at + 70 * US, stream=20,
            name="ncclDevKernel_AllReduce_Sum_f32",
        )  # fmt: skip
        program.node(step, "a", at + 200 * US, at + 300 * US)
        program.trace.kernel(at + 2_002 * US, at + 20 * MS, launch=at + 210 * US)
        program.call("cudaStreamWaitEvent", at + 320 * US, at + 321 * US)
        program.trace.kernel(at + 20_002 * US, at + 29 * MS, launch=at + 330 * US)
        program.call("cudaDeviceSynchronize", at + 500 * US, at + 29 * MS + 5 * US)
    found = program.recording(tmp_path)
    assert saves(found, **{"(communication)": 0.0}) == pytest.approx(0, abs=1 / MS)
    assert saves(found, a=0.0) == pytest.approx(14.0, abs=0.25)  # then it waits for the exchange


FETCH = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def fetching(tmp_path, waits, queue=2, unpickling=MS, marked=True, count=STEPS):
    """Steps of 40 ms that begin with the fetch of a batch, and then compute for 7 ms in ``a`` or b.

    Each waits for so long, and then unpickles the batch; the rest of the step is other work.
    """
    program = Program(count)
    for (step, at), wait in zip(program.steps(), waits, strict=True):
        begin = at + MS
        program.trace.annotation(FETCH, begin, begin + wait + unpickling)
        if marked:
            mark = batch_mark(1, 1, queue, wait)
            program.trace.annotation(
                mark, begin + wait + unpickling, begin + wait + unpickling + 10
            )
        after = begin + wait + unpickling + US
        program.node(step, "b", after, after + 4 * MS)
        program.node(step, "a", after + 4 * MS, after + 7 * MS)
    return program.recording(tmp_path)


def without_waits(found):
    none = np.zeros(len(found.ownership.spans.start), bool)
    nothing = np.zeros(len(found.ownership.work.start), bool)
    return free(found, Removable(none, nothing, found.batches.event))


def test_where_each_step_waits_for_workers_a_faster_module_waits_for_longer(tmp_path):
    found = fetching(tmp_path, [10 * MS] * 3)
    saved = saved_by_step(found, ZERO, [change_of_paths(found, {"a": 0.0}), without_waits(found)])
    np.testing.assert_allclose(saved[:, 0], 0, atol=60 * US)
    # Without workers that are late each step is shorter by its wait, whatever their number.
    np.testing.assert_allclose(saved[:, 1], 10 * MS, atol=20 * US)


def test_where_batches_are_ready_a_module_saves_its_time_however_long_unpickling_takes(tmp_path):
    found = fetching(tmp_path, [0] * 3, unpickling=8 * MS)
    saved = saved_by_step(found, ZERO, [change_of_paths(found, {"a": 0.0}), without_waits(found)])
    np.testing.assert_allclose(saved[:, 0], 3.05 * MS, atol=10 * US)
    np.testing.assert_allclose(saved[:, 1], 0.0, atol=10 * US)


def test_workers_that_had_to_wait_for_the_host_deliver_sooner_to_a_faster_one(tmp_path):
    """They were as far ahead as they may be, so that the host decided when to load the last."""
    found = fetching(tmp_path, [0, 0, 0, 10 * MS], queue=2, count=4)
    a = change_of_paths(found, {"a": 0.0})
    # The last batch comes as long after the second one was fetched as it did. The host is there
    # two modules sooner.
    saved = saved_by_step(found, ZERO, [a])[:, 0]
    np.testing.assert_allclose(saved, [3.05 * MS, 3.05 * MS, 3.05 * MS, -3.05 * MS], atol=0.1 * MS)


def test_where_data_limits_the_step_the_rest_of_it_says_what_recording_cost(tmp_path):
    """The step takes as long at any cost, and without the wait as long as it really computes."""
    found = fetching(tmp_path, [10 * MS] * 3)
    for computes in (24 * MS, 20 * MS):
        cost = fit(found, 40 * MS, data_ns=40 * MS - computes)
        assert isinstance(cost, ProfilerCost)
        replayed = replays(found, cost, [without_waits(found)])[0]
        np.testing.assert_allclose(replayed.steps, 40 * MS, rtol=0.02)
        np.testing.assert_allclose(replayed.saved[:, 0], 39 * MS - computes, atol=MS)


def test_a_trace_that_does_not_say_whether_batches_were_ready_is_not_replayed(tmp_path):
    with pytest.raises(AssertionError, match="does not say whether it was ready"):
        fetching(tmp_path, [4 * MS] * 3, marked=False)


def test_calls_that_start_no_work_cost_nothing_to_record(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 8 * MS)
        program.trace.kernel(at + 2 * MS, at + 3 * MS, launch=at + MS)
        for call in range(10):
            begin = at + 4 * MS + call * 10 * US
            program.call("cudaEventRecord", begin, begin + US)
    found = program.recording(tmp_path)
    dear = ProfilerCost(0.0, 1.0 * US, 0.0, 0.0, 0.0)
    without = (found.host(ZERO) - found.host(dear)).sum()
    assert without == pytest.approx(STEPS * US)  # the launches


def test_costs_are_taken_from_the_host_and_not_from_the_kernels(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 8 * MS)
        program.trace.kernel(at + 8 * MS, at + 10 * MS, launch=at + 7 * MS)
    found = program.recording(tmp_path)
    cost = ProfilerCost(operator_ns=100 * US, runtime_ns=0, label_ns=0, marker_ns=0, node_ns=0)
    replayed = replay(found, cost)
    work = attribute(replayed.events).work
    np.testing.assert_array_equal(work.end - work.start, 2 * MS)
    events = replayed.events
    # A step has a mark, two operators and a node with an event of the engine around it.
    assert events.end.max() <= found.events.end.max() - STEPS * 4 * 100 * US


def test_a_launch_that_finds_the_queue_full_waits_for_room(tmp_path):
    program = Program()
    for step, at in program.steps():
        begin = at + 100 * US
        program.node(step, "b", at, at + 25 * MS)
        count, length = 1_200, 20 * US
        ends = [begin + (number + 1) * length for number in range(count)]
        for number in range(count):
            launch = max(at + number * US, ends[number - 1024] if number >= 1024 else 0)
            program.trace.kernel(ends[number] - length, ends[number], launch=launch)
    found = program.recording(tmp_path)
    count = len(found.ownership.work.start)
    np.testing.assert_array_equal(found.graph.after_end_of[1_024:], np.arange(count - 1_024))
    at_once = host_times(found, 0 * found.host(ZERO))
    replayed = simulate(found, at_once, found.work(ZERO))
    launched, ended = replayed.at(found, found.graph.launch), replayed.end[found.schedule.place]
    assert (launched[1_024:] >= ended[: count - 1_024]).all()


def test_without_the_kernels_that_fill_a_queue_launches_wait_no_longer(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 12 * MS)
        free = 0
        for number in range(1_400):
            end = at + (number + 1) * 20 * US
            launch = max(free, at + number * 2 * US)
            free = max(launch + 2 * US, end - 1_000 * 20 * US)
            program.trace.kernel(end - 20 * US, end, launch=launch, launched=free)
    found = program.recording(tmp_path)
    held = [wait for wait in found.waits if wait.for_room]
    assert len(held) == 289 * program.count
    # Each takes 20 us, of which a launch needs 5. With kernels of no length, none of them waits.
    work = np.arange(len(found.ownership.work.start))
    change = Change(work[:0], np.empty(0), work, np.zeros(len(work)))
    saved = saved_by_step(found, ZERO, [change])
    assert saved[1, 0] == pytest.approx(289 * 15 * US, rel=0.03)
    refused = unfitted(found, ZERO).change({"no_waits": True})
    assert isinstance(refused, Refusal)


def test_a_factor_is_for_what_is_in_a_module_unless_that_has_its_own(tmp_path):
    program = Program(paths=("a", "a.b", "ab"))
    for step, at in program.steps():
        program.trace.forward("", "Model", at - BACKWARD + US, at - US)
        for number, path in enumerate(program.paths):
            program.node(step, path, at + number * 2 * MS, at + (number + 1) * 2 * MS)
    found = program.recording(tmp_path)
    assert saves(found, a=0.0) == pytest.approx(4.1, abs=0.01)
    assert saves(found, **{"a": 0.0, "a.b": 1.0}) == pytest.approx(2.05, abs=0.01)
    assert saves(found, **{"a.b": 0.0, "a": 0.5}) == pytest.approx(3.075, abs=0.01)


def test_threads_that_work_at_once_are_refused(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 8 * MS)
        program.trace.operator("aten::sort", at, at + 8 * MS, thread=9)
    refused = prepare(Recording.read(program.save(tmp_path)))
    assert isinstance(refused, Refusal)
    assert "Several threads run operators at once" in refused.reason


def test_a_trace_that_is_cut_short_is_refused(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 8 * MS)
    recording = Recording.read(program.save(tmp_path))
    refused = prepare(replace(recording, events=replace(recording.events, truncated=True)))
    assert refused == Refusal("The trace is cut short, and the work of the devices comes last.")


def test_work_without_launches_is_refused(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 8 * MS)
        program.trace.kernel(at + 20 * US, at + 2 * MS, launch=at + 10 * US)
        program.trace.kernel(at + 2 * MS, at + 9 * MS, launch=None)
    refused = prepare(Recording.read(program.save(tmp_path)))
    assert isinstance(refused, Refusal)
    assert refused.reason.endswith("of the device time has no launch record.")
