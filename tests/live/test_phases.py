"""Where a training loop's time goes, in profiles of real ones."""

from __future__ import annotations

import time
from pathlib import Path

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
