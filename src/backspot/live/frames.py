"""The frame that Backspot writes into a stack trace of Inductor, and the lines around it.

A *frame* says for which module a node of a graph works, and what the node reads and writes. It
looks like a frame of Python, so that Inductor keeps it with the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

from backspot.live.line_names import file_name
from backspot.trace.source_lines import SourceLine

__all__ = ["IN_REDUCTION", "Frame", "format_frame", "parse_frame", "with_frame"]

IN_REDUCTION = '  File "backspot:then", line 0, in reduction\n'
"""In the stack traces of a kernel behind which another one finishes the reduction."""
_FRAME = re.compile(
    r'  File "backspot:(?P<direction>[fb]):(?P<class_name>[^:"]*):(?P<place>[^"]*)", '
    r"line (?P<bytes>\d+), in (?P<base>\d+)/(?P<node>\d+)<(?P<reads>[^>]*)>(?P<users>[\d,]*)\n"
)
_LINE = re.compile(
    r'  File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.*)\n(?: +(?P<text>.*))?'
)
_SAFE = "[]'.() "


class Frame(NamedTuple):
    """What a node of a graph works for.

    Attributes:
        class_name: the class of its module, as it is written; empty without a module.
        place: Dynamo's expression for the module; empty without one.
        backward: whether it is work of the backward.
        base: how many launch sites there were before the graph was compiled.
        node: the number of the node.
        bytes: the bytes that it makes.
        reads: the bytes that it reads, by the number of the node that made them.
        users: the numbers of the nodes that read what it makes.
    """

    class_name: str
    place: str
    backward: bool
    base: int
    node: int
    bytes: int
    reads: Mapping[int, int]
    users: Sequence[int]


def format_frame(frame: Frame) -> str:
    """Return a frame as text."""
    reads = ",".join(f"{source}.{size}" for source, size in frame.reads.items())
    users = ",".join(map(str, frame.users))
    direction = "b" if frame.backward else "f"
    return (
        f'  File "backspot:{direction}:{frame.class_name}:{quote(frame.place, safe=_SAFE)}", '
        f"line {frame.bytes}, in {frame.base}/{frame.node}<{reads}>{users}\n"
    )


def parse_frame(trace: str) -> tuple[Frame, SourceLine | None] | None:
    """Return the first frame in a stack trace, and the innermost line of the program behind it.

    ``None`` if there is no frame.
    """
    found = _FRAME.search(trace)
    if found is None:
        return None
    pairs = (one.partition(".") for one in found["reads"].split(",") if one)
    frame = Frame(
        found["class_name"],
        unquote(found["place"]),
        found["direction"] == "b",
        int(found["base"]),
        int(found["node"]),
        int(found["bytes"]),
        {int(source): int(size) for source, _, size in pairs},
        tuple(int(one) for one in found["users"].split(",") if one),
    )
    return frame, _line_of(trace[found.end() :])


def with_frame(trace: str, frame: Frame) -> str:
    """Return a stack trace with this frame and no other.

    It comes first: messages show the innermost frame, which stays the user's.
    """
    return format_frame(frame) + _FRAME.sub("", trace)


def _line_of(trace: str) -> SourceLine | None:
    """Return the innermost line of a stack trace."""
    found = list(_LINE.finditer(trace))
    if not found:
        return None
    last = found[-1]
    return SourceLine(
        file_name(last["file"]), int(last["line"]), last["function"], (last["text"] or "").strip()
    )
