"""Saving: a file appears whole or not at all."""

import csv
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings

from backspot import Report, compare, locate
from backspot.commands import main
from backspot.errors import (
    BackspotError,
    MissingDependencyError,
    OutputExistsError,
    SourceNotFoundError,
    UsageError,
)
from backspot.render import renderer_for, suffixes
from support.program import program
from support.sample_reports import (
    ODD_NAMES,
    SAMPLES,
    checkpointed,
    empty,
    odd,
    report as report_of,
    reports,
    row,
    unlabelled,
    vit,
)
from support.synthetic import Trace


@pytest.mark.parametrize("suffix", suffixes())
def test_the_suffix_decides_the_form(tmp_path, suffix):
    path = vit().save(tmp_path / f"REPORT{suffix.upper()}")
    assert path.read_bytes() == renderer_for(f"x{suffix}")(vit())


@pytest.mark.parametrize("name", ["report.text", "report", "json", "report.json.bak"])
def test_a_suffix_that_names_no_form_is_refused_and_the_known_ones_are_listed(tmp_path, name):
    with pytest.raises(UsageError, match=r"use one of \.csv, \.github\.txt, \.html, .* or \.txt"):
        vit().save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_an_existing_file_stays_unless_it_is_forced(tmp_path):
    path = tmp_path / "report.md"
    path.write_text("precious")
    with pytest.raises(OutputExistsError, match=r"report\.md already exists.*--force"):
        vit().save(path)
    assert path.read_text() == "precious"
    vit().save(path, force=True)
    assert path.read_text().startswith("**`patch_drop")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.md"]


@pytest.mark.posix
def test_a_link_that_leads_nowhere_counts_as_there(tmp_path):
    (tmp_path / "report.md").symlink_to(tmp_path / "elsewhere.md")
    with pytest.raises(OutputExistsError):
        vit().save(tmp_path / "report.md")


@pytest.mark.posix
def test_forcing_writes_through_a_link_and_keeps_the_files_permissions(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    vit().save(link, force=True)
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert real.read_bytes() == renderer_for("x.json")(vit())


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(SourceNotFoundError, match=r"there is no folder .*missing"):
        vit().save(tmp_path / "missing" / "report.json")


def test_a_folder_is_no_output(tmp_path):
    (tmp_path / "reports.json").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        vit().save(tmp_path / "reports.json", force=True)


def test_a_failed_write_leaves_the_old_file_whole_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("precious")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(BackspotError, match=r"report\.json cannot be written: No space left"):
        vit().save(path, force=True)
    with pytest.raises(BackspotError, match="No space left"):
        vit().save(tmp_path / "other.json")
    assert path.read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_a_file_that_appears_while_ours_is_written_stays(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    monkeypatch.setattr("os.fsync", lambda _: path.write_text("precious"))
    with pytest.raises(OutputExistsError, match="created in the meantime"):
        vit().save(path)
    assert path.read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_saving_works_where_files_cannot_be_linked(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", unsupported)
    vit().save(tmp_path / "report.csv")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.csv"]


@pytest.mark.parametrize("name", ["vit", "odd", "unlabelled", "empty", "diagnosed", "varied"])
def test_markdown_reads_as_it_did(golden, name):
    golden(f"{name}.md", renderer_for("x.md")(SAMPLES[name]()).decode())


@pytest.mark.parametrize("name", ["checkpointed", "odd", "varied"])
def test_csv_reads_as_it_did(golden, name):
    golden(f"{name}.csv", renderer_for("x.csv")(SAMPLES[name]()).decode())


def test_csv_has_a_line_for_every_row_whoever_owns_it():
    lines = list(csv.DictReader(io.StringIO(renderer_for("x.csv")(vit()).decode())))
    assert [line["path"] for line in lines] == [row.path for row in vit().modules]
    assert sum(int(line["wall_ns"]) for line in lines) == vit().wall_ns
    assert sum(float(line["wall_share"]) for line in lines) == pytest.approx(1, abs=1e-3)
    assert {line["is_module"] for line in lines} == {"true", "false"}


@pytest.mark.parametrize(
    "name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "  =1", "\n@x", "＝1", "\u00a0=1"]
)
def test_csv_never_starts_a_formula(name):
    lines = list(
        csv.reader(
            io.StringIO(renderer_for("x.csv")(report_of([row(name, name, wall=3)])).decode())
        )
    )
    assert lines[1][0].startswith("'")
    assert lines[1][1].startswith("'")


@given(reports())
def test_no_csv_cell_of_any_report_runs_or_breaks_its_line(any_report):
    text = renderer_for("x.csv")(any_report).decode()
    lines = list(csv.reader(io.StringIO(text)))
    assert len(text.splitlines()) == len(lines) == 1 + len(any_report.modules)
    for line in lines:
        assert len(line) == len(lines[0])
        started = [cell for cell in line if cell.lstrip().startswith(tuple("=+-@\t\r"))]
        # Numbers do not run; what the typical times of the rows leave over may be negative.
        assert all(re.fullmatch(r"-\d+(\.\d+)?(e-?\d+)?", cell) for cell in started)


@given(reports())
def test_no_name_leaves_its_cell_in_markdown(any_report):
    text = renderer_for("x.md")(any_report).decode()
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert len({line.count("|") for line in table}) <= 1
    assert not re.search(r"<|&(?!#\d+;)", text)


def test_markdown_shows_odd_names_as_text():
    text = renderer_for("x.md")(odd()).decode()
    assert "<img" not in text
    assert "&#60;&#47;script&#62;" in text
    assert "pipe&#124;tick&#96;star&#42;&#95;under&#95;" in text


def test_in_markdown_what_to_mistrust_stands_before_the_numbers():
    text = renderer_for("x.md")(odd()).decode()
    assert text.index("\n\n- Warning: a warning") < text.index("\n\n| # | module")


def test_a_frame_has_a_row_a_module_and_raw_names():
    pytest.importorskip("pandas")
    frame = odd().to_pandas()
    assert list(frame["path"]) == list(ODD_NAMES)
    assert frame["wall_ns"].sum() == odd().wall_ns
    assert frame["wall_ns"].dtype == "int64"
    assert frame["heaviest_node"][1] == ODD_NAMES[1]


@pytest.mark.parametrize("made", [empty, unlabelled, checkpointed])
def test_a_frame_and_a_csv_file_share_their_columns(made):
    pytest.importorskip("pandas")
    head = next(csv.reader(io.StringIO(renderer_for("x.csv")(made()).decode())))
    assert list(made().to_pandas().columns) == head


def test_without_pandas_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'backspot\[pandas\]'"):
        vit().to_pandas()


@pytest.mark.slow
@settings(max_examples=30)
@given(reports())
def test_any_report_can_be_saved_in_every_form(tmp_path, any_report):
    for suffix in suffixes():
        any_report.save(Path(tmp_path) / f"report{suffix}", force=True)


# What is being read is never written over.


def small_trace(path: Path) -> Path:
    trace = Trace()
    trace.forward("fc", "Linear", 0, 50_000)
    trace.operator("aten::addmm", 1_000, 10_000, seq=1)
    trace.node("AddmmBackward0", 100_000, 130_000, seq=1)
    return trace.save(path)


def link_to(kind: str, path: Path) -> Path:
    """Another name of a file."""
    if kind == "itself":
        return path
    if kind == "another way":
        return path.parent / ".." / path.parent.name / path.name
    other = path.with_name(f"other{''.join(path.suffixes)}")
    if kind == "a link":
        other.symlink_to(path)
    else:
        other.hardlink_to(path)
    return other


NAMES = ["itself", "another way", pytest.param("a link", marks=pytest.mark.posix), "a hard link"]


@pytest.mark.parametrize("kind", NAMES)
def test_a_report_never_takes_the_place_of_its_trace(tmp_path, kind):
    path = small_trace(tmp_path / "t.json")
    before = path.read_bytes()
    output = link_to(kind, path)
    report = locate(path)
    for write in (
        lambda: report.save(output, force=True),
        lambda: compare(vit(), report).save(output, force=True),
        lambda: compare(report, vit()).save(output, force=True),
        lambda: locate(path, trace=output, force=True),
    ):
        with pytest.raises(UsageError, match="is the trace itself, which is never overwritten"):
            write()
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == len({path.name, output.name})


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("suffix", ["json", "trace.json"])
def test_no_command_writes_over_its_trace(tmp_path, capsys, suffix, kind):
    path = small_trace(tmp_path / f"t.{suffix}")
    before = path.read_bytes()
    output = link_to(kind, path)
    assert main(["show", str(path), "-o", str(output), "--force"]) == 2
    assert "is the trace itself" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_the_trace_that_a_folder_stands_for_is_not_written_over(tmp_path, capsys):
    for name in ("t.json", "t.trace.json"):
        path = small_trace(tmp_path / name)
        before = path.read_bytes()
        assert main(["show", str(tmp_path), "-o", str(path), "--force"]) == 2
        assert path.read_bytes() == before


def test_what_comes_through_standard_input_is_not_written_over(tmp_path):
    path = small_trace(tmp_path / "t.json")
    before = path.read_bytes()
    with path.open("rb") as file:
        done = program("show", "-", "-o", path, "--force", stdin=file)
    assert done.returncode == 2
    assert b"is the trace itself" in done.stderr
    assert path.read_bytes() == before


def test_a_saved_report_can_be_written_again_where_it_was_read(tmp_path):
    path = vit().save(tmp_path / "report.json")
    before = path.read_bytes()
    Report.load(path).save(path, force=True)
    assert path.read_bytes() == before


# What a killed process left.

WRITER = """
import sys
from backspot.render.files import writing

with writing(sys.argv[1], force=True) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


@contextmanager
def being_written(path: Path) -> Iterator[subprocess.Popen]:
    """Another process in the middle of writing a file, for as long as the context lasts."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as writer:
        assert writer.stdout.readline() == b"writing\n"
        yield writer
        writer.stdin.close()


def parts_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(".backspot-*.part"))


def make_old(path: Path) -> None:
    os.utime(path, (time.time() - 3_600,) * 2)


@pytest.mark.posix
def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path):
    with being_written(tmp_path / "a.json") as writer:
        writer.kill()
        writer.wait()
    (left,) = parts_in(tmp_path)
    make_old(left)
    vit().save(tmp_path / "b.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["b.json"]


@pytest.mark.posix
@pytest.mark.skipif(sys.platform == "win32", reason="there nobody can remove an open file")
def test_what_another_process_still_writes_stays_however_long_it_takes(tmp_path):
    with being_written(tmp_path / "a.json"):
        (part,) = parts_in(tmp_path)
        make_old(part)
        vit().save(tmp_path / "b.json")
        assert parts_in(tmp_path) == [part]
    assert (tmp_path / "a.json").read_bytes() == b"half"
    assert not parts_in(tmp_path)


def test_a_part_of_a_moment_ago_stays(tmp_path):
    part = tmp_path / ".backspot-0123456789ab.part"
    part.write_text("not locked yet")
    vit().save(tmp_path / "b.json")
    assert part.exists()


@pytest.mark.posix
def test_what_is_not_ours_stays(tmp_path):
    (tmp_path / "kept").write_text("precious")
    names = [".backspot-notes.part", "a.part", ".backspot-0123456789ab.part.bak"]
    for name in names:
        (tmp_path / name).write_text("precious")
        make_old(tmp_path / name)
    (tmp_path / ".backspot-00000000000a.part").symlink_to(tmp_path / "kept")
    (tmp_path / ".backspot-00000000000b.part").mkdir()
    there = set(tmp_path.iterdir())
    vit().save(tmp_path / "b.json")
    assert set(tmp_path.iterdir()) == there | {tmp_path / "b.json"}
    assert (tmp_path / "kept").read_text() == "precious"
