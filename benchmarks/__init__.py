"""Measurements of Backspot: is it right, what does it cost, what does it survive?

Each script answers one question; ``benchmarks/README.md`` lists the questions. All scripts take
``--small`` (seconds on a CPU), ``--list`` where there are cases, and ``-o`` for the results, which
a full run writes to ``benchmarks/results``.

``accuracy``, ``causes``, ``cost`` and ``robustness`` hold the scripts, ``fixtures`` records the
traces that the tests read, and ``traces`` reads, trims and copies exported traces. All rooms share
four files:

- ``common.py``: the command line, tables, results with hardware and versions, timing, profiling.
- ``workers.py``: the one manager of worker processes.
- ``load.py``: other processes that keep the machine busy.
- ``models.py``: the models, each at the size of the run.

Importing this package sets the environment that PyTorch reads at its import, and finds
``backspot`` in this repository.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_SRC = Path(__file__).parents[1] / "src"

# Deterministic cuBLAS needs this before torch is imported; otherwise it does nothing.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if str(_SRC) not in sys.path:
    sys.path.insert(0, str(_SRC))
