"""What parts add to verbs: options of ``backspot run``, ``--sort`` and ``--by`` of ``show``.

A part has a file here with its ``OPTIONS``, ``ORDERS`` or ``ROWS``, and an entry in these lists.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backspot.commands import _host, _limits, _memory, _plan, _trials

ORDERS: Mapping[str, str] = {**_memory.ORDERS, **_limits.ORDERS}
"""What parts rank rows by, in words."""
ROWS: Mapping[str, tuple[str, Callable[..., str]]] = {**_host.ROWS}
"""What parts have rows of in place of modules: in words, and what prints so many of them."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **_memory.OPTIONS,
    **_trials.OPTIONS,
    **_plan.OPTIONS,
}
"""What argparse needs of each option; ``acts_of`` takes its value by its name."""
ALONE: Mapping[str, Any] = {**_plan.ALONE}
"""What an option means that is given without ``=`` and a value."""

CHECKS: Sequence[Callable[[argparse.Namespace], None]] = (
    _plan.check,
)  # fmt: skip
"""What sees, before the script runs, that what is asked of a part can be done."""


def add_options_of_parts(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    for name, how in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **how)


def with_values(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return words with a value for each option of Backspot's that may stand alone.

    What comes from the script on is the script's.
    """
    options, completed, place = parser._option_string_actions, list(words), 0
    while (
        place < len(completed)
        and completed[place][:1] == "-"
        and completed[place] not in ("-m", "--")
    ):
        word = completed[place]
        if (alone := ALONE.get(word.removeprefix("--"))) is not None:
            completed[place] = f"{word}={alone}"
        elif word in options and options[word].nargs != 0:
            place += 1
        place += 1
    return completed


def check_parts(args: argparse.Namespace) -> None:
    """Raise an error where what is asked of a part cannot be done, before the script runs."""
    for check in CHECKS:
        check(args)


def asked_of_parts(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was asked of parts."""
    return {name: getattr(args, name) for name in OPTIONS}
