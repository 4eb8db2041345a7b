"""Which instrumented calls are running on each thread, and which of them made a given graph node.

A thread numbers its autograd nodes one by one. The calls of instrumented modules cut these numbers
into intervals, each with the innermost call's module as its owner; a node's own number then tells
who made it, wherever its tensor went afterwards.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import Counter
from operator import itemgetter
from types import FrameType
from typing import Any

import msgspec

from backspot.live import torch_internals
from backspot.live.owner import Owner, Scope
from backspot.live.sessions import sessions
from backspot.live.source_lines import Recorder, book

__all__ = ["Call", "Thread", "calls_that_fail", "current_thread", "local"]

_next_number, _new_range = torch_internals.sequence_number, torch_internals.new_range
_first = itemgetter(0)
_INTERVALS = 1 << 16  # some hundred steps of a large model; the oldest half goes first


class Call(msgspec.Struct, eq=False, gc=False):
    """One labelled call that has not returned: numbers and its owner, never the module itself.

    A struct of C, for one is made for each call. It is the ``Holder`` of its range.

    Attributes:
        owner: whose call it is.
        opened: the range of its forward label, one of two torch classes.
        module_id: ``id`` of the module.
        kwargs_id: ``id`` of the call's keyword arguments, the one object that both hooks of a call
            share and no other call on the stack has.
        place: of the line that made the call, where its nodes are known by that; -1 for none.
    """

    owner: Any
    opened: Any
    module_id: int
    kwargs_id: int
    place: int = -1


class Thread:
    """The running calls and the owners of the node numbers of one thread.

    What every recorded call goes through is written out where it is needed: with the processor's
    caches cold, as they are between two operators of a real model, each step of Python's counts.

    Attributes:
        calls: the labelled calls that have not returned, outermost first. All of them were opened
            in the session ``session``.
        counts: how often each module was called within the outermost call.
        seen_id: ``id`` of the last tensor whose node was looked at.
        seen_at: the next node's number then. While no node is made, that tensor's is the same, and
            no other tensor with that ``id`` can have a new one.
        unmarked: ids of the tensors that were counted as unmarked within the outermost call.
    """

    __slots__ = (
        "_follower",
        "_made",
        "_recorder",
        "calls",
        "counts",
        "seen_at",
        "seen_id",
        "session",
        "unmarked",
    )

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.counts: dict[Owner, int] = {}
        self.seen_id = 0
        self.seen_at = -1
        self.unmarked: set[int] = set()
        self.session = -1
        # From which number on nodes are whose, ascending; nobody's before a session's first call.
        self._made: list[tuple[int, Owner | None]] = [(-1, None)]
        self._recorder: Recorder | None = None
        self._follower: Call | None = None  # the outermost call whose lines are wanted

    def __del__(self) -> None:
        # The thread ended within a call; its ranges must not be freed while a profiler records.
        for call in self.calls:
            sessions.put_aside(call)

    def enter(self, owner: Owner, module: Any, kwargs: Any) -> int:
        """A module call begins, and a profiler records; gives the next node's number.

        The call is listed before its range is opened: whatever interrupts this, the range has an
        owner that ends it or puts it aside.
        """
        calls = self.calls
        if self.session != sessions.number:
            self.forget()
            self.session = sessions.number
        elif calls and calls[-1].owner not in owner.ancestors:
            # Not called from within the innermost call's module, as far as names tell: recursion, a
            # loss, or calls that an interrupt left behind.
            self.repair(module)
        counts = self.counts
        if not calls:
            counts.clear()
            self.unmarked.clear()
            self.seen_id = 0
            if self._follower is not None:
                self._end_lines(None)
        if owner in counts:
            label = self._again(owner)
        else:
            counts[owner] = 1
            label = owner.forward
        call = Call(owner, _new_range(label), id(module), id(kwargs))
        calls.append(call)
        call.opened.__enter__()
        number = _next_number()
        made = self._made
        if number < made[-1][0]:
            self._forget_numbers()
        made.append((number, owner))
        if owner.scope.lines:
            self._follow_lines(call, module)
        return number

    def _again(self, owner: Owner) -> str:
        """The label of a call that is not the module's first within the outermost call."""
        if len(self._made) > _INTERVALS:  # only calls in a loop come to so many
            del self._made[1 : _INTERVALS // 2]
        count = self.counts[owner] = self.counts[owner] + 1
        return owner.repeated(count)

    def find(self, owner: Owner, kwargs: Any, failed: bool) -> Call | None:
        """The call that is ending; ``None`` if its beginning was not recorded."""
        kwargs_id = id(kwargs)
        for call in reversed(self.calls):
            if call.kwargs_id == kwargs_id and call.owner is owner:
                return call
        # Another's hook replaced the keyword arguments. On an exception this could as well be a
        # call whose own pre-hook never ran, and that on the stack its caller's: leave that alone.
        if self.calls and self.calls[-1].owner is owner and not failed:
            return self.calls[-1]
        return None

    def leave(self, call: Call, number: int) -> None:
        """A running call ends; what was begun after it was left behind by an interrupt.

        A call stays listed until its range has ended.
        """
        calls = self.calls
        while calls[-1] is not call:
            sessions.end(calls[-1], self.session)
            calls.pop()
        if self.session == sessions.number:
            try:  # noqa: SIM105 - of each recorded call; suppress() is an object more
                call.opened.__exit__(None, None, None)
            except Exception:  # noqa: S110 - the stack was full when it was to be opened
                pass
        else:
            sessions.put_aside(call)
        made = self._made
        if number < made[-1][0]:
            self._forget_numbers()
        made.append((number, calls[-2].owner if len(calls) > 1 else None))
        calls.pop()
        if self._follower is not None:
            self._end_lines(call)

    def owner_of(self, number: int, following: int) -> Owner | None:
        """Who made the node with this number; ``None`` if no module did or it can't be told.

        Args:
            number: the node's.
            following: the next node's.
        """
        last, owner = self._made[-1]
        if number >= last:
            # Not made on this thread if its number is still to come here.
            return owner if number < following else None
        return self._made[bisect_right(self._made, number, key=_first) - 1][1]

    def _forget_numbers(self) -> None:
        """A session began, or somebody set the number back: the old intervals mean nothing."""
        self._made[:] = [(-1, None)]

    def repair(self, entering: Any) -> None:
        """Drop the calls that no longer run: an interrupt skips even ``always_call`` hooks.

        Args:
            entering: the module whose call is beginning, and is not yet in ``calls``.
        """
        running = _running_modules(entering)
        running[id(entering)] -= 1
        kept: list[Call] = []
        for call in self.calls:
            if running[call.module_id] > 0 and call.owner.scope.active:
                running[call.module_id] -= 1
                kept.append(call)
        self._keep(kept)

    def drop(self, scope: Scope) -> None:
        """Close the calls of an instrumentation that is being removed."""
        self._keep([call for call in self.calls if call.owner.scope is not scope])

    def forget(self) -> None:
        """Start anew: a new session began."""
        self._keep([])
        self._forget_numbers()

    def _keep(self, kept: list[Call]) -> None:
        dropped = len(kept) < len(self.calls)
        if dropped:
            for call in reversed(self.calls):
                if call not in kept:
                    sessions.end(call, self.session)
            self.calls[:] = kept
        if self._follower is not None and self._follower not in kept:
            self._end_lines(None)
        if dropped:
            # What was made since the last change of owner may be from after the interrupt.
            last, _ = self._made[-1]
            self._made[-1] = last, None
            self._made.append((max(_next_number(), last), kept[-1].owner if kept else None))

    def _follow_lines(self, call: Call, module: Any) -> None:
        """Have the source line of each node noted while this call runs."""
        recorder = self._recorder
        if self._follower is None:
            recorder = self._recorder = book.recorder(self.session, recorder)
            if recorder is None:
                return
            self._follower = call
            if torch_internals.push_node_hook is not None:
                torch_internals.push_node_hook(recorder.hook)
        if torch_internals.push_node_hook is None and recorder is not None:
            if _is_of_torch(module):
                call.place = recorder.call_site()
            recorder.turn(call.place)

    def _end_lines(self, ended: Call | None) -> None:
        """Calls have ended; ``ended`` did so in good order.

        An interrupt skips the hook that would take ours from the thread. Then it has to be asked
        whether it is still there: to take another's would be worse than to leave ours.
        """
        recorder, follower = self._recorder, self._follower
        if recorder is None or follower is None:
            return
        if follower in self.calls:
            if torch_internals.push_node_hook is None:
                recorder.turn(self.calls[-1].place)
            return
        if torch_internals.push_node_hook is None:
            recorder.turn(-1)
        else:
            for _ in range(1 if follower is ended else recorder.times_pushed()):
                torch_internals.pop_node_hook()
        self._follower = None  # last: where an interrupt comes before, this is repeated, and asks
        recorder.settle()


def _is_of_torch(module: Any) -> bool:
    """Whether all that a module does on its own is done by the line that calls it."""
    home = type(module).__module__
    return home.startswith("torch.") and not home.endswith(".container")


def _running_modules(entering: Any) -> Counter[int]:
    """How often each module is being called on this thread's Python stack, by ``id``.

    Args:
        entering: a module that certainly is.
    """
    frame: FrameType | None = sys._getframe(1)
    running: Counter[int] = Counter()
    methods: Counter[int] = Counter()
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            module_id = id(frame.f_locals.get("self"))
            if torch_internals.is_call(code):
                running[module_id] += 1
            else:
                methods[module_id] += 1
        frame = frame.f_back
    # Somebody has put a module call of his own in the place of PyTorch's: go by any method.
    return running if running[id(entering)] else running + methods


def calls_that_fail() -> set[int]:
    """The ``id`` of each module that is being called on a thread where an error is handled.

    PyTorch may be going through such a module's hooks at this moment, in its own dictionary.
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
            if torch_internals.is_call(frame.f_code):
                failing.add(id(frame.f_locals.get("self")))
            frame = frame.f_back
    return failing


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = Thread()


local = _Local()


def current_thread() -> Thread:
    """The state of the calling thread."""
    return local.thread
