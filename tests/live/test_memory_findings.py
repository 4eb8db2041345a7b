"""Causes of full memory, planted in models on the CPU, and the same models without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import backspot

BATCH = 64
Found = dict[str, backspot.Finding]


def found(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], **zero: Any) -> Found:
    """The findings about memory of three recorded steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(**zero)
        loss_of().backward()
        optimizer.step()

    step()
    with backspot.instrument(model), torch.profiler.profile(profile_memory=True) as prof:
        for _ in range(3):
            step()
    report = backspot.locate(prof)
    assert all(one.held_bytes is None or one.places for one in report.findings)
    return {one.rule: one for one in report.findings if one.held_bytes is not None}


def layers(*between: torch.nn.Module, width: int = 128) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width), *between, torch.nn.Linear(4 * width, width)
    )


def squared(model: torch.nn.Module, rows: int = 1024, width: int = 128) -> Found:
    batch = torch.randn(rows, width)
    return found(model, lambda: model(batch).square().mean())


@pytest.mark.parametrize(
    ("function", "said"), [(torch.nn.GELU(), "GELU"), (torch.nn.Dropout(), "dropout")]
)
def test_outputs_of_cheap_functions_are_found(function: torch.nn.Module, said: str) -> None:
    finding = squared(layers(function))["kept-pointwise"]
    assert finding.path == "1"
    assert f"by {said}" in finding.seen
    assert finding.held_bytes is not None
    assert finding.held_bytes >= 1024 * 512 * 4


def test_a_model_that_keeps_no_such_outputs_has_no_finding() -> None:
    assert squared(layers()) == {}


def test_attention_probabilities_are_found_and_those_of_a_loss_are_not() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    model = Attention()
    batch = torch.randn(4, 512, 16)
    kept = found(model, lambda: model(batch).square().mean())
    assert set(kept) == {"kept-softmax"}
    assert kept["kept-softmax"].held_bytes == 4 * 512 * 512 * 4
    assert kept["kept-softmax"].remedy.startswith("Use torch.nn.functional.scaled_dot")


def test_attention_that_pytorch_does_not_fuse_has_another_remedy() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    model = Attention()
    batch = torch.randn(4, 512, 16)
    finding = found(model, lambda: model(batch).square().mean())["kept-softmax"]
    assert finding.remedy.startswith("The model calls scaled_dot_product_attention")


def test_the_scores_of_a_large_vocabulary_are_found() -> None:
    model = torch.nn.Linear(32, 20_000)
    batch, target = torch.randn(256, 32), torch.randint(20_000, (256,))
    kept = found(model, lambda: F.cross_entropy(model(batch), target))
    finding = kept["logits"]
    assert finding.held_bytes is not None
    assert finding.held_bytes >= 2 * 256 * 20_000 * 4
    few = layers()
    classes = torch.randint(128, (1024,))
    rows = torch.randn(1024, 128)
    assert "logits" not in found(few, lambda: F.cross_entropy(few(rows).relu(), classes))


def test_tensors_that_are_held_over_steps_are_found_with_their_module() -> None:
    model, held = layers(), []
    batch = torch.randn(64, 128)

    def loss_of() -> torch.Tensor:
        output = model(batch)
        held.append(output)
        return output.square().mean()

    finding = found(model, loss_of)["held-over-steps"]
    assert finding.path == "1"
    assert finding.held_bytes == 64 * 128 * 4
    kept = found(model, lambda: model(batch).square().mean())
    assert "held-over-steps" not in kept


def test_gradients_that_are_filled_with_zeros_are_found() -> None:
    model = layers()
    batch = torch.randn(64, 128)
    loss_of = lambda: model(batch).square().mean()  # noqa: E731
    finding = found(model, loss_of, set_to_none=False)["gradients-kept"]
    assert finding.held_bytes is not None
    weights = sum(part.nbytes for part in model.parameters())
    assert 0.9 * weights <= finding.held_bytes <= weights
    assert "gradients-kept" not in found(model, loss_of)
