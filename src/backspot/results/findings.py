"""What makes a step slow, where, what to do about it, and what a step would save.

All times are integer nanoseconds of a typical step. Savings are those of a typical step without the
profiler's cost, as a replay of the recording predicts it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

from backspot.formatting import between, duration, labelled, visible
from backspot.presented import public
from backspot.results import memory, trials
from backspot.results.quantities import SELDOM, Count, Measured, OtherCost, Ratio


@public
@dataclass(frozen=True, slots=True)
class Saving:
    """How much less a typical step would take without some work, in nanoseconds.

    The range is the error of such predictions: see ``docs/evidence.md``.

    Attributes:
        ns: The saving. Work that other work hides saves nothing.
        low_ns: Lower end of the range.
        high_ns: Upper end of the range.
        parts: Of a row, which part of ``ns`` is ``forward``, ``backward``, ``recompute`` (forward
            work that runs again) and ``optimizer`` (its share of clipping, update
            and ``zero_grad``). They sum to ``ns``, and a part without a saving is left out.
        at_best: Whether more cannot be saved, but less can.
        at_least: Whether the remedy makes other work faster too, by what is not known.
    """

    ns: Count
    low_ns: Count
    high_ns: Count
    parts: dict[str, Count] = field(default_factory=dict, metadata=SELDOM)
    at_best: bool = field(default=False, metadata=SELDOM)
    at_least: bool = field(default=False, metadata=SELDOM)


@public
@dataclass(frozen=True, slots=True)
class FirstRemedy:
    """What to do first: of all remedies with a price, the one to begin with.

    Attributes:
        what: What to do, in a few words.
        saves: How much less a step takes with it; at least 2% of the step.
        share: That as a share (0 to 1) of the step.
        rule: Rule of the finding whose remedy it is; ``""`` where it is of no finding.
        measured: Whether that was measured on the machine that trains, not predicted.
        changes_training: Whether something else is trained with it.
    """

    what: str
    saves: Saving
    share: Ratio
    rule: str = ""
    measured: bool = False
    changes_training: bool = False


@public
@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """How long a typical step takes without the profiler's cost, by replay, in nanoseconds.

    Attributes:
        ns: The step.
        low_ns: Lower end of the range.
        high_ns: Upper end of the range.
        fitted: Whether the profiler's cost was fitted to steps that were timed without it. If not,
            it is that of another machine, and the range is wider.
    """

    ns: Count
    low_ns: Count
    high_ns: Count
    fitted: bool


@public
@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a typical step would take with some changes, in nanoseconds.

    Attributes:
        step_ns: The step, without the profiler's cost.
        saves_ns: How much less that is.
        low_ns: Lower end of the range of ``saves_ns``.
        high_ns: Upper end of the range of ``saves_ns``.
        alone: What each of the changes would save without the others.
        at_best: Whether more cannot be saved, but less can.

    Example:
        >>> print(report.what_if({"patch_drop": 0.5}))
        A step would take 24.5 ms: 2.2 ms less (uncertain, 0 ms to 4.4 ms), by ...
    """

    step_ns: int
    saves_ns: int
    low_ns: int
    high_ns: int
    alone: dict[str, Saving] = field(default_factory=dict)
    at_best: bool = False

    def __str__(self) -> str:
        """Return one sentence and, for several changes, a table of each of them alone."""
        ends = max(self.low_ns, 0), max(self.high_ns, 0)
        saving_text = f"{less(self.saves_ns)}{' at best' * self.at_best}"
        sentence = (
            f"A step would take {duration(self.step_ns)}: {saving_text} ({between(*ends)}), by a "
            "replay without the profiler"
        )
        if len(self.alone) < 2:
            return sentence
        rows = [("change", "alone", "range"), *map(_row, self.alone.items())]
        rows.append(("together", less(self.saves_ns), " to ".join(map(duration, ends))))
        name, alone, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        table = (f"{a:<{name}}  {b:<{alone}}  {c}".rstrip() for a, b, c in rows)
        return "\n".join((sentence, *table))


def less(ns: float) -> str:
    """Return in words how much less a step takes."""
    return f"{duration(ns)} less" if ns > 0 else "hardly less"


def _row(change: tuple[str, Saving]) -> tuple[str, str, str]:
    name, saves = change
    saving_text = f"{less(saves.ns)}{' at best' * saves.at_best}"
    return visible(name), saving_text, f"{duration(saves.low_ns)} to {duration(saves.high_ns)}"


class Predictor(Protocol):
    """A recording that can be replayed again and again."""

    def what_if(self, asked: Mapping[str, Any]) -> WhatIf:
        """Return the step with changes, by the name of each and what is asked of it.

        Raises:
            UsageError: If one of them cannot be predicted, with the reason.
        """

    def without_calls(self, calls: Sequence[Sequence[int]]) -> list[Saving]:
        """Return what a step saves if the host does not wait in some calls, for each list of them.

        Args:
            calls: indices into the events of the recording.
        """

    def with_less(
        self,
        paths: Collection[str],
        less: Sequence[tuple[float, float]],
        *,
        unblocked: str = "",
    ) -> list[float]:
        """Return how much less a step takes if host and devices work so much less in places.

        Args:
            paths: the places.
            less: nanoseconds of the host and of the devices, for each answer.
            unblocked: a rule, without the waits of which the host goes on.
        """

    def of_models(self, *, with_loss: bool) -> float:
        """Return the models' share of the host's time, or theirs and their loss's."""

    def apart(self) -> tuple[float, float]:
        """Return what the host needs for a step, and the devices, each without the other."""


class _Costly:
    """What costs time, or something else: a part that knows of such causes says so."""

    __slots__ = ()

    def _other_cost(self) -> OtherCost | None:
        return None


@dataclass(frozen=True)
class _Where(_Costly):
    """What each place of a finding has, whatever the finding is about.

    Attributes:
        path: Path of a row; a phase, ``(optimizer)`` or ``(data)``; or ``(allocator)``.
        class_name: Class of the module, or ``""``.
        count: Number of nodes, kernels or calls there.
        wall_ns: Clock time there, in nanoseconds of a typical step.
        line: ``file:line`` of the forward, or ``""``.
    """

    __slots__ = ()

    path: str
    class_name: str
    count: Count
    wall_ns: Count
    line: str = ""


@public
@dataclass(frozen=True, slots=True)
class Place(memory.InPlace, _Where):
    """A place of a finding: a module, time that no module owns, or a phase of the step."""

    @property
    def label(self) -> str:
        """Path and class, as the labels in a trace have them."""
        return labelled(self.path or self.class_name or "(root)", self.class_name)


Tier: TypeAlias = Literal["stable", "account", "preview"]
"""How much a finding counts, in this order."""
_TIERS = get_args(Tier)


@dataclass(frozen=True)
class _Cause(_Costly):
    """What each finding has, whatever it is about.

    Attributes:
        rule: Name of its section in ``docs/findings.md``.
        title: What is wrong, in a few words.
        seen: What was seen, with counts and times.
        remedy: What to do.
        wall_ns: Clock time in nanoseconds of a typical step, the sum over its places.
        places: Where, most wall time first. Never empty.
        steps: Number of recorded steps in which it takes at least 1% of the step.
        nodes: Autograd nodes involved, most expensive first.
        operators: Operators involved (``aten::…``), most expensive first.
        kernels: Kernels and copies involved, most expensive first.
        link: URL with more, or ``""``.
        saves: How much less a step would take with the remedy, by replay: that of a named change
            as in ``Report.what_if``, or else without the work of the cause, which is at most
            ``wall_ns``. ``None`` where that is not known.
        tier: How sure its rule is. ``stable``; ``account`` if it is true of nearly every step and
            no remedy is known to pay in this one, so that it is a line in the account of the step;
            or ``preview`` if the rule has not been shown right by two sources that nobody here
            wrote. The answer and the order of the others do not depend on these two, and preview
            findings are shown on demand (``--preview``).
        form: Which of the remedies of its rule this finding has, ``""`` for the usual one.
        changes_training: Whether something else is trained with the remedy, as with a larger batch:
            its saving is no reason alone to take it.
    """

    __slots__ = ()

    rule: str
    title: str
    seen: str
    remedy: str
    wall_ns: Count
    places: tuple[Place, ...]
    steps: Count
    nodes: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    link: str = ""
    saves: Saving | None = None
    tier: Tier = "stable"
    form: str = field(default="", metadata=SELDOM)
    changes_training: bool = field(default=False, metadata=SELDOM)

    def _measured(self) -> Measured | None:
        return None


@public
@dataclass(frozen=True, slots=True)
class Finding(trials.InFinding, memory.InFinding, _Cause):
    """A cause that makes the step slower than necessary, and what to do about it.

    Example:
        >>> finding = report.findings[0]
        >>> finding.rule, finding.path
        ('sorted-indexing', 'patch_drop')
        >>> print(finding.title)
        Indexing backward sorts its indices
    """

    def __repr__(self) -> str:
        place = f" in {visible(self.places[0].label)}" if self.places else ""
        other = self._other_cost()
        cost = f"{self.wall_ns / 1e6:.3f} ms" if other is None else other.said
        return f"<Finding {self.rule}{place}: {cost}>"

    @property
    def path(self) -> str:
        """Path of the place that takes most of the time."""
        return self.places[0].path


def other_cost(cause: Finding | Place) -> OtherCost | None:
    """Return what a finding costs, where that is no time, all in all or in one place."""
    return cause._other_cost()


def measured(finding: Finding) -> Measured | None:
    """Return what the remedy does here, as a part has measured it; ``None`` where none has."""
    return finding._measured()


def helps(finding: Finding) -> bool | None:
    """Return whether the remedy is known to help here, or not to; ``None`` where it is not."""
    measurement = finding._measured()
    return None if measurement is None else measurement.helps


def stable(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings that count, in their order."""
    return tuple(finding for finding in findings if finding.tier == "stable")


_GAIN = 0.005
"""Share of a step below which a saving is none."""


def saves_nothing(finding: Finding, step: ReplayedStep | None) -> bool:
    """Return whether a step would take as long with the remedy, as other work hides the cause."""
    return bool(finding.saves and step and finding.saves.ns < _GAIN * step.ns)


_CONCENTRATED = 0.75  # the share of a cause in its first place, from which it is of this place
ALL_OVER = 0.25  # what counts of a saving at best by a cause all over the step, as a bound on many


def gain_of(finding: Finding) -> Saving | None:
    """Return what a step saves with the remedy: as it was measured, or else by a replay."""
    measurement = measured(finding)
    if measurement is None or not measurement.helps:
        return finding.saves
    return Saving(measurement.saves_ns, measurement.low_ns, measurement.high_ns, at_least=True)


def counted_gain(finding: Finding) -> float | None:
    """Return what a step saves with the remedy; of a bound all over the step a part counts."""
    saves = gain_of(finding)
    if saves is None:
        return None
    return (ALL_OVER if saves.at_best and not is_concentrated(finding) else 1.0) * saves.ns


_CLEARLY_LESS = 0.9
"""A saving of less than this share of another time, or of as much more, differs from it."""


def alike(saves: Saving, ns: int) -> bool:
    """Return whether a saving is near another time."""
    return _CLEARLY_LESS * ns <= saves.ns <= ns / _CLEARLY_LESS


def is_concentrated(finding: Finding) -> bool:
    """Return whether a cause has most of its time in its first place."""
    return finding.places[0].wall_ns >= _CONCENTRATED * finding.wall_ns


def in_order(findings: Iterable[Finding], step: ReplayedStep | None) -> tuple[Finding, ...]:
    """Return the findings in the order in which to act on them: this rule alone orders them.

    First come those of which it is known what a step gains, measured or else by a replay, the
    largest gain first; of a bound all over the step, a part counts. Then those of which it is not
    known, with the most clock time first: other causes may explain it. Then those without which a
    step takes as long, as other work hides them, and those whose remedy does not help here. Last
    come findings about something else than time, such as memory, the largest first. Findings of the
    other tiers follow, each in the same order.

    Args:
        step: the step without any change, ``None`` before it was replayed. Then clock time stands
            for the gains that are not known.
    """

    def key(cause: Finding) -> tuple[int, float, str]:
        helping, gain = helps(cause), counted_gain(cause)
        if (other := other_cost(cause)) is not None:
            return 4, -other.amount, cause.rule
        if helping is False:
            return 3, -cause.wall_ns, cause.rule
        if step is None:
            return 0, -(cause.wall_ns if gain is None else gain), cause.rule
        if gain is None:
            return 1, -cause.wall_ns, cause.rule
        nothing = helping is not True and saves_nothing(cause, step)
        return (2, -cause.wall_ns, cause.rule) if nothing else (0, -gain, cause.rule)

    return tuple(sorted(findings, key=lambda cause: (_TIERS.index(cause.tier), key(cause))))
