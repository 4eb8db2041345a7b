"""The logits are permuted before the loss flattens them: a copy of the step's largest tensor."""

from __future__ import annotations

import torch

from benchmarks.causes.published import Models, Published, Step
from benchmarks.causes.published.parts import TokenLoss, half, sized, stepping
from benchmarks.models import Context, Gpt, made

CASE = Published(
    source="AMD-AGI/Primus#1049",
    title="Logits permuted from (s, b, v) to (b, s, v) before they are flattened for the loss",
    cause=("layout", "contiguous", "permut", "transpos", "logits cop", "strided"),
    place=("loss", "lm_head"),
    fix="Flatten the logits as they lie, which is free, and transpose the small targets",
    gain="963 to 792 ms a step (300M parameters, 8 MI355X, vocabulary of 128,256)",
)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    words, width = sized(context, 65536, 3072, 64), sized(context, 1024, 128, 32)
    length, batch = sized(context, 1024, 128, 8), sized(context, 16, 4, 2)
    depth = sized(context, 4, 2, 1)
    model = made(context, lambda: Gpt(width, depth, length, words)).to(half(context))
    tokens, follow = context.randint(words, batch, length), context.randint(words, length, batch)
    criterion = TokenLoss()

    def loss() -> torch.Tensor:
        logits = model(tokens)  # what follows takes them with the other dimension first
        if fixed:
            return criterion(logits, follow.t())
        return criterion(logits.transpose(0, 1), follow)

    return stepping(model, loss), {"": model, "loss": criterion}
