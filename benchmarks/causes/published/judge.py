"""Holding a report against a published case: the place, the cause, the promise, and the fix."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.causes.published import Published, names

if TYPE_CHECKING:
    import backspot

Said = dict[str, Any]
_NOTHING = 0.02
_FIRST = 3  # as many rows, findings and places of a finding are looked at


def said(report: backspot.Report) -> Said:
    """Return what a report says, in milliseconds."""
    from backspot.results.findings import gain_of

    findings = []
    for one in report.findings:
        texts = {key: getattr(one, key) for key in ("rule", "title", "seen", "remedy")}
        places = [asdict(place) for place in one.places[:_FIRST]]
        tried, gain = one.tried.verdict if one.tried else "", gain_of(one)
        promised = 0 if tried == "does not help" else gain.ns if gain else one.wall_ns
        about = {"places": places, "tried": tried, "promised": promised / 1e6, "tier": one.tier}
        findings.append({**texts, **about})
    rows = list(report.modules)
    first = [row.path for row in rows][:_FIRST]
    first += [row.path for row in rows if row.is_module][:_FIRST]
    return {
        "says": " ".join(takewhile(_is_answer, str(report).splitlines())),
        "answer": report.answer.path,
        "answer_saves": report.answer.saves.ns / 1e6 if report.answer.saves else None,
        "step_ms": report.step_ns / 1e6,
        "rows": list(dict.fromkeys(first)),
        "findings": findings,
        "warnings": list(report.warnings),
    }


def _is_answer(line: str) -> bool:
    return bool(line.strip()) and not line.startswith((" ", "A step takes", "Backward ", "Step"))


def of_tier(report: Said, tier: str) -> Said:
    """Return what a report says by the rules of one tier; modules and the answer are stable."""
    found = {**report, "findings": [one for one in report["findings"] if one["tier"] == tier]}
    return found if tier == "stable" else {**found, "rows": [], "answer": "", "answer_saves": None}


def judged(case: Published, before: Said, after: Said, times: Sequence[Sequence[float]]) -> Said:
    """Return the verdict on a case.

    A promise is right within 3% of the step or a quarter of the gain, whichever is larger. Where
    the fix gains nothing on this machine, less than 2% of the step, there is nothing to name, and
    at most these 2% may be promised for this cause at this place. Where it leaves a part of the
    cause, the promise is not judged.

    Args:
        case: what should have been said.
        before: what the report of the slow step says.
        after: what that of the fixed step says.
        times: milliseconds a step of both, measured in turn.
    """
    gains = sorted(slow - fast for slow, fast in zip(*times, strict=True))
    gain, step = _middle(gains), _middle(sorted(times[0]))
    spread = (gains[3 * len(gains) // 4] - gains[len(gains) // 4]) / 2
    first = before["findings"][:_FIRST]
    causes = [found for found in first if _names_cause(case, found)]
    places = [found for found in first if _names_place(case, found)]
    # Of those that name one of both, the first that names most.
    best = sorted(causes + places, key=lambda found: -(found in causes) - (found in places))
    answered = _is_at(case.place, before["answer"].replace("*", "0"))
    promised = best[0]["promised"] if best else before["answer_saves"] if answered else None
    # A cause comes before a place, so that this is the finding that names the cause.
    again = [f for f in after["findings"] if best and f["rule"] == best[0]["rule"]]
    again = [found for found in again if _names_cause(case, found)]
    was, left = (sum(found["promised"] for found in some) for some in (best[:1], again))
    verdict = {
        "step_ms": step,
        "gain_ms": gain,
        "gain_spread_ms": spread,
        "nothing": gain < _NOTHING * step,
        "place": bool(places) or answered or any(_is_at(case.place, p) for p in before["rows"]),
        "cause": bool(causes),
        "half": not causes and any(_says(case.half, found) for found in first),
        "by": best[0]["rule"] if best else None,
        "promised_ms": promised,
        "right": promised is not None and abs(promised - gain) <= max(0.03 * step, abs(gain) / 4),
        "gone": (left < was if case.partly else not left) if causes else None,
    }
    if case.partly:
        verdict["right"] = None
    if case.remains:
        verdict["gone"] = None
    if verdict["nothing"]:
        false = max((found["promised"] for found in causes if found in places), default=0.0)
        verdict |= {
            "promised_ms": false,
            "place": None,
            "cause": None,
            "half": None,
            "gone": None,
            "right": false <= _NOTHING * step,
        }
    return verdict


def _middle(values: Sequence[float]) -> float:
    return values[len(values) // 2]


def _names_cause(case: Published, found: Said) -> bool:
    return _says(case.cause, found)


def _says(phrases: Sequence[str], found: Said) -> bool:
    text = " ".join(found[key] for key in ("rule", "title", "seen", "remedy")).lower()
    return any(all(word in text for word in phrase.lower().split()) for phrase in phrases)


def _names_place(case: Published, found: Said) -> bool:
    if any(_is_at(case.place, place["path"]) for place in found["places"]):
        return True
    if any(f"{_function(place.get('line') or '')}()" in case.place for place in found["places"]):
        return True
    text = f"{found['title']} {found['seen']}"
    phases = (f"The {place.strip('()')} takes" for place in case.place if place[0] == "(")
    calls = (place[:-1] for place in case.place if place.endswith("()"))  # "collect("
    return any(name in text for name in (*phases, *calls))


def _function(line: str) -> str:
    """Return the function of a case that holds a line (``path:12`` or ``path:12-14``)."""
    name, _, numbers = line.rpartition(":")
    path = next(Path(__file__).parent.rglob(Path(name).name or "-"), None)
    number = numbers.partition("-")[0]
    if path is None or not number.isdecimal():
        return ""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    known = [node for node in tree if isinstance(node, ast.FunctionDef)]
    within = [one for one in known if one.lineno <= int(number) <= (one.end_lineno or 0)]
    return max(within, key=lambda one: one.lineno).name if within else ""


def _is_at(places: Sequence[str], path: str) -> bool:
    return any(_fits(place.split("."), path.split(".")) for place in places)


def _fits(pattern: Sequence[str], names: Sequence[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_fits(pattern[1:], names[start:]) for start in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _fits(pattern[1:], names[1:])


def score(cases: Mapping[str, Published], verdicts: Mapping[str, Said], device: str) -> Said:
    """Return how many of the cases that mean something on a device were answered.

    Those of the second set, and those of somebody who had read the rules, are counted apart.
    """
    found: Said = {}
    for folder, whose in (("blind", ""), ("blind_second", "second: "), ("own", "own: ")):
        among = {name: verdicts[name] for name in names(folder) if name in verdicts}
        found |= {whose + what: value for what, value in counted(cases, among, device).items()}
    return found


def counted(
    cases: Mapping[str, Published],
    verdicts: Mapping[str, Said],
    device: str,
    asked: Sequence[str] = ("place", "cause", "right", "gone"),
) -> Said:
    """Return how many of the cases that mean something on a device were answered."""
    meant = [
        verdict
        for name, verdict in verdicts.items()
        if device != "cpu" or cases[name].device == "any"
    ]
    nothing = [verdict for verdict in meant if verdict["nothing"]]
    real = [verdict for verdict in meant if not verdict["nothing"]]
    found: Said = {}
    for what in asked:
        known = [verdict[what] for verdict in real if verdict[what] is not None]
        found[what] = f"{sum(known)} of {len(known)}"
    silent = sum(verdict["right"] for verdict in nothing)
    return {**found, "nothing promised for nothing": f"{silent} of {len(nothing)}"}
