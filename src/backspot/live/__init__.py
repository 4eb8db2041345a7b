"""The live half: it puts labels into whatever trace ``torch.profiler`` is recording."""

from __future__ import annotations

from backspot.live.instrumenting import Instrumentation, instrument

__all__ = ["Instrumentation", "instrument"]
