"""Weight-decomposed adapters that send the input through the frozen weight twice."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import (
    Models,
    Published,
    Step,
    TokenLoss,
    half,
    sized,
    stepping,
)
from benchmarks.models import Context, Gpt, made

CASE = Published(
    source="huggingface/peft#2122",
    because="The result of the frozen layer is known, and is computed again for the magnitude.",
    cause=("twice", "again", "same product", "repeated", "duplicate", "reuse", "same inputs"),
    half=("matrix product", "matmul", "linear", "frozen", "norm"),
    place=(
        "h.*.attn.qkv", "h.*.attn.proj", "h.*.mlp.fc1", "h.*.mlp.fc2", "decomposed()",
        "h.*.attn.qkv.*", "h.*.attn.proj.*", "h.*.mlp.fc1.*", "h.*.mlp.fc2.*",
    ),
    fix="Reuse the result of the frozen layer where there is no dropout",
    gain="359.7 to 279.3 s for 20 steps (RTX 4090)",
)  # fmt: skip


class Decomposed(nn.Module):
    def __init__(self, base: nn.Linear, rank: int, fixed: bool) -> None:
        super().__init__()
        self.fixed, self.base = fixed, base.requires_grad_(False)
        self.down = nn.Parameter(0.02 * torch.randn(rank, base.in_features))
        self.up = nn.Parameter(0.02 * torch.randn(base.out_features, rank))
        self.magnitude = nn.Parameter(base.weight.detach().norm(dim=1))

    def decomposed(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        weight = self.base.weight
        scale = self.magnitude / (weight + (self.up @ self.down).detach()).norm(dim=1)
        known = result - self.base.bias if self.fixed else functional.linear(x, weight)
        low = functional.linear(functional.linear(x, self.down), self.up)
        return (scale - 1) * known + scale * low

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        return result + self.decomposed(x, result)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth, words = sized(context, 2048, 192, 32), sized(context, 6, 3, 1), 2000
    length, batch = sized(context, 1024, 96, 8), sized(context, 4, 2, 2)

    def make() -> Gpt:
        model = Gpt(width, depth, length, words).requires_grad_(False)
        for block in model.h:
            for part, names in ((block.attn, ("qkv", "proj")), (block.mlp, ("fc1", "fc2"))):
                for name in names:
                    setattr(part, name, Decomposed(getattr(part, name), 16, fixed))
        return model

    model, criterion = made(context, make).to(half(context)), TokenLoss()
    tokens, follow = (context.randint(words, batch, length) for _ in range(2))
    trained = nn.ParameterList(p for p in model.parameters() if p.requires_grad)

    def loss() -> torch.Tensor:
        value: torch.Tensor = criterion(model(tokens), follow)
        return value

    return stepping(trained, loss), {"": model, "loss": criterion}
