"""The answer: the one sentence that says what makes the backward slow, and what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median

from backspot.formatting import between, duration, labelled, percent
from backspot.render._phases import taking
from backspot.render._rare import told
from backspot.render._steadiness import is_clearly_first, is_steady
from backspot.render._words import Part, said
from backspot.render.parts import costs_of_parts
from backspot.render.view import (
    DEFAULT_VIEW,
    View,
    heaviest,
    only_nodes,
    operators_by,
    select,
    share_of,
)
from backspot.results.costs import OperatorCost, Row, Sort, time_of
from backspot.results.findings import Saving, less, stable
from backspot.results.grouping import numberless
from backspot.results.report import Answer, Report
from backspot.trace.names import short_node_name

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
_ANOTHER = 0.25
"""The answer gives a saving that differs from the row's time by this share or more."""
_MORE, _ENOUGH = 3, 10
"""A recording that is too noisy needs so many times as many steps, and at least as many as this."""
_LEAST_COLLECTIVE = 0.05
"""Share of a row's communication from which the answer names a collective."""

_WORDS = {
    "(recompute)": "recomputed forward work",
    "(before a graph's replay)": "GPU idle time before a CUDA graph's replay",
}
"""Entries among a row's nodes that are not nodes, in words; all others are collectives."""


def sentences(report: Report, view: View = DEFAULT_VIEW) -> list[list[Part]]:
    """What costs most in the step, and then, if that is no module, what does of the modules.

    Other rankings than by clock time have their own first row alone.
    """
    first = _first(report, report.answer) if view.sort == "wall" else []
    return [*([first] if first else []), answer(report, view)]


def _first(report: Report, subject: Answer) -> list[Part]:
    """What costs most in the step; nothing if that is a module, or nothing is known."""
    step, share, time = report.per, percent(subject.share), duration(subject.wall_ns)
    at_line = said(" in {}", ("name", subject.line)) if subject.line else []
    for cost in costs_of_parts(report):
        if cost.answer == replace(subject, remedy=None):
            most: list[Part] = [("text", ", most of it"), *at_line] if at_line else []
            return [*cost.said, *most, *_saving(subject.saves, cost.name), ("text", ".")]
    if subject.kind == "phase":
        rare = next((work for work in report.rare if f"({work.name})" == subject.path), None)
        if rare is not None and rare.share >= _MOSTLY * subject.share:
            rarely = told(rare, report.steps)
            sentence = said(f"{rarely[0].upper()}{rarely[1:]} ({{}} of it)", percent(rare.share))
        else:
            sentence = said(f"{taking(report, subject.path)} {{}} of the {step}: {{}}", share, time)
        sentence += [("text", ", most of it"), *at_line] if at_line else []
        sentence.append(("text", ", more than the backward of any module"))
    elif subject.kind == "cause":
        title = next(
            finding.title for finding in stable(report.findings) if finding.rule == subject.rule
        )
        sentence = said(f"{{}}: {{}}, {{}} of the {step}", ("text", title), time, share) + at_line
        if subject.class_name:
            name = labelled(subject.path or subject.class_name, subject.class_name)
            sentence += said(", in {}", ("name", name))
        elif subject.path == "(outside model)":
            sentence.append(("text", ", in no module"))
    elif subject.kind == "module":
        rows = [row for row in (costliest_row(report), answered(report)) if row is not None]
        row = next((row for row in rows if row.path == subject.path), None)
        if row is None or _is_said_next(report, row):
            return []
        return [*_with_its_forward(row, step, share, time), *_saving(subject.saves), ("text", ".")]
    elif only_nodes(report) or not subject.share:
        return []
    else:
        none = "Nothing stands out: no module, no cause and nothing around the model takes more"
        return said(f"{none} than {{}} of the {step}.", share)
    if subject.saves and subject.saves.ns:
        saves = subject.saves
        bound = "at least " if saves.at_least else "at most " if saves.at_best else ""
        # A remedy can take away more than the cause: what runs for it elsewhere.
        way = "without it" if saves.ns <= subject.wall_ns else "with its remedy"
        sentence += said(f"; {way}, a step would take {{}} less", bound + duration(saves.ns))
    return [*sentence, ("text", ".")]


def answer(report: Report, view: View = DEFAULT_VIEW) -> list[Part]:
    """What makes the backward slow; first, whether the clock of these steps can say so."""
    steady = _by_what_is_steady(report, view)
    if steady is not view:
        return [("text", "The host's time wavers. By GPU time, "), *_ranked(report, steady)]
    return [*_too_noisy(report, view), *_ranked(report, view)]


def _by_what_is_steady(report: Report, view: View) -> View:
    """The view by the time of devices, where the clock does not tell which row comes first."""
    if view.sort != "wall" or not (report.has_gpu and _is_open(report, view)):
        return view
    by_device = replace(view, sort="gpu")
    return by_device if is_steady(report, "gpu") and _answered(report, by_device) else view


def _is_open(report: Report, view: View) -> bool:
    """Whether the steps disagree so much that another row may be the first."""
    if not report.is_noisy:
        return False
    row = _answered(report, view)
    return row is None or not is_clearly_first(report, row, view)


def _too_noisy(report: Report, view: View) -> list[Part]:
    """That the steps disagree, how busy the machine was, and what gives steadier steps."""
    if not _is_open(report, view):
        return []
    host = report.recorded.get("host", "")
    threads = "" if report.has_gpu else "OMP_NUM_THREADS=1 and "
    steps = max(_MORE * report.steps, _ENOUGH)
    return said(
        "Too noisy to rank: {} of the backward may belong to other modules{}. Record again on an "
        f"idle machine, with {threads}--steps {steps} (profile(steps={steps})). In the steadiest "
        "steps, ",
        percent(report.noise),
        ("text", f" ({host})" if host else ""),
    )


def _ranked(report: Report, view: View) -> list[Part]:
    """One sentence: what makes the backward slow."""
    sort = view.sort
    if sort == "saves" and report.replayed_step is None:
        return [("text", "The step cannot be replayed, so no saving is known; use --sort wall.")]
    if sort == "gpu" and not report.gpu_ns:
        return [("text", "The trace has no GPU time to rank by; use --sort wall or --sort cpu.")]
    time_name = {
        "wall": "the backward",
        "gpu": "the backward's GPU time",
        "cpu": "the backward's CPU time",
        "saves": "the backward",
    }[sort]
    if only_nodes(report):
        return _answer_by_node(report, sort, time_name)
    chosen = select(report, replace(view, top=None))
    first = chosen.shown[0]
    row = _answered(report, view)
    if row is None:
        takes = "The step would save nothing without any one module" if sort == "saves" else ""
        return [("text", f"{takes or f'No module takes any of {time_name}'}.")]
    if row.is_exchange:
        return _exchanges(report, row, first)
    if sort == "saves":
        return said(
            f"Without {{}}, a {report.per} would take {{}} less, {{}} of the "
            f"{report.per}; it takes {{}} of the backward",
            ("name", row.label),
            duration(row.saves.ns if row.saves else 0),
            percent(report.share(row, "saves")),
            duration(row.wall_ns),
        )
    clause = _takes(report, row, sort, time_name)
    if row.members > first.members:
        most = percent(report.share(first, sort))
        clause += said("; no single module takes more than {}", most)
    unowned = sum(report.share(row, sort) for row in chosen.unowned)
    return clause + (
        said("; {} belongs to no module", percent(unowned)) if unowned > _UNOWNED else []
    )


def answered(report: Report, view: View = DEFAULT_VIEW) -> Row | None:
    """The row that the answer is about, or ``None`` if no module takes any of that time.

    This is a module or some modules, or the communication between ranks that takes more clock time.
    Where the clock does not tell which one comes first, and the time of devices does, that tells.
    """
    return _answered(report, _by_what_is_steady(report, view))


def _answered(report: Report, view: View) -> Row | None:
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


def view_of_answer(report: Report, top: int) -> View:
    """The view whose first row the answer is about: of repeated layers, or of modules."""
    row = answered(report)
    view = replace(_by_what_is_steady(report, DEFAULT_VIEW), top=top)
    return replace(view, by="pattern") if row is not None and row.members > 1 else view


def costliest_row(report: Report) -> Row | None:
    """The module, or the repeated layers, that take most of the step, forward and backward.

    ``None`` where no module takes any time, or where the steps disagree too much to tell, and the
    time of devices ranks the modules in its place.
    """
    rows = sorted((row for row in report.modules if row.is_module), key=_both, reverse=True)
    if not rows or not _both(rows[0]):
        return None
    layers = max((row for row in report.top(by="pattern") if row.is_module), key=_both)
    row = _alone_or_alike(rows, layers, _both, max(1, report.whole_ns))
    by_clock = _by_what_is_steady(report, DEFAULT_VIEW) is DEFAULT_VIEW
    is_known = by_clock or is_clearly_first(report, row, DEFAULT_VIEW, forward=True)
    return row if is_known else None


def _both(row: Row) -> int:
    """The clock time of a row in forward and backward."""
    return row.wall_ns + row.forward_ns


def _heaviest_module(report: Report, first: Row, view: View) -> Row | None:
    """The first row, or the repeated layers that take more together, ``None`` without any time."""

    def time(row: Row) -> int:
        return time_of(row, view.sort)

    if not time(first):
        return None
    if view.by != "path":
        return first
    layers = select(report, replace(view, top=1, by="pattern")).shown[0]
    rows = select(report, replace(view, top=None)).shown
    share = report.share(first, view.sort)
    return _alone_or_alike(rows, layers, time, time(first) / share if share else 1)


def _alone_or_alike(
    rows: Sequence[Row], layers: Row, time: Callable[[Row], int], total: float
) -> Row:
    """The first row, or the repeated layers that take more together.

    Args:
        rows: each module by itself, those that take most first.
        layers: the modules of one pattern that take most together.
        total: what the times are a share of.
    """
    first = rows[0]
    if layers.members == 1 or time(layers) < 2 * time(first):
        return first
    is_little = time(first) < _DIFFUSE * total
    # A module around the layers takes what they leave over.
    is_around = layers.path.startswith(f"{numberless(first.path)}." if first.path else "")
    if is_little or is_around or _is_like_others(first, rows, time):
        return layers
    return first


def _is_said_next(report: Report, row: Row) -> bool:
    """Whether the sentence about the backward is about the same, which is most of its time."""
    next_one = answered(report)
    same = next_one is not None and (next_one.path, next_one.members) == (row.path, row.members)
    return same and row.wall_ns >= row.forward_ns


def _with_its_forward(row: Row, step: str, share: str, time: str) -> list[Part]:
    """What a module takes of the step, forward and backward."""
    number: list[Part] = [("number", f"{row.members} × ")] if row.members > 1 else []
    verb, own = ("take", "their") if row.members > 1 else ("takes", "its")
    clause = said(f" {verb} {{}} of the {step}: {{}}", share, time)
    forward = row.forward_ns > row.wall_ns
    place = f", most of it in {own} forward" if forward else f", in {own} forward and backward"
    return [*number, ("name", row.label), *clause, ("text", place)]


def _is_like_others(first: Row, rows: Iterable[Row], time: Callable[[Row], int]) -> bool:
    """Whether the first row is a repeated layer that takes hardly longer than the others."""
    kind = numberless(first.path), first.class_name
    times = [time(row) for row in rows if (numberless(row.path), row.class_name) == kind]
    slowest = time(first)
    return sum(times) >= 2 * slowest and slowest < _STANDS_OUT * median(times)


def _takes(report: Report, row: Row, sort: Sort, time_name: str) -> list[Part]:
    time = time_of(row, sort)
    verb = "take" if row.members > 1 else "takes"
    clause: list[Part] = [("number", f"{row.members} × ")] if row.members > 1 else []
    clause.append(("name", row.label))
    idle = _idle(row, sort)
    if idle >= _MOSTLY * time:
        itself = "themselves take" if row.members > 1 else "itself takes"
        return clause + _waits(report, row, idle, itself)
    clause += said(
        f" {verb} {{}} of {time_name}: {{}}", percent(report.share(row, sort)), duration(time)
    )
    clause += _partly(time, idle)
    node = heaviest(row, sort)
    if node is None or not time_of(node, sort):
        return clause
    words = _in_words(node.name)
    name: Part = ("text", words) if words else ("node", short_node_name(node.name))
    share = time_of(node, sort) / time
    clause += said(", mostly {}" if share >= _MOSTLY else ", the largest part in {}", name)
    if share < _NEARLY_ALL:
        clause += said(" ({})", duration(time_of(node, sort)))
    return clause + (_without(row) if sort == "wall" else [])


def _waits(report: Report, cost: Row | OperatorCost, idle: int, itself: str) -> list[Part]:
    """That it works for a short time, and that the backward is idle around it."""
    whole_ns = report.wall_ns or 1
    return said(
        f" {itself} {{}} of the backward; around it, the backward is idle for {{}} ({{}})",
        duration(cost.wall_ns - idle),
        duration(idle),
        percent(idle / whole_ns),
    )


def _partly(time: int, idle: int) -> list[Part]:
    """How much of a time is idle, if that is worth saying."""
    return said(" ({} of it idle)", duration(idle)) if idle >= _PARTLY * time else []


def _idle(cost: Row | OperatorCost, sort: Sort) -> int:
    """The clock time during which nothing of it runs, neither on a device nor on the host.

    This is a lower bound, because work that runs on both at once is subtracted twice. If a trace
    lacks most of the device's work or most operators, it looks idle where the program was not.
    """
    return max(0, cost.wall_ns - cost.gpu_ns - cost.cpu_ns) if sort == "wall" else 0


def _without(row: Row) -> list[Part]:
    """What the step would save, if that is clearly another time than the row takes."""
    saves, wall = row.saves, row.wall_ns
    if saves is None or abs(saves.ns - wall) < _ANOTHER * wall:
        return []
    return _saving(saves, "them" if row.members > 1 else "it")


def _saving(saves: Saving | None, work: str = "it") -> list[Part]:
    if saves is None:
        return []
    interval_text = between(saves.low_ns, saves.high_ns)
    return said(f"; without {work}, a step would take {{}} ({interval_text})", less(saves.ns))


def _exchanges(report: Report, row: Row, module: Row) -> list[Part]:
    """That the backward waits for other ranks, in which collectives, and for how long."""
    clause = said(
        "Waiting for other ranks: {} takes {} of the backward: {}",
        ("name", row.path),
        percent(report.share(row)),
        duration(row.wall_ns),
    )
    named = [node for node in row.nodes if node.wall_ns >= _LEAST_COLLECTIVE * row.wall_ns]
    for node in named:
        name = node.name.strip("()")
        if len(named) == 1:
            clause.append(("text", f", mostly {name}"))
        else:
            clause += [("text", f", {name} "), ("number", duration(node.wall_ns))]
    most = percent(report.share(module))
    return [*clause, *_without(row), *said("; no module takes more than {}", most)]


def _answer_by_node(report: Report, sort: Sort, time_name: str) -> list[Part]:
    reason = (
        "The trace names no modules"
        if report.source == "none"
        else "No module owns any of the backward"
    )
    ranked = operators_by(report, sort)
    if not ranked or not time_of(report, sort) or not time_of(ranked[0], sort):
        return [("text", f"{reason}, and no autograd node takes any time.")]
    time = time_of(ranked[0], sort)
    words, name = _in_words(ranked[0].name), short_node_name(ranked[0].name)
    if words:
        clause: list[Part] = [("text", f"{reason}; {words}")]
    else:
        clause = said(f"{reason}; the heaviest autograd node, {{}},", ("node", name))
    idle = 0 if _is_collective(ranked[0].name) else _idle(ranked[0], sort)
    if idle >= _MOSTLY * time and not words:
        return clause + _waits(report, ranked[0], idle, "itself takes")
    share = percent(share_of(report, ranked[0], sort))
    return [
        *clause,
        *said(f" takes {{}} of {time_name}: {{}}", share, duration(time)),
        *_partly(time, idle),
    ]


def _in_words(node: str) -> str:
    """An entry among the nodes in words, ``""`` for a node."""
    return f"communication between ranks {node}" if _is_collective(node) else _WORDS.get(node, "")


def _is_collective(node: str) -> bool:
    return node.startswith("(") and node not in _WORDS
