"""Many ranks of a training job: which one is slow, where, and who waits for it.

All times are integer nanoseconds of a typical step: the mean over the steps that
nothing held up on most ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from backspot import presented
from backspot.formatting import counted, labelled
from backspot.presented import Beside, Presented, beside, public

SCHEMA = "backspot.job/1"
"""Version of the JSON form."""
Role = Literal[
    "data",
    "sharded",
    "tensor",
    "pipeline",
    "expert",
    "context",
    "expert_or_context",
    "unknown",
]
"""What a process group is for: the exchange of gradients, sharded parameters (FSDP), tensor,
pipeline, expert or context parallelism."""
ROLES: dict[Role, str] = {
    "data": "data parallel",
    "sharded": "fully sharded",
    "tensor": "tensor parallel",
    "pipeline": "pipeline",
    "expert": "expert parallel",
    "context": "context parallel",
    "expert_or_context": "expert or context parallel",
    "unknown": "role not known",
}
"""The roles in words."""
Part = Literal["forward_gpu", "forward_host", "backward_gpu", "backward_host"]
"""A part of a module's clock time: its kernels, or its host holding up the device."""
PARTS: dict[Part, str] = {
    "forward_gpu": "forward, kernels",
    "forward_host": "forward, host",
    "backward_gpu": "backward, kernels",
    "backward_host": "backward, host",
}
"""The parts in words."""


EXPLAINS = 0.5
"""Share of a rank's lateness from which what takes longer there explains it."""


@public
@dataclass(frozen=True, slots=True)
class RankCost:
    """One rank in a typical step, in nanoseconds.

    Attributes:
        rank: The rank.
        source: Name of its trace.
        host: Its host, ``""`` if not known.
        step_ns: Clock time of the step.
        exposed_ns: Clock time in which it only communicates.
        stalled_ns: Part of ``exposed_ns`` in transfers between two ranks, as in a pipeline.
        wait_ns: Time in collectives before the last rank enters; can overlap with computing.
        transfer_ns: Time in collectives after that.
        late_ns: How much later than the median of the others it enters collectives, on average.
        offset_ns: What to add to its clock for the job's; ``None`` if not known.
        drift_ppm: By how much the offset grows, in microseconds a second.
        uncertainty_ns: Standard deviation of its times on the job's clock.
        step_ns_by_step: Clock time of each step.
        own_ns_by_step: Each step without ``exposed_ns``.
        wait_ns_by_step: Waits in each step.
        transfer_ns_by_step: Transfers in each step.
    """

    rank: int
    source: str
    host: str
    step_ns: int
    exposed_ns: int
    stalled_ns: int
    wait_ns: int
    transfer_ns: int
    late_ns: int
    offset_ns: int | None
    drift_ppm: float
    uncertainty_ns: int
    step_ns_by_step: tuple[int, ...]
    own_ns_by_step: tuple[int, ...]
    wait_ns_by_step: tuple[int, ...]
    transfer_ns_by_step: tuple[int, ...]

    @property
    def exposed_ns_by_step(self) -> tuple[int, ...]:
        """Clock time of each step in which it communicates and does nothing else."""
        times = zip(self.step_ns_by_step, self.own_ns_by_step, strict=True)
        return tuple(step - own for step, own in times)


@public
@dataclass(frozen=True, slots=True)
class SlowestRank:
    """The rank that the others wait for in one step, with times in nanoseconds.

    Attributes:
        step: Number of the step.
        rank: The rank that enters collectives last.
        late_ns: How much later than the median of the others, on average.
        part: In what its module takes longer: ``forward_gpu``, ``backward_host``, …; ``""`` if
            nothing explains half of ``late_ns``.
        path: The module that takes longer there, or a place in parentheses: ``(between forward and
            backward)``.
        class_name: Its class, ``""`` for a place.
        longer_ns: By how much it exceeds the median of the other ranks.
        line: Line of Python that the host is at for most of it, ``""`` if not known.
    """

    step: int
    rank: int
    late_ns: int
    part: Part | Literal[""]
    path: str
    class_name: str
    longer_ns: int
    line: str = ""

    @property
    def label(self) -> str:
        """Path and class of the module."""
        return labelled(self.path or self.class_name, self.class_name)

    @property
    def differs_in(self) -> str:
        """The part in words; only the host's time is known outside of modules."""
        if not self.part:
            return ""
        return "host" if self.path.startswith("(") else PARTS[self.part]


@public
@dataclass(frozen=True, slots=True)
class GroupCost:
    """One process group in a typical step, in nanoseconds.

    Attributes:
        name: The process group, ``""`` if not known.
        ranks: Its ranks that have a summary.
        absent: Its ranks without one, which may be the last to enter.
        role: What its collectives show that it is for.
        collectives: Number of collectives in a step.
        transfers: Number of transfers between two ranks in a step; their waits are in
            ``RankCost.stalled_ns``.
        wait_ns: Median of the ranks.
        transfer_ns: Median of the ranks.
        most_waiting: The rank that waits most.
        most_wait_ns: Its wait.
    """

    name: str
    ranks: tuple[int, ...]
    absent: tuple[int, ...]
    collectives: float
    wait_ns: int
    transfer_ns: int
    most_waiting: int
    most_wait_ns: int
    role: Role = "unknown"
    transfers: float = 0.0


@public
@dataclass(frozen=True, slots=True)
class ModuleSpread:
    """One module, or place outside of modules, over the ranks, in nanoseconds of a typical step.

    A module's time is its clock time, and what the host executes of it while a collective hides
    that. Both are of the forward and the backward together.

    Attributes:
        path: Path of the module; or a place in parentheses, of which only the host's time counts.
        class_name: Its class, ``""`` for a place.
        median_ns: Median over the ranks.
        worst_ns: The longest.
        worst_rank: The rank that takes longest.
        part: In what that rank exceeds the others most.
        cost_ns: By how much its clock time there exceeds the median of the others: the most that
            the job can lose.
        clear: Whether the difference is beyond the noise.
        ns_by_rank: Its time on each of ``JobReport.ranks``; 0 where it does not exist.
        ns_by_step: Its time in each step, median of the ranks.
    """

    path: str
    class_name: str
    median_ns: int
    worst_ns: int
    worst_rank: int
    part: Part
    cost_ns: int
    clear: bool
    ns_by_rank: tuple[int, ...]
    ns_by_step: tuple[int, ...]

    @property
    def label(self) -> str:
        """Path and class of the module."""
        return labelled(self.path or self.class_name, self.class_name)

    @property
    def differs_in(self) -> str:
        """The part in words; only the host's time is known outside of modules."""
        return "host" if self.path.startswith("(") else PARTS[self.part]


@public
@dataclass(frozen=True, slots=True)
class RankLane:
    """One rank in one step, in nanoseconds of the job's clock from the first beginning on.

    Attributes:
        rank: The rank.
        begin_ns: When its step begins.
        end_ns: When its step ends.
        collectives: For each collective its start, the end of the wait, its end, and the rank that
            enters last.
    """

    rank: int
    begin_ns: int
    end_ns: int
    collectives: tuple[tuple[int, int, int, int], ...]


@public
@dataclass(frozen=True, slots=True)
class JobFinding:
    """A cause that makes the job slower, with times in nanoseconds of a typical step.

    Attributes:
        rule: Name of its section in ``docs/findings.md``.
        kind: ``host``, ``gpu``, ``data``, ``transfer`` or ``pipeline``: what takes longer.
        rank: The rank, ``None`` if the cause is on all.
        path: The module, ``""`` for none.
        title: What is wrong, in a few words.
        seen: What was seen, with times.
        remedy: What to do.
        cost_ns: What the job loses at most.
        at_least: Whether it loses ``cost_ns`` at least instead.
        saves_ns: What the job's step would take less without the cause, by replaying all ranks
            together; ``None`` if that is not known.
    """

    rule: str
    kind: Literal["host", "gpu", "data", "transfer", "pipeline"]
    rank: int | None
    path: str
    title: str
    seen: str
    remedy: str
    cost_ns: int
    at_least: bool = False
    saves_ns: int | None = None

    @property
    def bound(self) -> str:
        """``at least`` or ``up to``, as it stands before ``cost_ns`` in a sentence."""
        return "at least" if self.at_least else "up to"


@public
@dataclass(frozen=True, slots=True)
class LostRank:
    """A trace that is not part of the answer.

    Attributes:
        source: Name of the trace.
        reason: Why.
    """

    source: str
    reason: str


@public
@dataclass(frozen=True, slots=True)
class JobReport(Presented):
    """Many ranks of one training job, one answer.

    ``print(job)`` shows it. Times are nanoseconds of a typical step.

    Attributes:
        ranks: The ranks, ascending.
        world_size: Number of ranks of the job.
        steps: Numbers of the steps that all ranks recorded.
        step_ns: Clock time of a step, median of the ranks.
        slowest: The slowest rank of each step; empty if the clocks cannot be aligned.
        late: The ranks that enter collectives later than the others, beyond the noise.
        groups: Waits by process group.
        lane_step: The step that ``lanes`` shows, which takes about the typical time.
        lanes: The ranks in that step, on one clock.
        modules: Modules by what their spread over the ranks costs, most first.
        findings: Causes, most expensive first.
        lost: Traces that could not be used.
        warnings: What to know before trusting the numbers.
        replayed_step_ns: The step as the replay of all ranks has it, which ``saves_ns`` of findings
            compare with; ``None`` if they are not replayed: a rank or a clock is missing, or
            between which ranks something is transferred.
        schema: Version of the JSON form.

    Example:
        >>> job = backspot.ranks(["ddp.rank0.trace.json.gz", "ddp.rank1.trace.json.gz"])
        >>> [one.rank for one in job.ranks], job.world_size, len(job.findings)
        ([0, 1], 2, 0)
    """

    ranks: tuple[RankCost, ...]
    world_size: int
    steps: tuple[int, ...]
    step_ns: int
    slowest: tuple[SlowestRank, ...]
    groups: tuple[GroupCost, ...]
    lane_step: int
    lanes: tuple[RankLane, ...]
    modules: tuple[ModuleSpread, ...]
    findings: tuple[JobFinding, ...]
    lost: tuple[LostRank, ...]
    warnings: tuple[str, ...]
    late: tuple[int, ...] = ()
    replayed_step_ns: int | None = None
    schema: str = SCHEMA

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the answer as ``.html`` or ``.json``, completely or not at all.

        Args:
            path: Where to write.
            force: Whether to overwrite a file. Default false.

        Returns:
            The path of the file.

        Raises:
            OutputExistsError: If the file exists, without ``force``.
            UsageError: If the suffix names no format.

        Example:
            >>> job.save("job.html")
            PosixPath('job.html')
        """
        return presented.forms().write(self, path, force=force)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> JobReport:
        """Read a job's report that ``save`` wrote as JSON.

        Args:
            path: The ``.json`` file.

        Returns:
            A report equal to the one that was saved.

        Raises:
            SourceNotFoundError: If the file is missing or cannot be read.
            NotATraceError: If it is not a job's report, or has another schema.
            UsageError: If ``path`` is not a path.

        Example:
            >>> backspot.JobReport.load(job.save("job.json", force=True)) == job
            True
        """
        job: JobReport = presented.forms().read(path, cls)
        return job

    def _made_of(self) -> list[str]:
        return [rank.source for rank in self.ranks]

    def __repr__(self) -> str:
        return (
            f"<JobReport of {counted(len(self.ranks), 'rank')} of {self.world_size}, "
            f"{counted(len(self.steps), 'step')}, {counted(len(self.findings), 'finding')}>"
        )


class InProfile(TypedDict, total=False):
    """What ``profile`` takes.

    Attributes:
        ranks: ``"all"`` sends what each rank recorded to rank 0, by the store of
            ``torch.distributed``: all ranks must call ``profile`` with the same ``steps``. Rank 0
            waits two minutes at most, and names ranks without a recording; its ``report.job`` says
            which rank is slow, where, and who waits for it. Outside of a job, this is a
            ``UsageError``. ``None`` (default): each rank has its own report only.
    """

    ranks: Literal["all"] | None


class InReport(Beside):
    """What each report has; it is no field, so it is not saved."""

    __slots__ = ()

    @property
    def job(self) -> JobReport | None:
        """The answer for all ranks, on rank 0 after ``profile(..., ranks="all")``.

        It is not saved with the report.
        """
        answer: JobReport | None = beside(self, "job")
        return answer
