"""A recurrent decoder unrolled by a Python loop, though its inputs are known (teacher forcing)."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="IBM/pytorch-seq2seq#32",
    cause=("loop", "time step", "step by step", "launch", "small kernels", "cudnn"),
    place=("decoder", "decoder.**"),
    fix="Give the layer the whole sequence",
    gain="about 25% faster training (newstest2013)",
)


class Decoder(nn.Module):
    def __init__(self, words: int, width: int, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.words = nn.Embedding(words, width)
        self.cell = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor, state: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x = self.words(tokens)
        if self.fixed:
            return self.head(self.cell(x, state)[0])
        found = []
        for number in range(x.shape[1]):
            y, state = self.cell(x[:, number : number + 1], state)
            found.append(self.head(y))
        return torch.cat(found, 1)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, batch = sized(context, 640, 64, 8), sized(context, 64, 4, 2)
    frames, length, words = sized(context, 400, 60, 6), sized(context, 100, 40, 4), 512
    encoder = made(context, lambda: nn.LSTM(80, width, num_layers=2, batch_first=True))
    model = nn.ModuleDict(
        {"encoder": encoder, "decoder": made(context, lambda: Decoder(words, width, fixed))}
    )
    speech = context.randn(batch, frames, 80)
    tokens, follow = (context.randint(words, batch, length) for _ in range(2))

    def loss() -> torch.Tensor:
        _, state = model["encoder"](speech)
        logits = model["decoder"](tokens, tuple(part[-1:].contiguous() for part in state))
        return nn.functional.cross_entropy(logits.flatten(0, 1), follow.flatten())

    return stepping(model, loss), {"": model}
