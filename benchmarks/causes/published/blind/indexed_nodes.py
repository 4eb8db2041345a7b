"""Node features read by x[indices] for each edge of a graph."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="dmlc/dgl#3729",
    cause=("index_select", "index_put", "indexing", "sorts", "gather"),
    place=("layers.*",),
    fix="x.index_select(0, indices), whose backward adds without sorting",
    gain="the backward over 100 times its forward; pytorch/pytorch#15245: steps twice as fast",
    device="cuda",
)


class Convolution(nn.Module):
    def __init__(self, width: int, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.own, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, degree: torch.Tensor) -> torch.Tensor:
        source, target = edges
        messages = self.other(x)
        messages = messages.index_select(0, source) if self.fixed else messages[source]
        sums = torch.zeros_like(x).index_add(0, target, messages)
        return (self.own(x) + sums / degree[:, None]).relu()


class Network(nn.Module):
    def __init__(self, width: int, fixed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolution(width, fixed) for _ in range(3))
        self.head = nn.Linear(width, 40)

    def forward(self, x: torch.Tensor, *graph: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *graph)
        return self.head(x)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    nodes, count = sized(context, 100_000, 4000, 20), sized(context, 1_500_000, 40_000, 60)
    width = sized(context, 256, 64, 8)
    model = made(context, lambda: Network(width, fixed))
    edges = context.randint(nodes, 2, count)
    degree = 1 + torch.zeros(nodes, device=context.device).index_add(
        0, edges[1], torch.ones(count, device=context.device)
    )
    x, classes = context.randn(nodes, width), context.randint(40, nodes)
    loss = lambda: nn.functional.cross_entropy(model(x, edges, degree), classes)  # noqa: E731
    return stepping(model, loss), {"": model}
