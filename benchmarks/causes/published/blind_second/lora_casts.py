"""LoRA in float32 in a model in bfloat16: inputs and outputs of each layer cast there and back."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, adamw, gpt, learning
from benchmarks.models import Context, Gpt

CASE = Published(
    source="axolotl-ai-cloud/axolotl#3732",
    cause=("cast", "convert", "float32", "dtype", "precision"),
    place=(
        "h.*.attn.qkv.**",
        "h.*.attn.proj.**",
        "h.*.mlp.fc1.**",
        "h.*.mlp.fc2.**",
    ),
    fix="Cast the small weights, not the activations",
    gain="hundreds of MB of copies a step; a fifth of the memory in AgileRL/AgileRL#623",
    device="cuda",
)


class Lora(nn.Module):
    """A frozen layer, and a product of small matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int, fixed: bool) -> None:
        super().__init__()
        self.base, self.fixed = base, fixed
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        if self.fixed:
            low = nn.functional.linear(x, self.down.weight.to(x.dtype))
            return y + nn.functional.linear(low, self.up.weight.to(x.dtype)) * 2
        return (y + self.up(self.down(x.to(self.down.weight.dtype))) * 2).to(y.dtype)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    def alter(model: Gpt) -> None:
        model.requires_grad_(False)
        for block in model.h:
            for part, name in ((block.attn, "qkv"), (block.attn, "proj")):
                setattr(part, name, Lora(getattr(part, name), 16, fixed))
            for name in ("fc1", "fc2"):
                setattr(block.mlp, name, Lora(getattr(block.mlp, name), 16, fixed))

    sizes = (1536, 6, 1024, 8, 8192), (96, 3, 64, 4, 512)
    model, tokens, follow = gpt(context, *sizes, alter)
    for layer in model.modules():
        if isinstance(layer, Lora):
            layer.down.float()
            layer.up.float()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return learning(model, tokens, follow, optimizer=adamw(trained))
