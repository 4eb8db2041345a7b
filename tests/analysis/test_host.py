"""Which lines of the user's Python hold up the step, in traces with stacks made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from backspot import locate
from backspot.results import HostLine
from support.synthetic import Trace

_MAIN, _AUTOGRAD = 1, 2


def _frame(trace: Trace, name: str, start: int, end: int, thread: int = _MAIN) -> None:
    trace.event("python_function", name, start, end, thread)


def _lines(trace: Trace, folder: Path) -> tuple[HostLine, ...]:
    return locate(trace.save(folder / "trace.json")).host


@pytest.fixture
def trace() -> Trace:
    """A step whose backward runs one node on autograd's thread, while the line of it waits."""
    made = Trace()
    made.annotation("ProfilerStep#0", 0, 10_000)
    made.forward("fc", "Linear", 400, 950)
    made.operator("aten::mm", 500, 900, seq=0)
    made.node("MmBackward0", 3_000, 8_000, seq=0, thread=_AUTOGRAD)
    _frame(made, "train.py(9): step", 0, 10_000)
    _frame(made, "torch/_tensor.py(600): backward", 2_000, 9_000)
    return made


def test_a_hooks_python_has_its_own_line_however_many_calls_it_makes(
    trace: Trace, tmp_path: Path
) -> None:
    _frame(trace, "hooks.py(4): check", 4_000, 6_000, _AUTOGRAD)
    for start in range(4_000, 6_000, 100):
        _frame(trace, "<built-in function len>", start + 10, start + 60, _AUTOGRAD)

    (line,) = (line for line in _lines(trace, tmp_path) if line.file == "hooks.py")

    assert (line.place, line.function, line.phase) == ("hooks.py:4", "check", "backward")
    assert line.wall_ns == pytest.approx(2_000, rel=0.2)


def test_the_line_that_runs_a_backward_comes_last(trace: Trace, tmp_path: Path) -> None:
    *_, last = _lines(trace, tmp_path)

    assert (last.function, last.phase) == ("step", "backward")
    assert last.idle_ns == max(line.idle_ns for line in _lines(trace, tmp_path))


def test_a_comprehension_is_a_line_of_its_function(trace: Trace, tmp_path: Path) -> None:
    _frame(trace, "<built-in function sum>", 1_000, 1_900)
    for start in range(1_050, 1_850, 100):
        _frame(trace, "train.py(12): <genexpr>", start, start + 40)

    lines = _lines(trace, tmp_path)

    assert {line.function for line in lines} == {"step"}
    assert "train.py:12" in {line.place for line in lines}


@pytest.mark.parametrize(("size", "waits"), [(1 << 11, 0), (1 << 24, 1)])
def test_a_small_copy_from_pageable_memory_is_no_wait(
    trace: Trace, tmp_path: Path, size: int, waits: int
) -> None:
    trace.event("cuda_runtime", "cudaMemcpyAsync", 100, 200, correlation=7)
    copy = "Memcpy HtoD (Pageable -> Device)"
    trace.event("gpu_memcpy", copy, 150, 190, 7, device=0, stream=7, correlation=7, bytes=size)

    assert len(locate(trace.save(tmp_path / "trace.json")).waits) == waits


def test_frames_around_the_start_that_never_end_hide_no_lines(tmp_path: Path) -> None:
    """Where Python reports no returns while the profiler starts, frames stay open in the trace."""
    made = Trace()
    made.annotation("ProfilerStep#0", 1_000, 100_000)
    made.forward("fc", "Linear", 10_000, 20_000)
    made.operator("aten::mm", 11_000, 19_000, seq=0)
    made.node("MmBackward0", 40_000, 50_000, seq=0, thread=_MAIN)
    _frame(made, "train.py(3): train", 0, 100_000)
    _frame(made, "torch/optim/optimizer.py(533): wrapper", 100, 100_000)
    _frame(made, "backspot/live/running.py(9): on_event", 200, 100_000)
    _frame(made, "torch/autograd/profiler.py(422): _start_trace", 300, 100_000)
    call = {"CallFrom": "train.py:7"}
    made.event("python_function", "torch/nn/module.py(9): call", 9_000, 21_000, _MAIN, **call)
    made.event("python_function", "<built-in function len>", 30_000, 31_000, _MAIN, **call)

    assert "train.py:7" in {line.place for line in _lines(made, tmp_path)}
