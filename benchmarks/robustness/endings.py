"""Does a script start and end under `backspot run` as it does under `python`?

    python -m benchmarks endings

Each case runs plainly and under `backspot run`, in a fresh folder: output, errors, exit code, and
what is left afterwards (files, processes) must be the same. Peak memory and time are reported.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import zipapp
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import backspot
from benchmarks.harness import Figures, Run, each
from benchmarks.robustness.found import own_error
from benchmarks.workers import Job, Phase, Record, Stage

_SRC = Path(backspot.__file__).parents[1]
OPTIONS = ("--warmup", "2", "--steps", "3", "--trials", "none")
"""Of ``backspot run``: the report is of an early step."""
_LIMIT_S = 120
_MORE_MB = 250
"""What the program, its report and the trace of three steps may take in memory."""

TRAINING = """\
import atexit, os, signal, sys, threading, time
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps=40, at=-1, do=None, said=False):
    for step in range(steps):
        if step == at:
            do()
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        if said:
            print("step", step, flush=True)
    print("loss", loss.item().hex(), flush=True)

"""


@dataclass(frozen=True)
class Ending:
    """One way to start and end a script.

    Attributes:
        script: what follows the training's definition.
        python: options of Python.
        start: what runs: a script or ``-m`` and a module.
        arguments: of the script.
        environment: what is different in it; ``None`` for what is not there.
        prepare: makes more files in the folder of the script.
        before: is called in the new process, before Python starts.
        shell: the command in which ``@`` stands for that of the script.
        signals: the number of a signal, and the step that has ended when it is sent.
        given: standard input.
        head: what defines the training.
        folder: the working folder; ``None`` for that of the script.
        options: more options of ``backspot run``.
        reports: whether a report is due.
        errors: whether standard error is compared.
    """

    script: str
    python: tuple[str, ...] = ()
    start: tuple[str, ...] = ("train.py",)
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    prepare: Callable[[Path], object] | None = None
    before: Callable[[], object] | None = None
    shell: str = ""
    signals: tuple[int, int] | None = None
    given: str = ""
    head: str = TRAINING
    folder: str | None = None
    options: tuple[str, ...] = ()
    reports: bool = True
    errors: bool = True


def _write(name: str, text: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    return write


def _zipped(folder: Path) -> None:
    source = folder.parent / "source"
    source.mkdir()
    shutil.copy(folder / "train.py", source / "__main__.py")
    zipapp.create_archive(source, folder / "train.pyz")
    shutil.rmtree(source)


def _as_folder(folder: Path) -> None:
    (folder / "app").mkdir()
    shutil.copy(folder / "train.py", folder / "app" / "__main__.py")


def _linked(folder: Path) -> None:
    (folder / "real").mkdir()
    (folder / "train.py").rename(folder / "real" / "train.py")
    (folder / "real" / "beside.py").write_text("print('beside')\n")
    (folder / "train.py").symlink_to("real/train.py")


def _renamed(name: str, encoding: str = "utf-8", head: str = "") -> Callable[[Path], object]:
    def rename(folder: Path) -> None:
        text = head + (folder / "train.py").read_text()
        (folder / "train.py").unlink()
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding=encoding)

    return rename


def _limited(what: int, most: int) -> Callable[[], object]:
    return partial(resource.setrlimit, what, (most, most))


def _close(*descriptors: int) -> Callable[[], object]:
    return lambda: [os.close(one) for one in descriptors]


def _to(path: str, descriptor: int) -> Callable[[], object]:
    return lambda: os.dup2(os.open(path, os.O_WRONLY), descriptor)


def _leave_for_nowhere() -> None:
    gone = Path("gone").absolute()
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()


def _broken(descriptor: int) -> Callable[[], object]:
    def change() -> None:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, descriptor)

    return change


_SPAWN = """
import multiprocessing
def work(steps):
    train(steps)
def nested(how):
    one = multiprocessing.get_context(how).Process(target=work, args=(40,))
    one.start(); one.join(); print(one.exitcode, flush=True)
def kill():
    os.kill(os.getpid(), signal.SIGKILL)
def fail():
    train(3); raise ValueError("in the child")
"""


def _main(code: str) -> str:
    return f"{_SPAWN}\nif __name__ == '__main__':\n    {code}\n"


ENDINGS: dict[str, Ending] = {
    # Ends
    "returns": Ending("train()"),
    "sys.exit in a forward hook": Ending(
        "model[1].register_forward_hook(lambda *_: sys.exit(3) if count() > 30 else None)\n"
        "import itertools; count = itertools.count().__next__\ntrain()"
    ),
    "sys.exit in a gradient's hook": Ending(
        "import itertools; count = itertools.count().__next__\n"
        "model[0].weight.register_hook(lambda g: sys.exit(4) if count() > 30 else None)\ntrain()"
    ),
    "sys.exit in a hook while recorded": Ending(
        "import itertools; count = itertools.count().__next__\n"
        "model[0].weight.register_hook(lambda g: sys.exit(4) if count() > 8 else None)\ntrain()",
        reports=False,
    ),
    "sys.exit in a hook of the optimizer": Ending(
        "import itertools; count = itertools.count().__next__\n"
        "optimizer.register_step_post_hook(lambda *_: sys.exit(5) if count() > 30 else None)\n"
        "train()"
    ),
    "sys.exit in atexit": Ending("atexit.register(sys.exit, 6)\ntrain()"),
    "os._exit after the report": Ending("train(400, 390, lambda: (time.sleep(8), os._exit(4)))"),
    "os._exit while recorded": Ending("train(40, 9, lambda: os._exit(4))", reports=False),
    "os._exit before torch": Ending("os._exit(7)", head="import os\n", reports=False),
    "abort": Ending("train(40, 30, os.abort)", reports=False),
    "a SIGSEGV": Ending("import ctypes\ntrain(40, 30, lambda: ctypes.string_at(0))", reports=False),
    "faulthandler and a SIGSEGV": Ending(
        "import ctypes, faulthandler; faulthandler.enable()\n"
        "train(40, 30, lambda: ctypes.string_at(0))",
        reports=False, errors=False,
    ),
    "faulthandler that dumps later": Ending(
        "import faulthandler; faulthandler.dump_traceback_later(0.01, repeat=True, "
        "file=open(os.devnull, 'w'))\ntrain()\nfaulthandler.cancel_dump_traceback_later()"
    ),
    **{
        f"{signal.Signals(number).name} after step {step}": Ending(
            "train(100_000, said=True)", signals=(number, step), reports=False,
            errors=number != signal.SIGINT,
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
        for step in (0, 6, 9, 200)
    },
    "SIGTERM before torch": Ending(
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)", head="", reports=False
    ),
    "SIGTERM at exit": Ending("atexit.register(os.kill, os.getpid(), signal.SIGTERM)\ntrain()"),
    "SIGTERM that the script handles": Ending(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "train(40, 30, lambda: os.kill(os.getpid(), signal.SIGTERM))"
    ),
    "SIGTERM that raises in the backward": Ending(
        "class Preempted(Exception): pass\ndef stop(*_): raise Preempted\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "model[0].weight.register_hook(lambda g: os.kill(os.getpid(), signal.SIGTERM))\n"
        "try:\n    train()\nexcept Preempted:\n    print('saved'); sys.exit(8)",
        reports=False,
    ),
    "SIGINT that the script handles": Ending(
        "signal.signal(signal.SIGINT, lambda *_: print('ends the epoch', flush=True))\n"
        "train(40, 30, lambda: os.kill(os.getpid(), signal.SIGINT))"
    ),
    "SIGINT that is caught": Ending(
        "try:\n    train(40, 9, lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "except KeyboardInterrupt:\n    print('caught')\ntrain()"
    ),
    "SIGUSR1 of the script's own": Ending(
        "signal.signal(signal.SIGUSR1, lambda *_: print('mine', flush=True))\n"
        "train(40, 30, lambda: os.kill(os.getpid(), signal.SIGUSR1))"
    ),
    "a timer's signal every 5 ms": Ending(
        "import itertools; count = itertools.count().__next__\n"
        "signal.signal(signal.SIGALRM, lambda *_: count())\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)\ntrain(400)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\nprint(count() > 1)"
    ),
    "SIGHUP ignored": Ending(
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "train(40, 20, lambda: os.kill(os.getpid(), signal.SIGHUP))"
    ),
    "all signals blocked": Ending(
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntrain()"
    ),
    # Errors
    "an error in the forward": Ending("train(40, 30, lambda: model(torch.randn(3)))"),
    "an error while recorded": Ending("train(40, 9, lambda: model(torch.randn(3)))", reports=False),
    "an error in a Function's backward": Ending(
        "class F(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x): return x.clone()\n"
        "    @staticmethod\n    def backward(ctx, g): raise ValueError('in the backward')\n"
        "train(40, 30, lambda: F.apply(torch.ones(2, requires_grad=True)).sum().backward())"
    ),
    "an error in the optimizer": Ending(
        "def fail(*_): raise OSError('no')\n"
        "train(40, 30, lambda: optimizer.register_step_pre_hook(fail))"
    ),
    "an error in a loader's worker": Ending(
        "class D(torch.utils.data.Dataset):\n    def __len__(self): return 400\n"
        "    def __getitem__(self, i):\n        if i == 90: raise KeyError(i)\n"
        "        return torch.ones(8)\n"
        "for x in torch.utils.data.DataLoader(D(), 2, num_workers=2):\n"
        "    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()"
    ),
    "an error in atexit": Ending("atexit.register(lambda: 1 / 0)\ntrain()"),
    "an error before torch": Ending("1 / 0", head="", reports=False),
    "an error in a module that is imported": Ending(
        "import beside", head="", reports=False,
        prepare=_write("beside.py", "import torch\nraise ImportError('x')\n"),
    ),
    "a recursion": Ending("train()\ndef f(): f()\nf()"),
    "a low recursion limit": Ending("sys.setrecursionlimit(120)\ntrain()"),
    # The end of the interpreter
    "trains in atexit": Ending("atexit.register(train)", reports=False),
    "trains before and in atexit": Ending("train()\natexit.register(train)"),
    "trains in __del__": Ending(
        "class A:\n    def __del__(self): train(3)\na = A()\ntrain()\ndel a"
    ),
    "a generator that trains is closed": Ending(
        "def steps():\n    try:\n        while True:\n            train(20); yield\n"
        "    finally:\n        print('closed')\n"
        "one = steps(); next(one); next(one); next(one); one.close()"
    ),
    "threads that train": Ending(
        "one = threading.Thread(target=train); one.start(); one.join()"
    ),
    "a thread that trains outlives the script": Ending("threading.Thread(target=train).start()"),
    "a daemon thread trains": Ending(
        "def forever():\n    while True:\n"
        "        model(torch.randn(4, 8)).sum().backward()\n"
        "threading.Thread(target=forever, daemon=True).start(); time.sleep(1)", reports=False,
    ),
    "two threads train": Ending(
        "def one(seed):\n    net = torch.nn.Linear(8, 2)\n"
        "    o = torch.optim.SGD(net.parameters(), 0.1)\n"
        "    for _ in range(60):\n        net(torch.ones(4, 8)).sum().backward(); o.step()\n"
        "both = [threading.Thread(target=one, args=(s,)) for s in (1, 2)]\n"
        "[t.start() for t in both]; [t.join() for t in both]; print('both')",
    ),
    "an executor that trains": Ending(
        "from concurrent.futures import ThreadPoolExecutor as E\n"
        "with E(2) as pool: pool.submit(train).result()"
    ),
    "asyncio": Ending("import asyncio\nasync def main(): train()\nasyncio.run(main())"),
    "asyncio with threads and a signal": Ending(
        "import asyncio\nasync def main():\n    loop = asyncio.get_running_loop()\n"
        "    loop.add_signal_handler(signal.SIGTERM, lambda: print('heard', flush=True))\n"
        "    await asyncio.to_thread(train)\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await asyncio.sleep(0.1)\nasyncio.run(main())"
    ),
    # Processes
    **{
        f"{how}: a process that trains": Ending(
            _main(f"nested('{how}')")
        )
        for how in ("fork", "spawn", "forkserver")
    },
    **{
        f"{how}: a pool": Ending(
            _main(
                f"pool = multiprocessing.get_context('{how}').Pool(1)\n"
                "    pool.map(work, [40, 40]); pool.close(); pool.join()"
            )
        )
        for how in ("fork", "spawn", "forkserver")
    },
    "a pool that is terminated": Ending(
        _main("pool = multiprocessing.get_context('fork').Pool(2)\n"
              "    pool.map(len, ['a', 'b']); train(); pool.terminate()")
    ),
    "an executor of processes": Ending(
        _main("from concurrent.futures import ProcessPoolExecutor as E\n"
              "    with E(1, multiprocessing.get_context('spawn')) as pool: "
              "pool.submit(work, 40).result()")
    ),
    "processes of processes": Ending(
        _main("one = multiprocessing.get_context('spawn').Process(target=nested, args=('fork',))\n"
              "    one.start(); one.join(); print(one.exitcode)")
    ),
    "a manager and a queue": Ending(
        _main(
            "with multiprocessing.Manager() as m:\n"
            "        d = m.dict(a=1); train(); print(d['a'])"
        )
    ),
    "a process that is killed": Ending(
        _main("one = multiprocessing.get_context('fork').Process(target=kill)\n"
              "    one.start(); one.join(); print(one.exitcode); train()")
    ),
    "a process that fails": Ending(
        _main("one = multiprocessing.get_context('fork').Process(target=fail)\n"
              "    one.start(); one.join(); print(one.exitcode); train()"),
        errors=False,
    ),
    "a daemon process that is left": Ending(
        _main("one = multiprocessing.get_context('fork').Process("
              "target=time.sleep, args=(60,), daemon=True)\n    one.start(); train()")
    ),
    "mp.spawn": Ending(
        "import torch.multiprocessing as mp\n"
        "def work(rank): train()\n"
        "if __name__ == '__main__': mp.spawn(work, nprocs=2)",
    ),
    "mp.spawn with an error": Ending(
        "import torch.multiprocessing as mp\n"
        "def work(rank):\n    train()\n    if rank: raise ValueError('rank 1')\n"
        "if __name__ == '__main__': mp.spawn(work, nprocs=2)",
        errors=False,
    ),
    "os.fork and the child exits": Ending(
        "def fork():\n    pid = os.fork()\n    if not pid: sys.exit(3)\n"
        "    print(os.waitpid(pid, 0)[1])\ntrain(40, 30, fork)"
    ),
    "os.fork while recorded": Ending(
        "def fork():\n    pid = os.fork()\n    if not pid: os._exit(3)\n"
        "    print(os.waitpid(pid, 0)[1])\ntrain(40, 9, fork)"
    ),
    "os.fork and both train": Ending(
        "pid = os.fork()\nif pid: os.waitpid(pid, 0)\ntrain()"
    ),
    "a daemon by two forks": Ending(
        "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\ntrain()", reports=False
    ),
    "os.execv before torch": Ending(
        "import os, sys\nif len(sys.argv) < 2:\n"
        "    os.execv(sys.executable, [sys.executable, __file__, 'x'])\n"
        + TRAINING + "train()", head="",
    ),
    "os.execv after the training": Ending(
        "train()\nif len(sys.argv) < 2: os.execv(sys.executable, [sys.executable, __file__, 'x'])",
    ),
    "a Python that is started": Ending(
        "import subprocess, sys\nsys.exit(subprocess.run([sys.executable, 'other.py']).returncode)",
        head="", prepare=_write("other.py", TRAINING + "train(); sys.exit(5)"),
    ),
    "python -c that is started": Ending(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', open('other.py').read()])",
        head="", prepare=_write("other.py", TRAINING + "train()"),
    ),
    "an isolated Python that is started": Ending(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-I', 'other.py'])",
        head="", prepare=_write("other.py", TRAINING + "train()"), reports=False,
    ),
    "a shell that is started": Ending(
        "import os, sys\nos.system(f'{sys.executable} other.py | cat')",
        head="", prepare=_write("other.py", TRAINING + "train()"),
    ),
    "100 short processes": Ending(
        "import subprocess, sys\n"
        "for _ in range(100): subprocess.run([sys.executable, '-c', 'pass'])",
        head="", reports=False,
    ),
    "100 short forks": Ending(
        "for _ in range(100):\n    pid = os.fork()\n    if not pid: os._exit(0)\n"
        "    os.waitpid(pid, 0)\ntrain()",
    ),
    "torchrun": Ending(
        "import torch.distributed as d\nd.init_process_group('gloo')\ntrain()\n"
        "d.destroy_process_group()",
        start=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"),
        errors=False,
    ),
    "torchrun with a rank that fails": Ending(
        "import torch.distributed as d\nd.init_process_group('gloo')\ntrain()\n"
        "sys.exit(d.get_rank())",
        start=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"),
        errors=False,
    ),
    # Starts
    "python -m": Ending(
        "train()", start=("-m", "package.train"), prepare=_renamed("package/train.py")
    ),
    "python -m of a package": Ending(
        "print(__package__, __spec__.name); train()", start=("-m", "package"),
        prepare=_renamed("package/__main__.py"),
    ),
    "runpy": Ending(
        "import runpy; runpy.run_path('other.py', run_name='__main__')", head="",
        prepare=_write("other.py", TRAINING + "print(__name__); train()"),
    ),
    "python -m cProfile": Ending(
        "train()", start=("-m", "cProfile", "-o", "profile.out", "train.py"), reports=False
    ),
    "python -m pdb": Ending(
        "train()", start=("-m", "pdb", "-c", "continue", "-c", "quit", "train.py"), given="q\n"
    ),
    "python -m unittest": Ending(
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): train()\n",
        start=("-m", "unittest", "-q", "train"), errors=False,
    ),
    "breakpoint": Ending("train(40, 30, lambda: breakpoint())", given="c\n"),
    "input": Ending("print(input(), sys.stdin.read()); train()", given="a\nb\n"),
    "a zip application": Ending("train()", start=("train.pyz",), prepare=_zipped),
    "a folder": Ending("print(__name__, sys.argv); train()", start=("app",), prepare=_as_folder),
    "a symbolic link": Ending("import beside; train()", prepare=_linked),
    "a name with spaces": Ending(
        "print(sys.argv); train()",
        start=("a folder/ä script",), arguments=("--", "-x", "ü", ""),
        prepare=_renamed("a folder/ä script"),
    ),
    "a byte order mark": Ending("train()", prepare=_renamed("train.py", "utf-8-sig")),
    "Latin-1": Ending(
        "print(len('é')); train()",
        prepare=_renamed("train.py", "latin-1", "# -*- coding: latin-1 -*-\n"),
    ),
    "python -u": Ending("train(said=True)", python=("-u",)),
    "python -O": Ending("assert False\ntrain(); print(__debug__)", python=("-O",)),
    "python -OO": Ending("train(); print(train.__doc__)", python=("-OO",)),
    "python -W error": Ending("train()", python=("-W", "error")),
    "warnings as errors by the script": Ending(
        "import warnings; warnings.simplefilter('error')\ntrain()"
    ),
    "python -X dev": Ending("train()", python=("-X", "dev"), errors=False),
    "python -X faulthandler": Ending("train()", python=("-X", "faulthandler")),
    "python -B": Ending("import beside; train()", python=("-B",), prepare=_write("beside.py", "")),
    "python -s -P": Ending("train()", python=("-s", "-P")),
    "python -bb": Ending("train()", python=("-bb",)),
    # Streams
    "standard output is closed": Ending("train(); os.write(2, b'end')", before=_close(1)),
    "standard error is closed": Ending("train()", before=_close(2)),
    "all streams are closed": Ending("train()", before=_close(0, 1, 2)),
    "nobody reads the output": Ending("train()", before=_broken(1), errors=False),
    "nobody reads the errors": Ending("train()", before=_broken(2)),
    "the output is full": Ending("train()", before=_to("/dev/full", 1), errors=False),
    "the errors are full": Ending("train()", before=_to("/dev/full", 2)),
    "head reads the output": Ending(
        "for _ in range(100): train(40)", shell="@ 2>/dev/null | head -n 1", errors=False,
        reports=False,
    ),
    "SIGPIPE ends it": Ending(
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\ntrain()\n"
        "while True: print('x', flush=True)",
        shell="@ | head -n 1", errors=False, reports=False,
    ),
    "sys.stdout is None": Ending("sys.stdout = None\ntrain()"),
    "sys.stderr is None": Ending("sys.stderr = None\ntrain()"),
    "output is redirected": Ending(
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as o: train()\n"
        "print(len(o.getvalue()))"
    ),
    "print is replaced": Ending(
        "import builtins\nbefore = print\n"
        "builtins.print = lambda *a, **k: before('x', *a, **k)\ntrain()"
    ),
    # Surroundings
    "a folder that cannot be written": Ending(
        "train()", start=("{work}/train.py",), folder="/proc", options=("-o", "{work}/backspot")
    ),
    "the working folder is deleted": Ending(
        "train()", start=("{work}/train.py",), before=_leave_for_nowhere,
        options=("-o", "{work}/backspot"), reports=False,
    ),
    "the script deletes its folder": Ending(
        "import shutil, pathlib\nshutil.rmtree(pathlib.Path(__file__).parent)\ntrain()",
        reports=False,
    ),
    "the script changes its folder": Ending("os.mkdir('x'); os.chdir('x'); train()"),
    "no HOME": Ending("train()", environment={"HOME": None}),
    "HOME is not there": Ending("train()", environment={"HOME": "/nonexistent"}),
    "no folder for temporary files": Ending("train()", environment={"TMPDIR": "/nonexistent"}),
    "an empty environment": Ending("os.environ.clear(); train()"),
    "Python's path is cleared": Ending("sys.path.clear(); train()"),
    "LC_ALL=C without UTF-8": Ending(
        "train(); print('done')",
        environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ),
    "output in ASCII": Ending("train()", environment={"PYTHONIOENCODING": "ascii"}),
    "output in UTF-16": Ending("train()", environment={"PYTHONIOENCODING": "utf-16"}, errors=False),
    "a full disk": Ending(
        "train()", before=_limited(resource.RLIMIT_FSIZE, 4096), reports=False
    ),
    "20 open files": Ending("train()", before=_limited(resource.RLIMIT_NOFILE, 20), reports=False),
    "16 GB of addresses": Ending("train()", before=_limited(resource.RLIMIT_AS, 16 << 30)),
    "60 s of CPU": Ending("train()", before=_limited(resource.RLIMIT_CPU, 60)),
    "a small stack": Ending("train()", before=_limited(resource.RLIMIT_STACK, 1 << 20)),
    "umask 777": Ending("os.umask(0o777); train()"),
    "files are closed": Ending(
        "train(40, 20, lambda: os.closerange(3, 256)); train()", reports=False
    ),
    "gc.disable": Ending("import gc; gc.disable(); train(); print(gc.isenabled())"),
    "gc.freeze": Ending(
        "import gc; gc.collect(); gc.freeze(); train(); print(gc.get_freeze_count() > 0)"
    ),
    "sys.settrace": Ending("sys.settrace(lambda *_: None); train()"),
    "sys.setprofile": Ending(
        "sys.setprofile(lambda *_: None); train(); sys.setprofile(None)", reports=False
    ),
    "a short switch interval": Ending("sys.setswitchinterval(1e-6); train()"),
    "an audit hook": Ending(
        "sys.addaudithook(lambda name, _: None)\ntrain()"
    ),
    "a profiler of its own": Ending(
        "from torch.profiler import profile\n"
        "with profile() as p: train()\nprint(len(p.events()) > 9)",
        reports=False,
    ),
    "a script that imports itself": Ending(
        "import train as other\nif __name__ == '__main__': other.train()"
    ),
    "sys.modules without backspot": Ending(
        "for name in [*sys.modules]:\n"
        "    if name.startswith('backspot'): del sys.modules[name]\ntrain()",
        reports=False,
    ),
}  # fmt: skip


@dataclass
class Ended:
    """How a script has ended, and what is left."""

    code: int
    output: str
    errors: str
    seconds: float
    megabytes: float
    files: set[str]
    processes: list[str]
    reports: int


def run_ending(ending: Ending, *, observed: bool) -> Ended:
    """Run one script in a fresh folder.

    Args:
        ending: the script.
        observed: whether under ``backspot run``.
    """
    with tempfile.TemporaryDirectory(prefix="endings-", ignore_cleanup_errors=True) as name:
        return _run(ending, Path(name), observed)


def _run(ending: Ending, folder: Path, observed: bool) -> Ended:
    work = folder / "work"
    for one in ("work", "tmp", "home"):
        (folder / one).mkdir()
    (work / "train.py").write_text(ending.head + ending.script + "\n", encoding="utf-8")
    if ending.prepare is not None:
        ending.prepare(work)

    def placed(words: Sequence[str]) -> list[str]:
        return [word.replace("{work}", str(work)) for word in words]

    under = ["-m", "backspot", "run", *OPTIONS, *placed(ending.options)] if observed else []
    command = [sys.executable, *ending.python, *under, *placed(ending.start), *ending.arguments]
    if ending.shell:
        quoted = " ".join(f"'{word}'" for word in command)
        command = ["sh", "-c", ending.shell.replace("@", quoted)]
    token = uuid.uuid4().hex
    environment: dict[str, str | None] = {
        **{name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")},
        "PYTHONPATH": str(_SRC),
        "TMPDIR": str(folder / "tmp"),
        "HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
        "ENDINGS_TOKEN": token,
        **ending.environment,
    }
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ending.folder or work,
        env={name: value for name, value in environment.items() if value is not None},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=ending.before,
        start_new_session=True,
    )
    assert process.stdin
    with suppress(BrokenPipeError):
        process.stdin.write(ending.given.encode())
        process.stdin.close()
    lines: list[bytes] = []
    errors: list[bytes] = []

    def read() -> None:
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            if ending.signals and line == f"step {ending.signals[1]}\n".encode():
                process.send_signal(ending.signals[0])

    readers = [
        threading.Thread(target=read),
        threading.Thread(target=lambda: errors.extend(process.stderr or ())),
    ]
    for reader in readers:
        reader.start()
    killer = threading.Timer(_LIMIT_S, process.kill)
    killer.start()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - begin
    killer.cancel()
    left = _processes(token)
    until = time.monotonic() + 40
    while left and time.monotonic() < until:  # some outlive the first one
        time.sleep(0.2)
        left = _processes(token)
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for reader in readers:
        reader.join()
    output = b"".join(lines)
    if ending.signals:  # what comes after the signal is chance
        output = b"" if b"step 0\n" in output else b"no step"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.exists()}
    return Ended(
        code=process.returncode,
        output=output.decode(errors="replace").replace(str(folder), "FOLDER"),
        errors=b"".join(errors).decode(errors="replace").replace(str(folder), "FOLDER"),
        seconds=seconds,
        megabytes=used.ru_maxrss / 1e3,
        files={one for one in files if one != "work" and not one.startswith("work/backspot")},
        processes=[*left.values()],
        reports=len([one for one in files if re.fullmatch(r"work/backspot/report.*\.html", one)]),
    )


def _processes(token: str) -> dict[int, str]:
    """The processes that a run has started and that still run: their numbers and commands."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if token.encode() in (place / "environ").read_bytes():
                found[int(place.name)] = (place / "cmdline").read_text().replace("\0", " ")
    return found


def difference(ending: Ending, plain: Ended, observed: Ended) -> str:
    """What is different under ``backspot run``; empty if nothing is."""
    told = []
    if plain.code != observed.code:
        told.append(f"exit code {observed.code}, not {plain.code}")
    if _fitting(plain.output) != _fitting(observed.output):
        told.append(f"output {observed.output[-300:]!r}, not {plain.output[-300:]!r}")
    missing = _missing(_fitting(plain.errors), _fitting(observed.errors)) if ending.errors else ""
    if missing:
        told.append(f"errors without {missing!r}")
    if failed := own_error(observed.errors):
        told.append(f"an error of Backspot: {failed}")
    expected, files = map(_named, plain.files), sorted(map(_named, observed.files))
    if lost := [one for one in expected if one not in files or files.remove(one)]:
        told.append(f"files are missing: {', '.join(lost[:5])}")
    # The next run removes what is left where Python could not end.
    more = [one for one in files if not (_cut_short(ending, plain) and _REGISTER in one)]
    if more:
        told.append(f"it leaves {', '.join(more[:5])}")
    if len(observed.processes) > len(plain.processes):
        told.append(f"it leaves processes: {observed.processes}")
    if ending.reports and not observed.reports:
        said = [one for one in observed.errors.splitlines() if one.startswith("backspot: ")]
        told.append(f"no report: {' '.join(said)[:300]!r}")
    if observed.megabytes > plain.megabytes + _MORE_MB:
        told.append(f"{observed.megabytes:.0f} MB, not {plain.megabytes:.0f}")
    return "; ".join(told)


_REGISTER = "backspot-processes-"
"""How the file begins in which the processes of a run tell each other."""


def _cut_short(ending: Ending, plain: Ended) -> bool:
    """Whether Python itself did not end: a signal ended the process, or ``os._exit``."""
    return plain.code < 0 or "os._exit" in ending.script or "FATAL" in plain.errors


def _named(file: str) -> str:
    """A path without what is random in it."""
    return re.sub(r"[-_][a-z0-9_]{8}(?=[/.]|$)|[0-9a-f-]{36}_", "…", file)


def _fitting(text: str) -> str:
    """Leave out what no two runs have alike."""
    text = re.sub(r"0x[0-9a-f]+", "0x…", text)
    text = re.sub(r"\b(pid|process)[= ]\d+", r"\1 …", text, flags=re.IGNORECASE)
    text = re.sub(r"(?m)^([WEI])\d{4} [\d:.]+ \d+", r"\1…", text)
    text = re.sub(r"(?m)^USDT:[^ ]* [^ ]* [^ ]*", "USDT", text)  # Kineto's, with time and process
    # The frames of the program are some of those that a recursion may have.
    text = re.sub(r"line repeated \d+ more times", "line repeated … more times", text)
    return re.sub(r"\b\d+(\.\d+)? ?(ms|s|seconds)\b", "…", text)


def _missing(expected: str, text: str) -> str:
    """The first line of a text that another one lacks, in its order."""
    lines = iter(text.splitlines())
    return next((one for one in expected.splitlines() if one.strip() and one not in lines), "")


def _handle(job: Job, stage: Stage) -> Record:
    ending = ENDINGS[job["name"]]
    plain = run_ending(ending, observed=False)
    stage("observed", {"code": plain.code})
    observed = run_ending(ending, observed=True)
    return {
        "wrong": difference(ending, plain, observed),
        "code": observed.code,
        "reports": observed.reports,
        "seconds": [round(plain.seconds, 1), round(observed.seconds, 1)],
        "MB": [round(plain.megabytes), round(observed.megabytes)],
    }


def answer(run: Run) -> Figures:
    known = dict.fromkeys(ENDINGS, "")
    phases = [Phase(run.jobs, 3 * _LIMIT_S)]
    cases = each(run, lambda: known, _handle, small=("returns",), phases=phases, fresh=False)
    wrong: list[Any] = [name for name, case in cases.items() if case.get("wrong")]
    ended = [case for case in cases.values() if "seconds" in case]
    summary = {
        "cases": len(ended),
        "different": len(wrong),
        "seconds more, median": _median(case["seconds"][1] - case["seconds"][0] for case in ended),
        "MB more, median": _median(case["MB"][1] - case["MB"][0] for case in ended),
    }
    return {"cases": cases, "summary": summary, "wrong": wrong}


def _median(values: Any) -> float:
    ordered = sorted(values)
    return round(ordered[len(ordered) // 2], 1) if ordered else float("nan")
