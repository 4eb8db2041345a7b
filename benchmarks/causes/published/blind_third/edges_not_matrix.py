"""A graph of users and items convolved edge by edge, not as a sparse matrix."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="RUCAIBox/RecBole-GNN#75",
    because="A message is written out for each edge and added to its node, in each layer.",
    cause=("sparse", "scatter", "index_add", "gather", "atomic", "each edge"),
    half=("index", "pointwise", "kept", "memory"),
    place=("conv", "propagate()"),
    fix="Multiply by the sparse adjacency matrix (enable_sparse)",
    gain="155.8 to 33.9 s for 15 epochs of ML-1M, and a fifth of the memory (NGCF)",
)


class _Multiplied(torch.autograd.Function):
    """The product with a symmetric sparse matrix."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.matrix = matrix
        return matrix @ x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.matrix @ gradients[0].contiguous()


class Convolution(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed

    def propagate(
        self, x: torch.Tensor, edges: torch.Tensor, weight: torch.Tensor, matrix: torch.Tensor
    ) -> torch.Tensor:
        if self.fixed:
            found: torch.Tensor = _Multiplied.apply(matrix, x)
            return found
        messages = x.index_select(0, edges[1]) * weight[:, None]
        return torch.zeros_like(x).index_add(0, edges[0], messages)

    def forward(
        self, x: torch.Tensor, edges: torch.Tensor, weight: torch.Tensor, matrix: torch.Tensor
    ) -> torch.Tensor:
        return self.propagate(x, edges, weight, matrix)


class Recommender(nn.Module):
    def __init__(self, nodes: int, width: int, depth: int, fixed: bool) -> None:
        super().__init__()
        self.nodes = nn.Embedding(nodes, width)
        self.conv = Convolution(fixed)
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, *graph: torch.Tensor) -> torch.Tensor:
        x = self.nodes.weight
        found = [x]
        for mix in self.mix:
            x = functional.leaky_relu(mix(self.conv(x, *graph)), 0.2)
            found.append(x)
        return torch.stack(found).mean(0)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    nodes, links = sized(context, 9746, 1500, 20), sized(context, 500_000, 20_000, 60)
    width, batch = sized(context, 64, 32, 8), sized(context, 4096, 512, 6)
    model = made(context, lambda: Recommender(nodes, width, 3, fixed))
    with torch.random.fork_rng(devices=[]):
        some = torch.randint(nodes, (2, links), generator=torch.Generator().manual_seed(0))
    pairs = torch.cat((some, some.flip(0)), 1).unique(dim=1).to(context.device)
    degree = torch.bincount(pairs[0], minlength=nodes).float().clamp(min=1)
    weight = (degree[pairs[0]] * degree[pairs[1]]).rsqrt()
    ends = torch.bincount(pairs[0], minlength=nodes).cumsum(0)
    starts = functional.pad(ends, (1, 0))
    matrix = torch.sparse_csr_tensor(starts, pairs[1], weight, (nodes, nodes))
    user, near, far = (context.randint(nodes, batch) for _ in range(3))

    def loss() -> torch.Tensor:
        x = model(pairs, weight, matrix)
        better = (x[user] * (x[near] - x[far])).sum(-1)
        return -functional.logsigmoid(better).mean()

    return stepping(model, loss), {"": model}
