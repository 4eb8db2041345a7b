"""RMS norms written out as a chain of element-wise kernels in fp32."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published import Models, Published, Step
from benchmarks.causes.published.parts import TokenLoss, half, sized, stepping
from benchmarks.models import Context, Gpt, made

CASE = Published(
    source="huggingface/transformers#48915",
    title="RMS norms cast to fp32 and run six element-wise kernels forward, about ten backward",
    cause=("rms_norm", "rmsnorm", "element-wise", "elementwise", "pointwise", "torch.compile"),
    place=("h.*.norm*", "ln_f"),
    fix="One fused kernel each way (theirs in Triton; here functional.rms_norm)",
    gain="0.605 to 0.486 s a step on 8 B200",
    device="cuda",
)


class WrittenOutNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return wide.to(x.dtype) * self.weight


class FusedNorm(WrittenOutNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, 1e-6)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 2048, 128, 32), sized(context, 6, 3, 1)
    length, batch = sized(context, 1024, 128, 8), sized(context, 8, 4, 2)
    norm = FusedNorm if fixed else WrittenOutNorm

    def make() -> Gpt:
        model = Gpt(width, depth, length, 8192 if width > 1000 else 64)
        model.ln_f = norm(width)
        for block in model.h:
            block.norm1, block.norm2 = norm(width), norm(width)
        return model

    model = made(context, make).to(half(context))
    tokens, follow = (context.randint(model.vocabulary, batch, length) for _ in range(2))
    criterion = TokenLoss()
    return stepping(model, lambda: criterion(model(tokens), follow)), {"": model, "loss": criterion}
