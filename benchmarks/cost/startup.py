"""How long does a command take before it does anything?

    taskset -c 0,1 python -m benchmarks startup

Each command runs in a process of its own, and the interpreter's start is included: ten warm runs,
then one without Python's compiled files.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import TEST_DATA, Figures, Run
from benchmarks.traces.copies import Copies

_SRC = Path(__file__).parents[2] / "src"
_TRACE = TEST_DATA / "h200" / "launch_bound.trace.json.gz"


def answer(run: Run) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        size = Copies(_TRACE).write(trace, 1)
        commands: dict[str, tuple[list[str], float | None]] = {
            "python -c pass": (["-c", "pass"], None),
            "import backspot": (["-c", "import backspot"], 0.1),
            "import backspot; backspot.locate": (["-c", "import backspot as b; b.locate"], None),
            "backspot --help": (["-m", "backspot", "--help"], None),
            f"backspot show ({size / 1e6:.1f} MB trace)": (
                ["-m", "backspot", "show", str(trace)], 0.5,
            ),
        }  # fmt: skip
        cases = {}
        for name in run.choose(dict.fromkeys(commands, ""), ("import backspot",)):
            arguments, limit = commands[name]
            warm = [_seconds(arguments) for _ in range(2 if run.small else 11)][1:]
            cases[name] = {
                "median": statistics.median(warm),
                "least": min(warm),
                "most": max(warm),
                "not compiled": _seconds(arguments, cache=Path(folder) / f"cache{len(cases)}"),
                "at most": limit,
            }
    return {"cases": cases}


def _seconds(arguments: Sequence[str], cache: Path | None = None) -> float:
    """One run; with ``cache`` Python finds none of its compiled files."""
    command = [sys.executable, *arguments]
    begin = time.perf_counter()
    subprocess.run(command, check=True, env=environment(cache), stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def environment(cache: Path | None = None) -> dict[str, str]:
    """The environment of a process that finds Backspot."""
    path = os.pathsep.join(p for p in (str(_SRC), os.environ.get("PYTHONPATH", "")) if p)
    more: dict[str, Any] = {"PYTHONPYCACHEPREFIX": str(cache)} if cache else {}
    return {**os.environ, "PYTHONPATH": path, **more}
