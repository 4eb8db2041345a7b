"""The parts that act on a training while it lives, in the order in which they add to its report.

A part is an ``Act``, and an entry in these lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, get_args

from backspot.errors import UsageError
from backspot.formatting import quoted
from backspot.live.acts import Act, Asking, Joint, acts_for
from backspot.live.memory import remembering_of
from backspot.live.plan.earlier import with_earlier_plan
from backspot.live.ranks import rank_and_ranks
from backspot.live.trials.attempts import Trying, with_earlier_trials
from backspot.results import job, memory, plan, trials
from backspot.results.report import Report


def _gathering(ranks: object) -> Act:
    from backspot.live.gathering import gathering_of  # one rank needs nothing of it

    return gathering_of(ranks)


def _planning(budget: int | tuple[int, str]) -> Act:
    from backspot.live.plan.planning import Planning  # seldom asked for, and not small

    return Planning.of(budget)


ASKING = (
    Asking("memory", False, memory.InProfile, remembering_of),
    Asking("trials", "operators", trials.InProfile, Trying),
    Asking("ranks", None, job.InProfile, _gathering),
)
"""What ``profile`` takes for parts."""
FURTHER: tuple[Asking, ...] = (
    Asking("plan", None, plan.InRun, _planning),
    Asking("plan_from", None, plan.InRun, lambda _: None),  # goes with the other one
)
"""What ``backspot run`` has options for, beside these."""


class Asked(memory.InProfile, trials.InProfile, job.InProfile):
    """The same, for type checkers."""


def acts_of(arguments: Mapping[str, Any], asking: Sequence[Asking] = ASKING) -> list[Act]:
    """Return what parts do for the arguments of ``profile``, or the options of ``backspot run``.

    Args:
        asking: what can be asked for.

    Raises:
        TypeError: If no part takes one of the arguments.
        UsageError: If one of them is invalid.
    """
    values, implied = dict(arguments), dict[str, Any]()
    tries = values.get("trials", "operators")
    if tries not in get_args(trials.Trials):
        hint = '; "plan" also tries the model and the loader' if tries == "all" else ""
        raise UsageError(f'trials={quoted(tries)}: give "operators", "plan" or "none"{hint}')
    if tries == "plan":
        values["trials"], implied["plan"] = "operators", plan.PLAN_SECONDS
    if (earlier := values.get("plan_from")) is not None:
        values["plan"] = values.get("plan") or plan.PLAN_SECONDS, earlier
    return [*acts_for(asking, values), *acts_for(FURTHER, implied)]


_JOINTS: tuple[str, ...] = ("backspot.live.gathering",)
"""The modules with what several processes do together, imported only where there are several.

Each has ``joint_of(name)`` and ``note_presence()``, as the functions below.
"""


def _joints() -> list[Any]:
    return [import_module(name) for name in _JOINTS] if rank_and_ranks()[1] > 1 else []


def joint_of(name: str) -> Joint | None:
    """Return what the processes of this training answer together; ``None`` where they do not.

    Args:
        name: of this answer, the same in all processes.
    """
    joints = (module.joint_of(name) for module in _joints())
    return next((joint for joint in joints if joint is not None), None)


def load_joint() -> None:
    """Load what ``joint_of`` needs, if there are several processes.

    Before the training: Python may lose an interrupt that comes during an import.
    """
    _joints()


def note_presence() -> None:
    """Tell the other processes of this training that this one will leave its part of answers."""
    for module in _joints():
        module.note_presence()


_AS_BEFORE: tuple[Callable[[Report, Report], Report], ...] = (
    with_earlier_trials,
    with_earlier_plan,
)


def as_before(report: Report, earlier: Report) -> Report:
    """Return a report with what was added to an earlier one of the same recording."""
    for add in _AS_BEFORE:
        report = add(report, earlier)
    return report
