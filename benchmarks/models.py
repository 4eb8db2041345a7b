"""The models of all benchmarks, each at the size of the run, and the training step around them.

The causes, the truth, the remedies and the overhead take their models from here. What
belongs to one case alone (a planted fault, say) stays with the case. Results that are committed
were measured with these sizes.

Own transformers hold bf16 weights, so that nothing is cast; convolutional models run under bf16
autocast in channels_last.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint


@dataclass
class Context:
    """Where a case runs, and at which size."""

    device: str
    small: bool
    rank: int = 0
    world: int = 1

    def pick(self, full: int, small: int) -> int:
        return small if self.small else full

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device)

    def randint(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, device=self.device)

    def bf16(self, enabled: bool = True) -> Any:
        device = self.device.partition(":")[0]
        return torch.autocast(device, torch.bfloat16) if enabled else nullcontext()


def training_step(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    around: Callable[[], Any] = nullcontext,
) -> Callable[[], None]:
    """Return a training step as it should be: gradients are dropped, not filled with zeros.

    Args:
        model: what is trained.
        loss: computes the loss.
        optimizer: default: plain SGD.
        around: gives the context in which ``loss`` runs (autocast).
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with around():
            value = loss()
        value.backward()
        optimizer.step()

    return step


# Parts -------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention by ``scaled_dot_product_attention``.

    Subclasses replace ``mix``.
    """

    def __init__(self, width: int, heads: int | None = None, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads or max(1, width // 64), causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, length, _ = x.shape
        return self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(*self.split(x))
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class WrittenOutAttention(Attention):
    """Attention as three operations."""

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        if self.causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


class MathAttention(Attention):
    """``scaled_dot_product_attention`` held on the math backend."""

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().mix(q, k, v)


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Checkpointed(nn.Module):
    """Runs the module that it holds again in the backward, unless it is not ``active``."""

    def __init__(self, inner: nn.Module, *, reentrant: bool = False, active: bool = True) -> None:
        super().__init__()
        self.inner, self.reentrant, self.active = inner, reentrant, active

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.active:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Layer(nn.Module):
    """A layer that is a function of its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class Around(nn.Module):
    """A layer that is a function of what it holds, and of its inputs."""

    def __init__(self, inner: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.inner, *inputs)


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Any, back: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return ctx.back(gradient, x), None, None


def custom(
    there: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function with a backward of its own, which takes the gradient and the input."""
    return lambda x: _Custom.apply(x, there, back)


class ResidualMlp(nn.Module):
    """Linear layers with residuals, called in order (``layers.0``, ``layers.1``)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return x


class TwoStreams(nn.Module):
    """Two branches, the second on a stream of its own; autograd uses the same streams."""

    def __init__(self, width: int, depth: int, device: str) -> None:
        super().__init__()
        self.main = ResidualMlp(width, depth)
        self.side = ResidualMlp(width, depth)
        self.stream = torch.cuda.Stream() if device.startswith("cuda") else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stream is None:
            return self.main(x) + self.side(x)
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            y = self.side(x)
        z = self.main(x)
        current.wait_stream(self.stream)
        y.record_stream(current)
        return z + y


# Own models --------------------------------------------------------------------------------------


class Vit(nn.Module):
    """``tokens`` is between the embedding and the blocks: a place to plant things."""

    def __init__(self, width: int, depth: int, side: int, patch: int) -> None:
        super().__init__()
        self.width = width
        self.patch_embed = nn.Conv2d(3, width, patch, stride=patch)
        self.pos = nn.Parameter(torch.zeros(1, (side // patch) ** 2, width))
        self.tokens: nn.Module = nn.Identity()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Gpt(nn.Module):
    def __init__(self, width: int, depth: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.width, self.vocabulary = width, vocabulary
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(length, width)
        self.extra: nn.Module = nn.Identity()
        self.h = nn.ModuleList(Block(width, causal=True) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head: nn.Module = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.extra(self.wte(tokens) + self.wpe(places))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Recommender(nn.Module):
    """A history of items through an LSTM and a tower."""

    def __init__(self, users: int, items: int, width: int, hidden: int) -> None:
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items: nn.Module = nn.Embedding(items, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.tower = Mlp(hidden, 4 * hidden)
        self.head = nn.Linear(hidden, 1)

    def forward(self, user: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        x = self.items(history) + self.users(user)[:, None]
        x, _ = self.lstm(x)
        return self.head(self.tower(x)).squeeze(-1)


class _Double(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class Unet(nn.Module):
    def __init__(self, width: int, classes: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [_Double(3, width), _Double(width, 2 * width), _Double(2 * width, 4 * width)]
        )
        self.mid: nn.Module = _Double(4 * width, 8 * width)
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(2 * width * n, width * n, 2, stride=2) for n in (4, 2, 1)
        )
        self.skip = nn.ModuleList(nn.Identity() for _ in range(3))
        self.up = nn.ModuleList(_Double(2 * width * n, width * n) for n in (4, 2, 1))
        self.out: nn.Module = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.mid(x)
        for grow, skip, up in zip(self.grow, self.skip, self.up, strict=True):
            x = up(torch.cat((grow(x), skip(kept.pop())), dim=1))
        return self.out(x)


def with_instance_norms(model: nn.Module) -> nn.Module:
    """Replace the batch norms of a model, as networks for medical images have it."""
    for part in [*model.modules()]:
        for name, child in part.named_children():
            if isinstance(child, nn.BatchNorm2d):
                norm = nn.InstanceNorm2d(child.num_features, affine=True)
                setattr(part, name, norm.to(child.weight.device))
    return model


class _Residual(nn.Module):
    """Two convolutions behind group norms, and the time step added between them."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(functional.silu(self.norm1(x)))
        y = y + self.time(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(functional.silu(self.norm2(y)))


class DiffusionUnet(nn.Module):
    """Predicts the noise in images at a time step; attention at the lowest resolution."""

    def __init__(self, width: int, levels: int = 3) -> None:
        super().__init__()
        time = 4 * width
        widths = [width * 2**level for level in range(levels)]
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            _Residual(inner, outer, time)
            for inner, outer in zip([width, *widths], widths, strict=False)
        )
        self.norm, self.attention = nn.LayerNorm(widths[-1]), Attention(widths[-1])
        self.up = nn.ModuleList(
            _Residual(below + beside, beside, time)
            for below, beside in zip([widths[-1], *widths[:0:-1]], widths[::-1], strict=False)
        )
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def blocks(self) -> list[nn.Module]:
        """The blocks that take the time step."""
        return [*self.down, *self.up]

    def forward(self, x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        half = self.first.out_channels // 2
        places = torch.exp(torch.arange(half, device=x.device) * (-9.2 / half))
        angles = when[:, None].float() * places
        time = self.time(torch.cat((angles.sin(), angles.cos()), 1))
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x, time)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(self.norm(tokens))
        x = tokens.transpose(1, 2).reshape(x.shape)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat((x, kept.pop()), 1), time)
        return self.last(x)


class Detector(nn.Module):
    """Convolutions, scores, and a head over what ``select`` takes from the best places."""

    def __init__(self, width: int, best: int, select: nn.Module) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width // 2, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(inplace=True),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        self.score = nn.Linear(width, 1)
        self.select = select
        self.head = Mlp(width, 8 * width)
        self.box = nn.Linear(width, 4)
        self.best = best

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.backbone(x).flatten(2).transpose(1, 2)
        score = self.score(places).squeeze(-1)
        values, chosen = score.topk(self.best, dim=1)
        picked = self.select(places, chosen) * values[..., None].sigmoid()
        return self.box(self.head(picked))


# At the size of the run --------------------------------------------------------------------------

_Model = TypeVar("_Model", bound=nn.Module)


def made(context: Context, make: Callable[[], _Model]) -> _Model:
    """Make a model on the device, in training mode."""
    with torch.device(context.device):
        return make().train()


def vit(context: Context, *, depth: int = 4, dtype: torch.dtype = torch.bfloat16) -> Vit:
    width, side, patch = (64, 32, 8) if context.small else (1024, 224, 16)
    model = made(context, lambda: Vit(width, context.pick(depth, 2), side, patch))
    return model.to(dtype=dtype, memory_format=torch.channels_last)


def gpt(context: Context, *, depth: int = 4, dtype: torch.dtype = torch.bfloat16) -> Gpt:
    width, length, words = (64, 32, 128) if context.small else (1024, 1024, 8192)
    return made(context, lambda: Gpt(width, context.pick(depth, 2), length, words)).to(dtype)


def recommender(context: Context, *, users: int = 100_000, items: int = 50_000) -> Recommender:
    sizes = (50, 60, 16, 32) if context.small else (users, items, 128, 1024)
    return made(context, lambda: Recommender(*sizes)).to(torch.bfloat16)


def unet(context: Context) -> Unet:
    model = made(context, lambda: Unet(context.pick(64, 8)))
    return model.to(memory_format=torch.channels_last)


def detector(context: Context, select: nn.Module, *, best: int = 1024) -> Detector:
    model = made(context, lambda: Detector(context.pick(256, 16), context.pick(best, 8), select))
    return model.to(memory_format=torch.channels_last)


def wide(context: Context, *, depth: int = 6, dtype: torch.dtype = torch.bfloat16) -> ResidualMlp:
    """Few tokens, large weights."""
    model = made(context, lambda: ResidualMlp(context.pick(8192, 64), context.pick(depth, 2)))
    return model.to(dtype)


# Of libraries ------------------------------------------------------------------------------------


def resnet(context: Context, layers: int = 18, classes: int = 1000) -> nn.Module:
    """Torchvision's ResNet in channels_last, in training mode."""
    import torchvision.models

    make = getattr(torchvision.models, f"resnet{layers}")
    model = made(context, lambda: make(num_classes=classes))
    return model.to(memory_format=torch.channels_last)


def timm_model(context: Context, name: str, **options: Any) -> nn.Module:
    """Timm's model of this name, in training mode; with two blocks if it is a small ViT."""
    import timm

    if context.small and "vit" in name:
        name, options = "vit_tiny_patch16_224", {**options, "img_size": 64, "depth": 2}
    if context.small and "swin" in name:
        options = {**options, "img_size": 64, "window_size": 2}
    return made(context, lambda: timm.create_model(name, **options))


def gpt2(context: Context, *, layers: int, words: int = 32000, length: int = 512) -> nn.Module:
    """The GPT-2 of transformers with random weights, in training mode."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=context.pick(768, 48),
        n_head=context.pick(12, 3),
        vocab_size=context.pick(words, 211),
        n_positions=context.pick(length, 32),
        use_cache=False,
    )
    return GPT2LMHeadModel(config).to(context.device).train()


def gpt2_loss(
    context: Context, model: nn.Module, batch: int, length: int = 512
) -> Callable[[], torch.Tensor]:
    """Return what computes the loss of one batch of random tokens under bf16 autocast."""
    shape = context.pick(batch, 2), context.pick(length, 32)
    tokens = context.randint(model.config.vocab_size, *shape)

    def loss() -> torch.Tensor:
        with context.bf16():
            return model(input_ids=tokens, labels=tokens).loss

    return loss
