"""Every batch that the program asks a ``DataLoader`` for, and whether it was ready.

Worker processes load ahead. A batch was ready if it had arrived when it was asked for, however long
unpickling took then; else the program waited until it came.
"""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import msgspec

from backspot.live.torch_internals import batches as internals, profiler
from backspot.live.torch_internals.lookup import Wrapping
from backspot.trace.names import batch_mark


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """One batch that was asked for.

    Attributes:
        loader: tells loaders apart within the process.
        begin_ns: when it was asked for, as ``time.perf_counter_ns`` says.
        end_ns: when it was there.
        waited_ns: nanoseconds until the batch had arrived: 0 if it was ready. The whole time where
            no workers load it, and where ``ready`` is unknown.
        ready: whether it had arrived when it was asked for; ``None`` where that cannot be known:
            without workers, and with iterators other than those of ``DataLoader``.
        workers: how many processes load.
        queue: how many batches these keep ready at most; 0 without workers.
        epoch: how many batches an epoch has; ``None`` if unknown.
        place: its number in the epoch, from 1; 0 if unknown.
    """

    loader: int
    begin_ns: int
    end_ns: int
    waited_ns: int
    ready: bool | None
    workers: int
    queue: int
    epoch: int | None
    place: int = 0

    @property
    def is_within_epoch(self) -> bool:
        """Whether the workers had time to get ahead since the epoch began, as all begin with it."""
        return self.place > 2 * self.queue


def watch(
    note: Callable[[Fetch], None], turned: Callable[[int, int], None] = lambda *_: None
) -> Callable[[], None]:
    """Have each batch noted that any thread of this process asks a ``DataLoader`` for.

    Args:
        note: called on the thread that asked, before it gets its batch. It must not raise.
        turned: called likewise where a loader begins or ends an epoch, as it starts its workers or
            waits until they have ended, with the loader and how many nanoseconds that took.

    Returns:
        What ends it. It can be called again.
    """
    global _watchers
    _forgotten_by_copies()
    entry = note, turned  # of its own, so that the same functions can watch twice
    _watchers = (*_watchers, entry)
    for wrapping in _WRAPPINGS:
        wrapping.begin()

    def end() -> None:
        global _watchers
        _watchers = tuple(other for other in _watchers if other is not entry)
        if not _watchers:
            for wrapping in _WRAPPINGS:
                wrapping.end()
            _known.clear()
            _loaders.clear()
            _noted_at.clear()
            _newest.clear()

    return end


def mark_batches() -> Callable[[], None]:
    """Have a mark written into the trace behind each fetch of a batch, while a profiler records.

    Returns:
        What ends it.
    """

    def mark(fetch: Fetch) -> None:
        if fetch.ready is not None and profiler.recording():
            profiler.emit(batch_mark(fetch.loader, fetch.workers, fetch.queue, fetch.waited_ns))

    return watch(mark)


@functools.cache
def _forgotten_by_copies() -> None:
    """Have copies of this process, such as workers, begin without its watchers."""

    def forget() -> None:
        global _watchers
        _watchers = ()
        _waiting.clear()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)


def fetch(batches: Iterator[Any]) -> Any:
    """Return the next batch of any iterator; watchers note it.

    What the iterator itself asks a ``DataLoader`` for on this thread is noted in its place.
    """
    if not _watchers or internals.is_of_loader(batches):
        return next(batches)
    begin = perf_counter_ns()
    try:
        batch = next(batches)
    except StopIteration:
        if _noted_at.get(get_ident(), 0) < begin:
            _tell_of_turn(_about(batches), perf_counter_ns() - begin)
        raise
    thread = get_ident()
    if _noted_at.get(thread, 0) < begin:
        _tell(_about(batches), thread, begin, perf_counter_ns(), None)
    return batch


def newest(otherwise: Any = None) -> Any:
    """Return the iterator of the loader that this thread got its last batch from.

    Args:
        otherwise: what to return where nobody watches, and where that iterator is gone.
    """
    _, reference = _known.get(_newest.get(get_ident(), 0), (None, None))
    batches = None if reference is None else reference()
    return otherwise if batches is None else batches  # not by its truth, which asks for its length


# What is known ------------------------------------------------------------------------------------


class _Loader(msgspec.Struct):
    """What is known of a loader."""

    number: int
    epoch: int | None


class _Batches(msgspec.Struct):
    """What is known of an iterator."""

    loader: _Loader
    workers: int
    queue: int
    is_timed: bool


_watchers: tuple[tuple[Callable[[Fetch], None], Callable[[int, int], None]], ...] = ()
_numbers = itertools.count(1)

_waiting: dict[int, int] = {}
"""For each thread that fetches a batch, how many nanoseconds it has waited for the workers."""
_noted_at: dict[int, int] = {}
"""For each thread, when it got the last batch that was noted."""
_newest: dict[int, int] = {}
"""For each thread, the ``id`` of the iterator of a loader that it got its last batch from."""
_known: dict[int, tuple[_Batches, Any]] = {}
"""Iterators by ``id``, each with a reference that removes it."""
_loaders: dict[int, tuple[_Loader, Any]] = {}
"""Loaders by the ``id`` of what chooses their samples: an iterator does not know its loader."""


def _about(batches: Any) -> _Batches:
    key = id(batches)
    if (entry := _known.get(key)) is None:
        about = _Batches(
            _loader_of(batches),
            internals.workers_of(batches),
            internals.prefetched_by(batches),
            internals.is_timed(batches),
        )
        entry = _known[key] = about, _removing(batches, _known)
    return entry[0]


def _loader_of(batches: Any) -> _Loader:
    """Return the loader of an iterator, the same for each epoch."""
    sampler = internals.sampler_of(batches)
    if sampler is None:
        return _Loader(next(_numbers), None)
    key = id(sampler)
    if (entry := _loaders.get(key)) is None:
        loader = _Loader(next(_numbers), internals.length_of(sampler))
        entry = _loaders[key] = loader, _removing(sampler, _loaders)
    return entry[0]


def _removing(key: Any, table: dict[int, Any]) -> Any:
    """Return a reference that takes an object out of what is known when it is gone.

    Some, such as lists, cannot have one: another object can have the same ``id`` later, and passes
    for it.
    """
    number = id(key)
    try:
        return weakref.ref(key, lambda _: table.pop(number, None))
    except TypeError:
        return None


# What is noted ------------------------------------------------------------------------------------


def _tell(
    about: _Batches, thread: int, begin: int, end: int, waited: int | None, place: int = 0
) -> None:
    """Tell the watchers of a batch.

    Args:
        waited: nanoseconds; ``None`` if it is unknown whether the batch was ready.
        place: as in ``Fetch``.
    """
    loader = about.loader
    noted = Fetch(
        loader.number,
        begin,
        end,
        end - begin if waited is None else waited,
        None if waited is None else not waited,
        about.workers,
        about.queue,
        loader.epoch,
        place,
    )
    _noted_at[thread] = end
    for note, _ in _watchers:
        note(noted)


def _tell_of_turn(about: _Batches, took: int) -> None:
    """Tell the watchers that a loader has begun or ended an epoch."""
    for _, turned in _watchers:
        turned(about.loader.number, took)


def _next_noted(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap what returns the next batch. It runs in each step of a training."""

    def noted(batches: Any) -> Any:
        thread = get_ident()
        if not _watchers or thread in _waiting:  # of several within one another, the outermost
            return original(batches)
        about = entry[0] if (entry := _known.get(id(batches))) else _about(batches)
        begin = perf_counter_ns()
        try:
            _waiting[thread] = 0
            batch = original(batches)
        except StopIteration:
            about.loader.epoch = internals.handed_out_by(batches)
            _noted_at[thread] = perf_counter_ns()
            _tell_of_turn(about, _noted_at[thread] - begin)
            raise
        finally:
            waited = _waiting.pop(thread, 0)
        _newest[thread] = id(batches)
        end, place = perf_counter_ns(), internals.handed_out_by(batches) or 0
        _tell(about, thread, begin, end, waited if about.is_timed else None, place)
        return batch

    return noted


def _take_timed(original: Callable[..., Any]) -> Callable[..., Any]:
    def timed(batches: Any, *args: Any) -> Any:
        thread = get_ident()
        if thread not in _waiting:
            return original(batches, *args)

        def waited(nanoseconds: int) -> None:
            _waiting[thread] += nanoseconds

        return internals.take_timed(original, batches, args, perf_counter_ns, waited)

    return timed


def _begin_timed(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def timed(loader: Any) -> Any:
        # A loader that another one fetches from begins within that one's time.
        if not _watchers or get_ident() in _waiting:
            return original(loader)
        begin = perf_counter_ns()
        batches = original(loader)
        took = perf_counter_ns() - begin
        _tell_of_turn(_about(batches), took)
        return batches

    return timed


_WRAPPINGS = (
    Wrapping(internals.BEGIN_EPOCH, _begin_timed),
    Wrapping(internals.NEXT_BATCH, _next_noted),
    Wrapping(internals.TAKE_BATCH, _take_timed),
)
