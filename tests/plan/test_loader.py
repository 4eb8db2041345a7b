"""Other numbers of workers are tried within what the machine has free, each by itself."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, SequentialSampler, default_collate

from backspot.live.plan import loader as loader_trial
from backspot.live.plan.loader import Batch, most_workers, workers
from backspot.live.plan.pace import limit_of
from backspot.live.plan.room import room_on
from backspot.live.torch_internals.batches import Loading
from backspot.live.trials.twins import Refused
from backspot.results.trials import Variant

fcntl = pytest.importorskip("fcntl")  # Windows has none, nor the next one
resource = pytest.importorskip("resource")

MS = 1_000_000
STEP = 20 * MS

pytestmark = pytest.mark.posix


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(loader_trial, "cores", lambda: 2)


class Samples(Dataset):
    """Does something to the process of two workers, and takes a while for each sample."""

    def __init__(self, samples=400, of_two=None):
        self.samples, self.of_two = samples, of_two

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        worker = torch.utils.data.get_worker_info()
        if self.of_two and worker and worker.num_workers == 2:
            self.of_two()
        time.sleep(0.002)
        return torch.zeros(8)


def loading(data, now=0, batch=4, collate=default_collate):
    sampler = BatchSampler(SequentialSampler(data), batch, drop_last=True)
    return Loading(data, sampler, collate, None, now, 2, False)


def tried(data, seconds=2.0, **more) -> dict[str, Variant]:
    trial = workers(loading(data, **more), STEP, 5 * MS, seconds).tried
    return {variant.name: variant for variant in trial.variants}


def test_no_more_workers_are_tried_than_fit_into_memory():
    a_tenth = room_on(torch.device("cpu")) / 10
    assert most_workers(Batch(MS, a_tenth, 1), 1.0, 2) <= 2
    assert most_workers(Batch(MS, 1000, 1), 1.0, 2) > most_workers(Batch(MS, a_tenth, 1), 1.0, 2)
    assert most_workers(Batch(MS, a_tenth, 1), 0.1, 2) > most_workers(Batch(MS, a_tenth, 1), 1.0, 2)


def test_no_more_workers_are_tried_than_there_are_descriptors_for():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        pytest.skip("descriptors have no limit")
    assert most_workers(Batch(MS, 1000, limit / 10), 1.0, 2) <= 2


def test_workers_whose_batches_do_not_fit_are_not_started():
    most = int(0.6 * room_on(torch.device("cpu")))

    def untouched(_):
        if torch.utils.data.get_worker_info():
            os.kill(os.getppid(), signal.SIGKILL)  # else they would take the memory
        return torch.empty(most, dtype=torch.uint8)

    with pytest.raises(Refused, match="do not fit"):
        workers(loading(Samples(), collate=untouched), STEP, 5 * MS, 2.0)


def killed():
    os.kill(os.getpid(), signal.SIGBUS)


def refused():
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize("error", [killed, refused])
def test_a_number_of_workers_that_fails_leaves_the_others(error):
    found = tried(Samples(of_two=error), seconds=20.0)  # it takes two, and more on a busy machine
    assert found["num_workers=2"].verdict == "fails"
    assert found["num_workers=2"].note
    assert found["num_workers=0"].ns
    assert found["num_workers=1"].ns


@pytest.mark.slow
def test_a_block_that_never_ends_leaves_what_was_measured_before():
    found = tried(Samples(of_two=lambda: time.sleep(60)), seconds=1.0)
    assert found["num_workers=0"].ns
    assert found["num_workers=2"].verdict == "undecided"
    assert found["num_workers=2"].note == "no time was left"


def test_an_epoch_of_few_batches_is_gone_through_again():
    found = tried(Samples(12), now=2)
    assert found["num_workers=2"].ns
    assert found["num_workers=1"].ns


def test_an_epoch_without_a_batch_is_named():
    with pytest.raises(Refused, match=r"^an epoch has no batch$"):
        tried(Samples(2))


class OfOneDisk(Samples):
    """Reads a sample at a time, whatever the number of workers."""

    def __init__(self, lock):
        super().__init__()
        self.lock = lock
        lock.touch()

    def __getitem__(self, index):
        with self.lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return super().__getitem__(index)


def test_workers_that_wait_for_one_disk_are_late_for_a_faster_step_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(loader_trial, "_compute", lambda ns: time.sleep(ns / 1e9))  # on no core
    data, slow, fast = OfOneDisk(tmp_path / "lock"), 16 * MS, MS  # a batch takes 8 ms
    waits = workers(loading(data, now=2), STEP, slow, 4.0, [fast]).waits
    assert waits[fast] >= 6 * MS
    assert waits[slow] < waits[fast]
    assert 7 * MS <= limit_of(waits) <= slow


def test_what_workers_take_from_the_computing_counts_as_a_wait(monkeypatch):
    def beside_workers(ns):
        time.sleep(2 * ns / 1e9)

    monkeypatch.setattr(loader_trial, "_compute", beside_workers)
    assert min(one.ns for one in tried(Samples()).values()) >= 5 * MS


class Interrupted:
    """Sends signals beside a fork, once in the process that forks."""

    def __init__(self):
        self.by = []
        os.register_at_fork(after_in_parent=self)

    def __call__(self):
        while self.by:
            signal.raise_signal(self.by.pop(0))


beside_a_fork = Interrupted()
DESCRIPTORS = Path("/dev/fd")


def test_an_interrupt_beside_the_fork_is_not_lost():
    data = Samples()
    handler = signal.getsignal(signal.SIGINT)
    before = sorted(DESCRIPTORS.iterdir())
    beside_a_fork.by = [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        tried(data)
    assert not beside_a_fork.by
    assert sorted(DESCRIPTORS.iterdir()) == before
    assert signal.getsignal(signal.SIGINT) is handler
    assert tried(data)["num_workers=0"].ns


def test_of_two_signals_beside_the_fork_neither_is_lost():
    def noticed(*_):
        raise TimeoutError("the time of the job ends")

    handler = signal.signal(signal.SIGUSR1, noticed)
    beside_a_fork.by = [signal.SIGUSR1, signal.SIGINT]
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            tried(Samples())
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert isinstance(raised.value.__context__, TimeoutError)
