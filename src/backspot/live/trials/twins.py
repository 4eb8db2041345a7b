"""Copies of tensors, within the memory that is free, and what runs on them again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from backspot.live.free_memory import spaces
from backspot.live.torch_internals.process import tree_map

Run = Callable[[], object]
Autocast = tuple[str, bool, torch.dtype]
"""The kind of device, whether autocast is on, and its dtype."""

_MOST_BYTES, _MOST_ON_GPU = 1 << 30, 8 << 30
"""What the copies of one trial may take, however much is free."""


class Refused(Exception):  # noqa: N818 - it is no error
    """Why this cannot be tried; a sentence without its end."""


def check_plain(*tensors: torch.Tensor) -> None:
    """Refuse tensors of a class of their own, which may belong to other ranks.

    Raises:
        Refused: If a tensor is of another class, or not strided.
    """
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise Refused(f"a {type(tensor).__name__} cannot be copied apart from the training")
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise Refused("sparse tensors cannot be copied with their layout")


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a copy with the same strides."""
    if not tensor.numel():
        return 0
    reach = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return int((1 + reach) * tensor.element_size())


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf with the same values, strides and dtype, in memory of its own."""
    source = tensor.detach()
    for dim, (size, stride) in enumerate(zip(source.size(), source.stride(), strict=True)):
        if size > 1 and stride == 0:  # expanded: one of them is all there is
            source = source.narrow(dim, 0, 1)
    with torch.no_grad():
        copy = torch.empty_strided(
            source.size(), source.stride(), dtype=source.dtype, device=source.device
        )
        copy = copy.copy_(source).expand(tensor.size())
    return copy.detach().requires_grad_(tensor.requires_grad)


def touched(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of any dtype on the host, in memory of its own that was written.

    Zeros would all be one page of the system, which no copy has to read from memory. Some dtypes
    cannot be filled, so that bytes are.
    """
    size = shape.numel() * dtype.itemsize
    return torch.ones(size, dtype=torch.uint8).view(dtype).view(shape)


def copied(tree: Any, of: Callable[[torch.Tensor], torch.Tensor] = twin) -> Any:
    """Return nested lists and dictionaries with copies of their tensors, as ``of`` makes them."""
    return tree_map(lambda leaf: of(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def free_bytes(device: torch.device) -> int:
    """Return how much memory the copies of a trial may take: half of what is free, and a limit."""
    if device.type == "cuda":
        return min(int(torch.cuda.mem_get_info(device)[0]) // 2, _MOST_ON_GPU)
    return min([*(space.free // 2 for space in spaces()), _MOST_BYTES])


def check_fits(tensors: Iterable[torch.Tensor], times: float = 1.0) -> None:
    """Refuse copies that take more than half of the memory that is free.

    Raises:
        Refused: with how much it would take.
    """
    tensors = list(tensors)
    if tensors:
        check_room(tensors[0].device, int(times * sum(map(size_of, tensors))))


def check_room(device: torch.device, needed: int) -> None:
    """Refuse to take so many bytes where they are more than copies may."""
    if needed > (most := free_bytes(device)):
        raise Refused(f"copies take {needed >> 20:,} MiB, and a trial may take {most >> 20:,}")


def forward_and_backward(
    function: Callable[[], torch.Tensor],
    leaves: Sequence[torch.Tensor],
    autocast: Autocast,
    times: int = 1,
) -> Run:
    """Return what runs a function so often, and then each backward to its leaves, in autocast.

    Several forwards come before the first backward, as in a step: what they keep is no longer in
    the caches then. Gradients are not accumulated: leaves stand for tensors within a graph.
    """
    kind, on, dtype = autocast
    seeds: list[torch.Tensor] = []

    def run() -> None:
        with torch.autocast(kind, enabled=on, dtype=dtype):
            outs = [function() for _ in range(times)]
        if not outs[0].requires_grad:
            return
        if not seeds:
            seeds.append(numbers_like(outs[0]))
        while outs:
            torch.autograd.grad(outs.pop(), leaves, seeds[0], allow_unused=True)

    return run


def numbers_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return small random numbers, without the training's generators."""
    generator = torch.Generator(tensor.device).manual_seed(0)
    numbers = torch.randn(tensor.shape, generator=generator, device=tensor.device)
    return (1e-3 * numbers).to(tensor.dtype)
