"""A metric of each batch as a comparison of classes by classes by predictions."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, Mlp, made

CASE = Published(
    source="fastai/fastai#2516",
    cause=("metric", "confusion", "comparison"),
    place=("confusion()", "matrix", "(metrics)", "(other)"),
    fix="Add one at (target, prediction)",
    gain="validation with 10,000 classes 'tremendously slow' before; no figures",
)


class Confusion(nn.Module):
    def __init__(self, classes: int, fixed: bool) -> None:
        super().__init__()
        self.classes, self.fixed = classes, fixed
        self.register_buffer("counts", torch.zeros(classes, classes))

    @torch.no_grad()
    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        confusion(self, logits.argmax(-1), targets)


def confusion(into: Confusion, found: torch.Tensor, targets: torch.Tensor) -> None:
    if into.fixed:
        ones = torch.ones(len(found), device=found.device)
        into.counts.view(-1).index_add_(0, targets * into.classes + found, ones)
        return
    known = torch.arange(into.classes, device=found.device)
    pairs = (found == known[:, None]) & (targets == known[:, None, None])
    into.counts += pairs.sum(2, dtype=torch.float32)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    classes, width = sized(context, 1000, 192, 10), sized(context, 1024, 128, 16)
    texts, words = sized(context, 2048, 256, 8), sized(context, 256, 32, 4)

    def make() -> nn.Sequential:
        tower = [Mlp(width, 4 * width) for _ in range(4)]
        return nn.Sequential(nn.EmbeddingBag(20_000, width), *tower, nn.Linear(width, classes))

    model, matrix = made(context, make), made(context, lambda: Confusion(classes, fixed))
    tokens, targets = context.randint(20_000, texts, words), context.randint(classes, texts)
    seen: list[torch.Tensor] = []

    def loss() -> torch.Tensor:
        seen[:] = [model(tokens)]
        return nn.functional.cross_entropy(seen[0], targets)

    step = stepping(model, loss, after=lambda _: matrix(seen[0], targets))
    return step, {"": model, "matrix": matrix}
