"""Each batch that is asked for is noted, with how long it was waited for."""

from __future__ import annotations

import inspect
import multiprocessing.util
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch.utils.data import (  # noqa: E402
    DataLoader,
    Dataset,
    IterableDataset,
    dataloader as module_of_loaders,
)

import backspot  # noqa: E402
from backspot.analysis.accounting.batches import find_batches  # noqa: E402
from backspot.live import loaders  # noqa: E402
from backspot.live.loaders import Fetch  # noqa: E402
from backspot.live.torch_internals.batches import loading_of  # noqa: E402
from backspot.trace import read_events  # noqa: E402
from support import preloaded  # noqa: E402

pytestmark = pytest.mark.posix  # the gates below are inherited by a fork

WITHOUT_HOOKS = True
MAY_REORDER = "in_order" in inspect.signature(DataLoader).parameters
ORDERS = [{}, *([{"in_order": False}] if MAY_REORDER else [])]


class Gated(Dataset[Any]):
    """A batch of one sample each, which can be had when its gate is open."""

    def __init__(self, count: int, closed: tuple[int, ...] = ()) -> None:
        context = multiprocessing.get_context("fork")
        self.gates = [context.Event() for _ in range(count)]
        for number, gate in enumerate(self.gates):
            if number not in closed:
                gate.set()

    def __len__(self) -> int:
        return len(self.gates)

    def __getitem__(self, number: int) -> Any:
        assert self.gates[number].wait(60)
        return torch.tensor(number)

    def open_soon(self, number: int) -> None:
        """Open a gate when this thread has had time to come to wait for it."""
        threading.Timer(0.3, self.gates[number].set).start()


class Streamed(IterableDataset[Any]):
    """Of which each worker streams another number of samples."""

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        return iter(torch.arange(3 if worker is None or worker.id else 1))


@pytest.fixture
def fetches() -> Iterator[list[Fetch]]:
    noted: list[Fetch] = []
    end = loaders.watch(noted.append)
    yield noted
    end()


def with_workers(data: Any, workers: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        data, batch_size=1, num_workers=workers, multiprocessing_context="fork", **options
    )


def until_arrived(batches: Any) -> None:
    assert batches._worker_result_queue._reader.poll(60)


@pytest.mark.parametrize("options", [*ORDERS, {"persistent_workers": True}])
def test_a_batch_that_has_arrived_is_ready_and_another_is_waited_for(
    fetches: list[Fetch], options: dict[str, Any]
) -> None:
    data = Gated(4, closed=(1,))
    batches = iter(with_workers(data, **options))
    until_arrived(batches)
    next(batches)
    data.open_soon(1)
    next(batches)
    ready, late = fetches
    assert (ready.ready, ready.waited_ns) == (True, 0)
    assert late.ready is False
    assert 0 < late.waited_ns <= late.end_ns - late.begin_ns
    assert {(one.workers, one.queue, one.epoch) for one in fetches} == {(1, 2, 4)}


@pytest.mark.parametrize("options", ORDERS)
def test_batches_that_overtake_others_are_handed_out_alike(
    fetches: list[Fetch], options: dict[str, Any]
) -> None:
    data = Gated(6, closed=(0,))
    batches = iter(with_workers(data, workers=2, **options))
    until_arrived(batches)
    data.open_soon(0)
    got = [int(batch) for batch in batches]
    assert got == list(range(6)) if not options else sorted(got) == list(range(6))
    assert len(fetches) == 6
    # In order, the first is waited for although another is there.
    assert fetches[0].ready is bool(options)


def test_a_loader_is_the_same_in_each_epoch_and_others_are_others(fetches: list[Fetch]) -> None:
    first, second = with_workers(Gated(2), persistent_workers=True), DataLoader(Gated(2))
    for loader in (first, second, first):
        list(loader)
    one, *others = (fetches[at : at + 2] for at in (0, 2, 4))
    assert {fetch.loader for fetch in one} == {fetch.loader for fetch in others[1]}
    assert {fetch.loader for fetch in one}.isdisjoint({fetch.loader for fetch in others[0]})
    assert len({fetch.loader for fetch in fetches}) == 2


def test_the_epoch_of_a_stream_is_known_when_one_has_ended(fetches: list[Fetch]) -> None:
    loader = with_workers(Streamed(), workers=2)
    assert sorted(int(batch) for batch in loader) == [0, 0, 1, 2]
    assert [fetch.epoch for fetch in fetches] == [None] * 4
    list(loader)
    assert [fetch.epoch for fetch in fetches[4:]] == [4] * 4


def test_without_workers_nobody_knows_whether_a_batch_was_ready(fetches: list[Fetch]) -> None:
    list(DataLoader(Gated(3)))
    assert [(fetch.ready, fetch.workers, fetch.queue) for fetch in fetches] == [(None, 0, 0)] * 3
    assert all(fetch.waited_ns == fetch.end_ns - fetch.begin_ns > 0 for fetch in fetches)


def test_a_sampler_of_the_program_is_not_asked_for_its_length(fetches: list[Fetch]) -> None:
    class Sampler:
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0], [1])

        def __len__(self) -> int:
            raise AssertionError("asked")

    loader = DataLoader(Gated(2), batch_sampler=Sampler())
    for _ in loader:
        pass
    assert [fetch.epoch for fetch in fetches] == [None, None]
    next(iter(loader))
    assert fetches[-1].epoch == 2


def test_other_iterators_are_noted_by_their_time_alone(fetches: list[Fetch]) -> None:
    assert loaders.fetch(iter([1, 2])) == 1
    (noted,) = fetches
    assert (noted.ready, noted.workers, noted.epoch) == (None, 0, None)


def test_what_an_iterator_asks_a_loader_for_is_noted_once(fetches: list[Fetch]) -> None:
    batches = (batch for batch in with_workers(Gated(3)))
    for _ in range(3):
        loaders.fetch(batches)
    assert [fetch.workers for fetch in fetches] == [1, 1, 1]


def test_the_loader_of_the_last_batch_is_known_as_long_as_it_is_in_use() -> None:
    stop = loaders.watch(lambda _: None)
    try:
        batches = iter(DataLoader(range(9), batch_size=3, num_workers=1))
        other = iter(DataLoader(range(8), batch_size=2, shuffle=True))
        next(batches)
        next(other)
        assert loaders.newest() is other
        next(batches)
        assert loaders.newest() is batches
        found = loading_of(batches)
        assert found is not None
        assert (found.batch_size, found.workers, found.prefetched) == (3, 1, 2)
        del batches, found
        assert loaders.newest("nothing") == "nothing"
    finally:
        stop()
    next(other)
    assert loaders.newest() is None


def test_how_batches_are_loaded_is_the_same_of_a_loader_and_of_its_iterator() -> None:
    loader = DataLoader(range(8), batch_size=2, shuffle=True, collate_fn=list)
    found = loading_of(loader)
    assert found == loading_of(iter(loader))
    assert found is not None
    assert found.collate is list
    alone = loading_of(DataLoader(range(8), batch_size=None))
    assert alone is not None
    assert (alone.sampler, alone.batch_size) == (None, 0)
    assert loading_of([1, 2]) is None


def test_each_thread_has_its_own_fetches() -> None:
    noted: list[tuple[int, int]] = []
    end = loaders.watch(lambda fetch: noted.append((threading.get_ident(), fetch.loader)))
    threads = [threading.Thread(target=list, args=(with_workers(Gated(3)),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end()
    assert len(noted) == 6
    assert len(set(noted)) == len({loader for _, loader in noted}) == 2


def test_several_watch_at_once_and_nothing_is_left() -> None:
    classes = (
        module_of_loaders._BaseDataLoaderIter,
        module_of_loaders._MultiProcessingDataLoaderIter,
    )
    before = [dict(vars(each)) for each in classes]
    first: list[Fetch] = []
    second: list[Fetch] = []
    ends = [loaders.watch(first.append), loaders.watch(second.append)]
    batches = iter(with_workers(Gated(4)))
    own = dict(vars(batches._data_queue))
    next(batches)
    ends[0]()
    ends[0]()
    next(batches)
    ends[1]()
    next(batches)
    assert (len(first), len(second)) == (1, 2)
    assert [dict(vars(each)) for each in classes] == before
    assert vars(batches._data_queue).keys() == own.keys()
    assert batches._data_queue._poll == own["_poll"]


def test_how_long_a_loader_takes_to_begin_and_to_end_an_epoch_is_noted_and_nothing_is_left() -> (
    None
):
    before = dict(vars(DataLoader))
    first: list[int] = []
    second: list[int] = []
    ends = [
        loaders.watch(lambda _: None, lambda _, took, into=noted: into.append(took))
        for noted in (first, second)
    ]
    loader = with_workers(Gated(2))
    assert len(list(loader)) == 2
    ends[0]()
    ends[0]()
    assert len(list(loader)) == 2
    ends[1]()
    list(loader)
    assert (len(first), len(second)) == (2, 4)
    assert all(took > 0 for took in second)
    assert dict(vars(DataLoader)) == before


def test_waiting_for_workers_that_end_late_is_time_of_the_epochs_end() -> None:
    def linger(_: int) -> None:
        multiprocessing.util.Finalize(None, time.sleep, (0.2,), exitpriority=1)

    noted: list[int] = []
    end = loaders.watch(lambda _: None, lambda _, took: noted.append(took))
    list(with_workers(Gated(2), worker_init_fn=linger))
    end()
    _, ended = noted
    assert ended > 0.2e9


def test_the_end_of_another_iterator_is_noted_too() -> None:
    noted: list[int] = []
    end = loaders.watch(lambda _: None, lambda _, took: noted.append(took))
    batches = iter([1])
    loaders.fetch(batches)
    with pytest.raises(StopIteration):
        loaders.fetch(batches)
    end()
    assert len(noted) == 1


def test_a_loader_that_another_one_fetches_from_begins_and_ends_within_its_time() -> None:
    class Nested(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> Any:
            return next(iter(DataLoader(Gated(1))))

    noted: list[int] = []
    end = loaders.watch(lambda _: None, lambda _, took: noted.append(took))
    assert len(list(DataLoader(Nested()))) == 3
    end()
    assert len(noted) == 2


def test_a_loader_inside_of_a_worker_is_not_the_programs(tmp_path: Path) -> None:
    class Nested(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, number: int) -> Any:
            return next(iter(DataLoader(Gated(1))))

    log = tmp_path / "processes"

    def note(_: Fetch) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")

    end = loaders.watch(note)
    list(with_workers(Nested()))
    end()
    assert log.read_text().split() == [str(os.getpid())] * 2


FAILS = """
import os, re, sys, time, torch
from torch.utils.data import DataLoader, Dataset
class Fails(Dataset):
    def __len__(self): return 8
    def __getitem__(self, number):
        if number == 3 and sys.argv[1] == "dies":
            time.sleep(1)  # until the program waits
            os._exit(3)
        if number == 3 and sys.argv[1] == "raises": raise KeyError(number)
        if number == 3 and sys.argv[1] == "sleeps": time.sleep(60)
        return number
if __name__ == "__main__":
    if sys.argv[2] == "watched":
        from backspot.live import loaders
        loaders.watch(lambda fetch: None)
    # How long PyTorch waits for the end of a worker that sleeps.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2
    timeout = 1 if sys.argv[1] == "sleeps" else 0
    got = []
    try:
        for batch in DataLoader(Fails(), num_workers=1, timeout=timeout, collate_fn=list):
            got += batch
    except Exception as error:
        print(got, type(error), error.args, repr(error.__cause__))
"""


@pytest.mark.parametrize("way", ["dies", "raises", "sleeps"])
def test_a_loader_that_fails_fails_as_without_a_watch(way: str, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)

    both = [
        subprocess.Popen([*preloaded.python(), script, way, how], stdout=subprocess.PIPE, text=True)
        for how in ("plain", "watched")
    ]
    plain, watched = (
        re.sub(r"pid(\(s\))? \d+", "pid", run.communicate(timeout=120)[0]) for run in both
    )
    assert "Error" in plain
    assert watched == plain
    assert [run.returncode for run in both] == [0, 0]


def test_batches_that_a_thread_pins_are_waited_for_in_its_queue(
    fetches: list[Fetch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an accelerator nothing is pinned, so a queue of this process stands in for it."""
    batches = iter(with_workers(Gated(2)))
    pinned: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(batches, "_data_queue", pinned)
    pinned.put((0, torch.tensor(7)))
    assert int(next(batches)) == 7
    threading.Timer(0.3, pinned.put, [(1, torch.tensor(8))]).start()
    assert int(next(batches)) == 8
    assert [fetch.ready for fetch in fetches] == [True, False]
    assert fetches[0].waited_ns == 0 < fetches[1].waited_ns


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell that starts the tests in its background has them ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible", "workers_end_soon")
def test_a_wait_that_is_interrupted_can_go_on(fetches: list[Fetch]) -> None:
    data = Gated(2, closed=(0,))
    batches = iter(with_workers(data))
    waiting = threading.main_thread().ident  # a signal to another thread would not wake it
    interrupt = threading.Timer(0.3, signal.pthread_kill, (waiting, signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    interrupt.join()
    data.gates[0].set()
    assert [int(batch) for batch in batches] == [0, 1]
    assert len(fetches) == 2


def test_a_recording_of_an_instrumented_model_has_a_mark_behind_each_fetch(tmp_path: Path) -> None:
    data = Gated(3, closed=(1,))
    batches = iter(with_workers(data))
    with (
        backspot.instrument(torch.nn.Linear(1, 1)),
        profile(activities=[ProfilerActivity.CPU]) as profiler,
    ):
        until_arrived(batches)
        next(batches)
        data.open_soon(1)
        next(batches)
    next(batches)
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    noted = find_batches(read_events(path))
    assert noted.waited[0] == 0
    assert 0 < noted.waited[1] <= noted.end[1] - noted.start[1]
    assert (noted.workers.tolist(), noted.queue.tolist()) == ([1, 1], [2, 2])


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, number: int) -> Any:
        time.sleep(0.01)
        return torch.ones(8)


def test_a_training_that_waits_for_workers_is_limited_by_data() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    loader = DataLoader(Slow(), batch_size=4, num_workers=1, multiprocessing_context="fork")
    report = backspot.profile(step, model, data=loader, steps=6, warmup=4, trials="none")
    (waiting,) = (one for one in report.findings if one.rule == "waiting-for-data")
    assert "Data limits the step: the workers deliver " in waiting.seen
    assert "use more than these 1 workers" not in waiting.remedy
    # What a step waits is what it takes less without, whatever the number of recorded steps.
    assert waiting.saves is not None
    assert waiting.saves.ns > 0.7 * waiting.wall_ns
    # A faster module waits for longer.
    assert all(row.saves is None or row.saves.ns < 0.2 * waiting.saves.ns for row in report.modules)
