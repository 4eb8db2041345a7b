"""Does ``backspot.compare`` tell a real change from the same thing recorded twice?

    python -m benchmarks compare_runs --device cpu --busy 2 --pairs 100 --keep recorded
    python -m benchmarks compare_runs judge recorded      # again, by the rules of today

- False alarms: pairs of equal recordings of a ViT, and with ``--cases`` of a ResNet-50. No
  difference may be claimed.
- Power: in one module of the ViT the backward takes 10% longer (``--percent``), another module for
  each pair. The change must be claimed, in this module.

Each recording is ``backspot.profile`` with its defaults in a process of its own; both kinds of a
pair are recorded one after the other. The recordings are kept as reports in JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    from benchmarks.models import Context

_CASES = {
    "equal": "a ViT, twice",
    "slower": "a ViT, then with a slower backward in one module",
    "resnet50": "a ResNet-50, twice",
}
_DEFAULT = ("equal", "slower")
_BLOCKS = 4
_PLACES = tuple(
    f"blocks.{block}.{part}"
    for block in range(_BLOCKS)
    for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
)
"""The modules of the ViT, one of which is slower in each pair."""
_CALIBRATIONS = 3
_TIMEOUT_S = 200.0


# One recording -----------------------------------------------------------------------------------


class _Vit:
    """A ViT with a planted backward in each module of ``_PLACES``; all but one take no time.

    The plants are in every recording: the only change of a pair is how long one of them takes.
    """

    def __init__(self, context: Context, job: Job) -> None:
        from torch.nn.functional import cross_entropy

        from benchmarks.accuracy.plants import cycles_per_millisecond, planted, spin_for
        from benchmarks.models import Vit, training_step

        small, on_cpu = context.small, context.device == "cpu"
        width, side, patch = (48, 16, 8) if small else (256, 64, 8) if on_cpu else (1024, 224, 16)
        batch = 2 if small else 16 if on_cpu else 96
        self.model = Vit(width, _BLOCKS, side, patch).to(context.device).train()
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
        for path in _PLACES:
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


def _file(folder: Path, kind: str, number: int) -> Path:
    return folder / f"{kind}.{number}.report.json"


def _jobs(cases: Sequence[str], pairs: int) -> Iterator[tuple[str, int]]:
    """Yield kind and number of each recording, those of a pair one after the other."""
    for number in range(_CALIBRATIONS if "slower" in cases else 0):
        yield "calibration", number
    for number in range(pairs + 1):
        last = number == pairs
        if {"equal", "slower"} & {*cases}:
            yield "vit", number
        if "slower" in cases and not last:
            yield "slower", number
        if "resnet50" in cases:
            yield "resnet50", number


def _record(run: Any, cases: Sequence[str], folder: Path) -> list[str]:
    """Make all recordings that the folder does not have yet; return how each ended."""
    steps = run.steps or profile_default("steps")
    wanted = [one for one in _jobs(cases, run.pairs) if not _file(folder, *one).exists()]
    plants_file = folder / "plants.json"
    plants = json.loads(plants_file.read_text()) if plants_file.exists() else {}
    began = [one for one in wanted if one[0] == "calibration"]
    ends = []
    with busy(run.busy):
        for some in (began, [one for one in wanted if one not in began]):
            jobs = [_job(folder, kind, number, steps) for kind, number in some]
            slower = [job for job in jobs if job["kind"] == "slower"]
            if slower:
                typical = _typical_ms(folder)
                for job in slower:
                    path = _PLACES[job["number"] * 5 % len(_PLACES)]
                    milliseconds = typical[path] * run.percent / 100
                    plants[job["name"]] = {"path": path, "ms": milliseconds, "percent": run.percent}
                    job |= plants[job["name"]]
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


def _job(folder: Path, kind: str, number: int, steps: int) -> Job:
    file = str(_file(folder, kind, number).absolute())
    of = {"kind": kind, "number": number, "steps": steps, "file": file}
    return {"name": f"{kind}.{number}", **of}


def _typical_ms(folder: Path) -> Mapping[str, float]:
    """Return what each module's backward takes in the median step before anything is planted."""
    found: dict[str, list[float]] = {path: [] for path in _PLACES}
    for number in range(_CALIBRATIONS):
        path = _file(folder, "calibration", number)
        if path.exists():
            for row in backspot.Report.load(path).modules:
                if row.path in found:
                    found[row.path].append(row.wall_ms)
    return {path: statistics.median(values) for path, values in found.items() if values}


# Judging -----------------------------------------------------------------------------------------


_BEFORE_AND_AFTER = {
    "equal": ("vit", "vit"),
    "slower": ("vit", "slower"),
    "resnet50": ("resnet50", "resnet50"),
}


def _pairs(folder: Path) -> Iterator[tuple[str, int, Path, Path]]:
    """Yield case, number, and both files of each pair that is recorded."""
    numbers = {int(path.name.split(".")[1]) for path in folder.glob("*.report.json")}
    for number in sorted(numbers):
        for case, (before, after) in _BEFORE_AND_AFTER.items():
            files = _file(folder, before, number), _file(folder, after, number + (before == after))
            if all(path.exists() for path in files):
                yield case, number, *files


def _changes(comparison: backspot.Comparison) -> list[backspot.results.Change]:
    """Return every change in a comparison: of the whole, of modules, and of whatever it has."""
    found = []
    for field in dataclasses.fields(comparison):
        value = getattr(comparison, field.name)
        several = value if isinstance(value, tuple) else (value,)
        found += [change for change in several if isinstance(change, backspot.results.Change)]
    return found


def _compared(before: Path, after: Path, planted: Mapping[str, Any]) -> Record:
    comparison = backspot.compare(backspot.Report.load(before), backspot.Report.load(after))
    whole = comparison.whole
    claims = [change for change in _changes(comparison) if change.claimed]
    record: Record = {
        "before_ms": whole.before_ms,
        "after_ms": whole.after_ms,
        "interval_ms": (whole.low_ms, whole.high_ms),
        "whole": whole.verdict,
        "modules": len(comparison.changes),
        "claims": [(c.kind, c.path, c.verdict, c.before_ms, c.after_ms) for c in claims],
        "first": comparison.changes[0].path,
    }
    if planted:
        path = planted["path"]
        found = [c.verdict for c in claims if c.kind == "module" and c.path == path]
        others = {c.path for c in claims if c.kind == "module"} - {path}
        record |= {"planted": planted, "found": "slower" in found, "others": sorted(others)}
    return record


def _judge(folder: Path) -> Figures:
    """Compare all pairs of a folder."""
    plants_file = folder / "plants.json"
    plants = json.loads(plants_file.read_text()) if plants_file.exists() else {}
    results: dict[str, list[Record]] = {}
    for case, number, before, after in _pairs(folder):
        planted = plants.get(f"slower.{number}", {}) if case == "slower" else {}
        record = {"pair": number, **_compared(before, after, planted)}
        results.setdefault(case, []).append(record)
    if not results:
        raise UsageError(f"{folder} has no pair of recordings")
    summary = {case: _summary(records) for case, records in results.items()}
    rows = [{"case": _CASES[case], **one} for case, one in summary.items()]
    return {"rows": rows, "summary": summary, "pairs": results}


def _summary(records: Sequence[Record]) -> Record:
    claims = [{kind for kind, *_ in record["claims"]} for record in records]
    summary: Record = {
        "pairs": len(records),
        "with_a_claim": sum(bool(kinds) for kinds in claims),
        "whole_claimed": sum(bool(kinds - {"module", "node", "unowned"}) for kinds in claims),
    }
    if "found" in records[0]:
        summary["found"] = sum(record["found"] for record in records)
        summary["another_module"] = sum(bool(record["others"]) for record in records)
        missed = [r["planted"]["path"] for r in records if not r["found"]]
        summary["missed"] = dict(Counter(missed).most_common())
    else:
        summary["another_module"] = sum("module" in kinds for kinds in claims)
    return summary


def options(parser: argparse.ArgumentParser) -> None:
    judged_again(parser)
    parser.add_argument("--pairs", type=int, help="pairs of each case (default: 20)")
    parser.add_argument("--percent", type=float, default=10, help="how much slower (default: 10)")


def answer(run: Run) -> Figures:
    if run.worker:
        serve(_recording(run.device, run.small))
        raise SystemExit(0)
    cases = run.choose(_CASES, _DEFAULT) if run.cases or run.listed else list(_DEFAULT)
    run.pairs = run.pairs or (1 if run.small else 20)
    with recordings(run) as (folder, wanted):
        ends = _record(run, cases, folder) if wanted else []
        failed = {end: {"end": end} for end in ends if end != "done"}
        return {"busy": run.busy or 0, **_judge(folder), "cases": failed}
