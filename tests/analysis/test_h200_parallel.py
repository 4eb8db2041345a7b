"""Several GPUs: communication beside compute, and two devices in one process."""

from __future__ import annotations

from collections import Counter

import pytest

from support.h200 import (
    WITH_BACKWARD,
    Interval,
    Work,
    by_step,
    clipped,
    expected,
    length,
    passes_of,
    plain_of,
    report_of,
    spans_of,
    windows,
)
from support.sums import usual

pytestmark = pytest.mark.xdist_group("h200")  # one worker reads them

DISTRIBUTED = [name for name in WITH_BACKWARD if "communication" in expected(name)]
LAYERS = tuple(f"layers.{index}" for index in range(4))


def sent_by(name: str) -> list[Work]:
    """The communication that the backward launches, in nodes or in the engine's callbacks."""
    plain = plain_of(name)
    threads = {node.thread for node in plain.nodes}
    begins = [nodes[0].start for nodes in passes_of(name)]
    ends = [end for _, end in windows(report_of(name))]
    return [
        w
        for w in plain.work
        if w.precedence == 2
        and w.thread in threads
        and any(begin <= w.launch < end for begin, end in zip(begins, ends, strict=True))
    ]


def owners_of_communication(name: str) -> set[str]:
    owners = {"(gradient exchange)"}
    return owners | ({"(parameter gather)"} if name.startswith("fsdp") else set())


def hidden(name: str, work: Work) -> int:
    """For how long other work runs beside it."""
    others = [w for w in plain_of(name).work if w.precedence < 2]
    return length(clipped(spans_of(others), (work.start, work.end)))


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_communication_counts_in_full_as_device_time(name: str) -> None:
    report, plain = report_of(name), plain_of(name)
    layers = plain.layer_of()
    kind = expected(name)["communication"].replace("_", "")
    assert any(kind in w.name.lower() for w in sent_by(name))
    totals = Counter(dict.fromkeys(LAYERS, 0))
    for work in plain.backward:
        if layers[work.node] and work.precedence < 2:
            totals[layers[work.node]] += work.duration
    assert {path: sum(report[path].row.gpu_ns_by_step) for path in LAYERS} == totals
    assert any(layers[w.node] in LAYERS for w in sent_by(name))
    exchanged = sum(sum(report[path].row.gpu_ns_by_step) for path in owners_of_communication(name))
    assert exchanged == sum(w.duration for w in sent_by(name))


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_communication_owns_the_clock_only_where_nothing_else_runs(name: str) -> None:
    report, plain = report_of(name), plain_of(name)
    layers = plain.layer_of()
    busy, idle = Counter(dict.fromkeys(LAYERS, 0)), 0
    for window in windows(report):
        taken: list[Interval] = []
        for work in sorted(plain.work, key=lambda w: (w.precedence, w.start, w.end)):
            (part,) = clipped(spans_of([work]), window) or [(0, 0)]
            own = part[1] - part[0] - length(clipped(taken, part))
            if own and work.node and work.precedence < 2:
                busy[layers[work.node]] += own
            if own:
                taken.append(part)
        idle += window[1] - window[0] - length(taken)
    for path in LAYERS:
        assert busy[path] <= sum(report[path].row.wall_ns_by_step) <= busy[path] + idle
    beside = sum(hidden(name, work) for work in sent_by(name))
    assert beside > 3 * idle, "enough of it is hidden for these bounds to tell"
    assert sum(report.gpu_ns_by_step) - sum(report.wall_ns_by_step) >= beside - idle


@pytest.mark.parametrize("name", [n for n in DISTRIBUTED if n.startswith("ddp")])
def test_the_last_bucket_is_the_exposed_one(name: str) -> None:
    report, plain = report_of(name), plain_of(name)
    layers = plain.layer_of()
    exposed: Counter[str] = Counter()
    for work in sent_by(name):
        exposed[layers[work.node]] += work.duration - hidden(name, work)
    assert exposed["layers.0"] > 10 * exposed["layers.2"]
    exchange = report["(gradient exchange)"].row
    assert [node.name for node in exchange.nodes] == ["(all_reduce)"]
    assert sum(exchange.wall_ns_by_step) >= sum(exposed.values())
    assert exchange.gpu_ns > 2 * exchange.wall_ns, "most of it is hidden"
    finding = next(f for f in report.findings if f.rule == "exposed-communication")
    assert finding.places[0].path == "layers.0", "where the exchange was launched"


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_what_the_engine_calls_after_the_last_node_is_the_passs(name: str) -> None:
    report, plain = report_of(name), plain_of(name)
    threads = {node.thread for node in plain.nodes}
    after = [w for w in plain.work if w.node is None and w.thread in threads]
    assert after, "copies out of the buckets, or the last reduction"
    engine = report["(autograd engine)"].row
    assert sum(engine.gpu_ns_by_step) == sum(w.duration for w in after if w.precedence < 2)
    for (_, end), nodes in zip(windows(report), passes_of(name), strict=True):
        late = [w for w in after if w.launch > nodes[-1].end]
        assert end >= min(w.end for w in late)
    assert end == max(w.end for w in [*after, *plain.backward])


def test_both_ranks_tell_the_same_story() -> None:
    for case in ("ddp", "fsdp2"):
        first, second = (report_of(f"{case}.rank{rank}") for rank in (0, 1))
        assert [device.device for device in first.devices] == [0]
        assert [device.device for device in second.devices] == [1]
        for path in LAYERS:
            one, other = first[path].row, second[path].row
            assert next(n.name for n in one.nodes if n.gpu_ns) == "AddmmBackward0"
            assert one.wall_ns == pytest.approx(other.wall_ns, rel=0.15)


def test_each_device_has_a_table_of_its_own() -> None:
    report, plain = report_of("model_parallel"), plain_of("model_parallel")
    assert [device.device for device in report.devices] == expected("model_parallel")["devices"]
    for device in report.devices:
        mine = [w for w in plain.backward if w.device == device.device]
        assert sum(device.gpu_ns.values()) == usual(report, by_step("model_parallel", mine))
    for half, number in expected("model_parallel")["device_of"].items():
        for device in report.devices:
            found = any(path.startswith(half) for path in device.gpu_ns)
            assert found == (device.device == number)


def test_a_pass_over_two_devices_ends_with_the_later_one() -> None:
    report, plain = report_of("model_parallel"), plain_of("model_parallel")
    for (_, end), nodes in zip(windows(report), passes_of("model_parallel"), strict=True):
        mine = {*nodes}
        last = max((w for w in plain.backward if w.node in mine), key=lambda w: w.end)
        assert last.device == 0, "the left half comes last in backward"
        assert end == last.end


def test_halves_that_do_the_same_work_cost_the_same() -> None:
    report = report_of("model_parallel")
    left, right = report["left"].row, report["right"].row
    assert left.total_gpu_ns == pytest.approx(right.total_gpu_ns, rel=0.25)
    assert right.total_wall_ns > 0.7 * left.total_wall_ns
