"""The cases, by where their cause is: importing this package registers all of them.

``plant`` registers a cause that a rule must find, ``control`` the same thing done well. A
case's function holds what differs from a well-built model; the models are in
``benchmarks/models.py`` and their training steps in ``benchmarks/causes/training.py``.

- ``data``: between host and GPU: copies, and batches that come late.
- ``host``: launches, small batches, work that stays on the CPU.
- ``indexing``: waits, sorts and duplicates in the backward of indexing.
- ``kernels``: casts, layouts, no tensor cores, attention on the math path.
- ``gradients``: dense table gradients, backwards that cost many forwards.
- ``parameters``: accumulation, unused gradients, optimizers, recomputation.
- ``chains``: many operators that should be one, copies, gradients that nobody needs.
- ``slow_kernels``: operators without a fast kernel on a GPU.
- ``layers``: tables made again, layers off their fast kernel, losses of many classes, DDP's search.
- ``memory``: memory that is asked of the driver in each step, and given back.
- ``processor``: what makes steps slow on a processor without a GPU.
- ``ranks``: two GPUs: communication, and copies between devices.
- ``sharding``: two ranks: modules that are sharded one by one.
- ``controls``: the same models done well.
"""

from __future__ import annotations

from benchmarks.causes.case import CASES as CASES
from benchmarks.causes.cases import (  # noqa: F401 - each registers its own
    chains,
    controls,
    data,
    gradients,
    host,
    indexing,
    kernels,
    layers,
    memory,
    parameters,
    processor,
    ranks,
    sharding,
    slow_kernels,
)
