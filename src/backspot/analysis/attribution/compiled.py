"""The modules inside compiled regions: each launch of a compiled graph matched with its site.

A region calls compiled graphs, and what such a call launches are the events directly inside it, in
the order of the generated code. If their number and names agree with the sites that the live half
recorded, the k-th event is the k-th site. Some launches have no site: then the sites are found
among the launches by their names. What finishes the reduction of the launch before it belongs to
that launch's site; any other launch that is no site, or could be another one, has the owner of the
region. Where not even the names agree, the launches between the next ones that are certain, or the
whole region, keep the owner of the region, and ``unmatched`` says why.

What the host does between two launches, it does for the second one.

A call that replays a CUDA graph shows no launches, but its kernels, in the order of the code. If
the generated kernels among them are exactly those of the sites, each is its site's, and the kernels
between two of them are of the library calls between these two sites, if these have one owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from backspot.analysis.attribution.alignment import align, align_kernels, follow_directly
from backspot.analysis.attribution.launches import DeviceWork
from backspot.analysis.attribution.shares import Share, Shares, shares_of
from backspot.analysis.attribution.spans import Module, Spans
from backspot.analysis.attribution.updates import optimizer_steps
from backspot.analysis.timeline import (
    NOTHING,
    enclosing,
    first_started,
    grouped,
    innermost,
    take,
)
from backspot.trace import Category, Events, names
from backspot.trace.compiled import CompiledGraph, ModuleRef
from backspot.trace.events import Ints, Mask

_ROUNDING = 2_000  # nanoseconds by which a rounded clock may move an end


class Unmatched(msgspec.Struct, frozen=True):
    """Calls of compiled graphs in which launches could not be matched with sites.

    Attributes:
        path: the module that the region was entered at; ``""`` is the model or unknown.
        calls: how many calls.
        reason: why.
        partly: whether the other launches of these calls are known.
    """

    path: str
    calls: int
    reason: str
    partly: bool


class Compiled(msgspec.Struct, frozen=True):
    """What is known inside compiled regions.

    Attributes:
        modules: the modules without a label that own launches in regions, and those around them.
        event: the host's event of each matched launch.
        start: when the host began to work for the launch, nanoseconds: when the launch before it
            ended. Of the first launch of a call, and behind code that the profiler does not see,
            this is when the launch began.
        end: when the launch ended.
        span: the host's innermost span around the launch.
        shares: the owners of each of these launches, and behind them those of each kernel that a
            replay ran: indices into the spans' modules followed by ``modules``; ``NOTHING`` stands
            for the owner of the region.
        moved: the bytes that each launch reads and writes, each tensor once; ``NOTHING`` where its
            site is not certain.
        of_work: for each piece of device work the index of its owners in ``shares``: that of its
            launch in ``event``, or its own in a replay. ``NOTHING`` for none.
        called: the modules in the forward code of regions, once for each call of the code: indices
            into the spans' modules followed by ``modules``.
        caller: the host's innermost span around each of these calls.
        unmatched: the calls that keep one owner.
    """

    modules: tuple[Module, ...]
    event: Ints
    start: Ints
    end: Ints
    span: Ints
    shares: Shares
    moved: Ints
    of_work: Ints
    called: Ints
    caller: Ints
    unmatched: tuple[Unmatched, ...]

    def around(self, events: Events, index: Ints) -> Ints:
        """Return the launch that each host event is or is called by; ``NOTHING`` for none."""
        launches = np.full(len(index), NOTHING, np.int64)
        launched = dict(grouped(events.thread[self.event]))
        for thread, members in grouped(events.thread[index]):
            if thread in launched:
                own_launches = launched[thread]
                event = self.event[own_launches]
                line = first_started(events.start[event], events.end[event], own_launches)
                launches[members] = line.at(events.start[index[members]])
        return launches

    def at(self, spans: Spans, span: Ints, time: Ints) -> Ints:
        """Return the launch that each span itself works for at a time; ``NOTHING`` for none.

        Args:
            span: indices of spans; ``NOTHING`` is allowed.
            time: nanoseconds, one entry for each of ``span``.
        """
        launches = np.full(len(span), NOTHING, np.int64)
        in_regions = np.flatnonzero(take(_mask(self.span, len(spans.start)), span, False))
        of_thread = dict(grouped(take(spans.thread, self.span)))
        for thread, members in grouped(take(spans.thread, span), in_regions):
            own_launches = of_thread[thread]
            line = first_started(self.start[own_launches], self.end[own_launches], own_launches)
            launches[members] = line.at(time[members])
        return np.where(take(self.span, launches, NOTHING - 1) == span, launches, NOTHING)


def _mask(index: Ints, count: int) -> Mask:
    mask = np.zeros(count, bool)
    mask[index[index >= 0]] = True
    return mask


def find_compiled_launches(
    events: Events, spans: Spans, module: Ints, work: DeviceWork
) -> Compiled:
    """Match the launches of compiled graphs with their sites.

    Args:
        module: the module that owns each span, ``NOTHING`` for other owners.
    """
    matcher = _Matcher(events, spans)
    launches: list[int] = []
    begin: list[int] = []
    shares: list[list[Share]] = []
    moved: list[int] = []
    in_replays: list[int] = []
    shares_in_replays: list[list[Share]] = []
    unmatched: Counter[tuple[int, str, bool]] = Counter()
    of_work = np.full(len(work.start), NOTHING, np.int64)
    is_call = events.prefix_mask(names.COMPILED_GRAPH)
    calls = events.chosen(is_call, Category.OPERATOR, Category.ANNOTATION)
    if not events.compiled.recorded:
        calls = calls[:0]
    around = spans.of(events, calls)
    by_optimizer = enclosing(
        events, optimizer_steps(events), events.thread[calls], events.start[calls]
    )
    kept = (around >= 0) | (by_optimizer < 0)
    calls, around = calls[kept], around[kept]
    entered = take(module, around)
    called_in: list[tuple[int, int]] = []
    is_backward = _backwards(spans)
    for thread, members in grouped(events.thread[calls]):
        called = _called(events, calls[members], thread)
        replayed = _replayed(events, calls[members], thread, work)
        first = len(launches)
        for place, (call, children) in enumerate(zip(members.tolist(), called, strict=True)):
            request = _Asked(
                int(events.name[calls[call]]),
                int(entered[call]),
                bool(is_backward[around[call]]),
                tuple(events.name[children].tolist()),
            )
            match = matcher.match(request)
            if isinstance(match, str) and place in replayed:
                kernels = replayed[place]
                launched = tuple(events.name[work.event[kernels]].tolist())
                match = matcher.match(request._replace(launched=launched, replays=True))
                if not isinstance(match, str):
                    in_replays += kernels.tolist()
                    shares_in_replays += match.launches
                    called_in += [(owner_call, int(around[call])) for owner_call in match.called]
                    continue
            if isinstance(match, str):
                unmatched[int(entered[call]), match, False] += 1
            else:
                if match.unknown:
                    unmatched[int(entered[call]), match.unknown, True] += 1
                before = np.append(events.start[children[:1]], events.end[children[:-1]])
                began = events.start[children]
                begin += np.where(match.follows, np.minimum(before, began), began).tolist()
                launches += children
                shares += match.launches
                moved += match.moved
                called_in += [(owner_call, int(around[call])) for owner_call in match.called]
        matched = np.array(launches[first:], np.int64)
        timeline = innermost(events.start[matched], events.end[matched]).timeline
        device_work = np.flatnonzero((work.thread == thread) & (work.launch >= 0))
        launch = timeline.at(work.launch[device_work])
        of_work[device_work] = np.where(launch >= 0, launch + first, NOTHING)
    of_work[in_replays] = len(launches) + np.arange(len(in_replays))
    event = np.array(launches, np.int64)
    called, caller = np.array(called_in, np.int64).reshape(-1, 2).T
    return Compiled(
        modules=tuple(matcher.added),
        event=event,
        start=np.array(begin, np.int64),
        end=events.end[event],
        span=spans.of(events, event),
        shares=shares_of(shares + shares_in_replays),
        moved=np.array(moved, np.int64),
        of_work=of_work,
        called=called,
        caller=caller,
        unmatched=tuple(
            Unmatched(spans.modules[module].path if module >= 0 else "", count, reason, partly)
            for (module, reason, partly), count in unmatched.most_common()
        ),
    )


def _backwards(spans: Spans) -> Mask:
    """Return which spans are the node of a compiled region; one more entry for ``NOTHING``."""
    compiled = [name.startswith(names.COMPILED_FUNCTION) for name in spans.node_names]
    return np.append(take(np.array(compiled, bool), spans.node, False), False)


def _called(events: Events, calls: Ints, thread: int) -> list[list[int]]:
    """Return the events directly inside each of some calls on one thread, by start."""
    host = events.of(Category.OPERATOR, Category.ANNOTATION)
    host = host[(events.thread[host] == thread) & ~events.is_label[events.name[host]]]
    within = innermost(events.start[calls], events.end[calls]).timeline.at(events.start[host]) >= 0
    host = np.setdiff1d(host[within], calls)
    candidates = np.concatenate([calls, host])
    parent = innermost(events.start[candidates], events.end[candidates], tolerance=_ROUNDING).parent
    direct = np.flatnonzero((parent[len(calls) :] >= 0) & (parent[len(calls) :] < len(calls)))
    direct = direct[np.argsort(events.start[host[direct]], kind="stable")]
    inside: list[list[int]] = [[] for _ in calls]
    for call, event in zip(
        parent[direct + len(calls)].tolist(), host[direct].tolist(), strict=True
    ):
        inside[call].append(event)
    return inside


def _replayed(events: Events, calls: Ints, thread: int, work: DeviceWork) -> dict[int, Ints]:
    """Return the kernels of those calls that replay a captured graph, in the order of their start.

    The keys are indices of calls, the values of device work.
    """
    replays = events.prefixed(Category.RUNTIME, *names.GRAPH_LAUNCHES)
    replays = replays[events.thread[replays] == thread]
    timeline = innermost(events.start[calls], events.end[calls]).timeline
    within = innermost(events.start[replays], events.end[replays]).timeline
    kernels = np.flatnonzero(
        (work.thread == thread) & (events.category[work.event] == Category.KERNEL)
    )
    kernels = kernels[within.at(work.launch[kernels]) >= 0]
    kernels = kernels[np.argsort(work.start[kernels], kind="stable")]
    of_call = dict(grouped(timeline.at(work.launch[kernels])))
    return {
        call: kernels[of_call.get(call, kernels[:0])]
        for call in timeline.at(events.start[replays]).tolist()
    }


class _Asked(NamedTuple):
    """What decides which sites the launches of a call are.

    Attributes:
        name: the name of the call, an index into ``Events.names``.
        entered: the module that the region was entered at, ``NOTHING`` for none.
        backward: whether a region's node makes the call.
        launched: the names of the launches, or of the kernels of a replay.
        replays: whether the call replays a captured graph.
    """

    name: int
    entered: int
    backward: bool
    launched: tuple[int, ...]
    replays: bool = False


class _Match(NamedTuple):
    """What is known of one call of a compiled graph.

    Attributes:
        follows: whether each launch is the next thing that the code does after the launch before.
        launches: the shares of each launch.
        moved: the bytes of each launch.
        called: the modules that the code calls, if it is a forward.
        unknown: why launches between others are not known; ``""`` if there are none.
    """

    follows: list[bool]
    launches: list[list[Share]]
    moved: list[int]
    called: tuple[int, ...]
    unknown: str


class _Matcher:
    """Matches launches with the sites of compiled graphs, and sites with modules.

    Attributes:
        added: modules without a label that were found in regions.
    """

    def __init__(self, events: Events, spans: Spans) -> None:
        self.added: list[Module] = []
        self._events, self._spans = events, spans
        self._graphs: dict[str, list[CompiledGraph]] = {}
        for graph in events.compiled.graphs:
            same = self._graphs.setdefault(graph.key, [])
            if graph not in same:
                same.append(graph)
        self._known = {module.path: module for module in events.compiled.modules}
        self._index = {
            module.path: index for index, module in enumerate(spans.modules) if not module.is_region
        }
        self._answers: dict[_Asked, _Match | str] = {}

    def match(self, request: _Asked) -> _Match | str:
        """Return what is known of a call, or why nothing is."""
        if request not in self._answers:
            self._answers[request] = self._match(request)
        return self._answers[request]

    def _match(self, request: _Asked) -> _Match | str:
        same_key = self._graphs.get(names.compiled_graph_key(self._events.names[request.name]), [])
        graphs = [graph for graph in same_key if graph.sites is not None]
        if not graphs:
            return (
                "it was compiled before; torch.compiler.reset() after backspot.instrument(model) "
                "has it compile again"
            )
        # Graphs that PyTorch cannot cache all have the same key.
        if len(same_key) > 1:
            graphs = [graph for graph in graphs if graph.backward == request.backward] or graphs
        called = [self._events.names[name] for name in request.launched]
        reasons: dict[str, int] = {}
        answers: list[_Match] = []
        for graph in graphs:
            sites = graph.sites or ()
            if request.replays:
                aligned = align_kernels(sites, called)
            else:
                aligned = align(sites, called, every=len(same_key) > 1)
            if isinstance(aligned, str):
                match: _Match | str = aligned
            else:
                match = self._owned(graph, *aligned, request.entered)
            if isinstance(match, str):
                reasons[match] = abs(len(sites) - len(called))
            elif all(match.launches != answer.launches for answer in answers):
                answers.append(match)
        if len(answers) > 1:
            return "several graphs in memory have its key, and other modules"
        return answers[0] if answers else min(reasons, key=reasons.__getitem__)

    def _owned(
        self, graph: CompiledGraph, aligned: Sequence[int], unknown: str, entered: int
    ) -> _Match | str:
        bases: dict[str, str | None] = {}
        for root in {place.root for place in graph.places}:
            bases[root] = self._base([p for p in graph.places if p.root == root], entered)
            if bases[root] is None:
                return f"its modules ({root}) are not those of the module that was called"
        owners: list[int] = []
        called: set[int] = set()
        for place in graph.places:
            owner, *around = self._owners(place, bases[place.root] or "", entered)
            owners.append(owner)
            called |= {owner, *around}
        owners.append(NOTHING)  # the place -1
        of_sites = [
            _merged(Share(owners[p.place], p.weight, p.again, p.line) for p in site.parts)
            for site in graph.sites or ()
        ]
        launches = [of_sites[site] if site >= 0 else [Share(NOTHING, 1)] for site in aligned]
        bytes_of_sites = [sum(p.weight for p in site.parts) for site in graph.sites or ()]
        moved = [
            bytes_of_sites[site] or NOTHING if site >= 0 and site != before else NOTHING
            for before, site in pairwise((NOTHING, *aligned))
        ]
        # The module that was entered has a label for its call.
        inside = () if graph.backward else tuple(sorted(called - {entered}))
        return _Match(follow_directly(graph.sites or (), aligned), launches, moved, inside, unknown)

    def _base(self, places: Sequence[ModuleRef], entered: int) -> str | None:
        """Return the path of the module that is the root of some places; ``None`` if unknown.

        It must have modules of the right classes at all places. This is the module that the region
        was entered at, or else the only module inside it, or anywhere if there is none.
        """

        def fits(base: str) -> bool:
            return all(
                (module := self._known.get(_joined(base, place.path))) is not None
                and module.class_name == place.class_name
                for place in places
            )

        around = self._spans.modules[entered].path if self._is_module(entered) else ""
        if self._is_module(entered) and fits(around):
            return around
        inside = f"{around}." if around else ""
        candidates = [path for path in self._known if path.startswith(inside) and fits(path)]
        return candidates[0] if len(candidates) == 1 else None

    def _owners(self, place: ModuleRef, base: str, entered: int) -> Iterator[int]:
        """Yield the module that owns the time of a place, and those around it within the region.

        These are indices; a new module is added.
        """
        root = self._spans.modules[entered].root if self._is_module(entered) else base
        # Up the path of the place: the owner of a shared or unlabelled module can lie elsewhere.
        at = _joined(base, place.path)
        around = {self._known[at].owner: None}
        while at != base:
            at = at.rpartition(".")[0]
            if at in self._known:
                around[self._known[at].owner] = None
        for path in around:
            if path not in self._index:
                self._index[path] = len(self._spans.modules) + len(self.added)
                self.added.append(Module(path, self._known[path].class_name, root))
            yield self._index[path]

    def _is_module(self, entered: int) -> bool:
        return entered >= 0 and not self._spans.modules[entered].is_region


def _merged(shares: Iterable[Share]) -> list[Share]:
    """Return one share for each owner, the largest first, with the line of its largest part."""
    merged: dict[tuple[int, bool], Share] = {}
    for share in sorted(shares, key=lambda share: -share.weight):
        before = merged.setdefault((share.owner, share.again), share._replace(weight=0))
        merged[share.owner, share.again] = before._replace(weight=before.weight + share.weight)
    return sorted(merged.values(), key=lambda share: -share.weight) or [Share(NOTHING, 1)]


def _joined(base: str, path: str) -> str:
    return f"{base}.{path}" if base and path else base or path
