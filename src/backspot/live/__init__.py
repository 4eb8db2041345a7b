"""The live half: labels in whatever trace ``torch.profiler`` is recording, or in one of its own."""

from __future__ import annotations

from backspot.errors import MissingDependencyError

try:
    import torch as _torch  # noqa: F401 - a torch that is there but broken tells its own story
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingDependencyError(
        "backspot.profile and backspot.instrument need torch, which is not installed: "
        "pip install torch (traces are read without it: backspot.locate, backspot show)"
    ) from None

from backspot.live.instrumentation import Instrumentation, instrument
from backspot.live.profiling import profile

__all__ = ["Instrumentation", "instrument", "profile"]
