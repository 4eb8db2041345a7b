"""Seven small tensors for each image of a batch, which workers hand over one by one."""

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="roboflow/rf-detr#1399",
    cause=("one tensor", "hand over", "unpickle"),
    place=("(data)",),
    fix="Concatenate each field of the targets into one tensor in the worker",
    gain="114 to 9 objects for a batch of 16; 1.25 to 1.67 times as many images from the loader",
    same=False,
)
FIELDS = ("boxes", "labels", "image_id", "area", "iscrowd", "orig_size", "size")


class Detections(Dataset[Any]):
    def __init__(self, number: int, side: int) -> None:
        self.number, self.side = number, side

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, at: int) -> Any:
        objects = 1 + at % 7
        target = {name: torch.zeros(objects) for name in FIELDS}
        target |= {"boxes": torch.rand(objects, 4), "image_id": torch.tensor([at])}
        target |= {"orig_size": torch.tensor([640, 480]), "size": torch.tensor([self.side] * 2)}
        return torch.zeros(3, self.side, self.side), target


def each(samples: list[Any]) -> Any:
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), list(targets)


def packed(samples: list[Any]) -> Any:
    images, targets = each(samples)
    counts = torch.tensor([len(one["labels"]) for one in targets])
    return images, counts, {name: torch.cat([one[name] for one in targets]) for name in FIELDS}


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    batch, side, width = sizes(context, (16, 576, 64), (16, 32, 16))
    batches: Iterator[Any] = chain.from_iterable(
        repeat(
            DataLoader(
                Detections(context.pick(200, 3) * batch, side),
                batch_size=batch,
                num_workers=context.pick(8 if context.device != "cpu" else 1, 1),
                collate_fn=packed if fixed else each,
                persistent_workers=True,
            )
        )
    )

    def network() -> nn.Module:
        stem = nn.Conv2d(3, width, 4, stride=4)
        layers = (nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()) for _ in range(6))
        return nn.Sequential(stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    model = made(context, lambda: nn.Sequential(network(), nn.Linear(width, 4)))

    def loss() -> torch.Tensor:
        images, *targets = next(batches)
        if fixed:
            counts, fields = targets
            boxes = torch.stack([one.mean(0) for one in fields["boxes"].split(counts.tolist())])
        else:
            boxes = torch.stack([one["boxes"].mean(0) for one in targets[0]])
        return (model(images.to(context.device)) - boxes.to(context.device)).abs().mean()

    return stepping(model, loss), {"": model}
