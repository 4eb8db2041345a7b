"""Traces of which one thing is very large: where time grew by its square, these took minutes.

``benchmarks/robustness/scaling.py`` compares the times of all that can grow.
"""

from __future__ import annotations

import io

import pytest

import backspot
from benchmarks.robustness.scaling_traces import DIMENSIONS
from support.sums import assert_adds_up


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dimension", "scale"),
    [
        ("one sequence number", 4),
        ("one sequence number, later", 4),
        ("nodes before their operators", 4),
        ("threads that autograd numbers", 4),
        ("threads that call C++ functions in hooked modules", 10),
        ("devices", 14),
        ("malformed events", 1),
        ("brackets that are missing", 2),
        ("arguments that nest", 2),
    ],
)
def test_much_of_one_thing_takes_its_time_and_no_more(dimension: str, scale: int) -> None:
    report = backspot.locate(io.BytesIO(DIMENSIONS[dimension](scale)))
    assert min(report.wall_ns, report.cpu_ns) > 0
    assert_adds_up(report)


def test_if_many_threads_could_have_built_a_node_none_is_named() -> None:
    report = backspot.locate(io.BytesIO(DIMENSIONS["threads that autograd numbers"](2)))
    assert any("could come from more than one thread's" in text for text in report.warnings)
    assert report.coverage.wall == 0


def test_no_device_has_a_number_that_pytorch_cannot_give() -> None:
    report = backspot.locate(io.BytesIO(DIMENSIONS["devices"](1)))
    assert {device.device for device in report.devices} == set(range(128))


@pytest.mark.slow
def test_the_paths_of_modules_that_nest_very_deep_in_pythons_stack_stay_short() -> None:
    report = backspot.locate(io.BytesIO(DIMENSIONS["modules within modules of Python's"](5)))
    assert len({row.path for row in report.modules}) == len(report.modules) > 2_000
    assert max(len(row.path) for row in report.modules) < 2_100
