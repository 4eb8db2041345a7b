"""Batches that are large on the bus because they are copied as floats."""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.launches import Tier
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import distinct
from backspot.results.findings import Finding
from backspot.trace import names
from backspot.trace.events import Mask

__all__ = ["find"]

_LARGE = 4_000_000  # bytes: a smaller copy is not a batch of images
_MULTIPROCESSORS = 120  # of a data centre's GPU, within a third: enough to tell 1 byte from 4
_PER_BLOCK = 512  # elements for each block of a casting kernel


@rule("host-to-device-volume", devices=("cuda",))
def find(evidence: Evidence) -> Finding | None:
    """Find large copies to the device that nothing hides and that no cast follows.

    A trace without shapes does not record the dtype. But bytes that arrive as uint8 are cast to
    floats by the next kernel, and its number of thread blocks gives the number of elements. Without
    such a cast the batch arrived in full width. Copies inside a module's call are left out.
    """
    costs, say = evidence.costs, evidence.wording
    size = evidence.events.size[evidence.work.event]
    work = evidence.work_named(lambda name: name.startswith(names.CUDA_TO_DEVICE))
    work &= (size >= _LARGE) & (evidence.work.span < 0)
    work &= ~_narrow(evidence, work)
    if not work.any():
        return None
    return finding(
        costs.places_of_work(work, elsewhere="(data)"),
        title="Large batches travel to the GPU at full width",
        seen=(
            f"{say.copies(size[work])}: {say.ms(costs.of_work(work))} in which nothing else runs."
        ),
        remedy=(
            "Copy images as uint8, a quarter of the bytes, and cast and normalise them on the GPU. "
            "Copy the next batch on a stream of its own while the GPU computes this one."
        ),
        link="https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
        kernels=costs.top_kernels(work),
    )


def _narrow(evidence: Evidence, copies: Mask) -> Mask:
    """Whether each of these copies seems to move less than half a float for each element."""
    work = evidence.work
    casting = (evidence.launched_in("aten::to", "aten::_to_copy") >= 0) & (work.span < 0)
    size = evidence.events.size[work.event]
    result = np.zeros(len(copies), bool)
    for device in distinct(work.device[copies]):
        mine = np.flatnonzero(copies & (work.device == device))
        kernels = np.flatnonzero((work.tier == Tier.COMPUTE) & (work.device == device))
        kernels = kernels[np.argsort(work.start[kernels], kind="stable")]
        after = np.searchsorted(work.start[kernels], work.end[mine])
        mine, after = mine[after < len(kernels)], after[after < len(kernels)]
        following = kernels[after]
        elements = size[following] / 1000 * _MULTIPROCESSORS * _PER_BLOCK
        # A trace without block counts leaves it open, so the copy counts as narrow.
        small = (size[mine] < 2.5 * elements) | (size[following] < 0)
        result[mine] = casting[following] & small
    return result
