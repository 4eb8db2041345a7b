"""How PyTorch's ``DataLoader`` hands out batches, and when those of worker processes arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from backspot.live.torch_internals.lookup import Location, find

# PyTorch imports the module itself. Without it no batch is noticed.
_base = find("utils", "data", "dataloader", "_BaseDataLoaderIter")
_with_workers = find("utils", "data", "dataloader", "_MultiProcessingDataLoaderIter")

# Without it, how batches are loaded is known from their iterator alone.
_DataLoader: Any = find("utils", "data", "DataLoader")

_BatchSampler: Any = find("utils", "data", "BatchSampler") or ()

# The method of a ``DataLoader`` that begins an epoch: it starts the workers, or has them go on.
# Without it this time is not known as the loader's.
BEGIN_EPOCH = Location(find("utils", "data", "DataLoader"), "__iter__")

# The method of all iterators of a ``DataLoader`` that returns the next batch.
NEXT_BATCH = Location(_base, "__next__")

# What an iterator with workers calls to take one batch from the queue: several times for one that
# other batches overtake, and not at all for one that has overtaken another. Without it nobody knows
# whether a batch was ready.
TAKE_BATCH = Location(_with_workers, "_try_get_data")


def is_of_loader(batches: object) -> bool:
    """Return whether ``NEXT_BATCH`` returns the batches of this iterator."""
    return _base is not None and isinstance(batches, _base)


def is_timed(batches: object) -> bool:
    """Return whether this iterator takes its batches by ``TAKE_BATCH``."""
    return TAKE_BATCH.exists() and isinstance(batches, _with_workers)


def take_timed(
    take: Callable[..., Any],
    batches: Any,
    args: tuple[Any, ...],
    clock: Callable[[], int],
    waited: Callable[[int], None],
) -> Any:
    """Take a batch from the queue, and hand on for how many nanoseconds the queue was empty.

    The wait for the queue of the workers is timed inside of its ``get``, which unpickles the batch
    afterwards: so it fails as it would by itself when a worker dies or Ctrl-C is pressed meanwhile.
    Where the batches are pinned, a thread of this process has unpickled them.
    """
    queue = batches._data_queue
    poll = getattr(queue, "_poll", None)
    if poll is None:
        if not queue.empty():
            return take(batches, *args)
        begin = clock()
        try:
            return take(batches, *args)
        finally:
            waited(clock() - begin)

    def timed(timeout: float = 0.0) -> bool:
        if poll(0.0):
            return True
        begin = clock()
        try:
            return bool(poll(timeout))
        finally:
            waited(clock() - begin)

    queue._poll = timed
    try:
        return take(batches, *args)
    finally:
        queue._poll = poll


def workers_of(batches: Any) -> int:
    """Return how many processes load the batches of a ``DataLoader``'s iterator."""
    return int(getattr(batches, "_num_workers", 0))


def prefetched_by(batches: Any) -> int:
    """Return how many batches the workers keep ready at most."""
    return workers_of(batches) * int(getattr(batches, "_prefetch_factor", 0) or 0)


class Loading(NamedTuple):
    """How batches are loaded.

    Attributes:
        dataset: where samples come from.
        sampler: what chooses the samples of each batch; ``None`` where each sample is a batch.
        collate: makes a batch of samples.
        begin_worker: what a worker process calls first, or ``None``.
        workers: how many processes load.
        prefetched: how many batches each of them keeps ready.
        is_pinned: whether batches are put into pinned memory.
    """

    dataset: Any
    sampler: Any
    collate: Any
    begin_worker: Any
    workers: int
    prefetched: int
    is_pinned: bool

    @property
    def batch_size(self) -> int:
        """Samples in a batch; 0 where that is not known."""
        return getattr(self.sampler, "batch_size", None) or 0


def loading_of(loader: Any) -> Loading | None:
    """Return how a ``DataLoader`` or its iterator loads; ``None`` of anything else.

    An iterator does not know its loader, and may outlive it.
    """
    is_iterator = is_of_loader(loader)
    if not is_iterator and not isinstance(loader, _DataLoader or ()):
        return None

    def of(name: str) -> Any:
        return getattr(loader, f"_{name}" if is_iterator else name, None)

    return Loading(
        of("dataset"),
        getattr(loader, "_index_sampler", None) if loader._auto_collation else None,
        of("collate_fn"),
        of("worker_init_fn"),
        of("num_workers") or 0,
        of("prefetch_factor") or 2,
        bool(of("pin_memory")),
    )


def sampler_of(batches: Any) -> Any:
    """Return what chooses the samples of each batch: the same object in each epoch."""
    return getattr(batches, "_index_sampler", None)


def handed_out_by(batches: Any) -> int | None:
    """Return how many batches were handed out in this epoch; ``None`` if unknown."""
    return getattr(batches, "_num_yielded", None)


def length_of(sampler: Any) -> int | None:
    """Return how many batches a sampler has, ``None`` if that would run others' samplers.

    They could take long, or draw random numbers.
    """
    inner = sampler.sampler if isinstance(sampler, _BatchSampler) else sampler
    if not (isinstance(inner, (list, tuple, range)) or type(inner).__module__.startswith("torch.")):
        return None
    try:
        return len(sampler)
    except Exception:  # of endless datasets
        return None
