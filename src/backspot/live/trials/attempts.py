"""Tries what the findings of a report advise, within a limit of time, and puts them in order."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from backspot.analysis.findings import weighed
from backspot.formatting import percent
from backspot.interrupts import pass_on
from backspot.live.acts import Act, Living
from backspot.live.ranks import rank_and_ranks
from backspot.live.torch_internals.dynamo import compilations
from backspot.live.torch_internals.process import innermost_mode, is_observed
from backspot.live.trials.chains import Chains, replaced_function
from backspot.live.trials.measuring import Clock, TooLong, measure, reason
from backspot.live.trials.trial import Entry, Live, Request, Times, Worth, remedies_of
from backspot.live.trials.twins import Refused
from backspot.live.trials.untouched import TouchedError, untouched
from backspot.results.costs import Phase
from backspot.results.findings import Finding, Place
from backspot.results.report import Report, changed, predictor_of
from backspot.results.trials import Trials, Tried

_SECONDS_IN_ALL = 5.0
_LEAST_PHASE = 0.05
_TITLES = {
    "optimizer": "The optimizer is faster in another form",
    "clipping": "Gradient clipping is faster in another form",
}
_MODE = "a mode of the training sees its functions"
_KEPT = 64 << 20
"""Bytes that may stay in the allocator after trials: to give them back costs the next step time."""
_OF_MANY = 0.8
"""The share of the step in which a device must work, so that the host does not decide its time."""


class Trying(Act):
    """Tries what the findings advise, on the first rank.

    Args:
        trials: what may be tried: PyTorch's optimizers and operators, or nothing.
    """

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self.needs_living = trials != "none"

    def after(self, report: Report, live: Living) -> Report:
        """Return the report with what came out of its trials."""
        if rank_and_ranks()[0]:
            return report
        watched = Live.of(live)
        if live.step is not None and _needs_step(report, self._trials):
            watched = chains_of(live.step, watched)
        return with_trials(report, watched, self._trials)

    def begin(self, report: Report, live: Living) -> Report | Callable[[], Report]:
        """Return the report with what came out of its trials: at once, or after one more step."""
        watched = Live.of(live)
        if _needs_step(report, self._trials):
            watched = _watching(watched)
        chains = watched.chains
        if chains is None:
            return with_trials(report, watched, self._trials)

        def ended() -> Report:
            chains.end()
            return with_trials(report, watched, self._trials)

        return ended


def _needs_step(report: Report, trials: Trials) -> bool:
    """Return whether a finding can only be tried with the operators of one more real step."""
    return any(entry.chains for finding in report.findings for entry in _entries(finding, trials))


def _watching(live: Live) -> Live:
    """Begin to see the operators of a step, for the caller to end; or say why that must not be."""
    if reason := live.why_no_chains or _why_not_watched(live):
        return replace(live, why_no_chains=reason)
    chains = Chains()
    watched = replace(live, chains=chains)
    # An interrupt may leave nobody who ends it.
    weakref.finalize(watched, chains.end).atexit = False
    chains.begin()
    return watched


def _why_not_watched(live: Live) -> str:
    """Return why the operators of a step must not be seen, ``""`` if they may.

    Compiled code would be compiled once more for such a step, and modules that are not trained
    would take another way through PyTorch, with results that differ in the last bit.
    """
    if compilations():
        return "the step runs compiled code"
    if replaced := replaced_function():
        return f"{replaced} is not PyTorch's own, and would run twice"
    return leaves_fast_path(live.models) or ("" if innermost_mode() is None else _MODE)


def leaves_fast_path(models: Mapping[str, torch.nn.Module]) -> str:
    """Return why a step with hooks or a mode gives other numbers, ``""`` if it does not.

    Attention that is not trained takes another way through PyTorch then.
    """
    fast = torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer
    modules = (module for model in models.values() for module in model.modules())
    if any(isinstance(module, fast) and not module.training for module in modules):
        return "a step that is watched leaves the fast path of MultiheadAttention"
    return ""


def chains_of(step: Callable[[], object], live: Live) -> Live:
    """Run a step and add the operators that it runs, unless they cannot be seen."""
    live = _watching(live)
    if live.chains is not None:
        try:
            step()
        finally:
            live.chains.end()
    return live


def with_trials(report: Report, live: Live, trials: Trials) -> Report:
    """Try what the findings advise, and return the report with what came out.

    Findings whose remedy does not help go last, and a saving that was measured ranks a finding. A
    phase of which no finding speaks is tried, too. An error of a trial is its result; one that ends
    the program is passed on.
    """
    until = time.monotonic() + _SECONDS_IN_ALL
    tried_findings = []
    for finding in (*report.findings, *_of_phases(report)):
        entries = _entries(finding, trials)
        tried = _attempt(Request(finding, report, live), entries, until) if entries else None
        best = tried.best if tried else None
        if finding.remedy:
            tried_findings.append(replace(finding, tried=tried))
        elif best:
            tried_findings.append(replace(finding, tried=tried, remedy=f"Pass {best.name}."))
    return changed(report, findings=weighed(tried_findings, report.replayed_step))


def with_earlier_trials(report: Report, earlier: Report) -> Report:
    """Return a report with what was tried for an earlier one of the same recording."""
    tried_before = {_cause(finding): finding for finding in earlier.findings}
    findings = []
    for finding in report.findings:
        before = tried_before.pop(_cause(finding), None)
        findings.append(replace(finding, tried=before.tried) if before else finding)
    # A trial that found a better form has made a finding by itself.
    findings += [
        finding
        for finding in tried_before.values()
        if finding.tried is not None and finding.tried.best
    ]
    return changed(report, findings=weighed(findings, report.replayed_step))


def _cause(finding: Finding) -> tuple[object, ...]:
    return finding.rule, finding.form, finding.places[:1] and finding.places[0].path


def tried_optimizer(report: Report, live: Living, seconds: float) -> Tried | None:
    """Return what other forms of the optimizers take, as the report has it or tried now."""
    findings = [
        finding for finding in report.findings if finding.path == "(optimizer)" and finding.tried
    ]
    if findings:
        return findings[0].tried
    phase = next((phase for phase in report.phases if phase.name == "optimizer"), None)
    if phase is None:
        return None
    finding = _of_phase(phase, report)
    request = Request(finding, report, Live.of(live))
    return _attempt(
        request, remedies_of(finding.rule, form=finding.form), time.monotonic() + seconds
    )


def _of_phases(report: Report) -> Iterator[Finding]:
    """Findings without a remedy, of the phases that another form may make faster.

    No rule can know that. They are findings only if a trial has found such a form.
    """
    paths = {place.path for finding in report.findings for place in finding.places}
    for phase in report.phases:
        title, path = _TITLES.get(phase.name, ""), f"({phase.name})"
        if title and path not in paths and phase.wall_ns >= _LEAST_PHASE * report.whole_ns:
            yield _of_phase(phase, report)


def _of_phase(phase: Phase, report: Report) -> Finding:
    return Finding(
        rule="optimizer-kernels",
        title=_TITLES[phase.name],
        seen=f"{percent(phase.wall_ns / max(1, report.whole_ns))} of the step.",
        remedy="",
        wall_ns=phase.wall_ns,
        places=(Place(f"({phase.name})", "", 1, phase.wall_ns),),
        steps=report.steps,
    )


def _entries(finding: Finding, trials: Trials) -> list[Entry]:
    if trials == "none" or finding.tier == "preview":
        return []
    return remedies_of(finding.rule, form=finding.form)


def _attempt(request: Request, entries: list[Entry], until: float) -> Tried | None:
    """Return what the first remedy measured that has something to try, or why there is none."""
    why: Tried | None = None
    for entry in entries:
        try:
            if time.monotonic() > until:
                raise Refused("the time for trials was up")
            if entry.chains and not (request.live.chains and request.live.chains.functions):
                raise Refused(request.live.why_no_chains or "no step came after the recording")
            if is_observed():
                raise Refused(_MODE)
            with untouched(request.live), own_memory(request.live.device):
                tried = _measured(entry, request, until)
            if tried is not None and not tried.why_not:
                return tried
            why = tried or why
        except (Refused, TouchedError) as refused:
            why = Tried("", why_not=str(refused))
    return why


def _measured(entry: Entry, request: Request, until: float) -> Tried | None:
    """Return what a remedy measured; when this returns, its copies are gone."""
    try:
        trial = entry.prepare(request)
        if trial is None:
            return None
        left = until - time.monotonic()
        seconds, clock = min(trial.allowed_s, left), Clock(request.live.device)
        return measure(trial, clock, request.step_ns, seconds, _worth(request), most_seconds=left)
    except Refused as refused:
        if isinstance(refused, TooLong) and entry.chains and request.at_once > 1:
            return _measured(entry, replace(request, at_once=1), until)
        return Tried("", why_not=str(refused))
    except Exception as error:
        pass_on(error)
        return Tried("", why_not=reason(error))


@contextmanager
def own_memory(device: torch.device) -> Iterator[Callable[[], None]]:
    """Have memory of a GPU come from a pool that goes back to the driver.

    Before torch 2.5 there are no pools. A backward runs on a thread of PyTorch's, which takes
    memory from the training's pool: what that has grown by goes back, too.

    Yields:
        Gives back at once what is free of it.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    before = torch.cuda.memory_reserved(device)
    pool = ExitStack()

    def give_back() -> None:
        # PyTorch keeps what is free of a pool in use. Tensors in one that has ended stay there.
        pool.close()
        try:
            torch.cuda.empty_cache()
        finally:
            pool.enter_context(_pool(device))

    try:
        with pool:
            pool.enter_context(_pool(device))
            yield give_back
    finally:
        if torch.cuda.memory_reserved(device) > before + _KEPT:
            torch.cuda.empty_cache()


def _pool(device: torch.device) -> AbstractContextManager[Any]:
    pools = getattr(torch.cuda, "MemPool", None)
    if pools is None:
        return nullcontext()
    try:
        pool: AbstractContextManager[Any] = torch.cuda.use_mem_pool(pools(), device)
    except RuntimeError:  # not with each setting of the allocator
        return nullcontext()
    return pool


def _worth(request: Request) -> Worth:
    """Return what tells how much less a step takes with less work: a replay, if there is one."""
    predictor = predictor_of(request.report)
    busy = sum(phase.busy_ns for phase in request.report.phases)
    host_decides = busy < _OF_MANY * request.step_ns

    def without_replay(saved: Sequence[Times]) -> Sequence[float]:
        return [
            request.step_ns - max(request.step_ns - host, busy - device) if host_decides else device
            for host, device in saved
        ]

    if predictor is None:
        return without_replay
    paths = {place.path for place in request.finding.places}
    return lambda saved: predictor.with_less(paths, saved)
