"""All steps of a training are noted until the script ends: in the report, and in training.json."""

from __future__ import annotations

import json
import re
import signal
import subprocess

import pytest

from support import preloaded
from support.program import program

pytest.importorskip("torch")

import backspot

pytestmark = pytest.mark.slow

HEAD = """
import sys, time, torch
from torch import nn
torch.manual_seed(0); torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(x=None):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8) if x is None else x).square().mean()
    loss.backward()
    optimizer.step()
    return loss
"""
SMALL = ("--warmup", "1", "--steps", "2", "--trials", "none")


@pytest.fixture
def run(tmp_path):
    """Run a script, and return its report as it is in the end, and what was said."""

    def observed(code, *arguments, options=SMALL):
        script = tmp_path / "train.py"
        script.write_text(HEAD + code)
        done = program("run", *options, script, *arguments, python=preloaded.python(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr.decode()
        return backspot.Report.load(tmp_path / "backspot/report.json"), done.stderr.decode()

    return observed


def test_the_report_has_all_steps_of_the_training_once_the_script_has_ended(run):
    report, said = run("for _ in range(100): step(); time.sleep(0.03)")
    training = report.training
    assert training.steps == 100
    assert 40 < training.counted < 100  # without those that were recorded
    assert report.unprofiled_step_ns == training.step_ns > 30_000_000
    parts = training.data_ns, training.forward_ns, training.backward_ns, training.optimizer_ns
    assert sum(parts) == training.step_ns
    assert all(part > 0 for part in parts[1:])
    assert re.search(rf"The training: {training.counted}( of 100)? steps", " ".join(said.split()))


def test_each_step_of_a_short_training_is_counted_or_named(run):
    report, said = run("for _ in range(40): step(); time.sleep(0.005)")
    training = report.training
    assert training.steps == 40
    apart = sum(time.steps for time in training.apart)
    assert training.counted + apart == 39  # the first begins before there is a stamp
    assert training.counted < 36
    assert f"The training: {training.counted} of 40 steps" in " ".join(said.split())


def test_what_happens_every_few_steps_is_a_part_of_the_step(run):
    report, _ = run("""
for at in range(160):
    step()
    if at % 8 == 7:
        until = time.perf_counter() + 0.04
        while time.perf_counter() < until: model(torch.randn(4, 8))
""")
    rare = report.training.rare[0]  # a busy machine can add others
    assert rare.period == pytest.approx(8, rel=0.3)
    assert rare.per_step_ns > report.training.typical_ns


def test_an_optimizer_that_later_steps_within_another_one_is_a_part_of_that_from_then_on(run):
    report, _ = run("""
class Twice(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(model.parameters(), {})
        self.inner = inner
    def step(self):
        self.inner.step()
        self.inner.step()
for _ in range(40): step()
optimizer = Twice(optimizer)
for _ in range(30): step()
""")
    assert report.training.steps == 70


def test_optimizers_that_take_turns_later_make_one_step_from_then_on(run):
    report, _ = run("""
other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
for _ in range(40): step()
for _ in range(30): step(); other.step()
for _ in range(200): step()
""")
    # It takes a while until the first one has replaced both again.
    assert 200 < report.training.steps <= 271


def test_a_checkpoint_is_named(run):
    report, _ = run("""
for at in range(90):
    step()
    if at % 9 == 8: torch.save(torch.zeros(1000000), "saved.pt"); time.sleep(0.05)
""")
    assert "saving a checkpoint" in [work.name for work in report.training.rare]


def test_batches_of_a_loader_that_is_late_are_counted_and_waited_for(run):
    report, _ = run("""
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 100
    def __getitem__(self, at): time.sleep(0.02); return torch.randn(8)
if __name__ == "__main__":
    for x in DataLoader(Slow(), batch_size=2, num_workers=1): step(x)
""")
    training = report.training
    (loader,) = training.loaders
    assert loader.workers == 1
    assert loader.late > loader.batches / 2
    assert training.data_ns > training.forward_ns


LOADERS = """
class Slow(torch.utils.data.Dataset):
    def __init__(self, length): self.length = length
    def __len__(self): return self.length
    def __getitem__(self, index): time.sleep(0.005); return torch.randn(4, 8)
trained = torch.utils.data.DataLoader([torch.randn(4, 8)] * 200, batch_size=None)
other = torch.utils.data.DataLoader(Slow(20), batch_size=None)
"""


def test_batches_of_an_evaluation_are_a_part_of_it_and_no_waiting_for_data(run):
    report, _ = run(f"""{LOADERS}
for at, x in enumerate(trained):
    step(x)
    time.sleep(0.005)
    if at % 10 == 9:
        with torch.no_grad():
            for x in other: model(x)
""")
    training = report.training
    (rare,) = [work for work in training.rare if work.name == "evaluation"]
    assert rare.period == pytest.approx(10, rel=0.3)
    assert rare.per_step_ns > 20 * 5e6 / 10 > 10 * training.data_ns
    times = {phase.name: phase.wall_ns for phase in report.phases}
    assert sum(times.values()) == report.step_ns == training.step_ns
    if training.held_up_ns < 0.05 * training.step_ns:  # else the log's parts say too little
        assert times["evaluation"] == pytest.approx(rare.per_step_ns, rel=0.01)
        assert times["data"] == pytest.approx(training.data_ns, rel=0.01)


@pytest.mark.parametrize("way", ["one batch", "with forces"])
def test_batches_of_an_evaluation_are_known_by_what_becomes_of_them(run, way):
    evaluation = {
        "one batch": "with torch.no_grad(): model(next(batches))",
        "with forces": """
            for _ in range(2):
                x = next(batches).requires_grad_()
                torch.autograd.grad(model(x).sum(), x)""",
    }[way]
    report, _ = run(f"""{LOADERS}
other = torch.utils.data.DataLoader(Slow(100), batch_size=None)
batches = iter(other)
for at, x in enumerate(trained):
    step(x)
    if at % 10 == 9:
        {evaluation}
""")
    assert "evaluation" in [work.name for work in report.training.rare]
    assert "waiting for data" not in [work.name for work in report.training.rare]


def test_batches_that_some_steps_train_on_are_waited_for(run):
    report, _ = run(f"""{LOADERS}
batches = iter(other)
for at, x in enumerate(trained):
    if at % 10 == 9: x = next(batches)
    step(x)
""")
    assert "evaluation" not in [work.name for work in report.training.rare]
    assert report.training.data_ns > 5e6 / 10


@pytest.mark.parametrize("waits", ["loader", "script"])
def test_what_a_loader_takes_to_begin_an_epoch_is_time_of_data(run, waits):
    report, _ = run(f"""
from torch.utils.data import DataLoader
class Order:
    def __len__(self): return 10
    def __iter__(self):
        if "{waits}" == "loader": time.sleep(0.3)
        return iter(range(10))
loader = DataLoader(torch.zeros(10, 8), batch_size=None, sampler=Order(), num_workers=1)
for epoch in range(8):
    if "{waits}" == "script": time.sleep(0.3)
    for x in loader: step(x)
""")
    training = report.training
    is_data = training.data_ns > training.step_ns / 2
    assert is_data == (waits == "loader")
    assert training.step_ns > 20_000_000  # a tenth of what an epoch's begin takes, at least


def test_the_account_begins_once_a_queue_that_was_filled_has_found_its_level(run):
    report, _ = run("""
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 200
    def __getitem__(self, at): time.sleep(0.01); return torch.randn(8)
if __name__ == "__main__":
    for at, x in enumerate(DataLoader(Slow(), batch_size=2, num_workers=1, prefetch_factor=16)):
        if at == 0: time.sleep(1)
        step(x)
""")
    assert report.training.data_ns > report.training.step_ns / 2


def test_a_killed_job_leaves_what_is_known_of_its_steps(tmp_path):
    script = tmp_path / "train.py"
    code = "for at in range(10**6):\n    step(); time.sleep(0.01)\n    if at == 50: print('now')\n"
    script.write_text(HEAD + code.replace("'now'", "'now', flush=True"))
    child = subprocess.Popen(
        [*preloaded.python(), "-m", "backspot", "run", *SMALL, script],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout.readline() == b"now\n"
    child.terminate()
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM
    found = json.loads((tmp_path / "backspot/training.json").read_text())
    assert found["schema"] == "backspot.training/1"
    assert found["steps"] > 40


def test_a_signal_ends_the_process_also_where_the_main_thread_does_not_come_back(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        HEAD
        + """
import ctypes
for _ in range(50): step()
print("now", flush=True)
ctypes.CDLL(None).sleep(600); ctypes.CDLL(None).pause(); ctypes.PyDLL(None)
"""
    )
    child = subprocess.Popen(
        [*preloaded.python(), "-m", "backspot", "run", *SMALL, script],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout.readline() == b"now\n"
    child.terminate()
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM
    assert (tmp_path / "backspot/training.json").exists()


def test_children_that_are_forked_end_by_the_signal_as_they_would_by_themselves(run):
    _, said = run("""
import os, signal
for _ in range(40): step()
child = os.fork()
if child == 0:
    time.sleep(60); os._exit(1)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.WTERMSIG(status) == signal.SIGTERM, status
for _ in range(5): step()
""")
    assert "Traceback" not in said


@pytest.mark.parametrize("option", ["--no-log", "--exit"])
def test_without_the_log_nothing_is_noted_after_the_report(run, option):
    report, _ = run(
        "for at in range(60):\n    step()\n"
        "    if at == 40:\n"
        "        from torch.optim import optimizer as home\n"
        "        print(len(home._global_optimizer_post_hooks), torch.save.__module__)\n",
        options=(*SMALL, option),
    )
    assert report.training is None or report.training.steps < 30


COMPILED = {
    "the model": "model = torch.compile(model, fullgraph=True, backend='aot_eager')",
    "the optimizer's step": """
@torch.compile(fullgraph=False, backend="aot_eager")
def update(): optimizer.step()
def step():
    optimizer.zero_grad(); model(torch.randn(4, 8)).square().mean().backward(); update()
""",
    "the whole step": """
@torch.compile(backend="aot_eager")
def step(x=None):
    optimizer.zero_grad(); model(torch.ones(4, 8)).square().mean().backward(); optimizer.step()
""",
    "the loss and its gradient": """
@torch.compile(fullgraph=True, backend="aot_eager")
def loss_of(x): return model(x).square().mean()
def step():
    optimizer.zero_grad(); loss_of(torch.randn(4, 8)).backward(); optimizer.step()
""",
}


@pytest.mark.parametrize("part", ["the model", "the loss and its gradient"])
def test_compiled_code_is_compiled_as_often_as_without_the_log(run, part, tmp_path):
    code = (
        COMPILED[part]
        + """
for _ in range(40): step()
from torch._dynamo.utils import counters
print("GRAPHS", counters["stats"]["unique_graphs"], dict(counters["graph_break"]), file=sys.stderr)
"""
    )
    report, said = run(code)
    assert report.training.steps == 40
    plain = tmp_path / "plain.py"
    plain.write_text(HEAD + code)
    command = [*preloaded.python(), plain]
    alone = subprocess.run(command, capture_output=True, text=True, check=True)
    (graphs,) = [line for line in alone.stderr.splitlines() if "GRAPHS" in line]
    assert graphs in said


@pytest.mark.parametrize("part", ["the optimizer's step", "the whole step"])
def test_each_step_is_noted_whose_optimizer_is_compiled(run, part):
    report, _ = run(COMPILED[part] + "for _ in range(40): step()\n")
    training = report.training
    # Without a hook, the next backward tells of a step: not of the first one, nor of the last one.
    assert 38 <= training.steps <= 40
    parts = training.data_ns, training.forward_ns, training.backward_ns, training.optimizer_ns
    assert sum(parts) == training.step_ns
    assert training.backward_ns > 0


def test_each_thread_that_trains_has_steps_of_its_own(run):
    # A thread that begins once another one has ended can have its number.
    report, _ = run("""
import threading, time
both = threading.Barrier(2)
def train(count):
    model = nn.Linear(8, 2); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both.wait()
    for number in range(count):
        if number == 60: time.sleep(2)  # the report is made, which is completed at the end
        model(torch.randn(4, 8)).sum().backward(); optimizer.step(); optimizer.zero_grad()
threads = [threading.Thread(target=train, args=(count,)) for count in (30, 90)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""")
    assert report.training.steps == 90


def test_an_optimizer_that_calls_the_backward_itself_is_counted_once_a_step(run):
    report, _ = run("""
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
x = torch.randn(16, 8)
def closure():
    optimizer.zero_grad(); loss = model(x).square().mean(); loss.backward(); return loss
for _ in range(40): optimizer.step(closure)
""")
    training = report.training
    assert training.steps == 40
    parts = training.data_ns, training.forward_ns, training.backward_ns, training.optimizer_ns
    assert sum(parts) == training.step_ns
