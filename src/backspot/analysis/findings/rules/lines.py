"""Rules about the user's Python: lines that hold up the step, in a recording with stacks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from backspot.analysis.findings.costs import Placed
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import BY_MASK
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.recording import once
from backspot.analysis.timeline import NOTHING, first_started, grouped, merged, take
from backspot.formatting import counted, duration
from backspot.results.costs import PhaseName
from backspot.results.findings import Finding, Place, Saving
from backspot.results.host import HostLine
from backspot.trace import Category, names, operations

_LEAST = 0.05
"""Share of the step from which a function is worth a look."""
_LEAST_NS = 200_000
"""Nanoseconds of a step that are worth a change."""
_MUCH = 0.1
"""The same, for a function that runs no operator often: what it does may be needed."""
_AROUND = ("host", "other", "idle", "loss", "metrics", "clipping", "averaging", "trainer", "saving")
_ERROR = 0.04
"""Share of the step by which times of lines may be off, as those of a replay."""
_MANY = 20
"""Calls and operators in a step from which a function is a loop."""


@rule(
    "python-code",
    tier="stable",
    sources=(
        "deepchem/deepchem#3615",
        "awslabs/gluonts#1732",
        "gbionics/amp-rsl-rl#12",
    ),
    needs=("stacks",),
    title="Python code holds up the step",
    link="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
)
def python_code(evidence: Evidence) -> Finding | None:
    """Python code runs while nothing else does.

    **Cause.** A function of yours runs Python for long: a loop over elements, keys of a cache,
    checks, logging, or `torch.tensor()` of a list. No operator runs meanwhile.

    **Found by** stacks, which `backspot run --stacks` and `profile` record (a trace needs
    `with_stack=True`), at the cost of the time in which the function's own lines run and every
    device is idle. Before the first operator of a step, PyTorch's own code that they call counts,
    too.

    **Fix.** Do it once before the training, in the loader's workers, or for whole arrays:
    `torch.from_numpy(numpy.stack(arrays))` for `torch.tensor(arrays)`.
    """
    # Loops over operators around the model belong to ``code-around-model``.
    loops = {(line.file, line.function) for line, _ in _loops(evidence)}
    lines = [line for line in evidence.report.host if (line.file, line.function) not in loops]
    # Before the batch, PyTorch's own Python makes tensors of lists.
    spent = ((line, line.python_ns + line.torch_ns * (line.phase == "host")) for line in lines)
    functions = _functions(evidence, ((line, min(ns, line.idle_ns)) for line, ns in spent))
    if not functions:
        return None
    (first, _), *others = functions
    nothing_else = "the GPU is idle" if evidence.report.has_gpu else "no operator runs"
    also = f" Also {', '.join(_named(line) for line, _ in others[:2])}." if others else ""
    return finding(
        _placed(evidence, functions),
        seen=(
            f"{_named(first)} runs Python for {duration(functions[0][1])} of each step, "
            f"in which {nothing_else}.{also}"
        ),
        remedy=(
            "Save in fewer steps, or in a thread, as torch.distributed.checkpoint.async_save does."
            if first.phase == "saving"
            else "Do it once before the training, in the loader's worker processes, or for whole "
            "arrays in place of a loop over their elements, which torch.tensor() of a list is, too."
        ),
        saves=_saving(evidence, functions),
        change=_without(evidence, functions)
        if {line.phase for line, _ in functions} == {"host"}
        else {},
    )


@rule(
    "code-around-model",
    tier="stable",
    sources=(
        "NVIDIA-NeMo/labs-molt#29",
        "ultralytics/ultralytics#25315",
        "allenai/OLMo#326",
    ),
    needs=("stacks",),
    title="Code around the model takes long",
    link="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
)
def code_around_model(evidence: Evidence) -> Finding | None:
    """A function around the model takes long.

    **Cause.** Before the model, or between model, backward and optimizer, a function calls some
    operators for each of many tensors (an average of the weights, clipping by hand), or many
    different ones.

    **Found by** stacks: a function that runs the same operator at least 20 times in each step, or
    20 operators in all that take a tenth of the step, if every device is idle for long in it. A
    labelled module, such as a loss, is a row of its own. The cost is the function's clock time,
    with the work of devices for it. What it does for all tensors at once takes time too, so the
    price is a bound; one with different operators has no price: the training may need it.

    **Fix.** One operator for all tensors (`torch._foreach_lerp_`, `clip_grad_norm_`,
    `AveragedModel` with `get_ema_multi_avg_fn`), or fewer steps. Where it reads by boolean masks
    again and again: one sum by class (`index_add_`, `scatter_reduce_`, a product with the one-hot
    classes).
    """
    loops = _loops(evidence)
    loop_functions = {(line.file, line.function) for line, _ in loops}
    others = (
        (line, min(line.operators_ns, line.idle_ns))
        for line in evidence.report.host
        if line.phase in _AROUND
        and line.phase not in ("loss", "clipping")
        and (line.file, line.function) not in loop_functions
        and not _done_in(evidence, line).in_modules
    )
    # Few operators are as long as what they compute, which no other code around them changes.
    much = _MUCH * evidence.step_ns
    long = [
        (line, cost)
        for line, cost in _functions(evidence, others)
        if cost >= much and line.operators >= _MANY
    ]
    functions = loops + long
    if not functions:
        return None
    clock = [sum(ns for ns, _ in _spent(evidence, [function]).values()) for function in functions]
    fractions = [_part_of(evidence, line) for line, _ in loops] + [1.0] * len(long)
    clock = [round(ns * fraction) for ns, fraction in zip(clock, fractions, strict=True)]
    timed = [(line, max(ns, cost)) for (line, cost), ns in zip(functions, clock, strict=True)]
    timed.sort(key=lambda pair: -pair[1])
    (first, cost), *_ = timed
    work, is_loop = _done_in(evidence, first), (first.file, first.function) in loop_functions
    often = f", {work.operator} {work.times:,} times" if is_loop and work.operator else ""
    return finding(
        _placed(evidence, timed),
        seen=(
            f"{_named(first)} takes {duration(cost)} of each step, outside of the "
            f"model, its backward and the optimizer: {counted(first.operators, 'operator')}{often}."
        ),
        remedy=(
            "Do it in fewer steps, or in a compiled function."
            if not is_loop
            else _MASKS
            if work.operator in _BY_MASK
            else _AT_ONCE
        ),
        operators=(work.operator,) if often else (),
        # Whether a long function does what the training needs is not known.
        saves=replace(_saving(evidence, loops), at_best=True) if loops else None,
        change=_without(evidence, loops) if loops else {},
    )


_AT_ONCE = (
    "Call one operator for all tensors (torch._foreach_…, clip_grad_norm_, "
    "torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn) in place of some for "
    "each, or do it in fewer steps."
)
_MASKS = (
    "Replace the mask for each class or sample by one operation on all rows: sums by class are "
    "index_add_, scatter_reduce_ or a product with the one-hot classes; or sort the rows by class "
    "once, and split them."
)
_BY_MASK = (*BY_MASK, "aten::nonzero")


class _Done(msgspec.Struct, frozen=True):
    """What a function around the model does in a step.

    Attributes:
        operator: the operator that it runs most often, views aside; ``""`` for none.
        times: how often in a step.
        in_modules: whether it runs its operators in calls of labelled modules.
        again: which share of the time of its operators is that of what it runs again and again.
    """

    operator: str = ""
    times: int = 0
    in_modules: bool = False
    again: float = 1.0


def _done_in(evidence: Evidence, line: HostLine) -> _Done:
    """Return what the function of a line does."""
    return _done(evidence).get((line.file, line.function), _Done())


@once
def _done(evidence: Evidence) -> dict[tuple[str, str], _Done]:
    """Return what each function does that is not in the backward, by file and name."""
    stacked = evidence.recording.detailed
    events, sites = stacked.events, stacked.sites
    index = events.prefixed(Category.OPERATOR, names.ATEN)
    outermost = [index[:0]]
    for _, members in grouped(events.thread, index):
        line = first_started(events.start[members], events.end[members], members)
        outermost.append(merged(line.values[line.values >= 0]))
    index = np.concatenate(outermost)
    step = stacked.ledger.steps.at(events.start[index])
    site = sites.line.at(events.start[index]) // 2
    span = stacked.ownership.spans.of(events, index)
    in_pass = take(stacked.ownership.passes.of_span >= 0, span, False)
    kept = (site >= 0) & (step >= 0) & ~in_pass
    index, site, span = index[kept], site[kept], span[kept]
    functions = [(host_site.file, host_site.function) for host_site in sites.sites]
    number = {name: index for index, name in enumerate(dict.fromkeys(functions))}
    of_site = np.array([number[name] for name in functions], np.int64)
    steps = max(1, len(stacked.ledger.step_ns))
    works = ~events.names_where(operations.is_view)
    masks = events.names_where(_BY_MASK.__contains__).astype(np.int64)
    done_by = {}
    for number_of, members in grouped(of_site[site]) if len(site) else ():
        ns, inside = (
            events.duration[index[members]],
            take(stacked.ownership.spans.module, span[members]),
        )
        name = events.name[index[members]]
        names_found, count = np.unique(name[works[name]], return_counts=True)
        often = np.zeros(len(events.names), bool)
        often[names_found] = 2 * count >= _MANY * steps
        # Masks say most of what to do.
        says_more = masks[names_found] * (count >= _MANY * steps)
        most = int(np.lexsort((count, says_more))[-1]) if len(count) else NOTHING
        done_by[functions[int(np.flatnonzero(of_site == number_of)[0])]] = _Done(
            events.names[names_found[most]] if most >= 0 else "",
            int(count[most]) // steps if most >= 0 else 0,
            bool(2 * ns[inside >= 0].sum() > ns.sum()),
            float(ns[often[name]].sum() / max(1, ns.sum())),
        )
    return done_by


def _without(evidence: Evidence, functions: list[tuple[HostLine, int]]) -> dict[str, Any]:
    """Return the change in which phases have no such functions.

    There is none on a CPU, beside whose host nothing runs, so that lines say what is saved.
    """
    spent = _spent(evidence, functions)
    left = {
        name: round(1 - ns / phase_ns, 1) for name, (ns, phase_ns) in spent.items()
    }  # in tenths
    return {"phases": left} if evidence.report.has_gpu and left else {}


def _loops(evidence: Evidence) -> list[tuple[HostLine, int]]:
    """Return the functions that call an operator again and again around the model."""
    around = ((line, line.idle_ns) for line in evidence.report.host if line.phase in _AROUND)
    loops = []
    for line, cost in _functions(evidence, around):
        work = _done_in(evidence, line)
        if min(line.calls, line.operators, work.times) >= _MANY and not work.in_modules:
            loops.append((line, round(cost * _part_of(evidence, line))))
    least = max(_LEAST_NS, _LEAST * evidence.step_ns)
    return [pair for pair in loops if pair[1] >= least]


def _part_of(evidence: Evidence, line: HostLine) -> float:
    """Return which part of the time of a function goes with what it runs again and again.

    Its Python does; of its operators, those that it runs often. A single product beside a loop is
    as long without the loop.
    """
    place = (line.file, line.function)
    lines = [
        host_line
        for host_line in evidence.report.host
        if (host_line.file, host_line.function) == place
    ]
    of_operators = sum(host_line.operators_ns for host_line in lines if host_line.phase in _AROUND)
    total_ns = sum(host_line.wall_ns for host_line in lines if host_line.phase in _AROUND)
    if not total_ns:
        return 1.0
    return max(0.0, 1 - (1 - _done_in(evidence, line).again) * of_operators / total_ns)


def _spent(
    evidence: Evidence, functions: list[tuple[HostLine, int]]
) -> dict[PhaseName, tuple[int, int]]:
    """Return the clock time of functions around the model by phase, and that of the phase.

    Their work on devices counts. The host may wait in them for work of other phases, too.
    """
    own_functions = {(line.file, line.function) for line, _ in functions}
    lines = [line for line in evidence.report.host if (line.file, line.function) in own_functions]
    spent = {}
    for phase in evidence.report.phases:
        phase_ns, name = phase.wall_ns, phase.name
        if (
            phase_ns
            and name in _AROUND
            and (times := [x.wall_ns for x in lines if x.phase == name])
        ):
            spent[name] = min(phase_ns, sum(times)), phase_ns
    return spent


def _functions(
    evidence: Evidence, costs: Iterable[tuple[HostLine, int]]
) -> list[tuple[HostLine, int]]:
    """Return the functions that cost enough, the most expensive first, each with its cost.

    A function is named by its most expensive line.
    """
    by_function: dict[tuple[str, str], list[tuple[HostLine, int]]] = {}
    for line, cost in costs:
        by_function.setdefault((line.file, line.function), []).append((line, cost))
    functions = []
    for lines in by_function.values():
        total_ns = sum(cost for _, cost in lines)
        first = max(lines, key=lambda pair: pair[1])[0]
        calls = sum(line.calls for line, _ in lines)
        operators = sum(line.operators for line, _ in lines)
        if total_ns >= max(_LEAST_NS, _LEAST * evidence.step_ns):
            functions.append((replace(first, calls=calls, operators=operators), total_ns))
    return sorted(functions, key=lambda pair: -pair[1])


def _placed(evidence: Evidence, functions: list[tuple[HostLine, int]]) -> Placed:
    """Return the places of functions: a module, or a phase of the step."""
    places = []
    for line, cost in functions:
        path = line.path if line.class_name else f"({line.phase})"
        places.append(Place(path, line.class_name, max(1, line.calls), cost, line.place))
    cost = min(sum(place.wall_ns for place in places), evidence.step_ns)
    return Placed(tuple(places), cost, evidence.report.steps)


def _saving(evidence: Evidence, functions: list[tuple[HostLine, int]]) -> Saving:
    """Return what a step would take less without these functions, where nothing else runs."""
    cost = min(sum(cost for _, cost in functions), evidence.step_ns)
    error = round(_ERROR * evidence.step_ns)
    return Saving(cost, max(0, cost - error), min(cost + error, evidence.step_ns))


def _named(line: HostLine) -> str:
    return f"{line.function}() ({line.place})"
