"""Checks of arguments: a wrong one is a ``UsageError`` that names it and says what to give."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from backspot.errors import UsageError
from backspot.formatting import quoted


def is_whole(value: object, least: int = 0) -> bool:
    """Whether a value is a whole number of at least ``least``; ``True`` is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object, least: float = 0, most: float = inf) -> bool:
    """Whether a value is a finite number between these, both included; ``True`` is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return least <= value <= most and value < inf


def check_whole(name: str, value: object, least: int, otherwise: str = "") -> None:
    """Refuse what is no whole number of at least ``least``.

    Args:
        otherwise: what else may be given, as the message has it: ``None``, ``None for all``. With
            this, the value ``None`` is accepted.
    """
    if not is_whole(value, least) and not (otherwise and value is None):
        rest = f", or {otherwise}" if otherwise else ""
        raise UsageError(f"{name}={quoted(value)}: give a whole number of at least {least}{rest}")


_DAY = 86_400


def read_seconds(word: str) -> int:
    """Return how many seconds an option says.

    Raises:
        UsageError: If it is no whole number of at least 1, or more than a day has.
    """
    if not word.isdecimal() or len(word) > len(str(_DAY)) or not 1 <= int(word) <= _DAY:
        raise UsageError(f"{quoted(word)}: give a whole number of seconds from 1 to {_DAY}")
    return int(word)


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither ``True`` nor ``False``."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}={quoted(value)}: give True or False")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse what is none of the known names."""
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"{name}={quoted(value)}: choose one of {', '.join(choices)}")
