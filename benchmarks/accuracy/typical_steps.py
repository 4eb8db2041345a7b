"""Which recorded steps should a mean be of? Small trainings beside busy processes, by each rule.

    python -m benchmarks typical_steps

Each training is recorded several times while two processes keep the cores busy. *Wrong* is the
share of the step that a rule gives to other parts than undisturbed times give it to: of each part,
the least time in any step of the same kind, and of the kinds the shares that the training has.
*Long* is how many times as long as undisturbed the step is. A part is a module in the backward, or
another phase.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from backspot.analysis.accounting.activity import NAMES
from benchmarks.harness import Figures, Run

STEPS, RECORDINGS, BUSY = 10, 4, 2
Build = Callable[[], tuple[Any, Callable[[int], None]]]
Rule = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""From the parts by step, their kinds, and their weights by Backspot, to parts of one step."""


def _fastest(part: float) -> Rule:
    def rule(parts: np.ndarray, _: np.ndarray, __: np.ndarray) -> np.ndarray:
        order = np.argsort(parts.sum(axis=0))[: max(1, round(part * parts.shape[1]))]
        return parts[:, order].mean(axis=1)

    return rule


RULES: dict[str, Rule] = {
    "median of each part": lambda parts, kind, weight: np.median(parts, axis=1),
    "mean over all": lambda parts, kind, weight: parts.mean(axis=1),
    "mean over the fastest half": _fastest(0.5),
    "mean over the fastest quarter": _fastest(0.25),
    "mean without hiccups": lambda parts, kind, weight: parts @ weight / weight.sum(),
}


def _spin() -> None:
    while True:
        sum(range(10_000))


@contextmanager
def _busy(number: int) -> Iterator[None]:
    others = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(number)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.join()


def trainings() -> dict[str, Build]:
    """Return models with their steps; a step knows its number."""
    import torch
    from torch import nn

    def layers(width: int, count: int) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))

    def accumulated(passes: int) -> tuple[Any, Callable[[int], None]]:
        model = layers(128, 6)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(_: int) -> None:
            for _ in range(passes):
                model(torch.randn(64, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    def transformer() -> tuple[Any, Callable[[int], None]]:
        layer = nn.TransformerEncoderLayer(96, 4, 192, batch_first=True)
        model = nn.TransformerEncoder(layer, 4)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(_: int) -> None:
            model(torch.randn(8, 32, 96)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    def in_turn() -> tuple[Any, Callable[[int], None]]:
        models = nn.ModuleDict({"generator": layers(192, 8), "critic": layers(96, 3)})
        optimizers = [torch.optim.AdamW(models[name].parameters()) for name in models]

        def step(number: int) -> None:
            name, width = [("generator", 192), ("critic", 96)][number % 2]
            models[name](torch.randn(64, width)).square().mean().backward()
            optimizers[number % 2].step()
            optimizers[number % 2].zero_grad()

        return models, step

    def dropped() -> tuple[Any, Callable[[int], None]]:
        model = layers(128, 8)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(_: int) -> None:
            value = torch.randn(64, 128)
            for number, layer in enumerate(model):
                if number < 2 or torch.rand(()) < 0.7:
                    value = layer(value)
            value.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    def rolled_out() -> tuple[Any, Callable[[int], None]]:
        model = layers(64, 4)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(number: int) -> None:
            if number % STEPS == 0:
                with torch.no_grad():
                    for _ in range(300):
                        model(torch.randn(4, 64))
            model(torch.randn(128, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    return {
        "transformer": transformer,
        "four passes": lambda: accumulated(4),
        "GAN, in turn": in_turn,
        "layers dropped": dropped,
        "rollout in 1 of 10": rolled_out,
    }


def _recorded(build: Build) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return the time of each part in each step, the kinds of the steps, and their weights."""
    import torch

    import backspot
    from backspot.analysis.recording import Recording

    torch.set_num_threads(1)
    model, step = build()
    for number in range(2 * STEPS):
        step(number)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with (
            backspot.instrument(model, markers=False),
            torch.profiler.profile(schedule=schedule) as profiler,
        ):
            for number in range(STEPS + 1):
                step(number - 1)
                profiler.step()
        profiler.export_chrome_trace(str(path))
        recording = Recording.read(path)
    typical, phases = recording.typical, recording.phases
    assert typical.work is not None
    assert phases is not None
    parts = {row.path: np.array(row.wall_ns_by_step) for row in recording.costs.modules}
    named = zip(NAMES, phases.wall, strict=True)
    parts |= {f"({name})": by_step for name, by_step in named if name != "backward"}
    return parts, typical.work, typical.weight


def _judged(build: Build, recordings: int) -> dict[str, tuple[float, float]]:
    """Return for each rule what is wrong, and how long the step is; medians of the recordings."""
    found = [_recorded(build) for _ in range(recordings)]
    names = sorted({name for parts, _, _ in found for name in parts})
    tables = []
    for parts, kind, weight in found:
        none = np.zeros(len(kind))
        tables.append((np.stack([parts.get(name, none) for name in names]), kind, weight))
    # The kinds of two recordings have no numbers in common: parts tell them.
    least: dict[tuple[bool, ...], np.ndarray] = {}
    for table, _, _ in tables:
        for by_part in table.T:
            has = tuple((by_part > 0).tolist())
            least[has] = np.minimum(least.get(has, by_part), by_part)
    said: dict[str, list[tuple[float, float]]] = {name: [] for name in RULES}
    for table, kind, weight in tables:
        true = np.stack([least[tuple((by_part > 0).tolist())] for by_part in table.T]).mean(axis=0)
        for name, rule in RULES.items():
            parts = rule(table, kind, weight)
            shares = parts / max(1.0, parts.sum())
            wrong = np.abs(shares - true / true.sum()).sum() / 2
            said[name].append((wrong, parts.sum() / true.sum()))
    return {name: tuple(np.median(values, axis=0).tolist()) for name, values in said.items()}


def answer(run: Run) -> Figures:
    """Judge each rule on each training."""
    rows = []
    cases = {}
    with _busy(0 if run.small else BUSY):
        for training, build in trainings().items():
            cases[training] = _judged(build, 1 if run.small else RECORDINGS)
    for rule in RULES:
        cells = {training: "{:.2f}, {:.1f}".format(*cases[training][rule]) for training in cases}
        rows.append({"the step is": rule, **cells})
    return {"rows": rows, "summary": {}}
