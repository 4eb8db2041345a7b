"""What comes of reading: the table, and which promises it keeps."""

from __future__ import annotations

from functools import partial
from typing import Any

from _common import print_table

__all__ = ["APART", "LIVE", "MB", "ONE", "TWO", "Cell", "checks", "show"]

MB = 1_000_000
LIVE = "live profile"
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
    """The promises, each with what was measured; those that this run cannot tell are left out."""
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
