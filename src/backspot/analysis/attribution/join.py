"""Match each autograd node with the forward operator that made it.

Operator and node share a sequence number, which autograd counts separately on each thread. A node
also has the logical number of the thread that built it. An exported trace names threads by the
operating system's numbers, so logical threads are first matched with recorded ones.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import msgspec
import numpy as np

from backspot.analysis.attribution.passes import Passes, find_passes
from backspot.analysis.attribution.spans import Spans
from backspot.analysis.attribution.unseen import Makers, Making
from backspot.analysis.timeline import (
    FAR,
    NOTHING,
    distinct,
    grouped,
    is_in,
    merged,
    numbered,
    take,
)
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask

_NEAR = 2  # numbers that one operator takes: those of CopySlices and of its view


class Join(msgspec.Struct, frozen=True):
    """Where each span that is a node comes from; arrays with one entry a span.

    Attributes:
        sequence: the node's sequence number, ``NOTHING`` where the node has none.
        builder: the recorded thread that built the node, ``NOTHING`` where that is not known.
        operator: the event index of the forward operator that made the node, or of one that ran
            where the node was made; ``NOTHING`` where none was found.
        unseen: true where the forward was recorded, but not what made the node.
        captured: true where the engine did not run the node: ``torch.autograd.grad`` asked for its
            gradient, and the pass ends there.
        ambiguous: true where several threads may have built the node.
        feeder: for AccumulateGrad, the span of the node that fed it; else ``NOTHING``.
    """

    sequence: Ints
    builder: Ints
    operator: Ints
    unseen: Mask
    captured: Mask
    ambiguous: Mask
    feeder: Ints


_WIDTH = 16
_Score = tuple[int, int]
"""How many nodes a recorded thread could have built: by their numbers, and by their names too."""
_MOST_PAIRS = 10_000
"""Pairs of a logical and a recorded thread that are compared; if there are more, none is."""


class _Operators(msgspec.Struct, frozen=True):
    """The forward operators of one thread, sorted by number and then by start."""

    index: Ints
    sequence: Ints
    start: Ints
    earliest: list[Ints]  # the starts; the earliest of every 16 of these; of every 16 of those …

    def before(self, position: int, time: int) -> int:
        """Return the last position up to this one with a start before ``time``, else -1."""
        level = 0
        while position >= 0:
            if self.earliest[level][position] < time:
                if not level:
                    return position
                level -= 1
                position = min(position * _WIDTH + _WIDTH, len(self.earliest[level])) - 1
            elif position % _WIDTH or level + 1 == len(self.earliest):
                position -= 1
            else:
                level, position = level + 1, position // _WIDTH - 1
        return NOTHING


def join_nodes(events: Events, spans: Spans) -> tuple[Join, Passes]:
    """Find the forward operator of each node, and the passes that the nodes run in."""
    sequence, logical, executed = _numbers(events, spans)
    operators = _forward_operators(events)
    threads, ambiguous = _map_threads(events, spans, sequence, logical, operators)
    nodes_of = _by_thread(sequence, logical)
    passes = find_passes(events, spans, sequence, logical, threads)
    makers = Makers(events, spans)
    operator = np.full(len(spans.start), NOTHING, np.int64)
    builder = np.full(len(spans.start), NOTHING, np.int64)
    unseen = np.zeros(len(spans.start), bool)
    for number, thread in threads.items():
        own_nodes = nodes_of.get(number, np.empty(0, np.int64))
        builder[own_nodes] = thread
        if thread in operators and len(own_nodes):
            operator[own_nodes], unseen[own_nodes] = _match(
                spans, makers, thread, operators[thread], sequence[own_nodes], passes, own_nodes
            )
    join = Join(
        sequence=sequence,
        builder=builder,
        operator=operator,
        unseen=unseen,
        captured=spans.is_node & ~executed,
        ambiguous=is_in(logical, sorted(ambiguous)) & (logical > 0),
        feeder=_feeders(spans, passes.of_span),
    )
    return join, passes


def _numbers(events: Events, spans: Spans) -> tuple[Ints, Ints, Mask]:
    """Find the sequence number and the logical thread of each node, and whether it was executed.

    If a hook wrote a label into a node, the engine's event around the node has no number. The event
    of the same name within has one.
    """
    sequence = np.full(len(spans.start), NOTHING, np.int64)
    logical = np.full(len(spans.start), NOTHING, np.int64)
    name_ids = {name: index for index, name in enumerate(spans.node_names)}
    node_of_name = np.array(
        [
            name_ids.get(name.removeprefix(names.EVALUATE_FUNCTION), NOTHING)
            for name in events.names
        ],
        np.int64,
    )
    named = events.chosen(node_of_name >= 0, Category.OPERATOR)
    span = spans.of(events, named)
    fits = take(spans.node, span) == node_of_name[events.name[named]]
    named, span = named[fits], span[fits]
    own = ~events.prefix_mask(names.EVALUATE_FUNCTION)[events.name[named]]
    executed = np.zeros(len(spans.start), bool)
    executed[span[own]] = True
    has_number = (events.forward_thread[named] > 0) & (events.sequence[named] >= 0)
    sequence[span[has_number]] = events.sequence[named[has_number]]
    logical[span[has_number]] = events.forward_thread[named[has_number]]
    return sequence, logical, executed | (sequence >= 0)


def _forward_operators(events: Events) -> dict[int, _Operators]:
    operators = events.of(Category.OPERATOR)
    forward = operators[(events.forward_thread[operators] == 0) & (events.sequence[operators] >= 0)]
    result = {}
    for thread, index in grouped(events.thread, forward):
        index = index[np.lexsort((events.start[index], events.sequence[index]))]
        earliest = [events.start[index]]
        while len(earliest[-1]) > _WIDTH:
            begins = np.arange(0, len(earliest[-1]), _WIDTH)
            earliest.append(np.minimum.reduceat(earliest[-1], begins))
        result[thread] = _Operators(index, events.sequence[index], earliest[0], earliest)
    return result


def _exact(operators: _Operators, sequence: Ints, start: Ints) -> Ints:
    """Return the position of the latest operator with each number before ``start``."""
    low = np.searchsorted(operators.sequence, sequence, side="left")
    position = np.searchsorted(operators.sequence, sequence, side="right") - 1
    late = np.flatnonzero((position >= low) & (operators.start[np.maximum(position, 0)] >= start))
    if len(late):
        # The ranks of numbers and starts together are one key, which orders by both.
        numbers, times = merged(operators.sequence), np.sort(operators.start)
        width = len(times) + 1
        keys, wanted = (
            np.searchsorted(numbers, number) * width + np.searchsorted(times, time)
            for number, time in (
                (operators.sequence, operators.start),
                (sequence[late], start[late]),
            )
        )
        position[late] = np.searchsorted(keys, wanted) - 1
    return np.where(position >= low, position, NOTHING)


def _match(
    spans: Spans,
    makers: Makers,
    thread: int,
    operators: _Operators,
    sequence: Ints,
    passes: Passes,
    nodes: Ints,
) -> tuple[Ints, Mask]:
    """Find the forward operator (event index) of each of ``nodes``.

    Returns:
        The operators; and where there is none although the forward was recorded.
    """
    run = passes.of_span[nodes]
    position = _exact(operators, sequence, spans.start[nodes])
    exact = position >= 0
    missing = np.flatnonzero(~exact).tolist()
    numbers = zip(run[exact].tolist(), sequence[exact].tolist(), strict=True)
    used_numbers = set(numbers) if missing else set()
    for node in missing:
        number, start = int(sequence[node]), int(spans.start[nodes[node]])
        position[node] = _floor(operators, number, start, int(run[node]), passes, used_numbers)
    operator = take(operators.index, position)

    # What made a node unseen ran between two operators, of which the first may not be its maker.
    suspect = makers.doubtful[nodes]
    doubtful = np.flatnonzero((position >= 0) & suspect)
    if len(doubtful):
        after = _operator_after(operators, nodes[doubtful], sequence[doubtful], spans)
        making = Making(nodes[doubtful], operator[doubtful], after, exact[doubtful])
        operator[doubtful] = makers.find(thread, making)

    # The forward of a pass was recorded if that of any of its nodes was.
    recorded = (position >= 0) | is_in(run, run[exact])
    return operator, suspect & recorded & (operator < 0) & (spans.marked[nodes] < 0)


def _operator_after(operators: _Operators, nodes: Ints, sequence: Ints, spans: Spans) -> Ints:
    """Return the first operator above each node's number, if it starts before the node."""
    above = np.searchsorted(operators.sequence, sequence, side="right")
    is_late = np.append(operators.start, FAR)[above] >= spans.start[nodes]
    return np.where(is_late, NOTHING, np.append(operators.index, NOTHING)[above])


def _floor(
    operators: _Operators,
    number: int,
    start: int,
    run: int,
    passes: Passes,
    used_numbers: set[tuple[int, int]],
) -> int:
    """Find the operator with the greatest number below a node's, as its position.

    An operator that builds several nodes has the number of the first. The match counts only if the
    trace shows that the node's number was taken during recorded forward work. Otherwise the node's
    own forward is not in the trace, and the greatest number below belongs to another step.
    """
    below = int(np.searchsorted(operators.sequence, number, side="left")) - 1
    position = operators.before(below, start)
    if position < 0:
        return NOTHING
    floor, began = int(operators.sequence[position]), int(operators.start[position])

    # Recorded work took a number above it before the node, or another node of the pass has it.
    above = int(np.searchsorted(operators.sequence, number, side="right"))
    is_passed = above < len(operators.start) and bool(operators.start[above] < start)
    if is_passed or (run, floor) in used_numbers:
        return position

    # Else the number must be near, and no other pass may have begun since.
    own_start = int(passes.start[run]) if run >= 0 else start
    following = int(np.searchsorted(passes.start, began, side="right"))
    has_pass_since = following < len(passes.start) and bool(passes.start[following] < own_start)
    return position if number - floor <= _NEAR and not has_pass_since else NOTHING


def _feeders(spans: Spans, passes: Ints) -> Ints:
    """Find the node that fed each AccumulateGrad: autograd runs the two one after the other."""
    feeder = np.full(len(spans.start), NOTHING, np.int64)
    accumulates = np.array(list(map(names.is_accumulate_grad, spans.node_names)), bool)
    nodes = np.flatnonzero(spans.is_node)
    nodes = nodes[np.argsort(spans.start[nodes], kind="stable")]
    is_fed, run = accumulates[spans.node[nodes]], passes[nodes]

    def latest(*place: Ints) -> Ints:
        """Find for each node the last before it in the same place that is not fed itself."""
        order = np.lexsort((np.arange(len(nodes)), *place))
        begins = np.zeros(len(nodes), bool)
        for column in place:
            begins |= np.append(True, column[order][1:] != column[order][:-1])
        at = np.arange(len(nodes))
        # At the beginning of a place there is no node before.
        feeds = np.maximum.accumulate(np.where(is_fed[order], NOTHING, at))
        feeds[feeds < np.maximum.accumulate(np.where(begins, at, 0))] = NOTHING
        latest_nodes = np.empty(len(nodes), np.int64)
        latest_nodes[order] = take(nodes[order], feeds)
        return latest_nodes

    if is_fed.any():
        in_place = latest(spans.thread[nodes], spans.parent[nodes])
        # Fed from another thread (a parameter on the CPU in a GPU model): the last that ran.
        feeders = np.where(in_place >= 0, in_place, latest(run))
        feeders = np.where(take(passes, feeders, NOTHING - 1) == run, feeders, NOTHING)
        feeder[nodes[is_fed]] = feeders[is_fed]
    return feeder


# Matching threads --------------------------------------------------------------------------------


def _map_threads(
    events: Events,
    spans: Spans,
    sequence: Ints,
    logical: Ints,
    operators: dict[int, _Operators],
) -> tuple[dict[int, int], set[int]]:
    """Match logical threads with recorded ones; also return those that stay ambiguous."""
    wanted = [number for number in distinct(logical[sequence >= 0]) if number > 0]
    thread_of = {n: events.logical_threads[n] for n in wanted if n in events.logical_threads}
    for number, votes in _votes(events, spans, logical).items():
        if number not in thread_of:
            thread, most = votes.most_common(1)[0]
            if 2 * most > sum(votes.values()):
                thread_of[number] = thread
    open_ = [number for number in wanted if number not in thread_of]
    if len(open_) * len(operators) > _MOST_PAIRS:
        return thread_of, set(open_)
    # One recorded thread is one logical thread: each match leaves fewer candidates for the others.
    free = {
        thread: numbers for thread, numbers in operators.items() if thread not in thread_of.values()
    }
    nodes_of = _by_thread(sequence, logical)
    scores = {number: _scores(events, spans, free, nodes_of[number], sequence) for number in open_}
    while match := _unambiguous(scores):
        number, thread = match
        thread_of[number] = thread
        del scores[number]
        for others in scores.values():
            others.pop(thread, None)
    return thread_of, {number for number, candidates in scores.items() if candidates}


def _unambiguous(scores: dict[int, dict[int, _Score]]) -> tuple[int, int] | None:
    """Find a logical thread with one best recorded thread, which scores lower for all others.

    Args:
        scores: for each logical thread the scores of the recorded threads that could be it.

    Returns:
        The logical and the recorded thread; ``None`` if there is no such pair.
    """
    for number, candidates in scores.items():
        best = max(candidates.values(), default=None)
        threads = [thread for thread, score in candidates.items() if score == best]
        if best is None or len(threads) > 1:
            continue
        (thread,) = threads
        rivals = (
            scores_of[thread]
            for other, scores_of in scores.items()
            if other != number and thread in scores_of
        )
        if all(rival < best for rival in rivals):
            return number, thread
    return None


def _by_thread(sequence: Ints, logical: Ints) -> dict[int, Ints]:
    """Return the numbered nodes of each logical thread."""
    return dict(grouped(logical, np.flatnonzero(sequence >= 0)))


def _votes(events: Events, spans: Spans, logical: Ints) -> dict[int, Counter[int]]:
    """Count Kineto's arrows from each recorded thread to the nodes of each logical thread."""
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    flows = events.flows
    for thread, members in grouped(flows.backward_thread):
        span = spans.at(thread, flows.backward_time[members])
        numbers = take(logical, span)
        for number, those in grouped(numbers):
            if number <= 0:
                continue
            origins, origin_of = numbered(flows.forward_thread[members[those]])
            for origin, many in zip(origins.tolist(), np.bincount(origin_of).tolist(), strict=True):
                votes[number][origin] += many
    return votes


def _scores(
    events: Events,
    spans: Spans,
    operators: dict[int, _Operators],
    nodes: Ints,
    sequence: Ints,
) -> dict[int, _Score]:
    """Score each recorded thread that could have built these nodes."""
    scores = {}
    for thread, candidates in operators.items():
        position = _exact(candidates, sequence[nodes], spans.start[nodes])
        hit = position >= 0
        if not hit.any():
            continue
        pairs = Counter(
            zip(
                spans.node[nodes[hit]].tolist(),
                events.name[candidates.index[position[hit]]].tolist(),
                strict=True,
            )
        )
        alike = sum(
            count
            for (node, operator), count in pairs.items()
            if _alike(spans.node_names[node], events.names[operator])
        )
        if alike or hit.sum() < 4:
            scores[thread] = (int(hit.sum()), alike)
    return scores


def _alike(node: str, operator: str) -> bool:
    """Whether a node is named after its operator: ``AddmmBackward0`` and ``aten::addmm``."""
    if len(operator) > 2 * len(node) + 1000:  # a long name is not copied for each node
        return False
    plain = re.sub(r"[^a-z0-9]", "", operator.rpartition("::")[2].lower())
    return bool(plain) and node.lower().startswith(plain)


def find_lines_of_nodes(events: Events, spans: Spans, join: Join) -> Ints:
    """Find the source line of each span, as an index into ``events.lines``, ``NOTHING`` for none.

    Only a node with its thread and its exact number in the table has a line: the nearest number
    below often belongs to another line. If the table also names the node, the names have to agree.
    """
    table = events.lines
    line = np.full(len(spans.start), NOTHING, np.int64)
    if not table.lines:
        return line
    has_number = np.flatnonzero((join.builder >= 0) & (join.sequence >= 0) & spans.is_node)
    for index, members in grouped(join.builder, has_number):
        _, thread = events.threads[index]
        if isinstance(thread, int):
            line[members] = table.at(thread, join.sequence[members])
    with_line = np.flatnonzero(line >= 0)
    # Python has one class for scripted graphs and C++ functions.
    called = [
        (name.rpartition("::")[2], names.CPP_FUNCTION if "::" in name else "")
        for name in spans.node_names
    ]
    for span, node, place in zip(
        with_line.tolist(), spans.node[with_line].tolist(), line[with_line].tolist(), strict=True
    ):
        if table.lines[place].node not in ("", *called[node]):
            line[span] = NOTHING
    return line
