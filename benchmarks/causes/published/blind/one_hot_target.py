"""one_hot(...).float() for the target of a semantic loss."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, Unet, made

CASE = Published(
    source="ultralytics/ultralytics#25244",
    cause=("one_hot", "one-hot", "int64", "scatter_"),
    place=("loss", "target()"),
    fix="Scatter ones into a tensor of floats",
    gain="0.7 to 0.1 ms for the target, 103.6 to 105.4 ms for the step ('within run noise')",
)


class SemanticLoss(nn.Module):
    def __init__(self, classes: int, fixed: bool) -> None:
        super().__init__()
        self.classes, self.fixed = classes, fixed

    def target(self, masks: torch.Tensor) -> torch.Tensor:
        if not self.fixed:
            return nn.functional.one_hot(masks, self.classes).permute(0, 3, 1, 2).float()
        found = torch.zeros(len(masks), self.classes, *masks.shape[1:], device=masks.device)
        return found.scatter_(1, masks[:, None], 1.0)

    def forward(self, maps: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(maps.float(), self.target(masks))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    side, batch = sized(context, 256, 128, 16), sized(context, 32, 2, 2)
    model = made(context, lambda: Unet(sized(context, 64, 4, 4)))
    model = model.to(memory_format=torch.channels_last)
    criterion = SemanticLoss(16, fixed)
    images, small = context.randn(batch, 3, side, side), side // 4
    masks = context.randint(16, batch, small, small)

    def loss() -> torch.Tensor:
        with context.bf16(context.device != "cpu"):
            maps = nn.functional.avg_pool2d(model(images), 4)
        return criterion(maps, masks)

    return stepping(model, loss), {"": model, "loss": criterion}
