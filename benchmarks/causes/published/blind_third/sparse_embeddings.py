"""Sparse gradients and SparseAdam for embeddings of walks that meet most nodes."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="pytorch/pytorch#81162",
    because="A sparse gradient is sorted and summed up in each step, though most rows are in it.",
    cause=("sparse", "coalesce"),
    half=("sort", "unique", "optimizer", "embedding"),
    place=("(optimizer)", "nodes"),
    fix="A dense gradient and Adam",
    gain="faster than SparseAdam on PubMed, on a CPU (no figures)",
    same=False,
)


class Walks(nn.Module):
    def __init__(self, nodes: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.nodes = nn.Embedding(nodes, width, sparse=sparse)

    def score(self, walks: torch.Tensor) -> torch.Tensor:
        first, rest = self.nodes(walks[:, :1]), self.nodes(walks[:, 1:])
        return (first * rest).sum(-1).flatten()

    def forward(self, near: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
        right = functional.softplus(-self.score(near)).mean()
        return right + functional.softplus(self.score(far)).mean()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    nodes, width = sized(context, 19717, 4000, 40), sized(context, 128, 32, 8)
    walks = sized(context, 14080, 1400, 10)
    model = made(context, lambda: Walks(nodes, width, not fixed))
    near, far = (context.randint(nodes, walks, 10) for _ in range(2))
    optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
    if fixed:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    return stepping(model, lambda: model(near, far), optimizer=optimizer), {"": model}
