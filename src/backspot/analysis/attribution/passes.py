"""The backward passes of a trace, and the steps that they belong to.

The profiler does not mark where the engine starts and stops: a pass is told from the next by what
happens between two nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backspot.analysis.attribution.spans import Spans
from backspot.analysis.timeline import NOTHING, distinct, grouped, merged, numbered, take
from backspot.results.report import StepUnit
from backspot.trace import Category, Events
from backspot.trace.events import Ints

__all__ = [
    "OPTIMIZER_STEP",
    "STEP_MARK",
    "Passes",
    "Steps",
    "find_passes",
    "find_steps",
    "separators",
    "top_nodes",
]

STEP_MARK = "ProfilerStep#"
"""How the profiler marks a step."""
OPTIMIZER_STEP = "Optimizer.step#"
"""How PyTorch marks an optimizer's step."""
_BETWEEN_PASSES = (STEP_MARK, "Optimizer.", "Optimizer#")


@dataclass(frozen=True, slots=True)
class Passes:
    """Backward passes in the order in which they start.

    Attributes:
        of_span: for each span the pass that it runs in, ``NOTHING`` for none.
        start: nanoseconds, when the host starts the pass's first node.
        end: nanoseconds, when the host ends its last, or what the engine calls after it.
        threads: threads that ran nodes, those that ran the most first.
    """

    of_span: Ints
    start: Ints
    end: Ints
    threads: tuple[int, ...]

    def after(self, start: Ints, end: Ints) -> Ints:
        """When the last pass within each stretch has ended; the stretch's start where none is.

        So long a step of an optimizer that is given a closure does the closure's work.
        """
        last = np.searchsorted(self.start, end, side="left") - 1
        begun, ended = (take(of, last) for of in (self.start, self.end))
        return np.where(begun >= start, np.minimum(ended, end), start)


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps with a backward in them.

    Attributes:
        unit: what counts as a step.
        of_pass: each pass's step.
        count: how many there are.
        start: when each step's mark begins, in nanoseconds; empty where the trace has no marks.
        end: when it ends.
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

    Between two nodes of one pass nobody does anything but the engine. So a pass ends where, before
    the next node starts, an operator runs outside the engine on the thread that runs the nodes or
    on the one that built them, or a step or an optimizer begins; or where sequence numbers rise
    again, since the engine goes from the last made node to the first.

    Args:
        events: the trace.
        spans: its spans.
        sequence: each span's sequence number.
        logical: each span's logical thread.
        threads: recorded threads of logical ones.
    """
    top = top_nodes(spans)
    order = np.lexsort((-spans.end, spans.start))
    roots = order[top[order] == order]
    between = separators(events, spans, top >= 0)
    begins = _first_roots(events, spans, roots, between, sequence, logical, threads)
    of_root = np.full(len(top) + 1, NOTHING, np.int64)
    of_root[roots] = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    busiest, which = numbered(spans.thread[roots])
    count = np.bincount(which, minlength=len(busiest))
    start = spans.start[roots[first]]
    end = np.maximum.reduceat(spans.end[roots], first) if len(first) else start.copy()
    return Passes(
        of_span=of_root[top],
        start=start,
        end=_with_callbacks(events, start, end, {t: between.get(t) for t in busiest.tolist()}),
        threads=tuple(busiest[np.argsort(-count, kind="stable")].tolist()),
    )


def _first_roots(
    events: Events,
    spans: Spans,
    roots: Ints,
    between: dict[int, Ints],
    sequence: Ints,
    logical: Ints,
    threads: dict[int, int],
) -> np.ndarray:
    """For each of the outermost nodes, in the order of their starts, whether a pass begins with it.

    Where one might is found for all at once; those few are then looked at one after the other.
    """
    begins = np.zeros(len(roots), bool)
    if not len(roots):
        return begins
    begins[0] = True
    start, number, origin = spans.start[roots], sequence[roots], logical[roots]
    ended = np.maximum.accumulate(spans.end[roots])[:-1]
    apart = np.append(False, start[1:] >= ended)

    def parted(times: Ints) -> np.ndarray:
        """Whether one of ``times`` lies between each root and what ended before it."""
        low = np.searchsorted(times, ended, side="left")
        return np.append(False, np.searchsorted(times, start[1:], side="left") > low)

    by_step = parted(np.sort(events.start[events.named(Category.ANNOTATION, *_BETWEEN_PASSES)]))
    origins, which = np.unique(origin, return_inverse=True)
    known = np.array([threads.get(n, NOTHING) for n in origins.tolist()], np.int64)[which]
    host = spans.thread[roots]
    operated = _last_operated(between, host, np.where(known >= 0, known, host), start, ended)
    rises, last, other = _rises(origin, number)
    maybe = np.flatnonzero(apart & (by_step | rises | (operated >= 0)))
    since = 0
    for root, step, rise, mine, theirs, hit in zip(
        *(column.tolist() for column in (maybe, by_step[maybe], rises[maybe])),
        *(column.tolist() for column in (last[maybe], other[maybe], operated[maybe])),
        strict=True,
    ):
        if step or hit >= since or (rise and mine >= since > theirs):
            begins[root], since = True, root
    return begins


def _last_operated(
    between: dict[int, Ints], host: Ints, built: Ints, start: Ints, ended: Ints
) -> Ints:
    """For each root a root of a thread on which an operator runs between it and what ended before.

    Of all these, itself included, the last: where that is of the same pass, the pass has ended.

    Args:
        between: the starts of operators outside the engine, on each thread.
        host: the thread that runs each root.
        built: the thread that built it.
        start: when each root starts.
        ended: when all up to each root have ended; of the last root it does not matter.
    """
    count = len(host)
    found = np.full(count, NOTHING, np.int64)
    times = [
        (thread, between[thread]) for thread in distinct(merged(host, built)) if thread in between
    ]
    if not times:
        return found
    thread = np.repeat([thread for thread, _ in times], [len(some) for _, some in times])
    time = np.concatenate([some for _, some in times])
    root = np.searchsorted(ended, time, side="right")
    parts = (root > 0) & (root < count)
    parts[parts] = time[parts] < start[root[parts]]
    thread, root = thread[parts], root[parts]
    roots = np.arange(count)
    involved = merged(host * count + roots, built * count + roots)
    wanted = thread * count + root
    latest = involved[np.searchsorted(involved, wanted, side="right") - 1]
    same = (latest // count == thread) & (latest <= wanted)
    np.maximum.at(found, root[same], latest[same] % count)
    return found


def _rises(origin: Ints, number: Ints) -> tuple[np.ndarray, Ints, Ints]:
    """Where sequence numbers rise again, and whose were used last.

    Args:
        origin: each root's logical thread.
        number: its sequence number.

    Returns:
        For each root: whether its number is not below the one before on its logical thread; the
        last root before it that has a number, if it is of the same logical thread, else
        ``NOTHING``; and the last one that is of another than that.
    """
    has = np.flatnonzero(number >= 0)
    by_origin = has[np.argsort(origin[has], kind="stable")]
    one, next_ = by_origin[:-1], by_origin[1:]
    rises = np.zeros(len(origin), bool)
    rises[next_] = (origin[one] == origin[next_]) & (number[next_] >= number[one])
    changes = np.append(True, origin[has[1:]] != origin[has[:-1]])[: len(has)]
    began = np.maximum.accumulate(np.where(changes, np.arange(len(has)), 0))
    others = take(has, began - 1)  # the one before that with which a stretch began
    before = np.searchsorted(has, np.arange(len(origin))) - 1
    last = take(has, before)
    same = (last >= 0) & (take(origin, last) == origin)
    return rises, np.where(same, last, NOTHING), take(others, before)


def _with_callbacks(
    events: Events, start: Ints, end: Ints, between: dict[int, Ints | None]
) -> Ints:
    """When each pass ends, with the callbacks that the engine runs after the last node.

    Data-parallel wrappers end their communication there. They are told from what a program does
    after its backward only on a thread that is the engine's own.
    """
    ends: Ints = end.copy()
    operators = events.of(Category.OPERATOR)
    forward = (events.sequence[operators] >= 0) & (events.forward_thread[operators] <= 0)
    marks = {*distinct(events.thread[events.named(Category.ANNOTATION, *_BETWEEN_PASSES)])}
    for thread, at in grouped(events.thread[operators]):
        times = between.get(thread)
        mine = operators[at]
        made = events.start[mine[forward[at]]]
        if times is None or thread in marks or np.isin(made, times).any():
            continue
        after = mine[np.isin(events.start[mine], times)]
        run = np.searchsorted(start, events.start[after], side="right") - 1
        after, run = after[run >= 0], run[run >= 0]
        np.maximum.at(ends, run, events.end[after])
    return ends


def top_nodes(spans: Spans) -> Ints:
    """For each span the outermost node around it (itself included), ``NOTHING`` for none."""
    span = np.arange(len(spans.parent))
    # The outermost node so far, and where the way up goes on: each round doubles what it covers.
    top = np.append(np.where(spans.is_node, span, NOTHING), NOTHING)
    up = np.append(spans.parent, NOTHING)
    while (up >= 0).any():
        above = top[up]
        top, up = np.where(above >= 0, above, top), up[up]
    return top[:-1]


def separators(events: Events, spans: Spans, within: np.ndarray) -> dict[int, Ints]:
    """On each thread the starts of the operators that no node contains, sorted.

    Args:
        events: the trace.
        spans: its spans.
        within: whether each span lies in a node, or is one.
    """
    operators = events.of(Category.OPERATOR)
    result = {}
    for thread, mine in grouped(events.thread, operators):
        span = spans.of(events, mine)
        # A label within a node belongs to the node: only what has no node around it separates.
        result[thread] = np.sort(events.start[mine[~take(within, span, False)]])
    return result


def find_steps(events: Events, passes: Passes) -> Steps:
    """Tell which step each pass belongs to.

    The profiler's own marks come first (it writes them where it was given a schedule); without them
    each optimizer step ends a step; with neither, each pass is one.
    """
    count = len(passes.start)
    marks = events.named(Category.ANNOTATION, STEP_MARK)
    optimizers = np.sort(events.start[events.named(Category.ANNOTATION, OPTIMIZER_STEP)])
    if len(marks):
        marks = marks[np.argsort(events.start[marks], kind="stable")]
        inside = np.searchsorted(events.start[marks], passes.start, side="right") - 1
        # What runs before the first mark belongs to the first step.
        used, of_pass = np.unique(np.maximum(inside, 0), return_inverse=True)
        marks = marks[used]
        return Steps("profiler step", of_pass, len(used), events.start[marks], events.end[marks])
    nothing = np.empty(0, np.int64)
    if len(optimizers):
        used, of_pass = np.unique(
            np.searchsorted(optimizers, passes.start, side="left"), return_inverse=True
        )
        return Steps("optimizer step", of_pass, len(used), nothing, nothing)
    return Steps("backward pass", np.arange(count, dtype=np.int64), count, nothing, nothing)
