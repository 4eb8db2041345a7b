"""What parts add to verbs: options of ``backspot run``, and orders for ``--sort`` of ``show``.

A part has a file here with its ``OPTIONS`` or ``ORDERS``, and an entry in these lists.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from backspot.commands import _limits, _memory, _trials

ORDERS: Mapping[str, str] = {**_memory.ORDERS, **_limits.ORDERS}
"""What parts rank rows by, in words."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {**_memory.OPTIONS, **_trials.OPTIONS}
"""What argparse needs of each option; ``acts_for`` takes its value by its name."""


def add_options_of_parts(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    for name, how in OPTIONS.items():
        parser.add_argument(f"--{name}", **how)


def asked_of_parts(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was asked of parts."""
    return {name: getattr(args, name) for name in OPTIONS}
