"""Recorded loops of several kinds: what their models run for without gradients.

``tests/data/loops`` has the scripts, and what ``backspot run`` recorded of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import backspot
from backspot import Report
from support.sums import assert_adds_up

LOOPS = Path(__file__).parents[1] / "data" / "loops"
WITHOUT_GRADIENTS = {"rollout", "scoring", "reference", "teacher", "evaluation"}


def located(name: str) -> Report:
    return backspot.locate(LOOPS / f"{name}.trace.json.gz")


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("ppo", {"rollout", "scoring"}),
        ("grpo", {"rollout", "scoring", "reference"}),
        ("sac", {"evaluation"}),
        ("validation", {"evaluation"}),
        ("dino", {"teacher"}),
    ],
)
def test_each_loop_runs_its_models_without_gradients_for_what_it_says(
    name: str, phases: set[str]
) -> None:
    report = located(name)
    assert {phase.name for phase in report.phases} & WITHOUT_GRADIENTS == phases
    assert_adds_up(report)


@pytest.mark.parametrize(
    ("name", "rare", "steps"),
    [
        ("ppo", "rollout", 3),
        ("grpo", "rollout", 2),
        ("validation", "evaluation", 4),
    ],
)
def test_what_only_some_steps_of_a_loop_have_is_rare_work(name: str, rare: str, steps: int) -> None:
    report = located(name)
    (work,) = (work for work in report.rare if work.name == rare)
    first, second = work.steps
    assert second - first == steps
    assert {hiccup.step for hiccup in report.hiccups}.isdisjoint(work.steps)


@pytest.mark.parametrize("name", ["sac", "dino"])
def test_what_each_step_of_a_loop_has_is_no_rare_work(name: str) -> None:
    assert WITHOUT_GRADIENTS.isdisjoint(work.name for work in located(name).rare)


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_loop_of_reinforcement_learning_has_shares_of_its_iteration(name: str) -> None:
    text = " ".join(str(located(name)).split())
    assert "of an iteration: rollout" in text
    assert "updates" in text
    assert "needs it" not in text
