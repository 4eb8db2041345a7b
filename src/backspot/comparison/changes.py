"""Two reports side by side: what got slower, what got faster, and what is only noise.

Everything is per step, and wall time. Whether a difference counts is decided by a Welch-type
interval over the steps, which ``noise`` describes: conservative with two or three steps,
and with a single step on either side nothing is claimed.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from backspot.errors import UsageError
from backspot.formatting import quoted
from backspot.results import presented
from backspot.results.presented import Presented
from backspot.results.report import StepUnit

__all__ = ["SCHEMA", "Change", "Comparison", "Kind", "Move", "Side", "Verdict"]


@dataclass(frozen=True, slots=True)
class Move:
    """A change within paths.

    Attributes:
        before: what is gone; ``""`` where everything moved into another module, ``*.qkv`` where
            the same happened in several places.
        after: what stands in its place.
        modules: how many modules moved with it.
    """

    before: str
    after: str
    modules: int


SCHEMA = "backspot.comparison/1"
"""The version of the JSON form."""

Kind = Literal["whole", "module", "node", "unowned"]
Verdict = Literal["slower", "faster", "within the noise", "undecided", "new", "gone", "moved"]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two recordings.

    Attributes:
        trace: what was read.
        steps: how many steps it holds.
        step_unit: what counts as one.
        name: what to call it, as given to ``compare``; empty where nothing was.
    """

    trace: str
    steps: int
    step_unit: StepUnit
    name: str = ""

    @property
    def label(self) -> str:
        """Its name, and what it is of where the name does not say so."""
        if not self.name:
            return self.trace or "a report"
        told = not self.trace or f"/{self.trace}".endswith(f"/{self.name}")
        return self.name if told else f"{self.name} ({self.trace})"


@dataclass(frozen=True, slots=True)
class Change:
    """What became of one module, or of the whole backward.

    Attributes:
        kind: ``whole``, ``module``, ``node`` (an autograd node by name, where modules have no
            labels) or ``unowned`` (what no module owns).
        path: the path after, or before where it is gone; a node's name; ``""`` for a root.
        before_path: the path before; differs from ``path`` where it moved; null where it is new.
        class_name: the module's class.
        before_ms: clock time in the backward per step before, in milliseconds.
        after_ms: the same after.
        change_ms: ``after_ms - before_ms``.
        percent: the change as a percentage of ``before_ms``; null where that is 0.
        low_ms: the least change that the steps allow; null where they have no spread.
        high_ms: the largest change that the steps allow; null where they have no spread.
        verdict: ``slower`` and ``faster`` are beyond the noise; ``undecided`` lacks the steps to
            tell; ``moved`` is at another path and not clearly slower or faster.
        before_ns_by_step: the times before, one a step; empty where they are not known by step.
        after_ns_by_step: the times after, one a step; empty where they are not known by step.
    """

    kind: Kind
    path: str
    before_path: str | None
    class_name: str
    before_ms: float
    after_ms: float
    change_ms: float
    percent: float | None
    low_ms: float | None
    high_ms: float | None
    verdict: Verdict
    before_ns_by_step: tuple[int, ...]
    after_ns_by_step: tuple[int, ...]

    @property
    def name(self) -> str:
        """The path as people say it: the root is called by its class."""
        return self.path or self.class_name or "(root)"

    @property
    def claimed(self) -> bool:
        """Whether it is slower or faster beyond the noise."""
        return self.verdict in ("slower", "faster")


@dataclass(frozen=True, slots=True)
class Comparison(Presented):
    """What changed between two reports.

    Attributes:
        whole: the whole backward.
        changes: its parts, the largest change first; their changes sum to the whole's.
        by: ``module``, or ``node`` where a side has no module labels.
        moves: the changes of paths by which modules moved.
        before: the first recording.
        after: the second.
        notes: what to know before trusting the numbers.
        schema: version of this form.
    """

    whole: Change
    changes: tuple[Change, ...]
    by: Literal["module", "node"]
    moves: tuple[Move, ...]
    before: Side
    after: Side
    notes: tuple[str, ...]
    schema: str = SCHEMA

    def __getitem__(self, path: str) -> Change:
        """The change of the module at ``path``, as it is called after, or before if it is gone.

        Raises:
            KeyError: where neither report has such a module.
            UsageError: where ``path`` is no text. A loop over the comparison itself ends here too:
                ``changes`` holds what changed.
        """
        if not isinstance(path, str):
            raise UsageError(
                f"comparison[{quoted(path)}]: give a module's path; comparison.changes has all"
            )
        found = [change for change in self.changes if change.path == path]
        if not found:
            raise KeyError(f"no module {path!r} in this comparison")
        return min(found, key=lambda change: change.verdict == "gone")

    def slower_than(self, percent: float) -> bool:
        """Whether the whole got slower beyond the noise, and by more than ``percent`` percent.

        Raises:
            UsageError: on what is no percentage of at least 0.
        """
        number = isinstance(percent, (int, float)) and not isinstance(percent, bool)
        if not number or not 0 <= percent < math.inf:
            raise UsageError(f"slower_than({quoted(percent)}): give a percentage of at least 0")
        whole = self.whole
        return whole.verdict == "slower" and (whole.percent is None or whole.percent > percent)

    # Not in Presented: IPython takes a class's own __repr__ before its base's method.
    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ANN401 - IPython's
        printer.text(str(self))

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the comparison; the suffix decides the form.

        ``.md``, ``.txt``, ``.csv`` and ``.json`` are known. The file appears whole or not at all.

        Raises:
            OutputExistsError: where the file exists and ``force`` is false.
            UsageError: on a suffix that names no form.
        """
        return presented.forms().write(self, path, force=force)
