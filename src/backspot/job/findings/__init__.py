"""Why a job is slow, and what to do about it.

In comes ``Evidence``: the summaries of all ranks, and what was made of them. Out come
``JobFinding``s, the most expensive first.

``rules.py`` has the rules, under the decorators ``rule`` and ``fallback_rule`` of this file. Its
docstring is the chapter on how to write one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from backspot.analysis.typical import TypicalStep
from backspot.job.modules import Claim, Table
from backspot.job.replay import Change, JobReplay
from backspot.job.roles import Roles
from backspot.job.scatter import MATTERS, MATTERS_OF_MANY
from backspot.job.summary import Call, Summary
from backspot.job.waiting import GroupWaits
from backspot.registry import Registry, Rule as AnyRule
from backspot.results.job import JobFinding, RankCost
from backspot.trace.events import Ints


@dataclass(frozen=True, slots=True)
class Transfers:
    """Collectives that move the same thing; arrays with one entry a collective.

    Attributes:
        bytes: what each rank puts in, -1 where that is not known.
        cost: nanoseconds for which the typical rank loses time by the transfer for certain: it
            runs, nothing else does, and what is launched waits; waits for other ranks left out.
        launching: nanoseconds for which the host of the typical rank launches it, while its device
            runs nothing, or collectives alone.
        idle_before: nanoseconds since the end of the collective before on the typical rank, 0 for
            the first one of a step.
    """

    typical: TypicalStep
    calls: Sequence[Call]
    step: Ints
    bytes: Ints
    cost: Ints
    launching: Ints
    idle_before: Ints

    def typical_ns(self, cost: Ints) -> int:
        """Return the sum of these costs in a typical step."""
        by_step = np.zeros(len(self.typical.chosen), np.int64)
        np.add.at(by_step, self.step, cost)
        return self.typical.value(by_step)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The summaries of all ranks, and what was made of them.

    Attributes:
        ranks: the summary of each rank, ascending.
        at: for each rank, where its summary has the steps that all ranks have.
        typical: the steps that count.
        step_ns: clock time of a step, median of the ranks.
        claims: the modules that take longer on a rank, beyond the noise.
        costs: the ranks in a typical step, in the order of ``ranks``.
        waits: waits and transfers by process group; empty if any of them may be missing.
        roles: what each process group is for.
        replay: all ranks together; ``None`` if they cannot be replayed.
    """

    ranks: Mapping[int, Summary]
    at: Mapping[int, Sequence[int]]
    typical: TypicalStep
    step_ns: int
    table: Table
    claims: Sequence[Claim]
    costs: Sequence[RankCost]
    waits: Sequence[GroupWaits]
    roles: Roles
    replay: JobReplay | None = None

    @property
    def steps(self) -> int:
        """Number of steps that all ranks have."""
        return len(next(iter(self.at.values())))

    @property
    def worth_ns(self) -> float:
        """What a cause that concerns all ranks must cost to be worth a claim."""
        return MATTERS * self.step_ns

    @property
    def stalled(self) -> Ints:
        """Time in which a transfer between two ranks is all that goes on, by rank and step."""
        return np.array(
            [np.array(summary.stalled)[self.at[rank]] for rank, summary in self.ranks.items()]
        )

    @property
    def kernels(self) -> Ints:
        """Time in which kernels run, by rank and step; also those outside of modules.

        The loss is part of the work of the last stage of a pipeline.
        """
        kernels = np.zeros((len(self.ranks), self.steps), np.int64)
        for row, (rank, summary) in enumerate(self.ranks.items()):
            times = [(module.forward_gpu, module.backward_gpu) for module in summary.modules]
            if times:
                kernels[row] = np.sum(times, axis=(0, 1))[list(self.at[rank])]
        return kernels

    def transfers(self, purpose: str) -> Transfers:
        """Return the collectives that move ``gradients`` or ``parameters``."""
        uncertain = {cost.rank: cost.uncertainty_ns for cost in self.costs}
        calls: list[Call] = []
        pieces: list[tuple[Ints, ...]] = []
        for group_waits in self.waits:
            group = group_waits.group
            columns_of = np.flatnonzero([call.purpose == purpose for call in group.call])
            rows = [group.ranks.index(rank) for rank in group_waits.ranks]
            doubt = np.array([[2 * uncertain[rank]] for rank in group_waits.ranks])
            cost = np.maximum(group.exposed[rows] - group_waits.wait - doubt, 0)
            idle = np.zeros_like(cost)
            idle[:, 1:] = np.maximum(group.start[rows, 1:] - group.end[rows, :-1], 0)
            idle[:, 1:][:, group.step[1:] != group.step[:-1]] = 0
            calls += [group.call[column] for column in columns_of.tolist()]
            columns = (group.step, *map(_low_median, (cost, group.launching[rows], idle)))
            pieces.append(tuple(column[columns_of] for column in columns))
        step, *times = (
            (np.concatenate(column) for column in zip(*pieces, strict=True))
            if pieces
            else (np.empty(0, np.int64),) * 4
        )
        return Transfers(
            self.typical, calls, step, np.array([call.bytes for call in calls], np.int64), *times
        )

    def costly(self, longer_ns: Mapping[int, int]) -> set[int]:
        """Return the ranks without whose longer work the job's step would take less.

        Kernels also take longer beside the collectives of a rank that waits, and a slow rank costs
        nothing where all wait for a host. A rank counts if it costs the job something as it is, or
        once all other ones are as fast as the rest: two that are alike hide each other. The replay
        says up to three times too little (``planted_ranks``), so 0.5% of the step is enough.

        Args:
            longer_ns: nanoseconds a step by which the work of each rank takes longer.
        """
        if not self.replay or not longer_ns:
            return set(longer_ns)
        changes = {
            rank: change
            for rank, by_ns in longer_ns.items()
            if (change := self.replay.sooner(rank, by_ns))
        }
        rest = [_together(changes[one] for one in changes if one != rank) for rank in changes]
        variants = [_together(changes.values()), *changes.values(), *rest]
        now, without_any, *others = self.replay.steps(variants)
        without_it, with_it_alone = others[: len(changes)], others[len(changes) :]
        return longer_ns.keys() - {
            rank
            for rank, without, alone in zip(changes, without_it, with_it_alone, strict=True)
            if self.typical.value(np.maximum(now - without, alone - without_any))
            < MATTERS_OF_MANY * self.step_ns
        }

    def phase(self, name: str) -> Ints:
        """Return the clock time of a phase, by rank and step."""
        phase_ns = np.zeros((len(self.ranks), self.steps), np.int64)
        for row, (rank, summary) in enumerate(self.ranks.items()):
            for phase in summary.phases:
                if phase.name == name:
                    phase_ns[row] = np.array(phase.by_step, np.int64)[list(self.at[rank])]
        return phase_ns


def _together(changes: Iterable[Change]) -> Change:
    """Return these changes as one."""
    made = tuple(changes)

    def change(takes: np.ndarray) -> np.ndarray:
        for one in made:
            takes = one(takes)
        return takes

    return change


def _low_median(values: Ints) -> Ints:
    """Return the median over the first axis; of two, the lower one."""
    medians: Ints = np.sort(values, axis=0)[(len(values) - 1) // 2]
    return medians


Rule: TypeAlias = AnyRule[Evidence, JobFinding, Iterable[JobFinding]]

_rules: Registry[Evidence, JobFinding, Iterable[JobFinding]] = Registry("backspot.job.findings")
rule = _rules.rule
fallback_rule = _rules.fallback_rule


def all_rules() -> tuple[Rule, ...]:
    """Return every rule, sorted by name, with the fallback rules last."""
    return _rules.rules


def find_all(evidence: Evidence) -> tuple[JobFinding, ...]:
    """Return what all rules find, the most expensive first."""
    findings: list[JobFinding] = []
    for job_rule in all_rules():
        findings += [
            job_rule.named(finding) for finding in job_rule.find(evidence, tuple(findings))
        ]
    return tuple(
        sorted(
            _priced(evidence, findings),
            key=lambda finding: (
                -finding.cost_ns,
                -1 if finding.rank is None else finding.rank,
                finding.path,
            ),
        )
    )


def _priced(evidence: Evidence, findings: Sequence[JobFinding]) -> list[JobFinding]:
    """Say what the job's step would take less without each cause, where the replay knows."""
    replay = evidence.replay
    priceable = [
        finding for finding in findings if finding.kind == "transfer" or finding.rank is not None
    ]
    if not replay or not priceable:
        return list(findings)
    changes = [
        replay.without_transfers
        if finding.rank is None
        else replay.balanced
        if finding.kind == "pipeline"
        else replay.sooner(finding.rank, finding.cost_ns)
        for finding in priceable
    ]
    now, *changed = replay.steps([change for change in changes if change])
    priced = [finding for finding, change in zip(priceable, changes, strict=True) if change]
    saves = {
        id(finding): evidence.typical.value(now - then)
        for finding, then in zip(priced, changed, strict=True)
    }
    # All transfers are hidden in the replay: one kind of them saves no more than it costs.
    return [
        replace(finding, saves_ns=max(min(saves[id(finding)], finding.cost_ns), 0))
        if id(finding) in saves
        else finding
        for finding in findings
    ]
