"""The answers that stay in the repository: one file a device, a line a case, small in all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import kept
from benchmarks.__main__ import main as run
from benchmarks.questions import QUESTIONS
from benchmarks.robustness.found import Found

ANSWERS = [
    pytest.param(answer, id=f"{device}-{name}")
    for device in kept.DEVICES
    for name, answer in kept.read_evidence(kept.path_of(device))["questions"].items()
]


def document(cases: dict[str, dict], **more: object) -> dict:
    """What a run of a question writes."""
    hardware = {"device": "NVIDIA H200", "date": "2026-11-28", "torch": "2.11.0"}
    about = {"benchmark": "steady_answer", "commit": "abc", "small": False, "seconds": 12}
    summary = {"steady and right": f"{len(cases)} of {len(cases)}"}
    return {**about, "hardware": hardware, "cases": cases, "summary": summary, **more}


def right(times: int) -> dict:
    record = {"right": times, "alike": 10, "of": 10, "noisy": 0, "step_ms": 2.123456}
    return {**record, "answers": {"a": times}, "end": "done"}


@pytest.fixture
def keep(tmp_path, capsys):
    """Keeps a document in a folder, and returns the answers of the GPU."""
    number = iter(range(20))

    def keep(what: dict, *options: str, code: int = 0) -> dict:
        path = tmp_path / f"out{next(number)}.json"
        path.write_text(json.dumps(what))
        assert run(["keep", str(path), "--folder", str(tmp_path), *options]) == code
        if code:
            assert capsys.readouterr().err.count("\n") == 1
        return kept.read_evidence(kept.path_of("cuda", tmp_path))["questions"]

    return keep


def test_there_is_one_file_a_device_beside_the_notes():
    files = sorted(path.name for path in kept.RESULTS.iterdir())
    assert files == ["README.md", *sorted(f"{device}.json" for device in kept.DEVICES)]


def test_all_of_it_is_small():
    sizes = {path.name: path.stat().st_size for path in kept.RESULTS.iterdir()}
    assert sum(sizes.values()) <= kept.LIMIT == 400_000, sizes
    assert sizes["README.md"] <= 15_000


@pytest.mark.parametrize("answer", ANSWERS)
def test_each_answer_names_its_question_code_day_and_hardware(answer):
    assert answer["question"] in QUESTIONS
    assert answer["commit"]
    assert answer["date"]
    assert answer["hardware"]["device"]


@pytest.mark.parametrize("device", kept.DEVICES)
def test_each_case_has_a_line_of_its_own(device):
    path = kept.path_of(device)
    text, evidence = path.read_text("utf-8"), kept.read_evidence(path)
    lines = [line for one in evidence["questions"].values() for line in one["lines"]]
    assert len(lines) > 500
    assert [json.loads(line.rstrip(",")) for line in text.splitlines() if line[:1] == "["] == lines


@pytest.mark.parametrize("device", kept.DEVICES)
def test_what_is_kept_is_written_again_as_it_is(device, tmp_path):
    path = kept.path_of(device)
    kept.write_evidence(tmp_path / path.name, kept.read_evidence(path))
    assert (tmp_path / path.name).read_text("utf-8") == path.read_text("utf-8")


def near(value: object) -> object:
    """A summary, as far as four digits of what it is made of give it."""
    if isinstance(value, dict):
        return {key: near(one) for key, one in value.items()}
    return pytest.approx(value, rel=5e-3, abs=5e-3) if isinstance(value, (int, float)) else value


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_summary_can_be_made_again_of_the_lines(answer):
    pytest.importorskip("torch")
    summary_of = kept.summary_of_lines(answer["question"])
    if summary_of is None or not answer["lines"] or "note" in answer:
        pytest.skip("its lines say less")
    made = summary_of(kept.rows_of(answer), kept.device_of(answer["hardware"]))
    assert answer["summary"] == near({key: made[key] for key in answer["summary"]})


def test_a_run_is_kept_with_a_short_line_for_each_case(keep):
    found = keep(document({"loop": right(10), "mlp": right(9)}))["steady_answer"]
    assert (found["commit"], found["cases"], found["end"]) == ("abc", [2, 2], "done")
    assert kept.rows_of(found)[1]["right"] == 9
    assert kept.rows_of(found)[0]["step_ms"] == 2.123
    assert "answers" not in found["columns"]
    assert found["summary"] == {"steady and right": "2 of 2"}


def test_a_rounded_number_is_rounded_again_as_the_whole_one_is():
    for value in (24.4512, 12.549, 0.04551, 24.45):
        assert f"{kept.short(value):.1f}" == f"{value:.1f}"
        assert abs(kept.short(value) - value) <= 5e-4 * value
    assert kept.short(5129699328) == 5129699328


def test_a_newer_run_takes_the_place_of_an_answer_or_stands_beside_it(keep):
    keep(document({"loop": right(10)}))
    found = keep(document({"mlp": right(7)}, commit="def"), "--as", "steady_beside")
    assert [one["commit"] for one in found.values()] == ["abc", "def"]
    assert found["steady_beside"]["question"] == "steady_answer"
    found = keep(document({"mlp": right(7)}, commit="def"))
    assert [one["case"] for one in kept.rows_of(found["steady_answer"])] == ["mlp"]


def test_some_cases_take_the_place_of_theirs_and_the_summary_is_of_all(keep):
    keep(document({"loop": right(10), "mlp": right(2), "gpt": {"end": "no time left"}}))
    again = {"mlp": right(10), "loop": {"end": "no time left"}}
    found = keep(document(again, commit="def"), "--merge")["steady_answer"]
    assert {row["case"]: row["right"] for row in kept.rows_of(found)} == {"loop": 10, "mlp": 10}
    assert found["summary"]["steady and right"] == "2 of 2"
    assert (found["commit"], found["end"], found["cases"]) == ("abc", "in part", [2, 3])
    assert [(one["commit"], one["cases"]) for one in found["parts"]] == [("def", ["mlp"])]
    found = keep(document({"gpt": right(10)}, commit="ghi"), "--merge")["steady_answer"]
    assert (found["end"], found["cases"], len(found["parts"])) == ("done", [3, 3], 2)
    whole = {name: right(10) for name in ("loop", "mlp", "gpt")}
    found = keep(document(whole, commit="jkl"), "--merge")["steady_answer"]
    assert (found["commit"], found.get("parts")) == ("jkl", None)


DIED = {"end": "died"}


def test_a_case_that_died_is_not_in_the_summary_and_a_later_run_can_mend_it(keep):
    keep(document({"loop": right(10), "mlp": DIED, "gpt": {"end": "no time left"}}))
    found = keep(document({"gpt": right(9)}, commit="def"), "--merge")["steady_answer"]
    assert found["summary"]["steady and right"] == "2 of 2"
    assert (found["end"], found["cases"]) == ("done, with faults", [3, 3])
    found = keep(document({"mlp": right(10)}, commit="ghi"), "--merge")["steady_answer"]
    assert found["summary"]["steady and right"] == "3 of 3"
    assert (found["end"], found["cases"]) == ("done", [3, 3])
    found = keep(document({"loop": DIED}, commit="jkl"), "--merge")["steady_answer"]
    assert (found["end"], found["summary"]["steady and right"]) == ("done, with faults", "2 of 2")


def of_variants(cases: dict[str, dict], by: dict[str, list[str]], **more: object) -> dict:
    rows = [
        {"case": case, "variant": variant, "off: added %": [1.0, 0.5, 2.0]}
        for case, variants in by.items()
        for variant in variants
    ]
    return document(cases, benchmark="overhead", rows=rows, **more)


def test_a_case_that_died_without_a_line_is_a_fault_until_it_is_run_again(keep):
    pytest.importorskip("torch")
    cases = {"vit": {}, "gpt": DIED}
    found = keep(of_variants(cases, {"vit": ["plain"]}))["overhead"]
    assert (found["end"], found["failed"]) == ("done, with faults", ["gpt"])
    vit = of_variants({"vit": {}}, {"vit": ["plain", "live"]}, commit="def")
    found = keep(vit, "--merge")["overhead"]
    assert (found["end"], found["cases"], found["failed"]) == ("done, with faults", [2, 2], ["gpt"])
    found = keep(of_variants({"gpt": {}}, {"gpt": ["plain"]}, commit="ghi"), "--merge")["overhead"]
    assert (found["end"], found["cases"], found.get("failed")) == ("done", [2, 2], None)


def test_what_a_benchmark_calls_wrong_stays_so_as_long_as_its_lines_do(keep):
    pytest.importorskip("torch")
    keep(of_variants({"vit": {}, "gpt": {}}, {"vit": ["plain"], "gpt": ["plain"]}, wrong=True))
    found = keep(of_variants({"gpt": {}}, {"gpt": ["plain"]}), "--merge")["overhead"]
    assert found["end"] == "done, with faults"
    both = {"vit": ["plain"], "gpt": ["plain"]}
    found = keep(of_variants({"vit": {}, "gpt": {}}, both), "--merge")["overhead"]
    assert found["end"] == "done"


def test_some_variants_of_a_case_take_the_place_of_theirs_alone(keep):
    pytest.importorskip("torch")
    variants = ["plain", "live", "whole"]
    keep(of_variants({"vit": {}}, {"vit": variants}))
    again = of_variants({"vit": {}}, {"vit": ["plain", "live"]}, commit="def")
    found = keep(again, "--merge")["overhead"]
    assert sorted(row["variant"] for row in kept.rows_of(found)) == sorted(variants)
    assert set(found["summary"]["off"]) == set(variants)
    (part,) = found["parts"]
    assert (part["cases"], part["lines"]) == (["vit"], [["vit", "plain"], ["vit", "live"]])
    again = of_variants({"vit": {}}, {"vit": ["live"]}, commit="ghi")
    parts = keep(again, "--merge")["overhead"]["parts"]
    assert [part["lines"] for part in parts] == [[["vit", "plain"]], [["vit", "live"]]]


def test_lines_that_lack_what_a_summary_needs_are_refused_in_one_line(keep):
    without = {key: value for key, value in right(10).items() if key != "alike"}
    keep(document({"loop": without, "mlp": right(10)}))
    again = document({"mlp": right(9)}, commit="def")
    assert keep(again, "--merge", code=2)["steady_answer"]["commit"] == "abc"


@pytest.mark.parametrize("question", ["fuzz_traces", "fuzz_reports", "random_scripts"])
def test_the_cases_of_another_seed_are_added(question, keep):
    def of_seed(seed: int, wrong: int) -> dict:
        found = Found()
        for number in range(10):
            found.add((number, "clean", "lost" if number < wrong else "", 0.5 * seed))
        return document({}, benchmark=question, **found.figures(seed))

    keep(of_seed(1, 2))
    found = keep(of_seed(2, 1), "--merge")[question]["summary"]
    assert (found["seed"], found["broken"], found["clean"], found["bad"]) == ("1, 2", 20, 20, 3)
    assert keep(of_seed(2, 0), "--merge")[question]["summary"]["bad"] == 2


@pytest.mark.parametrize(
    "what",
    [
        document({"loop": right(10)}, small=True),
        document({"loop": right(10)}, commit=""),
        document({"loop": right(10)}, benchmark="of_yesterday"),
        {"no": "run"},
    ],
    ids=["small", "no-commit", "no-question", "no-run"],
)
def test_what_answers_nothing_is_refused_in_one_line(what, keep):
    assert keep(what, code=2) == {}


def test_a_part_of_a_question_whose_summary_needs_more_than_lines_is_refused(keep):
    startup = document({"none": right(1)}, benchmark="startup")
    assert keep(startup)["startup"]["commit"] == "abc"
    assert keep({**startup, "commit": "def"}, "--merge", code=2)["startup"]["commit"] == "abc"


def test_a_run_that_ends_between_its_lines_is_kept_as_one_in_part(keep):
    whole = document({"no time left": {"end": "no time left"}}, benchmark="compare_runs")
    found = keep({**whole, "lines": [{"case": "equal", "pair": 0}]})["compare_runs"]
    assert found["end"] == "in part"
    assert found["cases"] == []
    assert "not_done" not in found
    assert found["lines"] == [["equal", 0]]


def test_runs_that_did_nothing_are_merged_to_one_that_did_nothing(keep):
    left = {name: {"end": "no time left"} for name in ("loop", "mlp")}
    keep(document(left))
    one = document({"gpt": {"end": "no time left"}}, commit="def")
    found = keep(one, "--merge")["steady_answer"]
    assert (found["end"], found["cases"]) == ("in part", [0, 3])
    assert found["not_done"] == ["gpt", "loop", "mlp"]
    assert found["lines"] == found.get("parts", []) == []


def test_a_run_that_does_all_that_another_did_has_its_command_and_seconds(keep):
    keep(document({"loop": right(10), "mlp": {"end": "no time left"}}, command="a", seconds=1))
    again = {"loop": right(9), "gpt": {"end": "no time left"}}
    found = keep(document(again, commit="def", command="b", seconds=2), "--merge")
    said = found["steady_answer"]
    assert (said["commit"], said["command"], said["seconds"]) == ("def", "b", 2)
    assert said["not_done"] == ["gpt", "mlp"]


def test_runs_of_one_commit_on_one_machine_are_one(keep):
    keep(document({name: right(9) for name in ("loop", "mlp", "gpt")}))
    for name in ("loop", "mlp"):
        found = keep(document({name: right(8)}, commit="def"), "--merge")["steady_answer"]
    assert [one["cases"] for one in found["parts"]] == [["loop", "mlp"]]
    found = keep(document({"gpt": right(8)}, commit="def"), "--merge")["steady_answer"]
    assert (found["commit"], found.get("parts", []), found["cases"]) == ("def", [], [3, 3])
    assert found["command"] == ""  # of neither alone
    found = keep(document({"mlp": right(7)}, commit="def"), "--merge")["steady_answer"]
    assert (found["commit"], found.get("parts", [])) == ("def", [])


def test_the_newer_answers_of_another_file_of_a_device_are_taken(keep, tmp_path):
    keep(document({"loop": right(10)}))
    elsewhere = tmp_path / "elsewhere"
    older = document({"mlp": right(1)}, commit="old")
    older["hardware"] = {**older["hardware"], "date": "2026-11-01"}
    for one in (older, document({"none": right(1)}, benchmark="startup")):
        kept.keep(one, elsewhere)
    found = keep(json.loads((elsewhere / "cuda.json").read_text()))
    assert found["steady_answer"]["commit"] == "abc"
    assert "startup" in found


def test_what_is_merged_here_is_not_lost_to_another_file_of_the_same_day(keep, tmp_path):
    whole = document({"loop": right(10), "mlp": right(2)})
    keep(whole)
    elsewhere = tmp_path / "elsewhere"
    kept.keep(whole, elsewhere)
    again = document({"mlp": right(10)}, commit="def")
    keep(again, "--merge")
    other = elsewhere / "cuda.json"
    found = keep(json.loads(other.read_text()))["steady_answer"]
    assert [part["commit"] for part in found["parts"]] == ["def"]
    kept.keep(again, elsewhere, merge=True)
    later = document({"loop": right(9)}, commit="ghi")
    kept.keep(later, elsewhere, merge=True)
    found = keep(json.loads(other.read_text()))["steady_answer"]
    assert found["commit"] == "def"  # of the first run nothing is left
    assert [part["commit"] for part in found["parts"]] == ["ghi"]
    newer = document({"loop": right(7), "mlp": right(7)}, commit="new")
    newer["hardware"] = {**newer["hardware"], "date": "2026-11-29"}
    kept.keep(newer, elsewhere)
    assert keep(json.loads(other.read_text()))["steady_answer"]["commit"] == "new"


def test_a_command_is_kept_without_the_paths_of_its_machine():
    from benchmarks.harness import DEFAULTS, Run, command_of

    words = ["--jobs", "2", "-o", "out.json", "--keep", "/a/b", "--cases", "mlp", "x/y"]
    of = Run(**DEFAULTS, question="planted", argv=words, small=False, out=Path("out.json"))
    assert command_of(of) == "python -m benchmarks planted --jobs 2 --cases mlp"
