"""Causes in the kernels that run: casts, layouts, no tensor cores, attention on the math path."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.case import Built, Context, built, plant
from benchmarks.causes.training import (
    put_each,
    train_gpt,
    train_recommender,
    train_resnet,
    train_unet,
    train_vit,
)
from benchmarks.models import (
    Around,
    Attention,
    DiffusionUnet,
    Layer,
    MathAttention,
    WrittenOutAttention,
    gpt,
    made,
    recommender,
    resnet,
    unet,
    vit,
    with_instance_norms,
)

_WRITTEN_OUT = {
    "casts": "its softmax runs in fp32 between bf16 products",
    "layout-copies": "heads are made contiguous for the batched products",
}
_FP32 = {"casts": "into fp32 and back again at its border"}


# casts --------------------------------------------------------------------------------------------


class InFp32(nn.Module):
    """What it holds computes in fp32, whatever is around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.inner(x.float()).to(x.dtype)


@plant("casts", ["blocks.*.mlp.act", "blocks.*.mlp.act.inner"])
def casts_gelu_vit(context: Context) -> Built:
    """GELU in fp32 between bf16 layers, in every block."""
    model = vit(context)
    for block in model.blocks:
        block.mlp.act = InFp32(nn.GELU())
    return train_vit(context, model)


@plant("casts", ["*.bn1", "*.bn2", "bn1", "*.bn1.inner", "*.bn2.inner", "bn1.inner"])
def casts_norm_resnet(context: Context) -> Built:
    """Every BatchNorm in fp32."""
    model = resnet(context)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d) and name in ("bn1", "bn2"):
                setattr(module, name, InFp32(child))
    return train_resnet(context, model)


@plant("casts", ["skip.*"])
def casts_skip_unet(context: Context) -> Built:
    """Skip connections that go through fp32 and back, twice."""

    def through(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x.float().to(torch.bfloat16)
        return x

    model = unet(context)
    for index in range(3):
        model.skip[index] = Layer(through)
    return train_unet(context, model)


class _RmsNorm(nn.Module):
    """As many language models have it: computed in fp32, written out."""

    def __init__(self, width: int, context: Context) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=context.device, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


@plant(
    "casts",
    ["h.*.norm1", "h.*.norm2", "ln_f"],
    {"backward-ratio": "a norm written out runs many elementwise kernels in its backward"},
)
def casts_rms_norm_gpt(context: Context) -> Built:
    """RMSNorm written out in fp32, before every layer."""
    model = gpt(context)
    for block in model.h:
        block.norm1 = _RmsNorm(model.width, context)
        block.norm2 = _RmsNorm(model.width, context)
    return train_gpt(context, model)


# layout-copies ------------------------------------------------------------------------------------


class _Contiguous(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x.contiguous(memory_format=torch.contiguous_format))
        return y.contiguous(memory_format=torch.channels_last)


@plant("layout-copies", ["layer1", "layer2", "layer1.*", "layer2.*", "maxpool"])
def layout_back_and_forth_resnet(context: Context) -> Built:
    """Two layers of a channels_last model that make their tensors NCHW."""
    model = resnet(context)
    model.layer1 = _Contiguous(model.layer1)
    model.layer2 = _Contiguous(model.layer2)
    return train_resnet(context, model)


@plant("layout-copies", None)
def layout_nchw_unet(context: Context) -> Built:
    """A U-Net in NCHW under bf16: cuDNN turns each tensor around and back."""
    model = unet(context).to(memory_format=torch.contiguous_format)
    side = context.pick(256, 32)
    return train_unet(context, model, context.randn(context.pick(32, 2), 3, side, side))


@plant("layout-copies", None, {"casts": "autocast computes group norms in fp32"})
def layout_group_norm_unet(context: Context) -> Built:
    """A U-Net with group norms in NCHW: on a GPU they know no other layout."""
    side, batch = context.pick(64, 16), context.pick(64, 2)
    model = made(context, lambda: DiffusionUnet(context.pick(128, 16)))
    noise = context.randn(batch, 3, side, side)
    when = context.randint(1000, batch)
    return built(context, model, lambda: model(noise, when).square().mean(), autocast=True)


@plant("layout-copies", None)
def layout_instance_norm_unet(context: Context) -> Built:
    """A U-Net with instance norms in NCHW, as networks for medical images have them."""
    model = with_instance_norms(unet(context)).to(memory_format=torch.contiguous_format)
    side = context.pick(256, 32)
    return train_unet(context, model, context.randn(context.pick(32, 2), 3, side, side))


class _Mixing(nn.Module):
    """Mixes tokens by a Linear over the transposed sequence."""

    def __init__(self, tokens: int, context: Context) -> None:
        super().__init__()
        self.fc1 = nn.Linear(tokens, 2 * tokens, device=context.device, dtype=torch.bfloat16)
        self.fc2 = nn.Linear(2 * tokens, tokens, device=context.device, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(1, 2).contiguous()
        y = self.fc2(functional.gelu(self.fc1(y)))
        return y.transpose(1, 2).contiguous()


@plant("layout-copies", ["blocks.*.attn"])
def layout_transposes_mixer(context: Context) -> Built:
    """An MLP-Mixer that makes each transposed sequence contiguous."""
    model = vit(context)
    for block in model.blocks:
        block.attn = _Mixing(model.pos.shape[1], context)
    return train_vit(context, model)


class _Windows(Attention):
    """Attention in windows: cut out and put back by permuting copies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        side = int(length**0.5)
        cut = side // 2
        shape = (batch, 2, cut, 2, cut, width)
        y = x.view(shape).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, cut * cut, width)
        y = super().forward(y)
        y = y.view(batch, 2, 2, cut, cut, width).permute(0, 1, 3, 2, 4, 5).contiguous()
        return y.view(batch, length, width)


@plant("layout-copies", ["blocks.*.attn"])
def layout_windows_vit(context: Context) -> Built:
    """Windows cut out and put back by copies, in every block."""
    model = vit(context)
    for block in model.blocks:
        block.attn.__class__ = _Windows
    return train_vit(context, model)


# deterministic-fill -------------------------------------------------------------------------------

_DETERMINISTIC = {"sorted-indexing": "so it does with gradients of indexing, which are then sorted"}


@plant("deterministic-fill", None, _DETERMINISTIC)
def fill_vit(context: Context) -> Built:
    """A ViT in deterministic mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    return train_vit(context, vit(context))


@plant("deterministic-fill", None, _DETERMINISTIC)
def fill_gpt(context: Context) -> Built:
    """A GPT in deterministic mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    return train_gpt(context, gpt(context))


@plant("deterministic-fill", None, _DETERMINISTIC)
def fill_unet(context: Context) -> Built:
    """A U-Net in deterministic mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    return train_unet(context, unet(context))


@plant("deterministic-fill", None, _DETERMINISTIC)
def fill_resnet(context: Context) -> Built:
    """A ResNet in deterministic mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    return train_resnet(context, resnet(context))


# no-tensor-cores ----------------------------------------------------------------------------------


@plant("no-tensor-cores", ["blocks.1.inner.*", "blocks.1.inner.*.*"], _FP32)
def fp32_block_vit(context: Context) -> Built:
    """One block of four in fp32."""
    model = vit(context)
    model.blocks[1] = InFp32(model.blocks[1].float())
    return train_vit(context, model, batch=96)


@plant("no-tensor-cores", ["lm_head", "lm_head.inner"], _FP32)
def fp32_head_gpt(context: Context) -> Built:
    """The language model's head in fp32."""
    model = gpt(context)
    model.lm_head = InFp32(model.lm_head.float())
    return train_gpt(context, model, batch=16)


@plant(
    "no-tensor-cores",
    ["*conv*", "layer*", "layer*.*"],
    {"layout-copies": "cuDNN converts for its fp32 kernels, channels_last or not"},
)
def fp32_resnet(context: Context) -> Built:
    """A ResNet in fp32 with TF32 switched off."""
    torch.backends.cudnn.allow_tf32 = False
    return train_resnet(context, resnet(context), autocast=False, batch=128)


@plant("no-tensor-cores", ["lstm", "tower.*", "tower"])
def fp32_recommender(context: Context) -> Built:
    """An LSTM and its tower in fp32 with TF32 switched off."""
    torch.backends.cudnn.allow_tf32 = False
    model = recommender(context).float()
    return train_recommender(context, model)


@plant("no-tensor-cores", ["mid.inner", "mid.inner.*", "mid"], _FP32)
def fp32_middle_unet(context: Context) -> Built:
    """The U-Net's middle in fp32 with TF32 switched off."""
    torch.backends.cudnn.allow_tf32 = False
    model = unet(context)
    model.mid = InFp32(model.mid)
    return train_unet(context, model)


# attention-math -----------------------------------------------------------------------------------


@plant("attention-math", ["blocks.1.attn", "blocks.2.attn"], _WRITTEN_OUT)
def math_two_blocks_vit(context: Context) -> Built:
    """Attention written out in two blocks of four."""
    model = vit(context)
    for index in (1, min(2, len(model.blocks) - 1)):
        model.blocks[index].attn.__class__ = WrittenOutAttention
    return train_vit(context, model)


@plant(
    "attention-math",
    ["h.*.attn"],
    {**_WRITTEN_OUT, "no-tensor-cores": "the math path multiplies in fp32"},
)
def math_backend_gpt(context: Context) -> Built:
    """scaled_dot_product_attention held on the math backend."""
    model = gpt(context)
    for block in model.h:
        block.attn.__class__ = MathAttention
    return train_gpt(context, model, batch=12)


def with_weights(
    width: int, context: Context, *, weights: bool
) -> Callable[[nn.Module], nn.Module]:
    """``nn.MultiheadAttention`` in another attention's place, asked for its weights or not."""
    where = {"device": context.device, "dtype": torch.bfloat16}

    def attention(_: nn.Module) -> nn.Module:
        inner = nn.MultiheadAttention(width, max(1, width // 64), batch_first=True, **where)
        return Around(inner, lambda inner, x: inner(x, x, x, need_weights=weights)[0])

    return attention


@plant("attention-math", ["blocks.*.attn.inner", "blocks.*.attn"], _WRITTEN_OUT)
def math_weights_vit(context: Context) -> Built:
    """nn.MultiheadAttention that is asked for weights which nobody reads."""
    model = vit(context)
    attention = with_weights(model.width, context, weights=True)
    return train_vit(context, put_each(model, model.blocks, attn=attention))


class _Biased(Attention):
    """Einsums and a bias that is learnt."""

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhqk,bhkd->bhqd", (scores + self.bias).softmax(-1), v)


@plant("attention-math", ["blocks.*.attn"], _WRITTEN_OUT)
def math_biased_vit(context: Context) -> Built:
    """Attention by einsum with a learnt bias, in every block."""
    model = vit(context)
    for block in model.blocks:
        attention, length = block.attn, model.pos.shape[1]
        attention.__class__ = _Biased
        bias = torch.zeros(attention.heads, length, length, device=context.device)
        attention.bias = nn.Parameter(bias.to(torch.bfloat16))
    return train_vit(context, model)
