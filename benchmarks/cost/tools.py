"""The tools that ``read.py`` compares: seconds, memory, and what each found in a trace.

The peak memory is that above the idle interpreter with the same imports. "live profile" records a
profile of many events and reads it in place, by Backspot and by PyTorch's ``key_averages()``, which
keeps what it made of the events: only its first call is the cost of reading them. Backspot reads
them each time, and its first reading is counted too.
"""

from __future__ import annotations

import gzip
import importlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.workers import Job, Record, Stage

LIVE = "live profile"
Found = dict[str, Any]
Reader = Callable[[Path], Callable[[], Found]]
"""Imports what the tool needs, and returns what is timed."""

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


def decoder(module: str) -> Reader:
    """A decoder of JSON and nothing after it: a floor."""

    def reader(path: Path) -> Callable[[], Found]:
        loads = importlib.import_module(module).loads

        def run() -> Found:
            data = path.read_bytes()
            text = gzip.decompress(data) if path.suffix == ".gz" else data
            return {"events": len(loads(text)["traceEvents"])}

        return run

    return reader


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
    "json": decoder("json"),
    "orjson": decoder("orjson"),
}


def peak() -> int:
    """The most memory that this process has held, in KiB.

    ``ru_maxrss`` only where there is nothing better: a child's begins with its parent's.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def idle_worker() -> int:
    """What one of Backspot's other processes holds before it reads, in KiB."""
    code = "import resource, sys; sys.path[:] = sys.argv[1:]; import backspot.trace.parallel; "
    code += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    command = [sys.executable, "-I", "-S", "-c", code, *sys.path]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def examine(job: Job, _: Stage) -> Record:
    """Read ``job["trace"]`` by the tool ``job["name"]``, or a live profile of its size."""
    if job["name"] == LIVE:
        return live(job["events"])
    run = TOOLS[job["name"]](Path(job["trace"]))
    worker_idle = idle_worker() if job["name"].startswith("backspot") else 0
    started: list[str] = []
    sys.addaudithook(
        lambda event, _: started.append(event) if event == "subprocess.Popen" else None
    )
    idle, spent = peak(), time.process_time()
    begin = time.perf_counter()
    found = run()
    seconds = time.perf_counter() - begin
    own, others = peak() - idle, resource.getrusage(resource.RUSAGE_CHILDREN)
    workers = len(started)
    worker = others.ru_maxrss - worker_idle if workers else 0
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - spent + others.ru_utime + others.ru_stime,
        "processes": 1 + workers,
        # Of all its processes together, as if each held its most at once.
        "peak_kib": own + workers * worker,
        **found,
    }


def live(events: int) -> Record:
    """Profile about so many events, and read them in place."""
    import torch
    from torch import nn

    import backspot
    import backspot.pipeline
    from benchmarks.common import profiling
    from benchmarks.models import training_step

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(40))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = training_step(model, lambda: model(torch.randn(4, 8)).square().mean(), optimizer)

    def record(steps: int) -> torch.profiler.profile:
        with backspot.instrument(model), profiling("cpu") as recorded:
            for _ in range(steps):
                step()
        return recorded

    record(1)
    few = len(record(4).profiler.kineto_results.events())
    recorded = record(max(1, round(4 * events / few)))
    begin = time.perf_counter()
    report = backspot.locate(recorded)
    located = time.perf_counter() - begin
    begin = time.perf_counter()
    recorded.key_averages()
    averaged = time.perf_counter() - begin
    return {
        "events": len(recorded.profiler.kineto_results.events()),
        "locate": located,
        "key_averages": averaged,
        "modules": len(report.modules),
        "torch": torch.__version__,
    }
