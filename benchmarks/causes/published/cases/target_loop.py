"""A detector's targets that are packed image by image."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.causes.published import Models, Published, Step
from benchmarks.causes.published.parts import sized, stepping
from benchmarks.models import Context, Unet, made

CASE = Published(
    source="ultralytics/ultralytics#23966",
    title="Boxes packed into a batch by a Python loop over its images, with a mask for each",
    cause=("loop", "synchron", "waits for", "nonzero", "launch", "small kernels"),
    place=("packed()", "loss"),
    fix="Pack all boxes at once, by offsets from a cumulative sum",
    gain="no times given",
    device="cuda",
)


class BoxLoss(nn.Module):
    def __init__(self, most: int, fixed: bool) -> None:
        super().__init__()
        self.most, self.fixed = most, fixed

    def packed(self, image: torch.Tensor, boxes: torch.Tensor, count: int) -> torch.Tensor:
        """Boxes of each image, filled up with zeros."""
        found = boxes.new_zeros(count, self.most, 4)
        if self.fixed:
            sizes = torch.zeros(count, dtype=torch.long, device=image.device)
            sizes.index_add_(0, image, torch.ones_like(image))
            starts = sizes.cumsum(0) - sizes
            within = torch.arange(len(image), device=image.device) - starts[image]
            found[image, within] = boxes
            return found
        for number in range(count):
            mask = image == number
            if size := int(mask.sum()):
                found[number, :size] = boxes[mask]
        return found

    def forward(self, maps: torch.Tensor, image: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        targets = self.packed(image, boxes, len(maps))
        wanted = maps.flatten(2)[:, :4, : self.most].transpose(1, 2)
        return (wanted - targets).abs().mean() + maps.square().mean()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    side, batch = sized(context, 128, 32, 16), sized(context, 64, 32, 4)
    most = sized(context, 24, 8, 4)
    model = made(context, lambda: Unet(sized(context, 48, 2, 2)))
    criterion = BoxLoss(most, fixed)
    images = context.randn(batch, 3, side, side)
    image = torch.arange(batch, device=context.device).repeat_interleave(most // 2)
    boxes = context.randn(len(image), 4)

    def loss() -> torch.Tensor:
        with context.bf16(context.device != "cpu"):
            maps = model(images)
        return criterion(maps.float(), image, boxes)

    return stepping(model, loss), {"": model, "loss": criterion}
