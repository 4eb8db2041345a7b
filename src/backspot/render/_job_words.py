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
    lost = ((trace.source, trace.reason) for trace in job.lost)
    return [f"not read: {reason}" for reason in failures(lost, ": ")]


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
    for rank in sorted(job.ranks, key=lambda rank: -rank.late_ns):
        costs = sum(
            finding.cost_ns for finding in job.findings if finding.rank in (rank.rank, None)
        )
        if rank.rank in job.late and costs < EXPLAINS * rank.late_ns:
            late = f"Rank {rank.rank} enters collectives {duration(rank.late_ns)} after the others"
            places = Counter(
                (step.path, step.line)
                for step in job.slowest
                if step.rank == rank.rank and step.part
            )
            ((path, line), often), *_ = [*places.most_common(1), (("", ""), 0)]
            if 2 * often <= len(job.steps):
                return f"{late}, and nothing recorded shows why"
            outside = path.startswith("(")
            place = path.strip("()") if outside else f"in {visible(path) or 'the model'}"
            if line:
                place = f"in {visible(line)}, {'in no module, ' if outside else ''}{place}"
            steps = f"{often} of {counted(len(job.steps), 'step')}"
            return f"{late}; in {steps} it takes longer {place}, not beyond the noise"
    return ""


def differs(job: JobReport, module: ModuleSpread, rank: int | None) -> bool:
    """Return whether the answer says that a module takes longer, on a rank or anywhere.

    An output may draw the eye to nothing else.
    """
    return module.clear or any(
        finding.path == module.path
        if finding.path
        else finding.kind == "gpu" and finding.rank == rank
        for finding in job.findings
        if finding.path or finding.rank is not None
    )


def middle(job: JobReport) -> str:
    """Return what the value in the middle of the ranks is called: that of two is their mean."""
    return "median" if len(job.ranks) > 2 else "mean"


def groups_alike(job: JobReport) -> list[list[GroupCost]]:
    """Return the process groups by name, role and size: each stage of a pipeline may have one."""
    groups: dict[tuple[str, str, int], list[GroupCost]] = {}
    for group in job.groups:
        groups.setdefault((group.name, group.role, len(group.ranks)), []).append(group)
    return list(groups.values())


def median_of(groups: Sequence[GroupCost], field: Literal["wait_ns", "transfer_ns"]) -> int:
    """Return the median of a time over process groups."""
    times: list[int] = [getattr(group, field) for group in groups]
    return round(median(times))


def stalls(job: JobReport, top: int = ROWS) -> str:
    """Say how long the stages of a pipeline stall; ``""`` if there is none."""
    stalled = [rank for rank in job.ranks if rank.stalled_ns]
    if not stalled:
        return ""
    ranks = ", ".join(
        f"rank {rank.rank} {duration(rank.stalled_ns)} ({percent(rank.stalled_ns / rank.step_ns)})"
        for rank in stalled[:top]
    )
    more = f" and {counted(len(stalled) - top, 'rank')} more" if len(stalled) > top else ""
    return f"stalls between the stages of a pipeline: {ranks}{more}"
