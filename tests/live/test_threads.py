"""A script that trains in several threads: one is recorded, and the others are left alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from backspot.live.running import after_return
from support import preloaded
from support.program import program

pytestmark = [pytest.mark.slow, pytest.mark.posix]

ROUNDS = 15
"""Recordings beside running threads. Chosen for time: more of them find rarer races."""

AROUND = """
import sys, threading, torch
from concurrent.futures import ThreadPoolExecutor
from torch import nn
import torch.autograd.profiler as profiler
from backspot.live.recorder import Schedule
from backspot.live.running import Observer

torch.set_num_threads(1)
made = threading.Lock()

def net():
    with made:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def train(steps, model=None, call=None, most=0):
    model = model or net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(max(steps, most)):
        if step >= steps and found:
            break
        (call or model)(torch.ones(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def in_threads(number, *given):
    threads = [threading.Thread(target=train, args=given) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

def sweep():
    with ThreadPoolExecutor(4) as pool:
        # A step of these nets is over before the models are found.
        list(pool.map(lambda _: train(20, most=2_000), range(6)))

def one_after_another():
    in_threads(4, 5)  # each ends while it is recorded
    in_threads(1, 20)

def replicas():
    model = net()
    def call(inputs):
        copies = [model, model]
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(lambda copy: copy(inputs), copies))
    train(20, model, call)

def beside(work):
    ends = threading.Event()
    def loop():
        while not ends.is_set():
            work()
            ends.wait(0.001)
    thread = threading.Thread(target=loop)
    thread.start()
    try:
        train(20)
    finally:
        ends.set()
        thread.join()

def evaluation():
    other = net()
    def work():
        with torch.no_grad():
            other(torch.ones(4, 8))
    beside(work)

def prefetching():
    beside(lambda: torch.randn(64, 8).sort())

clean = nn.Module.__call__, sys.getrecursionlimit(), torch.Tensor.backward, False
for number in range(ROUNDS):
    found, said = [], []
    observer = Observer(Schedule(warmup=1, steps=2), found.append, said.append, lambda _: None)
    observer.begin()
    WAY()
    observer.recorder.end()
    left = (
        nn.Module.__call__, sys.getrecursionlimit(), torch.Tensor.backward,
        profiler._is_profiler_enabled,
    )
    assert left == clean, (number, left)
    assert not said, (number, said)
    assert len(found) == 1, number
    assert found[0].count == 2
print("well")
"""


@pytest.mark.parametrize(
    "way", ["sweep", "one_after_another", "replicas", "evaluation", "prefetching"]
)
def test_threads_beside_a_recording_train_on_and_nothing_is_left(way, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(AROUND.replace("ROUNDS", str(ROUNDS)).replace("WAY()", f"{way}()"))
    done = program_of(path)
    assert (done.returncode, done.stdout) == (0, b"well\n"), done.stderr.decode()


def program_of(path):
    return subprocess.run(
        [*preloaded.python(), preloaded.WHOLE, str(path)],
        capture_output=True,
        check=False,
        timeout=300,
    )


WITH_RUN = """
import torch
from concurrent.futures import ThreadPoolExecutor
def train(number):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
with ThreadPoolExecutor(4) as pool:
    list(pool.map(train, range(6)))
print("trained")
"""


def test_a_sweep_in_threads_has_a_report(tmp_path):
    (tmp_path / "train.py").write_text(WITH_RUN)
    done = program(
        "run", "--warmup", "2", "--steps", "3", "train.py", cwd=tmp_path, python=preloaded.python()
    )
    assert (done.returncode, done.stdout) == (0, b"trained\n"), done.stderr.decode()
    assert (tmp_path / "backspot" / "report.html").exists()
    assert b"torch.profiler itself" not in done.stderr


BETWEEN_STEPS = """
import threading, time, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
import backspot

register_optimizer_step_post_hook(lambda *_: time.sleep(0.002))  # PyTorch is often among the hooks
failed, ended = [], threading.Event()

def train():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        while not ended.is_set():
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            time.sleep(0.002)
    except RuntimeError as error:
        failed.append(error)

thread = threading.Thread(target=train)
thread.start()
for _ in range(50):
    with backspot.instrument(torch.nn.Linear(2, 2)):
        pass
ended.set()
thread.join()
print(failed or "well")
"""


def test_hooks_of_optimizers_come_and_go_while_no_other_thread_goes_through_them(tmp_path):
    (tmp_path / "train.py").write_text(BETWEEN_STEPS)
    done = program_of(tmp_path / "train.py")
    assert (done.returncode, done.stdout) == (0, b"well\n"), done.stderr.decode()


def test_what_begins_when_a_function_returns_runs_as_code_outside_of_a_tracer():
    """Within one, PyTorch compiles nothing (from Python 3.12 on), and no debugger stops."""
    seen = []

    def note(frame, event, _):
        if event == "call":
            seen.append(frame.f_code.co_name)

    def work():
        pass

    def action():
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(None)

    def step():
        assert after_return(sys._getframe(), action)

    before = sys.getprofile()
    sys.setprofile(None)
    try:
        step()
    finally:
        sys.setprofile(before)
    assert seen == ["work"]
