"""``backspot run``: a script that knows nothing of Backspot trains as ever, and gets a report."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from support import preloaded
from support.program import program

torch = pytest.importorskip("torch")

import backspot  # noqa: E402
from backspot.commands import main  # noqa: E402
from backspot.live.running import Cycle  # noqa: E402

SMALL = ("--warmup", "1", "--steps", "2")
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

TRAINING = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps):
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item().hex(), flush=True)
"""


@pytest.fixture
def write(tmp_path):
    def put(code, name="train.py"):
        path = tmp_path / name
        path.write_text(code)
        return path

    return put


def training(*lines):
    return TRAINING + "\n".join(lines) + "\n"


def python(*arguments, start=(sys.executable,), **more):
    return subprocess.run([*start, *map(str, arguments)], capture_output=True, check=False, **more)


def observed(*arguments, trials="none", **more):
    """``backspot run`` in a process that has PyTorch already."""
    return program("run", "--trials", trials, *arguments, python=preloaded.python(), **more)


def told(done):
    return [
        line.removeprefix("backspot: ")
        for line in done.stderr.decode().splitlines()
        if line.startswith("backspot: ")
    ]


# As python runs it -------------------------------------------------------------------------------

ABOUT = """
import __main__, os, pickle, sys
class Kept: pass
print(sys.argv, __name__, __file__, __package__, __spec__ and __spec__.name, sys.path[0])
print(os.getcwd(), sys.stdin.read(), sorted(name for name in vars(__main__)))
print(type(pickle.loads(pickle.dumps(Kept()))) is Kept, "backspot" in vars(__main__))
import atexit
atexit.register(lambda: print("at exit", Kept.__name__))
print("to standard error", file=sys.stderr)
"""


def same(ours, plain):
    assert ours.stdout.decode() == plain.stdout.decode()
    assert ours.returncode == plain.returncode
    said = ours.stderr.decode().splitlines()
    assert [line for line in said if not line.startswith("backspot: ")] == (
        plain.stderr.decode().splitlines()
    )


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "sys.exit('a word')", "raise SystemExit"])
def test_a_script_runs_as_python_runs_it(ending, write, tmp_path):
    path = write(ABOUT + ending)
    given = ["--lr", "3", "--", "-o", "x", "--help"]
    plain = python(path.name, *given, cwd=tmp_path, input=b"in")
    ours = program("run", path.name, *given, cwd=tmp_path, input=b"in")
    same(ours, plain)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH came with Python 3.11")
@pytest.mark.parametrize("start", [["train.py"], ["-m", "train"]])
def test_a_safe_path_stays(start, write, tmp_path):
    write("import sys; print(sys.path)")
    paths = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": paths}
    plain = python(*start, cwd=tmp_path, env=environment)
    ours = program("run", *start, cwd=tmp_path, env=environment)
    assert ours.stdout == plain.stdout
    assert plain.stdout.startswith(f"[{str(tmp_path)!r}".encode())


@pytest.mark.slow
def test_two_dashes_end_the_options(write, tmp_path):
    path = write("import sys; print(sys.argv)")
    done = program("run", "--steps", "2", "--", path.name, "--", "-o", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, b"['train.py', '--', '-o']\n")
    assert program("run", "--", cwd=tmp_path).returncode == 2


@pytest.mark.slow
def test_a_module_runs_as_python_runs_it(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(ABOUT)
    (package / "train.py").write_text(f"from . import __path__\n{ABOUT}")
    for name in ("package", "package.train"):
        given = ("-m", name, "-m", "a", "--", "-o", "--", "b")
        plain = python(*given, cwd=tmp_path, input=b"in")
        ours = program("run", *given, cwd=tmp_path, input=b"in")
        same(ours, plain)
        assert plain.returncode == 0


OUTLIVES = """
import atexit, pickle, sys, threading
from concurrent.futures import ThreadPoolExecutor
class Kept: pass
def check(): print(type(pickle.loads(pickle.dumps(Kept()))) is Kept)
def later():
    while threading.main_thread().is_alive(): pass
    check()
atexit.register(check)
pool = ThreadPoolExecutor(1)  # its worker waits until Python ends
pool.submit(check).result()
threading.Thread(target=later).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "sys.exit(3)"])
def test_what_outlives_the_script_has_its_main_module(ending, write, tmp_path):
    path = write(OUTLIVES + ending)
    ours = program("run", path, cwd=tmp_path, timeout=60)
    same(ours, python(path, cwd=tmp_path))
    assert ours.stdout.split() == [b"True"] * 3


@pytest.mark.slow
def test_a_program_that_calls_the_command_keeps_its_main_module(write, tmp_path):
    path = write("print(__name__)", "script.py")
    code = (
        "import sys, backspot.commands\n"
        f"backspot.commands.main(['run', {str(path)!r}])\n"
        "print(hasattr(sys.modules['__main__'], 'own'))\nown = True\n"
        "print(hasattr(sys.modules['__main__'], 'own'))"
    )
    done = python(write(code), cwd=tmp_path)
    assert done.stdout.split() == [b"__main__", b"False", b"True"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", ["def f():\n    raise ValueError('no')\nf()", "x = (", "raise KeyboardInterrupt"]
)
def test_an_error_of_the_script_is_shown_as_python_shows_it(code, write, tmp_path):
    path = write(code)
    plain = python(path.name, cwd=tmp_path)
    ours = program("run", path.name, cwd=tmp_path)
    assert plain.stderr in ours.stderr
    assert ours.returncode == plain.returncode


@pytest.mark.slow
def test_a_script_or_module_that_is_not_there_is_one_line(tmp_path):
    for given in (["nothing.py"], ["-m", "no_such_package.train"], ["-m", "json.no_such"]):
        done = program("run", *given, cwd=tmp_path)
        assert done.returncode == 3
        assert done.stderr.count(b"\n") == 1
    done = program("run", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 3
    assert b"is a folder without __main__.py: name the script in it" in done.stderr
    done = program("run", cwd=tmp_path)
    assert done.returncode == 2


@pytest.mark.slow
def test_a_script_without_torch_runs_and_is_told_why_there_is_no_report(write, tmp_path):
    done = program("run", write("print('hello')"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, b"hello\n")
    assert told(done) == ["no report: the script did not import torch"]
    assert not (tmp_path / "backspot").exists()
    done = program("run", write("raise ValueError"), cwd=tmp_path)
    assert told(done) == ["no report: the script raised ValueError before it imported torch"]


# Reports -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_report_is_printed_on_standard_error_and_written(write, tmp_path):
    path = write(training("train(9)"))
    plain = python(path, start=preloaded.python(), cwd=tmp_path)
    done = observed(*SMALL, path, trials="operators", cwd=tmp_path)
    assert done.stdout == plain.stdout
    assert sorted(file.name for file in (tmp_path / "backspot").iterdir()) == [
        "report.html",
        "report.json",
        "trace.json.gz",
    ]
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report.trace == f"{path}, steps 5 to 6"
    assert {"0", "1", "2"} <= {row.path for row in report.modules}
    assert report.steps == 2
    assert report["0"].row.recorded_calls == 2
    assert report["0"].row.class_name.encode() in done.stderr
    again = backspot.locate(tmp_path / "backspot" / "trace.json.gz")
    assert {row.path for row in again.modules} == {row.path for row in report.modules}
    assert b"A step takes " in done.stderr
    assert told(done) == [
        f"wrote trace.json.gz, report.html, report.json into backspot{os.sep}",
        f"open backspot{os.sep}report.html in a browser, the trace in ui.perfetto.dev",
    ]


@pytest.mark.slow
@pytest.mark.skipif(VERSION < (2, 14), reason="this PyTorch records no lines of calls")
def test_with_stacks_the_lines_of_the_step_are_known(write, tmp_path):
    path = write(training("train(20)"))
    done = observed("--stacks", *SMALL, path, cwd=tmp_path)
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert "loss.backward()" in {
        TRAINING.splitlines()[line.line - 1].strip() for line in report.host
    }
    assert not any("Python profiler" in line for line in told(done))


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["train(9)", "train(3)"], ids=["a report", "too few steps"])
def test_a_script_that_closes_standard_error_trains_on(ends, write, tmp_path):
    closing = "sys.stderr = open('log', 'w'); sys.stderr.close()"
    path = write(training(closing, ends))
    plain = python(path, start=preloaded.python(), cwd=tmp_path)
    done = observed(*SMALL, path, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert (tmp_path / "backspot" / "report.html").exists() == (ends == "train(9)")


TEE = """
class Tee:
    def __init__(self, stream): self.stream, self.log = stream, open("log", "w")
    def write(self, text): self.stream.write(text); self.log.write(text)
    def flush(self): self.stream.flush(); self.log.flush()
sys.stderr = Tee(sys.stderr)
"""


@pytest.mark.slow
def test_a_script_that_logs_standard_error_gets_the_report_there_too(write, tmp_path):
    done = observed(*SMALL, write(training(TEE, "train(9)")), cwd=tmp_path)
    printed = (tmp_path / "log").read_bytes()
    assert b"AddmmBackward0" in printed
    assert done.stderr.endswith(printed)


@pytest.mark.slow
def test_an_earlier_report_is_kept(write, tmp_path):
    path = write(training("train(9)"))
    (tmp_path / "backspot").mkdir()
    observed(*SMALL, path, cwd=tmp_path)
    assert (tmp_path / "backspot-2" / "report.html").exists()
    refused = observed(*SMALL, "-o", "backspot-2", path, cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (6, b"")
    forced = observed(*SMALL, "-o", "backspot-2", "--force", path, cwd=tmp_path)
    assert forced.returncode == 0


@pytest.mark.slow
@pytest.mark.posix
@pytest.mark.parametrize("folder", ["train.py/inside", "gone/inside"])
def test_a_folder_that_cannot_be_written_to_is_told_before_the_script_starts(
    folder, write, tmp_path
):
    (tmp_path / "gone").symlink_to("nowhere")
    done = program("run", "-o", folder, write("print('hello')"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith(f"backspot: error: --output {folder}: nothing can be written there: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "breaking", ["open('backspot', 'w')", "os.makedirs('backspot/report.html')"]
)
@pytest.mark.parametrize("option", [(), ("--memory",)])
def test_a_report_that_cannot_be_written_is_printed_in_full(breaking, option, write, tmp_path):
    path = write(training("import os", f"train(3); {breaking}; train(9)"))
    kept = tmp_path / "temporary"
    kept.mkdir()
    done = observed(*SMALL, *option, path, cwd=tmp_path, env={"TMPDIR": str(kept)})
    assert done.returncode == 0
    assert b"slowest node" in done.stderr
    assert [line for line in told(done) if line.startswith("no files: ")]
    assert not any(line.startswith(("wrote", "open", "no report")) for line in told(done))
    assert not list(kept.glob("backspot-*"))


@pytest.mark.slow
def test_the_report_goes_where_the_command_was_started(write, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    path = write(training("import os; os.chdir('elsewhere')", "train(9)"))
    observed(*SMALL, path, cwd=tmp_path)
    assert (tmp_path / "backspot" / "report.html").exists()


@pytest.mark.slow
def test_the_script_ends_after_the_report_if_that_is_wanted(write, tmp_path):
    path = write(training("try:", "    train(1000)", "finally:", "    print('cleaned up')"))
    done = observed(*SMALL, "--exit", path, cwd=tmp_path)
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0
    assert (len(lines), lines[-1]) == (6, "cleaned up")  # the sixth step does not print


@pytest.mark.slow
def test_the_first_recorded_step_can_be_chosen(write, tmp_path):
    path = write(training("train(16)"))
    observed("--at", "12", "--steps", "2", path, cwd=tmp_path)
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report.trace.endswith("steps 12 to 13")


@pytest.mark.slow
def test_a_script_may_ask_where_torch_is_before_it_imports_it(write, tmp_path):
    ask = "import importlib.util\nfor _ in range(2): assert importlib.util.find_spec('torch')\n"
    done = observed(*SMALL, write(ask + training("train(9)")), cwd=tmp_path)
    assert len(told(done)) == 2, done.stderr.decode()
    assert (tmp_path / "backspot" / "report.json").exists()


@pytest.mark.slow
def test_tensors_that_the_script_trains_can_be_swapped(write, tmp_path):
    script = write(
        training(
            "torch.__future__.set_swap_module_params_on_conversion(True)",
            "for _ in range(20):",
            "    train(1)",
            "    optimizer.zero_grad()",
            "    model.load_state_dict(model.state_dict())",
            "    other = nn.Parameter(model[0].weight.detach() * 0.9)",
            "    torch.utils.swap_tensors(model[0].weight, other)",
        )
    )
    plain = python(script, start=preloaded.python(), cwd=tmp_path)
    done = observed(*SMALL, script, cwd=tmp_path)
    assert b"wrote" in done.stderr
    assert (done.returncode, done.stdout) == (0, plain.stdout)


@pytest.mark.slow
def test_a_script_that_never_compiles_loads_no_compiler_and_gets_no_folder_for_it(write, tmp_path):
    script = write(
        TRAINING.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", "")
        .replace("optimizer.zero_grad()", "model.zero_grad()")
        .replace("optimizer.step()", "[p.data.sub_(0.1 * p.grad) for p in model.parameters()]")
        + "train(20)\nimport os\n"
        "print(os.environ.get('TORCHINDUCTOR_CACHE_DIR'))\n"
        "print(*(name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules))\n"
    )
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    plain = python(script, start=preloaded.python(), cwd=tmp_path, env=environment)
    observed = python(
        "-m", "backspot", "run", *SMALL, "--memory", script, cwd=tmp_path, env=environment
    )
    assert b"wrote" in observed.stderr
    *lines, of_compilers = observed.stdout.splitlines()
    assert lines == plain.stdout.splitlines()[:-1]
    assert of_compilers == b""
    assert not [*(tmp_path / "temporary").iterdir()]


@pytest.mark.slow
def test_a_training_in_a_thread_is_reported_after_the_script_has_ended(write, tmp_path):
    code = training(
        "import threading",
        "def late():",
        "    while threading.main_thread().is_alive(): pass",
        "    train(9)",
        "threading.Thread(target=late).start()",
    )
    done = observed(*SMALL, write(code), cwd=tmp_path)
    assert len(told(done)) == 2, done.stderr.decode()
    assert backspot.Report.load(tmp_path / "backspot" / "report.json").steps == 2


@pytest.mark.slow
@pytest.mark.parametrize("waits", ["", "thread.join()"])
def test_a_thread_that_ends_within_the_recorded_steps_is_one_line(waits, write, tmp_path):
    code = training(
        "import threading", "thread = threading.Thread(target=train, args=(5,))", "thread.start()"
    )
    done = observed("--warmup", "1", "--steps", "2", write(code + waits), cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    (line,) = told(done)
    assert line.startswith("no report: the script ended after 5 steps")


@pytest.mark.slow
def test_a_file_with_the_name_of_the_folder_is_left_alone(write, tmp_path):
    (tmp_path / "backspot").write_text("mine")
    done = observed(*SMALL, write(training("train(9)")), cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "backspot-2" / "report.json").exists()


@pytest.mark.slow
def test_a_first_step_that_is_too_early_is_one_line(write, tmp_path):
    path = write(training("train(16)"))
    done = observed("--at", "4", "--steps", "2", path, cwd=tmp_path)
    assert told(done)[0].startswith("--at 4: records from step 5 on")
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report.trace.endswith("steps 5 to 6")


UNUSED = "other = nn.Linear(8, 8); unused = torch.optim.SGD(other.parameters(), lr=0.1)"


@pytest.mark.slow
def test_an_optimizer_that_takes_no_step_delays_the_report_by_a_few_steps(write, tmp_path):
    path = write(training(UNUSED, "train(60)"))
    observed("--warmup", "10", "--steps", "2", path, cwd=tmp_path)
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report.trace.endswith("steps 34 to 35")
    observed("--at", "14", "--steps", "2", path, cwd=tmp_path)
    report = backspot.Report.load(tmp_path / "backspot-2" / "report.json")
    assert report.trace.endswith("steps 14 to 15")


@pytest.mark.slow
def test_too_few_steps_because_of_such_an_optimizer_are_explained(write, tmp_path):
    done = observed(*SMALL, write(training(UNUSED, "train(6)")), cwd=tmp_path)
    assert told(done) == [
        "no report: the script ended after 6 steps, and a report needs 8 (3 of them for an "
        "optimizer that took no step)"
    ]


QUEUE = """
from torch.utils.data import DataLoader
if __name__ == "__main__":
    count = int(sys.argv[1])  # one epoch, whose batches are there before they are needed
    loader = DataLoader(torch.zeros(count), num_workers=1, prefetch_factor=6)
    for at, _ in enumerate(loader):
        train(1)
        if at == 0: __import__("time").sleep(2)
"""


@pytest.mark.slow
def test_with_as_many_steps_as_the_queue_of_a_loader_may_need_there_is_a_report(write, tmp_path):
    path = write(training(QUEUE))
    (line,) = told(observed(*SMALL, path, "8", cwd=tmp_path))
    found = re.match(r"no report: the script ended after 8 steps, and .* up to (\d+) (.*)", line)
    assert found is not None
    assert found[2] == "(up to 12 of them for the queue of a loader)"
    done = observed(*SMALL, path, found[1], cwd=tmp_path)
    assert not [line for line in told(done) if "no report" in line]
    assert (tmp_path / "backspot" / "report.json").exists()


@pytest.mark.slow
def test_too_few_steps_of_a_critic_and_a_late_generator_are_explained(write, tmp_path):
    code = training(UNUSED, *["train(3); unused.step()"] * 6)
    done = observed("--warmup", "5", "--steps", "2", write(code), cwd=tmp_path)
    (line,) = told(done)
    assert line.startswith("no report: the script ended after 8 steps, and a report needs 9; use ")


@pytest.mark.slow
def test_models_that_gc_freeze_hides_are_found_by_variables(write, tmp_path):
    code = training(
        "class Trainer: pass",
        "trainer = Trainer(); trainer.models = [model]",
        "import gc; gc.freeze(); del model",
        "for _ in range(9):",
        "    trainer.models[0](torch.randn(4, 8)).sum().backward(); optimizer.step()",
    )
    done = observed(*SMALL, write(code), cwd=tmp_path)
    assert len(told(done)) == 2, done.stderr.decode()
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report["0"].row.recorded_calls == 2


@pytest.mark.slow
def test_layers_that_no_module_holds_have_the_names_that_they_have_themselves(write, tmp_path):
    code = training(
        "class Layer(nn.Linear):",
        "    def __init__(self, width, name):",
        "        super().__init__(8, width)",
        "        self.name = name",
        "layers = [Layer(8, 'dense'), Layer(8, 'dense_1'), Layer(2, 'dense_2')]",
        "optimizer = torch.optim.SGD([p for one in layers for p in one.parameters()], lr=0.1)",
        "del model",
        "for _ in range(9):",
        "    x = torch.randn(4, 8)",
        "    for at in range(3): x = layers[at](x)",
        "    x.sum().backward(); optimizer.step()",
    )
    done = observed(*SMALL, write(code), cwd=tmp_path)
    assert len(told(done)) == 2, done.stderr.decode()
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert {row.path for row in report.modules if row.is_module} == {"dense", "dense_1", "dense_2"}


@pytest.mark.slow
def test_models_that_gc_freeze_hides_everywhere_are_one_line(write, tmp_path):
    code = training(
        "def make(model=nn.Sequential(nn.Linear(8, 8))):",
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "    return optimizer, lambda: model(torch.randn(4, 8)).sum()",
        "optimizer, loss = make()",
        "del model, make",
        "import gc; gc.freeze()",
        "for _ in range(9): loss().backward(); optimizer.step()",
    )
    done = observed(*SMALL, write(code), cwd=tmp_path)
    assert told(done)[0].startswith("no module is labelled: none was found, and gc.freeze() can")


@pytest.mark.slow
def test_a_report_can_be_made_again_and_again(write, tmp_path):
    path = write(training("train(30)"))
    done = observed(*SMALL, "--every", "10", path, cwd=tmp_path)
    assert sorted(file.name for file in (tmp_path / "backspot").glob("*.json")) == [
        "report.json",
        "report.step15.json",
        "report.step25.json",
    ]
    assert done.stdout == python(path, start=preloaded.python(), cwd=tmp_path).stdout


@pytest.mark.slow
def test_the_training_goes_on_while_the_report_is_made(write, tmp_path):
    each = "for _ in range(9):\n    train(1)\n    seen |= {one.name for one in enumerate()}"
    last = "print(any(name.startswith('backspot') for name in seen))"
    path = write(training("from threading import enumerate", "seen = set()", each, last))
    done = observed(*SMALL, path, cwd=tmp_path)
    assert done.stdout.decode().splitlines()[-1] == "True"
    assert (tmp_path / "backspot" / "report.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "raise ValueError('broken')", "raise KeyboardInterrupt"])
@pytest.mark.parametrize("thread", ["", "Thread(target=main_thread().join).start()"])
def test_what_was_recorded_is_reported_when_the_script_ends_early(thread, ending, write, tmp_path):
    path = write(training("from threading import *", "train(8)", thread, ending))
    # Where tabulate is installed, PyTorch makes Python forget that it was interrupted.
    plain = python(path, start=preloaded.python(), cwd=tmp_path)
    done = observed("--warmup", "1", "--steps", "4", path, cwd=tmp_path)
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report.steps == 2
    assert report.trace.endswith("steps 7 to 8")
    assert done.returncode == plain.returncode


@pytest.mark.slow
def test_an_end_within_a_step_leaves_that_step_out(write, tmp_path):
    code = training("train(8)", "model(torch.randn(4, 8)).sum()", "1 / 0")
    done = observed("--warmup", "1", "--steps", "4", write(code), cwd=tmp_path)
    assert b"ZeroDivisionError" in done.stderr
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert (report.steps, len(report.passes)) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "recorded"), [(4, 1), (5, 2), (10, 2), (16, 2), (19, 3)])
def test_a_script_that_ends_early_gets_the_report_of_the_steps_that_there_were(
    steps, recorded, write, tmp_path
):
    path = write(training(f"train({steps})"))
    done = observed(path, cwd=tmp_path)
    assert len(done.stdout.splitlines()) == steps
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report.steps == recorded
    first = 4 if steps < 17 else 17
    assert report.trace.endswith(f"steps {first} to {first + recorded - 1}")
    assert any("steps of its warm-up" in text for text in report.warnings) == (steps < 17)
    assert len(report.unprofiled_step_ns_by_step) == min(max(steps - 5, 0), 10)
    assert f"after {steps} steps, and the report is of {recorded}" in told(done)[-1]


@pytest.mark.slow
def test_the_command_for_more_steps_of_a_short_script_records_them(write, tmp_path):
    path = write(training("train(14)"))
    *_, line = told(observed(path, cwd=tmp_path))
    command = line.partition("backspot run ")[2].split()
    again = observed(*command, cwd=tmp_path)
    assert backspot.Report.load(tmp_path / "backspot-2" / "report.json").steps == 5
    assert "the script ended" not in told(again)[-1]


@pytest.mark.slow
def test_steps_of_the_warm_up_are_dropped_once_there_are_later_ones(write, tmp_path):
    observed(write(training("train(30)")), cwd=tmp_path)
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report.trace.endswith("steps 17 to 26")
    assert not any("warm-up" in text for text in report.warnings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("open('gone.csv')", "the script raised FileNotFoundError before its first step"),
        ("raise SystemExit(2)", "the script called sys.exit(2) before its first step"),
        ("train(2); 1 / 0", "the script raised ZeroDivisionError after 2 steps, and a report"),
        ("raise KeyboardInterrupt", "the script was interrupted before its first step"),
    ],
)
def test_a_script_that_ends_without_a_report_is_said_to_have_ended_so(
    ending, said, write, tmp_path
):
    (line,) = told(observed(write(training(ending)), cwd=tmp_path))
    assert line.startswith(f"no report: {said}")


@pytest.mark.slow
def test_without_a_report_the_reason_that_was_given_before_is_the_reason(write, tmp_path):
    # cProfile sets none from Python 3.12 on.
    code = training("sys.setprofile(lambda *_: None)", "train(14)")
    first, last = told(observed(*SMALL, write(code), cwd=tmp_path))
    assert first == "a Python profiler is running, so no step is recorded"
    assert last == f"no report: {first}"


@pytest.mark.slow
def test_an_optimizer_that_is_made_anew_for_each_step_is_one(write, tmp_path):
    code = training(
        "kept = []",
        "for _ in range(9):",
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "    kept.append(optimizer)",
        "    train(1)",
    )
    observed(*SMALL, write(code), cwd=tmp_path)
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report.trace.endswith("steps 5 to 6")


@pytest.mark.slow
@pytest.mark.posix
def test_a_recording_that_cannot_be_written_is_one_line_with_the_folder(write, tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    done = observed(*SMALL, write(training(limit, "train(9)")), cwd=tmp_path)
    (line,) = told(done)
    assert line.startswith("no report: the recording cannot be written to the temporary folder ")
    assert line.endswith("set TMPDIR to a folder with more space")
    assert len(done.stdout.splitlines()) == 9


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Kineto's errors are of use with a GPU")
def test_kineto_says_nothing_of_a_gpu_that_is_not_there(write, tmp_path):
    code = training("import os, subprocess", "train(9)", "print('KINETO_LOG_LEVEL' in os.environ)")
    code += "print(b'KINETO_LOG_LEVEL' in subprocess.check_output('env'))\n"
    done = observed(*SMALL, write(code), cwd=tmp_path)
    assert done.stdout.splitlines()[-2:] == [b"False", b"False"]
    said = done.stderr.decode().splitlines()
    assert not [line for line in said if line.startswith(("USDT:", "ERROR:", "STAGE:"))]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("run --epochs 3 train.py", "after it: backspot run train.py --epochs 3"),
        ("run --steps 4 --lr 0.1 train.py data", "backspot run --steps 4 train.py data --lr 0.1"),
        ("train.py --epochs 3", "backspot run train.py --epochs 3"),
    ],
)
def test_a_command_in_the_wrong_order_is_answered_by_the_right_one(words, remedy, capsys):
    assert main(words.split()) == 2
    assert remedy in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "said"), [(0, "nothing called backward()"), (3, "after 3 steps")]
)
def test_too_few_steps_are_one_clear_line(steps, said, write, tmp_path):
    done = observed(*SMALL, write(training(f"train({steps})")), cwd=tmp_path)
    (line,) = told(done)
    assert line.startswith("no report: ")
    assert said in line
    assert not (tmp_path / "backspot").exists()


# Nothing remains ---------------------------------------------------------------------------------

LEFT = """
import sys, threading, signal
from support.leftovers import hooks_on, left_in_torch
def left():
    return [
        *hooks_on(model), *left_in_torch(),
        *(name for name, found in vars(torch.Tensor).items()
          if getattr(found, "__globals__", {}).get("__name__", "").startswith("backspot")),
        *(thread.name for thread in threading.enumerate() if thread is not threading.main_thread()),
        *(type(one).__name__ for one in sys.meta_path if "backspot" in type(one).__module__),
        *filter(None, [sys.getprofile(), sys.gettrace()]),
        *(vars(optimizer).keys() & {"step"}),
    ]
"""


WAITING = """
for _ in range(600):  # the report is made while the training goes on
    if left():
        time.sleep(0.05)
        optimizer.step()
"""


@pytest.mark.slow
def test_nothing_remains_after_the_report(write, tmp_path):
    path = write(training(LEFT, "import time", "train(9)", WAITING, "print(left())"))
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = observed(*SMALL, "--no-log", path, cwd=tmp_path, env=environment)
    assert done.stdout.decode().splitlines()[-1] == "[]", done.stderr.decode()


@pytest.mark.slow
def test_while_it_waits_there_are_one_hook_of_pytorchs_own_and_who_waits_for_inductor(
    write, tmp_path
):
    path = write(training(LEFT, "train(2)", "print(left())"))
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = observed("--warmup", "3", "--no-log", path, cwd=tmp_path, env=environment)
    hook, *waiting = eval(done.stdout.decode().splitlines()[-1])
    assert "_global_optimizer_post_hooks" in hook
    assert set(waiting) <= {"_Finder"}


# Compiled code -----------------------------------------------------------------------------------

# The code is that of ``live/test_compiled.py``, so that a worker builds its C++ once.
COMPILED = """
import sys
import time
import torch
import torch._inductor.config as config
from torch import nn

config.cpp.enable_kernel_profile = True  # the kernels are in traces

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(8, 8, bias=False), nn.Tanh()

    def forward(self, x):
        return x + self.act(self.fc(x))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 2))
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    optimizer.zero_grad()
    loss = compiled(torch.randn(3, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
    torch._dynamo.config.error_on_recompile = True
for _ in range(600):  # the report is made while the training goes on
    if config.post_grad_custom_post_pass:
        time.sleep(0.05)
        optimizer.step()
found = torch._dynamo.utils.counters
print("from the caches:", found["inductor"]["fxgraph_cache_hit"])
print("left:", config.post_grad_custom_post_pass, config.trace.provenance_tracking_level)
print("left:", [one for one in sys.meta_path if "backspot" in type(one).__module__])
"""
with_inductor = pytest.mark.skipif(VERSION < (2, 10), reason="this PyTorch keeps no launch sites")


@pytest.mark.slow
@pytest.mark.xdist_group("dynamo")  # one worker has the built code
@with_inductor
def test_the_modules_inside_compiled_code_are_known_also_with_warm_caches(
    write, tmp_path, forget_graphs, monkeypatch
):
    # As users have Inductor: it looks which instructions work, and starts processes that compile.
    for name in ("TORCHINDUCTOR_VEC_ISA_OK", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.delenv(name)
    path = write(COMPILED)
    launched, losses = [], []
    for folder, hits in (("cold", 0), ("warm", 2)):
        done = observed(*SMALL, "-o", folder, path, cwd=tmp_path)
        assert b"no report" not in done.stderr
        *of_steps, caches, settings, finders = done.stdout.decode().splitlines()
        assert caches == f"from the caches: {hits}"
        assert (settings, finders) == ("left: None 0", "left: []")
        losses.append(of_steps)
        report = backspot.Report.load(tmp_path / folder / "report.json")
        rows = {row.path: row for row in report.modules}
        assert {"0", "1.fc", "1.act", "2.fc", "2.act", "3"} <= rows.keys()
        assert "aten::mm" in {kernel.name for kernel in rows["2.fc"].kernels}
        launched.append({path: {one.name for one in row.kernels} for path, row in rows.items()})
        assert not [one for one in report.warnings if "compil" in one]
    assert launched[0] == launched[1]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 9


@pytest.mark.slow
@with_inductor
def test_inductor_is_set_up_until_the_script_ends_unless_that_is_unwanted(write, tmp_path):
    path = write(
        "import atexit, torch, torch._inductor.config as config\n"
        "def level(): print(config.trace.provenance_tracking_level)\n"
        "print(config.post_grad_custom_post_pass is not None); level(); atexit.register(level)"
    )
    assert observed(path, cwd=tmp_path).stdout.split() == [b"True", b"2", b"0"]
    unwanted = observed("--no-compiled", path, cwd=tmp_path)
    assert unwanted.stdout.split() == [b"False", b"0", b"0"]


@pytest.mark.slow
def test_a_script_that_does_not_compile_loads_no_more_of_pytorch(write, tmp_path):
    path = write(
        "import sys\n"
        "print('torch' in sys.modules)\n"
        f"{training('train(9)')}\n"
        "print(sorted(name for name in sys.modules if name.startswith('torch._inductor')))"
    )
    plain = python(path, start=preloaded.python(), cwd=tmp_path)
    done = observed(*SMALL, path, cwd=tmp_path)
    assert done.stdout == plain.stdout
    assert done.stdout.startswith(b"False")
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert (report.steps, report["0"].row.recorded_calls) == (2, 2)


WHOLE_STEP = """
import torch
from torch._dynamo.utils import counters

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@torch.compile(backend="aot_eager")
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss

for _ in range(40):
    loss = step(torch.ones(3, 4))
    breaks = sum(counters["graph_break"].values())
    print(loss.item(), counters["stats"]["unique_graphs"], breaks, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    reason="this PyTorch compiles what a function calls that it leaves alone",
)
@pytest.mark.parametrize("options", [(), ("--no-log", "--exit")], ids=["default", "unlogged"])
def test_nothing_but_the_script_is_compiled_where_its_whole_step_is(write, tmp_path, options):
    path = write(WHOLE_STEP)
    plain = python(path, start=preloaded.python(), cwd=tmp_path).stdout.splitlines()
    assert len(plain) == 40
    ours = observed(*SMALL, *options, path, cwd=tmp_path).stdout.splitlines()
    assert ours == plain[: len(ours)]
    assert len(ours) == 40 or options
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report.steps == 2


# Beside what the script does ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_profiler_of_the_script_is_left_alone(write, tmp_path):
    code = training(
        "with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:",
        "    train(12)",
        "print(len(found.events()) > 0)",
    )
    done = observed(*SMALL, write(code), cwd=tmp_path)
    assert done.stdout.decode().splitlines()[-1] == "True"
    first, second = told(done)
    assert first.startswith("the script uses torch.profiler itself")
    assert second.startswith("no report: ")


@pytest.mark.slow
def test_it_records_after_the_scripts_own_profiler(write, tmp_path):
    code = training(
        "from torch.profiler import ProfilerActivity, profile, schedule",
        "plan = schedule(wait=1, warmup=1, active=2, repeat=1)",
        "with profile(activities=[ProfilerActivity.CPU], schedule=plan) as found:",
        "    for _ in range(16):",
        "        train(1)",
        "        found.step()",
        "print(len(found.events()) > 0)",
    )
    done = observed(*SMALL, write(code), cwd=tmp_path)
    assert done.stdout.decode().splitlines()[-1] == "True"
    assert (tmp_path / "backspot" / "report.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("begun", ["timed", "prepared", "recorded"])
def test_it_gives_way_to_a_profiler_that_the_script_starts_meanwhile(begun, write, tmp_path):
    before = {"timed": 2, "prepared": 3, "recorded": 5}[begun]
    code = training(
        f"train({before})",
        "with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:",
        "    train(2)",
        "names = [event.name for event in found.events()]",
        "train(20)",
        "print(names.count('Optimizer.step#SGD.step'), 'ProfilerStep#0' in names)",
    )
    done = observed(*SMALL, write(code), cwd=tmp_path)
    assert done.stdout.decode().splitlines()[-1] == "2 False"
    assert told(done)[0].startswith("the script uses torch.profiler itself")
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert (report.steps, report["0"].row.recorded_calls) == (2, 2)


INSIDE = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
def update(parameter):
    own[parameter].step()
    own[parameter].zero_grad()
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for _ in range(12):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    print(loss.item().hex())
"""


@pytest.mark.slow
def test_where_optimizers_step_inside_the_backward_each_backward_is_a_step(write, tmp_path):
    path = write(INSIDE)
    done = observed(*SMALL, path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == python(path, start=preloaded.python(), cwd=tmp_path).stdout
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report.trace.endswith("steps 5 to 6")
    assert (
        report.steps,
        len(report.passes),
        report["0"].row.recorded_calls,
    ) == (2, 2, 2)


@pytest.mark.slow
def test_an_optimizer_outside_the_backward_ends_the_steps_of_those_inside(write, tmp_path):
    code = INSIDE.replace("for _ in", "rest = torch.nn.Linear(2, 2)\nfor _ in")
    code = code.replace("model(torch.randn(4, 8))", "rest(model(torch.randn(4, 8)))")
    code = code.replace("for _ in", "outer = torch.optim.SGD(rest.parameters(), 0.1)\nfor _ in")
    code += "    (rest.weight.sum() ** 2).backward()\n    outer.step()\n"
    done = observed(*SMALL, write(code), cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert (report.steps, len(report.passes)) == (2, 4)


@pytest.mark.slow
def test_labels_of_the_scripts_own_are_used(write, tmp_path):
    code = training("import backspot", "with backspot.instrument(model, name='net'):", "  train(9)")
    observed(*SMALL, write(code), cwd=tmp_path)
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report["net.0"].row.recorded_calls == 2


@pytest.mark.slow
def test_a_forked_process_writes_nothing(write, tmp_path):
    code = training("import os", "os.fork() or os._exit(0)", "train(9)")
    done = observed(*SMALL, write(code), cwd=tmp_path)
    assert len(told(done)) == 2


# The signal --------------------------------------------------------------------------------------


def until_it_prints(process):
    return process.stdout.readline()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="there is no SIGUSR1")
def test_a_signal_asks_for_a_report_now(write, tmp_path):
    path = write(training("import time", "while True: train(1); time.sleep(0.02)"))
    command = [
        *preloaded.python(),
        "-m",
        "backspot",
        "run",
        "--warmup",
        "100000",
        "--steps",
        "2",
        str(path),
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        # The steps are not counted any more after the first report.
        for expected in ("report.json", "report.2.json"):
            process.stdout.readline()
            process.stdout.readline()
            process.send_signal(signal.SIGUSR1)
            wait_for(lambda name=expected: (tmp_path / "backspot" / name).exists(), process)
    finally:
        process.kill()
        process.communicate()
    first, second = (
        backspot.Report.load(tmp_path / "backspot" / name).trace
        for name in ("report.json", "report.2.json")
    )
    assert ", steps " in first
    assert second.endswith(", 2 steps")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="there is no SIGUSR1")
def test_a_later_report_that_is_cut_short_does_not_advise_what_was_done(write, tmp_path):
    asked = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"
    path = write(training("train(40)", asked, "train(15)"))
    done = observed("--steps", "10", path, cwd=tmp_path)
    assert len([*(tmp_path / "backspot").glob("report*.json")]) == 2
    assert told(done)[-1].startswith("the script ended after ")
    assert "for more of them" not in told(done)[-1]


def wait_for(condition, process):
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < end
        process.stdout.readline()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="there is no SIGUSR1")
def test_a_handler_of_the_script_stays(write, tmp_path):
    code = training(
        "import os, signal",
        "signal.signal(signal.SIGUSR1, lambda *_: print('mine'))",
        "train(9)",
        "os.kill(os.getpid(), signal.SIGUSR1)",
    )
    done = observed(*SMALL, write(code), cwd=tmp_path)
    assert done.stdout.decode().splitlines()[-1] == "mine"


# Which optimizer ends an iteration ---------------------------------------------------------------


FOLDS = """
import gc

def fold(steps):
    global model, optimizer
    model = optimizer = None
    gc.collect()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(steps)
"""


@pytest.mark.slow
def test_what_is_recorded_is_of_one_fold(write, tmp_path):
    code = training(FOLDS, "for steps in (7, 4, 9, 2): fold(steps)")
    done = observed("--warmup", "2", "--steps", "3", write(code), cwd=tmp_path)
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report.trace.endswith("steps 18 to 20")
    assert {row.calls for row in report.modules if row.is_module} == {1}
    assert not [line for line in told(done) if "no report" in line]


@pytest.mark.slow
def test_folds_that_are_too_short_are_told(write, tmp_path):
    code = training(FOLDS, "for _ in range(6): fold(5)")
    done = observed("--warmup", "2", "--steps", "5", write(code), cwd=tmp_path)
    assert told(done)[0].startswith(
        "no report: the script ended after 30 steps, at most 5 of one model, and a report needs 9"
    )


@pytest.mark.slow
def test_a_step_within_another_optimizers_step_is_a_part_of_it(write, tmp_path):
    code = training(
        "class Around(torch.optim.Optimizer):",
        "    def __init__(self, parameters):",
        "        super().__init__(parameters, {})",
        "        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)",
        "    def step(self):",
        "        with torch.enable_grad():",
        "            model(torch.randn(4, 8)).square().mean().backward()",
        "        self.inner.step()",
        "optimizer = Around(model.parameters())",
        "train(9)",
    )
    observed(*SMALL, write(code), cwd=tmp_path)
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report.trace.endswith("steps 5 to 6")
    assert len(report.passes) == 4
    assert {row.calls for row in report.modules if row.is_module} == {2}


@pytest.mark.slow
def test_threads_that_are_not_recorded_are_told(write, tmp_path):
    code = training(
        "import threading",
        "thread = threading.Thread(target=train, args=(2,))",
        "thread.start(); thread.join(); train(9)",
    )
    done = observed(*SMALL, write(code), cwd=tmp_path)
    assert "2 threads of the script train." in done.stderr.decode()


@pytest.mark.slow
def test_steps_whose_calls_have_no_labels_are_told(write, tmp_path):
    code = training(
        "train(5)",
        "def call(self, *args): return self.forward(*args)",
        "nn.Module.__call__ = call",
        "train(4)",
    )
    done = observed("--warmup", "1", "--steps", "2", write(code), cwd=tmp_path)
    text = " ".join(done.stderr.decode().split())
    assert "In 1 of 2 steps no module with a label was called" in text


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        ("AAAA", "AAAA"),  # one optimizer
        ("DGDGDGDG", "D  G G G".replace(" ", "-")),
        ("DDDGDDDGDDDG", "DDD----G---G"),
        ("IOIOIO", "I--O-O"),  # an optimizer around another one
        ("WWW" + "F" * 15, "WWW" + "-" * 12 + "FFF"),  # a head's warm-up, then all parameters
        (("D" * 20 + "G") * 3, "D" * 20 + "-" + ("-" * 20 + "G") * 2),
    ],
)
def test_an_iteration_ends_with_the_last_of_its_optimizers(order, ends):
    cycle = Cycle()
    found = "".join(one if cycle.ends_with(ord(one)) else "-" for one in order)
    assert found == ends


def test_an_optimizer_that_is_alone_has_replaced_the_others_at_once():
    cycle = Cycle()
    found = [(cycle.ends_with(ord(one), lambda: True), cycle.replaced) for one in "AAABBC"]
    assert found == [(True, one) for one in (False, False, False, True, False, True)]


def test_an_optimizer_with_long_turns_replaces_no_other():
    cycle = Cycle()
    for one in ("D" * 70 + "G") * 3:
        cycle.ends_with(ord(one))
        assert not cycle.replaced


def test_new_optimizers_end_iterations_too():
    cycle = Cycle()
    for one in "DGDGDG":
        cycle.ends_with(ord(one))
    assert [cycle.ends_with(ord("N")) for _ in range(200)][-1]


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPUs, for two counts of threads")
def test_a_training_in_a_thread_multiplies_with_as_many_threads_as_before(write):
    # PyTorch gives a thread the count of set_num_threads once an operator of it needs the count.
    # These are too small for that, so that products sum in the order of another count.
    script = write(
        """
import threading, zlib
import torch
from torch import nn

torch.set_num_threads(2)

def train():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(24, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        outputs = model(torch.randn(6, 8))
        outputs.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(zlib.crc32(outputs.detach().numpy().tobytes()))

training = threading.Thread(target=train)
training.start()
training.join()
"""
    )
    where = {"cwd": script.parent, "text": True, "start": preloaded.python()}  # with one thread
    plain = python(script, **where)
    observed = python("-m", "backspot", "run", script, **where)  # with trials, in the thread too
    assert "backspot: wrote" in observed.stderr
    assert observed.stdout.splitlines()[:60] == plain.stdout.splitlines()
