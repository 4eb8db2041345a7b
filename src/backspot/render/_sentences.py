"""What a report says in words, in every output: the answer, its setting, and what to mistrust.

A sentence is a list of parts, so that each output can style names and numbers in its own way, and
can escape them: every name comes from a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

from backspot.formatting import MINUS, counted, duration, percent, size
from backspot.render.view import (
    DEFAULT_VIEW,
    LEAST_UNSTEADY,
    SCREEN_ROWS,
    Selection,
    View,
    heaviest,
    is_unsteady,
    only_nodes,
    operators_by,
    select,
    share_of,
)
from backspot.results.grouping import numberless
from backspot.results.report import (
    Finding,
    LineCost,
    OperatorCost,
    Phase,
    PhaseName,
    Place,
    Report,
    Row,
    Sort,
    time_of,
)
from backspot.results.unusual import unusual_steps
from backspot.trace.names import short_node_name

__all__ = [
    "FINDINGS_ON_A_SCREEN",
    "HEADING",
    "KINDS",
    "Part",
    "answer",
    "answered",
    "cost_of",
    "cost_of_place",
    "coverage",
    "elsewhere",
    "explained",
    "has_repeats",
    "hidden_work",
    "kept_phases",
    "listed",
    "longer_phase",
    "made_by",
    "notes",
    "phase_text",
    "place_name",
    "recording",
    "remedies",
    "savings",
    "searched",
    "setting",
    "shares_time_with",
    "units",
    "view_of_answer",
    "worth",
]

Part = tuple[Literal["text", "name", "node", "number"], str]

_DIFFUSE = 0.10
"""If the first row has a smaller share than this, the answer may be about repeated layers."""
_STANDS_OUT = 1.5
"""A layer that takes this many times as long as the median of its like is an answer by itself."""
_MOSTLY = 0.5
_PARTLY = 0.25
"""Idle shares of a time: from the second the answer says so, from the first that comes first."""
_NEARLY_ALL = 0.95
"""Share of a row's time from which the answer gives no second time for its heaviest node."""
_UNOWNED = 0.25
"""If a larger share than this is owned by no module, the answer says so."""
_LONG = 0.2
"""From this share of the step, a phase other than forward and backward gets an explanation."""

_MOVED = 0.03
"""From this share of the step, a replayed step that is shorter than the recorded one is shown."""
_ANOTHER = 0.25
"""The answer gives a saving that differs from the row's time by this share or more."""
_HIDDEN = 0.5
"""A row that saves certainly less than this share of its time is hidden behind other work."""
_CONCERNED = 5
"""How many of the first rows can get the sentence about hidden work."""
_LEAST_HIDDEN = 0.05
"""Share of the backward from which hidden work is worth a sentence."""

_LEAST_COLLECTIVE = 0.05
"""Share of a row's communication from which the answer names a collective."""


def made_by(line: LineCost) -> str:
    """The source line that made a node, or that called the code that made it."""
    return line.place if line.exact else f"called at {line.place}"


_SAID = {
    "(recompute)": "recomputed forward work",
    "(before a graph's replay)": "GPU idle time before a CUDA graph's replay",
}
"""Entries among a row's nodes that are not nodes, in words; all others are collectives."""


def _said(node: str) -> str:
    """An entry among the nodes in words, ``""`` for a node."""
    return f"communication between ranks {node}" if _is_collective(node) else _SAID.get(node, "")


def _is_collective(node: str) -> bool:
    return node.startswith("(") and node not in _SAID


def answer(report: Report, view: View = DEFAULT_VIEW) -> list[Part]:
    """One sentence: what makes the backward slow."""
    sort = view.sort
    if sort == "saves" and report.replayed_step is None:
        return [("text", "The step cannot be replayed, so no saving is known; use --sort wall.")]
    if sort == "gpu" and not report.gpu_ns:
        return [("text", "The trace has no GPU time to rank by; use --sort wall or --sort cpu.")]
    whole = {
        "wall": "the backward",
        "gpu": "the backward's GPU time",
        "cpu": "the backward's CPU time",
        "saves": "the backward",
    }[sort]
    if only_nodes(report):
        return _answer_by_node(report, sort, whole)
    chosen = select(report, replace(view, top=None))
    first = chosen.shown[0]
    row = answered(report, view)
    if row is None:
        takes = "The step would save nothing without any one module" if sort == "saves" else ""
        return [("text", f"{takes or f'No module takes any of {whole}'}.")]
    if row.is_exchange:
        return _exchanges(report, row, first)
    if sort == "saves":
        return _saves(report, row)
    parts = _takes(report, row, sort, whole)
    if row.members > first.members:
        parts += [
            ("text", "; no single module takes more than "),
            ("number", percent(report.share(first, sort))),
        ]
    unowned = sum(report.share(row, sort) for row in chosen.unowned if not is_unsteady(row))
    if unowned > _UNOWNED:
        parts += [("text", "; "), ("number", percent(unowned)), ("text", " belongs to no module")]
    return parts


def answered(report: Report, view: View = DEFAULT_VIEW) -> Row | None:
    """The row that the answer is about, or ``None`` if no module takes any of that time.

    This is a module or some modules, or the communication between ranks that takes more clock time.
    """
    if only_nodes(report):
        return None
    chosen = select(report, replace(view, top=1))
    first = chosen.shown[0]
    heaviest_module = _heaviest_module(report, first, view)
    exchanges = [row for row in chosen.unowned if row.is_exchange and view.sort == "wall"]
    longest = max(exchanges, key=lambda row: row.wall_ns, default=None)
    if longest and longest.wall_ns > (heaviest_module.wall_ns if heaviest_module else 0):
        return longest
    return heaviest_module


_TAKES: dict[PhaseName, str] = {
    "data": "Waiting for data takes",
    "copy": "Copying the batch takes",
    "loss": "The loss takes",
    "optimizer": "The optimizer takes",
    "other": "Work outside the model takes",
    "idle": "Idle time takes",
}


def longer_phase(report: Report, row: Row | None) -> list[Part]:
    """One sentence if a phase without modules takes much of the step, and more than the answer.

    Args:
        report: the report.
        row: what the answer is about.
    """
    longest = _longer_phase(report, row)
    if longest is None:
        return []
    _, time, share = phase_text(report, longest)
    return [
        ("text", f"{_TAKES[longest.name]} "),
        ("number", share),
        ("text", f" of the {report.per}: "),
        ("number", time),
        ("text", ", more than the backward of any module."),
    ]


def _longer_phase(report: Report, row: Row | None) -> Phase | None:
    """The longest phase without modules, if it takes much and more than the answer."""
    phases = [phase for phase in report.phases if phase.name in _TAKES]
    longest = max(phases, key=lambda phase: phase.wall_ns, default=None)
    least = max(_LONG * report.step_ns, row.wall_ns if row else 0)
    return longest if longest is not None and longest.wall_ns > least else None


def _heaviest_module(report: Report, first: Row, view: View) -> Row | None:
    """The first row, or the repeated layers that take more together, ``None`` without any time."""
    if not time_of(first, view.sort):
        return None
    if view.by != "path":
        return first
    layers = select(report, replace(view, top=1, by="pattern")).shown[0]
    if layers.members == 1 or time_of(layers, view.sort) < 2 * time_of(first, view.sort):
        return first
    is_little = report.share(first, view.sort) < _DIFFUSE
    if is_little or _is_around(first, layers) or _is_like_others(report, first, view):
        return layers
    return first


def _is_around(row: Row, layers: Row) -> bool:
    """Whether a module contains these layers, so that it takes what they leave over."""
    return layers.path.startswith(f"{numberless(row.path)}." if row.path else "")


def _is_like_others(report: Report, first: Row, view: View) -> bool:
    """Whether the first row is a repeated layer that takes hardly longer than the others."""
    kind = numberless(first.path), first.class_name
    times = [
        time_of(row, view.sort)
        for row in select(report, replace(view, top=None)).shown
        if (numberless(row.path), row.class_name) == kind
    ]
    slowest = time_of(first, view.sort)
    return sum(times) >= 2 * slowest and slowest < _STANDS_OUT * median(times)


def _exchanges(report: Report, row: Row, module: Row) -> list[Part]:
    """That the backward waits for other ranks, in which collectives, and for how long."""
    parts: list[Part] = [
        ("text", "Waiting for other ranks: "),
        ("name", row.path),
        ("text", " takes "),
        ("number", percent(report.share(row))),
        ("text", " of the backward: "),
        ("number", duration(row.wall_ns)),
    ]
    named = [node for node in row.nodes if node.wall_ns >= _LEAST_COLLECTIVE * row.wall_ns]
    for node in named:
        name = node.name.strip("()")
        if len(named) == 1:
            parts.append(("text", f", mostly {name}"))
        else:
            parts += [("text", f", {name} "), ("number", duration(node.wall_ns))]
    most = percent(report.share(module))
    return [*parts, *_without(row), ("text", "; no module takes more than "), ("number", most)]


def _answer_by_node(report: Report, sort: Sort, whole: str) -> list[Part]:
    reason = (
        "The trace names no modules"
        if report.source == "none"
        else "No module owns any of the backward"
    )
    ranked = operators_by(report, sort)
    if not ranked or not time_of(report, sort) or not time_of(ranked[0], sort):
        return [("text", f"{reason}, and no autograd node takes any time.")]
    time = time_of(ranked[0], sort)
    said = _said(ranked[0].name)
    if said:
        parts: list[Part] = [("text", f"{reason}; {said}")]
    else:
        name = short_node_name(ranked[0].name)
        parts = [("text", f"{reason}; the heaviest autograd node, "), ("node", name), ("text", ",")]
    idle = 0 if _is_collective(ranked[0].name) else _idle(ranked[0], sort)
    if idle >= _MOSTLY * time and not said:
        return parts + _waits(report, ranked[0], idle, "itself takes")
    return [
        *parts,
        ("text", " takes "),
        ("number", percent(share_of(report, ranked[0], sort))),
        ("text", f" of {whole}: "),
        ("number", duration(time)),
        *_partly(time, idle),
    ]


def _takes(report: Report, row: Row, sort: Sort, whole: str) -> list[Part]:
    time = time_of(row, sort)
    verb = "take" if row.members > 1 else "takes"
    parts: list[Part] = [("number", f"{row.members} × ")] if row.members > 1 else []
    parts.append(("name", row.label))
    idle = _idle(row, sort)
    if idle >= _MOSTLY * time:
        itself = "themselves take" if row.members > 1 else "itself takes"
        return parts + _waits(report, row, idle, itself)
    parts += [
        ("text", f" {verb} "),
        ("number", percent(report.share(row, sort))),
        ("text", f" of {whole}: "),
    ]
    node = heaviest(row, sort)
    parts += [("number", duration(time)), *_partly(time, idle)]
    if node is None or not time_of(node, sort):
        return parts
    said = _said(node.name)
    name: Part = ("text", said) if said else ("node", short_node_name(node.name))
    part = time_of(node, sort) / time
    parts += [("text", ", mostly " if part >= _MOSTLY else ", the largest part in "), name]
    if part < _NEARLY_ALL:
        parts += [("text", " ("), ("number", duration(time_of(node, sort))), ("text", ")")]
    return parts + (_without(row) if sort == "wall" else [])


def _saves(report: Report, row: Row) -> list[Part]:
    """How much less time a step would take if the backward of this row were free."""
    return [
        ("text", "Without the backward of "),
        ("name", row.label),
        ("text", f", a {report.per} would take "),
        ("number", duration(row.saves_ns or 0)),
        ("text", " less, "),
        ("number", percent(report.share(row, "saves"))),
        ("text", f" of the {report.per}; it takes "),
        ("number", duration(row.wall_ns)),
        ("text", " of the backward"),
    ]


def _without(row: Row) -> list[Part]:
    """What the step would save, if that is clearly another time than the row takes."""
    saves, wall = row.saves, row.wall_ns
    if saves is None or saves.low_ns <= wall <= saves.high_ns:
        return []
    if abs(saves.ns - wall) < _ANOTHER * wall:
        return []
    least, most = duration(saves.low_ns), duration(saves.high_ns)
    return [
        ("text", "; without it, a step would take "),
        ("number", f"{duration(saves.ns)} less" if saves.ns else "hardly less"),
        ("text", f" ({least} to {most})"),
    ]


def _idle(cost: Row | OperatorCost, sort: Sort) -> int:
    """The clock time during which nothing of it runs, neither on a device nor on the host.

    This is a lower bound, because work that runs on both at once is subtracted twice. If a trace
    lacks most of the device's work or most operators, it looks idle where the program was not.
    """
    return max(0, cost.wall_ns - cost.gpu_ns - cost.cpu_ns) if sort == "wall" else 0


def _waits(report: Report, cost: Row | OperatorCost, idle: int, itself: str) -> list[Part]:
    """That it works for a short time, and that the backward is idle around it."""
    whole = report.wall_ns or 1
    return [
        ("text", f" {itself} "),
        ("number", duration(cost.wall_ns - idle)),
        ("text", " of the backward; around it, the backward is idle for "),
        ("number", duration(idle)),
        ("text", " ("),
        ("number", percent(idle / whole)),
        ("text", ")"),
    ]


def _partly(time: int, idle: int) -> list[Part]:
    """How much of a time is idle, if that is worth saying."""
    if idle < _PARTLY * time:
        return []
    return [("text", " ("), ("number", duration(idle)), ("text", " of it idle)")]


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


def units(report: Report) -> str:
    """The units of a table."""
    return f"times in ms per {report.per}" + (", memory in MB" if report.memory else "")


def setting(report: Report) -> list[str]:
    """What was measured, as a list of facts: the times, the number of steps and the labels."""
    steps = report.steps
    wall = duration(report.wall_ns)
    facts = [f"backward {wall} per {report.per}{_spread(report)}"]
    unit = counted(steps, *_UNITS[report.step_unit])
    if len(report.passes) > steps:
        unit += f" ({counted(len(report.passes), 'pass', 'passes')})"
    whole = report.step_ns
    if report.unprofiled_step_ns is not None:
        recorded = f"; {duration(whole)} while recorded" if report.per == "step" else ""
        facts.insert(0, f"a step takes {duration(report.unprofiled_step_ns)}{recorded}")
    elif report.per == "step" and whole > 1.001 * report.wall_ns:
        unit += f" of {duration(whole)} while recorded{_replayed(report)}"
    facts.append(unit)
    if report.has_gpu:
        facts.append(f"GPU {duration(report.gpu_ns)}")
    facts += [f"CPU {duration(report.cpu_ns)}", _SOURCES[report.source]]
    return facts


def recording(report: Report) -> list[str]:
    """Where and how the trace was recorded, as a list of facts; some may be unknown."""
    known = report.recorded
    torch = [f"PyTorch {known['torch']}"] if "torch" in known else []
    facts = [known.get(name, "") for name in ("device", "time", "command")]
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
    return f", about {duration(step.ns)} without the profiler"


def _has_ranks(report: Report) -> bool:
    """Whether the step communicates with other ranks."""
    return any(row.is_exchange for row in report.modules)


def _spread(report: Report) -> str:
    by_step = report.wall_ns_by_step
    if len(by_step) < 2 or max(by_step) <= 1.2 * min(by_step):
        return ""
    return f" ({duration(min(by_step))} to {duration(max(by_step))})"


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


def savings(report: Report, chosen: Selection) -> list[str]:
    """Where what a step would save comes from, why it is not known, and what surprises in it."""
    step = report.replayed_step
    if step is None:
        reason = report.not_replayed
        return [f"What a {report.per} would save without a module is not known: {reason}"] * bool(
            reason
        )
    meaning = (
        f"saves: how much less time a {report.per} would take if that backward were free, by replay"
    )
    if not step.fitted:
        meaning += " with a cost of the profiler that was measured elsewhere, so roughly"
    if _has_ranks(report):
        meaning += "; other ranks are not replayed"
    return [*hidden_work(report, chosen), f"{meaning}."]


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
            less = f"only {duration(saves.ns)} less" if saves.ns else "hardly less"
            return [
                f"{row.name} takes {duration(wall)} of the backward, but without it a "
                f"{report.per} would take {less}: other work takes that time anyway."
            ]
    return []


def has_repeats(chosen: Selection) -> bool:
    """Whether grouping by pattern shortens a list of modules that is longer than a screen has."""
    rows = (*chosen.shown, *chosen.hidden)
    patterns = {(numberless(row.path), row.class_name) for row in rows}
    return len(patterns) < len(rows) > SCREEN_ROWS


def remedies(report: Report) -> Sequence[str]:
    """Unusual steps, the report's warnings, and how to get labels if no warning says it."""
    warnings = (*_unusual(report), *report.warnings)
    if report.source != "none" or any("instrument(" in text for text in report.warnings):
        return warnings
    return (*warnings, "To see modules, record the trace inside backspot.instrument(model).")


def _unusual(report: Report) -> list[str]:
    """The steps that took far longer than the typical one, in one line."""
    steps = unusual_steps(report)
    if not steps:
        return []
    first, *others = steps
    phases = {f"({name})": f" ({text})" for name, text in _PHASES.items()}
    where = phases.get(first.where, f", in {first.where}") if first.where else ""
    text = f"Step {first.step} took {duration(first.longer_ns)} longer{where}"
    if others:
        least = duration(others[-1].longer_ns)
        text += f"; {counted(len(others), 'more step')} took at least {least} longer"
    return [f"{text}. The numbers are those of a typical step."]


HEADING = "Why, and what to do"

KINDS = {
    "gpu": "GPU busy",
    "communication": "communication",
    "queued": "queued on the GPU",
    "sync": "after a host-device sync",
    "host": "GPU waits for the host",
}
"""What wall time is spent on: the fields of ``WallKinds``, in words."""

_PHASES: dict[PhaseName, str] = {
    "data": "waiting for data",
    "copy": "copies to the GPU",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "optimizer": "optimizer",
    "other": "other work",
    "idle": "idle",
    "unsteady": "unsteady",
}


def kept_phases(report: Report) -> list[Phase]:
    """The phases that take any time worth showing.

    What is unsteady is negative where the typical times of the others are more than the step, and
    is shown then too, so that the phases add up.
    """
    least = LEAST_UNSTEADY * report.step_ns
    return [
        phase
        for phase in report.phases
        if abs(phase.wall_ns) > (least if phase.name == "unsteady" else 0)
    ]


def phase_text(report: Report, phase: Phase) -> tuple[str, str, str]:
    """A phase's name, its time in a step, and its share of it."""
    time, sign = abs(phase.wall_ns), MINUS if phase.wall_ns < 0 else ""
    share = percent(time / report.step_ns if report.step_ns else 0.0)
    to_gpu = report.has_gpu or phase.name != "copy"
    name = _PHASES[phase.name] if to_gpu else "copies of the batch"
    return name, f"{sign}{duration(time)}", f"{sign}{share}"


_MEANINGS: dict[PhaseName, str] = {
    "data": (
        "the time until the model has its next batch; look first at what the host does in this "
        "time, such as loading data without worker processes"
    ),
    "copy": (
        "copies from the host to the GPU while no kernel runs; look first at pinned memory with "
        "non_blocking=True, and at the size of the batch"
    ),
    "loss": (
        "work after the model's forward and before the backward; look first at the loss function "
        "and at what else runs there, such as metrics"
    ),
    "optimizer": (
        "updates of the parameters, with zero_grad and gradient clipping; look first at whether "
        "the optimizer runs with fused=True or foreach=True"
    ),
    "other": (
        "recorded work that belongs to no other phase; look first at its operators in a trace "
        "viewer"
    ),
    "idle": (
        "nothing is recorded, neither on the host nor on a GPU; look first at what the program "
        "does besides PyTorch's operators, such as logging or waiting for another process"
    ),
    "unsteady": (
        "what the typical times of the other phases leave over of the step, less than nothing if "
        "they sum to more, because the phases vary from step to step; look first at their times by "
        "step in the JSON report"
    ),
}
"""What a long phase means and what to look at first; only what follows from any such trace."""


def explained(report: Report) -> list[str]:
    """A sentence for each phase that takes much of the step, the longest first."""
    phases = [phase for phase in report.phases if abs(phase.wall_ns) > _LONG * report.step_ns]
    sentences = []
    for phase in sorted(phases, key=lambda phase: -abs(phase.wall_ns)):
        if phase.name in _MEANINGS:
            name, _, share = phase_text(report, phase)
            meaning = _MEANINGS[phase.name]
            if phase.name == "copy" and not report.has_gpu:
                meaning = "copies before the forward; look first at the size of the batch"
            sentences.append(
                f"{name[0].upper()}{name[1:]} ({share} of the {report.per}): {meaning}."
            )
    return sentences


def view_of_answer(report: Report, top: int) -> View:
    """The view whose first row the answer is about: of repeated layers, or of modules."""
    row = answered(report)
    return View(top=top, by="pattern" if row is not None and row.members > 1 else "path")


def elsewhere(report: Report) -> list[Part]:
    """What takes more time than the answer and is no module.

    That is a phase of the step, or a cause that takes most of the backward, all over the modules.
    Empty if there is no such thing.
    """
    row = answered(report)
    said = longer_phase(report, row)
    finding = max(report.findings, key=lambda finding: finding.wall_ns, default=None)
    least = max(_MOSTLY * report.wall_ns, row.wall_ns if row else 0)
    if said or finding is None or finding.wall_ns <= least or not _is_spread(finding):
        return said
    time, share = cost_of(report, finding)
    return [
        ("number", finding.title),
        ("text", ": "),
        ("number", time),
        ("text", f", {share}, more than the backward of any module."),
    ]


def _is_spread(finding: Finding) -> bool:
    """Whether no single place has most of what a finding costs."""
    return finding.places[0].wall_ns < _MOSTLY * finding.wall_ns


_SAME = 0.25
"""The share of the shorter of two times that must be the same, because times of kernels and of the
clock differ a little."""


def shares_time_with(report: Report, finding: Finding, before: Sequence[Finding]) -> list[Finding]:
    """The findings listed before this one that may count some of the same time.

    That is so where both together say of a module more than it takes, and where they name the same
    kernels in one module.
    """
    rows = {row.path: row for row in report.modules}
    mine = {place.path: place.wall_ns for place in finding.places if place.wall_ns}

    def overlap(other: Finding) -> bool:
        shared = [place for place in other.places if place.wall_ns and place.path in mine]
        if set(finding.kernels) & set(other.kernels):
            return bool(shared)
        with_forward = _counts_forward(finding, rows) or _counts_forward(other, rows)
        for place in shared:
            if (row := rows.get(place.path)) is not None:
                takes = row.wall_ns + with_forward * row.forward_ns
                less, more = sorted((mine[place.path], place.wall_ns))
                if more <= takes < less + more - _SAME * less:
                    return True
        return False

    return [other for other in before if overlap(other)]


def _counts_forward(finding: Finding, rows: Mapping[str, Row]) -> bool:
    """Whether a finding says of a module more than its backward takes."""
    return any(
        place.wall_ns > rows[place.path].wall_ns for place in finding.places if place.path in rows
    )


def searched(report: Report) -> str:
    """How many rules looked for causes and how many could not, or ``""`` if that says nothing."""
    looked, unable = report.rules_looked, report.rules_unable
    rules = counted(looked + unable, "rule")
    if unable:
        need = "needs" if unable == 1 else "need"
        what = "events that this trace lacks" if report.has_gpu else "a GPU trace"
        told = f"{unable:,} of {rules} {need} {what}."
        return told if report.findings else f"No cause found; {told}"
    if not looked or report.findings:
        return ""
    return f"No cause found by {rules}."


_PLURAL = {"step": "steps", "pass": "passes"}
_CLEARLY_LESS = 0.9
"""A finding whose cause saves less than this share of its time says so."""


def cost_of(report: Report, finding: Finding) -> tuple[str, str]:
    """A finding's cost per step and its share: ``5.0 ms`` and ``11% of the step``."""
    if finding.held_bytes is not None:
        share = percent(_of_memory(report, finding.held_bytes))
        return size(finding.held_bytes), f"{share} of the peak"
    whole = report.whole_ns
    # Where a pass counts as a step, the step has its forward too, if that is recorded.
    step = report.per if whole > report.wall_ns or report.per == "step" else "backward"
    share = percent(finding.wall_ns / whole if whole else 0.0)
    of = f"{finding.steps} of {counted(report.steps, report.per, _PLURAL[report.per])}"
    often = "" if finding.steps == report.steps else f" (in {of})"
    saves = ""
    if finding.saves is not None and finding.saves.ns < _CLEARLY_LESS * finding.wall_ns:
        saves = f" ({duration(finding.saves.ns)} less without it)"
    return duration(finding.wall_ns), f"{share} of the {step}{often}{saves}"


def cost_of_place(place: Place) -> str:
    """What a finding costs in one place: a time, or memory."""
    return duration(place.wall_ns) if place.held_bytes is None else size(place.held_bytes)


def _of_memory(report: Report, held: int) -> float:
    peak = report.memory[0].peak_bytes if report.memory else 0
    return held / peak if peak else 0.0


_PHASE_PLACES = {
    "(data)": "the loading of data",
    "(optimizer)": "the optimizer",
    "(allocator)": "the allocator",
}
"""Places of findings that have no row, in words."""


def worth(finding: Finding, limit: int) -> tuple[tuple[Place, ...], str]:
    """The first places to name, and how many more there are.

    A place that has no row is named only among others: alone, the title of the finding says it.
    """
    if len(finding.places) == 1 and finding.path in _PHASE_PLACES:
        return (), ""
    named, rest = finding.places[:limit], len(finding.places) - limit
    return named, counted(rest, "more place") if rest > 0 else ""


def place_name(place: Place) -> str:
    """What a place is called: path and class of a module, or words."""
    return _PHASE_PLACES.get(place.path, place.label)


FINDINGS_ON_A_SCREEN = 3


def listed(report: Report, view: View = DEFAULT_VIEW) -> list[Finding]:
    """The findings in the order in which to read them.

    The most expensive come first, and before them, of the first few, the one that is about the
    answer alone: its remedy is the next thing to do. Where memory is the question, findings about
    memory come first.
    """
    found = list(report.findings)
    if view.order == "memory":
        return sorted(found, key=lambda one: one.held_bytes is None)
    row = answered(report, replace(view, order=None))
    phase = _longer_phase(report, row) if view.sort == "wall" else None
    subjects = [f"({phase.name})" if phase else "", row.path if row else ""]
    for subject in filter(None, subjects):
        for index, one in enumerate(found[:FINDINGS_ON_A_SCREEN]):
            if [place.path for place in one.places] == [subject]:
                return [one, *found[:index], *found[index + 1 :]]
    return found
