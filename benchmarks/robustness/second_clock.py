"""Runs a script with a second clock beside it, which shares no code with Backspot.

    python second_clock.py OUT MODE SCRIPT [ARGUMENT ...]

``modules``: how long each module's backward takes. A node belongs to the innermost module in whose
call it was made, by autograd's sequence numbers. A hook before each node notes the time: of the
thread on a CPU, which other processes do not disturb, of CUDA events on a GPU.

``steps``, or ``steps:REMEDY:REMEDY``: how long each step takes, as it is or with remedies applied;
``null`` where the script has nothing for these to change, ``[]`` where it makes too few steps.

``pace``, or ``pace:REMEDY:REMEDY``: how long a step takes in a row of them, without a wait for the
GPU between two steps, which would keep the host from running ahead.

OUT gets the result as JSON once enough was measured; the script ends then. A script that ends
before that gives what there is, and one that fails gives no OUT. A process that the script starts
has a clock of its own, and the first one that has measured enough ends them all.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import runpy
import signal
import sys
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import register_optimizer_step_post_hook

WARMUP, MEASURED = 4, 24
"""How many backward passes, or steps, are left out and measured."""

OUTSIDE = "(outside model)"
Hook = Callable[..., None]


CLOCK = "SECOND_CLOCK"
"""In the environment of processes that are started: where the result goes, what is measured."""
_IN_CHILDREN = f"""import os, sys
sys.path.append({str(Path(__file__).parent)!r})
import second_clock
second_clock.start(*os.environ[second_clock.CLOCK].split(os.pathsep, 1))
"""


def finish(path: str, found: Any) -> None:
    """Write what was measured, and end the script with all that it started."""
    written = Path(f"{path}.{os.getpid()}")
    written.write_text(json.dumps(found), encoding="utf-8")
    written.replace(path)
    sys.stdout.flush()
    if os.getpid() != os.getpgrp():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


# The backward of each module ---------------------------------------------------------------------


def without_longest(passes: list[float]) -> float:
    """Return the seconds of all passes, the longest one taken as the mean of the others.

    A pause of the machine, of 200 ms, falls into one module of one pass, and makes it the slowest.
    """
    others = len(passes) - 1
    return (sum(passes) - max(passes)) * (1 + 1 / others) if others else passes[0]


class ModuleClock:
    """Measures the backward of each module."""

    def __init__(self, out: str) -> None:
        self.out = out
        # Autograd numbers the nodes of each thread on their own.
        self.made: dict[int, tuple[list[int], list[nn.Module | None]]] = defaultdict(
            lambda: ([0], [None])
        )
        self.marks: list[tuple[nn.Module | None, Any]] | None = None
        self.stack: list[nn.Module | None] = [None]
        self.names: dict[int, tuple[str, str, str]] = {}
        self.spent: dict[tuple[str, str, str], list[float]] = defaultdict(list)  # of each pass
        self.passes = 0
        self.cuda = torch.cuda.is_available()

    def start(self) -> None:
        """Follow calls of modules and backward passes."""
        nn.Module.__call__ = self._followed(nn.Module.__call__)  # type: ignore[method-assign]

        def made(cls: type, **options: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**options)
            if inspect.isfunction(own := vars(cls).get("__call__")):
                cls.__call__ = self._followed(own)  # type: ignore[operator]

        nn.Module.__init_subclass__ = classmethod(made)  # type: ignore[assignment]
        for name in ("backward", "grad"):
            setattr(torch.autograd, name, self._around(getattr(torch.autograd, name)))

    def _followed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def followed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(module, *args, **kwargs)
            self._enter(module)
            try:
                return call(module, *args, **kwargs)
            finally:
                self._leave()

        return followed

    def _enter(self, module: nn.Module) -> None:
        self.stack.append(module)
        self._note()

    def _leave(self) -> None:
        self.stack.pop()
        self._note()

    def _note(self) -> None:
        numbers, owners = self.made[threading.get_ident()]
        numbers.append(torch._C._autograd._get_sequence_nr())
        # What a node runs again outside modules belongs to that node's module.
        running = self.marks[-1][0] if self.marks else None
        owners.append(running if self.stack[-1] is None else self.stack[-1])

    def _around(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def measured(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            def call() -> Any:
                return backward(tensors, *args, **kwargs)

            outer = self.marks  # of a checkpoint's own pass, in the middle of another
            if outer is None:
                self.passes += 1
            marks = self.marks = [] if outer is None else outer
            try:
                result = call() if self.passes <= WARMUP else self._marked(tensors, marks, call)
            finally:
                self.marks = outer
            if outer is None and self.passes > WARMUP:
                self._add(marks)
                if self.passes >= WARMUP + MEASURED:
                    self.end()
            return result

        return measured

    def _marked(self, tensors: Any, marks: list[Any], call: Callable[[], Any]) -> Any:
        """Make a pass whose nodes note when they begin; who ran before it runs on after it."""
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        running = marks[-1][0] if marks else None
        hooks = self._hook(roots, marks)
        result = call()
        marks.append((running, self._now()))
        for hook in hooks:
            hook.remove()
        return result

    def _hook(self, roots: list[torch.Tensor], marks: list[Any]) -> list[Any]:
        def hook(owner: nn.Module | None) -> Hook:
            return lambda *_: marks.append((owner, self._now()))

        numbers, owners = self.made[threading.get_ident()]
        seen: set[Any] = set()
        hooks = []
        pending = [root.grad_fn for root in roots]
        while pending:
            node = pending.pop()
            # What adds to a parameter's gradient runs behind the node that computed it.
            if node is None or node in seen or node.name().endswith("AccumulateGrad"):
                continue
            seen.add(node)
            index = bisect_right(numbers, node._sequence_nr()) - 1
            hooks.append(node.register_prehook(hook(owners[index])))
            pending.extend(following for following, _ in node.next_functions)
        return hooks

    def _now(self) -> Any:
        if not self.cuda:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add(self, marks: list[Any]) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        spent: dict[tuple[str, str, str], float] = defaultdict(float)
        for (owner, begin), (_, end) in pairwise(marks):
            took = begin.elapsed_time(end) / 1e3 if self.cuda else end - begin
            spent[self._name(owner)] += took
        for name, seconds in spent.items():
            self.spent[name].append(seconds)

    def _name(self, module: nn.Module | None) -> tuple[str, str, str]:
        """Path under the outermost module that has it, its class, and that module's class."""
        if module is None:
            return OUTSIDE, "", ""
        if id(module) not in self.names:
            inside: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
            for parent in gc.get_objects():
                # isinstance would look through weak proxies, and raise for dead ones.
                if issubclass(type(parent), nn.Module) and "_modules" in vars(parent):
                    for name, child in parent._modules.items():
                        if child is not None:
                            inside[id(child)].append((parent, name))
            parts: list[str] = []
            root = module
            while id(root) in inside and len(parts) < 100:
                # A slice of a Sequential is a module too, which no other one has.
                root, name = max(inside[id(root)], key=lambda one: id(one[0]) in inside)
                parts.append(name)
            self.names[id(module)] = (
                ".".join(reversed(parts)),
                type(module).__name__,
                type(root).__name__,
            )
        return self.names[id(module)]

    def end(self) -> None:
        """Write the times, most first."""
        spent = {name: without_longest(passes) for name, passes in self.spent.items()}
        ordered = sorted(spent.items(), key=lambda item: -item[1])
        finish(self.out, [[*name, seconds] for name, seconds in ordered])


# Steps, with and without a remedy ----------------------------------------------------------------


class ClockOfSteps:
    """Follows the steps of the script's first optimizer.

    Args:
        out: where the times are written.
    """

    def __init__(self, out: str) -> None:
        self.out = out
        self.first: Any = None

    def start(self) -> None:
        """Follow the optimizers."""
        register_optimizer_step_post_hook(self._step)

    def _step(self, optimizer: Any, *_: object) -> None:
        if self.first is None:
            self.first = optimizer
        if optimizer is self.first:
            self.stepped()

    def stepped(self) -> None:
        """Note a step of the first optimizer."""
        raise NotImplementedError

    @staticmethod
    def now() -> float:
        """Return the time once the device has ended its work, in seconds."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


class StepClock(ClockOfSteps):
    """Measures the time between two steps."""

    def __init__(self, out: str) -> None:
        super().__init__(out)
        self.stamps: list[tuple[float, float]] = []

    def stepped(self) -> None:
        """Note the time, and end after enough steps."""
        self.stamps.append((self.now(), time.process_time()))
        if len(self.stamps) > WARMUP + MEASURED:
            self.end()

    def end(self) -> None:
        """Write wall and processor seconds of each step; nothing if no remedy changed anything."""
        pairs = list(pairwise(self.stamps))[WARMUP - 1 :]
        seconds = [[b[0] - a[0], b[1] - a[1]] for a, b in pairs]
        finish(self.out, seconds if CHANGED or not ASKED else None)


class PaceClock(ClockOfSteps):
    """Measures a row of steps."""

    WARMUP, MEASURED = (12, 30), (8, 40)
    """How many steps are left out, and measured: the smaller number where the larger one takes
    longer than ``SECONDS``. What is compiled is compiled before, and the batches that a loader had
    ready by then are used up."""
    SECONDS = 6.0

    def __init__(self, out: str) -> None:
        super().__init__(out)
        self.begin = time.perf_counter()
        self.steps = -1
        self.warm = False

    def stepped(self) -> None:
        """Count a step, and begin or end the row of them."""
        self.steps += 1
        if self.steps == 0:
            self.begin = time.perf_counter()
        least, most = self.MEASURED if self.warm else self.WARMUP
        late = self.steps >= least and time.perf_counter() - self.begin > self.SECONDS
        if not late and self.steps < most:
            return
        if self.warm:
            self.end()
        self.warm, self.steps, self.begin = True, 0, self.now()

    def end(self) -> None:
        """Write the seconds of a step, and of how many; nothing where none was measured."""
        took, steps = self.now() - self.begin, self.steps
        measured = {"step_s": took / steps, "steps": steps} if self.warm and steps > 0 else None
        finish(self.out, measured)


ASKED: set[str] = set()
CHANGED: set[str] = set()
"""The remedies that are asked for, and what they have changed in the script so far."""


def default(kind: type, name: str, value: Any, *, when: Any = None) -> None:
    """Give a constructor's argument another default, also where it is passed as ``when``."""
    construct = kind.__init__  # type: ignore[misc]

    @functools.wraps(construct)
    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get(name, when) == when:
            kwargs[name] = value
            CHANGED.add(name)
        construct(self, *args, **kwargs)

    kind.__init__ = changed  # type: ignore[misc]


def optimizer_option(name: str) -> None:
    """Pass an option to each optimizer of PyTorch's that has it."""
    for kind in list(vars(torch.optim).values()):
        code = getattr(getattr(kind, "__init__", None), "__code__", None)
        if isinstance(kind, type) and code and name in code.co_varnames:
            default(kind, name, value=True)


def set_to_none() -> None:
    """Have ``zero_grad`` drop gradients in place of filling them."""

    def cleared(clear: Callable[[Any], None], owner: Any) -> None:
        CHANGED.add("gradients")
        clear(owner)

    for kind in (nn.Module, torch.optim.Optimizer):
        clear = kind.zero_grad
        kind.zero_grad = lambda self, *_, clear=clear, **__: cleared(clear, self)  # type: ignore[method-assign, misc]


def at_first_call(change: Callable[[nn.Module], Any]) -> None:
    """Change each outermost module with parameters when it is first called in training.

    Those without are no models, but what a loader's workers do to images, or losses.
    """
    call = nn.Module.__call__
    changed: set[int] = set()
    depth = [0]

    def changing(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not depth[0] and module.training and id(module) not in changed:
            changed.add(id(module))
            if next(module.parameters(), None) is not None:
                CHANGED.add(type(module).__name__)
                change(module)
        depth[0] += 1
        try:
            return call(module, *args, **kwargs)
        finally:
            depth[0] -= 1

    nn.Module.__call__ = changing  # type: ignore[assignment, method-assign]


def fused_attention() -> None:
    """Replace causal attention, written as minGPT has it, by the fused function."""
    call = nn.Module.__call__

    def attend(self: Any, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = (
            part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        drop = getattr(self, "attn_dropout", None)
        mixed = nn.functional.scaled_dot_product_attention(
            *heads, dropout_p=drop.p if drop is not None and self.training else 0.0, is_causal=True
        )
        projected = self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return self.resid_dropout(projected) if hasattr(self, "resid_dropout") else projected

    def replaced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(module).__name__ == "CausalSelfAttention":
            CHANGED.add("attention")
            return attend(module, *args, **kwargs)
        return call(module, *args, **kwargs)

    nn.Module.__call__ = replaced  # type: ignore[assignment, method-assign]


def matmul_precision() -> None:
    """Compute products of float32 in TF32."""
    CHANGED.add("products")
    torch.set_float32_matmul_precision("high")


WHOLE_RUN = ExitStack()
"""Contexts that end with the script."""

REMEDIES: dict[str, Callable[[], Any]] = {
    "foreach=True": lambda: optimizer_option("foreach"),
    "fused=True": lambda: optimizer_option("fused"),
    "set_to_none=True": set_to_none,
    "num_workers=2": lambda: default(torch.utils.data.DataLoader, "num_workers", 2, when=0),
    # Some models have a `to` of their own.
    "channels_last": lambda: at_first_call(
        lambda m: nn.Module.to(m, memory_format=torch.channels_last)
    ),
    "torch.compile": lambda: at_first_call(lambda m: m.compile()),
    "matmul precision": matmul_precision,
    "fused attention": fused_attention,
    **{
        name: lambda backend=backend: WHOLE_RUN.enter_context(sdpa_kernel(backend))
        for name, backend in SDPBackend.__members__.items()
    },
}


Clock: TypeAlias = ModuleClock | StepClock | PaceClock
CLOCKS: dict[str, Callable[[str], Clock]] = {
    "modules": ModuleClock,
    "steps": StepClock,
    "pace": PaceClock,
}


def start(out: str, mode: str) -> Clock:
    """Start a clock in this process."""
    kind, *remedies = mode.split(":")
    ASKED.update(remedies)
    for remedy in remedies:
        REMEDIES[remedy]()
    clock = CLOCKS[kind](out)
    clock.start()
    return clock


def main(out: str, mode: str, script: str, *arguments: str) -> None:
    """Run the script."""
    if os.getpid() != os.getpgrp():
        os.setpgrp()  # whoever ends the script ends this group
    children = Path(out).with_suffix(".children")
    children.mkdir(exist_ok=True)
    (children / "sitecustomize.py").write_text(_IN_CHILDREN, encoding="utf-8")
    os.environ[CLOCK] = os.pathsep.join((out, mode))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        (str(children), *filter(None, [os.environ.get("PYTHONPATH")]))
    )
    clock = start(out, mode)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt:  # by which some scripts end
        pass
    except SystemExit as end:
        if end.code:
            raise
    if os.getpid() == os.getpgrp():  # not in a fork of it
        clock.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
