"""Memory that a sample of a report has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from backspot.results.memory import MemoryOfDevice, MemoryOfModule, MemoryShare, MemoryTimeline
from backspot.results.report import Report


def with_memory(plain: Report, paths: Sequence[str]) -> Report:
    """Add what each module holds on a GPU, and eight of them over time."""
    rows = []
    for index, one in enumerate(plain.modules, 1):
        held = 10**8 * index
        memory = MemoryOfModule(held, held, 2 * held, held, held, 2 * held, held // 2)
        rows.append(replace(one, memory=memory))
    live = tuple(
        MemoryShare(one.path, one.class_name, "activation", 10**8 * index, 2)
        for index, one in enumerate(rows, 1)
    )
    peak = sum(share.bytes for share in live)
    device = MemoryOfDevice(
        device=0,
        peak_bytes=peak,
        peak_ns=2_000_000,
        peak_path=rows[0].path,
        peak_phase="backward",
        peak_step=0,
        before_bytes=0,
        reserved_bytes=2 * peak,
        reserved_at_peak_bytes=2 * peak,
        live=live,
        least_by_step=(0, 0),
        timeline=MemoryTimeline(
            paths=("(before the recording)", *paths),
            ns=(1_000_000, 2_000_000, 4_000_000),
            allocated_bytes=(0, peak, peak // 2),
            bytes_by_path=((0, 0, 0), *[(0, peak // 9, peak // 18)] * 8),
        ),
    )
    return replace(plain, modules=tuple(rows), memory=(device,))
