"""Which batches of worker processes were ready, by marks and by evidence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from backspot import Finding, Report
from backspot.analysis.accounting.batches import Batches, find_batches
from backspot.analysis.recording import Options, Recording
from backspot.pipeline import report_of
from backspot.results.training import LoaderUse, Training
from backspot.trace import read_events
from backspot.trace.names import batch_mark, read_batch_mark
from support.synthetic import Trace

US, MS = 1_000, 1_000_000
FETCH = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
STATEFUL = "enumerate(DataLoader)#_StatefulMultiProcessingDataLoaderIter.__next__"
COUNTS = st.integers(1, 10**6)


def found_of(
    folder: Path,
    fetches: list[int],
    computing: list[int],
    *,
    marks: bool = False,
    name: str = FETCH,
) -> Batches:
    """What is found of fetches in turn with computing; marked ones waited all but 1 ms."""
    trace, at = Trace(), 0
    trace.forward("", "Model", 0, 10)
    trace.operator("aten::mul", 0, 10, seq=1)
    for fetch, after in zip(fetches, computing, strict=True):
        trace.annotation(name, at, at + fetch)
        at += fetch
        if marks:
            trace.annotation(batch_mark(1, 2, 4, max(0, fetch - MS)), at + 10, at + 20)
        at += after
    return find_batches(read_events(trace.save(folder / "trace.json")))


@given(COUNTS, COUNTS, COUNTS, st.integers(0, 10**12))
def test_a_mark_says_what_was_noted_in_microseconds(
    loader: int, workers: int, queue: int, waited: int
) -> None:
    said = read_batch_mark(batch_mark(loader, workers, queue, waited))
    assert said is not None
    assert said[:3] == (loader, workers, queue)
    assert bool(said[3]) is bool(waited)
    assert abs(said[3] - waited) <= 500


@pytest.mark.parametrize("name", ["batch of loader ", "batch of loader 1: ready", "batch"])
def test_a_mark_that_is_cut_short_says_nothing(name: str) -> None:
    assert read_batch_mark(name) is None


def test_marks_say_how_long_each_batch_was_waited_for(tmp_path: Path) -> None:
    batches = found_of(tmp_path, [9 * MS, MS, 3 * MS], [20 * MS] * 3, marks=True)
    assert batches.waited.tolist() == [8 * MS, 0, 2 * MS]
    assert (batches.arrived - batches.start).tolist() == [8 * MS, 0, 2 * MS]
    assert set(batches.workers.tolist()) == {2}
    assert set(batches.queue.tolist()) == {4}
    assert len(set(batches.loader.tolist())) == 1


def test_an_end_of_an_epoch_waits_for_no_batch(tmp_path: Path) -> None:
    trace = Trace()
    for at in (0, 40 * MS):
        trace.annotation(FETCH, at, at + 9 * MS)
    trace.annotation(batch_mark(1, 1, 2, 8 * MS), 9 * MS + 10, 9 * MS + 20)
    trace.forward("", "Model", 10 * MS, 11 * MS)
    batches = find_batches(read_events(trace.save(tmp_path / "trace.json")))
    assert batches.waited.tolist() == [8 * MS, 0]


def test_a_fetch_that_is_short_beside_the_step_was_no_wait(tmp_path: Path) -> None:
    batches = found_of(tmp_path, [2 * MS] * 5, [60 * MS] * 5)
    assert not batches.waited.any()


@pytest.mark.parametrize("name", [FETCH, STATEFUL])
def test_a_fetch_of_equal_length_after_equal_computing_can_be_either(
    tmp_path: Path, name: str
) -> None:
    batches = found_of(tmp_path, [10 * MS] * 8, [40 * MS] * 8, name=name)
    assert (batches.waited < 0).all()


def test_a_fetch_of_most_of_the_step_waited(tmp_path: Path) -> None:
    assert (found_of(tmp_path, [30 * MS] * 3, [10 * MS] * 3).waited > 0).all()


def test_a_fetch_that_is_much_longer_than_all_others_waited(tmp_path: Path) -> None:
    batches = found_of(tmp_path, [20 * MS, 100 * US, 100 * US] * 3, [20 * MS] * 9)
    assert batches.waited.tolist() == [20 * MS - 100 * US, 0, 0] * 3


@given(st.lists(st.integers(-3 * MS, 3 * MS), min_size=7, max_size=12))
def test_a_fetch_that_is_shorter_by_what_was_computed_longer_waited(
    tmp_path_factory: pytest.TempPathFactory, more: list[int]
) -> None:
    """And one whose length has nothing to do with it was ready."""
    more[:2] = [-3 * MS, 3 * MS]
    folder = tmp_path_factory.mktemp("traces")
    computing = [40 * MS + one for one in more]
    # The fetch that follows a longer step is shorter.
    waiting = found_of(folder, [10 * MS, *(10 * MS - one for one in more[:-1])], computing)
    assert (waiting.waited > 0).all()
    ready = found_of(folder, [10 * MS] * len(more), computing)
    assert not ready.waited.any()


def test_evidence_is_of_all_fetches_of_a_thread(tmp_path: Path) -> None:
    """Those of another thread say nothing about them."""
    trace = Trace()
    trace.forward("", "Model", 0, 10)
    for number in range(4):
        trace.event("user_annotation", FETCH, number * 50 * MS, number * 50 * MS + 10 * MS, 1)
        trace.event("user_annotation", FETCH, number * 50 * MS, number * 50 * MS + 20 * US, 2)
    batches = find_batches(read_events(trace.save(tmp_path / "trace.json")))
    long = batches.end - batches.start > MS
    assert (batches.waited[long] < 0).all()
    np.testing.assert_array_equal(batches.waited[~long], 0)


# Beside a device ---------------------------------------------------------------------------------


def trained(folder: Path, *, device_ms: int, training: Training) -> Report:
    """Four steps of 10 ms, of which a fetch takes 1 ms; a device works from the third on."""
    trace = Trace()
    for step in range(4):
        at = step * 10 * MS
        trace.annotation(f"ProfilerStep#{step}", at, at + 10 * MS - 10)
        trace.annotation(FETCH, at + 10, at + MS)
        trace.annotation(batch_mark(1, 1, 2, 0), at + MS + 10, at + MS + 20)
        trace.forward("a", "Model", at + MS, at + 4 * MS)
        trace.operator("aten::mul", at + 2 * MS, at + 2 * MS + 100 * US, seq=step)
        trace.node("MulBackward0", at + 5 * MS, at + 9 * MS, seq=step)
        trace.kernel(at + 3 * MS, at + (3 + device_ms) * MS, launch=at + 2 * MS + 10)
    recording = Recording.of(read_events(trace.save(folder / "trace.json")))
    return report_of(recording, Options(training=training))


def steps_with_data(step: int, data: int, late: int = 0, workers: int = 1) -> Training:
    """A training of a thousand steps; all times in milliseconds."""
    rest = (step - data) * MS // 4
    parts = (data * MS, step * MS - data * MS - 2 * rest, rest, rest)
    use = (LoaderUse(workers, 1000, late, 0, late),) if workers else ()
    return Training(1000, 1000, step * MS, *parts, step * MS, step * MS, loaders=use)


def data_ms(report: Report) -> float:
    assert sum(phase.wall_ns for phase in report.phases) == report.step_ns
    return {phase.name: phase.wall_ns / MS for phase in report.phases}["data"]


def test_beside_a_device_a_late_batch_costs_what_the_device_has_no_work_for(tmp_path: Path) -> None:
    """The recorded fetches were short: the workers had a pause to get ahead."""
    late = steps_with_data(30, 20, late=1000)
    assert data_ms(trained(tmp_path, device_ms=2, training=late)) == pytest.approx(20, abs=0.1)
    # The device works for 2 ms of the next fetch.
    assert data_ms(trained(tmp_path, device_ms=9, training=late)) == pytest.approx(18, abs=0.5)


def test_bursts_cost_what_their_long_fetches_do(tmp_path: Path) -> None:
    """One of ten takes 50 ms, of which the device works for 2."""
    bursts = steps_with_data(15, 6, late=100)
    assert data_ms(trained(tmp_path, device_ms=9, training=bursts)) == pytest.approx(4.9, abs=0.3)


def test_a_device_that_always_has_work_waits_for_no_data(tmp_path: Path) -> None:
    busy = steps_with_data(11, 1, late=1000)
    assert data_ms(trained(tmp_path, device_ms=10, training=busy)) < 0.5


def test_without_workers_a_fetch_costs_as_much(tmp_path: Path) -> None:
    alone = steps_with_data(30, 20, workers=0)
    assert data_ms(trained(tmp_path, device_ms=9, training=alone)) == pytest.approx(18, abs=0.5)


# What a faster module saves -----------------------------------------------------------------------


def saves_of(folder: Path, training: Training | None) -> float:
    """What a step saves without its module, in milliseconds.

    Six steps of 20 ms, of which the module takes 15. Eight workers may have 16 batches ready; one
    batch of the six is late.
    """
    trace = Trace()
    for step in range(6):
        at = step * 20 * MS
        trace.annotation(f"ProfilerStep#{step}", at, at + 20 * MS - 10)
        trace.annotation(FETCH, at + 10, at + 5 * MS)
        waited = 4 * MS if step == 2 else 0
        trace.annotation(batch_mark(1, 8, 16, waited), at + 5 * MS + 10, at + 5 * MS + 20)
        trace.forward("a", "Model", at + 5 * MS + 30, at + 12 * MS)
        trace.operator("aten::mul", at + 6 * MS, at + 11 * MS, seq=step)
        trace.node("MulBackward0", at + 12 * MS, at + 20 * MS - 20, seq=step)
    recording = Recording.of(read_events(trace.save(folder / "trace.json")))
    saves = report_of(recording, Options(training=training))["a"].row.saves
    assert saves is not None
    return saves.ns / MS


def test_a_faster_module_saves_nothing_where_workers_are_never_ahead(tmp_path: Path) -> None:
    """Of a burst of eight batches one is late, and the next one comes after the recording."""
    assert saves_of(tmp_path, steps_with_data(20, 5, late=125, workers=8)) < 0.5


def test_a_faster_module_saves_its_time_where_workers_are_late_now_and_then(tmp_path: Path) -> None:
    """They have all batches ready from one stall to the next. What one stall takes is waited."""
    assert saves_of(tmp_path, steps_with_data(20, 5, late=20, workers=8)) > 6
    assert saves_of(tmp_path, None) > 6


def test_batches_that_are_late_as_an_epoch_begins_decide_nothing(tmp_path: Path) -> None:
    """Nor do those of an evaluation: neither counts as behind."""
    training = steps_with_data(20, 5, late=200, workers=8)
    uses = tuple(replace(use, behind=0) for use in training.loaders)
    assert saves_of(tmp_path, replace(training, loaders=uses)) > 6


def handed_over(folder: Path, tensors: int, apart: int, behind: int) -> Finding | None:
    """What is found where each step takes over a batch of ``tensors``, in 40 ms.

    Args:
        apart: from one tensor to the next, in nanoseconds; the first comes 1 ms after the batch.
        behind: what follows the last.
    """
    trace = Trace()
    for step in range(3):
        at = step * 80 * MS
        end = at + 2 * MS + max(tensors - 1, 0) * apart + behind
        trace.annotation(FETCH, at + MS, end)
        trace.annotation(batch_mark(1, 1, 2, 0), end, end + 10)
        for number in range(tensors):
            begin = at + 2 * MS + number * apart
            trace.operator("aten::set_", begin, begin + 10 * US)
        trace.forward("", "Model", end + MS, end + 10 * MS)
        trace.operator("aten::mul", end + MS, end + 9 * MS, seq=step)
        trace.node("MulBackward0", end + 11 * MS, end + 29 * MS, seq=step, thread=1)
        trace.annotation(f"ProfilerStep#{step}", at, end + 30 * MS)
    events = read_events(trace.save(folder / "trace.json"))
    report = report_of(Recording.of(events), Options())
    return next((one for one in report.findings if one.rule == "batch-handover"), None)


@pytest.mark.parametrize(("tensors", "behind"), [(1, 0), (1, 4 * MS), (9, 2 * MS), (16, 0)])
def test_what_the_tensors_of_a_batch_need_themselves_is_no_finding(tmp_path, tensors, behind):
    assert handed_over(tmp_path, tensors, 100 * US, behind) is None


@pytest.mark.parametrize(
    ("tensors", "apart", "behind", "said", "saved"),
    [
        (50, 100 * US, 20 * US, "a batch of 50 tensors", 4.9),
        (9, MS, 20 * US, "a batch of 9 tensors", 8),
        (0, 0, 8 * MS, "the Python objects of a batch", 9),
        (1, 0, 20 * MS, "the Python objects of a batch", 16),
        (2, 100 * US, 20 * MS, "the Python objects of a batch", 16.1),
    ],
)
def test_a_handover_costs_what_is_between_its_tensors_and_what_python_objects_take(
    tmp_path, tensors, apart, behind, said, saved
):
    """One tensor beside nested objects, or a few that wait for each other, do not hide that."""
    found = handed_over(tmp_path, tensors, apart, behind)
    assert found is not None
    assert f"the program unpickles {said} that has arrived" in found.seen
    assert found.wall_ns == pytest.approx(saved * MS, rel=0.02)
    assert found.saves is not None
    assert found.saves.ns == pytest.approx(saved * MS, rel=0.05)
