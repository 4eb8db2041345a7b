"""The parts of rich in use, all imported here, where a script's random numbers stay as they are.

The first import of rich draws from Python's global random numbers.
"""

import random

_state = random.getstate()
try:
    from rich.cells import cell_len
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress as Bar,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.table import Table
    from rich.text import Text
finally:
    random.setstate(_state)

__all__ = [
    "Bar",
    "BarColumn",
    "Console",
    "DownloadColumn",
    "Table",
    "Text",
    "TextColumn",
    "TimeElapsedColumn",
    "cell_len",
]
