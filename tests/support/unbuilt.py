"""Code of Inductor without its kernels: to build one in C++ takes a second of a core."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that compute nothing, and have the name in a trace that C++ gives them.

    Whose kernels they are is in the code of Python around them, which is as ever.
    """
    fast = torch._C._profiler._RecordFunctionFast

    def kernel(_: object, _arguments: object, source: str) -> Callable[..., None]:
        named = re.search(r'record_\w+_?\("(\w+)"', source)  # with ``cpp.enable_kernel_profile``
        name = named[1] if named else "kernel"

        def run(*_: object) -> None:
            with fast(name):
                pass

        return run

    async_compile = pytest.importorskip("torch._inductor.async_compile")
    # Modules of generated code are kept with their kernels: no test has those of another.
    kept = pytest.importorskip("torch._inductor.codecache").PyCodeCache
    forget = getattr(kept, "cache_clear", None) or kept.clear  # of PyTorch before 2.5
    forget()
    monkeypatch.setattr(async_compile.AsyncCompile, "cpp_pybinding", kernel)
    yield
    forget()
