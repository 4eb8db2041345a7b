"""Causes between the host and the GPU: copies, and the next batch that is not there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.causes.case import DATA, Built, Context, pinned, plant
from benchmarks.causes.training import put, train_gpt, train_resnet, train_unet, train_vit
from benchmarks.models import Layer, gpt, resnet, unet, vit

_HOST_WAITS = {"launch-bound": "the host waits for the copy, and the GPU's queue runs dry"}
_BOTH_WAYS = {
    **_HOST_WAITS,
    "pageable-copy": "both copies go through pageable memory",
    "host-waits": "so do the gradient's, and the host waits for them in the backward",
    "backward-ratio": "the gradient is copied both ways as well",
}


def raw(context: Context, batch: int, side: int) -> torch.Tensor:
    """A batch as a decoder leaves it: bytes, on the host."""
    shape = (context.pick(batch, 2), 3, *(2 * (context.pick(side, 32),)))
    data = torch.randint(0, 256, shape, dtype=torch.uint8)
    return data.contiguous(memory_format=torch.channels_last)


def moved(
    context: Context,
    batches: Iterable[torch.Tensor],
    dtype: torch.dtype,
    *,
    wait: bool = False,
) -> Iterator[torch.Tensor]:
    """Batches on the device, as numbers from 0 to 1."""
    while True:
        for batch in batches:
            data = batch.to(context.device, non_blocking=not wait)
            data = data.to(dtype)
            yield data / 255 if batch.dtype == torch.uint8 else data


# pageable-copy ------------------------------------------------------------------------------------


@plant("pageable-copy", DATA, _HOST_WAITS)
def pageable_images_vit(context: Context) -> Built:
    """A batch of bytes copied from pageable memory."""
    source = moved(context, [raw(context, 192, 224)], torch.bfloat16, wait=True)
    return train_vit(context, vit(context), source)


@plant("pageable-copy", DATA, _HOST_WAITS)
def pageable_non_blocking_resnet(context: Context) -> Built:
    """non_blocking=True from memory that is not pinned."""
    source = moved(context, [raw(context, 384, 224)], torch.float32)
    return train_resnet(context, resnet(context), source)


class _HostTable(nn.Module):
    """Keeps a table on the host and copies it at each call."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.table = [torch.zeros(shape, dtype=torch.bfloat16)]  # a list: ``to`` must not see it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[0].to(x.device).sum(0)


@plant("pageable-copy", ["extra"], _HOST_WAITS)
def pageable_table_gpt(context: Context) -> Built:
    """A table that was not registered as a buffer: copied at every call."""
    model = gpt(context)
    model.extra = _HostTable((context.pick(24, 2), model.wpe.num_embeddings, model.width))
    return train_gpt(context, model)


@plant(
    "pageable-copy",
    ["skip.0"],
    {**_HOST_WAITS, "host-to-device-volume": "it is large", "layout-copies": "added in NCHW"},
)
def pageable_map_unet(context: Context) -> Built:
    """A map that is no buffer, and so stays on the host and is sent in each forward."""

    class Shifted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "shift"):
                self.shift = torch.zeros(x.shape[1:]).expand(8, -1, -1, -1).contiguous()
            return x + self.shift.to(x.device).mean(0)

    model = unet(context)
    model.skip[0] = Shifted()
    return train_unet(context, model)


@plant(
    "device-copies",
    ["skip.0"],
    {**_HOST_WAITS, "cpu-operators": "it sums them there", "device-copies": "to read a mean"},
)
def pageable_monitor_unet(context: Context) -> Built:
    """Features brought to the host each step to be watched."""

    class Watched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x.detach()[:16].cpu()
            return x

    model = unet(context)
    model.skip[0] = Watched()
    return train_unet(context, model)


# host-to-device-volume ----------------------------------------------------------------------------


def _numbers(context: Context, batch: int, side: int, dtype: torch.dtype) -> torch.Tensor:
    return pinned(context, raw(context, batch, side).to(dtype) / 255)


@plant("host-to-device-volume", DATA)
def volume_floats_vit(context: Context) -> Built:
    """Images as fp32 from pinned memory."""
    source = moved(context, [_numbers(context, 192, 224, torch.float32)], torch.bfloat16)
    return train_vit(context, vit(context), source)


@plant("host-to-device-volume", DATA)
def volume_floats_resnet(context: Context) -> Built:
    """Images as fp32 from pinned memory, for convolutions."""
    source = moved(context, [_numbers(context, 384, 224, torch.float32)], torch.float32)
    return train_resnet(context, resnet(context), source)


@plant("host-to-device-volume", DATA, {"casts": "64-bit images are cast on the GPU"})
def volume_doubles_resnet(context: Context) -> Built:
    """Images as float64, as NumPy makes them."""
    source = moved(context, [_numbers(context, 192, 224, torch.float64)], torch.float32)
    return train_resnet(context, resnet(context), source)


@plant("host-to-device-volume", DATA)
def volume_crops_unet(context: Context) -> Built:
    """Five crops of each image as fp32, of which the step takes one."""
    crops = _numbers(context, 160, 256, torch.float32)

    def source() -> Iterator[torch.Tensor]:
        for batch in moved(context, [crops], torch.float32):
            yield batch[: context.pick(32, 2)]

    return train_unet(context, unet(context), source())


# waiting-for-data ---------------------------------------------------------------------------------


class Pictures(Dataset[torch.Tensor]):
    """Batches that take ``seconds`` to come."""

    def __init__(self, context: Context, batch: int, seconds: float) -> None:
        self.seconds = seconds
        self.data = raw(context, batch, 224)

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.data


class _Stream(IterableDataset[torch.Tensor]):
    """As ``Pictures``, without an order."""

    def __init__(self, inner: Pictures) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield self.inner[0]


class _Augmented(Dataset[torch.Tensor]):
    """Single pictures, cropped and flipped one by one on the host."""

    def __init__(self, context: Context, count: int) -> None:
        self.data = raw(context, 16, 256)
        self.count = context.pick(count, 2)
        self.side = context.pick(224, 32)

    def __len__(self) -> int:
        return 1000 * self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        picture = self.data[index % len(self.data)]
        picture = picture[:, : self.side, : self.side].flip(-1)
        return picture.float().mul(1.01).clamp(0, 255).to(torch.uint8)


def loaded(
    context: Context,
    dataset: Dataset[torch.Tensor],
    dtype: torch.dtype,
    **options: Any,
) -> tuple[Iterator[torch.Tensor], Callable[[], None]]:
    """Batches from a loader, on the device; and what stops its workers."""
    loader: DataLoader[torch.Tensor] = DataLoader(
        dataset,
        **{"batch_size": None, "pin_memory": context.device != "cpu", **options},
    )
    batches = moved(context, loader, dtype)
    return batches, batches.close  # type: ignore[attr-defined]


@plant("waiting-for-data", DATA)
def data_slow_vit(context: Context) -> Built:
    """A loader without workers whose batches take 25 ms."""
    source, close = loaded(context, Pictures(context, 192, 0.025), torch.bfloat16)
    return train_vit(context, vit(context), source, close=close)


@plant("waiting-for-data", DATA)
def data_two_workers_resnet(context: Context) -> Built:
    """Two workers, where six would be needed."""
    pictures = Pictures(context, 256, context.pick(150, 5) / 1000)
    source, close = loaded(context, pictures, torch.float32, num_workers=2, prefetch_factor=2)
    return train_resnet(context, resnet(context), source, close=close)


@plant("waiting-for-data", DATA)
def data_stream_vit(context: Context) -> Built:
    """A stream that gives a batch each 40 ms, read in the training process."""
    stream = _Stream(Pictures(context, 192, 0.04))
    source, close = loaded(context, stream, torch.bfloat16)
    return train_vit(context, vit(context), source, close=close)


@plant("waiting-for-data", DATA, {"cpu-operators": "the augmentation runs there, before the step"})
def data_augmented_resnet(context: Context) -> Built:
    """Pictures augmented one by one in the training process."""
    pictures = _Augmented(context, 256)
    source, close = loaded(context, pictures, torch.float32, batch_size=pictures.count)
    return train_resnet(context, resnet(context), source, close=close)


# device-copies ------------------------------------------------------------------------------------


def _round_trip(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().to(x.device)


@plant("device-copies", ["tokens"], _BOTH_WAYS)
def trip_vit(context: Context) -> Built:
    """Tokens taken to the host and back, gradients too."""
    return train_vit(context, put(vit(context), tokens=Layer(_round_trip)))


@plant(
    "device-copies",
    ["h.1", "h.1.*"],
    {"host-waits": "what was offloaded is waited for", "launch-bound": "for the same reason"},
)
def trip_offload_gpt(context: Context) -> Built:
    """A block's activations offloaded to the host, on a GPU with room to spare."""

    class Offloaded(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu(pin_memory=x.is_cuda):
                return self.inner(x)

    model = gpt(context)
    model.h[1] = Offloaded(model.h[1])
    return train_gpt(context, model)


@plant("device-copies", ["skip.0"], {**_BOTH_WAYS, "cpu-operators": "NumPy's input is made there"})
def trip_numpy_unet(context: Context) -> Built:
    """A mask computed with NumPy from features in the middle of the forward."""

    def masked(x: torch.Tensor) -> torch.Tensor:
        seen = x.detach().float().cpu().numpy()
        return x * torch.from_numpy(seen > -1e9).to(x.device)

    model = unet(context)
    model.skip[0] = Layer(masked)
    return train_unet(context, model)


@plant("device-copies", ["extra"], _BOTH_WAYS)
def trip_gradient_gpt(context: Context) -> Built:
    """A hook that takes the gradient to the host and back."""

    def logged(x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        x.register_hook(lambda gradient: gradient.cpu().to(gradient.device))
        return x

    return train_gpt(context, put(gpt(context), extra=Layer(logged)))
