"""Copies of an instrumented model are plain models.

PyTorch keeps a module's hooks in ordered dictionaries. While a model is instrumented, ``copy`` and
``pickle`` reduce such a dictionary by a function of ours, which leaves our hooks out. It does not
matter then which class a module has: lazy, parametrized and sharded modules change theirs.
"""

from __future__ import annotations

import copyreg
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from backspot.live.hooks import KEY, hook_of

__all__ = ["end_plain_copies", "keep_copies_plain"]

_classes: dict[Any, tuple[type, ...]] = {}  # of each user: whose instances are reduced by us
_installed: dict[type, Callable[[Any], Any]] = {}


def keep_copies_plain(user: Any, flagged: Iterable[type]) -> None:
    """Leave our hooks out of copies until ``end_plain_copies(user)``.

    Args:
        user: on behalf of whom, anything hashable.
        flagged: classes of modules that have full backward hooks, and a flag that says so.
    """
    _classes[user] = (OrderedDict, *flagged)
    _install()


def end_plain_copies(user: Any) -> None:
    """Undo it for this user; a second call does nothing."""
    _classes.pop(user, None)
    _install()


def _install() -> None:
    """Make ``copyreg`` agree with ``_classes``. Whatever interrupts this, the next call repairs."""
    wanted = {cls for classes in _classes.values() for cls in classes}
    for cls in wanted:
        reducer = _installed.setdefault(
            cls, _reduce_hooks if cls is OrderedDict else _reduce_module
        )
        copyreg.dispatch_table.setdefault(cls, reducer)  # a class with one of its own keeps it
    for cls in _installed.keys() - wanted:
        if copyreg.dispatch_table.get(cls) is _installed[cls]:
            del copyreg.dispatch_table[cls]
        del _installed[cls]


def _reduce_hooks(dictionary: OrderedDict[Any, Any]) -> Any:
    if KEY not in dictionary or not _is_ours(dictionary[KEY]):
        return dictionary.__reduce_ex__(4)
    plain = OrderedDict((key, value) for key, value in dictionary.items() if key != KEY)
    vars(plain).update(vars(dictionary))
    return plain.__reduce_ex__(4)


def _is_ours(value: object) -> bool:
    """Whether it is a hook of ours, or a flag of one."""
    return value is True or hook_of(value) is not None


def _reduce_module(module: Any) -> Any:
    reduced = module.__reduce_ex__(4)
    if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
        state = dict(reduced[2])
        if KEY in state.get("_backward_hooks", ()) and len(state["_backward_hooks"]) == 1:
            state["_is_full_backward_hook"] = None
        return (*reduced[:2], state, *reduced[3:])
    return reduced
