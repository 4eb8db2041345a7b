"""Whether the plan of the report before came true in the report after."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from backspot import compare
from backspot.commands import main
from backspot.render.comparison import render_comparison
from backspot.render.html import comparison_to_html
from backspot.render.markdown import comparison_to_markdown
from backspot.render.notebook import comparison_html
from backspot.results import Plan, Report
from support.plans import BF16, COMPILED, LAYOUT, MS, PLAN, REFUSED
from support.sample_reports import ODD_NAMES, vit


def timed(step_ms: float | None, plan: Plan | None = None) -> Report:
    """A report whose steps take so long without the profiler."""
    if step_ms is None:
        return replace(vit(), plan=plan)
    ns = round(step_ms * MS)
    return replace(vit(), plan=plan, unprofiled_step_ns=ns, unprofiled_step_ns_by_step=(ns,) * 9)


def outcomes(before: Report, after: Report) -> dict[str, str]:
    return {one.setting: one.outcome for one in compare(before, after).planned}


BEFORE = timed(94.7, PLAN)


def test_each_rung_is_judged_by_the_step_after():
    assert outcomes(BEFORE, timed(54.6)) == {
        "channels_last": "came true",
        "bf16": "not reached",
        "torch.compile": "not reached",
    }
    assert outcomes(BEFORE, timed(30.3)) == {
        "channels_last": "faster than said",
        "bf16": "faster than said",
        "torch.compile": "came true",
    }


def test_a_plan_that_nobody_followed_came_true_in_nothing():
    assert set(outcomes(BEFORE, timed(94.5)).values()) == {"not reached"}


def test_settings_that_were_not_said_to_help_are_not_judged():
    said = outcomes(BEFORE, timed(60))
    assert not {"TF32", "fused optimizer", "batch 1,024", "CUDA graph"} & set(said)


def test_without_a_plan_or_a_ladder_nothing_is_said_of_one():
    for plan in (None, REFUSED):
        found = compare(timed(94.7, plan), timed(50))
        assert found.planned == ()
        assert "plan" not in " ".join(found.notes)
        assert "plan" not in render_comparison(found, width=80)


def test_a_step_that_was_only_recorded_judges_no_plan_and_it_is_said():
    found = compare(BEFORE, timed(None))
    assert found.planned == ()
    assert any("Whether the plan before came true is not known" in note for note in found.notes)
    assert "came true is" not in " ".join(compare(timed(94.7), timed(None)).notes)


@pytest.mark.parametrize(
    "form",
    [
        lambda found: render_comparison(found, width=200),
        lambda found: comparison_to_markdown(found).decode(),
        lambda found: comparison_to_html(found).decode(),
        comparison_html,
    ],
)
def test_every_output_has_what_was_said_and_what_is(form):
    said = form(compare(BEFORE, timed(54.6))).replace("&#95;", "_")
    assert "channels_last: said 54.0 ms, now 54.6 ms: came true." in said
    assert "bf16 with channels_last: said 40.1 ms, now 54.6 ms: not reached." in said
    odd = replace(PLAN, rungs=tuple(replace(LAYOUT, setting=name) for name in ODD_NAMES))
    hostile = form(compare(timed(94.7, odd), timed(54.6)))
    assert "\x1b" not in hostile
    if "<div" in hostile:
        assert "<img src=x" not in hostile


def test_the_command_says_it_of_saved_reports(tmp_path, capsys):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    BEFORE.save(before)
    timed(54.6).save(after)
    assert main(["diff", str(before), str(after)]) == 0
    assert "channels_last: said 54.0 ms, now 54.6 ms: came true." in capsys.readouterr().out
    assert main(["diff", str(before), str(after), "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)["planned"]
    assert [one["outcome"] for one in planned] == ["came true", "not reached", "not reached"]
    assert main(["diff", str(after), str(after)]) in (0, 2)
    assert "planned" not in capsys.readouterr().out


@given(st.floats(0.1, 500), st.floats(0.1, 500))
def test_a_longer_step_never_makes_more_of_a_plan_true(one, other):
    order = ("faster than said", "came true", "not reached")
    shorter, longer = (outcomes(BEFORE, timed(ms)) for ms in sorted((one, other)))
    for rung in (LAYOUT, BF16, COMPILED):
        assert order.index(shorter[rung.setting]) <= order.index(longer[rung.setting])
