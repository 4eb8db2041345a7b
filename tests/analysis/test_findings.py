"""Each rule on a recording in which its cause was planted, and on one without it.

The recordings were made by ``benchmarks/causes``, on an H200 or on a CPU; ``expect.json`` beside
them says what was planted where.
"""

from __future__ import annotations

import gzip
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import backspot
from backspot import Report
from backspot.analysis.findings import (
    LEAST_SHARE,
    Evidence,
    all_rules,
    rules,
)
from backspot.analysis.findings.registry import rule
from backspot.analysis.parts import RULES
from backspot.job.findings import all_rules as rules_over_ranks
from backspot.registry import Registry
from backspot.results.findings import ALL_OVER, Finding, is_concentrated, stable
from support import recordings
from support.choice import slow_except
from support.h200 import WITH_BACKWARD, report_of
from support.sums import assert_adds_up
from support.synthetic import Trace

pytestmark = recordings.IN_ONE_WORKER

DATA = recordings.DATA / "findings"
EXPECTED: dict[str, dict[str, Any]] = json.loads((DATA / "expect.json").read_text())
DOCS = Path(__file__).parents[2] / "docs" / "findings.md"
PLANTED = sorted(name for name, case in EXPECTED.items() if case["planted"])
CLEAN = sorted(name for name, case in EXPECTED.items() if not case["planted"])
RECORDED = {case["rule"] for case in EXPECTED.values()}
NAMES = {rule.name for rule in all_rules()}


def report(name: str) -> Report:
    return recordings.report_of(DATA / f"{name}.trace.json.gz")


def test_a_trace_that_is_cut_short_is_blamed_on_nothing(tmp_path):
    text = gzip.decompress((DATA.parent / "h200" / "vit_patch_drop.trace.json.gz").read_bytes())
    path = tmp_path / "t.json"
    path.write_bytes(text[: len(text) * 6 // 10])  # behind the host's events, before the kernels
    cut = backspot.locate(path)
    assert cut.gpu_ns == 0 < cut.wall_ns
    assert "no causes are given" in cut.warnings[0]
    assert cut.findings == ()


@pytest.mark.parametrize("name", slow_except(PLANTED[::4], PLANTED))
def test_what_was_planted_is_found_where_it_is_and_nothing_else(name):
    case = EXPECTED[name]
    found = {finding.rule: finding for finding in report(name).findings}
    assert case["rule"] in found, case["about"]
    assert sorted(found) == sorted(case["found"])
    assert found[case["rule"]].path == case["path"]


@pytest.mark.parametrize("name", slow_except(CLEAN[::4], CLEAN))
def test_well_done_the_rule_is_silent(name):
    case = EXPECTED[name]
    found = [finding.rule for finding in report(name).findings]
    assert case["rule"] not in found, case["about"]
    assert sorted(found) == sorted(case["found"])


def test_every_rule_has_a_recording_of_either_kind():
    assert {EXPECTED[name]["rule"] for name in PLANTED} == RECORDED
    assert {EXPECTED[name]["rule"] for name in CLEAN} == RECORDED
    assert RECORDED == NAMES


def test_rules_are_sorted_by_name_with_those_that_need_the_others_last():
    names = [(rule.fallback, rule.name) for rule in all_rules()]
    assert names == sorted(names)
    last = [rule.name for rule in all_rules() if rule.fallback]
    assert last == ["backward-ratio", "launch-bound", "slow-node", "small-batch"]


@pytest.mark.slow
def test_the_example_of_a_rule_is_one_file_and_nothing_else(tmp_path):
    _, _, example = inspect.cleandoc(rules.__doc__ or "").partition("::\n\n")
    example = textwrap.dedent(example.partition("\n\n1. ")[0])
    imports = (
        "from backspot.analysis.findings.evidence import Evidence\n"
        "from backspot.analysis.findings.registry import finding, rule\n"
        "from backspot.results.findings import Finding\n"
        "from backspot.trace import names\n"
    )
    (tmp_path / "slow_sort.py").write_text(imports + example)
    trace = DATA.parent / "h200" / "vit_patch_drop.trace.json.gz"
    command = (
        "import backspot\n"
        "from backspot.analysis.findings import rules\n"
        f"rules.__path__.append({str(tmp_path)!r})\n"
        f"print(*(finding.rule for finding in backspot.locate({str(trace)!r}).findings))\n"
    )
    ran = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert "slow-sort" in ran.stdout.split(), ran.stderr


def test_a_second_rule_of_a_name_is_an_error():
    def find(evidence: Evidence) -> None: ...

    assert "casts" in {rule.name for rule in all_rules()}
    with pytest.raises(ValueError, match="a rule of this name exists already"):
        rule("casts")(find)


def test_a_rule_is_registered_again_by_an_import_that_is_made_again():
    def imported() -> Any:
        def find(evidence: Evidence) -> None: ...

        return find

    registry: Registry[Any, Any, None] = Registry("nowhere")
    registry.rule("one")(imported())
    registry.rule("one")(imported())
    with pytest.raises(ValueError, match="a rule of this name exists already"):
        registry.rule("one")(test_a_second_rule_of_a_name_is_an_error)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["backspot", "backspot.analysis.timeline", "backspot.pipeline"])
def test_importing_the_package_does_not_import_the_rules(module):
    shown = "sum(name.startswith('backspot.analysis.findings.rules') for name in sys.modules)"
    command = [sys.executable, "-c", f"import sys, {module}; print({shown})"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"


def test_the_page_of_findings_is_current_and_has_a_section_for_every_rule():
    """``python docs/make_findings.py`` makes it so."""
    if not DOCS.exists():
        pytest.skip("the tests run outside of the checkout")
    script = DOCS.with_name("make_findings.py")
    spec = importlib.util.spec_from_file_location("make_findings", script)
    make_findings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_findings)
    page = DOCS.read_text("utf-8")
    assert page == make_findings.made()
    names = NAMES | {rule.name for of in (*RULES, rules_over_ranks) for rule in of()}
    assert set(re.findall(r"^## (.*)$", page, re.MULTILINE)) == names
    assert set(re.findall(r"^- \[(.*?)\]\(#\1\): ", page, re.MULTILINE)) == names


def certain_or_in_one_place(finding: Finding) -> bool:
    return not (finding.saves and finding.saves.at_best) or is_concentrated(finding)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PLANTED, *CLEAN])
def test_findings_are_whole_and_in_order(name):
    found = stable(report(name).findings)
    replayed = report(name).replayed_step
    least = 0.005 * replayed.ns if replayed else 0
    known = [f for f in found if f.saves and f.saves.ns >= least]
    unknown = [f for f in found if f.saves is None]
    assert found[: len(known) + len(unknown)] == (*known, *unknown)  # those without a gain are last
    counted = [f.saves.ns * (1 if certain_or_in_one_place(f) else ALL_OVER) for f in known]
    for gains in (counted, [f.wall_ns for f in unknown]):
        assert gains == sorted(gains, reverse=True)
    whole = report(name).whole_ns
    for finding in report(name).findings:
        assert finding.wall_ns >= LEAST_SHARE * whole
        assert report(name).steps < 2 * finding.steps <= 2 * report(name).steps
        assert finding.wall_ns == sum(place.wall_ns for place in finding.places)
        costs = [place.wall_ns for place in finding.places]
        assert costs == sorted(costs, reverse=True)
        assert all((finding.title, finding.seen, finding.remedy))
        assert finding.link.startswith(("https://docs.pytorch.org/", "https://docs.python.org/"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PLANTED, *CLEAN])
def test_the_phases_of_each_recording_sum_to_its_steps(name):
    assert_adds_up(report(name))
    (backward,) = (phase for phase in report(name).phases if phase.name == "backward")
    assert backward.wall_ns_by_step == report(name).wall_ns_by_step


@pytest.mark.parametrize("name", slow_except(PLANTED[:6], [*PLANTED, *CLEAN]))
def test_no_finding_costs_more_than_the_steps_took(name):
    whole = report(name).whole_ns
    assert all(finding.wall_ns <= whole for finding in report(name).findings)


def test_what_is_folded_away_is_still_named_by_its_own_path():
    folded = backspot.locate(DATA / "casts_gelu_vit.trace.json.gz", depth=0)
    assert folded.findings[0].places == report("casts_gelu_vit").findings[0].places


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("vit_patch_drop", "sorted-indexing"),
        ("vit_patch_drop", "deterministic-fill"),
        pytest.param("embedding_duplicates", "dense-embedding-gradient", marks=pytest.mark.slow),
        ("pageable_copies", "pageable-copy"),
        ("gpt2_checkpointed", "recompute"),
        pytest.param("gpt2_checkpointed_reentrant", "recompute", marks=pytest.mark.slow),
        pytest.param("launch_bound", "launch-bound", marks=pytest.mark.slow),
        pytest.param("launch_bound", "small-batch", marks=pytest.mark.slow),
        pytest.param("fp32_convnet", "no-tensor-cores", marks=pytest.mark.slow),
        pytest.param("attention_math", "attention-math", marks=pytest.mark.slow),
        pytest.param("optimizer_foreach_false", "optimizer-kernels", marks=pytest.mark.slow),
        ("ddp.rank0", "exposed-communication"),
        pytest.param("fsdp2.rank1", "exposed-communication", marks=pytest.mark.slow),
        pytest.param("model_parallel", "device-copies", marks=pytest.mark.slow),
    ],
)
def test_older_recordings_have_the_finding_that_they_were_made_for(name, rule):
    assert rule in [finding.rule for finding in report_of(name).findings]


@pytest.mark.parametrize("name", WITH_BACKWARD)
def test_copies_that_compute_hides_cost_nothing(name):
    if name == "pinned_prefetch":
        rules = [finding.rule for finding in report_of(name).findings]
        assert "pageable-copy" not in rules
        assert "host-to-device-volume" not in rules


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(0, 20), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_a_trace_holds_the_rules_end_without_complaint(tmp_path_factory, pieces):
    trace, time = Trace(), 0
    trace.forward("block", "Block", 0, 100)
    for number, (start, length, wait, waits) in enumerate(pieces):
        trace.operator("aten::mul", 2 * number, 2 * number + 1, seq=number)
        time += start
        begin = 200 + time
        trace.node("MulBackward0", begin, begin + length, seq=len(pieces) - 1 - number)
        trace.kernel(begin + wait, begin + wait + length, launch=begin, name="sgemm_volta")
        if waits:
            trace.event("cuda_runtime", "cudaStreamSynchronize", begin, begin + length, 2)
        time += length
    folder = tmp_path_factory.mktemp("trace")
    located = backspot.locate(trace.save(folder / "trace.json"))
    assert {finding.rule for finding in located.findings} <= {"host-waits", "launch-bound"}
    for finding in located.findings:
        assert 0 < finding.wall_ns <= located.wall_ns
        assert finding.wall_ns == sum(place.wall_ns for place in finding.places)
