"""Where a training loop's time goes, in profiles of real ones."""

from __future__ import annotations

import copy
import io
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

import backspot
from backspot import Report

PAUSE = 0.03


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(PAUSE)
        return torch.full((4, 16), float(index))


def trained(*, marked: bool, path: Path | None = None) -> Report:
    """Three steps with a slow loader, clipping and a loss outside the model."""
    model, loss = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters())
    batches = iter(DataLoader(Slow(), batch_size=None))
    options = {"schedule": schedule(wait=0, warmup=1, active=3)} if marked else {}
    with backspot.instrument(model), backspot.instrument(loss, name="loss"):
        with profile(activities=[ProfilerActivity.CPU], **options) as prof:
            for number in range(4):
                batch = next(batches)
                optimizer.zero_grad()
                loss(model(batch), torch.zeros(4, 4)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if number < 3:
                    prof.step()
        if path is not None:
            prof.export_chrome_trace(str(path))
    return backspot.locate(prof if path is None else path)


def check(report: Report) -> None:
    spent = {phase.name: phase.wall_ns for phase in report.phases}
    assert sum(spent.values()) == report.step_ns
    assert spent["data"] >= PAUSE * 1e9
    assert spent["backward"] == report.wall_ns
    assert min(spent[name] for name in ("forward", "loss", "optimizer")) > 0
    assert report.utilisation == 0.0


def test_a_live_profile_with_marks_tells_its_phases() -> None:
    report = trained(marked=True)
    assert (report.step_unit, report.steps) == ("profiler step", 3)
    check(report)


def test_a_live_profile_without_marks_tells_its_phases() -> None:
    report = trained(marked=False)
    assert (report.step_unit, report.steps) == ("optimizer step", 4)
    check(report)


def test_an_exported_trace_tells_the_same_kinds_of_phases(tmp_path: Path) -> None:
    check(trained(marked=True, path=tmp_path / "trace.json"))


def test_clipping_between_backward_and_the_step_is_the_optimizers() -> None:
    model, batch = nn.Linear(8, 8), torch.ones(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backspot.instrument(model), profile(activities=[ProfilerActivity.CPU]) as prof:
        model(batch).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    report = backspot.locate(prof)
    assert "other" not in {phase.name for phase in report.phases}


class SlowFile(io.BytesIO):
    """A file on a slow disk."""

    def write(self, data: object) -> int:
        time.sleep(PAUSE / 20)
        return super().write(data)  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_a_loop_does_around_the_model_has_the_name_of_what_it_does() -> None:
    """Each part pauses within what shows it, so that its phase must own the pause."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step(batch: torch.Tensor) -> None:
        time.sleep(PAUSE)
        output = model(batch)
        (output.argmax(1) == 0).float().mean().item()
        scaler.scale(output.square().sum()).backward()
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            norm = torch.linalg.vector_norm(parameter.grad)
            parameter.grad.mul_((1.0 / norm).clamp(max=1.0))
            time.sleep(PAUSE / 8)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
                time.sleep(PAUSE / 8)
            for _ in range(3):
                model(batch)
                time.sleep(PAUSE / 2)
        torch.save(model.state_dict(), SlowFile())

    report = backspot.profile(step, model, data=[torch.ones(4, 16)] * 20, steps=3, unprofiled=4)
    spent = {phase.name: phase.wall_ns for phase in report.phases}
    for name in ("host", "clipping", "averaging", "evaluation", "saving"):
        assert spent[name] >= 0.8 * PAUSE * 1e9, name
    assert min(spent[name] for name in ("metrics", "scaler", "zero_grad", "optimizer")) > 0
    assert spent["idle"] + spent["other"] < min(spent["host"], spent["saving"])
    assert sum(phase.wall_ns for phase in report.phases) == report.unprofiled_step_ns
    assert torch.save.__name__ == "save"
    assert not hasattr(torch.save, "__wrapped__")


def test_a_loop_that_changes_all_parameters_is_the_optimizer_where_none_is_marked() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-0.1)
                time.sleep(PAUSE / 6)
                parameter.grad = None

    report = backspot.profile(step, model, data=[torch.ones(2, 8)] * 9, steps=2, unprofiled=0)
    spent = {phase.name: phase.wall_ns for phase in report.phases}
    assert spent["optimizer"] >= 0.8 * PAUSE * 5 / 6 * 1e9
    assert "averaging" not in spent


def test_a_teacher_without_gradients_is_the_forward_and_no_evaluation() -> None:
    model, teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> None:
        with torch.no_grad():
            target = teacher(batch)
        (model(batch) - target).square().sum().backward()
        optimizer.step()

    models = {"model": model, "teacher": teacher}
    report = backspot.profile(
        step, models, data=[torch.ones(2, 8)] * 9, steps=2, unprofiled=0, trials="none"
    )
    assert "evaluation" not in {phase.name for phase in report.phases}
