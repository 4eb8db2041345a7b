"""When optimizers take their steps, and which compiled regions are theirs.

PyTorch marks each step of its optimizers. A step that is compiled has no mark: there the table of
compiled code tells in which regions Dynamo met an optimizer.
"""

from __future__ import annotations

import numpy as np

from backspot.analysis.timeline import NOTHING, enclosing, grouped, innermost, is_in, take
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask
from backspot.trace.operations import optimizer_of


def optimizer_steps(events: Events) -> Ints:
    """Return the steps of optimizers by start, as PyTorch marks them, or as regions are compiled.

    A step that several regions make is several.
    """
    cache = vars(events)
    if "_optimizer_steps" not in cache:
        marks = events.prefixed(Category.ANNOTATION, names.OPTIMIZER_STEP)
        compiled = _compiled_steps(events)
        marked = enclosing(events, marks, events.thread[compiled], events.start[compiled]) >= 0
        steps = np.concatenate([marks, compiled[~marked]])
        cache["_optimizer_steps"] = steps[np.argsort(events.start[steps], kind="stable")]
    steps_found: Ints = cache["_optimizer_steps"]
    return steps_found


def forms_of(events: Events, steps: Ints) -> list[str]:
    """Return for each marked step the class of ``torch.optim`` whose forms its optimizer has.

    The forms are those that the arguments ``fused`` and ``foreach`` choose. ``""`` stands for an
    optimizer that has none of them, whatever its name is. Who recorded the trace without Backspot
    does not tell that: then the name counts.
    """
    forms = [optimizer_of(events.names[name]) for name in events.name[steps]]
    marks = events.prefixed(Category.ANNOTATION, names.OPTIMIZER_FORMS)
    position = {step: index for index, step in enumerate(steps.tolist())}
    around = enclosing(events, steps, events.thread[marks], events.start[marks])
    for step, name in zip(around.tolist(), events.name[marks].tolist(), strict=True):
        if step >= 0:
            form = events.names[name].removeprefix(names.OPTIMIZER_FORMS)
            forms[position[step]] = "" if form == names.NO_FORMS else form
    return forms


def are_of_optimizers(events: Events, regions: Ints, nodes: Ints) -> Mask:
    """Whether each compiled region works for an optimizer's step, and not for a closure in it.

    A closure, as LBFGS calls it, runs forwards, which make nodes, and backwards.

    Args:
        nodes: when backward nodes start, sorted.
    """
    steps = optimizer_steps(events)
    start = events.start[regions]
    step = enclosing(events, steps, events.thread[regions], start)
    ends = take(events.end, step)
    followed = np.searchsorted(nodes, ends, side="left") > np.searchsorted(nodes, start)
    return (step >= 0) & ~(followed & _regions_make_nodes(events, regions))


def make_nodes(events: Events, threads: Ints, start: Ints, end: Ints) -> Mask:
    """Whether each interval of a thread has operators that make nodes.

    Then autograd's number is higher behind it. Operators that make no node can have the next
    number, too. Behind the last interval of a trace the nodes tell that have its number.
    """
    makes_nodes = np.zeros(len(start), bool)
    operators = events.of(Category.OPERATOR)
    numbered = operators[events.sequence[operators] >= 0]
    is_forward = events.forward_thread[numbered] <= 0
    nodes, forward = numbered[~is_forward], numbered[is_forward]
    nodes_of = events.sequence[nodes]
    of_thread = dict(grouped(events.thread[forward]))
    for thread, members in grouped(threads):
        makers = forward[of_thread.get(thread, forward[:0])]
        makers = makers[np.argsort(events.start[makers], kind="stable")]
        if not len(makers):
            continue
        first, after = (
            np.searchsorted(events.start[makers], moments[members]) for moments in (start, end)
        )
        number = events.sequence[makers]
        is_last = after == len(makers)
        last = len(makers) - 1
        rises = number[np.minimum(after, last)] > number[np.minimum(first, last)]
        rises[is_last] = is_in(number[-1:], nodes_of).all()
        makes_nodes[members] = (after > first) & rises
    return makes_nodes


def _regions_make_nodes(events: Events, regions: Ints) -> Mask:
    return make_nodes(events, events.thread[regions], events.start[regions], events.end[regions])


def _compiled_steps(events: Events) -> Ints:
    """Return the outermost regions that make no node and hold an optimizer's compiled step."""
    of_optimizers = {
        f"{names.COMPILED_REGION}{compilation.region}"
        for compilation in events.compiled.compilations
        if compilation.optimizer or compilation.file.startswith(names.OPTIMIZER_FILES)
    }
    if not of_optimizers:
        return np.empty(0, np.int64)
    is_region = events.prefix_mask(names.COMPILED_REGION)
    regions = events.chosen(is_region, Category.OPERATOR, Category.ANNOTATION)
    regions = regions[np.lexsort((-events.end[regions], events.start[regions]))]
    is_optimizer = np.array([name in of_optimizers for name in events.names], bool)
    is_step = is_optimizer[events.name[regions]]
    parent = np.full(len(regions), NOTHING, np.int64)
    for _, members in grouped(events.thread[regions]):
        nested = innermost(events.start[regions[members]], events.end[regions[members]])
        parent[members] = take(members, nested.parent)
    for inner in range(len(regions) - 1, -1, -1):  # the inner ones come last
        if is_step[inner] and parent[inner] >= 0:
            is_step[parent[inner]] = True
    is_step &= ~_regions_make_nodes(events, regions)
    outermost: Ints = regions[is_step & ~take(is_step, parent, False)]
    return outermost
