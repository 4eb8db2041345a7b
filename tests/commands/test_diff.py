"""``backspot diff``, from its arguments to its exit code."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

from backspot import compare, locate
from backspot.commands import main
from backspot.render.comparison import render_comparison
from backspot.render.markdown import comparison_to_markdown
from backspot.render.view import View
from support.recorded_steps import recorded
from support.sample_reports import report, row, vit

DATA = Path(__file__).parents[1] / "data" / "foreign"
CONTROL, TEST = (str(DATA / f"hta_recommender_{name}.json.gz") for name in ("control", "test"))


@pytest.fixture
def saved(tmp_path):
    """Two saved reports: the second is slower by about a fifth."""
    paths = tmp_path / "before.json", tmp_path / "after.json"
    for path, drop in zip(paths, (1_500_000, 15_690_000), strict=True):
        vit(drop=drop).save(path)
    return [str(path) for path in paths]


def test_it_prints_the_comparison_of_two_saved_reports(saved, capsys):
    assert main(["diff", *saved, "--top", "4"]) == 0
    out, err = capsys.readouterr()
    expected = compare(vit(drop=1_500_000), vit(), names=("before.json", "after.json"))
    assert out == render_comparison(expected, View(top=4), width=80) + "\n"
    assert not err


def test_a_trace_and_its_saved_report_are_the_same(trace, tmp_path, capsysbinary):
    path = locate(trace).save(tmp_path / "report.json")
    assert main(["diff", str(trace), str(path), "--format", "json"]) == 0
    found = json.loads(capsysbinary.readouterr().out)
    assert {c["verdict"] for c in (found["whole"], *found["changes"])} == {"within the noise"}


def test_each_side_is_called_by_its_file_even_where_both_hold_a_profile_of_the_same(
    tmp_path, capsys
):
    one = report([row("fc", wall=9_000)], trace="the profile of step()")
    paths = [tmp_path / name / "report.json" for name in ("main", "branch")]
    for path in paths:
        path.parent.mkdir()
        one.save(path)
    assert main(["diff", *map(str, paths)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "before: main/report.json (the profile of step()), 3 steps ·" in out
    assert "after: branch/report.json (the profile of step()), 3 steps" in out


def test_a_trace_is_called_by_its_name_alone(trace, tmp_path, capsysbinary):
    path = locate(trace).save(tmp_path / "report.json")
    assert main(["diff", str(trace), str(path), "--format", "json"]) == 0
    found = json.loads(capsysbinary.readouterr().out)
    assert [found[side]["name"] for side in ("before", "after")] == ["trace.json.gz", "report.json"]
    assert main(["diff", str(trace.parent), str(trace), "--format", "md"]) == 0
    assert (
        b"before: `trace.json.gz`, 2 steps; after: `trace.json.gz`" in capsysbinary.readouterr().out
    )


def test_markdown_keeps_to_top(saved, capsysbinary):
    assert main(["diff", *saved, "--format", "md", "--top", "1"]) == 0
    expected = compare(vit(drop=1_500_000), vit(), names=("before.json", "after.json"))
    out = capsysbinary.readouterr().out
    assert out == comparison_to_markdown(expected, View(top=1))
    assert out.startswith(b"**These two recordings differ by +")


def test_a_report_whose_keys_were_sorted_is_still_a_report(saved, capsys):
    path = Path(saved[0])
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps(content, sort_keys=True), encoding="utf-8")
    assert main(["diff", *saved]) == 0


def test_csv_keeps_to_top_and_tells_its_notes_beside(saved, capsys):
    assert main(["diff", *saved, "--format", "csv", "--top", "1"]) == 0
    out, err = capsys.readouterr()
    lines = list(csv.DictReader(io.StringIO(out)))
    assert [line["path"] for line in lines] == [
        "",
        "",
        "patch_drop",
    ]  # the step and the backward first
    assert err.startswith("backspot: warning: Two or three steps")


def test_a_slower_backward_fails_above_the_limit_and_the_table_stands(saved, capsys):
    assert main(["diff", *saved, "--fail-above", "5"]) == 8
    out, err = capsys.readouterr()
    assert out.startswith("These two recordings differ by +")
    assert err.startswith("backspot: error: the backward took 19.8% longer in the recording after")
    assert "three recordings on each side tell whether that is the code" in err
    assert "--fail-above 5" in err
    assert err.count("\n") == 1


def test_below_the_limit_or_faster_or_the_same_is_fine(saved):
    assert main(["diff", *saved, "--fail-above", "90%"]) == 0
    assert main(["diff", *reversed(saved), "--fail-above", "0"]) == 0
    assert main(["diff", saved[0], saved[0], "--fail-above", "0"]) == 0


def test_a_single_step_never_fails_and_says_why(tmp_path, capsys):
    paths = []
    for name, wall in (("a", 1_000), ("b", 9_000)):
        made = report([row("fc", wall=wall, steps=1)], step_ns=(9_999,))
        paths.append(str(made.save(tmp_path / f"{name}.json")))
    assert main(["diff", *paths, "--fail-above", "0"]) == 0
    assert "record ten steps or more on both sides" in capsys.readouterr().err


@pytest.mark.slow
def test_two_steps_without_labels_decide_only_what_is_large(capsys):
    assert main(["diff", CONTROL, TEST, "--fail-above", "70"]) == 0
    out, err = capsys.readouterr()
    assert "CompiledFunctionBackward" in out
    assert "tell whether the step got more than 70% slower" in err


@pytest.fixture
def noisy(tmp_path):
    """Two recordings of one module, whose steps vary more than they differ."""
    paths = []
    for name, scale in (("a", 1), ("b", 1.5)):
        times = [round(one * scale) * 10**6 for one in (10, 60, 12, 40, 11, 30, 55, 10, 25, 70)]
        paths.append(str(recorded({"fc": times}).save(tmp_path / f"{name}.json")))
    return paths


def test_noise_beyond_the_limit_warns_with_the_noise_and_the_limit(noisy, capsys):
    assert main(["diff", *noisy, "--fail-above", "5"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Too noisy to tell: the step took")
    assert err.startswith("backspot: warning: too noisy to tell whether the step got more than 5%")
    assert re.search(r"\d ms, then .* ms \(\+5\d%\), noise ±.* ms \(±\d+%\)", err)
    assert "OMP_NUM_THREADS=1" in err
    assert err.count("\n") == 1


def test_strict_fails_where_the_noise_is_too_large_to_tell(noisy, saved, capsys):
    assert main(["diff", *noisy, "--fail-above", "5", "--strict"]) == 9
    out, err = capsys.readouterr()
    assert out.startswith("Too noisy to tell")
    assert err.startswith("backspot: error: too noisy to tell whether the step")
    # A limit beyond the noise is checked, and so is a slowdown beyond it.
    assert main(["diff", *noisy, "--fail-above", "9999", "--strict"]) == 0
    assert main(["diff", *saved, "--fail-above", "5", "--strict"]) == 8
    assert main(["diff", *saved, "--strict"]) == 2
    assert "--strict needs a limit" in capsys.readouterr().err


def test_a_step_that_is_slower_outside_its_backward_fails_too(tmp_path, capsys):
    steady = [1_000_000] * 10
    paths = []
    for name, idle in (("a", 0), ("b", 200_000_000)):
        made = recorded({"fc": steady}, None, {"idle": [idle] * 10})
        paths.append(str(made.save(tmp_path / f"{name}.json")))
    assert main(["diff", *paths, "--fail-above", "5"]) == 8
    assert re.search(r"the step took [\d.]+% longer in the recording", capsys.readouterr().err)


@pytest.mark.parametrize("percent", ["much", "-1", "nan", "inf", ""])
def test_a_limit_that_is_no_percentage_is_refused(saved, percent, capsys):
    assert main(["diff", *saved, f"--fail-above={percent}"]) == 2
    assert "not a percentage" in capsys.readouterr().err


def test_what_cannot_be_read_has_its_own_code(saved, tmp_path, capsys):
    assert main(["diff", saved[0], str(tmp_path / "missing.json")]) == 3
    newer = tmp_path / "newer.json"
    newer.write_text('{"schema": "backspot.report/4"}')
    assert main(["diff", saved[0], str(newer)]) == 4
    assert main(["diff", "-", "-"]) == 2
    assert "newer Backspot" in capsys.readouterr().err


# Several recordings a side.


@pytest.fixture
def sets(tmp_path):
    """Three saved reports of each side: all steps of the second are a third longer."""
    sides = []
    for name, scale in (("a", 3), ("b", 4)):
        paths = []
        for run in range(3):
            times = [scale * 10**6 + 10**4 * run + step for step in range(10)]
            made = recorded({"fc": times}, None, {"forward": times})
            paths.append(str(made.save(tmp_path / f"{name}{run}.json")))
        sides.append(paths)
    return sides


def test_three_recordings_a_side_tell_of_the_code(sets, capsys):
    before, after = sets
    assert main(["diff", *before, "--", *after]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.match(r"The step got slower by 33\.2% ± \d", out)
    assert "before: a0.json … a2.json, 3 recordings, 30 steps" in out
    assert "after: b0.json … b2.json, 3 recordings, 30 steps" in out


def test_options_may_follow_the_recordings_of_both_sides(sets, capsysbinary):
    before, after = sets
    assert main(["diff", *before, "--", *after, "--format", "json"]) == 0
    found = json.loads(capsysbinary.readouterr().out)
    assert (found["about"], found["before"]["recordings"]) == ("code", 3)
    assert len(found["step"]["after_ms_by_recording"]) == 3
    assert main(["diff", "--format", "json", before[0], "--", *after]) == 0
    assert json.loads(capsysbinary.readouterr().out)["about"] == "recordings"


def test_slower_code_fails_above_the_limit(sets, capsys):
    before, after = sets
    assert main(["diff", *before, "--", *after, "--fail-above", "5"]) == 8
    err = capsys.readouterr().err
    assert re.search(r"error: the (step|backward) got slower by 33\.\d%, which", err)
    assert main(["diff", *before, "--", *after, "--fail-above", "50"]) == 0
    assert main(["diff", *after, "--", *before, "--fail-above", "0"]) == 0


def test_noise_between_recordings_is_told_with_what_helps(sets, tmp_path, capsys):
    before, _ = sets
    unsteady = []
    for run, scale in enumerate((2, 3, 5)):
        times = [scale * 10**6 + step for step in range(10)]
        made = recorded({"fc": times}, None, {"forward": times})
        unsteady.append(str(made.save(tmp_path / f"u{run}.json")))
    assert main(["diff", *before, "--", *unsteady, "--fail-above", "5", "--strict"]) == 9
    err = capsys.readouterr().err
    assert "record more recordings on each side" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a", "b", "c"], "3 recordings, and no -- that tells which are before the change"),
        (["a", "b", "--"], "no AFTER: name at least one recording after the --"),
        (["--", "a", "b"], "no BEFORE: name at least one recording before the --"),
        (["a", "--", "b", "--", "c"], "-- stands twice"),
        (["-", "a", "--", "-"], "only one of BEFORE and AFTER can be standard input"),
    ],
)
def test_sides_that_cannot_be_told_apart_are_a_usage_error_of_one_line(words, told, capsys):
    assert main(["diff", *words]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_recordings_of_several_devices_are_refused(tmp_path, capsys):
    times = {"fc": [10**6] * 10}
    plain = str(recorded(times).save(tmp_path / "cpu.json"))
    gpu = str(recorded(times, times).save(tmp_path / "gpu.json"))
    assert main(["diff", plain, gpu, "--", plain]) == 2
    err = capsys.readouterr().err
    assert "'cpu.json' is of a CPU and 'gpu.json' of a GPU" in err
    assert "leave out those of the other" in err
