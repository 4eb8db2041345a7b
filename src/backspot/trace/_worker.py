"""A process that decodes stretches of a trace, and takes the next one from standard input.

It writes what it found to standard output, for ``splitting`` to read.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from backspot.heap import keep_freed
from backspot.trace.stretches import decode_stretches

__all__ = ["main"]


def main(path: str, after: int, until: int) -> None:
    """Decode this stretch and whichever is next, while there are any; fail where one is broken."""
    keep_freed()
    for part in decode_stretches(Path(path), (after, until), turns=0):
        pickle.dump(part, sys.stdout.buffer, protocol=5)
    sys.stdout.flush()
    os._exit(0)  # to tidy up takes as long as to decode a megabyte, and somebody waits
