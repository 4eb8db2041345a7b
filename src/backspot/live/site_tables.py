"""The launch sites of compiled code, as the table in a trace has them: read from the frames."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from backspot.live.frames import IN_REDUCTION, Frame, parse_frame
from backspot.live.torch_internals.inductor import CompiledCode
from backspot.trace.compiled import CompiledGraph, Part, Place, Site
from backspot.trace.names import is_library_call
from backspot.trace.source_lines import SourceLine

__all__ = ["SiteTables", "place_of"]

_ROOT = re.compile(r"[A-Za-z_]\w*(\[[^\]]*\])?(\.__self__\b)?")  # a method's module is one, too
_WRAPPERS = re.compile(r"\.(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")
_ITEM = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")


class _Worked(NamedTuple):
    """What a kernel does for one node of a graph, and the line of the program that made it."""

    frame: Frame
    place: Place | None
    line: SourceLine | None


def place_of(class_name: str, expression: str) -> Place | None:
    """Return the place that Dynamo's expression for a module names; ``None`` for none."""
    root = _ROOT.match(expression)
    if root is None:
        return None
    path = _WRAPPERS.sub("", expression[root.end() :].replace("._modules[", "["))
    path = _ITEM.sub(r".\1", path).replace("..", ".").strip(".")
    return Place(root[0], path, class_name)


def _worked(trace: str) -> _Worked | None:
    """Return what the frame in a stack trace says; ``None`` if there is none."""
    found = parse_frame(trace)
    if found is None:
        return None
    frame, line = found
    return _Worked(frame, place_of(frame.class_name, frame.place), line)


def _ran(name: str, worked: list[_Worked | None]) -> list[_Worked]:
    """Return the nodes that a site runs.

    A call of a library is one node of the graph, the last one. The nodes before it made its inputs,
    in other kernels.
    """
    known = [one for one in worked if one is not None]
    return (
        [max(known, key=lambda one: one.frame.node)] if known and is_library_call(name) else known
    )


def _weights(
    kernel: list[_Worked],
) -> dict[tuple[Place | None, bool], tuple[int, SourceLine | None]]:
    """Return the bytes of a kernel by module and direction, each with the line of most of them.

    What one node of a kernel makes and another one reads stays in registers, and is not counted.
    """
    inside = {one.frame.node for one in kernel}
    amounts: dict[tuple[Place | None, bool], int] = {}
    lines: dict[tuple[Place | None, bool], tuple[int, SourceLine | None]] = {}
    read: set[tuple[Place | None, int]] = set()
    for one in kernel:
        frame = one.frame
        key = one.place, frame.backward
        amount = 0 if frame.users and inside.issuperset(frame.users) else frame.bytes
        for source, size in frame.reads.items():
            if source not in inside and (one.place, source) not in read:
                read.add((one.place, source))
                amount += size
        amounts[key] = amounts.get(key, 0) + amount
        if amount > lines.get(key, (-1, None))[0]:
            lines[key] = amount, one.line
    some = any(amounts.values())
    return {key: (amount, lines[key][1]) for key, amount in amounts.items() if amount or not some}


class SiteTables:
    """The graphs of one table, with their lines."""

    def __init__(self) -> None:
        self.lines: dict[SourceLine, int] = {}

    def graph(self, code: CompiledCode) -> CompiledGraph:
        """Return a compiled graph as the table has it."""
        kernels = sorted(_kernels(code.sites or ""), key=lambda kernel: kernel[1])
        worked = [(name, at, [_worked(trace) for trace in traces]) for name, at, traces in kernels]
        known = [one for _, _, some in worked for one in some if one is not None]
        if not known:
            return CompiledGraph(code.key, code.backward, (), None)
        base = max(one.frame.base for one in known)
        reductions = {at for _, at, traces in kernels if IN_REDUCTION in traces}
        places: dict[Place, int] = {}
        sites = []
        for name, at, some in worked:
            if at <= base:
                continue
            parts = [
                Part(
                    -1 if place is None else places.setdefault(place, len(places)),
                    amount,
                    code.backward and not of_backward,
                    -1 if line is None else self.lines.setdefault(line, len(self.lines)),
                )
                for (place, of_backward), (amount, line) in _weights(_ran(name, some)).items()
            ]
            then = at in reductions
            sites.append(Site(name, tuple(sorted(parts, key=lambda part: -part.weight)), then))
        return CompiledGraph(code.key, code.backward, tuple(places), tuple(sites))


def _kernels(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yield each launch site's name, number and stack traces."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return
    for key, traces in found.items():
        name, _, number = key.rpartition(":")
        if name and number.isdigit() and isinstance(traces, list):
            yield name, int(number), [trace for trace in traces if isinstance(trace, str)]
