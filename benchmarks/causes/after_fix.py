"""What is found once a cause is gone? The fixed variants of all cases, profiled as a user would.

python -m benchmarks after_fix --device cuda --jobs 6
python -m benchmarks after_fix --device cpu --book FOLDER        # with the cases of a case book
python -m benchmarks after_fix --sets own,book --book FOLDER     # on another GPU at the same time
python -m benchmarks after_fix judge FILE FILE                   # what ``-o FILE`` has written

The cases are those of ``published_causes`` and ``blind_set_3``, with their slow step, and the
controls of ``causes``, which are their models with everything done well and have no slow step. A
case book is a folder of files with ``build(fixed, device, size)``, ``RULES``, ``WORDS`` and,
where the fix leaves a part of the cause, ``PARTLY``.

Each case has a process of its own. Its slow step is profiled without trials, and its fixed step by
the defaults of ``backspot.profile``; the processes take turns on the device. A finding of the fixed
step was there before the fix if the slow step has one of the same rule at the same place; what is
true of nearly every step has no place. What takes less than 2% of the slow step is below what rules
look at there, and is not new. A finding promises too much if it names the cause and promises
above 2% of the step, or if it promises that and was not there before with as large a promise.

A fixed step can have a second cause. A finding is true where its own trial has made the change
here and the step became shorter, where the case says that the fix leaves it, where it promises a
part of the time in which no kernel runs in steps without the profiler, where the change is a
setting that was made here and shortened real steps by 2%, or where ``after_fix.toml`` says by what
it was shown. These are counted apart. Stable rules and those in preview are counted apart, too.

``judge`` takes the newest record of each case, and states commit and hardware of the first file.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Figures, Run, UsageError, each, profile_in_turn, turn
from benchmarks.measuring import interleaved
from benchmarks.workers import NO_TIME, Job, Record, Stage

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

if TYPE_CHECKING:
    import torch

    import backspot
    from benchmarks.models import Context

Said = dict[str, Any]
Step = Callable[[], object]
Models = Mapping[str, "torch.nn.Module"]

_SMALL = ("blind:gae_loop", "blind:zeroed_gradients")
_TIMEOUT_S = 150.0
_PROMISE = 0.02
_OF_PROMISE = 0.25
TIERS = ("stable", "preview")
_PLACE_IN_CODE = re.compile(r"\S*\.py\b")
_OF_IDLE = ("launch-bound", "small-batch")
"""Rules that promise the time in which the GPU has nothing to do."""


@dataclass(frozen=True)
class Variants:
    """A case as it was and as it became.

    Attributes:
        about: what was slow.
        build: builds the fixed step, or the slow one, with the models to instrument.
        close: called when the case is over.
        names_cause: whether a finding names the cause.
        leaves: whether the fix leaves a part of the cause.
        granted: rules that find something for a known reason.
        slow: whether there is a step before the fix.
        device: ``cuda``, ``cpu`` or ``any``: where its figures mean something.
    """

    about: str
    build: Callable[[bool, Context], tuple[Step, Models]]
    close: Callable[[], None] = lambda: None
    names_cause: Callable[[Said], bool] = lambda _: False
    leaves: bool = False
    granted: Mapping[str, str] = field(default_factory=dict)
    slow: bool = True
    device: str = "any"


# The cases ---------------------------------------------------------------------------------------


def cases(book: Path | None = None) -> dict[str, Variants]:
    """Return all cases by ``set:name``."""
    return {**_published(), **(_of_book(book) if book else {}), **_controls()}


def _published() -> dict[str, Variants]:
    from benchmarks.causes import published

    found = {}
    for folder in (*published.FOLDERS, published.THIRD):
        for name in published.names(folder):
            case, build = published.load(name)
            found[f"{folder}:{name}"] = Variants(
                published.title(name),
                build,
                names_cause=partial(_says, case.cause),
                leaves=case.partly or case.remains,
                device=case.device,
            )
    return found


def _says(phrases: Sequence[str], finding: Said) -> bool:
    text = " ".join(finding[key] for key in ("rule", "title", "seen", "remedy")).lower()
    return any(all(word in text for word in phrase.lower().split()) for phrase in phrases)


def _of_book(folder: Path) -> dict[str, Variants]:
    found = {}
    sys.path.insert(0, str(folder.resolve()))
    for path in sorted(folder.glob("*.py")):
        if "def build(" not in path.read_text(encoding="utf-8"):
            continue
        spec = importlib.util.spec_from_file_location(f"book_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise UsageError(f"{path} is no case")
        case = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(case)
        found[f"book:{path.stem}"] = Variants(
            case.TITLE,
            partial(_built_of_book, case.build),
            names_cause=partial(_is_named, case.RULES, getattr(case, "WORDS", ())),
            leaves=getattr(case, "PARTLY", False),
            device=case.DEVICE,
        )
    return found


def _built_of_book(build: Any, fixed: bool, context: Context) -> tuple[Step, Models]:
    step, models = build(fixed, context.device, 0.25 if context.small else 1.0)
    return step, models if isinstance(models, Mapping) else {"": models}


def _is_named(rules: Sequence[str], words: Sequence[str], finding: Said) -> bool:
    return finding["rule"] in rules or _says(words, finding)


def _controls() -> dict[str, Variants]:
    from benchmarks.causes.cases import CASES

    found = {}
    for name, case in CASES.items():
        if case.planted or case.ranks > 1 or case.gpus > 1:
            continue
        found[f"control:{name}"] = Variants(
            case.about,
            partial(_built_control, case.build),
            names_cause=partial(_is_named, (case.rule,), ()),
            granted=case.also,
            slow=False,
            device="cuda" if case.gpus else "cpu",
        )
    return found


def _built_control(build: Any, _: bool, context: Context) -> tuple[Step, Models]:
    made = build(context)
    _closing.append(made.close)
    return made.step, {name: model for model, name in made.modules}


_closing: list[Callable[[], None]] = []
"""What ends the loaders of the controls that this process has built."""


# Measuring ---------------------------------------------------------------------------------------


def _examine(job: Job, stage: Stage, run: Any) -> Record:
    """Profile a case, slow and fixed."""
    import backspot
    from benchmarks.causes.case import prepare, settings

    case = cases(run.book)[job["name"]]
    prepare(run.device)
    found: Record = {}
    if case.slow:
        with turn():
            stage("build the slow step", {})
            settings()
            step, models = case.build(False, run.context)
            step()
        stage("profile the slow step", {})
        few = {"steps": 5, "warmup": 1, "unprofiled": 4}
        found["before"] = said(profile_in_turn(step, models, **few, trials="none"))
        del step, models
        _give_back(run)
    with turn():
        stage("build the fixed step", found)
        settings()
        step, models = case.build(True, run.context)
        step()
        stage("profile the fixed step", found)
        found["after"] = said(backspot.profile(step, models))
        stage("make the next fix", found)
        found["made"] = _made(case, run, step, found["after"])
        while _closing:
            _closing.pop()()
        del step, models
        _give_back(run)
    return found


def _made(case: Variants, run: Run, step: Step, after: Said) -> dict[str, list[float]]:
    """Return milliseconds of the fixed step as it is and with the next fix, measured in turn.

    They are of the rules that promise above 2% of the step, and whose remedy is a setting.
    """
    from benchmarks.causes.case import settings

    times: dict[str, list[float]] = {}
    for finding in after["findings"]:
        is_asked = finding["rule"] in _MAKERS and finding["tried"] != "helps"
        if not is_asked or (finding["promises_ms"] or 0.0) <= _PROMISE * after["step_ms"]:
            continue
        settings()
        other, models = case.build(True, run.context)
        changed = _MAKERS[finding["rule"]](other, models)
        how = {"rounds": 2 if run.small else 5, "inner": 1 if run.device == "cpu" else 4}
        both = interleaved([step, changed], run.device, **how, warmup=2, seconds=2)
        times[finding["rule"]] = [statistics.median(some) for some in both]
    return times


def _in_tf32(step: Step, _: Models) -> Step:
    """Return a step whose products of float32 are of TF32."""
    import torch

    def changed() -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            step()
        finally:
            torch.set_float32_matmul_precision(before)

    return changed


def _in_channels_last(step: Step, models: Models) -> Step:
    """Return a step whose weights have their channels last in memory."""
    import torch

    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for model in models.values():
        for weight in model.parameters():
            if weight.dim() in formats:
                weight.data = weight.data.to(memory_format=formats[weight.dim()])
    return step


_MAKERS: dict[str, Callable[[Step, Models], Step]] = {
    "no-tensor-cores": _in_tf32,
    "layout-copies": _in_channels_last,
}
"""Remedies that are a setting: from a step and its models, which may be changed, to a step."""


def _give_back(run: Run) -> None:
    """Leave the memory of the device to the processes whose turn comes."""
    import torch

    gc.collect()
    if run.device != "cpu":
        torch.cuda.empty_cache()


def said(report: backspot.Report) -> Said:
    """Return what a report says, in milliseconds of its step."""
    from backspot.testing import all_rules, gain_of

    common = {rule.name for rule in all_rules() if rule.common}
    step = report.replayed_step.ns if report.replayed_step else report.step_ns
    findings = []
    for one in report.findings:
        gain = gain_of(one)
        tried = one.tried.verdict if one.tried else ""
        places = [place.path for place in one.places]
        findings.append(
            {key: getattr(one, key) for key in ("rule", "tier", "title", "seen", "remedy")}
            | {
                "places": [] if one.rule in common else places[:6],
                "line": (one.places[0].line or "") if one.places else "",
                "takes_ms": one.wall_ns / 1e6,
                "promises_ms": 0.0 if tried == "does not help" else gain and gain.ns / 1e6,
                "bound": "" if gain is None else "best" * gain.at_best or "least" * gain.at_least,
                "tried": tried,
            }
        )
    return {
        "step_ms": step / 1e6,
        "real_ms": (report.unprofiled_step_ns or 0) / 1e6,
        "busy_ms": sum(phase.busy_ns for phase in report.phases) / 1e6,
        "findings": findings,
        "not_replayed": report.not_replayed,
        "says": str(report).partition("\n")[0],
    }


# Judging -----------------------------------------------------------------------------------------


def judged(
    case: Variants, record: Mapping[str, Any], known: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return the verdict on each finding of a fixed step.

    Args:
        case: what was slow, and what the fix leaves.
        record: what the reports of both steps say; without ``before``, nothing was there.
        known: by rule, what has shown that this finding is true.
    """
    after = record["after"]
    before = record.get("before") or {"findings": []}
    verdicts = []
    for finding in after["findings"]:
        if finding["tier"] not in TIERS:  # what is true of nearly every step is said, not found
            continue
        earlier = [one for one in before["findings"] if _is_same(one, finding)]
        # Places name the case's own file, and remedies much else.
        said_of_it = _PLACE_IN_CODE.sub("", finding["seen"])
        is_cause = case.names_cause({**finding, "seen": said_of_it, "remedy": ""})
        promise = finding["promises_ms"] or 0.0
        # Where the replay of the slow step is refused, what both take says whether it is the same.
        key = "takes_ms" if any(one["promises_ms"] is None for one in earlier) else "promises_ms"
        known_ms = sum(one[key] for one in earlier)
        # A machine that others keep busy meanwhile makes all of a step longer.
        known_ms *= max(1.0, after["step_ms"] / before.get("step_ms", after["step_ms"]))
        more = (finding[key] or 0.0) - known_ms
        is_larger = more > max(_PROMISE * after["step_ms"], _OF_PROMISE * known_ms)
        share = promise / after["step_ms"]
        # A control's rule is what it shows to be absent.
        counts = is_larger or not earlier or (is_cause and not case.leaves)
        verdicts.append(
            {
                "rule": finding["rule"],
                "tier": finding["tier"],
                "place": next(iter(finding["places"]), ""),
                "new": not earlier and finding["takes_ms"] >= _PROMISE * before.get("step_ms", 0.0),
                "share": share,
                "promises": counts and share > _PROMISE,
                "true": _evidence(case, record, finding, is_cause, known or {}),
            }
        )
    return verdicts


def _is_same(one: Said, other: Said) -> bool:
    """Whether two findings are of one rule and have a place in common."""
    if one["rule"] != other["rule"]:
        return False
    places, others = ({_place(path) for path in some["places"]} for some in (one, other))
    return bool(places & others) or not (places or others)


def _place(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _evidence(
    case: Variants,
    record: Mapping[str, Any],
    finding: Said,
    is_cause: bool,
    known: Mapping[str, str],
) -> str:
    """Return what shows that a finding of a fixed step is true; empty: nothing."""
    rule, after = finding["rule"], record["after"]
    if finding["tried"] == "helps":
        return "tried"
    if is_cause and case.leaves:
        return "left by the fix"
    if rule in _OF_IDLE:
        busy, real = after.get("busy_ms", 0.0), after.get("real_ms", 0.0)
        if 0 < busy + (finding["promises_ms"] or 0.0) < real:
            return f"kernels run for {busy:.2g} of {real:.2g} ms"
    as_it_is, changed = record.get("made", {}).get(rule, (0.0, 0.0))
    if as_it_is - changed > _PROMISE * as_it_is:
        return f"made: {as_it_is:.3g} to {changed:.3g} ms"
    return case.granted.get(rule) or known.get(rule, "")


def second_causes() -> dict[str, dict[str, str]]:
    """Return what is known of second causes in fixed steps: by case and rule, what showed them."""
    path = Path(__file__).with_suffix(".toml")
    found: dict[str, dict[str, str]] = tomllib.loads(path.read_text(encoding="utf-8"))
    return found


def line_of(name: str, verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is kept of a case: rules with something new or promised, and those that are true.

    ``new`` and ``promises`` name what is not known to be true, with the percentage of the step that
    is promised. A rule in preview begins with ``~``.
    """

    def named(verdict: Mapping[str, Any], share: bool = False) -> str:
        of_share = f" {100 * verdict['share']:.0f}" if share else ""
        return f"{'~' * (verdict['tier'] != 'stable')}{verdict['rule']}{of_share}"

    counted = [one for one in verdicts if one["new"] or one["promises"]]
    false = [one for one in counted if not one["true"]]
    lists = {
        "new": [named(one) for one in false if one["new"]],
        "promises": [named(one, True) for one in false if one["promises"]],
        "true": [named(one) for one in counted if one["true"]],
    }
    return {"case": name} | {key: "; ".join(some) or None for key, some in lists.items()}


def summary_of_lines(lines: Sequence[Mapping[str, Any]], _: str = "") -> dict[str, Any]:
    """Return in how many cases something is new or promised after the fix."""

    def count(key: str, tier: str) -> int:
        lists = [(line.get(key) or "").split("; ") for line in lines]
        is_preview = tier == "preview"
        return sum(any(one and one.startswith("~") is is_preview for one in some) for some in lists)

    return {
        f"{tier}: {what}": count(key, tier)
        for tier in TIERS
        for key, what in (
            ("new", "new after the fix"),
            ("promises", "promises above 2%"),
            ("true", "a second cause that is true"),
        )
    }


# The question ------------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("verb", nargs="?", choices=("record", "judge"), default="record")
    add("files", nargs="*", type=Path, help="judge: what -o has written, the newest last")
    add("--book", type=Path, help="a folder of further cases")
    add("--sets", default="", help="only cases of these: own,blind,control,… (default: all)")


def answer(run: Any) -> Figures:
    """Profile the fixed variant of each case, and judge what is found in it."""
    if run.book is not None and not run.book.is_dir():
        raise UsageError(f"--book needs a folder of cases: there is no {run.book}")
    known = cases(run.book)

    def chosen() -> dict[str, str]:
        named = bool(run.cases) or run.small or run.listed
        meant = {"any", run.device}
        return {name: case.about for name, case in known.items() if named or case.device in meant}

    measured: dict[str, Any] = {}  # where and of what, of recordings that are judged again
    if run.verb == "judge":
        if not run.files or not all(path.is_file() for path in run.files):
            raise UsageError("judge needs files that -o has written")
        kept: dict[str, Record] = {}
        for path in run.files:
            document = json.loads(path.read_text(encoding="utf-8"))
            found = document["cases"]
            kept |= {name: one for name, one in found.items() if one["end"] != NO_TIME}
            measured = measured or {key: document[key] for key in ("commit", "hardware")}
        records = {name: kept.get(name, {"end": NO_TIME}) for name in run.choose(chosen())}
    else:
        handle = partial(_examine, run=run)
        records = each(run, chosen, handle, small=_SMALL, timeout_s=_TIMEOUT_S)
    shown = second_causes()
    lines, rows = [], []
    for name, record in records.items():
        if record["end"] == "done":
            verdicts = judged(known[name], record, shown.get(name))
            lines.append(line_of(name, verdicts))
            rows += [{"case": name, **one} for one in verdicts if one["new"] or one["promises"]]
    return {
        "rows": rows,
        "lines": lines,
        "summary": summary_of_lines(lines),
        "cases": records,
        **measured,
    }
