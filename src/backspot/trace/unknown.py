"""Events of categories that nobody here knows, such as another accelerator's: counted, and told.

Without them a report of that accelerator's work reads like one of the host alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from backspot.formatting import counted, duration, visible

__all__ = ["Unknown"]

# What the profiler writes beside the work of host and devices.
_BESIDE = frozenset(
    {
        "",
        "Trace",
        "collective_comm",
        "cpu_instant_event",
        "cuda_event",
        "cuda_profiler_range",
        "cuda_sync",
        "external_correlation",
        "gpu_user_annotation",
        "overhead",
        "python_function",
    }
)
_NAMED = 3
_LONGEST = 40
_MOST_NS = float(1 << 62)


class Unknown:
    """Counts what is left out, by category."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, float]] = {}

    def add(self, events: Iterable[tuple[str | None, float | None]]) -> None:
        """Note events that no category is known for.

        Args:
            events: the category and the nanoseconds of each.
        """
        for category, ns in events:
            if category is None or category in _BESIDE:
                continue
            lasting = ns if ns is not None and 0 <= ns < _MOST_NS else 0
            count, spent = self._found.get(category, (0, 0))
            self._found[category] = count + 1, spent + lasting

    def extend(self, other: Unknown) -> None:
        """Add what another reader noted."""
        for category, (count, spent) in other._found.items():
            mine, own = self._found.get(category, (0, 0))
            self._found[category] = mine + count, own + spent

    def warnings(self) -> tuple[str, ...]:
        """What a reader of the report must know, if anything."""
        ranked = sorted(self._found.items(), key=lambda item: (-item[1][1], -item[1][0], item[0]))
        if not ranked:
            return ()
        told = [
            f"{visible(category[:_LONGEST])} ({counted(count, 'event')}, {duration(spent)})"
            for category, (count, spent) in ranked[:_NAMED]
        ]
        if len(ranked) > _NAMED:
            told.append(f"{len(ranked) - _NAMED} more")
        return (
            f"Left out are events of kinds that Backspot does not know: {', '.join(told)}. If that "
            "is a device's work, it is missing here, and the times are those of the rest.",
        )
