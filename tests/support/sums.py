"""What every report adds up to, and a typical step computed in the plainest way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from backspot import Report
from backspot.results.costs import UNSTEADY

TIMES = ("wall_ns", "gpu_ns", "cpu_ns")


def middle(by_step: Sequence[int]) -> int:
    """Return the median of the steps that have any, shared over all steps, rounded down."""
    ordered, steps = sorted(one for one in by_step if one), len(by_step)
    if 4 * len(ordered) < steps or (len(ordered) < 2 and steps > 3) or not ordered:
        return 0
    median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2
    return median * len(ordered) // steps


def middle_count(by_step: Sequence[int]) -> int:
    """Return the mean of counts, rounded up."""
    return -(-sum(by_step) // len(by_step))


def assert_adds_up(report: Report) -> None:
    """Assert that each step is divided without remainder, and that typical times are medians.

    The report must not be folded: the times of a group are sums of medians.
    """
    owned = [row for row in report.modules if row.is_module or row.path != UNSTEADY]
    assert len(report.modules) - len(owned) <= 1
    for time in TIMES:
        whole = getattr(report, f"{time}_by_step")
        rows = [getattr(row, f"{time}_by_step") for row in report.modules]
        passes = [0] * report.steps
        for run in report.passes:
            passes[run.step] += getattr(run, time)
        assert [sum(step) for step in zip(*rows, strict=True)] == list(whole) == passes
        assert min(min(row) for row in rows) >= 0
        assert getattr(report, time) == middle(whole)
        assert sum(getattr(row, time) for row in report.modules) == middle(whole)
        for row in owned:
            assert getattr(row, time) == middle(getattr(row, f"{time}_by_step"))
    for run in report.passes:
        assert run.duration_ns == run.wall_ns + run.forward_ns + run.other_ns
        assert min(run.forward_ns, run.other_ns) >= 0
    for row in owned:
        kinds = asdict(row.wall_on).values()
        assert 0 <= row.recompute_ns <= row.wall_ns
        assert all(0 <= kind <= row.wall_ns for kind in kinds)
        assert all(
            0 <= kernel.spent_ns <= (row.gpu_ns if report.has_gpu else row.cpu_ns)
            for kernel in row.kernels
        )
        for time in TIMES:
            assert all(0 <= getattr(n, time) <= getattr(row, time) for n in row.nodes)
        if report.steps <= 2:
            # Each of these medians of two is rounded down.
            assert 0 <= row.wall_ns - sum(kinds) <= (report.steps - 1) * len(kinds)
    assert report.step_ns == middle(report.step_ns_by_step)
    if report.phases:
        assert_phases_add_up(report)


def assert_phases_add_up(report: Report) -> None:
    """Assert that the phases divide each step without remainder."""
    steps = zip(*(phase.wall_ns_by_step for phase in report.phases), strict=True)
    assert tuple(sum(step) for step in steps) == report.step_ns_by_step
    assert sum(phase.wall_ns for phase in report.phases) == report.step_ns
    assert len({phase.name for phase in report.phases}) == len(report.phases)
    for phase in report.phases:
        if phase.name == "unsteady":
            assert not any(phase.wall_ns_by_step)
        else:
            assert phase.wall_ns == middle(phase.wall_ns_by_step)
            assert 0 <= phase.busy_ns <= phase.wall_ns
