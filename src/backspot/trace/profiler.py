"""Reading a live profiler without using up its one export.

The events that Kineto keeps in memory can be read again and again, before and after the user
exports them; an export can be had once. The module never imports torch: it asks the objects that
it is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from backspot.errors import NoBackwardError, UsageError
from backspot.trace.columns import Columns
from backspot.trace.decode import integers
from backspot.trace.events import CATEGORIES, Category, Events, Ints
from backspot.trace.names import MODULE_CALL
from backspot.trace.source_lines import KEY, LineTable, find_lines, live_tables

__all__ = ["LIVE", "exported", "is_profiler", "read_profiler"]

LIVE = "the live profile"
"""What a report calls a profiler that was read in place."""


def is_profiler(source: Any) -> bool:  # noqa: ANN401
    """Whether ``source`` is ``torch.profiler.profile`` or ``torch.autograd.profiler.profile``."""
    home = type(source).__module__ or ""
    base_homes = {base.__module__ for base in type(source).__mro__}
    return (home.startswith("torch") or bool(base_homes & {"torch.profiler.profiler"})) and (
        hasattr(source, "kineto_results") or hasattr(source, "profiler")
    )


def read_profiler(profiler: Any) -> Events:  # noqa: ANN401
    """Read the events of a profiler that has stopped.

    Raises:
        UsageError: where the profiler was never started, still runs, or has thrown its events away.
        NoBackwardError: where it recorded no CPU activity.
    """
    results = _results(profiler)
    columns = Columns()
    seen = _gather(results.events(), columns)
    if not seen:
        raise NoBackwardError(
            "locate(prof): the profile holds no CPU activity, so no backward can be seen in it; "
            "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    columns.lines = _lines(results)
    return columns.finish(LIVE)


@contextmanager
def exported(profiler: Any) -> Iterator[Path]:  # noqa: ANN401
    """The profiler's trace as a file, for as long as the context lasts; this is its one export.

    Raises:
        UsageError: where the profiler cannot be read, or was exported before.
    """
    _results(profiler)
    with TemporaryDirectory(prefix="backspot-") as folder:
        path = Path(folder) / "trace.json"
        try:
            profiler.export_chrome_trace(str(path))
        except RuntimeError as error:
            if "already saved" not in str(error):
                raise
            raise UsageError(
                "the profiler was exported already, which it can be once: give the file that "
                "it was exported to instead"
            ) from None
        yield path


def _results(profiler: Any) -> Any:  # noqa: ANN401
    """What a profiler that has stopped holds."""
    inner = profiler if hasattr(profiler, "kineto_results") else profiler.profiler
    if inner is None:
        raise UsageError(
            "locate(prof): the profiler was never started; run the steps within `with prof:`"
        )
    results = inner.kineto_results
    if results is None:
        if getattr(inner, "entered", False):
            raise UsageError(
                "locate(prof): the profiler is still running; call locate after its `with` block, "
                "or from on_trace_ready"
            )
        raise UsageError(
            "locate(prof): the profiler holds no recorded step; with a schedule, call locate "
            "from on_trace_ready"
        )
    return results


def _gather(events: Sequence[Any], columns: Columns) -> bool:
    """Ask the events for what matters, one property of all of them after the other.

    Returns:
        Whether any is an operator.
    """
    if not events:
        return False
    ask = type(events[0])
    tells = hasattr(ask, "activity_type")
    types = list(map(ask.activity_type, events)) if tells else []
    kinds = map(CATEGORIES.get, types) if tells else map(_guess, events)
    columns.unknown.add(
        (name, event.duration_ns())
        for name, event in zip(types, events, strict=False)
        if name not in CATEGORIES
    )
    kept = [
        (event, kind)
        for event, kind in zip(events, kinds, strict=True)
        if kind is not None
        and (kind != Category.MODULE_CALL or event.name().startswith(MODULE_CALL))
        and event.duration_ns() >= 0
    ]
    if not kept:
        return False
    events = [event for event, _ in kept]
    category = np.array([kind for _, kind in kept], np.int64)
    device = list(map(ask.device_index, events))
    places = zip(device, map(ask.device_resource_id, events), strict=True)
    thread = np.array([columns.threads[place] for place in places], np.int64)
    of_operators = category == Category.OPERATOR
    sequence, forward_thread = _numbers(ask, events, of_operators, "sequence_nr", "fwd_thread_id")
    forward_thread[sequence < 0] = -1
    # Only numbered operators: the profiler's own overhead bears made-up threads.
    numbered = sequence >= 0
    (logical,) = _numbers(ask, events, numbered, "start_thread_id")
    known = logical > 0
    columns.logical_threads.update(
        zip(logical[known].tolist(), thread[known].tolist(), strict=True)
    )
    (correlation,) = _numbers(ask, events, category >= Category.RUNTIME, "correlation_id")
    columns.add(
        integers(ask.start_ns, events),
        integers(ask.duration_ns, events),
        category,
        np.array([columns.names[name] for name in map(ask.name, events)], np.int64),
        thread,
        sequence,
        forward_thread,
        correlation,
        np.where(category <= Category.RUNTIME, -1, np.array(device, np.int64)),
        np.full(len(events), -1, np.int64),
    )
    return bool(of_operators.any())


def _numbers(ask: Any, events: list[Any], asked: np.ndarray, *names: str) -> list[Ints]:  # noqa: ANN401
    """What some of the events say of themselves; -1 for the others."""
    index = np.flatnonzero(asked)
    chosen = [events[at] for at in index.tolist()]
    columns = []
    for name in names:
        column = np.full(len(events), -1, np.int64)
        column[index] = integers(getattr(ask, name), chosen)
        columns.append(column)
    return columns


def _lines(results: Any) -> LineTable:  # noqa: ANN401
    """The source lines of this very profile, which the live half keeps as long as it lives."""
    try:
        form = live_tables.get(results)
    except TypeError:  # of what cannot be referred to weakly there is none
        form = None
    return (form and find_lines(f'"{KEY}":{form}'.encode())) or LineTable()


# Frames of Python that with_stack=True records: "file.py(12): step", "<built-in method …>".
_PYTHON_FRAME = re.compile(r".*\.py\(\d+\): |<built-in ")
_DRIVER_CALL = re.compile(r"(cuda|hip|cu[A-Z])")


def _guess(event: Any) -> Category | None:  # noqa: ANN401
    """Before torch 2.12 an event does not say what it is: device and name must tell."""
    name = event.name()
    if event.device_type().name == "CPU":
        if _DRIVER_CALL.match(name):
            return Category.RUNTIME
        if name.startswith(MODULE_CALL):
            return Category.MODULE_CALL
        if _PYTHON_FRAME.match(name):
            return None
        return Category.ANNOTATION if _is_annotation(event) else Category.OPERATOR
    if name.startswith("Memcpy"):
        return Category.MEMCPY
    if name.startswith("Memset"):
        return Category.MEMSET
    return None if _is_annotation(event) else Category.KERNEL


_USER_SCOPE = 7  # torch's RecordScope.USER_SCOPE: what record_function opens


def _is_annotation(event: Any) -> bool:  # noqa: ANN401
    if hasattr(event, "is_user_annotation"):
        return bool(event.is_user_annotation())
    return bool(event.scope() == _USER_SCOPE)
