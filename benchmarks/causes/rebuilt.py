"""Published bottlenecks, rebuilt before and after their fix: does a report name them, and let go?

Each case is written here, after what its author says was slow, what was changed and what that
gained. Some changes gained nothing: for these no rule may fire that promises it. A case says at
which path the cause is and which rules name it. ``python -m benchmarks causes published`` runs each
variant without the profiler, in turns, and then profiles both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.case import Built, Context, built, settings
from benchmarks.measuring import interleaved
from benchmarks.models import Layer, Mlp

Variant = Callable[[Context, bool], Built]


@dataclass(frozen=True)
class Published:
    """A bottleneck that somebody published.

    Attributes:
        build: makes the step, as it was, or fixed.
        source: where it is published.
        gain: what its author gained.
        rules: those that name the cause; for a change without a gain, those that must be silent.
        at: a pattern of the path of the cause.
        nothing: whether the change gained nothing.
        gpu: whether its figures mean something on a GPU only.
    """

    build: Variant
    source: str
    gain: str
    rules: tuple[str, ...]
    at: str
    nothing: bool
    gpu: bool

    @property
    def about(self) -> str:
        """What is slow."""
        return (self.build.__doc__ or "").strip().partition("\n")[0]


PUBLISHED: dict[str, Published] = {}


def published(
    source: str, gain: str, *rules: str, at: str = "*", nothing: bool = False, gpu: bool = False
) -> Callable[[Variant], Variant]:
    """Register a case; the arguments are the fields of ``Published``."""

    def register(build: Variant) -> Variant:
        PUBLISHED[build.__name__] = Published(build, source, gain, rules, at, nothing, gpu)
        return build

    return register


def run(names: Sequence[str], context: Context, rounds: int = 5) -> list[dict[str, Any]]:
    """Run cases before and after their fix, and say what the reports say."""
    rows = []
    for name in names:
        case = PUBLISHED[name]
        settings()
        variants = {key: case.build(context, key == "after") for key in ("before", "after")}
        steps = [variant.step for variant in variants.values()]
        before, after = interleaved(steps, context.device, rounds=rounds, inner=1, warmup=2)
        found = {key: _found(variant) for key, variant in variants.items()}
        named = [rule for rule in case.rules if rule in found["before"]]
        places = [found["before"][rule][0] for rule in named]
        rows.append(
            {
                "case": name,
                "source": case.source,
                "nothing": case.nothing,
                "gpu": case.gpu,
                "before_ms": round(median(before), 3),
                "after_ms": round(median(after), 3),
                "named": named,
                "placed": any(fnmatchcase(place, case.at) for place in places),
                "left": [rule for rule in case.rules if rule in found["after"]],
                "found": found,
            }
        )
    return rows


def _found(variant: Built) -> dict[str, tuple[str, float]]:
    """The rules that fire, each with its first place and its share of the step."""
    import backspot

    modules = {path: module for module, path in variant.modules}
    report = backspot.profile(variant.step, modules, steps=6, warmup=1, unprofiled=4)
    return {one.rule: (one.path, one.wall_ns / report.step_ns) for one in report.findings}


# What the cases share -----------------------------------------------------------------------------


def _trained(context: Context, model: nn.Module, *shape: int) -> Built:
    model = model.to(context.device)
    x = context.randn(*shape)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    return built(context, model, lambda: model(x).float().square().mean(), optimizer=sgd)


class _Pre(nn.Module):
    """A norm, a layer of features and what is added to."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = norm, Mlp(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def _sizes(context: Context, full: tuple[int, ...], small: tuple[int, ...]) -> tuple[int, ...]:
    return full if context.device != "cpu" and not context.small else small


# The cases ----------------------------------------------------------------------------------------


class _RmsNorm(nn.Module):
    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.weight, self.fused = nn.Parameter(torch.zeros(width)), fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused and x.is_cuda:
            return functional.rms_norm(x, x.shape[-1:], 1 + self.weight)
        if self.fused:  # rms_norm is no single operator on a CPU; this one has as much to do
            return functional.layer_norm(x, x.shape[-1:], 1 + self.weight)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


@published(
    "huggingface/transformers#48915", "0.605 to 0.486 s a step", "pointwise-chain", at="*.norm"
)
def norm_in_fp32(context: Context, fixed: bool) -> Built:
    """RMSNorm in fp32 as separate element-wise kernels, in every layer."""
    batch, length, width = _sizes(context, (32, 1024, 2048), (8, 128, 256))
    model = nn.Sequential(*(_Pre(_RmsNorm(width, fixed), width) for _ in range(4)))
    return _trained(context, model, batch, length, width)


class _Shared(nn.Module):
    """Attention whose heads share keys and values."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.heads, self.how = width // 32, how
        self.q, self.kv, self.out = (nn.Linear(width, n) for n in (width, 64, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, 32)).transpose(1, 2)
        k, v = self.kv(x)[:, None].chunk(2, -1)
        if self.how == "repeat":
            k, v = (one.repeat(1, self.heads, 1, 1) for one in (k, v))
        else:
            k, v = (one.expand(-1, self.heads, -1, -1) for one in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


@published(
    "mosaicml/llm-foundry#628", "less memory and more of the peak", "repeated-tensor", at="*.mlp"
)
def keys_by_repeat(context: Context, fixed: bool) -> Built:
    """Keys and values that heads share are repeated for each head."""
    batch, length, width = _sizes(context, (32, 1024, 1024), (8, 128, 256))
    blocks = [_Pre(nn.LayerNorm(width), width) for _ in range(3)]
    for block in blocks:
        block.mlp = _Shared(width, "expand" if fixed else "repeat")
    return _trained(context, nn.Sequential(*blocks), batch, length, width)


def _scanned(x: torch.Tensor, how: str) -> torch.Tensor:
    keep = 0.95
    if how == "product":
        place = torch.arange(x.shape[1], device=x.device)
        return (keep ** (place[:, None] - place).clamp(min=0)).tril() @ x
    if how == "doubling":
        reach = 1
        while reach < x.shape[1]:
            x = torch.cat([x[:, :reach], x[:, reach:] + keep**reach * x[:, :-reach]], 1)
            reach *= 2
        return x
    state, rows = torch.zeros_like(x[:, 0]), []
    for each in x.unbind(1):
        state = keep * state + each
        rows.append(state)
    return torch.stack(rows, 1)


def _scan(context: Context, how: str, *sizes: int) -> Built:
    width = sizes[-1]
    model = nn.Sequential(nn.Linear(width, width), Layer(lambda x: _scanned(x, how)))
    return _trained(context, model.append(Mlp(width, 2 * width)), *sizes)


@published(
    "johnma2006/mamba-minimal#18", "about 14 times as fast (A30, inference)",
    "operator-loop", "launch-bound", at="1",
)  # fmt: skip
def scan_by_positions(context: Context, fixed: bool) -> Built:
    """A selective scan as a Python loop over positions."""
    sizes = _sizes(context, (8, 1024, 512), (4, 128, 64))
    return _scan(context, "product" if fixed else "loop", *sizes)


@published(
    "alxndrTL/mamba.py#57", "none on a CPU: 10 s by a parallel scan, 2 s by the loop",
    "operator-loop", nothing=True,
)  # fmt: skip
def scan_of_wide_states(context: Context, fixed: bool) -> Built:
    """A loop whose every turn has much to compute."""
    sizes = _sizes(context, (512, 64, 16384), (512, 33, 128))
    return _scan(context, "doubling" if fixed else "loop", *sizes)


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, asks: bool) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.asks = asks
        return a @ b

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        wanted = [not ctx.asks or need for need in ctx.needs_input_grad]
        to_a = gradient @ b.mT if wanted[0] else None
        return to_a, a.mT @ gradient if wanted[1] else None, None


@published("cai4cai/torchsparsegradutils#31", "not measured", "unread-gradient", at="1")
def gradient_of_a_constant(context: Context, fixed: bool) -> Built:
    """A Function computes the gradients of both of its matrices, and one is a constant."""
    batch, width = _sizes(context, (8192, 2048), (256, 256))
    table = context.randn(batch, batch) / batch
    model = nn.Sequential(nn.Linear(width, width), Layer(lambda x: _Solve.apply(table, x, fixed)))
    return _trained(context, model.append(nn.Linear(width, width)), batch, width)


class _Turned(nn.Module):
    """LayerNorm over the channels of an image."""

    def __init__(self, width: int, copies: bool) -> None:
        super().__init__()
        self.norm, self.copies = nn.LayerNorm(width), copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.permute(0, 2, 3, 1)
        if not self.copies:
            return self.norm(y).permute(0, 3, 1, 2)
        y = functional.layer_norm(y.contiguous(), y.shape[-1:], self.norm.weight, self.norm.bias)
        return y.permute(0, 3, 1, 2).contiguous()


@published(
    "pytorch/pytorch#76012", "the norm itself is fast, the permutes around it are not",
    "layout-copies", at="*.0",
)  # fmt: skip
def norm_of_images(context: Context, fixed: bool) -> Built:
    """Images are copied into another layout for a norm, and back."""
    batch, width, side = _sizes(context, (64, 192, 56), (8, 64, 48))
    blocks = (nn.Sequential(_Turned(width, not fixed), nn.GELU()) for _ in range(4))
    model = nn.Sequential(*blocks, nn.Conv2d(width, 8, 1))
    made = _trained(context, model, batch, width, side, side)
    if fixed:
        model.to(memory_format=torch.channels_last)
    return made


@published(
    "pytorch/pytorch#18631", "3-D depthwise backward ten times a dense forward",
    "slow-convolution", "backward-ratio", at="1", gpu=True,
)  # fmt: skip
def separable_volume(context: Context, fixed: bool) -> Built:
    """A volume is filtered channel by channel."""
    batch, width, side = _sizes(context, (8, 64, 48), (1, 8, 12))
    middle = nn.Conv3d(width, width, 3, padding=1, groups=1 if fixed else width)
    model = nn.Sequential(nn.Conv3d(2, width, 3, padding=1), middle, nn.ReLU())
    return _trained(context, model.append(nn.Conv3d(width, 4, 1)), batch, 2, side, side, side)


@published(
    "pytorch/pytorch#64977", "the backward grows with the image, and not with what is sampled",
    "atomic-additions", "backward-ratio", at="1", gpu=True,
)  # fmt: skip
def sampled_image(context: Context, fixed: bool) -> Built:
    """A few points are sampled from large images, whose gradient is as large."""
    batch, side = _sizes(context, (16, 1024), (2, 128))
    grid = (context.randn(batch, 32, 32, 2) / 3).clamp(-1, 1)

    def sample(x: torch.Tensor) -> torch.Tensor:
        maps = x.detach() if fixed else x
        return functional.grid_sample(maps, grid, align_corners=False)

    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Layer(sample), nn.Conv2d(16, 8, 1))
    return _trained(context, model, batch, 3, side, side)


@published(
    "kijai/ComfyUI-WanVideoWrapper#642", "2:06 to 2:04 minutes; none once compiled",
    "pointwise-chain", nothing=True,
)  # fmt: skip
def norm_beside_products(context: Context, fixed: bool) -> Built:
    """A written-out RMSNorm beside far larger products."""
    batch, length, width = _sizes(context, (4, 512, 4096), (4, 32, 512))
    layers = nn.Sequential(*(Mlp(width, 4 * width) for _ in range(3)))
    model = nn.Sequential(_RmsNorm(width, fixed), layers)
    return _trained(context, model, batch, length, width)


@published(
    "facebookresearch/sapiens2#3", "none in fp32, where the fused kernels refuse shared heads",
    "repeated-tensor", nothing=True,
)  # fmt: skip
def heads_by_expand(context: Context, fixed: bool) -> Built:
    """Keys that are expanded, and not repeated, in fp32."""
    batch, length, width = _sizes(context, (16, 512, 1024), (8, 96, 256))
    block = _Pre(nn.LayerNorm(width), width)
    block.mlp = _Shared(width, "expand")
    return _trained(context, nn.Sequential(block, Mlp(width, 2 * width)), batch, length, width)
