"""How fast, and in how much memory, is a trace read? Backspot beside other tools, in one run.

    taskset -c 0,1 python -m benchmarks read
    python -m benchmarks read --trace TRACE --tools "backspot --jobs 1,json"

Traces of 30, 300 and 1,200 MB, plain and compressed, are made by copying a recorded step of an H200
(``copies.py``); the report of the copies must be that of one, times their number. Each tool
(``tools.py``) runs in a process of its own, in turns. What is left out is named with the reason.

Two readings at once that have nothing to do with each other show what two processes can gain on the
machine. Run it in pieces with --sizes, --tools and --repeat; traces are kept in --folder if given.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.common import (
    TEST_DATA,
    Budget,
    UsageError,
    available_bytes,
    command_line,
    parse,
    print_machine,
    print_table,
    script,
    spread,
    write_results,
)
from benchmarks.cost.tools import LIVE, NEEDS, TOOLS, examine
from benchmarks.traces.copies import Copies
from benchmarks.workers import do_alone, serve, worker_command

MB = 1_000_000
ONE, TWO, MANY = "backspot --jobs 1", "backspot --jobs 2", "backspot"
APART = "two readings at once"
"""Two processes that have nothing to do with each other: the most that dividing one can gain."""
RECORDED = TEST_DATA / "h200" / "vit_patch_drop.trace.json.gz"
_GIVEN_UP = 150.0
"""Seconds after which a tool's one reading is given up."""

Cell = dict[str, Any]


# Promises ----------------------------------------------------------------------------------------


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _promises(cells: list[Cell]) -> list[tuple[str, float, str, bool]]:
    """Return each promise with its measurement and limit; what was not measured is left out."""

    def cell(tool: str, size: int, gzip: bool = False) -> Cell:
        keys = ("tool", "megabytes", "gzip")
        wanted = (tool, size, gzip)
        return next((c for c in cells if tuple(c.get(key) for key in keys) == wanted), {})

    def median(tool: str, size: int, gzip: bool = False) -> float | None:
        seconds = cell(tool, size, gzip).get("seconds")
        return seconds["median"] if seconds else None

    def reading(tool: str, size: int) -> float | None:
        return cell(tool, size).get("read_seconds")

    live = next((c for c in cells if c["tool"] == LIVE and not c["skipped"]), {})
    locate, theirs = (live.get(key) for key in ("locate_seconds", "key_averages_seconds"))
    exact = [c["exact"] for c in cells if "exact" in c]
    least: dict[str, tuple[float | None, float]] = {
        **{f"MB/s in one process, {n} MB": (cell(ONE, n).get("mb_per_second"), 100)
           for n in (30, 300, 1200)},
        **{f"times HTA's rate, {n} MB": (_ratio(median("hta", n), median(MANY, n)), 10)
           for n in (30, 300)},
        **{f"times as fast in two processes, to the list, {n} MB":
           (_ratio(median(ONE, n), median(TWO, n)), 1.6) for n in (300, 1200)},
        **{f"times as fast in two processes, reading alone, {n} MB":
           (_ratio(reading(ONE, n), reading(TWO, n)), 1.6) for n in (300, 1200)},
        "times as fast as key_averages() on a live profile":
            (theirs["median"] / locate["median"] if locate and theirs else None, 10),
        "share of reports that are the recorded step's, times its copies":
            (sum(exact) / len(exact) if exact else None, 1),
    }  # fmt: skip
    most: dict[str, tuple[float | None, float]] = {
        **{f"peak memory of the plain file, {tool}, {n} MB":
           (cell(tool, n).get("peak_of_plain"), 0.7) for n in (300, 1200) for tool in (ONE, MANY)},
        "1.2 GB against 300 MB": (_ratio(median(ONE, 1200), median(ONE, 300)), 4.3),
        **{f"gzip against plain, {n} MB": (_ratio(median(ONE, n, True), median(ONE, n)), 1.4)
           for n in (30, 300)},
    }  # fmt: skip
    found = [
        (what, float(value), f"at least {limit:g}", value >= limit)
        for what, (value, limit) in least.items()
        if value is not None
    ]
    for what, (value, limit) in most.items():
        if value is not None:
            found.append((what, float(value), f"at most {limit:g}", value <= limit))
    for size in (300, 1200):
        gained = _ratio(median(ONE, size), median(APART, size))
        if gained is not None:
            print(f"{size} MB: {APART} do {2 * gained:.2f} times the work of one in its time")
    return found


def _show(cells: list[Cell], promises: list[tuple[str, float, str, bool]]) -> None:
    rows = []
    for cell in cells:
        name = f"{cell.get('megabytes', 0):,} MB{' gzip' if cell.get('gzip') else ''}"
        if cell["skipped"]:
            rows.append([name, cell["tool"], None, cell["skipped"], None, None, None])
            continue
        if cell["tool"] == LIVE:
            for what in ("locate_seconds", "key_averages_seconds"):
                took = cell[what]
                spent = f"{took['low']:.2f} to {took['high']:.2f}, n={took['n']}"
                name = f"{LIVE}, {cell['events']:,} events"
                rows.append([name, what, took["median"], spent, None, None, None])
            continue
        took = cell["seconds"]
        spent = f"{took['low']:.2f} to {took['high']:.2f}, n={took['n']}"
        peak = round(cell["peak_bytes"] / MB)
        of_file = round(cell["mb_per_second"]), peak, cell["peak_of_plain"]
        rows.append([name, cell["tool"], took["median"], spent, *of_file])
    print()
    print_table(("trace", "tool", "seconds", "quartiles", "MB/s", "peak MB", "of file"), rows)
    print()
    told = [(*promise[:3], "yes" if promise[3] else "NO") for promise in promises]
    print_table(("promise", "measured", "limit", "kept"), told)


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


def _given(path: Path) -> Cell:
    """A trace of the user's."""
    size = path.stat().st_size
    packed = path.suffix == ".gz"
    return {"path": path, "megabytes": size // MB, "gzip": packed, "copies": 0, "plain_bytes": size}


def _measured(
    trace: Cell, tools: list[str], options: argparse.Namespace, budget: Budget, expected: Cell
) -> list[Cell]:
    """Read one trace with every tool, in turns."""
    found: dict[str, list[Cell]] = {tool: [] for tool in tools if tool != LIVE}
    left_out = {tool: reason for tool in found if (reason := _reason_to_skip(tool, trace))}
    # Once without a clock: the file is then in the system's memory for all of them.
    with trace["path"].open("rb", buffering=0) as file:
        while file.read(MB):
            pass
    for number in range(options.repeat):
        for tool in list(found) if number % 2 == 0 else list(reversed(found)):
            times = [reading["seconds"] for reading in found[tool]]
            longest = max(times, default=0.0)
            if tool in left_out or (times and sum(times) + longest > options.patience):
                continue
            if budget.left <= 2 * longest:
                if not times:
                    left_out[tool] = "no time left"
                continue
            reading = _reading(tool, trace["path"], options, min(_GIVEN_UP, budget.left + 10))
            if "skipped" in reading:
                left_out[tool] = reading["skipped"]
                continue
            rows = reading.pop("rows", None)
            if rows is not None and trace["copies"]:
                count, of_one = trace["copies"], expected.get("rows", {})
                times_one = {path: [cost * count for cost in row] for path, row in of_one.items()}
                reading["exact"] = rows == times_one
            found[tool].append(reading)
            rate = trace["plain_bytes"] / MB / reading["seconds"]
            print(f"  {trace['path'].name} {tool}: {reading['seconds']:.2f} s, {rate:.0f} MB/s")
    cells = []
    for tool, readings in found.items():
        cell = {"tool": tool, "megabytes": trace["megabytes"], "gzip": trace["gzip"]}
        cell["skipped"] = "" if readings else left_out.get(tool, "")
        cells.append(cell | (_summary(readings, trace) if readings else {}))
    return cells


def _summary(readings: list[Cell], trace: Cell) -> Cell:
    peak = max(reading["peak_kib"] for reading in readings) * 1024
    seconds = spread([reading["seconds"] for reading in readings])
    both = [key for key in ("read_seconds", "cpu_seconds") if key in readings[0]]
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


def _reading(tool: str, path: Path, options: argparse.Namespace, limit: float = _GIVEN_UP) -> Cell:
    """One tool reads one trace in a process of its own, or in two at once."""
    if tool != APART:
        return _answered({"name": tool, "trace": str(path)}, options, limit)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: _reading(ONE, path, options, limit), range(2)))
    for reading in both:
        if "skipped" in reading:
            return reading
    slower = max(both, key=lambda reading: float(reading["seconds"]))
    return {**slower, "peak_kib": sum(reading["peak_kib"] for reading in both)}


def _answered(job: Cell, options: argparse.Namespace, limit: float) -> Cell:
    found = do_alone(job, worker_command(options), limit)
    reasons = {"timeout": f"not done within {limit:.0f} s", "memory": "out of memory"}
    if found["end"] != "done":
        return {"skipped": reasons.get(found["end"]) or found["error"]}
    return {key: value for key, value in found.items() if key != "end"}


def _live(options: argparse.Namespace) -> Cell:
    """A live profile, read in place and by PyTorch itself."""
    readings: list[Cell] = []
    budget = Budget(options.patience)
    while len(readings) < options.repeat and budget.left:
        reading = _answered({"name": LIVE, "events": options.live_events}, options, 240)
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


# The run -----------------------------------------------------------------------------------------


def _numbers(text: str | None, default: list[int]) -> list[int]:
    return default if text is None else [int(number) for number in text.split(",") if number]


@script
def main(argv: Sequence[str] | None = None) -> int:
    known = [*TOOLS, APART, LIVE]
    parser = command_line(__doc__, "read", device=False, cases=False, seconds=480.0, jobs=1)
    parser.add_argument("--sizes", help="plain sizes in MB (default: 30,300,1200; with --small 1)")
    parser.add_argument("--gzip", help="sizes that are read compressed too (default: 30,300)")
    parser.add_argument("--trace", type=Path, help="read this trace instead")
    parser.add_argument("--tools", help=f"comma-separated (default: all of {', '.join(known)})")
    parser.add_argument("--repeat", type=int, default=5, help="readings of each at most")
    parser.add_argument("--patience", type=float, default=25.0, help="seconds for those of each")
    parser.add_argument("--live-events", type=int, default=180_000)
    parser.add_argument("--folder", type=Path, help="where the traces are, or are made and kept")
    options = parse(parser, argv)
    if options.worker:
        serve(examine)
        return 0
    sizes, packed, tools = [30, 300, 1200], [30, 300], known
    if options.small:
        sizes, packed, tools, options.repeat = [1], [], [ONE, "json"], 1
    tools = [tool.strip() for tool in options.tools.split(",")] if options.tools else tools
    unknown = sorted(set(tools) - set(known))
    if unknown:
        raise UsageError(f"there is no tool {', '.join(unknown)}; there are {', '.join(known)}")
    budget = Budget(options.seconds)
    document: dict[str, Any] = {"recorded": RECORDED.name}
    print_machine()
    cells: list[Cell] = [_live(options)] if LIVE in tools else []
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as folder:
        wanted = _numbers(options.sizes, sizes), _numbers(options.gzip, packed)
        traces = [_given(options.trace)] if options.trace else _make(Path(folder), *wanted)
        document["traces"] = [{**trace, "path": trace["path"].name} for trace in traces]
        expected = _reading(ONE, RECORDED, options)
        for trace in traces:
            cells += _measured(trace, tools, options, budget, expected)
            write_results(options, {**document, "cells": cells}, last=False)
    promises = _promises(cells)
    _show(cells, promises)
    write_results(options, {**document, "cells": cells, "checks": promises})
    return 0
