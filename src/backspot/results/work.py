"""How much work a module does: floating point operations and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from backspot.results.public import public

__all__ = ["WorkOfModule", "summed_work"]


@public
@dataclass(frozen=True, slots=True)
class WorkOfModule:
    """The work of one module in a typical step, without the modules inside it.

    ``None`` is unknown: no operator of this kind has a formula, so the work is not nothing.

    Attributes:
        forward_flops: Floating point operations of its forward: those of products of matrices,
            convolutions and fused attention, by the definitions of ``torch.utils.flop_counter``.
        recompute_flops: The same, of forward work that activation checkpointing runs again.
        flops: The same, of its backward, without ``recompute_flops``.
        forward_bytes: Bytes that its forward reads and writes at least: each element of an input
            once, and each element of an output.
        recompute_bytes: The same, of forward work that runs again.
        bytes: The same, of its backward.
        unknown_share: Share (0 to 1) of its time in backward in operators that no formula covers:
            device time, or host time without a device.
    """

    forward_flops: int | None
    recompute_flops: int | None
    flops: int | None
    forward_bytes: int | None
    recompute_bytes: int | None
    bytes: int | None
    unknown_share: float


def summed_work(
    parts: Iterable[tuple[WorkOfModule | None, int]],
) -> WorkOfModule | None:
    """Return the work of several modules together, ``None`` where none is known.

    Args:
        parts: the work of each, and its time in backward, which weighs its unknown share.
    """
    known = [(one, time) for one, time in parts if one is not None]
    if not known:
        return None
    sums = {
        field.name: _added([getattr(one, field.name) for one, _ in known])
        for field in fields(WorkOfModule)
        if field.name != "unknown_share"
    }
    whole = sum(time for _, time in known)
    unknown = sum(one.unknown_share * time for one, time in known) / whole if whole else 0.0
    return WorkOfModule(**sums, unknown_share=unknown)


def _added(values: Sequence[int | None]) -> int | None:
    some = [value for value in values if value is not None]
    return sum(some) if some else None
