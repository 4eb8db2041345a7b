"""Which place of the user's Python the host is at, at each moment of a recording with stacks."""

from __future__ import annotations

import msgspec
import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.timeline import (
    EMPTY,
    NOTHING,
    Nesting,
    Timeline,
    grouped,
    innermost,
    is_in,
    layered,
    take,
)
from backspot.formatting import place_of
from backspot.trace import Category, Events
from backspot.trace.events import Ints
from backspot.trace.frames import OF_OTHERS, OF_TORCH, Frames, function_of, line_of_call

_AT_ONCE = 1_000  # nanoseconds
_COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")


class HostSite(msgspec.Struct, frozen=True):
    """A place of the user's code: a line with a call, or what runs between two calls."""

    file: str
    line: int
    last_line: int
    function: str

    @property
    def text(self) -> str:
        """``file:line``, or ``file:line-last_line``."""
        return place_of(self.file, self.line, self.last_line)


class HostSites(msgspec.Struct, frozen=True):
    """Which place of the user's code the host is at.

    Attributes:
        line: at each moment twice the index into ``sites``, plus 1 within PyTorch's own Python.
        sites: the places.
        calls: when the user's functions call others, in nanoseconds, in any order.
    """

    line: Timeline
    sites: tuple[HostSite, ...]
    calls: Ints

    @property
    def texts(self) -> tuple[Timeline, list[str]]:
        """The places as texts, and which of them the host is at."""
        values = np.where(self.line.values >= 0, self.line.values // 2, NOTHING)
        return Timeline(self.line.edges, values), [site.text for site in self.sites]


def find_sites(events: Events, ownership: Ownership) -> HostSites:
    """Find which place of the user's code the host is at; nowhere without stacks.

    A hook runs on a thread of autograd, while the thread that called the backward waits.
    """
    frames, lines = events.frames, []
    calls = [frames.start[:0]]
    sites: dict[HostSite, int] = {}
    passes = set(ownership.passes.threads)
    by_thread = dict(grouped(frames.thread))
    spans = ownership.spans
    of_program = [thread for thread in by_thread if thread in passes or thread in spans.nesting]
    for thread in of_program:
        own_calls, called = _users(frames, _that_return(frames, by_thread[thread]))
        calls.append(frames.start[called])
        nesting = innermost(
            frames.start[own_calls], frames.start[own_calls] + frames.duration[own_calls]
        )
        lines.append(_of_thread(events, own_calls, nesting, sites))
    # A thread that runs Python for a shorter time, as for hooks, does so while another waits.
    lines.sort(key=lambda line: np.diff(line.edges)[line.values[:-1] >= 0].sum())
    line = layered(*lines) if lines else EMPTY
    return HostSites(line, tuple(sites), np.concatenate(calls))


def _that_return(frames: Frames, own_calls: Ints) -> Ints:
    """Return a thread's calls without those around the profiler's start that seem never to end.

    ``backspot run`` starts it where a function returns, and there Python reports no returns. Calls
    of the user's functions stay: they go on.
    """
    own_calls = own_calls[np.lexsort((-frames.duration[own_calls], frames.start[own_calls]))]
    end = frames.start[own_calls] + frames.duration[own_calls]
    first = own_calls[: int(np.argmin(end >= end.max() - _AT_ONCE))]  # until one returns
    of_user = np.flatnonzero(frames.function[first] >= 0)
    inner = first[of_user[-1] + 1 :] if len(of_user) else first[:0]
    return own_calls[~is_in(own_calls, inner)] if OF_TORCH in frames.function[inner] else own_calls


def _users(frames: Frames, own_calls: Ints) -> tuple[Ints, Ints]:
    """Return a thread's calls that are of the user's functions or from them, and the latter."""
    parent = innermost(
        frames.start[own_calls], frames.start[own_calls] + frames.duration[own_calls]
    ).parent
    of_user = frames.function[own_calls] >= 0
    from_user = take(of_user, parent, False)
    return own_calls[of_user | from_user], own_calls[from_user]


def _of_thread(
    events: Events, own_calls: Ints, nesting: Nesting, sites: dict[HostSite, int]
) -> Timeline:
    """Return the sites of one thread, as ``_sites`` does."""
    frames, line = events.frames, nesting.timeline
    functions = [function_of(text) for text in frames.texts]
    calls = [line_of_call(text) for text in frames.texts]
    function, called = frames.function[own_calls].tolist(), frames.line[own_calls].tolist()
    # A function of C in which operators run is one of PyTorch's.
    starts = np.sort(events.start[events.of(Category.OPERATOR)], kind="stable")
    entered = frames.start[own_calls]
    left = entered + frames.duration[own_calls]
    calls_torch = np.searchsorted(starts, left) > np.searchsorted(starts, entered)
    kind = frames.function[own_calls]
    of_torch = ((kind == OF_TORCH) | (calls_torch & (kind == OF_OTHERS))).tolist()
    parent = nesting.parent.tolist()
    values = line.values.tolist()
    within: dict[int, int] = {}  # the lines of comprehensions, and of the calls that run them
    for frame, number in enumerate(function):
        text = functions[number] if number >= 0 else None
        if text is not None and text[2] in _COMPREHENSIONS:
            within[frame] = text[1]
            above = parent[frame]
            while above >= 0 and function[above] < 0:
                within[above], above = text[1], parent[above]
    site_values = np.full(len(values), NOTHING)

    def enclosing_function(frame: int) -> int:
        while frame >= 0 and function[frame] < 0:
            frame = parent[frame]
        return frame

    def name_of(outer: int) -> str:
        """The function's name; of a comprehension, that of the function which it is written in."""
        around, (file, line, name) = outer, functions[function[outer]] or ("", 0, "")
        while name in _COMPREHENSIONS:
            around = enclosing_function(parent[around])
            text = functions[function[around]] if around >= 0 else None
            if text is None or text[0] != file or text[1] > line:
                break
            name = text[2]
        return name

    def line_within(frame: int, outer: int) -> int | None:
        """The line of ``outer`` from which ``frame`` was called, directly or not."""
        while frame >= 0 and frame != outer:
            above = parent[frame]
            if enclosing_function(above) == outer and called[frame] >= 0:
                place = calls[called[frame]]
                return place[1] if place else None
            if above == outer and frame in within:  # stacks before PyTorch 2.15 lack lines of calls
                return within[frame]
            frame = above
        return None

    for index, frame in enumerate(values):
        if frame < 0:
            continue
        outer = enclosing_function(frame)
        if outer < 0:
            continue
        text = functions[function[outer]]
        if text is None:
            continue
        file, first, _ = text
        if frame != outer:  # a call from the function
            begin = end = line_within(frame, outer) or first
        else:
            before = line_within(values[index - 1], outer) if index else None
            after = line_within(values[index + 1], outer) if index + 1 < len(values) else None
            begin = before or first
            end = max(begin, after or begin)
        site = HostSite(file, begin, end, name_of(outer))
        site_values[index] = 2 * sites.setdefault(site, len(sites)) + of_torch[frame]
    return Timeline(line.edges, site_values)
