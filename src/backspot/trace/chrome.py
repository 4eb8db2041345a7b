"""Decoding of exported Kineto traces (Chrome's JSON trace event format) in pieces.

A trace of gigabytes is read some hundred kilobytes at a time: the text is cut between two events,
each piece is decoded into typed structs that live for that piece only, and what matters goes into
columns. The fast way trusts the text; whatever it stumbles over is decoded again leniently, event
by event, so that one bad event costs one event.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import msgspec

from backspot.errors import NotATraceError
from backspot.garbage import without_collecting
from backspot.lines import KEY, find_lines
from backspot.trace.columns import Columns
from backspot.trace.decoding import Event, decode_events, gather

__all__ = ["ChromeDecoder", "first_between", "split_head"]

# What a piece becomes stays in the processor's caches; ten times as much takes half again as long.
_PIECE = 1 << 18
_HEAD = re.compile(rb'"traceEvents"\s*:\s*\[')
# Between two events. In a JSON string a quote is escaped, so this cannot match inside one; a list
# of objects within an event's args could match, and is then found out by the decoder.
_BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|bp|s)"\s*:)')
_CLOSING = re.compile(rb"\}\s*\]")
_MOST_TAIL = 1 << 26  # bytes: what may follow the events and is looked through
_MOST_EVENTS = 1 << 12  # bytes: most are shorter


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
        with without_collecting():
            head, rest = split_head(self._read, self._source)
            self._look_for_lines(head)
            while True:
                block = self._read(max(_PIECE, len(rest)))
                if not block:
                    self._last(rest)
                    return
                buffer = rest + block
                cut = _last_between(buffer, len(rest))
                if cut is None:
                    rest = buffer
                    continue
                piece, rest = buffer[: cut[0]], buffer[cut[1] :]
                if not self._piece(piece):
                    self._look_for_lines(buffer + self._tail())
                    return

    def run_part(self, *, first: bool, last: bool) -> bool:
        """Read a stretch of a trace that begins and ends between two events.

        Args:
            first: whether it begins with what stands before the events.
            last: whether it ends with what stands behind them.

        Returns:
            Whether all is sound. If not, only ``run`` on the whole text can tell what is wrong.

        Raises:
            NotATraceError: where the text is no trace at all.
        """
        with without_collecting():
            rest = b""
            if first:
                head, rest = split_head(self._read, self._source)
                self._look_for_lines(head)
            while block := self._read(max(_PIECE, len(rest))):
                buffer = rest + block
                cut = _last_between(buffer, len(rest))
                if cut is None:
                    rest = buffer
                    continue
                rest = buffer[cut[1] :]
                if not self._fast(buffer[: cut[0]]):
                    return False
            if not last:
                return self._fast(rest)
            self._look_for_lines(rest)
            return self._close(rest)

    def extend(self, columns: Columns, seen: int, impossible: int) -> None:
        """Add what another decoder read of the stretch that follows."""
        self.columns.extend(columns)
        self.seen += seen
        self.impossible += impossible

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
        self._look_for_lines(text)
        if self._close(text):
            return
        # Something is wrong in here, or the writer died before it was done. What is whole is kept.
        cut = _last_between(text)
        if cut is not None:
            whole, text = text[: cut[0]], text[cut[1] :]
            if not self._fast(whole) and not self._lenient(whole):
                self._one_by_one(whole)
        if not self._close(text):
            self.truncated = True
            self._fast(text.strip().rstrip(b","))

    def _tail(self) -> bytes:
        """What follows the text that holds the end of the events."""
        blocks, size = [], 0
        while size < _MOST_TAIL and (block := self._read(_PIECE)):
            blocks.append(block)
            size += len(block)
        return b"".join(blocks)

    def _look_for_lines(self, text: bytes) -> None:
        """Take the table of source lines, if ``text``, which holds more than events, has it."""
        if KEY.encode() in text:
            self.columns.lines = find_lines(text) or self.columns.lines

    def _close(self, text: bytes) -> bool:
        """Decode up to the bracket that closes the list of events, if it is in ``text``."""
        if text.lstrip()[:1] == b"]":
            return True
        tries = 0
        for match in _CLOSING.finditer(text):
            try:
                events = decode_events(b"[" + text[: match.end()])
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
            events = decode_events(b"[" + text + b"]")
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

    def _converted(self, raw: list[object]) -> list[Event]:
        events = []
        for item in raw:
            try:
                events.append(msgspec.convert(item, Event, strict=False))
            except (msgspec.ValidationError, OverflowError):
                self.malformed += 1
        return events

    def _take(self, events: list[Event]) -> None:
        self.seen += len(events)
        self.impossible += gather(events, self.columns)


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
            if b'"backspot.report/' in text:
                raise NotATraceError(
                    f"{source} is a report that Backspot saved, no trace: backspot diff compares "
                    "it, backspot.Report.load reads it"
                )
            raise NotATraceError(
                f"{source} is no Kineto trace: it has no traceEvents; "
                "give a file that export_chrome_trace wrote"
            )
        text += more
    return text[: match.end()], text[match.end() :]


def first_between(text: bytes) -> tuple[int, int] | None:
    """Where the first event of ``text`` starts: (end of the one before, its own start)."""
    match = _BETWEEN.search(text)
    return (match.start() + 1, match.end()) if match else None


def _last_between(text: bytes, since: int = 0) -> tuple[int, int] | None:
    """Where the last event of ``text`` starts: (end of the one before, its own start).

    Args:
        text: what to look in, from the back.
        since: before which there is none.
    """
    window = _MOST_EVENTS
    while True:
        at = max(0, len(text) - window)
        last = None
        for match in _BETWEEN.finditer(text, at):
            last = match
        if last is not None:
            return last.start() + 1, last.end()
        if at <= since - _MOST_EVENTS or not at:
            return None
        window *= 8
