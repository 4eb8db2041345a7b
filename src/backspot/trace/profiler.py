"""Read a live profiler without using up its one export.

Kineto keeps its events in memory. They can be read any number of times, before and after the user
exports them; an export is possible only once. This file never imports torch: it calls methods of
the objects that it is given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from multiprocessing.util import Finalize
from operator import itemgetter
from pathlib import Path
from shutil import disk_usage, rmtree
from tempfile import mkdtemp
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np

from backspot.descriptors import Descriptor
from backspot.errors import BackspotError, NoBackwardError, UsageError
from backspot.formatting import size
from backspot.trace import compiled, source_lines
from backspot.trace.columns import BETWEEN_TEXTS, Columns, integers
from backspot.trace.events import CATEGORIES, Category, Events, Ints
from backspot.trace.names import (
    COLLECTIVE_CALL,
    INSTANTS,
    MEMCPY,
    MEMORY,
    MEMSET,
    MODULE_CALL,
    OVERHEADS,
    PROCESS_GROUP,
    PROCESS_GROUP_NUMBER,
    is_python_frame,
    is_runtime_call,
    process_group,
)

LIVE = "the live profile"
"""The name of a live profiler as the source of a report."""


def is_profiler(source: Any) -> bool:
    """Whether ``source`` is ``torch.profiler.profile`` or ``torch.autograd.profiler.profile``."""
    home = type(source).__module__ or ""
    base_homes = {base.__module__ for base in type(source).__mro__}
    return (home.startswith("torch") or bool(base_homes & {"torch.profiler.profiler"})) and (
        hasattr(source, "kineto_results") or hasattr(source, "profiler")
    )


def read_profiler(profiler: Any) -> Events:
    """Read the events of a profiler that has stopped.

    Raises:
        UsageError: If the profiler was never started, still runs, or has discarded its events.
        NoBackwardError: If it recorded no CPU activity.
    """
    results = _results(profiler)
    columns = Columns()
    has_operators = _gather(results.events(), columns)
    if not has_operators:
        raise NoBackwardError(
            "locate(prof): the profile has no CPU activity, so it cannot show a backward; "
            "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    _gather_allocations(results, columns)
    columns.lines = (
        source_lines.find_lines(_recorded(results, source_lines.live_tables, source_lines.KEY))
        or source_lines.LineTable()
    )
    columns.compiled = compiled.find_compiled(
        _recorded(results, compiled.live_compiled, compiled.KEY)
    )
    return columns.finish(LIVE)


_plain: ContextVar[bool] = ContextVar("backspot-plain-export", default=False)


def is_plain_export() -> bool:
    """Whether the export that runs at this moment is to have PyTorch's own file, for reading it."""
    return _plain.get()


@contextmanager
def _plainly() -> Iterator[None]:
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


@contextmanager
def exported(profiler: Any) -> Iterator[Path]:
    """Yield the profiler's trace as a temporary file; this is its one export.

    Raises:
        UsageError: If the profiler cannot be read, or was exported before.
        BackspotError: If the temporary folder has too little space.
    """
    _results(profiler)
    with _folder() as folder:
        path = folder / "trace.json"
        try:
            with _plainly():
                profiler.export_chrome_trace(str(path))
        except RuntimeError as error:
            if "already saved" not in str(error):
                raise
            raise UsageError(
                "the profiler was exported already, which is possible only once: give the file "
                "that it was exported to instead"
            ) from None
        # Kineto raises nothing if it cannot write, and leaves no file or the beginning of one.
        if not (path.is_file() and _ends_as_json(path)):
            at = path.parent.parent
            raise BackspotError(
                f"the recording cannot be written to the temporary folder {at}, which has "
                f"{size(disk_usage(at).free)} free: set TMPDIR to a folder with more space"
            )
        yield path


@contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder; a copy of this process leaves it alone, unlike ``TemporaryDirectory``."""
    process, folder = os.getpid(), mkdtemp(prefix="backspot-")
    try:
        yield Path(folder)
    finally:
        if os.getpid() == process:
            rmtree(folder, ignore_errors=True)


def _ends_as_json(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 16, 0))
        return file.read().rstrip().endswith(b"}")


class Export:
    """The one export of a profiler, made at once, before another profiler starts.

    The work of devices is missing from an export that is made later: Kineto keeps it until the next
    start only. A ``with`` block gives the file, any number of times; the file goes with this
    object. Where the system has open files without a name, it is one, so that nothing is left of it
    however the process ends, and a copy of the process takes nothing from it.

    Args:
        profiler: as for ``exported``.

    Raises:
        UsageError: As ``exported``.
    """

    def __init__(self, profiler: Any) -> None:
        file = ExitStack()
        self._path = file.enter_context(exported(profiler))
        self._descriptor: Descriptor | None = None
        opened = _opened(self._path)
        if opened is not None:
            file.close()
            number, self._path = opened
            self._descriptor = Descriptor(number)
            self._descriptor.keep_from_copies()
            finalize(self, self._descriptor.close).atexit = False
            return
        finalize(self, file.close)
        Finalize(self, file.close, exitpriority=0)  # where multiprocessing ends a process

    def __enter__(self) -> Path:
        if self._descriptor is not None and not self._descriptor.is_open:
            raise BackspotError("the recording is gone: the script has closed all open files")
        return self._path

    def __exit__(self, *_: object) -> None:
        """Keep the file."""


def _opened(path: Path) -> tuple[int, Path] | None:
    """Open a file that is to lose its name.

    Returns:
        Its number, and a path that lasts as long as this process holds it open, for other
        processes of this one too; ``None`` where an open file has no path of its own.
    """
    with suppress(OSError):
        number = os.open(path, os.O_RDONLY)
        lasting = Path(f"/proc/{os.getpid()}/fd/{number}")
        with suppress(OSError):
            if lasting.samefile(path) and os.access(lasting, os.R_OK):
                return number, lasting
        os.close(number)
    return None


def _results(profiler: Any) -> Any:
    """Return the results of a profiler that has stopped."""
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
    """Put the values of events into columns; return whether any event is an operator."""
    if not events:
        return False
    event_type = type(events[0])
    has_types = hasattr(event_type, "activity_type")
    types = list(map(event_type.activity_type, events)) if has_types else []
    categories = map(CATEGORIES.get, types) if has_types else map(_guess, events)
    columns.unknown.add(
        (name, event.duration_ns())
        for name, event in zip(types, events, strict=False)
        if name not in CATEGORIES
    )
    kept_events = [
        (event, category)
        for event, category in zip(events, categories, strict=True)
        if category is not None
        and (category != Category.MODULE_CALL or event.name().startswith(MODULE_CALL))
        and event.duration_ns() >= 0
    ]
    if not kept_events:
        return False
    events = [event for event, _ in kept_events]
    category = np.array([category for _, category in kept_events], np.int64)
    device = list(map(event_type.device_index, events))
    places = zip(device, map(event_type.device_resource_id, events), strict=True)
    thread = np.array([columns.threads[place] for place in places], np.int64)
    of_operators = category == Category.OPERATOR
    sequence, forward_thread = _numbers(
        event_type, events, of_operators, "sequence_nr", "fwd_thread_id"
    )
    forward_thread[sequence < 0] = -1
    # Only numbered operators: the profiler's own overhead has made-up threads.
    numbered = sequence >= 0
    (logical,) = _numbers(event_type, events, numbered, "start_thread_id")
    is_known = logical > 0
    columns.logical_threads.update(
        zip(logical[is_known].tolist(), thread[is_known].tolist(), strict=True)
    )
    (correlation,) = _numbers(event_type, events, category >= Category.RUNTIME, "correlation_id")
    columns.add(
        integers(list(map(event_type.start_ns, events))),
        integers(list(map(event_type.duration_ns, events))),
        category,
        np.array([columns.names[name] for name in map(event_type.name, events)], np.int64),
        thread,
        sequence,
        forward_thread,
        correlation,
        np.where(category <= Category.RUNTIME, -1, np.array(device, np.int64)),
        np.full(len(events), -1, np.int64),
        np.array([_group(event, columns) for event in events], np.int64),
        np.full(len(events), -1, np.int64),
        _signatures(events, of_operators, columns),
    )
    return bool(of_operators.any())


def _numbers(
    event_type: Any,
    events: list[Any],
    having: np.ndarray,
    *names: str,
) -> list[Ints]:
    """Return attributes of the events that have them; -1 for the others."""
    index = np.flatnonzero(having)
    chosen = [events[place] for place in index.tolist()]
    columns = []
    for name in names:
        column = np.full(len(events), -1, np.int64)
        column[index] = integers(list(map(getattr(event_type, name), chosen)))
        columns.append(column)
    return columns


def _group(event: Any, columns: Columns) -> int:
    """Return ``Events.group``; before torch 2.13 an event has nothing of it."""
    if event.name() != COLLECTIVE_CALL or not hasattr(event, "extra_meta"):
        return -1
    metadata = event.extra_meta()
    name, number = (
        metadata.get(key, "").strip('"') for key in (PROCESS_GROUP, PROCESS_GROUP_NUMBER)
    )
    return columns.groups[process_group(name, number)] if name else -1


def _signatures(events: list[Any], of_operators: np.ndarray, columns: Columns) -> Ints:
    """Return ``Events.signature``; before torch 2.13 an event has no strides."""
    signatures = np.full(len(events), -1, np.int64)
    for index in np.flatnonzero(of_operators).tolist():
        event = events[index]
        types = event.dtypes()
        if types:
            structured = hasattr(event, "structured_input_shapes")
            shapes = event.structured_input_shapes() if structured else event.shapes()
            strides = json.dumps(event.structured_input_strides()) if structured else ""
            values = [str(value) if value is not None else "" for value in event.concrete_inputs()]
            texts = (json.dumps(shapes), json.dumps(types), strides, json.dumps(values))
            signatures[index] = columns.signatures[BETWEEN_TEXTS.join(map(str.encode, texts))]
    return signatures


def _gather_allocations(results: Any, columns: Columns) -> None:
    """Put the blocks of memory into columns. Only the tree of events has their addresses."""
    events = results.events()
    has_type = hasattr(type(events[0]), "activity_type")
    instants = [e for e in events if e.activity_type() == INSTANTS] if has_type else events
    memory = [event for event in instants if event.name() == MEMORY]
    if not memory:
        return
    threads = {event.start_thread_id(): event.device_resource_id() for event in memory}
    places = {resource: (device, resource) for device, resource in columns.threads}
    blocks = []
    waiting = list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation":
            blocks.append((event.start_time_ns, event.start_tid, event.extra_fields))
    blocks.sort(key=itemgetter(0))
    resources = [threads.get(thread, thread) for _, thread, _ in blocks]
    time, address, size, allocated, reserved = np.array(
        [
            (start, block.ptr or 0, block.alloc_size, block.total_allocated, block.total_reserved)
            for start, _, block in blocks
        ],
        np.int64,
    ).T
    device = [-1 if b.device.type == "cpu" else b.device.index or 0 for _, _, b in blocks]
    columns.add_allocations(
        [places.get(resource, (-1, resource)) for resource in resources],
        time,
        address,
        size,
        allocated,
        reserved,
        np.array(device, np.int64),
    )


def _recorded(results: Any, tables: WeakKeyDictionary[Any, str], key: str) -> bytes:
    """Return a table that the live half recorded for this profile, under its key."""
    try:
        table = tables.get(results)
    except TypeError:  # an object without weak references is in no table
        table = None
    return f'"{key}":{table}'.encode() if table else b""


def _guess(event: Any) -> Category | None:
    """Infer a category from device and name: before torch 2.12 an event has no type."""
    name = event.name()
    if name == MEMORY:
        return None
    if event.device_type().name == "CPU":
        if is_runtime_call(name):
            return Category.RUNTIME
        if name.startswith(MODULE_CALL):
            return Category.MODULE_CALL
        if is_python_frame(name):
            return None
        if _is_annotation(event):
            return Category.ANNOTATION
        return None if name in OVERHEADS else Category.OPERATOR
    if name.startswith(MEMCPY):
        return Category.MEMCPY
    if name.startswith(MEMSET):
        return Category.MEMSET
    return None if _is_annotation(event) else Category.KERNEL


_USER_SCOPE = 7  # torch's RecordScope.USER_SCOPE: what record_function opens


def _is_annotation(event: Any) -> bool:
    if hasattr(event, "is_user_annotation"):
        return bool(event.is_user_annotation())
    return bool(event.scope() == _USER_SCOPE)
