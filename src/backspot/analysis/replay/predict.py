"""Savings and steps as a report has them: typical values in whole nanoseconds, with their range."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from backspot.analysis.accounting.activity import SAVING, USES
from backspot.analysis.attribution.cutting import Cut
from backspot.analysis.attribution.launches import DeviceWork, Precedence
from backspot.analysis.attribution.ownership import Special
from backspot.analysis.findings import NOTHING_FOUND, Found, Removable, weighed
from backspot.analysis.recording import Options, Recording
from backspot.analysis.replay.changes import CHANGES, change_by_names, free, said
from backspot.analysis.replay.host import MEASURED, Floats, ProfilerCost
from backspot.analysis.replay.replay import apart, contradiction, fit
from backspot.analysis.replay.replayable import Refusal, Replayable, prepare
from backspot.analysis.replay.saving import (
    Change,
    Replays,
    free_owners,
    owners_within,
    replays,
    scaled_owners,
)
from backspot.analysis.timeline import grouped, quantile, take
from backspot.analysis.typical import TypicalStep
from backspot.errors import UsageError
from backspot.formatting import labelled
from backspot.results.costs import Row
from backspot.results.findings import Finding, ReplayedStep, Saving, WhatIf, saves_nothing
from backspot.results.grouping import parents_of, repeated_layers
from backspot.results.report import Report, changed

_MOST_TIMES = 10_000_000  # of stations and works, in all runs without a row or a subtree
_LEAST_MOST = 100  # rows and subtrees, however large the recording is
_LAYERS = 12  # groups of repeated layers that are replayed without
_ENOUGH = 6_000  # spans and pieces of device work
_FEWEST = 3  # steps
_BUSY = 0.9  # of the step: from here on a device decides how long the step takes
_LONG = 200_000  # nanoseconds of a kernel: to launch one takes 5 to 20 thousand
_ERROR, _OF_SPREAD = 0.01, 0.7
"""How far a saving may be off: a share of the step, and of the standard deviation of the steps.

Steps that wait for a host differ by as much as the host's speed does, and so do savings. Fitted to
105 real changes on an H100 (``benchmarks/accuracy/what_if.py``), to hold 90% of what was measured.
"""
_SPREAD = 0.07  # of the step, where fewer than three count: that of most recordings
_MEASURED_MORE = 1.3  # how much longer work can take than was recorded
_UPDATING = {"(optimizer)", "(clipping)", "(zero_grad)"}
_MOST_STEPS = [0.1, 0.9]  # from the tenth to the ninetieth of a hundred recorded steps
_NOTHING = Saving(0, 0, 0)
"""What a module saves that does nothing."""
_TAKEN_AWAY = {"free", "parts", "update"}
"""Changes in which work is not done at all, so that a replay knows what it takes."""
PARTS_OF_SAVINGS = ("forward", "backward", "recompute", "optimizer")


_Key: TypeAlias = tuple[str | int, ...]
"""What a question is about: ``("row", path, class)``, ``("subtree", path)``, ``("layers", pattern,
class)`` or ``("remedy", rule)``."""


class _Question(NamedTuple):
    """What would a step save with this change?

    Attributes:
        owners: whose work goes, in proportion to which the saving is told apart; none for other
            changes.
    """

    change: Change
    owners: Sequence[int] = ()


class Prediction(msgspec.Struct, frozen=True, dict=True):
    """A recording without the profiler's cost, ready to be asked what a change would save.

    Attributes:
        recording: the recording, of some steps of the trace if the trace has very many.
        typical: the steps of the recording that count.
        cost: what the profiler cost.
        fitted: whether the cost was fitted to measured steps.
        cut: what the recording is of the one that was asked for, ``None`` for all of it.
        remedies: the changes that the remedies of the report's findings are, by rule.
    """

    recording: Replayable
    typical: TypicalStep
    cost: ProfilerCost
    fitted: bool
    cut: Cut | None = None
    remedies: Mapping[str, Change] = msgspec.field(default_factory=dict)

    def within(self, work: Removable) -> Removable:
        """Return some work of the trace, as far as it is replayed."""
        if self.cut is None:
            return work
        waits, operators = (self.cut.place[index] for index in (work.waits, work.operators))
        return replace(
            work,
            spans=work.spans[self.cut.spans],
            work=work.work[self.cut.work],
            waits=waits[waits >= 0],
            operators=operators[operators >= 0],
        )

    def change(self, requests: Mapping[str, Any]) -> Change | Refusal:
        """Return changes together, by the name of each and what is asked of it."""

        def within(value: Any) -> Any:
            if isinstance(value, Removable):
                return self.within(value)
            return [*map(within, value)] if isinstance(value, (list, tuple)) else value

        requests = {name: within(request) for name, request in requests.items()}
        return change_by_names(self.recording, requests)

    @property
    def most(self) -> int:
        """Without how many modules to replay: each time takes as long as there are modules."""
        size = int(self.recording.schedule.last[-1]) + 1 + len(self.recording.graph.gap)
        return max(_LEAST_MOST, _MOST_TIMES // size)

    @property
    def is_device_bound(self) -> bool:
        """Whether devices run something for nearly all of the recorded steps."""
        work, steps = self.recording.ownership.work, self.recording.steps
        busy = int((work.end - work.start)[steps.of_work >= 0].sum())
        return busy >= _BUSY * int((steps.end - steps.start).sum())

    def savings(self, changes: Sequence[Change]) -> tuple[ReplayedStep, list[Saving]] | Refusal:
        """Return the step without any change, and what it saves with each change alone.

        It is refused if the times of the trace contradict one another. Where they were held against
        a real step, that was looked for.
        """
        replayed = replays(self.recording, self.cost, changes)
        unchanged = np.stack([replayed[0].recorded, replayed[0].replayed], axis=1)
        is_compared = self.fitted or self.cost.slowdown != 1.0
        if not is_compared and (refusal := contradiction(self.recording, unchanged)):
            return refusal
        step = self._step(replayed)
        steps = replayed[0].steps[self.typical.chosen]
        spread = float(steps.std(ddof=1)) if len(steps) > 2 else _SPREAD * step.ns
        error = _ERROR * step.ns + _OF_SPREAD * spread
        shared = _time_shared(self.recording.ownership.work)
        shared /= max(1, len(replayed[0].steps))
        errors = [error + float((shared[c.work] * (1 - c.work_factors)).sum()) for c in changes]
        shorter = np.max([replay.shorter for replay in replayed], axis=0)
        most = shorter * _MEASURED_MORE + (shorter > 0) * error
        return step, _savings(replayed, self.typical, error, np.array(errors), most, step.ns)

    def what_if(self, requests: Mapping[str, Any]) -> WhatIf:
        """Return the step with changes, by the name of each and what is asked of it.

        Raises:
            UsageError: If one of them cannot be predicted, with the reason.
        """
        changes: list[Change] = []
        for request in (requests, *({name: value} for name, value in requests.items())):
            change = self.change(request)
            if isinstance(change, Refusal):
                if request is requests:
                    raise UsageError(f"what_if() cannot predict {change.reason}")
                change = changes[0]
            changes.append(change)
        savings = self.savings(changes)
        assert not isinstance(savings, Refusal)  # noqa: S101 - a report has only what was not refused
        step, (saving, *alone) = savings
        bounds = [CHANGES[name].at_best for name in requests]
        savings_alone = [
            replace(saving_alone, at_best=best)
            for saving_alone, best in zip(alone, bounds, strict=True)
        ]
        return WhatIf(
            step.ns - saving.ns,
            saving.ns,
            saving.low_ns,
            saving.high_ns,
            dict(zip(map(said, requests.items()), savings_alone, strict=True)),
            any(bounds),
        )

    def without_calls(self, calls: Sequence[Sequence[int]]) -> list[Saving]:
        """Return what a step saves if the host waits for no device in some calls.

        Args:
            calls: for each answer the calls, as indices into the events of the trace.
        """
        index, factors = np.empty(0, np.int64), np.empty(0)
        changes = []
        for indices in calls:
            waits = np.array(indices, np.int64)
            if self.cut is not None:
                waits = self.cut.place[waits]
            changes.append(Change(index, factors, index, factors, waits[waits >= 0]))
        savings = self.savings(changes)
        assert not isinstance(savings, Refusal)  # noqa: S101 - a report has only what was not refused
        return savings[1]

    def with_less(
        self,
        paths: Collection[str],
        less: Sequence[tuple[float, float]],
        *,
        unblocked: str = "",
    ) -> list[float]:
        """Return how much less a step takes if some places need so much less; below 0, more.

        Args:
            paths: modules, or phases that update the parameters. Where they do not take so much,
                the whole step counts.
            less: for each answer by how much the host and the devices work less in a step; below 0,
                they work more. All are nanoseconds.
            unblocked: a rule. Where its remedy takes waits away, the host does not wait there.
        """
        recording, ownership = self.recording, self.recording.ownership
        count = max(1, len(recording.steps.start))
        host = recording.host(self.cost)[:, 0]
        work = np.where(recording.steps.of_work >= 0, recording.work(self.cost)[:, 0], 0.0)
        of_host, of_work = np.zeros(len(host)), np.zeros(len(work))
        if not _UPDATING.isdisjoint(paths):
            of_host[recording.part == recording.forward_outside + 1] = 1.0
            of_work[recording.update] = 1.0
        else:
            is_inside = np.zeros(len(ownership.owners))
            is_inside[
                [owner for numbers in owners_within(ownership, paths).values() for owner in numbers]
            ] = 1.0
            fractions = [
                is_inside[ownership.owner],
                ownership.launch_shares.mean(is_inside),
                np.zeros(3),
            ]
            of_host, of_work = (
                np.concatenate(fractions)[recording.part],
                ownership.work_shares.mean(is_inside),
            )
        takes = float(of_host @ host) / count, float(of_work @ work) / count
        least = np.abs(np.array(less)).max(axis=0, initial=0.0)
        if takes[0] < least[0] or takes[1] < least[1]:
            of_host, of_work = np.ones(len(host)), np.ones(len(work))
            takes = float(host.sum()) / count, float(work.sum()) / count
        remedy = self.remedies.get(unblocked)
        waits = np.empty(0, np.int64) if remedy is None else remedy.waits
        changes = [
            Change(
                np.arange(len(host)),
                1 - of_host * less_by[0] / max(takes[0], 1.0),
                np.arange(len(work)),
                1 - of_work * less_by[1] / max(takes[1], 1.0),
                waits,
            )
            for less_by in less
        ]
        saved = replays(recording, self.cost, changes)[0].saved[self.typical.chosen]
        return [float(saved_ns) for saved_ns in saved.mean(axis=0)]

    def apart(self) -> tuple[float, float]:
        """Return what the host needs for a step, and the devices, each without the other."""
        return apart(self.recording, self.cost, self.typical)

    def of_models(self, *, with_loss: bool) -> float:
        """Return the models' share of the host's time, or theirs and their loss's.

        That is all but updates of the parameters and, without the loss, the forward outside of
        modules: what runs between two nodes of a backward belongs to neither.
        """
        recording = self.recording
        host, work_for = recording.host(self.cost)[:, 0], recording.part
        outside = recording.forward_outside
        rest = (work_for == outside + 1) | (not with_loss) & (work_for == outside)
        return 1.0 - float(host[rest].sum()) / max(1.0, float(host.sum()))

    @cached_property
    def worth(self) -> Floats:
        """How long each owner's work takes (rows), by ``PARTS_OF_SAVINGS`` (columns).

        It is the time of the devices if they decide how long the step takes, else of the host.
        """
        recording, ownership = self.recording, self.recording.ownership
        host = np.bincount(
            recording.part + 1, recording.host(self.cost)[:, 0], recording.forward_outside + 3
        )[1:]
        device = recording.work(self.cost)[:, 0]
        spans, work = len(ownership.spans.start), ownership.work
        again = ~ownership.spans.is_node & (ownership.passes.of_span >= 0)
        kind = np.where(again, 2, (ownership.passes.of_span >= 0).astype(np.int64))
        tables = np.zeros((2, len(ownership.owners), len(PARTS_OF_SAVINGS)))
        np.add.at(tables[0], (ownership.owner, kind), host[:spans])
        kinds_of_work = (
            ownership.launch_shares,
            host[spans:-2],
            take(kind, ownership.compiled.span, 0),
        )
        of_work = np.where(work.run >= 0, take(kind, work.span, 1), 0)
        for table, (shares, ns, kinds) in zip(
            tables, (kinds_of_work, (ownership.work_shares, device, of_work)), strict=True
        ):
            place = np.repeat(np.arange(len(ns)), shares.count)
            column = np.where(shares.again, 2, kinds[place])
            np.add.at(table, (shares.owner, column), ns[place] * shares.fraction)
        tables[0, Special.OUTSIDE, 0] += host[-2]
        tables[1, Special.OUTSIDE, 0] += device[recording.outside].sum()
        update = np.array([host[-1], device[recording.update].sum()])
        tables[:, :, 3] += recording.of_update * update[:, None]
        of_device = self.is_device_bound and tables[1].any()
        worth: Floats = tables[int(of_device)]
        return worth

    def _step(self, replayed: Sequence[Replays]) -> ReplayedStep:
        times = [self.typical.value(np.round(replay.steps).astype(np.int64)) for replay in replayed]
        return ReplayedStep(times[0], min(times), max(times), self.fitted)


def with_savings(report: Report, recording: Recording, _: Options) -> Report:
    """Add what the step would save without each row, each subtree and with each remedy.

    In a model that is too large to replay without each of its modules, this is done for the rows
    and subtrees with the most clock time.
    """
    prediction = predict(recording, report.unprofiled_step_ns)
    if isinstance(prediction, Refusal):
        return _without_savings(report, prediction)
    parents = parents_of(row for row in report.modules if row.is_module)
    outer = dict.fromkeys(parent for parent in parents.values() if parent is not None)
    alone = _of_rows(prediction)
    remedies = {finding.rule: _change_of(finding, prediction) for finding in report.findings}
    questions = _most_expensive(report.modules, alone, outer, prediction)
    questions |= _of_layers(report.modules, prediction)
    for rule, (change, _names) in remedies.items():
        if change is not None:
            questions["remedy", rule] = _Question(change)
    answers = prediction.savings([question.change for question in questions.values()])
    if isinstance(answers, Refusal):
        return _without_savings(report, answers)
    step, savings = answers
    saved = {
        key: _told_apart(saving, prediction.worth[[*question.owners]].sum(axis=0))
        for (key, question), saving in zip(questions.items(), savings, strict=True)
    }
    slower = _slower(report) if report.has_gpu else None
    priced = []
    vain = set()
    for finding in report.findings:
        names = remedies[finding.rule][1]
        finding = _with_saving(finding, saved.get(("remedy", finding.rule)), names, slower)
        priced.append(finding)
        # Of a change that at best saves nothing there is nothing to say.
        is_at_best = any(CHANGES[name].at_best for name in names)
        if is_at_best and saves_nothing(finding, step):
            vain.add(finding.rule)
    telling = [finding for finding in priced if finding.rule not in vain]
    layers = {
        labelled(*map(str, place)): saving
        for (kind, *place), saving in saved.items()
        if kind == "layers"
    }

    def saves(row: Row) -> Row:
        if not row.is_module and row.path == Special.ENGINE.path:
            return row  # replays give the engine's time to the nodes before
        key = "row", row.path, row.class_name
        own = total = saved.get(key, None if key in alone else _NOTHING)
        if row.is_module and row.path in outer:
            total = saved.get(("subtree", row.path))
        return replace(row, saves=own, total_saves=total)

    changes = {rule: change for rule, (change, _) in remedies.items() if change is not None}
    return changed(
        report,
        msgspec.structs.replace(prediction, remedies=changes),
        modules=tuple(map(saves, report.modules)),
        findings=weighed(telling, step),
        rules=report.rules | dict.fromkeys(vain, NOTHING_FOUND),
        replayed_step=step,
        layers=layers,
    )


def _slower(report: Report) -> float:
    """Return how many times as long devices waited in a recorded step as in a real one."""
    busy = sum(phase.busy_ns for phase in report.phases)
    recorded, real = (max(0, ns - busy) for ns in (report.recorded_step_ns, report.step_ns))
    return max(1.0, recorded / max(1, real))


def _without_savings(report: Report, refusal: Refusal) -> Report:
    findings = weighed((_with_saving(finding, None, (), None) for finding in report.findings), None)
    return changed(report, findings=findings, not_replayed=refusal.reason)


def _of_rows(prediction: Prediction) -> dict[_Key, _Question]:
    """Return what to ask of each row that has work: the step without it."""
    named = prediction.recording.ownership.owners.named
    return {
        ("row", *named(owner)): _Question(change, [owner])
        for owner, change in free_owners(prediction.recording).items()
    }


def _most_expensive(
    rows: Sequence[Row],
    alone: Mapping[_Key, _Question],
    outer: Collection[str],
    prediction: Prediction,
) -> dict[_Key, _Question]:
    """Return what to ask of as many rows and subtrees as there is time for, kept in order.

    Args:
        alone: what to ask of each row.
        outer: the paths of the subtrees.
    """
    own: dict[_Key, int] = {("row", row.path, row.class_name): row.wall_ns for row in rows}
    total = {row.path: row.total_wall_ns for row in rows if row.is_module}
    costs = np.array([*(own.get(key, 0) for key in alone), *(total[path] for path in outer)])
    chosen = np.zeros(len(costs), bool)
    chosen[np.argsort(-costs, kind="stable")[: prediction.most]] = True
    paths = list(compress(outer, chosen[len(alone) :]))
    within = owners_within(prediction.recording.ownership, paths)
    questions: dict[_Key, _Question] = dict(compress(alone.items(), chosen))
    for path, owners in within.items():
        questions["subtree", path] = _without(owners, prediction)
    return questions


def _of_layers(rows: Sequence[Row], prediction: Prediction) -> dict[_Key, _Question]:
    """Return what to ask of the repeated layers with most clock time, by pattern and class."""
    owners = prediction.recording.ownership.owners
    number = {owners.named(owner): owner for owner in range(len(owners))}
    layers = repeated_layers(rows)
    time = {key: sum(row.wall_ns for row in members) for key, members in layers.items()}
    questions: dict[_Key, _Question] = {}
    for pattern, class_name in sorted(layers, key=lambda key: -time[key])[:_LAYERS]:
        members = [
            number.get((row.path, row.class_name), -1) for row in layers[pattern, class_name]
        ]
        if min(members) >= 0:
            questions["layers", pattern, class_name] = _without(members, prediction)
    return questions


def _without(owners: Sequence[int], prediction: Prediction) -> _Question:
    """Return what to ask of some owners: the step without them."""
    change = scaled_owners(prediction.recording, dict.fromkeys(owners, 0.0))
    return _Question(change, owners)


def _told_apart(saving: Saving, worth: Floats) -> Saving:
    """Return a saving with its parts, in proportion to the time that each part takes."""
    if not saving.ns or not worth.sum():
        return saving
    ends = np.round(np.cumsum(worth) / worth.sum() * saving.ns).astype(np.int64)
    lengths = zip(PARTS_OF_SAVINGS, np.diff(ends, prepend=0).tolist(), strict=True)
    return replace(saving, parts={name: ns for name, ns in lengths if ns})


def _change_of(finding: Finding, prediction: Prediction) -> tuple[Change | None, Mapping[str, Any]]:
    """Return the change that a finding's remedy is, and its names; no names for free work.

    There is no change where what the remedy saves is not known.
    """
    if not (isinstance(finding, Found) and finding.priced):
        return None, {}
    change = prediction.change(finding.change) if finding.change else None
    if isinstance(change, Change):
        return change, finding.change
    # Where the step waits for the host, device work alone does not say what a cause costs, unless
    # to launch it takes hardly any time beside it.
    work = finding.removable
    if work is None:
        return None, {}
    within, pieces = prediction.within(work), prediction.recording.ownership.work
    long = (pieces.end - pieces.start)[within.work] >= _LONG
    few = not finding.change and bool(
        (long & (pieces.precedence[within.work] == Precedence.COMPUTE)).all()
    )
    if not (work.with_host or few or prediction.is_device_bound):
        return None, {}
    return free(prediction.recording, within), {}


def _with_saving(
    finding: Finding,
    saves: Saving | None,
    names: Iterable[str],
    slower: float | None,
) -> Finding:
    """Return the finding with its saving: of free work, and of bounds, at most its clock time.

    Without launches the host is ahead, so that later ones cost less: of these, the time that they
    take a host as slow as the recorded one is the most.

    Args:
        slower: how many times as long the devices waited for the host while it was recorded.
            ``None`` without a device: nothing runs beside the host then, and a replay knows its
            real time better.
    """
    if not isinstance(finding, Found):
        return finding
    if saves is None:  # the rule may know it without a replay
        return finding.with_saves(finding.saves)
    # What is free instead of a change that is refused is a bound.
    work, bounds = finding.removable, [CHANGES[name].at_best for name in finding.change]
    best = finding.at_best or any(bounds) or not (names or _TAKEN_AWAY.issuperset(finding.change))
    most = saves.ns
    if slower is None and not _TAKEN_AWAY.issuperset(names):
        most = finding.wall_ns  # in another form, work takes at least no time
    if slower is not None and (best or not names):
        launched = "graph" in names or (work and work.work.any())
        most = round(finding.wall_ns * (slower if best and launched else 1.0))
    if finding.taken_ns is not None:
        most = min(most, finding.taken_ns)
    saves = Saving(min(saves.ns, most), min(saves.low_ns, most), saves.high_ns)
    return finding.with_saves(replace(saves, at_best=best, at_least=finding.at_least))


def predict(recording: Recording, real_step_ns: int | None) -> Prediction | Refusal:
    """Compile a recording for predictions: its middle steps, as many as a typical step needs.

    Args:
        real_step_ns: the typical step without profiler and labels, ``None`` where it is not known.
            Then the cost of the profiler is the one that was measured on another machine.

    Returns:
        The prediction, or why the recording cannot be replayed.
    """
    ownership, typical = recording.ownership, recording.typical
    steps, size = ownership.steps.count, len(ownership.work.start) + len(ownership.spans.start)
    steps_kept = max(_FEWEST, _ENOUGH * steps // max(1, size))
    cut = None
    if steps_kept < steps and not recording.events.truncated:
        first = (steps - steps_kept) // 2
        recording = recording.steps(first, first + steps_kept - 1)
        cut = recording.cut
        typical = typical.within(first, steps_kept)
    replayable = prepare(recording)
    if isinstance(replayable, Refusal):
        return replayable
    cost: ProfilerCost | Refusal = MEASURED
    if real_step_ns is not None:
        real_parts = recording.real_step.parts if recording.real_step else {}
        if recording.pace is not None:  # what was not recorded is not replayed
            unseen = int(recording.pace.unseen_ns[[SAVING, *USES]].sum())
            real_step_ns = max(1, real_step_ns - unseen)
        cost = fit(replayable, real_step_ns, typical, real_parts.get(("data",), 0))
    if isinstance(cost, Refusal):
        return cost
    fitted = cost.uncertainty < MEASURED.uncertainty
    return Prediction(replayable, typical, cost, fitted=fitted, cut=cut)


def _time_shared(work: DeviceWork) -> Floats:
    """Return for how long each piece of device work runs beside other computation on its device.

    Both share the device's units: without one, the other runs faster by what no replay knows.
    """
    shared = np.zeros(len(work.start))
    for _, members in grouped(work.device, np.flatnonzero(work.precedence == Precedence.COMPUTE)):
        edges = np.concatenate([work.start[members], work.end[members]])
        order = np.argsort(edges, kind="stable")
        edges = edges[order]
        running = np.cumsum(np.repeat([1, -1], len(members))[order])
        several = np.append(0.0, np.cumsum(np.diff(edges) * (running[:-1] > 1)))
        first, last = (np.searchsorted(edges, times[members]) for times in (work.start, work.end))
        shared[members] = several[last] - several[first]
    return shared


def _savings(
    replayed: Sequence[Replays],
    typical: TypicalStep,
    less: float,
    more: Floats,
    most: Floats,
    step_ns: int,
) -> list[Saving]:
    """Return what each change saves, with the error of predictions on both sides.

    A change saves at least nothing, and hardly more than the time of all work that it makes
    shorter, or the whole step.

    Args:
        typical: the steps that count.
        less: by how much a saving can be less, in nanoseconds.
        more: by how much each saving can be more.
        most: what each of them is at most.
        step_ns: the step without any change.
    """
    # One step saves less than nothing where it waits for what another one no longer waits for.
    by_step = np.round(replayed[0].saved).astype(np.int64)
    steps = [replay.saved[typical.chosen] for replay in replayed]
    ends = np.stack([[quantile(saved, share) for share in _MOST_STEPS] for saved in steps])
    ns = np.clip(typical.mean(by_step.T), 0, step_ns)
    low = np.clip(np.round(ends.min(axis=(0, 1)) - less), 0, ns).astype(np.int64)
    high = np.minimum(np.round(ends.max(axis=(0, 1)) + more), np.round(most))
    high = np.clip(high, ns, step_ns).astype(np.int64)
    return [
        Saving(*numbers) for numbers in zip(ns.tolist(), low.tolist(), high.tolist(), strict=True)
    ]
