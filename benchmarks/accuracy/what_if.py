"""Does a step save what ``what_if`` says? Predicts real changes by replay, then makes them.

    python -m benchmarks what_if

For each change of ``changes.py``: ``backspot.profile`` of the model before, and what its report
says of the change, against the difference of the step times, measured without profiler in turn.
Both are shares of their own step, as the speed of a machine can change between the two. The same
again by the trace alone, as on a machine whose steps nobody timed. ``replayed_error`` is that of
the step that a replay predicts, as published replays state it: with the change, and of the
unchanged step by the trace alone. One of the models is compiled.

For the known remedies (``--cases remedies``), a second recording says by how much each changed part
became faster, on the host and on the device, and the replay of the first one says what that saves.
The wall time of the rows is then that of the changed subtrees and their neighbours, forward and
backward, before minus after: the saving that a report shows. The summary compares it with the real
one, in milliseconds where the GPU limits the step, else as shares of the recorded and of the real
step; ``bounded`` says how often no more was saved than what the changed subtrees cost before.

Not covered is the size of DDP's buckets: that needs several GPUs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Figures, Run, each, turn
from benchmarks.measuring import interleaved, record_trace, spread
from benchmarks.workers import Job, Record, Stage

if TYPE_CHECKING:
    from backspot.analysis.replay.host import ProfilerCost
    from backspot.analysis.replay.replayable import Replayable
    from backspot.analysis.replay.saving import Change

_REMEDY = "remedy_"
_MISS = 0.06
_BUSY = 0.9


# Recordings for replays --------------------------------------------------------------------------


def read_recording(path: Path) -> Replayable:
    """Compile a trace for replays.

    Raises:
        RuntimeError: If it cannot be replayed.
    """
    from backspot.analysis.recording import Recording
    from backspot.analysis.replay.replayable import Refusal, prepare

    recording = prepare(Recording.read(path))
    if isinstance(recording, Refusal):
        raise RuntimeError(recording.reason)  # noqa: TRY004 - what the trace is, not a type
    return recording


def cost_of(recording: Replayable, real_step_ns: float) -> tuple[ProfilerCost, str]:
    """Return the costs fitted to a real step, or the usual ones and why they do not fit."""
    from backspot.analysis.replay.host import MEASURED
    from backspot.analysis.replay.replay import fit
    from backspot.analysis.replay.replayable import Refusal

    cost = fit(recording, real_step_ns)
    return (MEASURED, cost.reason) if isinstance(cost, Refusal) else (cost, "")


def _record(model: Any, step: Callable[[], None], device: str, path: Path, small: bool) -> Any:
    import backspot

    with backspot.instrument(model):
        for _ in range(3):  # what is compiled, is compiled here
            step()
        record_trace(step, device, path, steps=2 if small else 5, warmup=3, settled=1)
    return backspot.locate(path), read_recording(path)


def _times(steps: Sequence[Callable[[], None]], device: str, small: bool) -> list[list[float]]:
    """Milliseconds of each step, in turn; without a GPU those of the processor, of one thread.

    Other programs on a machine move its clock by more than most changes.
    """
    rounds, inner = (3, 1) if small else (12, 3)
    seconds = 1.5 * len(steps) if device != "cpu" else 4.0 * len(steps)
    clock = time.process_time if device == "cpu" else time.perf_counter
    return interleaved(
        steps, device, rounds=rounds, inner=inner, warmup=2, seconds=seconds, clock=clock
    )


# Measure and predict -----------------------------------------------------------------------------


def _rows_ms(report: Any, paths: Sequence[str], *, forward: bool) -> float:
    """The wall time of the rows of the subtrees, in milliseconds a step.

    Of ``""`` and of ``=PATH`` that row counts, and not its subtree.
    """
    own = {path.removeprefix("=") for path in paths}
    below = tuple(f"{path}." for path in paths if path and path[0] != "=")
    mine = [row for row in report.modules if row.path in own or row.path.startswith(below)]
    return sum(row.wall_ms + forward * row.forward_ns / 1e6 for row in mine)


def _judge(
    about: str,
    recording: Replayable,
    report: Any,
    change: Change,
    wall_ms: float,
    before: list[float],
    after: list[float],
) -> Record:
    from backspot.analysis.replay.predict import Prediction
    from backspot.analysis.typical import every_step

    step = statistics.median(before)
    real = spread([a - b for a, b in zip(before, after, strict=True)])
    cost, said = cost_of(recording, step * 1e6)
    prediction = Prediction(
        recording, every_step(len(recording.steps.start)), cost, fitted=not said
    )
    _, (saving,) = prediction.savings([change])
    recorded = report.step_ns / 1e6
    wall = wall_ms / recorded * step
    low, high = saving.low_ns / 1e6, saving.high_ns / 1e6
    return {
        "about": about,
        "bound": "gpu" if prediction.is_device_bound else "host",
        "step_ms": step,
        "recorded_ms": recorded,
        "operator_ns": cost.operator_ns,
        "refused": said,
        "real_ms": real,
        "saves_ms": saving.ns / 1e6,
        "saves_range_ms": [low, high],
        "in_range": low <= real["median"] <= high,
        "wall_ms": wall,
        "error": abs(saving.ns / 1e6 - real["median"]) / step,
        "error_of_wall": abs(wall - real["median"]) / step,
    }


def _said(report: Any, asked: dict[str, Any], real_ms: float, step_ms: float) -> Record:
    """What a report says of a change, against the real saving; only why not, if it refuses."""
    import backspot

    try:
        found = report.what_if(**asked)
    except backspot.UsageError as error:
        return {"refused": str(error)}
    whole = found.step_ns + found.saves_ns
    saves, low, high = (
        ns / whole * step_ms for ns in (found.saves_ns, found.low_ns, found.high_ns)
    )
    return {
        "saves_ms": saves,
        "saves_range_ms": [low, high],
        "in_range": low <= real_ms <= high,
        "error": abs(saves - real_ms) / step_ms,
        "replayed_error": abs((step_ms - saves) / (step_ms - real_ms) - 1),
        "at_best": found.at_best,
    }


def _switches(name: str, context: Any, folder: Path, stage: Stage) -> list[Record]:
    import backspot
    from benchmarks.accuracy.changes import CASES

    case = CASES[name](context)
    state = [False] * len(case.switches)

    def switched(number: int) -> Callable[[], None]:
        def step() -> None:
            for other, switch in enumerate(case.switches):
                if state[other] != (other == number):
                    state[other] = other == number
                    switch.set(state[other])
            case.step()

        return step

    steps = [switched(number) for number in range(-1, len(case.switches))]
    path = folder / "before.json.gz"
    report = backspot.profile(steps[0], case.model, trace=path, stacks=False)
    alone = backspot.locate(path)
    stage("recorded", {"recorded_ms": report.step_ns / 1e6})
    before, *others = _times(steps, context.device, context.small)
    step_ms = statistics.median(before)
    found: list[Record] = []
    for switch, after in zip(case.switches, others, strict=True):
        real = spread([a - b for a, b in zip(before, after, strict=True)])
        about = {
            "about": switch.about,
            "kind": switch.kind,
            "bound": "gpu" if report.utilisation >= _BUSY else "host",
            "step_ms": step_ms,
            "profiled_apart_ms": (report.unprofiled_step_ns or 0) / 1e6,
            "real_ms": real,
        }
        said = _said(report, switch.asked, real["median"], step_ms)
        by_trace = _said(alone, switch.asked, real["median"], step_ms)
        found.append(about | said | {"alone": by_trace})
    replayed = alone.replayed_step
    return [
        one | {"unchanged_alone_error": abs(replayed.ns / 1e6 / step_ms - 1) if replayed else None}
        for one in found
    ]


def _remedy(name: str, context: Any, folder: Path) -> list[Record]:
    import torch

    from benchmarks.accuracy.remedies import REMEDIES

    remedy = REMEDIES[name]
    sides, records = [], []
    for after in (False, True):
        torch.manual_seed(0)
        sides.append(remedy.build(context, after))
        path = folder / f"{after}.json"
        records.append(
            _record(sides[-1].model, sides[-1].step, context.device, path, context.small)
        )
    (report, before), (later, after_it) = records
    reach = (*remedy.changed, *remedy.neighbours)
    times = _times([side.step for side in sides], context.device, context.small)
    rows = [_rows_ms(one, reach, forward=True) for one in (report, later)]
    change = _as_after(before, after_it, reach)
    found = _judge(remedy.about, before, report, change, rows[0] - rows[1], *times)
    real, noise = found["real_ms"], found["real_ms"]["high"] - found["real_ms"]["low"]
    in_ms = found["bound"] == "gpu"
    shown = rows[0] - rows[1] if in_ms else found["wall_ms"]
    most = _rows_ms(report, remedy.changed, forward=True)
    found["error_of_shown"] = abs(shown / real["median"] - 1) if real["median"] else None
    found["bounded"] = real["median"] <= most + noise / 2
    return [found]


def _as_after(before: Replayable, after: Replayable, reach: Sequence[str]) -> Change:
    """Scale each part by what it takes after the remedy: host and device, forward and backward."""
    import numpy as np

    from backspot.analysis.replay.saving import change_of

    ownership = before.ownership
    spans, work = np.ones(len(ownership.spans.start)), np.ones(len(ownership.work.start))
    for path in reach:
        first, second = _spent(before, path), _spent(after, path)
        for key, (where, taken) in first.items():
            factor = second[key][1] / taken if taken else 1.0
            (spans if key[0] == "host" else work)[where] = factor
    mine, done = np.flatnonzero(spans != 1), np.flatnonzero(work != 1)
    return change_of(before, (mine, spans[mine]), (done, work[done]))


def _spent(recording: Replayable, path: str) -> dict[tuple[str, bool], tuple[Any, float]]:
    """What a part takes, by host or device and whether in backward: its items, and ns a step."""
    import numpy as np

    from backspot.analysis.replay.saving import owners_within

    ownership, steps = recording.ownership, len(recording.steps.start)
    only = path == "" or path.startswith("=")  # that row, and not its subtree
    root = path.removeprefix("=")
    owners = [
        owner
        for owner in owners_within(ownership, [root])[root]
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


def _errors(records: Sequence[Record]) -> dict[str, Any]:
    """How far the predictions of changes are off; bounds are no predictions."""
    known = [one for one in records if "saves_ms" in one and not one.get("at_best")]
    if not known:
        return {"changes": 0, "refused": len(records)}
    errors = sorted(one["error"] for one in known)
    replayed = [one["replayed_error"] for one in known if "replayed_error" in one]
    return {
        "changes": len(known),
        "refused": len(records) - len(known),
        "median_error": statistics.median(errors),
        "error_90": errors[min(len(errors) - 1, int(0.90 * len(errors)))],
        "error_95": errors[min(len(errors) - 1, int(0.95 * len(errors)))],
        "worst_error": errors[-1],
        "in_range": statistics.mean(one["in_range"] for one in known),
        "replayed_step_error": statistics.mean(replayed) if replayed else None,
    }


def _by(records: Iterable[Record], key: str) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for one in records:
        found.setdefault(one.get(key, "remedy"), []).append(one)
    return found


def _summary(changes: Sequence[Record]) -> dict[str, Any]:
    if not changes:
        return {}
    summary: dict[str, Any] = {"all": _errors(changes)}
    for key in ("bound", "kind"):
        summary |= {kind: _errors(mine) for kind, mine in _by(changes, key).items()}
    summary["trace alone"] = _errors([one["alone"] for one in changes if "alone" in one])
    unchanged = [
        one["unchanged_alone_error"] for one in changes if one.get("unchanged_alone_error")
    ]
    if unchanged:
        summary["trace alone"]["unchanged_step_error"] = statistics.mean(set(unchanged))
    shown = [one["error_of_shown"] for one in changes if one.get("error_of_shown") is not None]
    if shown:
        summary["remedies"] = {
            "count": len(shown),
            "median_error": statistics.median(shown),
            "worst_error": max(shown),
            "bounded": sum(one.get("bounded", False) for one in changes),
        }
    return summary | {"misses": [one["about"] for one in changes if one.get("error", 0) > _MISS]}


def answer(run: Run) -> Figures:
    def handle(job: Job, stage: Stage) -> Record:
        with turn("torch", "torch._dynamo", "torchvision", "timm"):
            import torch

            torch.manual_seed(0)
            if run.device == "cpu":
                torch.set_num_threads(1)
            with tempfile.TemporaryDirectory() as scratch:
                if job["name"].startswith(_REMEDY):
                    name = job["name"].removeprefix(_REMEDY)
                    return {"changes": _remedy(name, run.context, Path(scratch))}
                return {"changes": _switches(job["name"], run.context, Path(scratch), stage)}

    def known() -> dict[str, Any]:
        from benchmarks.accuracy.changes import CASES
        from benchmarks.accuracy.remedies import REMEDIES

        remedies = {f"{_REMEDY}{name}": remedy.about for name, remedy in REMEDIES.items()}
        if run.cases == "remedies":
            run.cases = ",".join(remedies)
        return CASES | remedies

    small = ("vit_tiny", "trainer", f"{_REMEDY}attention_fused")
    cases = each(run, known, handle, small=small)
    changes = [
        {"case": name} | one for name, case in cases.items() for one in case.get("changes", ())
    ]
    shown = ("case", "about", "bound", "step_ms", "saves_ms", "saves_range_ms", "error", "refused")
    rows = [
        {"real_ms": one["real_ms"]["median"], **{key: one.get(key, "") for key in shown}}
        for one in changes
    ]
    return {"cases": cases, "rows": rows, "summary": _summary(changes)}
