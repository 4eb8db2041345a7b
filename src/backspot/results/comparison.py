"""The comparison of two sides: frozen data, with the questions that people ask about it.

A side is one recording, or several of the same code. All times are milliseconds per step, unless
the name ends in ``_ns_by_step``; those of several recordings are means.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backspot import presented
from backspot.checks import is_number
from backspot.errors import UsageError
from backspot.formatting import quoted, visible
from backspot.presented import Presented, public
from backspot.results import plan
from backspot.results.report import StepUnit


@public
@dataclass(frozen=True, slots=True)
class Move:
    """One renaming that explains why modules have other paths after than before.

    Attributes:
        before: The part of the path that is gone, ``*`` for several places; ``""`` if everything
            moved into another module.
        after: The part that replaces it.
        modules: Number of modules that moved.
    """

    before: str
    after: str
    modules: int


SCHEMA = "backspot.comparison/3"
"""Version of the JSON form."""

_NOISY = 0.2
"""Share of a time from which its noise is too large to say that nothing changed."""

ChangeKind = Literal["step", "phase", "whole", "modules", "module", "node", "unowned", "rank"]
Time = Literal["wall", "gpu"]
About = Literal["recordings", "code"]
Verdict = Literal[
    "slower",
    "faster",
    "longer",
    "shorter",
    "within the noise",
    "undecided",
    "new",
    "gone",
    "moved",
]


def _check(percent: float, method: str) -> None:
    if not is_number(percent):
        raise UsageError(f"{method}({quoted(percent)}): give a percentage of at least 0")


@public
@dataclass(frozen=True, slots=True)
class Side:
    """One of the two sides that are compared: one recording, or several of the same code.

    Attributes:
        trace: What was read; of several recordings, that of the first and of the last.
        steps: Number of recorded steps, of all recordings together.
        step_unit: What counts as one step.
        name: Name given to ``compare``, ``""`` if none was given.
        recordings: Number of recordings.
    """

    trace: str
    steps: int
    step_unit: StepUnit
    name: str = ""
    recordings: int = 1

    @property
    def label(self) -> str:
        """The name, followed by what was read unless the name already says so."""
        if not self.name:
            return self.trace or "a report"
        names_trace = not self.trace or f"/{self.trace}".endswith(f"/{self.name}")
        return self.name if names_trace else f"{self.name} ({self.trace})"


@public
@dataclass(frozen=True, slots=True)
class Change:
    """Change of one time from one side to the other: of the step, a phase, or a module.

    Times are milliseconds per step, the mean over the recordings of a side.

    Attributes:
        kind: ``step``, ``phase``, ``whole`` (the backward), ``module``, ``node`` (if modules have
            no labels) or ``unowned`` (no module owns it, or the saved report left it out); of jobs,
            also ``modules`` (all together) and ``rank``.
        path: Path after, or before if it is gone; or the name of a phase or a node.
        before_path: Path before; ``None`` if it is new.
        class_name: Class of the module.
        before_ms: Clock time before.
        after_ms: Clock time after.
        change_ms: ``after_ms - before_ms``.
        percent: The change in percent of ``before_ms``, ``None`` if that is 0.
        before_gpu_ms: Device time of the backward; ``None`` unless both reports have device work,
            and for the step, phases and nodes.
        after_gpu_ms: Device time of the backward; ``None`` unless both reports have device work,
            and for the step, phases and nodes.
        judged_by: The time that ``verdict``, ``low_ms`` and ``high_ms`` are about.
        low_ms: Lower end of the change, give or take the noise; ``None`` if that is not known.
        high_ms: Upper end.
        verdict: ``slower`` and ``faster`` are said of the code, from three recordings a side on;
            ``longer`` and ``shorter`` of fewer recordings, which can differ by what the machine
            did. Both are beyond the noise, and of a module beyond what all modules have in common.
            ``undecided`` is beyond the noise only, or with too few steps; ``moved`` at another
            path, without a clear change.
        before_ns_by_step: Clock times in nanoseconds, one for each step, those of several
            recordings one after the other; empty if unknown.
        after_ns_by_step: Clock times in nanoseconds, one for each step, those of several
            recordings one after the other; empty if unknown.
        before_ms_by_recording: The time that ``verdict`` is about, in each recording.
        after_ms_by_recording: The time that ``verdict`` is about, in each recording.

    Example:
        >>> change = comparison["blocks.2.attn"]
        >>> change
        <Change of blocks.2.attn: +1.644 GPU ms per step, longer>
        >>> f"{change.before_ms:.2f} ms, then {change.after_ms:.2f} ms ({change.percent:+.0f}%)"
        '1.44 ms, then 3.10 ms (+115%)'
    """

    kind: ChangeKind
    path: str
    before_path: str | None
    class_name: str
    before_ms: float
    after_ms: float
    change_ms: float
    percent: float | None
    before_gpu_ms: float | None
    after_gpu_ms: float | None
    judged_by: Time
    low_ms: float | None
    high_ms: float | None
    verdict: Verdict
    before_ns_by_step: tuple[int, ...]
    after_ns_by_step: tuple[int, ...]
    before_ms_by_recording: tuple[float, ...] = ()
    after_ms_by_recording: tuple[float, ...] = ()

    def __repr__(self) -> str:
        time = "GPU ms" if self.judged_by == "gpu" else "ms"
        return (
            f"<Change of {visible(self.title)}: {self.judged_ms[2]:+.3f} {time} per step, "
            f"{self.verdict}>"
        )

    @property
    def title(self) -> str:
        """The name as it reads in a sentence, such as ``the step``."""
        titles = {
            "whole": "the whole backward",
            "modules": "all modules",
            "step": "the step",
        }
        return titles.get(self.kind, self.name)

    @property
    def judged_ms(self) -> tuple[float, float, float]:
        """Before, after and change in the time that the verdict is about."""
        if self.judged_by == "wall" or self.before_gpu_ms is None or self.after_gpu_ms is None:
            return self.before_ms, self.after_ms, self.change_ms
        return self.before_gpu_ms, self.after_gpu_ms, self.after_gpu_ms - self.before_gpu_ms

    @property
    def judged_percent(self) -> float | None:
        """The change in percent of the time before, in the time that the verdict is about."""
        before, _, change = self.judged_ms
        return change / before * 100 if before else None

    @property
    def noise_ms(self) -> float | None:
        """Half of the interval from ``low_ms`` to ``high_ms``; ``None`` if no noise is known."""
        if self.low_ms is None or self.high_ms is None:
            return None
        return (self.high_ms - self.low_ms) / 2

    @property
    def is_noisy(self) -> bool:
        """Whether it is within a noise of more than a fifth of the time: nothing is known then."""
        largest = max(self.judged_ms[:2])
        noise = self.noise_ms or 0.0
        return self.verdict == "within the noise" and noise > _NOISY * largest

    def exceeds(self, percent: float) -> bool:
        """Return whether this takes longer beyond the noise and by more than a limit.

        Args:
            percent: At least 0, of the time that the verdict is about.

        Returns:
            True if the verdict is ``slower`` or ``longer``, and the change is more than
            ``percent`` percent.

        Raises:
            UsageError: If ``percent`` is invalid.

        Example:
            >>> comparison["blocks.2.attn"].exceeds(10)
            True
        """
        _check(percent, "exceeds")
        by = self.judged_percent
        return self.verdict in ("slower", "longer") and (by is None or by > percent)

    def too_noisy_for(self, percent: float) -> bool:
        """Return whether a slowdown by more than a limit can neither be claimed nor excluded.

        Args:
            percent: At least 0, of the time that the verdict is about.

        Returns:
            True if the interval of the change reaches beyond the limit, and either the noise or the
            change itself is larger than the limit. False if the change exceeds the limit.

        Raises:
            UsageError: If ``percent`` is invalid.

        Example:
            >>> comparison["blocks.2.attn"].too_noisy_for(10)
            False
        """
        _check(percent, "too_noisy_for")
        if self.exceeds(percent):
            return False
        noise, (before, _, change) = self.noise_ms, self.judged_ms
        if noise is None:
            return self.verdict == "undecided"
        limit = before * percent / 100
        return change + noise > limit and max(change, noise) > limit

    @property
    def name(self) -> str:
        """The path, or the class for the root, which has an empty path."""
        return self.path or self.class_name or "(root)"

    @property
    def differs(self) -> bool:
        """Whether the sides differ in it beyond the noise, in the code or in the recordings."""
        if self.verdict in ("new", "gone") and self.low_ms is not None and self.high_ms is not None:
            return not self.low_ms <= 0 <= self.high_ms
        return self.claimed or self.verdict in ("longer", "shorter")

    @property
    def claimed(self) -> bool:
        """Whether the code is slower or faster in it, beyond the noise."""
        return self.verdict in ("slower", "faster")


@dataclass(frozen=True)
class _Changes:
    """What each comparison has.

    Attributes:
        step: Change of the whole step.
        phases: Changes of the phases of the step, which sum to it; empty if a report has none. Of
            jobs: own time, exposed communication, waits and transfers of the typical rank, which
            can overlap.
        whole: Change of the backward; of jobs, of all modules, forward and backward.
        changes: Changes of the parts of ``whole``, which sum to it: first those beyond the noise,
            then the largest.
        by: ``node`` if a side has no module labels.
        moves: Renamings that explain why paths differ.
        before: The first side.
        after: The second side.
        notes: What to know before trusting the numbers.
        ranks: Of jobs: the change of each rank's own time.
        about: ``code`` with three recordings or more on each side, else ``recordings``.
        clock: ``real`` if the times are those of steps without the profiler, which all recordings
            have; else ``recorded``.
    """

    __slots__ = ()

    step: Change
    phases: tuple[Change, ...]
    whole: Change
    changes: tuple[Change, ...]
    by: Literal["module", "node"]
    moves: tuple[Move, ...]
    before: Side
    after: Side
    notes: tuple[str, ...]
    ranks: tuple[Change, ...] = ()
    about: About = "recordings"
    clock: Literal["real", "recorded"] = "recorded"


@public
@dataclass(frozen=True, slots=True)
class Comparison(Presented, plan.InComparison, _Changes):
    """The changes between two sides, each one recording or several.

    One recording a side tells by how much these recordings differ, give or take the noise of their
    steps. From three a side on, it is known how much recordings of the same code differ, and what
    is beyond that is the code: ``about`` tells which.

    ``print(comparison)`` shows it, a notebook displays it, ``comparison[path]`` returns the change
    of one module.

    Attributes:
        schema: Version of the JSON form.

    Example:
        >>> before = backspot.locate("main.trace.json.gz")
        >>> after = backspot.locate("branch.trace.json.gz")
        >>> comparison = backspot.compare(before, after, names=("main", "branch"))
        >>> comparison
        <Comparison of main (main.trace.json.gz) with branch (branch.trace.json.gz):
         +3.067 ms per step, within the noise>
        >>> [change.name for change in comparison.changes if change.differs]
        ['blocks.2.attn', 'blocks.1.attn']
    """

    schema: str = SCHEMA

    def _made_of(self) -> list[str]:
        return [self.before.trace, self.after.trace]

    def __repr__(self) -> str:
        return (
            f"<Comparison of {visible(self.before.label)} with {visible(self.after.label)}: "
            f"{self.whole.change_ms:+.3f} ms per step, {self.whole.verdict}>"
        )

    def __getitem__(self, path: str) -> Change:
        """Return the change of the module at ``path``.

        Args:
            path: Path after, or before if it is gone.

        Returns:
            The change, in milliseconds per step.

        Raises:
            KeyError: If neither report has such a module.
            UsageError: If ``path`` is not a string. Iterating over the comparison raises this too.

        Example:
            >>> comparison["blocks.0.attn"].verdict
            'within the noise'
        """
        if not isinstance(path, str):
            raise UsageError(
                f"comparison[{quoted(path)}]: give a module's path; comparison.changes has all"
            )
        changes = [change for change in self.changes if change.path == path]
        if not changes:
            raise KeyError(f"no module {path!r} in this comparison")
        return min(changes, key=lambda change: change.verdict == "gone")

    def slower_than(self, percent: float) -> bool:
        """Return whether the step or its backward takes longer than a limit allows.

        With three recordings or more a side, this is about the code; with fewer, about these
        recordings, which a busier machine can make longer as well.

        Args:
            percent: Percentage of the time before, at least 0.

        Returns:
            True if one of the two takes longer beyond the noise and by more than ``percent``.

        Raises:
            UsageError: If ``percent`` is invalid.

        Example:
            >>> comparison.slower_than(5), comparison.slower_than(50)
            (True, False)
        """
        _check(percent, "slower_than")
        return any(change.exceeds(percent) for change in (self.step, self.whole))

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the comparison as a file: a page, text or data. It is complete or not written.

        Args:
            path: Where to write: ``.html``, ``.md``, ``.txt``, ``.csv`` or ``.json``.
            force: Whether to overwrite a file. Default false.

        Returns:
            The path of the file.

        Raises:
            OutputExistsError: If the file exists, without ``force``.
            UsageError: If the suffix names no format.

        Example:
            >>> comparison.save("comparison.md")
            PosixPath('comparison.md')
        """
        return presented.forms().write(self, path, force=force)
