"""Steps as spans of OpenTelemetry, seen by the exporter of its own SDK."""

from __future__ import annotations

from collections import defaultdict

import pytest

import backspot
from support import h200

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: E402
    InMemorySpanExporter,
)

from backspot.integrations.opentelemetry import send_steps  # noqa: E402

END = 1_800_000_000_000_000_000


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter):
    made = sdk.TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    yield made
    made.shutdown()


def by_parent(exporter):
    """The finished spans by the span around them, each list in the order of time."""
    children = defaultdict(list)
    for span in sorted(exporter.get_finished_spans(), key=lambda span: span.start_time):
        children[span.parent.span_id if span.parent else None].append(span)
    return children


def length(span):
    return span.end_time - span.start_time


@pytest.fixture
def report():
    return h200.report_of("vit_patch_drop")


def test_each_recorded_step_is_a_span_that_its_phases_fill(report, provider, exporter):
    assert send_steps(report, provider, end_ns=END) == report.steps
    children = by_parent(exporter)
    steps = children[None]
    assert [length(step) for step in steps] == list(report.step_ns_by_step)
    assert steps[-1].end_time == END
    assert len({step.context.trace_id for step in steps}) == len(steps)
    for number, step in enumerate(steps):
        phases = children[step.context.span_id]
        assert [(span.name, length(span)) for span in phases] == [
            (phase.name, phase.wall_ns_by_step[number]) for phase in report.phases
        ]
        assert (phases[0].start_time, phases[-1].end_time) == (step.start_time, step.end_time)


def test_the_first_modules_are_in_the_backward_with_their_wall_time(report, provider, exporter):
    send_steps(report, provider, modules=2, end_ns=END)
    children = by_parent(exporter)
    first = children[children[None][0].context.span_id]
    backward = next(span for span in first if span.name == "backward")
    inside = children[backward.context.span_id]
    rows = [row for row in report.top() if row.is_module][:2]
    assert [(span.name, span.attributes["backspot.module"], length(span)) for span in inside] == [
        (row.label, row.path, row.wall_ns_by_step[0]) for row in rows
    ]
    assert inside[-1].end_time <= backward.end_time


def test_a_saved_report_gives_the_same_spans(report, provider, exporter, tmp_path):
    send_steps(report, provider, end_ns=END)
    live = [(span.name, span.start_time) for span in exporter.get_finished_spans()]
    exporter.clear()
    saved = backspot.Report.load(report.save(tmp_path / "report.json"))
    send_steps(saved, provider, end_ns=END)
    assert [(span.name, span.start_time) for span in exporter.get_finished_spans()] == live


def test_a_wrong_number_of_modules_is_one_clear_error(report, provider):
    with pytest.raises(backspot.UsageError, match="modules"):
        send_steps(report, provider, modules=-1)
