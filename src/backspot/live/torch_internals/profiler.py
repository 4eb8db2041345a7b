"""The profiler: whether it records, where it starts and stops, its trace; devices and ranks."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler as _profiler
from torch.profiler import record_function

from backspot.live.torch_internals.lookup import Location, Turn, Watch, find, no

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

# What exports the trace of the profiler of one cycle. Without it no export gets backward labels.
_EXPORT = Location(find("autograd", "profiler", "profile"), "export_chrome_trace")

# What every profiler of Kineto calls before it starts. Kineto has one recording at a time, and the
# newest takes it over. ``recording`` wraps the function, so that our own ends before. Without it a
# profiler that the script starts while ours records gets an empty trace.
PROFILER_PREPARES = Location(_profiler, "_prepare_profiler")

# What says once, in a process, that a profile has the events of its last cycle alone; torch 2.8 to
# 2.11 also say it of a first one. Where ours is the first, that is not to be said, nor to count as
# said: the script's own profiler says it. Without it that is said of ours.
PROFILER_WARNS = Location(find("profiler", "profiler"), "_warn_once")

# The modules that torch imports when somebody asks for them. A profiler that is prepared asks for
# Inductor, to know a setting of it. Without it a profiler imports that.
_LAZY_MODULES = Location(torch, "_lazy_modules")


class _WithoutInductor(set[str]):
    def __init__(self, lazy: Iterable[str]) -> None:
        super().__init__(lazy)
        self._thread = threading.get_ident()

    def __contains__(self, name: object) -> bool:
        asked_here = threading.get_ident() == self._thread
        return super().__contains__(name) and not (name == "_inductor" and asked_here)


@contextmanager
def without_inductor() -> Iterator[None]:
    """Have PyTorch not import Inductor inside the block on this thread, unless the program has.

    A script without compiled code and without PyTorch's optimizers never does: the import takes
    seconds, makes a folder for what is compiled, and names it in the environment.
    """
    lazy: Any = _LAZY_MODULES.get()
    if lazy is None or "torch._inductor" in sys.modules:
        yield
        return
    try:
        _LAZY_MODULES.set(_WithoutInductor(lazy))
        yield
    finally:
        _LAZY_MODULES.set(lazy)


# A range, opened by ``__enter__`` and closed by ``__exit__``, at a tenth of the cost of the public
# ``record_function``, which is used without it.
new_range: Callable[[str], Any] = find("_C", "_profiler", "_RecordFunctionFast") or record_function


def emit(label: str) -> None:
    """Write a marker: a range that is closed at once, so that none can be left open."""
    with new_range(label):
        pass


# Adds a key to the trace: the table of source lines. Without it the exported trace has no lines.
_add_metadata = find("autograd", "_add_metadata_json")

# The kind of profiler. NVTX and ITT write no trace, and warn about metadata. Without it, they warn,
# and get no backward labels.
_profiler_type = find("_C", "_autograd", "_profiler_type")


def is_exported_by_kineto() -> bool:
    """Return whether what records on this thread, or on all, has a trace to export."""
    # Where all threads are profiled, the answer is that nothing records.
    return _profiler_type is None or _profiler_type().name in ("KINETO", "NONE")


def add_metadata(key: str, value: str) -> None:
    """Put JSON under a key of the trace that is being recorded."""
    if _add_metadata is None:
        return
    if _profiler_type is None or "KINETO" in _profiler_type().name:
        _add_metadata(key, value)


class Export(NamedTuple):
    """The export of a profiler's trace.

    Attributes:
        run: runs it, and returns what it returns.
        path: the file that it writes.
        other_writer: what else writes or completes the file, if anything; else ``""``.
    """

    run: Callable[[], Any]
    path: Any
    other_writer: str


class Exports:
    """Has a function called in the place of the export of some results of the profiler.

    While there are such results, the method of PyTorch's class is wrapped, and nothing is on a
    profiler: what is bound to it keeps it alive, and its copy is exported as itself. Without such
    results, as once they are exported or gone, nothing is left.

    Args:
        around: called in the place of an export.
    """

    def __init__(self, around: Callable[[Export], Any]) -> None:
        self._around = around
        self._results: set[weakref.ref[Any]] = set()
        self._watch = Watch(_EXPORT, self._export)
        self._turn = Turn()  # results can go at any moment, on any thread

    def add(self, results: Any) -> None:
        """Surround the export of the results of a session."""
        with self._turn:
            self._results.add(weakref.ref(results, self._forget))
            # Other code may have wrapped the method since, or put back what it had found.
            if not self._watch.is_outermost():
                self._watch = Watch(_EXPORT, self._export)
                self._watch.begin()

    def _forget(self, reference: weakref.ref[Any]) -> None:
        with self._turn:
            self._results.discard(reference)
            if not self._results:
                self._watch.end()

    def _export(self, original: partial[Any]) -> Any:
        profiler = original.args[0] if original.args else None
        results = getattr(profiler, "kineto_results", None)
        try:
            awaited = weakref.ref(results)
        except TypeError:  # there are none
            return original()
        if awaited not in self._results:
            return original()
        arguments: dict[str, Any] = dict(zip(("profiler", "path"), original.args, strict=False))
        arguments |= original.keywords  # other code may pass on whatever it is given
        with suppress(TypeError):  # the export itself raises it again
            arguments |= (
                signature(original.func).bind(*original.args, **original.keywords).arguments
            )

        def run() -> Any:
            self._forget(awaited)  # first: a wrapper within that of other code calls nothing again
            try:
                return original()
            except BaseException:
                self.add(results)  # an export that fails can be tried again
                raise

        return self._around(Export(run, arguments.get("path"), _other_writer(profiler, arguments)))


def _other_writer(profiler: Any, arguments: dict[str, Any]) -> str:
    """Return what else writes or completes the file of an export; ``""`` if nothing does."""
    if arguments.get("use_python_export"):
        return "use_python_export=True"
    config = getattr(profiler, "experimental_config", None)
    # Work of the device is merged into the file after the export, at times by another thread.
    if "cupti_monitor" in (getattr(config, "custom_profiler_config", None) or ""):
        return "the CUPTI monitor"
    return ""


# The name that a backend from outside of PyTorch has given to its device. Without it: PyTorch's
# name for a device without one.
privateuse1_name: Callable[[], str] = find("_C", "_get_privateuse1_backend_name") or (
    lambda: "privateuseone"
)
