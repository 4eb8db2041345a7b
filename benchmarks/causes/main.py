"""Causes planted on purpose: does a report say what is wrong, where, and nothing else?

python -m benchmarks causes record -o recorded                  # on a GPU
python -m benchmarks causes record -o recorded --gpus 2         # those that need two
python -m benchmarks causes record -o recorded --device cpu     # those that need none
python -m benchmarks causes judge recorded                      # anywhere, as often as you like
python -m benchmarks causes --small                             # records two cases, judges them
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import OUT, Figures, Run, UsageError

if TYPE_CHECKING:
    from benchmarks.causes.case import Case


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="record the cases that need so many (default: 1)")
    add("verb", nargs="?", choices=("record", "judge"))
    add("folder", nargs="?", type=Path, help="judge: the recorded traces")
    add("--no-shapes", action="store_true", help="judge without shapes")
    add("--rule", default="", help="judge only the cases about this rule")


def answer(run: Run) -> Figures | int:
    from benchmarks.causes.cases import CASES
    from benchmarks.causes.record import record

    known = {name: _about(case) for name, case in CASES.items()}
    names = run.choose(known, ("small_vit", "plain_vit"))
    if run.verb == "record":
        if run.out is None or run.out.suffix:
            raise UsageError("record needs a folder for the traces: -o FOLDER")
        return record(run, CASES, names, run.out)
    if run.verb == "judge":
        if run.folder is None:
            raise UsageError("judge needs the folder of the traces")
        return _judge(run, run.folder, CASES, names)
    if not run.small:
        raise UsageError("say record, judge or --small")
    with tempfile.TemporaryDirectory() as folder:
        code = record(run, CASES, names, Path(folder))
        figures = _judge(run, Path(folder), CASES, names)
        return {**figures, "wrong": figures["wrong"] or code}


def _about(case: Case) -> str:
    kind = case.rule if case.planted else f"not {case.rule}"
    return f"{kind}; {case.about} [{case.gpus} GPU]"


def _judge(run: Run, folder: Path, cases: Mapping[str, Case], names: Sequence[str]) -> Figures:
    """Judge the traces of a folder; what could not be read is wrong."""
    from benchmarks.causes import judge

    wanted = {n for n in names if not run.rule or cases[n].rule == run.rule}
    found = judge.examine(folder, wanted, shapes=not run.no_shapes, jobs=run.jobs)
    found = {name: found[name] for name in cases if name in found}
    if run.rule and run.out is not None and run.out.parent == OUT:
        run.out = None  # judged in part
    facts = judge.recorded_facts(folder)
    judged = {}
    for name, result in found.items():
        findings = [{key: f[key] for key in ("rule", "path", "share")} for f in result["findings"]]
        more = {"recorded": facts["cases"].get(name, {}), "findings": findings}
        verdict = judge.verdict(cases[name], result)
        judged[name] = {"about": cases[name].about, **verdict, **more}
    summary = judge.summarise(judged)
    rows = [
        {"case": name, **{k: one[k] for k in ("rule", "planted", "hit", "placed", "path", "false")}}
        for name, one in judged.items()
    ]
    shares = [one["share"] for one in judged.values()]
    lines = [{**row, "share": share} for row, share in zip(rows, shares, strict=True)]
    rows += [{"rule": rule, **rates} for rule, rates in summary["rules"].items()]
    return {
        "lines": lines,
        "shapes": not run.no_shapes,
        "not_recorded": sorted(wanted - found.keys()),
        "summary": summary,
        "rows": rows,
        "cases": judged,
        "hardware": facts["hardware"],
        "wrong": [result["error"] for result in found.values() if "error" in result],
    }
