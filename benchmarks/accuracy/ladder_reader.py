"""What a reader of a printed report does first, as an option of ``ladder_training.py``.

Which option that is comes from the words of a finding's remedy, or the code of a plan's rung.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backspot.results import Finding, Report, Rung
from backspot.testing import gain_of, helps
from benchmarks.measuring import usable_cores

State = dict[str, Any]
"""The options of the training, by their names; a switch has the value ``True``."""

_WORDS: Mapping[str, str] = {
    r"num_workers=(\d+|…)": "workers",
    r"pin_memory=True|non_blocking=True": "pinned",
    r"batch_size=(\d+)|larger batch": "batch",
    r"uint8": "uint8",
    r"[Dd]ecode once": "decoded",
    r"set_float32_matmul_precision\([\"']high": "tf32",
    r"autocast\([^)]*bfloat16": "bf16",
    r"memory_format=torch\.channels_last": "channels-last",
    r"torch\.compile\(": "compile",
    r"fused=True": "fused",
    r"cudnn\.benchmark = True": "benchmark",
    r"read them in some steps|without \.item\(\)": "unread-loss",
}
"""What in a text is which option of the training."""


_ON_A_SCREEN = 3
"""Of how many findings the one about the headline is said first."""


@dataclass(frozen=True)
class Advice:
    """What a reader does first.

    Attributes:
        source: the rule of a finding, or ``plan: `` with the rung's name.
        option: of the training.
        value: of the option.
        times: how many times as fast the training becomes, by what is said; ``None``: not said.
        bound: whether that is ``at least`` or ``at best`` so, or ``""``.
    """

    source: str
    option: str
    value: Any
    times: float | None
    bound: str = ""


def first_advice(report: Report, state: State, tried: Sequence[State]) -> Advice | None:
    """Return what a reader would do first that the training has not and that was not undone."""
    stable = [finding for finding in report.findings if finding.tier == "stable"]
    advice = [finding for finding in stable if helps(finding) is not False]
    answer, rungs = report.answer, report.plan.rungs if report.plan else ()
    heads = [
        finding
        for finding in advice[:_ON_A_SCREEN]
        if finding.rule == answer.rule or [place.path for place in finding.places] == [answer.path]
    ]
    kept = sorted((one for one in rungs if one.kept), key=lambda one: -one.saves_ns)
    batches = [one for one in rungs if one.axis == "batch" and one.verdict == "helps"]
    for one in (*heads, *kept, *advice, *batches):
        for option, value in _named(one, rungs, state):
            if state.get(option) != value and {**state, option: value} not in tried:
                return Advice(
                    _source(one), option, value, *_said(one, option, value, report, state)
                )
    return None


def _source(one: Finding | Rung) -> str:
    return f"plan: {one.setting}" if isinstance(one, Rung) else one.rule


def _named(one: Finding | Rung, rungs: Sequence[Rung], state: State) -> Iterator[tuple[str, Any]]:
    """Yield the options that a piece of advice names, in the order of its words."""
    text = one.code if isinstance(one, Rung) else one.remedy
    named = [
        (match.start(), option, match[match.lastindex or 0])
        for words, option in _WORDS.items()
        for match in re.finditer(words, text)
    ]
    for _, option, value in sorted(named):
        if option not in ("workers", "batch"):
            yield option, True
        elif value.isdigit():
            yield option, int(value)
        elif option == "batch":
            yield option, 2 * state["batch"]
        else:  # how many is left open: as the plan says, or else one for each core but one
            tried = [rung for rung in rungs if rung.setting.startswith("num_workers=")]
            helping = [rung for rung in tried if rung.verdict == "helps"]
            best = min(helping, key=lambda rung: rung.step_ns, default=None)
            if best is not None:
                yield option, int(best.setting.partition("=")[2])
            elif not tried:
                yield option, max(1, usable_cores() - 1)


def _said(
    one: Finding | Rung, option: str, value: Any, report: Report, state: State
) -> tuple[float | None, str]:
    """Return how many times as fast a step becomes by what is said, and of which kind that is.

    Of what a finding advises, the plan may have a rung that was tried on the step as it is.
    """
    rungs = report.plan.rungs if report.plan else ()
    same = [
        rung
        for rung in rungs
        if rung.step_ns and not rung.on and (option, value) in _named(rung, rungs, state)
    ]
    if isinstance(one, Rung) or same:
        rung = one if isinstance(one, Rung) else same[0]
        return rung.before_ns / rung.step_ns, ""
    saves, step = gain_of(one), report.unprofiled_step_ns or report.whole_ns
    if saves is None or saves.ns >= step:
        return None, ""
    bound = "at least" if saves.at_least else "at best" if saves.at_best else ""
    return step / (step - saves.ns), bound
