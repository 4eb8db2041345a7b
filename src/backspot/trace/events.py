"""The columns into which a trace is read, one row an event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from backspot.trace.source_lines import LineTable

__all__ = ["CATEGORIES", "MODULE_CALL", "Category", "Events", "Flows", "Ints"]

Ints: TypeAlias = NDArray[np.int64]

MODULE_CALL = "nn.Module: "
"""How the profiler names a module's call where it records Python (``with_stack=True``)."""


class Category(IntEnum):
    """The kinds of events that matter here, under one name for CUDA, ROCm and old traces."""

    OPERATOR = 0
    ANNOTATION = 1
    MODULE_CALL = 2
    RUNTIME = 3
    KERNEL = 4
    MEMCPY = 5
    MEMSET = 6


CATEGORIES: dict[str, Category] = {
    "cpu_op": Category.OPERATOR,
    "Operator": Category.OPERATOR,
    "user_annotation": Category.ANNOTATION,
    "python_function": Category.MODULE_CALL,
    **dict.fromkeys(
        (
            "cuda_runtime",
            "cuda_driver",
            "hip_runtime",
            "hip_driver",
            "xpu_runtime",
            "xpu_driver",
            "privateuse1_runtime",
            "privateuse1_driver",
            "runtime",
            "Runtime",
        ),
        Category.RUNTIME,
    ),
    "kernel": Category.KERNEL,
    "Kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "Memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "Memset": Category.MEMSET,
}
"""Kineto's category names, and those that its older versions and ROCm builds write."""


@dataclass(frozen=True, slots=True)
class Flows:
    """Kineto's ``fwdbwd`` arrows: from a forward operator to a backward node.

    Arrays of equal length; an arrow with one end outside the trace is left out.

    Attributes:
        forward_thread: index into ``Events.threads``.
        backward_thread: index into ``Events.threads``.
        backward_time: nanoseconds, on the clock of ``Events.start``.
    """

    forward_thread: Ints
    backward_thread: Ints
    backward_time: Ints


@dataclass(frozen=True, slots=True)
class Events:
    """A trace as columns; arrays of equal length, one entry an event, in the order of the trace.

    ``category``, ``name`` and ``thread`` are of fewer than 64 bits.

    Attributes:
        start: nanoseconds from the trace's first event.
        duration: nanoseconds, never negative.
        category: a ``Category``.
        name: index into ``names``.
        thread: index into ``threads``: the host thread, or the device's queue.
        sequence: autograd's sequence number, -1 where there is none.
        forward_thread: autograd's logical number of the thread that built a node: 0 on forward
            operators, at least 1 on nodes, -1 where there is none.
        correlation: joins device work with the call that launched it; -1 where there is none.
        device: index of the device, -1 on the host.
        size: of a copy or memset, its bytes; of a kernel, the thread blocks that it starts for each
            multiprocessor, in thousandths; -1 where the trace does not say.
        names: each distinct name once.
        threads: (process, thread) as the trace names them.
        flows: the arrows from forward to backward.
        logical_threads: autograd's thread numbers that are known for sure (a live profile's), as
            indices into ``threads``.
        source: what was read, for people.
        warnings: what was wrong with the trace.
        origin_ns: the trace's own time at which ``start`` is 0.
        truncated: whether the trace is cut short.
        lines: which line of source made which node, as far as the trace tells.
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
    names: Sequence[str]
    threads: Sequence[tuple[object, object]]
    flows: Flows
    logical_threads: dict[int, int] = field(default_factory=dict)
    source: str = ""
    warnings: tuple[str, ...] = ()
    origin_ns: int = 0
    truncated: bool = False
    lines: LineTable = field(default_factory=LineTable)
    _end: list[Ints] = field(default_factory=list, init=False, repr=False, compare=False)
    _of: dict[tuple[Category, ...], Ints] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _names_of: dict[tuple[Category, ...], Ints] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def end(self) -> Ints:
        """``start + duration``; kept, so it is read only."""
        if not self._end:
            self._end.append(self.start + self.duration)
            self._end[0].flags.writeable = False
        return self._end[0]

    def of(self, *categories: Category) -> Ints:
        """The indices of the events of these categories; kept, so they are read only."""
        if categories not in self._of:
            chosen = np.logical_or.reduce([self.category == category for category in categories])
            index = np.flatnonzero(chosen)
            index.flags.writeable = False
            self._of[categories] = index
        return self._of[categories]

    def named(self, category: Category, *prefixes: str) -> Ints:
        """The indices of the events of a category whose names start with one of ``prefixes``."""
        return self.chosen(self.name_mask(*prefixes), category)

    def chosen(self, names: NDArray[np.bool_], *categories: Category) -> Ints:
        """The indices of the events of these categories whose names are chosen."""
        index = self.of(*categories)
        if not names.any():
            return index[:0]
        if categories not in self._names_of:
            self._names_of[categories] = self.name[index]
        found: Ints = index[names[self._names_of[categories]]]
        return found

    def name_mask(self, *prefixes: str) -> NDArray[np.bool_]:
        """For each distinct name, whether it starts with one of ``prefixes``."""
        return np.fromiter((n.startswith(prefixes) for n in self.names), bool, len(self.names))
