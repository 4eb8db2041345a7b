"""Which instrumented calls are running on each thread, and which module made an autograd node.

A thread numbers its autograd nodes one by one. The calls of instrumented modules cut these numbers
into *intervals*, and the owner of an interval is the module of the innermost call. So a node's own
number tells which module made the node, wherever the node's tensor went afterwards.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import Counter
from operator import itemgetter
from types import CodeType, FrameType
from typing import Any

import msgspec
import torch

from backspot.interrupts import pass_on
from backspot.live.owner import Owner, Scope
from backspot.live.sessions import sessions
from backspot.live.source_lines import LineRecorder, book, lines_are_exact
from backspot.live.torch_internals import autograd, profiler
from backspot.live.torch_internals.modules import is_call

_MOST = 1 << 16  # some hundred steps of a large model; the oldest half goes first
_first = itemgetter(0)


class Intervals(list[tuple[int, Owner | None]]):
    """The intervals of one thread: the first number of each, ascending, and its owner.

    A list, as every recorded call appends to it twice, without a call of Python. Whoever appends a
    number below the last one calls ``restart`` first: a user has set autograd's counter back.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__([(-1, None)])  # no owner before the first call of a session

    def restart(self) -> None:
        """Forget all intervals: the numbers begin again, or a new session began."""
        self[:] = [(-1, None)]

    def trim(self) -> None:
        """Forget the oldest half if there are too many."""
        if len(self) > _MOST:
            del self[1 : _MOST // 2]

    def cut(self, number: int, owner: Owner | None) -> None:
        """Begin an interval after an interrupt: the nodes since the last call have no owner."""
        last, _ = self[-1]
        self[-1] = last, None
        self.append((max(number, last), owner))

    def owner_of(self, number: int, following: int) -> Owner | None:
        """Return the module that made a node; ``None`` if none did or if it is not known.

        Args:
            following: the sequence number of the thread's next node.
        """
        last, owner = self[-1]
        if number >= last:
            # A number that is still to come on this thread is another thread's node.
            return owner if number < following else None
        return self[bisect_right(self, number, key=_first) - 1][1]


wrapper_codes: set[CodeType] = set()
"""The code of the wrapper that lists calls: each frame is a running call of its first argument."""

_next_number, _new_range = autograd.sequence_number, profiler.new_range


class Call(msgspec.Struct, eq=False, gc=False):
    """One labelled call that has not returned: numbers and its owner, never the module itself.

    A struct in C, as one is made for each call. It is the ``Holder`` of its range.

    Attributes:
        kwargs_id: ``id`` of the call's keyword arguments, the one object that both hooks of a call
            share and that no other call on the stack has. 0 for a call through the wrapper, which
            begins and ends it in one frame.
        place: where the call was made, if lines are known by call only; -1 for unknown.
    """

    owner: Any
    opened: Any
    module_id: int
    kwargs_id: int = 0
    place: int = -1


class Thread:
    """The running calls of one thread, and the owners of the nodes made in them.

    What every recorded call runs is written out instead of being called: between two operators of a
    real model the processor's caches are cold, and each step of the interpreter counts.

    Attributes:
        calls: the labelled calls that have not returned, outermost first, all of them opened in the
            session ``session``.
        ranges: the ranges of the calls that the wrapper did not list, outermost first, all of them
            opened in that session too. Always this one list, as the wrapper's frames hold it.
        brief: the session in which the wrapper may open a label without listing the call. -1 where
            intervals or lines need each call.
        seen_id: ``id`` of the last tensor that was checked for a node.
        seen_at: the sequence number of the next node at that time. Until a node is made, that
            tensor's node is the same, and no other tensor with that ``id`` can have a new one.
        unmarked: ids of the tensors that were counted as unmarked within the outermost call.
    """

    __slots__ = (
        "_follower",
        "_recorder",
        "brief",
        "calls",
        "counts",
        "intervals",
        "ranges",
        "seen_at",
        "seen_id",
        "session",
        "unmarked",
    )

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.ranges: list[Any] = []
        self.counts: dict[Owner, int] = {}
        self.intervals = Intervals()
        self.seen_id = 0
        self.seen_at = -1
        self.unmarked: set[int] = set()
        self.session = -1
        self.brief = -1
        self._recorder: LineRecorder | None = None
        self._follower: Call | None = None  # the outermost call, while its lines are recorded

    def __del__(self) -> None:
        # The thread ended within a call; its ranges must not be freed while a profiler records.
        for call in self.calls:
            sessions.put_aside(call)
        if self.ranges:  # as the interpreter ends, modules go before the last thread's data
            sessions.put_ranges_aside(self.ranges)

    def enter(self, call: Call, module: torch.nn.Module) -> int:
        """Begin a recorded module call.

        The call is listed before its range is opened: after an interrupt at any point there is a
        call that holds the range, and that ends the range or puts it aside.

        Returns:
            The sequence number of the next node; -1 if no instrumentation needs it.
        """
        calls = self.calls
        owner = call.owner
        if self.session != sessions.number:
            self.forget()
            self.session = sessions.number
        elif calls and calls[-1].owner not in owner.ancestors:
            # By its path the module is not inside the innermost call's: a recursion, a loss, or
            # calls that an interrupt left behind.
            self.repair(module, call)
        counts = self.counts
        if not calls:
            sessions.labelled = True
            counts.clear()
            self.unmarked.clear()
            self.seen_id = 0
            if self._follower is not None:
                self._end_lines(None)
            self.brief = sessions.number if self._needs_no_list(owner) else -1
        if owner in counts:
            label = self._again(owner)
        else:
            counts[owner] = 1
            label = owner.forward
        call.opened = _new_range(label)
        calls.append(call)
        call.opened.__enter__()
        number = -1
        if sessions.marking:
            number = _next_number()
            intervals = self.intervals
            if number < intervals[-1][0]:
                intervals.restart()
            intervals.append((number, owner))
        if owner.scope.lines:
            self._follow_lines(call, module)
        return number

    def _needs_no_list(self, owner: Owner) -> bool:
        """Return whether the calls inside this outermost call need not be listed."""
        return not sessions.marking and (
            not sessions.lines or (owner.scope.lines and lines_are_exact)
        )

    def _again(self, owner: Owner) -> str:
        """Return the label of a call that is not the module's first within the outermost call."""
        self.intervals.trim()  # only calls in a loop make that many
        count = self.counts[owner] = self.counts[owner] + 1
        return owner.repeated(count)

    def find(self, owner: Owner, kwargs: object, failed: bool) -> Call | None:
        """Return the call that is ending; ``None`` if its beginning was not recorded."""
        kwargs_id = id(kwargs)
        for call in reversed(self.calls):
            if call.kwargs_id == kwargs_id and call.owner is owner:
                return call
        # A user's hook replaced the keyword arguments. After an exception this could as well be a
        # call whose pre-hook never ran, inside a call of the same module: leave that one alone.
        if self.calls and self.calls[-1].owner is owner and not failed:
            return self.calls[-1]
        return None

    def leave(self, call: Call, number: int) -> None:
        """End a running call, and the calls after it that an interrupt left behind.

        A call stays listed until its range has ended.
        """
        calls = self.calls
        while calls[-1] is not call:
            sessions.end(calls[-1], self.session)
            calls.pop()
        if self.ranges and len(calls) == 1:
            self._end_ranges()
        if self.session == sessions.number:
            try:
                call.opened.__exit__(None, None, None)
            except Exception as error:  # the stack was full when the range was to be opened
                pass_on(error)
        else:
            sessions.put_aside(call)
        if number >= 0:
            intervals = self.intervals
            if number < intervals[-1][0]:
                intervals.restart()
            intervals.append((number, calls[-2].owner if len(calls) > 1 else None))
        calls.pop()
        if self._follower is not None:
            self._end_lines(call)

    def leave_if_listed(self, call: Call, number: int) -> None:
        """End a call if it still runs: removal and a new session end calls too."""
        if any(listed is call for listed in self.calls):
            self.leave(call, number)

    def repair(self, entering: torch.nn.Module, beginning: Call) -> None:
        """Drop the calls that no longer run: an interrupt skips even ``always_call`` hooks."""
        hooked, wrapped = _running_modules(entering)
        (hooked if beginning.kwargs_id else wrapped)[id(entering)] -= 1
        open_calls: list[Call] = []
        for call in self.calls:
            running = hooked if call.kwargs_id else wrapped
            if running[call.module_id] > 0 and call.owner.scope.active:
                running[call.module_id] -= 1
                open_calls.append(call)
        if not open_calls:
            self._end_ranges()
        self._keep(open_calls)

    def drop(self, scope: Scope) -> None:
        """End the calls of an instrumentation that is being removed."""
        self._keep([call for call in self.calls if call.owner.scope is not scope])

    def forget(self) -> None:
        """Drop everything: a new session began."""
        self._end_ranges()
        self._keep([])
        self.intervals.restart()

    def _end_ranges(self) -> None:
        """End the ranges of calls that were not listed, which an interrupt left behind."""
        if self.session == sessions.number:
            self.ranges.clear()  # frees them, the innermost first
        else:
            sessions.put_ranges_aside(self.ranges)

    def _keep(self, open_calls: list[Call]) -> None:
        dropped = len(open_calls) < len(self.calls)
        if dropped:
            for call in reversed(self.calls):
                if call not in open_calls:
                    sessions.end(call, self.session)
            self.calls[:] = open_calls
        if self._follower is not None and self._follower not in open_calls:
            self._end_lines(None)
        if dropped:
            self.intervals.cut(_next_number(), open_calls[-1].owner if open_calls else None)

    def _follow_lines(self, call: Call, module: torch.nn.Module) -> None:
        """Record the source line of each node while this call runs."""
        recorder = self._recorder
        if self._follower is None:
            recorder = self._recorder = book.recorder(self.session, recorder)
            if recorder is None:
                return
            self._follower = call
            recorder.begin()
        if recorder is not None and not recorder.exact:
            call.place = recorder.enter(module)

    def _end_lines(self, ended: Call | None) -> None:
        """Stop recording lines if the outermost call has ended.

        Args:
            ended: the call that ended in order; ``None`` if an interrupt ended calls.
        """
        recorder, follower = self._recorder, self._follower
        if recorder is None or follower is None:
            return
        if follower in self.calls:
            if not recorder.exact:
                recorder.turn(self.calls[-1].place)
            return
        recorder.end(in_order=follower is ended)
        self._follower = None  # last: after an interrupt before this line, all of it is repeated
        recorder.settle()


def _running_modules(entering: torch.nn.Module) -> tuple[Counter[int], Counter[int]]:
    """Return how often each module is being called on this thread's Python stack, by ``id``."""
    frame: FrameType | None = sys._getframe(1)
    running: Counter[int] = Counter()
    wrapped: Counter[int] = Counter()
    methods: Counter[int] = Counter()
    while frame is not None:
        code = frame.f_code
        if code in wrapper_codes:
            wrapped[id(frame.f_locals.get(code.co_varnames[0]))] += 1
        elif code.co_argcount and code.co_varnames[0] == "self":
            module_id = id(frame.f_locals.get("self"))
            if is_call(code):
                running[module_id] += 1
            else:
                methods[module_id] += 1
        frame = frame.f_back
    if not (running[id(entering)] or wrapped[id(entering)]):
        # A library has replaced PyTorch's module call by its own: count any method.
        running += methods
    return running, wrapped


def calls_that_fail() -> set[int]:
    """Return the ``id`` of each module being called on a thread where an error is handled.

    PyTorch may be iterating over the dictionary of such a module's hooks at this moment.
    """
    failing: set[int] = set()
    stacks = None
    for thread, error in sys._current_exceptions().items():
        raised = error[1] if isinstance(error, tuple) else error  # a tuple before Python 3.12
        if raised is None:
            continue
        stacks = stacks or sys._current_frames()
        frame = stacks.get(thread)
        while frame is not None:
            if is_call(frame.f_code):
                failing.add(id(frame.f_locals.get("self")))
            frame = frame.f_back
    return failing


class Local(threading.local):
    """The state of each thread that called an instrumented module."""

    def __init__(self) -> None:
        self.thread = Thread()


local = Local()


def current_thread() -> Thread:
    """Return the state of the calling thread."""
    return local.thread
