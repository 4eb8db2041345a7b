"""Causes planted on purpose: does a report say what is wrong, where, and nothing else?

    python -m benchmarks causes record -o recorded --tar causes     # on a GPU
    python -m benchmarks causes record -o recorded --gpus 2         # those that need two
    python -m benchmarks causes judge recorded                      # anywhere, as often as you like
    python -m benchmarks causes --small                             # records two cases, judges them
    python -m benchmarks fixtures -o fixtures [--gpus 2]            # the traces that the tests read

``judge`` takes a folder of traces, of tars as ``--tar`` writes them, or of both.
"""

from __future__ import annotations

import argparse
import tempfile
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

if TYPE_CHECKING:
    from benchmarks.causes.case import Case


def _command_line(question: str, seconds: float) -> argparse.ArgumentParser:
    parser = command_line(__doc__, question, seconds=seconds, jobs=2)
    parser.add_argument("--gpus", type=int, default=1, help="record the cases that need so many")
    parser.add_argument("--tar", type=Path, help="record: pack the traces into TAR-0.tar, …")
    return parser


@script
def fixtures(argv: Sequence[str] | None = None) -> int:
    """Record the traces that the tests read."""
    arguments = parse(_command_line("fixtures", 520), argv)
    from benchmarks.causes.fixtures import FIXTURES
    from benchmarks.causes.record import record, serve_recordings

    serve_recordings(arguments, FIXTURES)
    names = choose(arguments, {n: case.about for n, case in FIXTURES.items()}, ("launch_bound",))
    if arguments.out is None and not arguments.small:
        raise UsageError("name a folder for the traces: -o FOLDER")
    with tempfile.TemporaryDirectory() as folder:
        return record(arguments, FIXTURES, names, arguments.out or Path(folder))


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = _command_line("causes", 480)
    parser.add_argument("verb", nargs="?", choices=("record", "judge"))
    parser.add_argument("folder", nargs="?", type=Path, help="judge: the recorded traces")
    parser.add_argument("--no-shapes", action="store_true", help="judge without shapes")
    parser.add_argument("--verbose", action="store_true", help="judge: print each finding in full")
    parser.add_argument("--rule", default="", help="judge only the cases about this rule")
    arguments = parse(parser, argv)
    from benchmarks.causes.cases import CASES
    from benchmarks.causes.record import record, serve_recordings

    serve_recordings(arguments, CASES)
    known = {name: _about(case) for name, case in CASES.items()}
    names = choose(arguments, known, ("small_vit", "plain_vit"))
    if arguments.verb == "record":
        if arguments.out is None or arguments.out.suffix:
            raise UsageError("record needs a folder for the traces: -o FOLDER")
        return record(arguments, CASES, names, arguments.out)
    if arguments.verb == "judge":
        if arguments.folder is None:
            raise UsageError("judge needs the folder of the traces")
        return _judge(arguments, arguments.folder, CASES, names)
    if not arguments.small:
        raise UsageError("say record, judge or --small")
    with tempfile.TemporaryDirectory() as folder:
        code = record(arguments, CASES, names, Path(folder))
        return _judge(arguments, Path(folder), CASES, names) or code


def _about(case: Case) -> str:
    kind = case.rule if case.planted else f"not {case.rule}"
    return f"{kind}; {case.about} [{case.gpus} GPU]"


def _judge(
    arguments: argparse.Namespace, folder: Path, cases: Mapping[str, Case], names: Sequence[str]
) -> int:
    """Judge the traces of a folder; whether any trace could not be read, as an exit code."""
    from benchmarks.causes import judge

    wanted = {n for n in names if not arguments.rule or cases[n].rule == arguments.rule}
    found = judge.examine(folder, wanted, shapes=not arguments.no_shapes, jobs=arguments.jobs)
    found = {name: found[name] for name in cases if name in found}
    if arguments.verbose:
        for name, result in found.items():
            judge.show_findings(name, result)
        print()
    facts = judge.recorded_facts(folder)
    verdicts = {name: judge.verdict(cases[name], result) for name, result in found.items()}
    summary = judge.summarise(verdicts)
    judge.print_verdicts(verdicts, found, summary)
    missing = sorted(wanted - found.keys())
    if missing:
        print(f"not recorded: {', '.join(missing)}")
    document = {"hardware": facts["hardware"], "shapes": not arguments.no_shapes, **summary}
    document |= {"not_recorded": missing, "cases": {}}
    for name, result in found.items():
        findings = [{key: f[key] for key in ("rule", "path", "share")} for f in result["findings"]]
        more = {"recorded": facts["cases"].get(name, {}), "findings": findings}
        document["cases"][name] = {"about": cases[name].about, **verdicts[name], **more}
    if (arguments.cases or arguments.rule) and arguments.out == RESULTS / arguments.default_out:
        print("judged in part: no results are written")
    else:
        write_results(arguments, document)
    return 1 if any("error" in result for result in found.values()) else 0
