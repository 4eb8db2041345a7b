"""What ``--by`` knows of the host's lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backspot.results.report import Report


def _lines(report: Report, most: int | None, *, width: int | None, color: bool) -> str:
    from backspot.render.host import render_lines

    return render_lines(report, most, width=width, color=color)


ROWS = {"line": ("line of the whole step's Python, if stacks were recorded", _lines)}
