"""Batches that are large on the bus because they travel as floats."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence, Mask
from backspot.analysis.findings.registry import rule
from backspot.analysis.timeline import distinct
from backspot.results.findings import Finding

__all__ = ["find"]

_LARGE = 4_000_000  # bytes: a smaller copy is no batch of images
_MULTIPROCESSORS = 120  # of a data centre's GPU, within a third: one byte is told from four
_PER_BLOCK = 512  # elements that a block of a casting kernel takes


@rule("host-to-device-volume")
def find(evidence: Evidence) -> Finding | None:
    """Find large copies to the device that nothing hides and nothing widens afterwards.

    A trace without shapes does not give the dtype. But bytes that arrive as uint8 are cast to
    floats by the next kernel, whose thread blocks tell how many elements there are; what is used
    as it came was sent in full. What a module fetches from the host is another rule's matter.
    """
    large = evidence.events.size[evidence.work.event] >= _LARGE
    work = evidence.work_named(lambda name: name.startswith("Memcpy HtoD")) & large
    work &= evidence.work.span < 0
    work &= ~_narrow(evidence, work)
    if not work.any():
        return None
    return evidence.finding(
        title="Large batches travel to the GPU at full width",
        seen=(
            f"{evidence.per_step(int(work.sum()), 'copy', 'copies')}{evidence.volume(work)}: "
            f"{evidence.ms(int(evidence.work_ns[work].sum()))} in which nothing else runs."
        ),
        remedy=(
            "Send images as uint8 and cast and normalise them on the GPU: a quarter of the bytes. "
            "Copy the next batch on a stream of its own while this one is computed."
        ),
        link="https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
        places=evidence.places_of_work(work, elsewhere="(data)"),
        kernels=evidence.top_kernels(work),
    )


def _narrow(evidence: Evidence, copies: Mask) -> Mask:
    """Whether each of these copies moves less than half a float for each element, as it seems."""
    work = evidence.work
    casting = (evidence.launched_in("aten::to", "aten::_to_copy") >= 0) & (work.span < 0)
    size = evidence.events.size[work.event]
    result = np.zeros(len(copies), bool)
    for device in distinct(work.device[copies]):
        mine = np.flatnonzero(copies & (work.device == device))
        kernels = np.flatnonzero((work.tier == 0) & (work.device == device))
        kernels = kernels[np.argsort(work.start[kernels], kind="stable")]
        after = np.searchsorted(work.start[kernels], work.end[mine])
        mine, after = mine[after < len(kernels)], after[after < len(kernels)]
        following = kernels[after]
        elements = size[following] / 1000 * _MULTIPROCESSORS * _PER_BLOCK
        # Where the trace does not count blocks, nobody knows.
        small = (size[mine] < 2.5 * elements) | (size[following] < 0)
        result[mine] = casting[following] & small
    return result
