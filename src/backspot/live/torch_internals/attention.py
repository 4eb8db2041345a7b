"""Which kernels attention runs: the backends of PyTorch's, and attention that is written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from backspot.live.torch_internals.lookup import find
from backspot.live.torch_internals.process import tree_map

# The backend that PyTorch takes for such inputs, as a number. Without it no backend is known.
_choice: Callable[..., int] | None = find("_fused_sdp_choice")


class AttentionWatch(TorchFunctionMode):  # type: ignore[misc] # untyped
    """Sees which backends ``scaled_dot_product_attention`` takes, and could take, on this thread.

    Args:
        backends: those to ask for.

    Attributes:
        taken: the number of each backend that was taken.
        possible: those that could be taken by all calls.
        calls: how many calls there were.
    """

    def __init__(self, backends: Sequence[SDPBackend]) -> None:
        super().__init__()
        self.taken: set[int] = set()
        self.possible = set(backends)
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function as it is, and note what attention takes."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and _choice is not None:
            self.calls += 1
            arguments, named = tree_map(_as_autocast_has_it, (args, kwargs))
            self.taken.add(_choice(*arguments, **named))
            for backend in tuple(self.possible):
                # Another one must be allowed: PyTorch warns where none is possible.
                with sdpa_kernel([backend, SDPBackend.MATH]):
                    if _choice(*arguments, **named) != int(backend):
                        self.possible.discard(backend)
        return func(*args, **kwargs)

    def takes(self, backend: SDPBackend) -> bool:
        """Return whether all calls take this backend by themselves."""
        return self.taken == {int(backend)}


def _as_autocast_has_it(value: Any) -> Any:
    """Return a tensor as autocast casts it, which happens after the watch has seen it."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return value
    kind = value.device.type
    return value.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else value


def is_written_out(module: torch.nn.Module) -> bool:
    """Return whether a model of Transformers computes its attention operator by operator."""
    if not hasattr(module, "set_attn_implementation"):
        return False
    return getattr(getattr(module, "config", None), "_attn_implementation", "") == "eager"


def can_be_fused(module: torch.nn.Module) -> bool:
    """Return whether such a model can have PyTorch's attention in place of that."""
    can: Callable[[], bool] = getattr(module, "_can_set_attn_implementation", lambda: False)
    return bool(getattr(module, "_supports_sdpa", False)) and can()


def fuse(module: Any) -> None:
    """Have such a model run PyTorch's attention."""
    module.set_attn_implementation("sdpa")
