"""Does a step save what ``what_if`` says? Predicts real changes by replay, then makes them.

    python -m benchmarks.accuracy.what_if

For each change: one recording of the model before, replayed with the part free, faster, removed or
without its waits, against the difference of the step times, measured without profiler in turn. The
costs of the profiler are fitted to the step before. Beside it stands what the wall time of the rows
would say. Two of the models are compiled. For the remedies of ``predicted_saving.py``, a second
recording says by how much each changed part became faster, on the host and on the device, and the
replay of the first one says what that saves.

Not covered is the size of DDP's buckets: that needs several GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.accuracy.replayed import cost_of, read_recording
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
from benchmarks.workers import Handler, Job, Record, Stage, serve

if TYPE_CHECKING:
    from backspot.analysis.replay.recording import Recording
    from backspot.analysis.typical import every_step
from backspot.analysis.replay.saving import Change

_REMEDY = "remedy_"
_MISS = 0.05


# Measure and predict -----------------------------------------------------------------------------


def _record(model: Any, step: Callable[[], None], device: str, path: Path, small: bool) -> Any:
    import backspot

    with backspot.instrument(model):
        for _ in range(3):  # what is compiled, is compiled here
            step()
        record_trace(step, device, path, steps=2 if small else 5, warmup=3, settled=1)
    return backspot.locate(path), read_recording(path)


def _times(steps: Sequence[Callable[[], None]], device: str, small: bool) -> list[list[float]]:
    """Milliseconds of each step, in turn."""
    return interleaved(
        steps, device, rounds=3 if small else 15, inner=1 if small else 3, warmup=2,
        seconds=3.0 * len(steps),
    )  # fmt: skip


def _rows_ms(report: Any, paths: Sequence[str], *, forward: bool) -> float:
    """What the rows of the subtrees say: wall time, milliseconds a step."""
    mine = [
        row
        for row in report.modules
        if any(row.path == path or row.path.startswith(f"{path}.") for path in paths)
    ]
    wall = sum(row.wall_ms for row in mine)
    return wall + sum(row.forward_ms for row in mine) if forward else wall


def _judge(
    about: str,
    recording: Recording,
    report: Any,
    change: Change,
    wall_ms: float,
    before: list[float],
    after: list[float],
) -> Record:
    from backspot.analysis.replay.predict import Prediction

    step = statistics.median(before)
    real = spread([a - b for a, b in zip(before, after, strict=True)])
    cost, said = cost_of(recording, step * 1e6)
    prediction = Prediction(
        recording, every_step(len(recording.steps.start)), cost, fitted=not said
    )
    _, (saving,) = prediction.savings([change])
    recorded = report.step_ns / 1e6
    wall = wall_ms / recorded * step
    predicted = saving.ns / 1e6
    return {
        "about": about,
        "bound": "gpu" if prediction.is_device_bound else "host",
        "step_ms": step,
        "recorded_ms": recorded,
        "operator_ns": cost.operator_ns,
        "refused": said,
        "real_ms": real,
        "saves_ms": predicted,
        "saves_range_ms": [saving.low_ns / 1e6, saving.high_ns / 1e6],
        "in_range": saving.low_ns / 1e6 <= real["median"] <= saving.high_ns / 1e6,
        "wall_ms": wall,
        "error": abs(predicted - real["median"]) / step,
        "error_of_wall": abs(wall - real["median"]) / step,
    }


def _measure(name: str, device: str, small: bool, stage: Stage) -> Record:
    import torch

    from benchmarks.models import Context

    torch.manual_seed(0)
    context = Context(device, small)
    with tempfile.TemporaryDirectory() as folder:
        if name.startswith(_REMEDY):
            return {"changes": _remedy(name.removeprefix(_REMEDY), context, Path(folder))}
        return {"changes": _switches(name, context, Path(folder), stage)}


def _switches(name: str, context: Any, folder: Path, stage: Stage) -> list[Record]:
    from benchmarks.accuracy.changes import CASES

    device, small = context.device, context.small
    case = CASES[name](context)

    def switched(number: int) -> Callable[[], None]:
        def step() -> None:
            for other, switch in enumerate(case.switches):
                if state[other] != (other == number):
                    state[other] = other == number
                    switch.set(state[other])
            case.step()

        return step

    state = [False] * len(case.switches)
    steps = [switched(number) for number in range(-1, len(case.switches))]
    report, recording = _record(case.model, steps[0], device, folder / "before.json", small)
    stage("recorded", {"recorded_ms": report.step_ns / 1e6})
    times = _times(steps, device, small)
    return [
        _judge(
            switch.about,
            recording,
            report,
            switch.predict(recording.ownership),
            _rows_ms(report, switch.paths(), forward=switch.forward),
            times[0],
            after,
        )
        for switch, after in zip(case.switches, times[1:], strict=True)
    ]


# Remedies ----------------------------------------------------------------------------------------


def _remedy(name: str, context: Any, folder: Path) -> list[Record]:
    import torch

    from benchmarks.accuracy.remedies import REMEDIES

    remedy = REMEDIES[name]
    sides, records = [], []
    for after in (False, True):
        torch.manual_seed(0)
        sides.append(remedy.build(context, after))
    for number, side in enumerate(sides):
        path = folder / f"{number}.json"
        records.append(_record(side.model, side.step, context.device, path, context.small))
    (report, before), (later, after) = records
    reach = (*remedy.changed, *remedy.neighbours)
    times = _times([side.step for side in sides], context.device, context.small)
    own = [path.removeprefix("=") for path in reach]
    rows = [
        sum(
            row.wall_ms + row.forward_ms
            for row in one.modules
            if row.path in own
            or any(path and path[0] != "=" and row.path.startswith(f"{path}.") for path in reach)
        )
        for one in (report, later)
    ]
    # The wall time of the rows has the recording after, too: what both say is saved.
    return [
        _judge(
            remedy.about, before, report, _as_after(before, after, reach), rows[0] - rows[1], *times
        )
    ]


def _as_after(before: Recording, after: Recording, reach: Sequence[str]) -> Change:
    """Scale each part by what it takes after the remedy: host and device, forward and backward."""
    import numpy as np

    from backspot.analysis.replay.saving import Change

    ownership = before.ownership
    spans, work = np.ones(len(ownership.spans.start)), np.ones(len(ownership.work.start))
    for path in reach:
        first, second = _spent(before, path), _spent(after, path)
        for key, (where, taken) in first.items():
            factor = second[key][1] / taken if taken else 1.0
            (spans if key[0] == "host" else work)[where] = factor
    mine, done = np.flatnonzero(spans != 1), np.flatnonzero(work != 1)
    return Change(mine, spans[mine], done, work[done])


def _spent(recording: Recording, path: str) -> dict[tuple[str, bool], tuple[Any, float]]:
    """What a part takes, by host or device and whether in backward: its items, and ns a step."""
    import numpy as np

    from backspot.analysis.replay.saving import owners_within

    ownership, steps = recording.ownership, len(recording.steps.start)
    only = path == "" or path.startswith("=")  # that row, and not its subtree
    root = path.removeprefix("=")
    owners = [
        owner
        for owner in owners_within(ownership, root)
        if not only or ownership.owners.path(owner) == root
    ]
    held = np.diff(recording.line.edges)
    span = recording.line.span
    host = np.bincount(span[span >= 0], held[span >= 0], minlength=len(ownership.spans.start))
    device = ownership.work.end - ownership.work.start
    of_spans, of_work = np.isin(ownership.owner, owners), np.isin(ownership.work_owner, owners)
    found: dict[tuple[str, bool], tuple[Any, float]] = {}
    for backward in (False, True):
        mine = of_spans & ((ownership.passes.of_span >= 0) == backward)
        done = of_work & ((ownership.work.run >= 0) == backward)
        found["host", backward] = mine, float(host[mine].sum()) / steps
        found["device", backward] = done, float(device[done].sum()) / steps
    return found


# The run -----------------------------------------------------------------------------------------


def _measuring(arguments: argparse.Namespace) -> Handler:
    def handle(job: Job, stage: Stage) -> Record:
        with turn("torch", "torch._dynamo", "torchvision", "timm"):
            return _measure(job["name"], arguments.device, arguments.small, stage)

    return handle


def _describe(result: Record) -> Iterator[str]:
    for one in result["changes"]:
        yield (
            f"{one['about']} ({one['bound']}-bound): real {one['real_ms']['median']:.3f} ms of "
            f"{one['step_ms']:.2f}, saves {one['saves_ms']:.3f}, wall {one['wall_ms']:.3f}"
        )


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    for rank, at in enumerate(order):
        ranks[at] = float(rank)
    return ranks


def _rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's, for values that are distinct."""
    if len(first) < 3:
        return None
    return statistics.correlation(_ranks(first), _ranks(second))


def _summarise(cases: dict[str, Any]) -> dict[str, Any]:
    changes = [one | {"case": n} for n, case in cases.items() for one in case.get("changes", ())]
    summary: dict[str, Any] = {}
    for bound in ("gpu", "host", "all"):
        mine = [one for one in changes if bound in (one["bound"], "all")]
        if not mine:
            continue
        real = [one["real_ms"]["median"] / one["step_ms"] for one in mine]
        summary[bound] = {"changes": len(mine), "in_range": sum(one["in_range"] for one in mine)}
        for column, error in (("saves", "error"), ("wall", "error_of_wall")):
            said = [one[f"{column}_ms"] / one["step_ms"] for one in mine]
            summary[bound][column] = {
                "median_error": statistics.median(one[error] for one in mine),
                "worst_error": max(one[error] for one in mine),
                "rank_correlation": _rank_correlation(said, real),
            }
    misses = [f"{one['case']}: {one['about']}" for one in changes if one["error"] > _MISS]
    return {"summary": summary, "misses": misses}


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(command_line(__doc__, out="what_if.json", seconds=520, jobs=2), argv)
    if arguments.worker:
        serve(_measuring(arguments))
        return 0
    from benchmarks.accuracy.changes import CASES
    from benchmarks.accuracy.remedies import REMEDIES

    known = dict.fromkeys(CASES, "")
    known |= {f"{_REMEDY}{name}": remedy.about for name, remedy in REMEDIES.items()}
    small = ("vit_tiny", "repeated_large", "sync_tiny", f"{_REMEDY}attention_fused")
    cases = run_cases(
        __spec__.name,
        choose(arguments, known, small),
        arguments,
        lambda: _measuring(arguments),
        summarise=_summarise,
        describe=_describe,
    )
    rows = []
    for name, case in cases.items():
        if case["end"] != "done":
            rows.append((name, case["end"], *([None] * 7)))
        for one in case.get("changes", ()):
            real = one["real_ms"]
            rows.append((
                name, one["about"], one["bound"], one["step_ms"], real["median"],
                f"{real['low']:.2f}–{real['high']:.2f}", one["saves_ms"], one["wall_ms"],
                one["error"] * 100,
            ))  # fmt: skip
    print_table(
        ("case", "change", "bound", "step ms", "real ms", "quartiles", "saves", "wall", "error %"),
        rows,
    )
    print(_summarise(cases))
    return exit_code(cases.values())


if __name__ == "__main__":
    sys.exit(main())
