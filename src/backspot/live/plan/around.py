"""What is around the model: optimizers, pinned memory, workers, and how the host launches all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from backspot.errors import UsageError
from backspot.formatting import duration
from backspot.live.acts import Living
from backspot.live.plan.comparing import predicted
from backspot.live.plan.loader import LATEST_S, OfWorkers, cores, workers
from backspot.live.plan.pace import BesideLoader, LoaderPace, WorkersTrial, limit_of
from backspot.live.plan.settings import AS_IT_IS
from backspot.live.ranks import rank_and_ranks
from backspot.live.torch_internals.batches import Loading
from backspot.live.trials.attempts import tried_optimizer
from backspot.live.trials.trial import Live
from backspot.live.trials.twins import Refused
from backspot.results.plan import Rung
from backspot.results.report import Report
from backspot.results.trials import Variant

LOADER_S = 8.0
_OPTIMIZER_S = 2.0
"""What other workers and other optimizers may take at most: they come after the search, which would
leave them nothing. Workers need seconds to start."""
_OTHER = 0.05
"""Share of what the step with the ladder computes, by which another one differs enough for the
loader to be tried beside it, too."""
_ALIKE = 0.02
"""Share of the step by which more workers must be faster than fewer to be taken."""


class Around:
    """Tries what is around the model, on top of a ladder.

    Args:
        loading: how batches are loaded, if that is known.
        step_ns: the step as it is.

    Attributes:
        next_limit: what then limits the step, as a sentence; or ``""``.
        loader_ns: the step that the loader limits then; 0 where it does not.
    """

    def __init__(self, report: Report, live: Living, loading: Loading | None, step_ns: int) -> None:
        self._report, self._live, self._loading, self._as_it_is = report, live, loading, step_ns
        self.next_limit, self.loader_ns = "", 0

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

    def beside_loader(
        self, ladder: Sequence[Rung], others: Sequence[Rung], seconds: float
    ) -> tuple[list[Rung], list[Rung]]:
        """Return the ladder and the other rungs beside the loader, with other numbers of workers.

        A step takes no less than its next batch. So a faster loader is a rung, and where there is
        none, what the model saves counts up to there.

        Args:
            ladder: what was tried without a look at the loader.
            others: the other rungs.
            seconds: how long other numbers of workers may take.
        """
        tried, why_not = self._tried_workers(ladder, others, seconds)
        return self._beside(ladder, others, tried, why_not)

    def beside_untried_loader(
        self, ladder: Sequence[Rung], others: Sequence[Rung], why_not: str
    ) -> tuple[list[Rung], list[Rung]]:
        """Return the same by the real steps' waits alone, with why no workers were tried."""
        return self._beside(ladder, others, None, why_not)

    def _beside(
        self,
        ladder: Sequence[Rung],
        others: Sequence[Rung],
        of_workers: OfWorkers | None,
        why_not: str,
    ) -> tuple[list[Rung], list[Rung]]:
        step, waits = self._as_it_is, self._waits
        fastest = self._computes(ladder)
        tried = of_workers.tried if of_workers else None
        trial = _trial(of_workers, fastest) if of_workers else None
        pace = None
        paces: Mapping[str, LoaderPace] = {}
        if self._loading is not None:
            now = self._loading.workers
            pace = LoaderPace.of_step(now, step, waits, trial)
            if trial is not None and not (why_not := trial.misses(now, step, waits)):
                paces = trial.paces(now, step, waits)
        beside = BesideLoader(step, waits, pace)
        place = beside.place(ladder)
        computes = beside.computes(self._step(ladder[:place]))
        on = _names(ladder[:place])
        if tried is None:
            made = [Rung("workers", "loader", on, note=why_not)]
        elif why_not:
            made = [Rung(one.name, "loader", on, note=why_not) for one in tried.variants[1:]]
        else:
            made = [
                _of_loader(Rung(one.name, "loader", on), one, pace, paces[one.name], computes)
                for one in tried.variants[1:]
            ]
        faster = _fewest([one for one in made if one.verdict == "helps"], paces, fastest)
        pace = paces[faster.setting] if faster else pace
        found, rest = beside.rungs(ladder, others, faster, pace)
        computes = beside.computes(self._step([one for one in ladder if _is_in(one, found)]))
        self.next_limit, self.loader_ns = "", 0
        if pace is not None and pace.is_late(computes):
            self.loader_ns = round(pace.step(computes))
            self.next_limit = (
                f"The loader with {pace.name} then limits the step at {duration(self.loader_ns)}: "
                f"{duration(self.loader_ns - computes)} of it waits for a batch."
            )
        return found, [one for one in made if one is not faster] + rest

    @property
    def _waits(self) -> int:
        """What of the step as it is is spent waiting for a batch."""
        waits = sum(one.wall_ns for one in self._report.phases if one.name == "data")
        return round(waits * self._as_it_is / max(1, self._report.whole_ns))

    def _computes(self, ladder: Sequence[Rung]) -> int:
        """Return what a step with a ladder does not wait for a batch."""
        return max(1, self._step(ladder) - self._waits)

    def _other_steps(self, ladder: Sequence[Rung], others: Sequence[Rung]) -> list[int]:
        """Return the same of the step as it is, and of one that is faster than with the ladder."""
        if self._loading is None or not self._loading.workers:
            return []  # loading a batch takes as long beside any step
        computes = self._computes(ladder)
        fastest = min((self._computes((one,)) for one in others if one.step_ns), default=computes)
        found = {self._computes(()), min(fastest, computes)}
        return [one for one in found if abs(one - computes) > _OTHER * computes]

    def _tried_workers(
        self, ladder: Sequence[Rung], others: Sequence[Rung], seconds: float
    ) -> tuple[OfWorkers | None, str]:
        """Return how long batches let a step with the ladder wait, or why that is unknown."""
        if rank_and_ranks()[1] > 1:
            return None, "the process that reads would have the ranks' connections"
        step, computes = self._step(ladder), self._computes(ladder)
        try:
            until, beside = min(seconds, LOADER_S) - LATEST_S, self._other_steps(ladder, others)
            return workers(self._loading, step, computes, until, beside), ""
        except Refused as refused:
            return None, str(refused)


def on_graphs(report: Report) -> str:
    """Return why CUDA graphs are not tried, with what a replay of the recording says of them."""
    reason = "a capture that fails cannot be undone"
    try:
        saves = max(0, report.what_if(graph=True).saves_ns)
    except UsageError:
        return reason
    return f"{reason}; by a replay of the step as it is, at most {duration(saves)} less"


def _trial(found: OfWorkers, computes: int) -> WorkersTrial:
    """Return what was tried by the numbers of workers, beside a step that computes for so long."""
    waits = {int(one.name.partition("=")[2]): one.ns for one in found.tried.variants}
    return WorkersTrial(waits, computes, found.loads, cores(), limit_of(found.waits))


def _of_loader(
    rung: Rung, tried: Variant, now: LoaderPace | None, pace: LoaderPace, computes: float
) -> Rung:
    """Return the rung of another number of workers, beside a step that computes for so long."""
    if now is None or (tried.note and not tried.ns):
        return replace(rung, note=tried.note)
    before = now.step(computes)
    saves = before - pace.step(computes)
    less, more = tried.saves_ns - tried.saves_low_ns, tried.saves_high_ns - tried.saves_ns
    rung = replace(rung, code=f"DataLoader(..., {rung.setting})")
    return predicted(rung, before, (saves, saves - less, saves + more))


def _fewest(rungs: Sequence[Rung], paces: Mapping[str, LoaderPace], computes: float) -> Rung | None:
    """Return the first of the rungs of a loader that are about as fast as the fastest."""
    steps = [paces[one.setting].step(computes) for one in rungs]
    fast = (one for one, ns in zip(rungs, steps, strict=True) if ns <= (1 + _ALIKE) * min(steps))
    return next(fast, None)


def is_of_workers(rung: Rung) -> bool:
    """Whether a rung is of another number of workers."""
    return rung.setting.startswith("num_workers=")


def _is_in(rung: Rung, ladder: Sequence[Rung]) -> bool:
    return rung.setting in _names(ladder)


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
