"""How many ranks can be put together from their traces? Backspot beside HolisticTraceAnalysis.

    python -m benchmarks ranks_from_traces

A recorded rank of FSDP2 on two H200s is copied: each rank of the job has a trace of its own with
ten times the recorded steps, its number and its clock. Both tools read the same folders, one after
the other, on as many processors as they find: Backspot to its answer, HTA to its data frames, the
overlap of communication and computing, and its stragglers. The number of ranks grows until a tool
fails, or needs more time or memory than it is given; then it is not asked again. The memory is that
of all processes of the tool together, read every 50 ms.

``--ranks 64 --copies 94`` reads 64 traces of 50 MB. ``--interrupt 20`` ends a reading by Backspot
after 20 seconds and lets a second one go on from the cache.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.common import (
    TEST_DATA,
    command_line,
    parse,
    print_machine,
    print_table,
    script,
    write_results,
)
from benchmarks.cost.startup import environment
from benchmarks.traces.copies import Copies

_RECORDED = TEST_DATA / "h200" / "fsdp2.rank0.trace.json.gz"
_MB = 1_000_000
_RANK = re.compile(r'"rank":\s*0,\s*"world_size":\s*2')
_GROUP = re.compile(r'"pg_size":\s*2,\s*"ranks":\s*\[0,\s*1\]')
_BACKSPOT = """
import sys
import backspot
cache = sys.argv[2] if len(sys.argv) > 2 else None
job = backspot.ranks(sys.argv[1], cache=cache)
print(str(job).splitlines()[1])
"""
_HTA = """
import logging, sys
from pathlib import Path
from hta.trace_analysis import TraceAnalysis
logging.disable(logging.WARNING)
if __name__ == "__main__":
    traces = dict(enumerate(map(str, sorted(Path(sys.argv[1]).iterdir()))))
    analysis = TraceAnalysis(trace_files=traces, trace_dir=sys.argv[1])
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    try:
        stragglers = str(analysis.get_potential_stragglers())
    except Exception as error:
        stragglers = f"{type(error).__name__}: {error}"
    print(f"{len(overlap)} ranks; stragglers: {stragglers}")
"""
_TOOLS = {"backspot": _BACKSPOT, "hta": _HTA}


@script
def main(argv: Sequence[str] | None = None) -> int:
    """Generate, read, print and write."""
    parser = command_line(__doc__, "ranks_from_traces", device=False, cases=False)
    parser.add_argument("--ranks", help="numbers of ranks (default: 4,16,64,256,1024)")
    parser.add_argument("--copies", type=int, help="copies of the recorded steps (default: 10)")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds for one reading")
    parser.add_argument("--gigabytes", type=float, default=12.0, help="memory for one reading")
    parser.add_argument("--interrupt", type=float, help="seconds, to go on from the cache after")
    parser.add_argument("--tools", default=",".join(_TOOLS), help="comma-separated")
    options = parse(parser, argv)
    sizes = [int(one) for one in (options.ranks or "").split(",") if one]
    sizes = sizes or ([2] if options.small else [4, 16, 64, 256, 1024])
    copies = options.copies or (2 if options.small else 10)
    tools = ["backspot"] if options.small else options.tools.split(",")
    print_machine()
    cells: list[dict[str, Any]] = []
    ended: dict[str, str] = {}
    if find_spec("hta") is None:
        ended["hta"] = "HolisticTraceAnalysis is not installed"
    with tempfile.TemporaryDirectory() as folder:
        traces = Path(folder) / "traces"
        recorded = _Recorded(copies, Path(folder) / "copied.json")
        for ranks in sizes:
            megabytes = recorded.write(traces, ranks) / _MB
            for tool in tools:
                if tool not in ended:
                    cell = _read(tool, [str(traces)], options.patience, options.gigabytes)
                    cells.append({"tool": tool, "ranks": ranks, "megabytes": megabytes, **cell})
                    if not cell["said"]:
                        ended[tool] = cell["failed"]
        if options.interrupt:
            cells += _resumed(traces, Path(folder) / "cache", sizes[-1], options)
    rows = [
        (
            one["ranks"],
            one["tool"],
            f"{one['megabytes']:.0f}",
            one["seconds"],
            one["processor_seconds"],
            f"{one['megabytes'] / one['processor_seconds']:.0f}" if one["said"] else None,
            f"{one['peak_mb']:.0f}",
            one["failed"] or one["said"][-60:],
        )
        for one in cells
    ]
    head = ("ranks", "tool", "MB", "seconds", "processor s", "MB/s a core", "peak MB", "")
    print_table(head, rows)
    for tool, reason in ended.items():
        print(f"{tool}: {reason}")
    write_results(options, {"events": recorded.events, "cells": cells, "ended": ended})
    return 0 if all(one["said"] for one in cells if one["tool"] == "backspot") else 1


class _Recorded:
    """The recorded rank with several copies of its steps, as the trace of any rank.

    Args:
        copies: how many.
        place: where the copies are written once.
    """

    def __init__(self, copies: int, place: Path) -> None:
        source = Copies(_RECORDED)
        source.write(place, copies)
        numbers = count(1)
        text = re.sub(r"ProfilerStep#\d+", "ProfilerStep#@", place.read_text("utf-8"))
        # Each step has one mark of the host; the device's marks were trimmed away.
        text = re.sub("#@", lambda _: f"#{next(numbers)}", text)
        head, key, events = text.partition('"traceEvents"')
        self._head, self._events = head, key + events
        self._base = json.loads(text)["baseTimeNanoseconds"]
        self.events = source.events * copies
        place.unlink()

    def write(self, folder: Path, ranks: int) -> int:
        """Write the traces that the folder lacks; return the bytes of all."""
        folder.mkdir(exist_ok=True)
        every = json.dumps(list(range(ranks)))
        size = 0
        for rank in range(ranks):
            head = _RANK.sub(f'"rank":{rank},"world_size":{ranks}', self._head)
            head = _GROUP.sub(f'"pg_size":{ranks},"ranks":{every}', head)
            head = head.replace(str(self._base), str(self._base + 1_000 * rank))
            path = folder / f"rank{rank:05}.json"
            size += path.write_text(head + self._events, encoding="utf-8")
        return size


def _read(tool: str, arguments: Sequence[str], seconds: float, gigabytes: float) -> dict[str, Any]:
    """Let one tool read, in processes of its own, within limits."""
    begin = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
    ):
        process = subprocess.Popen(
            [sys.executable, "-c", _TOOLS[tool], *arguments],
            stdout=out,
            stderr=err,
            env=environment(),
            start_new_session=True,
        )
        peak, failed = 0, ""
        while process.poll() is None:
            peak = max(peak, _bytes_of(process.pid))
            if time.perf_counter() - begin > seconds:
                failed = f"more than {seconds:.0f} s"
            elif peak > gigabytes * 1e9:
                failed = f"more than {gigabytes:.0f} GB"
            if failed:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.05)
        took = time.perf_counter() - begin
        used = _processor_seconds()
        out.seek(0)
        err.seek(0)
        said, errors = out.read().strip(), err.read().strip().splitlines()
    if process.returncode and not failed:
        failed = errors[-1] if errors else f"exit code {process.returncode}"
    return {
        "seconds": took,
        "processor_seconds": None if failed else used,  # of killed processes it is not known
        "peak_mb": peak / _MB,
        "said": "" if failed else said,
        "failed": failed,
    }


_spent = 0.0


def _processor_seconds() -> float:
    """Return what the processes that have ended since the last call used."""
    global _spent
    times = os.times()
    before, _spent = _spent, times.children_user + times.children_system
    return _spent - before


def _bytes_of(session: int) -> int:
    """Return the memory of all processes of a session; what they share counts once."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                    text = (entry / "smaps_rollup").read_text()
                    total += int(text.partition("Pss:")[2].split()[0]) * 1024
    return total


def _resumed(traces: Path, cache: Path, ranks: int, options: Any) -> list[dict[str, Any]]:
    """Interrupt a reading, then let a second and a third one use what is in the cache."""
    command = [sys.executable, "-c", _BACKSPOT, str(traces), str(cache)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
    )
    time.sleep(options.interrupt)
    process.send_signal(signal.SIGINT)
    process.wait()
    found = []
    _processor_seconds()
    for what in ("after an interrupt", "again"):
        kept = len(list(cache.glob("*.rank")))
        cell = _read("backspot", [str(traces), str(cache)], options.patience, options.gigabytes)
        size = sum(path.stat().st_size for path in traces.iterdir()) / _MB
        size *= (ranks - kept) / ranks  # what is read
        name = f"backspot {what}, {kept} of {ranks} in the cache"
        found.append({"tool": name, "ranks": ranks, "megabytes": size, **cell})
    return found
