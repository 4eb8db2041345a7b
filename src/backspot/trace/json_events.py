"""Decode the JSON text of some events into structs, and put their values into columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from backspot.trace.columns import BETWEEN_TEXTS, LONGEST_NS, Columns, integers
from backspot.trace.events import CATEGORIES, Category, Ints, Mask
from backspot.trace.frames import OF_USER, whose
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
    RECEIVES_FROM,
    SENDS_TO,
    SEQUENCE_NUMBER,
    TOTAL_ALLOCATED,
    TOTAL_RESERVED,
    item_size,
    process_group,
)

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
    sends_to: int | None = msgspec.field(name=SENDS_TO, default=None)
    receives_from: int | None = msgspec.field(name=RECEIVES_FROM, default=None)
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


decode_events = msgspec.json.Decoder(list[Event], strict=False).decode
"""Decode a JSON list of events; raises ``msgspec.DecodeError`` if the text is anything else.

Numbers in quotes are numbers: for ROCm, Kineto writes the bytes of a copy as text.
"""

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


decode_in_detail = msgspec.json.Decoder(list[_DetailedEvent], strict=False).decode
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
_MOST_RANKS = 1 << 31
_MOST_BLOCK = 1 << 44
"""Bytes of one block of memory, as much."""

_TOGETHER = 1 << 14
"""Events whose values become arrays at once: numpy's calls take longer than a thousand values."""
_ENDS = (FLOW_START, FLOW_FINISH)
_OF_ALLOCATION = tuple(
    map(attrgetter, ("block", "address", "allocated", "reserved", "device_type", "device_id"))
)
_UNKNOWN = -1


class _Codes(dict[str | None, int]):
    def __missing__(self, category: str | None) -> int:
        return _UNKNOWN


_CODES = _Codes({category: int(kind) for category, kind in CATEGORIES.items()})
_OPERATOR, _MODULE_CALL, _RUNTIME = map(
    int, (Category.OPERATOR, Category.MODULE_CALL, Category.RUNTIME)
)


class Gatherer:
    """Puts the values of events into columns.

    The values of a piece are picked out while its structs are in the processor's caches, each field
    by a list comprehension: nothing in Python is as fast. They become arrays together with those of
    other pieces. ``impossible`` counts events that were left out because of their times.
    """

    def __init__(self, columns: Columns) -> None:
        self.impossible = 0
        self._columns = columns
        self._places: dict[Any, Any] = {}
        self._empty()

    def _empty(self) -> None:
        self._start: list[np.ndarray] = []
        self._duration: list[np.ndarray] = []
        self._codes: list[int] = []
        self._names: list[int] = []
        self._threads: list[int] = []
        # What an event of another kind does not have is not looked for. Of the host's work:
        self._sequence: list[int | None] = []
        self._forward_thread: list[int | None] = []
        self._signature: list[int] = []
        # Of calls of the runtime and of device work:
        self._correlation: list[int | None] = []
        # Of device work:
        self._device: list[int | None] = []
        self._process: list[int | str | None] = []
        self._bytes: list[int | None] = []
        self._blocks: list[float | None] = []
        # Row, process group, peer and bytes of each call of a collective, in turns:
        self._collectives: list[int] = []
        self._flows: list[Event] = []
        # Time, thread and what else the allocators' events have:
        self._allocations: list[list[Any]] = [[] for _ in range(2 + len(_OF_ALLOCATION))]

    def take(self, events: Sequence[Event]) -> None:
        """Pick the values out of the events of a piece."""
        rows = [event for event in events if event.ph == COMPLETE]
        if len(rows) < len(events):
            others = [event for event in events if event.ph != COMPLETE]
            self._flows += [e for e in others if e.cat == FORWARD_BACKWARD and e.ph in _ENDS]
            if type(others[0]) is _DetailedEvent:
                self._pick_allocations([e for e in others if e.ph == INSTANT and e.name == MEMORY])
        codes = [_CODES[event.cat] for event in rows]
        kinds = set(codes)
        if _UNKNOWN in kinds:
            unknown = compress(rows, [code == _UNKNOWN for code in codes])
            self._columns.unknown.add(
                (event.cat, None if event.dur is None else event.dur * 1000) for event in unknown
            )
        if _MODULE_CALL in kinds:
            calls = compress(rows, [code == _MODULE_CALL for code in codes])
            _gather_frames(list(calls), self._columns)
        if _UNKNOWN in kinds or _MODULE_CALL in kinds:
            # Of Python's frames, modules' calls are kept.
            is_kept = [
                code >= 0 and (code != _MODULE_CALL or (event.name or "").startswith(MODULE_CALL))
                for event, code in zip(rows, codes, strict=True)
            ]
            rows, codes = list(compress(rows, is_kept)), list(compress(codes, is_kept))
        start = _floats([event.ts for event in rows])
        duration = _floats([event.dur for event in rows], 0.0)
        possible = _possible(start, duration)
        if not possible.all():
            is_kept = possible.tolist()
            self.impossible += is_kept.count(False)
            rows, codes = list(compress(rows, is_kept)), list(compress(codes, is_kept))
            start, duration = start[possible], duration[possible]
        self._start.append(start)
        self._duration.append(duration)
        self._pick(rows, codes)
        if len(self._codes) + len(self._flows) + len(self._allocations[0]) >= _TOGETHER:
            self.flush()

    def _pick(self, rows: list[Event], codes: list[int]) -> None:
        names, threads = self._columns.names, self._columns.threads
        named = [names[event.name] for event in rows]
        collective = names.get(COLLECTIVE_CALL, -1)
        if collective >= 0 and collective in named:
            for row, (event, name, code) in enumerate(zip(rows, named, codes, strict=True)):
                if name == collective and code == _OPERATOR:
                    self._pick_collective(len(self._codes) + row, event.args or _NO_ARGS)
        self._codes += codes
        self._names += named
        self._threads += [threads[event.pid, event.tid] for event in rows]
        both = zip(rows, codes, strict=True)
        args = [event.args or _NO_DETAILS for event, code in both if code < _RUNTIME]
        self._sequence += [event_args.sequence for event_args in args]
        self._forward_thread += [event_args.forward_thread for event_args in args]
        if rows and type(rows[0]) is _DetailedEvent:
            self._signature += _signatures(args, self._columns)
        both = zip(rows, codes, strict=True)
        args = [event.args or _NO_DETAILS for event, code in both if code >= _RUNTIME]
        self._correlation += [event_args.correlation for event_args in args]
        work = [event for event, code in zip(rows, codes, strict=True) if code > _RUNTIME]
        args = [event.args or _NO_DETAILS for event in work]
        self._device += [event_args.device for event_args in args]
        self._process += [event.pid for event in work]
        self._bytes += [event_args.bytes for event_args in args]
        self._blocks += [event_args.blocks for event_args in args]

    def _pick_allocations(self, events: list[Event]) -> None:
        args = [event.args or _NO_DETAILS for event in events]
        values: list[Iterable[Any]] = [
            [event.ts for event in events],
            # One tuple for each thread: the garbage collector would look at each of them.
            [self._places.setdefault(place, place) for place in ((e.pid, e.tid) for e in events)],
            *(map(get, args) for get in _OF_ALLOCATION),
        ]
        for gathered, added in zip(self._allocations, values, strict=True):
            gathered += added

    def _pick_collective(self, row: int, args: _Args) -> None:
        group = -1
        if args.group is not None:
            group = self._columns.groups[process_group(args.group, args.group_number or "")]
        moved = (args.elements or 0) * item_size(args.dtype or "")
        peer = args.receives_from if args.sends_to is None else args.sends_to
        if peer is None or not 0 <= peer < _MOST_RANKS:
            peer = -1
        self._collectives += row, group, peer, moved if 0 < moved <= _MOST_BYTES else -1

    def flush(self) -> None:
        """Put the values that were picked out into the columns."""
        if self._flows:
            _gather_flows(self._flows, self._columns)
        if self._allocations[0]:
            _gather_allocations(self._allocations, self._columns)
        if self._codes:
            category = np.array(self._codes, np.int64)
            of_host, of_device = category < _RUNTIME, category > _RUNTIME
            size, group, peer = np.full((3, len(category)), -1, np.int64)
            size[of_device] = _sizes(_floats(self._blocks), integers(self._bytes))
            row, *of_calls = (self._collectives[index::4] for index in range(4))
            group[row], peer[row], size[row] = of_calls
            self._columns.add(
                _nanoseconds(np.concatenate(self._start)),
                _nanoseconds(np.concatenate(self._duration)),
                category,
                np.array(self._names, np.int64),
                np.array(self._threads, np.int64),
                _placed(of_host, integers(self._sequence)),
                _placed(of_host, integers(self._forward_thread)),
                _placed(~of_host, integers(self._correlation)),
                _placed(of_device, _devices(self._device, self._process)),
                size,
                group,
                peer,
                _placed(of_host, np.array(self._signature or -1, np.int64)),
            )
        self._empty()


def _placed(has_value: Mask, values: Ints) -> Ints:
    """Return a column where ``has_value`` is true, with these values; -1 for the others."""
    column = np.full(len(has_value), -1, np.int64)
    column[has_value] = values
    return column


def _gather_frames(events: list[Event], columns: Columns) -> None:
    """Keep the calls of Python functions, each with whose it is and which line calls it."""
    start = _floats([event.ts for event in events])
    duration = _floats([event.dur for event in events], 0.0)
    possible = _possible(start, duration)
    events = list(compress(events, possible.tolist()))
    texts = columns.frame_texts
    names = [event.name or "" for event in events]
    function = [
        texts[name] if owner == OF_USER else owner
        for name, owner in zip(names, map(whose, names), strict=True)
    ]
    callers = [(event.args or _NO_ARGS).called_from for event in events]
    line = [
        -1 if caller is None or whose(caller) != OF_USER else texts[caller] for caller in callers
    ]
    columns.add_frames(
        ((event.pid, event.tid) for event in events),
        _nanoseconds(start[possible]),
        _nanoseconds(duration[possible]),
        np.array(function, np.int64),
        np.array(line, np.int64),
    )


def _gather_flows(flows: list[Event], columns: Columns) -> None:
    start = _floats([flow.ts for flow in flows])
    possible = _possible(start, np.zeros(len(start)))
    flows = list(compress(flows, possible.tolist()))
    columns.add_flows(
        [flow.id for flow in flows],
        [flow.ph == FLOW_START for flow in flows],
        [(flow.pid, flow.tid) for flow in flows],
        _nanoseconds(start[possible]),
    )


def _gather_allocations(gathered: list[list[Any]], columns: Columns) -> None:
    start, threads = _floats(gathered[0]), gathered[1]
    block, *others = gathered[2:]
    size = _signed(block)
    address, allocated, reserved, kind, device = map(integers, others)
    is_possible = _possible(start, np.zeros(len(start))) & (size != 0) & (allocated >= 0)
    device = np.where(kind <= 0, -1, np.clip(device, 0, _MOST_DEVICES - 1))
    numbers = (address, size, allocated, reserved, device)
    columns.add_allocations(
        list(compress(threads, is_possible.tolist())),
        _nanoseconds(start[is_possible]),
        *(column[is_possible] for column in numbers),
    )


def _signed(values: Iterable[int | None]) -> Ints:
    """Return sizes of blocks, which may be negative; 0 for ``None`` and what is out of range."""
    return np.array(
        [value if value and -_MOST_BLOCK < value < _MOST_BLOCK else 0 for value in values], np.int64
    )


def _signatures(args: Sequence[Any], columns: Columns) -> list[int]:
    """Return ``Events.signature``. The inputs are numbered as they are written, not parsed."""
    number_of = columns.signatures
    return [
        -1
        if event_args.types is _NO_TEXT and event_args.shapes is _NO_TEXT
        else number_of[
            BETWEEN_TEXTS.join(
                (event_args.shapes, event_args.types, event_args.strides, event_args.values)
            )
        ]
        for event_args in args
    ]


def _possible(start: np.ndarray, duration: np.ndarray) -> np.ndarray:
    possible: np.ndarray = (duration >= 0.0) & (duration <= _LONGEST)
    possible &= (start > _EARLIEST) & (start < _LATEST)
    return possible


def _floats(values: Sequence[float | None], missing: float = _NAN) -> np.ndarray:
    try:
        return np.fromiter(values, np.float64, len(values))
    except TypeError:  # null
        return np.array([missing if value is None else value for value in values], np.float64)


def _nanoseconds(microseconds: np.ndarray) -> Ints:
    """Convert microseconds with three decimals to whole nanoseconds, exactly.

    The whole and the fractional part are scaled apart. Kineto's clock starts up to three months
    ago; in microseconds that leaves a double just enough bits for three decimals, and a product
    would lose some of them.
    """
    whole_us = np.floor(microseconds)
    fraction = np.rint((microseconds - whole_us) * 1000).astype(np.int64)
    nanoseconds: Ints = whole_us.astype(np.int64) * 1000 + fraction
    return nanoseconds


def _devices(devices: Sequence[int | None], processes: Sequence[int | str | None]) -> Ints:
    device = integers(devices)
    device[device >= _MOST_DEVICES] = -1
    for index in np.flatnonzero(device < 0).tolist():
        pid = processes[index]  # Kineto writes the device as the process of its work
        device[index] = pid if isinstance(pid, int) and 0 <= pid < _MOST_DEVICES else 0
    return device


def _sizes(blocks: np.ndarray, copied: Ints) -> Ints:
    """Return ``Events.size``: thousandths of thread blocks, or the bytes that were copied."""
    is_known = (blocks < _MOST_BLOCKS) & (blocks > -_MOST_BLOCKS)
    size: Ints = np.where(np.isnan(blocks) & (copied <= _MOST_BYTES), copied, -1)
    size[is_known] = np.rint(blocks[is_known] * 1000).astype(np.int64)
    return size
