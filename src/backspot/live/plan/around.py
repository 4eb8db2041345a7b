"""What is around the model: optimizers, pinned memory, workers, and how the host launches all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from backspot.errors import UsageError
from backspot.formatting import duration
from backspot.live.acts import Living
from backspot.live.plan.comparing import predicted
from backspot.live.plan.loader import LATEST_S, workers
from backspot.live.plan.settings import AS_IT_IS
from backspot.live.ranks import rank_and_ranks
from backspot.live.torch_internals.batches import Loading
from backspot.live.trials.attempts import tried_optimizer
from backspot.live.trials.trial import Live
from backspot.live.trials.twins import Refused
from backspot.results.plan import Rung
from backspot.results.report import Report
from backspot.results.trials import Variant

LOADER_S = 6.0
_OPTIMIZER_S = 2.0
"""What other workers and other optimizers may take at most: they come after the search, which would
leave them nothing. Workers need seconds to start."""
_LATE = 0.05
"""Share of the step from which its wait for a batch is said to limit it."""


class Around:
    """Tries what is around the model, on top of a ladder.

    Args:
        loading: how batches are loaded, if that is known.
        step_ns: the step as it is.

    Attributes:
        next_limit: what then limits the step, as a sentence; or ``""``.
    """

    def __init__(self, report: Report, live: Living, loading: Loading | None, step_ns: int) -> None:
        self._report, self._live, self._loading, self._as_it_is = report, live, loading, step_ns
        self.next_limit = ""

    def _step(self, ladder: Sequence[Rung]) -> int:
        return ladder[-1].step_ns if ladder else self._as_it_is

    def of_optimizer(self, ladder: Sequence[Rung]) -> list[Rung]:
        """Return what other forms of the optimizers give."""
        tried = tried_optimizer(self._report, self._live, _OPTIMIZER_S)
        if tried is None:
            return []
        optimizers = self._live.optimizers
        names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
        if not tried.variants:
            return [Rung(f"{names} in another form", "optimizer", note=tried.why_not or AS_IT_IS)]
        on = _names(ladder)
        form = f"torch.optim.{type(optimizers[0]).__name__}(..., {{}})"
        rungs = [
            (
                Rung(f"{names} with {variant.name}", "optimizer", on, form.format(variant.name)),
                variant,
            )
            for variant in tried.variants[1:]
        ]
        return _with_best([_with(rung, variant, self._step(ladder)) for rung, variant in rungs])

    def of_pinning(self, ladder: Sequence[Rung]) -> list[Rung]:
        """Return what pinned memory gives, as the trial of the step's copies to the GPU says."""
        findings = [finding for finding in self._report.findings if finding.rule == "pageable-copy"]
        tried = findings[0].tried if findings else None
        rung = Rung(
            "pinned memory",
            "loader",
            _names(ladder),
            "DataLoader(..., pin_memory=True)\nx = x.to(device, non_blocking=True)  # each batch",
        )
        if tried is not None and tried.variants:
            return _with_best(
                [_with(rung, variant, self._step(ladder)) for variant in tried.variants[1:]]
            )
        if findings:
            return [replace(rung, note=tried.why_not if tried else "operators were not tried")]
        if self._loading is None or Live.of(self._live).device.type != "cuda":
            return []
        is_pinned = self._loading.is_pinned
        return [replace(rung, note=AS_IT_IS if is_pinned else "no copy to the GPU holds up a step")]

    def of_graphs(self, ladder: Sequence[Rung]) -> list[Rung]:
        """Return what CUDA graphs save at most; a capture that fails could not be undone."""
        if Live.of(self._live).device.type != "cuda":
            return []
        code = 'model = torch.compile(model, mode="reduce-overhead")'
        return [Rung("CUDA graphs", "graph", code=code, note=on_graphs(self._report))]

    def of_workers(self, seconds: float, ladder: Sequence[Rung]) -> list[Rung]:
        """Return what other numbers of workers give beside the step of the ladder.

        Args:
            seconds: how long they may take.
        """
        rung = Rung("workers", "loader", _names(ladder))
        if rank_and_ranks()[1] > 1:
            return [replace(rung, note="the process that reads would have the ranks' connections")]
        whole_ns, step = self._report.whole_ns, self._step(ladder)
        waits = sum(phase.wall_ns for phase in self._report.phases if phase.name == "data")
        computes = max(1, step - round(waits * self._as_it_is / max(1, whole_ns)))
        try:
            tried = workers(self._loading, step, computes, min(seconds, LOADER_S) - LATEST_S)
        except Refused as refused:
            return [replace(rung, note=str(refused))]
        now, *others = tried.variants
        before = computes + now.ns
        if now.ns >= _LATE * before:
            self.next_limit = (
                f"The loader with {now.name} then limits the step at {duration(before)}: "
                f"{duration(now.ns)} of it waits for a batch."
            )
        rungs = [
            (replace(rung, setting=variant.name, code=f"DataLoader(..., {variant.name})"), variant)
            for variant in others
        ]
        return _with_best([_with(rung, variant, before) for rung, variant in rungs])


def on_graphs(report: Report) -> str:
    """Return why CUDA graphs are not tried, with what a replay of the recording says of them."""
    reason = "a capture that fails cannot be undone"
    try:
        saves = max(0, report.what_if(graph=True).saves_ns)
    except UsageError:
        return reason
    return f"{reason}; by a replay of the step as it is, at most {duration(saves)} less"


def _names(ladder: Sequence[Rung]) -> tuple[str, ...]:
    return tuple(rung.setting for rung in ladder)


def _with(rung: Rung, tried: Variant, before: int) -> Rung:
    """Return a rung with what a variant saves of a step."""
    if not tried.ns or tried.verdict == "fails":
        return replace(rung, note=tried.note)
    saves = tried.saves_ns, tried.saves_low_ns, tried.saves_high_ns
    return predicted(replace(rung, note=tried.note), before, saves, tried.verdict)


def _with_best(rungs: Sequence[Rung]) -> list[Rung]:
    """Return rungs of which one can be made at most, with the best that helps kept."""
    helping = (rung for rung in rungs if rung.verdict == "helps")
    best = max(helping, key=lambda rung: rung.saves_ns, default=None)
    return [replace(rung, kept=rung is best) for rung in rungs]
