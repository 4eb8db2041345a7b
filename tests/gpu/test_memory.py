"""Memory and operations on a real GPU, against PyTorch's own counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812 - as everybody calls it

import backspot  # noqa: E402
from benchmarks.operations import operations_counter  # noqa: E402
from support.gpu_models import DEVICE, MODELS, gpu_profile, needs_gpu  # noqa: E402

pytestmark = needs_gpu

Step = Callable[[], None]


@pytest.fixture(autouse=True)
def no_blocks_of_others() -> Iterator[None]:
    """What other tests left in the allocator would count as fragments."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def recorded(model: nn.Module, step: Step, steps: int = 1, **options: Any) -> backspot.Report:
    step()
    with backspot.instrument(model), gpu_profile(**options) as prof:
        for _ in range(steps):
            step()
    return backspot.locate(prof)


def training(model: nn.Module, loss: Callable[[], torch.Tensor], **zero: Any) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(**zero)
        loss().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_the_allocators_and_its_parts_sum_to_it(name: str) -> None:
    make, inputs = MODELS[name]
    model = make().to(DEVICE)
    batch = inputs()
    step = training(model, lambda: model(batch).float().square().mean())
    step()
    torch.cuda.synchronize()
    with backspot.instrument(model), gpu_profile(profile_memory=True) as prof:
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    gpu = backspot.locate(prof).memory[0]
    assert gpu.name == "GPU 0"
    assert gpu.peak_bytes == peak
    assert sum(share.bytes for share in gpu.live) == peak
    assert "(not accounted for)" not in {share.path for share in gpu.live}


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_that_pytorch_counts(name: str) -> None:
    make, inputs = MODELS[name]
    model = make().to(DEVICE)
    batch = inputs()

    def step() -> None:
        model.zero_grad()
        model(batch).float().square().mean().backward()

    report = recorded(model, step, record_shapes=True)
    kinds = ("forward_flops", "recompute_flops", "flops")
    ours = sum(getattr(row.work, kind) or 0 for row in report.modules if row.work for kind in kinds)
    with operations_counter() as counter:
        step()
    assert ours == counter.get_total_flops()


# Causes of full memory ---------------------------------------------------------------------------


def found(
    model: nn.Module, loss: Callable[[], torch.Tensor], **zero: Any
) -> dict[str, backspot.Finding]:
    report = recorded(model.to(DEVICE), training(model, loss, **zero), 3, profile_memory=True)
    return {one.rule: one for one in report.findings if one.held_bytes is not None}


def wide(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 2048), *between, nn.Linear(2048, 256))


def squared(model: nn.Module, rows: int = 16384) -> dict[str, backspot.Finding]:
    batch = torch.randn(rows, 256, device=DEVICE)
    return found(model, lambda: model(batch).square().mean())


def test_a_healthy_model_has_no_finding() -> None:
    assert squared(wide()) == {}


def test_outputs_of_cheap_functions() -> None:
    finding = squared(wide(nn.GELU()))["kept-pointwise"]
    assert finding.path == "1"
    assert finding.held_bytes == 16384 * 2048 * 4
    assert "kept-pointwise" in squared(wide(nn.Dropout(0.1)))


def test_the_scores_of_a_vocabulary() -> None:
    model = nn.Linear(64, 50_000)
    rows = torch.randn(2048, 64, device=DEVICE)
    target = torch.randint(50_000, (2048,), device=DEVICE)
    finding = found(model, lambda: F.cross_entropy(model(rows), target))["logits"]
    assert finding.held_bytes is not None
    assert finding.held_bytes >= 2 * 2048 * 50_000 * 4


def test_attention_probabilities() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    model = Attention()
    batch = torch.randn(8, 2048, 64, device=DEVICE)
    kept = found(model, lambda: model(batch).square().mean())
    assert set(kept) == {"kept-softmax"}


def test_tensors_that_are_held_over_steps() -> None:
    model, held = wide(), []
    batch = torch.randn(4096, 256, device=DEVICE)

    def loss() -> torch.Tensor:
        held.append(model(batch))
        return held[-1].square().mean()

    finding = found(model, loss)["held-over-steps"]
    assert finding.path == "1"
    assert finding.held_bytes is not None
    assert finding.held_bytes >= 4096 * 256 * 4


def test_gradients_that_are_filled_with_zeros() -> None:
    # The workspaces of cuBLAS are in the peak, too.
    model = nn.Sequential(nn.Linear(2048, 8192), nn.Linear(8192, 2048))
    batch = torch.randn(64, 2048, device=DEVICE)
    loss = lambda: model(batch).square().mean()  # noqa: E731
    assert "gradients-kept" in found(model, loss, set_to_none=False)
    assert "gradients-kept" not in found(model, loss)


def test_memory_that_was_reserved_for_other_work() -> None:
    model = wide(nn.ReLU())
    batch = torch.randn(1024, 256, device=DEVICE)
    held = [torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(8)]
    held.clear()
    finding = found(model, lambda: model(batch).square().mean())["fragmentation"]
    assert finding.held_bytes is not None
    assert finding.held_bytes >= 400 << 20


def test_profile_records_memory_and_shapes_in_steps_of_their_own() -> None:
    make, inputs = next(iter(MODELS.values()))
    model = make().to(DEVICE)
    batch = inputs()
    step = training(model, lambda: model(batch).float().square().mean())
    report = backspot.profile(
        step, model, steps=2, warmup=2, unprofiled=2, memory=True, shapes=True
    )
    assert report.memory[0].name == "GPU 0"
    assert report.peaks is not None
    assert report.mfu is not None
    assert 0 < report.mfu < 1
    assert report.gpu_ns > 0
    assert any(row.work.flops for row in report.modules if row.work)
    limits = [report.limit(row) for row in report.modules if row.is_module]
    assert any(one is not None and one.tflops for one in limits)
