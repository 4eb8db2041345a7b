"""Profiler sessions told apart, so that no range ends in a later session than its own.

Ending or freeing a range while a later session records corrupts the heap: the range writes its end
into an event that went with its session. So a range is ended in its own session, or while no
profiler records, when ending it has no effect; what can be neither is put aside until none does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torch.autograd import profiler

from backspot.live import gates
from backspot.live.lines import book
from backspot.live.optimizers import OptimizerWatch
from backspot.live.owners import Scope

__all__ = ["Sessions", "sessions"]


class Sessions:
    """The process's profiler sessions by number, and the ranges that outlived theirs.

    Attributes:
        number: grows by one whenever a profiler starts, while an instrumentation lives.
        when_stopped: called for each instrumentation at work after a profiler stopped.
    """

    when_stopped: Callable[[Scope], None] | None = None

    def __init__(self) -> None:
        self.number = 0
        self._scopes: list[Scope] = []
        self._aside: list[Any] = []
        self._watches = (
            _Watch("_run_on_profiler_start", self._starting),
            _Watch("_disable_profiler", self._stopping),
            _Watch("_run_on_profiler_stop", self._stopped),
        )
        self._optimizers = OptimizerWatch(self.live_scopes)

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

    def end(self, opened: Any, number: int) -> None:  # noqa: ANN401 - one of two torch classes
        """End a range that was opened in the session of this number, or put it aside."""
        if number == self.number or not gates.recording():
            opened.__exit__(None, None, None)
        else:
            self._aside.append(opened)

    def put_aside(self, opened: Any) -> None:  # noqa: ANN401 - one of two torch classes
        """Keep a range until no profiler records."""
        self._aside.append(opened)

    def dispose(self) -> None:
        """Free what was put aside, if no profiler records, on this thread or another."""
        if self._aside and not gates.recording():
            self._aside.clear()

    def _watch(self) -> None:
        # A session may have begun and ended since the last watch.
        self.number += 1
        self._optimizers.start()
        for watch in self._watches:
            watch.begin()

    def _unwatch(self) -> None:
        self._optimizers.stop()
        if book.is_open:  # lines wait for their trace; its end ends the watch too
            return
        for watch in self._watches:
            watch.end()

    def _starting(self, original: Callable[..., Any]) -> Any:  # noqa: ANN401 - passed through
        self.number += 1
        self.dispose()  # the last moment at which nothing records
        return original()

    def _stopping(self, original: Callable[..., Any]) -> Any:  # noqa: ANN401 - passed through
        form = None
        with suppress(Exception):  # a trace without lines, and nothing worse
            form = book.write()
        results = original()
        if form is not None:
            with suppress(TypeError):  # of what cannot be referred to weakly
                book.keep(results, form)
            if not self.live_scopes():
                self._unwatch()
        return results

    def _stopped(self, original: Callable[[], Any]) -> Any:  # noqa: ANN401 - passed through
        result = original()  # from here on nothing records
        with suppress(Exception):  # a hook too many does no harm
            if self.when_stopped is not None and not gates.recording():
                for scope in self.live_scopes():
                    self.when_stopped(scope)
        return result


class _Watch:
    """A function of PyTorch's profiler that runs within one of ours, for a while."""

    def __init__(self, name: str, around: Callable[[Callable[..., Any]], Any]) -> None:
        self._name = name
        self._around = around
        self._original: Any = None
        self._wrapper: Any = None

    def begin(self) -> None:
        original = getattr(profiler, self._name, None)
        if original is None or self._wrapper is not None:
            return

        def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            return self._around(partial(original, *args, **kwargs))

        self._original, self._wrapper = original, wrapper
        setattr(profiler, self._name, wrapper)

    def end(self) -> None:
        # Someone may have wrapped it since: then it stays, counts on, and is taken up again.
        if getattr(profiler, self._name, None) is self._wrapper is not None:
            setattr(profiler, self._name, self._original)
            self._original = self._wrapper = None


sessions = Sessions()
