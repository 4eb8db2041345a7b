"""False alarms and power of ``backspot.compare`` on recordings that exist already.

    python -m benchmarks.comparison.recorded FILE...
    python -m benchmarks.comparison.recorded FILE... --steps 6,10,30 --times 1.5

Each file has recordings of one model, as JSON (``.gz`` too): a list of objects with ``rows`` (the
clock time of each row of a report in each step, in nanoseconds, by path), ``step_ns`` (that of each
step), ``gpu`` (the device time of each row: by step, or a sum over all steps; null without a GPU)
and ``plant`` (null, or the module in which something was planted and its nanoseconds). A list of
saved reports, in a folder, is read the same way.

Every pair of recordings without a plant is compared, in windows of so many steps: no claim may be
made. Then every recording without a plant with every one that has a plant: the claim must be of
that module. Where no recording has a plant, ``--times`` makes one: in the later recording of each
pair, the clock time of one module after the other is multiplied.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import backspot
from backspot.comparison.changes import Comparison
from backspot.results.report import Coverage, Report, Row
from benchmarks.common import print_table, script

_LARGE = 0.02
"""Share of the backward from which modules are made slower by ``--times``."""


@dataclass(frozen=True)
class _Recording:
    """One recording: nanoseconds by row and by step."""

    wall: Mapping[str, Sequence[int]]
    gpu: Mapping[str, Sequence[int]] | None
    step: Sequence[int]
    plant: str

    @property
    def steps(self) -> int:
        return len(self.step)

    def window(self, start: int, steps: int) -> _Recording:
        """Return some of the steps."""
        cut = slice(start, start + steps)
        gpu = None if self.gpu is None else {path: t[cut] for path, t in self.gpu.items()}
        wall = {path: times[cut] for path, times in self.wall.items()}
        return replace(self, wall=wall, gpu=gpu, step=self.step[cut])

    def slower(self, path: str, times: float) -> _Recording:
        """Return the same with a module that takes longer."""
        made = [round(time * times) for time in self.wall[path]]
        more = [new - old for new, old in zip(made, self.wall[path], strict=True)]
        step = [time + extra for time, extra in zip(self.step, more, strict=True)]
        return replace(self, wall={**self.wall, path: made}, step=step, plant=path)

    def report(self) -> Report:
        """Return a report with these times."""
        rows = tuple(self._row(path) for path in self.wall)
        walls = _sums(row.wall_ns_by_step for row in rows)
        gpus = _sums(row.gpu_ns_by_step for row in rows)
        wall, gpu = _typical(walls), _typical(gpus)
        rest = wall - sum(row.wall_ns for row in rows), gpu - sum(row.gpu_ns for row in rows)
        rows += (replace(_row("(unsteady)", (0,) * self.steps, (0,) * self.steps),
                         wall_ns=rest[0], gpu_ns=rest[1]),)  # fmt: skip
        zeros = (0,) * self.steps
        return Report(
            modules=rows,
            operators=(),
            passes=(),
            devices=(),
            step_unit="profiler step",
            step_ns=_typical(self.step),
            wall_ns=wall,
            gpu_ns=gpu,
            cpu_ns=0,
            step_ns_by_step=tuple(self.step),
            wall_ns_by_step=walls,
            gpu_ns_by_step=gpus,
            cpu_ns_by_step=zeros,
            coverage=Coverage(1.0, 1.0, 1.0),
            source="backspot",
            has_gpu=self.gpu is not None,
            warnings=(),
        )

    def _row(self, path: str) -> Row:
        zeros = (0,) * self.steps
        return _row(path, self.wall[path], zeros if self.gpu is None else self.gpu.get(path, zeros))


def _row(path: str, wall: Sequence[int], gpu: Sequence[int]) -> Row:
    zeros = (0,) * len(wall)
    return Row(
        path=path,
        class_name="",
        root="",
        is_module=not path.startswith("("),
        calls=1.0,
        wall_ns=_typical(wall),
        gpu_ns=_typical(gpu),
        cpu_ns=0,
        forward_ns=0,
        recompute_ns=0,
        total_wall_ns=0,
        total_gpu_ns=0,
        total_cpu_ns=0,
        total_forward_ns=0,
        total_recompute_ns=0,
        nodes=(),
        wall_ns_by_step=tuple(wall),
        gpu_ns_by_step=tuple(gpu),
        cpu_ns_by_step=zeros,
        forward_ns_by_step=zeros,
    )


def _typical(times: Sequence[int]) -> int:
    return math.floor(median(times))


def _sums(by_step: Any) -> tuple[int, ...]:
    return tuple(sum(step) for step in zip(*by_step, strict=True))


def _read(path: Path) -> list[_Recording]:
    """Return the recordings of a file, or of a folder of saved reports."""
    if path.is_dir():
        return [_of_report(json.loads(one.read_text())) for one in sorted(path.glob("*.json"))]
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found = json.loads(text)
    return [_of_report(found)] if isinstance(found, dict) else [_of_times(one) for one in found]


def _of_times(found: Mapping[str, Any]) -> _Recording:
    steps = len(found["step_ns"])

    def by_step(times: Any) -> list[int]:
        return times if isinstance(times, list) else [round(times / steps)] * steps

    gpu = found.get("gpu")
    return _Recording(
        found["rows"],
        None if gpu is None else {path: by_step(times) for path, times in gpu.items()},
        found["step_ns"],
        found["plant"][0] if found.get("plant") else "",
    )


def _of_report(found: Mapping[str, Any]) -> _Recording:
    rows = [row for row in found["modules"] if row["path"] != "(unsteady)"]
    step = found.get("step_ns_by_step") or found["step_ns"]
    gpu = {row["path"]: row.get("gpu_ns_by_step") for row in rows} if found["has_gpu"] else None
    return _Recording({row["path"]: row["wall_ns_by_step"] for row in rows}, gpu, step, "")


def _windows(
    before: _Recording, after: _Recording, steps: int
) -> Iterator[tuple[_Recording, _Recording]]:
    for start in range(0, min(before.steps, after.steps) - steps + 1, steps):
        yield before.window(start, steps), after.window(start, steps)


def _claims(comparison: Comparison) -> list[str]:
    changes = (comparison.step, *comparison.phases, comparison.whole, *comparison.changes)
    return [change.title for change in changes if change.claimed]


def _compared(before: _Recording, after: _Recording) -> list[str]:
    return _claims(backspot.compare(before.report(), after.report()))


def _false_alarms(recordings: Sequence[_Recording], steps: int) -> list[list[str]]:
    equal = [one for one in recordings if not one.plant]
    return [
        _compared(*window)
        for before, after in combinations(equal, 2)
        for window in _windows(before, after, steps)
    ]


def _power(recordings: Sequence[_Recording], steps: int, times: float) -> list[tuple[bool, bool]]:
    """Return for each pair whether the planted module is claimed, and whether another one is."""
    found = []
    equal = [one for one in recordings if not one.plant]
    planted = [one for one in recordings if one.plant]
    pairs = [(before, after) for before in equal for after in planted] or [*combinations(equal, 2)]
    for before, after in pairs:
        for was, now in _windows(before, after, steps):
            for slower in [now] if now.plant else _slower(now, times):
                claims = _compared(was, slower)
                others = {*claims} - {slower.plant, "the step", "the whole backward"}
                found.append((slower.plant in claims, bool(others)))
    return found


def _slower(recording: _Recording, times: float) -> Iterator[_Recording]:
    """Yield the recording with each of five large modules slower."""
    sizes = {
        path: median(wall) for path, wall in recording.wall.items() if not path.startswith("(")
    }
    least = _LARGE * sum(sizes.values())
    large = sorted(path for path, size in sizes.items() if size >= least)
    for path in large[:: max(1, len(large) // 5)][:5]:
        yield recording.slower(path, times)


def _share(number: int, of: int) -> str:
    return f"{number} of {of} ({number / of:.1%})" if of else "none"


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what to compare")
    parser.add_argument("--steps", default="10", help="steps of a window, several with commas")
    parser.add_argument("--times", type=float, default=1.5, help="factor where none is planted")
    arguments = parser.parse_args(argv)
    lines = []
    for path in arguments.files:
        recordings = _read(path)
        for steps in map(int, arguments.steps.split(",")):
            alarms = _false_alarms(recordings, steps)
            power = _power(recordings, steps, arguments.times)
            named = Counter(name for claims in alarms for name in claims)
            lines.append(
                (
                    path.name,
                    steps,
                    _share(sum(map(bool, alarms)), len(alarms)),
                    ", ".join(f"{name} {count}" for name, count in named.most_common(3)),
                    _share(sum(hit for hit, _ in power), len(power)),
                    _share(sum(other for _, other in power), len(power)),
                )
            )
    print_table(("file", "steps", "false alarms", "of", "planted found", "others"), lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
