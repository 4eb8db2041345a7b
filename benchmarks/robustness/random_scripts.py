"""Does `backspot run` change what a random training script prints, or how it ends?

Each script is put together of random pieces: a model, a loader, a launcher, an optimizer, a loss, a
compile mode, contexts and an end. It runs plainly and under `backspot run` with random options, and
prints the loss of each step, the parameters and the state of the generators, bit for bit. A script
is made again by its number alone::

    python -m benchmarks random_scripts --count 500 --seed 1 --jobs 2
    python -m benchmarks random_scripts --seed 1 --only 123 --keep train.py
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import backspot
from benchmarks.harness import TEST_DATA, Figures, Run
from benchmarks.robustness.found import (
    Outcome,
    found_in,
    own_error,
    summary_of_lines as summary_of_lines,
)
from benchmarks.workers import Job, Record, Stage

_SRC = Path(backspot.__file__).parents[1]
_LIMIT_S = 150

MODELS = {
    "mlp": "nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))",
    "norm": "nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), "
    "nn.Linear(16, 4))",
    "convolution": "nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.Flatten(), "
    "nn.Linear(24, 4))",
    "shared": "Shared()",
    "own call": "OwnCall()",
    "lstm": "Recurrent()",
    "attention": "nn.Sequential(nn.Unflatten(1, (2, 4)), "
    "nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(8, 4))",
    "checkpointed": "Checkpointed()",
    "custom function": "nn.Sequential(nn.Linear(8, 4), Doubled())",
    "weight norm": "nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), "
    "nn.Linear(8, 4))",
    "frozen": "nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4))",
    "scripted": "nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 4))",
    "sparse": "Sparse()",
    "dictionary": "Dictionary()",
    "hooked": "Hooked()",
    "deep": "nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)), "
    "nn.Linear(8, 4))",
    "double": "nn.Sequential(nn.Linear(8, 4))",
    "parallel": "nn.DataParallel(nn.Linear(8, 4))",
}
OPTIMIZERS = {
    "sgd": "optim.SGD(model.parameters(), lr=0.01)",
    "momentum": "optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)",
    "adam": "optim.Adam(model.parameters(), lr=1e-3)",
    "adam foreach": "optim.AdamW(model.parameters(), lr=1e-3, foreach=True)",
    "adam fused": "optim.AdamW(model.parameters(), lr=1e-3, fused=True)",
    "adagrad": "optim.Adagrad(model.parameters(), lr=1e-2)",
    "own": "Own(model.parameters(), dict(lr=0.01))",
    "two": "Two(model)",
    "none": "Manual(model)",
    "lbfgs": "optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)",
    "hooked": "Each(model)",
}
LOADERS = {
    "tensors": "[(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(steps)]",
    "generator": "((torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(steps))",
    "loader": "data.DataLoader(Set(6 * steps), batch_size=6, shuffle=True)",
    "workers": "data.DataLoader(Set(6 * steps), batch_size=6, num_workers=2)",
    "persistent": "data.DataLoader(Set(6 * steps), batch_size=6, num_workers=1, "
    "persistent_workers=True, prefetch_factor=4)",
    "iterable": "data.DataLoader(Stream(6 * steps), batch_size=6)",
    "sampler": "data.DataLoader(Set(6 * steps), batch_size=6, sampler=data.RandomSampler("
    "Set(6 * steps), replacement=True, num_samples=6 * steps))",
}
LOSSES = {
    "cross entropy": "f.cross_entropy(out, y).backward()",
    "mean square": "out.square().mean().backward()",
    "a module": "nn.CrossEntropyLoss(label_smoothing=0.1)(out, y).backward()",
    "two backwards": "out.sum().backward(retain_graph=True); f.cross_entropy(out, y).backward()",
    "penalty": "g, = torch.autograd.grad(out.square().sum(), [last(model)], create_graph=True); "
    "(out.square().mean() + g.square().sum()).backward()",
    "grad": "ps = [p for p in model.parameters() if p.requires_grad]; "
    "gs = torch.autograd.grad(out.square().mean(), ps, allow_unused=True); "
    "[setattr(p, 'grad', g) for p, g in zip(ps, gs)]",
    "accumulated": "(f.cross_entropy(out, y) / 2).backward(); "
    "(f.cross_entropy(read(model(x)), y) / 2).backward()",
    "clipped": "f.cross_entropy(out, y).backward(); "
    "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "with tensors": "out.backward(torch.ones_like(out))",
    "own": "Loss.apply(out).backward()",
}
_DENSE = ("sgd", "none", "adagrad", "own")
"""The optimizers that take sparse gradients, or none at all."""
COMPILED = {
    "": "",
    "eager": "model = torch.compile(model, backend='eager')",
    "aot_eager": "model = torch.compile(model, backend='aot_eager')",
    "in place": "model.compile(backend='eager')",
}
CONTEXTS = {
    "": "nullcontext()",
    "autocast": "torch.autocast('cpu', torch.bfloat16)",
    "anomaly": "torch.autograd.detect_anomaly(check_nan=False)",
    "saved on the CPU": "torch.autograd.graph.save_on_cpu()",
    "saved by hooks": "torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)",
    "one thread": "torch.autograd.set_multithreading_enabled(False)",
    "a range": "torch.profiler.record_function('mine')",
    "a dispatch mode": "Mode()",
}
SETTINGS = {
    "": "",
    "double": "torch.set_default_dtype(torch.float64)",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "no garbage": "import gc; gc.disable()",
    "garbage": "import gc; gc.set_threshold(5)",
    "a default device": "torch.set_default_device('cpu')",
    "warnings are errors": "import warnings; warnings.simplefilter('error', UserWarning)",
    "instrumented": "import backspot",
}
BETWEEN = {
    "": "pass",
    "a validation": "if step % 7 == 6: evaluate(model)",
    "a checkpoint": "if step % 9 == 8: torch.save(model.state_dict(), io.BytesIO())",
    "a profiler": "if step == 12: profiled(model, x)",
    "a new optimizer": "if step == 15: optimizer = OPTIMIZER",
    "a thread": "if step == 8: t = threading.Thread(target=evaluate, args=(model,)); t.start(); "
    "t.join()",
    "a copy": "if step == 10: import copy; copy.deepcopy(model)(x)",
    "a caught error": "if step % 5 == 4: caught(model)",
    "a process": "if step == 11: subprocess.run([sys.executable, '-c', 'print(1)'])",
    "a fork": "if step == 11: forked()",
    "a pause": "time.sleep(0.002)",
    "a scheduler": "for g in groups(optimizer): g['lr'] *= 0.99",
    "garbage": "import gc; gc.collect()",
}
LAUNCHERS = {
    "plain": "main()",
    "guarded": "if __name__ == '__main__': main()",
    "a thread": "t = threading.Thread(target=main); t.start(); t.join()",
    "a thread that outlives": "threading.Thread(target=main).start()",
    "an executor": "from concurrent.futures import ThreadPoolExecutor as E\n"
    "with E(1) as pool: pool.submit(main).result()",
    "asyncio": "import asyncio\nasync def run(): main()\nasyncio.run(run())",
    "fork": "start('fork')",
    "spawn": "if __name__ == '__main__': start('spawn')",
    "mp.spawn": "if __name__ == '__main__': torch.multiprocessing.spawn(of_rank, (), 1)",
    "twice": "main(); main()",
    "runpy": "import runpy\nif __name__ == '__main__': "
    "runpy.run_path(__file__, run_name='again')['main']()",
    "subprocess": "if sys.argv[1:]: main()\n"
    "else: sys.exit(subprocess.run([sys.executable, __file__, 'x']).returncode)",
    "profile": "import cProfile\ncProfile.run('main()', os.devnull)",
    "exec": "exec(compile('main()', 'text', 'exec'))",
}
ENDS = {
    "": "",
    "exit": "sys.exit(7)",
    "error": "raise ValueError('the end')",
    "interrupt": "raise KeyboardInterrupt",
    "at once": "sys.stdout.flush(); os._exit(5)",
    "in the backward": "h = last(model).register_hook(fail); read(model(x)).sum().backward()",
    "in the forward": "model(torch.randn(2, 3, 5))",
    "memory": "raise MemoryError('out of memory')",
}
OPTIONS = {
    "": (),
    "memory": ("--memory",),
    "shapes": ("--shapes",),
    "stacks": ("--stacks",),
    "depth": ("--depth", "1"),
    "often": ("--every", "10"),
    "no log": ("--no-log",),
    "trials": ("--trials", "operators"),
    "outside of compiled code": ("--no-compiled",),
}

_SCRIPT = """\
import io, os, subprocess, sys, threading, time, zlib
from contextlib import nullcontext
import torch
import torch.nn.functional as f
from torch import nn, optim
from torch.utils import checkpoint, data
from torch.utils._python_dispatch import TorchDispatchMode

torch.manual_seed(SEED)
torch.set_num_threads(1)
SETTING
steps = STEPS

class Shared(nn.Module):
    def __init__(self):
        super().__init__(); self.a = nn.Linear(8, 8); self.b = nn.Linear(8, 4)
    def forward(self, x): return self.b(self.a(torch.relu(self.a(x))))
class OwnCall(nn.Linear):
    def __init__(self): super().__init__(8, 4)
    def __call__(self, x): return self.forward(x)
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__(); self.a = nn.LSTM(4, 8, batch_first=True); self.b = nn.Linear(8, 4)
    def forward(self, x): return self.b(self.a(x.reshape(len(x), 2, 4))[0][:, -1])
class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__(); self.a = nn.Linear(8, 8); self.b = nn.Linear(8, 4)
    def forward(self, x):
        return self.b(checkpoint.checkpoint(self.a, x, use_reentrant=False))
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, g): return g * 2
class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): ctx.save_for_backward(x); return x.square().mean()
    @staticmethod
    def backward(ctx, g): x, = ctx.saved_tensors; return g * 2 * x / x.numel()
class Doubled(nn.Module):
    def forward(self, x): return Twice.apply(x)
class Sparse(nn.Module):
    def __init__(self):
        super().__init__(); self.a = nn.EmbeddingBag(32, 8, sparse=True); self.b = nn.Linear(8, 4)
    def forward(self, x): return self.b(self.a((x.abs() * 7).long() % 32))
class Dictionary(nn.Module):
    def __init__(self): super().__init__(); self.a = nn.Linear(8, 4)
    def forward(self, x): return {"out": self.a(x), "more": (x, None)}
class Hooked(nn.Module):
    def __init__(self):
        super().__init__(); self.a = nn.Linear(8, 8); self.b = nn.Linear(8, 4)
        self.a.register_full_backward_hook(lambda m, i, o: None)
        self.b.register_forward_pre_hook(lambda m, i: None)
    def forward(self, x): return self.b(self.a(x).sin())

class Own(optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None: p.add_(p.grad.to_dense(), alpha=-group["lr"])
class Two:
    def __init__(self, model):
        ps = [*model.parameters()]
        self.all = [optim.SGD(ps[:1], lr=0.01), optim.Adam(ps[1:] or ps, lr=1e-3)]
    def zero_grad(self): [one.zero_grad() for one in self.all]
    def step(self): [one.step() for one in self.all]
class Manual:
    def __init__(self, model): self.model = model
    def zero_grad(self): self.model.zero_grad()
    def step(self):
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is not None: p -= 0.01 * p.grad.to_dense()
class Each:
    def __init__(self, model):
        self.all = []
        for p in model.parameters():
            if p.requires_grad:
                one = optim.SGD([p], lr=0.01); self.all.append(one)
                p.register_post_accumulate_grad_hook(
                    lambda p, one=one: (one.step(), one.zero_grad(), None)[2])
    def zero_grad(self): pass
    def step(self): pass
def groups(optimizer):
    all = getattr(optimizer, "all", [optimizer])
    return [g for one in all for g in getattr(one, "param_groups", [])]

class Set(data.Dataset):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randn(8, generator=g, device="cpu"), i % 4
class Stream(data.IterableDataset):
    def __init__(self, n): self.n = n
    def __iter__(self): return (Set(self.n)[i] for i in range(self.n))
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

def read(out): return out["out"] if isinstance(out, dict) else out
def last(model): return [p for p in model.parameters() if p.requires_grad][-1]
def fail(g): raise RuntimeError("in the backward")
@torch.no_grad()
def evaluate(model):
    model.eval()
    for _ in range(2): model(torch.ones(6, 8))
    model.train()
def profiled(model, x):
    with torch.profiler.profile() as p: read(model(x)).sum().backward()
    print("profiled", len(p.key_averages()) > 3)
def caught(model):
    try: model(torch.randn(2, 3, 5))
    except Exception as error: print(type(error).__name__)
def forked():
    pid = os.fork()
    if not pid: os._exit(0)
    print(os.waitpid(pid, 0)[1])
def start(how):
    import multiprocessing
    one = multiprocessing.get_context(how).Process(target=main)
    one.start(); one.join(); print("ended", one.exitcode)
def of_rank(rank): main()

def show(model):
    sums = [zlib.crc32(p.detach().double().numpy().tobytes()) for p in model.parameters()]
    print(*sums, zlib.crc32(torch.get_rng_state().numpy().tobytes()), flush=True)

def main():
    model = MODEL
    optimizer = OPTIMIZER
    COMPILED
    for step, (x, y) in enumerate(LOADER):
        x = x.to(torch.get_default_dtype())
        optimizer.zero_grad()
        def closure():
            with CONTEXT:
                out = read(model(x))
                out = out.to(torch.get_default_dtype())
                LOSS
            return out.detach().square().mean()
        if isinstance(optimizer, optim.LBFGS):
            value = optimizer.step(lambda: (optimizer.zero_grad(), closure())[1])
        else:
            value = closure()
            optimizer.step()
        print(step, float(value).hex())
        BETWEEN
    show(model)
    END

LAUNCHER
"""


@dataclass(frozen=True)
class Script:
    """A random script.

    Attributes:
        text: what Python runs.
        options: of ``backspot run``.
        pieces: the names of its pieces.
    """

    text: str
    options: tuple[str, ...]
    pieces: tuple[str, ...]


def script(seed: str, number: int) -> Script:
    """Make one script of random pieces."""
    chance = random.Random(f"{seed} {number}")

    def often(pieces: Sequence[str], most: float) -> str:
        """The first piece, or with a probability another one."""
        return chance.choice(pieces[1:]) if chance.random() < most else pieces[0]

    model = chance.choice([*MODELS])
    optimizers = [name for name in OPTIMIZERS if model != "sparse" or name in _DENSE]
    losses = [name for name in LOSSES if model != "sparse" or name not in ("clipped", "penalty")]
    picked = {
        "MODEL": model,
        "OPTIMIZER": chance.choice(optimizers),
        "LOADER": chance.choice([*LOADERS]),
        "LOSS": chance.choice(losses),
        "COMPILED": often([*COMPILED], 0.2),
        "CONTEXT": often([*CONTEXTS], 0.4),
        "SETTING": often([*SETTINGS], 0.4),
        "BETWEEN": often([*BETWEEN], 0.6),
        "LAUNCHER": chance.choice([*LAUNCHERS]),
        "END": often([*ENDS], 0.5),
    }
    tables = {
        "LAUNCHER": LAUNCHERS, "LOADER": LOADERS, "MODEL": MODELS, "COMPILED": COMPILED,
        "CONTEXT": CONTEXTS, "SETTING": SETTINGS, "BETWEEN": BETWEEN, "LOSS": LOSSES,
        "END": ENDS, "OPTIMIZER": OPTIMIZERS,
    }  # fmt: skip
    text = _SCRIPT.replace("STEPS", str(chance.choice([3, 20, 20, 40, 120])))
    text = text.replace("SEED", str(number))
    for place, table in tables.items():
        text = re.sub(rf"\b{place}\b", lambda _, at=place, of=table: of[picked[at]] or "pass", text)
    given = chance.choice([*OPTIONS])
    options = ("--warmup", str(chance.choice([1, 2, 5])), "--steps", str(chance.choice([1, 3, 5])))
    trials = () if given == "trials" else ("--trials", "none")
    pieces = [f"{place.lower()} {name}" for place, name in picked.items() if name]
    return Script(text, (*options, *trials, *OPTIONS[given]), (*pieces, given))


# One script --------------------------------------------------------------------------------------


@dataclass
class _Done:
    code: int
    output: str
    errors: str
    left: list[str]
    reports: int


def _python() -> list[str]:
    sys.path.insert(0, str(TEST_DATA.parent))
    from support import preloaded

    return preloaded.python()


def _run(folder: Path, text: str, under: Sequence[str]) -> _Done:
    shutil.rmtree(folder, ignore_errors=True)
    for one in (folder, folder / "tmp"):
        one.mkdir()
    (folder / "train.py").write_text(text)
    environment = {
        **os.environ,
        # What the folders of the environment hold is for the processes of a script, too.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_SRC), os.environ.get("PYTHONPATH")))),
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            [*_python(), *under, "train.py"],
            cwd=folder, env=environment, capture_output=True, text=True, errors="replace",
            timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        code, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        code, output, errors = -99, "", "it does not end"
    return _Done(
        code,
        output,
        errors,
        [path.name for path in (folder / "tmp").iterdir()],
        len([*folder.glob("backspot/report*.json")]),
    )


def one_script(seed: str, number: int) -> Outcome:
    """Make a script, run it plainly and observed, and compare."""
    made = script(seed, number)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as place:
        folder = Path(place) / "r"
        plain = _run(folder, made.text, ())
        observed = _run(folder, made.text, ("-m", "backspot", "run", *made.options))
    wrong = _difference(plain, observed, ends_at_once="end at once" in made.pieces)
    if wrong:
        wrong = f"{wrong} [{', '.join(made.pieces)}]"
    end = f"exit {plain.code}, {'a report' if observed.reports else 'no report'}"
    return number, end, wrong, time.monotonic() - begin


def _difference(plain: _Done, observed: _Done, *, ends_at_once: bool) -> str:
    """What is different under ``backspot run``; empty if nothing is.

    Args:
        ends_at_once: whether the training ends by ``os._exit``, which leaves files of processes to
            the next run, and no report where that is still being made.
    """
    if plain.code != observed.code:
        return f"exit code {observed.code}, not {plain.code}: {observed.errors[-300:]!r}"
    if plain.output != observed.output:
        pairs = zip(plain.output.splitlines(), observed.output.splitlines(), strict=False)
        at = next(((one, other) for one, other in pairs if one != other), "its length")
        return f"output differs: {at}"
    ours = iter(observed.errors.splitlines())
    for line in plain.errors.splitlines():
        if _steady(line) and line not in ours:
            return f"errors without {line!r}"
    if ours_failed := own_error(observed.errors):
        return f"an error of Backspot: {ours_failed}"
    if "Traceback" in observed.errors and "Traceback" not in plain.errors:
        return f"an error: {observed.errors[-400:]!r}"
    left = [name for name in observed.left if name not in plain.left]
    if ends_at_once:
        left = [name for name in left if not name.startswith("backspot-processes-")]
    if len(left) > len(plain.left) or any("backspot" in name for name in left):
        return f"it leaves {left}"
    if not ends_at_once and "it was killed" in observed.errors:
        return "a process is said to be killed"
    return ""


def _steady(line: str) -> bool:
    """Whether every run writes this line: it has no number of a process, address or time.

    Nor is it of Kineto, which says some things in a process's first profile alone.
    """
    return bool(line.strip()) and not re.search(
        r"UserWarning|^(USDT|ERROR):|0x[0-9a-f]+|\d{5,}|pid=\d|\^|~~|/preloaded.py|_go_on_as_python|exec\(code",
        line,
    )


# Many --------------------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, help="scripts (default: 500; with --small 1)")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--only", type=int, help="the number of one script")
    parser.add_argument("--keep", type=Path, help="where to write that script")


def answer(run: Run) -> Figures | int:
    def handle(job: Job, _: Stage) -> Record:
        return {"outcome": one_script(run.seed, job["number"])}

    if run.only is not None:
        made = script(run.seed, run.only)
        if run.keep:
            run.keep.write_text(made.text)
        print(*made.options)
        print(*one_script(run.seed, run.only), sep="\n")
        return 0
    count = run.count or (1 if run.small else 500)
    return found_in(run, count, handle, 3 * _LIMIT_S).figures(run.seed)
