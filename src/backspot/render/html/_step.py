"""One step as lanes, in SVG that needs no script: the host by phase and by line, the GPU below.

Each piece has a title. Waits are drawn from the host to the work that it waits for.
"""

from __future__ import annotations

from collections import Counter

from backspot.formatting import counted, duration, percent
from backspot.render._phases import PHASES
from backspot.render.html._fragments import shown
from backspot.results.host import StepPicture
from backspot.results.report import Report

_COLORS = 8
"""How many lines have a colour of their own, those that take longest."""
_LANE, _GAP, _ROOM = 22, 4, 44
"""Pixels: height of a lane, between lanes of the host, and above the lane of the GPU."""


def step_lanes(report: Report) -> str:
    """The picture of a step, or nothing if the report has none."""
    picture = report.picture
    if picture is None:
        return ""
    host = [(start, end, PHASES[name], f"p-{name}") for start, end, name in picture.host]
    parts, y = [_lane(picture, 0, "host", host)], _LANE
    legend = ""
    if picture.lines:
        spent: Counter[str] = Counter()
        for start, end, line in picture.lines:
            spent[line] += end - start
        color = {line: f"c{at}" for at, (line, _) in enumerate(spent.most_common(_COLORS), 1)}
        at_line = [(*one, color.get(one[2], "c0")) for one in picture.lines]
        parts.append(_lane(picture, y + _GAP, "line", at_line))
        y += _GAP + _LANE
        items = "".join(
            f'<li><i class="{color[line]}" aria-hidden="true"></i><code>{shown(line)}</code> '
            f"<b>{percent(spent[line] / picture.wall_ns)}</b></li>"
            for line in color
        )
        legend = f'<ul class="legend" aria-label="Lines of Python">{items}</ul>'
    if picture.device:
        below = y + _ROOM if picture.waits else y + _GAP
        parts += [_waits(picture, y, below), _device(picture, below)]
        y = below + _LANE
    what = "host by phase" + (" and by line" if picture.lines else "")
    what += ", GPU below" if picture.device else ""
    waits = f", {counted(len(picture.waits), 'wait')} for the GPU" if picture.waits else ""
    stacks = " with stacks" if picture.lines else ""
    label = f"One {report.per} as it was recorded{stacks}, {duration(picture.wall_ns)}"
    return (
        f'<section class="step"><h2>{label} <span class="muted">{what}{waits}</span></h2>'
        f'<svg role="img" height="{y}" aria-label="{label}: {what}{waits}">{"".join(parts)}</svg>'
        f"{legend}</section>"
    )


def _lane(picture: StepPicture, y: int, name: str, pieces: list[tuple[int, int, str, str]]) -> str:
    """A lane of what the host does: start, end, text and class of each piece."""
    drawn = "".join(
        _piece(picture, start, end, kind, y, _LANE, text) for start, end, text, kind in pieces
    )
    return _name(y, name) + drawn


def _device(picture: StepPicture, y: int) -> str:
    """The lane of the devices, higher where they are busier."""
    drawn = []
    for start, end, phase, busy in picture.device:
        high = max(2, _LANE * busy // 100)
        text = f"GPU busy for {busy}% or less, {PHASES[phase]}"
        drawn.append(_piece(picture, start, end, f"p-{phase}", y + _LANE - high, high, text))
    floor = f'<line class="floor" x2="100%" y1="{y + _LANE}" y2="{y + _LANE}"/>'
    return _name(y, "GPU") + floor + "".join(drawn)


def _waits(picture: StepPicture, y: int, below: int) -> str:
    """The waits, from the host, which ends at ``y``, to the work that they wait for."""
    drawn = []
    for start, end, since, until, line in picture.waits:
        text = f"The host waits for the GPU{f' in {line}' if line else ''}"
        to = 100 * (since + until) / 2 / picture.wall_ns
        drawn.append(
            f'<g class="wait">{_piece(picture, start, end, "", y, 5, text)}'
            f'<line x1="{100 * start / picture.wall_ns:.2f}%" x2="{to:.2f}%" '
            f'y1="{y + 5}" y2="{below}"/></g>'
        )
    return "".join(drawn)


def _piece(
    picture: StepPicture, start: int, end: int, kind: str, y: int, height: int, text: str
) -> str:
    left, wide = 100 * start / picture.wall_ns, 100 * (end - start) / picture.wall_ns
    return (
        f'<rect class="{kind}" x="{left:.2f}%" width="{wide:.2f}%" y="{y}" height="{height}">'
        f"<title>{shown(text)}, {duration(end - start)} from {duration(start)} on</title></rect>"
    )


def _name(y: int, name: str) -> str:
    return f'<text x="-8" y="{y + _LANE - 6}" text-anchor="end">{name}</text>'
