"""A module of a report together with the modules inside it, at any depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from backspot.formatting import counted, visible
from backspot.results import presented
from backspot.results.costs import Row
from backspot.results.grouping import parents_of
from backspot.results.public import public

__all__ = ["Subtree", "near_names", "subtree_of"]

_LONGEST_NAME = 200  # characters: the time to compare two names grows with the product of lengths


@public
@dataclass(frozen=True, slots=True)
class Subtree:
    """A module with the modules inside it, as ``report[path]`` returns it.

    ``print(subtree)`` shows it as a tree.

    Attributes:
        row: The module itself. Its ``total_*`` include the children.
        children: Modules directly inside, most total wall time first.

    Example:
        >>> block = report["blocks.0"]
        >>> block
        <Subtree of blocks.0 (Block): 20 modules inside>
        >>> [child.row.path for child in block.children[:3]]
        ['blocks.0.attn', 'blocks.0.mlp', 'blocks.0.norm2']
    """

    row: Row
    children: tuple[Subtree, ...]

    # A dataclass writes these methods recursively, and a model may be deeper than Python recurses.

    def __repr__(self) -> str:
        inside = sum(1 for _ in self._walk()) - 1
        return f"<Subtree of {visible(self.row.label)}: {counted(inside, 'module')} inside>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Subtree):
            return NotImplemented
        pairs = zip_longest(self._walk(), other._walk())
        return all(ours == theirs for ours, theirs in pairs)

    def __hash__(self) -> int:
        return hash((self.row, len(self.children)))

    def _walk(self) -> Iterator[tuple[int, Row]]:
        """Yield each row, parents first, with its number of levels below this one."""
        pending: list[tuple[int, Subtree]] = [(0, self)]
        while pending:
            depth, subtree = pending.pop()
            yield depth, subtree.row
            pending += [(depth + 1, child) for child in reversed(subtree.children)]

    def __str__(self) -> str:
        return presented.forms().as_text(self)


def subtree_of(row: Row, modules: Mapping[str, Row]) -> Subtree:
    """Return a row with the modules inside it, built without recursion.

    Raises:
        KeyError: If ``row`` is a module that ``modules`` lacks.
    """
    if not row.is_module:
        return Subtree(row, ())
    inside: dict[str, list[Subtree]] = defaultdict(list)
    # Inner modules first, so that the children of a module exist when the module is reached.
    for path, parent in reversed(parents_of(modules.values()).items()):
        children = sorted(
            inside.pop(path, ()), key=lambda child: (-child.row.total_wall_ns, child.row.path)
        )
        subtree = Subtree(modules[path], tuple(children))
        if path == row.path:
            return subtree
        if parent is not None:
            inside[parent].append(subtree)
    raise KeyError(row.path)


def near_names(path: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" for the names nearest to a path, or ``""`` if none is near."""
    import difflib

    if len(path) > _LONGEST_NAME:
        return ""
    likely = [name for name in known if len(name) <= _LONGEST_NAME]
    near = difflib.get_close_matches(path, likely, n=3, cutoff=0.5)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""
