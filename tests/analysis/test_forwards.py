"""What models run for without gradients: rollouts, scoring, references, teachers, evaluations."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.loop import CALL, Loop
from support.phased import HOST, TICK

SAMPLING = ("aten::softmax", "aten::multinomial", "aten::cat")


def test_a_loop_that_draws_from_its_model_is_a_rollout_and_what_follows_scores_it() -> None:
    loop = Loop()
    for _ in range(3):
        loop.bare(times=6, then=SAMPLING)
        loop.bare(then=("aten::log_softmax", "aten::gather"))
        loop.bare("reference", then=("aten::log_softmax", "aten::gather", "aten::sub"))
        for _ in range(2):
            loop.update()
    assert loop.times() == {"rollout": 3 * 6 * 13, "scoring": 3 * 12, "reference": 3 * 13}


def test_the_best_of_each_output_appended_to_a_sequence_is_a_rollout() -> None:
    loop = Loop()
    for _ in range(3):
        loop.bare(times=5, then=("aten::argmax", "aten::cat"))
        loop.update()
    assert loop.times() == {"rollout": 3 * 5 * 12}


def test_actor_and_critic_that_take_turns_are_one_rollout_with_the_environment() -> None:
    loop = Loop()
    for _ in range(2):
        for _ in range(8):
            loop.bare("critic")
            loop.bare("actor", then=("aten::multinomial", "aten::copy_"))
            loop.wait(30)  # the environment, in Python
            loop.operators("aten::lift_fresh")
        loop.bare("critic", then=("aten::sub", "aten::mul"))
        for _ in range(4):
            loop.update("critic")
            loop.update("actor")
    assert loop.times() == {"rollout": 2 * 8 * 53, "scoring": 2 * 12}


def test_rollouts_of_other_lengths_are_the_same_kind_of_step() -> None:
    loop = Loop()
    for length in (6, 9, 40, 5, 12, 7):
        loop.bare(times=length, then=SAMPLING)
        loop.update()
    assert loop.report().hiccups == ()


def validated(loop: Loop) -> None:
    for _ in range(5):
        loop.fetch()
        loop.bare(then=("aten::argmax", "aten::eq", "aten::sum"))
    loop.fetch()


def sampled_by_the_way(loop: Loop) -> None:
    loop.bare(times=9, then=SAMPLING)


def measured_without_a_loader(loop: Loop) -> None:
    loop.bare(times=30, then=("aten::cross_entropy_loss",))


def of_noise(loop: Loop) -> None:
    for _ in range(8):
        loop.operators("aten::randn")
        loop.bare()


@pytest.mark.parametrize(
    "evaluate", [validated, sampled_by_the_way, measured_without_a_loader, of_noise]
)
def test_what_is_not_trained_on_is_a_forward_without_gradients(
    evaluate: Callable[[Loop], None],
) -> None:
    loop = Loop()
    for number in range(6):
        loop.fetch()
        loop.update()
        if number in (1, 3):
            evaluate(loop)
    assert list(loop.times()) == ["evaluation"]


def test_an_evaluation_begins_where_its_first_batch_is_asked_for() -> None:
    loop = Loop()
    for number in range(4):
        loop.fetch()
        loop.update()
        if number == 1:
            validated(loop)
    assert loop.times() == {"evaluation": 5 * (1 + CALL + 3) - 3}
    (data,) = (phase for phase in loop.report().phases if phase.name == "data")
    assert sum(data.wall_ns_by_step) == 5 * TICK


def test_scoring_ends_where_an_update_begins() -> None:
    loop = Loop()
    for _ in range(3):
        loop.bare(times=6, then=SAMPLING)
        loop.bare(then=("aten::sub",))
        at = loop.at * TICK, (loop.at + 4) * TICK
        loop.trace.annotation("Optimizer.zero_grad#SGD.zero_grad", *at)
        loop.wait(4)
        loop.operators("aten::index")
        loop.update()
    assert loop.times() == {"rollout": 3 * 6 * 13, "scoring": 3 * 11}


def test_a_draw_behind_single_calls_is_no_rollout() -> None:
    """As where an actor acts once before each update, and a target network values that."""
    loop = Loop()
    for _ in range(4):
        loop.bare("actor", then=("aten::normal",))
        loop.bare("critic_target", then=("aten::sub",))
        loop.update("critic")
        loop.update("actor")
    assert list(loop.times()) == ["evaluation"]


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("teacher", "teacher"),
        ("ema_model", "teacher"),
        ("momentumEncoder", "teacher"),
        ("ref_model", "reference"),
        ("target_net", "evaluation"),
        ("preferred", "evaluation"),
        ("schema", "evaluation"),
    ],
)
def test_a_copy_before_each_training_is_what_its_name_says(name: str, phase: str) -> None:
    loop = Loop()
    for _ in range(4):
        loop.fetch()
        loop.bare(name, times=2)
        loop.update("student")
    assert loop.times() == {phase: 4 * 2 * CALL}


def test_an_average_that_is_evaluated_is_no_teacher() -> None:
    loop = Loop()
    for number in range(6):
        loop.fetch()
        loop.update("model")
        if number % 2:
            for _ in range(5):
                loop.fetch()
                loop.bare("ema")
    assert list(loop.times()) == ["evaluation"]


def test_a_frozen_model_of_another_kind_is_part_of_the_forward() -> None:
    loop = Loop()
    for _ in range(4):
        begin = loop.at
        loop.wait(CALL)
        loop.trace.forward("encoder", "Encoder", begin * TICK, loop.at * TICK)
        loop.trace.operator("aten::addmm", (begin + 2) * TICK, (begin + 8) * TICK)
        loop.update("head")
    assert loop.times() == {}
    (forward,) = (phase for phase in loop.report().phases if phase.name == "forward")
    assert min(forward.wall_ns_by_step) >= 2 * CALL * TICK


def test_nothing_runs_without_gradients_where_no_model_has_any() -> None:
    loop = Loop()
    for number in range(3):
        loop.bare(times=6, then=SAMPLING)
        loop.trace.operator("aten::mul", loop.at * TICK, (loop.at + 1) * TICK, seq=number)
        loop.wait(1)
        at = loop.at * TICK, (loop.at + CALL) * TICK
        loop.trace.node("MulBackward0", *at, seq=number, thread=HOST)
        loop.wait(CALL)
        at = loop.at * TICK, (loop.at + 1) * TICK
        loop.trace.annotation("Optimizer.step#SGD.step", *at)
        loop.wait(1)
    assert loop.times() == {}


def test_no_advice_doubts_what_runs_without_gradients() -> None:
    loop = Loop()
    for _ in range(3):
        loop.bare(times=30, then=SAMPLING)
        loop.update()
    text = " ".join(str(loop.report()).split())
    assert "of an iteration: rollout" in text
    assert "needs it" not in text
