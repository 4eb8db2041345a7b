"""Where our hooks are on a module: in PyTorch's own dictionaries, under a key of our own.

PyTorch would give each hook a number, and Dynamo's code for a block asks for that number: then no
block could use the code that was compiled for its like, and a model compiled block by block would
run into the recompile limit. Besides, what is known by its key can be taken away whatever
interrupted its placing: there is no handle to lose. A hook is put down after its flags and taken
away before them, for PyTorch looks for the flags of the hooks that it finds.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KEY", "put_after", "put_around_backward", "put_before", "take_away"]

KEY = -0xBAC5

_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")


def put_before(module: Any, hook: Any) -> None:  # noqa: ANN401 - torch is not typed here
    """Run this hook before all others of the module's."""
    module._forward_pre_hooks_with_kwargs[KEY] = True
    module._forward_pre_hooks[KEY] = hook
    module._forward_pre_hooks.move_to_end(KEY, last=False)


def put_after(module: Any, hook: Any) -> None:  # noqa: ANN401
    """Run this hook after all others of the module's that there are, errors or not."""
    module._forward_hooks_with_kwargs[KEY] = True
    module._forward_hooks_always_called[KEY] = True
    module._forward_hooks[KEY] = hook


def put_around_backward(module: Any, before: Any, after: Any) -> None:  # noqa: ANN401
    """Add a full backward pre-hook and a full backward hook."""
    module._backward_pre_hooks[KEY] = before
    module._is_full_backward_hook = True
    module._backward_hooks[KEY] = after


def take_away(module: Any, *, only_after: bool = False, keep_after: bool = False) -> None:  # noqa: ANN401
    """Take our hooks away; a module without any is left as it is.

    Args:
        module: any module.
        only_after: take away just the hook that runs after the call.
        keep_after: leave that one, for PyTorch may be going through its dictionary.
    """
    after = () if keep_after else _AFTER
    for name in after if only_after else (*_BEFORE, *_BACKWARD, *after):
        getattr(module, name, {}).pop(KEY, None)
