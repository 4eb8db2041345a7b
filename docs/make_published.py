"""Write published.md: bottlenecks that people published, and what Backspot says of them.

Usage: python docs/make_published.py

The verdicts are those of ``python -m benchmarks published_causes`` on a GPU, as they are kept; the
facts are those of the cases.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import kept
from benchmarks.causes.published import facts

HEAD = """\
# Published bottlenecks

Others published what made a training step slow, and what they changed. We rebuilt {number} such \
steps from the published facts, ran them before and after the fix on one {device} (torch {torch}), \
and asked Backspot about the slow one. Misses are in the table.

- **Says**: the rule that answers best of the first three findings, or the first sentence of the \
report, and where. It is judged by what the author names, written down before any run: *place and \
cause*, one of them, or *missed*.
- **Predicted**: what the report of the slow step says that it would save, its advice tried on the \
spot; without a price, what the finding takes. **Gained**: the fix, timed without a profiler, in \
turns: a median with half the distance of the quartiles. Where it gains less than 2% of the step, \
only a promise for its cause is wrong.

{summary}

Made by `python docs/make_published.py` from the figures of `python -m benchmarks \
published_causes` (commit {commit}); the [results](../benchmarks/results/README.md) have more.
"""
BLIND = """
## By somebody who had not read the rules
"""
SECOND = """
## A second set

By somebody who had read neither the rules nor these results, after the rules had learned from the \
first set.
"""
OWN = """
## By somebody who had read the rules

{number} more say less, as who rebuilt them knew what the rules look for. Where the fix gains \
something, the place is right in {place}, the cause in {cause}, the prediction in {right}; where \
it gains nothing, nothing is promised in {silent}.
"""
TABLE = """
| what people saw | Backspot says | fix | step: predicted, gained, ms |
| --- | --- | --- | --- |
"""
_NONE = "0 of 0"


def answer() -> dict[str, Any]:
    """Return what is kept of the cases."""
    found: dict[str, Any] = kept.read_evidence(kept.path_of("cuda"))["questions"]
    return dict(found["published_causes"])


def made(results: Mapping[str, Any]) -> str:
    """Return the whole page."""
    cases = {one["case"]: one for one in kept.rows_of(results)}
    done = {name: one for name, one in cases.items() if not one.get("end")}
    hardware = results["hardware"]
    parts = [
        HEAD.format(
            number=len(done),
            device=hardware["device"].removeprefix("NVIDIA "),
            torch=hardware["torch"],
            summary=_summary(results["summary"]),
            commit=results["commit"].partition("-")[0],
        )
    ]
    for head, folder in ((BLIND, "blind"), (SECOND, "blind_second")):
        mine = [name for name, one in done.items() if one["of"] == folder]
        if mine:
            parts += [head, TABLE, *(_row(facts(name), done[name]) for name in mine)]
    if own := sum(one["of"] == "own" for one in done.values()):
        summary = results["summary"]
        said = {what: summary[f"own: {what}"] for what in ("place", "cause", "right")}
        silent = summary["own: nothing promised for nothing"]
        parts.append(OWN.format(number=own, silent=silent, **said))
    missing = [*results.get("not_done", ()), *(name for name in cases if name not in done)]
    if missing:
        parts.append(f"\nDid not run: {', '.join(missing)}.\n")
    return "".join(parts)


def _summary(found: Mapping[str, str]) -> str:
    silent = found["nothing promised for nothing"]
    none = f" Where the fix gains nothing, nothing is promised in {silent}."
    second = silent_second = ""
    if found.get("second: place", _NONE) != _NONE:
        if (promised := found["second: nothing promised for nothing"]) != _NONE:
            silent_second = f", and nothing is promised for nothing in {promised}"
        second = (
            f" In a second set, the place is right in {found['second: place']}, the cause in "
            f"{found['second: cause']}, the prediction in {found['second: right']}{silent_second}."
        )
    return (
        f"By somebody who had not read the rules, and where the fix gains something, the place is "
        f"right in {found['place']}, the cause in {found['cause']}, and the prediction, within the "
        f"larger of 3% of the step and a quarter of the gain, in {found['right']}. After the fix, "
        f"the finding that named the cause is gone in {found['gone']}."
        f"{none if silent != _NONE else ''}{second}"
    )


def _row(about: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    source = about["source"]
    repository, _, number = source.partition("#")
    link = source if "://" in source else f"https://github.com/{repository}/issues/{number}"
    says = found["says"].partition(": ")[0]
    if found["by"]:
        line = f" ({found['line']})" if found["line"] else ""
        where = f"`{found['at'] or 'the whole model'}`{line}"
        says = f"[{found['by']}](findings.md#{found['by']}) at {where}"
    promised = found["promised_ms"]
    still_there = ", still there after the fix" if found["gone"] is False else ""
    cells = (
        f"{about['title']} ([{repository if number else 'source'}]({link}))",
        f"{_cell(says)} · *{_verdict(found)}*{still_there}",
        about["fix"],
        f"{found['step_ms']:.1f}: {'–' if promised is None else f'{promised:.1f}'}, "
        f"{found['gain_ms']:.1f} ±{found['gain_spread_ms']:.1f}",
    )
    return f"| {' | '.join(cells)} |\n"


def _verdict(found: Mapping[str, Any]) -> str:
    if found["nothing"]:
        return "rightly nothing promised" if found["right"] else "promises what is not there"
    named = [what for what in ("place", "cause") if found[what]]
    return " and ".join(named) + (" only" if len(named) == 1 else "") if named else "missed"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def main() -> None:
    """Write the page beside this script."""
    page = made(answer())
    Path(__file__).with_name("published.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
