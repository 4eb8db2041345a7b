"""The traces that ``scaling.py`` reads: in each, one thing grows and all else stays.

Each maker takes a scale and gives a text that is about as many times as long as at scale 1.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import zlib
from collections.abc import Callable

import numpy as np

__all__ = ["DIMENSIONS"]

Maker = Callable[[int], bytes]
DIMENSIONS: dict[str, Maker] = {}


def dimension(name: str) -> Callable[[Maker], Maker]:
    def listed(maker: Maker) -> Maker:
        DIMENSIONS[name] = maker
        return maker

    return listed


class Sketch:
    """Events as text; times are microseconds, and go on with each event unless they are given."""

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

    def mark(self, name: str, begin: float, length: float, tid: int = 1) -> None:
        self.span(name, begin, length, cat="user_annotation", tid=tid)

    def kernel(
        self, begin: float, length: float, launch: float | None, *, name: str = "kernel",
        tid: int = 2, stream: int = 7, device: int = 0, cat: str = "kernel",
    ) -> None:  # fmt: skip
        self.correlation += 1
        number = {"correlation": self.correlation}
        if launch is not None:
            self.span("cudaLaunchKernel", launch, 0.5, cat="cuda_runtime", tid=tid, **number)
        where = {"device": device, "stream": stream}
        self.span(name, begin, length, cat=cat, pid=device, tid=stream, **number, **where)

    def module(self, path: str, seq: int, tid: int = 1, operator: str = "aten::mul") -> None:
        """A module's call with one numbered operator."""
        self.span(f"forward: {path} (M)", self.at, 8, tid=tid)
        self.operator(operator, self.at + 1, 2, seq, tid)
        self.at += 10

    def backward(self, seq: int, tid: int = 2, logical: int = 1) -> None:
        self.node("MulBackward0", self.at, 8, seq, tid, logical)
        self.at += 10

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


# A training run -----------------------------------------------------------------------------------


@dimension("steps with marks")
def marked_steps(scale: int) -> bytes:
    s = Sketch()
    for step in range(200 * scale):
        begin = s.at
        s.step(4, 4 * step)
        s.mark(f"ProfilerStep#{step}", begin, s.at - begin)
        s.at += 10
    return s.text()


@dimension("optimizer steps")
def optimizer_steps(scale: int) -> bytes:
    s = Sketch()
    for step in range(200 * scale):
        s.step(4, 4 * step)
    return s.text()


@dimension("passes of one step")
def passes(scale: int) -> bytes:
    s = Sketch()
    for number in range(800 * scale):
        s.module("m", number)
        s.backward(number)
    return s.text()


@dimension("modules")
def modules(scale: int) -> bytes:
    s = Sketch()
    s.step(1000 * scale)
    return s.text()


@dimension("depth of modules")
def depth(scale: int) -> bytes:
    s = Sketch()
    deep = int(300 * math.sqrt(scale))  # each path names all around it: text grows by the square
    for number in range(deep):
        path = ".".join(["m"] * (number + 1))
        s.span(f"forward: {path} (M)", number, 4 * deep - 2 * number)
        s.operator("aten::mul", number + 0.5, 0.4, number)
    s.at = 5 * deep
    for number in reversed(range(deep)):
        s.backward(number)
    return s.text()


@dimension("depth of one path")
def one_path(scale: int) -> bytes:
    s = Sketch()
    s.module(".".join(["m"] * 100_000 * scale), 0)
    s.backward(0)
    return s.text()


@dimension("calls within calls")
def recursion(scale: int) -> bytes:
    s = Sketch()
    deep = 1500 * scale
    for number in range(deep):
        s.span("forward: m (M)", number, 4 * deep - 2 * number)
        s.operator("aten::mul", number + 0.5, 0.4, number)
    s.at = 5 * deep
    for number in reversed(range(deep)):
        s.backward(number)
    return s.text()


@dimension("nodes")
def nodes(scale: int) -> bytes:
    s = Sketch()
    count = 2000 * scale
    s.span("forward: m (M)", 0, 10 * count)
    for number in range(count):
        s.operator("aten::mul", 4 * number + 1, 2, number)
    s.at = 12 * count
    for number in reversed(range(count)):
        s.backward(number)
    return s.text()


@dimension("nodes within nodes")
def nested_nodes(scale: int) -> bytes:
    s = Sketch()
    count = 1500 * scale
    for number in range(count):
        s.operator("aten::mul", 4 * number + 1, 2, number)
    s.at = 5 * count
    for number in range(count):
        s.node("MulBackward0", s.at + number, 4 * count - 2 * number, number)
    return s.text()


@dimension("nodes without an operator")
def unrecorded(scale: int) -> bytes:
    s = Sketch()
    count = 1500 * scale
    for number in range(count):
        s.operator("aten::mul", s.at, 2, 2 * number)
        s.at += 4
    for number in reversed(range(count)):
        s.node("OddBackward0", s.at, 8, 2 * number + 1)
        s.at += 10
    return s.text()


@dimension("nodes before their operators")
def too_early(scale: int) -> bytes:
    s = Sketch()
    count = 1500 * scale
    s.operator("aten::mul", 0, 1, 0)
    s.at = 10
    for number in reversed(range(count)):
        s.node("OddBackward0", s.at, 8, number + count)
        s.at += 10
    for number in range(count):
        s.operator("aten::mul", s.at, 2, number + 1)
        s.at += 4
    return s.text()


@dimension("one sequence number")
def one_number(scale: int) -> bytes:
    s = Sketch()
    for _ in range(2000 * scale):
        s.module("m", 1)
        s.backward(1)
    return s.text()


@dimension("one sequence number, later")
def one_later_number(scale: int) -> bytes:
    s = Sketch()
    count = 2000 * scale
    s.module("m", 1)
    for _ in range(count):
        s.backward(1)
    for _ in range(count):
        s.module("m", 1)
    return s.text()


@dimension("nodes hooks took the number of")
def accumulating(scale: int) -> bytes:
    s = Sketch()
    count = 1500 * scale
    for number in range(count):
        s.module("m", number)
    for number in reversed(range(count)):
        s.backward(number)
        s.span(
            "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", s.at, 8, tid=2
        )
        s.at += 10
    return s.text()


@dimension("checkpoints")
def checkpoints(scale: int) -> bytes:
    s = Sketch()
    count = 700 * scale
    for number in range(count):
        s.module(f"m.{number % 50}", number)
    for number in reversed(range(count)):
        s.node("MulBackward0", s.at, 40, number)
        if number % 2:
            s.span(f"forward: m.{number % 50} (M)", s.at + 1, 20, tid=2)
            s.operator("aten::mul", s.at + 2, 5, number + count, tid=2)
        s.at += 50
    return s.text()


@dimension("compiled regions")
def regions(scale: int) -> bytes:
    s = Sketch()
    for number in range(1500 * scale):
        s.span(f"Torch-Compiled Region: {number}/0", s.at, 8)
        s.operator("CompiledFunction", s.at + 1, 5, number)
        s.at += 10
    for number in reversed(range(1500 * scale)):
        s.node("CompiledFunctionBackward", s.at, 8, number)
        s.at += 10
    return s.text()


@dimension("modules that Python's stack names")
def python_modules(scale: int) -> bytes:
    s = Sketch()
    count = 1000 * scale
    for number in range(count):
        s.span(f"nn.Module: Linear_{number}", s.at, 8, cat="python_function")
        s.operator("aten::mul", s.at + 1, 2, number)
        s.at += 10
    for number in reversed(range(count)):
        s.backward(number)
    return s.text()


@dimension("modules within modules of Python's")
def nested_python_modules(scale: int) -> bytes:
    s = Sketch()
    deep = 400 * scale
    for number in range(deep):
        s.span(f"nn.Module: Linear_{number}", number, 4 * deep - 2 * number, cat="python_function")
        s.operator("aten::mul", number + 0.5, 0.4, number)
    s.at = 5 * deep
    for number in reversed(range(deep)):
        s.backward(number)
    return s.text()


# Threads and devices ------------------------------------------------------------------------------


@dimension("threads")
def threads(scale: int) -> bytes:
    s = Sketch()
    count = 400 * scale
    for number in range(count):
        s.module("m", number, tid=10 + 2 * number)
    for number in reversed(range(count)):
        s.backward(number, tid=11 + 2 * number)
    return s.text()


@dimension("threads that autograd numbers")
def logical_threads(scale: int) -> bytes:
    s = Sketch()
    count = 100 * scale
    for number in range(count):
        for seq in range(4):
            s.module("m", seq, tid=10 + number)
    for number in reversed(range(count)):
        for seq in reversed(range(4)):
            s.backward(seq, logical=number + 1)
    return s.text()


@dimension("threads that call C++ functions in hooked modules")
def doubtful_threads(scale: int) -> bytes:
    s = Sketch()
    count = 100 * scale
    for number in range(count):
        common = f'"cat": "fwdbwd", "name": "fwdbwd", "id": {number}, "pid": 1'
        made, ran = 10 * number + 2, 10 * (count + number) + 2
        s.events.append(f'{{"ph": "s", {common}, "tid": {10 + number}, "ts": {made}}}')
        s.events.append(f'{{"ph": "f", "bp": "e", {common}, "tid": 2, "ts": {ran}}}')
    for number in range(count):
        s.module("m", 0, tid=10 + number, operator="BackwardHookFunction")
    for number in range(count):
        name = f"cpp::Function{number}" if number % 2 else "BackwardHookFunctionBackward"
        s.node(name, s.at, 8, 0, logical=number + 1)
        s.at += 10
    return s.text()


@dimension("streams")
def streams(scale: int) -> bytes:
    s = Sketch()
    s.module("m", 0)
    begin = s.at
    count = 1500 * scale
    for number in range(count):
        s.kernel(begin + number + 2, 20, begin + number + 1, stream=number)
    s.node("MulBackward0", begin, count + 10, 0)
    return s.text()


@dimension("devices")
def devices(scale: int) -> bytes:
    s = Sketch()
    s.module("m", 0)
    begin = s.at
    count = 400 * scale
    for number in range(count):
        s.kernel(begin + number + 2, 20, begin + number + 1, device=number)
    s.node("MulBackward0", begin, count + 10, 0)
    return s.text()


@dimension("kernels")
def kernels(scale: int) -> bytes:
    s = Sketch()
    s.module("m", 0)
    begin = s.at
    count = 2000 * scale
    for number in range(count):
        s.kernel(begin + number + 2, 20, begin + number + 1)
    s.node("MulBackward0", begin, count + 10, 0)
    return s.text()


@dimension("kernels without a launch")
def lost_kernels(scale: int) -> bytes:
    s = Sketch()
    s.module("m", 0)
    begin = s.at
    count = 3000 * scale
    for number in range(count):
        s.kernel(begin + number + 2, 1, begin + number + 1 if number % 5 == 0 else None)
    s.node("MulBackward0", begin, count + 10, 0)
    return s.text()


@dimension("copies and waits")
def copies(scale: int) -> bytes:
    s = Sketch()
    s.module("m", 0)
    begin = s.at
    count = 1500 * scale
    for number in range(count):
        at = begin + 10 * number
        s.kernel(at + 2, 4, at + 1, name="Memcpy HtoD (Pageable -> Device)", cat="gpu_memcpy")
        s.span("cudaStreamSynchronize", at + 3, 4, cat="cuda_runtime", tid=2)
    s.node("MulBackward0", begin, 10 * count + 10, 0)
    return s.text()


@dimension("arrows")
def arrows(scale: int) -> bytes:
    s = Sketch()
    count = 1500 * scale
    for number in range(count):
        common = f'"cat": "fwdbwd", "name": "fwdbwd", "id": {number}, "pid": 1'
        s.events.append(f'{{"ph": "s", {common}, "tid": 1, "ts": {10 * number + 2}}}')
        s.events.append(
            f'{{"ph": "f", "bp": "e", {common}, "tid": 2, "ts": {10 * (2 * count - number) + 2}}}'
        )
    for number in range(count):
        s.module("m", number)
    s.at = 10 * count + 10
    for number in reversed(range(count)):
        s.backward(number)
    return s.text()


# Names and texts ----------------------------------------------------------------------------------


@dimension("names")
def names(scale: int) -> bytes:
    s = Sketch()
    count = 1000 * scale
    for number in range(count):
        s.module("m", number, operator=f"aten::operator_{number}")
    for number in reversed(range(count)):
        s.kernel(s.at + 1, 2, s.at + 0.5, name=f"kernel_{number}")
        s.node(f"Operator{number}Backward0", s.at, 8, number)
        s.at += 10
    return s.text()


@dimension("length of names")
def long_names(scale: int) -> bytes:
    s = Sketch()
    name = "n" * 200_000 * scale
    s.module(name, 0, operator=f"aten::{name}")
    s.kernel(s.at + 1, 2, s.at + 0.5, name=name)
    s.node(f"{name}Backward0", s.at, 8, 0)
    s.mark(f"Optimizer.step#{name}", s.at + 10, 5)
    return s.text()


@dimension("length of names, odd ones")
def odd_names(scale: int) -> bytes:
    s = Sketch()
    for unit in ("(", ")", " ", "#", "%", "%25", "::", ".", "\u20ac", "\\", '"', " #2", " (M)"):
        name = unit * (60_000 // len(unit)) * scale
        s.span(f"forward: {name}", s.at, 8)
        s.span(f"forward: {name} (M)", s.at + 10, 8)
        s.span(f"backward: {name} (M)", s.at + 20, 8)
        s.span(f"[pl][module]{name}: {name}", s.at + 30, 8, cat="user_annotation")
        s.span(name, s.at + 40, 8)
        s.at += 50
    s.module("m", 0)
    s.backward(0)
    return s.text()


@dimension("marks that overlap")
def overlapping(scale: int) -> bytes:
    s = Sketch()
    count = 2000 * scale
    for number in range(count):
        s.mark("Optimizer.step#SGD.step", number, 2 * count)
        s.mark("enumerate(DataLoader)#x.__next__", number + 0.5, count)
    s.step()
    return s.text()


@dimension("calls that overlap")
def crossing(scale: int) -> bytes:
    s = Sketch()
    count = 1500 * scale
    for number in range(count):
        s.span(f"forward: m.{number % 20} (M)", 3 * number, 3 * count)
        s.operator("aten::mul", 3 * number + 1, 1, number)
    s.at = 8 * count
    for number in reversed(range(count)):
        s.node("MulBackward0", s.at, 3 * count, number)
        s.at += 3
    return s.text()


@dimension("events at one moment")
def one_moment(scale: int) -> bytes:
    s = Sketch()
    for number in range(1000 * scale):
        s.span("forward: m (M)", 5, 0)
        s.operator("aten::mul", 5, 0, number)
        s.node("MulBackward0", 50, 0.2, number)
        s.kernel(50, 0, 50)
    s.step()
    return s.text()


@dimension("source lines")
def lines(scale: int) -> bytes:
    s = Sketch()
    count = 1000 * scale
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


@dimension("arguments")
def arguments(scale: int) -> bytes:
    s = Sketch()
    s.step()
    s.span("aten::odd", s.at, 1, x=[[n, str(n), {"name": n}] for n in range(30_000 * scale)])
    return s.text()


@dimension("arguments that nest")
def nesting(scale: int) -> bytes:
    s = Sketch()
    s.step()
    for number in range(20 * scale):
        deep = "[" * 20_000 + "]" * 20_000
        s.span("aten::odd", s.at + number, 1, x="@")
        s.events[-1] = s.events[-1].replace('"@"', deep)
    return s.text()


@dimension("malformed events")
def malformed(scale: int) -> bytes:
    s = Sketch()
    s.step()
    for number in range(8000 * scale):
        s.span("aten::odd", s.at + number, 1)
        s.events[-1] = s.events[-1].replace('"ts": ', '"ts": "soon" ')
    s.step()
    return s.text()


@dimension("brackets that are missing")
def missing(scale: int) -> bytes:
    s = Sketch()
    s.step()
    for number in range(8000 * scale):
        s.span("aten::odd", s.at + number, 1)
        s.events[-1] = s.events[-1][:-1].replace('"ph": "X", ', "") + ', "y": 1'
    s.step()
    return s.text()


@dimension("numbers that are words")
def words(scale: int) -> bytes:
    s = Sketch()
    s.module("m", 0)
    for number in range(8000 * scale):
        s.kernel(s.at + number, 1, None)
        s.events[-1] = s.events[-1].replace('"stream": 7', '"blocks per SM": inf')
    s.backward(0)
    return s.text()


@dimension("text without events")
def no_trace(scale: int) -> bytes:
    return b'{"a": "' + b"x" * (20_000_000 * scale) + b'"}'


@dimension("text before the events")
def head(scale: int) -> bytes:
    s = Sketch()
    s.step()
    return b'{"a": "' + b"x" * (20_000_000 * scale) + b'", ' + s.text()[1:]


@dimension("text behind the events")
def tail(scale: int) -> bytes:
    s = Sketch()
    s.step()
    s.tail = ', "a": "' + "x" * (20_000_000 * scale) + '"'
    return s.text()


@dimension("gzip members")
def members(scale: int) -> bytes:
    s = Sketch()
    s.step()
    text = s.text()
    return b"".join(gzip.compress(text[n : n + 1]) for n in range(len(text))) + (
        gzip.compress(b" ") * 20_000 * scale
    )
