"""Reports of recordings whose steps vary, made of the times of each module by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from backspot.results.costs import Phase
from backspot.results.report import Report
from support.report_parts import report, row, typical

_Times = Mapping[str, Sequence[int]]


def recorded(wall: _Times, gpu: _Times | None = None, phases: _Times | None = None) -> Report:
    """A report with these times by module, and by phase; the backward phase is added."""
    steps = len(next(iter(wall.values())))
    rows = []
    for path, times in wall.items():
        device = tuple(gpu[path]) if gpu else (0,) * steps
        rows.append(
            replace(
                row(path, is_module=not path.startswith("("), steps=steps),
                wall_ns=typical(times),
                recorded_wall_ns=typical(times),
                gpu_ns=typical(device),
                wall_ns_by_step=tuple(times),
                gpu_ns_by_step=device,
            )
        )
    walls = tuple(map(sum, zip(*wall.values(), strict=True)))
    gpus = tuple(map(sum, zip(*gpu.values(), strict=True))) if gpu else (0,) * steps
    rows_ns = sum(one.wall_ns for one in rows)
    of_step = {**(phases or {}), "backward": walls}
    whole = tuple(map(sum, zip(*of_step.values(), strict=True)))
    means = {
        name: rows_ns if name == "backward" else typical(times) for name, times in of_step.items()
    }
    made = [
        Phase(name, means[name], 0, tuple(times), means[name]) for name, times in of_step.items()
    ]
    return replace(
        report(rows, step_ns=whole, has_gpu=gpu is not None, phases=tuple(made)),
        step_ns=sum(means.values()),
        recorded_step_ns=sum(means.values()),
        wall_ns=rows_ns,
        recorded_wall_ns=rows_ns,
        gpu_ns=sum(one.gpu_ns for one in rows),
        wall_ns_by_step=walls,
        gpu_ns_by_step=gpus,
    )


@st.composite
def recordings(draw: st.DrawFn) -> Report:
    """Any recording of up to a dozen modules; the steps vary, and modules may take no time."""
    steps = draw(st.integers(1, 12))
    paths = draw(st.lists(st.sampled_from("abcdefghijkl"), unique=True, min_size=1, max_size=12))
    base = draw(st.integers(0, 10**9))

    def times(names: Sequence[str]) -> dict[str, list[int]]:
        made = {}
        for name in names:
            typical_ns = draw(st.sampled_from((base, base * 2, 0, base // 1_000)))
            spread = draw(st.sampled_from((0, typical_ns // 100, typical_ns // 2)))
            made[name] = [typical_ns + draw(st.integers(0, spread)) for _ in range(steps)]
        return made

    wall = times([*paths, "(autograd engine)"])
    gpu = times([*paths, "(autograd engine)"]) if draw(st.booleans()) else None
    return recorded(wall, gpu, times(draw(st.sampled_from(((), ("forward", "idle"))))))
