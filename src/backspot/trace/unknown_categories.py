"""Count the events of unknown categories, such as those of another accelerator, and warn of them.

Without the warning, a report that misses an accelerator's work would read like one of a model that
runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable

from backspot.formatting import counted, duration, visible
from backspot.trace.names import OTHER_CATEGORIES

_NAMED = 3
_LONGEST = 40
_MOST_NS = float(1 << 62)


class UnknownCategories:
    """Counts the events of each unknown category."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, float]] = {}

    def add(self, events: Iterable[tuple[str | None, float | None]]) -> None:
        """Add events, by the category of each and its nanoseconds."""
        for category, ns in events:
            if category is None or category in OTHER_CATEGORIES:
                continue
            lasting = ns if ns is not None and 0 <= ns < _MOST_NS else 0
            count, spent = self._found.get(category, (0, 0))
            self._found[category] = count + 1, spent + lasting

    def extend(self, other: UnknownCategories) -> None:
        """Add the counts of another reader."""
        for category, (count, spent) in other._found.items():
            count_before, own = self._found.get(category, (0, 0))
            self._found[category] = count_before + count, own + spent

    @property
    def any(self) -> bool:
        """Whether there are such events."""
        return bool(self._found)

    def warnings(self) -> tuple[str, ...]:
        """Return a warning that names the longest categories; empty if there are none."""
        ranked = sorted(self._found.items(), key=lambda item: (-item[1][1], -item[1][0], item[0]))
        if not ranked:
            return ()
        listed = [
            f"{visible(category[:_LONGEST])} ({counted(count, 'event')}, {duration(spent)})"
            for category, (count, spent) in ranked[:_NAMED]
        ]
        if len(ranked) > _NAMED:
            listed.append(f"{len(ranked) - _NAMED} more")
        return (
            f"Events of unknown kinds were left out: {', '.join(listed)}. If they are a device's "
            "work, that work is missing here, and the times are those of the rest.",
        )
