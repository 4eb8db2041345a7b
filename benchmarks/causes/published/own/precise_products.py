"""A transformer trained in fp32, whose products run without tensor cores."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="microsoft/retrochimera#36",
    cause=("tensor cores", "float32_matmul_precision"),
    place=("**",),
    fix="torch.set_float32_matmul_precision('high')",
    gain="2.2 times the throughput of the transformer's training (A100); bf16: 10 to 15% more",
    device="cuda",
    same=False,
)


class Translator(nn.Module):
    def __init__(self, words: int, width: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.inner = nn.Transformer(
            width, width // 64, depth, depth, 4 * width, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(width, words)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device)
        return self.head(self.inner(self.words(source), self.words(target), tgt_mask=mask))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth, batch, length = sizes(context, (512, 6, 64, 256), (64, 1, 2, 8))
    model = made(context, lambda: Translator(512, width, depth))
    source, target, follow = (context.randint(512, batch, length) for _ in range(3))
    inner = stepping(
        model,
        lambda: nn.functional.cross_entropy(model(source, target).flatten(0, 1), follow.flatten()),
    )

    def step() -> torch.Tensor:
        torch.set_float32_matmul_precision("high" if fixed else "highest")
        try:
            return inner()
        finally:
            torch.set_float32_matmul_precision("highest")

    return step, {"": model}
