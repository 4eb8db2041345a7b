"""A report as folded stacks: ``root;blocks;3;attn;GatherBackward0 12345``, a line a stack.

What flamegraph.pl, inferno and most other flame graph tools read.
"""

from __future__ import annotations

from backspot.render._stacks import stacks
from backspot.report import Report

__all__ = ["to_folded"]


def to_folded(report: Report) -> bytes:
    r"""Wall time in nanoseconds over all steps, in UTF-8.

    A semicolon within a name is written ``\x3b``, for it would part the name in two.
    """
    return "".join(
        f"{';'.join(frame.replace(';', _SEMICOLON) for frame in stack.frames)} {stack.wall}\n"
        for stack in stacks(report)
        if stack.wall
    ).encode()


_SEMICOLON = "\\x3b"
