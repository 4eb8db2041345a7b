"""What is said of many ranks, on a terminal as on a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Literal

from backspot.formatting import counted, duration, failures, percent, visible
from backspot.results.job import EXPLAINS, GroupCost, JobFinding, JobReport, ModuleSpread

ROWS = 3
"""How many ranks, steps or modules are named at first."""


def not_read(job: JobReport) -> list[str]:
    """Say which traces are not part of the answer: each reason once."""
    lost = ((one.source, one.reason) for one in job.lost)
    return [f"not read: {said}" for said in failures(lost, ": ")]


def worth(finding: JobFinding) -> str:
    """Say what the job gains without the cause, by replay; ``""`` if that is not known."""
    if finding.saves_ns is None:
        return ""
    changed = {"transfer": "With all transfers hidden", "pipeline": "With equal work on all stages"}
    without = changed.get(finding.kind, "Without that")
    return f"{without}, all ranks replayed, the job's step takes {duration(finding.saves_ns)} less."


def nothing_found(job: JobReport) -> str:
    """Say what is known of an answer without findings."""
    return unexplained(job) or "No rank differs from the others beyond the noise"


def unexplained(job: JobReport) -> str:
    """Say which rank is late most, if no finding explains it; ``""`` if there is none."""
    for one in sorted(job.ranks, key=lambda one: -one.late_ns):
        costs = sum(found.cost_ns for found in job.findings if found.rank in (one.rank, None))
        if one.rank in job.late and costs < EXPLAINS * one.late_ns:
            late = f"Rank {one.rank} enters collectives {duration(one.late_ns)} after the others"
            places = Counter(
                (step.path, step.line)
                for step in job.slowest
                if step.rank == one.rank and step.part
            )
            ((path, line), often), *_ = [*places.most_common(1), (("", ""), 0)]
            if 2 * often <= len(job.steps):
                return f"{late}, and nothing recorded shows why"
            outside = path.startswith("(")
            where = path.strip("()") if outside else f"in {visible(path) or 'the model'}"
            if line:
                where = f"in {visible(line)}, {'in no module, ' if outside else ''}{where}"
            steps = f"{often} of {counted(len(job.steps), 'step')}"
            return f"{late}; in {steps} it takes longer {where}, not beyond the noise"
    return ""


def differs(job: JobReport, one: ModuleSpread, rank: int | None) -> bool:
    """Return whether the answer says that a module takes longer, on a rank or anywhere.

    An output may draw the eye to nothing else.
    """
    return one.clear or any(
        found.path == one.path if found.path else found.kind == "gpu" and found.rank == rank
        for found in job.findings
        if found.path or found.rank is not None
    )


def middle(job: JobReport) -> str:
    """Return what the value in the middle of the ranks is called: that of two is their mean."""
    return "median" if len(job.ranks) > 2 else "mean"


def groups_alike(job: JobReport) -> list[list[GroupCost]]:
    """Return the process groups by name, role and size: each stage of a pipeline may have one."""
    found: dict[tuple[str, str, int], list[GroupCost]] = {}
    for one in job.groups:
        found.setdefault((one.name, one.role, len(one.ranks)), []).append(one)
    return list(found.values())


def median_of(groups: Sequence[GroupCost], what: Literal["wait_ns", "transfer_ns"]) -> int:
    """Return the median of a time over process groups."""
    times: list[int] = [getattr(one, what) for one in groups]
    return round(median(times))


def stalls(job: JobReport, top: int = ROWS) -> str:
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
