"""Is the cost that Backspot shows for a module saved when the module is improved?

    python -m benchmarks.accuracy.predicted_saving

For each known remedy: the saving that Backspot attributes (forward, recomputation and backward wall
time of the changed subtrees and their neighbours, before minus after), against the change of the
step time, measured without profiler in turn, before and after. A second column is what could be
said from the run before alone: the changed subtrees' wall time, more than which no remedy can save.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases import exit_code, run_cases, turn
from benchmarks.common import (
    choose,
    command_line,
    interleaved,
    parse,
    print_table,
    record_trace,
    script,
    spread,
)
from benchmarks.traces.plain import busy, read_plain
from benchmarks.traces.trim import read_trace
from benchmarks.workers import Handler, Job, Record, Stage, serve

if TYPE_CHECKING:
    from benchmarks.accuracy.remedies import Remedy, Side

_GPU_BOUND = 0.9
_NEAR = 0.15
_FAR = 0.40


def _profile(side: Side, device: str, path: Path, steps: int) -> dict[str, Any]:
    """Each module's forward and backward, milliseconds a step."""
    import backspot

    with backspot.instrument(side.model):
        record_trace(side.step, device, path, steps=steps, warmup=3)
    report = backspot.locate(path)
    plain = read_plain(read_trace(path))
    return {
        "rows": {
            row.path: {
                "forward": row.forward_ms,
                "backward": row.wall_ms,
                "recompute": row.recompute_ns / 1e6,
                "heaviest": row.nodes[0].name if row.nodes else "",
            }
            for row in report.modules
        },
        "steps": report.steps,
        "profiled_step_ms": report.step_ns / 1e6,
        "backward_ms": report.wall_ns / 1e6,
        "busy": busy(plain.intervals) / max(1, report.recorded_wall_ns),
        "lost": plain.lost,
        "coverage": report.coverage.wall,
        "warnings": list(report.warnings),
    }


def _within(path: str, roots: tuple[str, ...]) -> bool:
    """Whether a row counts: in one of the subtrees, or, for ``""`` and ``=PATH``, that row."""
    for root in roots:
        if root == "" or root.startswith("="):
            if path == root.removeprefix("="):
                return True
        elif path == root or path.startswith(f"{root}."):
            return True
    return False


def _cost(profiled: dict[str, Any], roots: tuple[str, ...] | None) -> float:
    """Forward and backward of the rows; recomputation is part of the backward's wall time."""
    return sum(
        row["forward"] + row["backward"]
        for path, row in profiled["rows"].items()
        if roots is None or _within(path, roots)
    )


def _judge(
    remedy: Remedy, before: dict[str, Any], after: dict[str, Any], times: list[list[float]]
) -> dict[str, Any]:
    step_before, step_after = (spread(t) for t in times)
    real = spread([a - b for a, b in zip(*times, strict=True)])
    reach = (*remedy.changed, *remedy.neighbours)
    predicted = _cost(before, reach) - _cost(after, reach)
    bound = _cost(before, remedy.changed)
    gpu_bound = min(before["busy"], after["busy"]) >= _GPU_BOUND
    real_share = real["median"] / step_before["median"]
    predicted_share = predicted / before["profiled_step_ms"]
    error = (
        abs(predicted - real["median"]) / abs(real["median"])
        if gpu_bound
        else abs(predicted_share - real_share) / abs(real_share)
    )
    noise = real["high"] - real["low"]
    return {
        "bound_by": "gpu" if gpu_bound else "launch",
        "step_before_ms": step_before,
        "step_after_ms": step_after,
        "real_saving_ms": real,
        "real_share": real_share,
        "predicted_saving_ms": predicted,
        "predicted_share": predicted_share,
        "changed_only_ms": bound - _cost(after, remedy.changed),
        "every_row_ms": _cost(before, None) - _cost(after, None),
        "error": error,
        "compared": "ms" if gpu_bound else "share",
        "noise_of_saving": noise / abs(real["median"]),
        "bound_ms": bound,
        "bound_held": real["median"] <= bound + noise / 2,
        "moved": sorted(
            (
                (path, _row_cost(before, path) - _row_cost(after, path))
                for path in {*before["rows"], *after["rows"]}
            ),
            key=lambda item: -abs(item[1]),
        )[:12],
    }


def _row_cost(profiled: dict[str, Any], path: str) -> float:
    row = profiled["rows"].get(path)
    return row["forward"] + row["backward"] if row else 0.0


def _measuring(arguments: argparse.Namespace) -> Handler:
    def handle(job: Job, stage: Stage) -> Record:
        with turn("torch", "torch._dynamo", "timm"):
            return _measure(job["name"], arguments.device, arguments.small, stage)

    return handle


def _measure(name: str, device: str, small: bool, stage: Stage) -> Record:
    import torch

    from benchmarks.accuracy.remedies import REMEDIES, describe
    from benchmarks.models import Context

    remedy = REMEDIES[name]
    result: Record = describe(name)
    sides = []
    for after in (False, True):
        torch.manual_seed(0)
        sides.append(remedy.build(Context(device, small), after))
    # Profiled first: the profiler leaves the step as it was, compiled regions included.
    with tempfile.TemporaryDirectory() as folder:
        for kind, side in zip(("before", "after"), sides, strict=True):
            for _ in range(3):
                side.step()
            result[kind] = _profile(side, device, Path(folder) / f"{kind}.json", 2 if small else 5)
            stage(kind, result)
    times = interleaved(
        [side.step for side in sides], device, rounds=3 if small else 25,
        inner=1 if small else 5, seconds=45,
    )  # fmt: skip
    result["times_ms"] = times
    result["result"] = _judge(remedy, result["before"], result["after"], times)
    for kind in ("before", "after"):  # the rows that say something
        rows = result[kind]["rows"]
        heavy = sorted(rows, key=lambda p: -rows[p]["forward"] - rows[p]["backward"])[:40]
        result[kind]["rows"] = {path: rows[path] for path in heavy}
    return result


def _describe(result: Record) -> Iterator[str]:
    judged = result["result"]
    yield (
        f"{judged['bound_by']}-bound: real {judged['real_saving_ms']['median']:.3f} ms of "
        f"{judged['step_before_ms']['median']:.2f}, predicted {judged['predicted_saving_ms']:.3f}, "
        f"every row {judged['every_row_ms']:.3f}, error {judged['error']:.1%}, "
        f"bound {judged['bound_ms']:.2f} held: {judged['bound_held']}"
    )
    yield f"  moved: {[(p, round(ms, 3)) for p, ms in judged['moved'][:6]]}"


def _summarise(cases: dict[str, Any]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for bound in ("gpu", "launch"):
        errors = {
            name: case["result"]["error"]
            for name, case in cases.items()
            if case.get("result", {}).get("bound_by") == bound
        }
        if errors:
            summary[bound] = {
                "remedies": len(errors),
                "median_error": statistics.median(errors.values()),
                "within_15_percent": sum(e <= _NEAR for e in errors.values()),
                "above_40_percent": [name for name, e in errors.items() if e > _FAR],
            }
    held = [case["result"]["bound_held"] for case in cases.values() if "result" in case]
    return {"summary": summary, "bounds_held": f"{sum(held)} of {len(held)}"}


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(command_line(__doc__, out="predicted_saving.json", seconds=520, jobs=2), argv)
    if arguments.worker:
        serve(_measuring(arguments))
        return 0
    from benchmarks.accuracy.remedies import REMEDIES

    cases = run_cases(
        __spec__.name,
        choose(arguments, {n: r.about for n, r in REMEDIES.items()}, ("attention_fused",)),
        arguments,
        lambda: _measuring(arguments),
        summarise=_summarise,
        describe=_describe,
    )
    head = ("remedy", "bound by", "step ms", "after", "saved ms", "quartiles", "predicted ms",
            "saved %", "predicted %", "error %", "said before: at most ms", "held")  # fmt: skip
    rows = []
    for name, case in cases.items():
        if "result" not in case:
            rows.append((case.get("about", name), case["end"], *([None] * 10)))
            continue
        found = case["result"]
        saved = found["real_saving_ms"]
        rows.append((
            case["about"], found["bound_by"], found["step_before_ms"]["median"],
            found["step_after_ms"]["median"], saved["median"],
            f"{saved['low']:.2f}–{saved['high']:.2f}", found["predicted_saving_ms"],
            found["real_share"] * 100, found["predicted_share"] * 100, found["error"] * 100,
            found["bound_ms"], "yes" if found["bound_held"] else "no",
        ))  # fmt: skip
    print_table(head, rows)
    print(_summarise(cases))
    return exit_code(cases.values())


if __name__ == "__main__":
    sys.exit(main())
