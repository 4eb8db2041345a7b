"""The backward passes of a trace, and the steps that they belong to.

The profiler does not mark where the engine starts and stops. What happens between two nodes shows
whether the second belongs to another pass.
"""

from __future__ import annotations

import msgspec
import numpy as np

from backspot.analysis.attribution.spans import Spans
from backspot.analysis.attribution.updates import optimizer_steps
from backspot.analysis.timeline import NOTHING, distinct, grouped, is_among, merged, numbered, take
from backspot.results.report import StepUnit
from backspot.trace import Category, Events
from backspot.trace.events import Ints, Mask
from backspot.trace.names import OPTIMIZER, PROFILER_STEP

_BETWEEN_PASSES = (PROFILER_STEP, *OPTIMIZER)


class Passes(msgspec.Struct, frozen=True):
    """Backward passes in the order in which they start.

    Attributes:
        of_span: for each span the pass that it runs in, ``NOTHING`` for none.
        start: nanoseconds, when the host starts the first node of the pass.
        end: nanoseconds, when the host ends the last node, or the engine's callbacks after it.
        threads: threads that ran nodes, those that ran the most first.
    """

    of_span: Ints
    start: Ints
    end: Ints
    threads: tuple[int, ...]

    def after(self, start: Ints, end: Ints) -> Ints:
        """Return the end of the last pass in each interval, or the interval's start without one.

        An optimizer step with a closure runs the closure until then, and updates nothing.
        """
        last = np.searchsorted(self.start, end, side="left") - 1
        begun, ended = (take(column, last) for column in (self.start, self.end))
        return np.where(begun >= start, np.minimum(ended, end), start)


class Steps(msgspec.Struct, frozen=True):
    """Steps with a backward in them.

    Attributes:
        unit: what counts as a step.
        of_pass: each pass's step.
        count: how many there are.
        start: when each step's mark begins, in nanoseconds; empty where the trace has no marks.
        end: when each step's mark ends.
    """

    unit: StepUnit
    of_pass: Ints
    count: int
    start: Ints
    end: Ints


def find_passes(
    events: Events, spans: Spans, sequence: Ints, logical: Ints, threads: dict[int, int]
) -> Passes:
    """Split the nodes into passes.

    Between two nodes of one pass only the engine runs. So a pass ends if, before the next node
    starts, an operator runs outside the engine, on the thread that runs the nodes or on the one
    that built them; or if a step or an optimizer begins. A pass also ends if sequence numbers rise
    again, because the engine goes from the node made last to the first.

    Args:
        sequence: each span's sequence number.
        logical: each span's logical thread.
    """
    top = top_nodes(spans)
    order = np.lexsort((-spans.end, spans.start))
    roots = order[top[order] == order]
    between = separators(events, spans, top >= 0)
    boundaries = _find_boundaries(events, spans, roots, between, sequence, logical, threads)
    begins = boundaries.starts_pass()
    of_root = np.full(len(top) + 1, NOTHING, np.int64)
    of_root[roots] = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    busiest, thread_of = numbered(spans.thread[roots])
    count = np.bincount(thread_of, minlength=len(busiest))
    start = spans.start[roots[first]]
    end = np.maximum.reduceat(spans.end[roots], first) if len(first) else start.copy()
    return Passes(
        of_span=of_root[top],
        start=start,
        end=_with_callbacks(events, start, end, {t: between.get(t) for t in busiest.tolist()}),
        threads=tuple(busiest[np.argsort(-count, kind="stable")].tolist()),
    )


class _Boundaries(msgspec.Struct, frozen=True):
    """What separates the outermost nodes, or roots, of one pass from those of the next.

    Arrays with one entry a root, in the order of their starts. The *gap* before a root begins when
    all roots before have ended.

    Attributes:
        exists: whether there is a gap: whether all roots before have ended.
        marked: whether a step or an optimizer begins in the gap.
        operated: the last root, up to this one, of a thread that runs an operator outside the
            engine in the gap; ``NOTHING`` for none.
        rises: whether the sequence number is not below the last one on the same logical thread.
        same: the root that used a number last, if it is of the same logical thread, else
            ``NOTHING``.
        other: the root of another logical thread than that one that used a number last.
    """

    exists: Mask
    marked: Mask
    operated: Ints
    rises: Mask
    same: Ints
    other: Ints

    def step_between(self, root: int) -> bool:
        """Whether a step or an optimizer begins in the gap before the root."""
        return bool(self.marked[root])

    def operator_between(self, root: int, first: int) -> bool:
        """Whether an operator runs in the gap, on a thread of a root since the pass's ``first``."""
        return bool(self.operated[root] >= first)

    def numbers_rise(self, root: int, first: int) -> bool:
        """Whether sequence numbers rise again, all since the pass's ``first`` being of one thread.

        The engine runs nodes in the reverse order of their making. If the nodes of several threads
        alternate, their numbers cannot be compared.
        """
        return bool(self.rises[root]) and self.same[root] >= first > self.other[root]

    def starts_pass(self) -> Mask:
        """Whether a pass starts with each root."""
        starts = np.zeros(len(self.exists), bool)
        starts[:1] = True
        first = 0
        possible = self.exists & (self.marked | self.rises | (self.operated >= 0))
        for root in np.flatnonzero(possible).tolist():
            if (
                self.step_between(root)
                or self.operator_between(root, first)
                or self.numbers_rise(root, first)
            ):
                starts[root], first = True, root
        return starts


def _find_boundaries(
    events: Events,
    spans: Spans,
    roots: Ints,
    between: dict[int, Ints],
    sequence: Ints,
    logical: Ints,
    threads: dict[int, int],
) -> _Boundaries:
    """Find what separates the roots, given in the order of their starts; see ``find_passes``."""
    start, origin, host = spans.start[roots], logical[roots], spans.thread[roots]
    ended = np.maximum.accumulate(spans.end[roots])[:-1]
    marks = np.sort(events.start[events.prefixed(Category.ANNOTATION, *_BETWEEN_PASSES)])
    low = np.searchsorted(marks, ended, side="left")
    marked = np.searchsorted(marks, start[1:], side="left") > low
    origins, origin_of = np.unique(origin, return_inverse=True)
    built = np.array([threads.get(n, NOTHING) for n in origins.tolist()], np.int64)[origin_of]
    rises, same, other = _rises(origin, sequence[roots])
    return _Boundaries(
        exists=np.append(False, start[1:] >= ended)[: len(roots)],
        marked=np.append(False, marked)[: len(roots)],
        operated=_last_operated(between, host, np.where(built >= 0, built, host), start, ended),
        rises=rises,
        same=same,
        other=other,
    )


def _last_operated(
    between: dict[int, Ints], host: Ints, built: Ints, start: Ints, ended: Ints
) -> Ints:
    """Find the last root, up to each one, of a thread that runs an operator in the gap before it.

    A root is of the thread that runs it and of the thread that built it.

    Args:
        between: the starts of the operators outside the engine on each thread.
        host: the thread that runs each root.
        start: when each root starts.
        ended: when all up to each root but the last have ended.
    """
    count = len(host)
    last_root = np.full(count, NOTHING, np.int64)
    threads = [thread for thread in distinct(merged(host, built)) if thread in between]
    if not threads:
        return last_root
    time = np.concatenate([between[thread] for thread in threads])
    thread = np.repeat(threads, [len(between[thread]) for thread in threads])

    # The operators that start in a gap: after all roots before have ended, and before the next.
    next_root = np.searchsorted(ended, time, side="right")
    in_gap = (next_root > 0) & (next_root < count)
    in_gap[in_gap] = time[in_gap] < start[next_root[in_gap]]
    thread, next_root = thread[in_gap], next_root[in_gap]

    # Thread and root make one key: the latest key up to an operator's own is the last such root.
    roots = np.arange(count)
    keys = merged(host * count + roots, built * count + roots)
    wanted = thread * count + next_root
    latest = keys[np.searchsorted(keys, wanted, side="right") - 1]
    exists = (latest // count == thread) & (latest <= wanted)
    np.maximum.at(last_root, next_root[exists], latest[exists] % count)
    return last_root


def _rises(origin: Ints, number: Ints) -> tuple[Mask, Ints, Ints]:
    """Find where sequence numbers rise again, and which roots used numbers last.

    Args:
        origin: each root's logical thread.
        number: its sequence number.

    Returns:
        For each root: whether its number is not below the one before on its logical thread; the
        last root before that has a number, if it is of the same logical thread, else ``NOTHING``;
        and the last root before that has a number and is of another logical thread than that one.
    """
    numbered_roots = np.flatnonzero(number >= 0)
    count = len(numbered_roots)

    # On each logical thread, a number beside the one before.
    by_origin = numbered_roots[np.argsort(origin[numbered_roots], kind="stable")]
    before, after = by_origin[:-1], by_origin[1:]
    rises = np.zeros(len(origin), bool)
    rises[after] = (origin[before] == origin[after]) & (number[after] >= number[before])

    # Of runs of one logical thread, the root before a run is the last of another thread.
    switches = origin[numbered_roots[1:]] != origin[numbered_roots[:-1]]
    begins_run = np.append(True, switches)[:count]
    beginning = np.maximum.accumulate(np.where(begins_run, np.arange(count), 0))
    last_of_others = take(numbered_roots, beginning - 1)

    last_position = np.searchsorted(numbered_roots, np.arange(len(origin))) - 1
    last = take(numbered_roots, last_position)
    is_same = (last >= 0) & (take(origin, last) == origin)
    return rises, np.where(is_same, last, NOTHING), take(last_of_others, last_position)


def _with_callbacks(
    events: Events, start: Ints, end: Ints, between: dict[int, Ints | None]
) -> Ints:
    """Return when each pass ends, including callbacks that the engine runs after the last node.

    Data-parallel wrappers end their communication in callbacks. Callbacks can be distinguished from
    what the program does after its backward only on a thread of the engine's own.
    """
    ends: Ints = end.copy()
    operators = events.of(Category.OPERATOR)
    forward = (events.sequence[operators] >= 0) & (events.forward_thread[operators] <= 0)
    marks = {*distinct(events.thread[events.prefixed(Category.ANNOTATION, *_BETWEEN_PASSES)])}
    for thread, positions in grouped(events.thread[operators]):
        times = between.get(thread)
        if times is None or thread in marks:
            continue
        own_operators = operators[positions]
        outside = is_among(events.start[own_operators], times)
        if (outside & forward[positions]).any():
            continue
        after = own_operators[outside]
        run = np.searchsorted(start, events.start[after], side="right") - 1
        after, run = after[run >= 0], run[run >= 0]
        np.maximum.at(ends, run, events.end[after])
    return ends


def top_nodes(spans: Spans) -> Ints:
    """Return the outermost node around each span, which may be itself, ``NOTHING`` for none."""
    span = np.arange(len(spans.parent))
    # The outermost node so far, and the next span to look at: each round doubles the distance.
    top = np.append(np.where(spans.is_node, span, NOTHING), NOTHING)
    up = np.append(spans.parent, NOTHING)
    while (up >= 0).any():
        above = top[up]
        top, up = np.where(above >= 0, above, top), up[up]
    return top[:-1]


def separators(events: Events, spans: Spans, within: Mask) -> dict[int, Ints]:
    """Return the sorted starts of the operators on each thread that are in no node.

    Args:
        within: whether each span lies in a node, or is one.
    """
    operators = events.of(Category.OPERATOR)
    result = {}
    for thread, members in grouped(events.thread, operators):
        span = spans.of(events, members)
        # A label within a node belongs to the node, and separates nothing.
        start = events.start[members[~take(within, span, False)]]
        result[thread] = np.sort(start, kind="stable")  # fast where parts are sorted
    return result


def find_steps(events: Events, spans: Spans, passes: Passes, operator: Ints) -> Steps:
    """Find the step of each pass.

    If the profiler marks steps (with a schedule it does), these are the steps. Without marks, each
    optimizer step ends a step. Without either, each pass is a step. Marks that begin between a
    forward and its backward, as Lightning's profiler writes them, do not count.

    Args:
        operator: the forward operator that made each span, ``NOTHING`` for none.
    """
    count = len(passes.start)
    marks = events.prefixed(Category.ANNOTATION, PROFILER_STEP)
    updates = np.sort(events.end[optimizer_steps(events)])
    marks = marks[np.argsort(events.start[marks], kind="stable")]
    inside = np.searchsorted(events.start[marks], passes.start, side="right") - 1
    if len(marks) and not _split(
        take(events.start[marks], inside), events, spans, passes, operator
    ):
        # A pass before the first mark belongs to the first step.
        used, of_pass = np.unique(np.maximum(inside, 0), return_inverse=True)
        marks = marks[used]
        return Steps("profiler step", of_pass, len(used), events.start[marks], events.end[marks])
    nothing = np.empty(0, np.int64)
    if len(updates):
        # If the optimizer runs a closure, the passes before its end are of its step.
        used, of_pass = np.unique(
            np.searchsorted(updates, passes.start, side="right"), return_inverse=True
        )
        return Steps("optimizer step", of_pass, len(used), nothing, nothing)
    return Steps("backward pass", np.arange(count, dtype=np.int64), count, nothing, nothing)


def _split(marked: Ints, events: Events, spans: Spans, passes: Passes, operator: Ints) -> bool:
    """Whether the profiler's marks begin between the forwards and their backwards.

    Args:
        marked: when the mark around each pass begins, ``NOTHING`` without one.
        operator: the forward operator that made each span, ``NOTHING`` for none.
    """
    joined = np.flatnonzero((operator >= 0) & (passes.of_span >= 0) & spans.is_node)
    run, made_at = passes.of_span[joined], events.start[operator[joined]]
    forward = made_at < passes.start[run]  # a double backward is made in a pass
    # Lightning divides the loss after the mark, so not all nodes decide, but most.
    return bool(2 * (made_at < marked[run])[forward].sum() > forward.sum())
