"""Who pays for which moment on real GPUs: each against a plain computation from the events."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from support.choice import slow_except
from support.h200 import (
    EACH_WITH_BACKWARD,
    QUICK,
    WITH_BACKWARD,
    Interval,
    Node,
    Work,
    by_step,
    clipped,
    expected,
    length,
    passes_of,
    plain_of,
    report_of,
    spans_of,
    step_of,
    windows,
)
from support.sums import usual

pytestmark = pytest.mark.xdist_group("h200")  # one worker reads them

DISTRIBUTED = [name for name in WITH_BACKWARD if "communication" in expected(name)]
SINGLE = [name for name in WITH_BACKWARD if len(expected(name)["counted"]["devices"]) == 1]
# Work that runs again has its modules' rows and no nodes of its own.
BY_NODE = [name for name in SINGLE if "recompute_within" not in expected(name)]
GPU_BOUND = (
    "compiled_whole",
    "cuda_graph_part",
    "fp32_convnet",
    "optimizer_foreach_false",
    "pageable_copies",
    "pinned_prefetch",
    *DISTRIBUTED,
)


# The clock, moment by moment ---------------------------------------------------------------------


class Clock:
    """The rule for ``wall`` once more, with a question for each moment."""

    def __init__(self, name: str) -> None:
        self.plain = plain_of(name)
        self.starts = [w.start for w in self.plain.work]
        pageable = {w.launch for w in self.plain.work if "Pageable" in w.name}
        self.waits = [
            call
            for call in sorted(self.plain.calls, key=lambda call: call["start"])
            if ("Synchronize" in call["name"] or call["start"] in pageable)
            and self.plain.node_at(call["tid"], call["start"])
        ]
        self.ends = [0]
        for work in self.plain.work:
            self.ends.append(max(self.ends[-1], work.end))

    def edges(self, window: Interval) -> list[int]:
        times = {*window}
        for work in self.plain.work:
            times |= {work.start, work.end, work.launch}
        for node in self.plain.nodes:
            times |= {node.start, node.end}
        return sorted(t for t in times if window[0] <= t <= window[1])

    def holder(self, moment: int, threads: list[int]) -> Work | Node | None:
        begun = bisect_right(self.starts, moment)
        if self.ends[begun] > moment:
            running = [w for w in self.plain.work[:begun] if w.end > moment]
            return min(running, key=lambda w: (w.precedence, w.start, w.end))
        if begun < len(self.starts):
            soon = self.plain.work[begun]
            if soon.launch <= moment:
                return soon
            drained = self.ends[begun]  # since then the device idles
            waits = [call for call in self.waits if call["start"] <= drained]
            if begun and waits and waits[-1]["end"] >= drained:
                return self.plain.node_at(waits[-1]["tid"], waits[-1]["start"])
        return next(filter(None, (self.plain.node_at(t, moment) for t in threads)), None)


def collective_of(work: Work) -> str:
    """What the report lists among the nodes of the row that owns the communication."""
    known = {"AllReduce": "(all_reduce)", "ReduceScatter": "(reduce_scatter)"}
    return next((said for part, said in known.items() if part in work.name), "(all_gather)")


@pytest.mark.parametrize("name", slow_except(QUICK, BY_NODE))
def test_every_moment_has_the_owner_that_the_rule_says(name: str) -> None:
    report, clock = report_of(name), Clock(name)
    threads = sorted({node.thread for node in clock.plain.nodes})
    wall: dict[str, list[int]] = defaultdict(lambda: [0] * report.steps)
    for run, window, nodes in zip(report.passes, windows(report), passes_of(name), strict=True):
        edges = clock.edges(window)
        for moment, until in pairwise(edges):
            holder = clock.holder(moment, threads)
            if (
                isinstance(holder, Work)
                and holder.precedence == 2
                and holder.launch > nodes[0].start
            ):
                what = collective_of(holder)
            elif isinstance(holder, Work) and holder.node is None:
                before = holder.launch < nodes[0].start and not clock.plain.in_optimizer(holder)
                engine = holder.thread in threads
                what = "forward" if before else "engine" if engine else "other"
            else:
                node = holder.node if isinstance(holder, Work) else holder
                what = node.name if node else "engine"
            wall[what][run.step] += until - moment
    for what, kept in (("forward", "forward_ns"), ("other", "other_ns")):
        assert sum(getattr(run, kept) for run in report.passes) == sum(wall.pop(what, ()))
    engine = [row for row in report.modules if row.path == "(autograd engine)"]
    spent = [list(row.wall_ns_by_step) for row in engine if sum(row.wall_ns_by_step)]
    assert spent == [steps for steps in [wall.pop("engine", [])] if steps]
    found = Counter({o.name: o.wall_ns for o in report.operators})
    if replays := found.pop("(before a graph's replay)", 0):
        found["GraphedBackward"] += replays  # shown apart from the node that replays
    assert +found == {node: usual(report, steps) for node, steps in wall.items() if any(steps)}


# What counts as the backward's -------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", slow_except(QUICK, [n for n in WITH_BACKWARD if n not in DISTRIBUTED])
)
def test_device_time_is_that_of_the_work_launched_within_nodes(name: str) -> None:
    report, plain = report_of(name), plain_of(name)
    assert report.gpu_ns_by_step == by_step(name, plain.backward)
    by_node: dict[str, list[Work]] = defaultdict(list)
    for work in plain.backward:
        by_node[work.node.name].append(work)
    if not any(row.recompute_ns for row in report.modules):
        assert {o.name: o.gpu_ns for o in report.operators if o.gpu_ns} == {
            node: usual(report, by_step(name, work)) for node, work in by_node.items()
        }


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_a_pass_lasts_until_its_last_work_on_the_device_ends(name: str) -> None:
    report, plain, before = report_of(name), plain_of(name), 0
    for (start, end), nodes in zip(windows(report), passes_of(name), strict=True):
        assert start == max(nodes[0].start, before), "no moment is counted twice"
        mine = {*nodes}
        latest = max(w.end for w in plain.backward if w.node in mine)
        latest = max(latest, *(node.end for node in nodes))
        # In data-parallel training the engine's callbacks launch a little more.
        assert latest <= end <= latest + (300_000 if name in DISTRIBUTED else 0)
        before = end


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_host_time_is_that_spent_in_nodes(name: str) -> None:
    report = report_of(name)
    threads: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    for node, step in step_of(name).items():
        threads[step, node.thread].append((node.start, node.end))
    spent = [0] * report.steps
    for (step, _), spans in threads.items():
        spent[step] += length(spans)
    assert report.cpu_ns_by_step == tuple(spent)


# Forward and backward on the device --------------------------------------------------------------


@pytest.mark.parametrize("name", slow_except(QUICK, GPU_BOUND))
def test_the_forward_that_still_runs_is_not_the_backwards(name: str) -> None:
    report, plain = report_of(name), plain_of(name)
    for window, nodes, run in zip(windows(report), passes_of(name), report.passes, strict=True):
        mine = {*nodes}
        first = min(w.start for w in plain.backward if w.node in mine and w.precedence == 0)
        late = [
            w
            for w in plain.work
            if not w.node
            and w.launch < nodes[0].start
            and w.precedence == 0
            and not plain.in_optimizer(w)
        ]
        running = length(clipped(spans_of(late), (window[0], first)))
        assert run.forward_ns >= running > 500_000


def test_a_host_bound_backward_waits_for_no_forward() -> None:
    report = report_of("launch_bound")
    assert [run.forward_ns for run in report.passes] == [0, 0]
    assert report.gpu_ns < 0.1 * report.wall_ns
    assert report.cpu_ns > 0.8 * report.wall_ns


def test_the_optimizer_may_start_before_the_backward_ends() -> None:
    report, plain = report_of("optimizer_foreach_false"), plain_of("optimizer_foreach_false")
    optimizers = plain.named("Optimizer.step#")
    for (_, end), optimizer in zip(windows(report), optimizers, strict=True):
        assert optimizer["start"] < end, "the host is ahead"
    first, second = report.passes
    assert first.other_ns == 0, "it runs after its own step's backward, on the same stream"
    assert second.other_ns > 0, "and into the next step's"
    assert sum(report.gpu_ns_by_step) == sum(w.duration for w in plain.backward)


# Streams and copies ------------------------------------------------------------------------------


def test_both_streams_own_their_kernels() -> None:
    report, plain = report_of("two_streams"), plain_of("two_streams")
    assert {w.stream for w in plain.backward} == {7, 13}
    side = sum(w.duration for w in plain.backward if w.stream == 13)
    within = [row for row in report.modules if f"{row.path}.".startswith("side.")]
    assert sum(sum(row.gpu_ns_by_step) for row in within) == side
    assert report["side"].row.total_gpu_ns == sum(row.gpu_ns for row in within)
    side = report["side"].row.total_gpu_ns
    assert report["main"].row.total_gpu_ns == pytest.approx(side, rel=0.05)
    for run in report.passes:
        assert run.wall_ns <= run.duration_ns


def test_a_prefetch_beside_the_backward_costs_it_nothing() -> None:
    report, plain = report_of("pinned_prefetch"), plain_of("pinned_prefetch")
    copies = [w for w in plain.work if w.stream == 13]
    assert [w for w in copies if any(a < w.end and w.start < b for a, b in windows(report))]
    assert not any(w.node for w in copies)
    recorded = sum(report.wall_ns_by_step)
    assert recorded == pytest.approx(length(spans_of(plain.backward)), rel=0.02)


def test_copies_of_the_forward_are_not_the_backwards() -> None:
    plain = plain_of("pageable_copies")
    copies = [w for w in plain.work if "Pageable" in w.name]
    assert len(copies) == 2
    assert not any(w.node for w in copies)


# Waiting -----------------------------------------------------------------------------------------


def test_a_module_that_waits_for_the_device_pays_for_the_idle_time_after() -> None:
    report, plain = report_of("sync_in_backward"), plain_of("sync_in_backward")
    (path,) = expected("sync_in_backward")["syncs_in_backward_of"]
    waits = [
        (call, node)
        for call in plain.calls
        if "Synchronize" in call["name"] and (node := plain.node_at(call["tid"], call["start"]))
    ]
    mine = [(call, node) for call, node in waits if node.name == "_SyncInBackwardBackward"]
    assert len(mine) == 4, "two in each step: item() and nonzero()"
    idle = 0
    for call, _ in mine:
        drained = max(w.end for w in plain.work if w.start < call["end"])
        following = min(w.start for w in plain.work if w.start >= drained)
        launch = min(w.launch for w in plain.work if w.start == following)
        assert drained < call["end"] < launch
        idle += launch - drained
    row = report[path].row
    assert sum(row.wall_ns_by_step) >= sum(row.gpu_ns_by_step) + idle
    # While the host waited the GPU computed: that time is not the waiting module's.
    waited = sum(call["dur"] * 1000 for call, _ in mine)
    assert sum(row.cpu_ns_by_step) > waited > 4 * sum(row.wall_ns_by_step)


def test_a_gap_before_launched_work_is_that_works() -> None:
    report, plain = report_of("fp32_convnet"), plain_of("fp32_convnet")
    for window in windows(report):
        busy = length(clipped(spans_of(plain.work), window))
        assert window[1] - window[0] > busy, "there are gaps, although the host is far ahead"
    assert "(autograd engine)" not in {
        row.path for row in report.modules if sum(row.wall_ns_by_step)
    }
