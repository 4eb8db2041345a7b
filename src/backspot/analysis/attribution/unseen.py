"""The owners of nodes that nothing recorded may have made: a scripted graph, a C++ function.

Each numbered operator tells how far its thread had counted nodes when it began. So a node was made
between the last operator that began at the node's number or below, and the first that began above
it. What PyTorch derives itself runs in recorded operators only: the first of these two made it. But
a scripted graph or a C++ function takes its number unrecorded. The operator before it then began at
the same number, made nothing, and often ran in another module's call. Names tell which is the case;
else a marker does, or what ran between the two operators; and where nothing tells, nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from backspot.analysis.attribution.spans import EVALUATE, Spans
from backspot.analysis.timeline import NOTHING, Timeline, first_started, numbered
from backspot.trace import Category, Events
from backspot.trace.events import Ints
from backspot.trace.labels import parse_label

__all__ = ["Making", "find_makers", "is_doubtful"]

_DERIVED = re.compile(r"Backward\d+\Z")
_PLAIN = re.compile(r"\w+Backward\d*\Z")
# What autograd adds to an operator's own node, or makes where a view is asked for its node.
_ADDED = re.compile(r"(.*::)?(CopySlices|CopyBackwards|AsStridedBackward\d*)\Z")
_SCRIPTED = "DifferentiableGraph"
_NODE = "Backward"
_LEAST_ALIKE = 4  # letters; shorter names are part of anything
_LONGEST_NAMESPACE = 1000


@dataclass(frozen=True, slots=True)
class Making:
    """Nodes that one thread made, and what bounds their making; arrays of equal length.

    Attributes:
        node: the spans.
        before: the event index of the last operator that began at the node's number or below.
        after: that of the first that began above it, ``NOTHING`` for none.
        exact: whether ``before`` began at the very number.
    """

    node: Ints
    before: Ints
    after: Ints
    exact: np.ndarray

    def of(self, chosen: np.ndarray) -> Making:
        """Some of the nodes."""
        return Making(
            self.node[chosen], self.before[chosen], self.after[chosen], self.exact[chosen]
        )


def is_doubtful(spans: Spans) -> np.ndarray:
    """Whether something unrecorded can have made each span that is a node, by the node's name."""
    derived = any(_DERIVED.search(name) for name in spans.node_names)
    # Before torch 1.10 no name had a digit, and those of Python's functions looked like PyTorch's.
    sure = _DERIVED if derived else _PLAIN
    doubtful = [not sure.search(name) or _ADDED.match(name) for name in spans.node_names]
    found: np.ndarray = np.array([*doubtful, False], bool)[spans.node]
    return found


def find_makers(events: Events, spans: Spans, thread: int, making: Making) -> Ints:
    """For each node an operator (event index) that ran where the node was made.

    ``NOTHING`` where a marker in the node names its owner, or nothing tells.

    Args:
        events: the trace.
        spans: its spans.
        thread: the thread that made the nodes.
        making: the nodes.
    """
    found = np.full(len(making.node), NOTHING, np.int64)
    # Python's functions are recorded under their own names.
    same = making.exact & _names_fit(events, spans, making.node, making.before, _is_python)
    found[same] = making.before[same]
    rest = np.flatnonzero(~same & (spans.marked[making.node] < 0))
    if len(rest):
        found[rest] = _unmarked(events, spans, thread, making.of(rest))
    return found


def _unmarked(events: Events, spans: Spans, thread: int, making: Making) -> Ints:
    """As ``find_makers``, of nodes that neither an operator's name nor a marker settles."""
    around = _Around(events, spans, thread)
    node, before, after = making.node, making.before, making.after
    began = events.start[before]
    until = np.where(after >= 0, events.start[after], spans.start[node])
    outer = around.numbered_at(before)
    # What ran within the outermost operator is behind the one that matters only if that has ended.
    between, single = around.unnumbered_between(np.maximum(began, events.end[outer]), until)
    added, foreign, scripted = (
        np.array([matches(name) for name in spans.node_names], bool)[spans.node[node]]
        for matches in (_is_added, _is_foreign, _is_scripted)
    )
    extension = np.array([_is_extension(name) for name in events.names], bool)
    graph = around.unnumbered_at(after)
    # A graph runs its operators after it took its number, and nothing before.
    begins = (graph >= 0) & (events.start[graph] > began)
    alike = _names_fit(events, spans, node, outer, _is_alike)
    elsewhere = (between >= 0) & (~single | (spans.of(events, between) != spans.of(events, outer)))
    ways: tuple[tuple[np.ndarray, Ints], ...] = (
        (added, before),
        (foreign & alike & (making.exact | ~elsewhere), outer),
        (~around.any_edge(began, until), before),
        (scripted & begins, graph),
        # An extension's own operator, which calls its C++ function; unless something else may have.
        (foreign & extension[events.name[outer]] & ~elsewhere, outer),
        (single & ~(foreign & extension[events.name[outer]]), between),
    )
    conditions, operators = zip(*ways, strict=True)
    return np.select(conditions, operators, NOTHING)


# Names -------------------------------------------------------------------------------------------


def _names_fit(
    events: Events, spans: Spans, node: Ints, operator: Ints, fit: Callable[[str, str], bool]
) -> np.ndarray:
    """Whether the names of each node and operator fit; each pair of names is asked once."""
    width = len(events.names)
    pairs, which = numbered(spans.node[node] * width + events.name[operator])
    answers = [
        fit(spans.node_names[pair // width], events.names[pair % width]) for pair in pairs.tolist()
    ]
    fits: np.ndarray = np.array(answers, bool)[which]
    return fits


def _is_python(node: str, operator: str) -> bool:
    # Where one operator has many nodes, its name may be long: it is not copied for each.
    return len(node) == len(operator) + len(_NODE) and node == f"{operator}{_NODE}"


def _is_alike(node: str, operator: str) -> bool:
    """``CppNode<RoiAlignFunction>`` and ``torchvision::roi_align``."""
    if len(operator) > 2 * len(node) + _LONGEST_NAMESPACE:
        return False
    letters = _letters(operator.rpartition("::")[2])
    return len(letters) >= _LEAST_ALIKE and letters in _letters(node)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _is_added(node: str) -> bool:
    return _ADDED.match(node) is not None


def _is_foreign(node: str) -> bool:
    return "::" in node and not _is_scripted(node)


def _is_scripted(node: str) -> bool:
    return _SCRIPTED in node


def _is_extension(operator: str) -> bool:
    return "::" in operator and not operator.startswith("aten::")


# What ran ----------------------------------------------------------------------------------------


class _Around:
    """The outermost operators of one thread, and device work launched in none.

    Where autograd is off, as in the forward of a C++ function, operators have no number.
    """

    def __init__(self, events: Events, spans: Spans, thread: int) -> None:
        self._events = events
        nesting = spans.nesting.get(thread)
        self._edges = nesting[1].timeline.edges if nesting else np.empty(0, np.int64)
        plain = np.array([parse_label(name) is None for name in events.names], bool)
        plain &= ~events.name_mask(EVALUATE)
        operators = events.chosen(plain, Category.OPERATOR)
        operators = operators[
            (events.thread[operators] == thread) & (events.forward_thread[operators] <= 0)
        ]
        has_number = events.sequence[operators] >= 0
        self._numbered = self._outermost(operators[has_number])
        # What contains whole calls does not tell in which of them something happened.
        within = ~self.any_edge(events.start[operators], events.end[operators])
        leaves = operators[has_number | within]
        every = self._outermost(np.concatenate([leaves, self._launches(thread)]))
        self._every = every
        kept = every.values >= 0
        kept[kept] = events.sequence[every.values[kept]] < 0
        self._unnumbered = every.values[kept]
        self._start = events.start[self._unnumbered]
        span = spans.of(events, self._unnumbered)
        # How often the span was another than of the one before.
        self._changes = np.cumsum(np.append(False, span[1:] != span[:-1])[: len(span)])

    def _outermost(self, index: Ints) -> Timeline:
        start = self._events.start[index]  # a rounded clock makes some last no time
        return first_started(start, np.maximum(self._events.end[index], start + 1), index)

    def _launches(self, thread: int) -> Ints:
        events = self._events
        calls = events.of(Category.RUNTIME)
        calls = calls[(events.thread[calls] == thread) & (events.correlation[calls] > 0)]
        work = events.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET)
        found: Ints = calls[np.isin(events.correlation[calls], events.correlation[work])]
        return found

    def numbered_at(self, operator: Ints) -> Ints:
        """The outermost numbered operator around each operator, which may be itself."""
        found = self._numbered.at(self._events.start[operator])
        return np.where(found >= 0, found, operator)

    def unnumbered_at(self, operator: Ints) -> Ints:
        """The outermost operator around each one, where that has no number; else ``NOTHING``."""
        found = np.where(operator >= 0, self._every.at(self._events.start[operator]), NOTHING)
        return np.where(self._events.sequence[found] < 0, found, NOTHING)

    def unnumbered_between(self, after: Ints, before: Ints) -> tuple[Ints, np.ndarray]:
        """The first without a number that starts in each stretch, and whether all are in one span.

        ``NOTHING``, and false, where there is none.
        """
        low = np.searchsorted(self._start, after, side="left")
        high = np.searchsorted(self._start, before, side="left")
        some = low < high
        first = np.append(self._unnumbered, NOTHING)[np.where(some, low, NOTHING)]
        changes = np.append(self._changes, 0)
        single = some & (changes[low] == changes[high - 1])
        return first, single

    def any_edge(self, after: Ints, before: Ints) -> np.ndarray:
        """Whether a span begins or ends within each stretch, its own two moments included."""
        low = np.searchsorted(self._edges, after, side="right")
        return np.searchsorted(self._edges, before, side="left") > low
