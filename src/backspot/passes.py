"""The backward passes of a trace, and the steps that they belong to.

The profiler does not mark where the engine starts and stops: a pass is told from the next by what
happens between two nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backspot.report import StepUnit
from backspot.spans import Spans
from backspot.timeline import NOTHING, distinct, numbered
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
        begun, ended = (np.append(of, NOTHING)[last] for of in (self.start, self.end))
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
    host = spans.thread[roots]
    built = host.copy()
    for known, thread in threads.items():
        built[origin == known] = thread
    involved = {
        thread: (host == thread) | (built == thread)
        for thread in distinct(np.append(host, built))
        if thread in between
    }
    by_thread = {thread: parted(between[thread]) for thread in involved}
    numbered = {n: (origin == n) & (number >= 0) for n in distinct(origin[number >= 0])}
    rises = np.zeros(len(roots), bool)
    for mine in numbered.values():
        at = np.flatnonzero(mine)
        rises[at[1:]] = number[at[1:]] >= number[at[:-1]]
    until = {thread: np.cumsum(mine) for thread, mine in involved.items()}
    seen = {n: np.cumsum(mine) for n, mine in numbered.items()}
    maybe = apart & np.logical_or.reduce([by_step, rises, *by_thread.values()])
    since = 0
    for root in np.flatnonzero(maybe).tolist():
        # What this pass has had so far, from the root that it began with.
        so_far = [
            n for n, many in seen.items() if many[root - 1] > (many[since - 1] if since else 0)
        ]
        new = by_step[root] or (rises[root] and so_far == [int(origin[root])])
        for thread, hit in by_thread.items():
            if new:
                break
            many = until[thread]
            new = hit[root] and many[root] > (many[since - 1] if since else 0)
        if new:
            begins[root], since = True, root
    return begins


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
    marks = events.thread[events.named(Category.ANNOTATION, *_BETWEEN_PASSES)]
    for thread, times in between.items():
        mine = operators[events.thread[operators] == thread]
        made = events.start[operators[forward & (events.thread[operators] == thread)]]
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
    for thread in distinct(events.thread[operators]):
        mine = operators[events.thread[operators] == thread]
        span = spans.of(events, mine)
        # A label within a node belongs to the node: only what has no node around it separates.
        result[thread] = np.sort(events.start[mine[(span < 0) | ~np.append(within, False)[span]]])
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
