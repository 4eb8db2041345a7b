"""A plan in words: its ladder as a table, what all of it makes, and what does not help here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backspot.formatting import MINUS, counted, duration, percent, size
from backspot.render._sections import Column, Saying, Section, Table, milliseconds_of, numbers
from backspot.render._words import Part
from backspot.render.view import View, only_nodes
from backspot.results.comparison import Comparison
from backspot.results.findings import FirstRemedy, Saving
from backspot.results.plan import Plan, Rung
from backspot.results.report import Report
from backspot.results.trials import APART

_NOTABLE = 0.02
"""Share of the step from which it is said that a part of it stays as it is."""
_ANOTHER = 0.2
"""Share of a step by which steps of a training differ that a plan of some of them is not of."""
_NONE = "Of what was tried, nothing makes a step shorter here."
_HINT = (
    "A plan tries settings on a copy of the model, in a minute: backspot run --plan, %%backspot "
    '--plan in a notebook, or backspot.profile(..., trials="plan")'
)
_AS_IT_IS = "as it is"
_DIFFERENCES = (
    "outputs, loss, gradients: how far from those as it is, relative to their size; first line: "
    "of a second run as it is."
)


def heading(plan: Plan) -> str:
    """What was tried on what, and how long that took; or why nothing was."""
    if plan.why_not:
        return f"No plan: {plan.why_not.rstrip('.')}."
    took = f", in {duration(plan.took_ns)}" if plan.took_ns else ""
    if took and plan.compiling_ns >= _NOTABLE * plan.took_ns:
        took += f", {percent(plan.compiling_ns / plan.took_ns)} of it to compile"
    return f"Plan: settings tried on {plan.what}{took}" if plan.what else "Plan"


def sentences_of(plan: Plan) -> list[str]:
    """What a plan says beside its ladder, in its order; nothing where nothing was tried."""
    if plan.why_not:
        return []
    undecided = _others(plan, "undecided")
    return [
        *_altogether(plan),
        *_compiling(plan),
        *_of_batch(plan),
        *_helpful(plan),
        *_timed("Does not help here", _others(plan, "does not help")),
        *_timed("Too close to tell", [rung for rung in undecided if _is_close(rung)]),
        *_timed(
            "Not certain in so little time (--plan=300 takes more)",
            [rung for rung in undecided if not _is_close(rung)],
        ),
        *_untried(_others(plan, "not tried")),
        *filter(None, [plan.earlier]),
    ]


def _is_close(rung: Rung) -> bool:
    """Whether a step takes about as long with a setting, as far as that is known."""
    return abs(rung.saves_ns) <= APART * rung.before_ns


def sentences_on(report: Report, plan: Plan) -> list[str]:
    """What a plan says, and whether the steps of its report are others than it was made of."""
    if not _is_of_another_step(report, plan):
        return sentences_of(plan)
    was, now = duration(plan.step_ns), duration(report.step_ns)
    return [
        *sentences_of(plan),
        f"It was made of a step of {was}, and over the whole training a step takes {now}.",
    ]


def _helpful(plan: Plan) -> list[str]:
    """What helps and is no part of the ladder, where another one of its kind may be."""
    helps, axes = _others(plan, "helps"), {rung.axis for rung in plan.ladder}
    less = [rung for rung in helps if rung.axis in axes]
    alone = [rung for rung in helps if rung.axis not in axes]
    return [*_timed("Helps less", less), *_timed("Helps by itself", alone)]


def code_of(plan: Plan) -> list[tuple[str, str]]:
    """The code to write for each rung, in the order in which to write it."""
    return [(rung.setting, rung.code) for rung in plan.ladder if rung.code]


def change_of(before_ns: int, after_ns: int) -> str:
    """Two times of a step: ``94.7 → 54.0 ms``."""
    before, after = duration(before_ns), duration(after_ns)
    (amount, unit), other = before.split(), after.split()[1]
    return f"{amount if unit == other else before} → {after}"


def relative(share: float) -> str:
    """How far a result is from another: ``0``, ``3e-7``, ``0.4%``."""
    if share < 0.001:
        return f"{share:.0e}".replace("e-0", "e-") if share else "0"
    return percent(share) if share < 10 else f"{share:.0f} times"


def ladder_columns(plan: Plan) -> list[Column]:
    """The ladder as columns: first the training as it is, then each rung on those before it."""
    rungs = plan.ladder
    ms = milliseconds_of(max((plan.step_ns, *(rung.step_ns for rung in rungs))))
    settings: list[Part] = [
        ("text", _AS_IT_IS),
        *(("name", f"{number}. {rung.setting}") for number, rung in enumerate(rungs, 1)),
    ]
    columns = [
        Column("name", "setting", settings, least=16, left=True, style="cyan"),
        Column("other time", "before", numbers(["", *(ms(rung.before_ns) for rung in rungs)])),
        Column(
            "time",
            "step",
            numbers(ms(ns) for ns in (plan.step_ns, *(rung.step_ns for rung in rungs))),
            full_head="step ms",
            style="bold",
        ),
        Column(
            "spread",
            "±",
            numbers(["", *(ms((rung.high_ns - rung.low_ns) // 2) for rung in rungs)]),
            full_head="± ms",
            need=3,
            gap=1,
            style="dim",
        ),
    ]
    if any(rung.memory_bytes for rung in rungs):
        # A loader's rung has none, and changes none.
        before = next((one.before_memory_bytes for one in rungs if one.before_memory_bytes), 0)
        cells = numbers([size(before) if before else "", *(_memory(rung) for rung in rungs)])
        columns.append(Column("amount", "memory", cells, full_head="memory", need=2))
    return [*columns, *_differences(rungs)]


def note_of(plan: Plan) -> str:
    """What the columns of the ladder are that need a word; empty if none does."""
    different = any(_differences(plan.ladder))
    memory = any(rung.memory_bytes for rung in plan.ladder)
    notes = [_DIFFERENCES] * different + ["memory: of forward and backward."] * memory
    return " ".join(notes)


def _memory(rung: Rung) -> str:
    """How much more or less memory a rung takes than the one before it."""
    if not rung.memory_bytes or not rung.before_memory_bytes:
        return ""
    change = rung.memory_bytes - rung.before_memory_bytes
    return f"{MINUS if change < 0 else '+' if change else ''}{size(abs(change))}"


def _differences(rungs: Sequence[Rung]) -> Iterator[Column]:
    """How far outputs, loss and gradients are, beside a second run as it is."""
    differences = [rung.difference for rung in rungs]
    for need, name in ((1, "outputs"), (5, "loss"), (4, "gradients")):
        shares: list[float | None] = [getattr(difference, name, None) for difference in differences]
        if any(share is not None for share in shares):
            again = [
                getattr(difference, f"{name}_again")
                for difference in differences
                if difference is not None
            ]
            most = max((share for share in again if share is not None), default=None)
            cells = numbers(
                "" if difference is None else relative(difference) for difference in (most, *shares)
            )
            yield Column("amount", name, cells, full_head=name, need=need)


def _altogether(plan: Plan) -> Iterator[str]:
    """What all of the ladder makes of the step, and what limits it then."""
    if not plan.ladder:
        tried = [rung for rung in plan.rungs if rung.step_ns]
        if not any(rung.verdict == "helps" for rung in tried):
            yield _NONE if tried else "Nothing was tried."
    else:
        times = plan.step_ns / plan.planned_ns if plan.planned_ns else 0
        factor_text = f", {times:.1f} times as fast" if times >= 1.05 else ""
        yield f"In all: {change_of(plan.step_ns, plan.planned_ns)}{factor_text}."
    last = next((rung for rung in reversed(plan.ladder) if rung.limit), plan)
    if last.limit and not plan.loader_ns:
        then = "then " * (last is not plan)
        limit, other, ns = (
            ("GPU", "host", last.host_ns)
            if last.limit == "device"
            else ("host", "GPU", last.device_ns)
        )
        yield f"The {limit} {then}limits the step: the {other} needs {duration(ns)} of it."
        if then and last.limit == "host":
            yield "The speed of a host can change by more than ± shows."
    if plan.next_limit:
        yield _sentence(plan.next_limit)
    if plan.ladder and plan.rest_ns >= _NOTABLE * plan.planned_ns:
        yield f"{duration(plan.rest_ns)} of it are outside of what was tried."


def _compiling(plan: Plan) -> Iterator[str]:
    """What compiling takes, and after how many steps it has paid."""
    for rung in plan.ladder:
        if rung.compile_ns:
            pays = rung.pays_after
            paid = f", and has paid after {counted(pays, 'step')}" if pays is not None else ""
            yield f"{rung.setting} compiles for {duration(rung.compile_ns)} once{paid}."


def _of_batch(plan: Plan) -> Iterator[str]:
    """What another batch makes of the same number of samples; it is no part of the ladder."""
    for rung in plan.rungs:
        if rung.axis == "batch" and rung.step_ns:
            samples = f"{plan.batch:,} samples" if plan.batch else "as many samples"
            note = f" ({rung.note})" if rung.note else ""
            on = " on top of the plan" if rung.on else ""
            yield (
                f"{rung.setting}{on}: {samples} take {change_of(rung.before_ns, rung.step_ns)}, "
                f"{_VERDICTS[rung.verdict]}{note}."
            )


_VERDICTS = {
    "helps": "which helps, and changes what the model learns",
    "does not help": "which does not help here",
    "undecided": "too close to tell",
    "not tried": "not tried",
}


def _others(plan: Plan, verdict: str) -> list[Rung]:
    """The rungs with a verdict that are no part of the ladder."""
    return [
        rung
        for rung in plan.rungs
        if not rung.kept
        and rung.verdict == verdict
        and not (rung.axis == "batch" and rung.step_ns)  # has a sentence of its own
    ]


def _timed(lead: str, rungs: Sequence[Rung]) -> Iterator[str]:
    """Some rungs in one sentence, each with its times."""
    rung_texts = []
    for rung in rungs:
        on = f" with {' and '.join(rung.on)}" if rung.on else ""
        note = f" ({rung.note.rstrip('.')})" if rung.note else ""
        rung_texts.append(f"{rung.setting}{on} {change_of(rung.before_ns, rung.step_ns)}{note}")
    if rung_texts:
        yield f"{lead}: {'; '.join(rung_texts)}."


def _untried(rungs: Sequence[Rung]) -> Iterator[str]:
    """The rungs that were not tried, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for rung in rungs:
        by_reason.setdefault(rung.note.rstrip("."), []).append(rung.setting)
    reasons = [
        f"{', '.join(settings)} ({reason})" if reason else ", ".join(settings)
        for reason, settings in by_reason.items()
    ]
    if reasons:
        yield f"Not tried: {'; '.join(reasons)}."


def _sentence(text: str) -> str:
    text = text.strip()
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def hint(report: Report) -> str:
    """That a plan can be made; only of a live training whose modules are known."""
    can = bool(report.recorded.get("torch")) and report.out_of_memory is None
    return _HINT if can and report.plan is None and not only_nodes(report) else ""


def _sections(report: Report, _: View) -> list[Section]:
    """The plan with its ladder, below all else; or that one can be made."""
    plan = report.plan
    if plan is None:
        hint_text = hint(report)
        return [Section("last", "plan", [hint_text])] if hint_text else []
    tables = [Table("", note_of(plan), ladder_columns(plan))] if plan.ladder else []
    sentences, title = sentences_on(report, plan), heading(plan)
    code = code_of(plan)
    return [Section("last", "plan", sentences, len(sentences), title, tables, code=code)]


def _planned(comparison: Comparison) -> list[str]:
    """Of each setting of the plan before, what it said and what the step takes now; a heading."""
    if not comparison.planned:
        return []
    before = duration(comparison.planned[0].before_ms * 1e6)
    lines = [f"What the plan said of the step, which took {before}:"]
    for planned in comparison.planned:
        on = f" with {' and '.join(planned.on)}" if planned.on else ""
        said_ms, now = (duration(ms * 1e6) for ms in (planned.said_ms, planned.after_ms))
        lines.append(f"{planned.setting}{on}: said {said_ms}, now {now}: {planned.outcome}.")
    return lines


def _is_of_another_step(report: Report, plan: Plan) -> bool:
    """Whether the training's steps, all of them, take another time than the one that was planned.

    What a setting saves of that step, it may not save of these.
    """
    apart = abs(plan.step_ns - report.step_ns)
    return report.clock == "real" and bool(plan.step_ns) and apart > _ANOTHER * report.step_ns


def _remedies(report: Report) -> list[FirstRemedy]:
    """The first rung of the ladder, as far as the loader lets the step become shorter."""
    plan = report.plan
    if plan is None or not plan.ladder or _is_of_another_step(report, plan):
        return []
    rung = plan.ladder[0]
    most_ns = max(0, plan.step_ns - plan.loader_ns) if plan.loader_ns else rung.before_ns
    low_ns, high_ns = rung.low_ns or rung.step_ns, rung.high_ns or rung.step_ns
    ns, least, most = (
        min(max(0, rung.before_ns - step_ns), most_ns)
        for step_ns in (rung.step_ns, high_ns, low_ns)
    )
    saves = Saving(ns, least, most)
    share = saves.ns / max(1, rung.before_ns)
    return [FirstRemedy(rung.setting, saves, share, measured=True)]


SAYING = Saying(_sections, compared=_planned, remedies=_remedies)
