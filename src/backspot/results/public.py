"""What makes a class public: users import it from ``backspot``, and it says so."""

from __future__ import annotations

from inspect import get_annotations
from typing import TypeVar

__all__ = ["public"]

_Class = TypeVar("_Class", bound=type)


def public(cls: _Class) -> _Class:
    """Name ``backspot`` as the home of a class, in reprs, tracebacks and pickles.

    Its annotations are evaluated first, because ``backspot`` does not have the names in them.
    """
    cls.__annotations__ = get_annotations(cls, locals={cls.__name__: cls}, eval_str=True)
    cls.__module__ = "backspot"
    return cls
