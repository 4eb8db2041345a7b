"""A distance of point clouds that counts, cloud by cloud, how often each point is the nearest."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="wutong16/Density_aware_Chamfer_Distance#3",
    cause=("loop", "launch", "one by one", "bincount", "synchron", "waits for", "small kernels"),
    place=("distance", "weights()"),
    fix="Count in all clouds at once by scatter_add",
    gain="6.36 to 0.57 s in the loss",
    device="cuda",
)


def weights(nearest: torch.Tensor, points: int, fixed: bool) -> torch.Tensor:
    """Return one over how many points have the same nearest point."""
    if fixed:
        ones = torch.ones_like(nearest)
        counts = nearest.new_zeros(len(nearest), points).scatter_add(1, nearest, ones)
        return 1 / (counts.gather(1, nearest) + 1e-6)
    found = []
    for cloud in nearest:
        counts = torch.bincount(cloud, minlength=points)
        found.append(1 / (counts[cloud] + 1e-6))
    return torch.stack(found)


class Distance(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed

    def one_way(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            nearest = torch.cdist(x, y).argmin(-1)
            weight = weights(nearest, y.shape[1], self.fixed)
        away = (x - y.gather(1, nearest[..., None].expand(-1, -1, 3))).square().sum(-1)
        return (1 - (-40 * away).exp() * weight).mean()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.one_way(x, y) + self.one_way(y, x)


class Completion(nn.Module):
    def __init__(self, width: int, points: int) -> None:
        super().__init__()
        self.points = nn.Sequential(
            nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2 * width), nn.ReLU()
        )
        self.global_ = nn.Linear(2 * width, 4 * width)
        self.decode = nn.Sequential(
            nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 3 * points)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.global_(self.points(x)).amax(1)
        return self.decode(x).view(len(x), -1, 3).tanh()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, points = sized(context, 512, 64, 8), sized(context, 1024, 256, 16)
    clouds = sized(context, 96, 24, 3)
    model, distance = made(context, lambda: Completion(width, points)), Distance(fixed)
    partial, whole = (context.randn(clouds, points, 3).clamp(-1, 1) for _ in range(2))
    loss = lambda: distance(model(partial), whole)  # noqa: E731
    return stepping(model, loss), {"": model, "distance": distance}
