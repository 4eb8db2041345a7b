"""The option of the plan."""

from __future__ import annotations

import argparse
from pathlib import Path

from backspot.commands._console import count
from backspot.errors import BackspotError

PLAN_SECONDS = 60
"""As ``results.plan`` has it: to import a result takes longer than all of the help."""


def _seconds(word: str) -> int:
    seconds = count(word)
    if seconds < 1:
        raise argparse.ArgumentTypeError(f"{word}: give a whole number of at least 1")
    return seconds


def _earlier(word: str) -> str:
    from backspot.results.report import Report  # takes longer than all of the help

    try:
        plan = Report.load(word).plan
    except BackspotError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if plan is None:
        raise argparse.ArgumentTypeError(f"{word} has no plan: record it with --plan")
    return str(Path(word).absolute())  # a process that the script starts may run elsewhere


OPTIONS = {
    "plan": {
        "type": _seconds,
        "metavar": "SECONDS",
        "help": "also try settings on a copy of the whole model, such as bf16, channels_last and "
        "torch.compile, and say what the step takes with each; the training stands still "
        f"meanwhile, and goes on as if nothing had happened (--plan alone: {PLAN_SECONDS})",
    },
    "plan_from": {
        "type": _earlier,
        "metavar": "REPORT",
        "help": "make a plan, and leave out what did not help by that of an earlier report.json, "
        "where nothing below it has changed",
    },
}
ALONE = {"plan": PLAN_SECONDS}
"""What an option means that is given without ``=`` and a value."""
