"""Decoding of exported Kineto traces (Chrome's JSON trace event format) in pieces.

A trace of gigabytes is read a few megabytes at a time: the text is cut between two events, each
piece is decoded into typed structs that live for that piece only, and what matters goes into
columns. The fast way trusts the text; whatever it stumbles over is decoded again leniently, event
by event, so that one bad event costs one event.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from backspot.errors import NotATraceError
from backspot.trace.events import CATEGORIES, MODULE_CALL, Category, Columns, Ints

__all__ = ["ChromeDecoder", "split_head"]

_PIECE = 4 << 20
_HEAD = re.compile(rb'"traceEvents"\s*:\s*\[')
# Between two events. In a JSON string a quote is escaped, so this cannot match inside one; a list
# of objects within an event's args could match, and is then found out by the decoder.
_BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|bp|s)"\s*:)')
_CLOSING = re.compile(rb"\}\s*\]")
_LONGEST_EVENT = 1 << 16


class _Args(msgspec.Struct, gc=False):
    sequence: int | None = msgspec.field(name="Sequence number", default=None)
    forward_thread: int | None = msgspec.field(name="Fwd thread id", default=None)
    correlation: int | None = None
    device: int | None = None
    bytes: int | None = None
    blocks: float | None = msgspec.field(name="blocks per SM", default=None)


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | None = None
    dur: float | None = None
    id: int | str | None = None
    args: _Args | None = None


_NO_ARGS = _Args()
_DECODER = msgspec.json.Decoder(list[_Event])
_LATEST = (
    2.9e15  # microseconds, in the year 2061: sums of two such still fit 64 bits of nanoseconds
)
_EARLIEST = -1.0e12
_MOST_NUMBER = 1 << 62


class ChromeDecoder:
    """Feeds the events of one trace into columns.

    Args:
        read: gives the next bytes, at most as many as asked for; ``b""`` at the end.
        source: what is read, for messages.
    """

    def __init__(self, read: Callable[[int], bytes], source: str) -> None:
        self._read = read
        self._source = source
        self.columns = Columns()
        self.malformed = 0
        self.impossible = 0
        self.truncated = False
        self.seen = 0

    def run(self) -> None:
        """Read to the end.

        Raises:
            NotATraceError: where the text is no trace at all.
        """
        with _without_garbage_collection():
            _, rest = split_head(self._read, self._source)
            while True:
                block = self._read(_PIECE)
                buffer = rest + block
                if not block:
                    self._last(buffer)
                    return
                cut = _last_between(buffer)
                if cut is None:
                    rest = buffer
                    continue
                piece, rest = buffer[: cut[0]], buffer[cut[1] :]
                if not self._piece(piece):
                    return

    # The parts of the text ---------------------------------------------------------------------

    def _piece(self, text: bytes) -> bool:
        """Decode events that more will follow; false where the list of events ended within."""
        if self._fast(text) or self._lenient(text):
            return True
        if self._close(text):
            return False
        self._one_by_one(text)
        return True

    def _last(self, text: bytes) -> None:
        """Decode what remains: events, the closing bracket, and keys that follow."""
        if self._close(text):
            return
        # Something is wrong in here, or the writer died before it was done. What is whole is kept.
        cut = _last_between(text, window=len(text))
        if cut is not None:
            whole, text = text[: cut[0]], text[cut[1] :]
            if not self._fast(whole) and not self._lenient(whole):
                self._one_by_one(whole)
        if not self._close(text):
            self.truncated = True
            self._fast(text.strip().rstrip(b","))

    def _close(self, text: bytes) -> bool:
        """Decode up to the bracket that closes the list of events, if it is in ``text``."""
        if text.lstrip()[:1] == b"]":
            return True
        tries = 0
        for match in _CLOSING.finditer(text):
            try:
                events = _DECODER.decode(b"[" + text[: match.end()])
            except (msgspec.DecodeError, UnicodeDecodeError):
                tries += 1
                if tries == 4:
                    break
                continue
            self._take(events)
            return True
        try:
            # Slow, and right about everything: control characters, NaN, brackets within strings.
            decoded = text.decode("utf-8", "replace")
            events, _ = json.JSONDecoder(strict=False).raw_decode("[" + decoded)
        except (ValueError, RecursionError):
            return False
        self._take(self._converted(events))
        return True

    def _fast(self, text: bytes) -> bool:
        try:
            events = _DECODER.decode(b"[" + text + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        self._take(events)
        return True

    def _lenient(self, text: bytes) -> bool:
        try:
            raw = json.loads("[" + text.decode("utf-8", "replace") + "]", strict=False)
        except (ValueError, RecursionError):
            return False
        self._take(self._converted(raw))
        return True

    def _one_by_one(self, text: bytes) -> None:
        *parts, last = _BETWEEN.split(text)
        for part in [*(part + b"}" for part in parts), last]:
            if not self._lenient(part):
                self.malformed += 1

    def _converted(self, raw: list[object]) -> list[_Event]:
        events = []
        for item in raw:
            try:
                events.append(msgspec.convert(item, _Event, strict=False))
            except (msgspec.ValidationError, OverflowError):
                self.malformed += 1
        return events

    # Into columns ------------------------------------------------------------------------------

    def _take(self, events: list[_Event]) -> None:
        self.seen += len(events)
        columns = self.columns
        kept: list[_Event] = []
        categories: list[int] = []
        for event in events:
            if event.ph == "X":
                kind = CATEGORIES.get(event.cat or "")
                if kind is None or (
                    kind is Category.MODULE_CALL and not (event.name or "").startswith(MODULE_CALL)
                ):
                    continue
                if _possible(event):
                    kept.append(event)
                    categories.append(kind)
                else:
                    self.impossible += 1
            elif event.cat == "fwdbwd" and event.ph in ("s", "f") and _possible(event):
                columns.add_flow(
                    event.id,
                    forward=event.ph == "s",
                    thread=columns.thread(event.pid, event.tid),
                    time=int(_nanoseconds([event.ts or 0.0])[0]),
                )
        if not kept:
            return
        names, threads = columns.names, columns.threads
        args = [event.args or _NO_ARGS for event in kept]
        category = np.array(categories, np.int64)
        device = _numbers([a.device for a in args])
        on_host = category <= Category.RUNTIME
        device[on_host] = -1
        for index in np.flatnonzero((device < 0) & ~on_host).tolist():
            pid = kept[index].pid  # Kineto writes the device as the process of its work
            device[index] = pid if isinstance(pid, int) and 0 <= pid < 4096 else 0
        columns.add(
            _nanoseconds([event.ts or 0.0 for event in kept]),
            _nanoseconds([event.dur or 0.0 for event in kept]),
            category,
            np.array([names.setdefault(e.name or "", len(names)) for e in kept], np.int64),
            np.array([threads.setdefault((e.pid, e.tid), len(threads)) for e in kept], np.int64),
            _numbers([a.sequence for a in args]),
            _numbers([a.forward_thread for a in args]),
            _numbers([a.correlation for a in args]),
            device,
            _sizes(args),
        )


def split_head(read: Callable[[int], bytes], source: str) -> tuple[bytes, bytes]:
    """Read as far as the first event, or further: the bytes before it, and those read behind.

    Raises:
        NotATraceError: where the text is no trace at all.
    """
    text = read(_PIECE)
    stripped = text.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not stripped:
        raise NotATraceError(f"{source} is empty: export the trace again")
    if stripped[:1] == b"[":
        return text[: len(text) - len(stripped) + 1], stripped[1:]
    if stripped[:1] != b"{":
        what = "HTML" if stripped[:1] == b"<" else "not JSON"
        raise NotATraceError(
            f"{source} is no Kineto trace: it is {what}; give a file that export_chrome_trace wrote"
        )
    while (match := _HEAD.search(text)) is None:
        more = read(_PIECE)
        if not more:
            raise NotATraceError(
                f"{source} is no Kineto trace: it has no traceEvents; "
                "give a file that export_chrome_trace wrote"
            )
        text += more
    return text[: match.end()], text[match.end() :]


def _possible(event: _Event) -> bool:
    start, duration = event.ts, event.dur or 0.0
    return start is not None and 0.0 <= duration < _LATEST and _EARLIEST < start < _LATEST


def _nanoseconds(microseconds: list[float]) -> Ints:
    """Microseconds with three decimals as whole nanoseconds, exactly.

    The whole and the fractional part are scaled apart: three months in microseconds leave a double
    just enough bits to tell nanoseconds, and none to lose in a product.
    """
    values = np.array(microseconds, np.float64)
    whole = np.floor(values)
    return whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64)


def _sizes(args: list[_Args]) -> Ints:
    return _numbers(
        [
            a.bytes if a.blocks is None else round(a.blocks * 1000) if a.blocks < _LATEST else None
            for a in args
        ]
    )


def _numbers(values: list[int | None]) -> Ints:
    try:
        return np.array([-1 if v is None else v for v in values], np.int64)
    except OverflowError:  # AccumulateGrad's number in some versions: the largest of 64 bits
        return np.array(
            [-1 if v is None or not -1 <= v < _MOST_NUMBER else v for v in values], np.int64
        )


def _last_between(text: bytes, window: int = _LONGEST_EVENT) -> tuple[int, int] | None:
    """Where the last event of ``text`` starts: (end of the one before, its own start)."""
    at = max(0, len(text) - window)
    last = None
    for match in _BETWEEN.finditer(text, at):
        last = match
    if last is not None:
        return last.start() + 1, last.end()
    return _last_between(text, window * 8) if at else None


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    # Worth a factor of three here: the collector walks each new generation of structs in vain.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
