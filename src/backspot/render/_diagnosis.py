"""What every form says of the step's phases and of what was found to be wrong with it."""

from __future__ import annotations

from backspot.report import Finding, Phase, PhaseName, Place, Report
from backspot.words import counted, duration, percent

__all__ = ["HEADING", "KINDS", "cost_of", "kept_phases", "phase_text", "worth"]

HEADING = "Why, and what to do"

KINDS = {
    "gpu": "GPU works",
    "communication": "communication",
    "queued": "queued on the GPU",
    "sync": "after a host-device sync",
    "host": "GPU waits for the host",
}
"""What wall time can be spent on: the fields of ``WallKinds``, and what people call them."""

_PHASES: dict[PhaseName, str] = {
    "data": "waiting for data",
    "copy": "copies to the GPU",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "optimizer": "optimizer",
    "other": "other work",
    "idle": "idle",
}


def kept_phases(report: Report) -> list[Phase]:
    """The phases that took any time."""
    return [phase for phase in report.phases if phase.wall_ns > 0]


def phase_text(report: Report, phase: Phase) -> tuple[str, str, str]:
    """A phase's name, its time in a step, and its share of it."""
    whole = sum(one.wall_ns for one in report.phases)
    share = percent(phase.wall_ns / whole if whole else 0.0)
    return _PHASES[phase.name], duration(phase.wall_ns / report.steps), share


def cost_of(report: Report, finding: Finding) -> tuple[str, str]:
    """What goes into it in a step, and its share: ``5.0 ms`` and ``11% of the step``."""
    whole = report.whole_ns
    step = "backward" if report.step_unit == "backward pass" else "step"
    share = percent(finding.wall_ns / whole if whole else 0.0)
    return duration(finding.wall_ns / report.steps), f"{share} of the {step}"


def worth(finding: Finding, limit: int) -> tuple[tuple[Place, ...], str]:
    """The places to name, and a word about those that are left out."""
    named, rest = finding.places[:limit], len(finding.places) - limit
    return named, counted(rest, "more place") if rest > 0 else ""
