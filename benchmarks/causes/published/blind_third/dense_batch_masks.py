"""Graphs put into a dense batch by masks, in each layer of a graph transformer."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, Mlp, made

CASE = Published(
    source="pyg-team/pytorch_geometric#10660",
    because="Whether a graph is too large is read on the host, and a mask selects its nodes.",
    cause=("synchron", "waits for", "nonzero", "boolean", "mask index"),
    half=("index", "launch", "small kernels"),
    place=("dense()", "layers.*", "layers.*.**"),
    fix="Send the nodes that do not fit to a row that is cut off",
    gain="a call on an L4: 4.3 to less than 2.9 ms (1,024 graphs of up to 64 nodes)",
    device="cuda",
    remains=True,
)


def dense(
    x: torch.Tensor, graph: torch.Tensor, starts: torch.Tensor, graphs: int, most: int, fixed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return nodes as graphs by nodes of a graph, and where there is one."""
    place = torch.arange(len(x), device=x.device) - starts[graph]
    at = graph * most + place
    if fixed:
        at = torch.where(place < most, at, graphs * most)
        rows = x.new_zeros(graphs * most + 1, x.shape[1]).index_copy(0, at, x)
        here = torch.zeros(graphs * most + 1, dtype=torch.bool, device=x.device)
        here = here.index_fill(0, at, True)
        return rows[:-1].view(graphs, most, -1), here[:-1].view(graphs, most)
    if bool(place.max() >= most):
        fits = place < most
        x, at = x[fits], at[fits]
    rows = x.new_zeros(graphs * most, x.shape[1])
    rows[at] = x
    here = torch.zeros(graphs * most, dtype=torch.bool, device=x.device)
    here[at] = True
    return rows.view(graphs, most, -1), here.view(graphs, most)


class Layer(nn.Module):
    def __init__(self, width: int, most: int, fixed: bool) -> None:
        super().__init__()
        self.most, self.fixed, self.heads = most, fixed, max(1, width // 32)
        self.local, self.qkv = nn.Linear(width, width), nn.Linear(width, 3 * width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = Mlp(width, 2 * width)

    def forward(
        self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        near = torch.zeros_like(x).index_add(0, edges[1], self.local(x).index_select(0, edges[0]))
        rows, here = dense(self.norm1(x), graph, starts, len(starts), self.most, self.fixed)
        q, k, v = self.qkv(rows).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, here[:, None, None])
        y = y.transpose(1, 2).flatten(2).flatten(0, 1)
        place = (torch.arange(len(x), device=x.device) - starts[graph]).clamp(max=self.most - 1)
        x = x + near + y.index_select(0, graph * self.most + place)
        return x + self.mlp(self.norm2(x))


class Graphs(nn.Module):
    def __init__(self, width: int, depth: int, most: int, fixed: bool) -> None:
        super().__init__()
        self.atoms = nn.Embedding(100, width)
        self.layers = nn.ModuleList(Layer(width, most, fixed) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(
        self, atoms: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        x = self.atoms(atoms)
        for layer in self.layers:
            x = layer(x, edges, graph, starts)
        total = x.new_zeros(len(starts), x.shape[1]).index_add(0, graph, x)
        return self.head(total)[:, 0]


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth, graphs = sized(context, 128, 32, 8), sized(context, 10, 3, 1), 0
    graphs, most = sized(context, 256, 32, 4), sized(context, 32, 16, 4)
    model = made(context, lambda: Graphs(width, depth, most, fixed))
    sizes = context.randint(most, graphs) + 3
    starts = sizes.cumsum(0) - sizes
    graph = torch.arange(graphs, device=context.device).repeat_interleave(sizes)
    nodes = len(graph)
    atoms, right = context.randint(100, nodes), context.randn(graphs)
    source = torch.arange(nodes, device=context.device).repeat(4)
    offset = (torch.rand(4 * nodes, device=context.device) * sizes[graph].repeat(4)).long()
    edges = torch.stack((source, starts[graph].repeat(4) + offset))

    def loss() -> torch.Tensor:
        return functional.l1_loss(model(atoms, edges, graph, starts), right)

    return stepping(model, loss), {"": model}
