"""How many threads PyTorch computes with, without a change of the thread that asks."""

from __future__ import annotations

import sys
import threading
from typing import Any

__all__ = ["thread_count"]


def thread_count() -> int:
    """Return how many threads an operator of PyTorch uses on the CPU; 0 before torch is imported.

    A new thread asks. PyTorch gives a thread the number of ``torch.set_num_threads`` the first time
    that the thread needs it (``at::internal::lazy_init_num_threads``), and the question is a need.
    A training in a thread of its own whose operators are too small to need it would multiply its
    matrices with another number of threads from then on, and so sum in another order.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return 0
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(int(torch.get_num_threads())))
    try:
        asking.start()
    except RuntimeError:  # Python ends, or the system has no thread left: the training has ended
        return int(torch.get_num_threads())
    asking.join()
    return answers[0]
