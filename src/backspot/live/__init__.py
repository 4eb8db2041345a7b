"""The live half: labels in whatever trace ``torch.profiler`` is recording, or in one of its own."""

from __future__ import annotations

from backspot.live.instrumenting import Instrumentation, instrument
from backspot.live.profiling import profile

__all__ = ["Instrumentation", "instrument", "profile"]
