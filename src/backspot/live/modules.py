"""The modules of a model under the paths that users know, through the wrappers around them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from backspot.live.torch_internals.modules import WRAPPED_CHILD, children_of


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside its wrappers; a module without wrappers is returned as it is."""
    while True:
        inner = _wrapped(module)
        if inner is None:
            return module
        module = inner


def _wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    for ancestor in type(module).__mro__:
        child = WRAPPED_CHILD.get(ancestor.__name__)
        if child is not None:
            inner = children_of(module).get(child)
            if isinstance(inner, torch.nn.Module):
                return inner
    return None


def class_name(module: torch.nn.Module) -> str:
    """Return the name of a module's class as its author wrote it.

    Sharding and parametrization replace the class by a subclass (``FSDPLinear``,
    ``ParametrizedLinear``), and a lazy module changes its class with its first call.
    """
    return written_class_name(getattr(module, "cls_to_become", None) or type(module))


def written_class_name(cls: type) -> str:
    """Return the name of a class of modules as its author wrote it."""
    while True:
        for base in cls.__bases__:
            if cls.__name__ in (f"FSDP{base.__name__}", f"Parametrized{base.__name__}"):
                cls = base
                break
        else:
            return str(cls.__name__)


def is_called(module: torch.nn.Module) -> bool:
    """Return whether the module has a forward, which a ``ModuleList`` has not."""
    forward = getattr(type(module), "forward", None)  # a scripted class has none
    return forward is not torch.nn.Module.forward or "forward" in vars(module)


def find_modules(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Module | None]]:
    """Iterate over the modules of a model, parents first, each once and under its first path.

    Yields:
        The path without the parts that wrappers add, the module, and the module around it (``None``
        for the model itself).
    """
    visited: set[int] = set()
    pending: list[tuple[str, torch.nn.Module, torch.nn.Module | None]] = [("", model, None)]
    while pending:
        path, module, parent = pending.pop()
        module = unwrap(module)
        if id(module) in visited:
            continue
        visited.add(id(module))
        yield path, module, parent
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its children are compiled too
        pending.extend(
            (f"{path}.{name}" if path else name, child, module)
            for name, child in reversed(children_of(module).items())
            if child is not None
        )
