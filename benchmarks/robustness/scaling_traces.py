"""Traces of which one thing is very large, as no training run makes them.

Each entry of ``DIMENSIONS`` takes a scale and gives a text about as many times as long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable


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


def _odd_span(old: str, new: str, **args: object) -> Part:
    """An operator of which the text is changed."""

    def part(s: Sketch, number: int) -> None:
        s.span("aten::odd", s.at + number, 1, **args)
        s.replace(old, new)

    return part


def _unbracketed(s: Sketch, number: int) -> None:
    s.span("aten::odd", s.at + number, 1)
    s.events[-1] = s.events[-1][:-1].replace('"ph": "X", ', "") + ', "y": 1'


_PYTHON = "nn.Module: Linear_{number}"
DIMENSIONS: dict[str, Maker] = {
    "nodes before their operators": _too_early,
    "one sequence number": _each(2000, lambda s, _: (s.module("m", 1), s.backward(1))),
    "one sequence number, later": _each(
        2000, lambda s, _: s.backward(1), lambda s, _: s.module("m", 1),
        before=lambda s, _: s.module("m", 1),
    ),
    "modules within modules of Python's": _nested(_PYTHON, "python_function", count=400),
    "threads that autograd numbers": _each(100, _four_modules, _four_nodes),
    "threads that call C++ functions in hooked modules": _doubtful_threads,
    "devices": _in_a_node(400, lambda s, n, at: s.kernel(at + 2, 20, at + 1, device=n)),
    "arguments that nest": _after_a_step(20, _odd_span('"@"', "[" * 20_000 + "]" * 20_000, x="@")),
    "malformed events": _after_a_step(8000, _odd_span('"ts": ', '"ts": "soon" ')),
    "brackets that are missing": _after_a_step(8000, _unbracketed),
}  # fmt: skip
