"""Does anything but Backspot's own errors, or sums that add up, come out of broken traces?

Each case takes some hundred events of a trace in ``tests/data``, changes them in a few random
places, by their fields, by their text or by their bytes, and reads them. Several processes do it; a
case on which one hangs or dies is reported too. A case is made again by its seed and number alone::

    python -m benchmarks fuzz_traces --count 20000 --seed 1
    python -m benchmarks fuzz_traces --seed 1 --only 1234 --keep broken.json
"""

from __future__ import annotations

import argparse
import functools
import gzip
import io
import json
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from backspot import BackspotError, Report, locate
from benchmarks.harness import TEST_DATA, Figures, Run
from benchmarks.robustness.found import (
    Found,
    Outcome,
    found_in,
    summary_of_lines as summary_of_lines,
)
from benchmarks.robustness.trace_mutations import mutated
from benchmarks.workers import Job, Record, Stage

_LARGEST = 80_000
"""Bytes of a packed trace to take events of."""
_EVENTS = 700
_SLOW = 3.0
_SLOW_PER_BYTE = 5e-6
"""Processor seconds that a case may take, and what it may take beyond that for each byte."""
_HANGS_S = 120.0
_MOST_NS = 1 << 61


class Source:
    """A trace whose events are changed."""

    def __init__(self, path: Path) -> None:
        self.events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        self.by_time = sorted(range(len(self.events)), key=lambda at: _time(self.events[at]))
        self.nodes = [
            place
            for place, at in enumerate(self.by_time)
            if str(self.events[at].get("name", "")).startswith("autograd::engine::evaluate")
        ]

    def some(self, random: Random) -> list[dict[str, Any]]:
        """Events of some time around a node of a backward."""
        many = random.choice((_EVENTS // 10, _EVENTS // 2, _EVENTS // 2, _EVENTS))
        middle = random.choice(self.nodes) if self.nodes else len(self.events) // 2
        begin = max(0, middle - random.randrange(many))
        chosen = sorted(self.by_time[begin : begin + many])
        copied: list[dict[str, Any]] = json.loads(json.dumps([self.events[at] for at in chosen]))
        return copied


def sources(*, traces: int | None = None) -> list[Source]:
    """The events of traces to change, of the smallest so many."""
    paths = [at for at in TEST_DATA.rglob("*.json.gz") if at.stat().st_size <= _LARGEST]
    paths.sort(key=lambda at: (at.stat().st_size, at.name))
    return [Source(path) for path in paths[:traces]]


def fuzz(of: Sequence[Source], seed: str, numbers: Iterable[int]) -> Found:
    """Run these cases in this process."""
    found = Found()
    for number in numbers:
        found.add(one_case(of, seed, number))
    return found


def case(of: Sequence[Source], seed: str, number: int) -> tuple[bytes, Random]:
    """A broken trace, and what chooses how it is read."""
    random = Random(f"{seed}/{number}")
    return mutated(random.choice(of).some(random), random), random


def _time(event: dict[str, Any]) -> float:
    time = event.get("ts", 0)
    return float(time) if isinstance(time, (int, float)) else 0.0


class _Trickle(io.RawIOBase):
    """A stream that gives only so many bytes at a time."""

    def __init__(self, data: bytes, most: int) -> None:
        self._data, self._most = io.BytesIO(data), most

    def read(self, size: int = -1) -> bytes:
        return self._data.read(min(size, self._most))


def one_case(of: Sequence[Source], seed: str, number: int) -> Outcome:
    """Make a case, read it, and look at what comes out."""
    data, random = case(of, seed, number)
    most = random.choice((1 << 30, 1 << 30, 1 << 14, 777))
    begin = time.process_time()
    wrong = ""
    try:
        report = locate(_Trickle(data, most))
        if random.random() < 0.1:
            str(report)
        end = "warned" if report.warnings else "clean"
        wrong = unsound(report)
    except BackspotError as error:
        end = type(error).__name__
        if "\n" in str(error) or len(str(error)) > 400:
            wrong = f"its message is not one line: {str(error)[:200]!r}"
    except Exception:
        end, wrong = "traceback", traceback.format_exc(limit=-4)
    seconds = time.process_time() - begin
    if not wrong and seconds > _SLOW + _SLOW_PER_BYTE * len(data):
        wrong = f"took {seconds:.1f} s for {len(data):,} bytes"
    return number, end, wrong, seconds


def unsound(report: Report) -> str:
    """What does not add up in a report; nothing, if all does."""
    for name in ("wall_ns", "gpu_ns", "cpu_ns"):
        typical = sum(getattr(row, name) for row in report.modules)
        if typical != getattr(report, name):
            return f"{name}: the rows sum to {typical}, the report says {getattr(report, name)}"
        for step, whole in enumerate(getattr(report, f"{name}_by_step")):
            rows = [getattr(row, f"{name}_by_step")[step] for row in report.modules]
            passes = [getattr(one, name) for one in report.passes if one.step == step]
            if not sum(rows) == sum(passes) == whole:
                return f"{name}: step {step} of {whole}, its rows sum to {sum(rows)}"
            if min(rows, default=0) < 0 or not 0 <= whole < _MOST_NS:
                return f"{name}: {whole}, rows from {min(rows)}"
    for one in report.passes:
        if one.duration_ns != one.wall_ns + one.forward_ns + one.other_ns:
            return f"a pass does not sum up: {one}"
        if min(one.duration_ns, one.wall_ns, one.forward_ns, one.other_ns) < 0:
            return f"a pass takes less than nothing: {one}"
    for row in report.modules:
        kinds = [getattr(row.wall_on, kind) for kind in row.wall_on.__slots__]
        if min(kinds) < 0 or sum(kinds) != row.wall_ns:
            return f"a row does not sum up: {row}"
        least = min(row.total_wall_ns, row.total_gpu_ns, row.total_cpu_ns, row.forward_ns)
        if least < 0 or row.recompute_ns < 0:
            return f"a row takes less than nothing: {row}"
    if report.phases:
        steps = zip(*(phase.wall_ns_by_step for phase in report.phases), strict=True)
        if tuple(sum(step) for step in steps) != report.step_ns_by_step:
            return "the phases do not sum to the steps"
        if sum(phase.wall_ns for phase in report.phases) != report.step_ns:
            return "the typical phases do not sum to the typical step"
    if min(report.step_ns_by_step, default=0) < 0:
        return f"a step takes less than nothing: {report.step_ns_by_step}"
    for finding in report.findings:
        if not 0 <= finding.wall_ns <= report.whole_ns:
            return f"{finding.rule} costs {finding.wall_ns} of {report.whole_ns}"
    return ""


# Many at once ------------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, help="cases (default: 2000; with --small 20)")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--keep", type=Path, help="where to write that case")
    parser.add_argument("--traces", type=int, help="how many traces, the smallest first")


def answer(run: Run) -> Figures | int:
    @functools.cache
    def of() -> list[Source]:
        return sources(traces=run.traces or (3 if run.small else None))

    def handle(job: Job, _: Stage) -> Record:
        return {"outcome": one_case(of(), run.seed, job["number"])}

    if run.only is not None:
        if run.keep:
            run.keep.write_bytes(case(of(), run.seed, run.only)[0])
        print(*one_case(of(), run.seed, run.only), sep="\n")
        return 0
    count = run.count or (20 if run.small else 2_000)
    return found_in(run, count, handle, _HANGS_S).figures(run.seed)
