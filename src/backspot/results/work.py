"""How much work modules do, and bytes they move: operations, by type of number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from backspot.presented import public
from backspot.results.quantities import SELDOM, Count, Ratio


@public
@dataclass(frozen=True, slots=True)
class WorkOfModule:
    """The work of one module in a typical step, without the modules inside it.

    ``None`` is unknown, not nothing.

    Attributes:
        forward_flops: Floating point operations of the forward: products of matrices, convolutions
            and fused attention, as ``torch.utils.flop_counter`` defines them.
        recompute_flops: Those of forward work that runs again.
        flops: Those of the backward, without ``recompute_flops``.
        forward_bytes: Bytes that the forward must read and write: each element of an input and of
            an output once.
        recompute_bytes: Those of forward work that runs again.
        bytes: Those of the backward.
        flops_by_type: ``flops`` and ``recompute_flops`` by type of number: ``bf16``, ``fp16``,
            ``tf32`` (fp32 on tensor cores), ``fp32``, ``fp64``, ``fp8``.
        forward_flops_by_type: ``forward_flops`` by type of number.
        unknown_share: Share (0 to 1) of its backward in operators that no formula covers.
    """

    forward_flops: Count | None
    recompute_flops: Count | None
    flops: Count | None
    forward_bytes: Count | None
    recompute_bytes: Count | None
    bytes: Count | None
    flops_by_type: dict[str, Count]
    forward_flops_by_type: dict[str, Count]
    unknown_share: Ratio


COUNTS_OF_WORK = (
    *("forward_flops", "recompute_flops", "flops"),
    *("forward_bytes", "recompute_bytes", "bytes"),
)


class _HasWork(Protocol):
    @property
    def work(self) -> WorkOfModule | None: ...
    @property
    def gpu_ns(self) -> int: ...
    @property
    def cpu_ns(self) -> int: ...


def _summed(rows: Sequence[_HasWork], *_around: object) -> WorkOfModule | None:
    """Return the work of several rows together, ``None`` where none is known.

    The time of each in backward weighs its unknown share.
    """
    pairs = [(row.work, row.gpu_ns or row.cpu_ns) for row in rows if row.work is not None]
    if not pairs:
        return None
    total_time = sum(time for _, time in pairs)
    unknown = (
        sum(work.unknown_share * time for work, time in pairs) / total_time if total_time else 0.0
    )
    counts: dict[str, Any] = {}
    for name in COUNTS_OF_WORK:
        values = [count for work, _ in pairs if (count := getattr(work, name)) is not None]
        counts[name] = sum(values) if values else None
    for name in ("flops_by_type", "forward_flops_by_type"):
        sums: Counter[str] = Counter()
        for work, _ in pairs:
            sums.update(getattr(work, name))
        counts[name] = dict(sums)
    return WorkOfModule(**counts, unknown_share=min(1.0, unknown))


@dataclass(frozen=True, kw_only=True)
class InRow:
    """What each row has.

    Attributes:
        work: How much work it does; only with ``record_shapes=True``.
    """

    __slots__ = ()

    work: WorkOfModule | None = field(default=None, metadata={**SELDOM, "summed": _summed})
