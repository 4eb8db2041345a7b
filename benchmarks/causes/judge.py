"""Judging findings of recorded causes: found, in the right place, and nothing else."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.common import print_table
from benchmarks.traces.trim import SUFFIX, read_trace, write_trace

__all__ = [
    "judge",
    "print_rules",
    "print_verdicts",
    "recorded_facts",
    "show_findings",
    "summarise",
    "verdict",
]

_SHAPES = ("Input Dims", "Input Strides", "Input type", "Concrete Inputs")


def _traces_in(folder: Path, wanted: set[str] | None) -> Iterator[tuple[str, bytes]]:
    """Each trace of a folder by its case's name, those in tars too."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        name = path.name.removesuffix(SUFFIX)
        if wanted is None or name in wanted:
            yield name, path.read_bytes()
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                name = member.name.removesuffix(SUFFIX)
                held = archive.extractfile(member)
                known = name != member.name and (wanted is None or name in wanted)
                if known and held is not None:
                    yield name, held.read()


def recorded_facts(folder: Path) -> dict[str, Any]:
    """What the recorder wrote about the run."""
    texts = [path.read_text() for path in folder.glob("recorded.json")]
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as archive:
            if "recorded.json" in archive.getnames():
                held = archive.extractfile("recorded.json")
                texts.append(held.read().decode() if held else "{}")
    merged: dict[str, Any] = {"hardware": {}, "cases": {}}
    for text in texts:
        document = json.loads(text)
        merged["hardware"] = document.get("hardware") or merged["hardware"]
        merged["cases"] |= document.get("cases", {})
    return merged


def _examine(data: bytes, *, shapes: bool = True) -> dict[str, Any]:
    """Locate one trace and return its findings."""
    import backspot

    if not shapes:
        data = _without_shapes(data)
    began = time.monotonic()
    try:
        report = backspot.locate(io.BytesIO(data))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "findings": []}
    whole = max(1, report.whole_ns)
    return {
        "seconds": round(time.monotonic() - began, 3),
        "steps": report.steps,
        "step_ms": whole / 1e6,
        "backward_ms": report.wall_ns / 1e6,
        "phases": {phase.name: round(phase.wall_ns / 1e6, 3) for phase in report.phases},
        "rows": [
            [row.label, round(row.wall_ms, 3), row.nodes[0].name if row.nodes else ""]
            for row in report.modules[:3]
        ],
        "warnings": list(report.warnings),
        "findings": [
            {
                "rule": finding.rule,
                "path": finding.path,
                "share": finding.wall_ns / whole,
                "title": finding.title,
                "seen": finding.seen,
                "remedy": finding.remedy,
                "places": [asdict(place) for place in finding.places[:5]],
            }
            for finding in report.findings
        ],
    }


def _without_shapes(data: bytes) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        path.write_bytes(data)
        document = read_trace(path)
        for event in document["traceEvents"]:
            for key in _SHAPES:
                event.get("args", {}).pop(key, None)
        write_trace(document, path)
        return path.read_bytes()


def _examine_pair(pair: tuple[str, bytes, bool]) -> tuple[str, dict[str, Any]]:
    name, data, shapes = pair
    return name, _examine(data, shapes=shapes)


def judge(
    folder: Path, wanted: set[str] | None, *, shapes: bool, jobs: int
) -> dict[str, dict[str, Any]]:
    """Examine every trace of a folder, by name."""
    pairs = ((name, data, shapes) for name, data in _traces_in(folder, wanted))
    if jobs <= 1:
        return dict(map(_examine_pair, pairs))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return dict(pool.map(_examine_pair, pairs))


def verdict(case: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return whether the expected rule fired, where, and which others fired without a reason."""
    paths = [finding["path"] for finding in found["findings"] if finding["rule"] == case.rule]
    share = sum(f["share"] for f in found["findings"] if f["rule"] == case.rule)
    rules = Counter(finding["rule"] for finding in found["findings"])
    granted = set(case.also) | ({case.rule} if case.planted else set())
    placed = case.at is None or any(
        fnmatchcase(path, pattern) for path in paths[:1] for pattern in case.at
    )
    return {
        "rule": case.rule,
        "planted": case.planted,
        "hit": bool(paths),
        "placed": bool(paths) and placed,
        "path": paths[0] if paths else None,
        "at": case.at,
        "share": share,
        "false": sorted(rules.keys() - granted),
        "also": sorted(rules.keys() & set(case.also)),
    }


def summarise(verdicts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Precision and recall, rule by rule and over all."""
    rules = sorted({v["rule"] for v in verdicts.values()} | {
        rule for v in verdicts.values() for rule in v["false"]
    })  # fmt: skip
    by_rule = {}
    for rule in rules:
        planted = [v for v in verdicts.values() if v["planted"] and v["rule"] == rule]
        controls = [v for v in verdicts.values() if not v["planted"] and v["rule"] == rule]
        hits = sum(v["hit"] for v in planted)
        false = sum(rule in v["false"] for v in verdicts.values())
        by_rule[rule] = {
            "planted": len(planted),
            "found": hits,
            "placed": sum(v["placed"] for v in planted),
            "recall": hits / len(planted) if planted else None,
            "also": sum(rule in v["also"] for v in verdicts.values()),
            "false": false,
            "precision": hits / (hits + false) if hits + false else None,
            "controls": len(controls),
            "silent": sum(not v["hit"] for v in controls),
        }
    planted = [v for v in verdicts.values() if v["planted"]]
    controls = [v for v in verdicts.values() if not v["planted"]]
    hits = sum(v["hit"] for v in planted)
    false = sum(len(v["false"]) for v in verdicts.values())
    return {
        "planted": len(planted),
        "found": hits,
        "placed": sum(v["placed"] for v in planted),
        "recall": hits / len(planted) if planted else None,
        "precision": hits / (hits + false) if hits + false else None,
        "false": false,
        "controls": len(controls),
        "silent_controls": sum(not v["hit"] for v in controls),
        "clean_controls": sum(not v["false"] for v in controls),
        "rules": by_rule,
    }


# In words -----------------------------------------------------------------------------------------


def show_findings(name: str, found: dict[str, Any]) -> None:
    """Print all that a report finds, for an expert to judge."""
    print(
        f"\n## {name}: step {found.get('step_ms', 0):.1f} ms, "
        f"backward {found.get('backward_ms', 0):.1f} ms"
    )
    if "error" in found:
        print(f"   {found['error']}")
        return
    print("   phases:", ", ".join(f"{k} {v:.1f}" for k, v in found["phases"].items()) or "none")
    for label, wall, node in found["rows"]:
        print(f"   row: {label} {wall:.2f} ms {node}")
    for warning in found["warnings"]:
        print(f"   ! {warning}")
    for finding in found["findings"]:
        print(f"   {finding['rule']} {100 * finding['share']:.1f}% at {finding['path']!r}")
        print(f"      {finding['title']}. {finding['seen']} {finding['remedy']}")
        for place in finding["places"]:
            wall = place["wall_ns"] / 1e6
            print(
                f"      · {place['path']} ({place['class_name']}) ×{place['count']} {wall:.2f} ms"
            )


def print_rules(found: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Print and return how many findings each rule has."""
    fired = Counter(finding["rule"] for result in found.values() for finding in result["findings"])
    rules = dict(fired.most_common())
    print_table(["rule", "models"], [[rule, count] for rule, count in rules.items()])
    return rules


def print_verdicts(
    verdicts: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]], summary: dict[str, Any]
) -> None:
    rows = []
    for name, v in verdicts.items():
        mark = ("hit" if v["hit"] else "MISS") if v["planted"] else ("FIRED" if v["hit"] else "ok")
        place = "" if v["at"] is None or not v["hit"] else ("yes" if v["placed"] else v["path"])
        shares = ", ".join(
            f"{f['rule']} {100 * f['share']:.1f}% {f['path']}" for f in found[name]["findings"]
        )
        rows.append(
            [
                name,
                ("" if v["planted"] else "not ") + v["rule"],
                mark,
                place if v["planted"] else "",
                ", ".join(v["false"]),
                round(float(found[name].get("step_ms", 0.0)), 1),
                found[name].get("error", shares),
            ]
        )
    print_table(["case", "expected", "found", "place", "false", "step ms", "findings"], rows)
    print()
    print_table(
        ["rule", "planted", "found", "placed", "also", "false", "precision", "controls", "silent"],
        [
            [
                rule,
                *(r[key] for key in ("planted", "found", "placed", "also", "false", "precision")),
                r["controls"],
                r["silent"],
            ]
            for rule, r in summary["rules"].items()
        ],
    )
    percent = {k: "—" if summary[k] is None else f"{100 * summary[k]:.1f}%" for k in
               ("recall", "precision")}  # fmt: skip
    print(
        f"\n{summary['found']} of {summary['planted']} causes found ({percent['recall']}), "
        f"{summary['placed']} in the right place; {summary['false']} findings for no known reason "
        f"(precision {percent['precision']}); the named rule silent on "
        f"{summary['silent_controls']} of {summary['controls']} controls, "
        f"nothing false on {summary['clean_controls']}."
    )
