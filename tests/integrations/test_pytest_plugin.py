"""The fixture ``backward_budget``, in test suites of its users."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

torch = pytest.importorskip("torch")

import backspot  # noqa: E402

pytest_plugins = ["pytester"]

# The times of these modules are known: their backward sleeps.
SUITE = """
import torch
from support.sleeping import Sleep
from torch import nn

class Layer(nn.Module):
    def __init__(self, ms):
        super().__init__()
        self.ms = ms

    def forward(self, x):
        return Sleep.apply(x, lambda: self.ms / 1000)

def training(ms, last):
    model = nn.Sequential(nn.Linear(2, 2), *(Layer(ms) for _ in range(9)), Layer(last))
    return lambda: model(torch.ones(2, 2)).sum().backward(), model

# Of fewer steps, a busy machine stretches the typical one.
FEW = {"steps": 11, "warmup": 1}
"""


@pytest.fixture(scope="module")
def _everything_is_imported():
    """pytester removes what its runs import, and parts of PyTorch cannot be imported again."""
    model = torch.nn.Linear(1, 1)
    backspot.profile(lambda: model(torch.ones(1)).sum().backward(), model, steps=1, warmup=1)


@pytest.fixture
def suite(pytester, _everything_is_imported):
    """Write a test and run it; return the result."""
    installed = entry_points(group="pytest11", name="backspot")
    plugin = [] if installed else ["-p", "backspot.integrations.pytest_plugin"]

    def run(body, *options):
        test = "".join(f"    {line}\n" for line in body.splitlines())
        pytester.makepyfile(f"{SUITE}\ndef test_speed(backward_budget):\n{test}")
        return pytester.runpytest_inprocess(*plugin, *options)

    return run


def said(result):
    return "\n".join(result.outlines)


def test_modules_within_their_share_pass_and_the_report_is_returned(suite):
    body = (
        "report = backward_budget(*training(1, 1), share={'1': 0.9, '[1-9]': 1}, **FEW)\n"
        "assert report.steps == 11"
    )
    suite(body).assert_outcomes(passed=1)


@pytest.mark.slow
def test_modules_beyond_their_share_fail_with_the_report(suite):
    result = suite("backward_budget(*training(0, 20), share={'1*': 0.2, '0': 1}, **FEW)")
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines([r"1\* takes \d+% of the backward; its budget is 20%"])
    assert "10 (Layer) takes" in said(result)
    assert "pytest_plugin.py" not in said(result)


def test_a_pattern_that_matches_nothing_is_an_error(suite):
    result = suite("backward_budget(*training(0, 0), share={'blocks.*': 0.2}, **FEW)")
    result.assert_outcomes(failed=1)
    assert "match='blocks.*' matches no module" in said(result)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("share='0.3'", "share='0.3': give a dict of patterns and shares, such as"),
        ("against=(1, 2, 3)", "against has 3 parts: give the path of a report, or a step and its"),
        ("against=3", "against= takes the path of a file, not int"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_told_in_a_line(given, line, suite):
    result = suite(f"backward_budget(*training(0, 0), {given}, **FEW)")
    result.assert_outcomes(failed=1)
    assert f"UsageError: {line}" in said(result)
    assert "pytest_plugin.py" not in said(result)


def test_a_place_for_markdown_that_is_not_there_is_told_before_the_tests(suite, pytester):
    result = suite("raise AssertionError", "--backspot-markdown", "nodir/x.md")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    told = "ERROR: --backspot-markdown nodir/x.md: name a file, in a folder that is there"
    assert told in result.errlines


AGAINST = "backward_budget(*training({ms}, {last}), against='base.json', slower_by={by}, **FEW)"


@pytest.mark.slow
def test_a_step_is_compared_with_the_report_that_an_earlier_run_wrote(suite, pytester):
    missing = suite(AGAINST.format(ms=2, last=2, by=1))
    missing.assert_outcomes(failed=1)
    assert "base.json is missing: pytest --backspot-update writes it" in said(missing)
    suite(AGAINST.format(ms=2, last=2, by=1), "--backspot-update").assert_outcomes(passed=1)
    assert (pytester.path / "base.json").exists()

    # A machine that is three times slower is no reason to fail.
    suite(AGAINST.format(ms=6, last=6, by=1)).assert_outcomes(passed=1)

    slower = suite(AGAINST.format(ms=2, last=60, by=1), "--backspot-markdown", "diff.md")
    slower.assert_outcomes(failed=1)
    slower.stdout.re_match_lines(
        [r"10 got slower(?: by \d+%|, ×\d+ as long,) in time .*; its budget is 100%"]
    )
    assert "modules with the same work have in common" in " ".join(said(slower).split())
    text = (pytester.path / "diff.md").read_text()
    assert text.startswith("### test_speed\n\n**")
    assert (text.count("###"), text.count("| `10`")) == (1, 1)


@pytest.mark.slow
def test_a_step_is_compared_with_another_one_in_the_same_run(suite):
    body = "backward_budget(*training({}, {}), against=training(1, 1), slower_by=1, **FEW)"
    suite(body.format(1, 1)).assert_outcomes(passed=1)
    result = suite(body.format(8, 8))
    result.assert_outcomes(failed=1)
    got = r"the whole backward got slower(?: by \d+%|, ×\d+ as long,) in time"
    result.stdout.re_match_lines([got])


# In half of the steps each layer sleeps far longer.
NOISY = """
def noisy():
    model = nn.Sequential(nn.Linear(2, 2), *(Layer(1) for _ in range(3)))

    def step():
        for layer in model[1:]:
            layer.ms = 21 - layer.ms
        model(torch.ones(2, 2)).sum().backward()

    return step, model

backward_budget(*noisy(), against=noisy(), steps=8, warmup=1)
"""


@pytest.mark.slow
def test_noise_beyond_the_budget_warns_and_fails_only_where_that_is_asked_for(suite):
    result = suite(NOISY)
    result.assert_outcomes(passed=1, warnings=1)
    told = said(result)
    assert "Too noisy to tell whether this got more than 10% slower:" in told
    assert re.search(r"the whole backward: .* ms, then .* ms \(.*%\), noise ±.* ms \(±\d+%\)", told)
    assert "OMP_NUM_THREADS=1" in told

    strict = suite(NOISY, "--backspot-strict")
    strict.assert_outcomes(failed=1)
    assert "Too noisy to tell whether this" in said(strict)


REPEATED = """
class Repeated(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.layers = nn.ModuleList(Layer(3) for _ in range(4))
        self.extra = Layer(3)
        self.first = nn.Linear(2, 2)
        self.times = times

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        for _ in range(self.times):
            x = self.extra(x)
        return x

model = Repeated({times})
step = lambda: model(torch.ones(2, 2)).sum().backward()
backward_budget(step, model, against='base.json', **FEW)
"""


@pytest.mark.slow
def test_more_calls_than_in_the_saved_report_are_no_slower_machine(suite):
    suite(REPEATED.format(times=1), "--backspot-update").assert_outcomes(passed=1)
    result = suite(REPEATED.format(times=15))
    result.assert_outcomes(failed=1)
    told = " ".join(said(result).split())
    assert "the whole backward got slower by" in told
    assert "The work differs: extra (Layer) is called 15 times per step, 1 before." in told


@pytest.mark.posix  # what takes names away imports torch
def test_a_start_of_pytest_imports_nothing_for_it():
    code = (
        "import sys, backspot.integrations.pytest_plugin\n"
        "print([*sys.modules.keys() & {'torch', 'numpy', 'msgspec', 'rich'}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"
