"""Nodes that no recorded operator may have made: those of scripted graphs and C++ functions.

Each numbered operator shows how many nodes its thread had counted when the operator began. So a
node was made between two operators: the last that began at the node's number or below, and the
first that began above. The nodes that PyTorch derives are made in recorded operators only, by the
first of these two. But a scripted graph or a C++ function takes its number without being recorded.
Then the operator before began at the same number, made nothing, and often ran in another module's
call. Names show which of the two cases a node is. If they show the second, a marker names the
owner, or else what ran between the two operators does. Without either, the owner stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property

import msgspec
import numpy as np

from backspot.analysis.attribution.spans import Spans
from backspot.analysis.timeline import (
    NOTHING,
    Timeline,
    first_started,
    grouped,
    is_in,
    numbered,
    take,
)
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask

_LEAST_ALIKE = 4  # letters; shorter names are part of many others
_LONGEST_NAMESPACE = 1000


class Making(msgspec.Struct, frozen=True):
    """Nodes that one thread made, and the operators around their making; arrays of equal length.

    Attributes:
        node: the spans.
        before: the event index of the last operator that began at the node's number or below.
        after: the event index of the first operator that began above, ``NOTHING`` for none.
        exact: whether ``before`` began at exactly the node's number.
    """

    node: Ints
    before: Ints
    after: Ints
    exact: Mask

    def of(self, chosen: Mask | Ints) -> Making:
        """Return some of the nodes."""
        return Making(
            self.node[chosen], self.before[chosen], self.after[chosen], self.exact[chosen]
        )


class Makers:
    """Finds operators that ran where nodes were made. What all threads share is computed once."""

    def __init__(self, events: Events, spans: Spans) -> None:
        self._events, self._spans = events, spans

    @cached_property
    def doubtful(self) -> Mask:
        """For each span whether it is a node that something unrecorded may have made, by name."""
        node_names = self._spans.node_names
        # Before torch 1.10 no name had a digit, and Python's functions had names like PyTorch's.
        sure = (
            names.is_generated_node
            if any(map(names.is_generated_node, node_names))
            else names.is_node
        )
        return self._nodes_where(lambda name: not sure(name) or names.is_view_node(name))

    def find(self, thread: int, making: Making) -> Ints:
        """Find for each node an operator (event index) that ran where the node was made.

        Returns:
            The operators; ``NOTHING`` where a marker in the node names the owner, or nothing does.
        """
        operators = np.full(len(making.node), NOTHING, np.int64)
        # Python's functions are recorded under their own names.
        same = making.exact & self._names_fit(making.node, making.before, _is_python)
        operators[same] = making.before[same]
        rest = np.flatnonzero(~same & (self._spans.marked[making.node] < 0))
        if len(rest):
            operators[rest] = self._unmarked(thread, making.of(rest))
        return operators

    def _unmarked(self, thread: int, making: Making) -> Ints:
        """As ``find``, for nodes that neither an operator's name nor a marker settles."""
        events, spans = self._events, self._spans
        nothing = np.empty(0, np.int64)
        around = _Around(
            events,
            spans,
            thread,
            self._operators_of.get(thread, nothing),
            self._launches_of.get(thread, nothing),
        )
        node, before, after = making.node, making.before, making.after
        began = events.start[before]
        until = np.where(after >= 0, events.start[after], spans.start[node])
        outer = around.numbered_at(before)
        # What ran within the outermost operator comes after ``before`` only if ``outer`` has ended.
        between, single = around.unnumbered_between(np.maximum(began, events.end[outer]), until)
        added, foreign, scripted = (
            column[node] for column in (self._added, self._foreign, self._scripted)
        )
        graph = around.unnumbered_at(after)
        # A scripted graph runs its operators after it took its number.
        begins = (graph >= 0) & (events.start[graph] > began)
        alike = self._names_fit(node, outer, _is_alike)
        elsewhere = (between >= 0) & (
            ~single | (spans.of(events, between) != spans.of(events, outer))
        )
        # An extension's own operator calls its C++ function.
        of_extension = foreign & self._extension[events.name[outer]]
        ways: tuple[tuple[Mask, Ints], ...] = (
            (added, before),
            (foreign & alike & (making.exact | ~elsewhere), outer),
            (~around.any_edge(began, until), before),
            (scripted & begins, graph),
            (of_extension & ~elsewhere, outer),
            (single & ~of_extension, between),
        )
        conditions, operators = zip(*ways, strict=True)
        return np.select(conditions, operators, NOTHING)

    # What runs on each thread --------------------------------------------------------------------

    @cached_property
    def _operators_of(self) -> dict[int, Ints]:
        """The operators of each thread, without labels and without nodes."""
        events = self._events
        plain = ~events.is_label & ~events.prefix_mask(names.EVALUATE_FUNCTION)
        operators = events.chosen(plain, Category.OPERATOR)
        return dict(grouped(events.thread, operators[events.forward_thread[operators] <= 0]))

    @cached_property
    def _launches_of(self) -> dict[int, Ints]:
        """The calls of each thread that launch device work."""
        events = self._events
        calls = events.of(Category.RUNTIME)
        calls = calls[events.correlation[calls] > 0]
        work = events.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET)
        launching = is_in(events.correlation[calls], events.correlation[work])
        return dict(grouped(events.thread, calls[launching]))

    # Names ---------------------------------------------------------------------------------------

    @cached_property
    def _added(self) -> Mask:
        return self._nodes_where(names.is_view_node)

    @cached_property
    def _scripted(self) -> Mask:
        return self._nodes_where(lambda name: names.DIFFERENTIABLE_GRAPH in name)

    @cached_property
    def _foreign(self) -> Mask:
        return self._nodes_where(lambda name: "::" in name) & ~self._scripted

    @cached_property
    def _extension(self) -> Mask:
        return self._events.names_where(
            lambda name: "::" in name and not name.startswith(names.ATEN)
        )

    def _nodes_where(self, holds: Callable[[str], bool]) -> Mask:
        """For each span whether it is a node with a name for which a predicate holds."""
        return take(
            np.array([holds(n) for n in self._spans.node_names], bool), self._spans.node, False
        )

    def _names_fit(self, node: Ints, operator: Ints, fit: Callable[[str, str], bool]) -> Mask:
        """Whether the names of each node and operator fit; each pair of names is compared once."""
        events, spans = self._events, self._spans
        width = len(events.names)
        pairs, pair_of = numbered(spans.node[node] * width + events.name[operator])
        answers = [
            fit(spans.node_names[pair // width], events.names[pair % width])
            for pair in pairs.tolist()
        ]
        fits: Mask = np.array(answers, bool)[pair_of]
        return fits


def _is_python(node: str, operator: str) -> bool:
    # The lengths are compared first: the name may be long, and is not copied for each node.
    return (
        len(node) == len(operator) + len(names.BACKWARD) and node == f"{operator}{names.BACKWARD}"
    )


def _is_alike(node: str, operator: str) -> bool:
    """``CppNode<RoiAlignFunction>`` and ``torchvision::roi_align``."""
    if len(operator) > 2 * len(node) + _LONGEST_NAMESPACE:
        return False
    letters = _letters(operator.rpartition("::")[2])
    return len(letters) >= _LEAST_ALIKE and letters in _letters(node)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


class _Around:
    """The outermost operators of one thread, and launches outside of all operators.

    Where autograd is off, as in the forward of a C++ function, operators have no number.

    Args:
        events: the trace.
        spans: its spans.
        thread: the thread.
        operators: its operators, without labels and without nodes.
        launches: its calls that launch device work.
    """

    def __init__(
        self, events: Events, spans: Spans, thread: int, operators: Ints, launches: Ints
    ) -> None:
        self._events = events
        nesting = spans.nesting.get(thread)
        self._edges = nesting[1].timeline.edges if nesting else np.empty(0, np.int64)
        has_number = events.sequence[operators] >= 0
        self._numbered = self._outermost(operators[has_number])
        # An operator that contains whole calls does not show in which of them something happened.
        within = ~self.any_edge(events.start[operators], events.end[operators])
        leaves = operators[has_number | within]
        outermost = self._outermost(np.concatenate([leaves, launches]))
        self._every = outermost
        is_unnumbered = outermost.values >= 0
        is_unnumbered[is_unnumbered] = events.sequence[outermost.values[is_unnumbered]] < 0
        self._unnumbered = outermost.values[is_unnumbered]
        self._start = events.start[self._unnumbered]
        span = spans.of(events, self._unnumbered)
        # How often the span has changed from one to the next, up to each.
        self._changes = np.cumsum(np.append(False, span[1:] != span[:-1])[: len(span)])

    def _outermost(self, index: Ints) -> Timeline:
        start = self._events.start[index]  # a rounded clock gives some no duration
        return first_started(start, np.maximum(self._events.end[index], start + 1), index)

    def numbered_at(self, operator: Ints) -> Ints:
        """Return the outermost numbered operator around each operator, which may be itself."""
        outermost = self._numbered.at(self._events.start[operator])
        return np.where(outermost >= 0, outermost, operator)

    def unnumbered_at(self, operator: Ints) -> Ints:
        """Return the outermost operator around each one if it has no number, else ``NOTHING``."""
        outermost = np.where(operator >= 0, self._every.at(self._events.start[operator]), NOTHING)
        return np.where(self._events.sequence[outermost] < 0, outermost, NOTHING)

    def unnumbered_between(self, after: Ints, before: Ints) -> tuple[Ints, Mask]:
        """Find what has no number and starts between two times each.

        Returns:
            The first such operator or launch, ``NOTHING`` for none; and whether there are some,
            and all in one span.
        """
        low = np.searchsorted(self._start, after, side="left")
        high = np.searchsorted(self._start, before, side="left")
        has_any = low < high
        first = take(self._unnumbered, np.where(has_any, low, NOTHING))
        changes = np.append(self._changes, 0)
        single = has_any & (changes[low] == changes[high - 1])
        return first, single

    def any_edge(self, after: Ints, before: Ints) -> Mask:
        """Whether a span begins or ends within each interval, its two ends excluded."""
        low = np.searchsorted(self._edges, after, side="right")
        return np.searchsorted(self._edges, before, side="left") > low
