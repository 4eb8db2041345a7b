"""A module of a report with all that is inside it, however deep that goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from backspot.formatting import counted
from backspot.results import presented
from backspot.results.costs import Row
from backspot.results.grouping import parents_of

__all__ = ["Subtree", "near_names", "subtree_of"]

_WRITTEN = 200  # characters: comparing two names takes time by the product of their lengths


@dataclass(frozen=True, slots=True)
class Subtree:
    """A module with all that is inside it, as ``report[path]`` gives it.

    Attributes:
        row: the module itself; its ``total_*`` include the children.
        children: the modules directly inside, most expensive (in total wall time) first.
    """

    row: Row
    children: tuple[Subtree, ...]

    # What a dataclass would write for these calls itself once a level, and models are deep.

    def __repr__(self) -> str:
        inside = sum(1 for _ in self._walked()) - 1
        return f"<Subtree of {self.row.label}: {counted(inside, 'module')} inside>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Subtree):
            return NotImplemented
        pairs = zip_longest(self._walked(), other._walked())
        return all(ours == theirs for ours, theirs in pairs)

    def __hash__(self) -> int:
        return hash((self.row, len(self.children)))

    def _walked(self) -> Iterator[tuple[int, Row]]:
        """Each row with how deep it lies below this one, in the order of the tree."""
        left: list[tuple[int, Subtree]] = [(0, self)]
        while left:
            depth, one = left.pop()
            yield depth, one.row
            left += [(depth + 1, child) for child in reversed(one.children)]

    def __str__(self) -> str:
        return presented.forms().as_text(self)


def subtree_of(row: Row, modules: Mapping[str, Row]) -> Subtree:
    """A row with the modules inside it; a model may be deeper than Python calls itself."""
    if not row.is_module:
        return Subtree(row, ())
    within: dict[str, list[Subtree]] = defaultdict(list)
    # Those inside come before those around, so that a module finds its children made.
    for path, parent in reversed(parents_of(modules.values()).items()):
        children = sorted(
            within.pop(path, ()), key=lambda one: (-one.row.total_wall_ns, one.row.path)
        )
        made = Subtree(modules[path], tuple(children))
        if path == row.path:
            return made
        if parent is not None:
            within[parent].append(made)
    raise KeyError(row.path)


def near_names(path: str, known: Iterable[str]) -> str:
    """What somebody may have meant; of names that nobody writes by hand, nothing."""
    import difflib

    likely = [name for name in known if len(name) <= _WRITTEN]
    near = difflib.get_close_matches(path, likely, n=3, cutoff=0.5) if len(path) <= _WRITTEN else ()
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""
