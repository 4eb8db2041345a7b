"""The models whose traces ``record_fixtures.py`` records, on one device without compilation.

Each case returns a ``Recipe``: what to instrument, a training step, and what is known about the
trace by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["CASES", "Case", "Context", "Mlp", "Recipe", "case", "sgd_step"]


@dataclass
class Context:
    """Where a case runs."""

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

    def bf16(self) -> Any:  # noqa: ANN401 - a context manager
        return torch.autocast(self.device.partition(":")[0], torch.bfloat16)


@dataclass
class Recipe:
    """One training step and what is known of its trace.

    Attributes:
        modules: what to instrument, with names.
        step: one training step.
        expect: known by construction; goes to the file of expectations.
        how: ``plain``, ``scheduled`` (two cycles, written by ``tensorboard_trace_handler``), or
            ``stack`` (``with_stack``, not instrumented).
        warmup: steps before the profiler starts.
    """

    modules: list[tuple[nn.Module, str]]
    step: Callable[[], None]
    expect: dict[str, Any] = field(default_factory=dict)
    how: str = "plain"
    warmup: int = 4


@dataclass(frozen=True)
class Case:
    """A recipe's maker, what it needs (``cpu``, ``cuda``, ``2 gpus``, ``2 ranks``)."""

    build: Callable[[Context], Recipe]
    needs: str
    shapes: bool


CASES: dict[str, Case] = {}
_Build = Callable[[Context], Recipe]


def case(needs: str = "cpu", *, shapes: bool = True) -> Callable[[_Build], _Build]:
    def register(build: _Build) -> _Build:
        CASES[build.__name__] = Case(build, needs, shapes)
        return build

    return register


def sgd_step(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
) -> Callable[[], None]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    return step


class Mlp(nn.Module):
    """Linear layers with residuals, called in order (``layers.0``, ``layers.1``)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return x


# Vision ------------------------------------------------------------------------------------------


def _vit(context: Context, **changes: Any) -> nn.Module:  # noqa: ANN401 - timm's arguments
    from timm.models.vision_transformer import VisionTransformer

    small = context.small
    size = {"img_size": 32 if small else 224, "patch_size": 8 if small else 16}
    shape = {"embed_dim": 48 if small else 768, "num_heads": 3 if small else 12}
    return VisionTransformer(**size, **shape, depth=3, num_classes=100, **changes)


def _vit_recipe(context: Context, model: nn.Module) -> Recipe:
    model.to(context.device).train()
    loss = nn.CrossEntropyLoss()
    images = context.randn(context.pick(128, 4), 3, *(2 * (context.pick(224, 32),)))
    labels = context.randint(100, len(images))

    def compute() -> torch.Tensor:
        with context.bf16():
            return loss(model(images), labels)

    return Recipe([(model, ""), (loss, "loss")], sgd_step(model, compute))


@case()
def vit_patch_drop(context: Context) -> Recipe:
    torch.use_deterministic_algorithms(True)
    recipe = _vit_recipe(context, _vit(context, patch_drop_rate=0.5))
    recipe.expect = {
        "owners": {"GatherBackward0": ["patch_drop"], "LogSoftmaxBackward0": ["loss"]},
        "node_counts": {"GatherBackward0": 2},
        "heaviest": ["patch_drop"],
        "sort": "gpu",
    }
    return recipe


@case()
def vit_index(context: Context) -> Recipe:
    """The same with the remedy: indexing in place of gather."""
    torch.use_deterministic_algorithms(True)

    class IndexDrop(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            prefix, patches = x[:, :1], x[:, 1:]
            batch, count = patches.shape[:2]
            order = torch.argsort(torch.randn(batch, count, device=x.device), dim=-1)
            kept = order[:, : count // 2]
            rows = torch.arange(batch, device=x.device)[:, None]
            return torch.cat((prefix, patches[rows, kept]), dim=1)

    model = _vit(context)
    model.patch_drop = IndexDrop()
    recipe = _vit_recipe(context, model)
    recipe.expect = {"owners": {"IndexBackward0": ["patch_drop"]}}
    return recipe


@case()
def resnet_channels_last(context: Context) -> Recipe:
    from torchvision.models import resnet18

    model = resnet18().to(context.device, memory_format=torch.channels_last).train()
    images = context.randn(context.pick(128, 2), 3, *(2 * (context.pick(224, 32),)))
    images = images.contiguous(memory_format=torch.channels_last)
    labels = context.randint(1000, len(images))

    def compute() -> torch.Tensor:
        with context.bf16():
            return functional.cross_entropy(model(images), labels)

    expect = {
        "owners": {
            "MaxPool2DWithIndicesBackward0": ["maxpool"],
            "AddmmBackward0": ["fc"],
            "NllLossBackward0": ["(outside model)"],
        },
        "node_counts": {"ConvolutionBackward0": 40, "MaxPool2DWithIndicesBackward0": 2},
    }
    return Recipe([(model, "")], sgd_step(model, compute), expect)


@case()
def fp32_convnet(context: Context) -> Recipe:
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    width = context.pick(256, 16)
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(3, width, 4, stride=4))
    model.add_module("heavy", nn.Conv2d(width, width, 5, padding=2))
    model.add_module("norm", nn.BatchNorm2d(width))
    model.add_module("act", nn.ReLU(inplace=True))
    model.add_module("light", nn.Conv2d(width, width, 1))
    model.to(context.device).train()
    images = context.randn(context.pick(32, 2), 3, *(2 * (context.pick(128, 32),)))
    expect = {
        "heaviest": ["heavy"],
        "sort": "gpu",
        "node_counts": {"ConvolutionBackward0": 6},
        "owners": {"ReluBackward0": ["act"]},
    }
    return Recipe([(model, "")], sgd_step(model, lambda: model(images).square().mean()), expect)


# Language ----------------------------------------------------------------------------------------


def _gpt2(context: Context, *, reentrant: bool) -> Recipe:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_embd=context.pick(768, 48),
        n_head=context.pick(12, 3),
        vocab_size=context.pick(32000, 211),
        n_positions=context.pick(512, 32),
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).to(context.device).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    tokens = context.randint(config.vocab_size, context.pick(16, 2), config.n_positions)

    def compute() -> torch.Tensor:
        with context.bf16():
            return model(input_ids=tokens, labels=tokens).loss

    blocks = [f"transformer.h.{index}" for index in range(2)]
    expect = {
        "recompute_within": blocks,
        "owners": {"EmbeddingBackward0": ["transformer.wte", "transformer.wpe"]},
        "calls": dict.fromkeys(blocks, 2),
    }
    return Recipe([(model, "")], sgd_step(model, compute), expect)


@case()
def gpt2_checkpointed(context: Context) -> Recipe:
    return _gpt2(context, reentrant=False)


@case(shapes=False)
def gpt2_checkpointed_reentrant(context: Context) -> Recipe:
    recipe = _gpt2(context, reentrant=True)
    recipe.expect["nested_passes"] = True
    return recipe


@case()
def embedding_duplicates(context: Context) -> Recipe:
    rows, width = context.pick(50000, 100), context.pick(512, 16)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(rows, width)
            self.head = nn.Linear(width, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.tokens(x))

    model = Model().to(context.device)
    tokens = context.randint(4, context.pick(256, 4), context.pick(512, 8))
    expect = {
        "heaviest": ["tokens"],
        "sort": "gpu",
        "owners": {"EmbeddingBackward0": ["tokens"], "MeanBackward0": ["(outside model)"]},
    }
    return Recipe([(model, "")], sgd_step(model, lambda: model(tokens).square().mean()), expect)


@case()
def attention_math(context: Context) -> Recipe:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    width, heads = context.pick(512, 24), context.pick(8, 2)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, _ = x.shape
            q, k, v = self.qkv(x).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            with sdpa_kernel(SDPBackend.MATH):
                y = functional.scaled_dot_product_attention(q, k, v)
            return self.out(y.transpose(1, 2).reshape(batch, length, width))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.attention = Attention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.attention(self.norm(x))

    model = nn.Sequential(Block(), Block()).to(context.device)
    inputs = context.randn(context.pick(8, 2), context.pick(1024, 16), width)

    def compute() -> torch.Tensor:
        with context.bf16():
            return model(inputs).float().square().mean()

    attentions = ["0.attention", "1.attention"]
    expect = {
        "heaviest": attentions,
        "sort": "gpu",
        "owners": {"NativeLayerNormBackward0": ["0.norm", "1.norm"]},
    }
    return Recipe([(model, "")], sgd_step(model, compute), expect)
