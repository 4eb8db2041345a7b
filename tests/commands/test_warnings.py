"""Under ``backspot run`` a script's warnings name the same lines, and come as often."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support import preloaded

pytest.importorskip("torch")

pytestmark = pytest.mark.slow

MODEL = """
import warnings
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.a.register_full_backward_hook(lambda *_: warnings.warn("a hook", stacklevel=2))
        self.b.register_full_backward_hook(lambda *_: warnings.warn("a hook", stacklevel=4))
    def forward(self, x):
        warnings.warn("a forward", stacklevel=2)
        warnings.warn("the caller's", stacklevel=4)
        return self.b(self.a(x).sin())

def steps(number):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(number):
        optimizer.zero_grad()
        LOSS
        optimizer.step()

if __name__ == "__main__":
    START
"""
LOSSES = {
    "hooks": "model(torch.ones(6, 8)).sum().backward()",
    "C++": "torch.use_deterministic_algorithms(True, warn_only=True)\n"
    "        put = torch.tensor([1]), torch.tensor([1.0])\n"
    "        model(torch.ones(6, 8)).put(*put).sum().backward()",
    "a gradient": "loss = model(torch.ones(6, 8)).sum()\n"
    "        gradients = torch.autograd.grad(loss, list(model.parameters()))\n"
    "        for p, g in zip(model.parameters(), gradients): p.grad = g",
    "the script's own profiler": "with torch.profiler.profile() as profiler:\n"
    "            model(torch.ones(6, 8)).sum().backward()",
}
STARTS = {
    "here": "steps(20)",
    "a process": "import multiprocessing\n"
    "    one = multiprocessing.get_context('fork').Process(target=steps, args=(20,))\n"
    "    one.start(); one.join()",
}
CASES = [*((loss, "here") for loss in LOSSES), ("hooks", "a process")]
FRESH = ("hooks", "here")
"""The case that is observed in a Python without anything in memory."""


def warned(folder: Path, python: list[str], *under: str) -> list[str]:
    """Return the warnings that a script shows, each with its line."""
    done = subprocess.run(
        [*python, *under, "train.py"], cwd=folder, capture_output=True, text=True, check=True
    )
    lines = done.stderr.splitlines()
    places = [at for at, line in enumerate(lines) if "Warning: " in line]
    return ["\n".join(lines[at : at + 2]) for at in places]


@pytest.mark.parametrize(("loss", "start"), CASES)
def test_warnings_name_the_same_lines_and_come_as_often(loss, start, tmp_path):
    code = MODEL.replace("LOSS", LOSSES[loss]).replace("START", STARTS[start])
    (tmp_path / "train.py").write_text(code)
    plain = warned(tmp_path, preloaded.python())
    assert any("the caller's" in one for one in plain)
    if loss == "C++":  # a warning of PyTorch's in the backward has its own line
        assert any("deterministic" in one and "run_backward" in one for one in plain)
    run = ("-m", "backspot", "run", "--warmup", "2", "--steps", "3", "--trials", "none")
    python = [sys.executable] if (loss, start) == FRESH else preloaded.python()
    assert warned(tmp_path, python, *run) == plain
