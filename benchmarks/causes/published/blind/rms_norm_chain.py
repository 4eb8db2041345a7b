"""RMS norms cast to fp32 and run six element-wise kernels forward, about ten backward."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, gpt, learning
from benchmarks.models import Context, Gpt

CASE = Published(
    source="huggingface/transformers#48915",
    cause=("rms_norm", "rmsnorm", "element-wise", "elementwise", "pointwise", "torch.compile"),
    place=("h.*.norm*", "ln_f"),
    fix="One fused kernel each way (theirs in Triton; here nn.functional.rms_norm)",
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
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, 1e-6)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    norm = FusedNorm if fixed else WrittenOutNorm

    def alter(model: Gpt) -> None:
        model.ln_f = norm(model.width)
        for block in model.h:
            block.norm1, block.norm2 = norm(model.width), norm(model.width)

    return learning(*gpt(context, (2048, 6, 1024, 8, 8192), (128, 3, 128, 4, 512), alter))
