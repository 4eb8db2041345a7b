"""Watches one real step, and then tries settings on copies while the training stands still."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from backspot.formatting import counted
from backspot.interrupts import pass_on
from backspot.live.acts import Act, Living
from backspot.live.modules import class_name
from backspot.live.plan.account import Account
from backspot.live.plan.again import inputs_of, taken_from, why_anew
from backspot.live.plan.around import LOADER_S, Around, is_of_workers
from backspot.live.plan.copies import NO_TIME
from backspot.live.plan.remedies import with_rungs
from backspot.live.plan.search import Search, why
from backspot.live.plan.watching import Watching
from backspot.live.ranks import rank_and_ranks
from backspot.live.torch_internals.autograd import hears_its_gradient
from backspot.live.torch_internals.batches import loading_of
from backspot.live.torch_internals.collectives import shortest_timeout
from backspot.live.torch_internals.dynamo import (
    compilations,
    compiled_modules,
    compiles_itself,
    forget_compilations,
)
from backspot.live.torch_internals.process import (
    default_device_leaves_innermost,
    innermost_mode,
    is_observed,
)
from backspot.live.trials.attempts import leaves_fast_path, own_memory
from backspot.live.trials.chains import replaced_function
from backspot.live.trials.trial import Live, step_of
from backspot.live.trials.twins import Refused
from backspot.live.trials.untouched import TouchedError, untouched
from backspot.results.plan import Plan, Rung
from backspot.results.report import Report, changed
from backspot.threads import thread_count, thread_count_of_process

_INTERRUPTED = "interrupted"
_TALKS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "SyncBatchNorm")
_OVERRUN_S, _LEAST_S = 10.0, 5.0
"""By how much a plan may take longer than it should, and how long a useful one takes at least."""


class Planning(Act):
    """Plans after the report, with one more real step.

    Args:
        seconds: how long planning may take.
        earlier: a report whose plan says what need not be tried again.
    """

    def __init__(self, seconds: int, earlier: Report | None = None) -> None:
        self._seconds, self._earlier = seconds, earlier

    @classmethod
    def of(cls, budget: int | tuple[int, str]) -> Planning:
        """Return what plans for so many seconds, also with the path of an earlier report.

        Raises:
            BackspotError: If that cannot be read.
        """
        if isinstance(budget, int):
            return cls(budget)
        return cls(budget[0], Report.load(budget[1]))

    needs_living = True

    def after(self, report: Report, live: Living) -> Report:
        """Return the report with the plan."""
        watching = _begun(report, live)
        if live.step is not None and not watching.why_not:
            try:
                live.step()
            finally:
                watching.end()
        return with_plan(report, live, watching, self._seconds, self._earlier)

    def begin(self, report: Report, live: Living) -> Report | Callable[[], Report]:
        """Return the report with the plan, after one more step."""
        watching = _begun(report, live)
        if watching.why_not:
            return with_plan(report, live, watching, self._seconds, self._earlier)

        def ended() -> Report:
            watching.end()
            return with_plan(report, live, watching, self._seconds, self._earlier)

        return ended


def _begun(report: Report, live: Living) -> Watching:
    """Begin to watch a step, or say why it must not be watched."""
    watching = Watching(_replicas(live))
    watching.why_not = live.why_no_step or _why_not(report, live)
    if compilations():
        # Its code would be dropped with that of the copies.
        watching.why_not_compiled = "the process runs other compiled code"
        watching.why_no_loss = watching.why_not_compiled  # a mode would have it compiled again
    elif replaced := replaced_function():
        watching.why_no_loss = f"{replaced} is not PyTorch's own, and would run twice"
    elif innermost_mode() is not None and default_device_leaves_innermost():
        watching.why_no_loss = "the default device is a mode, which this PyTorch could mix up"
    if not watching.why_not:
        watching.begin()
    return watching


def _why_not(report: Report, live: Living) -> str:
    """Return why copies of this training cannot be run apart from it, ``""`` if they may."""
    if _most_seconds() < _LEAST_S:
        waits = shortest_timeout()
        if waits is None:
            return "how long the other ranks wait for this one is not known"
        return (
            f"the other ranks wait for this one for {waits:.0f} s at most, and a plan needs "
            f"{2 * (_OVERRUN_S + _LEAST_S):.0f}: init_process_group(timeout=...) sets that"
        )
    modules = [module for model in _replicas(live).values() for module in model.modules()]
    for module in modules:
        if not {base.__name__ for base in type(module).__mro__}.isdisjoint(_TALKS):
            return f"{type(module).__name__} talks to other ranks"
        if _splits_batches(module):
            return f"{type(module).__name__} splits each batch over several GPUs"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{type(module).__name__} is scripted"
    if reason := leaves_fast_path(live.models) or _why_not_here(live):
        return reason
    parameters = [p for module in modules for p in module.parameters(recurse=False)]
    if any(map(hears_its_gradient, parameters)):
        return "parameters have hooks of their own, such as an optimizer in the backward"
    if not parameters:
        return "no parameter is trained"
    compiled = set(map(id, compiled_modules()))
    # A hook on these, or in their regions, would have them compiled again.
    if any(id(module) in compiled or compiles_itself(module) for module in modules) or any(
        row.calls for row in report.modules if not row.is_module
    ):
        return "the step runs compiled code"
    return "a mode of the training sees its functions" if is_observed() else ""


def _why_not_here(live: Living) -> str:
    """Return why a plan would change the sums of a training in this thread, ``""`` if not.

    PyTorch gives a thread the process's number of threads when an operator first needs it. In a
    training of tiny operators on a CPU, none may ever do, until a plan's do.
    """
    if Live.of(live).device.type != "cpu":
        return ""
    of_thread, process = thread_count(), thread_count_of_process()
    if of_thread == process:
        return ""
    return (
        f"the training has a thread of its own, which computes with "
        f"{counted(of_thread, 'thread')}, and "
        f"{process} after a plan: call torch.set_num_threads in that thread"
    )


def _most_seconds() -> float:
    """Return how long a plan may take: while this rank plans, the others wait in their step.

    They give up after a time that is set for their group; half of that is for all else.
    """
    if rank_and_ranks()[1] < 2:
        return math.inf
    return (shortest_timeout() or 0.0) / 2 - _OVERRUN_S


def _replicas(live: Living) -> dict[str, torch.nn.Module]:
    """Return the models without what is around them and computes nothing.

    ``DistributedDataParallel`` only sends their gradients, and ``DataParallel`` of one GPU, as
    scripts have it, only calls the model.
    """
    return {name: _unwrapped(model) for name, model in live.models.items()}


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    parallel = torch.nn.parallel
    is_of_one = isinstance(model, parallel.DataParallel) and not _splits_batches(model)
    if is_of_one or isinstance(model, parallel.DistributedDataParallel):
        inner: torch.nn.Module = model.module
        return inner
    return model


def _splits_batches(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.parallel.DataParallel) and len(module.device_ids) > 1


def with_plan(
    report: Report, live: Living, watching: Watching, seconds: int, earlier: Report | None = None
) -> Report:
    """Return the report with what the settings give; an interrupt ends the plan, not the training.

    Args:
        watching: the calls of one step, ended.
        earlier: a report whose plan says what need not be tried again.
    """
    begin = time.monotonic()
    if not watching.why_not:
        seconds = int(min(seconds, _most_seconds()))
    names = ", ".join(class_name(watching.models[number]) for number in watching.copies)
    plan = Plan(
        f"a copy of {names or 'the model'}, forward and backward",
        step_ns=step_of(report),
        allowed_ns=seconds * 10**9,
        inputs=inputs_of(watching),
    )
    anew = "" if earlier is None else why_anew(earlier, report, plan)
    before = None if earlier is None or anew else earlier.plan
    try:
        plan = _made(plan, report, live, watching, begin + seconds, before)
        if earlier is not None:
            plan = replace(plan, earlier=taken_from(before, plan.rungs, anew))
    except Exception as error:  # of the model's copies, which is a result too
        pass_on(error)
        reason = str(error) if isinstance(error, TouchedError) else why(error)
        plan = replace(plan, why_not=reason)
    took = round(1e9 * (time.monotonic() - begin))
    return with_rungs(changed(report, plan=replace(plan, took_ns=took)))


def _made(
    plan: Plan,
    report: Report,
    live: Living,
    watching: Watching,
    until: float,
    earlier: Plan | None,
) -> Plan:
    if watching.why_not:
        raise Refused(watching.why_not)
    account = Account.of(report)
    loading = loading_of(live.loader)
    of_loader = min(LOADER_S, (until - time.monotonic()) / 3) if loading else 0.0
    of_batch = loading.batch_size if loading else 0
    search = Search(watching, account, until - of_loader, of_batch, earlier)
    ladder: list[Rung] = []
    others: list[Rung] = []
    around = Around(report, live, loading, plan.step_ns)
    try:
        _searched(search, watching, Live.of(live))
        ladder, others = _apart(search.rungs())
        for more in (around.of_optimizer, around.of_pinning, around.of_graphs):
            try:
                kept_rungs, lost = _apart(more(ladder))
            except Exception as error:
                pass_on(error)
                kept_rungs, lost = [], [Rung("what is around the model", "loader", note=why(error))]
            ladder, others = ladder + kept_rungs, lost + others
        try:
            paced = around.beside_loader(ladder, others, of_loader)
        except Exception as error:
            pass_on(error)
            paced = around.beside_untried_loader(ladder, others, why(error))
    except KeyboardInterrupt as interrupt:
        pass_on(interrupt)  # the script may have a handler of its own
        if not (ladder or others):
            ladder, others = _apart(search.rungs())
        others = [
            replace(rung, note=_INTERRUPTED) if rung.note == NO_TIME else rung for rung in others
        ]
        paced = around.beside_untried_loader(ladder, others, _INTERRUPTED)
    ladder, others = paced
    rest = account.rest(watching.has_loss)
    if any(rung.axis == "optimizer" and rung.step_ns for rung in (*ladder, *others)):
        rest -= account.optimizer
    if any(is_of_workers(one) and one.step_ns for one in (*ladder, *others)):
        rest -= account.data
    others.sort(key=lambda one: not one.step_ns)
    return replace(
        plan,
        what=plan.what.replace(", for", " with its loss, for") if watching.has_loss else plan.what,
        rungs=(*ladder, *others),
        rest_ns=max(0, rest) if search.as_it_is else 0,
        host_ns=round(search.as_it_is.host) if search.as_it_is else 0,
        device_ns=round(search.as_it_is.device) if search.as_it_is else 0,
        compiling_ns=round(1e9 * search.compiling_s),
        batch=search.batch,
        next_limit=" ".join(filter(None, (_of_ranks(ladder), around.next_limit))),
        loader_ns=around.loader_ns,
    )


def _of_ranks(ladder: Sequence[Rung]) -> str:
    """Say what no copy of one rank shows."""
    rank, ranks = rank_and_ranks()
    if ranks < 2 or not ladder:
        return ""
    return (
        f"Tried on rank {rank} of {ranks}: what the ranks send each other stays as it is, and a "
        "step that waits for it is at best so short."
    )


def _apart(rungs: Sequence[Rung]) -> tuple[list[Rung], list[Rung]]:
    """Return the rungs of the ladder, and the others."""
    return [rung for rung in rungs if rung.kept], [rung for rung in rungs if not rung.kept]


def _searched(search: Search, watching: Watching, live: Live) -> None:
    """Search, and leave the training as it was."""
    try:
        with untouched(live), own_memory(live.device) as give_back:
            try:
                search.go(give_back)
            finally:
                search.close()
    finally:
        if compilations() and not watching.why_not_compiled:  # the copies' alone
            forget_compilations()
