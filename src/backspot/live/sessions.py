"""Profiler sessions told apart, so that no range ends in a later session than its own.

Ending or freeing a range while a later session records corrupts the heap: the range writes its end
into an event that went with its session. So a range is ended in its own session, or put aside and
freed while no profiler records. ``docs/how-it-works.md`` argues why no interrupt gets around this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from torch.autograd import profiler

from backspot.live import torch_internals
from backspot.live.optimizers import OptimizerWatch
from backspot.live.owner import Scope
from backspot.live.source_lines import book

__all__ = ["Holder", "Sessions", "sessions"]


class Holder(Protocol):
    """What holds a range. Python frames hold the holder and never the range itself.

    A traceback keeps the frames of an interrupt alive, for as long as somebody keeps the exception.
    The range can be taken out of the holder all the same.
    """

    opened: Any


class Sessions:
    """The process's profiler sessions by number, and the ranges that outlived theirs.

    Attributes:
        number: changes whenever a profiler starts or stops, while an instrumentation lives. A range
            that was opened under this number can be ended.
        when_stopped: called for each instrumentation at work after a profiler stopped.
    """

    when_stopped: Callable[[Scope], None] | None = None

    def __init__(self) -> None:
        self.number = 0
        self._scopes: list[Scope] = []
        self._aside: list[Holder] = []
        self._watches = (
            _Watch("_run_on_profiler_start", self._starting),
            _Watch("_disable_profiler", self._stopping),
            _Watch("_run_on_profiler_stop", self._stopped),
        )
        self._optimizers = OptimizerWatch(self.live_scopes)
        self._stack_room = _StackRoom()

    def live_scopes(self) -> list[Scope]:
        """The instrumentations at work: not removed, and their model not gone."""
        self._scopes = [
            scope for scope in self._scopes if scope.active and scope.model() is not None
        ]
        return self._scopes

    def join(self, scope: Scope) -> None:
        """Watch the profiler for this instrumentation too."""
        if not self.live_scopes():
            self._watch()
        self._scopes.append(scope)
        self.dispose()

    def depart(self, scope: Scope) -> None:
        """This instrumentation was removed; with the last one the watch ends."""
        scope.active = False
        if not self.live_scopes():
            self._unwatch()
        self.dispose()

    def end(self, holder: Holder, number: int) -> None:
        """End a range that was opened under this number, or put it aside."""
        if number == self.number:
            # After an interrupt it may have ended already, or never have begun.
            with suppress(Exception):
                holder.opened.__exit__(None, None, None)
        else:
            self.put_aside(holder)

    def put_aside(self, holder: Holder) -> None:
        """Keep a range until no profiler records."""
        self._aside.append(holder)
        self.dispose()

    def dispose(self) -> None:
        """Free what was put aside, while no profiler records, on this thread or another."""
        while self._aside and not torch_internals.recording():
            self._aside[-1].opened = None
            self._aside.pop()

    def _watch(self) -> None:
        # A session may have begun and ended since the last watch.
        self.number += 1
        self._optimizers.start()
        for watch in self._watches:
            watch.begin()
        self._stack_room.give()

    def _unwatch(self) -> None:
        self.number += 1  # from here on nobody counts
        self._stack_room.take()
        self._optimizers.stop()
        if book.is_open:  # lines wait for their trace; its end ends the watch too
            return
        for watch in self._watches:
            watch.end()

    def _starting(self, original: Callable[..., Any]) -> Any:
        self.number += 1
        self.dispose()  # the last moment at which nothing records
        return original()

    def _stopping(self, original: Callable[..., Any]) -> Any:
        form = None
        with suppress(Exception):  # a trace without lines, and nothing worse
            form = book.write()
        self.number += 1  # before the session ends: what is still open no longer ends in it
        results = original()
        if form is not None:
            with suppress(TypeError):  # of what cannot be referred to weakly
                book.keep(results, form)
            if not self.live_scopes():
                self._unwatch()
        return results

    def _stopped(self, original: Callable[[], Any]) -> Any:
        result = original()  # from here on nothing records
        with suppress(Exception):  # a hook too many does no harm
            if self.when_stopped is not None and not torch_internals.recording():
                for scope in self.live_scopes():
                    self.when_stopped(scope)
            self.dispose()
        return result


class _Watch:
    """A function of PyTorch's profiler that runs within one of ours, for a while."""

    def __init__(self, name: str, around: Callable[[Callable[..., Any]], Any]) -> None:
        self._name = name
        self._around = around
        self._original: Any = None
        self._wrapper: Any = None
        self._installed = False

    def begin(self) -> None:
        """Install the wrapper. An interrupt in here or in ``end`` leaves nothing half done."""
        current = getattr(profiler, self._name, None)
        if current is None or self._installed:
            return
        if current is not self._wrapper:

            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return self._around(partial(current, *args, **kwargs))

            self._original, self._wrapper = current, wrapper
            setattr(profiler, self._name, wrapper)
        self._installed = True

    def end(self) -> None:
        """Take the wrapper off, unless someone has wrapped it since: then it stays and counts."""
        if getattr(profiler, self._name, None) is self._wrapper is not None:
            self._installed = False
            setattr(profiler, self._name, self._original)
            self._original = self._wrapper = None


class _StackRoom:
    """A higher recursion limit while a model is instrumented.

    PyTorch calls a module that has a hook through one frame more, so that a model as deep as
    Python's limit allows would fail because it is instrumented.
    """

    _HOOKS = 64  # frames that a hook may need at the very bottom

    def __init__(self) -> None:
        self._given: tuple[int, int] | None = None

    def give(self) -> None:
        if self._given is None:
            limit = sys.getrecursionlimit()
            # A call takes three frames of Python at least: one more is a third.
            self._given = (limit, limit + limit // 2 + self._HOOKS)
            sys.setrecursionlimit(self._given[1])

    def take(self) -> None:
        if self._given is not None:
            before, given = self._given
            if sys.getrecursionlimit() == given:  # else somebody has set another one
                with suppress(RecursionError):  # the stack is deeper than that right now
                    sys.setrecursionlimit(before)
            self._given = None


sessions = Sessions()
