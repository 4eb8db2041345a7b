"""A TensorDataset in memory, of which a DataLoader takes one row after the other."""

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, Mlp, made

CASE = Published(
    source="shenweichen/DeepCTR-Torch#70",
    cause=("whole batches", "batchsampler"),
    place=("(data)",),
    fix="Slice the tensors by whole batches",
    gain="about 4 times as fast a reading, 'especially in large batch size'",
    same=False,
)


class Clicks(nn.Module):
    """Tables for sparse features, and a tower."""

    def __init__(self, fields: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(fields))
        self.tower = nn.Sequential(Mlp(fields * width, 256), nn.Linear(fields * width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [table(x[:, number]) for number, table in enumerate(self.tables)]
        return self.tower(torch.cat(found, -1)).squeeze(-1)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    fields, batch = sizes(context, (26, 4096), (8, 256))
    rows = context.pick(64 * batch, 4 * batch)
    data = TensorDataset(torch.randint(1000, (rows, fields)), torch.rand(rows))
    loader: DataLoader[Any] = DataLoader(data, batch_size=batch, shuffle=True)
    if fixed:
        sampler = BatchSampler(RandomSampler(data), batch, drop_last=False)
        loader = DataLoader(data, batch_size=None, sampler=sampler)
    model = made(context, lambda: Clicks(fields, 1000, 8))
    batches: Iterator[Any] = chain.from_iterable(repeat(loader))

    def loss() -> torch.Tensor:
        x, clicked = (one.to(context.device) for one in next(batches))
        return nn.functional.binary_cross_entropy_with_logits(model(x), clicked)

    return stepping(model, loss), {"": model}
