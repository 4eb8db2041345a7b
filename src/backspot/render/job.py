"""Many ranks as text for a terminal, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from backspot.formatting import counted, duration, percent, visible
from backspot.results.job import JobReport, ModuleSpread, SlowestRank

__all__ = ["render_job", "stalls"]

_WIDTH = 80
_ROWS = 10
_PARTS = {
    "forward_gpu": "forward, kernels",
    "forward_host": "forward, host",
    "backward_gpu": "backward, kernels",
    "backward_host": "backward, host",
    "": "",
}


def render_job(job: JobReport, top: int = _ROWS) -> str:
    """Return the answer, the waits, the slowest ranks and the modules that differ.

    Args:
        job: many ranks.
        top: how many modules, ranks and steps to show of each.
    """
    lines = _wrapped(_answer(job))
    lines += _wrapped(
        f"{counted(len(job.ranks), 'rank')} of {job.world_size}, {counted(len(job.steps), 'step')} "
        f"of {duration(job.step_ns)}. Times are of a typical step."
    )
    for finding in job.findings:
        lines += ["", *_wrapped(f"* {finding.title}: up to {duration(finding.cost_ns)} of a step")]
        lines += _wrapped(f"{finding.seen} {finding.remedy}", "  ")
    lines += _waits(job, top)
    lines += _slowest(job.slowest[:top])
    lines += _modules([one for one in job.modules if one.cost_ns][:top])
    for lost in job.lost:
        lines += ["", *_wrapped(f"not read: {visible(lost.source)}: {visible(lost.reason)}")]
    for warning in job.warnings:
        lines += ["", *_wrapped(f"! {visible(warning)}")]
    return "\n".join(lines)


def _answer(job: JobReport) -> str:
    if not job.findings:
        return "No rank differs from the others beyond the noise."
    first = job.findings[0]
    return f"{first.title}: up to {duration(first.cost_ns)} of each step"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _waits(job: JobReport, top: int) -> list[str]:
    bubbles = stalls(job, top)
    lines = ["", *_wrapped(bubbles)] if bubbles else []
    ranked = sorted(job.ranks, key=lambda one: (-one.wait_ns, one.rank))
    lines += ["", "waits in collectives, most first (they can overlap with computing)"]
    lines.append(
        f"{'rank':>6} {'wait':>10} {'transfer':>10} {'enters later by':>16} {'clock ±':>9}"
    )
    for one in ranked[:top]:
        late = f"{'-' if one.late_ns < 0 else ''}{duration(abs(one.late_ns))}"
        lines.append(
            f"{one.rank:>6} {duration(one.wait_ns):>10} {duration(one.transfer_ns):>10} "
            f"{late:>16} {duration(one.uncertainty_ns):>9}  {_short(one.host, 20)}".rstrip()
        )
    if len(ranked) > top:
        lines.append(f"  and {counted(len(ranked) - top, 'rank')} more")
    for group in job.groups:
        name = _short(group.name or "(process group)", 30)
        lines += _wrapped(
            f"{name}: {counted(round(group.collectives), 'collective')} a step, "
            f"{counted(len(group.ranks), 'rank')}; median wait {duration(group.wait_ns)}, "
            f"transfer {duration(group.transfer_ns)}; rank {group.most_waiting} waits most, "
            f"{duration(group.most_wait_ns)}",
            "  ",
        )
    return lines


def stalls(job: JobReport, top: int = _ROWS) -> str:
    """Say how long the stages of a pipeline stall; ``""`` if there is none."""
    stalled = [one for one in job.ranks if one.stalled_ns]
    if not stalled:
        return ""
    said = ", ".join(
        f"rank {one.rank} {duration(one.stalled_ns)} ({percent(one.stalled_ns / one.step_ns)})"
        for one in stalled[:top]
    )
    more = f" and {counted(len(stalled) - top, 'rank')} more" if len(stalled) > top else ""
    return f"stalls between the stages of a pipeline: {said}{more}"


def _slowest(steps: tuple[SlowestRank, ...]) -> list[str]:
    if not steps:
        return []
    lines = ["", "the last rank to enter, step by step, and the module that takes longest there"]
    lines.append(f"{'step':>6} {'rank':>5} {'late by':>9} {'longer by':>10}  module")
    for one in steps:
        name = _short(one.path or one.class_name, 26)
        part = f" ({_PARTS[one.part]})" if one.part else ""
        lines.append(
            f"{one.step:>6} {one.rank:>5} {duration(max(one.late_ns, 0)):>9} "
            f"{duration(one.longer_ns):>10}  {name}{part}"
        )
    return lines


def _modules(modules: Sequence[ModuleSpread]) -> list[str]:
    if not modules:
        return []
    lines = ["", "modules over the ranks, by what the difference costs at most"]
    lines.append(f"{'costs':>9} {'median':>9} {'worst':>9} {'rank':>5}    module")
    for one in modules:
        mark = "*" if one.clear else " "
        lines.append(
            f"{duration(one.cost_ns):>9} {duration(one.median_ns):>9} "
            f"{duration(one.worst_ns):>9} {one.worst_rank:>5}  {mark} "
            f"{_short(one.path or one.class_name, 38)}".rstrip()
        )
    if any(one.clear for one in modules):
        lines.append("  * beyond the noise")
    return lines


def _short(name: str, width: int) -> str:
    """Return the end of a name, which says most."""
    name = visible(name)
    return name if len(name) <= width else f"…{name[1 - width :]}"
