"""Does ``backspot.compare`` tell slower code from the same code recorded again?

    python -m benchmarks compare_runs --device cpu --pairs 50 --keep recorded
    python -m benchmarks compare_runs judge recorded      # again, by the rules of today

Each pair has three recordings a side (``--runs``), made in turns:

- False alarms: both sides are the same ViT, and with ``--cases`` the same ResNet-50. Nothing may
  be claimed of the code.
- Power: after, a step of the ViT takes 10% longer (``--percent``), in the backward of one module,
  another one for each pair. That the code is slower must be claimed, of the step or of this module.

The same recordings, one of each side, show how often two recordings of the same code differ beyond
the noise of their steps: that is no claim about the code.

Each recording is ``backspot.profile`` with its defaults in a process of its own. The recordings are
kept as reports in JSON with ``--keep``, and a run that was ended goes on from those that are there.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import backspot
from benchmarks.harness import (
    Figures,
    Run,
    UsageError,
    judged_again,
    profile_in_turn,
    recordings,
    write_json,
)
from benchmarks.measuring import busy, profile_default
from benchmarks.workers import Handler, Job, Phase, Record, Stage, run_jobs, serve, worker_command

if TYPE_CHECKING:
    import torch

    from backspot.results import Change
    from benchmarks.models import Context

_CASES = {
    "equal": "the same ViT on both sides",
    "slower": "after, a step of the ViT takes longer, in one module's backward",
    "resnet50": "the same ResNet-50 on both sides",
}
_DEFAULT = ("equal", "slower")
_BLOCKS = 4
_PLACES = tuple(
    f"blocks.{block}.{part}"
    for block in range(_BLOCKS)
    for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
)
"""The modules of the ViT, one of which is slower in each pair."""
_OF_A_BLOCK = len(_PLACES) // _BLOCKS
_CALIBRATIONS = 3
_TIMEOUT_S = 200.0


def _places(small: bool) -> tuple[str, ...]:
    """Return those that the ViT has: it has one block in a small run."""
    return _PLACES[:_OF_A_BLOCK] if small else _PLACES


# One recording -----------------------------------------------------------------------------------


class _Vit:
    """A ViT with a planted backward in each module of ``_places``; all but one take no time.

    The plants are in every recording: the only change of a pair is how long one of them takes.
    """

    def __init__(self, context: Context, job: Job) -> None:
        from torch.nn.functional import cross_entropy

        from benchmarks.accuracy.plants import cycles_per_millisecond, planted, spin_for
        from benchmarks.models import Vit, training_step

        small, on_cpu = context.small, context.device == "cpu"
        width, side, patch = (48, 16, 8) if small else (128, 32, 8) if on_cpu else (1024, 224, 16)
        batch = 2 if small else 8 if on_cpu else 96
        blocks = 1 if small else _BLOCKS
        self.model = Vit(width, blocks, side, patch).to(context.device).train()
        modules = dict(self.model.named_modules())

        @functools.cache
        def spin_of() -> Callable[[], None]:
            # In the first step, because another worker may use the GPU before it.
            cycles = 0.0 if on_cpu else cycles_per_millisecond()
            return spin_for(job["ms"], context.device, cycles)

        def chosen() -> None:
            spin_of()()

        self.plants = stack = ExitStack()  # which removes them when it is gone
        plants = []
        for path in _places(small):
            spin = chosen if path == job.get("path") else lambda: None
            plants.append(stack.enter_context(planted(modules[path], 0, spin)))
        images, labels = context.randn(batch, 3, side, side), context.randint(1000, batch)

        def loss() -> torch.Tensor:
            for plant in plants:
                plant.begin_step()
            return cross_entropy(self.model(images), labels)

        self.step = training_step(self.model, loss, around=lambda: context.bf16(not on_cpu))


class _Resnet:
    """A ResNet-50."""

    def __init__(self, context: Context) -> None:
        from torch.nn.functional import cross_entropy

        from benchmarks.models import timm_model, training_step

        self.model = timm_model(context, "resnet10t" if context.small else "resnet50")
        on_cpu = context.device == "cpu"
        side, batch = context.pick(224, 32), 4 if on_cpu else context.pick(128, 4)
        images, labels = context.randn(batch, 3, side, side), context.randint(1000, batch)
        self.step = training_step(
            self.model,
            lambda: cross_entropy(self.model(images), labels),
            around=lambda: context.bf16(not on_cpu),
        )


def _recording(device: str, small: bool) -> Handler:
    """Return what makes one recording and saves it."""

    def handle(job: Job, _: Stage) -> Record:
        import torch

        from benchmarks.models import Context

        torch.manual_seed(0)
        context = Context(device, small)
        made = _Resnet(context) if job["kind"] == "resnet50" else _Vit(context, job)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = profile_in_turn(made.step, made.model, steps=job["steps"])
        report.save(job["file"], force=True)
        return {}

    return handle


# All recordings ----------------------------------------------------------------------------------


def _file(folder: Path, kind: str, pair: int, number: int = 0) -> Path:
    return folder / f"{kind}.{pair}.{number}.report.json"


_Recording = tuple[str, int, int]
"""Its kind, its pair, and its number among those of the pair."""


def _recordings(cases: Sequence[str], pairs: int, runs: int) -> Iterator[_Recording]:
    """Yield each recording, those of the sides of a pair in turns."""
    for pair in range(pairs):
        for number in range(runs):
            for kind in ("vit", "resnet50"):
                wanted = {"equal", "slower"} if kind == "vit" else {"resnet50"}
                if not wanted & {*cases}:
                    continue
                yield kind, pair, 2 * number
                if kind == "vit" and "slower" in cases:
                    yield "slower", pair, number
                if {"equal", "resnet50"} & wanted & {*cases}:
                    yield kind, pair, 2 * number + 1


def _record(run: Any, cases: Sequence[str], folder: Path) -> list[str]:
    """Make all recordings that the folder does not have yet; return how each ended."""
    steps = run.steps or (3 if run.small else profile_default("steps"))
    plants_file = folder / "plants.json"
    plants = json.loads(plants_file.read_text()) if plants_file.exists() else {}
    ends = []
    count = 1 if run.small else _CALIBRATIONS
    calibrations = [("calibration", number, 0) for number in range(count)]
    with busy(run.busy):
        for wanted in (
            calibrations if "slower" in cases else [],
            [*_recordings(cases, run.pairs, run.runs)],
        ):
            jobs = [_job(folder, one, steps) for one in wanted if not _file(folder, *one).exists()]
            for job in jobs:
                if job["kind"] == "slower":
                    job |= plants.setdefault(str(job["pair"]), _plant(folder, run, job["pair"]))
            write_json(plants_file, plants)
            records = run_jobs(
                jobs,
                worker_command(run),
                lambda: _recording(run.device, run.small),
                [Phase(run.jobs, _TIMEOUT_S)],
                seconds=run.seconds,
                fresh=True,
            )
            ends += [record["end"] for record in records]
    return ends


def _job(folder: Path, recording: _Recording, steps: int) -> Job:
    kind, pair, number = recording
    file = str(_file(folder, kind, pair, number).absolute())
    return {
        "name": f"{kind}.{pair}.{number}",
        "kind": kind,
        "pair": pair,
        "steps": steps,
        "file": file,
    }


def _plant(folder: Path, run: Any, pair: int) -> Record:
    """Return where and for how long the backward of a pair is held up."""
    files = [_file(folder, "calibration", number) for number in range(_CALIBRATIONS)]
    usual = statistics.median(_step_ms(backspot.Report.load(one)) for one in files if one.exists())
    places = _places(run.small)
    path = places[pair * 5 % len(places)]
    return {"path": path, "ms": usual * run.percent / 100, "percent": run.percent}


def _step_ms(report: backspot.Report) -> float:
    return (report.unprofiled_step_ns or report.step_ns) / 1e6


# Judging -----------------------------------------------------------------------------------------


def _sides(folder: Path, case: str, pair: int) -> tuple[list[Path], list[Path]]:
    """Return the files of both sides of a pair, those that are there."""
    kind = "resnet50" if case == "resnet50" else "vit"
    files = [*folder.glob(f"{kind}.{pair}.*.report.json")]
    known = {int(path.name.split(".")[2]): path for path in files}
    before = [path for number, path in sorted(known.items()) if number % 2 == 0]
    after = [path for number, path in sorted(known.items()) if number % 2]
    if case == "slower":
        slower = folder.glob(f"slower.{pair}.*.report.json")
        after = sorted(slower, key=lambda path: int(path.name.split(".")[2]))
    return before, after


def _changes(comparison: backspot.Comparison) -> list[Change]:
    return [comparison.step, *comparison.phases, comparison.whole, *comparison.changes]


def _said(changes: Sequence[Change]) -> list[tuple[str, str, str]]:
    return [(change.kind, change.path, change.verdict) for change in changes]


def _compared(before: Sequence[Path], after: Sequence[Path], planted: Record) -> Record:
    comparison = backspot.compare(before, after)
    step = comparison.step
    claims = [change for change in _changes(comparison) if change.claimed]
    alone = backspot.compare(before[0], after[0])
    spreads = [
        statistics.stdev(values) / statistics.fmean(values)
        for values in (step.before_ms_by_recording, step.after_ms_by_recording)
    ]
    record: Record = {
        "before_ms": step.before_ms_by_recording,
        "after_ms": step.after_ms_by_recording,
        "spread": statistics.fmean(spreads),
        "interval_ms": (step.low_ms, step.high_ms),
        "claims": _said(claims),
        "claims_of_one_recording": _said([one for one in _changes(alone) if one.claimed]),
        "differences_of_one_recording": _said([one for one in _changes(alone) if one.differs]),
    }
    if not planted:
        every = [*before, *after]
        claims_of_splits = [
            _said([one for one in _changes(backspot.compare(*sides)) if one.claimed])
            for sides in _splits(every)
        ]
        return record | {"claims_of_splits": claims_of_splits}
    modules = {one.path for one in claims if one.kind == "module" and one.verdict == "slower"}
    in_step, in_module = step.verdict == "slower", planted["path"] in modules
    record |= {"planted": planted, "in_step": in_step, "in_module": in_module}
    record["others"] = sorted(
        {one.path for one in claims if one.kind == "module"} - {planted["path"]}
    )
    return record


def _splits(recordings: Sequence[Path]) -> Iterator[tuple[list[Path], list[Path]]]:
    """Yield each way to make two sides of equal recordings; most were not made in turns."""
    first, *others = recordings
    for chosen in itertools.combinations(others, len(recordings) // 2 - 1):
        yield [first, *chosen], [one for one in others if one not in chosen]


def _judge(folder: Path) -> Figures:
    """Compare all pairs of a folder whose sides are complete."""
    plants_file = folder / "plants.json"
    plants = json.loads(plants_file.read_text()) if plants_file.exists() else {}
    results: dict[str, list[Record]] = {}
    named = {path.name.split(".")[1] for path in folder.glob("*.report.json")}
    for pair in sorted(map(int, named)):
        for case in _CASES:
            before, after = _sides(folder, case, pair)
            if len(before) < 2 or len(before) != len(after):
                continue
            planted = plants.get(str(pair), {}) if case == "slower" else {}
            record = {"pair": pair, **_compared(before, after, planted)}
            results.setdefault(case, []).append(record)
    if not results:
        raise UsageError(f"{folder} has no pair with two recordings or more on each side")
    summary = {case: _summary(records) for case, records in results.items()}
    rows = [{"case": _CASES[case], **one} for case, one in summary.items()]
    lines = [_line(case, one) for case, records in results.items() for one in records]
    return {"rows": rows, "lines": lines, "summary": summary, "pairs": results}


def _line(case: str, record: Record) -> Record:
    """What is kept of a pair: the step of each recording, and what was claimed, by kind."""
    shown = ("before_ms", "after_ms", "interval_ms", "in_step", "in_module")
    line = {"case": case, "pair": record["pair"], **{key: record.get(key) for key in shown}}
    line["claims"] = " ".join(kind for kind, *_ in record["claims"])
    line["claims of one"] = " ".join(kind for kind, *_ in record["claims_of_one_recording"])
    line["one differs"] = bool(record["differences_of_one_recording"])
    if "claims_of_splits" in record:
        line["splits"] = len(record["claims_of_splits"])
        line["splits with a claim"] = sum(map(bool, record["claims_of_splits"]))
    return line | {"planted": record.get("planted", {}).get("path"), "others": record.get("others")}


def _summary(records: Sequence[Record]) -> Record:
    spreads = sorted(record["spread"] for record in records)
    changes = sorted(
        abs(statistics.fmean(record["after_ms"]) / statistics.fmean(record["before_ms"]) - 1)
        for record in records
    )
    summary: Record = {
        "pairs": len(records),
        "recordings_a_side": len(records[0]["before_ms"]),
        "spread_of_recordings": statistics.median(spreads),
        "largest_spread": spreads[-1],
        "change_of_step": statistics.median(changes),
        "largest_change": changes[-1],
    }
    if "planted" in records[0]:
        found = [record["in_step"] or record["in_module"] for record in records]
        missed = Counter(
            record["planted"]["path"]
            for record, is_found in zip(records, found, strict=True)
            if not is_found
        )
        return summary | {
            "found": sum(found),
            "in_step": sum(record["in_step"] for record in records),
            "in_module": sum(record["in_module"] for record in records),
            "another_module": sum(bool(record["others"]) for record in records),
            "missed": dict(missed.most_common()),
        }
    kinds = [{kind for kind, *_ in record["claims"]} for record in records]
    return summary | {
        "with_a_claim": sum(map(bool, kinds)),
        "splits": sum(len(record["claims_of_splits"]) for record in records),
        "splits_with_a_claim": sum(
            bool(claims) for record in records for claims in record["claims_of_splits"]
        ),
        "step_claimed": sum("step" in one for one in kinds),
        "module_claimed": sum("module" in one for one in kinds),
        "with_a_claim_of_one_recording": sum(
            bool(record["claims_of_one_recording"]) for record in records
        ),
        "one_recording_differs": sum(
            bool(record["differences_of_one_recording"]) for record in records
        ),
    }


def options(parser: argparse.ArgumentParser) -> None:
    judged_again(parser)
    parser.add_argument("--pairs", type=int, help="pairs of each case (default: 50)")
    parser.add_argument("--runs", type=int, help="recordings a side (default: 3; small: 2)")
    parser.add_argument("--percent", type=float, default=10, help="how much slower (default: 10)")


def answer(run: Run) -> Figures:
    if run.worker:
        serve(_recording(run.device, run.small))
        raise SystemExit(0)
    cases = run.choose(_CASES, _DEFAULT) if run.cases or run.listed else list(_DEFAULT)
    run.pairs = run.pairs or (1 if run.small else 50)
    run.runs = run.runs or (2 if run.small else 3)
    with recordings(run) as (folder, wanted):
        ends = _record(run, cases, folder) if wanted else []
        failed = {end: {"end": end} for end in ends if end != "done"}
        return {"busy": run.busy or 0, **_judge(folder), "cases": failed}
