"""Logits permuted from (s, b, v) to (b, s, v) before they are flattened for the loss."""

import torch

from benchmarks.causes.published.parts import Models, Published, Step, TokenLoss, gpt, stepping
from benchmarks.models import Context

CASE = Published(
    source="AMD-AGI/Primus#1049",
    cause=("layout", "contiguous", "permut", "transpos", "logits cop", "strided"),
    place=("loss", "lm_head"),
    fix="Flatten the logits as they lie, which is free, and transpose the small targets",
    gain="963 to 792 ms a step (300M parameters, 8 MI355X, vocabulary of 128,256)",
)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    model, tokens, follow = gpt(context, (1024, 4, 1024, 16, 65536), (128, 2, 128, 4, 3072))
    follow, criterion = follow.t().contiguous(), TokenLoss()

    def loss() -> torch.Tensor:
        logits = model(tokens)  # what follows takes them with the other dimension first
        if fixed:
            return criterion(logits, follow.t())
        return criterion(logits.transpose(0, 1), follow)

    return stepping(model, loss), {"": model, "loss": criterion}
