"""How long does a command take before it does anything?

    taskset -c 0,1 python -m benchmarks startup

Each command runs in a process of its own, and the interpreter's start is included: ten warm runs,
then one without Python's compiled files, and one after the system was asked to drop all files from
memory, as after a reboot.
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

from benchmarks.common import (
    TEST_DATA,
    choose,
    command_line,
    parse,
    print_machine,
    print_table,
    script,
    write_results,
)
from benchmarks.traces.copies import Copies

_SRC = Path(__file__).parents[2] / "src"
_TRACE = TEST_DATA / "h200" / "launch_bound.trace.json.gz"


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, "startup", device=False)
    parser.add_argument("--repeat", type=int, help="warm runs (default: 10; with --small 1)")
    options = parse(parser, argv)
    repeat = options.repeat or (1 if options.small else 10)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        size = Copies(_TRACE).write(trace, 1)
        show = f"backspot show ({size / 1e6:.1f} MB trace)"
        commands: dict[str, tuple[list[str], float | None]] = {
            "python -c pass": (["-c", "pass"], None),
            "import backspot": (["-c", "import backspot"], 0.1),
            "import backspot; backspot.locate": (["-c", "import backspot as b; b.locate"], None),
            "backspot --help": (["-m", "backspot", "--help"], None),
            show: (["-m", "backspot", "show", str(trace)], 0.5),
        }
        rows, cases = [], {}
        for name in choose(options, dict.fromkeys(commands, ""), ("import backspot",)):
            arguments, limit = commands[name]
            warm = [seconds(arguments) for _ in range(repeat + 1)][1:]
            uncompiled = seconds(arguments, cache=Path(folder) / f"cache{len(rows)}")
            let_go = forget(files_of(arguments))
            cold = seconds(arguments)
            median = statistics.median(warm)
            kept = "" if limit is None else "yes" if median <= limit else "NO"
            cases[name] = {
                "warm": warm,
                "median": median,
                "limit": limit,
                "uncompiled": uncompiled,
                "cold": cold,
                "files_let_go": let_go,
            }
            rows.append([name, median, min(warm), max(warm), uncompiled, cold, limit, kept])
    print_machine()
    head = ["seconds", "median", "least", "most", "not compiled", "cold", "at most", "kept"]
    print_table(head, rows)
    write_results(options, {"cases": cases})
    return 0


def seconds(arguments: Sequence[str], cache: Path | None = None) -> float:
    """One run; with ``cache`` Python finds none of its compiled files."""
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], check=True, env=environment(cache), stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - begin


def environment(cache: Path | None = None) -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(_SRC), os.environ.get("PYTHONPATH", "")) if p)
    more: dict[str, Any] = {"PYTHONPYCACHEPREFIX": str(cache)} if cache else {}
    return {**os.environ, "PYTHONPATH": path, **more}


def files_of(arguments: Sequence[str]) -> list[Path]:
    """The files that a run opens: the modules that it imports, sources and compiled ones."""
    done = subprocess.run(
        [sys.executable, "-v", *arguments],
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        env=environment(),
    )
    found = set()
    for line in done.stderr.splitlines():
        for word in line.replace("'", " ").split():
            if word.startswith("/") and word.endswith((".py", ".pyc", ".so")):
                found.add(Path(word))
    found.add(Path(sys.executable).resolve())
    return sorted(path for path in found if path.is_file())


def forget(files: Sequence[Path]) -> int:
    """Ask the system to drop these files from memory; return how many it was asked about."""
    if not hasattr(os, "posix_fadvise"):
        return 0
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return len(files)
