"""Things that can have several owners: the shares of each, which sum to the whole exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from backspot.analysis.timeline import NOTHING, numbered, take
from backspot.trace.events import Ints, Mask

_Floats = NDArray[np.float64]
_WHOLE = 1 << 16  # so fine that rounding is invisible, and no product exceeds 64 bits


class Shares(msgspec.Struct, frozen=True):
    """Who pays for things that can have several owners: the shares of one thing lie side by side.

    Attributes:
        first: for each thing the index of its first share; one more entry at the end.
        owner: the owner of each share; of one thing, the largest share comes first.
        weight: the shares of one thing sum to 65,536.
        again: whether a share is forward work that the backward repeats.
        line: the source line of each share, an index into ``Ownership.lines``; ``NOTHING`` where it
            is not known.
    """

    first: Ints
    owner: Ints
    weight: Ints
    again: Mask
    line: Ints

    @property
    def count(self) -> Ints:
        """How many shares each thing has."""
        return np.diff(self.first)

    @property
    def largest(self) -> Ints:
        """The owner of each thing's largest share."""
        largest_owners: Ints = self.owner[self.first[:-1]]
        return largest_owners

    @property
    def is_split(self) -> Mask:
        """Whether each thing has several owners."""
        count = self.count
        differs = self.owner != np.repeat(self.largest, count)
        split = np.zeros(len(count), bool)
        split[np.repeat(np.arange(len(count)), count)[differs]] = True
        return split

    @property
    def fraction(self) -> _Floats:
        """Which part of its thing each share is: 0 to 1."""
        return self.weight / _WHOLE

    @staticmethod
    def part(weight: int) -> float:
        """Return which part of its thing a share of this weight is: 0 to 1."""
        return weight / _WHOLE

    @classmethod
    def one_each(cls, owner: Ints, line: Ints) -> Shares:
        """Return the shares of things that have one owner and one line each."""
        count = len(owner)
        return cls(np.arange(count + 1), owner, np.full(count, _WHOLE), np.zeros(count, bool), line)

    @classmethod
    def joined(cls, tables: Sequence[Shares]) -> Shares:
        """Return the shares of all things of all parts, one part after the other."""
        before = np.cumsum([0, *(len(table.owner) for table in tables)])
        first = [table.first[:-1] + lead for table, lead in zip(tables, before[:-1], strict=True)]
        return cls(
            np.concatenate([*first, before[-1:]]),
            *(
                np.concatenate([getattr(table, name) for table in tables])
                for name in ("owner", "weight", "again", "line")
            ),
        )

    def where(self, keep: Mask) -> Shares:
        """Return the shares of those things for which ``keep`` is true."""
        of_kept = np.repeat(keep, self.count)
        first = np.append(0, np.cumsum(self.count[keep]))
        return Shares(
            first,
            self.owner[of_kept],
            self.weight[of_kept],
            self.again[of_kept],
            self.line[of_kept],
        )

    def over(
        self, which: Ints, owner: Ints, line: Ints, *, owner_offset: int, line_offset: int
    ) -> Shares:
        """Return the shares of other things, each of which is one of these things or none.

        Args:
            which: for each of the other things the one of these that it is, ``NOTHING`` for none.
            owner: the one owner of those that are none, and of shares without an owner.
            line: the source line of those that are none.
            owner_offset: what to add to the owners of these things.
            line_offset: what to add to their lines.
        """
        is_known = which >= 0
        first = np.append(0, np.cumsum(np.where(is_known, take(self.count, which), 1)))
        place = np.repeat(np.arange(len(which)), np.diff(first))
        is_owned = is_known[place]
        share = (take(self.first, which)[place] + np.arange(len(place)) - first[place])[is_owned]
        every_owner, every_line = owner[place], line[place]
        weight, again = np.full(len(place), _WHOLE), np.zeros(len(place), bool)
        owned = self.owner[share]
        every_owner[is_owned] = np.where(owned >= 0, owned + owner_offset, every_owner[is_owned])
        every_line[is_owned] = np.where(
            self.line[share] >= 0, self.line[share] + line_offset, NOTHING
        )
        weight[is_owned], again[is_owned] = self.weight[share], self.again[share]
        return Shares(first, every_owner, weight, again, every_line)

    def mean(self, factor: _Floats) -> _Floats:
        """Return the mean of a value of the owners of each thing, by their shares."""
        if self._are_whole:
            return factor[self.owner]
        means: _Floats = np.add.reduceat(factor[self.owner] * self.fraction, self.first[:-1])
        return means

    def parts(self, share: Ints) -> tuple[Ints, _Floats]:
        """Return the things that have these shares, and how much of each thing these are.

        Args:
            share: indices of shares, ascending.
        """
        if self._are_whole:
            return share, np.ones(len(share))
        item = np.searchsorted(self.first, share, side="right") - 1
        items, item_of = numbered(item)
        fractions = np.bincount(item_of, self.weight[share] / _WHOLE, minlength=len(items))
        return items, fractions.astype(np.float64)

    @property
    def _are_whole(self) -> bool:
        """Whether each thing has one share, as in nearly all traces."""
        return len(self.owner) == len(self.first) - 1

    def split(self, items: Ints, amount: Ints) -> tuple[Ints, Ints, Ints]:
        """Split an amount of each of some things; the parts sum to the amount exactly.

        Args:
            items: indices of things; one may come several times.
            amount: an amount of each.

        Returns:
            For each part: its position in ``items``, its share, and its amount.
        """
        if self._are_whole:
            return np.arange(len(items)), items, amount
        count = self.count[items]
        place = np.repeat(np.arange(len(items)), count)
        within = np.arange(len(place)) - np.repeat(np.cumsum(count) - count, count)
        share = self.first[items][place] + within
        before = np.append(0, np.cumsum(self.weight))
        begin = before[share] - before[self.first[items]][place]
        amounts = amount[place]
        portions = amounts * (begin + self.weight[share]) // _WHOLE - amounts * begin // _WHOLE
        return place, share, portions


class Share(NamedTuple):
    """One share of one thing, as ``Shares`` has it in columns."""

    owner: int
    weight: int
    again: bool = False
    line: int = NOTHING


def shares_of(items: Sequence[Sequence[Share]]) -> Shares:
    """Return the shares of some things as columns, with weights that sum up as ``Shares`` says."""
    rows = [share for shares in items for share in _scaled(shares)]
    owner, weight, again, line = np.array(rows, np.int64).reshape(-1, len(Share._fields)).T
    first = np.append(0, np.cumsum([len(shares) for shares in items])).astype(np.int64)
    return Shares(first, owner, weight, again.astype(bool), line)


def _scaled(shares: Sequence[Share]) -> Iterator[Share]:
    """Yield the shares with weights of the right sum; equal ones if none has a weight."""
    total = sum(share.weight for share in shares)
    weight_so_far = before = 0
    for number, share in enumerate(shares, 1):
        weight_so_far += share.weight
        up_to = _WHOLE * weight_so_far // total if total else _WHOLE * number // len(shares)
        yield share._replace(weight=up_to - before)
        before = up_to
