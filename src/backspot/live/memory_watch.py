"""No training runs out of memory because it is recorded.

The profiler lays its records into blocks that were freed, so that the next large tensors need new
ones: memory can grow by a gigabyte in a step, and glibc keeps it. When the profiler stops, PyTorch
makes more of each record. So between two steps freed memory is given back, and a recording ends
when the next step might leave too little.

Within a step a thread looks. No other thread can stop a profiler than the one that has started it,
and that not inside a backward. So the thread only asks for it, and what trains stops the profiler
where it next gets to: an outermost or repeated module call, or either end of a backward.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import torch

from backspot.formatting import size
from backspot.interrupts import contained
from backspot.live.free_memory import (
    GPU,
    Space,
    device_spaces,
    give_back,
    grown,
    heap,
    ranks_here,
    resident,
    spaces,
)
from backspot.live.sessions import sessions
from backspot.live.torch_internals import autograd, dynamo
from backspot.live.torch_internals.engine import watch_backward
from backspot.live.torch_internals.profiler import recording as is_recording

_LEFT = 10
"""A recording leaves one part of so many free; half of what was free at its begin, if less."""

_OF_PROCESS, _OF_ROOM = 2, 8
"""What was freed is given back when it is one part of so many of the process's memory, or of what
the recording may take. The training has to get its part of it anew, page by page, so that the next
step is slower by a tenth: that is for what would double the process's memory, and no routine."""

_READING, _READING_DETAIL = 8, 14
"""What a record takes when it is read, in times of what it takes before; without and with memory
and shapes. Measured with a million records: 233 and 295 bytes, 1,790 and 3,940."""

_RECORDED_IN_A_SECOND = 150_000_000
"""Bytes of records that a thread can write at most: measured with operators that do nothing."""

_FILLED_IN_A_SECOND = 10_000_000_000
"""Bytes of memory that a process can take at most, about."""

_SHORTEST, _LONGEST = 0.01, 1.0  # between two looks, in seconds
_WHEN_LOW = 0.25


class MemoryWatch:
    """Watches the memory while a profiler records, as a context manager on the profiler's thread.

    Args:
        devices: whose memory is looked at too, between the steps.
        detailed: whether memory or shapes are recorded.
        end: called where the recording can end inside a step, as memory runs low.

    Attributes:
        shortage: why the recording is to end; empty while there is enough.
    """

    def __init__(
        self, devices: Collection[torch.device], *, detailed: bool, end: Callable[[], None]
    ) -> None:
        self.shortage = ""
        self._devices = devices
        self._end = end
        self._reading = _READING_DETAIL if detailed else _READING
        self._reading *= ranks_here()
        self._owner = os.getpid(), threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="backspot memory", daemon=True)
        self._on = threading.Lock()  # released when the thread is to end; no fork hangs on it
        self._begun = 0.0
        self._steps = self._recorded = 0

    def __enter__(self) -> MemoryWatch:
        all_spaces = self._look()
        self._before = self._least = {space.of: space.free for space in all_spaces}
        self._left = {space.of: min(space.total // _LEFT, space.free // 2) for space in all_spaces}
        room = min((space.free - self._left[space.of] for space in all_spaces), default=0)
        self._worth_a_trim = min(resident() // _OF_PROCESS, room // _OF_ROOM)
        self._at_begin = self._kept = self._before_step = heap()
        self._no_backwards = watch_backward(self._at_backward, self._at_backward)
        self._on.acquire()
        try:
            with suppress(RuntimeError):  # no thread is left: memory is looked at between steps
                self._thread.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._no_backwards()
        try:
            if self._on.locked():
                self._on.release()
            if self._thread.is_alive():
                self._thread.join()
        finally:
            if sessions.ending == self._end_here:
                sessions.ending = None

    # On the thread of the training ----------------------------------------------------------------

    def step_begins(self) -> None:
        """Note what is free before a step."""
        self._before = {space.of: space.free for space in self._look()}
        self._least = dict(self._before)
        self._begun = time.monotonic()

    def step_ended(self) -> None:
        """Give back what the step has freed; not within the step's time."""
        self._begun = 0.0
        self._steps += 1
        self._note(self._look())
        now = self._before_step = heap()
        if grown(self._kept, now).freed > self._worth_a_trim:
            give_back()
            self._kept = now
        self._recorded = max(grown(self._at_begin, now).used, 0)

    def has_room(self) -> bool:
        """Return whether another step can be recorded."""
        reading = (self._recorded + self._recorded // max(self._steps, 1)) * self._reading
        for space in self._look() if self._steps else ():
            left = space.free - self._left.get(space.of, 0)
            before = self._before.get(space.of, space.free)
            used = max(before - self._least.get(space.of, before), 0)
            if left < used:
                self._say(f"a step takes {size(used)}, and {_free(space)}")
            elif left < reading and not space.of.startswith(GPU):
                self._say(f"the recording would take {size(reading)} to read, and {_free(space)}")
        return not self.shortage

    def _look(self) -> list[Space]:
        return [*spaces(), *device_spaces(self._devices)]

    def _note(self, all_spaces: list[Space]) -> None:
        for space in all_spaces:
            self._least[space.of] = min(space.free, self._least.get(space.of, space.free))

    def _say(self, shortage: str) -> None:
        self.shortage = self.shortage or f"memory runs low: {shortage}"

    def _end_here(self) -> bool:
        """End the recording, if that is possible here; return whether it was."""
        if self._owner != (os.getpid(), threading.get_ident()) or not _may_stop():
            return False
        sessions.ending = None
        with contained():
            self._end()
        return True

    def _at_backward(self, _: bool) -> None:
        if sessions.ending is not None:
            sessions.ending()

    # On a thread of its own -----------------------------------------------------------------------

    def _watch(self) -> None:
        pause = _SHORTEST
        while not self._on.acquire(timeout=pause):
            if not is_recording():  # an interrupt came before ``__exit__``
                return
            pause = self._pause()

    def _pause(self) -> float:
        """Look once, and return for how long nothing can happen, in seconds."""
        all_spaces = spaces()
        self._note(all_spaces)
        rooms = {space: space.free - self._left.get(space.of, 0) for space in all_spaces}
        tightest = min(rooms, key=rooms.__getitem__, default=None)
        if tightest is None:
            return _LONGEST
        reading = self._records(rooms[tightest] // self._reading) * self._reading
        room = rooms[tightest] - reading
        if room >= 0:
            return min(max(room / _FILLED_IN_A_SECOND, _SHORTEST), _LONGEST)
        if rooms[tightest] < 0:
            self._say(_free(tightest))
        else:
            self._say(f"the recording takes {size(reading)} to read, and {_free(tightest)}")
        sessions.ending = self._end_here
        give_back()  # what can be had at once; the step is no part of the report
        return _WHEN_LOW

    def _records(self, enough: int) -> int:
        """Return how many bytes the records take at most; more exactly if that is not enough."""
        begun = self._begun
        most = int((time.monotonic() - begun) * _RECORDED_IN_A_SECOND) if begun else 0
        if self._recorded + most > enough:
            most = min(most, max(grown(self._before_step, heap()).used, 0))
        return self._recorded + most


def _free(space: Space) -> str:
    return f"{space.of} has {size(space.free)} of {size(space.total)} free"


def _may_stop() -> bool:
    """Return whether a profiler can stop here: PyTorch is in nothing that restores its state."""
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return not (
        autograd.in_backward()
        or autograd.exporting()
        or autograd.innermost_transform() is not None
        or dynamo.compiles_frames()
        or capturing
    )


# Every frame within what PyTorch may compile.
dynamo.keep_from_dynamo(
    MemoryWatch._end_here, MemoryWatch._at_backward, _may_stop, dynamo.compiles_frames
)
