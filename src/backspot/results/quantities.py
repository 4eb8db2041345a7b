"""The numbers that results can hold: others are refused where a saved result is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Nanoseconds, bytes or things; so few that NumPy and other programs can hold them."""
Measure: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1 << 63)]
"""Any other number that is never negative."""
Ratio: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
"""A part of a whole."""

HOST = -1
"""The index of the host among the devices."""

SELDOM: Mapping[str, Any] = MappingProxyType({"seldom": True})
"""Metadata of a field that few traces have something for: where it is empty, JSON leaves it out."""


class Ranking(NamedTuple):
    """What a part ranks rows by, where that is no time of the backward.

    Attributes:
        weight: what a row of a report weighs; -1 where that is not known.
        is_known: whether a report has it at all.
        needs: what else must be recorded, as a message names it.
        is_time: whether it is a time.
    """

    weight: Callable[[Any, Any], int]
    is_known: Callable[[Any], bool]
    needs: str
    is_time: bool


class Measured(NamedTuple):
    """What the remedy of a finding does on the machine that trains, as a part measured it.

    All times are nanoseconds of a step.

    Attributes:
        helps: whether a step takes less with it; ``None`` where that is not known.
        saves_ns: how much less at least; 0 unless it helps.
        low_ns: lower end of the interval of that.
        high_ns: upper end of it.
        refutes: whether it contradicts what a replay says that the remedy saves.
        way: which way of the remedy saves most, where it is not the first one; or ``""``.
        changes_training: whether something else is trained with it.
        of_plan: whether a plan has measured it, which says itself what to make first.
    """

    helps: bool | None
    saves_ns: int = 0
    low_ns: int = 0
    high_ns: int = 0
    refutes: bool = False
    way: str = ""
    changes_training: bool = False
    of_plan: bool = False


class OtherCost(NamedTuple):
    """What a finding costs, where that is no time.

    Attributes:
        amount: how much, to order such findings.
        said: the same, as people read it.
        share: what that is a share of in a report, as people read it: ``11% of the peak``.
    """

    amount: int
    said: str
    share: Callable[[Any], str]
