"""What grows with a trace and with a model grows in step with it; counted, never timed."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import backspot
from backspot.render.text import render_text
from backspot.render.view import View
from support.synthetic import Trace

TICK = 1_000


def steps(count: int, path: Path) -> Path:
    """Steps of ten modules each."""
    trace = Trace()
    for step in range(count):
        at = 1_000 * TICK * step
        for module in range(10):
            begin = at + 20 * TICK * module
            trace.forward(f"m.{module}", "M", begin, begin + 10 * TICK)
            trace.operator("aten::mul", begin + TICK, begin + 2 * TICK, seq=10 * step + module)
        trace.annotation("Optimizer.zero_grad#SGD.zero_grad", at + 300 * TICK, at + 301 * TICK)
        for module in reversed(range(10)):
            begin = at + 400 * TICK + 20 * TICK * (10 - module)
            trace.node("MulBackward0", begin, begin + 9 * TICK, seq=10 * step + module)
            trace.kernel(begin + 5 * TICK, begin + 12 * TICK, launch=begin + TICK)
    return trace.save(path)


def modules(count: int, path: Path) -> Path:
    """One step of so many modules in blocks of ten; the first ones take most time."""
    trace = Trace()
    for number in range(count):
        at = 30 * TICK * number
        if number % 10 == 0:
            trace.forward(f"blocks.{number // 10}", "Block", at, at + 299 * TICK)
        trace.forward(f"blocks.{number // 10}.{number % 10}", "M", at + TICK, at + 9 * TICK)
        trace.operator("aten::mul", at + 2 * TICK, at + 3 * TICK, seq=number)
    for number in reversed(range(count)):
        at = 30 * TICK * (2 * count - number)
        took = (20 if number < 10 else 5) * TICK
        trace.node("MulBackward0", at, at + 28 * TICK, seq=number)
        trace.kernel(at + 5 * TICK, at + 5 * TICK + took, launch=at + TICK)
    return trace.save(path)


def most_bytes(work: Callable[[], object]) -> int:
    """The most that Python and NumPy hold at once while ``work`` runs."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_report_of_twice_the_steps_takes_at_most_twice_the_memory(tmp_path: Path) -> None:
    paths = [steps(count, tmp_path / f"{count}.json") for count in (200, 400)]
    backspot.locate(paths[0])  # what is imported and kept once
    once, twice = (most_bytes(lambda path=path: backspot.locate(path)) for path in paths)
    assert twice < 2.4 * once


def test_the_cost_of_n_steps_is_n_times_that_of_one(tmp_path: Path) -> None:
    few, many = (backspot.locate(steps(count, tmp_path / "t.json")) for count in (3, 30))
    recorded = ("wall_ns_by_step", "gpu_ns_by_step", "cpu_ns_by_step")
    assert {r.path: [10 * sum(getattr(r, cost)) for cost in recorded] for r in few.modules} == {
        r.path: [sum(getattr(r, cost)) for cost in recorded] for r in many.modules
    }
    assert {r.path: (r.wall_ns, r.gpu_ns, r.cpu_ns) for r in few.modules} == {
        r.path: (r.wall_ns, r.gpu_ns, r.cpu_ns) for r in many.modules
    }


@pytest.mark.slow
def test_twice_the_modules_take_at_most_twice_the_memory_to_instrument() -> None:
    nn = pytest.importorskip("torch.nn")

    def instrumented(count: int) -> int:
        model = nn.ModuleList(
            nn.Sequential(*(nn.Flatten() for _ in range(50))) for _ in range(count)
        )
        found: list[int] = []

        def work() -> None:
            with backspot.instrument(model) as handle:
                found.append(len(handle.paths))

        used = most_bytes(work)
        assert found == [51 * count + 1]
        return used

    instrumented(2)
    assert instrumented(40) < 2.4 * instrumented(20)


@pytest.mark.slow
def test_a_table_of_many_modules_adds_up_what_repeats_and_fits_on_a_screen(tmp_path: Path) -> None:
    trace = Trace()
    for number in range(2_000):
        at = 10 * TICK * number
        trace.forward(f"blocks.{number}", "Block", at, at + 8 * TICK)
        trace.operator("aten::mul", at + TICK, at + 2 * TICK, seq=number)
    for number in reversed(range(2_000)):
        at = 10 * TICK * (4_000 - number)
        trace.node("MulBackward0", at, at + 5 * TICK, seq=number)
    text = str(backspot.locate(trace.save(tmp_path / "t.json")))
    assert len(text.splitlines()) < 24
    assert "2000 × blocks.* (Block)" in text
    assert "for single modules" in text


@pytest.mark.slow
def test_a_model_of_many_modules_is_replayed_without_those_that_take_most(tmp_path: Path) -> None:
    report = backspot.locate(modules(4_000, tmp_path / "t.json"))
    rows = {row.path: row for row in report.modules if row.is_module}
    known = [row.wall_ns for row in rows.values() if row.saves is not None and row.wall_ns]
    unknown = [row.wall_ns for row in rows.values() if row.saves is None]
    assert min(known) >= max(unknown) > 0
    assert rows["blocks.0"].total_saves is not None
    assert rows["blocks.0.0"].saves is not None
    first, whole = (render_text(report, View(top=top), full=True) for top in (5, None))
    said = "only the modules with the most time are replayed"
    assert said not in " ".join(first.split())
    assert said in " ".join(whole.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import backspot", ("numpy", "msgspec", "rich", "torch", "backspot.results.report")),
        (
            "import backspot.commands as c; c.main(['--help'])",
            ("numpy", "msgspec", "rich", "torch"),
        ),
        ("import backspot; backspot.locate", ("torch", "rich")),
    ],
)
def test_what_is_not_needed_is_not_imported(statement: str, absent: tuple[str, ...]) -> None:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(absent) & set(done.stdout.splitlines()[-1].split())
