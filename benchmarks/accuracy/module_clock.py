"""How long each module's backward takes, by CUDA events and without a profiler.

The graph's nodes run in the order of falling sequence numbers. Wherever the next node is another
module's, an event is recorded; the time between two events is that module's.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import synchronize

if TYPE_CHECKING:
    import torch

    from benchmarks.accuracy.truth_models import Build

_SLEEP = 40_000_000
"""Cycles, some 20 ms: the host gets ahead, as it is within a long step."""


class Tracker:
    """Finds the module that made a node by autograd's sequence number, without Backspot."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.active = False
        self._numbers: list[int] = []
        self._paths: list[str] = []
        self._stack: list[str] = []
        compiled: set[str] = set()
        for path, module in model.named_modules():
            if any(path.startswith(f"{around}.") for around in compiled):
                continue
            if getattr(module, "_compiled_call_impl", None) is not None:
                compiled.add(path)  # hooks would be compiled along, and see nothing
                module._compiled_call_impl = self._around(path, module._compiled_call_impl)
                continue
            module.register_forward_pre_hook(self._enter(path))
            module.register_forward_hook(self._leave)

    def _note(self) -> None:
        import torch

        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._paths.append(self._stack[-1] if self._stack else "(outside model)")

    def _around(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        enter = self._enter(path)

        def inner(*args: object, **kwargs: object) -> object:
            enter()
            result = call(*args, **kwargs)
            self._leave()
            return result

        return inner

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            if self.active:
                self._stack.append(path)
                self._note()

        return enter

    def _leave(self, *_: object) -> None:
        if self.active:
            self._stack.pop()
            self._note()

    def forward(self, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        for kept in (self._numbers, self._paths, self._stack):
            kept.clear()
        self.active = True
        try:
            self._note()
            return loss()
        finally:
            self.active = False

    def order(self, loss: torch.Tensor) -> list[tuple[str, Any]]:
        """The graph's nodes as the engine runs them, each with its owner's path."""
        found: dict[Any, int] = {}
        pending = [loss.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in found or node.name().endswith("AccumulateGrad"):
                continue
            found[node] = node._sequence_nr()
            pending.extend(following for following, _ in node.next_functions)
        ordered = sorted(found, key=found.__getitem__, reverse=True)
        at = [max(0, bisect_right(self._numbers, found[node]) - 1) for node in ordered]
        return [(self._paths[place], node) for place, node in zip(at, ordered, strict=True)]


def fold(path: str, depth: int | None) -> str:
    """The path's ancestor at ``depth``."""
    if depth is None or path.startswith("("):
        return path
    return ".".join(path.split(".")[:depth])


def moment(device: str) -> Any:
    """Now on the GPU, or on the host where there is none."""
    if not device.startswith("cuda"):
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, last: Any) -> float:
    """Milliseconds between two moments."""
    return (last - first) * 1e3 if isinstance(first, float) else first.elapsed_time(last)


def _timed_backward(
    build: Build, tracker: Tracker, device: str, only: str | None, ahead: bool
) -> tuple[dict[str, float], bool]:
    """One step without profiler: milliseconds by path, and whether the nodes ran in order."""
    import torch

    build.model.zero_grad(set_to_none=True)
    loss = tracker.forward(build.loss)
    if ahead and device.startswith("cuda"):
        torch.cuda._sleep(_SLEEP)
    marks: list[tuple[int, Any]] = []

    def hook(index: int) -> Callable[..., None]:
        def mark(*_: object) -> None:
            marks.append((index, moment(device)))

        return mark

    owners: list[str] = []
    for path, node in tracker.order(loss):
        owner = fold(path, build.depth)
        if only is not None and owner != only:
            owner = "(other)"
        if not owners or owners[-1] != owner:
            node.register_prehook(hook(len(owners)))
            owners.append(owner)
    loss.backward()
    marks.append((len(owners), moment(device)))
    synchronize(device)
    taken: dict[str, float] = defaultdict(float)
    for (index, begin), (_, following) in pairwise(marks):
        taken[owners[index]] += between(begin, following)
    indices = [index for index, _ in marks]
    return taken, indices == sorted(indices) == list(range(len(owners) + 1))


def time_modules(
    build: Build, tracker: Tracker, device: str, steps: int, only: str | None, ahead: bool
) -> dict[str, Any]:
    """Each module's time and share over several steps, of which the first two do not count."""
    times: dict[str, list[float]] = defaultdict(list)
    shares: dict[str, list[float]] = defaultdict(list)
    totals: list[float] = []
    in_order = True
    for number in range(steps + 2):
        taken, ordered = _timed_backward(build, tracker, device, only, ahead)
        if number < 2:
            continue
        in_order &= ordered
        totals.append(sum(taken.values()))
        for path, value in taken.items():
            times[path].append(value)
            shares[path].append(value / totals[-1])
    return {"times": times, "shares": shares, "totals": totals, "in_order": in_order}
