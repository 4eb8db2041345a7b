"""Workers hand over a list of objects, each of which holds tensors of its own."""

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, Mlp, made

CASE = Published(
    source="pytorch/pytorch#123439",
    cause=("one tensor", "hand over", "unpickle"),
    place=("(data)",),
    fix="Send the attributes as collated tensors",
    gain="'objects in collate_fn slow down batching', above all with workers; no figures",
    same=False,
)


class Sample:
    """What a data set returns: several attributes in one object."""

    def __init__(self, width: int) -> None:
        self.features, self.weights = torch.rand(width), torch.rand(width)
        self.mask, self.target = torch.ones(width), torch.rand(1)


class Samples(Dataset[Sample]):
    def __init__(self, number: int, width: int) -> None:
        self.number, self.width = number, width

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, at: int) -> Sample:
        return Sample(self.width)


def stacked(samples: list[Sample]) -> tuple[torch.Tensor, ...]:
    names = ("features", "weights", "mask", "target")
    return tuple(torch.stack([getattr(one, name) for one in samples]) for name in names)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    batch, width, hidden = sizes(context, (64, 1024, 4096), (32, 128, 512))
    loader: DataLoader[Any] = DataLoader(
        Samples(context.pick(200, 3) * batch, width),
        batch_size=batch,
        num_workers=context.pick(8 if context.device != "cpu" else 1, 1),
        collate_fn=stacked if fixed else list,
        persistent_workers=True,
    )
    batches: Iterator[Any] = chain.from_iterable(repeat(loader))
    towers = (Mlp(width, hidden) for _ in range(4))
    model = made(context, lambda: nn.Sequential(*towers, nn.Linear(width, 1)))

    def loss() -> torch.Tensor:
        batch = next(batches)
        found = batch if fixed else stacked(batch)
        features, weights, mask, target = (one.to(context.device) for one in found)
        return (model(features * weights * mask) - target).square().mean()

    return stepping(model, loss), {"": model}
