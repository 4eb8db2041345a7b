"""Train with and without Backspot, and know from PyTorch itself who made each node."""

from __future__ import annotations

import threading
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import backspot
from backspot.analysis.attribution.ownership import Special, attribute
from backspot.trace import read_events
from support.leftovers import hooks_on, labels_of, left_in_torch
from support.sums import assert_adds_up

ACCUMULATE = "AccumulateGrad"
tells_creation = hasattr(torch.autograd.graph, "node_creation_hook")


def cpu_profile(**options: Any) -> profile:
    return profile(activities=[ProfilerActivity.CPU], **options)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors that a step returned, for comparison."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_of(part)]
    return []


def said(caught: Iterable[warnings.WarningMessage]) -> frozenset[str]:
    """What was warned of, but for what torch 2.8 to 2.11 say at a profile, whoever takes it."""
    return frozenset(
        str(warning.message)
        for warning in caught
        if "Profiler clears events" not in str(warning.message)
    )


@dataclass
class Run:
    """What a training run gave: its results, and the profile where there was one."""

    model: nn.Module
    results: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    profiler: profile | None = None
    said: frozenset[str] = frozenset()

    @property
    def report(self) -> backspot.Report:
        assert self.profiler is not None
        return backspot.locate(self.profiler)


def same(one: Run, other: Run) -> None:
    """Bit for bit: what the steps returned, and every gradient."""
    assert one.results
    assert one.gradients
    assert len(one.results) == len(other.results)
    assert all(
        torch.equal(a, b) or (a.isnan().any() and a.shape == b.shape)
        for a, b in zip(one.results, other.results, strict=True)
    )
    assert one.gradients.keys() == other.gradients.keys()
    for name, gradient in one.gradients.items():
        told = other.gradients[name]
        assert (gradient is None) == (told is None), name
        assert gradient is None or torch.equal(gradient, told), name


def train(
    make: Callable[[], Any],
    step: Callable[[Any], Any],
    *,
    instrumented: bool = True,
    steps: int = 2,
    warm_up: int = 0,
    profiled: Callable[[], profile] = cpu_profile,
    **options: Any,
) -> Run:
    """Some training steps from a fixed seed; instrumented ones under a profiler."""
    torch.manual_seed(0)
    model = make()
    results: list[torch.Tensor] = []

    def go(count: int) -> None:
        for _ in range(count):
            results.extend(tensors_of(step(model)))

    profiler = None
    with warnings.catch_warnings(record=True) as caught, ExitStack() as stack:
        warnings.simplefilter("always")
        if instrumented:
            stack.enter_context(backspot.instrument(model, **options))
        go(warm_up)
        if instrumented:
            profiler = stack.enter_context(profiled())
        go(steps)
    assert hooks_on(model) == left_in_torch() == []
    gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    return Run(model, results, gradients, profiler, said(caught))


def check(make: Callable[[], Any], step: Callable[[Any], Any], **options: Any) -> backspot.Report:
    """Train plainly and instrumented; hand back the report of the second.

    Everything is the same, nobody warns of anything new, the rows sum to the whole, and afterwards
    nothing of Backspot is left: no hook, and no label in the next profile.
    """
    same_kind = {name: options[name] for name in ("steps", "warm_up") if name in options}
    # Plainly first: PyTorch has things to say once in a process.
    plain = train(make, step, instrumented=False, **same_kind)
    run = train(make, step, **options)
    same(plain, run)
    assert run.said <= plain.said
    report = run.report
    assert_adds_up(report)
    assert labels_of(lambda: step(run.model)) == set()
    return report


def owners(report: backspot.Report) -> dict[str, dict[str, int]]:
    """Path to node name to count; parameters' gradients and recomputation left out."""
    return {
        row.path: {
            node.name: node.count
            for node in row.nodes
            if ACCUMULATE not in node.name and node.name != "(recompute)"
        }
        for row in report.modules
        if any(ACCUMULATE not in node.name and node.name != "(recompute)" for node in row.nodes)
    }


# Node for node -----------------------------------------------------------------------------------


class Truth:
    """Who made each node, told by hooks of the test's own and by autograd itself.

    A node made while a module runs is that of the innermost one; a node made inside another node's
    execution, and in no module, is that of the other.
    """

    def __init__(self, model: nn.Module, outside: str = Special.OUTSIDE.path) -> None:
        self.owner: dict[tuple[int, int], str] = {}
        self.names: dict[tuple[int, int], str] = {}
        self.outside = outside
        # Made as a gradient came to its parameter: autograd does not say which node fed that.
        self.untold: set[tuple[int, int]] = set()
        self._intervals: dict[int, list[tuple[int, str]]] = {}
        self._local = threading.local()
        self._handles = []
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            self._handles += [
                module.register_forward_pre_hook(self._enter(path)),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    @property
    def _stack(self) -> list[tuple[str, int | None]]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._stack.append((path, _executing()))
            self._note()

        return enter

    def _leave(self, *_: object) -> None:
        self._stack.pop()
        self._note()

    def _now(self) -> str:
        node = _executing()
        if self._stack and self._stack[-1][1] == node:
            return self._stack[-1][0]
        # Inside a node that no module's call lies in: what is made now is that node's owner's.
        return self.outside if node is None else self.of(threading.get_native_id(), node)

    def _note(self) -> None:
        """Whoever runs now makes what gets this number and those after it."""
        number = torch._C._autograd._get_sequence_nr()
        told = self._intervals.setdefault(threading.get_native_id(), [(0, self.outside)])
        told.append((number, self._now()))

    def _made(self, node: Any) -> None:
        if ACCUMULATE not in node.name():
            key = threading.get_native_id(), node._sequence_nr()
            if ACCUMULATE in getattr(torch._C._current_autograd_node(), "name", str)():
                self.untold.add(key)
            self.owner[key] = self._now()
            self.names[key] = node.name()

    def of(self, thread: int, number: int) -> str:
        """The owner of a node by the thread that made it and its sequence number."""
        if (thread, number) in self.owner:
            return self.owner[thread, number]
        told = self._intervals.get(thread, [(0, self.outside)])
        # The last word on this number: several changes can fall on one.
        return told[bisect_right(told, number, key=lambda entry: entry[0]) - 1][1]

    @contextmanager
    def listen(self) -> Any:
        """Hear of every node that this thread makes (torch 2.14 on)."""
        if tells_creation:
            with torch.autograd.graph.node_creation_hook(self._made):
                yield self
        else:
            yield self

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _executing() -> int | None:
    """The number of the node that autograd executes on this thread."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def owners_by_number(trace: Path) -> dict[tuple[int, int, int], tuple[str, str]]:
    """(thread, sequence number, how many times before) to (node name, owner), of a trace.

    A node without a number, and no AccumulateGrad, has none in the key's stead.
    """
    events = read_events(trace)
    found = attribute(events)
    result: dict[tuple[int, int, int], tuple[str, str]] = {}
    seen: Counter[tuple[int, int]] = Counter()
    for span in range(len(found.spans.start)):
        number, builder = int(found.join.sequence[span]), int(found.join.builder[span])
        name = found.spans.node_names[found.spans.node[span]]
        if found.spans.node[span] >= 0 and ACCUMULATE not in name:
            thread = int(str(events.threads[builder][1])) if builder >= 0 else -1
            key = (thread, number, seen[thread, number])
            seen[thread, number] += 1
            result[key] = name, found.owners.path(int(found.owner[span]))
    return result


def assert_true_owners(
    model: nn.Module,
    step: Callable[[], Any],
    folder: Path,
    *,
    least: int,
    profiled: Callable[[], profile] = cpu_profile,
) -> dict[str, int]:
    """Attribution agrees with the truth on every node of a profiled step.

    Args:
        model: the model.
        step: one training step.
        folder: where the trace is written.
        least: how many nodes there are at least, so that nothing is passed by finding nothing.
        profiled: makes the profiler.

    Returns:
        How many nodes each owner has.
    """
    truth = Truth(model)
    with backspot.instrument(model), profiled() as profiler, truth.listen():
        step()
    truth.remove()
    trace = folder / "trace.json"
    report = backspot.locate(profiler)
    profiler.export_chrome_trace(str(trace))
    assert owners(backspot.locate(trace)) == owners(report), "live and exported must agree"
    told = owners_by_number(trace)
    assert len(told) >= least
    wrong = {
        (number, name, owner, truth.of(thread, number))
        for (thread, number, _), (name, owner) in told.items()
        if owner != truth.of(thread, number) and (thread, number) not in truth.untold
    }
    assert wrong == set()
    return dict(Counter(owner for _, owner in told.values()))
