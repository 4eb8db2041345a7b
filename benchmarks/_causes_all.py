"""Imports whatever registers a case."""

from __future__ import annotations

import _causes_controls  # noqa: F401
import _causes_data  # noqa: F401
import _causes_gradients  # noqa: F401
import _causes_host  # noqa: F401
import _causes_indexing  # noqa: F401
import _causes_kernels  # noqa: F401
import _causes_params  # noqa: F401
import _causes_ranks  # noqa: F401
from _causes import CASES, Context

__all__ = ["CASES", "Context"]
