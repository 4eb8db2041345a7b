"""Causes planted on purpose: does a report say what is wrong, where, and nothing else?

    python -m benchmarks.causes record -o recorded --tar causes     # on a GPU
    python -m benchmarks.causes record -o recorded --gpus 2         # those that need two
    python -m benchmarks.causes judge recorded                      # anywhere, as often as you like

Each case trains a small, well-built model in which one thing is done badly, or, for a control, the
same model with it done well. Recording leaves ``NAME.trace.json.gz``: two steps, trimmed, with
shapes. Judging reads them and asks of each planted cause whether the rule that should find it did,
and whether the finding's first place is where the cause is; of every finding, whether there is a
reason for it (the planted cause, or one that the case's ``also`` grants).

``judge`` takes a folder of traces, of tars as ``--tar`` writes them, or of both.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path

from benchmarks.causes.record import add_recording_arguments, record, work
from benchmarks.common import RESULTS, write_json


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="record the cases' traces")
    add_recording_arguments(recording, seconds=480)
    recording.add_argument("--gpus", type=int, default=1, help="record the cases that need so many")
    judging = verbs.add_parser("judge", help="judge what reports of recorded traces find")
    judging.add_argument("folder", type=Path)
    judging.add_argument("--no-shapes", action="store_true", help="as if recorded without shapes")
    judging.add_argument("--verbose", action="store_true", help="print each finding in full")
    judging.add_argument("--rule", default="", help="only cases about this rule")
    judging.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    judging.add_argument("--out", type=Path, default=RESULTS / "causes.json")
    listing = verbs.add_parser("list", help="print the cases and end")
    for verb in (recording, judging, listing):
        verb.add_argument("--cases", default="", help="comma-separated names (default: all)")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    from benchmarks.causes.cases import CASES

    wanted = [name for name in arguments.cases.split(",") if name] or list(CASES)
    unknown = [name for name in wanted if name not in CASES]
    if unknown:
        raise SystemExit(f"no such case: {', '.join(unknown)}; 'list' prints them")
    if arguments.verb == "list":
        for name in wanted:
            case = CASES[name]
            kind = case.rule if case.planted else f"not {case.rule}"
            print(f"{name}: {kind}; {case.about} [{case.gpus} GPU]")
    elif arguments.verb == "record" and arguments.child:
        work(arguments, CASES)
    elif arguments.verb == "record":
        # The first of each rule, then the second: a run that is cut short has something of each.
        seen: Counter[tuple[str, bool]] = Counter()
        turns = {}
        for name in wanted:
            seen[CASES[name].rule, CASES[name].planted] += 1
            turns[name] = seen[CASES[name].rule, CASES[name].planted]
        groups: dict[int, list[str]] = {}
        for name in sorted(wanted, key=turns.__getitem__):
            if CASES[name].gpus == arguments.gpus:
                groups.setdefault(CASES[name].ranks, []).append(name)
        record("benchmarks.causes", arguments, groups)
    else:
        _judge(arguments, set(wanted))


def _judge(arguments: argparse.Namespace, wanted: set[str]) -> None:
    from benchmarks.causes.cases import CASES
    from benchmarks.causes.judge import (
        judge,
        print_verdicts,
        recorded_facts,
        show_findings,
        summarise,
        verdict,
    )

    if arguments.rule:
        wanted = {name for name in wanted if CASES[name].rule == arguments.rule}
    shapes = not arguments.no_shapes
    found = judge(arguments.folder, wanted, shapes=shapes, jobs=arguments.jobs)
    found = {name: found[name] for name in CASES if name in found}
    verdicts = {name: verdict(CASES[name], result) for name, result in found.items()}
    if arguments.verbose:
        for name, result in found.items():
            show_findings(name, result)
        print()
    summary = summarise(verdicts)
    print_verdicts(verdicts, found, summary)
    missing = sorted(wanted - found.keys())
    if missing:
        print(f"not recorded: {', '.join(missing)}")
    whole = not arguments.cases and not arguments.rule
    if whole:
        facts = recorded_facts(arguments.folder)
        cases = {
            name: {
                "about": CASES[name].about,
                **verdicts[name],
                "recorded": facts["cases"].get(name, {}),
                "findings": [
                    {key: finding[key] for key in ("rule", "path", "share")}
                    for finding in found[name]["findings"]
                ],
            }
            for name in found
        }
        write_json(
            arguments.out,
            {
                "benchmark": "causes",
                "hardware": facts["hardware"],
                "shapes": shapes,
                **summary,
                "not_recorded": missing,
                "cases": cases,
            },
        )
        print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
