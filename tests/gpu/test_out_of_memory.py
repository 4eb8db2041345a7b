"""A training that dies of memory on a real GPU, against what PyTorch's own message says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import backspot  # noqa: E402
from backspot.results import OutOfMemory  # noqa: E402
from support.gpu_models import needs_gpu  # noqa: E402
from support.program import program  # noqa: E402

pytestmark = [*needs_gpu, pytest.mark.slow]

WORKSPACES = 64 << 20
"""What cuBLAS and cuBLASLt take at most, of which a Hopper GPU has 33 MiB."""

TRAINING = """
import sys
import torch
from torch import nn

WHERE, AT, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(1024, 1024)
        self.act = nn.GELU()

    def forward(self, x):
        return x + self.act(self.fc(x))

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def limit(where):
    if (where, step) == (WHERE, AT):
        torch.cuda.empty_cache()
        may_take = torch.cuda.memory_reserved() + (2 << 20)
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(may_take / whole)

torch.manual_seed(0)
model = Network().cuda()
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.ones(STEPS * 8192, 1024), batch_size=8192)

def train():
    global step
    for step, x in enumerate(data, 1):
        x = x.cuda()
        optimizer.zero_grad()
        limit("forward")
        loss = model(x).sum()
        limit("backward")
        loss.backward()
        limit("optimizer")
        optimizer.step()

"""


def run(folder: Path, code: str, *given: object, options: tuple[str, ...] = ()) -> Any:
    (folder / "train.py").write_text(TRAINING + code, encoding="utf-8")
    arguments = ["run", "--trials", "none", *options, "train.py", *given]
    return program(*arguments, cwd=folder, timeout=300)


def said(size: int) -> str:
    """As PyTorch writes it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


def agrees_with_pytorch(found: OutOfMemory, message: str) -> None:
    assert found.asked_bytes is not None
    assert f"Tried to allocate {said(found.asked_bytes)}" in message
    assert f"{said(found.in_use_bytes)} is allocated by PyTorch" in message
    unallocated = found.reserved_bytes - found.in_use_bytes
    assert f"{said(unallocated)} is reserved by PyTorch but unallocated" in message
    assert sum(one.bytes for one in found.held) == found.in_use_bytes


PLACES = {
    "forward": ("forward", r"blocks\.0\.fc"),
    "backward": ("backward", r"blocks\.5\.fc"),
    "optimizer": ("optimizer", ""),
}


@pytest.mark.parametrize("history", [True, False], ids=["with a history", "without"])
@pytest.mark.parametrize("where", PLACES)
def test_a_death_in_the_first_step_is_what_pytorch_says_of_it(
    where: str, history: bool, tmp_path: Path
) -> None:
    ours = run(tmp_path, "train()", where, 1, 3, options=("--memory",) * history)
    message = ours.stderr.decode()
    assert ours.returncode == 1, message
    found = OutOfMemory.load(tmp_path / "backspot" / "out-of-memory.json")
    agrees_with_pytorch(found, message)
    phase, path = PLACES[where]
    assert (found.step, found.phase, found.batch_size) == (1, phase, 8192)
    assert re.fullmatch(path, found.path), found.path
    assert found.source == ("history" if history else "snapshot")
    parameters = 6 * 4 * (1024 * 1024 + 1024)
    held = {one.kind: one.bytes for one in found.held}
    assert parameters <= held["parameter"] < parameters + 6 * 4096
    assert bool(found.node) == (where == "backward")
    if history and where == "backward":
        kept = 8192 * 1024 * 4
        of = {one.path: one for one in found.held if one.kind == "activation"}
        assert of["blocks.*.fc"].members == 6
        # cuBLAS takes its workspaces within the first product, whose module has them from then on.
        assert 0 <= of["blocks.*.fc"].bytes - 6 * kept <= WORKSPACES
        (layers,) = found.layers
        assert (layers.path, layers.members) == ("blocks.*", 6)
        assert layers.bytes >= 12 * kept


@pytest.mark.parametrize("options", [(), ("--memory",)], ids=["plain", "with memory"])
def test_a_death_after_the_report_is_in_it(options: tuple[str, ...], tmp_path: Path) -> None:
    small = ("--warmup", "1", "--steps", "2", *options)
    ours = run(tmp_path, "train()", "backward", 30, 32, options=small)
    message = ours.stderr.decode()
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    found = report.out_of_memory
    assert found is not None, message
    agrees_with_pytorch(found, message)
    assert (found.step, found.phase) == (30, "backward")
    assert bool(report.memory) == bool(options)


RETRY = """
try:
    train()
except torch.cuda.OutOfMemoryError:
    pass
torch.cuda.set_per_process_memory_fraction(1.0)
AT = 0
train()
print(sum(p.double().sum() for p in model.parameters()).item().hex())
"""


@pytest.mark.parametrize("options", [(), ("--memory",)], ids=["plain", "with memory"])
def test_an_error_that_is_caught_changes_nothing(options: tuple[str, ...], tmp_path: Path) -> None:
    ours = run(tmp_path, RETRY, "backward", 2, 4, options=options)
    assert ours.returncode == 0
    assert b"out of memory" not in ours.stderr.lower()
    assert not list(tmp_path.glob("*/out-of-memory*"))
    plain = subprocess.run(
        [sys.executable, "train.py", "backward", "2", "4"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)


def test_earlier_errors_that_were_caught_are_counted(tmp_path: Path) -> None:
    code = RETRY.replace("AT = 0\n", "WHERE, AT = 'forward', 3\n")
    run(tmp_path, code, "backward", 2, 4)
    found = next(
        OutOfMemory.load(path)
        if path.name.startswith("out")
        else backspot.Report.load(path).out_of_memory
        for path in (tmp_path / "backspot").glob("*o*.json")
        if path.name in ("out-of-memory.json", "report.json")
    )
    assert found is not None
    assert (found.phase, found.earlier) == ("forward", 1)
