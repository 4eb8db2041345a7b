"""Sums of rows by depth, class or pattern, and modules chosen by their paths."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import zip_longest
from operator import add, attrgetter
from typing import Any, Protocol, TypeVar

from backspot import presented
from backspot.errors import UsageError
from backspot.formatting import counted, labelled, quoted, visible
from backspot.presented import public
from backspot.results.costs import (
    KernelCost,
    LineCost,
    NodeCost,
    Row,
    WallKinds,
)
from backspot.results.findings import Saving

_COSTS = ("wall_ns", "gpu_ns", "cpu_ns", "forward_ns", "recompute_ns")
_TOTALS = tuple(f"total_{cost}" for cost in _COSTS)
_BY_STEP = tuple(f"{cost}_by_step" for cost in _COSTS[:4])
_OF_PARTS = {
    field.name: field.metadata["summed"] for field in fields(Row) if "summed" in field.metadata
}
"""What sums each field of a part over the rows that become one."""


def fold(
    rows: Sequence[Row], depth: int | None, matches: Callable[[str], bool] | None = None
) -> tuple[Row, ...]:
    """Fold every row that is too deep, or does not match, into the nearest row that is kept.

    The root, at level 0, is always kept. Only modules that were called make a level: the forward of
    a ``ModuleList`` never runs, so its modules are at the level that it has itself. ``None`` keeps
    every level, and every path.

    Savings do not add up. A row that takes in all modules inside it saves its total, a row that
    takes in none saves what it did, and what any other row saves is not known.
    """
    by_path = {row.path: row for row in rows if row.is_module}
    levels: dict[str, int] = {}
    target: dict[str, str] = {}
    parents = parents_of(by_path.values())
    for path, parent in parents.items():
        root = by_path[path].root
        if path == root:
            levels[path] = 0
        elif parent is None:
            levels[path] = 1
        else:
            levels[path] = levels[parent] + (parent == root or by_path[parent].calls > 0)
        too_deep = depth is not None and levels[path] > depth
        if path == root or not (too_deep or (matches is not None and not matches(path))):
            target[path] = path
        else:
            target[path] = root if parent is None else target[parent]
    inside = _counts_inside(parents)
    groups: dict[str, list[Row]] = defaultdict(list)
    others: list[Row] = []
    for row in rows:
        if row.is_module:
            groups[target[row.path]].append(row)
        else:
            others.append(row)
    folded = [
        _merge(
            members,
            path=path,
            class_name=by_path[path].class_name if path in by_path else "",
            calls=by_path[path].calls if path in by_path else max(row.calls for row in members),
            members=1,
            saves=_saves(by_path.get(path), len(members), inside.get(path, 0)),
            total_saves=by_path[path].total_saves if path in by_path else None,
            kept=by_path.get(path),
            has_all=len(members) == inside.get(path, 0),
        )
        for path, members in groups.items()
    ]
    return (*folded, *others)


def group(
    rows: Sequence[Row],
    name_of: Callable[[Row], str],
    saves: Mapping[str, Saving] | None = None,
) -> tuple[Row, ...]:
    """Sum modules of the same class and the same ``name_of``; leave other rows unchanged.

    Savings do not add up: ``saves`` has those of groups, by their labels.
    """
    groups: dict[tuple[bool, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        name = name_of(row) if row.is_module else row.path
        groups[row.is_module, row.class_name, name].append(row)
    return tuple(
        members[0]
        if len(members) == 1 and members[0].path == name
        else _merge(
            members,
            path=name,
            class_name=class_name,
            calls=sum(row.calls for row in members),
            members=len(members),
            saves=(saves or {}).get(labelled(name, class_name)),
        )
        for (_, class_name, name), members in groups.items()
    )


def repeated_layers(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Return the modules of one class whose paths differ by numbers alone, by pattern and class."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.is_module:
            groups[numberless(row.path), row.class_name].append(row)
    return {key: members for key, members in groups.items() if len(members) > 1}


def pattern_of(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return a function that names a row by its pattern, or by its path if the pattern is unique.

    The modules of a ``Sequential`` have numbers too: only layers of one class share a pattern.
    """
    repeated = repeated_layers(rows)

    def name(row: Row) -> str:
        pattern = numberless(row.path)
        return pattern if (pattern, row.class_name) in repeated else row.path

    return name


@lru_cache(maxsize=1 << 16)
def numberless(path: str) -> str:
    """Return a path with ``*`` in place of each number, as repeated layers have them."""
    return ".".join("*" if name_part.isdecimal() else name_part for name_part in path.split("."))


def _counts_inside(parents: dict[str, str | None]) -> dict[str, int]:
    """Return how many modules each module consists of, with itself, at all depths."""
    counts = dict.fromkeys(parents, 1)
    for path, parent in reversed(parents.items()):
        if parent is not None:
            counts[parent] += counts[path]
    return counts


def _saves(row: Row | None, members: int, inside: int) -> Saving | None:
    """Return what a row saves that takes in so many of the modules inside it, with itself."""
    if row is None:
        return None
    return row.saves if members == 1 else row.total_saves if members == inside else None


def _merge(
    rows: Sequence[Row],
    *,
    path: str,
    class_name: str,
    calls: float,
    members: int,
    saves: Saving | None = None,
    total_saves: Saving | None = None,
    kept: Row | None = None,
    has_all: bool = False,
) -> Row:
    """Return one row that takes in others.

    Args:
        kept: the module that stays, if the others are inside it.
        has_all: whether these are all modules inside it.
    """
    # A total includes the modules inside, so only the outermost rows of the group are added.
    parents = parents_of(rows)
    outer = [row for row in rows if parents[row.path] is None]
    sums: dict[str, Any] = {cost: sum(map(attrgetter(cost), rows)) for cost in _COSTS}
    sums |= {cost: sum(map(attrgetter(cost), outer)) for cost in _TOTALS}
    sums |= {cost: _by_step(map(attrgetter(cost), rows)) for cost in _BY_STEP}
    sums |= {name: summed(rows, outer, kept, has_all) for name, summed in _OF_PARTS.items()}
    return replace(
        rows[0],
        **sums,
        path=path,
        class_name=class_name,
        calls=calls,
        members=members,
        split_ns=sum(row.split_ns for row in rows),
        nodes=ranked_nodes(_summed(NodeCost, 1, (node for row in rows for node in row.nodes))),
        lines=ranked_lines(line for row in rows for line in row.lines),
        kernels=ranked_kernels(kernel for row in rows for kernel in row.kernels),
        wall_on=sum((row.wall_on for row in rows), WallKinds()),
        saves=saves,
        total_saves=total_saves,
        recorded_wall_ns=sum(row.recorded_wall_ns for row in rows),
    )


def _by_step(by_step: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*by_step, strict=True))


def ranked_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Sort by wall time, then device time, then host time, most expensive first."""
    return tuple(sorted(rows, key=lambda r: (-r.wall_ns, -r.gpu_ns, -r.cpu_ns, r.path)))


def ranked_nodes(nodes: Iterable[NodeCost]) -> tuple[NodeCost, ...]:
    """Sort by wall time, then device time, then host time, most expensive first."""
    return tuple(
        sorted(nodes, key=lambda node: (-node.wall_ns, -node.gpu_ns, -node.cpu_ns, node.name))
    )


_Cost = TypeVar("_Cost", NodeCost, LineCost, KernelCost)


def _summed(kind: type[_Cost], keys: int, costs: Iterable[_Cost]) -> list[_Cost]:
    """Sum the costs that agree in their first fields, the keys; the others are numbers."""
    costs = list(costs)
    if len(costs) < 2:
        return costs
    values = attrgetter(*(field.name for field in fields(kind)))
    sums: dict[tuple[Any, ...], Iterable[int]] = {}
    for values_of_cost in map(values, costs):
        key, numbers = values_of_cost[:keys], values_of_cost[keys:]
        sums[key] = tuple(map(add, sums[key], numbers)) if key in sums else numbers
    return [kind(*key, *numbers) for key, numbers in sums.items()]


def ranked_lines(lines: Iterable[LineCost]) -> tuple[LineCost, ...]:
    """Sum the costs of each line and node name, most expensive first."""
    return tuple(
        sorted(
            _summed(LineCost, 6, lines),
            key=lambda cost: (
                -cost.wall_ns,
                -cost.gpu_ns,
                -cost.cpu_ns,
                cost.file,
                cost.line,
                cost.node,
            ),
        )
    )


def ranked_kernels(kernels: Iterable[KernelCost]) -> tuple[KernelCost, ...]:
    """Sum the kernels of each name, most device time first."""
    added = _summed(KernelCost, 1, kernels)
    return tuple(sorted(added, key=lambda kernel: (-kernel.spent_ns, kernel.name)))


class _Placed(Protocol):
    """A row of a report, or a module of a trace."""

    @property
    def path(self) -> str: ...
    @property
    def root(self) -> str: ...


def parents_of(modules: Iterable[_Placed]) -> dict[str, str | None]:
    """Map each module's path to the path of the module directly around it, or to ``None``.

    ``""`` contains all paths of its root. Only modules of one root contain each other: "loss", an
    instrumented loss, is not inside the model, although the model's path is "". In the returned
    order, outer modules come before the modules inside them.
    """
    by_root: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        by_root[module.root].append(module.path)
    parents: dict[str, str | None] = {}
    for paths in by_root.values():
        around: list[str] = []
        # In this order a module is directly followed by all modules inside it.
        for path in sorted(paths, key=name_order):
            while around and not _contains(around[-1], path):
                around.pop()
            parents[path] = around[-1] if around else None
            around.append(path)
    return parents


def name_order(path: str) -> str:
    """Return a key that sorts paths name by name: the dot sorts before every other character."""
    return path.translate(_DOT_FIRST) if "\0" in path or "\1" in path else path.replace(".", "\0")


_DOT_FIRST = str.maketrans({".": "\0", "\0": "\1\1", "\1": "\1\2"})


def _contains(outer: str, path: str) -> bool:
    if not outer:
        return bool(path)
    return path.startswith(outer) and path[len(outer) : len(outer) + 1] == "."


def add_totals(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Set each row's ``total_*`` from its own costs and those of the modules inside it."""
    own = {row.path: row for row in rows if row.is_module}
    costs = attrgetter(*_COSTS)
    totals = {path: costs(row) for path, row in own.items()}
    for path, parent in reversed(parents_of(own.values()).items()):
        if parent is not None:
            totals[parent] = tuple(map(add, totals[parent], totals[path]))
    return tuple(
        replace(
            row,
            **dict(zip(_TOTALS, totals[row.path] if row.is_module else costs(row), strict=True)),
        )
        for row in rows
    )


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
        return all(ours == other for ours, other in pairs)

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
    """Return a row with the modules inside it, built without recursion."""
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


def near_names(path: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean …?" for the names nearest to a path, or ``""`` if none is near."""
    import difflib

    if len(path) > _LONGEST_NAME:
        return ""
    likely = [name for name in candidates if len(name) <= _LONGEST_NAME]
    near = difflib.get_close_matches(path, likely, n=3, cutoff=0.5)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""


_WILDCARD = re.compile(r"(?<![^.])\*\*\.|\*\*|\*|\?|\[!?[^]]+\]")
_MEANING = {"**.": r"(?:.*\.)?", "**": ".*", "*": r"[^.]*", "?": r"[^.]"}


@dataclass(frozen=True)
class Patterns:
    """Patterns of module paths. A path matches if one of the patterns matches all of it.

    ``*`` and ``?`` match within a name, ``**`` matches any number of names, and ``[0-3]`` matches
    one character of a set.
    """

    texts: tuple[str, ...]

    @cached_property
    def _expressions(self) -> tuple[re.Pattern[str], ...]:
        return tuple(map(_expression, self.texts))

    def matches(self, path: str) -> bool:
        """Return whether a path matches."""
        return any(expression.fullmatch(path) for expression in self._expressions)

    def check(self, paths: Collection[str]) -> None:
        """Raise ``UsageError`` with near patterns if a pattern matches none of these paths."""
        for text, expression in zip(self.texts, self._expressions, strict=True):
            if not any(map(expression.fullmatch, paths)):
                kinds = Counter(map(numberless, paths))
                candidates = dict.fromkeys(
                    path if kinds[numberless(path)] == 1 else numberless(path) for path in paths
                )
                # The root has no name.
                examples = ", ".join(quoted(name) for name in list(filter(None, candidates))[:3])
                others = f"; among the modules are {examples or 'none with a name'}"
                near = near_names(text, candidates) or others
                raise UsageError(f"match={quoted(text)} matches no module{near}")


def is_pattern(text: str) -> bool:
    """Whether a text has a wildcard, so that it is more than one path."""
    return _WILDCARD.search(text) is not None


def patterns_of(match: object) -> Patterns:
    """Return the patterns of a ``match=`` argument: one, or several in a list.

    Raises:
        UsageError: If it is neither, or a pattern is invalid.
    """
    texts = (match,) if isinstance(match, str) else match
    if not isinstance(texts, (list, tuple)) or not texts:
        raise UsageError(
            f"match={quoted(match)}: give a pattern of module paths, such as 'model.layers.*', or "
            "a list of patterns"
        )
    return Patterns(tuple(_checked(text) for text in texts))


def _checked(text: object) -> str:
    if not isinstance(text, str):
        raise UsageError(f"match={quoted(text)}: a pattern of module paths must be a str")
    try:
        _expression(text)
    except re.error as error:
        raise UsageError(f"match={quoted(text)} is not a pattern: {error.msg}") from None
    return text


def _expression(text: str) -> re.Pattern[str]:
    pieces, at = [], 0
    for match in _WILDCARD.finditer(text):
        pieces += [re.escape(text[at : match.start()]), _meaning(match[0])]
        at = match.end()
    return re.compile("".join([*pieces, re.escape(text[at:])]), re.DOTALL)


def _meaning(wildcard: str) -> str:
    if wildcard[0] == "[":
        others = wildcard[1] == "!" and len(wildcard) > 3
        inside = re.escape(wildcard[1 + others : -1]).replace(r"\-", "-")
        return f"[{'^' * others}{inside}]"
    return _MEANING[wildcard]
