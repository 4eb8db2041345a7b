"""``backspot run`` tries remedies while a script trains, and the script trains on bit for bit."""

import subprocess

import pytest

import backspot
from support import preloaded
from support.program import program

pytestmark = [pytest.mark.slow, pytest.mark.posix]

SCRIPT = """
import threading
import torch
from torch import nn
from torch.nn import functional

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = functional.dropout(functional.softmax(q @ k.mT / 4, dim=-1), 0.1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(Attention(), Attention())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(STEPS):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 160, 64)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
    for thread in threading.enumerate():  # a report is made meanwhile: a trial needs a later step
        if thread.name.startswith("backspot_"):
            thread.join(60)
"""
ENOUGH, AS_MANY_AS_NEEDED = 14, 6
SMALL = ("--warmup", "1", "--steps", "2", "-o", "out")


def both(tmp_path, steps, *options):
    """What the script prints by itself and under Backspot, its standard error, and its report."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("STEPS", str(steps)))
    plain = subprocess.run(
        [*preloaded.python(), "train.py"], capture_output=True, check=True, cwd=tmp_path
    )
    ours = program("run", *SMALL, *options, "train.py", python=preloaded.python(), cwd=tmp_path)
    assert ours.stdout == plain.stdout
    report = backspot.Report.load(tmp_path / "out" / "report.json")
    (found,) = [one for one in report.findings if one.rule == "attention-math"]
    return ours.stderr.decode(), found


def test_a_script_trains_on_bit_for_bit_after_a_step_that_was_watched(tmp_path):
    said, found = both(tmp_path, ENOUGH)
    assert "ried here" in said
    assert found.tried.variants or "too long" in found.tried.why_not


def test_a_script_that_ends_with_the_recorded_steps_has_a_report_without_operators(tmp_path):
    _, found = both(tmp_path, AS_MANY_AS_NEEDED)
    assert found.tried.why_not == "no step came after the recording"


def test_nothing_is_tried_where_the_command_says_so(tmp_path):
    said, found = both(tmp_path, ENOUGH, "--trials", "none")
    assert "ried here" not in said
    assert found.tried is None
