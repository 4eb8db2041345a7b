"""Operators for which a GPU has no fast kernel, and the same by others."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.case import Built, Context, built, control, plant
from benchmarks.models import Layer

__all__: list[str] = []
_OF_FP32 = {
    "no-tensor-cores": "convolutions in fp32",
    "layout-copies": "cuDNN turns the channels around",
}
_SHORT = {"casts": "autocast", "launch-bound": "a step of a few milliseconds"}


def _trained(context: Context, model: nn.Module, *shape: int, half: bool = False) -> Built:
    model = model.to(context.device)
    x = context.randn(*shape)
    return built(context, model, lambda: model(x).float().square().mean(), autocast=half)


def _volumes(context: Context, middle: nn.Module, width: int, *, half: bool = False) -> Built:
    """A 3-D layer between dense ones."""
    model = nn.Sequential(nn.Conv3d(1, width, 3, padding=1), nn.ReLU(), middle, nn.ReLU())
    model.append(nn.LazyConv3d(8, 1))
    side = context.pick(32, 6)
    with torch.no_grad():
        model(torch.zeros(1, 1, side, side, side))
    return _trained(context, model, context.pick(16, 1), 1, side, side, side, half=half)


@plant("slow-convolution", ["2"], _OF_FP32)
def depthwise_volume(context: Context) -> Built:
    """A depthwise convolution in three dimensions."""
    return _volumes(context, nn.Conv3d(64, 64, 3, padding=1, groups=64), 64)


@plant("slow-convolution", ["2"], {"casts": "autocast around the convolution"})
def depthwise_volume_half(context: Context) -> Built:
    """The same in half precision."""
    return _volumes(context, nn.Conv3d(64, 64, 3, padding=1, groups=64), 64, half=True)


@plant("slow-convolution", ["2"], _OF_FP32)
def depthwise_volume_wide(context: Context) -> Built:
    """A depthwise convolution over five places a side."""
    return _volumes(context, nn.Conv3d(64, 64, 5, padding=2, groups=64), 64)


@plant("slow-convolution", ["0"], _OF_FP32)
def few_filters_of_one_channel(context: Context) -> Built:
    """The first convolution of a volume: with 32 filters cuDNN's gradient is slow, not with 64."""
    return _volumes(context, nn.Conv3d(32, 32, 3, padding=1), 32)


@control("slow-convolution", _OF_FP32)
def grouped_volume(context: Context) -> Built:
    """A 3-D convolution in 16 groups, whose gradients take two to three times the forward."""
    return _volumes(context, nn.Conv3d(64, 64, 3, padding=1, groups=16), 64)


@control("slow-convolution", _OF_FP32)
def odd_filters_volume(context: Context) -> Built:
    """Very many tiny filters in three dimensions, whose gradients take four times the forward."""
    return _volumes(context, nn.Conv3d(16, 511, 2), 16)


def _maps(context: Context, middle: nn.Module, *, half: bool = False) -> Built:
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), middle)
    model.append(nn.Conv2d(64, 8, 3, padding=1))
    side = context.pick(192, 16)
    return _trained(context, model, context.pick(16, 1), 3, side, side, half=half)


def _through(cells: int, mode: str, x: torch.Tensor) -> torch.Tensor:
    pooled = functional.adaptive_avg_pool2d(x, cells)
    more = {} if mode == "nearest" else {"align_corners": False}
    return x + functional.interpolate(pooled, x.shape[2:], mode=mode, **more)


def _warped(x: torch.Tensor) -> torch.Tensor:
    grid = torch.zeros(len(x), *x.shape[2:], 2, device=x.device, dtype=x.dtype)
    return x + functional.grid_sample(x, grid + 0.01, align_corners=False)


@plant("atomic-additions", ["2"], _OF_FP32)
def interpolated_cells(context: Context) -> Built:
    """Bilinear interpolation from four cells."""
    return _maps(context, Layer(lambda x: _through(2, "bilinear", x)))


@plant("atomic-additions", ["2"], {"casts": "autocast around the interpolation"})
def interpolated_half(context: Context) -> Built:
    """Bilinear interpolation from nine cells in half precision."""
    return _maps(context, Layer(lambda x: _through(3, "bilinear", x)), half=True)


@plant("atomic-additions", ["2"], _OF_FP32)
def interpolated_cubic(context: Context) -> Built:
    """Bicubic interpolation from sixteen cells."""
    return _maps(context, Layer(lambda x: _through(4, "bicubic", x)))


@plant("atomic-additions", ["2"], _OF_FP32)
def sampled_at_one_place(context: Context) -> Built:
    """A grid that samples a map at one place."""
    return _maps(context, Layer(_warped))


@control("atomic-additions", _OF_FP32)
def doubled_map(context: Context) -> Built:
    """Bilinear interpolation to twice the side."""
    return _maps(context, Layer(lambda x: functional.interpolate(x, scale_factor=2)))


def _sequences(context: Context, middle: nn.Module) -> Built:
    model = nn.Sequential(nn.Linear(256, 256), middle, nn.Linear(256, 256))
    return _trained(context, model, context.pick(64, 2), context.pick(1024, 16), 256, half=True)


def _products(size: int, vector: bool, x: torch.Tensor) -> torch.Tensor:
    table = torch.eye(size, device=x.device, dtype=x.dtype).expand(x.shape[1], 1, -1, -1)
    parts = x.unflatten(-1, (-1, size))
    if vector:
        return (table @ parts[..., None])[..., 0].flatten(-2)
    return (parts.unflatten(-2, (-1, size)) @ table).flatten(-3)


@plant("tiny-products", ["1"], {"casts": "autocast", "layout-copies": "a table is expanded"})
def rotations_by_products(context: Context) -> Built:
    """Products of 2 by 2 matrices and vectors."""
    return _sequences(context, Layer(lambda x: _products(2, True, x)))


@plant("tiny-products", ["1"], {"casts": "autocast", "layout-copies": "a table is expanded"})
def quaternions_by_products(context: Context) -> Built:
    """Products of 4 by 4 matrices and vectors."""
    return _sequences(context, Layer(lambda x: _products(4, True, x)))


@plant("tiny-products", ["1"], {"casts": "autocast", "layout-copies": "a table is expanded"})
def frames_by_products(context: Context) -> Built:
    """Products of 4 by 4 matrices."""
    return _sequences(context, Layer(lambda x: _products(4, False, x)))


@plant("tiny-products", ["1"], {"casts": "autocast", "layout-copies": "a table is expanded"})
def pairs_by_products(context: Context) -> Built:
    """Products of 2 by 2 matrices."""
    return _sequences(context, Layer(lambda x: _products(2, False, x)))


@control("tiny-products", _SHORT)
def large_products(context: Context) -> Built:
    """Batched products of large matrices."""
    return _sequences(context, Layer(lambda x: x + (x @ x.mT) @ x / 1024))


class _Matcher(nn.Module):
    """Distances of all tokens to some of them."""

    def __init__(self, p: float, coordinates: int) -> None:
        super().__init__()
        self.p, self.coordinates = p, coordinates

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        few = x.float()[..., : self.coordinates]
        return x + torch.cdist(few, few[:, :256], p=self.p).mean(-1, keepdim=True)


for _p, _coordinates in ((1.0, 4), (1.0, 2), (3.0, 4), (float("inf"), 3)):

    def _build(context: Context, p: float = _p, coordinates: int = _coordinates) -> Built:
        return _sequences(context, _Matcher(p, coordinates))

    _build.__name__ = f"distances_{_p:g}_{_coordinates}"
    _build.__doc__ = f"cdist with p={_p:g} of points with {_coordinates} coordinates."
    plant("pairwise-distance", ["1"], _SHORT)(_build)


@control("pairwise-distance", _SHORT)
def distances_by_product(context: Context) -> Built:
    """Cdist with p=2, which is a product of matrices."""
    return _sequences(context, _Matcher(2.0, 64))
