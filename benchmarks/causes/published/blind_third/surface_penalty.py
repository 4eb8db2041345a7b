"""A penalty on the pressure along each airfoil, sample by sample behind masks."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Block, Context, made

CASE = Published(
    source="wandb/senpai#339",
    because="Surface nodes of each sample are counted on the host, selected, sorted and indexed.",
    cause=("loop", "one by one", "synchron", "waits for", "boolean", "nonzero", "mask index"),
    half=("python", "launch", "small kernels", "index", "host"),
    place=("penalty()",),
    fix="Sort padded rows of all samples at once, with the other nodes behind",
    gain="5 s an epoch with the penalty, 4 s without; the author of the fix hoped for that second",
)


def penalty(
    found: torch.Tensor, right: torch.Tensor, arc: torch.Tensor, mask: torch.Tensor, fixed: bool
) -> torch.Tensor:
    """Return how far changes along the surface are from the right ones."""
    if fixed:
        order = arc.masked_fill(~mask, float("inf")).argsort(1)
        counts = mask.sum(1)
        change = found.gather(1, order).diff(dim=1) - right.gather(1, order).diff(dim=1)
        pairs = torch.arange(change.shape[1], device=arc.device) < (counts - 1)[:, None]
        means = (change.abs() * pairs).sum(1) / (counts - 1).clamp(min=1)
        return (means * (counts >= 3)).sum() / len(found)
    total = torch.zeros((), device=found.device)
    for sample in range(len(found)):
        here = mask[sample]
        if here.sum() < 3:
            continue
        order = arc[sample, here].argsort()
        change = found[sample, here][order].diff() - right[sample, here][order].diff()
        total = total + change.abs().mean()
    return total / len(found)


class Surrogate(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 256, 48, 16), sized(context, 5, 3, 1)
    nodes, batch = sized(context, 1024, 96, 16), sized(context, 24, 12, 3)
    model = made(context, lambda: Surrogate(width, depth)).to(half(context))
    x, right = context.randn(batch, nodes, 8).to(half(context)), context.randn(batch, nodes, 3)
    arc = torch.rand(batch, nodes, device=context.device)
    mask = torch.rand(batch, nodes, device=context.device) < 0.3

    def loss() -> torch.Tensor:
        found = model(x).float()
        wrong = (found - right).abs().mean(-1)
        value = wrong.mean() + 10 * (wrong * mask).sum() / mask.sum()
        return value + 2 * penalty(found[..., 2], right[..., 2], arc, mask, fixed)

    return stepping(model, loss), {"": model}
