"""A report as spans of OpenTelemetry: one a recorded step, with its phases and first modules.

A collector of OpenTelemetry shows them beside those of the program around the training. Nothing is
sent by itself: ``send_steps`` hands them to the tracer provider of the program.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
except ModuleNotFoundError as error:
    from backspot.errors import MissingDependencyError

    if error.name != "opentelemetry":
        raise
    raise MissingDependencyError(
        "backspot.integrations.opentelemetry needs the API of OpenTelemetry, which is not "
        "installed: pip install 'backspot[opentelemetry]'"
    ) from None

from backspot._version import __version__
from backspot.checks import check_whole
from backspot.results.report import Report

_MODULES = 5
"""As many modules as fit below a step in a view of spans."""


def send_steps(
    report: Report,
    provider: trace.TracerProvider | None = None,
    *,
    modules: int = _MODULES,
    end_ns: int | None = None,
) -> int:
    """Make a span of each recorded step, with its phases, and with modules in the backward.

    A report knows how long parts are, and not when the host began each. So phases stand in their
    order, and modules one behind the other, those with the most wall time first. Lengths are
    those of the report, on the clock that the attribute ``backspot.clock`` names; beginnings are
    not exact. Each step is a root, also within a span of the program, which may be shorter.

    Args:
        report: the report; of one that was read from a file, too.
        provider: what makes the tracer. ``None``: the one that the program has set.
        modules: how many modules a backward has at most. Default 5.
        end_ns: when the last step ended, in nanoseconds since 1970. ``None``: now.

    Returns:
        The number of steps.

    Raises:
        UsageError: If ``modules`` is no whole number of at least 0.

    Example:
        >>> send_steps(backspot.Report.load("report.json"))
        10
    """
    check_whole("modules", modules, 0)
    tracer = trace.get_tracer("backspot", __version__, provider)
    steps = report.step_ns_by_step
    begin = (time.time_ns() if end_ns is None else end_ns) - sum(steps)
    rows = [row for row in report.top() if row.is_module][:modules]
    for number, step_ns in enumerate(steps):
        step = tracer.start_span(
            report.step_unit,
            Context(),
            start_time=begin,
            attributes={
                "backspot.step": number + 1,
                "backspot.trace": report.trace,
                "backspot.clock": report.clock,
            },
        )
        context = trace.set_span_in_context(step)
        in_backward = [
            (row.label, row.wall_ns_by_step[number], {"backspot.module": row.path}) for row in rows
        ]
        if not report.phases:
            _in_turn(tracer, context, begin, in_backward)
        at = begin
        for phase in report.phases:
            ns = phase.wall_ns_by_step[number]
            span = tracer.start_span(phase.name, context, start_time=at)
            if phase.name == "backward":
                _in_turn(tracer, trace.set_span_in_context(span), at, in_backward)
            at += ns
            span.end(at)
        begin += step_ns
        step.end(begin)
    return len(steps)


def _in_turn(
    tracer: trace.Tracer,
    context: Context,
    begin: int,
    parts: Iterable[tuple[str, int, dict[str, str]]],
) -> None:
    """Make a span of each part: its name, its nanoseconds, and its attributes."""
    for name, ns, attributes in parts:
        span = tracer.start_span(name, context, attributes=attributes, start_time=begin)
        begin += ns
        span.end(begin)
