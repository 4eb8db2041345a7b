"""A slow backward, planted into one call of one module."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Call = tuple[str, int]
"""A module's path, and which of its calls within one step, from 0 on."""


def spin_for(milliseconds: float, device: str, cycles_per_ms: float = 0.0) -> Callable[[], None]:
    """What the planted backward does: keeps the host busy, or the GPU."""
    if device == "cuda":
        cycles = max(1, round(milliseconds * cycles_per_ms))
        return lambda: torch.cuda._sleep(cycles)
    length = round(milliseconds * 1e6)

    def spin() -> None:
        end = time.perf_counter_ns() + length
        while time.perf_counter_ns() < end:
            pass

    return spin


def cycles_per_millisecond() -> float:
    """How many cycles ``torch.cuda._sleep`` takes for a millisecond on this GPU."""
    cycles = 20_000_000
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return cycles / min(times)


class Plant:
    """What was planted.

    Attributes:
        ran: how often its backward ran.
        node_name: the name of the node that made the output, and of the planted node too.
    """

    def __init__(self, module: torch.nn.Module, call: int, spin: Callable[[], None]) -> None:
        self.module = module
        self.call = call
        self.spin = spin
        self.ran = 0
        self.calls = 0
        self.node_name = ""
        plant = self

        class Planted(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
                return tensor.clone()  # a view could not be changed in place afterwards

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                plant.ran += 1
                plant.spin()
                return gradient

        self._function = Planted

    def begin_step(self) -> None:
        """Count the module's calls from 0 again."""
        self.calls = 0

    def within(self, output: Any) -> Any:
        """The output of one call, in the chosen one with the plant on its first tensor."""
        chosen = self.calls == self.call
        self.calls += 1
        return _replace_first(output, self._apply)[0] if chosen else output

    def _apply(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.node_name:
            # Named as the node before it: a slow backward in the field has no name of its own,
            # it is one of many of its kind.
            node = tensor.grad_fn
            self.node_name = node.name() if node is not None else "PlantedBackward"
            self._function._backward_cls.__name__ = self.node_name
        return self._function.apply(tensor)


@contextmanager
def planted(module: torch.nn.Module, call: int, spin: Callable[[], None]) -> Iterator[Plant]:
    """Have one call of ``module`` run a slow backward, made within its forward."""
    plant = Plant(module, call, spin)
    original = module.forward
    own = vars(module).get("forward")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return plant.within(original(*args, **kwargs))

    module.forward = forward
    try:
        yield plant
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def find_calls(model: torch.nn.Module, step: Callable[[], None]) -> list[Call]:
    """The calls of a step whose output has a differentiable tensor."""
    found: list[Call] = []
    counts: Counter[str] = Counter()

    def note(path: str, output: Any) -> None:
        if _replace_first(output, lambda tensor: tensor)[1]:
            found.append((path, counts[path]))
        counts[path] += 1

    handles = [
        module.register_forward_hook(lambda _m, _a, output, path=path: note(path, output))
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    step()
    for handle in handles:
        handle.remove()
    return found


def _replace_first(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, bool]:
    """The value with its first differentiable tensor changed, and whether it has one."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad and value.is_floating_point():
            return change(value), True
    elif isinstance(value, dict):
        for key, item in list(value.items()):
            new, done = _replace_first(item, change)
            if done:
                value[key] = new  # a ModelOutput sets its attribute too
                return value, True
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            new, done = _replace_first(item, change)
            if done:
                items = [*value[:index], new, *value[index + 1 :]]
                if hasattr(value, "_fields"):
                    return type(value)(*items), True
                return type(value)(items), True
    return value, False
