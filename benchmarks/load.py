"""Other processes that keep the cores of this machine busy while something is measured."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["add_busy", "busy", "usable_cores"]

# A process whose parent is gone ends itself, so that a run that is killed leaves none behind.
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def add_busy(parser: argparse.ArgumentParser, *, default: int | None = 0, says: str = "0") -> None:
    """Add the option ``--busy``.

    Args:
        parser: the script's parser.
        default: how many processes.
        says: the default in the words of the help.
    """
    parser.add_argument(
        "--busy",
        type=int,
        default=default,
        metavar="N",
        help=f"other processes that keep a core busy each meanwhile (default: {says})",
    )


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep ``count`` cores busy with a process each."""
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.wait()
