"""Two GPUs: each rank finds the owners, and trains as ever."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")

from torch import nn  # noqa: E402

from support.gloo import train_two_ranks  # noqa: E402
from support.gpu_models import gpu_profile, needs_gpu  # noqa: E402
from support.training import check, owners  # noqa: E402

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_nccl_available()),
    reason="built without NCCL",
)
@pytest.mark.parametrize(
    "case",
    ["ddp-before", "ddp-after", "ddp-no-sync", "ddp-checkpoint", "fsdp-before", "fsdp-after"],
)
def test_each_rank_with_a_gpu_finds_the_owners_and_trains_as_ever(case, tmp_path):
    train_two_ranks([case], tmp_path, device="cuda")


def test_data_parallelism_in_one_process_trains_as_ever():
    def make():
        return nn.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).cuda(), [0, 1])

    def step(model):
        loss = model(torch.randn(6, 4, device="cuda")).sum()
        loss.backward()
        return loss

    report = check(make, step, profiled=gpu_profile)
    assert len(report.passes) == 2
    assert report.has_gpu
    nodes = {name for of_path in owners(report).values() for name in of_path}
    assert "TanhBackward0" in nodes
