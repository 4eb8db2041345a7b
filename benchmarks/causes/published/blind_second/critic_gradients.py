"""Gradients of a discriminator's weights in the step of the generator, where nobody wants them."""

from itertools import pairwise

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, adamw, sized
from benchmarks.models import Context, made

CASE = Published(
    source="junyanz/pytorch-CycleGAN-and-pix2pix#594",
    cause=("requires_grad", "nobody", "not read", "never read", "unused", "thrown away", "discard"),
    place=("critic", "critic.**"),
    fix="requires_grad_(False) for the discriminator while the generator learns",
    gain="'a small speedup trick', no figures",
)


def convolutions(*widths: int, stride: int = 1) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [nn.Conv2d(inner, outer, 3, stride, padding=1), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers)


class Painter(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = convolutions(3, width, 2 * width, stride=2)
        self.middle = convolutions(*[2 * width] * 4)
        self.up = nn.Sequential(nn.Upsample(scale_factor=4), nn.Conv2d(2 * width, 3, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.middle(self.down(x))).tanh()


class Critic(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = convolutions(3, width, stride=2)
        self.deep = convolutions(width, 2 * width, 4 * width, 4 * width, stride=1)
        self.last = nn.Conv2d(4 * width, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.deep(self.first(x)))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, side = sized(context, 64, 12, 4), sized(context, 128, 48, 16)
    batch = sized(context, 128, 2, 2)
    painter, critic = made(context, lambda: Painter(width)), made(context, lambda: Critic(width))
    for model in (painter, critic):
        model.to(memory_format=torch.channels_last)
    paints, judges = adamw(painter.parameters()), adamw(critic.parameters())
    sketch, photo = (context.randn(batch, 3, side, side) for _ in range(2))
    on_gpu = context.device != "cpu"

    def step() -> torch.Tensor:
        critic.requires_grad_(not fixed)
        paints.zero_grad()
        with context.bf16(on_gpu):
            painted = painter(sketch)
            fooled = (critic(painted) - 1).square().mean() + (painted - photo).abs().mean()
        fooled.backward()
        paints.step()
        critic.requires_grad_(True)
        judges.zero_grad()
        with context.bf16(on_gpu):
            told = (critic(photo) - 1).square().mean() + critic(painted.detach()).square().mean()
        told.backward()
        judges.step()
        return (fooled + told).detach()

    return step, {"painter": painter, "critic": critic}
