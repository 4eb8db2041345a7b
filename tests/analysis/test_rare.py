"""What recurs in some of the recorded steps only, and how often."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from backspot import Report
from backspot.analysis.recording import Options, Recording
from backspot.analysis.typical import RareSteps
from backspot.pipeline import report_of
from backspot.results import RareWork, Training
from backspot.trace import read_events
from support.loop import CALL, Loop
from support.phased import TICK
from support.sums import assert_adds_up

UPDATE = 26  # ticks of a step with nothing but an update


def trained(steps: int, *, every: int, calls: int = 20) -> Loop:
    """Steps of which each so many begin with calls without gradients."""
    loop = Loop()
    for number in range(steps):
        if number % every == 0:
            loop.bare(times=calls)
        loop.update()
    return loop


def said(report: Report) -> str:
    return " ".join(str(report).split())


def known(loop: Loop, folder: Path, *rare: RareSteps, real: tuple[int, ...] = ()) -> Report:
    """The report of a loop of whose steps more is known than its recording shows."""
    path = loop.trace.save(folder / "trace.json")
    return report_of(
        msgspec.structs.replace(Recording.of(read_events(path)), rare=rare),
        Options(real_steps=real),
    )


def test_what_is_in_some_steps_only_is_named_with_its_period_its_time_and_its_share() -> None:
    report = trained(8, every=4).report()
    (rare,) = report.rare
    assert (rare.name, rare.period, rare.steps) == ("evaluation", 4, (0, 4))
    assert rare.wall_ns == 20 * CALL * TICK
    assert rare.per_step_ns == 5 * CALL * TICK
    assert rare.share == pytest.approx(50 / (50 + UPDATE))
    assert report.hiccups == ()
    assert report.step_ns == (50 + UPDATE) * TICK


def test_the_answer_leads_with_rare_work_that_costs_most() -> None:
    text = said(trained(8, every=4).report())
    answer = "Once in 4 steps: forward without gradients, 200 ms, 50.0 ms a step (66% of it)"
    assert text.startswith(answer)
    assert "(226 ms with forward without gradients, 26.0 ms without)" in text


def test_what_was_recorded_once_has_no_period_that_the_recording_shows() -> None:
    text = "n 1 of 8 recorded steps: forward without gradients, {} ms, {} ms a step"
    assert said(trained(8, every=8, calls=40).report()).startswith("I" + text.format(400, "50.0"))
    assert "i" + text.format(200, "25.0") in said(trained(8, every=8).report())


def test_the_period_is_that_of_the_training_where_it_is_known(tmp_path: Path) -> None:
    report = known(trained(8, every=8), tmp_path, RareSteps((0,), 1 / 16))
    (rare,) = report.rare
    assert rare.period == pytest.approx(16, rel=0.01)
    assert rare.per_step_ns == pytest.approx(200 * TICK / 16, rel=0.01)
    assert report.step_ns == pytest.approx((200 / 16 + UPDATE) * TICK, rel=0.01)
    assert "once in 16 steps: forward without gradients, 200 ms, 12.5 ms a step" in said(report)
    assert_adds_up(report)


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=8),
    st.sets(st.integers(0, 7), min_size=1),
    st.floats(0.01, 0.99),
)
def test_all_sums_are_exact_whatever_share_rare_steps_have(
    tmp_path_factory: pytest.TempPathFactory, calls: list[int], rare: set[int], share: float
) -> None:
    loop = Loop()
    for times in calls:
        loop.bare(times=times)
        loop.update()
    folder = tmp_path_factory.mktemp("trace")
    report = known(loop, folder, RareSteps(tuple(sorted(rare)), share))
    assert_adds_up(report)
    assert sum(phase.wall_ns for phase in report.phases) == report.step_ns


def test_a_late_batch_in_one_step_is_rare_work_and_no_hiccup() -> None:
    loop = Loop()
    for number in range(10):
        loop.fetch(late=300 * (number == 4))
        loop.update()
    report = loop.report()
    assert report.hiccups == ()
    (rare,) = report.rare
    assert (rare.name, rare.wall_ns, rare.steps) == ("data", 300 * TICK, (4,))
    assert said(report).startswith("In 1 of 10 recorded steps: waiting for data, 300 ms, 30.0 ms")


@pytest.mark.parametrize(("waits", "period"), [(True, 20), (False, 40)])
def test_a_step_that_is_longer_for_another_reason_is_none_of_those_that_wait(
    tmp_path: Path, waits: bool, period: int
) -> None:
    """By their time alone, two recorded steps would share what the training has of waits."""
    loop = Loop()
    for number in range(10):
        loop.fetch(late=300 * (number == 4))
        if number == 7:
            loop.wait(300)
        loop.update()
    (rare,) = known(loop, tmp_path, RareSteps((4, 7), 1 / 20, waits)).rare
    assert (rare.name, rare.wall_ns, rare.steps) == ("data", 300 * TICK, (4,))
    assert rare.period == pytest.approx(period, rel=0.01)


def test_scoring_beside_a_rollout_counts_with_its_steps() -> None:
    loop = Loop()
    for number in range(8):
        if number % 2 == 0:
            loop.bare(times=9, then=("aten::multinomial",))
            loop.bare(times=3, then=("aten::log_softmax",))
        loop.update()
    report = loop.report()
    assert [work.name for work in report.rare] == ["rollout", "scoring"]
    text = said(report)
    assert "with rollout and scoring, 26.0 ms without)" in text
    assert "of an iteration: rollout 54%, scoring 18%, updates 28%" in text


def test_what_all_steps_have_is_no_rare_work() -> None:
    assert trained(6, every=1).report().rare == ()


def test_a_step_that_the_machine_held_up_has_no_rare_work() -> None:
    loop = Loop()
    for number in range(10):
        loop.update()
        loop.wait(400 * (number == 5))
    report = loop.report()
    assert [hiccup.step for hiccup in report.hiccups] == [6]
    assert report.rare == ()


def test_rare_work_has_the_time_of_real_steps_where_these_are_known(tmp_path: Path) -> None:
    report = known(trained(8, every=4), tmp_path, real=(38 * TICK,) * 5)
    (rare,) = report.rare
    (phase,) = (phase for phase in report.phases if phase.name == "evaluation")
    assert rare.per_step_ns == pytest.approx(phase.wall_ns, abs=2)
    assert rare.share == pytest.approx(phase.wall_ns / (38 * TICK), rel=0.001)
    assert "A step takes 38.0 ms" in said(report)


def logged(step_ns: int, *rare: tuple[str, int]) -> Training:
    """The log of a training whose steps have this rare work, so long in each step."""
    return Training(
        steps=800,
        counted=780,
        step_ns=step_ns,
        data_ns=0,
        forward_ns=step_ns,
        backward_ns=0,
        optimizer_ns=0,
        typical_ns=step_ns,
        longest_ns=step_ns,
        rare=tuple(RareWork(name, 4, 4 * ns, ns, ns / step_ns) for name, ns in rare),
    )


@pytest.mark.parametrize("every", [4, 0])
@pytest.mark.parametrize(
    ("rare", "expected"),
    [
        ([("evaluation", 30)], {"evaluation": 30}),
        ([("saving a checkpoint", 20), ("saving a checkpoint", 5)], {"saving": 25}),
        ([("evaluation and saving a checkpoint", 30)], {"evaluation": 30}),
        (
            [("evaluation and saving a checkpoint", 30), ("saving a checkpoint", 10)],
            {"evaluation": 40},
        ),
        ([("evaluation", 30), ("backward", 12)], {"evaluation": 30}),
    ],
)
def test_rare_work_takes_as_long_as_the_log_of_the_training_says(
    rare: list[tuple[str, int]], expected: dict[str, int], every: int, tmp_path: Path
) -> None:
    path = trained(8, every=every or 100, calls=20 * bool(every)).trace.save(
        tmp_path / "trace.json"
    )
    real = 100 * TICK
    training = logged(real, *((name, ticks * TICK) for name, ticks in rare))
    report = report_of(Recording.read(path), Options(training=training))
    assert_adds_up(report)
    assert sum(phase.wall_ns for phase in report.phases) == real
    found = {phase.name: phase.wall_ns / TICK for phase in report.phases}
    for name, ticks in expected.items():
        assert found[name] == pytest.approx(ticks, abs=1e-3)
    # What was recorded and has another name in the log keeps the share that it was recorded with.
    assert ("evaluation" in found) == (bool(every) or "evaluation" in expected)


def test_work_without_a_name_is_that_of_the_recorded_phases_that_are_rare(tmp_path: Path) -> None:
    path = trained(8, every=4).trace.save(tmp_path / "trace.json")
    outside = ("work outside backward and optimizer", 30 * TICK)
    report = report_of(Recording.read(path), Options(training=logged(100 * TICK, outside)))
    found = {phase.name: phase.wall_ns / TICK for phase in report.phases}
    assert found["evaluation"] == pytest.approx(30, abs=1e-3)
    always = trained(8, every=1).trace.save(tmp_path / "always.json")
    report = report_of(Recording.read(always), Options(training=logged(100 * TICK, outside)))
    found = {phase.name: phase.wall_ns / TICK for phase in report.phases}
    assert found["evaluation"] > 50  # it is in each step, so that it is nothing rare
