"""The window of a structural similarity made anew on the host in every step."""

import math

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="graphdeco-inria/gaussian-splatting#886",
    because="A constant window is built by Python and copied to the device for every image.",
    cause=(
        "rebuilt", "window", "cache", "constant", "same each step", "host to the device",
        "copy host", "copied host", "pageable",
    ),
    half=("synchron", "waits for", "python", "small operators"),
    place=("create_window()", "ssim()"),
    fix="Make the window once",
    gain="none given; of the same code elsewhere: 'not a big performance overhead'",
)  # fmt: skip


def create_window(size: int, channels: int, device: torch.device) -> torch.Tensor:
    values = [math.exp(-((x - size // 2) ** 2) / (2 * 1.5**2)) for x in range(size)]
    line = torch.tensor(values)
    line = (line / line.sum())[:, None]
    square = (line @ line.T)[None, None]
    return square.expand(channels, 1, size, size).contiguous().to(device)


def ssim(x: torch.Tensor, y: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    def blur(image: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(image, window, padding=5, groups=3)

    a, b = blur(x), blur(y)
    spread_x, spread_y = blur(x * x) - a * a, blur(y * y) - b * b
    common = blur(x * y) - a * b
    above = (2 * a * b + 1e-4) * (2 * common + 9e-4)
    return (above / ((a * a + b * b + 1e-4) * (spread_x + spread_y + 9e-4))).mean()


class Splats(nn.Module):
    """Gaussians in a plane, drawn one group after the other."""

    def __init__(self, count: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.places = nn.Parameter(torch.rand(count, 2))
        self.sizes = nn.Parameter(torch.full((count, 2), -3.0))
        self.colors = nn.Parameter(torch.randn(count, 3))

    def forward(self) -> torch.Tensor:
        line = torch.linspace(0, 1, self.side, device=self.places.device)
        near = (line[:, None, None] - self.places) / self.sizes.exp()
        rows, columns = (-0.5 * near.square()).exp().unbind(-1)
        weighted = columns[:, :, None] * self.colors.sigmoid()
        image = torch.einsum("hg,wgc->chw", rows, weighted)
        return image[None] / (1 + image[None].abs())


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    side, count = sized(context, 800, 96, 16), sized(context, 8000, 400, 20)
    model = made(context, lambda: Splats(count, side))
    right = torch.rand(1, 3, side, side, device=context.device)
    known = create_window(11, 3, right.device) if fixed else None

    def loss() -> torch.Tensor:
        image = model()
        window = create_window(11, 3, image.device) if known is None else known
        return 0.8 * (image - right).abs().mean() + 0.2 * (1 - ssim(image, right, window))

    return stepping(model, loss), {"": model}
