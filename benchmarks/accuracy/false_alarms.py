"""What is found in 40 healthy models? An expert judges each finding; all of them are listed.

    python -m benchmarks false_alarms --device cpu --keep recorded
    python -m benchmarks false_alarms --device cuda --jobs 3 --keep recorded
    python -m benchmarks false_alarms judge recorded        # the table again

Each model (``healthy.py``) is recorded three times by ``backspot.profile`` with its defaults. On a
CPU, other processes keep all cores busy meanwhile. ``--keep`` saves each report as JSON, and with
``--traces`` each recording too; ``judge`` then applies the rules as they are now to the recordings.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import backspot
from benchmarks.cases import exit_code, profile_in_turn
from benchmarks.common import (
    RESULTS,
    UsageError,
    busy,
    choose,
    command_line,
    parse,
    print_table,
    profile_default,
    script,
    usable_cores,
    write_results,
)
from benchmarks.workers import Handler, Job, Phase, Record, Stage, run, serve, worker_command

_RECORDINGS = 3
_TIMEOUT_S = 300.0
_REPORT, _TRACE = ".report.json", ".trace.json.gz"


# One model ---------------------------------------------------------------------------------------


def _examining(device: str, small: bool) -> Handler:
    """Return what records a model three times and describes what is found."""

    def handle(job: Job, stage: Stage) -> Record:
        import torch

        from benchmarks.accuracy.healthy import HEALTHY
        from benchmarks.causes.case import settings
        from benchmarks.models import Context

        settings()
        torch.backends.cudnn.benchmark = device != "cpu"
        record: Record = {"recordings": []}
        stage("build", record)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made = HEALTHY[job["name"]](Context(device, small))
            except ModuleNotFoundError as error:
                return {"skipped": f"needs {error.name}"}
            models = {name: module for module, name in made.modules}
            for number in range(1 if small else _RECORDINGS):
                stage("record", record)
                report = _recorded(made.step, models, job, f"{job['name']}.{number}")
                record["recordings"].append(_described(report))
        return record

    return handle


def _recorded(
    step: Callable[[], None], models: Mapping[str, Any], job: Job, name: str
) -> backspot.Report:
    """Record some steps as a user does, and keep what is to be kept."""
    folder = Path(job["keep"]) if job["keep"] else None
    trace = folder / f"{name}{_TRACE}" if folder and job["traces"] else None
    report = profile_in_turn(step, models, steps=job["steps"], trace=trace, force=True)
    if folder:
        report.save(folder / f"{name}{_REPORT}", force=True)
    return report


def _described(report: backspot.Report) -> Record:
    """Return the findings of a report, and its first rows."""
    return {
        "steps": report.steps,
        "step_ms": round(report.step_ns / 1e6, 3),
        "findings": [
            {
                "rule": finding.rule,
                "path": finding.path,
                "places": len(finding.places),
                "ms": round(finding.wall_ns / 1e6, 3),
                "title": finding.title,
                "seen": finding.seen,
                "remedy": finding.remedy,
            }
            for finding in report.findings
        ],
        "rows": [
            {
                "label": row.label,
                "share": round(report.share(row), 4),
                "ms_by_step": [round(ns / 1e6, 3) for ns in row.wall_ns_by_step],
            }
            for row in report.top(3)
        ],
        "warnings": list(report.warnings),
    }


# All models --------------------------------------------------------------------------------------


def _together(cases: Mapping[str, Record]) -> list[Record]:
    """Return what each rule finds in each model, over all of its recordings."""
    together: list[Record] = []
    for model, record in cases.items():
        same: dict[str, list[Record]] = {}
        for recording in record.get("recordings", ()):
            for finding in recording["findings"]:
                same.setdefault(finding["rule"], []).append(finding)
        for rule, found in same.items():
            typical = sorted(found, key=lambda finding: finding["ms"])[len(found) // 2]
            together.append(
                {
                    "model": model,
                    "rule": rule,
                    "paths": sorted({finding["path"] for finding in found}),
                    "in": len(found),
                    "of": len(record["recordings"]),
                    **{key: typical[key] for key in ("ms", "seen", "remedy")},
                }
            )
    return together


def _summary(cases: Mapping[str, Record]) -> Record:
    together = _together(cases)
    done = [record for record in cases.values() if record.get("recordings")]
    return {
        "models": len(done),
        "recordings": sum(len(record["recordings"]) for record in done),
        "skipped": {n: r["skipped"] for n, r in cases.items() if "skipped" in r},
        "models_by_rule": dict(Counter(found["rule"] for found in together).most_common()),
        "findings": together,
        "warnings": _warnings(cases),
    }


def _warnings(cases: Mapping[str, Record]) -> list[Record]:
    """Return how often each warning is given, with one of its texts; numbers do not count."""
    texts: dict[str, list[tuple[str, str]]] = {}
    for model, record in cases.items():
        for recording in record.get("recordings", ()):
            for text in recording["warnings"]:
                texts.setdefault(re.sub(r"[\d.,]+", "N", text), []).append((model, text))
    return [
        {
            "models": len({model for model, _ in found}),
            "recordings": len(found),
            "model": found[0][0],
            "text": found[0][1],
        }
        for found in texts.values()
    ]


def _print(summary: Record) -> None:
    for name, why in summary["skipped"].items():
        print(f"skipped: {name} {why}")
    together = summary["findings"]
    if together:
        print_table(
            ("model", "rule", "module", "recordings", "ms", "seen"),
            [
                (
                    f["model"], f["rule"], " or ".join(path or "(root)" for path in f["paths"]),
                    f"{f['in']} of {f['of']}", f["ms"], f["seen"],
                )
                for f in together
            ],
        )  # fmt: skip
        print()
        print_table(
            ("rule", "models", "of these in every recording"),
            [
                (rule, models, sum(f["in"] == f["of"] for f in together if f["rule"] == rule))
                for rule, models in summary["models_by_rule"].items()
            ],
        )
        print()
    if summary["warnings"]:
        print_table(
            ("models", "recordings", "for example", "warning"),
            [(w["models"], w["recordings"], w["model"], w["text"]) for w in summary["warnings"]],
        )
        print()
    print(f"{summary['models']} models, {summary['recordings']} recordings")


def _judge(arguments: argparse.Namespace) -> int:
    """Describe kept recordings with the rules of today, or kept reports as they are."""
    if arguments.folder is None or not arguments.folder.is_dir():
        raise UsageError("judge needs the folder of the recordings")
    cases: dict[str, Record] = {}
    for path in sorted(arguments.folder.glob(f"*{_REPORT}")):
        name = path.name.removesuffix(_REPORT)
        trace = path.with_name(f"{name}{_TRACE}")
        report = backspot.locate(trace) if trace.exists() else backspot.Report.load(path)
        record = cases.setdefault(name.rpartition(".")[0], {"recordings": []})
        record["recordings"].append(_described(report))
    summary = _summary(cases)
    _print(summary)
    if arguments.out != RESULTS / arguments.default_out:
        write_results(arguments, {**summary, "cases": cases})
    return 0


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, "false_alarms", seconds=3000, jobs=1, load=True)
    parser.add_argument("verb", nargs="?", choices=("record", "judge"), default="record")
    parser.add_argument("folder", nargs="?", type=Path, help="judge: what --keep has saved")
    parser.add_argument("--steps", type=int, help="steps to record (default: that of profile)")
    parser.add_argument("--keep", type=Path, help="save each report in this folder")
    parser.add_argument("--traces", action="store_true", help="with --keep: the recordings too")
    arguments = parse(parser, argv)
    if arguments.worker:
        serve(_examining(arguments.device, arguments.small))
        return 0
    if arguments.verb == "judge":
        return _judge(arguments)
    from benchmarks.accuracy.healthy import HEALTHY, SMALL

    names = choose(arguments, dict.fromkeys(HEALTHY, ""), SMALL)
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    if arguments.busy is None:
        cores = 1 if arguments.small else usable_cores()
        arguments.busy = cores if arguments.device == "cpu" else 0
    cases: dict[str, Record] = {}

    def ended(job: Job, record: Record) -> None:
        cases[job["name"]] = record
        write_results(arguments, _document(arguments, cases), last=False)

    jobs = [
        {
            "name": name,
            "steps": arguments.steps or profile_default("steps"),
            "keep": str(arguments.keep.absolute()) if arguments.keep else "",
            "traces": arguments.traces,
        }
        for name in names
    ]
    with busy(arguments.busy):
        records = run(
            jobs,
            worker_command(arguments),
            lambda: _examining(arguments.device, arguments.small),
            [Phase(arguments.jobs, _TIMEOUT_S)],
            seconds=arguments.seconds,
            ended=ended,
        )
    cases = dict(zip(names, records, strict=True))
    _print(_summary(cases))
    write_results(arguments, _document(arguments, cases))
    return exit_code(cases.values())


def _document(arguments: argparse.Namespace, cases: Mapping[str, Record]) -> Record:
    return {"busy": arguments.busy, **_summary(cases), "cases": cases}
