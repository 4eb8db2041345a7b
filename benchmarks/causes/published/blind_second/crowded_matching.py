"""Costs of matching each prediction of a batch to the objects of all its images."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Block, Context, made

CASE = Published(
    source="ultralytics/ultralytics#26150",
    cause=("copies to the host", "device to host", "copy", "transfer", "waits for", "synchron"),
    place=("matcher", "matched()"),
    fix="Pad the objects of an image, and leave out the costs between images",
    gain="23.75 to 16.64 s an epoch (RT-DETR-L, SKU-110K); none for COCO, with few objects",
    device="cuda",
    partly=True,
)


class Matcher(nn.Module):
    """The best query for each object, for which the host needs the costs."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed

    @torch.no_grad()
    def forward(self, boxes: torch.Tensor, objects: torch.Tensor) -> torch.Tensor:
        return matched(boxes.float(), objects, self.fixed)


def matched(boxes: torch.Tensor, objects: torch.Tensor, fixed: bool) -> torch.Tensor:
    images, queries, _ = boxes.shape
    if fixed:
        costs = (boxes[:, :, None] - objects[:, None]).abs().sum(-1).cpu()
        found = [cost.argmin(0) for cost in costs]
    else:
        pairs = boxes.flatten(0, 1)[:, None] - objects.flatten(0, 1)
        costs = pairs.abs().sum(-1).view(images, queries, -1).cpu()
        parts = costs.split(objects.shape[1], -1)
        found = [part[image].argmin(0) for image, part in enumerate(parts)]
    return torch.stack(found).to(boxes.device)


class Queries(nn.Module):
    """A decoder whose blocks all predict boxes."""

    def __init__(self, width: int, depth: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.boxes = nn.Linear(width, 4)

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        x, found = self.patches(images).flatten(2).mT, []
        for block in self.blocks:
            x = block(x)
            found.append(self.boxes(x).sigmoid())
        return found


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 1024, 64, 32), sized(context, 4, 3, 2)
    side, batch, each = (
        sized(context, *sizes) for sizes in ((320, 128, 32), (16, 4, 2), (150, 30, 3))
    )
    model = made(context, lambda: Queries(width, depth, 16)).to(half(context))
    matcher, images = Matcher(fixed), context.randn(batch, 3, side, side).to(half(context))
    objects = context.randn(batch, each, 4).sigmoid()

    def loss() -> torch.Tensor:
        total = objects.new_zeros(())
        for boxes in model(images):
            chosen = matcher(boxes, objects)[..., None].expand(-1, -1, 4)
            total = total + (boxes.float().gather(1, chosen) - objects).abs().mean()
        return total

    return stepping(model, loss), {"": model, "matcher": matcher}
