"""Recorded steps that are no part of the typical step, because something held them up."""

from __future__ import annotations

from dataclasses import dataclass

from backspot.results.public import public

__all__ = ["Hiccup"]


@public
@dataclass(frozen=True, slots=True)
class Hiccup:
    """A recorded step that was held up, and is left out of the typical step.

    Attributes:
        step: Index of the step, from 0, as in ``wall_ns_by_step``.
        longer_ns: How much longer the step took than such steps do, or what held it up, in
            nanoseconds.
        where: Name of the module, row or phase that took at least half of that, or ``""``.
    """

    step: int
    longer_ns: int
    where: str
