"""The causes of ``price_truth``, each with its fix: what is done badly beside an innocent operator.

A cause is two trainings that differ in one thing. ``CASES`` has each beside one to three innocent
operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    TensorDataset,
    default_collate,
)

from benchmarks.accuracy.price_models import (
    FEATURES,
    Mark,
    Part,
    Run,
    Shape,
    Size,
    State,
    Training,
    heads_of,
    image_of,
)
from benchmarks.models import custom

_PRODUCT, _BOTH = ("product",), ("product", "convolution")
_ALL = ("product", "convolution", "attention")


@dataclass(frozen=True)
class Cause:
    """A cause and its fix.

    Attributes:
        rule: the rules, one of which must find it.
        slow: the training with the cause.
        fixed: the training without it.
        beside: names of the innocent operators beside it, in a case each.
        devices: where it costs something.
        whole: whether the clock around the cause holds all that it takes; an option of the step
            costs in many places.
        partly: whether the fix leaves a part of the cause.
        leaves: rules of what the remedy itself says to do next, as to compile what it has written.
    """

    rule: tuple[str, ...]
    slow: Training
    fixed: Training
    beside: Sequence[str] = _BOTH
    devices: tuple[str, ...] = ("cpu", "cuda")
    whole: bool = True
    partly: bool = False
    leaves: tuple[str, ...] = ()


CAUSES: dict[str, Cause] = {}


def _cause(
    name: str,
    rule: str,
    slow: Training | Run,
    fixed: Training | Run,
    *,
    weights: Any = None,
    **more: Any,
) -> None:
    """Add a cause. A function stands for a part of a forward, with the shapes of its weights."""
    shapes: Callable[[Size], Sequence[Shape]] = weights or (lambda size: ())
    both = [
        one if isinstance(one, Training) else Training(Part(one, shapes)) for one in (slow, fixed)
    ]
    CAUSES[name] = Cause(tuple(rule.split()), *both, **more)


def _square(size: Size) -> list[Shape]:
    return [(size.width, size.width)]


# Loops and chains --------------------------------------------------------------------------------


def _tokens(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1)


def _each_token(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    some = _tokens(x)[: len(scale)]
    turns = [row.sigmoid() * one for row, one in zip(some.unbind(), scale.unbind(), strict=True)]
    return x + torch.stack(turns).mean()


def _all_tokens(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x + (_tokens(x)[: len(scale)].sigmoid() * scale[:, None]).mean()


def _power_of_two(scale: torch.Tensor) -> torch.Tensor:
    return scale.clamp(min=1e-3).log2().ceil().exp2()


def _each_row(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scales = torch.stack([_power_of_two(row.abs().amax()) for row in weight.unbind()])
    return functional.linear(x, weight) / scales.mean()


def _all_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scales = _power_of_two(weight.abs().amax(1))
    return functional.linear(x, weight) / scales.mean()


def _gelu_written_out(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3))))


def _norm_written_out(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * scale + shift


def _norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, scale.shape, scale, shift)


_vectors = lambda size: [(size.width,), (size.width,)]  # noqa: E731 - shapes of two weights
_cause(
    "loop", "operator-loop", _each_token, _all_tokens, weights=lambda s: [(s.turns,)], beside=_ALL
)
_cause("scales", "operator-loop", _each_row, _all_rows, weights=_square, beside=_BOTH)
_cause(
    "gelu", "pointwise-chain", _gelu_written_out,
    lambda x: functional.gelu(x, approximate="tanh"), beside=_ALL,
)  # fmt: skip
_cause("norm", "pointwise-chain", _norm_written_out, _norm, weights=_vectors)


# Copies ------------------------------------------------------------------------------------------

_FOUR = lambda size: [(4, size.width)]  # noqa: E731 - shapes of one weight


def _casts(x: torch.Tensor, cast: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    for _ in range(16):
        x = cast(x) * 1.01
    return x


def _columns(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x.transpose(1, 2).contiguous().sigmoid().transpose(1, 2).contiguous()
    return x


_cause(
    "repeat", "repeated-tensor",
    lambda x, w: x + (x[:, :, None].repeat(1, 1, 4, 1) * w).sum(2),
    lambda x, w: x + (x[:, :, None] * w).sum(2), weights=_FOUR,
)  # fmt: skip
_cause(
    "casts", "casts",
    lambda x: _casts(x, lambda y: y.bfloat16().float()), lambda x: _casts(x, lambda y: y),
)  # fmt: skip
_cause("columns", "layout-copies", _columns, lambda x: x.sigmoid().sigmoid().sigmoid(), beside=_ALL)


# Layers ------------------------------------------------------------------------------------------


def _attention_written_out(x: torch.Tensor) -> torch.Tensor:
    q = heads_of(x)
    weights = (q @ q.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
    return x + (weights @ q).transpose(1, 2).reshape(x.shape)


def _attention(x: torch.Tensor) -> torch.Tensor:
    q = heads_of(x)
    mixed = functional.scaled_dot_product_attention(q, q, q)
    return x + mixed.transpose(1, 2).reshape(x.shape)


def _convolved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(image_of(x), weight, padding=1).view_as(x)


_CELL = 32


def _cell_shapes(size: Size) -> list[Shape]:
    return [(4 * _CELL, _CELL), (4 * _CELL, _CELL), (4 * _CELL,), (4 * _CELL,)]


def _cells(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    h = c = x.new_zeros(len(x), _CELL)
    outputs = []
    for one in x[..., :_CELL].unbind(1):
        h, c = torch.lstm_cell(one, (h, c), *weights)
        outputs.append(h)
    return x + torch.stack(outputs, 1).mean(-1, keepdim=True)


def _whole(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    zeros = x.new_zeros(1, len(x), _CELL)
    given = x[..., :_CELL].contiguous(), (zeros, zeros), weights
    return x + torch.lstm(*given, True, 1, 0.0, True, False, True)[0].mean(-1, keepdim=True)


def _mlp(x: torch.Tensor, inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x @ inner) @ outer


def _table(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(16 * x.shape[1], device=x.device)[:, None]
    speeds = torch.exp(torch.arange(x.shape[2], device=x.device) * (-9.2 / x.shape[2]))
    return (places * speeds).cos()[: x.shape[1]]


_kept_tables: dict[Any, torch.Tensor] = {}


def _kept_table(x: torch.Tensor) -> torch.Tensor:
    key = (*x.shape, x.device)
    if key not in _kept_tables:
        _kept_tables[key] = _table(x)
    return _kept_tables[key]


def _anew(x: torch.Tensor, state: State, mark: Mark) -> torch.Tensor:
    _kept_tables.clear()
    return x


def _deep(run: Run) -> Training:
    """Several modules, of which each needs a table that is new in each step."""
    return Training(Part(run), depth=5, batch=2, before=_anew)


def _looked_up(x: torch.Tensor, table: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    places = torch.arange(x.shape[0] * x.shape[1], device=x.device) * 7919 % len(table)
    return x + functional.embedding(places, table, sparse=sparse).mean(-1).view(*x.shape[:2], 1)


def _tables(size: Size) -> list[Shape]:
    return [(96 * size.rows, 32)]


def _plain_sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, foreach=False)


_cause("attention", "attention-math", _attention_written_out, _attention)
_cause("cells", "recurrent-cells", _cells, _whole, weights=_cell_shapes, devices=("cpu",))
_cause(
    "double", "slow-path casts",
    lambda x, w: x + _convolved(x.double(), w.double()).float(), lambda x, w: x + _convolved(x, w),
    weights=lambda s: [(s.length // 4, s.length // 4, 3, 3)], devices=("cpu",), beside=_PRODUCT,
)  # fmt: skip
_cause(
    "recomputed", "recompute",
    lambda x, a, b: x + checkpoint(_mlp, x, a, b, use_reentrant=False),
    lambda x, a, b: x + _mlp(x, a, b),
    weights=lambda s: [(s.width, s.hidden // 2), (s.hidden // 2, s.width)],
)  # fmt: skip
_cause(
    "tables", "repeated-work",
    _deep(lambda x: x + _table(x)), _deep(lambda x: x + _kept_table(x)),
)  # fmt: skip
_cause(
    "rows", "dense-embedding-gradient",
    *(
        Training(Part(functools.partial(_looked_up, sparse=one), _tables), optimizer=_plain_sgd)
        for one in (False, True)
    ),
    whole=False,
)  # fmt: skip


# Gradients ---------------------------------------------------------------------------------------


class _Projected(torch.autograd.Function):
    """A product with a constant, for which it also computes a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, asks: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.asks = asks
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, Any, None]:
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad[1] or not ctx.asks
        of_weight = _tokens(x).t() @ _tokens(gradient) if needed else None
        return gradient @ weight.t(), of_weight, None


def _backward_by(power: int) -> Run:
    """Return a function whose backward has as many products."""

    def back(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weight = torch.eye(x.shape[-1], device=x.device)
        for _ in range(power):
            gradient = gradient @ weight
        return gradient

    return custom(torch.clone, back)


def _penalised(part: int) -> Training:
    """A gradient penalty on one in ``part`` of the batch."""

    def loss(model: nn.Module, x: torch.Tensor, mark: Mark) -> torch.Tensor:
        some = x[: max(1, len(x) // part)].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model(some).sum(), some, create_graph=True)
        return model(x).square().mean() + gradient.square().mean()

    return Training(loss=loss)


def _of_forces() -> Training:
    """The slope of an energy is trained: there is nothing to leave out."""

    def loss(model: nn.Module, x: torch.Tensor, mark: Mark) -> torch.Tensor:
        places = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(model(places).sum(), places, create_graph=True)
        return (force - x).square().mean()

    return Training(loss=loss)


def _wide_weight(size: Size) -> list[Shape]:
    return [(size.width, size.rows)]


_WIDE = Part(lambda x, w: x + (x[:, :1] @ w).mean(), _wide_weight)


def _adamw(parameters: Sequence[nn.Parameter], *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=fused)


_cause(
    "constant", "unread-gradient",
    lambda x, w: x + _Projected.apply(x, w.detach(), False),
    lambda x, w: x + _Projected.apply(x, w.detach(), True), weights=_square,
)  # fmt: skip
_cause(
    "left_out", "unused-gradient",
    Training(Part(lambda x, w: x + x @ w, _square, trained=False)),
    Training(Part(lambda x, w: x + x @ w, _square, trained=None)),
)  # fmt: skip
_cause("slow_backward", "backward-ratio", _backward_by(4), _backward_by(1))
_cause(
    "penalty", "second-backward", _penalised(1), _penalised(8), whole=False, partly=True,
)  # fmt: skip
_cause("forces", "second-backward", _of_forces(), _of_forces(), beside=_PRODUCT, whole=False)
_cause("zeros", "zero-grad-fill", Training(_WIDE, drops=False), Training(_WIDE), whole=False)
_cause(
    "passes", "gradient-accumulation",
    Training(_WIDE, micro=4), Training(_WIDE), beside=_PRODUCT, whole=False,
)  # fmt: skip
_cause(
    "adamw", "optimizer-kernels",
    *(
        Training(
            _WIDE, clips=True, clocks_update=True, optimizer=functools.partial(_adamw, fused=fused)
        )
        for fused in (False, True)
    ),
)  # fmt: skip


# The loss ----------------------------------------------------------------------------------------


def _scores(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    some = _tokens(x)[:512, : len(weight)]
    targets = torch.arange(len(some), device=x.device) * 7919 % weight.shape[1]
    return some, targets


def _cross_entropy(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    some, targets = _scores(x, weight)
    return functional.cross_entropy(some @ weight, targets)


def _cross_entropy_written_out(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    some, targets = _scores(x, weight)
    probabilities = (some @ weight).softmax(-1) + 1e-9
    return -probabilities.log().gather(1, targets[:, None]).mean()


def _labelled(x: torch.Tensor, weight: torch.Tensor, *, first: bool) -> torch.Tensor:
    """Cross-entropy where one position in four has a label."""
    some, targets = _scores(x, weight)
    has = torch.arange(len(some), device=x.device) % 4 == 0
    if first:
        some, targets = some[::4], targets[::4]
    else:
        targets = torch.where(has, targets, -100)
    return functional.cross_entropy(some @ weight, targets)


def _by_class(x: torch.Tensor) -> torch.Tensor:
    of = torch.arange(x.shape[0] * x.shape[1], device=x.device) * 7919 % 64
    terms = [_tokens(x)[of == one].square().mean() for one in range(64)]
    return torch.stack(terms).mean()


def _of_all_classes(x: torch.Tensor) -> torch.Tensor:
    of = torch.arange(x.shape[0] * x.shape[1], device=x.device) * 7919 % 64
    squares = _tokens(x).square().mean(1)
    sums = torch.zeros(64, device=x.device).index_add(0, of, squares)
    return (sums / torch.bincount(of, minlength=64).clamp(min=1)).mean()


def _in_loss(run: Run, weights: Any = lambda size: ()) -> Training:
    return Training(Part(run, weights), in_loss=True)


def _vocabulary(size: Size) -> list[Shape]:
    return [(min(64, size.width), size.rows)]


_cause(
    "labels", "loss-passes",
    *(_in_loss(functools.partial(_labelled, first=one), _vocabulary) for one in (False, True)),
)  # fmt: skip
_cause(
    "entropy", "loss-passes pointwise-chain",
    _in_loss(_cross_entropy_written_out, _vocabulary), _in_loss(_cross_entropy, _vocabulary),
)  # fmt: skip
_cause(
    "classes", "masked-indexing operator-loop code-around-model",
    _in_loss(_by_class), _in_loss(_of_all_classes),
)  # fmt: skip


# Around the model --------------------------------------------------------------------------------


def _kept_matrix(state: State) -> torch.Tensor:
    size: Size = state["size"]
    return state.setdefault("matrix", torch.eye(size.hidden, device=size.device))


def _averaged(at_once: bool) -> Training:
    """An average of all weights, and a product that is necessary, in one function."""

    def after(model: nn.Module, x: torch.Tensor, state: State, mark: Mark) -> None:
        weights = [weight.detach() for weight in model.parameters()]
        if "averages" not in state:
            state["averages"] = [weight.clone() for weight in weights]
        averages = state["averages"]
        with mark():
            if at_once:
                torch._foreach_lerp_(averages, weights, 0.01)
            else:
                for average, weight in zip(averages, weights, strict=True):
                    average.mul_(0.99).add_(weight, alpha=0.01)
        state["matrix"] = _kept_matrix(state) @ _kept_matrix(state)

    return Training(spare=1500, after=after)


def _evaluated(often: bool) -> Training:
    """The model runs again without a backward, beside a product that is necessary."""

    def after(model: nn.Module, x: torch.Tensor, state: State, mark: Mark) -> None:
        with torch.no_grad():
            if often:
                with mark():
                    model(x)
            state["matrix"] = _kept_matrix(state) @ _kept_matrix(state)

    return Training(after=after)


def _keyed(in_python: bool) -> Training:
    """Python computes a number of each row, beside a product that is necessary."""

    def before(x: torch.Tensor, state: State, mark: Mark) -> torch.Tensor:
        count = 200 * state["size"].turns
        state["matrix"] = _kept_matrix(state) @ _kept_matrix(state)
        with mark():
            if in_python:
                key = 0
                for number in range(count):
                    key = (key * 31 + number) % 1_000_003
            else:
                key = count
        return x + key * 1e-9

    return Training(before=before)


def _loaded(whole: bool) -> Training:
    """Batches of a loader without workers: row by row or at once; both are projected there."""

    def loader(size: Size) -> DataLoader[Any]:
        count = size.batch * size.length
        data = TensorDataset(torch.randn(4 * count, FEATURES))
        matrix = torch.eye(min(count, 1024))

        def collate(rows: Any) -> torch.Tensor:
            (batch,) = rows if whole else default_collate(rows)
            batch = matrix @ batch.reshape(len(matrix), -1)
            batch = batch.view(size.batch, size.length, FEATURES)
            if size.device == "cpu":
                return batch
            return batch.pin_memory().to(size.device, non_blocking=True)

        if not whole:
            return DataLoader(data, count, shuffle=True, collate_fn=collate, drop_last=True)
        sampler = BatchSampler(RandomSampler(data), count, drop_last=True)
        return DataLoader(data, batch_size=None, sampler=sampler, collate_fn=collate)

    return Training(loader=loader)


_LAYERS = Part(_norm, _vectors)
_cause("average", "code-around-model", _averaged(False), _averaged(True))
_cause("evaluation", "forward-only", _evaluated(True), _evaluated(False))
_cause("keys", "python-code code-around-model", _keyed(True), _keyed(False))
# What is left of loading can be hidden by workers.
_cause(
    "single_rows", "waiting-for-data",
    _loaded(False), _loaded(True), beside=_PRODUCT, partly=True,
)  # fmt: skip
_cause(
    "anomaly", "anomaly-mode",
    Training(_LAYERS, around=lambda: torch.autograd.detect_anomaly()), Training(_LAYERS),
    whole=False,
)  # fmt: skip


# On a GPU alone ----------------------------------------------------------------------------------

_GPU = {"devices": ("cuda",)}


def _places(x: torch.Tensor, rows: int) -> torch.Tensor:
    count = x.shape[0] * x.shape[1]
    return torch.arange(count, device=x.device) * 7919 % rows


def _few(x: torch.Tensor) -> torch.Tensor:
    return _places(x, 4)


def _waited(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        if x.detach().abs().amax().item() > 1e6:
            raise ValueError("it diverges")
    return x * 1.0


def _enlarged(x: torch.Tensor, *, by_products: bool, dtype: torch.dtype) -> torch.Tensor:
    """Bilinear interpolation from few cells, in single or in half precision."""
    image = image_of(x)
    side = min(8, *image.shape[2:])
    image = image[:, :, :side, :side].to(dtype)
    if by_products:
        eye = torch.eye(side, device=x.device)[None, None]
        matrix = functional.interpolate(eye, (64, side), mode="bilinear", align_corners=True)
        matrix = matrix[0, 0].to(dtype)
        large = matrix @ image @ matrix.t()
    else:
        large = functional.interpolate(image, (64, 64), mode="bilinear", align_corners=True)
    return x + large.float().mean()


def _rotated(x: torch.Tensor, turn: torch.Tensor, *, written_out: bool) -> torch.Tensor:
    pairs = x.reshape(-1, 2, 2)
    many = turn.expand(len(pairs), 2, 2)
    if not written_out:
        return torch.bmm(pairs, many).view_as(x)
    return (pairs[:, :, :, None] * many[:, None]).sum(2).view_as(x)


def _frames(x: torch.Tensor) -> torch.Tensor:
    """Return the tokens as a video of 64 channels."""
    return x.reshape(len(x), 64, -1, 16, 16) if x.shape[2] >= 64 else x.reshape(len(x), 2, -1, 2, 2)


def _deep_convolution(x: torch.Tensor, weight: torch.Tensor, *, flat: bool) -> torch.Tensor:
    video = _frames(x)
    channels, frames = video.shape[1:3]
    weight = weight[:channels]
    if not flat:
        return functional.conv3d(video, weight, padding=1, groups=channels).reshape(x.shape)
    padded = functional.pad(video, (0, 0, 0, 0, 1, 1)).transpose(1, 2)
    terms = [
        functional.conv2d(
            padded[:, one : one + frames].flatten(0, 1), weight[:, :, one], padding=1,
            groups=channels,
        )
        for one in range(3)
    ]  # fmt: skip
    video = sum(terms[1:], terms[0]).unflatten(0, (len(x), frames)).transpose(1, 2)
    return video.reshape(x.shape)


@contextmanager
def _deterministic(fills: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = fills
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    yield
    torch.set_float32_matmul_precision(before)


def _sent(narrow: bool, pinned: bool = True) -> Training:
    """A batch comes from the host, and is projected there in the same function."""

    def before(x: torch.Tensor, state: State, mark: Mark) -> torch.Tensor:
        if "batch" not in state:
            count = 16 * x.numel()
            batch = torch.randint(255, (count,), dtype=torch.uint8)
            batch = batch if narrow else batch.float()
            on_gpu = pinned and x.device.type != "cpu"
            state["batch"] = batch.pin_memory() if on_gpu else batch
        with mark():
            batch = state["batch"].to(x.device, non_blocking=True).float()
        state["matrix"] = _kept_matrix(state) @ _kept_matrix(state)
        return x + batch.mean() * 1e-9

    return Training(before=before)


def _logged(copied: bool) -> Training:
    """Hidden numbers are copied to the host in each step, to print a mean."""

    def after(model: nn.Module, x: torch.Tensor, state: State, mark: Mark) -> None:
        matrix = state["matrix"] = _kept_matrix(state) @ _kept_matrix(state)
        with mark():
            state["mean"] = (matrix.cpu() if copied else matrix).mean()

    return Training(after=after)


def _emptied(always: bool) -> Training:
    def after(model: nn.Module, x: torch.Tensor, state: State, mark: Mark) -> None:
        state["matrix"] = _kept_matrix(state) @ _kept_matrix(state)
        with mark():
            if always and x.device.type != "cpu":
                torch.cuda.empty_cache()

    return Training(after=after)


def _around(around: Callable[[], AbstractContextManager[Any]], part: Part) -> Training:
    return Training(part, around=around)


_picked = lambda x: x + _tokens(x)[_places(x, 4096) % len(_tokens(x))].view_as(x)  # noqa: E731
_cause(
    "picked", "sorted-indexing", _picked,
    lambda x: x + _tokens(x).index_select(0, _places(x, 4096) % len(_tokens(x))).view_as(x), **_GPU,
)  # fmt: skip
_cause(
    "few_rows", "duplicate-indices sorted-indexing",
    lambda x, w: x + functional.embedding(_few(x), w).view_as(x),
    lambda x, w: x + (functional.one_hot(_few(x), 4).to(w.dtype) @ w).view_as(x),
    weights=_FOUR, **_GPU,
)  # fmt: skip
_cause("waits", "host-waits", _waited, lambda x: x * 1.0, **_GPU)
_cause(
    "host_table", "cpu-operators",
    lambda x: x + _table(x.new_empty(x.shape, device="cpu")).to(x.device),
    lambda x: x + _table(x), **_GPU,
)  # fmt: skip
_cause(
    "enlarged", "atomic-additions",
    functools.partial(_enlarged, by_products=False, dtype=torch.float32),
    functools.partial(_enlarged, by_products=True, dtype=torch.float32), **_GPU,
)  # fmt: skip
_cause(
    "enlarged_half", "atomic-additions",
    functools.partial(_enlarged, by_products=False, dtype=torch.bfloat16),
    functools.partial(_enlarged, by_products=True, dtype=torch.bfloat16), **_GPU,
)  # fmt: skip
_cause(
    "rotated", "tiny-products",
    *(functools.partial(_rotated, written_out=one) for one in (False, True)),
    weights=lambda s: [(2, 2)], **_GPU,
)  # fmt: skip
_cause(
    "distances", "pairwise-distance",
    lambda x: x + torch.cdist(x[..., :3].contiguous(), x[..., :3].contiguous(), p=1.0).mean(),
    lambda x: x + (x[:, :, None, :3] - x[:, None, :, :3]).abs().sum(-1).mean(),
    leaves=("pointwise-chain",), **_GPU,
)  # fmt: skip
_cause(
    "video", "slow-convolution",
    *(functools.partial(_deep_convolution, flat=one) for one in (False, True)),
    weights=lambda s: [(64, 1, 3, 3, 3)], **_GPU,
)  # fmt: skip
_FILLED = Part(lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]].sigmoid())
_cause(
    "filled", "deterministic-fill",
    *(_around(functools.partial(_deterministic, fills), _FILLED) for fills in (True, False)),
    whole=False, **_GPU,
)  # fmt: skip
_SQUARE = Part(lambda x, w: x + x @ w, _square)
_cause(
    "exact", "no-tensor-cores",
    *(_around(functools.partial(_precision, name), _SQUARE) for name in ("highest", "high")),
    beside=("convolution",), **_GPU,
)  # fmt: skip
_cause("floats", "host-to-device-volume", _sent(narrow=False), _sent(narrow=True), **_GPU)
_cause("pageable", "pageable-copy", _sent(True, pinned=False), _sent(True), **_GPU)
_cause("logged", "device-copies host-waits", _logged(True), _logged(False), **_GPU)
_cause("emptied", "allocator-calls", _emptied(True), _emptied(False), **_GPU)


@dataclass(frozen=True)
class Case:
    """A cause beside an innocent operator."""

    cause: Cause
    neighbour: str


CASES = {
    f"{name}-{neighbour}": Case(cause, neighbour)
    for name, cause in CAUSES.items()
    for neighbour in cause.beside
}


def cases_on(device: str) -> dict[str, Case]:
    """Return the cases that cost something on a device."""
    return {name: case for name, case in CASES.items() if device in case.cause.devices}
