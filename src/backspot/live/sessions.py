"""The profiler's sessions by number, so that no range ends in a later session than its own.

Ending or freeing a range while a later session records corrupts the heap: the range writes its end
into an event that was freed with its session. ``KeyboardInterrupt`` can come between any two
bytecodes, and a kept exception keeps the local variables of its frames. So:

1. No local variable holds a range. Frames hold a ``Call``, or the list ``Thread.ranges``, which has
   the ranges of calls that are not listed. The range can be taken out of both.
2. A call is listed before its range opens (``Thread.enter``), or else the range itself is, so that
   each open range is in a list.
3. Both leave their list only after the range has ended in its own session, or has joined
   ``_aside``. Both steps can be repeated.
4. A number identifies the session. It changes before a session starts and before it stops.
5. Only ``Sessions.dispose`` frees what was put aside, one range at a time, after checking that no
   profiler records.

Every step of ``instrument`` and ``remove`` can be repeated, and there are no locks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from backspot.interrupts import contained
from backspot.live.compiled import compiled_book
from backspot.live.optimizers import OptimizerWatch
from backspot.live.owner import Scope
from backspot.live.source_lines import book
from backspot.live.torch_internals import profiler
from backspot.live.torch_internals.lookup import Watch


class Holder(Protocol):
    """An object that holds a range. Variables of Python frames hold it, and never the range.

    A traceback keeps the frames of an interrupt alive for as long as the exception is kept. The
    range can still be taken out of the holder.
    """

    opened: Any


class _Aside(msgspec.Struct, eq=False, gc=False):
    """A holder that is made in C: no frame of Python has the range."""

    opened: Any


class Sessions:
    """The process's profiler sessions, and the ranges that outlived theirs.

    Attributes:
        number: changes whenever a profiler starts or stops while a model is instrumented. A range
            that was opened under this number can be ended.
        marking: whether an instrumentation marks nodes, which needs the sequence number of each
            call.
        lines: whether an instrumentation records source lines.
        watches_starts: whether the start of a profiler can be noticed.
        when_started: called after a profiler started.
        when_ending: called after a profiler stopped, before PyTorch clears its flag for that.
        when_stepped: called after an optimizer has taken a step while a profiler records.
        when_stopped: called with each active instrumentation after that.
        when_labelled: called with the results of a session that has ended, if a label was written
            in it and the backward labels are still to come. Without it they never are: they are
            written while the session records.
        labelled: whether a label was written in this session.
        wraps_calls: whether the wrapper around module calls is installed.
        ending: set while the recording is to end inside a step: called where a profiler may be
            able to stop, it returns whether it has stopped.
        beside: what else begins when a profiler starts; each returns what ends it.
    """

    when_started: Callable[[], None] | None = None
    when_ending: Callable[[], None] | None = None
    when_stepped: Callable[[], None] | None = None
    when_stopped: Callable[[Scope], None] | None = None
    when_labelled: Callable[[Any], None] | None = None
    ending: Callable[[], bool] | None = None
    labelled = False
    wraps_calls = False

    def __init__(self) -> None:
        self.beside: list[Callable[[], Callable[[], None]]] = []
        self.number = 0
        self.marking = False
        self.lines = False
        self.watches_starts = profiler.PROFILER_STARTS[0].exists()
        self._scopes: list[Scope] = []
        self._aside: list[Holder] = []
        self._watches = (
            *(Watch(place, self._starting) for place in profiler.PROFILER_STARTS),
            *(Watch(place, self._stopping) for place in profiler.PROFILER_STOPS),
            Watch(profiler.PROFILER_STOPPED, self._stopped),
        )
        self._completes = False  # whether backward labels of this session come later
        self._optimizers = OptimizerWatch(self.live_scopes, self._stepped)
        self._stack_room = _StackRoom()
        self._ends: list[Callable[[], None]] = []

    def live_scopes(self) -> list[Scope]:
        """Return the active instrumentations: not removed, and with a model that still exists."""
        self._scopes = [
            scope for scope in self._scopes if scope.active and scope.model() is not None
        ]
        return self._scopes

    def join(self, scope: Scope) -> None:
        """Add an instrumentation; with the first one, start to watch the profiler."""
        if not self.live_scopes():
            self._watch()
        self._scopes.append(scope)
        if profiler.recording():
            self._consider_markers()
        self._consider()
        self.dispose()

    def depart(self, scope: Scope) -> None:
        """Remove an instrumentation; with the last one, stop watching the profiler."""
        scope.active = False
        if not self.live_scopes():
            self._unwatch()
        self._consider()
        self.dispose()

    def _consider(self) -> None:
        """Note what the active instrumentations need."""
        scopes = self.live_scopes()
        self.marking = any(scope.marks_nodes for scope in scopes)
        self.lines = any(scope.lines for scope in scopes)
        self.make_room()

    def _consider_markers(self) -> None:
        """Note whether nodes are to be marked in this session, or its trace is completed later."""
        later = self.when_labelled is not None and profiler.is_exported_by_kineto()
        for scope in self.live_scopes():
            if scope.markers is None:
                scope.marks_nodes = not later
                self._completes = self._completes or later

    def make_room(self) -> None:
        """Raise the recursion limit while module calls go through hooks or the wrapper."""
        if self.wraps_calls or any(scope.hooks != "call" for scope in self._scopes):
            self._stack_room.give()
        else:
            self._stack_room.take()

    def end(self, holder: Holder, number: int) -> None:
        """End a range that was opened under a number, or put it aside."""
        if number == self.number:
            # After an interrupt the range may have ended already, or may never have begun.
            with contained():
                holder.opened.__exit__(None, None, None)
        else:
            self.put_aside(holder)

    def put_aside(self, holder: Holder) -> None:
        """Keep a range until no profiler records."""
        self._aside.append(holder)
        self.dispose()

    def put_ranges_aside(self, ranges: list[Any]) -> None:
        """Keep the ranges of a list until no profiler records, and empty the list.

        After an interrupt between the two steps a range has two holders, which does no harm.
        """
        if ranges:
            self._aside.extend(map(_Aside, ranges))
            ranges.clear()
            self.dispose()

    def dispose(self) -> None:
        """Free the ranges that were put aside, unless a profiler records on any thread."""
        while self._aside and not profiler.recording():
            self._aside[-1].opened = None
            self._aside.pop()

    def _watch(self) -> None:
        # A session may have begun and ended since the last watch.
        self.number += 1
        if not (self.labelled and self._completes):  # else it is still to be completed
            self.labelled = self._completes = False
        self._optimizers.start()
        for watch in self._watches:
            watch.begin()

    def _unwatch(self) -> None:
        self.number += 1  # from here on sessions are not counted
        self._optimizers.stop()
        self._end_others()
        # Tables and labels wait for the end of their trace.
        if book.is_open or compiled_book.is_open or (self.labelled and self._completes):
            return
        for watch in self._watches:
            watch.end()

    def _starting(self, original: Callable[[], Any]) -> Any:
        self.number += 1
        self.dispose()  # the last moment at which nothing records
        result = original()
        self.labelled = self._completes = False
        with contained():  # at worst the trace has no labels
            self._consider_markers()
            self._consider()
            if self.when_started is not None:
                self.when_started()
            self._end_others()
            for begin in self.beside:
                self._ends.append(begin())
        return result

    def _stopping(self, original: Callable[[], Any]) -> Any:
        forms: list[tuple[Any, str]] = []
        for own_book in (book, compiled_book):
            with contained():  # at worst the trace has no such table
                form = own_book.write()
                if form is not None:
                    forms.append((own_book, form))
        self.number += 1  # before the session ends: open ranges must not end in it any more
        to_complete = self.labelled and self._completes
        self.labelled = self._completes = False
        try:
            results = original()
        finally:
            self._end_others()
            if self.when_ending is not None:
                self.when_ending()
        for own_book, form in forms:
            with suppress(TypeError):  # results that take no weak reference
                own_book.keep(results, form)
        if to_complete and self.when_labelled is not None:
            with contained():  # at worst the trace has no backward labels
                self.when_labelled(results)
        if (forms or to_complete) and not self.live_scopes():
            self._unwatch()
        self._tidy()  # here, if PyTorch has no flag to clear
        return results

    def _stepped(self) -> None:
        if self.when_stepped is not None:
            self.when_stepped()

    def _end_others(self) -> None:
        while self._ends:
            self._ends[-1]()
            self._ends.pop()

    def _stopped(self, original: Callable[[], Any]) -> Any:
        result = original()  # from here on nothing records
        self._tidy()
        return result

    def _tidy(self) -> None:
        with contained():  # a hook that stays does no harm
            if self.when_stopped is not None and not profiler.recording():
                for scope in self.live_scopes():
                    self.when_stopped(scope)
            self.dispose()


class _StackRoom:
    """A higher recursion limit while module calls go through hooks or the wrapper.

    Both take a frame or two more for each call. Without this, a model as deep as Python's limit
    allows would fail.
    """

    _HOOKS = 64  # frames that a hook may need at the very bottom

    def __init__(self) -> None:
        self._given: tuple[int, int] | None = None

    def give(self) -> None:
        limit = sys.getrecursionlimit()
        # It differs where other code has set it since, perhaps long after a model that is gone.
        if self._given is None or limit != self._given[1]:
            # A call takes at least three frames of Python, so two more are at most two thirds.
            self._given = (limit, limit + limit * 2 // 3 + self._HOOKS)
            sys.setrecursionlimit(self._given[1])

    def take(self) -> None:
        if self._given is not None:
            before, limit = self._given
            if sys.getrecursionlimit() == limit:  # else other code has set another limit
                with suppress(RecursionError):  # the stack is deeper than that at this moment
                    sys.setrecursionlimit(before)
            self._given = None


sessions = Sessions()
