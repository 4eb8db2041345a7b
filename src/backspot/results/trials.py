"""What a trial of a remedy measured on the machine that trains, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict

from backspot.formatting import between, duration
from backspot.presented import public
from backspot.results.quantities import SELDOM, Count, Measured

APART = 0.1
"""Share of a time by which another one is not close to it."""

Verdict: TypeAlias = Literal["", "helps", "does not help", "undecided", "fails"]
_NO_HELP: tuple[Verdict, ...] = ("does not help", "fails")


@public
@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute the same: what it takes in each step, and what a step saves with it.

    All times are nanoseconds of a step.

    Attributes:
        name: What is written differently, or ``"as it is"``.
        ns: Median time; 0 if it failed.
        low_ns: Lower quartile of the times.
        high_ns: Upper quartile of the times.
        saves_ns: Median of the differences to the code as it is, measured side by side. Below 0: it
            takes longer.
        saves_low_ns: Lower end of the 95% interval of that median.
        saves_high_ns: Upper end of it.
        verdict: ``"helps"`` if a step saves at least 1% of its time, and 0.5% with certainty;
            ``"does not help"`` if it certainly saves less than 1%; else ``"undecided"``. Both must
            lie beyond what the code as it is differs from itself in the same trial.
            ``"fails"`` if it cannot run here; ``""`` for the code as it is.
        note: Why it fails, or what is different with it; or ``""``.
        changes_training: Whether it trains something else, as without a dropout: ``note`` says
            what. Its saving is no reason alone to take it.
    """

    name: str
    ns: Count = 0
    low_ns: Count = 0
    high_ns: Count = 0
    saves_ns: int = 0
    saves_low_ns: int = 0
    saves_high_ns: int = 0
    verdict: Verdict = ""
    note: str = ""
    changes_training: bool = field(default=False, metadata=SELDOM)


@public
@dataclass(frozen=True, slots=True)
class Tried:
    """What happened when the remedy of a finding was tried, beside the training, on copies.

    Attributes:
        what: What was measured, such as ``AdamW.step() on copies of 52 parameters``.
        variants: The code as it is, then the remedy of the finding, then other variants. Empty if
            nothing was tried.
        rounds: How often each variant was measured.
        why_not: Why nothing was tried, or ``""``.
        cpu_time: Whether times are CPU time of the one thread that trains, which other processes do
            not lengthen, as they do the clock time of findings.
        of_plan: Whether the variants are settings of the plan, of the whole model, which says in
            which order to make them.

    Example:
        >>> tried = report.findings[0].tried
        >>> tried.best.name if tried and tried.best else "nothing was tried, or nothing helps"
        'nothing was tried, or nothing helps'
    """

    what: str
    variants: tuple[Variant, ...] = ()
    rounds: Count = 0
    why_not: str = ""
    cpu_time: bool = False
    of_plan: bool = field(default=False, metadata=SELDOM)

    @property
    def best(self) -> Variant | None:
        """The variant that saves most, of those that help; ``None`` if none does."""
        helping = [variant for variant in self.variants if variant.verdict == "helps"]
        return max(helping, key=lambda variant: variant.saves_ns, default=None)

    @property
    def verdict(self) -> Verdict:
        """``"helps"`` if one variant does, ``"does not help"`` if none can; ``""`` if not tried."""
        verdicts = {variant.verdict for variant in self.variants}
        order: tuple[Verdict, ...] = ("helps", "undecided", "does not help", "fails")
        return next((verdict for verdict in order if verdict in verdicts), "")

    def __str__(self) -> str:
        """Return one sentence, or more for the variants."""
        if self.why_not or not self.variants:
            return f"Not tried here: {self.why_not or 'there is no other way to write it'}."
        now, best = self.variants[0], self.best
        others = [_of(variant) for variant in self.variants[1:] if variant is not best]
        rest = f" {'; '.join(others)}." if others else ""
        of_cpu = " of CPU time" * self.cpu_time
        if best is not None:
            changes = ", changes what is trained" * best.changes_training
            return (
                f"Tried here{changes}: {duration(now.ns)} → {duration(best.ns)}{of_cpu} with "
                f"{best.name}"
                f"{f' ({best.note})' if best.note else ''}; a "
                f"step takes at least {duration(best.saves_ns)} less "
                f"({between(max(best.saves_low_ns, 0), best.saves_high_ns)}).{rest}"
            )
        sentences = {"undecided": self._doubt(), "fails": "no variant runs"}
        verdict = sentences.get(self.verdict, "does not help")
        return f"Tried here, {verdict}: {duration(now.ns)}{of_cpu} as it is;{rest}"

    def _doubt(self) -> str:
        """Why there is no verdict: the times are alike, or those of the same code differ."""
        now = self.variants[0]
        tried = [variant for variant in self.variants if variant.verdict == "undecided"]
        if not any(variant.ns for variant in tried):
            return "not measured"
        apart = max(abs(variant.ns - now.ns) for variant in tried if variant.ns)
        return "the times vary too much" if apart > APART * now.ns else "too close to tell"


def _of(variant: Variant) -> str:
    if variant.verdict == "fails":
        return f"{variant.name} fails: {variant.note}"
    if not variant.ns:
        return f"{variant.name} was not measured ({variant.note})"
    return f"{duration(variant.ns)} with {variant.name}" + (
        f" ({variant.note})" if variant.note else ""
    )


Trials: TypeAlias = Literal["operators", "plan", "none"]
"""What may be tried."""


class InProfile(TypedDict, total=False):
    """What ``profile`` takes.

    Attributes:
        trials: what may be tried of what the findings advise, on copies, within five seconds:
            ``"operators"`` (default), PyTorch's optimizers and operators; ``"plan"``, settings on a
            copy of the whole model too, within a minute, for ``Report.plan``; or ``"none"``.
    """

    trials: Literal["operators", "plan", "none"]


@dataclass(frozen=True, kw_only=True)
class InFinding:
    """What each finding has.

    Attributes:
        tried: What a trial of the remedy measured on the machine that trains; ``None`` where no
            trial was made.
    """

    __slots__ = ()

    tried: Tried | None = field(default=None, metadata=SELDOM)

    def _measured(self) -> Measured | None:
        if self.tried is None:
            return None
        best, verdict = self.tried.best, self.tried.verdict
        if best is None:
            # A replay has a price for the remedy itself, whatever others are undecided.
            remedy = self.tried.variants[1].verdict if len(self.tried.variants) > 1 else ""
            is_known = False if verdict in _NO_HELP else None
            return Measured(is_known, refutes=remedy in _NO_HELP or is_known is False)
        low, high = max(best.saves_low_ns, 0), max(best.saves_high_ns, best.saves_ns)
        is_remedy = not self.tried.of_plan and any(best is way for way in self.tried.variants[1:2])
        way, changes = "" if is_remedy else best.name, best.changes_training
        of_plan = self.tried.of_plan
        return Measured(True, best.saves_ns, low, high, False, way, changes, of_plan)
