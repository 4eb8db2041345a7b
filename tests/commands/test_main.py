"""The command line, from its arguments to its exit code."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import backspot.commands
from backspot import BackspotError, Report, __version__, errors, locate
from backspot.commands import VERBS, main
from backspot.render.text import render_text
from backspot.render.view import View
from support.program import PROGRAM, program
from support.synthetic import Trace

DATA = Path(__file__).parents[1] / "data"


def one_line(text: str) -> str:
    assert text.startswith("backspot: error: ")
    assert text.endswith("\n")
    assert text.count("\n") == 1
    return text


# What it prints.


def test_show_prints_the_ranked_list(trace, capsys):
    assert main(["show", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert out == render_text(locate(trace), width=80, more="--full") + "\n"
    assert out.startswith("stem (Slow) takes 90% of the backward: 0.90 ms, mostly AddmmBackward0\n")
    assert not err


def test_show_passes_its_options_on(trace, capsys):
    options = ["--top", "1", "--depth", "1", "--by", "class", "--sort", "cpu"]
    assert main(["show", str(trace), *options]) == 0
    expected = render_text(locate(trace), View(1, 1, "cpu", "class"), width=80, more="--full")
    assert capsys.readouterr().out == expected + "\n"


def test_show_keeps_in_print_and_in_a_file_the_modules_that_match(trace, tmp_path, capsys):
    chosen = locate(trace).top(match=["st*", "head"])
    options = ["--match", "st*", "--match", "head"]
    assert main(["show", str(trace), "--format", "csv", *options]) == 0
    printed = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert [line["wall_ns"] for line in printed] == [str(row.wall_ns) for row in chosen]
    saved = tmp_path / "report.json"
    assert main(["show", str(trace), "-o", str(saved), *options]) == 0
    assert Report.load(saved).modules == chosen
    capsys.readouterr()
    assert main(["show", str(trace), "--match", "steem"]) == 2
    assert "match='steem' matches no module; did you mean 'stem'" in one_line(
        capsys.readouterr().err
    )


def test_show_prints_json_that_loads_to_the_same_report(trace, tmp_path, capsysbinary):
    assert main(["show", str(trace), "--format", "json"]) == 0
    (tmp_path / "report.json").write_bytes(capsysbinary.readouterr().out)
    assert Report.load(tmp_path / "report.json") == locate(trace)


def test_show_keeps_the_rows_that_were_asked_for_and_what_no_module_owns(tmp_path, capsysbinary):
    made = Trace()
    for number, path in enumerate(("stem", "head")):
        made.forward(path, "Linear", number * 100, number * 100 + 90)
        made.operator("aten::addmm", number * 100 + 10, number * 100 + 80, seq=number)
    made.operator("aten::sum", 210, 280, seq=2)
    made.node("SumBackward0", 400, 450, seq=2)
    made.node("AddmmBackward0", 500, 600, seq=1)
    made.node("AddmmBackward0", 700, 1000, seq=0)
    trace = made.save(tmp_path / "trace.json")
    assert main(["show", str(trace), "--format", "json", "--top", "1"]) == 0
    rows = json.loads(capsysbinary.readouterr().out)["modules"]
    assert {row["path"] for row in rows} == {"stem", "(outside model)", "(autograd engine)"}


def test_show_prints_csv_and_markdown(trace, capsysbinary):
    assert main(["show", str(trace), "--format", "csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsysbinary.readouterr().out.decode())))
    assert [line["path"] for line in lines] == [
        row.path.replace("\x1b", "\\x1b") for row in locate(trace).modules
    ]
    assert "'=1+1" in {line["class_name"] for line in lines}
    assert main(["show", str(trace), "--format", "md", "--top", "1"]) == 0
    assert capsysbinary.readouterr().out.startswith(b"**`stem (Slow)` takes 90%")


@pytest.mark.parametrize("form", ["table", "json", "csv", "md"])
def test_no_name_steers_the_terminal_whatever_the_form(trace, form, capsysbinary):
    assert main(["show", str(trace), "--format", form]) == 0
    assert b"\x1b" not in capsysbinary.readouterr().out


def test_show_writes_the_form_that_the_suffix_names(trace, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main(["show", str(trace), "-o", str(path)]) == 0
    assert Report.load(path) == locate(trace)
    assert capsys.readouterr().out == f"Wrote {path}\n"


def test_show_writes_a_saved_report_in_other_forms(trace, tmp_path, capsys):
    saved, made, again = (tmp_path / name for name in ("report.json", "made.csv", "again.csv"))
    assert main(["show", str(trace), "-o", str(saved)]) == 0
    for source, path in [(trace, made), (saved, again)]:
        assert main(["show", str(source), "-o", str(path), "--depth", "1"]) == 0
    assert again.read_text(encoding="utf-8") == made.read_text(encoding="utf-8")


def test_show_overwrites_only_by_force(trace, tmp_path, capsys):
    path = tmp_path / "report.md"
    path.write_text("precious")
    assert main(["show", str(trace), "-o", str(path)]) == 6
    assert "--force" in one_line(capsys.readouterr().err)
    assert path.read_text() == "precious"
    assert main(["show", str(trace), "-o", str(path), "--force"]) == 0
    assert path.read_text().startswith("**`stem (Slow)`")


def test_an_output_that_cannot_be_is_told_before_the_trace_is_read(tmp_path, capsys):
    there = tmp_path / "report.json"
    there.write_text("precious")
    for output, code in [(there, 6), (tmp_path / "report.text", 2), (tmp_path / "no" / "a.md", 3)]:
        assert main(["show", str(tmp_path / "missing.json"), "-o", str(output)]) == code
        assert output.name in one_line(capsys.readouterr().err)


def test_a_folder_serves_its_newest_trace_and_says_which(trace, tmp_path, capsys):
    runs = tmp_path / "runs"
    runs.mkdir()
    shutil.copy(trace, runs / "new.json.gz")
    shutil.copy(DATA / "foreign" / "tracelens_qwen_forward_only.json.gz", runs / "old.json.gz")
    os.utime(runs / "old.json.gz", (1, 1))
    assert main(["show", str(runs)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("stem (Slow)")
    assert err == f"backspot: read {runs / 'new.json.gz'}, the newest trace in {runs}\n"


def test_a_report_saved_beside_its_trace_is_not_taken_for_one(trace, tmp_path, capsys):
    runs = tmp_path / "runs"
    runs.mkdir()
    shutil.copy(trace, runs / "steps.json.gz")
    os.utime(runs / "steps.json.gz", (1, 1))
    assert main(["show", str(trace), "-o", str(runs / "report.json")]) == 0
    capsys.readouterr()
    assert main(["show", str(runs)]) == 0
    assert str(runs / "steps.json.gz") in capsys.readouterr().err


def test_the_newest_trace_is_the_newest_whatever_it_is_called(trace, tmp_path, capsys):
    runs = tmp_path / "runs"
    runs.mkdir()
    shutil.copy(trace, runs / "step9.json.gz")
    shutil.copy(trace, runs / "old_trace.json.gz")
    os.utime(runs / "old_trace.json.gz", (1, 1))
    (runs / "config.json").write_text('{"lr": 0.1}')
    assert main(["show", str(runs)]) == 0
    assert str(runs / "step9.json.gz") in capsys.readouterr().err
    # A trace that broke while it was written is not passed over for an older one.
    (runs / "torn.json").write_text('{"schemaVersion": 1, ')
    assert main(["show", str(runs)]) == 4
    assert "torn.json" in one_line(capsys.readouterr().err)


def test_an_empty_path_is_not_the_folder_one_is_in(trace, capsys, monkeypatch):
    monkeypatch.chdir(trace.parent)
    assert main(["show", ""]) == 3
    assert "empty path" in one_line(capsys.readouterr().err)


@pytest.mark.slow
def test_a_trace_comes_through_standard_input_packed_or_not(trace):
    import gzip

    packed = trace.read_bytes()
    for data in (packed, gzip.decompress(packed)):
        done = program("show", "-", input=data)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.startswith(b"stem (Slow) takes 90%")


def test_a_real_trace_without_labels_is_ranked_by_node(capsys):
    assert main(["show", str(DATA / "foreign" / "hta_resnet.json.gz")]) == 0
    assert "the heaviest autograd node, ConvolutionBackward0," in capsys.readouterr().out


# What it says of itself.


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"backspot {__version__}\n"


def codes_told(*arguments, capsys):
    assert main([*arguments, "--help"]) == 0
    out = capsys.readouterr().out
    assert "example:\n  backspot " in out
    assert max(map(len, out.splitlines())) <= 80
    return [int(code) for code in re.findall(r"^  (\d+)  ", out, re.MULTILINE)], out


def test_the_help_holds_an_example_and_every_exit_code(capsys):
    told, _ = codes_told(capsys=capsys)
    assert told == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 130]
    kinds = [BackspotError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        assert kind.exit_code in told


@pytest.mark.parametrize(
    ("verb", "codes"),
    [
        ("demo", [6, 7]),
        ("explain", []),
        ("run", [3, 6, 7]),
        ("show", [3, 4, 5, 6]),
        ("diff", [3, 4, 5, 8, 9]),
    ],
)
def test_the_help_of_a_verb_holds_an_example_and_the_exit_codes_of_its_own(verb, codes, capsys):
    told, out = codes_told(verb, capsys=capsys)
    assert told == codes
    assert out.endswith("others: see backspot --help\n")


def test_the_page_for_agents_has_every_exit_code(capsys):
    page = Path(__file__).parents[2].joinpath("docs", "for-agents.md").read_text("utf-8")
    told, _ = codes_told(capsys=capsys)
    assert [int(code) for code in re.findall(r"^- (\d+): ", page, re.MULTILINE)] == told


def test_python_dash_m_is_the_same_program():
    done = program("--version")
    assert (done.returncode, done.stdout.decode()) == (0, f"backspot {__version__}\n")


def test_without_a_verb_the_help_says_what_there_is(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("usage: backspot")


# How it fails.


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tell"], "invalid choice: 'tell'"),
        (["show"], "the following arguments are required: TRACE"),
        (["show", "a", "--top", "-1"], "'-1' is not a whole number of at least 0"),
        (["show", "a", "--depth", "deep"], "'deep' is not a whole number of at least 0"),
        (["show", "a", "--by", "name"], "invalid choice: 'name'"),
        (["show", "a", "--form", "json"], "unrecognized arguments: --form json"),
        (["show", "a", "--format", "html"], "choose from table, csv, github, json, md"),
        (["diff", "a", "b", "--format", "xml"], "not a format; choose from table, csv, json, md"),
        (["show", "a", "b", "-o", "report.html"], "-o takes one TRACE"),
        (["show", "a", "-o", "a.csv", "--top", "3", "--by", "class"], "leave out --top and --by"),
        (["show", "a", "-o", "a.csv", "--format", "md"], "leave out --format"),
        (
            ["show", "a", "-o", "report.html5"],
            "use one of .csv, .github.txt, .html, .json, .md, .speedscope.json or .txt",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, complaint, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert complaint in one_line(err)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("missing.json", None, 3),
        ("empty.json", b"", 4),
        ("page.json", b"<!DOCTYPE html><html></html>", 4),
        ("other.json", b'{"a": [1, 2]}', 4),
        ("broken.json.gz", b"\x1f\x8b\x08\x00rubbish", 4),
        ("report.json", b'{"schema": "backspot.report/1"}', 4),
        ("odd\x1b[2J\nname.json", None, 3),
    ],
)
def test_a_trace_that_cannot_be_read_is_one_line_and_its_exit_code(
    tmp_path, name, content, code, capsys
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["show", str(tmp_path / name)]) == code
    out, err = capsys.readouterr()
    assert not out
    assert "\x1b" not in one_line(err)


def test_the_help_explains_every_exit_code(capsys):
    assert main(["--help"]) == 0
    explained = capsys.readouterr().out.partition("exit codes:\n")[2]
    codes = {int(line.split()[0]) for line in explained.splitlines()}
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    assert codes == {0, 130, *(kind.exit_code for kind in kinds if issubclass(kind, BackspotError))}
    for verb in VERBS:
        assert set(import_module(f"backspot.commands.{verb}").EXIT_CODES) <= codes


def test_a_trace_without_a_backward_has_its_own_exit_code(capsys):
    assert main(["show", str(DATA / "foreign" / "tracelens_qwen_forward_only.json.gz")]) == 5
    assert "no backward pass" in one_line(capsys.readouterr().err)


@pytest.mark.slow
def test_a_standard_input_that_cannot_be_read_has_that_exit_code_too(tmp_path, monkeypatch, capsys):
    with (tmp_path / "output").open("wb") as only_written:
        done = program("show", "-", stdin=only_written)
    assert done.returncode == 3
    assert "standard input cannot be read: Bad file descriptor" in one_line(done.stderr.decode())
    monkeypatch.setattr("sys.stdin", None)
    assert main(["show", "-"]) == 3
    assert "standard input is closed" in one_line(capsys.readouterr().err)


def test_a_folder_without_traces_has_the_exit_code_of_what_is_not_found(tmp_path, capsys):
    assert main(["show", str(tmp_path)]) == 3
    one_line(capsys.readouterr().err)


def broken(monkeypatch, error: BaseException) -> None:
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("backspot.commands.show.run", fail)


def test_an_error_of_our_own_asks_for_a_report_and_keeps_the_traceback_to_itself(
    monkeypatch, capsys
):
    broken(monkeypatch, ZeroDivisionError("division\nby zero"))
    assert main(["show", "a"]) == 1
    line = one_line(capsys.readouterr().err)
    assert "ZeroDivisionError: division\\nby zero" in line
    assert "BACKSPOT_DEBUG=1" in line
    monkeypatch.setenv("BACKSPOT_DEBUG", "1")
    assert main(["show", "a"]) == 1
    assert capsys.readouterr().err.startswith("Traceback")


def test_an_interrupt_is_quiet_and_has_its_own_exit_code(monkeypatch, capsys):
    broken(monkeypatch, KeyboardInterrupt())
    assert main(["show", "a"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.posix
@pytest.mark.slow
def test_ctrl_c_ends_a_running_program_quietly():
    running = subprocess.Popen(
        [*PROGRAM, "show", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A runner in the background may have handed down that interrupts are ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    # More than a pipe holds: it reads, and waits for the rest of the trace.
    running.stdin.write(b'{"traceEvents": [' + b" " * (1 << 20))
    running.stdin.flush()
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=30)
    assert (running.returncode, out, err) == (130, b"", b"")


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(trace):
    running = subprocess.Popen(
        [*PROGRAM, "show", str(trace), "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    running.stdout.close()
    assert running.stderr.read() == b""
    assert running.wait(30) == 0


@pytest.mark.slow
@pytest.mark.posix
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_one_line(trace):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*PROGRAM, "show", str(trace)], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert "No space left on device" in one_line(done.stderr.decode())


# What it costs.


@pytest.mark.slow
def test_the_commands_import_neither_torch_nor_what_is_optional(trace):
    code = (
        "import sys; from backspot.commands import main; "
        f"assert main(['show', {str(trace)!r}]) == 0; "
        "heavy = {'torch', 'pandas', 'hypothesis', 'timm', 'matplotlib'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_help_does_without_numpy_and_rich():
    code = (
        "import sys; from backspot.commands import main; main(['--help']); "
        "assert not {'numpy', 'rich', 'msgspec'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_every_verb_is_a_module_with_its_two_functions():
    folder = Path(backspot.commands.__file__).parent
    modules = {path.stem for path in folder.glob("[!_]*.py")}
    assert modules == set(VERBS)


def test_the_help_imports_no_result_and_names_the_seconds_of_a_plan() -> None:
    from backspot.commands import _plan
    from backspot.results.plan import PLAN_SECONDS

    assert _plan.PLAN_SECONDS == PLAN_SECONDS
    asked = "import sys, backspot.commands.run, backspot.commands.show; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert not [name for name in done.stdout.split() if name.startswith("backspot.results")]
