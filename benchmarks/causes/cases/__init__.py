"""All cases: importing this package registers them."""

from __future__ import annotations

from benchmarks.causes.case import CASES, Context
from benchmarks.causes.cases import (  # noqa: F401 - each registers its own
    controls,
    data,
    gradients,
    host,
    indexing,
    kernels,
    parameters,
    ranks,
)

__all__ = ["CASES", "Context"]
