"""The recordings in ``tests/data``, each read, attributed and judged once by a process.

Tests of all of them are of one group of xdist, so that this is once in all.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from backspot import Report, pipeline
from backspot.analysis.recording import Recording

DATA = Path(__file__).parents[1] / "data"
IN_ONE_WORKER = pytest.mark.xdist_group("h200")


@cache
def recording_of(path: Path) -> Recording:
    """Return a recording, for reading only: all tests have the same one."""
    return Recording.read(path)


@cache
def report_of(path: Path) -> Report:
    """Return what ``locate`` returns for it."""
    return pipeline.report_of(recording_of(path))
