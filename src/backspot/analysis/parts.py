"""The parts of a report, in the order in which each adds its own to it.

A part is a function of the report so far, the recording and the options; ``CONTRIBUTING.md`` says
how to add one. The first makes the report from the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from backspot.analysis.accounting.batches import left_waiting
from backspot.analysis.accounting.holders import find_fused
from backspot.analysis.accounting.peaks import peaks_of
from backspot.analysis.accounting.phases import device_times
from backspot.analysis.accounting.unrecorded import RealStep
from backspot.analysis.accounting.work import find_work
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.caveats import warnings_of
from backspot.analysis.findings import (
    CUT_SHORT,
    Evidence,
    all_rules,
    find_all,
)
from backspot.analysis.host.picture import with_picture
from backspot.analysis.host.report import with_host, with_savings_of_waits
from backspot.analysis.memory.registry import rules_about_memory
from backspot.analysis.memory.report import with_memory
from backspot.analysis.rare import rare_parts, with_rare_work
from backspot.analysis.recorded import find_recorded, reserved_bytes
from backspot.analysis.recording import Options, Part, Recording
from backspot.analysis.replay.predict import with_savings
from backspot.analysis.timeline import distinct
from backspot.formatting import counted, duration, percent
from backspot.registry import Rule
from backspot.results.costs import Row
from backspot.results.findings import stable
from backspot.results.grouping import fold, ranked_rows
from backspot.results.limits import share_of_peak
from backspot.results.report import Report, changed
from backspot.results.training import Training
from backspot.trace import Category, Events, names

Value = TypeVar("Value")


def ranking(recording: Recording, options: Options) -> Report:
    """Return the report that all parts complete: what the backward costs, and the steps."""
    events, ownership = recording.events, recording.ownership
    costs, typical, phases = recording.costs, recording.typical, recording.phases
    real, recorded_phases = recording.real_step, recording.recorded_phases
    step_ns = recording.ledger.step_ns if phases is None else phases.wall.sum(axis=0)
    recorded = recording.recorded_ledger.step_ns
    return Report(
        modules=costs.modules,
        operators=costs.operators,
        passes=costs.passes,
        devices=costs.devices,
        step_unit=ownership.steps.unit,
        clock="real" if recording.pace else "recorded",
        step_ns=typical.value(step_ns),
        recorded_step_ns=typical.value(recorded),
        recorded_wall_ns=sum(row.recorded_wall_ns for row in costs.modules),
        wall_ns=costs.wall_ns,
        gpu_ns=costs.gpu_ns,
        cpu_ns=costs.cpu_ns,
        step_gpu_ns=typical.value(device_times(recording.recorded_ledger)),
        step_ns_by_step=tuple(step_ns.tolist()),
        wall_ns_by_step=costs.wall_ns_by_step,
        gpu_ns_by_step=costs.gpu_ns_by_step,
        cpu_ns_by_step=costs.cpu_ns_by_step,
        unprofiled_step_ns=real.step_ns if real else None,
        unprofiled_step_ns_by_step=real.by_step if real else (),
        coverage=costs.coverage,
        source=ownership.spans.source,
        has_gpu=bool(recording.clock.devices),
        warnings=(
            *options.slowed_by,
            *warnings_of(events, ownership, warmed_up=options.warmed_up),
            *_of_steps_without_calls(costs.modules, ownership),
            *_of_backward_hooks(costs.modules, costs.wall_ns, events),
        ),
        trace=events.source,
        phases=phases.typical(typical, recorded_phases) if phases and recorded_phases else (),
        fused=find_fused(events, ownership, typical),
        hiccups=typical.hiccups,
        noise=recording.recorded_costs.noise,
        recorded=find_recorded(events, ownership, live=options.live),
        training=options.training,
    )


_STEADY = 50
"""Steps from which it does not count how far the host is ahead of a device at both ends."""


_HELD_UP = 0.05
"""Share of the mean step up to which it does not count that the machine held up some steps."""


def real_step(recording: Recording, options: Options) -> RealStep | None:
    """Return the mean step without a profiler: of the whole training, else of the timed steps.

    The training's own clock tells of the parts of a step, too:

    - without a device, how long each part takes, unless the machine held up steps, in whatever part
      that was;
    - with a device, how long a step fetches batches alone, as it works on while the host does
      something else;
    - with and without one, how long the work takes that only some steps have.
    """
    training, timed = options.training, options.real_steps
    has_device = bool((recording.ownership.work.device >= 0).any())
    least = max(len(timed), _STEADY if has_device and timed else 1)
    if training is None or training.counted < least:
        return RealStep.of(timed)
    known_ns = {
        "data": training.data_ns,
        "backward": training.backward_ns,
        "optimizer": training.optimizer_ns,
    }
    if has_device:
        known_ns = {"data": _left_waiting(recording, training)}
    rare_ns = rare_parts(recording, training)
    rare_ns |= {(name,): ns for name, ns in known_ns.items() if ns}
    is_steady = training.held_up_ns <= _HELD_UP * training.step_ns
    behind = max((use.behind / use.batches for use in training.loaders if use.batches), default=0.0)
    return RealStep(training.step_ns, timed, rare_ns if is_steady else {}, behind)


def _left_waiting(recording: Recording, training: Training) -> int:
    """Return how long devices wait for data in a mean step; 0 without fetches or phases."""
    phases = recording.recorded_phases
    if phases is None or not training.data_ns:
        return 0
    steps = len(recording.windows.start)
    work = recording.ownership.work
    waiting = left_waiting(recording.events, work, steps, training)
    # Devices work as long while nothing is recorded.
    working = int(recording.typical.mean(phases.busy).sum())
    return min(waiting, max(0, training.step_ns - working))


def _of_steps_without_calls(rows: Sequence[Row], ownership: Ownership) -> list[str]:
    """Return a warning if labels end or begin within the recorded steps."""
    if ownership.steps.unit == "backward pass" or ownership.spans.source != "backspot":
        return []  # a pass through the graph of a gradient calls no module
    forward = [sum(step) for step in zip(*(row.forward_ns_by_step for row in rows), strict=True)]
    # A step can also be short of events, and nothing of it is outside then.
    outside = [row.wall_ns_by_step for row in rows if row.path == "(outside model)"]
    nodes = [sum(step) for step in zip(*outside, strict=True)] or [0] * len(forward)
    without = sum(ns > 0 and not called for called, ns in zip(forward, nodes, strict=True))
    if not 0 < without < len(forward):
        return []
    return [
        f"In {without} of {len(forward)} steps no module with a label was called: they train "
        "something else, or the script has replaced torch.nn.Module.__call__."
    ]


_HOOKS = f"{names.BACKWARD_HOOK_FUNCTION}{names.BACKWARD}"
_NAMED = 2
_MUCH = 0.1
"""Share of the backward from which the node that hooks run in is more than PyTorch's own work."""


def _of_backward_hooks(rows: Sequence[Row], wall_ns: int, events: Events) -> list[str]:
    """Return a warning if modules' full backward hooks take much of the backward.

    They run with a node of their own, and else their time passes for the module's.
    """
    spent = [(sum(node.wall_ns for node in row.nodes if node.name == _HOOKS), row) for row in rows]
    costly = sorted((pair for pair in spent if pair[0]), key=lambda pair: -pair[0])
    ns = sum(own for own, _ in costly)
    if not ns or ns < _MUCH * wall_ns:
        return []
    first = [row for _, row in costly[:_NAMED]]
    listed = [row.label for row in first]
    if len(costly) > _NAMED:
        listed.append(counted(len(costly) - _NAMED, "more module"))
    marks = events.prefixed(Category.ANNOTATION, names.BACKWARD_HOOK)
    read = (
        names.read_backward_hook_mark(events.names[name]) for name in distinct(events.name[marks])
    )
    paths = {row.path for row in first}
    hooks = sorted(
        {hook_mark[0] for hook_mark in read if hook_mark is not None and hook_mark[1] in paths}
    )
    return [
        f"Full backward hooks of {', '.join(listed)} take {duration(ns)}, "
        f"{percent(ns / wall_ns)} of the backward: {', '.join(hooks[:_NAMED]) or _HOOKS}. What "
        "they do is not the module's own work (register_full_backward_hook)."
    ]


def with_findings(report: Report, recording: Recording, options: Options) -> Report:
    """Add what makes the step slower than necessary."""
    if recording.events.truncated:
        # Kineto writes device work last. Without it, every rule would find the host at fault.
        return changed(report, rules=dict.fromkeys((rule.name for rule in all_rules()), CUT_SHORT))
    reserved = reserved_bytes(live=options.live)
    judged = find_all(Evidence(recording, report, reserved))
    rules_found = {finding.rule for finding in stable(judged.findings)}
    said_again = {sentence for sentence, rule in options.slowed_by.items() if rule in rules_found}
    return changed(
        report,
        findings=judged.findings,
        rules=judged.states,
        warnings=tuple(sentence for sentence in report.warnings if sentence not in said_again),
    )


def with_limits(report: Report, recording: Recording, options: Options) -> Report:
    """Add the work of each row, and what the device can do, if all devices have one name."""
    events, ownership = recording.detailed.events, recording.detailed.ownership
    work = find_work(events, ownership)
    if work is None:
        return report
    work_of = _by_name(ownership, work)
    rows = tuple(
        replace(row, work=work_of.get((row.path, row.class_name))) for row in report.modules
    )
    devices = set(ownership.work.device.tolist())
    used = {events.device_names.get(device, "") for device in devices}
    by_user = options.peak_tflops, options.peak_gbps
    peaks = peaks_of(next(iter(used)), *by_user) if len(used) == 1 else None
    replayed = report.replayed_step.ns if report.replayed_step else 0
    step_ns = report.step_ns if report.clock == "real" else replayed or report.step_ns
    mfu = share_of_peak(rows, peaks, step_ns, len(devices))
    return changed(report, modules=rows, peaks=peaks, mfu=mfu)


def _by_name(ownership: Ownership, values: Sequence[Value]) -> dict[tuple[str, str], Value]:
    """Return the values of all owners, by the path and the class name of their rows."""
    return {ownership.owners.named(owner): value for owner, value in enumerate(values)}


def folded(report: Report, _: Recording, options: Options) -> Report:
    """Add every row that is deeper than the asked depth to the one above it."""
    if options.depth is None:
        return report
    # A layer of the folded rows has more in it than the one that was replayed without.
    return changed(report, modules=ranked_rows(fold(report.modules, options.depth)), layers={})


RULES: tuple[Callable[[], Sequence[Rule[Any, Any, Any]]], ...] = (all_rules, rules_about_memory)
"""What returns the rules of each part that has some."""

PARTS: tuple[Part, ...] = (
    with_host,
    with_rare_work,
    with_picture,
    with_findings,
    with_savings,
    with_savings_of_waits,
    with_memory,
    with_limits,
    folded,
)
"""What each report gets. Limits are those of the step that savings replay; what is asked of the
rows as a whole comes last."""
