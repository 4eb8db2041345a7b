"""The structural similarity of images by a square Gaussian filter."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, Unet, made

CASE = Published(
    source="kornia/kornia#2383",
    because="A Gaussian of 11 by 11 is applied to each channel where two of 11 give the same.",
    cause=("separable", "depthwise", "grouped", "groups", "two passes", "one-dimensional"),
    half=("convolution", "conv2d", "cudnn"),
    place=("loss", "blur()", "loss.*"),
    fix="Filter rows, then columns",
    gain="no slower for 11 pixels, much faster for large windows (a table of the author)",
)


class Ssim(nn.Module):
    window: torch.Tensor

    def __init__(self, size: int, fixed: bool) -> None:
        super().__init__()
        self.size, self.fixed = size, fixed
        places = torch.arange(size).float() - size // 2
        window = (-places.square() / (2 * 1.5**2)).exp()
        self.register_buffer("window", window / window.sum())

    def blur(self, x: torch.Tensor) -> torch.Tensor:
        channels, around = x.shape[1], self.size // 2
        x = functional.pad(x, (around,) * 4, mode="reflect")
        line = self.window.to(x.dtype)
        if self.fixed:
            rows = line.expand(channels, 1, 1, -1)
            x = functional.conv2d(x, rows.contiguous(), groups=channels)
            return functional.conv2d(x, rows.mT.contiguous(), groups=channels)
        square = (line[:, None] * line).expand(channels, 1, -1, -1)
        return functional.conv2d(x, square.contiguous(), groups=channels)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = self.blur(x), self.blur(y)
        spread_x, spread_y = self.blur(x * x) - a * a, self.blur(y * y) - b * b
        common = self.blur(x * y) - a * b
        above = (2 * a * b + 1e-4) * (2 * common + 9e-4)
        below = (a * a + b * b + 1e-4) * (spread_x + spread_y + 9e-4)
        return 1 - (above / below).mean()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, side = sized(context, 24, 8, 4), sized(context, 256, 64, 16)
    batch = sized(context, 8, 2, 2)
    model = made(context, lambda: Unet(width, 3))
    loss = Ssim(11, fixed).to(context.device)
    images, right = (torch.rand(batch, 3, side, side, device=context.device) for _ in range(2))

    def restored() -> torch.Tensor:
        value: torch.Tensor = loss(model(images).sigmoid(), right)
        return value

    return stepping(model, restored), {"": model, "loss": loss}
