"""Decoding of exported Kineto traces (Chrome's JSON trace event format) in pieces.

A trace of gigabytes is read some hundred kilobytes at a time: the text is cut between two events,
each piece is decoded into typed structs that live for that piece only, and what matters goes into
columns. The fast way trusts the text; whatever it stumbles over is looked at again bracket by
bracket, and in the end event by event, so that one bad event costs one event. No step looks twice
at what it has seen, and none keeps more than one event of the most bytes that one may have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise

import msgspec

from backspot.errors import NotATraceError
from backspot.trace.brackets import Brackets, Shape, with_numbers
from backspot.trace.columns import Columns
from backspot.trace.decode import Event, decode_events, gather
from backspot.trace.outside import TableFinder, find_events

__all__ = ["ChromeDecoder", "first_between"]

# What a piece becomes stays in the processor's caches; ten times as much takes half again as long.
_PIECE = 1 << 18
# Between two events. In a JSON string a quote is escaped, so this cannot match inside one; a list
# of objects within an event's args could match, and is then found out by the decoder.
_BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|bp|s)"\s*:)')
# So PyTorch writes every event, and nobody anything within one.
_FIRST_KEY = re.compile(rb'\{\s*"ph"')
_SURELY_BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"ph"\s*:)')
# What follows the list of events: nothing, the end of the object, or its next key.
_AFTER = re.compile(rb'\s*(?:\Z|\}\s*\Z|,\s*(?:\Z|"))')
_MOST_EVENTS = 1 << 12  # bytes: most are shorter
_LONG = 1 << 20
"""Bytes without a place between two events, after which brackets are counted."""
_MOST_EVENT = 1 << 24
"""Bytes of one event: one that is longer is left out unread, and is counted as malformed."""
_MOST_LENIENT = 1 << 22
"""Bytes that become Python's own objects, each of which takes some dozen times its text."""
_BEYOND_USE = 100_000
"""Malformed events after which, none having been sound, none is expected."""
# Errors of the decoders: of JSON, of text (half a surrogate pair), of numbers, of nesting.
_BAD = (ValueError, OverflowError, RecursionError)


class ChromeDecoder:
    """Feeds the events of one trace into columns.

    Args:
        read: gives the next bytes, at most as many as asked for; ``b""`` at the end.
        source: what is read, for messages.
    """

    def __init__(self, read: Callable[[int], bytes], source: str) -> None:
        self._read = read
        self._source = source
        self._around = TableFinder()
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
        after = self._events(find_events(self._read, self._source, self._around.look))
        while after is not None:
            self._around.look(after)
            after = self._read(_PIECE) or None
        self._look_up_lines()

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
        rest = find_events(self._read, self._source, self._around.look) if first else b""
        while block := self._next(len(rest)):
            buffer = rest + block
            cut = _last_between(buffer, len(rest))
            rest = buffer[cut[1] :] if cut else buffer
            if cut and not self._fast(buffer[: cut[0]]):
                return False
            if len(rest) > (_MOST_EVENT if last else _LONG):
                return False
        if not last:
            return self._fast(rest)
        end = Brackets().follow(rest).end
        if end < 0 or not self._fast(rest[:end]):
            return False
        self._around.look(rest[end + 1 :])
        self._look_up_lines()
        return True

    def extend(self, columns: Columns, seen: int, impossible: int) -> None:
        """Add what another decoder read of the stretch that follows."""
        self.columns.extend(columns)
        self.seen += seen
        self.impossible += impossible

    # The parts of the text ---------------------------------------------------------------------

    def _events(self, rest: bytes) -> bytes | None:
        """Decode the list of events; gives what was read behind it, ``None`` where it never ends.

        Args:
            rest: what was read of it already.
        """
        while block := self._next(len(rest)):
            buffer = rest + block
            cut = _last_between(buffer, len(rest))
            if cut is not None and not _FIRST_KEY.match(buffer, cut[1]):
                cut = _checked(buffer, cut)
            if cut is None:
                rest = buffer.lstrip() if buffer[:1].isspace() else buffer
                if len(rest) > _LONG:
                    rest, is_end = self._long(rest)
                    if is_end:
                        return rest
                continue
            piece, rest = buffer[: cut[0]], buffer[cut[1] :]
            if not self._fast(piece):
                after = self._by_brackets(piece)
                if after is not None:
                    return after + buffer[cut[0] :]
        after = self._by_brackets(rest, is_last=True)
        self.truncated = after is None
        return after

    def _next(self, least: int) -> bytes:
        """The next bytes, not fewer than ``least``: as many as are kept, which are then copied."""
        block = self._read(max(_PIECE, least))
        if not block or len(block) >= least:
            return block
        blocks, size = [block], len(block)
        while size < least and (block := self._read(least - size)):
            blocks.append(block)
            size += len(block)
        return b"".join(blocks)

    def _by_brackets(self, text: bytes, *, is_last: bool = False) -> bytes | None:
        """Decode what is no plain list of events; gives what follows its end, if that is in here.

        Args:
            text: from the beginning of an event.
            is_last: whether nothing follows; then an event that is cut short is no malformed one.
        """
        shape = Brackets().follow(text)
        if shape.end >= 0 and _is_end(text, shape.end, is_last=is_last):
            self._elements(text[: shape.end], shape)
            return text[shape.end + 1 :]
        if shape.is_whole:
            self._elements(text, shape)
            return None
        last = int(shape.commas[-1]) if len(shape.commas) else 0
        if last and self._fast(text[:last]):
            text = text[last + 1 :]
        return self._one_by_one(text, is_last=is_last)

    def _elements(self, text: bytes, shape: Shape) -> None:
        """Decode events that brackets and commas tell apart."""
        for begin, end in shape.stretches(len(text), _PIECE):
            some = text[begin:end]
            if self._fast(some) or self._lenient(some):
                continue
            edges = [-1, *Brackets().follow(some).commas.tolist(), len(some)]
            self._halved([some[a + 1 : b] for a, b in pairwise(edges)])

    def _halved(self, events: list[bytes]) -> None:
        """Decode events of which one is bad at least: the half without it, and the other's."""
        if len(events) == 1:
            if not self._fast(events[0]) and not self._lenient(events[0]):
                self._leave_out()
            return
        half = len(events) // 2
        for some in (events[:half], events[half:]):
            if len(some) == 1 or not self._decoded(b",".join(some)):
                self._halved(some)

    def _one_by_one(self, text: bytes, *, is_last: bool) -> bytes | None:
        """Decode text whose brackets or strings are broken, as ``_by_brackets`` does."""
        at = 0
        for match in (*_BETWEEN.finditer(text), None):
            event = text[at : match.start() + 1] if match else text[at:]
            if not self._fast(event) and not self._lenient(event):
                ends_here = is_last and match is None
                end = Brackets().follow(event).end
                behind = at + end + 1
                ends = end >= 0 and _is_end(text, at + end, is_last=is_last)
                if ends and (self._fast(event[:end]) or self._lenient(event[:end])):
                    return text[behind:]
                if not ends_here:
                    self._leave_out()
            at = match.end() if match else len(text)
        return None

    def _long(self, text: bytes) -> tuple[bytes, bool]:
        """Decode text in which no two events visibly meet.

        Returns:
            What is left of it to decode, or what follows the end of the list; and which of the two.
        """
        shape = Brackets().follow(text)
        if shape.end >= 0 and _is_end(text, shape.end, is_last=False):
            self._elements(text[: shape.end], shape)
            return text[shape.end + 1 :], True
        if len(shape.commas):
            last = int(shape.commas[-1])
            self._elements(text[:last], shape)
            return text[last + 1 :], False
        if shape.is_whole:  # one event, and nothing but blanks behind it yet
            self._elements(text, shape)
            return b"", False
        cut = _last_between(text)
        if cut is not None:  # a bracket is missing, and no later one is where it belongs
            after = self._one_by_one(text[: cut[0]], is_last=False)
            return (text[cut[1] :], False) if after is None else (after + text[cut[0] :], True)
        return (text if len(text) <= _MOST_EVENT else self._skipped(text)), False

    def _skipped(self, text: bytes) -> bytes:
        """Read to the end of an event that is too long, and give what follows it."""
        self._leave_out()
        brackets = Brackets()
        brackets.follow(text)
        before = text[-_MOST_EVENTS:]
        while text := self._read(_PIECE):
            shape = brackets.follow(text)
            if len(shape.commas):
                return text[int(shape.commas[0]) + 1 :]
            if shape.end >= 0:
                return text[shape.end :]
            known = before + text
            if (match := _SURELY_BETWEEN.search(known)) is not None:
                return known[match.end() :]
            before = known[-_MOST_EVENTS:]
        return b""

    # Events ------------------------------------------------------------------------------------

    def _fast(self, text: bytes) -> bool:
        if self._decoded(text):
            return True
        numbers = with_numbers(text)
        return numbers is not text and self._decoded(numbers)

    def _decoded(self, text: bytes) -> bool:
        try:
            events = decode_events(b"[" + text + b"]")
        except _BAD:
            return False
        self._take(events)
        return True

    def _lenient(self, text: bytes) -> bool:
        """Slow, and tolerant: of control characters, bytes that are no text, numbers in quotes."""
        if len(text) > _MOST_LENIENT:
            return False
        try:
            raw = json.loads("[" + text.decode("utf-8", "replace") + "]", strict=False)
        except _BAD:
            return False
        self._take(self._converted(raw))
        return True

    def _converted(self, raw: list[object]) -> list[Event]:
        events = []
        for item in raw:
            try:
                events.append(msgspec.convert(item, Event, strict=False))
            except _BAD:
                self._leave_out()
        return events

    def _take(self, events: list[Event]) -> None:
        self.seen += len(events)
        self.impossible += gather(events, self.columns)

    def _leave_out(self) -> None:
        self.malformed += 1
        if self.malformed >= _BEYOND_USE and not len(self.columns):
            raise NotATraceError(
                f"{self._source} is broken beyond use: none of its first {self.malformed:,} events "
                "can be read"
            )

    def _look_up_lines(self) -> None:
        self.columns.lines = self._around.table() or self.columns.lines


def _is_end(text: bytes, bracket: int, *, is_last: bool) -> bool:
    """Whether the list of events can end with the bracket that stands there.

    Args:
        text: in which no list is open at the bracket but that one.
        bracket: where it stands.
        is_last: whether nothing follows the text.
    """
    if _AFTER.match(text, bracket + 1):
        return True
    return is_last and _BETWEEN.search(text, bracket) is None


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


def _checked(text: bytes, cut: tuple[int, int]) -> tuple[int, int] | None:
    """The same cut, or where brackets say that it lies within an event, the last one before it."""
    piece = text[: cut[0]]
    if piece.count(b"{") == piece.count(b"}") and piece.count(b"[") == piece.count(b"]"):
        return cut
    shape = Brackets().follow(piece)
    if shape.is_whole or shape.end >= 0:
        return cut
    last = int(shape.commas[-1]) if len(shape.commas) else 0
    return (last, last + 1) if last else None
