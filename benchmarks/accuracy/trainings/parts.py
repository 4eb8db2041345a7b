"""What the trainings are made of: models, and data sets that take their time."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.accuracy.trainings.clock import DEVICE, sized


def perceptron(width: int, *, inputs: int = 0, outputs: int = 0, layers: int = 3) -> nn.Sequential:
    """Return a multilayer perceptron on the device."""
    sizes = [inputs or width, *[width] * (layers - 1), outputs or width]
    made: list[nn.Module] = []
    for size, following in pairwise(sizes):
        made += [nn.Linear(size, following), nn.ReLU()]
    return nn.Sequential(*made[:-1]).to(DEVICE)


class Language(nn.Module):
    """A small causal transformer."""

    def __init__(self, width: int, *, tokens: int = 512, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        logits: Tensor = self.head(self.blocks(self.embedding(ids), mask=mask, is_causal=True))
        return logits


class Files(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Samples that come from a slow place.

    Args:
        seconds: what it takes to get the sample of an index.
        shape: of a sample.
    """

    def __init__(
        self, count: int, seconds: Callable[[int], float], shape: tuple[int, ...] = (256,)
    ) -> None:
        self._count = count
        self._seconds = seconds
        self._sample = torch.randn(shape)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self._seconds(index))
        return self._sample, index % 10


def batch_of(*shape: int) -> Tensor:
    """Return random numbers on the device."""
    return torch.randn(*shape, device=DEVICE)


WIDTH = sized(256, 1024)
"""Of layers of which a few take milliseconds."""
