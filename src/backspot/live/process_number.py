"""Which process this is, without a question to the system.

That question takes as long as much of what Backspot does at the end of a step.
"""

from __future__ import annotations

import os

_number = os.getpid()


def process_number() -> int:
    """Return the number of this process, as ``os.getpid`` does.

    A copy of a process knows its own number once ``os.fork`` has returned there.
    """
    return _number


def _note() -> None:
    global _number
    _number = os.getpid()


if hasattr(os, "register_at_fork"):  # where it is not, processes cannot be copied
    os.register_at_fork(after_in_child=_note)
