"""``backspot run --plan``: what the words mean, and a script that trains on bit for bit."""

import subprocess

import pytest
import torch

import backspot
from backspot.commands import main
from backspot.commands.run import worded
from support import preloaded
from support.program import program

SCRIPT = """
import threading, time
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(40):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 32)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
    time.sleep(0.02)  # a copy, on a busy machine, takes less than a step
    for _ in range(50):  # a report is made meanwhile, and its plan needs one step more
        if not any(one.name.startswith("backspot_") for one in threading.enumerate()):
            break
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--plan", "train.py"], ["--plan=60", "train.py"]),
        (["--plan=300", "train.py"], ["--plan=300", "train.py"]),
        (["--warmup", "3", "--plan", "train.py"], ["--warmup", "3", "--plan=60", "train.py"]),
        (["train.py", "--plan"], ["train.py", "--plan"]),
        (["-m", "package.train", "--plan"], ["-m", "package.train", "--plan"]),
        (["-o", "--plan", "--", "--plan"], ["-o", "--plan", "--", "--plan"]),
    ],
)
def test_a_plan_without_seconds_takes_none_of_the_words_after_it(words, meant):
    assert worded(["run", *words]) == ["run", *meant]


def test_wrong_values_are_named_with_what_to_give(capsys):
    for seconds in ("0", "1.5", "86401", "9" * 5000):
        assert main(["run", f"--plan={seconds}", "train.py"]) == 2
        assert "give a whole number of seconds from 1 to 86400" in capsys.readouterr().err
    assert main(["run", "--trials", "all", "train.py"]) == 2
    assert "--plan tries the model and the loader" in capsys.readouterr().err


def test_an_earlier_report_without_a_plan_is_named(capsys, tmp_path):
    model = torch.nn.Linear(2, 2)
    step = lambda: model(torch.ones(1, 2)).sum().backward()  # noqa: E731
    path = tmp_path / "report.json"
    backspot.profile(step, model, steps=1, warmup=0, trials="none").save(path)
    assert main(["run", "--plan-from", str(path), "train.py"]) == 2
    assert "has no plan: record it with --plan" in capsys.readouterr().err
    assert main(["run", "--plan-from", str(tmp_path / "none.json"), "train.py"]) == 3
    assert "none.json" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.posix
def test_a_script_trains_on_bit_for_bit_after_a_plan(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    plain = subprocess.run(
        [*preloaded.python(), "train.py"], capture_output=True, check=True, cwd=tmp_path
    )
    options = ("--plan=3", "--warmup", "1", "--steps", "2", "-o", "out")
    ours = program("run", *options, "train.py", python=preloaded.python(), cwd=tmp_path)
    assert ours.stdout == plain.stdout
    plan = backspot.Report.load(tmp_path / "out" / "report.json").plan
    assert not plan.why_not
    assert plan.what == "a copy of Sequential with its loss, forward and backward"
    assert "bf16" in {one.setting for one in plan.rungs}
    options = ("--plan-from", "out/report.json", "--warmup", "1", "--steps", "2", "-o", "again")
    ours = program("run", *options, "train.py", python=preloaded.python(), cwd=tmp_path)
    assert ours.stdout == plain.stdout
    plan = backspot.Report.load(tmp_path / "again" / "report.json").plan
    assert "not tried again" in plan.earlier
