"""How much work a module does: floating point operations and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
            What an optimizer computes is no forward.
        recompute_flops: The same, of forward work that activation checkpointing runs again.
        flops: The same, of its backward, without ``recompute_flops``.
        forward_bytes: Bytes that its forward reads and writes at least: each element of an input
            once, and each element of an output.
        recompute_bytes: The same, of forward work that runs again.
        bytes: The same, of its backward.
        flops_by_type: ``flops`` and ``recompute_flops`` together, by the type of the numbers that
            are multiplied: ``bf16``, ``fp16``, ``fp32``, ``tf32`` (fp32 on tensor cores), ``fp64``,
            ``fp8``.
        forward_flops_by_type: The same, of the forward.
        unknown_share: Share (0 to 1) of its time in backward in operators that no formula covers:
            device time, or host time without a device.
    """

    forward_flops: int | None
    recompute_flops: int | None
    flops: int | None
    forward_bytes: int | None
    recompute_bytes: int | None
    bytes: int | None
    flops_by_type: dict[str, int]
    forward_flops_by_type: dict[str, int]
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
    whole = sum(time for _, time in known)
    unknown = sum(one.unknown_share * time for one, time in known) / whole if whole else 0.0
    works = [one for one, _ in known]
    return WorkOfModule(
        forward_flops=_added([one.forward_flops for one in works]),
        recompute_flops=_added([one.recompute_flops for one in works]),
        flops=_added([one.flops for one in works]),
        forward_bytes=_added([one.forward_bytes for one in works]),
        recompute_bytes=_added([one.recompute_bytes for one in works]),
        bytes=_added([one.bytes for one in works]),
        flops_by_type=_merged([one.flops_by_type for one in works]),
        forward_flops_by_type=_merged([one.forward_flops_by_type for one in works]),
        unknown_share=min(1.0, unknown),
    )


def _merged(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            sums[name] = sums.get(name, 0) + count
    return sums


def _added(values: Sequence[int | None]) -> int | None:
    some = [value for value in values if value is not None]
    return sum(some) if some else None
