"""Tables that each layer makes again, layers off their fast kernels, losses of many classes, DDP.

All of it is on a processor, too: ``record --device cpu``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.causes.case import Build, Built, Context, built, control, plant
from benchmarks.models import Layer

__all__: list[str] = []


def _register(
    register: Callable[[Build], Build], name: str, about: str, build: Callable[[Context], Built]
) -> None:
    def made(context: Context) -> Built:
        return build(context)

    made.__name__, made.__doc__ = name, about
    register(made)


def _trained(
    context: Context, model: nn.Module, *shape: int, dtype: torch.dtype = torch.float32
) -> Built:
    model = model.to(context.device, dtype)
    x = context.randn(*shape).to(dtype)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    return built(context, model, lambda: model(x).float().square().mean(), optimizer=sgd)


# repeated-work ------------------------------------------------------------------------------------


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary tables of the length of the input."""
    length, half = x.shape[1], x.shape[2] // 2
    rates = 1e4 ** (-torch.arange(0, half, device=x.device) / half)
    angles = torch.outer(torch.arange(length, device=x.device, dtype=torch.float32), rates)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1) + torch.cat((-sin, sin), -1)


def _causal(x: torch.Tensor) -> torch.Tensor:
    length = x.shape[1]
    past = torch.ones(length, length, device=x.device).tril() == 0
    return torch.zeros(length, length, device=x.device).masked_fill(past, -1e9)


def _slopes(x: torch.Tensor) -> torch.Tensor:
    """Distances of positions, as ALiBi has them."""
    place = torch.arange(x.shape[1], device=x.device)
    return (place[None] - place[:, None]).abs().neg().float() * 0.5


def _buckets(x: torch.Tensor) -> torch.Tensor:
    """Logarithmic distances of positions, as T5 has them."""
    place = torch.arange(x.shape[1], device=x.device)
    far = (place[None] - place[:, None]).abs().clamp(1)
    return torch.where(far < 8, far.float(), 8 + far.float().log())


class _Adds(nn.Module):
    """A layer that adds a table, or weighs by it; makes it unless it is given."""

    def __init__(self, width: int, table: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table, self.linear = table, nn.Linear(width, width)

    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        table = self.table(x) if table is None else table
        return self.linear(x + table if table.shape[-1] == x.shape[-1] else table.tanh() @ x)


class _Stack(nn.Module):
    def __init__(self, width: int, table: Callable[..., torch.Tensor], *, once: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Adds(width, table) for _ in range(8))
        self.once = once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.layers[0].table(x) if self.once else None
        for layer in self.layers:
            x = x + layer(x, table)
        return x


def _stack(context: Context, table: Callable[..., torch.Tensor], *, once: bool = False) -> Built:
    length = context.pick(384, 32)
    return _trained(context, _Stack(64, table, once=once), 2, length, 64)


for _name, _about, _table in (
    ("again_rotary", "Each layer makes the sines of rotary positions.", _turned),
    ("again_causal", "Each layer makes a causal mask.", _causal),
    ("again_slopes", "Each layer makes the distances of all positions.", _slopes),
    ("again_buckets", "Each layer makes logarithmic distances.", _buckets),
):
    _register(
        plant("repeated-work", ("layers.*",), gpus=0),
        _name,
        _about,
        lambda context, table=_table: _stack(context, table),
    )
_register(
    control("repeated-work", gpus=0),
    "once_rotary",
    "The sines are made once and passed on.",
    lambda context: _stack(context, _turned, once=True),
)


def _drawn(x: torch.Tensor) -> torch.Tensor:
    """Noise, which each layer makes again."""
    noise = torch.rand(x.shape[1], x.shape[1], device=x.device)
    return torch.zeros_like(noise).masked_fill(noise < 0.1, -1.0)


_register(
    control("repeated-work", gpus=0),
    "again_noise",
    "Each layer draws a mask of its own.",
    lambda context: _stack(context, _drawn),
)


class _Refined(nn.Module):
    """Layers that move points, whose sines are taken again for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        points = x[..., 0]
        for layer in self.layers:
            rates = 1e4 ** (-torch.arange(0, 32, device=x.device) / 32)
            angles = points.detach()[..., None] * rates
            x = x + layer(x + torch.cat((angles.sin(), angles.cos()), -1))
            points = points + x[..., 0]
        return x


_register(
    control("repeated-work", gpus=0),
    "again_refined",
    "A decoder takes the sines of points that each layer moves.",
    lambda context: _trained(context, _Refined(), 2, context.pick(384, 32), 64),
)

# slow-path ----------------------------------------------------------------------------------------


def _images(context: Context, layer: nn.Module, dtype: torch.dtype) -> Built:
    model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(2), nn.Linear(24 * 24, 8))
    return _trained(context, model, 4, 16, 24, 24, dtype=dtype)


class _First(nn.Module):
    """A recurrent layer without its state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


def _sequences(context: Context, layer: nn.Module, dtype: torch.dtype) -> Built:
    return _trained(context, _First(layer), 16, 40, 16, dtype=dtype)


for _name, _about, _build in (
    (
        "general_fp64",
        "Convolutions in fp64.",
        lambda c: _images(c, nn.Conv2d(16, 16, 3, padding=1), torch.float64),
    ),
    (
        "general_dilated",
        "Dilated convolutions in fp64.",
        lambda c: _images(c, nn.Conv2d(16, 16, 3, padding=2, dilation=2), torch.float64),
    ),
    (
        "general_projected",
        "An LSTM with projections.",
        lambda c: _sequences(c, nn.LSTM(16, 64, proj_size=32, batch_first=True), torch.float32),
    ),
    (
        "general_lstm_fp64",
        "An LSTM in fp64.",
        lambda c: _sequences(c, nn.LSTM(16, 64, batch_first=True), torch.float64),
    ),
):
    _register(plant("slow-path", ("0", "layer"), gpus=0), _name, _about, _build)
_register(
    control("slow-path", gpus=0),
    "fast_convolution",
    "Convolutions in fp32.",
    lambda c: _images(c, nn.Conv2d(16, 16, 3, padding=1), torch.float32),
)
_register(
    control("slow-path", gpus=0),
    "pointwise_convolution",
    "1x1 convolutions in fp32, for which PyTorch takes the general way on one thread on purpose.",
    lambda c: _images(c, nn.Conv2d(16, 16, 1), torch.float32),
)
_register(
    control("slow-path", gpus=0),
    "fast_lstm",
    "An LSTM in fp32.",
    lambda c: _sequences(c, nn.LSTM(16, 64, batch_first=True), torch.float32),
)

# double-precision ---------------------------------------------------------------------------------


class _Normed(nn.Module):
    """Layers, between which a norm may have parameters of its own number format."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 256), nn.Linear(256, 256)
        self.norm = nn.LayerNorm(256, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.norm(self.first(x).to(self.norm.weight.dtype))
        return self.last(inside.to(x.dtype))


class _Doubled(nn.Module):
    """A layer in double precision, whatever its inputs are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.double())


class _Attention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(256, 4, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, x, need_weights=False)[0]


class _Scaled(nn.Module):
    """A layer whose outputs are multiplied with one number, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def _wide(context: Context, model: nn.Module, dtype: torch.dtype) -> Built:
    """Train a model as it is, on noise of a number format; the sum of the losses is in fp64."""
    model = model.to(context.device)
    x, total = context.randn(512, 256).to(dtype), torch.zeros((), dtype=torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss() -> torch.Tensor:
        value = model(x).square().mean()
        total.add_(value.detach().double().to(total.device))
        return value

    return built(context, model, loss, optimizer=sgd)


def _mlp(dtype: torch.dtype) -> nn.Module:
    layers = (nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    return nn.Sequential(*layers).to(dtype)


for _name, _about, _at, _build in (
    (
        "double_mlp",
        "A model in fp64.",
        ("0", "2"),
        lambda c: _wide(c, _mlp(torch.float64), torch.float64),
    ),
    (
        "double_attention",
        "Attention in fp64.",
        ("layer*",),
        lambda c: _wide(c, _Attention(torch.float64), torch.float64),
    ),
    (
        "double_norm",
        "A norm in fp64 between layers in fp32.",
        ("norm",),
        lambda c: _wide(c, _Normed(torch.float64), torch.float32),
    ),
    (
        "double_last",
        "The last layer in fp64.",
        ("1.layer",),
        lambda c: _wide(
            c, nn.Sequential(_mlp(torch.float32), _Doubled(nn.Linear(256, 256))), torch.float32
        ),
    ),
):
    _register(plant("double-precision", _at, gpus=0), _name, _about, _build)
for _name, _about, _build in (
    (
        "single_scaled",
        "A model in fp32 with one number in fp64, and a sum of losses in fp64.",
        lambda c: _wide(c, _Scaled(), torch.float32),
    ),
    (
        "single_mlp",
        "A model in fp32 with a sum of losses in fp64.",
        lambda c: _wide(c, _mlp(torch.float32), torch.float32),
    ),
):
    _register(control("double-precision", gpus=0), _name, _about, _build)

# loss-passes --------------------------------------------------------------------------------------


def _classes(
    context: Context,
    number: int,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = functional.cross_entropy,
    rows: int = 256,
) -> Built:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, number)).to(context.device)
    x, labels = context.randn(rows, 64), context.randint(number, rows)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    return built(context, model, lambda: loss(model(x), labels), optimizer=sgd)


def _in_two(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.nll_loss(scores.log_softmax(-1), labels)


def _in_bf16(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.bfloat16().float(), labels)


for _name, _about, _build in (
    ("words_8000", "The loss of 8,000 words.", lambda c: _classes(c, 8000)),
    ("words_20000", "The loss of 20,000 words.", lambda c: _classes(c, 20_000, rows=128)),
    ("words_in_two", "log_softmax and nll_loss.", lambda c: _classes(c, 8000, _in_two)),
    ("words_in_bf16", "Scores in bf16, a loss in fp32.", lambda c: _classes(c, 8000, _in_bf16)),
):
    _register(plant("loss-passes", None, gpus=0), _name, _about, _build)
_register(
    control("loss-passes", gpus=0),
    "classes_100",
    "The loss of 100 classes.",
    lambda c: _classes(c, 100, rows=2048),
)

# unused-parameter-search --------------------------------------------------------------------------


def _parallel(context: Context, depth: int, layer: Callable[[], nn.Module], search: bool) -> Built:
    file = Path(tempfile.mkdtemp()) / "store"
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(file), 1))
    layers = nn.Sequential(*(layer() for _ in range(depth))).to(context.device)
    model = DistributedDataParallel(layers, find_unused_parameters=search)
    x = context.randn(8, 32)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    made = built(context, model, lambda: model(x).square().mean(), optimizer=sgd)
    made.close = dist.destroy_process_group
    return made


def _chained(length: int) -> nn.Module:
    """A layer with many nodes in the graph for each parameter."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            x = x.sin() + x
        return x

    return nn.Sequential(nn.Linear(32, 32), Layer(chain))


for _depth, _length in ((5, 30), (8, 25), (10, 30), (20, 20)):
    _register(
        plant("unused-parameter-search", None, gpus=0),
        f"search_{_depth}x{_length}",
        f"A search of {_depth} layers with {2 * _length} nodes each.",
        lambda c, n=_depth, k=_length: _parallel(c, n, lambda: _chained(k), True),
    )
_register(
    control("unused-parameter-search", gpus=0),
    "no_search",
    "No search.",
    lambda c: _parallel(c, 10, lambda: _chained(30), False),
)
