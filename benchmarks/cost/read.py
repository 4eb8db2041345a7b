"""How fast, and in how much memory, is a trace read? Backspot beside other tools, in one run.

    taskset -c 0,1 python -m benchmarks read

Traces of 30, 300 and 1,200 MB, plain and compressed, are made by copying a recorded step of an H200
(``copies.py``); the report of the copies must be that of one, times their number. Each tool
runs in a process of its own, in turns. Backspot goes from the file to the ranked list; HTA loads
its data frames; json and orjson decode and do nothing else. What is left out is named with the
reason. A live profile is read in place and by PyTorch's own ``key_averages()``.

Two readings at once that have nothing to do with each other show what two processes can gain on the
machine. Run it in pieces with --sizes, --tools and --repeat; traces are kept in --folder if given.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
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
from benchmarks.cost.reading_tools import LIVE, NEEDS, TOOLS
from benchmarks.traces.copies import Copies
from benchmarks.workers import do_alone, worker_command

MB = 1_000_000
ONE, TWO, MANY = "backspot --jobs 1", "backspot --jobs 2", "backspot"
APART = "two readings at once"
"""Two processes that have nothing to do with each other: the most that dividing one can gain."""

Cell = dict[str, Any]


def cell_of(cells: list[Cell], tool: str, size: int, gzip: bool = False) -> Cell:
    wanted = (tool, size, gzip)
    for cell in cells:
        if (cell["tool"], cell.get("megabytes"), cell.get("gzip")) == wanted:
            return cell
    return {}


def median_of(cells: list[Cell], tool: str, size: int, gzip: bool = False) -> float | None:
    seconds = cell_of(cells, tool, size, gzip).get("seconds")
    return seconds["median"] if seconds else None


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def checks(cells: list[Cell]) -> list[dict[str, Any]]:
    """Return each promise with its measurement; a promise that was not measured is left out."""
    cell, median = partial(cell_of, cells), partial(median_of, cells)
    found: list[dict[str, Any]] = []

    def check(what: str, value: float | None, limit: float, *, most: bool = False) -> None:
        if value is not None:
            kept = value <= limit if most else value >= limit
            found.append({"what": what, "value": value, "limit": limit, "most": most, "kept": kept})

    for size in (30, 300, 1200):
        rate = cell(ONE, size).get("mb_per_second")
        check(f"MB/s in one process, {size} MB", rate, 100)
    for size in (30, 300):
        check(f"times HTA's rate, {size} MB", ratio(median("hta", size), median(MANY, size)), 10)
    for size in (300, 1200):
        for tool in (ONE, MANY):
            share = cell(tool, size).get("peak_of_plain")
            check(f"peak memory of the plain file, {tool}, {size} MB", share, 0.7, most=True)
    check("1.2 GB against 300 MB", ratio(median(ONE, 1200), median(ONE, 300)), 4.3, most=True)
    for size in (30, 300):
        cost = ratio(median(ONE, size, True), median(ONE, size))
        check(f"gzip against plain, {size} MB", cost, 1.4, most=True)
    for size in (300, 1200):
        faster = ratio(median(ONE, size), median(TWO, size))
        check(f"times as fast in two processes, to the list, {size} MB", faster, 1.6)
        faster = ratio(cell(ONE, size).get("read_seconds"), cell(TWO, size).get("read_seconds"))
        check(f"times as fast in two processes, reading alone, {size} MB", faster, 1.6)
    profile = next((c for c in cells if c["tool"] == LIVE and not c["skipped"]), None)
    if profile:
        faster = ratio(
            profile["key_averages_seconds"]["median"], profile["locate_seconds"]["median"]
        )
        check("times as fast as key_averages() on a live profile", faster, 10)
    exact = [c["exact"] for c in cells if "exact" in c]
    if exact:
        check(
            "share of reports that are the recorded step's, times its copies",
            sum(exact) / len(exact),
            1,
        )
    return found


def show(cells: list[Cell], found: list[dict[str, Any]]) -> None:
    rows = []
    for cell in cells:
        if cell["tool"] == LIVE:
            continue
        name = f"{cell['megabytes']:,} MB{' gzip' if cell['gzip'] else ''}"
        if cell["skipped"]:
            rows.append([name, cell["tool"], None, cell["skipped"], None, None, None])
            continue
        seconds = cell["seconds"]
        rows.append(
            [
                name,
                cell["tool"],
                seconds["median"],
                f"{seconds['low']:.2f} to {seconds['high']:.2f}, n={seconds['n']}",
                round(cell["mb_per_second"]),
                round(cell["peak_bytes"] / MB),
                cell["peak_of_plain"],
            ]
        )
    print()
    print_table(["trace", "tool", "seconds", "quartiles", "MB/s", "peak MB", "of file"], rows)
    for cell in cells:
        if cell["tool"] == LIVE:
            print()
            if cell["skipped"]:
                print(f"{LIVE}: {cell['skipped']}")
                continue
            ours, theirs = cell["locate_seconds"], cell["key_averages_seconds"]
            print_table(
                [f"live, {cell['events']:,} events", "seconds", "quartiles"],
                [
                    [name, took["median"], f"{took['low']:.2f} to {took['high']:.2f}"]
                    for name, took in (("locate(prof)", ours), ("key_averages()", theirs))
                ],
            )
    print()
    print_table(
        ["promise", "measured", "limit", "kept"],
        [
            [
                check["what"],
                float(check["value"]),
                f"{'at most' if check['most'] else 'at least'} {check['limit']:g}",
                "yes" if check["kept"] else "NO",
            ]
            for check in found
        ],
    )

    for size in (300, 1200):
        gained = ratio(median_of(cells, ONE, size), median_of(cells, APART, size))
        if gained is not None:
            print(f"{size} MB: {APART} do {2 * gained:.2f} times the work of one in its time")


RECORDED = TEST_DATA / "h200" / "vit_patch_drop.trace.json.gz"
_GIVEN_UP = 150.0
"""Seconds after which a tool's one reading is given up."""


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, "read", device=False, cases=False, seconds=480.0)
    known = [*TOOLS, APART, LIVE]
    parser.add_argument("--sizes", help="plain sizes in MB (default: 30,300,1200; with --small 1)")
    parser.add_argument("--gzip", help="sizes that are read compressed too (default: 30,300)")
    parser.add_argument("--tools", help=f"comma-separated (default: all of {', '.join(known)})")
    parser.add_argument("--repeat", type=int, default=5, help="readings of each at most")
    parser.add_argument("--patience", type=float, default=25.0, help="seconds for those of each")
    parser.add_argument("--live-events", type=int, default=180_000)
    parser.add_argument("--folder", type=Path, help="where the traces are, or are made and kept")
    options = parse(parser, argv)
    if options.small:
        sizes, packed, tools, options.repeat = [1], [], [ONE, "json"], 1
    else:
        sizes, packed, tools = [30, 300, 1200], [30, 300], known
    sizes = _numbers(options.sizes) if options.sizes else sizes
    packed = _numbers(options.gzip) if options.gzip is not None else packed
    tools = [tool.strip() for tool in options.tools.split(",")] if options.tools else tools
    unknown = set(tools) - set(known)
    if unknown:
        raise UsageError(
            f"there is no tool {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    budget = Budget(options.seconds)
    document: dict[str, Any] = {"recorded": RECORDED.name}
    print_machine()
    cells: list[Cell] = [live(options)] if LIVE in tools else []
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as folder:
        traces = make(Path(folder), sizes, packed)
        document["traces"] = [
            {k: v for k, v in trace.items() if k != "path"} | {"name": trace["path"].name}
            for trace in traces
        ]
        expected = one_reading(ONE, RECORDED)
        for trace in traces:
            cells += measured(trace, tools, options, budget, expected)
            write_results(options, {**document, "cells": cells}, last=False)
    document |= {"cells": cells, "checks": checks(cells)}
    show(cells, document["checks"])
    write_results(options, document)
    return 0


def make(folder: Path, sizes: list[int], packed: list[int]) -> list[dict[str, Any]]:
    """Write the traces that are not there yet."""
    copies = Copies(RECORDED)
    folder.mkdir(parents=True, exist_ok=True)
    traces = []
    for size in sorted({*sizes, *packed}):
        for suffix in [".json"] * (size in sizes) + [".json.gz"] * (size in packed):
            count = copies.count(size * MB)
            plain = folder / f"{size}mb-{count}.json"
            path = plain.with_suffix(suffix)
            if not path.exists():
                part = path.with_name(f"part-{path.name}")
                copies.write(part, count)
                part.replace(path)
            traces.append(
                {
                    "path": path,
                    "megabytes": size,
                    "gzip": suffix == ".json.gz",
                    "copies": count,
                    "events": count * copies.events,
                    "plain_bytes": plain.stat().st_size
                    if plain.exists()
                    else copies.written(count),
                    "bytes": path.stat().st_size,
                }
            )
            print(f"{path.name}: {traces[-1]['events']:,} events", flush=True)
    return traces


def measured(
    trace: dict[str, Any],
    tools: list[str],
    options: argparse.Namespace,
    budget: Budget,
    expected: Cell,
) -> list[Cell]:
    """Read one trace with every tool, in turns."""
    found: dict[str, list[Cell]] = {tool: [] for tool in tools if tool != LIVE}
    left_out: dict[str, str] = {}
    for tool in found:
        reason = reason_to_skip(tool, trace)
        if reason:
            left_out[tool] = reason
    # Once without a clock: the file is then in the system's memory for all of them.
    with trace["path"].open("rb", buffering=0) as file:
        while file.read(MB):
            pass
    for number in range(options.repeat):
        order = list(found) if number % 2 == 0 else list(reversed(found))
        for tool in order:
            readings = found[tool]
            spent = sum(reading["seconds"] for reading in readings)
            longest = max((reading["seconds"] for reading in readings), default=0.0)
            if tool in left_out or (readings and spent + longest > options.patience):
                continue
            if budget.left < 2 * longest or budget.left <= 0:
                left_out.setdefault(tool, "no time left") if not readings else None
                continue
            reading = one_reading(tool, trace["path"], min(_GIVEN_UP, budget.left + 10))
            if "skipped" in reading:
                left_out[tool] = reading["skipped"]
                continue
            if "rows" in reading:
                reading["exact"] = is_exact(reading, expected, trace["copies"])
                del reading["rows"]
            readings.append(reading)
            rate = trace["plain_bytes"] / MB / reading["seconds"]
            print(
                f"  {trace['path'].name} {tool}: {reading['seconds']:.2f} s, {rate:.0f} MB/s",
                flush=True,
            )
    return [
        {
            "tool": tool,
            "megabytes": trace["megabytes"],
            "gzip": trace["gzip"],
            "skipped": left_out.get(tool, "") if not readings else "",
            **(summary(readings, trace) if readings else {}),
        }
        for tool, readings in found.items()
    ]


def summary(readings: list[Cell], trace: dict[str, Any]) -> Cell:
    peak = max(reading["peak_kib"] for reading in readings) * 1024
    seconds = spread([reading["seconds"] for reading in readings])
    return {
        "seconds": seconds,
        "least_seconds": min(reading["seconds"] for reading in readings),
        **(
            {"read_seconds": statistics.median(r["read_seconds"] for r in readings)}
            if "read_seconds" in readings[0]
            else {}
        ),
        "cpu_seconds": statistics.median(reading["cpu_seconds"] for reading in readings),
        "mb_per_second": trace["plain_bytes"] / MB / seconds["median"],
        "peak_bytes": peak,
        "peak_of_plain": peak / trace["plain_bytes"],
        "processes": readings[0]["processes"],
        **({"exact": all(r["exact"] for r in readings)} if "exact" in readings[0] else {}),
    }


def reason_to_skip(tool: str, trace: dict[str, Any]) -> str:
    needed, available = NEEDS.get(tool, 1.0) * trace["plain_bytes"], available_bytes()
    if needed > 0.9 * available:
        return f"takes about {needed / 1e9:.0f} GB of memory; {available / 1e9:.0f} GB are free"
    if tool == "hta" and trace["megabytes"] > 300:
        return "not tried beyond 300 MB: minutes"
    if tool == "json" and trace["megabytes"] > 300:
        return "not tried beyond 300 MB: a minute"
    if tool in (TWO, APART) and trace["gzip"]:
        return "one process reads what is compressed"
    if tool == APART and trace["megabytes"] < 300:
        return "one process reads it by default"
    return ""


def one_reading(tool: str, path: Path, limit: float = _GIVEN_UP) -> Cell:
    """One tool reads one trace in a process of its own, or in two at once."""
    if tool != APART:
        return in_a_process(tool, path, limit)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: in_a_process(ONE, path, limit), range(2)))
    for reading in both:
        if "skipped" in reading:
            return reading
    slower = max(both, key=lambda reading: float(reading["seconds"]))
    return {**slower, "peak_kib": sum(reading["peak_kib"] for reading in both)}


_COMMAND = worker_command("benchmarks.cost.reading_tools", argparse.Namespace(small=False))


def in_a_process(tool: str, path: Path, limit: float) -> Cell:
    return _answered({"name": tool, "trace": str(path)}, limit)


def _answered(job: Cell, limit: float) -> Cell:
    found = do_alone(job, _COMMAND, limit)
    reasons = {"timeout": f"not done within {limit:.0f} s", "memory": "out of memory"}
    if found["end"] != "done":
        return {"skipped": reasons.get(found["end"]) or found["error"]}
    return {key: value for key, value in found.items() if key != "end"}


def is_exact(reading: Cell, expected: Cell, copies: int) -> bool:
    """Whether the copies' report is the recorded step's, times their number."""
    if "rows" not in expected:
        return False
    times = {path: [cost * copies for cost in row] for path, row in expected["rows"].items()}
    return bool(reading["rows"] == times)


def live(options: argparse.Namespace) -> Cell:
    """A live profile, read in place and by PyTorch itself."""
    readings: list[Cell] = []
    began = time.monotonic()
    while len(readings) < options.repeat and time.monotonic() - began < options.patience:
        reading = _answered({"name": LIVE, "events": options.live_events}, 240)
        if "skipped" in reading:
            if not readings:
                return {"tool": LIVE, **reading}
            break
        readings.append(reading)
        print(f"  {LIVE}: {reading}", flush=True)
    return {
        "tool": LIVE,
        "skipped": "",
        "events": readings[0]["events"],
        "torch": readings[0]["torch"],
        "locate_seconds": spread([reading["locate"] for reading in readings]),
        "key_averages_seconds": spread([reading["key_averages"] for reading in readings]),
    }
