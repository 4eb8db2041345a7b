"""What the program makes of the terminal that it writes to, or of none."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backspot.commands import _console
from support.program import PROGRAM, program


def on_a_terminal(stream, *arguments, **environment) -> bytes:
    """What the program writes to a terminal that one of its streams is."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    other = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        **{**other, stream: theirs},
        env={**os.environ, "TERM": "xterm", **environment},
        check=False,
    )
    os.set_blocking(ours, False)
    try:
        text = os.read(ours, 1_000_000)
    except BlockingIOError:
        text = b""
    os.close(ours)
    os.close(theirs)
    return text


@pytest.mark.slow
def test_colour_goes_to_a_terminal_only(trace):
    assert b"\x1b[" in on_a_terminal("stdout", "show", trace)
    assert b"\x1b" not in program("show", trace).stdout


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colour_can_be_refused(trace, environment):
    assert b"\x1b" not in on_a_terminal("stdout", "show", trace, **environment)


@pytest.mark.slow
def test_colour_can_be_forced_and_refusing_it_wins(trace):
    assert b"\x1b[" in program("show", trace, env={"FORCE_COLOR": "1"}).stdout
    both = {"FORCE_COLOR": "1", "NO_COLOR": "1"}
    assert b"\x1b" not in program("show", trace, env=both).stdout


@pytest.mark.slow
def test_a_short_reading_shows_no_progress(trace):
    assert on_a_terminal("stderr", "show", trace) == b""


def test_a_long_reading_shows_its_progress_on_a_terminal(monkeypatch, capsys):
    from backspot import progress

    monkeypatch.setattr(progress, "_PATIENCE", 0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with _console.reading("runs/[red]trace\x1b[2J.json") as shown:
        shown.update(1_000_000, 4_000_000)
        shown.update(4_000_000, 4_000_000)
    err = capsys.readouterr().err
    assert "reading [red]trace\\x1b[2J.json" in err
    with _console.reading("-") as shown:
        shown.update(1_000_000, None)


@pytest.mark.slow
def test_a_terminal_that_knows_only_ascii_gets_ascii(trace):
    done = program("show", trace, env={"PYTHONIOENCODING": "ascii", "COLUMNS": "120"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"##" in done.stdout
    assert done.stdout.isascii()


@pytest.mark.slow
@pytest.mark.posix
def test_the_recording_in_the_documentation_shows_what_the_program_prints(tmp_path):
    docs = Path(__file__).parents[2] / "docs"
    subprocess.run([sys.executable, docs / "make_recording.py", tmp_path], check=True)
    for name in ("terminal.cast", "terminal.svg"):
        made = (tmp_path / name).read_bytes()
        assert made == (docs / "images" / name).read_bytes(), "run docs/make_recording.py"
        assert len(made) < 300_000
    *_, last = (tmp_path / "terminal.cast").read_text(encoding="utf-8").splitlines()
    assert json.loads(last)[0] < 30  # seconds


def test_a_character_that_the_stream_cannot_encode_is_replaced_alone():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    assert _console.encodable("█▏ → … · × 漢", stream) == "#  > … · × \\u6f22"
