"""What PyTorch keeps for the whole process: hooks on all modules and on all optimizers."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch.nn.modules import module as _module
from torch.optim import optimizer as _optimizer

# Hooks that run with every module and every optimizer of the process. A trial takes them out, as
# they would count its steps and see its copies. A dictionary that is missing stays as it is.
_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"),
    *("_global_backward_pre_hooks", "_global_module_registration_hooks"),
    *("_global_parameter_registration_hooks", "_global_buffer_registration_hooks"),
)
_OPTIMIZER_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")

GLOBAL_HOOKS: tuple[MutableMapping[Any, Any], ...] = tuple(
    found
    for home, names in ((_module, _HOOKS), (_optimizer, _OPTIMIZER_HOOKS))
    for name in names
    if isinstance(found := getattr(home, name, None), dict)
)

_HOOKS_OF_A_MODULE = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
)


def hooks_of(module: Any) -> tuple[dict[Any, Any], ...]:
    """Return the dictionaries of the hooks of one module."""
    return tuple(vars(module).get(name) or {} for name in _HOOKS_OF_A_MODULE)


def version_of(tensor: Any) -> int:
    """Return how often a tensor was written in place; 0 for one that does not count it."""
    try:
        return int(tensor._version)
    except RuntimeError:  # a tensor of inference mode
        return 0


def is_rescheduled(step: Any) -> bool:
    """Return whether an optimizer's ``step`` is PyTorch's own, which a scheduler counts."""
    return hasattr(step, "_wrapped_by_lr_sched")
