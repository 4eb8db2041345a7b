"""All times of a report are those of a real step, where one was timed."""

from __future__ import annotations

import csv
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from backspot import Report, pipeline
from backspot.analysis.accounting.activity import NAMES
from backspot.analysis.accounting.unrecorded import RealStep
from backspot.analysis.recording import Recording
from backspot.formatting import duration, percent
from backspot.render import renderer_for
from backspot.render._consistency import contradiction
from backspot.render.json import to_json
from backspot.render.tables import to_csv
from backspot.render.text import render_text
from backspot.trace.source_lines import KEY, LineTable, Made, SourceLine, format_lines
from support.phased import HOST, TICK, report_of, step
from support.recordings import IN_ONE_WORKER, recording_of, report_of as report_of_file
from support.synthetic import Trace

TESTS = Path(__file__).parents[1]
DATA, DOCS = TESTS / "data", TESTS.parent / "docs"


def timed(trace: Trace, real_ns: int, parts: Mapping[str, int] | None = None) -> Report:
    """The report of a trace of which real steps were timed, too, and perhaps parts of them."""
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording.read(trace.save(Path(folder) / "trace.json"))
    known = {(name,): ns for name, ns in (parts or {}).items()}
    return pipeline.report_of(recording.in_real_time(RealStep(real_ns, parts=known)))


@given(st.floats(0.3, 1.2), st.integers(0, 3))
def test_what_people_read_are_parts_of_the_real_step(part: float, kernels: int) -> None:
    trace = Trace()
    step(trace)
    for number in range(kernels):
        at = (22 + 6 * number) * TICK
        trace.kernel(at, at + 4 * TICK, launch=at, launch_thread=HOST)
    real = int(100 * TICK * part)
    report = timed(trace, real_ns=real)
    assert report.clock == "real"
    assert (report.step_ns, report.recorded_step_ns) == (real, 100 * TICK)
    check_sums(report)


def check_sums(report: Report) -> None:
    """All sums of a report are exact, in its clock and as it was recorded."""
    assert contradiction(report) == ""
    recorded, real = report.recorded_step_ns, report.step_ns
    assert sum(one.wall_ns for one in report.phases) == real
    assert sum(one.recorded_wall_ns for one in report.phases) == recorded
    for phase in report.phases:
        assert 0 <= phase.busy_ns <= phase.wall_ns, phase
        assert min(phase.wall_ns_by_step) >= 0, phase
    for field in ("wall_ns", "recorded_wall_ns", "cpu_ns", "gpu_ns"):
        whole = getattr(report, field)
        assert sum(getattr(row, field) for row in report.modules) == whole
        backward = [getattr(one, field, whole) for one in report.phases if one.name == "backward"]
        assert backward in ([], [whole])
    for field in ("wall_ns_by_step", "cpu_ns_by_step", "gpu_ns_by_step"):
        columns = zip(*(getattr(row, field) for row in report.modules), strict=True)
        assert tuple(map(sum, columns)) == getattr(report, field)
    columns = zip(*(phase.wall_ns_by_step for phase in report.phases), strict=True)
    assert tuple(map(sum, columns)) == report.step_ns_by_step
    for row in report.modules:
        assert sum(astuple(row.wall_on)) == row.wall_ns
        assert sum(node.wall_ns for node in row.nodes) <= row.wall_ns
    for device in report.devices if len(report.devices) == 1 else ():
        assert sum(device.wall_ns.values()) == report.wall_ns


CHOSEN = {"vit", "two_streams", "model_parallel", "gradient_accumulation", "lstm", "clip_each"}
CHOSEN |= {"fp32_convnet", "sync_in_backward"}  # a device works all the time
CHOSEN |= {"ddp", "late_layers"}
RECORDINGS = {
    name: path
    for path in sorted(DATA.glob("*/*.json.gz"))
    if (name := path.name.partition(".")[0]) in CHOSEN and path.parent.name != "ranks"
}


@IN_ONE_WORKER
@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("part", [0.04, 0.63, 1.7])
def test_of_a_recording_too_all_sums_are_those_of_a_real_step(
    name: str, part: float, tmp_path: Path
) -> None:
    recording, plain = recording_of(RECORDINGS[name]), report_of_file(RECORDINGS[name])
    check_sums(plain)
    assert plain.clock == "recorded"
    assert plain.step_ns == plain.recorded_step_ns
    real = RealStep(round(part * plain.step_ns))
    report = pipeline.report_of(recording.in_real_time(real))
    check_sums(report)
    assert (report.clock == "real") == bool(plain.phases)
    assert Report.load(report.save(tmp_path / "report.json")) == report
    assert report.recorded_step_ns == plain.step_ns
    assert {row.path: row.recorded_wall_ns for row in report.modules} == {
        row.path: row.wall_ns for row in plain.modules
    }
    assert report.gpu_ns == plain.gpu_ns
    assert report.gpu_ns_by_step == plain.gpu_ns_by_step


@given(
    st.dictionaries(
        st.sampled_from(["forward", "backward", "optimizer", "data"]), st.integers(1, 40)
    ),
    st.integers(1, 100),
)
def test_parts_of_the_real_step_that_are_known_hold_as_they_are(
    ticks_of: dict[str, int], rest: int
) -> None:
    trace = Trace()
    step(trace)
    parts = {name: count * TICK + 1 for name, count in ticks_of.items()}
    report = timed(trace, sum(parts.values()) + rest * TICK, parts)
    check_sums(report)
    found = {phase.name: phase.wall_ns for phase in report.phases}
    for name, ns in parts.items():
        assert found[name] == pytest.approx(ns, abs=len(NAMES))  # data, too, which has no event


@IN_ONE_WORKER
@pytest.mark.parametrize("name", ["late_layers", "vit"])
def test_waiting_for_data_alone_is_a_step_too(name: str) -> None:
    recording = recording_of(RECORDINGS[name])
    step_ns = report_of_file(RECORDINGS[name]).step_ns
    real = RealStep(step_ns, parts={("data",): 2 * step_ns})
    report = pipeline.report_of(recording.in_real_time(real))
    check_sums(report)
    assert max(report.phases, key=lambda phase: phase.wall_ns).name == "data"


def test_parts_beyond_the_step_are_brought_into_it() -> None:
    trace = Trace()
    step(trace)
    report = timed(trace, 10 * TICK, {"forward": 30 * TICK, "backward": 10 * TICK})
    check_sums(report)
    found = {phase.name: phase.wall_ns for phase in report.phases}
    assert found["forward"] == pytest.approx(3 * found["backward"], rel=1e-6)


def test_the_real_step_is_the_mean_of_the_timed_ones() -> None:
    """As a clock beside the training has it: a wait in one step is a part of the mean."""
    assert RealStep.of([10, 10, 10, 110]) == RealStep(35, (10, 10, 10, 110))
    assert RealStep.of(()) is None


def of_small_operators(*, noted: bool = False) -> Trace:
    """Steps of a millisecond: a loop of 40 operators in ``a``, and a node of 4 µs for each.

    Args:
        noted: whether the line of each node was noted while it was made.
    """
    trace, us = Trace(), 1_000
    for number in range(3):
        at = number * 1_000 * us
        trace.annotation(f"ProfilerStep#{number}", at, at + 1_000 * us)
        trace.forward("a", "A", at + 100 * us, at + 400 * us)
        for turn in range(40):
            begin, back = at + (110 + 6 * turn) * us, at + (800 - 8 * turn) * us
            trace.operator("aten::mul", begin, begin + 4 * us, seq=40 * number + turn)
            trace.node("MulBackward0", back, back + 4 * us, seq=40 * number + turn, thread=HOST)
    if noted:
        made = Made(np.array([0]), np.array([120]), np.array([0]))
        line = SourceLine("net.py", 7, "A.forward", "x = x * y", "MulBackward0")
        trace.metadata[KEY] = json.loads(format_lines(LineTable((line,), {1: made})))
    return trace


def test_what_recording_nodes_takes_is_time_between_them() -> None:
    """A recording runs before an event begins and after it ends."""
    rows = {row.path: row for row in timed(of_small_operators(), real_ns=900_000).modules}
    between = rows["(autograd engine)"]
    assert rows["a"].wall_ns == pytest.approx(rows["a"].recorded_wall_ns, rel=1e-3)
    assert between.wall_ns < 0.8 * between.recorded_wall_ns


def test_noting_the_lines_of_nodes_takes_time_where_they_are_made() -> None:
    plain, noted = (
        {
            one.name: one.wall_ns
            for one in timed(of_small_operators(noted=noted), real_ns=900_000).phases
        }
        for noted in (False, True)
    )
    assert noted["forward"] < 0.95 * plain["forward"]
    assert noted["backward"] > 1.05 * plain["backward"]


def test_without_a_device_a_loop_is_worth_most_of_a_module_that_does_nothing_else() -> None:
    report = timed(of_small_operators(noted=True), real_ns=700_000)
    (loop,) = (one for one in report.findings if one.rule == "operator-loop")
    (module,) = (row for row in report.modules if row.path == "a")
    assert loop.saves is not None
    assert module.saves is not None
    assert 0.75 * module.saves.ns < loop.saves.ns <= module.saves.ns


def said_of_rows(report: Report, tmp_path: Path) -> dict[str, list[tuple[str, int]]]:
    """What each output says of the time of each row in the backward, in nanoseconds."""
    data = json.loads(report.save(tmp_path / "report.json").read_text())
    head, *cells = csv.reader(to_csv(report).decode().splitlines())
    path, kind, wall = map(head.index, ("path", "class_name", "wall_ns"))
    return {
        "report": [(row.name, row.wall_ns) for row in report.modules],
        "top": [(row.name, row.wall_ns) for row in report.top()],
        "lookup": [(row.name, report[row.name].row.wall_ns) for row in report.modules],
        "repr": [
            (row.name, round(float(re.findall(r"wall ([\d.]+)", repr(row))[0]) * 1e6))
            for row in report.modules
        ],
        "share": [(row.name, round(report.share(row) * report.wall_ns)) for row in report.modules],
        "json": [(row["path"] or row["class_name"], row["wall_ns"]) for row in data["modules"]],
        "csv": [(row[path] or row[kind], int(row[wall])) for row in cells],
    }


def test_all_outputs_have_the_same_time_of_each_row(tmp_path: Path) -> None:
    trace = Trace()
    step(trace)
    report = timed(trace, real_ns=50 * TICK)
    assert Report.load(report.save(tmp_path / "saved.json")) == report
    truth, *others = said_of_rows(report, tmp_path).values()
    for said in others:
        assert dict(said) == pytest.approx(dict(truth), abs=500)  # as repr rounds
    assert sum(ns for _, ns in truth) == report.wall_ns < report.recorded_wall_ns
    assert f"backward {report.wall_ns / 1e6:.3f} ms" in repr(report)
    forms = [renderer_for(f"x.{suffix}")(report).decode() for suffix in ("html", "md")]
    texts = [render_text(report, width=200, full=True), report._repr_html_(), *forms]
    for row in report.modules:
        for text in texts:
            assert f"{row.wall_ns / 1e6:.2f}" in text, row.name
    for phase in report.phases:
        for text in texts:
            assert percent(phase.wall_ns / report.step_ns) in text, phase.name
    for text in texts:
        assert "times without the profiler" in text
    first = report.modules[0]
    text = f"{duration(first.total_wall_ns)} of the backward per step"
    assert str(report[first.name]).startswith(f"{first.label}: {text}")
    wall, *_ = json.loads(renderer_for("x.speedscope.json")(report))["profiles"]
    assert wall["endValue"] == report.wall_ns
    assert wall["name"].endswith("without the profiler")
    for row in json.loads(to_json(report))["phases"]:
        assert row["wall_ns"] < row["recorded_wall_ns"]


def test_a_trace_alone_says_that_its_times_are_recorded_ones() -> None:
    trace = Trace()
    step(trace)
    report = report_of(trace)
    forms = [renderer_for(f"x.{suffix}")(report).decode() for suffix in ("html", "md")]
    for text in (render_text(report, width=200), report._repr_html_(), *forms):
        assert "with the profiler" in text or "as recorded" in text


def test_the_recipes_for_agents_have_the_share_that_is_printed(tmp_path: Path) -> None:
    """What ``docs/for-agents.md`` computes from the JSON, here in Python."""
    trace = Trace()
    step(trace)
    report = timed(trace, real_ns=50 * TICK)
    data = json.loads(report.save(tmp_path / "report.json").read_text())
    recipe = (DOCS / "for-agents.md").read_text()
    fields = r"step_ms: \(\.(\w+) / 1e6\), backward_ms: \(\.(\w+) / 1e6\)"
    (asked,) = re.findall(fields, recipe)
    whole, backward = (data[field] for field in asked)
    assert f"{percent(backward / whole)} backward" in render_text(report, width=200)
