"""What a training could take with other settings, tried on a copy of the whole model.

A rung is one setting, made on top of those before it. All times are nanoseconds of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict

from backspot.presented import public
from backspot.results.quantities import SELDOM, Count, Measure

PLAN_SECONDS = 60
"""How long a plan may take where nothing else is said."""
PlanLimit: TypeAlias = Literal["host", "device", ""]
PlanOutcome: TypeAlias = Literal["came true", "faster than said", "not reached"]
PlanVerdict: TypeAlias = Literal["helps", "does not help", "undecided", "not tried"]


def _limit(host_ns: int, device_ns: int) -> PlanLimit:
    return "" if not device_ns else "host" if host_ns > device_ns else "device"


@public
@dataclass(frozen=True, slots=True)
class Difference:
    """How far results with a setting are from those as it is, relative to their size.

    The largest of all tensors' ``|a - b| / |b|`` (norms), beside what a second run as it is differs
    by: a setting that stays within that changes nothing that can be seen.

    Attributes:
        outputs: Of what the model returns.
        gradients: Of the gradients of its parameters.
        loss: Of the loss; ``None`` where the model does not return it.
        outputs_again: Of the outputs of a second run as it is.
        gradients_again: Of the gradients of a second run as it is.
        loss_again: Of the loss of a second run as it is; ``None`` as ``loss``.
    """

    outputs: Measure
    gradients: Measure
    loss: Measure | None = None
    outputs_again: Measure = 0.0
    gradients_again: Measure = 0.0
    loss_again: Measure | None = None


@public
@dataclass(frozen=True, slots=True)
class Rung:
    """One setting, and what a step takes with it, in nanoseconds.

    Attributes:
        setting: What is set, such as ``bf16`` or ``torch.compile``.
        axis: What kind of setting that is: ``precision``, ``layout``, ``compile``, ``optimizer``,
            ``attention``, ``cudnn``, ``checkpoint``, ``loader``, ``graph`` or ``batch``.
        on: The settings that it was tried on top of, in their order; empty: the training as it is.
        code: What to write for it, in Python.
        before_ns: The step without it, with ``on``; 0 where it was not tried.
        step_ns: The step with it; 0 where it was not tried. With another batch: the time of as
            many samples as a step has now, so that it compares.
        low_ns: Lower end of the 95% interval of ``step_ns``; 0 where too few rounds ran for one.
        high_ns: Upper end of it; 0 as ``low_ns``.
        memory_bytes: The most that forward and backward of the copy allocate on its device; 0 where
            that is not known.
        before_memory_bytes: The same without it.
        host_ns: What the host needs for the step with it, without its waits for the device; 0 where
            that is not known.
        device_ns: What the device needs for it, without waits for the host; 0 on a CPU, and where
            that is not known.
        compile_ns: What compiling takes, once; 0 where nothing is compiled.
        difference: How far results are from those as it is; ``None`` where that is not known.
        verdict: ``"helps"``, ``"does not help"`` or ``"undecided"``, as for ``Variant.verdict``;
            ``"not tried"`` where it could not run, or was not run.
        note: Why it was not tried, or what else is true of it; or ``""``.
        kept: Whether it is a rung of the ladder: the following ones are tried on top of it.
    """

    setting: str
    axis: str
    on: tuple[str, ...] = ()
    code: str = ""
    before_ns: Count = 0
    step_ns: Count = 0
    low_ns: Count = 0
    high_ns: Count = 0
    memory_bytes: Count = 0
    before_memory_bytes: Count = 0
    host_ns: Count = 0
    device_ns: Count = 0
    compile_ns: Count = 0
    difference: Difference | None = None
    verdict: PlanVerdict = "not tried"
    note: str = ""
    kept: bool = False

    @property
    def saves_ns(self) -> int:
        """What a step saves with it; below 0 where it takes longer, 0 where it was not tried."""
        return self.before_ns - self.step_ns if self.step_ns else 0

    @property
    def limit(self) -> PlanLimit:
        """What limits the step with it: the larger of ``host_ns`` and ``device_ns``.

        ``""`` on a CPU, and where the two are not known.
        """
        return _limit(self.host_ns, self.device_ns)

    @property
    def pays_after(self) -> int | None:
        """After how many steps compiling has paid; ``None`` where nothing is compiled or saved."""
        if not self.compile_ns or self.saves_ns <= 0:
            return None
        return -(-self.compile_ns // self.saves_ns)


@public
@dataclass(frozen=True, slots=True)
class Plan:
    """The settings that were tried beside the training, and which of them to take.

    Times are nanoseconds.

    Attributes:
        what: What was run, such as ``a copy of ResNet, forward and backward``.
        step_ns: The step as it is: the training's real one.
        rungs: First those of the ladder, each on top of the one before; then the settings that
            were tried alone or on top of it and are not part of it; then those not tried.
        rest_ns: The part of the step that no setting of the plan changes: the loader's waits,
            logging, hooks around the model, the optimizer where no form of it was tried.
        host_ns: What the host needs for the step as it is, as ``Rung.host_ns``.
        device_ns: What the device needs for it, as ``Rung.device_ns``.
        took_ns: How long planning took.
        compiling_ns: The part of that in which PyTorch compiled.
        allowed_ns: How long it was allowed to take.
        batch: Samples a step; 0 where that is not known.
        next_limit: What limits the step once all of the ladder is made, as a sentence; or ``""``.
        loader_ns: The step with all of the ladder where the loader then limits it, and not the
            model; else 0.
        earlier: What was taken from the plan of an earlier report, as a sentence; ``""`` without.
        inputs: The tensors that the models were called with, such as ``256x3x224x224 float32``.
        why_not: Why nothing was tried, or ``""``.
    """

    what: str
    step_ns: Count = 0
    rungs: tuple[Rung, ...] = ()
    rest_ns: Count = 0
    host_ns: Count = 0
    device_ns: Count = 0
    took_ns: Count = 0
    compiling_ns: Count = 0
    allowed_ns: Count = 0
    batch: Count = 0
    next_limit: str = ""
    loader_ns: Count = 0
    earlier: str = ""
    inputs: tuple[str, ...] = ()
    why_not: str = ""

    @property
    def limit(self) -> PlanLimit:
        """What limits the step as it is, as ``Rung.limit``."""
        return _limit(self.host_ns, self.device_ns)

    @property
    def ladder(self) -> tuple[Rung, ...]:
        """The rungs to take, in their order."""
        return tuple(rung for rung in self.rungs if rung.kept)

    @property
    def planned_ns(self) -> int:
        """The step with all of the ladder; as it is where there is none."""
        return self.ladder[-1].step_ns if self.ladder else self.step_ns


@public
@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What the plan before said of a step with one of its settings, beside the step after.

    Times are milliseconds of a step without the profiler.

    Attributes:
        setting: What was to be set, such as ``bf16``.
        on: The settings that it was tried on top of.
        before_ms: The step as the plan found it.
        said_ms: The step that the plan said.
        low_ms: Lower end of its 95% interval.
        high_ms: Upper end of it.
        after_ms: The step after.
        outcome: ``came true`` if the step after is within 5% or the interval of what was said,
            ``faster than said`` below that, ``not reached`` above: the setting was not made, or
            does not do what was said.
    """

    setting: str
    on: tuple[str, ...]
    before_ms: float
    said_ms: float
    low_ms: float
    high_ms: float
    after_ms: float
    outcome: PlanOutcome


@dataclass(frozen=True, kw_only=True)
class InReport:
    """What a report has of a plan.

    Attributes:
        plan: The settings that were tried on a copy of the model; ``None`` without ``--plan``.
    """

    __slots__ = ()

    plan: Plan | None = field(default=None, metadata=SELDOM)


@dataclass(frozen=True, kw_only=True)
class InComparison:
    """What a comparison has of a plan.

    Attributes:
        planned: What the plan before said of each setting that helps, beside the step after; empty
            without a plan, or where no step after was timed without the profiler.
    """

    __slots__ = ()

    planned: tuple[PlannedStep, ...] = field(default=(), metadata=SELDOM)


class InRun(TypedDict, total=False):
    """What ``backspot run`` takes.

    Attributes:
        plan: how many seconds a plan may take; ``None``: there is none.
        plan_from: the path of an earlier report, whose plan says what need not be tried again;
            asks for a plan, too.
    """

    plan: int | None
    plan_from: str | None
