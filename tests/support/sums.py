"""What every report adds up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import pytest

from backspot import Report

_ROUNDED = 500  # nanoseconds: a sum of the parts of a mean, each in whole nanoseconds
TIMES = ("wall_ns", "gpu_ns", "cpu_ns")


def usual(report: Report, by_step: Sequence[int]) -> object:
    """What equals the mean over the steps that count, but for the rounding of its parts."""
    count = [by_step[step] for step in report.typical_steps]
    return pytest.approx(sum(count) / len(count), abs=_ROUNDED)


def usual_count(report: Report, by_step: Sequence[int]) -> int:
    """Return the mean of counts over the steps that count, rounded up."""
    count = [by_step[step] for step in report.typical_steps]
    return -(-sum(count) // len(count))


def assert_adds_up(report: Report) -> None:
    """Assert that each step, and the typical one, is divided without remainder."""
    for time in TIMES:
        whole = getattr(report, f"{time}_by_step")
        rows = [getattr(row, f"{time}_by_step") for row in report.modules]
        passes = [0] * report.steps
        for run in report.passes:
            passes[run.step] += getattr(run, time)
        assert [sum(step) for step in zip(*rows, strict=True)] == list(whole) == passes
        assert min(min(row) for row in rows) >= 0
        assert sum(getattr(row, time) for row in report.modules) == getattr(report, time)
        count = [whole[step] for step in report.typical_steps]
        assert min(count) <= getattr(report, time) <= max(count)
        operators = sum(getattr(operator, time) for operator in report.operators)
        assert operators == sum(getattr(n, time) for row in report.modules for n in row.nodes)
        assert operators <= getattr(report, time)
    for device in report.devices:
        assert sum(device.gpu_ns.values()) <= report.gpu_ns
        if len(report.devices) == 1:
            assert device.wall_ns == {
                row.path: row.wall_ns for row in report.modules if row.wall_ns
            }
    if report.phases and len(report.devices) <= 1:
        forward = zip(*(row.forward_ns_by_step for row in report.modules), strict=True)
        both = map(sum, zip(map(sum, forward), report.wall_ns_by_step, strict=True))
        for spent, step_ns in zip(both, report.step_ns_by_step, strict=True):
            assert spent <= step_ns + _ROUNDED
    for run in report.passes:
        assert run.duration_ns == run.wall_ns + run.forward_ns + run.other_ns
        assert min(run.forward_ns, run.other_ns) >= 0
    for row in report.modules:
        kinds = asdict(row.wall_on).values()
        assert sum(kinds) == row.wall_ns
        assert min(kinds) >= 0
        assert 0 <= row.recompute_ns <= row.wall_ns
        assert 0 <= row.split_ns <= row.wall_ns
        for time in TIMES:
            assert sum(getattr(node, time) for node in row.nodes) <= getattr(row, time)
            assert sum(getattr(line, time) for line in row.lines) <= getattr(row, time)
        if report.has_gpu:
            assert sum(kernel.spent_ns for kernel in row.kernels) == row.gpu_ns
    left_out = [hiccup.step for hiccup in report.hiccups]
    assert sorted([*left_out, *report.typical_steps]) == list(range(report.steps))
    if report.phases:
        assert_phases_add_up(report)


def assert_phases_add_up(report: Report) -> None:
    """Assert that the phases divide each step, and the typical one, without remainder."""
    steps = zip(*(phase.wall_ns_by_step for phase in report.phases), strict=True)
    assert tuple(sum(step) for step in steps) == report.step_ns_by_step
    assert sum(phase.wall_ns for phase in report.phases) == report.step_ns
    assert len({phase.name for phase in report.phases}) == len(report.phases)
    for phase in report.phases:
        count = [phase.wall_ns_by_step[step] for step in report.typical_steps]
        assert min(count) <= phase.wall_ns <= max(count) + 1
        assert 0 <= phase.busy_ns <= phase.wall_ns
