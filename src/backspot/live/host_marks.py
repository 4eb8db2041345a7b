"""Marks of what no trace has by itself: collections, checkpoints, waits, unread gradients.

PyTorch can warn at each operator that waits for a GPU (``torch.cuda.set_sync_debug_mode``). The
warning comes when the operator returns, on the thread and at the line that called it. Waits inside
a backward come up when the backward returns, so these have no mark.
"""

from __future__ import annotations

import functools
import gc
import itertools
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, SupportsIndex

import torch

from backspot.live.source_lines import file_name, user_frame
from backspot.live.torch_internals import profiler
from backspot.live.torch_internals.autograd import FUNCTION_RUNS
from backspot.live.torch_internals.dynamo import keep_from_dynamo
from backspot.live.torch_internals.lookup import Location, Watch
from backspot.trace.names import COLLECTION, SAVING, WAITED_AT, unread_mark

_OLDEST = 2
"""The generation whose collection looks at all objects; the others take microseconds."""
_WARNING = "called a synchronizing"


@contextmanager
def collections_marked() -> Iterator[None]:
    """Mark each full collection inside the block, on the thread in which it runs."""
    begun: list[Any] = []

    def mark(moment: str, about: dict[str, int]) -> None:
        if moment == "stop" and begun:
            begun.pop().__exit__(None, None, None)
        elif moment == "start" and about["generation"] >= _OLDEST and profiler.recording():
            begun.append(profiler.new_range(COLLECTION))
            begun[-1].__enter__()

    gc.callbacks.append(mark)
    try:
        yield
    finally:
        gc.callbacks.remove(mark)


def saves_marked() -> Watch:
    """Mark each call of ``torch.save`` inside the block."""

    def mark(save: Callable[[], Any]) -> Any:
        with profiler.new_range(SAVING) if profiler.recording() else nullcontext():
            return save()

    return Watch(Location(torch, "save"), mark)


def can_record_stacks() -> bool:
    """Return whether the profiler may record stacks: on the main thread, and alone.

    Python has one profiling function a thread: Kineto would take the place of ``cProfile``'s, and
    leave none. On another thread it complains on standard error.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    in_use = getattr(getattr(sys, "monitoring", None), "get_tool", lambda _: None)(2)
    return sys.getprofile() is None and in_use is None


_counting: list[object] = []


def counts_calls() -> bool:
    """Return whether the profiling function of this thread is the one of ``calls_counted``."""
    return sys.getprofile() in _counting


@contextmanager
def calls_counted() -> Iterator[Iterator[int]]:
    """Count the calls and returns of functions inside the block, on this thread.

    Yields what gives the number next.
    """
    counter = itertools.count()

    def count(*_: object) -> None:
        next(counter)

    _counting.append(count)
    sys.setprofile(count)
    try:
        yield counter
    finally:
        if sys.getprofile() is count:
            sys.setprofile(None)
        _counting.remove(count)


@contextmanager
def unread_marked() -> Iterator[None]:
    """Mark each backward of a Function that returns gradients for inputs that need none.

    The engine throws them away. Nodes of PyTorch's own do not compute them.
    """
    with ExitStack() as stack:
        for place in FUNCTION_RUNS:
            stack.enter_context(Watch(place, _marked))
            if (run := place.get()) is not None:
                keep_from_dynamo(run)
        yield


def _marked(run: partial[Any]) -> Any:
    node, result = run.args[0], run()
    gradients = result if isinstance(result, tuple) else (result,)
    needs = zip(gradients, node.needs_input_grad, strict=False)  # of odd results the engine tells
    wanted = [need for gradient, need in needs if gradient is not None]
    if not all(wanted):
        profiler.emit(unread_mark(wanted.count(False), len(wanted)))
    return result


keep_from_dynamo(_marked)


@contextmanager
def waits_marked() -> Iterator[None]:
    """Mark the line of each wait for a GPU inside the block; not if the program warns itself."""
    if not torch.cuda.is_initialized() or torch.cuda.get_sync_debug_mode():
        yield
        return
    show, name = warnings.showwarning, functools.cache(file_name)

    def mark(message: Warning | str, *others: Any, **more: Any) -> None:
        if not str(message).startswith(_WARNING):
            show(message, *others, **more)
            return
        frame = user_frame(sys._getframe(1))
        while frame is not None and frame.f_globals.get("__name__") == "warnings":
            frame = user_frame(frame.f_back)
        if frame is not None:
            profiler.emit(f"{WAITED_AT}{name(frame.f_code.co_filename)}:{frame.f_lineno}")

    with filtered(("always", _WARNING), ("ignore", "Synchronization debug mode is a prototype")):
        warnings.showwarning = mark
        try:
            _set_sync_debug_mode("warn")
            yield
        finally:
            _set_sync_debug_mode("default")
            if warnings.showwarning is mark:
                warnings.showwarning = show


def _set_sync_debug_mode(mode: str) -> None:
    """Set it so that what PyTorch says of it once, in a process, does not count as said."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        torch.cuda.set_sync_debug_mode(mode)
    finally:
        torch.set_warn_always(always)


class _Filters(list[Any]):
    """Filters of warnings of which the first stay first, whatever a program adds inside.

    Attributes:
        first: how many.
    """

    first = 0

    def insert(self, index: SupportsIndex, filter_: Any) -> None:
        """Add a filter, as ``warnings.simplefilter`` does before all others."""
        super().insert(max(int(index), self.first), filter_)

    def __getitem__(self, index: Any) -> Any:
        """Return a filter, or for ``warnings.catch_warnings`` a copy of all of them."""
        filters = super().__getitem__(index)
        if isinstance(index, slice) and index == slice(None):
            filters = _Filters(filters)
            filters.first = self.first
        return filters


@contextmanager
def filtered(*filters: tuple[str, str]) -> Iterator[None]:
    """Have filters of warnings come first, which may be errors for the program.

    ``warnings.filterwarnings`` would have Python show again what it has shown once of each line.

    Args:
        filters: what is done with a warning, and how its text begins.
    """
    added = [(action, re.compile(text), Warning, None, 0) for action, text in filters]
    before: Any = warnings.filters
    ours = _Filters([*added, *before])
    ours.first = len(added)
    warnings.filters = ours
    try:
        yield
    finally:
        for place in {
            id(filters_list): filters_list for filters_list in (ours, warnings.filters)
        }.values():
            others = [entry for entry in place if not any(entry is own for own in added)]
            place[:] = others
        ours.first = 0
        if warnings.filters is ours:
            before[:] = ours
            warnings.filters = before
