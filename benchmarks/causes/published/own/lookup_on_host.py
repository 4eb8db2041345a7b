"""Windows of a correlation volume, whose offsets are made on the host for each look at it."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="princeton-vl/RAFT#113",
    cause=("on the cpu", "on the device", "device="),
    place=("look", "update", "**"),
    fix="Make all tensors on the device",
    gain="no figures: tensors made on the CPU are moved, 'creating communication overhead'",
    device="cuda",
)


class Look(nn.Module):
    """What is in a window around where each pixel has moved to, on four levels."""

    def __init__(self, radius: int, fixed: bool) -> None:
        super().__init__()
        self.radius, self.fixed = radius, fixed

    def offsets(self, device: torch.device) -> torch.Tensor:
        made = device if self.fixed else None
        line = torch.linspace(-self.radius, self.radius, 2 * self.radius + 1, device=made)
        return torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).to(device)

    def forward(self, pyramid: list[torch.Tensor], places: torch.Tensor) -> torch.Tensor:
        batch, _, high, wide = places.shape
        flat, found = places.permute(0, 2, 3, 1).reshape(-1, 1, 1, 2), []
        for level, volume in enumerate(pyramid):
            at = flat / 2**level + self.offsets(places.device)[None]
            size = torch.stack([at[..., 0] / volume.shape[-1], at[..., 1] / volume.shape[-2]], -1)
            window = functional.grid_sample(volume, 2 * size - 1, align_corners=True)
            found.append(window.view(batch, high, wide, -1))
        return torch.cat(found, -1).permute(0, 3, 1, 2)


class Flow(nn.Module):
    def __init__(self, width: int, radius: int, rounds: int, fixed: bool) -> None:
        super().__init__()
        self.rounds = rounds
        self.encode = nn.Sequential(
            nn.Conv2d(3, width, 8, stride=8), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )
        self.look = Look(radius, fixed)
        seen = 4 * (2 * radius + 1) ** 2
        self.update = nn.Sequential(
            nn.Conv2d(seen + 2, width, 1), nn.ReLU(), nn.Conv2d(width, 2, 3, padding=1)
        )

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        first, second = self.encode(one), self.encode(two)
        batch, width, high, wide = first.shape
        volume = first.flatten(2).mT @ second.flatten(2) / width**0.5
        pyramid = [volume.reshape(-1, 1, high, wide)]
        for _ in range(3):
            pyramid.append(functional.avg_pool2d(pyramid[-1], 2))
        rows, columns = (torch.arange(n, device=one.device) for n in (high, wide))
        grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy")).float()
        flow = torch.zeros(batch, 2, high, wide, device=one.device)
        for _ in range(self.rounds):
            flow = flow.detach()
            seen = self.look(pyramid, grid[None] + flow)
            flow = flow + self.update(torch.cat([seen, flow], 1))
        return flow


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, batch, side, rounds = sizes(context, (256, 4, 368, 12), (16, 1, 64, 3))
    model = made(context, lambda: Flow(width, 4, rounds, fixed))
    one, two = (context.randn(batch, 3, side, side) for _ in range(2))
    return stepping(model, lambda: model(one, two).abs().mean()), {"": model}
