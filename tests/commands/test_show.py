"""``backspot show``: several traces, saved reports, and the traces of other ranks."""

import gzip
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from backspot import locate
from backspot.analysis.recording import Options, Recording
from backspot.commands import main
from backspot.pipeline import report_of
from backspot.render.text import render_text
from backspot.render.view import View


def test_a_folder_of_a_run_is_shown_as_its_report_says_unless_the_trace_is_newer(
    trace, tmp_path, capsys
):
    timed = report_of(Recording.read(trace), Options(real_steps=(700_000,) * 4))
    saved = timed.save(tmp_path / "report.json")
    assert main(["show", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out == render_text(timed, width=80, more="--full") + "\n"
    assert err == f"backspot: read {saved}, the report of the newest trace in {tmp_path}\n"
    assert main(["show", str(tmp_path), "--what-if", "stem=0.5"]) == 0
    assert capsys.readouterr().out == f"{timed.what_if({'stem': 0.5})}\n"
    os.utime(saved, (1, 1))
    assert main(["show", str(tmp_path)]) == 0
    assert capsys.readouterr().out == render_text(locate(trace), width=80, more="--full") + "\n"


def test_several_traces_follow_each_other_under_their_names(trace, tmp_path, capsys):
    other = shutil.copy(trace, tmp_path / "other.json.gz")
    assert main(["show", str(trace), str(other)]) == 0
    text = render_text(locate(trace), width=80, more="--full")
    assert capsys.readouterr().out == f"── {trace}\n{text}\n\n── {other}\n{text}\n"


def test_of_several_all_that_can_be_read_are_shown_and_the_worst_code_is_given(
    trace, tmp_path, capsys
):
    (tmp_path / "broken.json").write_text("no trace")
    sources = [tmp_path / "missing.json", tmp_path / "broken.json", trace]
    assert main(["show", *map(str, sources)]) == 4
    out, err = capsys.readouterr()
    assert render_text(locate(trace), width=80, more="--full") in out
    assert ["missing.json" in err, "broken.json" in err] == [True, True]
    assert err.count("\n") == 2


def test_a_table_is_as_wide_as_wanted(trace, capsys):
    assert main(["show", str(trace), "--width", "60"]) == 0
    assert capsys.readouterr().out == render_text(locate(trace), width=60, more="--full") + "\n"


def test_everything_is_shown_if_it_is_wanted(trace, capsys):
    report = locate(trace)
    for options, top in (([], None), (["--top", "2"], 2)):
        assert main(["show", str(trace), "--full", *options]) == 0
        shown = capsys.readouterr().out
        assert shown == render_text(report, View(top=top), width=80, full=True) + "\n"
        assert "Modules own all of the backward." in shown
    saved = report.save(trace.with_name("report.txt"))
    assert (
        saved.read_text("utf-8") == render_text(report, View(top=None), width=100, full=True) + "\n"
    )


def test_a_file_format_and_standard_input_are_for_one(trace, capsys):
    for arguments in ([str(trace), str(trace), "--format", "json"], ["-", "-"]):
        assert main(["show", *arguments]) == 2
        out, err = capsys.readouterr()
        assert not out
        assert err.count("\n") == 1


def test_a_saved_report_is_shown_as_its_trace_is(trace, tmp_path, capsys):
    saved = locate(trace).save(tmp_path / "report.json")
    assert main(["show", str(saved), "--depth", "1"]) == 0
    shown, err = capsys.readouterr()
    assert main(["show", str(trace), "--depth", "1"]) == 0
    assert shown == capsys.readouterr().out
    assert not err
    saved.write_text(saved.read_text()[:-20])
    assert main(["show", str(saved)]) == 4


@pytest.fixture
def ranked(trace, tmp_path):
    """A function that writes the traces of ranks."""

    def write(*names: str, size: int = 0) -> list[str]:
        folder = tmp_path / "ranks"
        folder.mkdir(exist_ok=True)
        document = json.loads(gzip.decompress(trace.read_bytes()))
        paths = []
        for number, name in enumerate(names):
            info = {"backend": "nccl", "rank": number, "world_size": size, "pg_count": 1}
            head = {"distributedInfo": info} if size else {}
            (folder / name).write_text(json.dumps({**head, **document}))
            paths.append(str(folder / name))
        return paths

    return write


def asked(report, capsys):
    """What is said of a change of this report."""
    capsys.readouterr()
    assert main(["show", str(report), "--what-if", "blocks.*=0.5"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error.partition("to replay. ")[2].strip()


@pytest.mark.parametrize("name", ["trace.json.gz", "trace.json"])
def test_a_change_of_a_saved_report_says_how_to_ask_its_trace(trace, tmp_path, capsys, name):
    folder, content = tmp_path / "run", trace.read_bytes()
    folder.mkdir()
    report, made_of = folder / "report.json", folder / name
    made_of.write_bytes(content if name.endswith("gz") else gzip.decompress(content))
    assert main(["show", str(made_of), "-o", str(report)]) == 0
    says = "Its trace does: backspot show {} --what-if 'blocks.*=0.5'"
    assert asked(report, capsys) == says.format(made_of)
    (folder / "other.json.gz").write_bytes(content)
    assert asked(report, capsys) == says.format(made_of)
    moved = folder.rename(tmp_path / "moved")
    assert f"If that is {moved / name}: backspot" in asked(moved / "report.json", capsys)


def test_a_trace_without_its_folder_is_looked_for_beside_the_report(
    trace, tmp_path, capsys, monkeypatch
):
    """The folder in which the command ran may be another one today, with a trace of that name."""
    report = Path("report.json")
    monkeypatch.chdir(tmp_path)
    assert main(["show", trace.name, "-o", str(report)]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shutil.copy(trace, trace.name)
    beside = Path("..", trace.name)
    says = "Its trace does: backspot show {} --what-if 'blocks.*=0.5'"
    assert asked(Path("..", report), capsys) == says.format(beside)
    trace.unlink()
    assert f"If that is {trace.name}: backspot" in asked(Path("..", report), capsys)


@pytest.mark.parametrize("name", ["other_experiment.json.gz", "other_experiment.json"])
def test_another_trace_beside_a_saved_report_is_not_said_to_be_its_own(
    trace, tmp_path, capsys, name
):
    folder, content = tmp_path / "run", trace.read_bytes()
    folder.mkdir()
    report, other = folder / "report.json", folder / name
    assert main(["show", str(trace), "-o", str(report)]) == 0
    trace.unlink()
    says = "backspot show TRACE --what-if 'blocks.*=0.5'"
    assert asked(report, capsys) == f"Its trace does: {says}"
    other.write_bytes(content if name.endswith("gz") else gzip.decompress(content))
    said = f"Its trace does. If that is {other}: {says.replace('TRACE', str(other))}"
    assert asked(report, capsys) == said
    (folder / "third.json.gz").write_bytes(content)
    assert asked(report, capsys) == f"Its trace does: {says}"


@pytest.mark.parametrize("later", [True, False])
def test_the_trace_before_a_report_of_run_is_its_own(trace, tmp_path, capsys, later):
    """Such a report names no file; the trace of another run, which is newer, is not its own."""
    report, beside = tmp_path / "report.json", tmp_path / "trace.json.gz"
    beside.write_bytes(trace.read_bytes())
    assert main(["show", str(trace), "-o", str(report)]) == 0
    report.write_text(report.read_text().replace(json.dumps(str(trace)), '"the live profile"'))
    time = beside.stat().st_mtime + (10 if later else -10)
    os.utime(report, (time, time))
    assert ("If that is" in asked(report, capsys)) is not later


def test_traces_of_other_ranks_are_mentioned(ranked, capsys):
    names = [f"run1.rank{number}.json" for number in (0, 1, 2, 10, 11)]
    first, *others = ranked(*names, "run2.rank1.json", "run1.rankx.json")
    assert main(["show", first]) == 0
    assert capsys.readouterr().err == (
        "backspot: run1.rank0.json; other ranks' traces lie beside it: run1.rank1.json, "
        "run1.rank2.json, run1.rank10.json and 1 more\n"
        f"backspot: for all ranks together: backspot ranks {' '.join([first, *others[:4]])}\n"
    )
    assert main(["show", first, *others[:4]]) == 0
    assert not capsys.readouterr().err


def test_a_trace_says_its_own_rank(ranked, tmp_path, capsys):
    _, second = ranked("rank_0.json", "rank_1.json", size=2)
    assert main(["show", second, "-o", str(tmp_path / "report.md")]) == 0
    assert capsys.readouterr().err == (
        "backspot: rank_1.json is of rank 1 of 2; other ranks' traces lie beside it: rank_0.json\n"
        f"backspot: for all ranks together: backspot ranks {Path(second).parent}\n"
    )
    (alone,) = ranked("host_17.1.pt.trace.json", size=2)
    assert main(["show", alone, "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["modules"]
    assert err == "backspot: host_17.1.pt.trace.json is of rank 0 of 2\n"
    (only,) = ranked("one.json", size=1)
    assert main(["show", only]) == 0
    assert not capsys.readouterr().err


def test_names_that_only_resemble_a_rank_are_not_taken_for_one(ranked, capsys):
    first, _ = ranked("frank1.json", "frank2.json")
    assert main(["show", first]) == 0
    assert not capsys.readouterr().err


def test_the_mention_is_dim_on_a_colour_terminal(ranked, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    first, _ = ranked("rank0.json", "rank1.json")
    assert main(["show", first]) == 0
    err = capsys.readouterr().err
    assert err.startswith("\x1b[2mbackspot: ")
    assert err.endswith("\x1b[0m\n")


@pytest.mark.parametrize("wanted", ["memory", "headroom"])
def test_an_order_that_was_not_recorded_is_said_to_be_missing(wanted, trace, capsys):
    assert main(["show", str(trace), "--sort", wanted]) == 0
    said = capsys.readouterr()
    assert main(["show", str(trace)]) == 0
    assert said.out == capsys.readouterr().out
    (note,) = said.err.splitlines()
    assert "sorted by wall time" in note
    assert "report.json" in note


def test_a_table_ranks_by_memory_where_that_was_asked_for_and_a_file_by_time(tmp_path, capsys):
    source = Path(__file__).parents[1] / "data" / "memory" / "vit.trace.json.gz"
    asked = replace(locate(source), memory_asked=True)
    saved = str(asked.save(tmp_path / "report.json"))

    def shown(*options, of=saved):
        assert main(["show", of, *options]) == 0
        return capsys.readouterr().out

    assert shown(of=str(source)) == shown("--sort", "wall", of=str(source))

    assert shown() == shown("--sort", "memory")
    assert " of the memory at the peak" in shown()
    by_time = shown("--sort", "wall")
    assert by_time == render_text(asked, View(), width=80, more="--full") + "\n"
    assert "of the memory at the peak" not in by_time
    assert shown("--format", "csv") == shown("--format", "csv", "--sort", "wall")


def test_changes_are_asked_for_by_name_and_made_together(trace, capsys):
    report = locate(trace)
    first, second = (row.path for row in report.top(2) if row.is_module)
    changes = ["--what-if", f"{first}=0.5", "--what-if", f"{second}=0"]
    assert main(["show", str(trace), *changes]) == 0
    assert capsys.readouterr().out == f"{report.what_if({first: 0.5, second: 0.0})}\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("faster", "give MODULE=PART, fuse=MODULE, no_waits, graph"),
        ("**=half", "give the part of its time that a module keeps"),
        ("nowhere=0.5", "no module 'nowhere'"),
        ("buckets=many", "give a number of at least 1"),
        ("dtype=bf16", "cannot predict dtype"),
    ],
)
def test_a_change_that_cannot_be_made_costs_one_line_and_usages_code(trace, capsys, change, said):
    assert main(["show", str(trace), "--what-if", change]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert said in err
    assert err.count("\n") == 1


def test_changes_go_with_no_choice_of_rows(trace, capsys):
    assert main(["show", str(trace), "--what-if", "graph", "--sort", "gpu"]) == 2
    assert "leave out --sort" in capsys.readouterr().err
