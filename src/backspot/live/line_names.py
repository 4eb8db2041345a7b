"""What a line of source is called in a report: its file, number, function and text."""

from __future__ import annotations

import linecache
import os
import re
import sys
from types import CodeType

from backspot.trace.source_lines import SourceLine

__all__ = ["describe", "file_name"]

_LONGEST = 160
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_CELL = re.compile(r"<ipython-input-(\d+)-|[/\\]ipykernel_\d+[/\\]\d+\.py\Z")


def describe(code: CodeType, lasti: int, node: str) -> SourceLine:
    """Return the line of an instruction.

    Args:
        code: the code of a function.
        lasti: the position of the instruction in it.
        node: the class of the nodes that the line makes; ``""`` if it is not known.

    Returns:
        The line, with its text if the source can be read.
    """
    line = _line_at(code, lasti)
    text = linecache.getline(code.co_filename, line).strip()
    function = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
    return SourceLine(
        file_name(code.co_filename),
        line,
        function,
        text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…",
        node,
    )


def _line_at(code: CodeType, lasti: int) -> int:
    for start, end, line in code.co_lines():
        if start <= lasti < end and line is not None:
            return line
    return code.co_firstlineno


def file_name(file: str) -> str:
    """Return a file's name as readers know it.

    An installed file is named from its package on; a file below the working folder, or below a
    folder that modules are imported from, by its path inside.
    """
    cell = _CELL.search(file)
    if cell:
        number = cell[1] or _cell_number(file)
        return f"<cell {number}>" if number else "<notebook cell>"
    if file.startswith("<"):
        return file
    installed = _INSTALLED.match(file)
    if installed:
        return file[installed.end() :]
    folders = {os.path.abspath(entry or ".") for entry in sys.path if isinstance(entry, str)}  # noqa: PTH100
    try:
        below = [os.getcwd()]  # noqa: PTH109
    except OSError:  # the working folder is gone
        below = []
    for folder in [*below, *sorted(folders, key=len, reverse=True)]:
        lead = folder.rstrip(os.sep) + os.sep
        if file.startswith(lead) and lead != os.sep:
            return file[len(lead) :]
    return file.removeprefix(f".{os.sep}")


def _cell_number(file: str) -> int | None:
    """Return the number in brackets before a cell, if IPython has it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", None)
    return numbers.get(file) if isinstance(numbers, dict) else None
