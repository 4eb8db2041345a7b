"""What the plan of an earlier report, before a change, leaves to try again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from backspot.formatting import counted
from backspot.live.plan.pace import IF_READY
from backspot.live.plan.settings import AS_IT_IS, Setting
from backspot.live.plan.watching import Watching
from backspot.live.trials.chains import tensors_of
from backspot.results.plan import Plan, Rung
from backspot.results.report import Report

FROM_EARLIER = "as the earlier report says"


def why_anew(earlier: Report, report: Report, plan: Plan) -> str:
    """Return why nothing counts of an earlier plan, ``""`` if it does.

    It is of the same modules with the same inputs, and was made where this one is.
    """
    if earlier.plan is None:
        return "the earlier report has no plan"
    if _modules(earlier) != _modules(report) or earlier.plan.inputs != plan.inputs:
        return "the earlier report has no plan of this model with these inputs"
    for before, now in zip(_made_on(earlier), _made_on(report), strict=True):
        if before != now:
            return f"the earlier plan was made with {before}, and this one is with {now}"
    return ""


def _made_on(report: Report) -> tuple[str, str, str]:
    """Return what the times of a report depend on: the devices, PyTorch, threads and CPUs."""
    recorded = report.recorded
    threads = recorded.get("host", "").partition(", ")[2]  # without the load
    torch = recorded.get("torch", "")
    return recorded.get("device") or "no GPU", f"PyTorch {torch}", threads or "other CPUs"


def inputs_of(watched: Watching) -> tuple[str, ...]:
    """Return what the models were called with, each kind of tensor once."""
    tensors = (tensor for call in watched.calls for tensor in tensors_of((call.args, call.kwargs)))
    kinds = (
        f"{'x'.join(map(str, tensor.shape)) or 'one'} {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in tensors
    )
    return tuple(dict.fromkeys(kinds))


def _modules(report: Report) -> set[tuple[str, str]]:
    return {(row.path, row.class_name) for row in report.modules if row.is_module}


def lost_before(
    plan: Plan | None, settings: Sequence[Setting]
) -> dict[tuple[str, frozenset[str]], Rung]:
    """Return the rungs that did not help before, with nothing below them changed since.

    Args:
        plan: the earlier plan.
        settings: what could be tried now.

    Returns:
        By the setting, and by the names of those that it was tried on top of beside what is in use.
    """
    if plan is None:
        return {}
    used = {one.setting for one in plan.rungs if one.note == AS_IT_IS}
    used &= {one.name for one in settings}
    known = used | {one.setting for one in plan.ladder}
    now = {one.name for one in settings if one.why_not == AS_IT_IS} & known
    found = {}
    tried = {one.name for one in settings}
    for rung in plan.rungs:
        if rung.note.endswith(IF_READY):  # it may help with another loader
            continue
        if rung.verdict == "does not help" and used <= now <= used.union(rung.on):
            on = tuple(one for one in rung.on if one in tried - now)
            found[rung.setting, frozenset(on)] = replace(rung, on=on, note=FROM_EARLIER)
    return found


def taken_from(earlier: Plan | None, rungs: Sequence[Rung], why: str) -> str:
    """Return what of an earlier plan counts now, as a sentence.

    Args:
        why: why nothing counts, or ``""``.
    """
    if earlier is None:
        return f"All is tried anew: {why}."
    ladder = {rung.setting for rung in earlier.ladder}
    settings_made = [
        rung.setting for rung in rungs if rung.note == AS_IT_IS and rung.setting in ladder
    ]
    lost = sum(rung.note == FROM_EARLIER for rung in rungs)
    sentence = (
        f"{counted(lost, 'setting')} that did not help in the earlier report {{}} not tried again"
    )
    more = [
        f"of its plan, {', '.join(settings_made)} {'is' if len(settings_made) == 1 else 'are'} made"
    ] * bool(settings_made)
    return "; ".join([sentence.format("is" if lost == 1 else "are"), *more]) + "."
