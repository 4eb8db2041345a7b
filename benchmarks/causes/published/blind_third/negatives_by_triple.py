"""A knowledge graph embedding that reads every negative of every triple as rows of its own."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="uma-pi1/kge#161",
    because="Scores are products and sums over rows read anew for each pair, not one product.",
    cause=(
        "matrix product", "matmul", "gemm", "broadcast sum", "same rows", "duplicate",
        "repeated rows", "product sum",
    ),
    half=("embedding", "gather", "index", "atomic", "pointwise", "kept"),
    place=("entities", "score()", "kge"),
    fix="negative_sampling.implementation batch: score all entities of a batch by one product",
    gain="65 against an expected 14 s an epoch of FB15k (ComplEx, 1,024 negatives, Titan Xp)",
)  # fmt: skip


class Kge(nn.Module):
    def __init__(self, entities: int, relations: int, width: int, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.entities = nn.Embedding(entities, width)
        self.relations = nn.Embedding(relations, width)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def score(self, query: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        if self.fixed:
            unique, at = others.unique(return_inverse=True)
            return (query @ self.entities(unique).T).gather(1, at)
        return (query[:, None] * self.entities(others)).sum(-1)

    def forward(self, triples: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        subject, relation, right = triples.unbind(1)
        query = self.mix(self.entities(subject)) * self.relations(relation)
        positive = (query * self.entities(right)).sum(-1, keepdim=True)
        return torch.cat((positive, self.score(query, others)), 1)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    entities, width = sized(context, 14951, 2000, 40), sized(context, 256, 64, 8)
    batch, others = sized(context, 512, 128, 6), sized(context, 512, 128, 5)
    model = made(context, lambda: Kge(entities, 500, width, fixed))
    triples = torch.stack(
        (context.randint(entities, batch), context.randint(500, batch),
         context.randint(entities, batch)), 1,
    )  # fmt: skip
    negative = context.randint(entities, batch, others)
    truth = torch.zeros(batch, others + 1, device=context.device)
    truth[:, 0] = 1

    def loss() -> torch.Tensor:
        scores = model(triples, negative)
        return functional.binary_cross_entropy_with_logits(scores, truth)

    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, fused=context.device == "cpu")
    return stepping(model, loss, optimizer=optimizer), {"kge": model}
