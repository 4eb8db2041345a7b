"""Gradients of the discriminator's weights in the generator's update, then thrown away."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, adamw, sized
from benchmarks.models import Context, made

CASE = Published(
    source="SKTBrain/DiscoGAN#2",
    cause=("requires_grad", "nobody reads", "not read", "never read", "unused gradient", "discard"),
    place=("discriminator", "discriminator.**"),
    fix="requires_grad_(False) on the discriminator while the generator is updated",
    gain="'a small speedup' (junyanz/pytorch-CycleGAN-and-pix2pix#594); no times given",
)


def generator(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(32, 2 * width, 4),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 3, 4, 2, 1),
        nn.Tanh(),
    )


def discriminator(width: int, depth: int) -> nn.Sequential:
    inner = (nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.LeakyReLU()) for _ in range(depth))
    first, last = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 1, 16)
    return nn.Sequential(first, nn.LeakyReLU(), *inner, last)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, batch = sized(context, 256, 48, 4), sized(context, 512, 4, 2)
    maker = made(context, lambda: generator(width))
    critic = made(context, lambda: discriminator(width, 3))
    make, judge = adamw(maker.parameters()), adamw(critic.parameters())
    noise = context.randn(batch, 32, 1, 1)
    real = context.randn(batch, 3, 16, 16)

    def step() -> torch.Tensor:
        critic.requires_grad_(not fixed)
        make.zero_grad()
        with context.bf16(context.device != "cpu"):
            fake = maker(noise)
            loss = nn.functional.softplus(-critic(fake)).mean()
        loss.backward()
        make.step()
        critic.requires_grad_(True)
        judge.zero_grad()
        with context.bf16(context.device != "cpu"):
            wrong = nn.functional.softplus(critic(fake.detach())).mean()
            worse = wrong + nn.functional.softplus(-critic(real)).mean()
        worse.backward()
        judge.step()
        return (loss + worse).detach()

    return step, {"generator": maker, "discriminator": critic}
