"""The same models well done: the rule that a control names must not fire."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.case import Built, Context, adamw, control, pinned
from benchmarks.causes.cases.data import Pictures, loaded, moved, raw
from benchmarks.causes.cases.indexing import drop_gather, pick
from benchmarks.causes.cases.kernels import with_weights
from benchmarks.causes.training import (
    put,
    put_each,
    train_detector,
    train_gpt,
    train_recommender,
    train_resnet,
    train_unet,
    train_vit,
    train_wide,
)
from benchmarks.models import Layer, detector, gpt, recommender, resnet, unet, vit, wide

_AUTOCAST = {"casts": "autocast runs LayerNorm in fp32 and casts for each layer after it"}


@control("launch-bound")
def plain_vit(context: Context) -> Built:
    """A ViT with bf16 weights."""
    return train_vit(context, vit(context))


@control("no-tensor-cores", _AUTOCAST)
def autocast_vit(context: Context) -> Built:
    """A ViT in fp32 under bf16 autocast."""
    model = vit(context, dtype=torch.float32)
    return train_vit(context, model, dtype=torch.float32, autocast=True)


@control("layout-copies")
def plain_resnet(context: Context) -> Built:
    """A ResNet under bf16 autocast in channels_last."""
    return train_resnet(context, resnet(context))


@control("attention-math")
def plain_gpt(context: Context) -> Built:
    """A GPT with bf16 weights and fused attention."""
    return train_gpt(context, gpt(context))


@control("recompute", _AUTOCAST)
def autocast_gpt(context: Context) -> Built:
    """A GPT in fp32 under bf16 autocast, nothing checkpointed."""
    return train_gpt(context, gpt(context, dtype=torch.float32), autocast=True)


@control("dense-embedding-gradient")
def plain_recommender(context: Context) -> Built:
    """Tables that are small."""
    return train_recommender(context, recommender(context))


@control("dense-embedding-gradient")
def sparse_recommender(context: Context) -> Built:
    """A table of twenty million rows with sparse gradients."""
    model = recommender(context, users=20_000_000)
    model.users.sparse = True
    return train_recommender(context, model, torch.optim.SGD(model.parameters(), lr=1e-3))


@control("backward-ratio")
def plain_unet(context: Context) -> Built:
    """A U-Net under bf16 autocast in channels_last."""
    return train_unet(context, unet(context))


@control("sorted-indexing")
def gather_detector(context: Context) -> Built:
    """The best places gathered, with no deterministic algorithms."""
    return train_detector(context, detector(context, Layer(pick)))


@control("sorted-indexing")
def gather_vit(context: Context) -> Built:
    """Patch dropout by gather, with no deterministic algorithms."""
    return train_vit(context, put(vit(context), tokens=Layer(drop_gather)), batch=320)


@control("deterministic-fill")
def unfilled_vit(context: Context) -> Built:
    """A ViT in deterministic mode that leaves fresh memory as it is."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    return train_vit(context, vit(context))


@control("gradient-accumulation")
def plain_wide(context: Context) -> Built:
    """Large weights, one batch a step."""
    return train_wide(context, wide(context), tokens=4096)


@control("no-tensor-cores")
def tf32_wide(context: Context) -> Built:
    """Large fp32 weights with TF32 allowed."""
    torch.backends.cuda.matmul.allow_tf32 = True
    return train_wide(context, wide(context, dtype=torch.float32), tokens=4096)


@control("no-tensor-cores")
def tf32_resnet(context: Context) -> Built:
    """A ResNet in fp32 with TF32 allowed, as PyTorch has it."""
    return train_resnet(context, resnet(context), autocast=False, batch=128)


@control("host-waits")
def clipped_vit(context: Context) -> Built:
    """Gradients clipped in the backward without asking the host."""

    def clip(x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        x.register_hook(lambda g: g * (1 / g.norm()).clamp(max=1))
        return x

    return train_vit(context, put(vit(context), tokens=Layer(clip)))


@control("host-waits")
def read_loss_gpt(context: Context) -> Built:
    """The loss read each step, after the backward."""
    model = gpt(context)
    optimizer = adamw(context, model)
    loss = nn.CrossEntropyLoss()
    tokens = context.randint(model.vocabulary, context.pick(24, 2), model.wpe.num_embeddings)
    follow = tokens.roll(-1, 1).flatten()
    seen = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        value = loss(model(tokens).flatten(0, 1), follow)
        value.backward()
        optimizer.step()
        seen.append(value.item())

    return Built([(model, ""), (loss, "loss")], step)


@control("duplicate-indices")
def segments_gpt(context: Context) -> Built:
    """Four segment rows as a product with a one-hot matrix."""
    model = gpt(context)

    class Segments(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(4, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            which = torch.arange(x.shape[1], device=x.device) * 4 // x.shape[1]
            chosen = functional.one_hot(which.expand(len(x), -1), 4).to(x.dtype)
            return x + chosen @ self.table

    segments = Segments(model.width).to(context.device, torch.bfloat16)
    return train_gpt(context, put(model, extra=segments))


@control("attention-math", {"layout-copies": "it copies its projections, as it does"})
def multihead_vit(context: Context) -> Built:
    """nn.MultiheadAttention that is not asked for its weights."""
    model = vit(context)
    attention = with_weights(model.width, context, weights=False)
    return train_vit(context, put_each(model, model.blocks, attn=attention))


@control("optimizer-kernels")
def foreach_vit(context: Context) -> Built:
    """AdamW over all parameters at once, not fused."""
    model = vit(context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    return train_vit(context, model, optimizer=optimizer)


@control("optimizer-kernels")
def momentum_resnet(context: Context) -> Built:
    """SGD with momentum, over all parameters at once."""
    model = resnet(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    return train_resnet(context, model, optimizer=optimizer)


@control("zero-grad-fill")
def dropped_recommender(context: Context) -> Built:
    """Gradients dropped before the forward."""
    return train_recommender(context, recommender(context, users=20_000))


@control("unused-gradient")
def frozen_resnet(context: Context) -> Built:
    """A backbone that is frozen as it should be, but for its last layer."""
    model = resnet(context)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("layer4", "fc")))
    trained = nn.ModuleList([model.layer4, model.fc])
    return train_resnet(context, model, batch=512, optimizer=adamw(context, trained))


@control("pageable-copy")
def pinned_vit(context: Context) -> Built:
    """Bytes from pinned memory, cast on the GPU."""
    source = moved(context, [pinned(context, raw(context, 192, 224))], torch.bfloat16)
    return train_vit(context, vit(context), source)


@control("host-to-device-volume")
def bytes_resnet(context: Context) -> Built:
    """Bytes from pinned memory, for convolutions."""
    source = moved(context, [pinned(context, raw(context, 256, 224))], torch.float32)
    return train_resnet(context, resnet(context), source)


@control("waiting-for-data")
def workers_vit(context: Context) -> Built:
    """Workers that are ahead."""
    pictures = Pictures(context, 192, 0.01)
    source, close = loaded(context, pictures, torch.bfloat16, num_workers=3, prefetch_factor=3)
    return train_vit(context, vit(context), source, close=close)


@control("device-copies")
def scalars_unet(context: Context) -> Built:
    """A scalar brought to the host at the end of each step."""
    model = unet(context)
    built = train_unet(context, model)
    inner, seen = built.step, []

    def step() -> None:
        inner()
        seen.append(float(next(model.out.parameters()).sum()))

    return Built(built.modules, step)


@control("cpu-operators")
def numbers_vit(context: Context) -> Built:
    """Schedules computed on the host: a few scalars a step."""
    scheduled = Layer(lambda x: x * float(1 - torch.linspace(0, 1, 8).square().mean() * 1e-6))
    return train_vit(context, put(vit(context), tokens=scheduled))


@control("small-batch")
def deep_vit(context: Context) -> Built:
    """A deeper ViT, well filled."""
    return train_vit(context, vit(context, depth=6), batch=256)


@control("casts")
def clean_mixer(context: Context) -> Built:
    """Convolutions in a transformer's place: bf16 weights, no casts."""
    model = vit(context)

    class Mixing(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.gate = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gate(x) * x.mean(1, keepdim=True)

    def mixing(_: nn.Module) -> nn.Module:
        return Mixing(model.width).to(context.device, torch.bfloat16)

    return train_vit(context, put_each(model, model.blocks, attn=mixing))
