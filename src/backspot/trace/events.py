"""The columns of a trace, with one row for each event."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from backspot.trace import names
from backspot.trace.compiled import CompiledTable
from backspot.trace.frames import Frames
from backspot.trace.labels import Label, parse_label
from backspot.trace.source_lines import LineTable

Ints: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]


class Category(IntEnum):
    """The kinds of events that are read, with one name for CUDA, ROCm and old traces.

    In this order: what comes before ``RUNTIME`` is of the host alone, what comes after it is of a
    device.
    """

    OPERATOR = 0
    ANNOTATION = 1
    MODULE_CALL = 2
    RUNTIME = 3
    KERNEL = 4
    MEMCPY = 5
    MEMSET = 6


CATEGORIES: dict[str, Category] = {
    **dict.fromkeys(names.OPERATOR_CATEGORIES, Category.OPERATOR),
    **dict.fromkeys(names.ANNOTATION_CATEGORIES, Category.ANNOTATION),
    **dict.fromkeys(names.PYTHON_CATEGORIES, Category.MODULE_CALL),
    **dict.fromkeys(names.RUNTIME_CATEGORIES, Category.RUNTIME),
    **dict.fromkeys(names.KERNEL_CATEGORIES, Category.KERNEL),
    **dict.fromkeys(names.MEMCPY_CATEGORIES, Category.MEMCPY),
    **dict.fromkeys(names.MEMSET_CATEGORIES, Category.MEMSET),
}
"""The category for each of Kineto's names for one."""


class Flows(msgspec.Struct, frozen=True):
    """Kineto's ``fwdbwd`` arrows, each from a forward operator to a backward node.

    All are arrays of equal length. An arrow with one end outside the trace is left out.

    Attributes:
        forward_thread: index into ``Events.threads``.
        backward_thread: index into ``Events.threads``.
        backward_time: nanoseconds, on the clock of ``Events.start``.
    """

    forward_thread: Ints
    backward_thread: Ints
    backward_time: Ints


class Allocations(msgspec.Struct, frozen=True):
    """What the allocators reported with ``profile_memory=True``: each block that came or went.

    All are arrays of equal length, in the order of time.

    Attributes:
        time: nanoseconds, on the clock of ``Events.start``.
        thread: index into ``Events.threads``.
        address: where the block is, on its device.
        size: bytes of the block, negative where it is freed.
        allocated: bytes that the allocator has given out after this. On the host, PyTorch counts
            only while it records.
        reserved: bytes that the allocator has from the device; 0 on the host.
        device: index of the device, -1 for the host.
    """

    time: Ints
    thread: Ints
    address: Ints
    size: Ints
    allocated: Ints
    reserved: Ints
    device: Ints

    def __len__(self) -> int:
        """How many there are."""
        return len(self.time)

    def where(self, keep: Mask) -> Allocations:
        """Return those for which ``keep`` is true."""
        return Allocations(*(getattr(self, name)[keep] for name in self.__struct_fields__))


def _no_allocations() -> Allocations:
    return Allocations(*(np.empty(0, np.int64) for _ in Allocations.__struct_fields__))


class Signature(NamedTuple):
    """The inputs of an operator, with ``record_shapes=True``, as JSON lists with an entry an input.

    Attributes:
        shapes: the sizes of each tensor.
        types: the type of each tensor's elements, as C++ names it, or ``Scalar`` and the like.
        strides: the strides of each tensor; ``""`` where they are not recorded.
        values: the values of the inputs that are not tensors, as text.
    """

    shapes: str
    types: str
    strides: str
    values: str


class Events(msgspec.Struct, frozen=True, dict=True):
    """A trace as columns: arrays of equal length with one entry for each event, in trace order.

    ``category``, ``name``, ``thread``, ``group``, ``peer`` and ``signature`` have fewer than 64
    bits.

    Attributes:
        start: nanoseconds from the trace's first event.
        duration: nanoseconds, never negative.
        category: a ``Category``.
        name: index into ``names``.
        thread: index into ``threads``: the host thread, or the device's queue.
        sequence: autograd's sequence number, -1 for none.
        forward_thread: autograd's logical number of the thread that built a node: 0 on forward
            operators, at least 1 on nodes, -1 for none.
        correlation: the number that device work shares with the call that launched it; -1 for none.
        device: index of the device, -1 on the host.
        size: the bytes of a copy or memset; for the call of a collective, what the rank puts in;
            for a kernel, its thread blocks for each multiprocessor, in thousandths; -1 where the
            trace does not have it.
        group: for the call of a collective, index into ``groups``; -1 for none.
        peer: for the call of a transfer, the rank to or from which it goes; -1 for none.
        signature: for an operator, index into ``signatures``; -1 for none.
        names: each distinct name once.
        threads: (process, thread) as the trace names them.
        groups: the process groups by name.
        signatures: each distinct signature once; empty without ``record_shapes=True``.
        flows: the arrows from forward to backward.
        logical_threads: for each of autograd's thread numbers that a live profile knows, the index
            into ``threads``.
        source: what was read, for people.
        warnings: what was wrong with the trace.
        origin_ns: the trace's own time at which ``start`` is 0.
        truncated: whether the trace is cut short.
        unread: whether events of unknown categories were left out, which may be a device's work.
        lines: the lines of source that made the nodes, as far as they were recorded.
        allocations: the blocks of memory; none without ``profile_memory=True``.
        frames: the calls of Python functions; none without ``with_stack=True``.
        device_names: the names of the devices by index, as far as the trace has them.
        clock_ns: the time of the clock at which ``start`` is 0: nanoseconds since 1970, if the
            trace has that; any number otherwise.
        compiled: the launch sites of compiled graphs, as far as they were recorded.
    """

    start: Ints
    duration: Ints
    category: Ints
    name: Ints
    thread: Ints
    sequence: Ints
    forward_thread: Ints
    correlation: Ints
    device: Ints
    size: Ints
    group: Ints
    peer: Ints
    signature: Ints
    names: Sequence[str]
    threads: Sequence[tuple[object, object]]
    groups: Sequence[str]
    flows: Flows
    logical_threads: dict[int, int] = msgspec.field(default_factory=dict)
    source: str = ""
    warnings: tuple[str, ...] = ()
    origin_ns: int = 0
    truncated: bool = False
    unread: bool = False
    lines: LineTable = msgspec.field(default_factory=LineTable)
    signatures: Sequence[Signature] = ()
    allocations: Allocations = msgspec.field(default_factory=_no_allocations)
    frames: Frames = msgspec.field(default_factory=Frames)
    device_names: dict[int, str] = msgspec.field(default_factory=dict)
    clock_ns: int = 0
    compiled: CompiledTable = msgspec.field(default_factory=CompiledTable)

    @cached_property
    def end(self) -> Ints:
        """``start + duration``; read only."""
        end: Ints = self.start + self.duration
        end.flags.writeable = False
        return end

    @cached_property
    def labels(self) -> tuple[Label | None, ...]:
        """For each distinct name, the label that it is, if any."""
        return tuple(map(parse_label, self.names))

    @cached_property
    def is_label(self) -> Mask:
        """For each distinct name, whether it is a label."""
        return np.fromiter((label is not None for label in self.labels), bool, len(self.names))

    @cached_property
    def _of(self) -> dict[tuple[Category, ...], tuple[Ints, Ints]]:
        """The events of some categories and their names, as far as ``_index`` has found them."""
        return {}

    def _index(self, categories: tuple[Category, ...]) -> tuple[Ints, Ints]:
        if categories not in self._of:
            chosen = np.logical_or.reduce([self.category == category for category in categories])
            index = np.flatnonzero(chosen)
            index.flags.writeable = False
            self._of[categories] = index, self.name[index]
        return self._of[categories]

    def of(self, *categories: Category) -> Ints:
        """Return the indices of the events of these categories; read only."""
        return self._index(categories)[0]

    def where(self, keep: Mask) -> Events:
        """Return the trace with only those events for which ``keep`` is true.

        Flows and allocations are no events; they stay.
        """
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        kept_events = np.flatnonzero(keep)
        columns: dict[str, Any] = {
            name: column[kept_events]
            for name, column in values.items()
            if isinstance(column, np.ndarray)
        }
        shorter = replace(self, **columns)
        shorter.__dict__.update(
            {name: self.__dict__[name] for name in _OF_NAMES & vars(self).keys()}
        )
        return shorter

    def named(self, category: Category, *names: str) -> Ints:
        """Return the indices of a category's events with these names."""
        return self.chosen(self.name_mask(*names), category)

    def prefixed(self, category: Category, *prefixes: str) -> Ints:
        """Return the indices of a category's events with names that start with a prefix."""
        return self.chosen(self.prefix_mask(*prefixes), category)

    def chosen(self, names: Mask, *categories: Category) -> Ints:
        """Return the indices of the events of these categories with names in a mask."""
        index, name = self._index(categories)
        chosen: Ints = index[np.flatnonzero(names.take(name))] if names.any() else index[:0]
        return chosen

    def name_mask(self, *names: str) -> Mask:
        """For each distinct name, return whether it is one of ``names``."""
        is_named = np.zeros(len(self.names), bool)
        order, ordered = self._ordered_names
        for name in names:
            place = bisect_left(ordered, name)
            if place < len(ordered) and ordered[place] == name:
                is_named[order[place]] = True
        return is_named

    def prefix_mask(self, *prefixes: str) -> Mask:
        """For each distinct name, return whether it starts with one of ``prefixes``."""
        has_prefix = np.zeros(len(self.names), bool)
        order, ordered = self._ordered_names
        for prefix in prefixes:
            first = bisect_left(ordered, prefix)
            last = bisect_left(ordered, True, first, key=lambda name: not name.startswith(prefix))
            has_prefix[order[first:last]] = True
        return has_prefix

    @cached_property
    def _ordered_names(self) -> tuple[Ints, list[str]]:
        """The distinct names in their order, so that those with one beginning lie together."""
        order = sorted(range(len(self.names)), key=self.names.__getitem__)
        return np.array(order, np.int64), [self.names[index] for index in order]

    def names_where(self, holds: Callable[[str], bool]) -> Mask:
        """For each distinct name, return whether a predicate holds; read only."""
        if holds not in self._known:
            holds_for = np.fromiter(map(holds, self.names), bool, len(self.names))
            holds_for.flags.writeable = False
            self._known[holds] = holds_for
        return self._known[holds]

    @cached_property
    def _known(self) -> dict[Callable[[str], bool], Mask]:
        """What ``names_where`` has found; several rooms ask the same."""
        return {}


_OF_NAMES = {"labels", "is_label", "_ordered_names", "_known"}
"""What is computed from ``Events.names`` alone."""
