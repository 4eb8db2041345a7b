"""The option of the plan."""

from __future__ import annotations

import argparse
from pathlib import Path

from backspot.checks import read_seconds
from backspot.errors import UsageError

PLAN_SECONDS = 60
"""As ``results.plan`` has it: to import a result takes longer than all of the help."""


def _seconds(word: str) -> int:
    try:
        return read_seconds(word)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check(args: argparse.Namespace) -> None:
    """See that an earlier report has a plan, before the script runs.

    Raises:
        BackspotError: If it has none, or cannot be read.
    """
    if args.plan_from is None:
        return
    from backspot.results.report import Report  # takes longer than all of the help

    if Report.load(args.plan_from).plan is None:
        raise UsageError(f"--plan-from: {args.plan_from} has no plan: record it with --plan")


def _absolute(word: str) -> str:
    return str(Path(word).absolute())  # a process that the script starts may run elsewhere


OPTIONS = {
    "plan": {
        "type": _seconds,
        "metavar": "SECONDS",
        "help": "also try settings on a copy of the whole model, such as bf16 or torch.compile; "
        f"the training stands still meanwhile (--plan alone: {PLAN_SECONDS})",
    },
    "plan_from": {
        "type": _absolute,
        "metavar": "REPORT",
        "help": "make a plan without what did not help by that of an earlier report.json",
    },
}
ALONE = {"plan": PLAN_SECONDS}
"""What an option means that is given without ``=`` and a value."""
