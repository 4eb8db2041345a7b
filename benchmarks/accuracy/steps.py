"""Models with random weights, and one training step of them."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import profiling, synchronize

BATCH = 2
_SIZES = (32, 64, 96, 112, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512, 768, 1024)


def set_up(device: str, memory_fraction: float) -> None:
    """Make this process deterministic, single-threaded and modest."""
    warnings.filterwarnings("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(memory_fraction)
        torch.backends.cudnn.benchmark = False
        with profiling(device):  # the first session of a process loads CUPTI
            torch.ones(8, device=device).sum().item()


def seed(number: int) -> None:
    """Seed whatever a model may draw from."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name, None))


def loss_of(output: Any) -> torch.Tensor:
    """The mean square over all differentiable outputs."""
    parts = [
        part.float().square().mean()
        for part in tensors_in(output)
        if part.requires_grad and part.is_floating_point() and part.numel()
    ]
    if not parts:
        raise RuntimeError("no output requires a gradient")
    return torch.stack(parts).sum()


def build_timm(name: str, device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A timm model in training mode and the smallest input that it takes a step with.

    Raises:
        Exception: what the last try said, where the model takes no step at any size.
    """
    import timm

    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    channels, *native = getattr(config, "input_size", None) or (3, 224, 224)
    least = max((getattr(config, "min_input_size", None) or (0, 0, 0))[1:])
    sizes: list[tuple[int, ...]] = [(size, size) for size in _SIZES if least <= size < max(native)]
    tries = [(False, size) for size in sizes]
    if getattr(config, "fixed_input_size", False):
        tries = [(True, size) for size in sizes]
    tries.append((False, tuple(native)))
    model, built_for = None, None
    for takes_size, size in tries:
        try:
            if model is None or takes_size or built_for is not None:
                model = None
                model = _create(name, {"img_size": size} if takes_size else {}, device)
                built_for = size if takes_size else None
            seed(1)
            data = torch.randn(BATCH, channels, *size, device=device)
            loss_of(model(data)).backward()
            synchronize(device)
        except Exception as error:
            if (takes_size, size) == tries[-1] or _is_final(error):
                raise
            if takes_size and "img_size" in str(error) and isinstance(error, TypeError):
                tries[tries.index((takes_size, size)) + 1 :] = tries[-1:]
        else:
            model.zero_grad(set_to_none=True)
            return model, data
    raise AssertionError("the last try returns or raises")


def _create(name: str, options: dict[str, Any], device: str) -> torch.nn.Module:
    import timm

    seed(0)
    try:
        with torch.device(device):
            return timm.create_model(name, **options).to(device).train()
    except Exception as error:
        if device == "cpu" or _is_final(error) or "img_size" in options:
            raise
        return timm.create_model(name, **options).to(device).train()


def _is_final(error: Exception) -> bool:
    text = str(error)
    return "out of memory" in text or "CUDA error" in text or isinstance(error, MemoryError)


def names_of_nodes(loss: torch.Tensor) -> Counter[str]:
    """The autograd graph's nodes by name."""
    seen = {loss.grad_fn}
    todo = [loss.grad_fn]
    names: Counter[str] = Counter()
    while todo:
        node = todo.pop()
        names[node.name()] += 1
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return names


def same_bits(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> bool:
    """Return whether tensors are equal bit for bit, NaNs too."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    differs = []
    for a, b in zip(one, other, strict=True):
        if (a is None) != (b is None) or (a is not None and a.shape != b.shape):
            return False
        if a is not None:
            a, b = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (a, b))
            kind = kinds[a.element_size()]
            differs.append((a.contiguous().view(kind) != b.contiguous().view(kind)).any())
    return not differs or not bool(torch.stack(differs).any())


def hooks_of(model: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Return the hooks of each module, and whether it takes others."""
    return [
        (
            getattr(module, "_is_full_backward_hook", None),
            *(len(v) for k, v in sorted(vars(module).items()) if "_hooks" in k and v is not None),
        )
        for module in model.modules()
    ]
