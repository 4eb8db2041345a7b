"""``backspot run`` ends as ``python`` ends, whatever the script does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipapp

import pytest

from support import preloaded
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
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(FAILING)
    ours = program("run", "train.py", python=preloaded.python(), cwd=tmp_path, timeout=60)
    assert ours.returncode == 1
    assert b"does not require grad" in ours.stderr
    assert b"/backspot/" not in ours.stderr


@pytest.mark.parametrize("how", ["a folder", "an archive"])
@pytest.mark.parametrize("given", [[], ["x"]])
@pytest.mark.parametrize("safe", ["", "1"])
def test_what_has_a_main_is_run_as_python_runs_it(how, given, safe, tmp_path):
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "beside.py").write_text("there = True")
    (folder / "__main__.py").write_text(
        "import beside, sys\nprint(__name__, __file__, __spec__.name, sys.argv, sys.path[0])\n"
        "print([path for path in sys.path if path.endswith('extra')])\n"
        "def f(): raise ValueError('no')\nif sys.argv[1:]: f()"
    )
    zipapp.create_archive(folder, tmp_path / "app.pyz", "/usr/bin/env python3")
    name = "app" if how == "a folder" else "app.pyz"
    env = {"PYTHONSAFEPATH": safe, "PYTHONPATH": str(tmp_path / "extra")}
    plain = subprocess.run(
        [sys.executable, name, *given],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        env={**os.environ, **env},
    )
    ours = program("run", name, *given, cwd=tmp_path, timeout=60, env=env)
    said = [line for line in ours.stderr.splitlines() if not line.startswith(b"backspot: ")]
    assert (ours.returncode, ours.stdout, said) == (
        plain.returncode,
        plain.stdout,
        plain.stderr.splitlines(),
    )


def test_a_working_folder_that_is_gone_needs_another_one_for_the_report(tmp_path):
    (tmp_path / "train.py").write_text("print('ran')")
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"rmdir ../gone; {sys.executable} -m backspot run"
    for options, told in (
        ("", b"name another one with --output"),
        ("-o ../out", b"did not import"),
    ):
        gone.mkdir(exist_ok=True)
        done = subprocess.run(
            ["sh", "-c", f"{command} {options.replace('..', str(tmp_path))} {tmp_path}/train.py"],
            cwd=gone, capture_output=True, check=False, timeout=60,
        )  # fmt: skip
        assert told in done.stderr
        assert done.stdout == (b"ran\n" if options else b"")


INTERRUPTED = """
import os, signal, sys, time, torch
signal.signal(signal.SIGINT, signal.default_int_handler)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
now = time.perf_counter_ns
def interrupted():
    if step == 20 and "backspot" in sys._getframe(1).f_globals["__name__"]:
        os.kill(os.getpid(), signal.SIGINT)
    return now()
time.perf_counter_ns = interrupted
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


def test_an_interrupt_inside_of_backspot_shows_no_frame_of_it(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(INTERRUPTED)
    ours = program("run", "train.py", python=preloaded.python(), cwd=tmp_path, timeout=60)
    assert ours.returncode == -signal.SIGINT
    assert b"in interrupted" in ours.stderr
    assert b"/backspot/" not in ours.stderr


TRAINS = """
import os, sys, time
import torch
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
while not os.path.exists("out/report.json"):
    train(20)
"""
FORKS = """
pid = os.fork()
if not pid:
    print("copy")
    sys.exit(3)
end = time.monotonic() + 60
while not (done := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
    time.sleep(0.1)
if not done[0]:
    os.kill(pid, 9)
print(os.waitstatus_to_exitcode(done[1]) if done[0] else "it does not end")
"""


def test_a_copy_of_the_process_that_has_recorded_ends_as_python_ends(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAINS + FORKS)
    options = ("--warmup", "1", "--steps", "2", "--trials", "none", "-o", "out")
    # With all that C++ does at the end, and another thread, as that of the report.
    python = [*preloaded.python(), preloaded.WHOLE]
    done = program("run", *options, "train.py", python=python, cwd=tmp_path, timeout=100)
    assert done.stdout == b"copy\n3\n"


LEFT_BY = {
    "itself": "os._exit(3)",
    "a signal that nothing hears": "os.kill(os.getpid(), 9)",
    "an error in C": "os.abort()",
    "a copy that exits first": "pid = os.fork()\nif not pid: sys.exit(0)\n"
    "os.waitpid(pid, 0); train(40)",
}


@pytest.mark.parametrize("how", LEFT_BY)
def test_a_training_that_ends_after_its_report_leaves_no_trace_of_it(how, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAINS + LEFT_BY[how])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    options = ("--warmup", "1", "--steps", "2", "--trials", "none", "-o", "out")
    done = program(
        *("run", *options, "train.py"),
        python=preloaded.python(),
        cwd=tmp_path,
        timeout=100,
        env={"TMPDIR": str(temporary)},
    )
    left = [path.name.rpartition("-")[0] for path in temporary.iterdir()]
    if how == "a copy that exits first":
        assert (done.returncode, left) == (0, [])
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["training"]["steps"] > 40  # it was completed
    else:  # what tells its processes of each other goes with the next run
        assert all(name.startswith("backspot-processes-") for name in left)


CLOSES_ALL = """
import signal, subprocess, tempfile
signal.signal(signal.SIGALRM, lambda *_: None)
train(4)
os.closerange(3, 256)
"""
AFTER_IT = {
    "a program that it starts ends well": """
print(subprocess.run(["true"], preexec_fn=lambda: None).returncode)
""",
    "a copy has the files that the script had": """
files = [os.open(os.devnull, os.O_WRONLY) for _ in range(9)]
if not os.fork():
    print(sum(os.write(file, b"x") for file in files), flush=True); os._exit(0)
os.wait()
""",
    "a copy waits for no signal": """
if not os.fork():
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True); os._exit(0)
os.wait()
""",
    "files have what it writes": """
files = [tempfile.TemporaryFile() for _ in range(9)]
time.sleep(0.2)
signal.raise_signal(signal.SIGALRM)
train(1)
print([os.fstat(file.fileno()).st_size for file in files])
""",
    "a signal ends it": """
time.sleep(0.2)
print(signal.getsignal(signal.SIGTERM), flush=True)
os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)
""",
}


@pytest.mark.parametrize("what", AFTER_IT)
def test_once_a_script_has_closed_all_files(what, tmp_path):
    pytest.importorskip("torch")
    trains = TRAINS.partition("while")[0]
    (tmp_path / "train.py").write_text(trains + CLOSES_ALL + AFTER_IT[what])
    plain = subprocess.run(
        [*preloaded.python(), "train.py"], cwd=tmp_path, capture_output=True, check=False
    )
    ours = program(
        "run", "--trials", "none", "train.py", python=preloaded.python(), cwd=tmp_path, timeout=60
    )
    assert plain.stdout
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
