"""The profiler: whether it records, where it starts and stops, its trace; devices and ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch.autograd import profiler as _profiler
from torch.profiler import record_function

from backspot.live.torch_internals.lookup import Location, find, no

# Whether a profiler records on this thread. Where all threads are profiled
# (``profile_all_threads``) PyTorch answers no on every one of them, so both this and the flag below
# are needed. Without it only the flag counts.
enabled_here: Callable[[], bool] = find("autograd", "_profiler_enabled") or no

# Python's flag for the whole process: reading it costs no call. A thread that the profiler does not
# record writes labels for nothing. Without it only ``enabled_here`` counts.
profiling: Any = (
    _profiler
    if hasattr(_profiler, "_is_profiler_enabled")
    else SimpleNamespace(_is_profiler_enabled=False)
)


def recording() -> bool:
    """Return whether a profiler records, on this thread or on all threads."""
    return profiling._is_profiler_enabled or enabled_here()  # the flag first: it costs no call


# Functions that ``sessions`` wraps to notice that a profiler starts, stops, and has stopped. The
# first pair is behind ``torch.profiler``, ``torch.autograd.profiler`` and its ``emit_nvtx`` and
# ``emit_itt``. Without the first, ``hooks="call"`` falls back to node hooks; without the others,
# ranges that outlive their session are not noticed at that moment.
_legacy = find("autograd", "profiler_legacy")
PROFILER_STARTS = (
    Location(_profiler, "_enable_profiler"),
    Location(_legacy, "_enable_profiler_legacy"),
)
PROFILER_STOPS = (
    Location(_profiler, "_disable_profiler"),
    Location(_legacy, "_disable_profiler_legacy"),
)
PROFILER_STOPPED = Location(_profiler, "_run_on_profiler_stop")

# What every profiler of Kineto calls before it starts. Kineto has one recording at a time, and the
# newest takes it over. ``recording`` wraps the function, so that our own ends before. Without it a
# profiler that the script starts while ours records gets an empty trace.
PROFILER_PREPARES = Location(_profiler, "_prepare_profiler")

# A range, opened by ``__enter__`` and closed by ``__exit__``, at a tenth of the cost of the public
# ``record_function``, which is used without it.
new_range: Callable[[str], Any] = find("_C", "_profiler", "_RecordFunctionFast") or record_function


def emit(label: str) -> None:
    """Write a marker: a range that is closed at once, so that none can be left open."""
    with new_range(label):
        pass


# Adds a key to the trace: the table of source lines. Without it the exported trace has no lines.
_add_metadata = find("autograd", "_add_metadata_json")

# The kind of profiler. NVTX and ITT write no trace, and warn about metadata. Without it, they warn.
_profiler_type = find("_C", "_autograd", "_profiler_type")


def add_metadata(key: str, value: str) -> None:
    """Put JSON under a key of the trace that is being recorded."""
    if _add_metadata is None:
        return
    if _profiler_type is None or "KINETO" in _profiler_type().name:
        _add_metadata(key, value)


# The name that a backend from outside of PyTorch has given to its device. Without it: PyTorch's
# name for a device without one.
privateuse1_name: Callable[[], str] = find("_C", "_get_privateuse1_backend_name") or (
    lambda: "privateuseone"
)
