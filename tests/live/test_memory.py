"""``profile(memory=True)`` and ``backspot run --memory``, against counts of our own."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile as recorded
from torch.utils.checkpoint import checkpoint

import backspot
from support import preloaded
from support.program import program

BATCH, WIDTH = 64, 128
FLOAT = 4


class Net(torch.nn.Module):
    """Two blocks, of which the second may be checkpointed."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = self.block()
        self.second = self.block()
        self.checkpointed = checkpointed

    @staticmethod
    def block() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.checkpointed:
            return checkpoint(self.second, x, use_reentrant=False)
        return self.second(x)


def training(model: torch.nn.Module, rows: int = BATCH) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(rows, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def profiled(model: torch.nn.Module, **others: Any) -> backspot.Report:
    return backspot.profile(
        training(model),
        model,
        steps=1,
        warmup=1,
        unprofiled=0,
        memory=True,
        trials="none",
        **others,
    )


def test_modules_keep_the_tensors_that_autograd_saves() -> None:
    report = profiled(Net())
    (device,) = report.memory
    assert device.name == "CPU"
    inner, outer = BATCH * 4 * WIDTH * FLOAT, BATCH * WIDTH * FLOAT
    kept = {row.path: row.memory.kept_bytes for row in report.modules if row.is_module}
    assert kept["first.0"] == kept["first.1"] == kept["second.0"] == kept["second.1"] == inner
    assert kept["first.2"] == kept["second.2"] == outer
    first = report["first"].row.memory
    # The output of the first block is what the second saves.
    assert first.total_kept_bytes == 2 * inner + outer
    assert first.checkpoint_frees_bytes == 2 * inner


def test_gradients_of_parameters_survive_the_backward() -> None:
    model = Net()
    report = profiled(model)
    of_kind = report.memory[0].kinds
    assert sum(share.bytes for share in report.memory[0].live) == report.memory[0].peak_bytes
    assert 0 < of_kind["gradient"] <= sum(p.nbytes for p in model.parameters())


def test_checkpointing_frees_what_was_predicted() -> None:
    plain = profiled(Net())["second"].row.memory
    again = profiled(Net(checkpointed=True))["second"].row.memory
    assert plain.checkpoint_frees_bytes > 0
    assert plain.total_kept_bytes - again.total_kept_bytes == plain.checkpoint_frees_bytes


def relu_before(following: torch.nn.Module) -> torch.nn.Module:
    """``block`` ends with the ReLU, which saves its output."""
    block = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())
    return torch.nn.Sequential(OrderedDict(block=block, following=following))


class CastFirst(torch.nn.Module):
    """Under autocast ``block`` saves a bf16 copy of its input, and nothing saves the input."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.block = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.gelu(self.block(x))


@pytest.mark.parametrize(
    ("make", "freed"),
    [
        (lambda: relu_before(torch.nn.Linear(WIDTH, 2)), 0),
        (lambda: relu_before(torch.nn.Softmax(-1)), BATCH * WIDTH * FLOAT),
        (CastFirst, 4 * WIDTH * WIDTH * 2 + BATCH * WIDTH * (2 - FLOAT)),
    ],
    ids=["the next saves it too", "the next does not", "the input is new"],
)
def test_an_output_that_the_next_operator_saves_stays_and_so_does_the_input(
    make: Callable[[], Any], freed: int
) -> None:
    model = make()

    plain = profiled(model)
    predicted = plain["block"].row.memory.checkpoint_frees_bytes
    forward = model.block.forward
    model.block.forward = lambda x: checkpoint(
        forward, x, use_reentrant=False, preserve_rng_state=False
    )
    after, before = (report[""].row.memory.total_kept_bytes for report in (profiled(model), plain))
    assert predicted == before - after == freed


def test_a_report_with_memory_prints_who_fills_it() -> None:
    report = profiled(Net())
    printed = str(report)
    assert " of the memory at the peak: " in printed.replace("\n", " ")
    first = next(line for line in printed.splitlines() if line.startswith("1  "))
    top = next(row for row in report.top(by="pattern", sort="memory") if row.is_module)
    assert top.name in first
    assert 'report.top(sort="wall") for time' in printed
    assert len(printed.splitlines()) <= 24


def test_what_is_live_at_the_peak_are_the_tensors_that_the_backward_still_needs() -> None:
    """When the second GELU's output has its gradient, both blocks and the weights' are live."""
    rows = 3 * BATCH
    model = Net()
    step = training(model, rows)
    few = {"steps": 1, "warmup": 1, "unprofiled": 0, "trials": "none"}
    report = backspot.profile(step, model, memory=True, **few)
    inner, outer = rows * 4 * WIDTH * FLOAT, rows * WIDTH * FLOAT
    live = {
        (share.path, share.kind): share.bytes
        for share in report.memory[0].live
        if share.path != "(outside model)" and share.kind != "before"
    }
    weights = sum(part.nbytes for part in model.second[2].parameters())
    assert live == {
        ("first.0", "activation"): inner,
        ("first.1", "activation"): inner,
        ("first.2", "activation"): outer,
        ("second.0", "activation"): inner,
        ("second.1", "activation"): inner,
        ("second.2", "backward"): inner,
        ("second.2", "gradient"): weights,
    }


def test_times_come_from_steps_without_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    report = profiled(Net(), trace=path)
    assert report.memory
    assert "[memory]" not in path.read_text()
    assert backspot.locate(path).memory == ()


def test_a_live_profile_with_memory_needs_no_export() -> None:
    model = Net()
    step = training(model)
    step()
    with backspot.instrument(model), torch.profiler.profile(profile_memory=True) as prof:
        step()
    live = backspot.locate(prof)
    assert live["first.0"].row.memory.kept_bytes == BATCH * 4 * WIDTH * FLOAT


def test_memory_is_a_truth_value() -> None:
    for value in ("yes", None):
        with pytest.raises(backspot.UsageError, match=f"memory={value!r}: give True or False"):
            backspot.profile(lambda: None, Net(), memory=value)  # type: ignore[arg-type]


SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range({steps}):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "has_memory"), [(13, True), (10, False)])
def test_a_script_gets_its_memory_from_further_steps(
    steps: int, has_memory: bool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(steps=steps))
    options = ("--memory", "--warmup", "2", "--steps", "3", "-o", "out")
    ran = program("run", *options, script, python=preloaded.python(), cwd=tmp_path)
    assert ran.returncode == 0
    said = ran.stderr.decode()
    report = backspot.Report.load(tmp_path / "out" / "report.json")
    assert ("of the memory at the peak: " in said) is has_memory
    assert ("--sort wall for time" in said) is has_memory
    assert bool(report.memory) is has_memory
    assert report.steps == 3
    if has_memory:
        assert report["1"].row.memory is not None


class _Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.randn(8)


@pytest.mark.slow
def test_a_trace_with_memory_of_a_step_that_waits_begins_with_the_wait(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())

    def train(steps: int) -> None:
        for _, batch in zip(range(steps), torch.utils.data.DataLoader(_Slow(), 4), strict=False):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    train(1)
    with recorded(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(3)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    report = backspot.locate(tmp_path / "trace.json")
    assert report.memory
    assert str(report).startswith("Waiting for data takes ")
    asked = backspot.profile(lambda: train(1), model, steps=1, warmup=0, memory=True, trials="none")
    assert " of the memory at the peak" in " ".join(str(asked).split("\n")[:2])
