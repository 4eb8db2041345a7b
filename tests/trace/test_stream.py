"""Compressed traces: members that meet anywhere, and little memory whatever is packed."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest

import backspot
from backspot.trace.stream import plain
from support.synthetic import Trace

TICK = 10_000
MIB = 1 << 20
READ = MIB // 4
"""The packed bytes that are read at a time, after the two that identify gzip."""


def step() -> Trace:
    trace = Trace()
    trace.forward("a", "A", 0, 10 * TICK)
    trace.operator("aten::mul", TICK, 2 * TICK, seq=0)
    trace.node("MulBackward0", 20 * TICK, 23 * TICK, seq=0)
    return trace


def member(data: bytes, size: int) -> bytes:
    """A gzip member of exactly ``size`` bytes: the file name in its header fills it up."""
    deflate = zlib.compressobj(wbits=-15)
    packed = deflate.compress(data) + deflate.flush()
    tail = struct.pack("<II", zlib.crc32(data), len(data))
    head = b"\x1f\x8b\x08\x08" + bytes(6)
    name = b"n" * (size - len(head) - 1 - len(packed) - len(tail))
    return head + name + b"\0" + packed + tail


def unpacked(data: bytes) -> bytes:
    with plain(io.BytesIO(data), None, None) as read:
        return b"".join(iter(lambda: read(MIB), b""))


@pytest.mark.slow
@pytest.mark.parametrize("reads", [1, 2])
@pytest.mark.parametrize("beside", range(-20, 21))
def test_two_members_may_meet_anywhere(reads: int, beside: int) -> None:
    text = json.dumps(step().document()).encode()
    half = len(text) // 2
    packed = member(text[:half], 2 + reads * READ + beside) + gzip.compress(text[half:])
    report = backspot.locate(io.BytesIO(packed))
    assert report.warnings == ()
    assert report.modules == backspot.locate(io.BytesIO(text)).modules


def test_other_bytes_behind_the_last_member_are_ignored() -> None:
    assert unpacked(gzip.compress(b"one") + b"\0\0 and more") == b"one"


def test_empty_members_are_skipped() -> None:
    assert unpacked(1_000 * gzip.compress(b"") + gzip.compress(b"one")) == b"one"


@pytest.mark.parametrize("at", [1, 2, 3, 9, 17, 19])
def test_a_second_member_that_is_cut_short_keeps_the_first(at: int) -> None:
    assert unpacked(gzip.compress(b"one") + gzip.compress(b"two")[:at])[:3] == b"one"


# Much that packs small ---------------------------------------------------------------------------

TEXT = json.dumps(step().document()).encode()
EVENTS, TAIL = TEXT.rindex(b"]"), TEXT.rindex(b"}")
REPEATED: dict[str, tuple[bytes, bytes, bytes]] = {
    "text without events": (b'{"a":"', b"x", b'"}'),
    "blanks before the events": (b"{", b" ", TEXT[1:]),
    "blanks behind the key": (b'{"traceEvents"', b" ", b": []}"),
    "blanks among the events": (TEXT[:EVENTS], b" ", TEXT[EVENTS:]),
    "a name": (TEXT[:EVENTS] + b', {"ph": "X", "name": "', b"x", b'"}' + TEXT[EVENTS:]),
    "a name without an end": (TEXT[:EVENTS] + b', {"ph": "X", "name": "', b"x", b""),
    "nested lists": (TEXT[:EVENTS] + b', {"ph": "X", "args": {"x": ', b"[", b""),
    "objects in an event": (
        TEXT[:EVENTS] + b', {"ph": "X", "args": {"x": [1',
        b',{"name": "x"}',
        b"]}}" + TEXT[EVENTS:],
    ),
    "backslashes": (TEXT[:EVENTS] + b', {"ph": "X", "name": "', b"\\\\", b'"}' + TEXT[EVENTS:]),
    "empty events": (TEXT[:EVENTS], b",{}", TEXT[EVENTS:]),
    "a value behind the events": (TEXT[:TAIL] + b', "x": "', b"x", b'"}'),
    "a table of lines": (TEXT[:TAIL] + b', "backspot.lines": [{}', b",{}", b"]}"),
}

"""The text before the repeated part, that part, and the text behind it."""
MANY = ("objects in an event", "empty events", "a table of lines")
"""Each of millions becomes an object, which takes its time."""
NO_TRACES = {"text without events": "no traceEvents", "blanks behind the key": "without a single"}


def repeated(case: str, size: int) -> bytes:
    head, unit, tail = REPEATED[case]
    block = unit * (MIB // len(unit))
    packing = zlib.compressobj(wbits=31)
    parts = [packing.compress(head)]
    parts += [packing.compress(block) for _ in range(size // len(block))]
    return b"".join([*parts, packing.compress(tail), packing.flush()])


READING = """
import sys
import threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import backspot
try:
    print(backspot.locate(sys.argv[2]).wall_ns)
except backspot.errors.BackspotError as error:
    print(error)
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""


def output_and_peak(path: Path) -> tuple[str, int]:
    """Return the output of a separate process that reads a trace, and its peak memory in bytes."""
    home = str(Path(backspot.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", READING, home, str(path)], capture_output=True, text=True, check=True
    )
    output, peak = done.stdout.splitlines()
    return output, int(peak) * 1024


linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak memory")


@pytest.mark.posix
@pytest.mark.slow
@linux
@pytest.mark.parametrize("case", REPEATED)
def test_reading_takes_little_memory_whatever_is_packed(case: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(repeated(case, (4 if case in MANY else 40) * MIB))
    output, peak = output_and_peak(path)
    assert NO_TRACES.get(case, str(3 * TICK)) in output
    assert peak < 300 * MIB


# The thread that unpacks -------------------------------------------------------------------------


def unpacking_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "unpacking" in thread.name]


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
def test_a_reader_that_stops_early_ends_the_thread(blocks: int) -> None:
    packed = gzip.compress(bytes(40 * MIB))
    with plain(io.BytesIO(packed), None, None) as read:
        for _ in range(blocks):
            assert read(20 * MIB)
    assert not unpacking_threads()


def test_an_interrupted_reader_ends_the_thread() -> None:
    def interrupted() -> None:
        with plain(io.BytesIO(gzip.compress(bytes(40 * MIB))), None, None) as read:
            read(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not unpacking_threads()


def test_an_error_of_the_thread_is_raised_in_the_reader() -> None:
    packed = gzip.compress(os.urandom(4 * MIB))
    with pytest.raises(zlib.error):
        unpacked(packed[: 2 * MIB] + bytes(MIB))
    assert not unpacking_threads()
