"""A noise schedule that is moved to the device for every batch of a diffusion model."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, DiffusionUnet, made

CASE = Published(
    source="huggingface/diffusers#6704",
    because="The table of the schedule is on the host and is copied to the device in each step.",
    cause=(
        "copy host", "copied host", "copies host", "host to the device", "pageable",
        "to the gpu each step", "moved to the device",
    ),
    half=("synchron", "waits for", "transfer"),
    place=("add_noise()",),
    fix="Keep the table on the device",
    gain="add_noise, a bottleneck of the training before, takes much less (flame graphs only)",
    device="cuda",
)  # fmt: skip


class Schedule:
    def __init__(self, steps: int, fixed: bool) -> None:
        self.fixed = fixed
        self.kept = (1 - torch.linspace(1e-4, 0.02, steps)).cumprod(0)

    def add_noise(self, x: torch.Tensor, noise: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        table = self.kept.to(device=x.device, dtype=x.dtype)
        if self.fixed:
            self.kept = self.kept.to(x.device)
        signal = (table[when] ** 0.5)[:, None, None, None]
        rest = ((1 - table[when]) ** 0.5)[:, None, None, None]
        return signal * x + rest * noise


class Noise(nn.Module):
    def forward(self, found: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return (found.float() - noise.float()).square().mean()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, side = sized(context, 192, 32, 16), sized(context, 32, 16, 8)
    batch = sized(context, 16, 4, 2)
    model = made(context, lambda: DiffusionUnet(width))
    schedule, loss = Schedule(1000, fixed), Noise()
    x, noise = (context.randn(batch, 3, side, side) for _ in range(2))
    when = context.randint(1000, batch)

    def denoised() -> torch.Tensor:
        noisy = schedule.add_noise(x, noise, when)
        with context.bf16(context.device != "cpu"):
            found = model(noisy, when)
        value: torch.Tensor = loss(found, noise)
        return value

    return stepping(model, denoised), {"": model, "loss": loss}
