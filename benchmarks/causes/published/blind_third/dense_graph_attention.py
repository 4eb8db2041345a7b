"""Graph attention over all pairs of nodes, of which a few are edges."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="diegoantognini/pyGAT#8",
    because="Features of all pairs of nodes are written out, scored and masked to the edges.",
    cause=(
        "dense", "sparse", "repeat", "materializ", "all pairs", "masked", "large intermediate",
        "concatenat", "expanded",
    ),
    half=("pointwise", "elementwise", "kept", "memory", "copies", "softmax"),
    place=("heads.*", "last", "attend()"),
    fix="Score the edges alone (SpGraphAttentionLayer)",
    gain="to 0.07 s an epoch of Cora on a Titan Xp (before: not given; 0.042 s on a V100, dgl#348)",
)  # fmt: skip


class Attention(nn.Module):
    def __init__(self, inner: int, outer: int, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.value = nn.Linear(inner, outer, bias=False)
        self.score = nn.Linear(2 * outer, 1, bias=False)

    def attend(self, x: torch.Tensor, edges: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        count = len(x)
        if self.fixed:
            to, source = edges
            pairs = torch.cat((x.index_select(0, to), x.index_select(0, source)), 1)
            weight = functional.leaky_relu(self.score(pairs)[:, 0], 0.2).exp()
            total = x.new_zeros(count).index_add(0, to, weight)
            mixed = x.index_select(0, source) * weight[:, None]
            return torch.zeros_like(x).index_add(0, to, mixed) / total[:, None]
        pairs = torch.cat((x.repeat_interleave(count, 0), x.repeat(count, 1)), 1)
        scores = functional.leaky_relu(self.score(pairs).view(count, count), 0.2)
        scores = torch.where(dense, scores, -9e15)
        return scores.softmax(1) @ x

    def forward(self, x: torch.Tensor, edges: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return self.attend(self.value(x), edges, dense)


class Gat(nn.Module):
    def __init__(self, inner: int, hidden: int, classes: int, heads: int, fixed: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Attention(inner, hidden, fixed) for _ in range(heads))
        self.mix = nn.Sequential(nn.Linear(hidden * heads, hidden * heads), nn.ELU())
        self.last = Attention(hidden * heads, classes, fixed)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        y = torch.cat([functional.elu(head(x, edges, dense)) for head in self.heads], 1)
        return self.last(self.mix(y), edges, dense)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    nodes, inner = sized(context, 2708, 300, 12), sized(context, 1433, 256, 8)
    model = made(context, lambda: Gat(inner, 8, 7, 8, fixed))
    x, labels = context.randn(nodes, inner), context.randint(7, nodes)
    dense = torch.rand(nodes, nodes, device=context.device) < 4 / nodes
    dense = dense | dense.T | torch.eye(nodes, dtype=torch.bool, device=context.device)
    edges = dense.nonzero().T.contiguous()

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(x, edges, dense), labels)

    return stepping(model, loss), {"": model}
