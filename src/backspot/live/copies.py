"""Copies of an instrumented model are plain models.

PyTorch keeps a module's hooks in ordered dictionaries. While a model is instrumented, ``copy`` and
``pickle`` reduce these dictionaries with a function that leaves Backspot's hooks out. So the class
of a module does not matter: lazy, parametrized and sharded modules change theirs.
"""

from __future__ import annotations

import copyreg
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from backspot.live.hooks import hook_of
from backspot.live.owner import Scope
from backspot.live.torch_internals.modules import KEY, without_backward_flag

_classes: dict[Scope, tuple[type, ...]] = {}  # the classes that an instrumentation needs reduced
_installed: dict[type, Callable[[Any], Any]] = {}


def keep_copies_plain(scope: Scope, flagged: Iterable[type]) -> None:
    """Leave Backspot's hooks out of copies until ``end_plain_copies(scope)``."""
    _classes[scope] = (OrderedDict, *flagged)
    _install()


def end_plain_copies(scope: Scope) -> None:
    """Undo ``keep_copies_plain``; a second call does nothing."""
    _classes.pop(scope, None)
    _install()


def _install() -> None:
    """Make ``copyreg`` agree with ``_classes``; after an interrupt the next call completes it."""
    wanted = {cls for classes in _classes.values() for cls in classes}
    for cls in wanted:
        reducer = _installed.setdefault(
            cls, _reduce_hooks if cls is OrderedDict else _reduce_module
        )
        copyreg.dispatch_table.setdefault(cls, reducer)  # a class with its own reducer keeps it
    for cls in _installed.keys() - wanted:
        if copyreg.dispatch_table.get(cls) is _installed[cls]:
            del copyreg.dispatch_table[cls]
        del _installed[cls]


def _reduce_hooks(dictionary: OrderedDict[Any, Any]) -> str | tuple[Any, ...]:
    ours = dictionary.get(KEY)  # a hook of Backspot, or the flag of one
    if ours is not True and hook_of(ours) is None:
        return dictionary.__reduce_ex__(4)
    plain = OrderedDict((key, value) for key, value in dictionary.items() if key != KEY)
    vars(plain).update(vars(dictionary))
    return plain.__reduce_ex__(4)


def _reduce_module(module: torch.nn.Module) -> str | tuple[Any, ...]:
    reduced: str | tuple[Any, ...] = module.__reduce_ex__(4)
    if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
        return (*reduced[:2], without_backward_flag(reduced[2]), *reduced[3:])
    return reduced
