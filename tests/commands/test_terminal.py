"""What the program makes of the terminal that it writes to, or of none."""

import os
import subprocess

import pytest

from support.program import PROGRAM, program


def on_a_terminal(*arguments, **environment) -> tuple[bytes, bytes]:
    """What the program writes to a terminal of its own: standard output, standard error."""
    pty = pytest.importorskip("pty")
    texts = []
    for stream in ("stdout", "stderr"):
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
            texts.append(os.read(ours, 1_000_000))
        except BlockingIOError:
            texts.append(b"")
        os.close(ours)
        os.close(theirs)
    return texts[0], texts[1]


@pytest.mark.slow
def test_colour_goes_to_a_terminal_only(trace):
    assert b"\x1b[" in on_a_terminal("show", trace)[0]
    assert b"\x1b" not in program("show", trace).stdout


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colour_can_be_refused(trace, environment):
    assert b"\x1b" not in on_a_terminal("show", trace, **environment)[0]


@pytest.mark.slow
def test_colour_can_be_forced_and_refusing_it_wins(trace):
    assert b"\x1b[" in program("show", trace, env={"FORCE_COLOR": "1"}).stdout
    both = {"FORCE_COLOR": "1", "NO_COLOR": "1"}
    assert b"\x1b" not in program("show", trace, env=both).stdout


@pytest.mark.slow
def test_a_short_reading_shows_no_progress(trace):
    assert on_a_terminal("show", trace)[1] == b""


def test_a_long_reading_shows_its_progress_on_a_terminal(monkeypatch, capsys):
    from backspot import progress
    from backspot.commands import _console

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
