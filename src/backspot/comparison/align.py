"""Which module of one report is which of another: by path, and where a path moved, by its likes.

A move is a change within paths: ``blocks`` became ``layers``, everything became ``module.…``, every
``qkv`` became ``to_qkv``. Each pair of a path that is gone and one that is new, of the same class
and with the same autograd nodes, votes for the change that would explain it; so a subtree, or a
layer that repeats, is one move with many votes. A move holds where no other with as many votes
claims one of its paths: twins stay gone and new.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from backspot.comparison.changes import Move
from backspot.results.costs import Row
from backspot.results.grouping import name_order

__all__ = ["aligned", "moves_between"]

_Path = tuple[str, ...]
_Likeness = tuple[str, frozenset[str]]

_MANY_PAIRS = 20_000


def aligned(
    before: Mapping[str, Row], after: Mapping[str, Row]
) -> tuple[list[tuple[str | None, str | None]], tuple[Move, ...]]:
    """Pairs of paths, ``None`` where a module is gone or new, and the moves that were found."""
    moves, moved = moves_between(before, after)
    arrived = {new: old for old, new in moved.items()}
    pairs: list[tuple[str | None, str | None]] = []
    for path in before:
        here = path in after and path not in arrived
        pairs.append((path, moved.get(path, path if here else None)))
    pairs += [
        (None, path)
        for path in after
        if path not in arrived and (path not in before or path in moved)
    ]
    return pairs, moves


def moves_between(
    before: Mapping[str, Row], after: Mapping[str, Row]
) -> tuple[tuple[Move, ...], dict[str, str]]:
    """The moves, and each moved path's new one."""
    gone = {path for path in before if path not in after}
    new = {path for path in after if path not in before}
    # A root of another class was wrapped, or unwrapped: it may stand elsewhere now.
    if "" in before and "" in after and before[""].class_name != after[""].class_name:
        gone.add("")
        new.add("")
    votes = _votes({path: before[path] for path in gone}, {path: after[path] for path in new})
    claims: dict[tuple[int, str], list[int]] = defaultdict(list)
    for found in votes.values():
        for side, path in ((side, vote.paths[side]) for vote in found for side in (0, 1)):
            claims[side, path].append(len(found))
    moves: list[Move] = []
    moved: dict[str, str] = {}
    ordered = sorted((name_order(path), path) for path in gone)
    free = set(new)
    for (old, fresh), found in sorted(votes.items(), key=lambda item: (-len(item[1]), item[0])):
        rivals = (
            sum(claim >= len(found) for claim in claims[side, vote.paths[side]])
            for vote in found
            for side in (0, 1)
        )
        if any(rival > 1 for rival in rivals):
            continue
        places = {vote.place for vote in found}
        with_it: dict[str, str] = {}
        if len(found) == 1:  # one likeness proves nothing of what else is there
            with_it = dict(vote.paths for vote in found)
        else:
            for place in sorted(places):
                rest = (
                    path
                    for path in _inside((*place, *old), ordered)
                    if path not in moved and path not in with_it
                )
                more = _followers((*place, *old), (*place, *fresh), rest, free, before, after)
                with_it |= more
                free.difference_update(more.values())
        moved |= with_it
        free.difference_update(with_it.values())
        at = places.pop() if len(places) == 1 else ("*",)
        moves.append(Move(".".join((*at, *old)), ".".join((*at, *fresh)), len(with_it)))
    return tuple(moves), moved


@dataclass(frozen=True, slots=True)
class _Vote:
    paths: tuple[str, str]
    place: _Path  # what the two paths begin with alike


def _votes(
    gone: Mapping[str, Row], new: Mapping[str, Row]
) -> dict[tuple[_Path, _Path], list[_Vote]]:
    old_likes, likes = _by_likeness(gone), _by_likeness(new)
    by_number: dict[tuple[_Likeness, _Path], list[str]] = defaultdict(list)
    for like, paths in likes.items():
        for path in paths:
            by_number[like, _numbers(path)].append(path)
    votes: dict[tuple[_Path, _Path], list[_Vote]] = defaultdict(list)
    for path, row in gone.items():
        if not row.nodes:  # nothing but a class in common is no likeness
            continue
        like = _likeness(row)
        # Of layers that repeat by the hundred, those of the same number are enough to tell.
        many = len(old_likes[like]) * len(likes.get(like, ())) > _MANY_PAIRS
        others = by_number.get((like, _numbers(path)), ()) if many else likes.get(like, ())
        for other in others:
            if other != path:
                place, change = _change(_parts(path), _parts(other))
                votes[change].append(_Vote((path, other), place))
    return votes


def _by_likeness(rows: Mapping[str, Row]) -> dict[_Likeness, list[str]]:
    likes: dict[_Likeness, list[str]] = defaultdict(list)
    for path, row in rows.items():
        likes[_likeness(row)].append(path)
    return likes


def _numbers(path: str) -> _Path:
    return tuple(part for part in _parts(path) if part.isdecimal())


def _likeness(row: Row) -> _Likeness:
    return row.class_name, frozenset(node.name for node in row.nodes)


def _change(old: _Path, new: _Path) -> tuple[_Path, tuple[_Path, _Path]]:
    """The beginning that two paths share, and what is left without it and the shared end."""
    end = 0
    while end < min(len(old), len(new)) and old[-1 - end] == new[-1 - end]:
        end += 1
    old, new = old[: len(old) - end], new[: len(new) - end]
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    return old[:start], (old[start:], new[start:])


def _followers(
    old: _Path,
    new: _Path,
    gone: Iterable[str],
    fresh: Set[str],
    before: Mapping[str, Row],
    after: Mapping[str, Row],
) -> dict[str, str]:
    """The paths that a move takes along: under its prefix on both sides, and of the same class."""
    found = {}
    for path in gone:
        parts = _parts(path)
        to = ".".join((*new, *parts[len(old) :]))
        if (
            parts[: len(old)] == old
            and to in fresh
            and before[path].class_name == after[to].class_name
        ):
            found[path] = to
    return found


def _inside(outer: _Path, ordered: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The paths at and below one, of those in the order of their names."""
    key = name_order(".".join(outer))
    for index in range(bisect_left(ordered, (key,)), len(ordered)):
        other, path = ordered[index]
        if outer and other != key and not other.startswith(f"{key}\0"):
            break
        yield path


def _parts(path: str) -> _Path:
    return tuple(path.split(".")) if path else ()
