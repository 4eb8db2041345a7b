"""Copies of an instrumented model, by ``copy``, ``pickle`` or ``torch.save``, are plain models.

While a model is instrumented, its modules' classes are reduced by a function of ours, which hands
on what PyTorch would and leaves our hooks out. An instance that bears none is reduced as ever.
"""

from __future__ import annotations

import copyreg
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from backspot.live.hooks import hook_of

__all__ = ["keep_copies_plain"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)

_users: Counter[type] = Counter()


def keep_copies_plain(model: Any, classes: Iterable[type]) -> Callable[[], Any]:  # noqa: ANN401
    """Reduce instances of these classes without our hooks.

    Returns:
        what ends it; it ends by itself when the model is gone.
    """
    classes = frozenset(classes)
    for cls in classes:
        # Who has a reduction of their own keeps it: our hooks then come out as idle functions.
        if copyreg.dispatch_table.setdefault(cls, _reduce) is _reduce:
            _users[cls] += 1
    return weakref.finalize(model, _release, classes)


def _release(classes: Iterable[type]) -> None:
    for cls in classes:
        if copyreg.dispatch_table.get(cls) is not _reduce:
            continue
        _users[cls] -= 1
        if _users[cls] <= 0:
            del copyreg.dispatch_table[cls], _users[cls]


def _reduce(module: Any) -> Any:  # noqa: ANN401 - what __reduce_ex__ returns: a str or a tuple
    reduced = module.__reduce_ex__(4)
    if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
        return (*reduced[:2], _without_hooks(reduced[2]), *reduced[3:])
    return reduced


def _without_hooks(state: dict[str, Any]) -> dict[str, Any]:
    ours: set[int] = set()
    plain = dict(state)
    for name in _HOOKS:
        hooks = state.get(name)
        if not hooks:
            continue
        mine = {key for key, hook in hooks.items() if hook_of(hook) is not None}
        if mine:
            ours |= mine
            plain[name] = type(hooks)((key, h) for key, h in hooks.items() if key not in mine)
            if name == "_backward_hooks" and not plain[name]:
                plain["_is_full_backward_hook"] = None
    for name in _FLAGS if ours else ():
        flags = state.get(name)
        if flags:
            plain[name] = type(flags)((key, v) for key, v in flags.items() if key not in ours)
    return plain
