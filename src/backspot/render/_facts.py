"""Short facts in a row, parted by dots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.text import Text

__all__ = ["fact_lines"]


def fact_lines(facts: Sequence[str], width: int) -> Iterator[Text]:
    """Facts in a row, broken between facts only; a line that goes on below ends with a dot."""
    line = facts[0][:1].upper() + facts[0][1:]
    for left, fact in zip(range(len(facts) - 1, 0, -1), facts[1:], strict=True):
        more = " ·" if left > 1 else ""
        if cell_len(f"{line} · {fact}{more}") > width:
            yield Text(f"{line} ·", "dim")
            line = fact
        else:
            line = f"{line} · {fact}"
    yield Text(line, "dim")
