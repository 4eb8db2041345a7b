"""The modules of a model under the paths that users know, through the wrappers around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["class_name", "find_modules", "unwrap"]

# Wrappers by the name of a class in their ancestry, so that none of them need be imported, and the
# child that they wrap. They add a part to every path and nothing to the work.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


def unwrap(module: Any) -> Any:
    """The module within the wrappers around it; a module that is none is returned as it is."""
    while True:
        inner = _wrapped(module)
        if inner is None:
            return module
        module = inner


def _wrapped(module: Any) -> Any:
    for ancestor in type(module).__mro__:
        child = _WRAPPERS.get(ancestor.__name__)
        if child is not None:
            inner = _children(module).get(child)
            if isinstance(inner, torch.nn.Module):
                return inner
    return None


def class_name(module: Any) -> str:
    """The name of a module's class as its author knows it.

    Sharding and parametrization put a class of their own in its place (``FSDPLinear``,
    ``ParametrizedLinear``), and a lazy module is the other class from its first call on.
    """
    cls = getattr(module, "cls_to_become", None) or type(module)
    while True:
        for base in cls.__bases__:
            if cls.__name__ in (f"FSDP{base.__name__}", f"Parametrized{base.__name__}"):
                cls = base
                break
        else:
            return str(cls.__name__)


def _children(module: Any) -> dict[str, Any]:
    # Past __getattr__, which wrappers forward to what they wrap.
    children = vars(module).get("_modules")
    return children if isinstance(children, dict) else {}


def find_modules(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Every module once, under its first path, with its path, parent first.

    Yields:
        the path without any wrapper's part, the module, and the module around it (at first
        ``None``).
    """
    seen: set[int] = set()
    pending: list[tuple[str, Any, Any]] = [("", model, None)]
    while pending:
        path, module, parent = pending.pop()
        module = unwrap(module)
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module, parent
        if isinstance(module, torch.jit.ScriptModule):
            continue  # what is in it is compiled too
        pending.extend(
            (f"{path}.{name}" if path else name, child, module)
            for name, child in reversed(_children(module).items())
            if child is not None
        )
