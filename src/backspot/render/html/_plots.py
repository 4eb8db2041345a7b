"""Plots for the page, as SVG that needs no script: what memory over time and the roofline share.

Each band and each point can be reached by the keyboard. What it is appears above the plot while it
has the focus or the pointer.

A plot is as wide as its place, and its text keeps its size: points, ticks and text are placed in
per cent of the plot, and areas and lines are stretched to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from backspot.render.html._fragments import shown


def figure(title: str, about: str, label: str, parts: Sequence[str], legend: str) -> str:
    """A plot with its heading above, and its legend below."""
    return (
        f'<section class="plot"><h2>{shown(title)} <span class="muted">{shown(about)}</span></h2>'
        f'<div class="plot-box"><svg role="group" aria-label="{shown(label)}">{"".join(parts)}'
        f"</svg></div>{legend}</section>"
    )


def stretched(drawn: str) -> str:
    """Areas and lines whose points are in per cent of the plot."""
    return f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{drawn}</svg>'


def reachable(text: str, drawn: str) -> str:
    """What is drawn, with a text that appears for the keyboard and the pointer."""
    label = shown(text)
    return (
        f'<g class="reach" tabindex="0" role="img" aria-label="{label}">{drawn}'
        f'<foreignObject class="said" y="-44" width="100%" height="38" aria-hidden="true">{label}'
        "</foreignObject></g>"
    )


def across(y: float, text: str) -> str:
    """A line over the whole plot, with its label on the left."""
    return (
        f'<line x2="100%" y1="{y:.2f}%" y2="{y:.2f}%"/>'
        f'<text x="-8" y="{y:.2f}%" dy="4" text-anchor="end">{text}</text>'
    )


def below(index: int, x: float, text: str) -> str:
    """The label of a tick; each second one goes where it is narrow."""
    anchor = "end" if x > 98 else "middle"
    kind = ' class="odd"' if index % 2 else ""
    return f'<text{kind} x="{x:.2f}%" y="100%" dy="19" text-anchor="{anchor}">{text}</text>'
