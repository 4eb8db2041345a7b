"""A training never runs out of memory because it is recorded."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from support import preloaded
from support.program import program

pytest.importorskip("torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.posix,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits"),
]

# A limit of the process is a limit of memory as any other. What is taken is never written to, so it
# costs the machine nothing.
START = """
import json, mmap, os, resource, threading, time
import torch
from torch import nn
from torch.autograd import profiler

def used():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

def limit():
    size = used() + (3 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))

def take():
    size, _ = resource.getrlimit(resource.RLIMIT_AS)
    return mmap.mmap(-1, size - used() - size // 20)  # leaves one part of twenty

class Loop(nn.Module):
    # Calls a module again and again until nothing records any more.
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.waits = lambda: False
    def forward(self, x):
        x = self.inner(x)
        if self.waits():
            until = time.monotonic() + 60
            while profiler._is_profiler_enabled and time.monotonic() < until:
                self.inner(x)
                time.sleep(0.001)
            print("recording:", profiler._is_profiler_enabled, flush=True)
        return x

torch.manual_seed(0)
torch.set_num_threads(1)
model = Loop()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plain_call = nn.Module.__call__

def step():
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
"""
ENDED = "recording: False"

TRAINING = """
limit()
low, forks, threads, fails = {low}, {forks}, {threads}, {fails}

def beside():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while not done:
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        time.sleep(0.01)

done = []
for number in range(1, 25):
    if number == low:
        model.waits = lambda: True
        taken = take()
    if number == low and forks:
        time.sleep(0.5)  # memory has run low, and nothing was called since
        child = os.fork()
        if not child:
            model.inner(model.inner(torch.ones(4, 8)))  # is not the one that is recorded
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    if number == 5 and threads:
        threading.Thread(target=beside).start()
    try:
        step()
        if number == low and fails:
            raise RuntimeError
    except RuntimeError:
        pass
    if number == low:
        model.waits = lambda: False
        taken.close()
done.append(True)
"""


@pytest.fixture
def training(tmp_path):
    def write(*, low, forks=False, threads=False, fails=False):
        path = tmp_path / "train.py"
        given = {"low": low, "forks": forks, "threads": threads, "fails": fails}
        path.write_text(START + TRAINING.format(**given))
        return path

    return write


def losses(printed):
    return [line for line in printed.decode().splitlines() if not line.startswith("recording")]


def ran(path, *options):
    given = ("--trials", "none", "--warmup", "2", "--steps", "6", *options, path.name)
    done = program("run", *given, python=preloaded.python(), cwd=path.parent)
    assert done.returncode == 0, done.stderr.decode()
    assert ENDED in done.stdout.decode()
    said = done.stderr.decode().splitlines()
    return done.stdout, [line for line in said if line.startswith("backspot: ")]


WAYS = {
    "alone": ((), {}),
    "in detail": (("--memory", "--stacks"), {}),
    "again and again": (("--every", "40"), {}),
    "with a child": ((), {"forks": True}),
    "beside another thread": ((), {"threads": True}),
    "with an error": ((), {"fails": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_recording_ends_within_the_step_in_which_memory_runs_low(way, training):
    options, how = WAYS[way]
    path = training(low=12, **how)
    plain = subprocess.run(
        [*preloaded.python(), path.name], cwd=path.parent, capture_output=True, check=True
    )
    printed, said = ran(path, *options)
    assert losses(printed) == losses(plain.stdout)
    report = json.loads((path.parent / "backspot" / "report.json").read_text())
    assert len(report["step_ns_by_step"]) == 2, "steps 10 and 11; the twelfth is not complete"
    warning = next(text for text in report["warnings"] if "memory" in text)
    assert warning.startswith("Only 2 of 6 steps were recorded, as memory runs low: ulimit -v has ")
    assert said[0] == f"backspot: {warning[5:-1]}"


def test_without_a_complete_step_one_line_says_why_there_is_no_report(training):
    path = training(low=10)
    _, said = ran(path)
    assert said[-1].startswith(
        "backspot: no report: 0 of 6 steps were recorded, as memory runs low: ulimit -v has "
    )
    assert not (path.parent / "backspot").exists()


PROFILE = """
import backspot
limit()
number = 0

def recorded(low=(), error=None):
    global number
    number = 0
    def one():
        global number
        number += 1
        model.waits = lambda: number in low
        taken = take() if number in low else None
        try:
            step()
            if error and number in low:
                raise error
        finally:
            if taken:
                taken.close()
    return backspot.profile(one, model, warmup=1, steps=4, unprofiled=0, stacks=False)

report = recorded(low=[4])
said = {"steps": report.steps, "warning": report.warnings[0]}
try:
    recorded(low=[2])
except backspot.BackspotError as raised:
    said["none"] = str(raised)
for error in ValueError, KeyboardInterrupt:
    try:
        recorded(low=[3], error=error)
    except error as raised:
        kept = raised  # with the frames in which labels were open
for _ in range(3):
    again = recorded()
said["again"] = again.steps, list(again.warnings)
said["threads"] = [thread.name for thread in threading.enumerate()]
said["call"] = nn.Module.__call__ is plain_call
print(json.dumps(said))
"""


def test_a_profile_ends_where_memory_runs_low_and_leaves_nothing(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(START + PROFILE)
    done = subprocess.run(
        [*preloaded.python(), preloaded.WHOLE, path.name],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().count(ENDED) == 4
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["steps"] == 2
    assert said["warning"].startswith("Only 2 of 4 steps were recorded, as memory runs low: ")
    assert said["none"].startswith("profile: no report, as 0 of 4 steps were recorded, as memory")
    assert said["again"][0] == 4
    assert not [text for text in said["again"][1] if "memory" in text]
    assert said["threads"] == ["MainThread"]
    assert said["call"]


# What fills the memory: hundreds of equal slices, between which the profiler lays its records.
SLICES = """
import os, sys, time, torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.set_num_threads(1)
rnn = nn.LSTM(64, 64, batch_first=True)
optimizer = torch.optim.Adam(rnn.parameters())
lengths = torch.arange(70, 102)
data = torch.ones(32, 101, 64)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def step():
    optimizer.zero_grad()
    packed = pack_padded_sequence(data, lengths, batch_first=True, enforce_sorted=False)
    pad_packed_sequence(rnn(packed)[0], batch_first=True)[0].mean().backward()
    optimizer.step()

for _ in range(9):
    step()
    print(resident())
if "wait" in sys.argv:
    def go_on():
        step()
        time.sleep(0.05)  # as one that waits for data: the machine has other work
    while not os.path.exists("backspot/report.json"):
        go_on()  # the report is made meanwhile
    until = time.monotonic() + 3
    while time.monotonic() < until:
        go_on()  # and memory is noted once a second
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_is_freed_in_recorded_steps_does_not_add_up(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SLICES)
    plain = subprocess.run(
        [*preloaded.python(), path.name], cwd=tmp_path, capture_output=True, check=True
    )
    options = ("--trials", "none", "--warmup", "1", "--steps", "3")
    done = program("run", *options, path.name, python=preloaded.python(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    before, now = (max(map(int, out.stdout.split())) for out in (plain, done))
    assert now < 1.7 * before, "it was 2.2 times as much after three steps, and so on"


def test_the_memory_of_a_training_is_without_that_of_its_recording(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SLICES)
    options = ("--trials", "none", "--warmup", "1", "--steps", "3")
    done = program("run", *options, path.name, "wait", python=preloaded.python(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    memory = json.loads((tmp_path / "backspot" / "report.json").read_text())["training"]["memory"]
    before = int(done.stdout.split()[0])
    assert memory["last_bytes"] < 1.25 * before, "the process has half as much again at that time"
