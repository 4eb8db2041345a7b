"""Frames of a replay memory, made floats on the host before they are copied to the GPU."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="Kaixhin/Rainbow#48",
    cause=("uint8", "as floats"),
    place=("(data)", "sampled()"),
    fix="Copy them as they are stored, and make them floats on the device",
    gain="no figures for a step; more for larger frames",
    device="cuda",
)


class Values(nn.Sequential):
    """What each action is worth, of four frames."""

    def __init__(self, width: int, side: int) -> None:
        reach = ((side // 4) // 2) ** 2 * 2 * width
        super().__init__(
            nn.Conv2d(4, width, 8, stride=4, padding=2),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(reach, 512),
            nn.ReLU(),
            nn.Linear(512, 18),
        )


def sampled(frames: torch.Tensor, at: torch.Tensor, fixed: bool, device: str) -> torch.Tensor:
    found = frames[at]
    if fixed:
        return found.to(device).to(torch.float32).div_(255)
    return found.to(dtype=torch.float32, device=device).div_(255)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, batch, side = sizes(context, (32, 512, 96), (8, 4, 16))
    frames = torch.randint(256, (context.pick(4096, 32), 4, side, side), dtype=torch.uint8)
    at = torch.randint(len(frames), (batch,))
    model = made(context, lambda: Values(width, side))
    target = context.randn(batch, 18)

    def loss() -> torch.Tensor:
        seen = sampled(frames, at, fixed, context.device)
        return nn.functional.smooth_l1_loss(model(seen), target)

    return stepping(model, loss), {"": model}
