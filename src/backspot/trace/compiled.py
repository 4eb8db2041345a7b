"""The table of compiled graphs and parameters: which modules each launch of generated code is for.

The live half writes one table for each profile into the trace's metadata, under ``KEY``. The
offline half reads it back. A graph is identified by the key in the event ``## Call CompiledFxGraph
KEY ##``, and a *site* is one place in the generated code that launches work, in the order of the
calls. Paths in a graph begin at a *root*, as equal modules share one graph: which module the root
is depends on the call.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from backspot.trace.metadata import last_value
from backspot.trace.source_lines import SourceLine

KEY = "backspot.compiled"
"""The key in the trace's metadata."""

MOST_BYTES = 1 << 24
"""The most bytes of a table's text."""

_MOST_UNPACKED = 1 << 28
_VERSION = 1

live_compiled: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The tables of this process's profiles, by torch's results object of the profile. The live half
puts them here. A table is dropped together with its results."""


class KnownModule(msgspec.Struct, array_like=True, frozen=True):
    """A module of an instrumented model, whether or not it has a label.

    Attributes:
        path: the path, as labels write it.
        class_name: the module's class.
        owner: the path of the module that owns its time: the module itself, or the nearest labelled
            module around. A module that is never called, as a ``ModuleList``, owns nothing.
    """

    path: str
    class_name: str
    owner: str


class ModuleRef(msgspec.Struct, array_like=True, frozen=True):
    """A module as a compiled graph names it.

    Attributes:
        root: the variable that the path begins with (``L['self']``).
        path: the path from there; ``""`` for the root itself.
    """

    root: str
    path: str
    class_name: str


class Part(msgspec.Struct, array_like=True, frozen=True):
    """What a launch does for one module.

    Attributes:
        place: index into ``CompiledGraph.places``; -1 for code that is in no module inside the
            region.
        weight: the bytes that this part of the kernel reads and writes.
        again: whether this is forward work that the backward repeats.
        line: index into ``CompiledTable.lines``; -1 if the line is not known.
    """

    place: int
    weight: int
    again: bool = False
    line: int = -1


class Site(msgspec.Struct, array_like=True, frozen=True):
    """One place in generated code that launches work.

    Attributes:
        name: what the generated code calls (``triton_poi_fused_add_3``, ``extern_kernels.mm``).
        parts: the modules that the launch works for, the largest weight first.
        then: whether operators that finish a reduction, which the code calls next, are a part of
            it.
    """

    name: str
    parts: tuple[Part, ...]
    then: bool = False


class CompiledGraph(msgspec.Struct, array_like=True, frozen=True):
    """One compiled graph.

    Attributes:
        key: the key in the names of its calls.
        sites: its sites in the order of the calls; ``None`` where they were not recorded.
    """

    key: str
    backward: bool
    places: tuple[ModuleRef, ...]
    sites: tuple[Site, ...] | None


class Compilation(msgspec.Struct, array_like=True, frozen=True):
    """That ``torch.compile`` compiled the code of a function, for the first time or again.

    Attributes:
        region: the number of the region in its name (``0/1``).
        function: the function's name.
        file: the file, as readers know it.
        line: the line at which the code begins: of the function, or behind a graph break.
        reason: why the code from before did not serve; ``""`` for the first time.
        optimizer: whether the code calls a method of an optimizer.
    """

    region: str
    function: str
    file: str
    line: int
    reason: str
    optimizer: bool = False


class Parameters(msgspec.Struct, array_like=True, frozen=True):
    """The parameters of a labelled module that an optimizer may update.

    Attributes:
        path: the path, as labels write it.
        class_name: the module's class.
        tensors: how many there are.
        numbers: how many numbers they have in all.
    """

    path: str
    class_name: str
    tensors: int
    numbers: int


class CompiledTable(msgspec.Struct, frozen=True):
    """The compiled graphs of one profile.

    Attributes:
        graphs: the graphs that were in memory when the profiler stopped.
        modules: the modules of the instrumented models.
        lines: the source lines of parts.
        compilations: the latest ones of the process.
        parameters: those of the modules, each parameter once.
        recorded: whether the trace has a table with graphs.
        broken: whether the trace has a table that cannot be read.
    """

    graphs: tuple[CompiledGraph, ...] = ()
    modules: tuple[KnownModule, ...] = ()
    lines: tuple[SourceLine, ...] = ()
    compilations: tuple[Compilation, ...] = ()
    parameters: tuple[Parameters, ...] = ()
    recorded: bool = False
    broken: bool = False


class _Form(msgspec.Struct):
    version: int
    table: str


class _Content(msgspec.Struct, array_like=True):
    graphs: tuple[CompiledGraph, ...]
    modules: tuple[KnownModule, ...]
    lines: tuple[tuple[str, int, str, str], ...]
    compilations: tuple[Compilation, ...] = ()
    parameters: tuple[Parameters, ...] = ()


def format_compiled(
    graphs: Sequence[CompiledGraph],
    modules: Sequence[KnownModule] = (),
    lines: Sequence[SourceLine] = (),
    compilations: Sequence[Compilation] = (),
    parameters: Sequence[Parameters] = (),
) -> str:
    """Return a table as JSON in ASCII without a backslash, for the trace's metadata.

    The content is compressed: equal layers have equal sites.
    """
    content = _Content(
        tuple(graphs),
        tuple(modules),
        tuple((line.file, line.line, line.function, line.text) for line in lines),
        tuple(compilations),
        tuple(parameters),
    )
    packed = base64.b64encode(zlib.compress(msgspec.json.encode(content))).decode()
    return msgspec.json.encode(_Form(_VERSION, packed)).decode()


def find_compiled(text: bytes) -> CompiledTable:
    """Find the table in the text around a trace's events: an empty one, or a ``broken`` one."""
    value = last_value(text, KEY, MOST_BYTES)
    if value is None:
        return CompiledTable()
    try:
        form = msgspec.json.decode(value, type=_Form)
        if form.version != _VERSION:
            raise ValueError(form.version)
        unpacking = zlib.decompressobj()
        raw = unpacking.decompress(base64.b64decode(form.table, validate=True), _MOST_UNPACKED)
        return _checked(msgspec.json.decode(raw, type=_Content))
    except (ValueError, RecursionError, zlib.error):  # msgspec's errors are ValueErrors
        return CompiledTable(recorded=True, broken=True)


def _checked(content: _Content) -> CompiledTable:
    """Return the content as a table; ``ValueError`` if an index or a weight is impossible."""
    for graph in content.graphs:
        for site in graph.sites or ():
            for share in site.parts:
                if not (
                    -1 <= share.place < len(graph.places)
                    and -1 <= share.line < len(content.lines)
                    and 0 <= share.weight < 1 << 53
                ):
                    raise ValueError(site.name)
    if any(min(parameter.tensors, parameter.numbers) < 0 for parameter in content.parameters):
        raise ValueError("parameters")
    lines = tuple(SourceLine(*line) for line in content.lines)
    return CompiledTable(
        content.graphs,
        content.modules,
        lines,
        content.compilations,
        content.parameters,
        recorded=bool(content.graphs),
    )
