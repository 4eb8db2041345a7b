"""Does reading any kind of trace take more than linear time?

    python -m benchmarks scaling

In each trace, one thing grows and all else stays. It is made once and ten times as large, and the
processor times are compared. A growth beyond linear is measured again; if it remains, the exit code
is 1. Times on a busy machine vary: a difference of a half says nothing. Each entry of
``DIMENSIONS`` takes a scale and gives a text that is about as many times as long as at scale 1.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import time
import zlib
from collections.abc import Callable
from contextlib import suppress

import numpy as np

import backspot
from benchmarks.harness import Figures, Run

_BEYOND = 2.0
"""How many times the growth of the size the growth of the time may be: what caches explain."""
_LEAST = 0.02
"""Seconds; a shorter time does not show how it grows."""


class Sketch:
    """Events as text; times are microseconds, and ``at`` is where the next event begins."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.at = 0
        self.correlation = 0
        self.tail = ""

    def span(
        self, name: str, begin: float, length: float, *, cat: str = "cpu_op", tid: int = 1,
        pid: int = 1, **args: object,
    ) -> None:  # fmt: skip
        self.events.append(
            f'{{"ph": "X", "cat": "{cat}", "name": {json.dumps(name)}, "pid": {pid}, '
            f'"tid": {tid}, "ts": {begin}, "dur": {length}, "args": {json.dumps(args)}}}'
        )

    def operator(self, name: str, begin: float, length: float, seq: int, tid: int = 1) -> None:
        self.span(name, begin, length, tid=tid, **{"Sequence number": seq, "Fwd thread id": 0})

    def node(
        self, name: str, begin: float, length: float, seq: int, tid: int = 2, logical: int = 1
    ) -> None:
        numbers = {"Sequence number": seq, "Fwd thread id": logical}
        around = f"autograd::engine::evaluate_function: {name}"
        self.span(around, begin, length, tid=tid, **numbers)
        self.span(name, begin + 0.1, length - 0.2, tid=tid, **numbers)

    def mark(self, name: str, begin: float, length: float) -> None:
        self.span(name, begin, length, cat="user_annotation")

    def arrow(self, number: int, tid: int, begin: float, end: float) -> None:
        """An arrow from a thread's forward to thread 2's backward."""
        common = f'"cat": "fwdbwd", "name": "fwdbwd", "id": {number}, "pid": 1'
        self.events.append(f'{{"ph": "s", {common}, "tid": {tid}, "ts": {begin}}}')
        self.events.append(f'{{"ph": "f", "bp": "e", {common}, "tid": 2, "ts": {end}}}')

    def kernel(
        self, begin: float, length: float, launch: float | None, *, name: str = "kernel",
        stream: int = 7, device: int = 0, cat: str = "kernel",
    ) -> None:  # fmt: skip
        self.correlation += 1
        number = {"correlation": self.correlation}
        if launch is not None:
            self.span("cudaLaunchKernel", launch, 0.5, cat="cuda_runtime", tid=2, **number)
        where = {"device": device, "stream": stream}
        self.span(name, begin, length, cat=cat, pid=device, tid=stream, **number, **where)

    def replace(self, old: str, new: str) -> None:
        """Change the text of the last event."""
        self.events[-1] = self.events[-1].replace(old, new)

    def call(
        self, name: str, seq: int, tid: int = 1, operator: str = "aten::mul", cat: str = "cpu_op"
    ) -> None:
        """A call with one numbered operator."""
        self.span(name, self.at, 8, tid=tid, cat=cat)
        self.operator(operator, self.at + 1, 2, seq, tid)
        self.at += 10

    def module(self, path: str, seq: int, tid: int = 1, operator: str = "aten::mul") -> None:
        self.call(f"forward: {path} (M)", seq, tid, operator)

    def alone(self, seq: int) -> None:
        """An operator outside of all modules."""
        self.operator("aten::mul", self.at, 2, seq)
        self.at += 4

    def backward(
        self, seq: int, name: str = "MulBackward0", tid: int = 2, logical: int = 1
    ) -> None:
        self.node(name, self.at, 8, seq, tid, logical)
        self.at += 10

    def nested(self, name: str, number: int, deep: int, cat: str = "cpu_op") -> None:
        """The call of this number, within all earlier ones of ``deep``."""
        self.span(name, number, 4 * deep - 2 * number, cat=cat)
        self.operator("aten::mul", number + 0.5, 0.4, number)
        self.at = 5 * deep

    def step(self, modules: int = 4, first: int = 0) -> None:
        """Forward, backward with kernels, optimizer."""
        for number in range(modules):
            self.module(f"m.{number}", first + number)
        for number in reversed(range(modules)):
            self.kernel(self.at + 5, 8, self.at + 1)
            self.backward(first + number)
        self.mark("Optimizer.step#SGD.step", self.at, 5)
        self.at += 20

    def text(self) -> bytes:
        events = ",\n".join(self.events)
        return f'{{"schemaVersion": 1, "traceEvents": [\n{events}\n]{self.tail}}}'.encode()


# Shapes ------------------------------------------------------------------------------------------

Part = Callable[[Sketch, int], object]
Maker = Callable[[int], bytes]


def _nothing(*_: object) -> None:
    pass


def _each(count: int, *parts: Part, before: Part = _nothing) -> Maker:
    """Each part for all numbers before the next part; a backward goes through them in reverse."""

    def made(scale: int) -> bytes:
        s = Sketch()
        before(s, count * scale)
        for number, part in enumerate(parts):
            numbers = range(count * scale)
            for index in reversed(numbers) if number else numbers:
                part(s, index)
        return s.text()

    return made


def _backward(s: Sketch, number: int) -> None:
    s.backward(number)


def _nested(name: str, cat: str = "cpu_op", *, count: int, root: bool = False) -> Maker:
    """Calls within calls; with ``root``, as many as make a text that grows with the scale."""

    def made(scale: int) -> bytes:
        s = Sketch()
        deep = int(count * (math.sqrt(scale) if root else scale))
        for number in range(deep):
            path = ".".join(["m"] * (number + 1)) if root else ""
            s.nested(name.format(number=number, path=path), number, deep, cat)
        for number in reversed(range(deep)):
            s.backward(number)
        return s.text()

    return made


def _in_a_node(count: int, part: Callable[[Sketch, int, int], object], width: int = 1) -> Maker:
    """One node of a backward with so many things in it, at ``width`` microseconds each."""

    def made(scale: int) -> bytes:
        s = Sketch()
        s.module("m", 0)
        for number in range(count * scale):
            part(s, number, s.at + width * number)
        s.node("MulBackward0", s.at, width * count * scale + 10, 0)
        return s.text()

    return made


def _after_a_step(count: int, part: Part) -> Maker:
    """A whole step, so many things, and another step."""
    return _each(count, part, before=lambda s, _: s.step())


# What grows --------------------------------------------------------------------------------------


def _marked_step(s: Sketch, number: int) -> None:
    begin = s.at
    s.step(4, 4 * number)
    s.mark(f"ProfilerStep#{number}", begin, s.at - begin)
    s.at += 10


def _checkpoint(s: Sketch, number: int, count: int = 7_000) -> None:
    s.node("MulBackward0", s.at, 40, number)
    if number % 2:
        s.span(f"forward: m.{number % 50} (M)", s.at + 1, 20, tid=2)
        s.operator("aten::mul", s.at + 2, 5, number + count, tid=2)
    s.at += 50


def _accumulating(s: Sketch, number: int) -> None:
    s.backward(number)
    name = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    s.span(name, s.at, 8, tid=2)
    s.at += 10


def _nodes(scale: int) -> bytes:
    s, count = Sketch(), 2000 * scale
    s.span("forward: m (M)", 0, 10 * count)
    for number in range(count):
        s.operator("aten::mul", 4 * number + 1, 2, number)
    s.at = 12 * count
    for number in reversed(range(count)):
        s.backward(number)
    return s.text()


def _nodes_in_nodes(scale: int) -> bytes:
    s, count = Sketch(), 1500 * scale
    for number in range(count):
        s.alone(number)
    for number in range(count):
        s.node("MulBackward0", s.at + number, 4 * count - 2 * number, number)
    return s.text()


def _too_early(scale: int) -> bytes:
    s, count = Sketch(), 1500 * scale
    s.alone(0)
    for number in reversed(range(count)):
        s.backward(number + count, "OddBackward0")
    for number in range(count):
        s.alone(number + 1)
    return s.text()


def _four_modules(s: Sketch, number: int) -> None:
    for seq in range(4):
        s.module("m", seq, tid=10 + number)


def _four_nodes(s: Sketch, number: int) -> None:
    for seq in reversed(range(4)):
        s.backward(seq, logical=number + 1)


def _doubtful_threads(scale: int) -> bytes:
    s, count = Sketch(), 100 * scale
    for number in range(count):
        s.arrow(number, 10 + number, 10 * number + 2, 10 * (count + number) + 2)
    for number in range(count):
        s.module("m", 0, tid=10 + number, operator="BackwardHookFunction")
    for number in range(count):
        odd = f"cpp::Function{number}"
        s.backward(0, odd if number % 2 else "BackwardHookFunctionBackward", logical=number + 1)
    return s.text()


def _arrows(s: Sketch, count: int) -> None:
    for number in range(count):
        s.arrow(number, 1, 10 * number + 2, 10 * (2 * count - number) + 2)


def _copy(s: Sketch, _: int, at: int) -> None:
    s.kernel(at + 2, 4, at + 1, name="Memcpy HtoD (Pageable -> Device)", cat="gpu_memcpy")
    s.span("cudaStreamSynchronize", at + 3, 4, cat="cuda_runtime", tid=2)


def _named_node(s: Sketch, number: int) -> None:
    s.kernel(s.at + 1, 2, s.at + 0.5, name=f"kernel_{number}")
    s.backward(number, f"Operator{number}Backward0")


def _long_names(scale: int) -> bytes:
    s, name = Sketch(), "n" * 200_000 * scale
    s.module(name, 0, operator=f"aten::{name}")
    s.kernel(s.at + 1, 2, s.at + 0.5, name=name)
    s.node(f"{name}Backward0", s.at, 8, 0)
    s.mark(f"Optimizer.step#{name}", s.at + 10, 5)
    return s.text()


def _odd_names(scale: int) -> bytes:
    s = Sketch()
    for unit in ("(", ")", " ", "#", "%", "%25", "::", ".", "\u20ac", "\\", '"', " #2", " (M)"):
        name = unit * (60_000 // len(unit)) * scale
        labels = [f"forward: {name}", f"forward: {name} (M)", f"backward: {name} (M)", name]
        for label in labels:
            s.span(label, s.at, 8)
            s.at += 10
        s.mark(f"[pl][module]{name}: {name}", s.at, 8)
        s.at += 10
    s.module("m", 0)
    s.backward(0)
    return s.text()


def _overlapping(s: Sketch, count: int) -> None:
    for number in range(count):
        s.mark("Optimizer.step#SGD.step", number, 2 * count)
        s.mark("enumerate(DataLoader)#x.__next__", number + 0.5, count)
    s.step()


def _crossing(scale: int) -> bytes:
    s, count = Sketch(), 1500 * scale
    for number in range(count):
        s.span(f"forward: m.{number % 20} (M)", 3 * number, 3 * count)
        s.operator("aten::mul", 3 * number + 1, 1, number)
    s.at = 8 * count
    for number in reversed(range(count)):
        s.node("MulBackward0", s.at, 3 * count, number)
        s.at += 3
    return s.text()


def _one_moment(s: Sketch, number: int) -> None:
    s.span("forward: m (M)", 5, 0)
    s.operator("aten::mul", 5, 0, number)
    s.node("MulBackward0", 50, 0.2, number)
    s.kernel(50, 0, 50)


def _source_lines(scale: int) -> bytes:
    s, count = Sketch(), 1000 * scale
    for number in range(count):
        s.module("m", number)
    for number in reversed(range(count)):
        s.backward(number)

    def packed(numbers: list[int]) -> str:
        return base64.b64encode(zlib.compress(np.array(numbers, "<i8").tobytes())).decode()

    ones = [1] * count
    table = {
        "version": 1,
        "exact": True,
        "complete": True,
        "lines": [["net.py", n, "Net.forward", f"x = x * {n}", ""] for n in range(count)],
        "threads": [[1, count, packed([0, *ones[1:]]), packed(ones), packed([0, *ones[1:]])]],
    }
    s.tail = f', "backspot.lines": {json.dumps(table)}'
    return s.text()


def _odd_span(old: str, new: str, **args: object) -> Part:
    """An operator of which the text is changed."""

    def part(s: Sketch, number: int) -> None:
        s.span("aten::odd", s.at + number, 1, **args)
        s.replace(old, new)

    return part


def _unbracketed(s: Sketch, number: int) -> None:
    s.span("aten::odd", s.at + number, 1)
    s.events[-1] = s.events[-1][:-1].replace('"ph": "X", ', "") + ', "y": 1'


def _worded(s: Sketch, number: int, at: int) -> None:
    s.kernel(at, 1, None)
    s.replace('"stream": 7', '"blocks per SM": inf')


def _arguments(scale: int) -> bytes:
    s = Sketch()
    s.step()
    s.span("aten::odd", s.at, 1, x=[[n, str(n), {"name": n}] for n in range(30_000 * scale)])
    return s.text()


def _padded(before: str, after: str) -> Maker:
    """A step, and much text before or after its events."""

    def made(scale: int) -> bytes:
        s, long = Sketch(), "x" * 20_000_000 * scale
        s.step()
        s.tail = f', "a": "{long}"' if after else ""
        return (f'{{"a": "{long}", '.encode() + s.text()[1:]) if before else s.text()

    return made


def _gzip_members(scale: int) -> bytes:
    s = Sketch()
    s.step()
    text = s.text()
    members = b"".join(gzip.compress(text[n : n + 1]) for n in range(len(text)))
    return members + gzip.compress(b" ") * 20_000 * scale


def _of_one_call(path: Callable[[int], str]) -> Maker:
    return lambda scale: _each(1, lambda s, n: s.module(path(scale), n), _backward)(1)


_PYTHON = "nn.Module: Linear_{number}"
DIMENSIONS: dict[str, Maker] = {
    # A training run
    "steps with marks": _each(200, _marked_step),
    "optimizer steps": _each(200, lambda s, n: s.step(4, 4 * n)),
    "passes of one step": _each(800, lambda s, n: (s.module("m", n), s.backward(n))),
    "modules": lambda scale: _each(1, lambda s, _: s.step(1000 * scale))(1),
    "depth of modules": _nested("forward: {path} (M)", count=300, root=True),
    "depth of one path": _of_one_call(lambda scale: ".".join(["m"] * 100_000 * scale)),
    "calls within calls": _nested("forward: m (M)", count=1500),
    "nodes": _nodes,
    "nodes within nodes": _nodes_in_nodes,
    "nodes without an operator": _each(
        1500, lambda s, n: s.alone(2 * n), lambda s, n: s.backward(2 * n + 1, "OddBackward0")
    ),
    "nodes before their operators": _too_early,
    "one sequence number": _each(2000, lambda s, _: (s.module("m", 1), s.backward(1))),
    "one sequence number, later": _each(
        2000, lambda s, _: s.backward(1), lambda s, _: s.module("m", 1),
        before=lambda s, _: s.module("m", 1),
    ),
    "nodes hooks took the number of": _each(1500, lambda s, n: s.module("m", n), _accumulating),
    "checkpoints": _each(700, lambda s, n: s.module(f"m.{n % 50}", n), _checkpoint),
    "compiled regions": _each(
        1500,
        lambda s, n: s.call(f"Torch-Compiled Region: {n}/0", n, operator="CompiledFunction"),
        lambda s, n: s.backward(n, "CompiledFunctionBackward"),
    ),
    "modules that Python's stack names": _each(
        1000, lambda s, n: s.call(_PYTHON.format(number=n), n, cat="python_function"), _backward
    ),
    "modules within modules of Python's": _nested(_PYTHON, "python_function", count=400),
    # Threads and devices
    "threads": _each(
        400,
        lambda s, n: s.module("m", n, tid=10 + 2 * n),
        lambda s, n: s.backward(n, tid=11 + 2 * n),
    ),
    "threads that autograd numbers": _each(100, _four_modules, _four_nodes),
    "threads that call C++ functions in hooked modules": _doubtful_threads,
    "streams": _in_a_node(1500, lambda s, n, at: s.kernel(at + 2, 20, at + 1, stream=n)),
    "devices": _in_a_node(400, lambda s, n, at: s.kernel(at + 2, 20, at + 1, device=n)),
    "kernels": _in_a_node(2000, lambda s, _, at: s.kernel(at + 2, 20, at + 1)),
    "kernels without a launch": _in_a_node(
        3000, lambda s, n, at: s.kernel(at + 2, 1, None if n % 5 else at + 1)
    ),
    "copies and waits": _in_a_node(1500, _copy, width=10),
    "arrows": _each(1500, lambda s, n: s.module("m", n), _backward, before=_arrows),
    # Names and texts
    "names": _each(
        1000, lambda s, n: s.module("m", n, operator=f"aten::operator_{n}"), _named_node
    ),
    "length of names": _long_names,
    "length of names, odd ones": _odd_names,
    "marks that overlap": _each(2000, before=_overlapping),
    "calls that overlap": _crossing,
    "events at one moment": _each(1000, _one_moment),
    "source lines": _source_lines,
    "arguments": _arguments,
    "arguments that nest": _after_a_step(20, _odd_span('"@"', "[" * 20_000 + "]" * 20_000, x="@")),
    "malformed events": _after_a_step(8000, _odd_span('"ts": ', '"ts": "soon" ')),
    "brackets that are missing": _after_a_step(8000, _unbracketed),
    "numbers that are words": _in_a_node(8000, _worded),
    "text without events": lambda scale: b'{"a": "' + b"x" * (20_000_000 * scale) + b'"}',
    "text before the events": _padded("a", ""),
    "text behind the events": _padded("", "a"),
    "gzip members": _gzip_members,
}  # fmt: skip


# The run -----------------------------------------------------------------------------------------


def _seconds(text: bytes) -> float:
    begin = time.process_time()
    with suppress(backspot.BackspotError):
        backspot.locate(io.BytesIO(text))
    return time.process_time() - begin


def answer(run: Run) -> Figures:
    cases = {}
    for name in run.choose(DIMENSIONS, ("steps with marks",)):
        one, ten = DIMENSIONS[name](1), DIMENSIONS[name](10)
        for attempt in range(3):
            short = min(_seconds(one) for _ in range(3 if attempt else 2))
            long = min(_seconds(ten) for _ in range(2 if attempt else 1))
            growth = long / max(short, _LEAST) / (len(ten) / len(one))
            if growth <= _BEYOND:
                break
        cases[name] = {"s": short, "s of ten times": long, "growth": growth}
    beyond = [name for name, found in cases.items() if found["growth"] > _BEYOND]
    return {"cases": cases, "summary": {"beyond linear": beyond}, "wrong": beyond and not run.small}
