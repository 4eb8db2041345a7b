"""A second, plain reading of a trace: loops over the JSON that share no code with Backspot.

The reading is slow and short on purpose, so that it can be checked by eye. It knows one thread that
runs the forward, and one backward pass a profiler step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_EVALUATE = "autograd::engine::evaluate_function: "
_LABEL = "forward: "
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class Plain:
    """What belongs to which module, by path.

    Attributes:
        gpu: nanoseconds of device work launched in backward.
        nodes: number of nodes by path and name.
        intervals: start and end of all device work launched in backward, nanoseconds.
        backward: nanoseconds from each pass's first node to the end of its last node or device
            work.
        lost: pieces of device work without a launch record.
    """

    gpu: Counter[str] = field(default_factory=Counter)
    nodes: Counter[tuple[str, str]] = field(default_factory=Counter)
    intervals: list[tuple[int, int]] = field(default_factory=list)
    backward: int = 0
    lost: int = 0


class _Span:
    """A node or a forward label on the host."""

    def __init__(self, event: dict[str, Any]) -> None:
        self.name: str = event["name"]
        self.start = round(event["ts"] * 1000)
        self.end = self.start + round(event["dur"] * 1000)
        self.tid = event["tid"]
        self.parent: _Span | None = None
        self.owner: str | None = None
        self.sequence: int | None = None

    @property
    def is_node(self) -> bool:
        return self.name.startswith(_EVALUATE)

    @property
    def node_name(self) -> str:
        return self.name.removeprefix(_EVALUATE)

    @property
    def in_backward(self) -> bool:
        return self.is_node or (self.parent is not None and self.parent.in_backward)


class _Thread:
    """The spans of one thread."""

    def __init__(self, spans: Iterable[_Span]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.start, -span.end))
        self.starts = [span.start for span in self.spans]
        for index, span in enumerate(self.spans):
            span.parent = self._before(index, span.start)

    def _before(self, index: int, time: int) -> _Span | None:
        for earlier in range(index - 1, -1, -1):
            if self.spans[earlier].end > time:
                return self.spans[earlier]
        return None

    def around(self, time: int) -> _Span | None:
        return self._before(bisect_right(self.starts, time), time)


def read_plain(document: dict[str, Any]) -> Plain:
    """Read an exported trace of an instrumented model."""
    events = [e for e in document["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    by_thread: dict[Any, list[_Span]] = defaultdict(list)
    for event in operators:
        if event["name"].startswith((_EVALUATE, _LABEL)):
            by_thread[event["tid"]].append(_Span(event))
    threads = {tid: _Thread(spans) for tid, spans in by_thread.items()}
    nodes = [span for thread in threads.values() for span in thread.spans if span.is_node]
    nodes.sort(key=lambda span: span.start)
    _number(operators, threads)
    _own(operators, threads, nodes)
    plain = Plain()
    for node in nodes:
        plain.nodes[node.owner or "", node.node_name] += 1
    steps = sorted(
        (round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")
    )
    windows = _windows(nodes, [start for start, _ in steps])
    _add_work(plain, events, threads, windows)
    return plain


def _number(operators: list[dict[str, Any]], threads: dict[Any, _Thread]) -> None:
    """Take each node's sequence number from the event of the node's own name within the node."""
    for event in operators:
        if event.get("args", {}).get("Fwd thread id", 0) > 0:
            span = threads[event["tid"]].around(round(event["ts"] * 1000))
            if span is not None and span.is_node and span.node_name == event["name"]:
                span.sequence = event["args"].get("Sequence number")


def _own(operators: list[dict[str, Any]], threads: dict[Any, _Thread], nodes: list[_Span]) -> None:
    """Give each node its path: that of the label around the operator with its number."""
    labelled: Counter[Any] = Counter()
    for tid, thread in threads.items():
        for span in thread.spans:
            if not span.in_backward:
                labelled[tid] += span.end - span.start
    home = labelled.most_common(1)[0][0] if labelled else None
    made: dict[int, list[int]] = defaultdict(list)
    for event in operators:
        args = event.get("args", {})
        number = args.get("Sequence number", -1)
        if event["tid"] == home and number >= 0 and args.get("Fwd thread id") == 0:
            made[number].append(round(event["ts"] * 1000))
    for times in made.values():
        times.sort()
    numbers = sorted(made)
    for thread in threads.values():
        for span in thread.spans:
            if not span.is_node:
                text = span.name.removeprefix(_LABEL)
                span.owner = text[: text.rindex("(")].rstrip()
    last: dict[Any, str] = {}
    for node in nodes:
        if node.node_name.endswith("AccumulateGrad"):
            node.owner = last.get(node.tid, "(forward not recorded)")
            continue
        time = _made_at(node, made, numbers)
        if time is None:
            node.owner = "(forward not recorded)"
        else:
            around = threads[home].around(time) if home in threads else None
            node.owner = "(outside model)" if around is None else around.owner
        last[node.tid] = node.owner or ""


def _made_at(node: _Span, made: dict[int, list[int]], numbers: list[int]) -> int | None:
    """When the operator with the node's number began; else that with the next lower number."""
    if node.sequence is None:
        return None
    at = bisect_right(numbers, node.sequence) - 1
    while at >= 0:
        times = made[numbers[at]]
        before = bisect_left(times, node.start) - 1
        if before >= 0:
            return times[before]
        at -= 1
    return None


def _windows(nodes: list[_Span], steps: list[int]) -> list[tuple[int, int]]:
    """From the first node to the last, in each step."""
    groups: dict[int, list[_Span]] = defaultdict(list)
    for node in nodes:
        groups[bisect_right(steps, node.start)].append(node)
    return [(min(n.start for n in g), max(n.end for n in g)) for _, g in sorted(groups.items())]


def _add_work(
    plain: Plain,
    events: list[dict[str, Any]],
    threads: dict[Any, _Thread],
    windows: list[tuple[int, int]],
) -> None:
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            correlation = event.get("args", {}).get("correlation", 0)
            calls.setdefault(correlation, event)
    ends = [end for _, end in windows]
    begins = [begin for begin, _ in windows]
    work = [event for event in events if event.get("cat") in _WORK]
    # Those without a launch record last: by then it is known how long each pass lasts.
    for event in sorted(work, key=lambda e: e["args"].get("correlation", 0) not in calls):
        start = round(event["ts"] * 1000)
        end = start + round(event["dur"] * 1000)
        call = calls.get(event["args"].get("correlation", 0))
        if call is None:
            plain.lost += 1
            within = any(a <= start < b for a, b in zip(begins, ends, strict=True))
            owner = "(no launch record)" if within else None
        else:
            owner = _launcher(call, threads, windows)
        if owner is None:
            continue
        plain.gpu[owner] += end - start
        plain.intervals.append((start, end))
        if call is not None:
            number = bisect_right(begins, round(call["ts"] * 1000)) - 1
            ends[number] = max(ends[number], end)
    plain.backward = sum(end - begin for begin, end in zip(begins, ends, strict=True))


def _launcher(
    call: dict[str, Any], threads: dict[Any, _Thread], windows: list[tuple[int, int]]
) -> str | None:
    """Return the path that launched it in backward; ``None`` for what backward did not launch."""
    thread = threads.get(call["tid"])
    if thread is None:
        return None
    time = round(call["ts"] * 1000)
    span = thread.around(time)
    if span is not None:
        return span.owner if span.in_backward else None
    ran_nodes = any(s.is_node for s in thread.spans)
    within = any(begin <= time < end for begin, end in windows)
    return "(autograd engine)" if ran_nodes and within else None


def busy(intervals: Iterable[tuple[int, int]]) -> int:
    """Nanoseconds in which at least one of the intervals holds."""
    total, until = 0, -1
    for start, end in sorted(intervals):
        if end > until:
            total += end - max(start, until)
            until = end
    return total
