"""All of a process that a training can observe, for a comparison of before and after."""

from __future__ import annotations

import asyncio
import gc
import locale
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def process_state(*own: str) -> dict[str, Any]:
    """What anybody can observe of this process, by name; compare two of them with ``changes``.

    Args:
        own: folders of the script's own; their modules must stay as they are.
    """
    found: dict[str, Any] = dict(_of_python(own))
    if "numpy" in sys.modules:
        found |= _of_numpy(sys.modules["numpy"])
    if "torch" in sys.modules:
        found |= _of_torch(sys.modules["torch"])
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs, by name."""
    return {
        name: (before.get(name), after.get(name))
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
    }


def _of_python(own: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    yield "random", random.getstate()
    yield "recursion limit", sys.getrecursionlimit()
    yield "switch interval", sys.getswitchinterval()
    for number in signal.valid_signals():
        yield f"handler of {number}", signal.getsignal(number)
    yield "trace and profile", (sys.gettrace(), sys.getprofile())
    yield "of threads", (threading._trace_hook, threading._profile_hook)
    yield "warnings", (list(warnings.filters), warnings.showwarning, warnings.defaultaction)
    yield "once", dict(warnings.onceregistry)
    yield "locale", locale.setlocale(locale.LC_ALL)
    yield "environment", dict(os.environ)
    yield "folder and mask", (os.getcwd(), _mask())  # noqa: PTH109
    yield "path", (list(sys.path), list(sys.argv))
    yield "finders", [*map(id, sys.meta_path), *map(id, sys.path_hooks)]
    main = sys.modules["__main__"]  # also as __mp_main__, once joblib is imported
    for name, module in list(sys.modules.items()):
        path = str(getattr(module, "__file__", None))
        if path.startswith(own or ("\0",)) and module is not main:
            yield f"module {name}", (id(module), {**vars(module)}.keys())
    yield "gc", (gc.get_threshold(), gc.isenabled(), gc.get_freeze_count(), gc.get_debug())
    yield "gc callbacks", list(gc.callbacks)
    yield "logging", (logging.root.level, list(logging.root.handlers), logging.root.manager.disable)
    yield "loggers", _loggers()
    # The folder is open while it is listed, and CUDA opens its devices when it is first used.
    opened = [file for file in Path("/proc/self/fd").iterdir() if file.exists()]
    files = {file.name: os.readlink(file) for file in opened}  # noqa: PTH115
    yield "files", {key: to for key, to in files.items() if not to.startswith("/dev/nvidia")}
    hooks = ("excepthook", "unraisablehook", "displayhook", "breakpointhook")
    yield "hooks", [getattr(sys, name) for name in hooks] + [threading.excepthook]
    yield "streams", [getattr(sys, name) for name in ("stdin", "stdout", "stderr", "__stdout__")]
    yield "ways to start", multiprocessing.get_start_method(allow_none=True)
    yield "threads", {thread.name for thread in threading.enumerate()}
    yield "int digits", sys.get_int_max_str_digits()
    yield "loop policy", type(asyncio.get_event_loop_policy())
    yield "main", id(main)


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _loggers() -> dict[str, Any]:
    return {
        name: (logger.level, logger.propagate, logger.disabled, list(logger.handlers))
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and (logger.level or logger.handlers)
    }


def _of_numpy(numpy: Any) -> dict[str, Any]:
    kind, keys, *rest = numpy.random.get_state()
    return {
        "numpy.random": (kind, keys.tobytes(), *rest),
        "numpy errors": numpy.geterr(),
        "numpy printing": str(numpy.get_printoptions()),
    }


_SWITCHES = (
    "get_default_dtype",
    "get_default_device",
    "get_num_threads",
    "get_num_interop_threads",
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "is_anomaly_enabled",
    "is_autocast_enabled",
    "get_autocast_gpu_dtype",
    "is_autocast_cache_enabled",
    "are_deterministic_algorithms_enabled",
    "get_float32_matmul_precision",
    "is_warn_always_enabled",
)


def _of_torch(torch: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"torch.random": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_initialized():
        found["cuda.random"] = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
        found["cuda device"] = torch.cuda.current_device()
    found |= {name: getattr(torch, name)() for name in _SWITCHES}
    found["autocast on the host"] = torch.is_autocast_enabled("cpu")
    found["multithreaded backward"] = torch.autograd.is_multithreading_enabled()
    backends = torch.backends
    for name, home, flags in (
        ("matmul", backends.cuda.matmul, ("allow_tf32", "allow_fp16_reduced_precision_reduction")),
        ("cudnn", backends.cudnn, ("enabled", "benchmark", "deterministic", "allow_tf32")),
        ("mkldnn", backends.mkldnn, ("enabled",)),
        ("opt_einsum", backends.opt_einsum, ("enabled", "strategy")),
    ):
        found |= {f"{name}.{flag}": getattr(home, flag) for flag in flags}
    modules = sys.modules["torch.nn.modules.module"]
    found |= {
        name: dict(value)
        for name, value in vars(modules).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }
    optimizers = sys.modules["torch.optim.optimizer"]
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        found[name] = dict(vars(optimizers)[name])
    for home, names in (
        (torch.nn.Module, ("__call__", "_call_impl", "__setattr__", "__deepcopy__")),
        (torch.Tensor, ("backward", "__torch_function__", "register_hook")),
        (torch.optim.Optimizer, ("step", "zero_grad", "profile_hook_step")),
        (torch.autograd.profiler, ("_run_on_profiler_start", "_run_on_profiler_stop")),
        (torch.autograd, ("backward", "grad")),
        (torch.autograd.Variable, ("_execution_engine",)),
    ):
        found |= {f"{home.__name__}.{name}": id(vars(home).get(name)) for name in names}
    found["a profiler records"] = torch.autograd.profiler._is_profiler_enabled
    return found
