"""The facts around a table: how it was measured, what it leaves out, and what to mistrust."""

from __future__ import annotations

from collections.abc import Sequence

from backspot.formatting import between, counted, duration, percent
from backspot.render._phases import PHASES
from backspot.render._rare import iteration, kinds_of_steps, rarely
from backspot.render._sections import Section
from backspot.render._words import WITHOUT_PROFILER
from backspot.render.view import SCREEN_ROWS, Selection, View
from backspot.results.costs import time_of
from backspot.results.findings import Saving, less
from backspot.results.grouping import numberless
from backspot.results.report import Report

_MOVED = 0.03
"""From this share of the step, a replayed step that is shorter than the recorded one is shown."""
_HIDDEN = 0.5
"""A row that saves certainly less than this share of its time is hidden behind other work."""
_BETWEEN_NODES = 0.1
"""Share of the backward from which the time between nodes is explained."""
_CONCERNED = 5
"""How many of the first rows can get the sentence about hidden work."""
_LEAST_HIDDEN = 0.05
"""Share of the backward from which hidden work is worth a sentence."""

_UNITS = {
    "profiler step": ("profiler step", "profiler steps"),
    "optimizer step": ("optimizer step", "optimizer steps"),
    "backward pass": ("backward pass", "backward passes"),
}
_SOURCES = {
    "backspot": "modules by Backspot's labels",
    "lightning": "modules by Lightning's labels",
    "python": "modules by the profiler's nn.Module events",
    "none": "no module labels",
}


def units(report: Report, of_parts: Sequence[Section]) -> str:
    """The units of a table, with those of what parts add to it."""
    others = [section.units for section in of_parts if section.units]
    return ", ".join([f"times in ms per {report.per}", *others])


def setting(report: Report) -> list[str]:
    """What was measured, as a list of facts: the times, the number of steps and the labels."""
    steps = report.steps
    wall = duration(report.wall_ns)
    typical = [report.wall_ns_by_step[step] for step in report.typical_steps]
    facts = [f"backward {wall} per {report.per}{_spread(typical)}"]
    unit = counted(steps, *_UNITS[report.step_unit])
    if len(report.passes) > steps:
        unit += f" ({counted(len(report.passes), 'pass', 'passes')})"
    step_ns = report.step_ns
    kinds = f" ({kinds_of_steps(report)})" if report.rare else ""
    if report.clock == "real":
        real = kinds or _spread_of_steps(report)
        facts.insert(0, f"a step takes {duration(step_ns)}{real}")
    elif report.per == "step" and step_ns > 1.001 * report.wall_ns:
        unit += f" of {duration(step_ns)} with the profiler{_replayed(report)}{kinds}"
    facts.append(unit)
    if report.clock == "real":
        facts.append(f"times {WITHOUT_PROFILER}")
    elif "with the profiler" not in unit:
        facts.append("times as recorded")
    facts += [*filter(None, [iteration(report)]), *rarely(report)]
    return [*facts, *_device_and_host(report), _SOURCES[report.source]]


def _device_and_host(report: Report) -> list[str]:
    """The time of the devices and of the host, and in what, where the step's time comes first."""
    of_backward = " in the backward" if report.clock == "real" else ""
    facts = [f"CPU {duration(report.cpu_ns)}{of_backward}"]
    if report.has_gpu:
        step_time = f"{duration(report.step_gpu_ns)} per step, " if of_backward else ""
        facts.insert(0, f"GPU {step_time}{duration(report.gpu_ns)}{of_backward}")
    return facts


def recording(report: Report) -> list[str]:
    """Where and how the trace was recorded, as a list of facts; some may be unknown."""
    recorded = report.recorded
    torch = [f"PyTorch {recorded['torch']}"] if "torch" in recorded else []
    facts = [recorded.get(name, "") for name in ("device", "time", "host", "command")]
    return [fact for fact in (*facts[:1], *torch, *facts[1:]) if fact]


def _replayed(report: Report) -> str:
    """How long the step takes without the profiler, if that is another time.

    How much sooner other ranks are without the profiler, one rank's trace does not say.
    """
    step = report.replayed_step
    if (
        step is None
        or _has_ranks(report)
        or abs(report.step_ns - step.ns) < _MOVED * report.step_ns
    ):
        return ""
    return f", about {duration(step.ns)} without it"


def _has_ranks(report: Report) -> bool:
    """Whether the step communicates with other ranks."""
    return any(row.is_exchange for row in report.modules)


def _spread(by_step: Sequence[int]) -> str:
    if len(by_step) < 2 or max(by_step) <= 1.2 * min(by_step):
        return ""
    return f" ({between(min(by_step), max(by_step), 'unsteady')})"


def _spread_of_steps(report: Report) -> str:
    """The shortest and the longest step that were timed, which all steps may take longer than."""
    by_step = report.unprofiled_step_ns_by_step
    if not by_step or min(by_step) <= report.step_ns <= max(by_step):
        return _spread(by_step)
    return f" ({between(min(by_step), max(by_step), 'unsteady')} beside the recording)"


def coverage(report: Report) -> str:
    """How much of the backward is owned by modules."""
    shares = [("wall", report.coverage.wall), ("CPU", report.coverage.cpu)]
    if report.has_gpu:
        shares.insert(1, ("GPU", report.coverage.gpu))
    if all(share >= 1 for _, share in shares):
        return f"Modules own all of the backward.{_split(report)}"
    *most, last = [f"{percent(share)} of {kind}" for kind, share in shares]
    return f"Modules own {', '.join(most)} and {last} time.{_split(report)}"


def _split(report: Report) -> str:
    """How much of the backward is estimated, as a sentence after another; ``""`` for none."""
    split = sum(row.split_ns for row in report.modules)
    if not split:
        return ""
    share = percent(split / report.wall_ns)
    return (
        f" {share} of the backward is in compiled kernels that work for several modules: their "
        "time is split by the bytes that each moves (report.fused)."
    )


def notes(report: Report, chosen: Selection, view: View) -> list[str]:
    """What the table leaves out, and how to see it."""
    lines = []
    groups = {"path": "module", "class": "class", "pattern": "row"}[view.by]
    plural = {"path": "modules", "class": "classes", "pattern": "rows"}[view.by]
    if chosen.hidden:
        time = sum(time_of(row, view.sort) for row in chosen.hidden)
        share = sum(report.share(row, view.sort) for row in chosen.hidden)
        number = counted(len(chosen.hidden), f"more {groups}", f"more {plural}")
        total = " in total" if len(chosen.hidden) > 1 else ""
        verb = "takes" if len(chosen.hidden) == 1 else "take"
        everything = len(chosen.shown) + len(chosen.hidden)
        lines.append(
            f"{number} {verb} {duration(time)} ({percent(share)}){total}; "
            f"see --top {everything} or report.top()."
        )
    if chosen.idle:
        verb = "takes" if chosen.idle == 1 else "take"
        lines.append(f"{counted(chosen.idle, 'module')} {verb} no time in the backward.")
    if view.by == "path" and has_repeats(chosen):
        lines.append('Layers repeat; add them up with --by pattern or report.top(by="pattern").')
    return lines


def has_repeats(chosen: Selection) -> bool:
    """Whether grouping by pattern shortens a list of modules that is longer than a screen has."""
    rows = (*chosen.shown, *chosen.hidden)
    patterns = {(numberless(row.path), row.class_name) for row in rows}
    return len(patterns) < len(rows) > SCREEN_ROWS


def between_nodes(report: Report) -> list[str]:
    """What the engine's own time is, and what makes it less, where it is much of the backward."""
    row = next((row for row in report.modules if row.path == "(autograd engine)"), None)
    if row is None or report.share(row) < _BETWEEN_NODES:
        return []
    return [
        "(autograd engine): the time between nodes, in which no module's work runs. It is long "
        "where a backward has many short nodes (fewer, larger operations or torch.compile help) "
        "or the machine is busy."
    ]


def savings(report: Report, chosen: Selection) -> list[str]:
    """Where what a step would save comes from, why it is not known, and what surprises in it."""
    step = report.replayed_step
    unknown = unknown_savings(report, chosen)
    if step is None:
        return [*between_nodes(report), *unknown]
    parts_saved = {name for row in report.modules if row.saves for name in row.saves.parts}
    updates = any(phase.name == "optimizer" and phase.wall_ns for phase in report.phases)
    share = (
        ", its share of the optimizer aside, which the trace does not tell"
        if updates and "optimizer" not in parts_saved
        else ""
    )
    meaning = (
        f"saves: how much less time a {report.per} would take without the module{share}, by replay"
    )
    if not step.fitted:
        why = ": real steps are longer than any replay" * (report.clock == "real")
        meaning += f" with a cost of the profiler that was measured elsewhere, so roughly{why}"
    if _has_ranks(report):
        meaning += "; other ranks are not replayed"
    return [*between_nodes(report), *hidden_work(report, chosen), f"{meaning}.", *unknown]


def told_apart(saves: Saving | None) -> str:
    """A saving in words, with its range and its parts; nothing where it is not known."""
    if saves is None:
        return ""
    shares = ", ".join(f"{duration(ns)} {name}" for name, ns in saves.parts.items())
    interval_text = between(saves.low_ns, saves.high_ns)
    return f"{less(saves.ns)} ({interval_text}){f': {shares}' if shares else ''}"


def unknown_savings(report: Report, chosen: Selection) -> list[str]:
    """Why the table has a dash where it says what a row saves; nothing if it has none."""
    if report.replayed_step is None:
        reason = report.not_replayed
    elif any(row.saves is None and row.members > 1 for row in chosen.shown):
        reason = "Savings of several modules do not add up, and not all groups are replayed."
    elif any(row.saves is None for row in chosen.shown) and any(
        row.is_module and row.saves is None for row in report.modules
    ):
        reason = "In so large a model, only the modules with the most time are replayed without."
    else:
        reason = ""
    return [f"saves –: not known. {reason}"] if reason else []


def hidden_work(report: Report, chosen: Selection) -> list[str]:
    """That one of the first rows hides behind other work.

    What a module saves is without the profiler's cost, so its wall time is compared without it.
    """
    replayed = report.replayed_step
    real = min(1.0, replayed.ns / report.step_ns) if replayed and report.step_ns else 1.0
    for row in chosen.shown[:_CONCERNED]:
        saves, wall = row.saves, row.wall_ns
        if wall < _LEAST_HIDDEN * report.wall_ns or not saves:
            continue
        if saves.high_ns < _HIDDEN * real * wall:
            takes = f"would take {'only ' * (saves.ns > 0)}{less(saves.ns)}"
            late = any(finding.rule == "waiting-for-data" for finding in report.findings)
            why = "the next batch comes no sooner" if late else "other work takes that time anyway"
            return [
                f"{row.name} takes {duration(wall)} of the backward, but without it a "
                f"{report.per} {takes}: {why}."
            ]
    return []


def remedies(report: Report) -> Sequence[str]:
    """Steps that are left out, warnings, and how to get labels if no warning says it."""
    warnings = (*_hiccups(report), *report.warnings)
    if report.source != "none" or any("instrument(" in text for text in report.warnings):
        return warnings
    return (*warnings, "To see modules, record the trace inside backspot.instrument(model).")


def _hiccups(report: Report) -> list[str]:
    """The steps that something held up, and how many steps count, in one line."""
    if not report.hiccups:
        return []
    first, *others = report.hiccups
    phases = {f"({name})": f" ({text})" for name, text in PHASES.items()}
    phase = phases.get(first.where, f", in {first.where}") if first.where else ""
    recorded = " with the profiler" if report.clock == "real" else ""
    text = f"Step {first.step + 1} took {duration(first.longer_ns)} longer{recorded}{phase}"
    if others:
        least = duration(others[-1].longer_ns)
        text += f"; {counted(len(others), 'more step')} took at least {least} longer"
    left = len(report.typical_steps)
    steps = f"the {left} others" if left > 1 else "the other step"
    return [f"{text}. The numbers are means over {steps}."]
