"""What is found in 40 healthy models? An expert judges each finding; all of them are listed.

    python -m benchmarks false_alarms --device cpu --keep recorded
    python -m benchmarks false_alarms --device cuda --jobs 3 --keep recorded
    python -m benchmarks false_alarms judge recorded    # the table again

Each model (``healthy.py``) is recorded three times by ``backspot.profile`` with its defaults. On a
CPU, other processes keep all cores busy meanwhile. ``--keep`` saves each report as JSON, and with
``--traces`` each recording too; ``judge`` then applies the rules as they are now to the recordings.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import backspot
from benchmarks.harness import Figures, Run, each, judged_again, profile_in_turn, recordings
from benchmarks.measuring import profile_default, usable_cores
from benchmarks.workers import Job, Record, Stage

_RECORDINGS = 3
_TIMEOUT_S = 300.0
_REPORT, _TRACE = ".report.json", ".trace.json.gz"


def _examine(job: Job, stage: Stage, run: Any, folder: Path) -> Record:
    """Record a model three times."""
    import torch

    from benchmarks.accuracy.healthy import HEALTHY
    from benchmarks.causes.case import settings

    settings()
    torch.backends.cudnn.benchmark = run.device != "cpu"
    warnings.simplefilter("ignore")
    stage("build", {})
    try:
        made = HEALTHY[job["name"]](run.context)
    except ModuleNotFoundError as error:
        return {"skipped": f"needs {error.name}"}
    models = {name: module for module, name in made.modules}
    steps = run.steps or profile_default("steps")
    for number in range(1 if run.small else _RECORDINGS):
        stage("record", {})
        name = f"{job['name']}.{number}"
        trace = folder / f"{name}{_TRACE}" if run.traces else None
        report = profile_in_turn(made.step, models, steps=steps, trace=trace, force=True)
        report.save(folder / f"{name}{_REPORT}", force=True)
    return {}


def _described(report: backspot.Report) -> Record:
    """Return the findings of a report, and its first rows."""
    findings = []
    for one in report.findings:
        found = {key: getattr(one, key) for key in ("rule", "path", "title", "seen", "remedy")}
        findings.append({**found, "places": len(one.places), "ms": round(one.wall_ns / 1e6, 3)})
    rows = []
    for row in report.top(3):
        by_step = [round(ns / 1e6, 3) for ns in row.wall_ns_by_step]
        share = round(report.share(row), 4)
        rows.append({"label": row.label, "share": share, "ms_by_step": by_step})
    found = {"steps": report.steps, "step_ms": round(report.step_ns / 1e6, 3)}
    return {**found, "findings": findings, "rows": rows, "warnings": list(report.warnings)}


def _together(cases: Mapping[str, Record]) -> list[Record]:
    """Return what each rule finds in each model, over all of its recordings."""
    together: list[Record] = []
    for model, record in cases.items():
        same: dict[str, list[Record]] = defaultdict(list)
        for recording in record.get("recordings", ()):
            for finding in recording["findings"]:
                same[finding["rule"]].append(finding)
        for rule, found in same.items():
            typical = sorted(found, key=lambda finding: finding["ms"])[len(found) // 2]
            of = {"model": model, "rule": rule, "paths": sorted({one["path"] for one in found})}
            of |= {"in": len(found), "of": len(record["recordings"])}
            together.append(of | {key: typical[key] for key in ("ms", "seen", "remedy")})
    return together


def _judge(folder: Path) -> Figures:
    """Describe kept recordings with the rules of today, or kept reports as they are."""
    recorded: dict[str, Record] = {}
    for path in sorted(folder.glob(f"*{_REPORT}")):
        name = path.name.removesuffix(_REPORT)
        trace = path.with_name(f"{name}{_TRACE}")
        report = backspot.locate(trace) if trace.exists() else backspot.Report.load(path)
        record = recorded.setdefault(name.rpartition(".")[0], {"recordings": []})
        record["recordings"].append(_described(report))
    found = _together(recorded)
    of_rule = Counter(one["rule"] for one in found)
    always = Counter(one["rule"] for one in found if one["in"] == one["of"])
    summary = {
        "models": len(recorded),
        "models with a finding": len({one["model"] for one in found}),
        "findings": len(found),
        "recordings": sum(len(record["recordings"]) for record in recorded.values()),
        "models by rule": dict(of_rule.most_common()),
        "of these in every recording": dict(always),
    }
    told = [
        {k: one[k] for k in ("model", "rule", "paths", "in", "of", "ms", "seen")} for one in found
    ]
    lines = [{**one, "paths": one["paths"][:1], "seen": None} for one in told]
    lines += [{"model": name} for name in recorded if name not in {one["model"] for one in told}]
    figures = {"summary": summary, "rows": told, "findings": found, "recorded": recorded}
    return {**figures, "lines": lines}


def options(parser: argparse.ArgumentParser) -> None:
    judged_again(parser)
    parser.add_argument("--traces", action="store_true", help="with --keep: the recordings too")


def answer(run: Run) -> Figures:
    def known() -> dict[str, Any]:
        from benchmarks.accuracy.healthy import HEALTHY

        return HEALTHY

    if run.busy is None and run.device == "cpu":
        run.busy = 1 if run.small else usable_cores()
    with recordings(run) as (folder, wanted):

        def handle(job: Job, stage: Stage) -> Record:
            # Workers have the folder of their driver.
            return _examine(job, stage, run, Path(job.get("folder", folder)))

        if not wanted:
            return _judge(folder)
        cases = each(
            run,
            known,
            handle,
            small=("mlp", "graph"),
            timeout_s=300,
            fresh=False,
            resumes=run.keep is not None,
            folder=str(folder),
        )
        skipped = {name: case["skipped"] for name, case in cases.items() if "skipped" in case}
        return {"busy": run.busy or 0, "cases": cases, "skipped": skipped, **_judge(folder)}
