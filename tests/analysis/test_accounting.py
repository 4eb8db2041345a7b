"""Costs against a second, plain implementation that looks at every moment by itself."""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import backspot
from backspot import Report
from backspot.results.costs import WallKinds
from backspot.trace.compiled import (
    KEY,
    CompiledGraph,
    KnownModule,
    ModuleRef,
    Part,
    Site,
    format_compiled,
)
from support.sums import assert_adds_up
from support.synthetic import Trace

TICK = 10_000  # nanoseconds: well above what is taken for a clock's rounding
FORWARD_THREAD, BACKWARD_THREAD = 1, 2
MODULES = ("a", "b", "c")
PARTS = 4
"""Shares of launches are whole quarters."""


def report_of(trace: Trace, depth: int | None = None) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        return backspot.locate(trace.save(Path(folder) / "trace.json"), depth=depth)


@dataclass
class Kernel:
    start: int
    end: int
    launch: int | None
    communication: bool
    copy: bool

    @property
    def precedence(self) -> int:
        return 2 if self.communication else 1 if self.copy else 0


@dataclass
class Launch:
    """A launch of compiled code, for the modules x and y inside that of its node."""

    start: int
    end: int
    of_x: int  # quarters
    again: bool  # whether y's part runs again


@dataclass
class Case:
    """A forward of three modules, ``nodes`` (module, start, end) in backward, and kernels.

    The nodes with ``launches`` are compiled regions.
    """

    nodes: list[tuple[int, int, int]]
    kernels: list[Kernel]
    launches: list[list[Launch]]

    BACKWARD_START = 20

    def compiled(self, trace: Trace) -> None:
        """Add the calls of compiled code, and its table."""
        graphs = []
        for number, launches in enumerate(self.launches):
            if not launches:
                continue
            start, end = launches[0].start * TICK, launches[-1].end * TICK
            call = f"## Call CompiledFxGraph k{number} ##"
            trace.event("cpu_op", call, start, end, BACKWARD_THREAD)
            sites = []
            for at, one in enumerate(launches):
                name = f"triton_{number}_{at}"
                trace.event("cpu_op", name, one.start * TICK, one.end * TICK, BACKWARD_THREAD)
                parts = (Part(0, one.of_x), Part(1, PARTS - one.of_x, one.again))
                sites.append(Site(name, tuple(part for part in parts if part.weight)))
            places = tuple(ModuleRef("L['self']", path, path.upper()) for path in ("x", "y"))
            graphs.append(CompiledGraph(f"k{number}", True, places, tuple(sites)))
        known = [KnownModule("", "Model", "")]
        for outer in MODULES:
            paths = (outer, f"{outer}.x", f"{outer}.y")
            known += [KnownModule(path, path[-1].upper(), path) for path in paths]
        trace.metadata[KEY] = json.loads(format_compiled(graphs, known))

    def trace(self) -> Trace:
        trace = Trace()
        trace.forward("", "Model", 0, 15 * TICK, FORWARD_THREAD)
        number = 0
        numbers = []
        for module, name in enumerate(MODULES):
            begin = 5 * module
            trace.forward(name, name.upper(), begin * TICK, (begin + 4) * TICK, FORWARD_THREAD)
            for position, (owner, _, _) in reversed(list(enumerate(self.nodes))):
                if owner == module:
                    at = begin * TICK + 100 * (len(self.nodes) - position)
                    trace.operator("aten::mul", at, at + 50, seq=number, thread=FORWARD_THREAD)
                    numbers.append((position, number))
                    number += 1
        for position, number in numbers:
            _, start, end = self.nodes[position]
            trace.node("MulBackward0", start * TICK, end * TICK, seq=number, thread=BACKWARD_THREAD)
        self.compiled(trace)
        for stream, kernel in enumerate(self.kernels):
            if kernel.launch is None:
                launch, thread = None, 0
            else:
                launch = kernel.launch * TICK
                thread = BACKWARD_THREAD if kernel.launch >= self.BACKWARD_START else FORWARD_THREAD
            trace.kernel(
                kernel.start * TICK,
                kernel.end * TICK,
                launch=launch,
                launch_thread=thread,
                name="ncclDevKernel_AllReduce" if kernel.communication else "gemm",
                cat="gpu_memcpy" if kernel.copy else "kernel",
                stream=stream,
            )
        return trace


@st.composite
def cases(draw: st.DrawFn) -> Case:
    at = Case.BACKWARD_START
    nodes = []
    for _ in range(draw(st.integers(1, 5))):
        start = at + draw(st.integers(0, 3))
        at = start + draw(st.integers(1, 5))
        nodes.append((draw(st.integers(0, len(MODULES) - 1)), start, at))
    # The engine runs the last made node first: number them that way.
    nodes = sorted(nodes, key=lambda node: (-node[0], node[1]))
    times = sorted((start, end) for _, start, end in nodes)
    nodes = [(owner, *time) for (owner, _, _), time in zip(nodes, times, strict=True)]
    kernels = []
    for _ in range(draw(st.integers(0, 7))):
        launch = draw(st.none() | st.integers(0, at + 2))
        start = draw(st.integers(0 if launch is None else launch, at + 12))
        copy = draw(st.booleans())
        kernels.append(
            Kernel(
                start,
                start + draw(st.integers(1, 6)),
                launch,
                communication=not copy and draw(st.booleans()),
                copy=copy,
            )
        )
    return Case(nodes, kernels, [draw(launches_in(*times)) for _, *times in nodes])


@st.composite
def launches_in(draw: st.DrawFn, start: int, end: int) -> list[Launch]:
    """No launches for most nodes, else some that do not overlap."""
    if end < start + 2 or not draw(st.booleans()):
        return []
    # The last moment of the node is outside of the call.
    times = sorted(draw(st.sets(st.integers(start, end - 1), min_size=2, max_size=5)))
    return [
        Launch(begin, until, draw(st.integers(0, PARTS)), draw(st.booleans()))
        for begin, until in list(pairwise(times))[:: draw(st.integers(1, 2))]
    ]


Payers = dict[str, int]
"""Who pays, and how many quarters."""


def by_hand(case: Case) -> tuple[dict[str, int], ...]:
    """Wall, gpu and cpu by owner, in quarter ticks; what is not backward under its own name.

    Last, wall by owner and what it is spent on.
    """
    begin = case.nodes[0][1]
    host_end = case.nodes[-1][2]

    def host(moment: int, *, prepares: bool = True) -> Payers:
        for (owner, start, end), launches in zip(case.nodes, case.launches, strict=True):
            if start <= moment < end:
                for number, launch in enumerate(launches):
                    # Between two launches the host prepares the second one.
                    since = launches[number - 1].end if number and prepares else launch.start
                    if since <= moment < launch.end:
                        shares = {"x": launch.of_x, "y": PARTS - launch.of_x}
                        return {f"{MODULES[owner]}.{p}": s for p, s in shares.items() if s}
                return {MODULES[owner]: PARTS}
        return {}

    def launched(kernel: Kernel) -> float:
        return math.inf if kernel.launch is None else kernel.launch

    def owner(kernel: Kernel) -> Payers:
        """Who launched it; nothing where that was not this pass."""
        if kernel.launch is None:
            lost = "(communication)" if kernel.communication else "(no launch record)"
            return {lost: PARTS}
        if not begin <= kernel.launch < host_end:
            return {}
        modules = host(kernel.launch, prepares=False)
        if kernel.communication:
            return {"(communication)" if modules else "(gradient exchange)": PARTS}
        return modules or engine

    engine = {"(autograd engine)": PARTS}

    mine = [k for k in case.kernels if owner(k) and k.launch is not None]
    end = max([host_end, *(k.end for k in mine)])
    wall: dict[str, int] = defaultdict(int)
    spent: dict[str, int] = defaultdict(int)
    for moment in range(begin, end):
        running = [k for k in case.kernels if k.start <= moment < k.end]
        following = [k for k in case.kernels if k.start > moment]
        if running:
            first = min(running, key=lambda k: (k.precedence, k.start, k.end, launched(k)))
        elif following:
            soon = min(k.start for k in following)
            # Several that start at once are told apart as while they run.
            at_once = (k for k in following if k.start == soon)
            first = min(at_once, key=lambda k: (k.precedence, k.end, launched(k)))
            if first.launch is None or first.launch > moment:
                first = None
        else:
            first = None
        if first is None:
            payers, kind = host(moment) or engine, "host_ns"
        else:
            payers = owner(first)
            kind = "communication_ns" if first.communication else "gpu_ns"
            kind = kind if running else "queued_ns"
        for name, share in payers.items():
            wall[name] += share
            spent[f"{name} {kind}"] += share
        if not payers:
            assert first is not None
            assert first.launch is not None
            wall["(forward)" if first.launch < begin else "(other)"] += PARTS
    gpu: dict[str, int] = defaultdict(int)
    for kernel in case.kernels:
        if kernel.launch is not None or begin <= kernel.start < end:
            for name, share in owner(kernel).items():
                gpu[name] += share * (kernel.end - kernel.start)
    cpu: dict[str, int] = defaultdict(int)
    for _, start, stop in case.nodes:
        for moment in range(start, stop):
            for name, share in host(moment).items():
                cpu[name] += share
    return dict(wall), dict(gpu), dict(cpu), dict(spent)


@given(cases())
def test_every_moment_has_the_owner_that_the_rule_says(case: Case) -> None:
    report = report_of(case.trace())
    wall, gpu, cpu, spent = by_hand(case)
    found = {
        column: {
            row.path: getattr(row, f"{column}_ns") * PARTS // TICK
            for row in report.modules
            if getattr(row, f"{column}_ns")
        }
        for column in ("wall", "gpu", "cpu")
    }
    assert found["cpu"] == cpu
    assert found["gpu"] == gpu
    for what in ("forward", "other"):
        left = sum(getattr(p, f"{what}_ns") for p in report.passes)
        assert left * PARTS // TICK == wall.pop(f"({what})", 0)
    assert found["wall"] == wall
    assert spent == {
        f"{row.path} {kind}": ns * PARTS // TICK
        for row in report.modules
        for kind, ns in asdict(row.wall_on).items()
        if ns
    }


@pytest.mark.slow
@given(cases())
def test_the_parts_sum_to_the_whole_exactly(case: Case) -> None:
    report = report_of(case.trace())
    assert report.steps == 1, "so that nodes, kernels and kinds sum to their row exactly"
    assert_adds_up(report)
    for column in ("wall_ns", "gpu_ns", "cpu_ns"):
        assert sum(getattr(o, column) for o in report.operators) <= getattr(report, column)
    for row in report.modules:
        assert sum(asdict(row.wall_on).values()) == row.wall_ns
        for column in ("wall_ns", "gpu_ns", "cpu_ns"):
            assert sum(k.spent_ns for k in row.kernels) == row.gpu_ns
            if row.is_module:
                assert sum(getattr(n, column) for n in row.nodes) == getattr(row, column)
    for depth in (0, 1):
        folded = report.top(depth=depth)
        assert sum(r.wall_ns for r in folded) == report.wall_ns
        assert all(sum(asdict(row.wall_on).values()) == row.wall_ns for row in folded)
        assert sum(r.forward_ns for r in folded) == sum(r.forward_ns for r in report.modules)


def test_two_devices_each_have_a_table_and_the_later_one_decides() -> None:
    case = Case([(2, 20, 25), (1, 25, 30)], [], [[], []])
    trace = case.trace()
    trace.kernel(22 * TICK, 40 * TICK, launch=21 * TICK, device=0)
    trace.kernel(27 * TICK, 60 * TICK, launch=26 * TICK, device=1)
    report = report_of(trace)
    assert [d.device for d in report.devices] == [0, 1]
    assert report.devices[0].gpu_ns == {"c": 18 * TICK}
    assert report.devices[1].gpu_ns == {"b": 33 * TICK}
    rows = {row.path: row.wall_ns // TICK for row in report.modules}
    assert rows["b"] == 33, "device 1 ends last: its kernel"
    assert rows["c"] == 7, "the host, and the kernel on device 0 while device 1 idles"
    assert report.passes[0].duration_ns == 40 * TICK


def test_a_forward_on_one_device_counts_while_another_device_idles() -> None:
    case = Case([(2, 20, 25), (1, 25, 30)], [], [[], []])
    trace = case.trace()
    trace.kernel(22 * TICK, 40 * TICK, launch=21 * TICK, device=0)
    trace.kernel(6 * TICK, 9 * TICK, launch=TICK, launch_thread=FORWARD_THREAD, device=1)
    rows = {row.path: row.forward_ns // TICK for row in report_of(trace).modules}
    assert rows["a"] == 4 + 3, "its call, and its kernel"
    assert rows["b"] == 1, "its call, until the kernel runs"


def test_the_device_that_ends_last_decides_although_another_one_starts_later() -> None:
    trace = Case([(2, 20, 25), (1, 25, 30)], [], [[], []]).trace()
    trace.kernel(22 * TICK, 60 * TICK, launch=21 * TICK, device=0)
    trace.kernel(27 * TICK, 40 * TICK, launch=26 * TICK, device=1)
    rows = {row.path: row.wall_ns // TICK for row in report_of(trace).modules if row.wall_ns}
    assert rows == {"c": 40}


def test_recompute_belongs_to_the_module_that_is_run_again() -> None:
    trace = Trace()
    trace.forward("", "Model", 0, 9 * TICK)
    trace.forward("block", "Block", TICK, 8 * TICK)
    trace.operator("aten::mul", 2 * TICK, 3 * TICK, seq=0)
    trace.node("MulBackward0", 20 * TICK, 40 * TICK, seq=0)
    trace.forward("block", "Block", 22 * TICK, 32 * TICK, thread=2)
    trace.operator("aten::mul", 23 * TICK, 24 * TICK, seq=0, thread=2)
    trace.kernel(24 * TICK, 30 * TICK, launch=23 * TICK, launch_thread=2)
    report = report_of(trace)
    row = report["block"].row
    assert row.calls == 1
    assert row.wall_ns == 20 * TICK
    assert row.recompute_ns == 10 * TICK
    assert {n.name: n.wall_ns for n in row.nodes} == {
        "MulBackward0": 10 * TICK,
        "(recompute)": 10 * TICK,
    }


def test_passes_that_overlap_on_the_device_count_each_moment_once() -> None:
    trace = Trace()
    for step in range(2):
        at = 100 * step * TICK
        trace.forward("", "Model", at, at + 5 * TICK)
        trace.operator("aten::mul", at + TICK, at + 2 * TICK, seq=step)
        trace.node("MulBackward0", at + 10 * TICK, at + 20 * TICK, seq=step)
        # The device is far behind the host.
        trace.kernel(at + 30 * TICK, at + 130 * TICK, launch=at + 12 * TICK, name=f"kernel {step}")
    report = report_of(trace)
    first, second = report.passes
    assert first.start_ns + first.duration_ns == second.start_ns
    assert report.wall_ns_by_step == ((130 - 10) * TICK, 100 * TICK)
    assert report.wall_ns == 110 * TICK
    assert report.gpu_ns_by_step == (100 * TICK, 100 * TICK)
    assert_adds_up(report)


def test_depth_folds_what_is_deeper() -> None:
    trace = Trace()
    trace.forward("", "Model", 0, 9 * TICK)
    trace.forward("block", "Block", TICK, 8 * TICK)
    trace.forward("block.fc", "Linear", 2 * TICK, 4 * TICK)
    trace.operator("aten::mul", 3 * TICK, 3 * TICK + 50, seq=0)
    trace.operator("aten::add", 6 * TICK, 6 * TICK + 50, seq=1)
    trace.node("AddBackward0", 20 * TICK, 22 * TICK, seq=1)
    trace.node("MulBackward0", 22 * TICK, 29 * TICK, seq=0)
    whole, folded = report_of(trace), report_of(trace, depth=1)
    assert [r.path for r in whole.top(2)] == ["block.fc", "block"]
    assert whole["block"].row.total_wall_ns == 9 * TICK
    assert [r.path for r in folded.modules if r.is_module] == ["block", ""]
    assert folded["block"].row.wall_ns == 9 * TICK
    assert folded["block"].row.calls == 1


def test_a_launch_that_the_profiler_missed_is_told_by_the_queues_order() -> None:
    trace = Case([(2, 20, 25), (1, 25, 30)], [], [[], []]).trace()
    trace.kernel(15 * TICK, 22 * TICK, launch=None, name="of the step before")
    trace.kernel(22 * TICK, 24 * TICK, launch=5 * TICK, launch_thread=FORWARD_THREAD)
    trace.kernel(24 * TICK, 26 * TICK, launch=21 * TICK)
    trace.kernel(26 * TICK, 31 * TICK, launch=None, name="between two of the same node")
    trace.kernel(31 * TICK, 32 * TICK, launch=23 * TICK)
    trace.kernel(32 * TICK, 35 * TICK, launch=None, name="between two of different nodes")
    trace.kernel(35 * TICK, 36 * TICK, launch=27 * TICK)
    report = report_of(trace)
    assert {row.path: row.gpu_ns // TICK for row in report.modules if row.gpu_ns} == {
        "c": 2 + 5 + 1,
        "b": 1,
        "(no launch record)": 3,
    }
    assert report.passes[0].forward_ns == 4 * TICK
    trace.kernel(28 * TICK, 29 * TICK, launch=None, stream=8, name="alone in its queue")
    report = report_of(trace)
    assert report["(no launch record)"].row.gpu_ns == 4 * TICK
    assert any("no launch record" in w for w in report.warnings)


def test_a_missed_launch_is_nobodys_if_another_module_ran_between_its_neighbours() -> None:
    trace = Case([(2, 20, 30)], [], [[]]).trace()
    trace.forward("b", "B", 23 * TICK, 25 * TICK, BACKWARD_THREAD)  # runs again, in a node of c
    trace.kernel(22 * TICK, 24 * TICK, launch=21 * TICK)
    trace.kernel(24 * TICK, 29 * TICK, launch=None)
    trace.kernel(29 * TICK, 30 * TICK, launch=27 * TICK)
    rows = {row.path: row.gpu_ns // TICK for row in report_of(trace).modules if row.gpu_ns}
    assert rows == {"c": 3, "(no launch record)": 5}


def test_idle_time_after_a_wait_is_the_waiting_modules() -> None:
    trace = Case([(2, 20, 30), (1, 30, 40)], [], [[], []]).trace()
    trace.kernel(21 * TICK, 26 * TICK, launch=21 * TICK)
    # The host waits until the queue has run empty, goes on to the next node, and launches late.
    trace.event("cuda_runtime", "cudaStreamSynchronize", 22 * TICK, 27 * TICK, 2)
    trace.kernel(38 * TICK, 41 * TICK, launch=37 * TICK)
    report = report_of(trace)
    assert {row.path: row.wall_ns // TICK for row in report.modules if row.wall_ns} == {
        "c": 1 + 5 + 11,  # host, kernel, and idle until the next launch
        "b": 1 + 3,  # the launch under way, and the kernel
    }
    assert report["c"].row.wall_on == WallKinds(
        gpu_ns=5 * TICK, sync_ns=11 * TICK, host_ns=1 * TICK
    )
    assert report["b"].row.wall_on == WallKinds(gpu_ns=3 * TICK, queued_ns=1 * TICK)


def test_an_optimizer_that_still_runs_is_neither_backward_nor_forward() -> None:
    trace = Case([(2, 20, 30)], [], [[]]).trace()
    trace.annotation("Optimizer.step#SGD.step", -9 * TICK, -5 * TICK)
    trace.kernel(-6 * TICK, 22 * TICK, launch=-8 * TICK, launch_thread=FORWARD_THREAD)
    trace.kernel(22 * TICK, 23 * TICK, launch=15 * TICK, launch_thread=FORWARD_THREAD)
    trace.kernel(23 * TICK, 31 * TICK, launch=21 * TICK)
    (run,) = report_of(trace).passes
    assert (run.other_ns // TICK, run.forward_ns // TICK, run.wall_ns // TICK) == (2, 1, 8)


def test_what_a_closure_launched_is_its_forwards_and_not_the_optimizers_that_called_it() -> None:
    trace = Case([(2, 20, 30)], [], [[]]).trace()
    trace.annotation("Optimizer.step#LBFGS.step", 5 * TICK, 60 * TICK)
    trace.kernel(16 * TICK, 23 * TICK, launch=15 * TICK, launch_thread=FORWARD_THREAD)
    trace.kernel(23 * TICK, 31 * TICK, launch=21 * TICK)
    (run,) = report_of(trace).passes
    assert (run.other_ns // TICK, run.forward_ns // TICK, run.wall_ns // TICK) == (0, 3, 8)
