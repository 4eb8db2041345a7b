"""A trace with tracks added that show which module's backward runs when.

The original is copied byte for byte, and the new events go in front of its first one, in the place
of those that an earlier copy has there. A span is written as a begin and an end event, not as one
event with a duration. Viewers round times, and with begin and end events nested spans stay nested.
Viewers sort tracks by number, so a track gets the next free number after the thread or stream that
it explains.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from backspot.errors import BackspotError, NotATraceError, UsageError
from backspot.formatting import percent, visible
from backspot.paths import path_text
from backspot.render._words import WITHOUT_PROFILER, made_by
from backspot.render.files import check_target, writing
from backspot.render.view import heaviest, heaviest_line
from backspot.results.costs import Row
from backspot.results.report import Report
from backspot.results.tracks import Arrow, Track, Tracks
from backspot.trace.names import short_node_name

if TYPE_CHECKING:
    from backspot.trace import Events
    from backspot.trace.stream import Read

CATEGORY = "backspot"
"""The category of all added events; reading a trace ignores it."""

_PIECE = 1 << 20
_LEVEL = 3  # half the time of 6, and a sixth more bytes
_FIRST_THREAD = 900_000_000  # above the numbers that systems give, for tracks of named threads
_FIRST_ARROW = 1 << 40
_ARROW_WITHIN = 500  # nanoseconds: inside the label, because viewers round its start


def check_labelled(
    output: str | os.PathLike[str], *, force: bool, source: Path | None = None
) -> None:
    """Check that a labelled trace can be written, before its source is read.

    Raises what ``check_target`` does, and ``UsageError`` if the name is not one for such a trace.
    """
    text = path_text(output, "trace=")
    if not text.lower().endswith((".json", ".json.gz")):
        raise UsageError(
            f"{visible(text)}: the name of a labelled trace must end in .json or .json.gz"
        )
    check_target(output, force=force, sources=() if source is None else (source,), what="trace=")


def write_labelled(
    path: Path,
    events: Events,
    tracks: Tracks,
    report: Report,
    output: str | os.PathLike[str],
    *,
    force: bool = False,
) -> None:
    """Write a copy of a trace with tracks of ``backward: …`` spans; it appears whole or not at all.

    A click on a span shows costs of the report. A ``.json.gz`` is compressed. Tracks that the trace
    has already are replaced.

    Raises:
        OutputExistsError: If the output exists and ``force`` is false.
        NotATraceError: If the trace is cut short.
    """
    _check_whole(path, events)
    rows = {row.path: _costs(report, row) for row in report.modules}
    with writing(output, force=force, sources=(path,)) as file:
        if os.fspath(output).lower().endswith(".gz"):
            with gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed:
                _copy(path, _added(events, tracks, rows), packed)
        else:
            _copy(path, _added(events, tracks, rows), file)


def label_in_place(path: Path, events: Events, tracks: Tracks, check: Callable[[], None]) -> None:
    """Write the tracks into a plain trace itself, without costs: no report is there yet.

    The trace stays as it is until the labelled one is complete, beside it.

    Args:
        check: called before the file is written, and before it takes the trace's place. If it
            raises, the trace stays as it is.

    Raises:
        NotATraceError: If the trace is cut short.
        BackspotError: If it cannot be written.
    """
    _check_whole(path, events)
    check()
    with writing(path, force=True, synced=False) as file:
        _copy(path, _added(events, tracks, {}), file)
        check()


def _check_whole(path: Path, events: Events) -> None:
    if events.truncated:
        raise NotATraceError(f"{path} is cut short, and its copy would be too: export it again")


_ADDED = re.compile(rb'\s*(?:\{"ph":"\w",(?:"bp":"e",)?"cat":"backspot",[^\n]*,\n)+')
"""Events that ``_added`` has made: whole lines, whose texts have no line end."""


def _copy(path: Path, added: Iterator[bytes], file: BinaryIO | gzip.GzipFile) -> None:
    from backspot.trace.read import trace_bytes  # the list of formats imports this file

    try:
        with trace_bytes(path) as (head, read):
            file.write(head)
            rest = _without_added(read)
            while events := b"".join(islice(added, 4096)):
                file.write(events)
            while rest:
                file.write(rest)
                rest = read(_PIECE)
    except (EOFError, ValueError) as error:
        if isinstance(error, BackspotError):
            raise
        raise NotATraceError(f"{path} changed while it was copied: try again") from error


def _without_added(read: Read) -> bytes:
    """Read over the events that an earlier copy has in front; return what was read beyond them."""
    rest = read(_PIECE)
    while match := _ADDED.match(rest):
        rest = rest[match.end() :]
        if b"\n" in rest:  # a whole line that is none of them
            break
        more = read(_PIECE)
        rest += more
        if not more:
            break
    return rest


def _added(
    events: Events, added: Tracks, costs: Mapping[str, dict[str, str | float]]
) -> Iterator[bytes]:
    """The new events, each with the comma and the line end that follow it."""
    numbers = _thread_numbers(events, added.tracks)
    named = _named(added, costs)
    leading_to: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, arrow in enumerate(added.arrows):
        leading_to[arrow.track, arrow.span].append(_FIRST_ARROW + number)
    for track, thread in zip(added.tracks, numbers, strict=True):
        yield from _headings(track, thread)
    yield from _arrow_starts(added.arrows, events.origin_ns)
    for index, (track, thread) in enumerate(zip(added.tracks, numbers, strict=True)):
        place = f'"pid":{json.dumps(track.process)},"tid":{thread}'
        around: list[int] = []
        for at, span in enumerate(track.spans):
            yield from _ends(around, span.depth, place, events.origin_ns)
            around.append(span.end)
            time = _microseconds(events.origin_ns + span.start)
            yield _line(f'"ph":"B","cat":"{CATEGORY}",{named[span.owner]},{place},"ts":{time}')
            for identity in leading_to.get((index, at), ()):
                yield _line(f'"ph":"f","bp":"e",{_flow(identity)},{place},"ts":{time}')
        yield from _ends(around, 0, place, events.origin_ns)


def _ends(around: list[int], depth: int, place: str, origin: int) -> Iterator[bytes]:
    while len(around) > depth:
        time = _microseconds(origin + around.pop())
        yield _line(f'"ph":"E","cat":"{CATEGORY}",{place},"ts":{time}')


def _headings(track: Track, thread: int) -> Iterator[bytes]:
    """The track's name, and its place below the track that it explains."""
    kind = "stream" if track.on_device else "thread"
    place = f'"pid":{json.dumps(track.process)},"tid":{thread}'
    arguments: list[tuple[str, dict[str, Any]]] = [
        ("thread_name", {"name": f"backward ({kind} {track.thread})"})
    ]
    if isinstance(track.thread, int):
        arguments.append(("thread_sort_index", {"sort_index": track.thread}))
    for name, values in arguments:
        yield _line(
            f'"ph":"M","cat":"{CATEGORY}","name":"{name}",{place},"args":{json.dumps(values)}'
        )


def _arrow_starts(arrows: list[Arrow], origin: int) -> Iterator[bytes]:
    for number, arrow in enumerate(arrows):
        process, thread = json.dumps(arrow.process), json.dumps(arrow.thread)
        within = min(_ARROW_WITHIN, (arrow.end - arrow.start) // 2)
        time = _microseconds(origin + arrow.start + within)
        yield _line(
            f'"ph":"s",{_flow(_FIRST_ARROW + number)},"pid":{process},"tid":{thread},"ts":{time}'
        )


def _flow(number: int) -> str:
    return f'"cat":"{CATEGORY}","name":"forward to backward","id":{number}'


def _line(fields: str) -> bytes:
    return f"{{{fields}}},\n".encode()


def _thread_numbers(events: Events, tracks: Sequence[Track]) -> list[int]:
    """For each track the first thread number after its thread that its process does not use."""
    used = {(str(process), str(thread)) for process, thread in events.threads}
    numbers: list[int] = []
    for track in tracks:
        number = track.thread + 1 if isinstance(track.thread, int) else _FIRST_THREAD
        while (str(track.process), str(number)) in used:
            number += 1
        used.add((str(track.process), str(number)))
        numbers.append(number)
    return numbers


def _named(added: Tracks, costs: Mapping[str, dict[str, str | float]]) -> list[str]:
    """For each owner the name of its spans and what they show of its costs, as JSON fields."""
    fields = []
    for name, path in zip(added.names, added.paths, strict=True):
        shown = costs.get(path)  # none where the report adds deeper modules up, or names another
        arguments = f',"args":{json.dumps(shown)}' if shown is not None else ""
        fields.append(f'"name":{json.dumps(name)}{arguments}')
    return fields


def _costs(report: Report, row: Row) -> dict[str, str | float]:
    """What a row costs in a typical step, with everything inside it."""
    share = row.total_wall_ns / report.wall_ns if report.wall_ns else 0.0
    costs: dict[str, str | float] = {
        f"wall ms per {report.per}": _milliseconds(row.total_wall_ns),
        "share of the backward": percent(share),
    }
    if report.clock == "real":
        costs["times"] = WITHOUT_PROFILER
    if report.has_gpu:
        costs[f"GPU ms per {report.per}"] = _milliseconds(row.total_gpu_ns)
    if row.total_wall_ns != row.wall_ns:
        costs["wall ms of its own"] = _milliseconds(row.wall_ns)
    node, line = heaviest(row, "wall"), heaviest_line(row, "wall")
    if node is not None:
        costs["slowest node"] = visible(short_node_name(node.name))
    if line is not None:
        costs["source line"] = visible(made_by(line))
        if line.text:
            costs["source"] = visible(line.text.strip())
    return costs


def _milliseconds(nanoseconds: int) -> float:
    """Return milliseconds, to the microsecond."""
    return round(nanoseconds / 1e6, 3)


def _microseconds(nanoseconds: int) -> str:
    microseconds, thousandths = divmod(abs(nanoseconds), 1000)
    return f"{'-' if nanoseconds < 0 else ''}{microseconds}.{thousandths:03d}"
