"""How findings put times and counts into words: per step, whatever number of steps was recorded."""

from __future__ import annotations

from dataclasses import dataclass

from backspot.formatting import counted, duration, percent
from backspot.trace.events import Ints

__all__ = ["Wording"]


@dataclass(frozen=True, slots=True)
class Wording:
    """Texts for the sentences of findings.

    Attributes:
        steps: how many steps were recorded.
        step_ns: the clock time of a typical one.
    """

    steps: int
    step_ns: int

    def ms(self, ns: float) -> str:
        """Return a time of a typical step: ``5.2 ms``."""
        return duration(ns)

    def share(self, ns: float) -> str:
        """Return a time as a share of the typical step: ``4.2%``."""
        return percent(ns / self.step_ns) if self.step_ns else "0%"

    def per_step(self, count: int, thing: str, things: str = "") -> str:
        """Return a count over all steps: ``12 kernels per step``, ``1 wait in 5 steps``.

        Args:
            count: how many.
            thing: the noun in the singular.
            things: the noun in the plural, where that is not ``thing`` and an ``s``.
        """
        if self.steps == 1 or count % self.steps == 0:
            return counted(count // self.steps, thing, things) + " per step"
        if count < self.steps:
            return f"{counted(count, thing, things)} in {self.steps:,} steps"
        return f"{count / self.steps:,.1f} {things or thing + 's'} per step"

    def in_steps(self, count: int) -> str:
        """Return in how many of the steps something is so: ``in 9 of 10 steps``."""
        if count == self.steps:
            return "in every recorded step"
        return f"in {count:,} of {self.steps:,} steps"

    def copies(self, size: Ints) -> str:
        """Return the number and the volume of copies: ``2 copies per step of 77 MB together``.

        Args:
            size: the bytes of each copy; below 0 where the trace does not say.
        """
        number = self.per_step(len(size), "copy", "copies")
        moved = int(size[size > 0].sum()) / self.steps
        if not moved:
            return number
        together = " together" if len(size) > self.steps else ""
        return f"{number} of {moved / 1e6:,.{0 if moved >= 1e7 else 1}f} MB{together}"
