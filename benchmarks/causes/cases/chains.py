"""Many operators that should be one, repeated copies, and gradients that need not be computed.

These cost time on a processor too: ``record --gpus 0``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.case import Built, Context, built, control, plant
from benchmarks.models import Layer

__all__: list[str] = []

_Function = Callable[[torch.Tensor], torch.Tensor]
_WIDTH, _LENGTH, _BATCH = 128, 128, 32


def _around(context: Context, part: nn.Module) -> Built:
    """Train a part between linear layers, on sequences of noise."""
    model = nn.Sequential(
        *(nn.Linear(_WIDTH, _WIDTH), part, nn.Linear(_WIDTH, _WIDTH), nn.GELU()),
        nn.Linear(_WIDTH, _WIDTH),
    ).to(context.device)
    x = context.randn(_BATCH, _LENGTH, _WIDTH)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    return built(context, model, lambda: model(x).square().mean(), optimizer=sgd)


def _register(register: Any, name: str, about: str, build: Callable[[Context], Built]) -> None:
    build = partial(build)
    build.__name__, build.__doc__ = name, about  # type: ignore[attr-defined]
    register(build)


def _parts(
    rule: str, planted: dict[str, tuple[str, _Function]], well: dict[str, tuple[str, _Function]]
) -> None:
    """Register functions of a sequence's features as causes, and others as the same well done."""
    for functions, register in (
        (planted, plant(rule, ["1"], gpus=0)),
        (well, control(rule, gpus=0)),
    ):
        for name, (about, function) in functions.items():
            build = lambda context, inner=function: _around(context, Layer(inner))  # noqa: E731
            _register(register, name, about, build)


# Chains -------------------------------------------------------------------------------------------


def _layer_norm(x: torch.Tensor) -> torch.Tensor:
    gap = x - x.mean(-1, keepdim=True)
    return gap / torch.sqrt(gap.pow(2).mean(-1, keepdim=True) + 1e-5)


def _rms_norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    angle = torch.arange(x.shape[1], device=x.device)[:, None].float()
    for _ in range(2):  # queries and keys
        first, second = x.chunk(2, -1)
        x = x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()
    return x


def _mish_of_half(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * torch.tanh(torch.log(1 + torch.exp(x.clamp(max=20)))) + 0.5 * x


_parts(
    "pointwise-chain",
    {
        "chain_layer_norm": ("LayerNorm by means, differences and a root.", _layer_norm),
        "chain_rms_norm": ("RMSNorm by a mean of squares and a root.", _rms_norm),
        "chain_rotary": ("Rotary positions by two halves and their products.", _rotated),
        "chain_mish": ("Mish by exp, log and tanh.", _mish_of_half),
    },
    {
        "chain_norm_function": (
            "LayerNorm as one operator.",
            lambda x: functional.layer_norm(x, x.shape[-1:]),
        ),
        "chain_gate": ("A gate of two operators.", lambda x: functional.silu(x) * x),
    },
)

# Loops --------------------------------------------------------------------------------------------


def _decayed(x: torch.Tensor) -> torch.Tensor:
    state, rows = torch.zeros_like(x[:, 0]), []
    for each in x.unbind(1):
        state = 0.9 * state + 0.1 * each
        rows.append(state)
    return torch.stack(rows, 1)


def _decayed_at_once(x: torch.Tensor) -> torch.Tensor:
    place = torch.arange(x.shape[1], device=x.device)
    weight = (0.1 * 0.9 ** (place[:, None] - place[None]).clamp(min=0)).tril()
    return weight @ x


def _by_parts(x: torch.Tensor, parts: int) -> torch.Tensor:
    return torch.cat([torch.tanh(part) * 0.5 for part in x.chunk(parts, 1)], 1)


def _root(x: torch.Tensor) -> torch.Tensor:
    square = x.square().mean(-1, keepdim=True) + 1
    root = square
    for _ in range(40):
        root = 0.5 * (root + square / root)
    return x / root


def _newest(x: torch.Tensor) -> torch.Tensor:
    best = x[:, 0]
    for position in range(1, x.shape[1]):
        best = torch.maximum(best * 0.99, x[:, position])
    return best[:, None].expand_as(x)


_parts(
    "operator-loop",
    {
        "loop_decay": ("A recurrence with decay, a time step at a time.", _decayed),
        "loop_root": ("A root by forty rounds of Newton's method.", _root),
        "loop_newest": ("A decayed maximum, a position at a time.", _newest),
        "loop_tiles": ("A function of elements, part by part.", lambda x: _by_parts(x, 128)),
    },
    {
        "loop_decay_at_once": ("The recurrence as one product.", _decayed_at_once),
        "loop_groups": ("A few groups in a loop.", lambda x: _by_parts(x, 8)),
    },
)

# Forms of one operation --------------------------------------------------------------------------


def _scaled(x: torch.Tensor, scale: _Function) -> torch.Tensor:
    wide = torch.cat([x] * 4, -1)
    return (wide / scale(wide))[..., : x.shape[-1]]


_parts(
    "slow-node",
    {
        "node_max": ("A scale by the largest element.", partial(_scaled, scale=torch.max)),
        "node_min": ("A scale by the smallest element.", partial(_scaled, scale=torch.min)),
        "node_amax": (
            "A scale by the largest element of each row, by amax.",
            partial(_scaled, scale=lambda x: x.amax(2, keepdim=True)),
        ),
        "node_amin": (
            "A scale by the smallest element of each row, by amin.",
            partial(_scaled, scale=lambda x: x.amin(2, keepdim=True)),
        ),
    },
    {
        "node_max_of_rows": (
            "A scale by the largest element, whose index is kept.",
            partial(_scaled, scale=lambda x: x.flatten().max(0).values),
        ),
        "node_norm": ("A scale by the norm.", partial(_scaled, scale=torch.norm)),
    },
)


def _mixed(x: torch.Tensor, product: Callable[[torch.Tensor, torch.Tensor], Any]) -> torch.Tensor:
    rows = x[..., :32].reshape(-1, 32)
    table = torch.linspace(-1, 1, 32 * 32, device=x.device).reshape(32, 32)
    return torch.cat([product(rows, table).reshape(*x.shape[:-1], 32), x[..., 32:]], -1)


def _scores(x: torch.Tensor) -> torch.Tensor:
    some = x[:, :8]
    return torch.cat([(x[:, :, None] * some[:, None]).sum(-1), x[..., 8:]], -1)


_parts(
    "written-out-product",
    {
        "product_of_rows": (
            "A product of rows and a table, as broadcasting and a sum.",
            partial(_mixed, product=lambda x, w: (x[:, :, None] * w).sum(1)),
        ),
        "product_of_columns": (
            "The same over the last dimension.",
            partial(_mixed, product=lambda x, w: (x[:, None] * w).sum(-1)),
        ),
        "product_as_mean": (
            "The same as a mean.",
            partial(_mixed, product=lambda x, w: (x[:, :, None] * w).mean(1)),
        ),
        "product_of_scores": ("Scores of pairs, as broadcasting and a sum.", _scores),
    },
    {
        "product_of_matrices": (
            "The product of rows and a table.",
            partial(_mixed, product=torch.matmul),
        ),
        "product_by_element": (
            "Products of elements and their sum, which need no larger tensor.",
            lambda x: x * (x * x.roll(1, -1)).sum(-1, keepdim=True),
        ),
    },
)

# Copies -------------------------------------------------------------------------------------------


def _distances(x: torch.Tensor, repeat: bool) -> torch.Tensor:
    points, others = x[:, :, None], x[:, None, :8]
    if repeat:
        points, others = points.repeat(1, 1, 8, 1), others.repeat(1, x.shape[1], 1, 1)
    return (points - others).sum(2)


_parts(
    "repeated-tensor",
    {
        "repeat_pairs": ("Pairs of points by repeat.", partial(_distances, repeat=True)),
        "repeat_gate": (
            "A gate that is repeated over the sequence.",
            lambda x: x * x.mean(1, keepdim=True).repeat(1, x.shape[1], 1),
        ),
        "repeat_prototypes": (
            "A sequence that is repeated for each other.",
            lambda x: x * x[:1].repeat(len(x), 1, 1) + x[-1:].repeat(len(x), 1, 1),
        ),
        "repeat_tile": ("A mean that is tiled.", lambda x: x + x[..., :8].tile(1, 1, 16)),
    },
    {
        "repeat_broadcast": ("Pairs of points by broadcasting.", partial(_distances, repeat=False)),
        "repeat_expand": (
            "A gate that is expanded.",
            lambda x: x * x.mean(1, keepdim=True).expand_as(x),
        ),
    },
)

# Gradients ----------------------------------------------------------------------------------------


def _penalized(context: Context, kind: str) -> Built:
    """Train a critic with a penalty on a gradient; ``detached`` only looks at that gradient."""
    model = nn.Sequential(*(nn.Linear(256, 256), nn.Softplus()) * 3, nn.Linear(256, 1))
    model = model.to(context.device)
    images = context.randn(256, 256)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

    def forward() -> torch.Tensor:
        inputs = images.clone().requires_grad_()
        if kind == "mixed":
            inputs = (0.5 * images + 0.5 * images.flip(0)).requires_grad_()
        value = model(inputs)
        of = model[0].weight if kind == "weights" else inputs
        again = kind != "detached"
        (slope,) = torch.autograd.grad(value.sum(), of, retain_graph=True, create_graph=again)
        size = slope.square().sum(-1)
        penalty = (size.sqrt() - 1).square().mean() if kind == "mixed" else size.mean()
        return value.mean() + (penalty.detach() if kind == "detached" else penalty)

    return built(context, model, forward, optimizer=sgd)


for _kind, _about in (
    ("inputs", "A penalty on the gradient at the images."),
    ("mixed", "A penalty on the gradient between images."),
    ("weights", "A penalty on the gradient of a layer's weights."),
):
    _register(
        plant("second-backward", None, gpus=0),
        f"penalty_{_kind}",
        _about,
        lambda context, kind=_kind: _penalized(context, kind),
    )
_register(
    control("second-backward", gpus=0),
    "penalty_detached",
    "A gradient at the images that is only looked at.",
    lambda context: _penalized(context, "detached"),
)


@plant("second-backward", None, gpus=0)
def penalty_forces(context: Context) -> Built:
    """Forces, as the gradient of an energy, that are trained themselves."""
    model = nn.Sequential(nn.Linear(96, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU())
    model.append(nn.Linear(256, 1))
    model, atoms, wanted = model.to(context.device), context.randn(256, 96), context.randn(256, 96)

    def forward() -> torch.Tensor:
        places = atoms.clone().requires_grad_()
        energy = model(places).sum()
        (forces,) = torch.autograd.grad(-energy, places, create_graph=True)
        return (forces - wanted).square().mean()

    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    return built(context, model, forward, optimizer=sgd)


class _Scaled(torch.autograd.Function):
    """A product of a table and scales, with the gradients that ``kind`` says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        ctx.kind = kind
        return (x * scale).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, scale = ctx.saved_tensors
        inner = gradient * (1 - (x * scale).tanh().square())
        if ctx.kind == "asked" and not ctx.needs_input_grad[1]:
            return inner * scale, None, None
        to_scale = inner * x
        return inner * scale, to_scale.sum((0, 1)) if scale.dim() == 1 else to_scale, None


def _scaling(context: Context, kind: str, whole: bool, learned: bool = False) -> Built:
    shape = (_BATCH, _LENGTH, _WIDTH) if whole else (_WIDTH,)
    scale = context.randn(*shape).requires_grad_(learned)
    return _around(context, Layer(lambda x: _Scaled.apply(x, scale, kind)))


for _name, _about, _options in (
    ("unread_scale", "A Function computes the gradient of a constant scale.", ("all", False)),
    ("unread_weights", "A Function computes the gradient of constant weights.", ("all", True)),
):
    _register(
        plant("unread-gradient", ["1"], gpus=0),
        _name,
        _about,
        lambda context, options=_options: _scaling(context, *options),
    )
for _name, _about, _options in (
    ("unread_asked", "The Function asks what is needed.", ("asked", True)),
    ("unread_learned", "The weights learn.", ("all", True, True)),
):
    _register(
        control("unread-gradient", gpus=0),
        _name,
        _about,
        lambda context, options=_options: _scaling(context, *options),
    )
