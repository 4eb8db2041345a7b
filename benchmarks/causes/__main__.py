"""Causes planted on purpose: does a report say what is wrong, where, and nothing else?

    python -m benchmarks.causes record -o recorded --tar causes     # on a GPU
    python -m benchmarks.causes record -o recorded --gpus 2         # those that need two
    python -m benchmarks.causes judge recorded                      # anywhere, as often as you like
    python -m benchmarks.causes record -o families --set families   # nothing planted
    python -m benchmarks.causes judge families --set families
    python -m benchmarks.causes --small                             # records two cases, judges them

``judge`` takes a folder of traces, of tars as ``--tar`` writes them, or of both.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import (
    RESULTS,
    UsageError,
    choose,
    command_line,
    parse,
    script,
    write_results,
)
from benchmarks.workers import serve

if TYPE_CHECKING:
    from benchmarks.causes.case import Case

_SMALL = ("small_vit", "plain_vit")


def _parser() -> argparse.ArgumentParser:
    processes = min(8, os.cpu_count() or 1)
    parser = command_line(__doc__, out="causes.json", seconds=480, jobs=processes)
    parser.add_argument("verb", nargs="?", choices=("record", "judge"))
    parser.add_argument("folder", nargs="?", type=Path, help="judge: the recorded traces")
    parser.add_argument("--set", choices=("planted", "families"), default="planted")
    parser.add_argument("--gpus", type=int, default=1, help="record: the cases that need so many")
    parser.add_argument("--tar", type=Path, help="record: pack the traces into TAR-0.tar, …")
    parser.add_argument("--no-shapes", action="store_true", help="judge without shapes")
    parser.add_argument("--verbose", action="store_true", help="judge: print each finding in full")
    parser.add_argument("--rule", default="", help="judge only the cases about this rule")
    return parser


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(_parser(), argv)
    from benchmarks.causes.cases import CASES, FAMILIES
    from benchmarks.causes.record import record, recording

    cases = FAMILIES if arguments.set == "families" else CASES
    if arguments.worker:
        serve(recording(arguments, cases))
        return 0
    names = choose(arguments, {name: _about(case) for name, case in cases.items()}, _SMALL)
    if arguments.verb == "record":
        if arguments.out is None or arguments.out.suffix:
            raise UsageError("record needs a folder for the traces: -o FOLDER")
        return record(arguments, cases, _groups(names, cases, arguments.gpus))
    if arguments.verb == "judge":
        if arguments.folder is None:
            raise UsageError("judge needs the folder of the traces")
        return _judge(arguments, arguments.folder, cases, names)
    if not arguments.small:
        raise UsageError("say record, judge or --small")
    with tempfile.TemporaryDirectory() as folder:
        recording_there = argparse.Namespace(**{**vars(arguments), "out": Path(folder)})
        code = record(recording_there, cases, {1: names})
        return _judge(arguments, Path(folder), cases, names) or code


def _about(case: Case) -> str:
    kind = case.rule if case.planted else f"not {case.rule}" if case.rule else "nothing planted"
    return f"{kind}; {case.about} [{case.gpus} GPU]"


def _groups(names: Sequence[str], cases: Mapping[str, Case], gpus: int) -> dict[int, list[str]]:
    """The cases for so many GPUs, by their number of ranks.

    The first case of each rule comes first, then the second: a run that is cut short has something
    of each.
    """
    seen: Counter[tuple[str, bool]] = Counter()
    turns = {}
    for name in names:
        kind = cases[name].rule, cases[name].planted
        seen[kind] += 1
        turns[name] = seen[kind]
    groups: dict[int, list[str]] = {}
    for name in sorted(names, key=turns.__getitem__):
        if cases[name].gpus == gpus:
            groups.setdefault(cases[name].ranks, []).append(name)
    return groups


def _judge(
    arguments: argparse.Namespace, folder: Path, cases: Mapping[str, Case], names: Sequence[str]
) -> int:
    """Judge the traces of a folder; whether any trace could not be read, as an exit code."""
    from benchmarks.causes.judge import (
        judge,
        print_rules,
        print_verdicts,
        recorded_facts,
        show_findings,
        summarise,
        verdict,
    )

    wanted = {n for n in names if not arguments.rule or cases[n].rule == arguments.rule}
    found = judge(folder, wanted, shapes=not arguments.no_shapes, jobs=arguments.jobs)
    found = {name: found[name] for name in cases if name in found}
    families = arguments.set == "families"
    if arguments.verbose or families:
        for name, result in found.items():
            show_findings(name, result)
        print()
    facts = recorded_facts(folder)
    missing = sorted(wanted - found.keys())
    document = {"hardware": facts["hardware"], "shapes": not arguments.no_shapes}
    if families:
        document |= {"rules": print_rules(found), "recorded": facts["cases"], "models": found}
    else:
        verdicts = {name: verdict(cases[name], result) for name, result in found.items()}
        summary = summarise(verdicts)
        print_verdicts(verdicts, found, summary)
        document |= {**summary, "not_recorded": missing}
        document["cases"] = {
            name: {
                "about": cases[name].about,
                **verdicts[name],
                "recorded": facts["cases"].get(name, {}),
                "findings": [
                    {key: finding[key] for key in ("rule", "path", "share")}
                    for finding in found[name]["findings"]
                ],
            }
            for name in found
        }
    if missing:
        print(f"not recorded: {', '.join(missing)}")
    _write(arguments, document)
    return 1 if any("error" in result for result in found.values()) else 0


def _write(arguments: argparse.Namespace, document: dict[str, object]) -> None:
    if arguments.set == "families":
        arguments.default_out = "families.json"
        if arguments.out == RESULTS / "causes.json":
            arguments.out = RESULTS / "families.json"
    if (arguments.cases or arguments.rule) and arguments.out == RESULTS / arguments.default_out:
        print("judged in part: no results are written")
        return
    write_results(arguments, document)


if __name__ == "__main__":
    sys.exit(main())
