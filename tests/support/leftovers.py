"""What of Backspot is still on a model or in PyTorch, whatever way it got there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

LABELS = (
    "forward: ",
    "backward: ",
    "backward end: ",
    "unmarked: ",
    "unused gradient: ",
    "float64: ",
)


def hooks_on(model: nn.Module) -> list[str]:
    """The places on a model where Backspot is: hooks of any kind, methods, a class of its own."""
    found = []
    for path, module in model.named_modules():
        if _is_ours(type(module)):
            found.append(f"{path}: {type(module)}")
        if type(module) is not nn.Module:  # while a profiler records, it has the wrapper
            found += [f"{path}: {type(module)}.{name}" for name in _places(vars(type(module)))]
        found += [f"{path}.{name}" for name in _places(vars(module))]
    return found


def left_in_torch() -> list[str]:
    """The places in PyTorch itself, and in ``copy``, where Backspot is.

    There are some while anything is instrumented, and none afterwards. The export of profilers is
    left out: it waits for the traces that are still to be exported, and an interrupt in the moment
    in which one of them goes leaves a wrapper that passes all on. Tests of exports look at it.
    """
    modules = (
        "torch.autograd.profiler",
        "torch.nn.modules.module",
        "torch.optim.optimizer",
        "torch.profiler.profiler",
        "copyreg",
    )
    holders = {name: import_module(name) for name in modules}
    profilers = (profile, torch.autograd.profiler.profile)
    classes = (nn.Module, torch.fx.GraphModule, *profilers, torch.optim.Optimizer)
    holders |= {str(held): held for held in classes}
    exporting = f"{torch.autograd.profiler.profile}.export_chrome_trace"

    places = (f"{home}.{name}" for home, held in holders.items() for name in _places(vars(held)))
    return [place for place in places if place != exporting]


def labels_of(run: Callable[[], Any]) -> set[str]:
    """The labels that come into a profile of this."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return {event.name for event in profiler.events() if event.name.startswith(LABELS)}


def _places(attributes: Mapping[str, Any]) -> Iterator[str]:
    for name, value in list(attributes.items()):
        if _is_ours(value):
            yield name
        elif isinstance(value, dict):
            for key, held in list(value.items()):
                if _is_ours(held):
                    yield f"{name}[{key!r}]"


def _is_ours(thing: Any) -> bool:
    """Whether the code that runs is Backspot's, however it is dressed up."""
    if isinstance(thing, FunctionType):
        # Not ``__module__``: functools.wraps copies that from what is wrapped.
        return _names_us(thing.__globals__.get("__name__"))
    if isinstance(thing, MethodType):
        return _is_ours(thing.__func__) or _is_ours(thing.__self__)
    if isinstance(thing, partial):
        return _is_ours(thing.func)
    if isinstance(thing, (staticmethod, classmethod)):
        return _is_ours(thing.__func__)
    if isinstance(thing, property):
        return _is_ours(thing.fget)
    return _names_us((thing if isinstance(thing, type) else type(thing)).__module__)


def _names_us(name: object) -> bool:
    return isinstance(name, str) and name.partition(".")[0] == "backspot"
