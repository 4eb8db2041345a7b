"""Reading a live profiler without using up its one export.

The events that Kineto keeps in memory can be read again and again, before and after the user
exports them; an export can be had once. The module never imports torch: it asks the objects that
it is given.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from backspot.errors import NoBackwardError, UsageError
from backspot.lines import KEY, LineTable, find_lines
from backspot.trace.columns import Columns
from backspot.trace.events import CATEGORIES, MODULE_CALL, Category, Events

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
    rows: list[tuple[int, ...]] = []
    names, threads = columns.names, columns.threads
    for event in results.events():
        category = _category(event)
        if category is None:
            continue
        name = event.name()
        if category is Category.MODULE_CALL and not name.startswith(MODULE_CALL):
            continue
        duration = event.duration_ns()
        if duration < 0:
            continue
        resource, device = event.device_resource_id(), event.device_index()
        thread = threads.setdefault((device, resource), len(threads))
        on_host = category <= Category.RUNTIME
        sequence, forward_thread = -1, -1
        if category is Category.OPERATOR:
            sequence, forward_thread = event.sequence_nr(), event.fwd_thread_id()
            # Only numbered operators: the profiler's own overhead bears made-up threads.
            logical = event.start_thread_id()
            if sequence >= 0 and logical > 0:
                columns.logical_threads[logical] = thread
        rows.append(
            (
                event.start_ns(),
                duration,
                category,
                names.setdefault(name, len(names)),
                thread,
                sequence if sequence < 1 << 62 else -1,
                forward_thread if sequence >= 0 else -1,
                event.correlation_id() if category >= Category.RUNTIME else -1,
                -1 if on_host else device,
                -1,
            )
        )
    table = np.array(rows, np.int64).reshape(-1, len(Columns.FIELDS))
    if not (table[:, 2] == Category.OPERATOR).any():
        raise NoBackwardError(
            "locate(prof): the profile holds no CPU activity, so no backward can be seen in it; "
            "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    columns.add(*(np.ascontiguousarray(table[:, index]) for index in range(table.shape[1])))
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


def _lines(results: Any) -> LineTable:  # noqa: ANN401
    """The source lines of this very profile, which the live half keeps as long as it lives."""
    live = sys.modules.get("backspot.live.lines")
    form = live.book.kept(results) if live is not None else None
    return (form and find_lines(f'"{KEY}":{form}'.encode())) or LineTable()


# Frames of Python that with_stack=True records: "file.py(12): step", "<built-in method …>".
_PYTHON_FRAME = re.compile(r".*\.py\(\d+\): |<built-in ")
_DRIVER_CALL = re.compile(r"(cuda|hip|cu[A-Z])")


def _category(event: Any) -> Category | None:  # noqa: ANN401
    if hasattr(event, "activity_type"):
        return CATEGORIES.get(event.activity_type())
    # Before torch 2.12 an event does not say what it is: device and name must tell.
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
