"""A finding does not advise what the plan beside it has tried in vain."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import backspot
from backspot import Finding, Report
from backspot.live.plan.remedies import with_rungs
from backspot.results.findings import gain_of, helps
from backspot.results.plan import Plan, PlanVerdict, Rung
from backspot.results.report import changed

DATA = Path(__file__).parents[1] / "data"
_MS = 1_000_000


@cache
def located(name: str) -> Report:
    return backspot.locate(DATA / f"{name}.trace.json.gz")


def planned(name: str, *rungs: Rung) -> Report:
    report = located(name)
    plan = Plan("a copy of the model, forward and backward", 100 * _MS, rungs)
    return with_rungs(changed(report, plan=plan))


def rung(
    setting: str,
    axis: str,
    step_ms: int,
    verdict: PlanVerdict,
    note: str = "",
    on: tuple[str, ...] = (),
    *,
    kept: bool = False,
) -> Rung:
    """Return a rung of a step of 100 ms; one that was not tried where it takes 0 ms."""
    before, error = (100 * _MS, _MS) if step_ms else (0, 0)
    step = step_ms * _MS
    low, high = step - error, step + error
    return Rung(
        setting, axis, on, "", before, step, low, high, verdict=verdict, note=note, kept=kept
    )


def of(report: Report, rule: str) -> Finding:
    return next(finding for finding in report.findings if finding.rule == rule)


def test_compiling_that_loses_is_no_advice_of_a_launch_bound_step() -> None:
    before = of(located("h200/launch_bound"), "launch-bound")
    assert before.tier == "stable"
    assert before.saves is not None
    loses = rung("torch.compile", "compile", 110, "does not help")
    report = planned("h200/launch_bound", loses)
    finding = of(report, "launch-bound")
    assert helps(finding) is False
    assert gain_of(finding) is None
    assert finding.tier == "account"
    assert report.answer.rule != "launch-bound"
    assert "does not help: 100 ms as it is; 110 ms with torch.compile" in str(finding.tried)


def test_what_the_plan_gained_is_the_price() -> None:
    gains = rung("torch.compile", "compile", 60, "helps")
    finding = of(planned("h200/launch_bound", gains), "launch-bound")
    gain = gain_of(finding)
    assert helps(finding) is True
    assert finding.tier == "stable"
    assert gain is not None
    assert (gain.ns, gain.low_ns, gain.high_ns) == (40 * _MS, 39 * _MS, 41 * _MS)


def test_a_larger_batch_lends_its_price_to_no_other_remedy() -> None:
    note = "for as many samples as a step has now"
    loses = rung("torch.compile", "compile", 110, "does not help")
    batch = rung("batch 64", "batch", 60, "helps", note)
    finding = of(planned("h200/launch_bound", loses, batch), "launch-bound")
    assert helps(finding) is False
    assert "batch 64" not in str(finding.tried)


def test_a_larger_batch_is_said_to_train_something_else() -> None:
    batch = rung("batch 64", "batch", 60, "helps")
    finding = of(planned("h200/launch_bound", batch), "small-batch")
    assert finding.tried is not None
    assert finding.tried.best is not None
    assert finding.tried.best.changes_training


def test_a_setting_on_top_of_others_saves_what_it_adds() -> None:
    added = rung("bf16", "precision", 70, "helps", on=("channels_last",))
    finding = of(planned("h200/fp32_convnet", added), "no-tensor-cores")
    assert finding.tried is not None
    assert finding.tried.best is not None
    assert finding.tried.best.saves_ns == 30 * _MS
    assert "70.0 ms with bf16 (on top of channels_last, from 100 ms)" in str(finding.tried)


def test_pinned_memory_is_no_other_number_of_workers() -> None:
    pinned = rung("pinned memory", "loader", 90, "helps")
    finding = of(planned("findings/data_slow_vit", pinned), "waiting-for-data")
    assert finding == of(located("findings/data_slow_vit"), "waiting-for-data")
    more = rung("num_workers=4", "loader", 50, "helps")
    finding = of(planned("findings/data_slow_vit", pinned, more), "waiting-for-data")
    assert finding.tried is not None
    assert [variant.name for variant in finding.tried.variants] == ["as it is", "num_workers=4"]


def test_what_was_not_tried_says_why_and_keeps_its_price() -> None:
    because = "compiling takes more than the 9 s that were left"
    missing = rung("torch.compile", "compile", 0, "not tried", note=because)
    finding = of(planned("h200/launch_bound", missing), "launch-bound")
    assert str(finding.tried) == f"Not tried here: torch.compile: {because}."
    assert finding.saves == of(located("h200/launch_bound"), "launch-bound").saves


@pytest.mark.parametrize("name", ["h200/launch_bound", "h200/fp32_convnet", "h200/attention_math"])
def test_settings_of_other_kinds_change_no_finding(name: str) -> None:
    graphs = rung("CUDA graphs", "graph", 80, "helps")
    assert planned(name, graphs).findings == located(name).findings
    assert with_rungs(located(name)) is located(name)


def test_what_to_do_first_is_the_plans_own_first_rung() -> None:
    """A finding would begin with what its remedy names first, or with a rung on top of others."""
    first = rung("TF32", "precision", 60, "helps", kept=True)
    second = rung("bf16", "precision", 58, "undecided", on=("TF32",))
    remedy = planned("h200/fp32_convnet", first, second).answer.remedy
    assert remedy is not None
    assert (remedy.what, remedy.rule) == ("TF32", "")


def test_a_plan_of_another_step_is_no_first_remedy_and_says_so() -> None:
    first = rung("TF32", "precision", 60, "helps", kept=True)
    report = planned("h200/fp32_convnet", first)
    text = " ".join(str(changed(report, clock="real", step_ns=50 * _MS)).split())
    assert "First: TF32" not in text
    assert (
        "It was made of a step of 100 ms, and over the whole training a step takes 50.0 ms." in text
    )
    assert "It was made of a step" not in str(changed(report, clock="real", step_ns=95 * _MS))


def test_an_untried_rung_without_a_reason_is_named_alone() -> None:
    finding = of(
        planned("h200/launch_bound", rung("torch.compile", "compile", 0, "not tried")),
        "launch-bound",
    )
    assert str(finding.tried) == "Not tried here: torch.compile."
