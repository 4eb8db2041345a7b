"""The options of ``backspot run`` that parts have, in the order of its help.

A part is a file here with its ``OPTIONS``, and an entry in this list.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from backspot.commands import _trials

OPTIONS: Mapping[str, Mapping[str, Any]] = {**_trials.OPTIONS}
"""What argparse needs of each option; ``acts_of`` takes its value by its name."""


def add_options_of_parts(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    for name, how in OPTIONS.items():
        parser.add_argument(f"--{name}", **how)


def asked_of_parts(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was asked of parts."""
    return {name: getattr(args, name) for name in OPTIONS}
