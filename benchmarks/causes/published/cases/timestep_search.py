"""Noise levels that are looked up sample by sample, each with a wait for the GPU."""

from __future__ import annotations

import torch

from benchmarks.causes.published import Models, Published, Step
from benchmarks.causes.published.parts import sized, stepping
from benchmarks.models import Context, DiffusionUnet, made

CASE = Published(
    source="huggingface/diffusers#9417",
    title="The index of each sample's time step found by nonzero() and item() in a Python loop",
    cause=("synchron", "waits for", "wait for", "nonzero", ".item()"),
    place=("noise_levels()", "index_of()"),
    fix="Find all indices at once on the GPU",
    gain="'unexpectedly slowing down my training speeds'; no times given",
    device="cuda",
)


def index_of(when: torch.Tensor, schedule: torch.Tensor) -> int:
    return int((schedule == when).nonzero()[0].item())


def noise_levels(
    when: torch.Tensor, schedule: torch.Tensor, sigmas: torch.Tensor, fixed: bool
) -> torch.Tensor:
    if fixed:
        return sigmas[torch.searchsorted(schedule, when)]
    return sigmas[[index_of(one, schedule) for one in when]]


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    side, batch = sized(context, 64, 16, 8), sized(context, 96, 8, 2)
    model = made(context, lambda: DiffusionUnet(sized(context, 128, 16, 8)))
    schedule = torch.arange(1000, device=context.device).float()
    sigmas = torch.linspace(0.001, 1.0, 1000, device=context.device)
    images = context.randn(batch, 3, side, side)
    when, noise = context.randint(1000, batch).float(), context.randn(*images.shape)

    def loss() -> torch.Tensor:
        sigma = noise_levels(when, schedule, sigmas, fixed).view(-1, 1, 1, 1)
        with context.bf16(context.device != "cpu"):
            found = model((1 - sigma) * images + sigma * noise, when)
        return (found.float() - (noise - images)).square().mean()

    return stepping(model, loss), {"": model}
