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


@public
@dataclass(frozen=True, slots=True)
class Saving:
    """How much less time a typical step would take without some work.

    All times are integer nanoseconds. The range is the error of such predictions: see
    ``docs/evidence.md``.

    Attributes:
        ns: How much less time the step would take. Work that other work hides saves nothing.
        low_ns: Lower end of the range.
        high_ns: Upper end of the range.
    """

    ns: Count
    low_ns: Count
    high_ns: Count


@public
@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """How long a typical step takes without the profiler's cost, as the replay predicts it.

    All times are integer nanoseconds.

    Attributes:
        ns: The typical step.
        low_ns: The typical step at the highest likely cost of the profiler.
        high_ns: The typical step at the lowest likely cost of the profiler.
        fitted: Whether the profiler's cost was fitted to steps that were timed without the
            profiler. If not, the cost was measured on another machine, and the range is wider.
    """

    ns: Count
    low_ns: Count
    high_ns: Count
    fitted: bool


@public
@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a typical step would take if some modules were faster, as ``Report.what_if`` returns it.

    All times are integer nanoseconds.

    Attributes:
        step_ns: What the step would take, without the profiler's cost.
        saves_ns: How much less time the step would take.
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
        path: Path of the module, as in its row; a name in parentheses for time that no module owns;
            or a phase of the step, ``(optimizer)`` or ``(data)``; or ``(allocator)`` for memory
            that no module has.
        class_name: Class of the module, ``""`` if the place is not a module.
        count: Number of occurrences in a typical step. The finding says of what: nodes, kernels or
            calls.
        wall_ns: Clock time that it takes there, in nanoseconds of a typical step.
        line: Line of forward source code, ``file:line``, or ``""`` if it is not known.
        held_bytes: What it has in memory there, ``None`` if the finding is not about memory.
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
        rule: The rule that found the cause: the name of its section in ``docs/findings.md``.
        title: What is wrong, in a few words.
        seen: What was seen, with counts and times: one or two sentences.
        remedy: What to do: one or two sentences.
        wall_ns: Clock time that the cause takes, in nanoseconds of a typical step, and the sum over
            its places, at most the whole step. The remedy cannot save more than this.
        places: Where it happens, most wall time first. Never empty.
        steps: Number of recorded steps in which the cause takes at least 1% of the step.
        nodes: Names of the autograd nodes involved, most expensive first.
        operators: Names of the operators involved (``aten::…``), most expensive first.
        kernels: Names of the kernels and copies involved, most expensive first.
        link: URL with more about the remedy, or ``""``.
        saves: How much less time a step would take if the work of the cause were free: its nodes
            with the device work that they launch, its device work alone, or its waits, as the
            section of the rule says; at most ``wall_ns``. ``None`` where that is not known.
        held_bytes: What the cause has in memory, ``None`` if the finding is about time. A finding
            about memory has no ``wall_ns``.

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

    def __repr__(self) -> str:
        where = f" in {visible(self.places[0].label)}" if self.places else ""
        cost = f"{self.wall_ns / 1e6:.3f} ms" if self.held_bytes is None else size(self.held_bytes)
        return f"<Finding {self.rule}{where}: {cost}>"

    @property
    def path(self) -> str:
        """Path of the place that takes most of the time."""
        return self.places[0].path
