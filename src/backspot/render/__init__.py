"""Reports as files: the suffix decides the form.

A renderer is a function that sees a Report and nothing else, and gives the file's bytes. A new form
is a new file in this folder and a line in ``_FORMS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backspot.comparison.changes import Comparison
from backspot.errors import UsageError
from backspot.formatting import visible
from backspot.paths import path_text
from backspot.render.files import check_target, writing
from backspot.results.presented import LABELLED
from backspot.results.report import Report, Subtree

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = [
    "Renderer",
    "as_frame",
    "as_html",
    "as_text",
    "draw",
    "read",
    "renderer_for",
    "suffixes",
    "write",
]

Renderer = Callable[["Report"], bytes]

# Where each form's renderer lives: nothing is imported before it is asked for.
_FORMS = {
    ".csv": ("backspot.render.tables", "to_csv"),
    ".folded": ("backspot.render.flamegraph", "to_folded"),
    ".html": ("backspot.render.html", "to_html"),
    ".json": ("backspot.render.json", "to_json"),
    ".md": ("backspot.render.markdown", "to_markdown"),
    ".speedscope.json": ("backspot.render.flamegraph", "to_speedscope"),
}


def suffixes() -> tuple[str, ...]:
    """The suffixes that name a form."""
    return tuple(sorted(_FORMS))


def renderer_for(path: str | os.PathLike[str]) -> Renderer:
    """The renderer that a file's name asks for; of two suffixes that fit, the longer.

    Raises:
        UsageError: on a suffix that names no form.
    """
    name = path_text(path, "_save_report")
    if name.lower().endswith(LABELLED):
        raise UsageError(
            f"{visible(name)} would be a labelled trace, which `backspot annotate` writes "
            "(report.save in Python): name a report otherwise"
        )
    fitting = [suffix for suffix in _FORMS if name.lower().endswith(suffix)]
    if not fitting:
        known = suffixes()
        raise UsageError(
            f"{visible(name)}: the name's end decides the form, "
            f"and this one is none of {', '.join(known[:-1])} or {known[-1]}"
        )
    module, function = _FORMS[max(fitting, key=len)]
    renderer: Renderer = getattr(import_module(module), function)
    return renderer


def _save_report(report: Report, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write a report in the form that the suffix names; the file appears whole or not at all.

    Args:
        report: what to write.
        path: where to.
        force: overwrite what is there.

    Returns:
        The path, as a ``Path``.

    Raises:
        OutputExistsError: where the file exists and ``force`` is false.
        SourceNotFoundError: where the folder does not exist.
        UsageError: on a suffix that names no form, and where ``path`` is the trace that the report
            was made of.
    """
    render = renderer_for(path)
    sources = (report.trace,)
    check_target(path, force=force, sources=sources)
    data = render(report)
    with writing(path, force=force, sources=sources) as file:
        file.write(data)
    return Path(path)


# What results ask for through ``backspot.results.presented``. Each form is imported when it is
# asked for.


def as_text(result: Report | Subtree | Comparison) -> str:
    """A result as text for a terminal."""
    if isinstance(result, Comparison):
        from backspot.render.comparison import render_text as render_comparison

        return render_comparison(result)
    from backspot.render.text import render_subtree, render_text

    return render_subtree(result) if isinstance(result, Subtree) else render_text(result)


def as_html(result: Report | Comparison) -> str:
    """A result as HTML for a notebook's cell."""
    from backspot.render.notebook import comparison_html, report_html

    return comparison_html(result) if isinstance(result, Comparison) else report_html(result)


def write(
    result: Report | Comparison, path: str | os.PathLike[str], *, force: bool = False
) -> Path:
    """Write a result in the form that the suffix names; the file appears whole or not at all.

    Args:
        result: what to write.
        path: where to.
        force: overwrite what is there.

    Returns:
        The path, as a ``Path``.

    Raises:
        OutputExistsError: where the file exists and ``force`` is false.
        SourceNotFoundError: where the folder does not exist.
        UsageError: on a suffix that names no form.
    """
    if isinstance(result, Comparison):
        from backspot.render.comparison import save as save_comparison

        return save_comparison(result, path, force=force)
    return _save_report(result, path, force=force)


def read(path: str | os.PathLike[str]) -> Report:
    """Read a report that was saved as JSON."""
    from backspot.render.json import load

    return load(path)


def as_frame(report: Report) -> pd.DataFrame:
    """A report's rows as a data frame."""
    from backspot.render.tables import to_frame

    return to_frame(report)


def draw(report: Report, /, **options: Any) -> Axes:  # noqa: ANN401 - those of Report.plot
    """Draw a report's most expensive modules."""
    from backspot.render.plot import plot

    return plot(report, **options)
