"""Reports as files: the suffix decides the form.

A renderer is a function that sees a Report and nothing else, and gives the file's bytes. A new form
is a new file in this folder and a line in ``_FORMS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from backspot.errors import UsageError
from backspot.formatting import visible
from backspot.paths import path_text
from backspot.render.files import check_target, writing

if TYPE_CHECKING:
    from backspot.results.report import Report

__all__ = ["LABELLED", "Renderer", "renderer_for", "save", "suffixes"]

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

LABELLED = (".trace.json", ".trace.json.gz")
"""How a labelled trace ends, which is made of a trace and no form of a report."""


def suffixes() -> tuple[str, ...]:
    """The suffixes that name a form."""
    return tuple(sorted(_FORMS))


def renderer_for(path: str | os.PathLike[str]) -> Renderer:
    """The renderer that a file's name asks for; of two suffixes that fit, the longer.

    Raises:
        UsageError: on a suffix that names no form.
    """
    name = path_text(path, "save")
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


def save(report: Report, path: str | os.PathLike[str], *, force: bool = False) -> Path:
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
