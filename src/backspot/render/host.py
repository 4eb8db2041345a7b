"""Where the host waits for a device, and the lines of Python that it runs: sentence and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from backspot.errors import UsageError
from backspot.formatting import counted, duration, labelled, percent
from backspot.render._phases import PHASES
from backspot.render._sections import (
    UNKNOWN,
    Column,
    Cost,
    Saying,
    Section,
    Table,
    milliseconds_of,
    numbers,
)
from backspot.render._terminal import lay_out, paragraph, space_for, written
from backspot.render._words import Part
from backspot.render.view import View
from backspot.results.host import HostLine, Wait
from backspot.results.report import Answer, Report
from backspot.styled import Text

_ROWS = 10
"""How many places and lines a table has."""
_GAIN = 0.005
"""Share of the step that waits must cost for their removal to be worth a number."""
_NOTABLE = 10
"""Waits in a step from which the screen says so although nothing is gained without them."""


def _waits_told(report: Report) -> str:
    """How often the host waits for devices, and what a step would gain; ``""`` if that is rare."""
    number = sum(wait.count for wait in report.waits)
    saves, step_ns = report.without_waits, report.step_ns
    worthwhile = saves is not None and saves.ns >= _GAIN * step_ns
    if not number or not (worthwhile or number >= _NOTABLE):
        return ""
    spent = duration(sum(wait.wall_ns for wait in report.waits))
    sentence = (
        f"the host waits for the GPU {counted(number, 'time')} per {report.per}, {spent} in all"
    )
    if saves is None:
        return sentence
    if not worthwhile:
        return f"{sentence}; without these waits a {report.per} would gain nothing"
    return f"{sentence}; without these waits, a {report.per} would take {duration(saves.ns)} less"


def _costs(report: Report) -> list[Cost]:
    """All waits together, as far as a step would take less without them."""
    saves, step = report.without_waits, report.replayed_step
    if saves is None or step is None or not saves.ns or not report.waits:
        return []
    share = min(1.0, saves.ns / max(1, step.ns))
    most = max(report.waits, key=lambda wait: wait.saves.ns if wait.saves else 0)
    number = counted(sum(wait.count for wait in report.waits), "wait")
    sentence: list[Part] = [
        ("number", number),
        ("text", " for the GPU cost "),
        ("number", percent(share)),
        ("text", f" of the {report.per}"),
    ]
    answer = Answer("waits", "", "", most.line, saves.ns, share, saves, "host-waits")
    return [Cost(answer, sentence, "them")]


def _sections(report: Report, _: View) -> list[Section]:
    """How often the host waits, and the tables of waits, of lines and of launches."""
    tables = _waits(report), _lines_of_step(report, _ROWS), _launches(report)
    shown = [table for table in tables if table is not None]
    waits_text = _waits_told(report)
    sentences = [waits_text] if waits_text else []
    return (
        [Section("tables", "host", sentences, 1, "The host", shown)] if sentences or shown else []
    )


def _waits(report: Report) -> Table | None:
    waits = report.waits[:_ROWS]
    if not waits:
        return None
    ms = milliseconds_of(waits[0].wall_ns)
    saves = numbers(UNKNOWN if wait.saves is None else ms(wait.saves.ns) for wait in waits)
    return Table(
        "Where the host waits for the GPU",
        f"saves: how much less time a {report.per} would take without this wait alone, by replay.",
        [
            _names("line", (o.line or labelled(o.path, o.class_name) for o in waits)),
            *_within(waits),
            Column("class", "operator", _words(wait.operator for wait in waits), need=2, left=True),
            Column("count", "waits", numbers(f"{wait.count:,}" for wait in waits)),
            Column("time", "wait ms", numbers(ms(wait.wall_ns) for wait in waits)),
            Column("other time", "GPU idle", numbers(ms(wait.idle_ns) for wait in waits), need=3),
            Column("saves", "saves ms", saves),
        ],
    )


def _launches(report: Report) -> Table | None:
    """What each phase launches, in the order of a step, and the module that idles most there."""
    phases = [phase.name for phase in report.phases]
    by_phase = [[launch for launch in report.launches if launch.phase == name] for name in phases]
    by_phase = [launches for launches in by_phase if any(launch.count for launch in launches)]
    if not any(launch.late for launches in by_phase for launch in launches):
        return None
    idle = [sum(launch.idle_ns for launch in launches) for launches in by_phase]
    ms = milliseconds_of(max(idle))
    most = _words(labelled(launches[0].path, launches[0].class_name) for launches in by_phase)
    return Table(
        "Launches",
        f"Kernels, copies and memsets per {report.per}. late: the GPU has nothing left when the "
        "host launches them, and waits.",
        [
            Column(
                "class",
                "phase",
                _words(PHASES[launches[0].phase] for launches in by_phase),
                left=True,
            ),
            Column("count", "launched", numbers(f"{sum(o.count for o in s):,}" for s in by_phase)),
            Column("count", "late", numbers(f"{sum(o.late for o in s):,}" for s in by_phase)),
            Column("time", "GPU waits ms", numbers(map(ms, idle))),
            Column("line", "mostly for", most, least=20, left=True, cut_start=True),
        ],
    )


def _lines_of_step(report: Report, most: int | None) -> Table | None:
    """The lines of the user's Python that hold up the step, the longest first; at most so many."""
    lines = report.host[:most]
    if not lines:
        return None
    ms = milliseconds_of(lines[0].idle_ns)
    free = "GPU idle" if report.has_gpu else "host ms"
    return Table(
        "Lines of the step",
        f"Innermost lines outside of PyTorch, in ms per {report.per} without stacks. "
        + ("GPU idle: no work runs or is queued. " if report.has_gpu else "")
        + "Python: neither an operator nor PyTorch's own Python runs.",
        [
            _names("line", map(_line, lines)),
            *_within(lines),
            Column("time", free, numbers(ms(line.idle_ns) for line in lines)),
            Column("other time", "Python", numbers(ms(line.python_ns) for line in lines), need=1),
            *(
                [Column("other time", "host", numbers(ms(line.wall_ns) for line in lines), need=2)]
                if report.has_gpu
                else []
            ),
            Column("calls", "calls", numbers(f"{line.calls:,}" for line in lines), need=3),
        ],
    )


def _line(line: HostLine) -> str:
    return f"{line.place} {line.function}" + ("" if line.function.endswith(">") else "()")


def _names(head: str, names: Iterable[str]) -> Column:
    return Column("name", head, _words(names), least=24, left=True, cut_start=True)


def _within(of: Sequence[Wait] | Sequence[HostLine]) -> list[Column]:
    """The phases, and the modules if there are any."""
    phases: list[Part] = [("text", PHASES[place.phase]) for place in of]
    columns = [Column("phase", "phase", phases, left=True)]
    modules = [place.path or place.class_name if place.class_name else "" for place in of]
    if any(modules):
        columns.append(Column("class", "module", _words(modules), need=4, least=10, left=True))
    return columns


def _words(texts: Iterable[str]) -> list[Part]:
    return [("name", text) for text in texts]


SAYING = Saying(_sections, costs=_costs)


def render_lines(
    report: Report, most: int | None = None, *, width: int | None = None, color: bool = False
) -> str:
    """The lines of the user's Python that hold up the whole step.

    Args:
        most: how many; ``None`` for all.

    Raises:
        UsageError: If the report has none.
    """
    table = _lines_of_step(report, most)
    if table is None:
        raise UsageError(
            "no lines: the steps were recorded without stacks; backspot run --stacks and "
            "backspot.profile record them, and torch.profiler.profile(with_stack=True)"
        )
    width, whole = space_for(width)
    lines = [*lay_out(table.columns, width, whole=whole)]
    lines += paragraph(Text(table.note, "dim"), width)
    return written(lines, width, color=color)
