"""``--format github``: findings as annotations of a workflow, which no name can break."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

import backspot
from backspot.commands import main
from backspot.render.annotations import to_annotations
from backspot.results.report import changed
from support.recordings import report_of

DATA = Path(__file__).parents[1] / "data"
TRACE = DATA / "h200/vit_patch_drop.trace.json.gz"
NOTICE = re.compile(r"::notice title=Backspot::([^\r\n]+)")
COMMAND = re.compile(r"::warning ((?:[a-z]+=[^,:\r\n]*,?)+)::([^\r\n]*)")


@pytest.fixture(scope="module")
def report():
    return backspot.locate(TRACE)


def annotations(report, **options):
    """Properties and text of each annotation, as a runner reads them."""
    read = []
    answer, *lines = to_annotations(report, **options).decode().splitlines()
    assert NOTICE.fullmatch(answer)
    for line in lines:
        properties, text = COMMAND.fullmatch(line).groups()
        named = dict(one.split("=", 1) for one in properties.split(","))
        read.append(({name: plain(value) for name, value in named.items()}, plain(text)))
    return read


def plain(escaped):
    for character, code in {"\r": "%0D", "\n": "%0A", ":": "%3A", ",": "%2C"}.items():
        escaped = escaped.replace(code, character)
    return escaped.replace("%25", "%")


def test_a_finding_is_a_warning_with_its_rule_its_cost_and_its_remedy(report):
    (finding,) = (one for one in report.findings if one.tier == "stable")
    ((properties, text),) = annotations(report)
    assert properties == {"title": f"{finding.title} ({finding.rule})"}
    assert text.startswith("patch_drop (PatchDropout): 5.6 ms, 19% of the step")
    assert text.endswith(finding.remedy)


def test_the_answer_comes_first_also_where_nothing_was_found(report):
    for one in (report, changed(report, findings=())):
        answer, *_ = to_annotations(one).decode().splitlines()
        assert "patch_drop (PatchDropout) takes 28%25 of the backward" in answer


def test_it_stands_at_the_line_of_its_first_place_that_has_one(report):
    finding = next(one for one in report.findings if one.tier == "stable")
    place = finding.places[0]
    there = replace(place, line="models/odd, name:v2.py:31")
    with_line = changed(report, findings=(replace(finding, places=(place, there)),))
    ((properties, _),) = annotations(with_line)
    assert properties["file"] == "models/odd, name:v2.py"
    assert properties["line"] == "31"


@given(st.text(min_size=1, max_size=30))
@example("a,line=9::\n::error::b")
def test_no_name_breaks_an_annotation_or_adds_one(name):
    report = report_of(TRACE)
    finding = next(one for one in report.findings if one.tier == "stable")
    place = replace(finding.places[0], path=name, line=f"{name}:3")
    hostile = changed(report, findings=(replace(finding, title=name, places=(place,)),))
    ((properties, _),) = annotations(hostile)
    assert properties["line"] == "3"


def test_findings_of_preview_rules_are_annotations_where_they_are_asked_for(capsys):
    trace = str(DATA / "findings/masks_read_gpt.trace.json.gz")
    assert main(["show", trace, "--format", "github"]) == 0
    without = capsys.readouterr().out.splitlines()
    assert main(["show", trace, "--format", "github", "--preview"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(without) > 0
