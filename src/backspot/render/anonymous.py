"""Results to share: without what could name a person, a machine, a file, or show its content.

Names of modules, classes, functions, operators and kernels stay, and so do all numbers, the device,
the version of PyTorch and the time of the recording.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from backspot.errors import NotATraceError
from backspot.formatting import visible
from backspot.render.files import writing
from backspot.results.report import Report
from backspot.trace.anonymous import Anonymizer

_KEPT = {
    "path",
    "paths",
    "class_name",
    "root",
    "before_path",
    "peak_path",
    "schema",
    "rule",
    "link",
}
"""Fields with names of modules and classes, and with what Backspot itself writes."""
_PLACES = {"line", "file", "lines", "waits"}
_SOURCE = {"text"}
_RECORDED = ("device", "time", "torch", "memory")


def anonymous(report: Report) -> Report:
    """Return a report without lines of source, files, the command, and paths in its sentences."""
    found = cast(Report, _changed(report, Anonymizer()))
    recorded = {name: report.recorded[name] for name in _RECORDED if name in report.recorded}
    return replace(found, recorded=recorded, trace="a recording")


def _changed(result: Any, anonymizer: Anonymizer) -> Any:
    changes = {}
    for one in fields(result):
        if one.init and one.name not in _KEPT:
            before = getattr(result, one.name)
            if one.name == "host" and isinstance(before, str):
                after: Any = "a machine"
            else:
                after = _value(before, one.name, anonymizer)
            if after is not before:
                changes[one.name] = after
    return replace(result, **changes) if changes else result


def _value(value: Any, name: str, anonymizer: Anonymizer) -> Any:
    if isinstance(value, str):
        if name in _SOURCE:
            return ""
        return anonymizer.place(value) if name in _PLACES else anonymizer.text(value)
    if isinstance(value, tuple):
        return tuple(_value(one, name, anonymizer) for one in value)
    if isinstance(value, Mapping):
        return {key: _value(one, name, anonymizer) for key, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return _changed(value, anonymizer)
    return value


def write_anonymous_trace(
    path: Path, output: str | os.PathLike[str], *, force: bool = False
) -> None:
    """Write a copy of a trace without what could name somebody; it appears whole or not at all.

    The whole trace is in memory for it. Notes of lines and of compiled code are left out.

    Raises:
        NotATraceError: If it is no whole JSON.
        OutputExistsError: If the output exists and ``force`` is false.
    """
    from backspot.trace.read import trace_bytes  # the list of formats imports the room's files

    with trace_bytes(path) as (head, read):
        pieces = [head]
        while piece := read(1 << 20):
            pieces.append(piece)
    try:
        trace = json.loads(b"".join(pieces).decode("utf-8", "replace"), strict=False)
    except (ValueError, RecursionError) as error:
        raise NotATraceError(f"{visible(str(path))} is no whole JSON: export it again") from error
    if isinstance(trace, list):
        trace = {"traceEvents": trace}
    with writing(output, force=force, sources=(path,)) as file:
        import gzip

        if os.fspath(output).lower().endswith(".gz"):
            with gzip.GzipFile("", "wb", 3, file, mtime=0) as packed:
                packed.writelines(Anonymizer().trace(trace))
        else:
            file.writelines(Anonymizer().trace(trace))
