"""Large traces with the structure of a recorded one: its steps, copied one after the other.

What distinguishes one event from another is shifted from copy to copy (times, sequence numbers,
correlation numbers, external ids, arrows), so that each copy attributes as the original does and a
report of ``n`` copies is ``n`` times the report of one. Kernel names and shapes repeat, as they do
from step to step in a recorded trace.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_GAP_NS = 10_000_000  # between two copies: no work of one is pending when the next begins
_ARGS = ("External id", "correlation", "Sequence number")


class Copies:
    """A recorded trace that can be written any number of times in a row.

    Args:
        source: the recorded trace, ``.json`` or ``.json.gz``.
    """

    def __init__(self, source: Path) -> None:
        data = source.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        document: dict[str, Any] = json.loads(data)
        events = document.pop("traceEvents")
        self._head = document
        self.events = len(events)
        moments: list[int] = []
        ends: list[int] = []
        highest = dict.fromkeys((*_ARGS, "flow"), 0)
        values: list[tuple[int, str]] = []
        pieces: list[str] = []
        for event in events:
            ts = _nanoseconds(event["ts"])
            moments.append(ts)
            ends.append(ts + _nanoseconds(event.get("dur", 0)))
            pieces.append(self._piece(event, ts, values, highest))
        self._template = ",".join(pieces)
        # A step's first copy has the original's numbers; each next one goes on where it ended.
        shift = {name: number + 1 for name, number in highest.items()}
        period = max(ends) - min(moments) + _GAP_NS
        period += -period % 1000  # whole microseconds: the fraction stays as it was recorded
        shift["ts"] = period // 1000
        self._values = np.array([value for value, _ in values], np.int64)
        self._shifts = np.array([shift[kind] for _, kind in values], np.int64)

    def size(self) -> int:
        """How many bytes one copy takes."""
        return len(self._copy(0).encode()) + 1

    def written(self, copies: int) -> int:
        """How many bytes a plain trace of so many copies takes."""
        return sum(len(text.encode()) for text in self._parts(copies))

    def count(self, size: int) -> int:
        """How many copies make a trace of at least ``size`` bytes."""
        return max(1, math.ceil(size / self.size()))

    def write(self, target: Path, copies: int) -> int:
        """Write a trace; ``.gz`` is compressed, as torch's exporter does it.

        Returns:
            The size of its plain text in bytes.
        """
        if target.suffix == ".gz":
            with gzip.GzipFile(target, "wb", 6, mtime=0) as packed:
                return self._write(packed, copies)
        with target.open("wb") as file:
            return self._write(file, copies)

    def _write(self, file: BinaryIO | gzip.GzipFile, copies: int) -> int:
        return sum(file.write(text.encode()) for text in self._parts(copies))

    def _parts(self, copies: int) -> Iterator[str]:
        head = ",\n  ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in self._head.items())
        yield f'{{\n  {head},\n  "traceEvents": ['
        for number in range(copies):
            yield ("," if number else "") + self._copy(number)
        yield "\n  ]\n}\n"

    def _copy(self, number: int) -> str:
        return self._template % tuple((self._values + number * self._shifts).tolist())

    def _piece(
        self, event: dict[str, Any], ts: int, values: list[tuple[int, str]], highest: dict[str, int]
    ) -> str:
        """One event in Kineto's layout, with a ``%d`` for each number that is shifted."""
        whole, fraction = divmod(ts, 1000)
        fields = [f'"ph": "{event["ph"]}"']

        def shifted(name: str, value: int, kind: str) -> str:
            values.append((value, kind))
            if kind != "ts":
                highest[kind] = max(highest[kind], value)
            return f"{_text(name)}: %d"

        place = f'"pid": {_text(event["pid"])}, "tid": {_text(event["tid"])}'
        named = f'"cat": {_text(event["cat"])}, "name": {_text(event["name"])}'
        if event["ph"] != "X":
            identity = shifted("id", event["id"], "flow")
            time = shifted("ts", whole, "ts") + f".{fraction:03}"
            end = ', "bp": "e"' if "bp" in event else ""
            return f"\n  {{\n    {fields[0]}, {identity}, {place}, {time},\n    {named}{end}\n  }}"
        time = shifted("ts", whole, "ts") + f".{fraction:03}"
        duration = _nanoseconds(event["dur"])
        lasting = f'"dur": {duration // 1000}.{duration % 1000:03}'
        text = f"\n  {{\n    {fields[0]}, {named}, {place},\n    {time}, {lasting}"
        args = event.get("args")
        if args:
            inner = ", ".join(
                shifted(name, value, name)
                if name in _ARGS and isinstance(value, int) and value > 0
                else f"{_text(name)}: {_text(value)}"
                for name, value in args.items()
            )
            text += f',\n    "args": {{\n      {inner}\n    }}'
        return text + "\n  }"


def _text(value: Any) -> str:
    return json.dumps(value).replace("%", "%%")


def _nanoseconds(microseconds: float) -> int:
    whole = math.floor(microseconds)
    return whole * 1000 + round((microseconds - whole) * 1000)
