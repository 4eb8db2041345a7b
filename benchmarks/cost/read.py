"""How fast, and in how much memory, is a trace read? Backspot beside other tools, in one run.

    taskset -c 0,1 python -m benchmarks read

Traces of 30, 300 and 1,200 MB, plain and compressed, are made by copying a recorded step of an H200
(``copies.py``); the report of the copies must be that of one, times their number. Each tool runs in
a process of its own, in turns. The peak memory is that above the idle interpreter with the same
imports. What is left out is named with the reason.

Two readings at once that have nothing to do with each other show what two processes can gain on the
machine. Traces that others published are read beside the copies: those of ``--foreign``, by default
the trimmed ones among the test data. For them, CPU seconds are compared: of ``bare``, gzip and one
decoding into structs, which no reader can do without; of reading, up to the columns; of the whole
answer; and of HolisticTraceAnalysis, which loads the same file.

"live profile" records a profile of many events and reads it in place, by Backspot and by
PyTorch's ``key_averages()``, which keeps what it made of the events: only its first call is the
cost of reading them. Backspot reads them each time, and its first reading is counted too.

Run it in pieces with --sizes, --tools and --repeat; traces are kept in --folder if given.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import TEST_DATA, Figures, Run, UsageError, write_results
from benchmarks.measuring import Budget, available_bytes, spread
from benchmarks.traces.copies import Copies
from benchmarks.workers import Job, Record, Stage, do_alone, serve, worker_command

MB = 1_000_000
ONE, TWO = "backspot --jobs 1", "backspot --jobs 2"
APART = "two readings at once"
"""Two processes that have nothing to do with each other: the most that dividing one can gain."""
RECORDED = TEST_DATA / "h200" / "vit_patch_drop.trace.json.gz"
FOREIGN = TEST_DATA / "foreign"
_CHILDREN = resource.RUSAGE_CHILDREN
_GIVEN_UP = 150.0
"""Seconds after which a tool's one reading is given up."""

Cell = dict[str, Any]


# The tools ---------------------------------------------------------------------------------------

LIVE = "live profile"
Found = dict[str, Any]
Reader = Callable[[Path], Callable[[], Found]]
"""Imports what the tool needs, and returns what is timed."""

NEEDS = {"bare": 3.0, "json": 6.0, "orjson": 9.0, "hta": 9.0}
"""Memory that a tool needs, in sizes of the plain file; the others need less than one."""


def backspot(path: Path, jobs: int | None = None) -> Callable[[], Found]:
    """From the file to the ranked list."""
    import rich.table  # noqa: F401 - what printing imports

    import backspot as library
    from backspot.testing import all_rules, render_text  # noqa: F401 - imported, as by a command

    all_rules()  # imports them
    locate = library.locate

    def run() -> Found:
        begin = read = time.perf_counter()
        spent = used = time.process_time()

        def progress(done: int, total: int | None) -> None:
            nonlocal read, used
            # The last times are when all of it is in columns.
            read, used = time.perf_counter(), time.process_time()

        report = locate(path, jobs=jobs, progress=progress)
        text = str(report)
        return {
            "read_seconds": read - begin,
            "read_cpu_seconds": used - spent,
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


class _Arguments(msgspec.Struct, gc=False):
    sequence: int | None = msgspec.field(name="Sequence number", default=None)
    thread: int | None = msgspec.field(name="Fwd thread id", default=None)
    correlation: int | None = None
    device: int | None = None


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | None = None
    dur: float | None = None
    id: int | str | None = None
    args: _Arguments | None = None


class _Document(msgspec.Struct, gc=False):
    events: list[_Event] = msgspec.field(name="traceEvents")


def bare(path: Path) -> Callable[[], Found]:
    """Unpack the file, and decode each event once into a struct of what Backspot reads."""
    decode = msgspec.json.Decoder(_Document).decode

    def run() -> Found:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        return {"events": len(decode(text).events)}

    return run


TOOLS: dict[str, Reader] = {
    "backspot": backspot,
    "backspot --jobs 1": lambda path: backspot(path, 1),
    "backspot --jobs 2": lambda path: backspot(path, 2),
    "bare": bare,
    "hta": hta,
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
    idle, spent, before = peak(), time.process_time(), resource.getrusage(_CHILDREN)
    begin = time.perf_counter()
    found = run()
    seconds = time.perf_counter() - begin
    own, others = peak() - idle, resource.getrusage(_CHILDREN)
    used = others.ru_utime + others.ru_stime - before.ru_utime - before.ru_stime
    workers = len(started)
    worker = others.ru_maxrss - worker_idle if workers else 0
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - spent + used,
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
    from benchmarks.measuring import profiling
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
    locate = backspot.locate  # imported before the clock runs
    begin = time.perf_counter()
    report = locate(recorded)
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


# Readings ----------------------------------------------------------------------------------------


def _make(folder: Path, sizes: list[int], packed: list[int]) -> list[Cell]:
    """Write the traces that are not there yet."""
    copies = Copies(RECORDED)
    folder.mkdir(parents=True, exist_ok=True)
    traces = []
    for size in sorted({*sizes, *packed}):
        count = copies.count(size * MB)
        for suffix in [".json"] * (size in sizes) + [".json.gz"] * (size in packed):
            path = folder / f"{size}mb-{count}{suffix}"
            if not path.exists():
                part = path.with_name(f"part-{path.name}")
                copies.write(part, count)
                part.replace(path)
            trace = {"path": path, "megabytes": size, "gzip": suffix == ".json.gz"}
            trace |= {"copies": count, "events": count * copies.events}
            traces.append({**trace, "plain_bytes": copies.written(count)})
            print(f"{path.name}: {trace['events']:,} events", flush=True)
    return traces


def _measured(
    trace: Cell, tools: list[str], run: Run, budget: Budget, expected: Cell
) -> list[Cell]:
    """Read one trace with every tool, in turns."""
    found: dict[str, list[Cell]] = {tool: [] for tool in tools if tool != LIVE}
    left_out = {tool: reason for tool in found if (reason := _reason_to_skip(tool, trace))}
    # Once without a clock: the file is then in the system's memory for all of them.
    with trace["path"].open("rb", buffering=0) as file:
        while file.read(MB):
            pass
    for number in range(run.repeat):
        for tool in list(found) if number % 2 == 0 else list(reversed(found)):
            times = [reading["seconds"] for reading in found[tool]]
            longest = max(times, default=0.0)
            if tool in left_out or (times and sum(times) + longest > run.patience):
                continue
            if budget.left <= 2 * longest:
                if not times:
                    left_out[tool] = "no time left"
                continue
            reading = _reading(tool, trace["path"], run, min(_GIVEN_UP, budget.left + 10))
            if "skipped" in reading:
                left_out[tool] = reading["skipped"]
                continue
            rows = reading.pop("rows", None)
            if rows is not None and trace["copies"]:
                # Times are of a typical step: copies leave it as it is.
                reading["exact"] = rows == expected.get("rows")
            found[tool].append(reading)
            rate = trace["plain_bytes"] / MB / reading["seconds"]
            print(f"  {trace['path'].name} {tool}: {reading['seconds']:.2f} s, {rate:.0f} MB/s")
    cells = []
    for tool, readings in found.items():
        cell = {"tool": tool, "trace": trace["path"].name}
        cell |= {"megabytes": trace["megabytes"], "gzip": trace["gzip"]}
        cell["skipped"] = "" if readings else left_out.get(tool, "")
        cells.append(cell | (_summary(readings, trace) if readings else {}))
    return cells


def _lines(cells: list[Cell], foreign: list[Cell]) -> list[Cell]:
    """What is kept: a line for each tool and size, and one for each trace of others."""
    told = ("seconds", "mb_per_second", "peak_of_plain", "exact", "skipped")
    sizes = [
        {
            "reading": f"{cell['tool']}, {cell['megabytes']} MB{', gzip' * bool(cell['gzip'])}",
            **{key: cell.get(key) for key in told},
            "seconds": [*cell.get("seconds", {}).values()],
        }
        for cell in cells
        if "megabytes" in cell
    ]
    return [*sizes, *({"reading": one["trace"], **one, "skipped": None} for one in foreign)]


def _summary(readings: list[Cell], trace: Cell) -> Cell:
    peak = max(reading["peak_kib"] for reading in readings) * 1024
    seconds = spread([reading["seconds"] for reading in readings])
    timed = ("read_seconds", "read_cpu_seconds", "cpu_seconds")
    both = [key for key in timed if key in readings[0]]
    return {
        "seconds": seconds,
        "least_seconds": min(reading["seconds"] for reading in readings),
        **{key: statistics.median(reading[key] for reading in readings) for key in both},
        "mb_per_second": trace["plain_bytes"] / MB / seconds["median"],
        "peak_bytes": peak,
        "peak_of_plain": peak / trace["plain_bytes"],
        "processes": readings[0]["processes"],
        **({"exact": all(r["exact"] for r in readings)} if "exact" in readings[0] else {}),
    }


def _reason_to_skip(tool: str, trace: Cell) -> str:
    needed, available = NEEDS.get(tool, 1.0) * trace["plain_bytes"], available_bytes()
    if needed > 0.9 * available:
        return f"takes about {needed / 1e9:.0f} GB of memory; {available / 1e9:.0f} GB are free"
    if tool in ("hta", "json") and trace["megabytes"] > 300:
        return "not tried beyond 300 MB: a minute, or minutes"
    if tool in (TWO, APART) and trace["gzip"]:
        return "one process reads what is compressed"
    if tool == APART and trace["megabytes"] < 300:
        return "one process reads it by default"
    return ""


def _reading(tool: str, path: Path, run: Run, limit: float = _GIVEN_UP) -> Cell:
    """One tool reads one trace in a process of its own, or in two at once."""
    if tool != APART:
        return _answered({"name": tool, "trace": str(path)}, run, limit)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: _reading(ONE, path, run, limit), range(2)))
    for reading in both:
        if "skipped" in reading:
            return reading
    slower = max(both, key=lambda reading: float(reading["seconds"]))
    return {**slower, "peak_kib": sum(reading["peak_kib"] for reading in both)}


def _answered(job: Cell, run: Run, limit: float) -> Cell:
    found = do_alone(job, worker_command(run), limit)
    reasons = {"timeout": f"not done within {limit:.0f} s", "memory": "out of memory"}
    if found["end"] != "done":
        why = reasons.get(found["end"]) or found["error"]
        if path := job.get("trace"):
            why = why.replace(path, Path(path).name)  # no folder of this machine
        return {"skipped": why}
    return {key: value for key, value in found.items() if key != "end"}


def _live(run: Run) -> Cell:
    """A live profile, read in place and by PyTorch itself."""
    readings: list[Cell] = []
    budget = Budget(run.patience)
    while len(readings) < run.repeat and budget.left:
        reading = _answered({"name": LIVE, "events": 180_000}, run, 240)
        if "skipped" in reading:
            break
        readings.append(reading)
        print(f"  {LIVE}: {reading}", flush=True)
    if not readings:
        return {"tool": LIVE, **reading}
    found = {key: readings[0][key] for key in ("events", "torch")}
    for key in ("locate", "key_averages"):
        found[f"{key}_seconds"] = spread([one[key] for one in readings])
    return {"tool": LIVE, "skipped": "", **found}


def _given(path: Path) -> Cell:
    """A trace that is not made of copies."""
    packed = path.suffix == ".gz"
    with gzip.open(path) if packed else path.open("rb") as file:
        size = sum(map(len, iter(lambda: file.read(MB), b"")))
    return {
        "path": path,
        "megabytes": round(size / MB, 1),
        "gzip": packed,
        "copies": 0,
        "plain_bytes": size,
    }


def _ratios(cells: list[Cell]) -> Cell:
    """What the tools took for one trace of others, in CPU seconds, and the ratios."""
    of = {cell["tool"]: cell for cell in cells}
    spent = {tool: cell.get("cpu_seconds") for tool, cell in of.items()}
    read, whole = of[ONE].get("read_cpu_seconds"), spent[ONE]

    def ratio(some: float | None, other: float | None) -> float | None:
        return round(some / other, 2) if some and other else None

    return {
        "trace": cells[0]["trace"],
        "megabytes": cells[0]["megabytes"],
        "bare": spent["bare"],
        "reading": read,
        "answer": whole,
        "hta": spent["hta"],
        "reading / bare": ratio(read, spent["bare"]),
        "after / reading": ratio(whole - read if whole and read else None, read),
        "hta / answer": ratio(spent["hta"], whole),
        "skipped": {tool: cell["skipped"] for tool, cell in of.items() if cell["skipped"]},
    }


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sizes", help="plain sizes in MB (default: 30,300,1200; with --small 1)")
    add("--gzip", help="sizes that are read compressed too (default: 30,300)")
    add("--trace", type=Path, help="read this trace instead")
    add("--foreign", type=Path, default=FOREIGN, help="a folder of traces that others published")
    add("--tools", help=f"comma-separated (default: all of {', '.join([*TOOLS, APART, LIVE])})")
    add("--repeat", type=int, default=5, help="readings of each at most")
    add("--patience", type=float, default=25.0, help="seconds for those of each")
    add("--folder", type=Path, help="where the traces are, or are made and kept")


def _numbers(text: str | None, default: list[int]) -> list[int]:
    return default if text is None else [int(number) for number in text.split(",") if number]


def answer(run: Run) -> Figures:
    if run.worker:
        serve(examine)
        raise SystemExit(0)
    known = [*TOOLS, APART, LIVE]
    sizes, packed, tools = [30, 300, 1200], [30, 300], known
    if run.small:
        sizes, packed, tools, run.repeat = [1], [], [ONE, "json"], 1
    tools = [tool.strip() for tool in run.tools.split(",")] if run.tools else tools
    unknown = sorted(set(tools) - set(known))
    if unknown:
        raise UsageError(f"there is no tool {', '.join(unknown)}; there are {', '.join(known)}")
    budget = Budget(run.seconds)
    cells: list[Cell] = [_live(run)] if LIVE in tools else []
    with nullcontext(run.folder) if run.folder else tempfile.TemporaryDirectory() as folder:
        traces = _make(Path(folder), _numbers(run.sizes, sizes), _numbers(run.gzip, packed))
        if run.trace:
            traces = [_given(run.trace)]
        expected = _reading(ONE, RECORDED, run)
        for trace in traces:
            cells += _measured(trace, tools, run, budget, expected)
            write_results(run, {"cells": cells})
    foreign: list[Cell] = []
    for path in [] if run.small or run.trace else sorted(run.foreign.glob("*.json*")):
        foreign.append(_ratios(_measured(_given(path), ["bare", ONE, "hta"], run, budget, {})))
        print(f"  {foreign[-1]}", flush=True)
    keys = ("megabytes", "gzip", "tool", "skipped", "mb_per_second", "peak_of_plain", "exact")
    rows = [
        {**{key: cell.get(key) for key in keys}, "seconds": [*cell.get("seconds", {}).values()]}
        for cell in cells
    ]
    told = [{**trace, "path": trace["path"].name} for trace in traces]
    wrong = not all(cell.get("exact", True) for cell in cells)
    summary = {
        f"{cell['tool']}, {cell['megabytes']} MB{', gzip' * cell['gzip']}": {
            "seconds": cell["seconds"]["median"],
            **{key: cell[key] for key in ("mb_per_second", "peak_of_plain")},
        }
        for cell in cells
        if cell.get("seconds") and "mb_per_second" in cell
    }
    return {
        "lines": _lines(cells, foreign),
        "recorded": RECORDED.name,
        "summary": summary,
        "traces": told,
        "cells": cells,
        "rows": rows,
        "foreign": foreign,
        "wrong": wrong,
    }
