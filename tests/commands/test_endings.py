"""``backspot run`` ends as ``python`` ends, whatever the script does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.program import program

pytestmark = [pytest.mark.slow, pytest.mark.posix]

ENDINGS = {
    "closes standard output": "print('done')\nsys.stdout.close()",
    "its output has no reader": "os.close(1)\nr, w = os.pipe(); os.close(r)\nprint('x')",
    "a number": "sys.exit(7)",
    "a text": "sys.exit('why')",
    "nothing": "sys.exit(None)",
    "at once": "print('x', flush=True); os._exit(5)",
    "a signal": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)",
    "an interrupt": "atexit.register(print, 'last')\nos.kill(os.getpid(), signal.SIGINT)\n"
    "time.sleep(5)",
    "an interrupt that is caught": "try:\n    os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\n"
    "except KeyboardInterrupt:\n    sys.exit(3)",
    "SystemExit in a thread": "t = threading.Thread(target=sys.exit)\nt.start(); t.join()",
    "an error": "def f():\n    raise ValueError('no')\nf()",
    "an error with a cause": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n"
    "    raise KeyError('x') from e",
    "an error while another is handled": "try:\n    1 / 0\nfinally:\n    [].pop()",
    "an error that is no Exception": "class Own(BaseException): pass\nraise Own",
    "not Python": "x = (",
    "a hook that fails": "def hook(*_): raise ValueError('hook')\nsys.excepthook = hook\n"
    "raise KeyError('the real error')",
    "a hook that exits": "sys.excepthook = lambda *_: sys.exit(9)\nraise KeyError",
    "a hook": "sys.excepthook = lambda kind, *_: print('hooked', kind)\nraise KeyError",
    "the last error at exit": "atexit.register(lambda: print(sys.last_value))\nraise KeyError('x')",
    "a group": "raise ExceptionGroup('all', [ValueError(1), OSError(2)])",
    "a note": "e = ValueError('x'); e.add_note('a note'); raise e",
}
SHOWN = ("a number", "an interrupt", "an error", "an error with a cause", "not Python", "a hook")
"""What shows the frames of a script, or ends it by another way: of modules too."""
HEAD = "import atexit, os, signal, sys, threading, time\n"
HEAD += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"


@pytest.mark.parametrize("name", [*ENDINGS, *(f"{name} of a module" for name in SHOWN)])
def test_a_script_ends_as_with_python(name, tmp_path):
    name, module, _ = name.partition(" of a module")
    if name in ("a group", "a note") and sys.version_info < (3, 11):
        pytest.skip("Python 3.11 brought them")
    (tmp_path / "train.py").write_text(HEAD + ENDINGS[name])
    given = ["-m", "train"] if module else ["train.py"]
    plain = subprocess.run(
        [sys.executable, *given], cwd=tmp_path, capture_output=True, check=False, timeout=60
    )
    ours = program("run", *given, cwd=tmp_path, timeout=60)
    said = [line for line in ours.stderr.splitlines() if not line.startswith(b"backspot: ")]
    assert (ours.returncode, ours.stdout, said) == (
        plain.returncode,
        plain.stdout,
        plain.stderr.splitlines(),
    )


FAILING = """
import torch
def fail(): torch.ones(1).sum().backward()
fail()
"""


def test_an_error_inside_the_backward_shows_no_frame_of_backspot(tmp_path):
    (tmp_path / "train.py").write_text(FAILING)
    ours = program("run", "train.py", cwd=tmp_path, timeout=60)
    assert ours.returncode == 1
    assert b"does not require grad" in ours.stderr
    assert b"/backspot/" not in ours.stderr
