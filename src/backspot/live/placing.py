"""Where our hooks stand on a module: in PyTorch's own dictionaries, under a key of our own.

PyTorch would give each hook a number, and Dynamo's code for a block asks for that number: then no
block could use the code that was compiled for its like, and a model compiled block by block would
run into the recompile limit.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KEY", "put_after", "put_before", "take_away"]

KEY = -0xBAC5

_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def put_before(module: Any, hook: Any) -> None:  # noqa: ANN401 - torch is not typed here
    """Run this hook before all others of the module's."""
    handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    _rename(module, handle.id, _BEFORE)
    module._forward_pre_hooks.move_to_end(KEY, last=False)


def put_after(module: Any, hook: Any) -> None:  # noqa: ANN401
    """Run this hook after all others of the module's that there are, errors or not."""
    handle = module.register_forward_hook(hook, with_kwargs=True, always_call=True)
    _rename(module, handle.id, _AFTER)


def take_away(module: Any, *, before: bool = True) -> None:  # noqa: ANN401
    """Take the hook after the call away, and the one before it too, unless told otherwise."""
    for name in (*_BEFORE, *_AFTER) if before else _AFTER:
        getattr(module, name, {}).pop(KEY, None)


def _rename(module: Any, number: int, names: tuple[str, ...]) -> None:  # noqa: ANN401
    for name in names:
        hooks = getattr(module, name, {})
        if number in hooks:
            hooks.pop(KEY, None)  # an idle one that came with a copy
            hooks[KEY] = hooks.pop(number)
