"""Decode the JSON text of some events into structs, and put their values into columns.

The structs live for one piece of the text only. Their attributes are picked out by ``map``, which
runs in C: a line of Python for each event would cost more than decoding it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from backspot.trace.columns import LONGEST_NS, NO_INPUTS, Columns, integers
from backspot.trace.events import CATEGORIES, Category, Ints, Mask, Signature
from backspot.trace.frames import OF_OTHERS, OF_TORCH, is_of_torch, is_of_user
from backspot.trace.names import (
    ADDRESS,
    BLOCK_BYTES,
    BLOCKS_PER_MULTIPROCESSOR,
    CALLED_FROM,
    COLLECTIVE_CALL,
    COMPLETE,
    CONCRETE_INPUTS,
    DEVICE_ID,
    DEVICE_TYPE,
    ELEMENT_TYPE,
    FLOW_FINISH,
    FLOW_START,
    FORWARD_BACKWARD,
    FORWARD_THREAD,
    INPUT_DIMS,
    INPUT_STRIDES,
    INPUT_TYPES,
    INSTANT,
    MEMORY,
    MESSAGE_ELEMENTS,
    MODULE_CALL,
    PROCESS_GROUP,
    PROCESS_GROUP_NUMBER,
    SEQUENCE_NUMBER,
    TOTAL_ALLOCATED,
    TOTAL_RESERVED,
    item_size,
    process_group,
)

__all__ = [
    "Event",
    "convert_event",
    "convert_in_detail",
    "decode_events",
    "decode_in_detail",
    "gather",
]

_NAN = float("nan")


class _Args(msgspec.Struct, gc=False, frozen=True):
    sequence: int | None = msgspec.field(name=SEQUENCE_NUMBER, default=-1)
    forward_thread: int | None = msgspec.field(name=FORWARD_THREAD, default=-1)
    correlation: int | None = -1
    device: int | None = -1
    bytes: int | None = -1
    blocks: float | None = msgspec.field(name=BLOCKS_PER_MULTIPROCESSOR, default=_NAN)
    group: str | None = msgspec.field(name=PROCESS_GROUP, default=None)
    group_number: str | None = msgspec.field(name=PROCESS_GROUP_NUMBER, default=None)
    elements: int | None = msgspec.field(name=MESSAGE_ELEMENTS, default=None)
    dtype: str | None = msgspec.field(name=ELEMENT_TYPE, default=None)
    called_from: str | None = msgspec.field(name=CALLED_FROM, default=None)


_NO_ARGS = _Args()


class Event(msgspec.Struct, gc=False):
    """The fields of an event that are used, as the trace has them."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | None = _NAN
    dur: float | None = 0.0
    id: int | str | None = None
    args: _Args | None = _NO_ARGS


decode_events = msgspec.json.Decoder(list[Event]).decode
"""Decode a JSON list of events; raises ``msgspec.DecodeError`` if the text is anything else."""

_NO_TEXT = msgspec.Raw()


class _DetailedArgs(_Args, gc=False, frozen=True):
    shapes: msgspec.Raw = msgspec.field(name=INPUT_DIMS, default=_NO_TEXT)
    types: msgspec.Raw = msgspec.field(name=INPUT_TYPES, default=_NO_TEXT)
    strides: msgspec.Raw = msgspec.field(name=INPUT_STRIDES, default=_NO_TEXT)
    values: msgspec.Raw = msgspec.field(name=CONCRETE_INPUTS, default=_NO_TEXT)
    address: int | None = msgspec.field(name=ADDRESS, default=-1)
    block: int | None = msgspec.field(name=BLOCK_BYTES, default=0)
    allocated: int | None = msgspec.field(name=TOTAL_ALLOCATED, default=-1)
    reserved: int | None = msgspec.field(name=TOTAL_RESERVED, default=-1)
    device_type: int | None = msgspec.field(name=DEVICE_TYPE, default=0)
    device_id: int | None = msgspec.field(name=DEVICE_ID, default=-1)


_NO_DETAILS = _DetailedArgs()


class _DetailedEvent(Event, gc=False):
    """An event of a trace with memory or shapes, which takes longer to decode."""

    args: _DetailedArgs | None = _NO_DETAILS


decode_in_detail = msgspec.json.Decoder(list[_DetailedEvent]).decode
"""As ``decode_events``, with what the allocators reported and with the inputs of operators."""


def convert_event(item: object) -> Event:
    """Make an event of what Python's decoder has made of one."""
    return msgspec.convert(item, Event, strict=False)


def convert_in_detail(item: object) -> Event:
    """As ``convert_event``, with the details that ``decode_in_detail`` adds."""
    args = item.get("args") if isinstance(item, dict) else None
    if isinstance(args, dict):
        texts = {
            key: msgspec.Raw(json.dumps(args[key]).encode())
            for key in (INPUT_DIMS, INPUT_TYPES, INPUT_STRIDES, CONCRETE_INPUTS)
            if key in args
        }
        item = {**item, "args": args | texts}  # type: ignore[dict-item]
    return msgspec.convert(item, _DetailedEvent, strict=False)


_LATEST = 2.9e15
"""Microseconds, in the year 2061."""
_EARLIEST = -1.0e12
_LONGEST = LONGEST_NS / 1000
_MOST_BLOCKS = 1e12
"""Thread blocks for each multiprocessor; a kernel's grid has at most about ``1 << 62`` in all."""
_MOST_DEVICES = 128
"""PyTorch numbers the devices of a process in a signed byte."""
_MOST_BYTES = 1 << 44
"""Bytes of one copy or collective, 16 TiB: more than any device holds."""
_MOST_BLOCK = 1 << 44
"""Bytes of one block of memory, as much."""

_CAT, _NAME = attrgetter("cat"), attrgetter("name")
_PID, _TID, _ID = attrgetter("pid"), attrgetter("tid"), attrgetter("id")
_TS, _DUR, _ARGS = attrgetter("ts"), attrgetter("dur"), attrgetter("args")
_OF_ARGS = {field: attrgetter(field) for field in _Args.__struct_fields__}
_OF_DETAILS = {field: attrgetter(field) for field in _DetailedArgs.__struct_fields__}
_ENDS = (FLOW_START, FLOW_FINISH)


class _Codes(dict[str | None, int]):
    def __missing__(self, category: str | None) -> int:
        return -1


_CODES = _Codes({category: int(kind) for category, kind in CATEGORIES.items()})


def gather(events: Sequence[Event], columns: Columns) -> int:
    """Put the values of events into columns.

    Returns:
        The number of events that were left out because their times are impossible.
    """
    in_detail = bool(events) and type(events[0]) is _DetailedEvent
    is_complete = [event.ph == COMPLETE for event in events]
    if not all(is_complete):
        others = [event for event in events if event.ph != COMPLETE]
        events = list(compress(events, is_complete))
        if in_detail:
            _gather_memory([e for e in others if e.ph == INSTANT and e.name == MEMORY], columns)
        _gather_flows([e for e in others if e.cat == FORWARD_BACKWARD and e.ph in _ENDS], columns)
    category = np.fromiter(map(_CODES.__getitem__, map(_CAT, events)), np.int64, len(events))
    is_known = category >= 0
    if not is_known.all():
        rest = compress(events, (~is_known).tolist())
        columns.unknown.add((e.cat, None if e.dur is None else e.dur * 1000) for e in rest)
        events, (category,) = _chosen(is_known, events, category)
    calls = category == Category.MODULE_CALL
    if calls.any():  # other Python frames have the same category
        _gather_frames(list(compress(events, calls.tolist())), columns)
        named = [(event.name or "").startswith(MODULE_CALL) for event in events]
        events, (category,) = _chosen(~calls | np.array(named, bool), events, category)
    start, duration = _floats(_TS, events), _floats(_DUR, events, 0.0)
    possible = _possible(start, duration)
    impossible = len(events) - int(np.count_nonzero(possible))
    if impossible:
        events, (category, start, duration) = _chosen(possible, events, category, start, duration)
    if not events:
        return impossible
    args = list(map(_ARGS, events))
    if None in args:
        args = [_NO_DETAILS if arg is None else arg for arg in args]
    # What an event of another kind does not have is not looked for.
    sequence, forward_thread = _of(category < Category.RUNTIME, args, "sequence", "forward_thread")
    (correlation,) = _of(category >= Category.RUNTIME, args, "correlation")
    on_device = category > Category.RUNTIME
    device, size = _of(on_device, args, "device", "bytes")
    blocks = compress(args, on_device.tolist())
    size[on_device] = _sizes(_floats(_OF_ARGS["blocks"], list(blocks)), size[on_device])
    count = len(events)
    names = np.fromiter(map(columns.names.__getitem__, map(_NAME, events)), np.int64, count)
    threads = zip(map(_PID, events), map(_TID, events), strict=True)
    group = _describe_collectives(names, category, args, columns, size)
    columns.add(
        _nanoseconds(start),
        _nanoseconds(duration),
        category,
        names,
        np.fromiter(map(columns.threads.__getitem__, threads), np.int64, count),
        sequence,
        forward_thread,
        correlation,
        _devices(device, on_device, events),
        size,
        group,
        _signatures(args, columns) if in_detail else np.full(count, -1, np.int64),
    )
    return impossible


def _of(where: Mask, args: Sequence[_Args], *names: str) -> list[Ints]:
    """Return numbers of the events for which ``where`` is true; -1 for the others."""
    chosen = list(compress(args, where.tolist()))
    found = [np.full(len(args), -1, np.int64) for _ in names]
    for numbers, name in zip(found, names, strict=True):
        numbers[where] = integers(_OF_ARGS[name], chosen)
    return found


def _gather_flows(flows: list[Event], columns: Columns) -> None:
    start = _floats(_TS, flows)
    flows, (start,) = _chosen(_possible(start, np.zeros(len(start))), flows, start)
    if flows:
        columns.add_flows(
            list(map(_ID, flows)),
            [flow.ph == FLOW_START for flow in flows],
            [(flow.pid, flow.tid) for flow in flows],
            _nanoseconds(start),
        )


def _gather_frames(events: list[Event], columns: Columns) -> None:
    """Keep the calls of Python functions, each with whose it is and which line calls it."""
    start, duration = _floats(_TS, events), _floats(_DUR, events, 0.0)
    possible = _possible(start, duration)
    events, (start, duration) = _chosen(possible, events, start, duration)
    texts = columns.frame_texts
    function = [
        texts[name] if is_of_user(name) else OF_TORCH if is_of_torch(name) else OF_OTHERS
        for name in (event.name or "" for event in events)
    ]
    line = [
        texts[caller] if is_of_user(caller) else -1
        for caller in ((event.args or _NO_ARGS).called_from for event in events)
    ]
    columns.add_frames(
        [(event.pid, event.tid) for event in events],
        _nanoseconds(start),
        _nanoseconds(duration),
        np.array(function, np.int64),
        np.array(line, np.int64),
    )


def _gather_memory(events: list[Event], columns: Columns) -> None:
    start = _floats(_TS, events)
    events, (start,) = _chosen(_possible(start, np.zeros(len(start))), events, start)
    args = [event.args or _NO_DETAILS for event in events]
    size = _signed(map(_OF_DETAILS["block"], args))
    allocated = integers(_OF_DETAILS["allocated"], args)
    known = (size != 0) & (allocated >= 0)
    if not known.any():
        return
    allocated = allocated[known]
    address, reserved, kind, device = (
        integers(_OF_DETAILS[field], args)[known]
        for field in ("address", "reserved", "device_type", "device_id")
    )
    device = np.where(kind <= 0, -1, np.clip(device, 0, _MOST_DEVICES - 1))
    threads = [
        (event.pid, event.tid) for event, kept in zip(events, known.tolist(), strict=True) if kept
    ]
    columns.add_memory(
        threads, _nanoseconds(start[known]), address, size[known], allocated, reserved, device
    )


def _signed(values: Iterable[int | None]) -> Ints:
    """Return sizes of blocks, which may be negative; 0 for ``None`` and what is out of range."""
    return np.array(
        [value if value and -_MOST_BLOCK < value < _MOST_BLOCK else 0 for value in values], np.int64
    )


def _signatures(args: Sequence[_Args], columns: Columns) -> Ints:
    """Return ``Events.signature``. The inputs are numbered as they are written, not parsed."""
    texts = (map(bytes, map(_OF_DETAILS[field], args)) for field in Signature._fields)
    numbers = map(columns.signatures.__getitem__, zip(*texts, strict=True))
    found = np.fromiter(numbers, np.int64, len(args))
    found[found == columns.signatures.get(NO_INPUTS, -1)] = -1
    return found


def _chosen(
    keep: np.ndarray, events: Sequence[Event], *columns: np.ndarray
) -> tuple[list[Event], list[np.ndarray]]:
    return list(compress(events, keep.tolist())), [column[keep] for column in columns]


def _possible(start: np.ndarray, duration: np.ndarray) -> np.ndarray:
    possible: np.ndarray = (duration >= 0.0) & (duration <= _LONGEST)
    possible &= (start > _EARLIEST) & (start < _LATEST)
    return possible


def _floats(
    get: Callable[[Any], float | None], items: Sequence[object], missing: float = _NAN
) -> np.ndarray:
    try:
        return np.fromiter(map(get, items), np.float64, len(items))
    except TypeError:  # null
        values = map(get, items)
        return np.array([missing if value is None else value for value in values], np.float64)


def _nanoseconds(microseconds: np.ndarray) -> Ints:
    """Convert microseconds with three decimals to whole nanoseconds, exactly.

    The whole and the fractional part are scaled apart. Kineto's clock starts up to three months
    ago; in microseconds that leaves a double just enough bits for three decimals, and a product
    would lose some of them.
    """
    whole = np.floor(microseconds)
    fraction = np.rint((microseconds - whole) * 1000).astype(np.int64)
    nanoseconds: Ints = whole.astype(np.int64) * 1000 + fraction
    return nanoseconds


def _devices(device: Ints, on_device: Mask, events: Sequence[Event]) -> Ints:
    device[device >= _MOST_DEVICES] = -1
    for index in np.flatnonzero((device < 0) & on_device).tolist():
        pid = events[index].pid  # Kineto writes the device as the process of its work
        device[index] = pid if isinstance(pid, int) and 0 <= pid < _MOST_DEVICES else 0
    return device


def _describe_collectives(
    names: Ints, category: Ints, args: Sequence[_Args], columns: Columns, size: Ints
) -> Ints:
    """Return ``Events.group``, and write the bytes of each collective into ``size``.

    Calls of collectives are few: no other event is looked at.
    """
    group = np.full(len(names), -1, np.int64)
    calls = (names == columns.names.get(COLLECTIVE_CALL, -1)) & (category == Category.OPERATOR)
    for index in np.flatnonzero(calls).tolist():
        of_call = args[index]
        if of_call.group is not None:
            name = process_group(of_call.group, of_call.group_number or "")
            group[index] = columns.groups[name]
        moved = (of_call.elements or 0) * item_size(of_call.dtype or "")
        size[index] = moved if 0 < moved <= _MOST_BYTES else -1
    return group


def _sizes(blocks: np.ndarray, copied: Ints) -> Ints:
    """Return ``Events.size``: thousandths of thread blocks, or the bytes that were copied."""
    known = (blocks < _MOST_BLOCKS) & (blocks > -_MOST_BLOCKS)
    size: Ints = np.where(np.isnan(blocks) & (copied <= _MOST_BYTES), copied, -1)
    size[known] = np.rint(blocks[known] * 1000).astype(np.int64)
    return size
