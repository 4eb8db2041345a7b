"""Measurements of Backspot: is it right, what does it cost, what does it survive?

``python -m benchmarks`` lists the questions, which are in ``questions.py``; ``python -m benchmarks
NAME`` answers one, and ``all`` those that this machine can (``evidence.py``). All rooms share
``harness.py`` (command line, tables, results), ``measuring.py`` (timing, profiling), ``workers.py``
(worker processes), ``ranks.py`` (two processes that train together) and ``models.py`` (the models,
each at the size of the run).

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
