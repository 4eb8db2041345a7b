"""One recording for all parts of a report: a trace with its owners, and what follows from both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from backspot.analysis.accounting.activity import Activity, find_activity
from backspot.analysis.accounting.clock import Clock
from backspot.analysis.accounting.launching import find_launches
from backspot.analysis.accounting.ledger import Ledger
from backspot.analysis.accounting.phases import PhaseTimes, phase_times, phases_of_work
from backspot.analysis.accounting.rows import (
    BackwardCosts,
    RecordedCosts,
    account,
    recorded_costs,
)
from backspot.analysis.accounting.steps import StepWindows, step_windows
from backspot.analysis.accounting.unrecorded import Pace, RealStep, pace_of
from backspot.analysis.accounting.waits import (
    HostWaits,
    find_host_waits,
    lines_as_in,
    lines_by_turn,
    lines_of_waits,
)
from backspot.analysis.attribution.cutting import Cut
from backspot.analysis.attribution.launches import Windows
from backspot.analysis.attribution.ownership import Ownership, attribute
from backspot.analysis.attribution.partial import only_steps, without_partial
from backspot.analysis.attribution.sites import HostSites, find_sites
from backspot.analysis.caveats import why_no_backward
from backspot.analysis.typical import RareSteps, TypicalStep, rare_steps
from backspot.errors import NoBackwardError
from backspot.results.costs import Launches
from backspot.results.report import Report
from backspot.results.training import Training
from backspot.trace import Events, read_events

Answer = TypeVar("Answer")


class Asked(Protocol):
    """What is asked for the same things again and again: a recording, or the evidence of rules."""

    @property
    def answers(self) -> dict[Any, Any]:
        """What was asked, and the answers."""


Subject = TypeVar("Subject", bound=Asked)


def once(question: Callable[[Subject], Answer]) -> Callable[[Subject], Answer]:
    """Make a function answer once for each recording, so that a part needs no attribute there.

    The answer is read only: all that ask get the same one.
    """

    @wraps(question)
    def answered(subject: Subject) -> Answer:
        if question not in subject.answers:
            subject.answers[question] = question(subject)
        answer: Answer = subject.answers[question]
        return answer

    return answered


class Options(msgspec.Struct, frozen=True):
    """What is asked of a report, and what is known beside the trace.

    Attributes:
        depth: as in ``locate``.
        peak_tflops: as in ``locate``.
        peak_gbps: as in ``locate``.
        live: whether this process recorded the trace.
        warmed_up: whether steps are known to have run before the recording.
        real_steps: how long steps take without the profiler, in nanoseconds.
        training: all steps of the training so far; ``None`` where they were not noted.
        slowed_by: what makes the process slow beside its training, each in one sentence, with the
            rule whose finding says it better, or ``""``.
        place: gives a file, line and function of a stack the file's name that lines have elsewhere,
            and the line at which the function begins; ``None``: they have them.
    """

    depth: int | None = None
    peak_tflops: float | None = None
    peak_gbps: float | None = None
    live: bool = False
    warmed_up: bool = False
    real_steps: tuple[int, ...] = ()
    training: Training | None = None
    slowed_by: Mapping[str, str] = {}
    place: Callable[[str, int, str], tuple[str, int]] | None = None


class Recording(msgspec.Struct, frozen=True, eq=False, dict=True):
    """A trace with its owners. What follows from these is computed once, when it is asked for.

    Attributes:
        events: the trace.
        ownership: its owners.
        detail: the trace of other steps of the same training, recorded with memory or shapes;
            ``None`` for none.
        cut: what this is of another recording, ``None`` if it is no part of one.
        around: the recording of more steps, from which the activity of the host is known.
        rare: the steps of which it is known how often the training has such steps.
        real_step: how long a step takes while nothing is recorded. All times are those of such a
            step; where it is not known, and where the trace has backward passes only, they are
            recorded ones.
    """

    events: Events
    ownership: Ownership
    detail: Events | None = None
    cut: Cut | None = None
    around: Recording | None = None
    rare: tuple[RareSteps, ...] = ()
    real_step: RealStep | None = None

    @classmethod
    def of(
        cls, events: Events, detail: Events | None = None, training: Training | None = None
    ) -> Recording:
        """Attribute a trace.

        Args:
            detail: the trace of other steps of the same training, if there is one.
            training: all steps of it, as far as they are known.

        Raises:
            NoBackwardError: If the trace has no backward pass.
        """
        ownership = attribute(events)
        if not len(ownership.passes.start):
            raise NoBackwardError(why_no_backward(events))
        steps = ownership.steps
        rare = rare_steps(steps.end - steps.start, training) if training is not None else ()
        return cls(events, ownership, detail, rare=rare)

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a trace file in this process alone, and leave out what was recorded in part.

        Raises:
            SourceNotFoundError: If the file is missing or cannot be read.
            NotATraceError: If the file is not a trace, or is too broken to use.
            NoBackwardError: If the trace has no backward pass.
        """
        return cls.of(read_events(path, jobs=1)).whole

    @cached_property
    def whole(self) -> Recording:
        """The recording without the passes and steps that were recorded in part, if one is left."""
        part_left = without_partial(self.events, self.ownership)
        return self if part_left is None else self._part(part_left)

    def in_real_time(self, real_step: RealStep | None) -> Recording:
        """Return the recording with the times of a step that takes so long."""
        return self if real_step is None else replace(self, real_step=real_step)

    @cached_property
    def detailed(self) -> Recording:
        """The recording that has memory or shapes, if any has: that of ``detail``, or this one."""
        return self if self.detail is None else Recording.of(self.detail).whole

    def steps(self, first: int, last: int) -> Recording:
        """Return the recording as if only these steps had been recorded."""
        return replace(
            self._part(only_steps(self.events, self.ownership, first, last)), around=self
        )

    def _part(self, cut_trace: Cut) -> Recording:
        rare = tuple(kind.behind(cut_trace.first) for kind in self.rare)
        return Recording(
            cut_trace.events,
            cut_trace.ownership,
            self.detail,
            cut_trace,
            rare=rare,
            real_step=self.real_step,
        )

    def made(self, report: Report) -> bool:
        """Whether a report has these passes, at the same times and in the same steps."""
        columns = (self.ownership.windows.start, self.ownership.steps.of_pass)
        own_passes = list(zip(*(column.tolist() for column in columns), strict=True))
        return own_passes == [(run.start_ns, run.step) for run in report.passes]

    @cached_property
    def clock(self) -> Clock:
        """Who holds each moment."""
        return Clock(self.ownership)

    @cached_property
    def step_windows(self) -> StepWindows | None:
        """The clock time of each step; ``None`` where the trace has backward passes only."""
        return step_windows(self.events, self.ownership, self.clock)

    @property
    def windows(self) -> StepWindows | Windows:
        """The clock time of each step, or of each pass where the trace has nothing else."""
        return self.step_windows or self.ownership.windows

    @cached_property
    def recorded_ledger(self) -> Ledger:
        """The clock time of the steps as it was recorded, dealt out once."""
        return Ledger(self.ownership, self.clock, self.windows)

    @cached_property
    def ledger(self) -> Ledger:
        """The clock time of the steps."""
        return replace(self.recorded_ledger, pace=self.pace) if self.pace else self.recorded_ledger

    @cached_property
    def pace(self) -> Pace | None:
        """How long each moment takes in a real step, ``None`` where that is not known."""
        if self.real_step is None or self.recorded_phases is None:
            return None
        costs = self.recorded_costs
        return pace_of(
            self.events,
            self.recorded_ledger,
            self.activity,
            self.recorded_phases,
            costs.typical,
            costs.of_owners,
            self.real_step,
        )

    @cached_property
    def activity(self) -> Activity:
        """What the host does at each moment: data, forward, optimizer and so on."""
        if self.around is not None:
            return self.around.activity
        return find_activity(self.events, self.ownership)

    @cached_property
    def recorded_phases(self) -> PhaseTimes | None:
        """The clock time of the phases as it was recorded.

        ``None`` where the trace has backward passes only.
        """
        if self.step_windows is None:
            return None
        return phase_times(self.events, self.recorded_ledger, self.activity)

    @cached_property
    def phases(self) -> PhaseTimes | None:
        """The clock time of the phases; ``None`` where the trace has backward passes only."""
        if self.pace is None or self.real_step is None:
            return self.recorded_phases
        times = phase_times(self.events, self.ledger, self.activity)
        return times.summing_to(self.real_step.step_ns, self.pace.unseen_ns, self.typical)

    @cached_property
    def costs(self) -> BackwardCosts:
        """What the backward costs."""
        return account(self.events, self.ledger, self.recorded_costs)

    @cached_property
    def recorded_costs(self) -> RecordedCosts:
        """What the backward costs as it was recorded, and the steps that count."""
        return recorded_costs(self.events, self.recorded_ledger, self.recorded_phases, self.rare)

    @property
    def typical(self) -> TypicalStep:
        """The steps that count."""
        return self.recorded_costs.typical

    @cached_property
    def waits(self) -> HostWaits:
        """The calls of the steps in which the host waits for a device."""
        activity = self.activity if self.step_windows else None
        return find_host_waits(self.events, self.ledger, activity)

    @cached_property
    def lines_of_waits(self) -> list[str]:
        """The line of each of ``waits``, ``""`` where it is not known."""
        stacked = self.detailed
        lines = lines_of_waits(stacked.events, stacked.waits, *stacked.sites.texts)
        if stacked is self:
            return lines
        lines_of_step = lines_by_turn(stacked.events, stacked.ownership, stacked.waits, lines)
        return lines_as_in(lines_of_step, self.events, self.ownership, self.waits)

    @cached_property
    def sites(self) -> HostSites:
        """Which line of the user's Python the host runs at each moment; needs stacks."""
        return find_sites(self.events, self.ownership)

    @cached_property
    def launches(self) -> tuple[Launches, ...]:
        """What each module launches in each phase; empty without device work or phases."""
        if self.step_windows is None or not self.clock.devices:
            return ()
        phase = phases_of_work(self.events, self.ownership, self.activity)
        return find_launches(self.ledger, phase, self.typical)

    @cached_property
    def answers(self) -> dict[Any, Any]:
        """What the parts of a report have asked of this recording; see ``once``."""
        return {}


Part: TypeAlias = Callable[[Report, Recording, Options], Report]
"""Adds one thing to a report. It returns the report with new values by ``results.report.changed``,
or as it is if the recording has nothing for it."""
