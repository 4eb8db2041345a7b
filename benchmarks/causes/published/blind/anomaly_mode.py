"""A radiance field trained with torch.autograd's anomaly mode on."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="stanford-iprl-lab/nerf_shared#10",
    cause=("anomaly",),
    place=("**", "detect_anomaly()"),
    fix="Turn it off",
    gain="6 to 9 steps a second (1.5 hours to 36 minutes an epoch in icon-lab/SynDiff#43)",
)


class Field(nn.Sequential):
    """Colour and density at a point, from sines and cosines of its coordinates."""

    def __init__(self, width: int, depth: int) -> None:
        inner = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        super().__init__(nn.Linear(60, width), *inner, nn.Linear(width, 4))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        angles = (points[..., None] * 2.0 ** torch.arange(10, device=points.device)).flatten(-2)
        return super().forward(torch.cat((angles.sin(), angles.cos()), -1))


def rendered(values: torch.Tensor) -> torch.Tensor:
    """Colours of rays from colours and densities at their samples."""
    opaque = 1 - torch.exp(-values[..., 3].relu() * 0.1)
    through = torch.cumprod(1 - opaque + 1e-6, -1)
    return ((opaque * through)[..., None] * values[..., :3].sigmoid()).sum(-2)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    rays, samples = sized(context, 4096, 32, 4), sized(context, 64, 32, 4)
    model = made(context, lambda: Field(sized(context, 256, 128, 16), sized(context, 8, 6, 2)))
    points, colours = context.randn(rays, samples, 3), context.randn(rays, 3).sigmoid()
    step = stepping(model, lambda: (rendered(model(points)) - colours).square().mean())

    def watched() -> torch.Tensor:
        with torch.autograd.set_detect_anomaly(not fixed):
            return step()

    return watched, {"": model}
