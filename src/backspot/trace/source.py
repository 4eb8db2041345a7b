"""The types of everything that can be read as a trace."""

from __future__ import annotations

import os
from typing import IO, Any, Protocol, TypeAlias


class Profiler(Protocol):
    """A ``torch.profiler.profile``, by its one export, so that torch need not be imported."""

    def export_chrome_trace(self, path: str, /) -> Any:
        """Write the recorded trace to a file."""


Source: TypeAlias = str | os.PathLike[str] | IO[bytes] | Profiler
"""What ``locate`` reads.

The path of a trace (``.json`` or ``.json.gz``) or of a folder with traces, ``"-"`` for standard
input, an open binary file, or a ``torch.profiler.profile`` that has stopped.
"""
