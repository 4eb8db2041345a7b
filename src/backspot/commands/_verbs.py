"""The verbs, and what one does for another: a part has its results in a verb of its own.

A verb may have functions for others: ``read_other(source)`` returns a result that is no report of
one trace, or ``None``; ``show_other(source, args)`` prints such a result for ``backspot show``, or
returns false; ``mention_others(trace, shown)`` notes what else lies beside a trace; and
``other_rules()`` returns rules that look at something else than one trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backspot.presented import Presented

VERBS = ("run", "demo", "show", "diff", "ranks", "explain", "skill")
"""The verbs, in the order of the help; each is a module of this package."""


def verb(name: str) -> ModuleType:
    """Import the module of a verb."""
    return import_module(f"backspot.commands.{name}")


def read_other(source: str) -> Presented | None:
    """Return what a verb reads that is no report of one trace; ``None`` if it is one."""
    return next(filter(None, (read(source) for read in _each("read_other"))), None)


def show_other(source: str, args: argparse.Namespace) -> bool:
    """Print what a verb reads that is no report of one trace; return whether one did."""
    return any(show(source, args) for show in _each("show_other"))


def mention_others(trace: str, shown: Collection[str]) -> None:
    """Note on standard error what else lies beside a trace, beside those that are shown."""
    for say in _each("mention_others"):
        say(trace, shown)


def other_rules() -> Iterator[Any]:
    """Yield the rules that look at something else than one trace."""
    for rules in _each("other_rules"):
        yield from rules()


def _each(function: str) -> Iterator[Any]:
    functions = (getattr(verb(name), function, None) for name in VERBS)
    return (function for function in functions if function is not None)
