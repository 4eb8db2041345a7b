"""A frozen autoencoder that encodes the same images in every step of a diffusion model."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Context, DiffusionUnet, made

CASE = Published(
    source="huggingface/diffusers#6076",
    because="What a frozen encoder makes of the training images never changes, and is made again.",
    cause=("frozen", "same inputs", "cache", "precompute", "once store", "before training"),
    half=("no_grad", "without gradient", "no gradient"),
    place=("vae", "vae.**", "encode()"),
    fix="Encode all images once, before the training, and keep the latents",
    gain="no time given; about 30% in the port to Flax (#1936: 5 to 3.2 minutes)",
)


class Encoder(nn.Module):
    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        widths = (3, width, 2 * width, 4 * width)
        self.down = nn.ModuleList(
            nn.Conv2d(inner, outer, 3, stride=2, padding=1) for inner, outer in pairwise(widths)
        )
        self.same = nn.ModuleList(nn.Conv2d(outer, outer, 3, padding=1) for outer in widths[1:])
        self.last = nn.Conv2d(4 * width, latent, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for down, same in zip(self.down, self.same, strict=True):
            x = functional.silu(down(x))
            x = x + functional.silu(same(x))
        return self.last(x)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, side = sized(context, 128, 32, 16), sized(context, 256, 64, 64)
    batch = sized(context, 16, 2, 2)
    vae = made(context, lambda: Encoder(sized(context, 96, 16, 4), 3)).to(half(context))
    vae.requires_grad_(False)
    model = made(context, lambda: DiffusionUnet(width))
    images = context.randn(batch, 3, side, side).to(half(context))
    noise = context.randn(batch, 3, side // 8, side // 8)
    when = context.randint(1000, batch)

    @torch.no_grad()
    def encode() -> torch.Tensor:
        latents: torch.Tensor = vae(images)
        return latents.float()

    known = encode() if fixed else None

    def denoised() -> torch.Tensor:
        latents = encode() if known is None else known
        with context.bf16(context.device != "cpu"):
            found: torch.Tensor = model(0.7 * latents + 0.7 * noise, when)
        return functional.mse_loss(found.float(), noise)

    return stepping(model, denoised), {"unet": model, "vae": vae}
