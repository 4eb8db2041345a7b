"""What reads a trace, each as a function of a path; one runs in a process of its own.

    python -m benchmarks.cost.reading_tools TOOL TRACE

prints one line of JSON: seconds, processor seconds, peak memory above that of the idle interpreter
with the same imports, and what the tool found.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmarks.common  # noqa: F401 - finds backspot

__all__ = ["NEEDS", "TOOLS"]

Found = dict[str, Any]
Reader = Callable[[Path], Callable[[], Found]]
"""Imports what the tool needs and gives what is to be timed."""

NEEDS = {"json": 6.0, "orjson": 9.0, "hta": 9.0}
"""Memory that a tool needs, in sizes of the plain file; the others need less than one."""


def backspot(path: Path, jobs: int | None = None) -> Callable[[], Found]:
    """From the file to the ranked list."""
    import rich.table  # noqa: F401 - what printing imports

    import backspot as library
    import backspot.pipeline
    import backspot.render.text

    def run() -> Found:
        begin = read = time.perf_counter()

        def progress(done: int, total: int | None) -> None:
            nonlocal read
            read = time.perf_counter()  # the last time is when all of it is in columns

        report = library.locate(path, jobs=jobs, progress=progress)
        text = str(report)
        return {
            "read_seconds": read - begin,
            "steps": report.steps,
            "wall_ns": report.wall_ns,
            "rows": {r.path: [r.wall_ns, r.gpu_ns, r.cpu_ns] for r in report.modules},
            "lines": text.count("\n"),
        }

    return run


def hta(path: Path) -> Callable[[], Found]:
    """HolisticTraceAnalysis as its documentation begins: the traces loaded into data frames."""
    import logging

    from hta.trace_analysis import TraceAnalysis

    logging.disable(logging.INFO)

    def run() -> Found:
        analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent))
        return {"events": len(analysis.t.get_trace(0))}

    return run


def plain_json(path: Path) -> Callable[[], Found]:
    """Python's own decoder and nothing after it: a floor."""

    def run() -> Found:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        return {"events": len(json.loads(text)["traceEvents"])}

    return run


def fast_json(path: Path) -> Callable[[], Found]:
    """The fastest general decoder and nothing after it: a floor."""
    import orjson

    def run() -> Found:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        return {"events": len(orjson.loads(text)["traceEvents"])}

    return run


def tracelens(path: Path) -> Callable[[], Found]:
    """TraceLens: the trace as its tree of calls."""
    from TraceLens import TreePerfAnalyzer

    def run() -> Found:
        analyzer = TreePerfAnalyzer.from_file(str(path))
        return {"events": len(analyzer.tree.events)}

    return run


TOOLS: dict[str, Reader] = {
    "backspot": backspot,
    "backspot --jobs 1": lambda path: backspot(path, 1),
    "backspot --jobs 2": lambda path: backspot(path, 2),
    "hta": hta,
    "tracelens": tracelens,
    "json": plain_json,
    "orjson": fast_json,
}


def peak() -> int:
    """The most memory that this process has held, in KiB.

    Not ``ru_maxrss`` where the system tells better: that of a child begins with its parent's.
    """
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def idle_worker() -> int:
    """What one of Backspot's other processes holds before it reads, in KiB."""
    code = "import resource, sys; sys.path[:] = sys.argv[1:]; import backspot.trace.parallel; "
    code += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    command = [sys.executable, "-I", "-S", "-c", code, *sys.path]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("trace", type=Path)
    options = parser.parse_args()
    try:
        run = TOOLS[options.tool](options.trace)
    except ImportError as error:
        print(json.dumps({"skipped": f"not installed ({error})"}))
        return
    worker_idle = idle_worker() if options.tool.startswith("backspot") else 0
    started: list[str] = []
    sys.addaudithook(
        lambda event, _: started.append(event) if event == "subprocess.Popen" else None
    )
    idle, spent = peak(), time.process_time()
    begin = time.perf_counter()
    try:
        found = run()
    except MemoryError:
        print(json.dumps({"skipped": "out of memory"}))
        return
    seconds = time.perf_counter() - begin
    own, others = peak() - idle, resource.getrusage(resource.RUSAGE_CHILDREN)
    workers = len(started)
    worker = others.ru_maxrss - worker_idle if workers else 0
    result = {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - spent + others.ru_utime + others.ru_stime,
        "processes": 1 + workers,
        # Of all its processes together, as if each held its most at once.
        "peak_kib": own + workers * worker,
        **found,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
