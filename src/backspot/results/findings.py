"""What makes a step slow, where, what to do about it, and what a step would save.

All times are integer nanoseconds of a typical step. Savings are those of a typical step without the
profiler's cost, as a replay of the recording predicts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from backspot.formatting import duration, labelled, size, visible
from backspot.presented import public
from backspot.results.quantities import Count
from backspot.results.trials import Tried


@public
@dataclass(frozen=True, slots=True)
class Saving:
    """How much less a typical step would take without some work, in nanoseconds.

    The range is the error of such predictions: see ``docs/evidence.md``.

    Attributes:
        ns: The saving. Work that other work hides saves nothing.
        low_ns: Lower end of the range.
        high_ns: Upper end of the range.
    """

    ns: Count
    low_ns: Count
    high_ns: Count


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
    """What a typical step would take if some modules were faster, in nanoseconds.

    Attributes:
        step_ns: The step, without the profiler's cost.
        saves_ns: How much less that is.
        low_ns: Lower end of the range of ``saves_ns``.
        high_ns: Upper end of the range of ``saves_ns``.

    Example:
        >>> print(report.what_if({"patch_drop": 0.5}))
        A step would take 24.7 ms: 1.9 ms less (0.43 ms to 3.4 ms), by a replay without the profiler
    """

    step_ns: int
    saves_ns: int
    low_ns: int
    high_ns: int

    def __str__(self) -> str:
        """Return one sentence."""
        saves = f"{duration(self.saves_ns)} less" if self.saves_ns > 0 else "hardly less"
        least, most = (duration(max(ns, 0)) for ns in (self.low_ns, self.high_ns))
        return (
            f"A step would take {duration(self.step_ns)}: {saves} ({least} to {most}), by a replay "
            "without the profiler"
        )


class Predictor(Protocol):
    """A recording that can be replayed again and again."""

    def what_if(self, factors: Mapping[str, float]) -> WhatIf:
        """Return the step if the backward of these modules, by path, takes so much of its time."""


@public
@dataclass(frozen=True, slots=True)
class Place:
    """A place of a finding: a module, time that no module owns, or a phase of the step.

    Attributes:
        path: Path of a row; a phase, ``(optimizer)`` or ``(data)``; or ``(allocator)``.
        class_name: Class of the module, or ``""``.
        count: Number of nodes, kernels or calls there.
        wall_ns: Clock time there, in nanoseconds of a typical step.
        line: ``file:line`` of the forward, or ``""``.
        held_bytes: What it has in memory there; ``None`` unless the finding is about memory.
    """

    path: str
    class_name: str
    count: Count
    wall_ns: Count
    line: str = ""
    held_bytes: Count | None = None

    @property
    def label(self) -> str:
        """Path and class, as the labels in a trace have them."""
        return labelled(self.path or self.class_name or "(root)", self.class_name)


@public
@dataclass(frozen=True, slots=True)
class Finding:
    """A cause that makes the step slower than necessary, and what to do about it.

    Attributes:
        rule: Name of its section in ``docs/findings.md``.
        title: What is wrong, in a few words.
        seen: What was seen, with counts and times.
        remedy: What to do.
        wall_ns: Clock time in nanoseconds of a typical step, the sum over its places. The remedy
            cannot save more.
        places: Where, most wall time first. Never empty.
        steps: Number of recorded steps in which it takes at least 1% of the step.
        nodes: Autograd nodes involved, most expensive first.
        operators: Operators involved (``aten::…``), most expensive first.
        kernels: Kernels and copies involved, most expensive first.
        link: URL with more, or ``""``.
        saves: How much less a step would take if the work of the cause were free, by replay, at
            most ``wall_ns``; ``None`` where that is not known.
        held_bytes: What the cause has in memory; ``None`` if the finding is about time. About
            memory, ``wall_ns`` is 0.
        tried: What a trial of the remedy measured on the machine that trains; ``None`` where no
            trial was made.

    Example:
        >>> finding = report.findings[1]
        >>> finding.rule, finding.path
        ('sorted-indexing', 'patch_drop')
        >>> print(finding.title)
        Indexing backward sorts its indices
    """

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
    held_bytes: Count | None = None
    tried: Tried | None = None

    def __repr__(self) -> str:
        where = f" in {visible(self.places[0].label)}" if self.places else ""
        cost = f"{self.wall_ns / 1e6:.3f} ms" if self.held_bytes is None else size(self.held_bytes)
        return f"<Finding {self.rule}{where}: {cost}>"

    @property
    def path(self) -> str:
        """Path of the place that takes most of the time."""
        return self.places[0].path
