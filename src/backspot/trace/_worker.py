"""A process that decodes one stretch of a trace, which it has as standard input.

It writes what it found to standard output, for ``splitting`` to read.
"""

from __future__ import annotations

import pickle
import sys

from backspot.trace.chrome import ChromeDecoder
from backspot.trace.splitting import stretch

__all__ = ["main"]


def main(begin: int, end: int, last: bool) -> None:
    """Decode the bytes from ``begin`` to ``end``; ``last`` says that the trace ends with them."""
    with open(0, "rb", buffering=0) as file:
        decoder = ChromeDecoder(stretch(file, begin, end), "")
        sound = decoder.run_part(first=False, last=last)
    decoder.columns.compact()
    found = (decoder.columns, decoder.seen, decoder.impossible) if sound else None
    pickle.dump(found, sys.stdout.buffer, protocol=5)
