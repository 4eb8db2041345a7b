"""Rare work in words: what recurs in some steps only, how often, and what it costs a step."""

from __future__ import annotations

from collections.abc import Sequence

from backspot.formatting import duration, percent
from backspot.render._phases import PHASES
from backspot.results.costs import WITHOUT_GRADIENTS
from backspot.results.rare import RareWork
from backspot.results.report import Report

_EVEN = 0.02
"""By how much a period can differ from that of the recorded steps, and still be theirs."""
_NAMED = 2
"""How much rare work is told beside the answer."""
_SMALL = 0.01
"""Share of an iteration from which a part of it is named."""


def name_of(work: RareWork) -> str:
    """What rare work is, as people read it."""
    return next((text for name, text in PHASES.items() if name == work.name), work.name)


def often(work: RareWork, steps: int) -> str:
    """How often rare work happens: ``once in 16 steps``, ``in 1 of 10 recorded steps``.

    What was recorded once has no period, unless that is known of the whole training.

    Args:
        steps: number of recorded steps.
    """
    if len(work.steps) == 1 and abs(work.period - steps) <= _EVEN * steps:
        return f"in 1 of {steps} recorded steps"
    return f"once in {work.period:.3g} steps"


def told(work: RareWork, steps: int) -> str:
    """Rare work in one phrase: ``once in 16 steps: rollout, 82 ms, 5.1 ms a step``."""
    duration_text, mean = duration(work.wall_ns), duration(work.per_step_ns)
    return f"{often(work, steps)}: {name_of(work)}, {duration_text}, {mean} a step"


def rarely(report: Report) -> list[str]:
    """The rare work that costs most, each in one phrase, but for what the answer is about."""
    about = report.answer.path
    rare = [work for work in report.rare if f"({work.name})" != about]
    return [told(work, report.steps) for work in rare[:_NAMED]]


def kinds_of_steps(report: Report) -> str:
    """How long steps with and without the largest rare work are, ``""`` without any.

    What else is in the same steps, such as scoring beside a rollout, counts with it.
    """
    if not report.rare:
        return ""
    steps = report.rare[0].steps
    together = [work for work in report.rare if work.steps == steps]
    without = max(0, report.step_ns - sum(work.per_step_ns for work in together))
    having = without + sum(work.wall_ns for work in together)
    names = _listed([name_of(work) for work in together])
    return f"{duration(having)} with {names}, {duration(without)} without"


def iteration(report: Report) -> str:
    """The shares of rollout, scoring and updates of an iteration, ``""`` without a rollout."""
    times = {phase.name: phase.wall_ns for phase in report.phases}
    if not times.get("rollout"):
        return ""
    total = sum(times.values())
    updates = total - sum(times.get(name, 0) for name in WITHOUT_GRADIENTS)
    parts = [(PHASES[name], times.get(name, 0)) for name in WITHOUT_GRADIENTS]
    shares = [
        f"{name} {percent(ns / total)}"
        for name, ns in (*parts, ("updates", updates))
        if ns >= _SMALL * total
    ]
    return f"of an iteration: {', '.join(shares)}"


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
