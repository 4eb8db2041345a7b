"""What is found in a fixed step is held against the step before the fix."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.causes import after_fix
from benchmarks.causes.after_fix import (
    Variants,
    cases,
    judged,
    line_of,
    second_causes,
    summary_of_lines,
)
from benchmarks.kept import answer_of, keep, path_of, read_evidence, rows_of


def finding(rule="casts", place="blocks.0", promises=5.0, **more):
    """A finding of a step of 100 ms."""
    return {
        "rule": rule, "tier": "stable", "places": [place], "title": "", "seen": "", "remedy": "",
        "takes_ms": 10.0, "promises_ms": promises, "bound": "", "tried": "",
    } | more  # fmt: skip


def verdict(before, after, case=None, known=None):
    """The verdict on one finding of the fixed step."""
    record = {
        "before": {"step_ms": 100.0, "findings": before},
        "after": {"step_ms": 100.0, "findings": [after]},
    }
    case = case or Variants("", lambda *_: None)
    (found,) = judged(case, record, known)
    return found


@pytest.mark.parametrize(
    ("before", "after", "new", "promises"),
    [
        ([], finding(), True, True),
        ([], finding(promises=1.0), True, False),
        ([], finding(promises=None), True, False),
        ([finding()], finding(), False, False),
        ([finding(promises=9.0)], finding(promises=5.0), False, False),
        ([finding(promises=1.0)], finding(promises=9.0), False, True),
        ([finding(promises=None)], finding(promises=9.0), False, False),
        ([finding(place="blocks.1")], finding(), False, False),
        ([finding(place="blocks.*")], finding(), False, False),
        ([finding(place="head")], finding(), True, True),
        ([finding("layout-copies")], finding(), True, True),
        ([finding(places=[])], finding(places=[]), False, False),
    ],
)
def test_a_finding_was_there_before_at_its_place_with_as_large_a_promise(
    before, after, new, promises
):
    found = verdict(before, after)
    assert (found["new"], found["promises"]) == (new, promises)


@pytest.mark.parametrize(("step", "promises"), [(50.0, False), (100.0, True), (200.0, True)])
def test_a_promise_is_as_large_as_before_where_all_of_the_step_takes_longer(step, promises):
    record = {
        "before": {"step_ms": step, "findings": [finding(promises=20.0)]},
        "after": {"step_ms": 100.0, "findings": [finding(promises=40.0)]},
    }
    (found,) = judged(Variants("", lambda *_: None), record)
    assert found["promises"] is promises


@pytest.mark.parametrize(("step", "new"), [(100.0, True), (1000.0, False)])
def test_what_was_little_of_a_long_step_is_not_new_in_a_short_one(step, new):
    record = {
        "before": {"step_ms": step, "findings": []},
        "after": {"step_ms": 100.0, "findings": [finding()]},
    }
    (found,) = judged(Variants("", lambda *_: None), record)
    assert (found["new"], found["promises"]) == (new, True)


def test_of_the_cause_itself_no_promise_is_left_unless_the_fix_leaves_a_part():
    named = Variants("", lambda *_: None, names_cause=lambda one: one["rule"] == "casts")
    assert verdict([finding()], finding(), named)["promises"]
    assert not verdict([finding()], finding(promises=1.0), named)["promises"]
    left = Variants("", lambda *_: None, names_cause=named.names_cause, leaves=True)
    found = verdict([finding()], finding(), left)
    assert not found["promises"]
    assert found["true"] == "left by the fix"


@pytest.mark.parametrize(
    ("after", "case", "known", "shown"),
    [
        (finding(tried="helps"), {}, {}, "tried"),
        (finding(tried="undecided"), {}, {}, ""),
        (finding(), {}, {"casts": "without autocast 3 ms less"}, "without autocast 3 ms less"),
        (finding(), {"granted": {"casts": "autocast"}}, {}, "autocast"),
        (finding("layout-copies"), {"granted": {"casts": "autocast"}}, {}, ""),
    ],
)
def test_a_second_cause_is_true_by_what_has_shown_it(after, case, known, shown):
    found = verdict([], after, Variants("", lambda *_: None, **case), known)
    assert found["true"] == shown


@pytest.mark.parametrize(("real", "shown"), [(90.0, "kernels run for 40 of 90 ms"), (60.0, "")])
def test_a_host_that_is_slower_than_the_kernels_is_a_cause_in_steps_without_the_profiler(
    real, shown
):
    late = finding("launch-bound", promises=45.0)
    after = {"step_ms": 100.0, "real_ms": real, "busy_ms": 40.0, "findings": [late]}
    (found,) = judged(Variants("", lambda *_: None), {"after": after})
    assert found["promises"]
    assert found["true"] == shown


@pytest.mark.parametrize(("changed", "shown"), [(80.0, "made: 90 to 80 ms"), (89.0, "")])
def test_a_setting_that_was_made_here_shows_by_real_steps_whether_it_helps(changed, shown):
    after = {"step_ms": 100.0, "findings": [finding("no-tensor-cores")]}
    record = {"after": after, "made": {"no-tensor-cores": [90.0, changed]}}
    (found,) = judged(Variants("", lambda *_: None), record)
    assert found["true"] == shown


def test_the_name_of_a_file_and_a_remedy_name_no_cause():
    case = Variants("", lambda *_: None, names_cause=lambda one: "valid" in one["seen"])
    for seen, promises in (("of validated.py:3", False), ("validation", True)):
        found = verdict([finding(seen=seen)], finding(seen=seen), case)
        assert found["promises"] is promises


def test_what_is_true_and_what_is_in_preview_are_counted_apart():
    case = Variants("", lambda *_: None)
    after = [
        finding(), finding("host-waits", tried="helps"), finding("slow-path", tier="preview"),
        finding("launch-bound", promises=None),
    ]  # fmt: skip
    records = {"a": {"after": {"step_ms": 100.0, "findings": after}}}
    records["b"] = {"after": {"step_ms": 100.0, "findings": []}}
    lines = [line_of(name, judged(case, record)) for name, record in records.items()]
    assert lines[0] == {
        "case": "a",
        "new": "casts; ~slow-path; launch-bound",
        "promises": "casts 5; ~slow-path 5",
        "true": "host-waits",
    }
    assert summary_of_lines(lines) == {
        "stable: new after the fix": 1,
        "stable: promises above 2%": 1,
        "stable: a second cause that is true": 1,
        "preview: new after the fix": 1,
        "preview: promises above 2%": 1,
        "preview: a second cause that is true": 0,
    }


def test_kept_lines_have_the_same_summary():
    after = {"step_ms": 100.0, "findings": [finding()]}
    lines = [line_of("a", judged(Variants("", lambda *_: None), {"after": after}))]
    lines.append({"case": "b", "new": None, "promises": None, "true": None})
    document = {
        "benchmark": "after_fix", "commit": "c", "lines": lines,
        "cases": {"a": {"end": "done"}, "b": {"end": "done"}},
    }  # fmt: skip
    assert summary_of_lines(rows_of(answer_of(document))) == summary_of_lines(lines)


def test_a_case_in_which_nothing_is_found_replaces_what_an_earlier_run_found_there(tmp_path):
    pytest.importorskip("torch")

    def judge(commit, **findings):
        records = {
            name: {
                "before": {"step_ms": 100.0, "findings": []},
                "after": {"step_ms": 100.0, "findings": found},
                "end": "done",
            }
            for name, found in findings.items()
        }
        path = tmp_path / "recorded.json"
        hardware = {"device": "cpu", "date": "2026-11-29"}
        path.write_text(json.dumps({"cases": records, "commit": commit, "hardware": hardware}))
        settings = {"verb": "judge", "files": [path], "book": None, "cases": "a,b", "small": True}
        run = SimpleNamespace(**settings, choose=lambda _: [*records], device="cpu")
        with pytest.MonkeyPatch.context() as patch:
            known = {name: Variants("", lambda *_: None) for name in records}
            patch.setattr(after_fix, "cases", lambda _: known)
            document = {"benchmark": "after_fix", **after_fix.answer(run)}
        keep(document, tmp_path, merge=True)
        return read_evidence(path_of("cpu", tmp_path))["questions"]["after_fix"]

    assert judge("old", a=[finding()], b=[finding()])["cases"] == [2, 2]
    kept = judge("new", a=[], b=[finding()])
    assert (kept["cases"], kept["commit"]) == ([2, 2], "new")
    assert [line["case"] for line in rows_of(kept) if line.get("new")] == ["b"]


BOOK = """
import torch

KIND, SOURCE, TITLE, CAUSE, FIX, GAIN = "host", "a/b#1", "A loop", "It loops", "No loop", "half"
PLACE, DEVICE, RULES, WORDS, NOTHING = ("",), "any", ("operator-loop",), ("one by one",), False

def build(fixed, device, size=1.0):
    model = torch.nn.Linear(4, 4)
    return lambda: model(torch.ones(2, 4)).sum().backward(), model
"""


def test_the_cases_are_those_of_all_sets_and_of_a_book(tmp_path: Path):
    pytest.importorskip("torch")
    (tmp_path / "a_loop.py").write_text(BOOK)
    (tmp_path / "run.py").write_text("raise SystemExit")
    known = cases(tmp_path)
    sets = {name.partition(":")[0] for name in known}
    assert sets == {"own", "blind", "blind_second", "blind_third", "control", "book"}
    assert known["book:a_loop"].names_cause(finding("operator-loop"))
    assert known["book:a_loop"].names_cause(finding(seen="They are read one by one."))
    assert not known["book:a_loop"].names_cause(finding())
    assert not any(case.slow for name, case in known.items() if name.startswith("control:"))


def test_second_causes_are_of_cases_and_rules_that_exist():
    pytest.importorskip("torch")
    from backspot.testing import all_rules

    known, rules = cases(), {rule.name for rule in all_rules()}
    for name, shown in second_causes().items():
        assert name in known or name.startswith("book:")
        assert set(shown) <= rules
        assert all(shown.values())
