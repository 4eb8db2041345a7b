"""The tracks of a labelled trace, read as viewers read them."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backspot.render.labelled_trace import CATEGORY
from backspot.trace.labels import parse_label


@dataclass
class Slice:
    name: str
    start: int
    end: int = -1
    around: Slice | None = None
    inside: list[Slice] = field(default_factory=list)

    @property
    def path(self) -> str:
        label = parse_label(self.name)
        return label.path if label else self.name.removeprefix("backward: ")

    @property
    def own(self) -> int:
        return self.end - self.start - sum(s.end - s.start for s in self.inside)


def exactly(microseconds: str) -> int:
    whole, fraction = microseconds.split(".")
    assert len(fraction) == 3
    return int(whole) * 1000 + int(fraction)


def padded(microseconds: object) -> int:
    """As ``exactly``, for those who leave out zeros at the end."""
    whole, _, fraction = str(microseconds).partition(".")
    return int(whole) * 1000 + int(fraction.ljust(3, "0"))


def text_of(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def original_within(annotated: bytes) -> tuple[bytes, bytes]:
    """The text without what was added, and that."""
    start = annotated.index(b'{"ph":"M","cat":"backspot"')
    end = start
    while (
        annotated.startswith(b'{"ph":"', end) and b'"cat":"backspot"' in annotated[end : end + 40]
    ):
        end = annotated.index(b"},\n", end) + 3
    return annotated[:start] + annotated[end:], annotated[start:end]


def added_of(text: bytes) -> list[dict[str, Any]]:
    # Times as text: a double has no room for the nanoseconds of a year.
    events = json.loads(text, parse_float=str)
    events = events["traceEvents"] if isinstance(events, dict) else events
    return [e for e in events if e.get("cat") == CATEGORY]


def slices_of(
    events: list[dict[str, Any]], convert: Callable[[str], float] = exactly
) -> dict[tuple[Any, Any], list[Slice]]:
    """Read begin and end events as viewers do: by time, in the file's order where times agree."""
    tracks: dict[tuple[Any, Any], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "BE":
            tracks[event["pid"], event["tid"]].append(event)
    result = {}
    for key, mine in tracks.items():
        times = [convert(event["ts"]) for event in mine]
        assert times == sorted(times)  # so a viewer's order is the file's
        found, stack = [], []
        for event, time in zip(mine, times, strict=True):
            if event["ph"] == "B":
                around = stack[-1] if stack else None
                stack.append(Slice(event["name"], time, around=around))
                found.append(stack[-1])
                if around:
                    around.inside.append(stack[-1])
            else:
                stack.pop().end = time
        assert not stack
        result[key] = found
    return result


def assert_nested(text: bytes, convert: Callable[[str], float] = exactly) -> None:
    """Perfetto's rule: two spans of a track lie inside each other or apart."""
    tracks = slices_of(added_of(text), convert)
    assert tracks
    for slices in tracks.values():
        open_: list[Slice] = []
        for one in slices:
            while open_ and open_[-1].end <= one.start:
                open_.pop()
            if open_:
                assert one.end <= open_[-1].end
                assert open_[-1] is one.around or one.start == one.end
            open_.append(one)
        if convert is exactly:
            assert all(one.end > one.start for one in slices)
