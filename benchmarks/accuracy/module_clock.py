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

from benchmarks.common import synchronize

if TYPE_CHECKING:
    import torch

    from benchmarks.accuracy.truth_models import Build

__all__ = ["Tracker", "fold", "time_modules"]


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
        return [
            (self._paths[max(0, bisect_right(self._numbers, found[node]) - 1)], node)
            for node in ordered
        ]


def fold(path: str, depth: int | None) -> str:
    """The path's ancestor at ``depth``."""
    if depth is None or path.startswith("("):
        return path
    return ".".join(path.split(".")[:depth])


class _Clock:
    """Moments on the GPU, or on the host where there is none."""

    def __init__(self, device: str) -> None:
        import torch

        self.cuda = device.startswith("cuda")
        self._event = torch.cuda.Event

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = self._event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) if self.cuda else (last - first) * 1e3


_SLEEP = 40_000_000  # cycles, some 20 ms: the host gets ahead, as it is within a long step


def _timed_backward(
    build: Build,
    tracker: Tracker,
    clock: _Clock,
    only: str | None,
    ahead: bool,
    settle: Callable[[], None],
) -> tuple[dict[str, float], float, bool]:
    """One step without profiler: milliseconds by path, of the whole, and whether in order."""
    import torch

    build.model.zero_grad(set_to_none=True)
    loss = tracker.forward(build.loss)
    if ahead and clock.cuda:
        torch.cuda._sleep(_SLEEP)
    marks: list[tuple[int, Any]] = []

    def hook(index: int) -> Callable[..., None]:
        def mark(*_: object) -> None:
            marks.append((index, clock.mark()))

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
    end = clock.mark()
    settle()
    taken: dict[str, float] = defaultdict(float)
    moments = [*marks, (len(owners), end)]
    for (index, begin), (_, following) in pairwise(moments):
        taken[owners[index]] += clock.between(begin, following)
    indices = [index for index, _ in marks]
    return dict(taken), sum(taken.values()), indices == sorted(indices) == list(range(len(owners)))


def time_modules(
    build: Build, tracker: Tracker, device: str, steps: int, only: str | None, ahead: bool
) -> dict[str, Any]:
    """Each module's time and share over several steps."""
    clock = _Clock(device)
    times: dict[str, list[float]] = defaultdict(list)
    shares: dict[str, list[float]] = defaultdict(list)
    totals: list[float] = []
    in_order = True
    for number in range(steps + 2):
        taken, total, ordered = _timed_backward(
            build, tracker, clock, only, ahead, lambda: synchronize(device)
        )
        if number < 2:
            continue
        in_order &= ordered
        totals.append(total)
        for path, value in taken.items():
            times[path].append(value)
            shares[path].append(value / total)
    return {"times": times, "shares": shares, "totals": totals, "in_order": in_order}
