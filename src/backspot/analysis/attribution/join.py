"""From an autograd node back to the forward operator that made it.

Operator and node share a sequence number, which autograd counts on each thread by itself; a node
also bears the logical number of the thread that it was built on. An exported trace names threads
by the operating system's numbers, so the one must first be told from the other.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from backspot.analysis.attribution.passes import Passes, find_passes
from backspot.analysis.attribution.spans import EVALUATE, Spans
from backspot.analysis.attribution.unseen import Making, find_makers, is_doubtful
from backspot.analysis.timeline import NOTHING, distinct, grouped, merged, numbered, take
from backspot.trace import Category, Events
from backspot.trace.events import Ints

__all__ = ["Join", "find_lines_of_nodes", "join_nodes"]

_ACCUMULATE = "AccumulateGrad"
_NEAR = 2  # numbers that one operator takes: CopySlices and the view behind it


@dataclass(frozen=True, slots=True)
class Join:
    """What became of each span that is a node; arrays with one entry a span.

    Attributes:
        sequence: the node's sequence number, ``NOTHING`` where it has none.
        builder: the recorded thread that built it, ``NOTHING`` where that is not known.
        operator: the event index of the forward operator that made it, or of one that ran where
            it was made; ``NOTHING`` where none was found.
        unseen: true where the forward was recorded, but nothing tells what in it made the node.
        captured: true where the engine did not run it: ``torch.autograd.grad`` asked for its
            gradient, and the pass ends there.
        ambiguous: true where it stays open which thread built the node.
        feeder: for AccumulateGrad, the span of the node that fed it; else ``NOTHING``.
    """

    sequence: Ints
    builder: Ints
    operator: Ints
    unseen: np.ndarray
    captured: np.ndarray
    ambiguous: np.ndarray
    feeder: Ints


_OF_CPP = "CppFunction"
_WIDTH = 16
_MOST_PAIRS = 10_000
"""Of a thread's number and a thread; of more, what none of the trace's arrows tells stays open."""


@dataclass(frozen=True, slots=True)
class _Operators:
    """One thread's forward operators, by number and then by start."""

    index: Ints
    sequence: Ints
    start: Ints
    earliest: list[Ints]  # the starts; the earliest of every 16 of these; of every 16 of those …

    def before(self, position: int, time: int) -> int:
        """The last position up to this one whose operator starts before ``time``, else -1."""
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
    """Find each node's forward operator, and the passes on the way.

    Args:
        events: the trace.
        spans: its spans.
    """
    sequence, logical, executed = _numbers(events, spans)
    operators = _forward_operators(events)
    threads, ambiguous = _map_threads(events, spans, sequence, logical, operators)
    nodes_of = _by_thread(sequence, logical)
    passes = find_passes(events, spans, sequence, logical, threads)
    operator = np.full(len(spans.start), NOTHING, np.int64)
    builder = np.full(len(spans.start), NOTHING, np.int64)
    unseen = np.zeros(len(spans.start), bool)
    for number, thread in threads.items():
        mine = nodes_of.get(number, np.empty(0, np.int64))
        builder[mine] = thread
        if thread in operators and len(mine):
            operator[mine], unseen[mine] = _match(
                events, spans, thread, operators[thread], sequence[mine], passes, mine
            )
    join = Join(
        sequence=sequence,
        builder=builder,
        operator=operator,
        unseen=unseen,
        captured=spans.is_node & ~executed,
        ambiguous=np.isin(logical, sorted(ambiguous)) & (logical > 0),
        feeder=_feeders(spans, passes.of_span),
    )
    return join, passes


def _numbers(events: Events, spans: Spans) -> tuple[Ints, Ints, np.ndarray]:
    """Each node's sequence number and logical thread, and whether it was executed at all.

    The engine's event around a node loses its number where a hook wrote a label into it; the node's
    own event, the one of the same name within, keeps it.
    """
    sequence = np.full(len(spans.start), NOTHING, np.int64)
    logical = np.full(len(spans.start), NOTHING, np.int64)
    name_ids = {name: index for index, name in enumerate(spans.node_names)}
    node_of_name = np.array(
        [name_ids.get(name.removeprefix(EVALUATE), NOTHING) for name in events.names], np.int64
    )
    named = events.chosen(node_of_name >= 0, Category.OPERATOR)
    span = spans.of(events, named)
    fits = take(spans.node, span) == node_of_name[events.name[named]]
    named, span = named[fits], span[fits]
    own = ~events.name_mask(EVALUATE)[events.name[named]]
    executed = np.zeros(len(spans.start), bool)
    executed[span[own]] = True
    numbered = (events.forward_thread[named] > 0) & (events.sequence[named] >= 0)
    sequence[span[numbered]] = events.sequence[named[numbered]]
    logical[span[numbered]] = events.forward_thread[named[numbered]]
    return sequence, logical, executed | (sequence >= 0)


def _forward_operators(events: Events) -> dict[int, _Operators]:
    operators = events.of(Category.OPERATOR)
    forward = operators[(events.forward_thread[operators] == 0) & (events.sequence[operators] >= 0)]
    result = {}
    for thread, index in grouped(events.thread, forward):
        index = index[np.lexsort((events.start[index], events.sequence[index]))]
        earliest = [events.start[index]]
        while len(earliest[-1]) > _WIDTH:
            every = np.arange(0, len(earliest[-1]), _WIDTH)
            earliest.append(np.minimum.reduceat(earliest[-1], every))
        result[thread] = _Operators(index, events.sequence[index], earliest[0], earliest)
    return result


def _exact(operators: _Operators, sequence: Ints, start: Ints) -> Ints:
    """Position of the latest operator with this number before ``start``, ``NOTHING`` for none."""
    low = np.searchsorted(operators.sequence, sequence, side="left")
    position = np.searchsorted(operators.sequence, sequence, side="right") - 1
    late = np.flatnonzero((position >= low) & (operators.start[np.maximum(position, 0)] >= start))
    if len(late):
        # Numbers and starts by their ranks, so that one key orders both.
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
    events: Events,
    spans: Spans,
    thread: int,
    operators: _Operators,
    sequence: Ints,
    passes: Passes,
    nodes: Ints,
) -> tuple[Ints, np.ndarray]:
    """The forward operator (event index) of each of ``nodes``, exact or by the floor.

    Returns:
        The operators, and where none is because none was recorded, though the forward was.
    """
    start = spans.start[nodes]
    position = _exact(operators, sequence, start)
    exact = position >= 0
    missing = np.flatnonzero(~exact)
    if len(missing):
        run = passes.of_span[nodes]
        taken = set(zip(run[exact].tolist(), sequence[exact].tolist(), strict=True))
        for node in missing.tolist():
            number, began = int(sequence[node]), int(start[node])
            position[node] = _floor(operators, number, began, int(run[node]), passes, taken)
    found = take(operators.index, position)
    suspect = is_doubtful(spans)[nodes]
    doubtful = np.flatnonzero((position >= 0) & suspect)
    if len(doubtful):
        above = np.searchsorted(operators.sequence, sequence[doubtful], side="right")
        late = np.append(operators.start, np.iinfo(np.int64).max)[above] >= start[doubtful]
        making = Making(
            node=nodes[doubtful],
            before=found[doubtful],
            after=np.where(late, NOTHING, np.append(operators.index, NOTHING)[above]),
            exact=exact[doubtful],
        )
        found[doubtful] = find_makers(events, spans, thread, making)
    # The forward of a pass was recorded if that of any of its nodes was.
    recorded = (position >= 0) | np.isin(passes.of_span[nodes], passes.of_span[nodes[exact]])
    return found, suspect & recorded & (found < 0) & (spans.marked[nodes] < 0)


def _floor(
    operators: _Operators,
    number: int,
    start: int,
    run: int,
    passes: Passes,
    taken: set[tuple[int, int]],
) -> int:
    """An operator that builds several nodes bears the first one's number: the greatest below.

    Believed only where the trace shows that the number was taken during recorded forward work:
    otherwise the node's own forward lies outside the trace, and the greatest number below is some
    other step's.
    """
    position = int(np.searchsorted(operators.sequence, number, side="left")) - 1
    position = operators.before(position, start)
    if position < 0:
        return NOTHING
    floor, began = int(operators.sequence[position]), int(operators.start[position])
    above = int(np.searchsorted(operators.sequence, number, side="right"))
    if above < len(operators.start) and operators.start[above] < start:
        return position
    if (run, floor) in taken:
        return position
    own = int(passes.start[run]) if run >= 0 else start
    since = int(np.searchsorted(passes.start, began, side="right"))
    pass_since = since < len(passes.start) and bool(passes.start[since] < own)
    return position if number - floor <= _NEAR and not pass_since else NOTHING


def _feeders(spans: Spans, passes: Ints) -> Ints:
    """For each AccumulateGrad the node that fed it: autograd runs it right after that one."""
    feeder = np.full(len(spans.start), NOTHING, np.int64)
    accumulates = np.array([name.endswith(_ACCUMULATE) for name in spans.node_names], bool)
    nodes = np.flatnonzero(spans.is_node)
    nodes = nodes[np.argsort(spans.start[nodes], kind="stable")]
    is_fed, run = accumulates[spans.node[nodes]], passes[nodes]

    def latest(*place: Ints) -> Ints:
        """For each node the last before it in the same place that is not fed itself."""
        order = np.lexsort((np.arange(len(nodes)), *place))
        begins = np.zeros(len(nodes), bool)
        for column in place:
            begins |= np.append(True, column[order][1:] != column[order][:-1])
        at = np.arange(len(nodes))
        # A place begins with nothing before it: what is carried on never crosses that.
        feeds = np.maximum.accumulate(np.where(is_fed[order], NOTHING, at))
        feeds[feeds < np.maximum.accumulate(np.where(begins, at, 0))] = NOTHING
        found = np.empty(len(nodes), np.int64)
        found[order] = np.where(feeds >= 0, nodes[order][feeds], NOTHING)
        return found

    if is_fed.any():
        here = latest(spans.thread[nodes], spans.parent[nodes])
        # Fed from another thread (a parameter on the CPU in a GPU model): the last to run.
        found = np.where(here >= 0, here, latest(run))
        found = np.where(take(passes, found, NOTHING - 1) == run, found, NOTHING)
        feeder[nodes[is_fed]] = found[is_fed]
    return feeder


# Which thread is which ---------------------------------------------------------------------------


def _map_threads(
    events: Events,
    spans: Spans,
    sequence: Ints,
    logical: Ints,
    operators: dict[int, _Operators],
) -> tuple[dict[int, int], set[int]]:
    """Logical thread numbers to recorded threads; and those that stay ambiguous."""
    wanted = [number for number in distinct(logical[sequence >= 0]) if number > 0]
    known = {n: events.logical_threads[n] for n in wanted if n in events.logical_threads}
    for number, votes in _votes(events, spans, logical).items():
        if number not in known:
            thread, most = votes.most_common(1)[0]
            if 2 * most > sum(votes.values()):
                known[number] = thread
    open_ = [number for number in wanted if number not in known]
    if len(open_) * len(operators) > _MOST_PAIRS:
        return known, set(open_)
    nodes_of = _by_thread(sequence, logical)
    scores = {
        number: _scores(events, spans, operators, nodes_of[number], sequence) for number in open_
    }
    ambiguous: set[int] = set()
    while scores:
        # One recorded thread is one logical thread: what is settled narrows what is left.
        free = {
            number: {t: s for t, s in found.items() if t not in known.values()}
            for number, found in scores.items()
        }
        settled: tuple[int, int | None] | None = None
        for number, found in free.items():
            best = sorted(found.items(), key=lambda item: item[1], reverse=True)
            if not best:
                settled = (number, None)
                break
            thread, score = best[0]
            clear = len(best) == 1 or best[1][1] < score
            rival = any(
                other != number and found_by.get(thread, (0, 0)) >= score
                for other, found_by in free.items()
            )
            if clear and not rival:
                settled = (number, thread)
                break
        if settled is None:
            ambiguous = set(free)
            break
        number, chosen = settled
        del scores[number]
        if chosen is not None:
            known[number] = chosen
    return known, ambiguous


def _by_thread(sequence: Ints, logical: Ints) -> dict[int, Ints]:
    """The numbered nodes of each logical thread."""
    numbered = np.flatnonzero(sequence >= 0)
    return dict(grouped(logical, numbered))


def _votes(events: Events, spans: Spans, logical: Ints) -> dict[int, Counter[int]]:
    """What Kineto's arrows say: each leads from a recorded thread to a node of a logical one."""
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    flows = events.flows
    for thread, mine in grouped(flows.backward_thread):
        span = spans.at(thread, flows.backward_time[mine])
        numbers = take(logical, span)
        for number, those in grouped(numbers):
            if number <= 0:
                continue
            origins, which = numbered(flows.forward_thread[mine[those]])
            for origin, many in zip(origins.tolist(), np.bincount(which).tolist(), strict=True):
                votes[number][origin] += many
    return votes


def _scores(
    events: Events,
    spans: Spans,
    operators: dict[int, _Operators],
    nodes: Ints,
    sequence: Ints,
) -> dict[int, tuple[int, int]]:
    """For each recorded thread how many of ``nodes`` it could have built, and by name too."""
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
    """Whether a node bears its operator's name: ``AddmmBackward0`` and ``aten::addmm``."""
    if len(operator) > 2 * len(node) + 1000:  # of one long name no copy is made for each node
        return False
    plain = re.sub(r"[^a-z0-9]", "", operator.rpartition("::")[2].lower())
    return bool(plain) and node.lower().startswith(plain)


def find_lines_of_nodes(events: Events, spans: Spans, join: Join) -> Ints:
    """For each span the index of its line in ``events.lines``, ``NOTHING`` for none.

    Only a node whose thread and number both stand in the table has a line: the nearest number below
    is often another line's. Where the table also names the kind of node, that has to agree.
    """
    table = events.lines
    line = np.full(len(spans.start), NOTHING, np.int64)
    if not table.lines:
        return line
    numbered = np.flatnonzero((join.builder >= 0) & (join.sequence >= 0) & spans.is_node)
    for index, mine in grouped(join.builder, numbered):
        _, thread = events.threads[index]
        if isinstance(thread, int):
            line[mine] = table.at(thread, join.sequence[mine])
    told = np.flatnonzero(line >= 0)
    # Python knows scripted graphs and C++ functions by one class.
    names = [
        (name.rpartition("::")[2], _OF_CPP if "::" in name else "") for name in spans.node_names
    ]
    for span, node, place in zip(
        told.tolist(), spans.node[told].tolist(), line[told].tolist(), strict=True
    ):
        if table.lines[place].node not in ("", *names[node]):
            line[span] = NOTHING
    return line
