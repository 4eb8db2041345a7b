"""How far a long run is, for whoever sits and waits: a terminal or a notebook, nobody else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["telling"]

_PATIENCE = 1.0
"""Seconds that a run may take before it is worth a word."""


@contextmanager
def telling(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show how many of ``total`` parts are done, if it takes long and somebody looks on.

    Yields:
        What to call after each part.
    """
    show = _display()
    if show is None:
        yield lambda: None
        return
    since, done = time.monotonic(), 0

    def tick() -> None:
        nonlocal done
        done += 1
        if time.monotonic() - since > _PATIENCE:
            show(f"{what}: {done} of {total} steps", done, total)

    try:
        yield tick
    finally:
        show("", done, total)


def _display() -> Callable[[str, int, int], None] | None:
    """How to show a line in the place of the last one; an empty line takes it away."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and hasattr(shell, "kernel"):
        return _Notebook()
    if sys.stderr is not None and sys.stderr.isatty():
        return _Terminal()
    return None


class _Terminal:
    """A bar of rich's on standard error."""

    def __init__(self) -> None:
        self._progress: Any = None

    def __call__(self, text: str, done: int, total: int) -> None:
        if not text:
            if self._progress is not None:
                self._progress.stop()
            return
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}", markup=False), BarColumn()
            self._progress = Progress(
                *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
            )
            self._progress.add_task(text, total=total)
            self._progress.start()
        self._progress.update(0, description=text, completed=done)


class _Notebook:
    """A line in the cell's output; rich's bar would ask for ipywidgets."""

    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, text: str, done: int, total: int) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": text}, raw=True)
        elif text:
            from IPython.display import display

            show: Any = display  # untyped
            self._handle = show({"text/plain": text}, raw=True, display_id=True)
