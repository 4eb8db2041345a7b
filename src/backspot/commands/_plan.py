"""The option of the plan."""

from __future__ import annotations

import argparse

from backspot.commands._console import count

PLAN_SECONDS = 60
"""As ``results.plan`` has it: to import a result takes longer than all of the help."""


def _seconds(word: str) -> int:
    seconds = count(word)
    if seconds < 1:
        raise argparse.ArgumentTypeError(f"{word}: give a whole number of at least 1")
    return seconds


OPTIONS = {
    "plan": {
        "type": _seconds,
        "metavar": "SECONDS",
        "help": "also try settings on a copy of the whole model, such as bf16, channels_last and "
        "torch.compile, and say what the step takes with each; the training stands still "
        f"meanwhile, and goes on as if nothing had happened (--plan alone: {PLAN_SECONDS})",
    },
}
ALONE = {"plan": PLAN_SECONDS}
"""What an option means that is given without ``=`` and a value."""
