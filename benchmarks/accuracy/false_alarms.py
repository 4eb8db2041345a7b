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
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

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


def _examining(device: str, small: bool) -> Handler:
    """Return what records a model three times and describes what is found."""

    def handle(job: Job, stage: Stage) -> Record:
        import torch

        from benchmarks.accuracy.healthy import HEALTHY
        from benchmarks.causes.case import settings
        from benchmarks.models import Context

        settings()
        torch.backends.cudnn.benchmark = device != "cpu"
        warnings.simplefilter("ignore")
        record: Record = {"recordings": []}
        stage("build", record)
        try:
            made = HEALTHY[job["name"]](Context(device, small))
        except ModuleNotFoundError as error:
            return {"skipped": f"needs {error.name}"}
        models = {name: module for module, name in made.modules}
        folder = Path(job["keep"]) if job["keep"] else None
        for number in range(1 if small else _RECORDINGS):
            stage("record", record)
            name = f"{job['name']}.{number}"
            trace = folder / f"{name}{_TRACE}" if folder and job["traces"] else None
            steps = job["steps"]
            report = profile_in_turn(made.step, models, steps=steps, trace=trace, force=True)
            if folder:
                report.save(folder / f"{name}{_REPORT}", force=True)
            record["recordings"].append(_described(report))
        return record

    return handle


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
    texts: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for model, record in cases.items():
        for recording in record.get("recordings", ()):
            for text in recording["warnings"]:
                texts[re.sub(r"[\d.,]+", "N", text)].append((model, text))
    return [
        {"models": len(dict(found)), "recordings": len(found), "model": found[0][0],
         "text": found[0][1]}
        for found in texts.values()
    ]  # fmt: skip


def _show(arguments: argparse.Namespace, cases: Mapping[str, Record]) -> None:
    """Print and write what is found."""
    summary = _summary(cases)
    for name, why in summary["skipped"].items():
        print(f"skipped: {name} {why}")
    together = summary["findings"]
    if together:
        rows = []
        for f in together:
            paths = " or ".join(path or "(root)" for path in f["paths"])
            often = f"{f['in']} of {f['of']}"
            rows.append((f["model"], f["rule"], paths, often, f["ms"], f["seen"]))
        print_table(("model", "rule", "module", "recordings", "ms", "seen"), rows)
        always = Counter(f["rule"] for f in together if f["in"] == f["of"])
        rules = [(rule, n, always[rule]) for rule, n in summary["models_by_rule"].items()]
        print_table(("rule", "models", "of these in every recording"), rules)
    if summary["warnings"]:
        head = ("models", "recordings", "model", "text")
        print_table(head, [[warning[key] for key in head] for warning in summary["warnings"]])
    print(f"{summary['models']} models, {summary['recordings']} recordings")
    write_results(arguments, {"busy": arguments.busy or 0, **summary, "cases": cases})


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
    if arguments.out == RESULTS / arguments.default_out:
        arguments.out = None
    _show(arguments, cases)
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

    names = choose(arguments, HEALTHY, SMALL)
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    if arguments.busy is None and arguments.device == "cpu":
        arguments.busy = 1 if arguments.small else usable_cores()
    job = {"steps": arguments.steps or profile_default("steps"), "traces": arguments.traces}
    job["keep"] = str(arguments.keep.absolute()) if arguments.keep else ""
    with busy(arguments.busy):
        records = run(
            [{"name": name, **job} for name in names],
            worker_command(arguments),
            lambda: _examining(arguments.device, arguments.small),
            [Phase(arguments.jobs, _TIMEOUT_S)],
            seconds=arguments.seconds,
        )
    _show(arguments, dict(zip(names, records, strict=True)))
    return exit_code(records)
