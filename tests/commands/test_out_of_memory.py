"""``backspot run`` of a training that dies of memory, and of those that do not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support import preloaded
from support.program import program

torch = pytest.importorskip("torch")

import backspot  # noqa: E402
from backspot.commands import main  # noqa: E402
from backspot.results import OutOfMemory  # noqa: E402

pytestmark = pytest.mark.slow

TRAINING = """
import sys
import torch
from torch import nn

WHERE, AT = sys.argv[1], int(sys.argv[2])
step = 0

def ask(where):
    if (where, step) == (WHERE, AT):
        torch.empty(1 << 47)

class Asking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ask("backward")
        return gradient

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        ask("forward")
        return Asking.apply(self.fc(x))

class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        ask("optimizer")
        return super().step(closure)

model = nn.Sequential(Mlp(), nn.Tanh(), nn.Linear(8, 2))
optimizer = Optimizer(model.parameters(), lr=0.1)

def train(steps):
    global step
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
"""


def run(folder: Path, code: str, *given: object, options: tuple[str, ...] = ()):
    (folder / "train.py").write_text(TRAINING + code, encoding="utf-8")
    python = preloaded.python()
    arguments = ["run", "--trials", "none", *options, "train.py", *given]
    return program(*arguments, python=python, cwd=folder, timeout=120)


def alone(folder: Path) -> OutOfMemory:
    assert sorted(file.name for file in (folder / "backspot").iterdir()) == [
        "out-of-memory.html",
        "out-of-memory.json",
    ]
    return OutOfMemory.load(folder / "backspot" / "out-of-memory.json")


def test_a_death_in_the_first_step_is_a_report_alone(tmp_path, capsys):
    ours = run(tmp_path, "train(3)", "forward", 1)
    found = alone(tmp_path)
    assert (found.step, found.phase, found.path, found.class_name) == (1, "forward", "0", "Mlp")
    said = ours.stderr.decode()
    assert "ran out of memory in step 1, in the forward of 0 (Mlp)" in said.replace("\n", " ")
    assert "no report:" not in said
    assert main(["show", str(tmp_path / "backspot" / "out-of-memory.json")]) == 0
    assert "in the forward of 0 (Mlp)" in capsys.readouterr().out.replace("\n", " ")
    page = (tmp_path / "backspot" / "out-of-memory.html").read_text(encoding="utf-8")
    assert "in the forward of 0 (Mlp)" in page


def test_the_script_ends_as_without_backspot(tmp_path):
    ours = run(tmp_path, "train(3)", "backward", 2)
    plain = subprocess.run(
        [*preloaded.python(), str(tmp_path / "train.py"), "backward", "2"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout) == (1, b"")
    _, line, shown = plain.stderr.partition(b'/train.py"')
    assert line
    assert ours.stderr.endswith(shown)  # without a frame of Backspot
    found = alone(tmp_path)
    assert (found.step, found.phase, found.node) == (2, "backward", "AskingBackward")
    assert (found.path, found.is_nearby) == ("0.fc", True)


@pytest.mark.parametrize("options", [(), ("--memory",)], ids=["plain", "with memory"])
def test_a_death_after_the_report_is_in_it_beside_its_steps(options, tmp_path):
    small = ("--warmup", "1", "--steps", "2", *options)
    ours = run(tmp_path, "train(40)", "optimizer", 30, options=small)
    assert ours.returncode == 1
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    found = report.out_of_memory
    assert found is not None
    assert (found.step, found.phase, found.source) == (30, "optimizer", "process")
    assert report.steps == 2
    assert bool(report.memory) == bool(options)
    for text in (str(report), report.save(tmp_path / "report.md").read_text(encoding="utf-8")):
        assert "ran out of memory in step 30, in an optimizer" in text.replace("\n", " ")
    page = (tmp_path / "backspot" / "report.html").read_text(encoding="utf-8")
    assert "ran out of memory in step 30" in page
    assert not (tmp_path / "backspot" / "out-of-memory.json").exists()


CAUGHT = """
try:
    train(3)
except RuntimeError as error:
    caught = str(error)
    {then}
"""


@pytest.mark.parametrize(
    ("then", "code"),
    [
        ("AT = 0; train(6)", 0),
        ("AT = 0; train(6); raise ValueError('of another kind')", 1),
        ("raise SystemExit(3)", 3),
    ],
    ids=["and retried", "before another error", "and exits"],
)
def test_an_error_of_memory_that_is_caught_is_no_death(then, code, tmp_path):
    ours = run(tmp_path, CAUGHT.format(then=then), "forward", 2)
    assert ours.returncode == code
    assert b"out of memory" not in ours.stderr.lower()
    assert not list(tmp_path.glob("*/out-of-memory*"))
    for report in tmp_path.glob("backspot/report.json"):
        assert backspot.Report.load(report).out_of_memory is None


def test_an_error_of_another_kind_is_no_death(tmp_path):
    ours = run(tmp_path, "train(2); torch.ones(2, 3) @ torch.ones(2, 3)", "nowhere", 0)
    assert ours.returncode == 1
    assert b"out of memory" not in ours.stderr.lower()
    assert not list(tmp_path.glob("*/out-of-memory*"))


LIMITED = """
import resource
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30),) * 2)
kept = []
class Keeping(nn.Module):
    def forward(self, x):
        kept.append(torch.zeros(1 << 26))
        return x
model.append(Keeping())
train(40)
"""


@pytest.mark.posix
def test_a_limit_of_the_process_is_what_ran_out(tmp_path):
    run(tmp_path, LIMITED, "nowhere", 0, options=("--warmup", "100"))
    found = alone(tmp_path)
    assert (found.phase, found.path, found.class_name) == ("forward", "3", "Keeping")
    assert found.limit == "ulimit -v"
    assert found.asked_bytes == 4 << 26
    assert found.free_bytes < found.asked_bytes


def test_show_says_what_it_can_do_with_it(tmp_path, capsys):
    run(tmp_path, "train(3)", "forward", 1)
    saved = tmp_path / "backspot" / "out-of-memory.json"
    assert main(["show", str(saved), "--top", "3"]) == 2
    assert "has no rows" in capsys.readouterr().err


SPAWNED = """
def work(_):
    train(3)

if __name__ == "__main__":
    import multiprocessing
    process = multiprocessing.get_context("fork").Process(target=work, args=(0,), name="worker")
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.posix
def test_a_process_that_the_script_starts_leaves_its_own(tmp_path):
    ours = run(tmp_path, SPAWNED, "forward", 2)
    assert ours.returncode == 1
    found = alone(tmp_path)
    assert (found.step, found.phase, found.path) == (2, "forward", "0")
    assert b"ran out of memory in step 2" in ours.stderr.replace(b"\n", b" ")
