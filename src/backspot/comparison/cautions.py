"""What both sides of a comparison warn about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["warnings_of_both"]


def warnings_of_both(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    """Yield each warning once, with the side that has it: ``Before``, ``After`` or ``Both``."""
    for warning in dict.fromkeys((*before, *after)):
        if warning in before:
            yield f"{'Both' if warning in after else 'Before'}: {warning}"
        else:
            yield f"After: {warning}"
