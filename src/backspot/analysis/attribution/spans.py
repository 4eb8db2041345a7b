"""The spans on the host that own work: module calls in forward, autograd nodes in backward.

Spans are found by their names alone. This file also decides, once for the whole trace, which labels
name the modules: Backspot's own, Lightning's, or the module events of ``with_stack=True``.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from msgspec.structs import replace

from backspot.analysis.attribution.updates import are_of_optimizers
from backspot.analysis.timeline import NOTHING, Nesting, grouped, innermost, numbered, take
from backspot.results.report import LabelSource
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask
from backspot.trace.labels import Kind, Label

_MOST_PATH = 2_000  # characters of a path that is composed of class names
_ROUNDING = 2_000  # nanoseconds: old traces are whole microseconds


class Module(msgspec.Struct, frozen=True):
    """A module that labels name, or a compiled region without a label around it.

    Attributes:
        path: the module's path; the region's function, or its name as the profiler writes it.
        class_name: the module's class.
        root: the path of the outermost module around it.
        is_region: true for a compiled region, whose module is not known.
    """

    path: str
    class_name: str
    root: str
    is_region: bool = False

    @property
    def is_function(self) -> bool:
        """Whether this is a compiled region of which the function is known, and is no module's."""
        return self.is_region and not self.path.startswith(names.COMPILED_REGION)


class Spans(msgspec.Struct, frozen=True, dict=True):
    """Module calls and autograd nodes of all threads; arrays with one entry a span.

    A span that is neither is code that checkpointing runs again.

    Attributes:
        start: nanoseconds.
        end: nanoseconds.
        thread: index into ``Events.threads``.
        module: index into ``modules`` for a module's call, ``NOTHING`` for a node.
        node: index into ``node_names`` for a node, ``NOTHING`` for a module's call.
        marked: for a node, the module that a marker in it names, else ``NOTHING``.
        caller: for code that runs again, the module's call that checkpointed it.
        parent: the span directly around, ``NOTHING`` for none.
        modules: the modules that labels name.
        node_names: names of autograd nodes.
        nesting: each thread's spans: their indices, and how they nest.
        source: what wrote the labels.
        unmarked: the calls with tensors that the live half could not safely mark, as labels.
    """

    start: Ints
    end: Ints
    thread: Ints
    module: Ints
    node: Ints
    marked: Ints
    caller: Ints
    parent: Ints
    modules: tuple[Module, ...]
    node_names: tuple[str, ...]
    nesting: dict[int, tuple[Ints, Nesting]]
    source: LabelSource
    unmarked: tuple[Label, ...]

    @property
    def is_node(self) -> Mask:
        """Whether each span is an autograd node."""
        return self.node >= 0

    def at(self, thread: int, times: Ints) -> Ints:
        """Return the innermost span on ``thread`` at each of ``times``."""
        if thread not in self.nesting:
            return np.full(len(times), NOTHING, np.int64)
        indices, nesting = self.nesting[thread]
        return take(indices, nesting.timeline.at(times))

    def of(self, events: Events, index: Ints) -> Ints:
        """Return the innermost span at the start of each of these host events, on its thread."""
        innermost_spans = vars(self).get("_of")
        if innermost_spans is None:
            column = np.full(len(events.start), NOTHING, np.int32)
            for thread, members in grouped(events.thread):
                column[members] = self.at(thread, events.start[members])
            innermost_spans = vars(self)["_of"] = column
        chosen: Ints = innermost_spans[index].astype(np.int64)
        return chosen

    def any_starts(self, threads: Ints, after: Ints, before: Ints) -> Mask:
        """For each thread given, whether a span starts between two times, both excluded."""
        any_start = np.zeros(len(threads), bool)
        for thread, members in grouped(threads):
            edges = self.nesting[thread][1].timeline.edges
            low = np.searchsorted(edges, after[members], side="right")
            any_start[members] = np.searchsorted(edges, before[members], side="left") > low
        return any_start


def find_spans(events: Events) -> Spans:
    """Find the module calls and the autograd nodes of a trace."""
    source, calls, identity = _module_calls(events)
    nodes, node_names, node = _nodes(events)
    index = np.concatenate([calls, nodes])
    start, end, thread = events.start[index], events.end[index], events.thread[index]
    parent, nesting = nest(start, end, thread)
    called = np.concatenate([identity, np.full(len(nodes), NOTHING, np.int64)])
    modules, called = _modules(events, source, called, parent, start, end)
    spans = Spans(
        start=start,
        end=end,
        thread=thread,
        module=called,
        node=np.concatenate([np.full(len(calls), NOTHING, np.int64), node]),
        marked=np.full(len(index), NOTHING, np.int64),
        caller=np.full(len(index), NOTHING, np.int64),
        parent=parent,
        modules=modules,
        node_names=node_names,
        nesting=nesting,
        source=source,
        unmarked=tuple(
            label for label in events.labels if label is not None and label.kind is Kind.UNMARKED
        ),
    )
    _mark(events, spans)
    return _with_regions(events, spans)


def _with_regions(events: Events, spans: Spans) -> Spans:
    """Add the compiled regions that lie in no module's call, no node and no optimizer's step.

    A call that is compiled as a whole, hooks included, has no label.
    """
    is_region = events.prefix_mask(names.COMPILED_REGION)
    regions = events.chosen(is_region, Category.OPERATOR, Category.ANNOTATION)
    index = regions[spans.of(events, regions) < 0]
    index = index[~are_of_optimizers(events, index, np.sort(spans.start[spans.is_node]))]
    if not len(index):
        return spans
    used, name_of = numbered(events.name[index])
    paths = [_path_of_region(events, events.names[name]) for name in used.tolist()]
    added = tuple(Module(path, "", path, True) for path in dict.fromkeys(paths))
    number = {module.path: index for index, module in enumerate(added)}
    name_of = np.array([number[path] for path in paths], np.int64)[name_of]
    nothing = np.full(len(index), NOTHING, np.int64)
    start = np.concatenate([spans.start, events.start[index]])
    end = np.concatenate([spans.end, events.end[index]])
    thread = np.concatenate([spans.thread, events.thread[index]])
    parent, nesting = nest(start, end, thread)
    return replace(
        spans,
        start=start,
        end=end,
        thread=thread,
        module=np.concatenate([spans.module, name_of + len(spans.modules)]),
        node=np.concatenate([spans.node, nothing]),
        marked=np.concatenate([spans.marked, nothing]),
        caller=np.concatenate([spans.caller, nothing]),
        parent=parent,
        modules=spans.modules + added,
        nesting=nesting,
    )


def _path_of_region(events: Events, name: str) -> str:
    """Return what to call a region in no module: its function, or what the profiler calls it."""
    region = name.removeprefix(names.COMPILED_REGION)
    for compilation in events.compiled.compilations:
        if compilation.region == region:
            function = names.compiled_function(compilation.function)
            return name if function in names.MODULE_FUNCTIONS else f"compiled function {function}()"
    return name


def _mark(events: Events, spans: Spans) -> None:
    """Set for each node the module that a marker directly in the node names."""
    module_of = {(m.path, m.class_name): index for index, m in enumerate(spans.modules)}
    named = np.array(
        [
            module_of.get((label.path, label.class_name), NOTHING)
            if label is not None and label.kind is Kind.BACKWARD
            else NOTHING
            for label in events.labels
        ],
        np.int64,
    )
    if not (named >= 0).any():
        return
    markers = events.chosen(named >= 0, Category.OPERATOR, Category.ANNOTATION)
    span = spans.of(events, markers)
    is_in_node = take(spans.is_node, span, False)
    spans.marked[span[is_in_node]] = named[events.name[markers[is_in_node]]]


def nest(start: Ints, end: Ints, thread: Ints) -> tuple[Ints, dict[int, tuple[Ints, Nesting]]]:
    """Return each span's parent, and for each thread its spans and their nesting."""
    parent = np.full(len(start), NOTHING, np.int64)
    nesting: dict[int, tuple[Ints, Nesting]] = {}
    for number, members in grouped(thread):
        nested = innermost(start[members], end[members], tolerance=_ROUNDING)
        nesting[number] = (members, nested)
        parent[members] = take(members, nested.parent)
    return parent, nesting


def _nodes(events: Events) -> tuple[Ints, tuple[str, ...], Ints]:
    """Find the executions of nodes: their event indices, all names, and the name of each."""
    index = events.prefixed(Category.OPERATOR, names.EVALUATE_FUNCTION)
    if not len(index):
        # Before torch 1.9 the engine recorded the nodes alone.
        operators = events.of(Category.OPERATOR)
        index = operators[events.forward_thread[operators] > 0]
    used, node = numbered(events.name[index])
    node_names = tuple(
        events.names[name].removeprefix(names.EVALUATE_FUNCTION) for name in used.tolist()
    )
    return index, node_names, node.astype(np.int64)


def _module_calls(events: Events) -> tuple[LabelSource, Ints, Ints]:
    """Find what wrote the labels, the event indices of the calls, and the name of each."""

    def ours() -> Mask:
        forward = [label is not None and label.kind is Kind.FORWARD for label in events.labels]
        return np.array(forward, bool)

    def lightnings() -> Mask:
        return events.names_where(lambda name: names.LIGHTNING_MODULE.match(name) is not None)

    def pythons() -> Mask:
        return events.prefix_mask(names.MODULE_CALL)

    sources: tuple[tuple[LabelSource, Callable[[], Mask], tuple[Category, ...]], ...] = (
        ("backspot", ours, (Category.OPERATOR, Category.ANNOTATION)),
        ("lightning", lightnings, (Category.ANNOTATION,)),
        ("python", pythons, (Category.MODULE_CALL,)),
    )
    for source, are_labels, categories in sources:
        index = events.chosen(are_labels(), *categories)
        if len(index):
            return source, index, events.name[index]
    empty = np.empty(0, np.int64)
    return "none", empty, empty


def _modules(
    events: Events, source: LabelSource, called: Ints, parent: Ints, start: Ints, end: Ints
) -> tuple[tuple[Module, ...], Ints]:
    """Turn the name indices of calls into modules with paths and roots."""
    calls = np.flatnonzero(called >= 0)
    calls = calls[np.lexsort((-end[calls], start[calls]))]
    # The nearest call around each call, whatever nodes lie between.
    outer = parent[calls]
    while (between := (outer >= 0) & (take(called, outer) < 0)).any():
        outer[between] = parent[outer[between]]
    identities: dict[int, tuple[str, str]] = {}
    root_of: dict[str, str] = {}
    numbers: dict[tuple[str, str], int] = {}
    settled: set[tuple[int, int]] = set()  # pairs that would change nothing now
    for pair in zip(called[calls].tolist(), take(called, outer).tolist(), strict=True):
        if pair in settled:
            continue
        settled.add(pair)
        name, around = pair
        outer_path = identities[around][0] if around >= 0 else ""
        if name not in identities:
            identities[name] = _identity(events, name, source, outer_path)
        path, _ = identities[name]
        numbers.setdefault(identities[name], len(numbers))
        if around >= 0:
            outermost = root_of.get(outer_path, outer_path)
            if outermost == "" or path.startswith(f"{outermost}."):
                root = outermost if path != outermost else root_of.get(path, path)
                if root_of.get(path) != root:
                    root_of[path] = root
                    settled.clear()
    modules = tuple(
        Module(path, class_name, root_of.get(path, path)) for path, class_name in numbers
    )
    number = np.full(len(events.names) + 1, NOTHING, np.int64)
    for name, identity in identities.items():
        number[name] = numbers[identity]
    return modules, number[called]


def _identity(events: Events, name: int, source: LabelSource, around: str) -> tuple[str, str]:
    """Return path and class of a label.

    Args:
        name: index into ``Events.names``.
        around: the path of the call around the first call with this label.
    """
    if source == "backspot":
        label = events.labels[name]
        assert label is not None  # noqa: S101 - only names that are labels come here
        return label.path, label.class_name
    if source == "lightning":
        match = names.LIGHTNING_MODULE.match(events.names[name])
        assert match is not None  # noqa: S101 - as above
        return match["path"], match["class_name"].rpartition(".")[2]
    instance = events.names[name].removeprefix(names.MODULE_CALL)
    class_name = instance.rpartition("_")[0] or instance
    if len(around) > _MOST_PATH:  # without a limit, calls that nest n deep take n² bytes of names
        around = around[:_MOST_PATH].rpartition(".")[0]
    return (f"{around}.{instance}" if around else instance), class_name
