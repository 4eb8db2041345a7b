"""The moving average of the weights is updated tensor by tensor."""

import copy

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="ultralytics/ultralytics#25315",
    cause=("average", "ema", "for all tensors"),
    place=("(averaging)", "update_average()"),
    fix="Collect the tensors once, and update them by one _foreach_lerp_",
    gain="12.8 to 5.8 ms an update (yolo26n, 594 tensors, Apple M): 1,188 launches to a few",
)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth, batch = sizes(context, (64, 40, 16), (12, 12, 2))

    def network() -> nn.Module:
        blocks = [Residual(width) for _ in range(depth)]
        stem, pool = nn.Conv2d(3, width, 4, stride=4), nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(stem, *blocks, pool, nn.Flatten(), nn.Linear(width, 80))

    model = made(context, network)
    average = copy.deepcopy(model)
    images, labels = context.randn(batch, 3, 64, 64), context.randint(80, batch)
    mine, theirs = (
        [tensor for tensor in one.state_dict().values() if tensor.is_floating_point()]
        for one in (average, model)
    )

    @torch.no_grad()
    def update_average(_: torch.Tensor) -> None:
        if fixed:
            torch._foreach_lerp_(mine, theirs, 0.001)
            return
        new = model.state_dict()
        for name, tensor in average.state_dict().items():
            if tensor.is_floating_point():
                tensor.mul_(0.999)
                tensor.add_(new[name].detach(), alpha=0.001)

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    return stepping(model, loss, after=update_average), {"": model}
