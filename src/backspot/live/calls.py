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
from types import FrameType
from typing import Any

from backspot.live import gates
from backspot.live.lines import Recorder, book
from backspot.live.owners import Owner, Scope
from backspot.live.sessions import sessions

__all__ = ["Call", "Thread", "current_thread", "local"]

_next_number, _new_range = gates.sequence_number, gates.new_range
_INTERVALS = 1 << 16  # some hundred steps of a large model; the oldest half goes first


class Call:
    """One labelled call that has not returned: numbers and its owner, never the module itself.

    Attributes:
        opened: the range of its forward label.
        module_id: ``id`` of the module.
        kwargs_id: ``id`` of the call's keyword arguments, the one object that both hooks of a call
            share and no other call on the stack has.
        place: of the line that made the call, where its nodes are known by that; -1 for none.
    """

    __slots__ = ("kwargs_id", "module_id", "opened", "owner", "place")

    def __init__(
        self,
        owner: Owner,
        opened: Any,  # noqa: ANN401 - one of two torch classes
        module_id: int,
        kwargs_id: int,
    ) -> None:
        self.owner = owner
        self.opened = opened
        self.module_id = module_id
        self.kwargs_id = kwargs_id
        self.place = -1


class Thread:
    """The running calls and the owners of the node numbers of one thread.

    Attributes:
        calls: the labelled calls that have not returned, outermost first. All of them were opened
            in the session ``session``.
        counts: how often each module was called within the outermost call.
        seen: ``id`` of the last tensor whose node was looked at, and the next node's number then.
            While no node is made, that tensor's is the same, and no other tensor with that ``id``
            can have a new one.
        unmarked: ids of the tensors that were counted as unmarked within the outermost call.
    """

    __slots__ = (
        "_follower",
        "_numbers",
        "_owners",
        "_recorder",
        "calls",
        "counts",
        "seen",
        "session",
        "unmarked",
    )

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.counts: dict[Owner, int] = {}
        self.seen = (0, -1)
        self.unmarked: set[int] = set()
        self.session = -1
        self._numbers: list[int] = []
        self._owners: list[Owner | None] = []
        self._recorder: Recorder | None = None
        self._follower: Call | None = None  # the outermost call whose lines are wanted

    def __del__(self) -> None:
        # The thread ended within a call; its ranges must not be freed while a profiler records.
        for call in self.calls:
            sessions.put_aside(call.opened)

    def enter(self, owner: Owner, module: Any, kwargs: Any) -> int:  # noqa: ANN401
        """A module call begins, and a profiler records; gives the next node's number."""
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
            self.seen = (0, -1)
        count = counts[owner] = counts.get(owner, 0) + 1
        opened = _new_range(owner.forward if count == 1 else owner.repeated(count))
        opened.__enter__()
        call = Call(owner, opened, id(module), id(kwargs))
        calls.append(call)
        number = _next_number()
        self._change_owner(owner, number)
        if owner.scope.lines:
            self._follow_lines(call, module)
        return number

    def find(self, owner: Owner, kwargs: Any, failed: bool) -> int:  # noqa: ANN401
        """Where the ending call stands in ``calls``, or -1 if its beginning was not recorded."""
        calls = self.calls
        kwargs_id = id(kwargs)
        index = len(calls) - 1
        while index >= 0:
            call = calls[index]
            if call.kwargs_id == kwargs_id and call.owner is owner:
                return index
            index -= 1
        # Another's hook replaced the keyword arguments. On an exception this could as well be a
        # call whose own pre-hook never ran, and that on the stack its caller's: leave that alone.
        if calls and calls[-1].owner is owner and not failed:
            return len(calls) - 1
        return -1

    def leave(self, index: int, number: int) -> None:
        """The call at ``index`` ends; what stands above it was left behind by an interrupt."""
        calls = self.calls
        ended = calls[index]
        while len(calls) > index:
            sessions.end(calls.pop().opened, self.session)
        self._change_owner(calls[-1].owner if calls else None, number)
        if self._follower is not None:
            self._end_lines(ended)

    def _change_owner(self, owner: Owner | None, number: int) -> None:
        """Nodes from this number on belong to ``owner``, or to no module."""
        if number < 0:
            return
        numbers = self._numbers
        if numbers:
            last = numbers[-1]
            if number == last:
                self._owners[-1] = owner
                return
            if number < last:  # somebody set it back: the old intervals mean nothing any more
                numbers.clear()
                self._owners.clear()
            elif len(numbers) >= _INTERVALS:
                del numbers[: _INTERVALS // 2]
                del self._owners[: _INTERVALS // 2]
        numbers.append(number)
        self._owners.append(owner)

    def owner_of(self, number: int, following: int) -> Owner | None:
        """Who made the node with this number; ``None`` if no module did or it can't be told.

        Args:
            number: the node's.
            following: the next node's.
        """
        numbers = self._numbers
        if not numbers:
            return None
        if number >= numbers[-1]:
            # Not made on this thread if its number is still to come here.
            return self._owners[-1] if number < following else None
        index = bisect_right(numbers, number) - 1
        return self._owners[index] if index >= 0 else None

    def repair(self, entering: Any) -> None:  # noqa: ANN401 - a torch module
        """Drop the calls that no longer run: an interrupt skips even ``always_call`` hooks.

        Args:
            entering: the module whose call is beginning, and is not yet in ``calls``.
        """
        running = _running_modules()
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
        self._numbers.clear()
        self._owners.clear()

    def _keep(self, kept: list[Call]) -> None:
        if len(kept) == len(self.calls):
            return
        for call in reversed(self.calls):
            if call not in kept:
                sessions.end(call.opened, self.session)
        self.calls[:] = kept
        if self._follower is not None:
            self._end_lines(None)
        if self._owners:
            # What was made since the last change of owner may be from after the interrupt.
            self._owners[-1] = None
        self._change_owner(kept[-1].owner if kept else None, _next_number())

    def _follow_lines(self, call: Call, module: Any) -> None:  # noqa: ANN401
        """Have the source line of each node noted while this call runs."""
        recorder = self._recorder
        if self._follower is None:
            recorder = self._recorder = book.recorder(self.session, recorder)
            if recorder is None:
                return
            self._follower = call
            if gates.push_node_hook is not None:
                gates.push_node_hook(recorder.hook)
        if gates.push_node_hook is None and recorder is not None:
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
            if gates.push_node_hook is None:
                recorder.turn(self.calls[-1].place)
            return
        self._follower = None
        if gates.push_node_hook is None:
            recorder.turn(-1)
        else:
            for _ in range(1 if follower is ended else recorder.times_pushed()):
                gates.pop_node_hook()
        recorder.settle()


def _is_of_torch(module: Any) -> bool:  # noqa: ANN401
    """Whether all that a module does on its own is done by the line that calls it."""
    home = type(module).__module__
    return home.startswith("torch.") and not home.endswith(".container")


def _running_modules() -> Counter[int]:
    """How often each module stands on this thread's Python stack, by ``id``."""
    running: Counter[int] = Counter()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is gates.call_code:
            running[id(frame.f_locals.get("self"))] += 1
        frame = frame.f_back
    return running


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = Thread()


local = _Local()


def current_thread() -> Thread:
    """The state of the calling thread."""
    return local.thread
