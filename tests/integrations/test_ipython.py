"""``%%backspot`` in IPython."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("IPython")

import backspot  # noqa: E402
from support.leftovers import left_in_torch  # noqa: E402

SETUP = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
"""
TRAINING = """
for step in range(8):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


@pytest.fixture
def run():
    """Run a cell in a shell of its own; what it displays, and what it prints."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    saved = sys.displayhook, sys.excepthook, sys.modules["__main__"]
    shell = InteractiveShell.instance(config=config)

    def cell(code):
        with capture_output() as captured:
            shell.run_cell(code)
        return captured

    cell.variables = shell.user_ns
    cell(f"%load_ext backspot\n{SETUP}")
    yield cell
    shell.user_ns.clear()
    InteractiveShell.clear_instance()
    sys.displayhook, sys.excepthook, sys.modules["__main__"] = saved


def test_a_cell_trains_as_ever_and_shows_its_report(run):
    run(TRAINING)
    plain = run.variables["losses"]
    run(SETUP)
    ending = "print(len(losses)); 'the end'"
    shown = run(f"%%backspot found --warmup 1 --steps 2\n{TRAINING}\n{ending}")
    assert run.variables["losses"] == plain
    (displayed,) = shown.outputs
    assert '<div class="backspot">' in displayed.data["text/html"]
    assert "8\n" in shown.stdout
    assert "'the end'" in shown.stdout
    report = run.variables["found"]
    assert isinstance(report, backspot.Report)
    assert report.steps == 2
    assert {"0", "1", "2"} <= {row.path for row in report.modules}
    assert not left_in_torch()


def test_the_files_are_written_if_that_is_wanted(run, tmp_path):
    run(f"%%backspot --warmup 1 --steps 2 -o {tmp_path}\n{TRAINING}")
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.html",
        "report.json",
        "trace.json.gz",
    }


@pytest.mark.slow
def test_a_plan_of_a_cell_is_in_its_report_and_its_files_and_changes_no_loss(run, tmp_path):
    training = TRAINING.replace("range(8)", "range(12)")
    run(training)
    plain = run.variables["losses"]
    run(SETUP)
    run(f"%%backspot --plan=4 found --warmup 1 --steps 2 -o {tmp_path}\n{training}")
    assert run.variables["losses"] == plain
    plan = run.variables["found"].plan
    assert plan.allowed_ns == 4 * 10**9
    assert any(rung.step_ns for rung in plan.rungs)
    assert backspot.Report.load(tmp_path / "report.json").plan == plan
    assert not left_in_torch()


def test_a_cell_that_fails_shows_its_error_and_what_was_recorded(run):
    failing = TRAINING + "    if step == 6: raise ValueError('broken')\n"
    shown = run(f"%%backspot found --warmup 1 --steps 3\n{failing}")
    assert "ValueError: broken" in shown.stdout + shown.stderr
    assert run.variables["found"].steps == 2
    assert not left_in_torch()


def test_too_few_steps_or_a_wrong_line_are_one_clear_line(run):
    shown = run(f"%%backspot --warmup 3\n{TRAINING}")
    assert "no report: the cell ended after 8 steps, and a report needs 15" in shown.stderr
    assert not shown.outputs
    for line, said in (
        ("--steps 0", "steps=0"),
        ("--no", "unrecognized arguments: --no"),
        ("--plan=0", "argument --plan: '0': give a whole number of seconds from 1 to 86400"),
        (f"--plan={'9' * 5000}", "argument --plan: "),
        ("--plan report more", "unrecognized arguments: more"),  # no number of seconds
        ("'a", "'a: No closing quotation"),
        (f"-o {__file__}/x", f"-o {__file__}/x: nothing can be written there"),
    ):
        wrong = run(f"%%backspot {line}\nran = True")
        assert f"UsageError: {said}" in wrong.stdout + wrong.stderr
    assert "ran" not in run.variables
    assert not left_in_torch()
