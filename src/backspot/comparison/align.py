"""Match the modules of two reports: by path, and by class and nodes if the path changed.

A move is one change within paths: ``blocks`` became ``layers``, every path got the prefix
``module.``, every ``qkv`` became ``to_qkv``. Consider each pair of a path that is gone and a path
that is new, with the same class and the same autograd nodes. The pair votes for the change that
turns one path into the other. A renamed subtree, or a repeated layer, is therefore one move with
many votes. A move is accepted unless another move with as many votes claims one of its paths: if
two modules cannot be told apart, they stay gone and new.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from backspot.results.comparison import Move
from backspot.results.costs import Row
from backspot.results.grouping import name_order

_Path = tuple[str, ...]
_Likeness = tuple[str, frozenset[str]]

_MANY_PAIRS = 20_000


def aligned(
    before: Mapping[str, Row], after: Mapping[str, Row]
) -> tuple[list[tuple[str | None, str | None]], tuple[Move, ...]]:
    """Return pairs of paths, with ``None`` if a module is gone or new, and the moves found."""
    moves, moved = moves_between(before, after)
    arrived = {new: old for old, new in moved.items()}
    pairs: list[tuple[str | None, str | None]] = []
    for path in before:
        stayed = path in after and path not in arrived
        pairs.append((path, moved.get(path, path if stayed else None)))
    pairs += [
        (None, path)
        for path in after
        if path not in arrived and (path not in before or path in moved)
    ]
    return pairs, moves


def moves_between(
    before: Mapping[str, Row], after: Mapping[str, Row]
) -> tuple[tuple[Move, ...], dict[str, str]]:
    """Return the moves, and the new path of each moved path."""
    gone = {path for path in before if path not in after}
    new = {path for path in after if path not in before}
    # A root of another class was wrapped or unwrapped, so the old root may have another path now.
    if "" in before and "" in after and before[""].class_name != after[""].class_name:
        gone.add("")
        new.add("")
    votes = _votes({path: before[path] for path in gone}, {path: after[path] for path in new})
    # For each path, on each side, the votes of every change that claims it.
    claims: dict[tuple[int, str], list[int]] = defaultdict(list)
    for ballots in votes.values():
        for ballot in ballots:
            for side, path in enumerate(ballot.paths):
                claims[side, path].append(len(ballots))
    moves: list[Move] = []
    moved: dict[str, str] = {}
    ordered = sorted((name_order(path), path) for path in gone)
    free = set(new)
    for (old, fresh), ballots in sorted(votes.items(), key=lambda item: (-len(item[1]), item[0])):
        if any(
            sum(claim >= len(ballots) for claim in claims[side, path]) > 1
            for ballot in ballots
            for side, path in enumerate(ballot.paths)
        ):
            continue
        prefixes = {ballot.prefix for ballot in ballots}
        taken_paths: dict[str, str] = {}
        if len(ballots) == 1:  # a single pair is no evidence about the modules around it
            taken_paths = dict(ballot.paths for ballot in ballots)
        else:
            for prefix in sorted(prefixes):
                rest = (
                    path
                    for path in _inside((*prefix, *old), ordered)
                    if path not in moved and path not in taken_paths
                )
                more = _followers((*prefix, *old), (*prefix, *fresh), rest, free, before, after)
                taken_paths |= more
                free.difference_update(more.values())
        moved |= taken_paths
        free.difference_update(taken_paths.values())
        prefix = prefixes.pop() if len(prefixes) == 1 else ("*",)
        moves.append(Move(".".join((*prefix, *old)), ".".join((*prefix, *fresh)), len(taken_paths)))
    return tuple(moves), moved


@dataclass(frozen=True, slots=True)
class _Vote:
    """The old and the new path of a module, and the names with which both begin."""

    paths: tuple[str, str]
    prefix: _Path


def _votes(
    gone: Mapping[str, Row], new: Mapping[str, Row]
) -> dict[tuple[_Path, _Path], list[_Vote]]:
    """Return the votes for each change of names, by the old and the new names."""
    old_likes, likes = _by_likeness(gone), _by_likeness(new)
    by_number: dict[tuple[_Likeness, _Path], list[str]] = defaultdict(list)
    for like, paths in likes.items():
        for path in paths:
            by_number[like, _numbers(path)].append(path)
    votes: dict[tuple[_Path, _Path], list[_Vote]] = defaultdict(list)
    for path, row in gone.items():
        if not row.nodes:  # an equal class without nodes proves nothing
            continue
        like = _likeness(row)
        # Layers that repeat by the hundred are compared only with those of the same number.
        many = len(old_likes[like]) * len(likes.get(like, ())) > _MANY_PAIRS
        others = by_number.get((like, _numbers(path)), ()) if many else likes.get(like, ())
        for other in others:
            if other != path:
                prefix, change = _change(_names(path), _names(other))
                votes[change].append(_Vote((path, other), prefix))
    return votes


def _by_likeness(rows: Mapping[str, Row]) -> dict[_Likeness, list[str]]:
    likes: dict[_Likeness, list[str]] = defaultdict(list)
    for path, row in rows.items():
        likes[_likeness(row)].append(path)
    return likes


def _numbers(path: str) -> _Path:
    return tuple(name for name in _names(path) if name.isdecimal())


def _likeness(row: Row) -> _Likeness:
    return row.class_name, frozenset(node.name for node in row.nodes)


def _change(old: _Path, new: _Path) -> tuple[_Path, tuple[_Path, _Path]]:
    """Return the names with which both paths begin, and what is left without the common end."""
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
    free: Set[str],
    before: Mapping[str, Row],
    after: Mapping[str, Row],
) -> dict[str, str]:
    """Return the paths that a move takes along: below ``old`` and ``new``, of the same class."""
    followed = {}
    for path in gone:
        names = _names(path)
        to = ".".join((*new, *names[len(old) :]))
        if (
            names[: len(old)] == old
            and to in free
            and before[path].class_name == after[to].class_name
        ):
            followed[path] = to
    return followed


def _inside(outer: _Path, ordered: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the paths at and below ``outer``, of those sorted by ``name_order``."""
    key = name_order(".".join(outer))
    for index in range(bisect_left(ordered, (key,)), len(ordered)):
        other, path = ordered[index]
        if outer and other != key and not other.startswith(f"{key}\0"):
            break
        yield path


def _names(path: str) -> _Path:
    return tuple(path.split(".")) if path else ()
