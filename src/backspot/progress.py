"""The one progress display: a bar on a terminal, a line in a notebook, nothing elsewhere."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any, Literal

from backspot.formatting import visible
from backspot.interrupts import contained

_PATIENCE = 0.5
"""Seconds that work may take before its progress is shown."""

Unit = Literal["steps", "traces", "bytes"]


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; one that cannot say, such as a closed one, is none."""
    with contained():
        return bool(stream.isatty())
    return False


class Progress:
    """How far a long piece of work has come, shown on standard error once it has taken a while.

    Use it as a context manager; leaving it removes the display::

        with Progress("profiling", "steps", total=8) as progress:
            progress.advance()
    """

    def __init__(self, title: str, unit: Unit, total: int | None = None) -> None:
        """Prepare the display.

        Args:
            title: what is done: ``profiling``, ``reading trace.json``.
            unit: what is counted.
            total: how many there are; ``None`` if unknown.
        """
        self._what, self._unit, self._total = visible(title), unit, total
        self._done = 0
        self._since = time.monotonic()
        self._display = _display()
        self._shown = False

    def advance(self) -> None:
        """Count one more as done."""
        self.update(self._done + 1, self._total)

    def update(self, done: int, total: int | None) -> None:
        """Show how many of ``total`` are done."""
        self._done = done
        if self._display is None or time.monotonic() - self._since < _PATIENCE:
            return
        text = self._what
        if self._unit != "bytes":
            text += f": {done} of {total} {self._unit}" if total else f": {done} {self._unit}"
        self._display.show(text, done, total or None, self._unit)
        self._shown = True

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._display is not None and self._shown:
            self._display.remove()


def _display() -> _Terminal | _Notebook | None:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and hasattr(shell, "kernel"):
        return _Notebook()
    if is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb":
        return _Terminal()
    return None


class _Terminal:
    """A bar on standard error."""

    def __init__(self) -> None:
        self._bar: Any = None

    def show(self, text: str, done: int, total: int | None, unit: Unit) -> None:
        if self._bar is None:
            from backspot.styled import (
                Bar,
                BarColumn,
                Console,
                DownloadColumn,
                TextColumn,
                TimeElapsedColumn,
            )

            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn() if unit == "bytes" else TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.add_task(text, total=total)
            self._bar.start()
        self._bar.update(0, description=text, completed=done, total=total)

    def remove(self) -> None:
        self._bar.stop()


class _Notebook:
    """A line in the cell's output; a bar of rich would need ipywidgets."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str, done: int, total: int | None, unit: Unit) -> None:
        from IPython.display import display

        if self._handle is None:
            show: Any = display  # untyped
            self._handle = show({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)

    def remove(self) -> None:
        self._handle.update({"text/plain": ""}, raw=True)
