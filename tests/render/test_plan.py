"""What every output says of a plan: its ladder, what does not help, and what costs precision."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from backspot import Report
from backspot.errors import NotATraceError
from backspot.render.html import to_html
from backspot.render.markdown import to_markdown
from backspot.render.notebook import report_html
from backspot.render.text import render_text
from backspot.results import Difference, Plan, Rung
from support.plans import (
    BATCH,
    BF16,
    COMPILED,
    FOREACH,
    GRAPH,
    LAYOUT,
    MS,
    NOTHING_HELPS,
    PLAN,
    REFUSED,
    TF32,
)
from support.sample_reports import ODD_NAMES, unlabelled, vit

LIVE = {"torch": "2.14.1"}
HINT = "backspot run --plan"


def planned(plan: Plan | None, **more: object) -> Report:
    return replace(vit(), plan=plan, recorded=LIVE, **more)


def outputs(report: Report) -> dict[str, str]:
    return {
        "screen": render_text(report, width=80),
        "text": render_text(report, width=80, full=True),
        "markdown": to_markdown(report).decode(),
        "page": to_html(report).decode(),
        "notebook": report_html(report),
    }


def plain(text: str) -> str:
    """Without tags and line breaks."""
    return " ".join(re.sub(r"<[^>]*>", " ", text).replace("&#95;", "_").split())


@pytest.mark.parametrize(
    ("name", "plan"), [("ladder", PLAN), ("nothing_helps", NOTHING_HELPS), ("refused", REFUSED)]
)
def test_it_reads_as_it_did(golden, name, plan):
    said = render_text(planned(plan), width=80)
    golden(f"plan.{name}.txt", said + "\n")


@pytest.mark.parametrize("form", outputs(vit()))
def test_every_output_has_all_that_a_plan_says(form):
    said = plain(outputs(planned(PLAN))[form])
    assert "In all: 94.7 → 30.2 ms, 3.1 times as fast." in said
    assert "The loader then limits the step at 46 ms" in said
    assert "has paid after 2,324 steps" in said
    assert "in 58.0 s, 50% of it to compile" in said
    assert "The GPU then limits the step: the host needs 12.3 ms of it." in said
    assert "Does not help here: TF32 94.7 → 94.8 ms." in said
    assert "Not tried: CUDA graph (the step waits for the GPU)." in said
    assert "Too close to tell: fused optimizer" in said
    for rung in (LAYOUT, BF16, COMPILED):
        assert rung.setting in said
    assert "model = torch.compile(model)" in said
    assert HINT not in said


@pytest.mark.parametrize("form", outputs(vit()))
def test_every_output_says_why_there_is_no_plan(form):
    said = plain(outputs(planned(REFUSED))[form])
    assert "No plan: the step runs an optimizer within the backward." in said
    assert "In all" not in said


@pytest.mark.parametrize(
    ("host", "device", "said"),
    [
        (20, 50, "The GPU limits the step: the host needs 20.0 ms of it."),
        (50, 20, "The host limits the step: the GPU needs 20.0 ms of it."),
        (50, 0, ""),
    ],
)
def test_a_plan_says_whether_host_or_gpu_limits_the_step_where_there_is_one(host, device, said):
    text = plain(
        render_text(
            planned(replace(NOTHING_HELPS, host_ns=host * MS, device_ns=device * MS)), width=80
        )
    )
    assert said in text
    assert ("limits the step" in text) == bool(said)


@pytest.mark.parametrize("form", outputs(vit()))
@pytest.mark.parametrize(("host", "device"), [(50, 20), (20, 50)])
def test_a_promise_that_the_host_limits_is_said_to_be_less_sure(form, host, device):
    last = replace(COMPILED, host_ns=host * MS, device_ns=device * MS)
    said = plain(outputs(planned(replace(PLAN, rungs=(LAYOUT, BF16, last))))[form])
    assert ("The speed of a host can change by more than ± shows." in said) is (host > device)


def test_nobody_takes_precision_for_free():
    said = render_text(planned(PLAN), width=80)
    head, first, layout, bf16 = said[said.index("setting  ") :].splitlines()[:4]
    assert head.split()[-3:] == ["outputs", "loss", "gradients"]
    assert first.split()[-3:] == ["1e-7", "0", "4e-7"]  # of a second run as it is
    assert layout.split()[-3:] == ["2e-6", "3e-7", "1e-5"]
    assert bf16.split()[-3:] == ["0.4%", "8e-4", "2.1%"]


def test_the_memory_as_it_is_stands_first_also_where_a_loader_comes_before_the_model():
    workers = Rung("num_workers=8", "loader", before_ns=99 * MS, step_ns=95 * MS, kept=True)
    plan = replace(PLAN, step_ns=99 * MS, rungs=(replace(workers, verdict="helps"), *PLAN.rungs))
    said = render_text(planned(plan), width=80)
    head, first = said[said.index("setting  ") :].splitlines()[:2]
    assert "memory" in head
    assert "5.20 GB" in first


def test_what_was_not_tried_is_named_by_the_reason_each_once():
    late = [
        replace(GRAPH, setting=name, axis=name, note="no time was left")
        for name in ("torch.compile", "workers")
    ]
    said = plain(render_text(planned(replace(PLAN, rungs=(late[0], GRAPH, late[1]))), width=80))
    assert (
        "Not tried: torch.compile, workers (no time was left); "
        "CUDA graph (the step waits for the GPU)." in said
    )


def test_what_helps_and_is_no_part_of_the_ladder_is_named_beside_it():
    alone = replace(TF32, verdict="helps", step_ns=60 * MS)
    said = plain(render_text(planned(replace(PLAN, rungs=(LAYOUT, BF16, alone))), width=80))
    assert "Helps less: TF32 94.7 → 60.0 ms." in said  # bf16 is of its kind
    late = replace(alone, note="no part of the ladder: no time was left")
    said = plain(render_text(planned(replace(PLAN, rungs=(LAYOUT, late))), width=80))
    assert "Helps less" not in said  # it could help more
    assert "Helps by itself: TF32 94.7 → 60.0 ms (no part of the ladder: no time was left)" in said
    said = plain(render_text(planned(replace(PLAN, rungs=(alone,))), width=80))
    assert "Helps by itself: TF32 94.7 → 60.0 ms." in said
    assert "nothing makes a step shorter" not in said


def test_results_of_which_nothing_is_known_have_no_columns():
    rung = replace(BF16, difference=None, memory_bytes=0, before_memory_bytes=0, on=())
    report = planned(replace(PLAN, rungs=(rung,)))
    said = render_text(report, width=80)
    head = said[said.index("setting  ") :].splitlines()[0]
    assert head.split() == ["setting", "before", "step", "ms", "±", "ms"]
    for form, text in outputs(report).items():
        assert "how far from those as it is" not in plain(text), form
        assert "memory: of forward" not in plain(text), form
    assert all(
        "how far from those as it is" in plain(text) for text in outputs(planned(PLAN)).values()
    )


def test_code_can_be_copied_whole_however_narrow_the_terminal():
    said = render_text(planned(PLAN), width=40).splitlines()
    for rung in (LAYOUT, BF16, COMPILED):
        for line in rung.code.splitlines():
            assert f"   {line}" in said


def test_another_batch_is_told_by_the_same_samples_and_never_in_all():
    said = plain(render_text(planned(PLAN), width=80))
    assert "batch 1,024 on top of the plan: 512 samples take 30.2 → 29.0 ms" in said
    assert "what the model learns" in said
    untried = replace(BATCH, step_ns=0, verdict="not tried", note="memory is full")
    said = plain(render_text(planned(replace(PLAN, rungs=(LAYOUT, untried))), width=80))
    assert "Not tried: batch 1,024 (memory is full)." in said


def test_a_live_report_without_a_plan_says_in_one_line_how_to_get_one():
    for form, said in outputs(planned(None)).items():
        assert said.count(HINT) == 1, form


@pytest.mark.parametrize(
    "report",
    [
        vit(),  # of a trace that was exported
        replace(unlabelled(), recorded=LIVE),  # no model is known
        planned(PLAN),
        planned(REFUSED),
    ],
)
def test_there_is_no_such_line_where_it_would_not_help(report):
    for form, said in outputs(report).items():
        assert HINT not in said, form


def test_names_and_code_from_elsewhere_are_escaped_everywhere():
    rungs = tuple(
        replace(LAYOUT, setting=name, code=f"{name}\n```\n</code>", note=name, axis=name)
        for name in ODD_NAMES
    )
    others = tuple(replace(one, kept=False, verdict="does not help", on=ODD_NAMES) for one in rungs)
    odd = Plan(ODD_NAMES[0], 94 * MS, (*rungs, *others), next_limit=ODD_NAMES[2])
    said = outputs(planned(odd))
    for form, text in said.items():
        assert "\x1b" not in text, form
        assert "\u202e" not in text, form
        text.encode()  # no half of a surrogate pair
    for form in ("page", "notebook"):
        assert "<img src=x" not in said[form]
    assert "<img" not in re.sub(r"````python.*?````", "", said["markdown"], flags=re.S)


def test_a_plan_comes_back_from_a_file_as_it_was(tmp_path):
    for at, plan in enumerate((PLAN, NOTHING_HELPS, REFUSED, None)):
        report = planned(plan)
        path = report.save(tmp_path / f"{at}.json")
        assert Report.load(path) == report
        assert ("plan" in json.loads(path.read_bytes())) == (plan is not None)


def test_a_saved_plan_with_an_impossible_time_is_refused(tmp_path):
    path = planned(PLAN).save(tmp_path / "report.json")
    path.write_text(path.read_text().replace('"step_ns": 54000000', '"step_ns": -54000000'))
    with pytest.raises(NotATraceError, match="not a complete Backspot report"):
        Report.load(path)


times = st.integers(1, 10**12)
rungs = st.builds(
    Rung,
    setting=st.text(max_size=12),
    axis=st.sampled_from(["precision", "batch", "loader", "compile"]),
    on=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    code=st.text(max_size=30),
    before_ns=times,
    step_ns=times,
    low_ns=times,
    high_ns=times,
    memory_bytes=st.integers(0, 10**12),
    before_memory_bytes=st.integers(0, 10**12),
    compile_ns=st.integers(0, 10**12),
    difference=st.none() | st.builds(Difference, st.floats(0, 1e9), st.floats(0, 1e9)),
    verdict=st.sampled_from(["helps", "does not help", "undecided", "not tried"]),
    note=st.text(max_size=12),
    kept=st.booleans(),
)


@given(st.lists(rungs, max_size=5).map(tuple), times)
def test_any_plan_can_be_told_and_names_each_of_its_settings(some, step_ns):
    plan = Plan("a copy", step_ns, some)
    for form, said in outputs(planned(plan)).items():
        assert "Plan" in said, form
    told = plain(render_text(planned(plan), width=200))
    for rung in some:
        if rung.setting.isalnum():
            assert rung.setting in told


@given(st.lists(rungs, max_size=5).map(tuple), times)
def test_what_all_of_a_ladder_makes_is_its_last_rung(some, step_ns):
    plan = Plan("a copy", step_ns, some)
    assert plan.planned_ns == (plan.ladder[-1].step_ns if plan.ladder else step_ns)
    for rung in some:
        assert rung.step_ns == rung.before_ns - rung.saves_ns
        if rung.pays_after is not None:
            assert rung.pays_after * rung.saves_ns >= rung.compile_ns
            assert (rung.pays_after - 1) * rung.saves_ns < rung.compile_ns


def test_what_too_few_rounds_leave_open_is_not_called_close() -> None:
    far = replace(FOREACH, setting="bf16", on=(), before_ns=130 * MS, step_ns=96 * MS)
    said = plain(render_text(planned(replace(PLAN, rungs=(far, FOREACH))), width=200))
    assert "Too close to tell: fused optimizer" in said
    assert "Not certain in so little time (--plan=300 takes more): bf16 130 → 96.0 ms." in said
