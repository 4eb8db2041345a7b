"""Judging findings of recorded causes: found, in the right place, and nothing else."""

from __future__ import annotations

import io
import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.traces.trim import SUFFIX, parse_trace, written

_SHAPES = ("Input Dims", "Input Strides", "Input type", "Concrete Inputs")


def recorded_facts(folder: Path) -> dict[str, Any]:
    """What the recorder wrote about the run."""
    path = folder / "recorded.json"
    return json.loads(path.read_text()) if path.exists() else {"hardware": {}, "cases": {}}


def examine(folder: Path, wanted: set[str], *, shapes: bool, jobs: int) -> dict[str, Any]:
    """Examine the wanted traces of a folder, by name."""
    found = {path.name.removesuffix(SUFFIX): path for path in sorted(folder.glob(f"*{SUFFIX}"))}
    jobs_of = ((name, found[name].read_bytes(), shapes) for name in found if name in wanted)
    if jobs <= 1:
        return dict(map(_examine, jobs_of))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return dict(pool.map(_examine, jobs_of))


def _examine(job: tuple[str, bytes, bool]) -> tuple[str, dict[str, Any]]:
    """Locate one trace and return its findings."""
    import backspot

    name, data, shapes = job
    if not shapes:
        document = parse_trace(data)
        for event in document["traceEvents"]:
            for key in _SHAPES:
                event.get("args", {}).pop(key, None)
        data = written(document)
    began = time.monotonic()
    try:
        report = backspot.locate(io.BytesIO(data))
    except Exception as error:
        return name, {"error": f"{type(error).__name__}: {error}", "findings": []}
    whole = max(1, report.whole_ns)
    findings = []
    for finding in report.findings:
        found = {key: getattr(finding, key) for key in ("rule", "path", "title", "seen", "remedy")}
        places = [asdict(place) for place in finding.places[:5]]
        findings.append({**found, "share": finding.wall_ns / whole, "places": places})
    return name, {
        "seconds": round(time.monotonic() - began, 3),
        "step_ms": whole / 1e6,
        "backward_ms": report.wall_ns / 1e6,
        "phases": {phase.name: round(phase.wall_ns / 1e6, 3) for phase in report.phases},
        "rows": [
            [row.label, round(row.wall_ms, 3), row.nodes[0].name if row.nodes else ""]
            for row in report.modules[:3]
        ],
        "warnings": list(report.warnings),
        "findings": findings,
    }


def verdict(case: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return whether the expected rule fired, where, and which others fired without a reason."""
    of_rule = [finding for finding in found["findings"] if finding["rule"] == case.rule]
    path = of_rule[0]["path"] if of_rule else None
    rules = {finding["rule"] for finding in found["findings"]}
    granted = set(case.also) | ({case.rule} if case.planted else set())
    placed = case.at is None or any(fnmatchcase(path or "", pattern) for pattern in case.at)
    return {
        "rule": case.rule,
        "planted": case.planted,
        "hit": bool(of_rule),
        "placed": bool(of_rule) and placed,
        "path": path,
        "at": case.at,
        "share": sum(finding["share"] for finding in of_rule),
        "false": sorted(rules - granted),
        "also": sorted(rules & set(case.also)),
    }


def summarise(verdicts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Precision and recall, rule by rule and over all."""
    every = list(verdicts.values())
    rules = sorted({v["rule"] for v in every} | {rule for v in every for rule in v["false"]})
    by_rule = {}
    for rule in rules:
        planted = [v for v in every if v["planted"] and v["rule"] == rule]
        controls = [v for v in every if not v["planted"] and v["rule"] == rule]
        by_rule[rule] = {
            **_rates(planted, sum(rule in v["false"] for v in every)),
            "also": sum(rule in v["also"] for v in every),
            "controls": len(controls),
            "silent": sum(not v["hit"] for v in controls),
        }
    controls = [v for v in every if not v["planted"]]
    return {
        **_rates([v for v in every if v["planted"]], sum(len(v["false"]) for v in every)),
        "controls": len(controls),
        "silent_controls": sum(not v["hit"] for v in controls),
        "clean_controls": sum(not v["false"] for v in controls),
        "rules": by_rule,
    }


def _rates(planted: list[dict[str, Any]], false: int) -> dict[str, Any]:
    hits = sum(v["hit"] for v in planted)
    return {
        "planted": len(planted),
        "found": hits,
        "placed": sum(v["placed"] for v in planted),
        "recall": hits / len(planted) if planted else None,
        "false": false,
        "precision": hits / (hits + false) if hits + false else None,
    }
