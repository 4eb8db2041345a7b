"""The backward passes of a trace, and the steps that they belong to.

The profiler does not mark where the engine starts and stops: a pass is told from the next by what
happens between two nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backspot.report import StepUnit
from backspot.spans import Spans
from backspot.timeline import NOTHING
from backspot.trace import Category, Events
from backspot.trace.events import Ints

__all__ = ["Passes", "Steps", "find_passes", "find_steps", "separators", "top_nodes"]

_STEP = "ProfilerStep#"
_OPTIMIZER = "Optimizer.step#"
_BETWEEN_PASSES = (_STEP, "Optimizer.", "Optimizer#")


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


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps with a backward in them.

    Attributes:
        unit: what counts as a step.
        of_pass: each pass's step.
        duration: each step's clock time where the trace marks it, else 0; nanoseconds.
    """

    unit: StepUnit
    of_pass: Ints
    duration: Ints


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
    order = np.lexsort((-spans.end, spans.start)).tolist()
    top = top_nodes(spans)
    roots = [span for span in order if top[span] == span]
    between = separators(events, spans, np.array(top, np.int64) >= 0)
    steps = np.sort(events.start[events.named(Category.ANNOTATION, *_BETWEEN_PASSES)])
    starts, ends = spans.start.tolist(), spans.end.tolist()
    host, numbers, origin = spans.thread.tolist(), sequence.tolist(), logical.tolist()
    of_root: dict[int, int] = {}
    begin: list[int] = []
    finish: list[int] = []
    last_number: dict[int, int] = {}
    last_threads: set[int] = set()
    for span in roots:
        start, number = starts[span], origin[span]
        involved = {host[span], threads.get(number, host[span])}
        new = not begin
        if begin and start >= finish[-1]:
            rises = number in last_number and len(last_number) == 1 and numbers[span] >= 0
            new = (rises and numbers[span] >= last_number[number]) or any(
                _any_between(times, finish[-1], start)
                for times in (
                    steps,
                    *(between[t] for t in involved | last_threads if t in between),
                )
            )
        if new:
            begin.append(start)
            finish.append(ends[span])
            last_number, last_threads = {}, set()
        finish[-1] = max(finish[-1], ends[span])
        if numbers[span] >= 0:
            last_number[number] = numbers[span]
        last_threads |= involved
        of_root[span] = len(begin) - 1
    of_span = np.array([of_root.get(root, NOTHING) for root in top], np.int64)
    busiest, count = np.unique(spans.thread[np.array(roots, np.int64)], return_counts=True)
    start, end = np.array(begin, np.int64), np.array(finish, np.int64)
    return Passes(
        of_span=of_span,
        start=start,
        end=_with_callbacks(events, start, end, {t: between.get(t) for t in busiest.tolist()}),
        threads=tuple(busiest[np.argsort(-count, kind="stable")].tolist()),
    )


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


def top_nodes(spans: Spans) -> list[int]:
    """For each span the outermost node around it (itself included), ``NOTHING`` for none."""
    parent, is_node = spans.parent.tolist(), spans.is_node.tolist()
    top = [NOTHING] * len(parent)
    # A span that starts with the one inside it comes first.
    for span in np.lexsort((-spans.end, spans.start)).tolist():
        around = parent[span]
        if around >= 0 and top[around] >= 0:
            top[span] = top[around]
        elif is_node[span]:
            top[span] = span
    return top


def separators(events: Events, spans: Spans, within: np.ndarray) -> dict[int, Ints]:
    """On each thread the starts of the operators that no node contains, sorted.

    Args:
        events: the trace.
        spans: its spans.
        within: whether each span lies in a node, or is one.
    """
    operators = events.of(Category.OPERATOR)
    result = {}
    for thread in np.unique(events.thread[operators]).tolist():
        times = np.sort(events.start[operators[events.thread[operators] == thread]])
        span = spans.at(thread, times)
        # A label within a node belongs to the node: only what has no node around it separates.
        result[thread] = times[(span < 0) | ~np.append(within, False)[span]]
    return result


def _any_between(times: Ints, after: int, before: int) -> bool:
    low, high = np.searchsorted(times, (after, before), side="left")
    return bool(high > low)


def find_steps(events: Events, passes: Passes) -> Steps:
    """Tell which step each pass belongs to.

    The profiler's own marks come first (it writes them where it was given a schedule); without them
    each optimizer step ends a step; with neither, each pass is one.
    """
    count = len(passes.start)
    marks = events.named(Category.ANNOTATION, _STEP)
    optimizers = np.sort(events.start[events.named(Category.ANNOTATION, _OPTIMIZER)])
    if len(marks):
        marks = marks[np.argsort(events.start[marks], kind="stable")]
        inside = np.searchsorted(events.start[marks], passes.start, side="right") - 1
        # What runs before the first mark belongs to the first step.
        used, of_pass = np.unique(np.maximum(inside, 0), return_inverse=True)
        return Steps("profiler step", of_pass.astype(np.int64), events.duration[marks[used]])
    if len(optimizers):
        used, of_pass = np.unique(
            np.searchsorted(optimizers, passes.start, side="left"), return_inverse=True
        )
        return Steps("optimizer step", of_pass.astype(np.int64), np.zeros(len(used), np.int64))
    return Steps("backward pass", np.arange(count, dtype=np.int64), np.zeros(count, np.int64))
