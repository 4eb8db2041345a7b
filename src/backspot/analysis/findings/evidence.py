"""What the rules look at: the trace with its owners, what it costs, and words to say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from backspot.analysis.accounting.batches import Batches, find_batches
from backspot.analysis.accounting.ledger import Ledger
from backspot.analysis.attribution.launches import DeviceWork
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.attribution.spans import Spans
from backspot.analysis.findings.costs import Costs, Removable
from backspot.analysis.recording import Recording
from backspot.analysis.timeline import (
    FAR,
    NOTHING,
    enclosing,
    first_started,
    merged,
    numbered,
    take,
)
from backspot.analysis.typical import TypicalStep
from backspot.formatting import counted, duration, percent
from backspot.registry import Device, Rule
from backspot.results.costs import Phase
from backspot.results.findings import Finding
from backspot.results.report import Report, lines_of
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask


class Wording(msgspec.Struct, frozen=True):
    """Texts for the sentences of findings.

    Attributes:
        steps: how many steps were recorded.
        step_ns: the clock time of a typical one.
    """

    steps: int
    step_ns: int

    def ms(self, ns: float) -> str:
        """Return a time of a typical step: ``5.2 ms``."""
        return duration(ns)

    def share(self, ns: float) -> str:
        """Return a time as a share of the typical step: ``4.2%``."""
        return percent(ns / self.step_ns if self.step_ns else 0.0)

    def per_step(self, count: int, noun: str, plural: str = "") -> str:
        """Return a count over all steps: ``12 kernels per step``, ``1 wait in 5 steps``.

        Args:
            count: how many.
            plural: the noun in the plural, where that is not ``noun`` and an ``s``.
        """
        if self.steps == 1 or count % self.steps == 0:
            return counted(count // self.steps, noun, plural) + " per step"
        if count < self.steps:
            return f"{counted(count, noun, plural)} in {self.steps:,} steps"
        return f"{count / self.steps:,.1f} {plural or noun + 's'} per step"

    def in_steps(self, count: int) -> str:
        """Return in how many of the steps something is so: ``in 9 of 10 steps``."""
        if count == self.steps:
            return "in every recorded step"
        return f"in {count:,} of {self.steps:,} steps"

    def copies(self, size: Ints) -> str:
        """Return the number and the volume of copies: ``2 copies per step of 77 MB together``.

        Args:
            size: the bytes of each copy; below 0 where the trace does not say.
        """
        number = self.per_step(len(size), "copy", "copies")
        moved = int(size[size > 0].sum()) / self.steps
        if not moved:
            return number
        together = " together" if len(size) > self.steps else ""
        return f"{number} of {moved / 1e6:,.{0 if moved >= 1e7 else 1}f} MB{together}"


class Evidence(msgspec.Struct, frozen=True, dict=True):
    """What every rule is a function of.

    A mask has one entry for each span (``spans``) or for each piece of device work (``work``).

    Attributes:
        recording: the trace with its owners, and what follows from both.
        report: its costs at all depths, without findings.
        reserved_bytes: how many bytes of the device were reserved at most, and how many it has;
            ``None`` if that is not known.
    """

    recording: Recording
    report: Report
    reserved_bytes: tuple[int, int] | None = None

    @property
    def events(self) -> Events:
        """The trace."""
        return self.recording.events

    @property
    def ledger(self) -> Ledger:
        """Its clock time."""
        return self.recording.ledger

    @property
    def typical(self) -> TypicalStep:
        """The steps that count."""
        return self.recording.typical

    @property
    def ownership(self) -> Ownership:
        """The owners of the trace."""
        return self.ledger.ownership

    @property
    def spans(self) -> Spans:
        """Module calls and nodes."""
        return self.ownership.spans

    @property
    def work(self) -> DeviceWork:
        """Kernels, copies and memsets."""
        return self.ownership.work

    @cached_property
    def device(self) -> Device:
        """The kind of device that the step runs on, which decides what helps.

        It follows from the calls of its driver, from the names of device work where these are not
        recorded, and from the operators of Apple's GPUs, which record no device work.
        """
        events = self.events
        if not self.report.has_gpu:
            elsewhere = events.unread or events.names_where(names.is_of_apples_gpu).any()
            return "other" if elsewhere else "cpu"
        calls = merged(events.name[events.of(Category.RUNTIME)])
        if len(calls):
            is_cuda = any(names.is_runtime_call(events.names[name]) for name in calls)
        else:
            named = (events.names[name] for name in self._work_names[0])
            is_cuda = not events.unread and any(map(names.is_cuda_work, named))
        return "cuda" if is_cuda else "other"

    def lacks(self, rule: Rule[Evidence, Finding, Finding | str | None]) -> str:
        """Return what a rule needs and the trace does not have, ``""`` if the rule can look."""
        if self.device not in rule.devices:
            return "needs a GPU" if self.device == "cpu" else "needs CUDA or ROCm"
        return next((f"needs {need}" for need in rule.needs if not self._has[str(need)]), "")

    @cached_property
    def _has(self) -> dict[str, bool]:
        """Which of the things are in the trace that rules need."""
        return {
            "stacks": len(lines_of(self.report)) > 0,
            "labels": self.report.source == "backspot",
            "blocks": bool((self.events.size[self.work.event] >= 0).any()),
        }

    @property
    def step_ns(self) -> int:
        """The clock time of a typical step: a real one where that is known, else a recorded one."""
        return self.report.whole_ns

    @cached_property
    def costs(self) -> Costs:
        """The clock time of spans and device work."""
        return Costs(self.ledger, self.events.names, self.typical)

    @cached_property
    def wording(self) -> Wording:
        """Times and counts in words."""
        return Wording(self.report.steps, self.step_ns)

    def phase(self, name: str) -> Phase | None:
        """Return one phase of the step, where the report has phases."""
        return next((p for p in self.report.phases if p.name == name), None)

    @cached_property
    def batches(self) -> Batches:
        """The batches that worker processes load."""
        return find_batches(self.events)

    def by_step(self, start: Ints, ns: Ints) -> Ints:
        """Return the sum of some times in each step, for what starts in it; nanoseconds."""
        step = self.ledger.steps.at(start)
        in_steps = step >= 0
        sums = np.zeros(self.report.steps, np.int64)
        np.add.at(sums, step[in_steps], ns[in_steps])
        return sums

    # Spans -----------------------------------------------------------------------------------

    @cached_property
    def in_pass(self) -> Mask:
        """Whether each span runs in a backward pass."""
        return self.ownership.passes.of_span >= 0

    def nodes_named(self, matches: Callable[[str], bool]) -> Mask:
        """Whether each span is a node of the backward with a name that matches."""
        good = np.array([matches(name) for name in self.spans.node_names] + [False], bool)
        chosen: Mask = good[self.spans.node] & self.in_pass & self.spans.is_node
        return chosen

    def spans_of_work(self, chosen: Mask) -> Mask:
        """Whether each span launched any of this device work."""
        return self.spans_with(self.work.span[chosen])

    def spans_around(self, index: Ints) -> Mask:
        """Whether each span is the innermost one around the start of any of these events."""
        return self.spans_with(self.spans.of(self.events, index))

    def spans_with(self, span: Ints) -> Mask:
        """Whether each span is among these; ``NOTHING`` is left out."""
        mask = np.zeros(len(self.spans.start), bool)
        mask[span[span >= 0]] = True
        return mask

    def with_forward(self, nodes: Mask) -> Removable:
        """Return the work of nodes, and of the operators in the forward that made them."""
        makers = self.ownership.join.operator[nodes]
        return self.costs.removable(
            nodes, self.work_of(nodes), operators=merged(makers[makers >= 0])
        )

    # Device work -----------------------------------------------------------------------------

    @cached_property
    def backward(self) -> Mask:
        """Whether each piece of device work was launched in a backward pass."""
        return take(self.in_pass, self.work.span, False)

    @cached_property
    def recorded(self) -> Mask:
        """Whether each piece of device work runs in the steps, not only before or between them."""
        steps, work = self.ledger.windows, self.work
        begins = np.append(steps.start, FAR)[np.searchsorted(steps.end, work.start, side="right")]
        in_steps: Mask = (begins < work.end) | (begins == work.start)
        return in_steps

    def work_named(self, matches: Callable[[str], bool]) -> Mask:
        """Whether each piece of device work in the steps has a name that matches."""
        names, inverse = self._work_names
        good = np.array([matches(self.events.names[name]) for name in names.tolist()], bool)
        return good[inverse] & self.recorded if len(names) else np.zeros(0, bool)

    @cached_property
    def _work_names(self) -> tuple[Ints, Ints]:
        """The distinct names of device work, and the one that each piece has."""
        return numbered(self.work.name)

    def work_of(self, spans: Mask) -> Mask:
        """Whether each piece of device work was launched directly in one of ``spans``."""
        return take(spans, self.work.span, False)

    def launched_in(self, *operators: str, category: Category = Category.OPERATOR) -> Ints:
        """Return the event around the launch of each piece of device work in the steps.

        Args:
            operators: names of events, or beginnings of names that end in ``*``.

        Returns:
            Indices into the events, of the outermost one; ``NOTHING`` for none.
        """
        if (operators, category) not in self.answers:
            around = self.around(self.work.thread, self.work.launch, *operators, category=category)
            self.answers[operators, category] = np.where(self.recorded, around, NOTHING)
        answer: Ints = self.answers[operators, category]
        return answer

    @cached_property
    def answers(self) -> dict[Any, Any]:
        """What rules have asked of this evidence; see ``once``."""
        return {}

    def time_taken(self, gone: Removable) -> int:
        """Return how long host and devices take together for the work of a cause; nanoseconds.

        The engine's time directly after a node goes with it.
        """
        events, work, costs = self.events, self.work, self.costs
        around = enclosing(events, gone.operators, work.thread, work.launch)
        launched = (gone.work | (around >= 0)) & (work.device >= 0)
        alone = merged(gone.operators, gone.waits)
        after, until = self._engine_after(gone.spans)
        start = np.concatenate([events.start[alone], gone.stretches[0], after])
        end = np.concatenate([events.end[alone], gone.stretches[1], until])
        line = first_started(start, end, np.zeros(len(start), np.int64))
        inside = np.flatnonzero(line.values >= 0)  # the last one is not
        begin, finish = line.edges[inside], line.edges[inside + 1]
        by_step = costs.times_by_step(begin, costs.elapsed(begin, finish))
        by_step += costs.times_by_step(work.start[launched], costs.device_ns[launched])
        return self.typical.value(by_step + costs.of_spans_by_step(gone.spans))

    def _engine_after(self, chosen: Mask) -> tuple[Ints, Ints]:
        """Return from when to when the engine works between each of these nodes and the next."""
        spans, run = self.spans, self.ownership.passes.of_span
        nodes = np.flatnonzero(self.in_pass & spans.is_node)
        nodes = nodes[np.lexsort((spans.start[nodes], run[nodes], spans.thread[nodes]))]
        first, second = nodes[:-1], nodes[1:]
        apart = chosen[first] & (spans.thread[first] == spans.thread[second])
        apart &= (run[first] == run[second]) & (spans.end[first] < spans.start[second])
        return spans.end[first[apart]], spans.start[second[apart]]

    # Events ----------------------------------------------------------------------------------

    def around(
        self,
        threads: Ints,
        times: Ints,
        *operators: str,
        category: Category = Category.OPERATOR,
    ) -> Ints:
        """Return the event around each of these times on these threads; else as ``launched_in``."""
        starts = tuple(name[:-1] for name in operators if name.endswith("*"))
        good = self.events.prefix_mask(*starts) | self.events.name_mask(*operators)
        index = self.events.chosen(good, category)
        return enclosing(self.events, index, threads, times)

    def names_of(self, index: Ints) -> Ints:
        """Return the name of each event as an index into the trace's names; ``NOTHING`` stays."""
        return take(self.events.name, index)
