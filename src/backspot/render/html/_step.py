"""One step as lanes, in SVG that needs no script: the host by phase and by line, the GPU below.

Each piece has a title. Waits are drawn from the host to the work that it waits for.
"""

from __future__ import annotations

from collections import Counter

from backspot.formatting import counted, duration, percent
from backspot.render._phases import PHASES
from backspot.render.html._fragments import shown
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
    step_ns, spent = picture.recorded_wall_ns, Counter[str]()
    for start, end, line in picture.lines:
        spent[line] += end - start
    color = {line: f"c{index}" for index, (line, _) in enumerate(spent.most_common(_COLORS), 1)}
    drawn = [_name(0, "host")]
    drawn += [
        _piece(step_ns, start, end, 0, _LANE, PHASES[name], f"p-{name}")
        for start, end, name in picture.host
    ]
    y = _LANE
    if picture.lines:
        drawn.append(_name(y + _GAP, "line"))
        drawn += [
            _piece(step_ns, start, end, y + _GAP, _LANE, line, color.get(line, "c0"))
            for start, end, line in picture.lines
        ]
        y += _GAP + _LANE
    if picture.device:
        below = y + (_ROOM if picture.waits else _GAP)
        for start, end, since, until, line in picture.waits:
            text = f"The host waits for the GPU{f' in {line}' if line else ''}"
            ends = f'x1="{100 * start / step_ns:.2f}%" x2="{50 * (since + until) / step_ns:.2f}%"'
            piece = _piece(step_ns, start, end, y, 5, text, "wait")
            drawn.append(f'{piece}<line class="wait" {ends} y1="{y + 5}" y2="{below}"/>')
        y = below + _LANE
        drawn.append(_name(below, "GPU") + f'<line x2="100%" y1="{y}" y2="{y}"/>')
        for start, end, phase, busy in picture.device:
            high = max(2, _LANE * busy // 100)
            text = f"GPU busy for {busy}% or less, {PHASES[phase]}"
            drawn.append(_piece(step_ns, start, end, y - high, high, text, f"p-{phase}"))
    what = "host by phase" + (" and by line" if picture.lines else "")
    what += ", GPU below" if picture.device else ""
    what += f", {counted(len(picture.waits), 'wait')} for the GPU" if picture.waits else ""
    stacks = " with stacks" if picture.lines else ""
    label = f"One {report.per} as it was recorded{stacks}, {duration(step_ns)}"
    legend = "".join(
        f'<li><i class="{kind}" aria-hidden="true"></i><code>{shown(line)}</code> '
        f"<b>{percent(spent[line] / step_ns)}</b></li>"
        for line, kind in color.items()
    )
    return (
        f'<section class="step"><h2>{label} <span class="muted">{what}</span></h2>'
        f'<svg role="img" height="{y}" aria-label="{label}: {what}">{"".join(drawn)}</svg>'
        f'<ul class="legend" aria-label="Lines of Python">{legend}</ul></section>'
    )


def _piece(step_ns: int, start: int, end: int, y: int, height: int, text: str, kind: str) -> str:
    left, wide = 100 * start / step_ns, 100 * (end - start) / step_ns
    return (
        f'<rect class="{kind}" x="{left:.2f}%" width="{wide:.2f}%" y="{y}" height="{height}">'
        f"<title>{shown(text)}, {duration(end - start)} from {duration(start)} on</title></rect>"
    )


def _name(y: int, name: str) -> str:
    return f'<text x="-8" y="{y + _LANE - 6}" text-anchor="end">{name}</text>'
