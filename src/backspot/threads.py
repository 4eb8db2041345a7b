"""How many threads PyTorch computes with, without a change of the thread that asks."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["thread_count", "thread_count_of_process"]


def thread_count() -> int:
    """Return how many threads PyTorch's operators use on the CPU in the thread that asks.

    PyTorch gives a thread the number of ``torch.set_num_threads`` the first time that the thread
    needs it (``at::internal::lazy_init_num_threads``), and ``torch.get_num_threads`` is a need. A
    training in a thread of its own whose operators are too small to need it would multiply its
    matrices with another number of threads from then on, and so sum in another order. There,
    OpenMP is asked, which changes nothing; where it is not found, PyTorch is.
    """
    torch = sys.modules["torch"]
    if threading.current_thread() is not threading.main_thread():
        openmp = _openmp(Path(str(torch.__file__)).parent / "lib")
        if openmp is not None:
            return int(openmp.omp_get_max_threads())
    return int(torch.get_num_threads())


def thread_count_of_process() -> int:
    """Return the number of ``torch.set_num_threads`` that a new thread gets.

    It is that of the main thread, unless another thread has set it: one that pins batches does.
    """
    torch = sys.modules["torch"]
    if threading.current_thread() is threading.main_thread():
        return int(torch.get_num_threads())
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(int(torch.get_num_threads())))
    try:
        asking.start()
    except RuntimeError:  # Python ends, and the training has
        return int(torch.get_num_threads())
    asking.join()
    return answers[0]


@cache
def _openmp(folder: Path) -> Any:
    """Return the OpenMP library that PyTorch has loaded from a folder; None if there is none."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    for file in (*folder.glob("libgomp*.so*"), *folder.glob("libiomp*.so*")):
        try:
            library = ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:  # it is not loaded
            continue
        if hasattr(library, "omp_get_max_threads"):
            return library
    return None
