"""Models with random weights, one training step of them, and what machine this is."""

from __future__ import annotations

import os
import platform
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

BATCH = 2
_SIZES = (32, 64, 96, 112, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512, 768, 1024)

Step = Callable[[], torch.Tensor]


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


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def profiling(device: str) -> Iterator[Any]:
    """A profiler of host and device that ends when the device is through."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as prof:
        yield prof
        synchronize(device)


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


def machine(device: str) -> dict[str, str]:
    """The hardware and the versions that a summary states."""
    import timm

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": "cpu",
    }
    try:
        import transformers

        found["transformers"] = transformers.__version__
    except ImportError:
        pass
    if device == "cuda":
        import subprocess

        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
        try:
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            found["driver"] = said.stdout.split()[0]
        except (OSError, IndexError, subprocess.SubprocessError):
            found["driver"] = "unknown"
    return found
