"""Decode an exported Kineto trace (Chrome's JSON trace event format) piece by piece.

A trace of gigabytes is read a few hundred kilobytes at a time. The text is cut between two events.
Each piece becomes typed structs, which live for that piece only, and their values go into columns.

The states of a decoder, by what it reads::

    before the events ──▶ in the list of events ──▶ behind the events
                                     └── end of the text: the trace is truncated

In the list, a piece is decoded at the first level that succeeds. Each level trusts the text less
and costs more::

    fast          cut where two events visibly meet (``}, {"ph":``), and decoded as one list
    by brackets   brackets are counted, which finds the end of the list and the commas between
                  events; the events between two commas are decoded as one list
    lenient       Python's own decoder: for control characters, bytes that are no text, numbers
                  in quotes
    one by one    brackets or strings are broken: cut at every place where two events visibly
                  meet, so that one bad event costs one event

No level reads a piece twice, and no more is kept than the longest event that is read
(``_MOST_EVENT`` bytes).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from itertools import pairwise

from backspot.errors import NotATraceError
from backspot.trace import compiled, source_lines
from backspot.trace.brackets import Brackets, Shape, with_numbers
from backspot.trace.columns import Columns
from backspot.trace.json_events import (
    Event,
    convert_event,
    convert_in_detail,
    decode_events,
    decode_in_detail,
    gather,
)
from backspot.trace.metadata import TableFinder, base_time, device_names, find_events, has_details

__all__ = ["ChromeDecoder", "first_between"]

# The structs of a piece stay in the processor's caches; ten times as much takes half again as long.
_PIECE = 1 << 18
# Between two events. A quote in a JSON string is escaped, so this cannot match inside a string. It
# can match in a list of objects within an event's args; then decoding the piece fails.
_BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|bp|s)"\s*:)')
# PyTorch begins every event so, and no object within an event.
_FIRST_KEY = re.compile(rb'\{\s*"ph"')
_SURELY_BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"ph"\s*:)')
# What follows the list of events: nothing, the end of the object, or its next key.
_AFTER = re.compile(rb'\s*(?:\Z|\}\s*\Z|,\s*(?:\Z|"))')
_MOST_EVENTS = 1 << 12  # bytes: most events are shorter
_LONG = 1 << 20
"""Bytes without a visible boundary between two events, after which brackets are counted."""
_MOST_EVENT = 1 << 24
"""Bytes of one event: a longer one is skipped and counted as malformed."""
_MOST_HEAD = 1 << 20
"""Bytes before the events that are searched for what is recorded."""
_MOST_LENIENT = 1 << 22
"""Bytes for the lenient level: Python's own objects take some dozen times the size of the text."""
_BEYOND_USE = 100_000
"""Malformed events after which, without a sound one so far, the rest is not read."""
# Errors of the decoders: of JSON, of text (half a surrogate pair), of numbers, of nesting.
_BAD = (ValueError, OverflowError, RecursionError)


class _List(Enum):
    """Whether the list of events has ended."""

    OPEN = auto()
    CLOSED = auto()


class ChromeDecoder:
    """Decodes one trace into columns.

    Args:
        read: returns the next bytes, at most as many as asked for; ``b""`` at the end.
        source: what is read, for messages.
        head: the text before the events, if what is read begins behind it.

    Attributes:
        columns: the values of the events.
        seen: the number of events that were decoded.
        malformed: the number of events that could not be decoded.
        impossible: the number of events that were left out because of their times.
        truncated: whether the text ends before the list of events does.
    """

    def __init__(self, read: Callable[[int], bytes], source: str, head: bytes = b"") -> None:
        self._read = read
        self._head = head
        self._in_detail = bool(head) and has_details(head)
        self._source = source
        self._tables = (
            TableFinder(source_lines.KEY, source_lines.MOST_BYTES),
            TableFinder(compiled.KEY, compiled.MOST_BYTES),
        )
        self.columns = Columns()
        self.seen = 0
        self.malformed = 0
        self.impossible = 0
        self.truncated = False

    def run(self) -> None:
        """Read to the end.

        Raises:
            NotATraceError: If the text is no trace at all.
        """
        state, text = self._events(self._begin())
        self.truncated = state is _List.OPEN
        if state is _List.CLOSED:
            self._look(text)
            while text := self._read(_PIECE):
                self._look(text)
        self._read_tables()

    def run_part(self, *, first: bool, last: bool) -> bool:
        """Read a stretch of a trace that begins and ends between two events.

        Only the fast level is used.

        Args:
            first: whether the stretch begins with the text before the events.
            last: whether the stretch ends with the text behind the events.

        Returns:
            Whether the stretch is sound. If it is not, only ``run`` on the whole text can say why.

        Raises:
            NotATraceError: If the text is no trace at all.
        """
        rest = self._begin() if first else b""
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
        self._look(rest[end + 1 :])
        self._read_tables()
        return True

    def extend(self, columns: Columns, seen: int, impossible: int) -> None:
        """Add the part that another decoder read of the following stretch."""
        self.columns.extend(columns)
        self.seen += seen
        self.impossible += impossible

    def _begin(self) -> bytes:
        """Read the text before the events, and return what was read behind it."""
        rest = find_events(self._read, self._source, self._look_before)
        self._in_detail = has_details(self._head)
        self.columns.device_names = device_names(self._head)
        self.columns.base_ns = base_time(self._head)
        return rest

    def _look_before(self, text: bytes) -> None:
        self._look(text)
        self._head += text[: max(0, _MOST_HEAD - len(self._head))]

    # The list of events ------------------------------------------------------------------------
    #
    # These return whether the list is still open, and the rest of the text: of an open list, what
    # is still to be decoded; of a closed one, what follows its closing bracket.

    def _events(self, rest: bytes) -> tuple[_List, bytes]:
        """Decode the list of events to its end, or to the end of the text.

        Args:
            rest: the part of the list that was read already.
        """
        while block := self._next(len(rest)):
            buffer = rest + block
            cut = _last_between(buffer, len(rest))
            if cut is not None and not _FIRST_KEY.match(buffer, cut[1]):
                cut = _checked(buffer, cut)
            if cut is None:
                rest = buffer.lstrip() if buffer[:1].isspace() else buffer
                if len(rest) > _LONG:
                    state, rest = self._long(rest)
                    if state is _List.CLOSED:
                        return state, rest
                continue
            piece, rest = buffer[: cut[0]], buffer[cut[1] :]
            if not self._fast(piece):
                state, after = self._by_brackets(piece)
                if state is _List.CLOSED:
                    return state, after + buffer[cut[0] :]
        return self._by_brackets(rest, is_last=True)

    def _next(self, least: int) -> bytes:
        """Read at least ``least`` bytes, if there are.

        With as many new bytes as are kept, copying both together takes linear time.
        """
        block = self._read(max(_PIECE, least))
        if not block or len(block) >= least:
            return block
        blocks, size = [block], len(block)
        while size < least and (block := self._read(least - size)):
            blocks.append(block)
            size += len(block)
        return b"".join(blocks)

    def _by_brackets(self, text: bytes, *, is_last: bool = False) -> tuple[_List, bytes]:
        """Decode all of a text that is no plain list of events.

        Args:
            text: from the beginning of an event.
            is_last: whether no text follows; then an event that is cut short is not malformed.
        """
        shape = Brackets().follow(text)
        if shape.end >= 0 and _is_end(text, shape.end, is_last=is_last):
            self._elements(text[: shape.end], shape)
            return _List.CLOSED, text[shape.end + 1 :]
        if shape.is_whole:
            self._elements(text, shape)
            return _List.OPEN, b""
        last = int(shape.commas[-1]) if len(shape.commas) else 0
        if last and self._fast(text[:last]):
            text = text[last + 1 :]
        return self._one_by_one(text, is_last=is_last)

    def _elements(self, text: bytes, shape: Shape) -> None:
        """Decode events between known commas."""
        for begin, end in shape.stretches(len(text), _PIECE):
            some = text[begin:end]
            if self._fast(some) or self._lenient(some):
                continue
            edges = [-1, *Brackets().follow(some).commas.tolist(), len(some)]
            self._halved([some[a + 1 : b] for a, b in pairwise(edges)])

    def _halved(self, events: list[bytes]) -> None:
        """Decode events of which at least one is bad, by halving until it is alone."""
        if len(events) == 1:
            if not self._fast(events[0]) and not self._lenient(events[0]):
                self._leave_out()
            return
        half = len(events) // 2
        for some in (events[:half], events[half:]):
            if len(some) == 1 or not self._decoded(b",".join(some)):
                self._halved(some)

    def _one_by_one(self, text: bytes, *, is_last: bool) -> tuple[_List, bytes]:
        """Decode all of a text with broken brackets or strings.

        Args:
            text: from the beginning of an event.
            is_last: as in ``_by_brackets``.
        """
        at = 0
        for match in (*_BETWEEN.finditer(text), None):
            event = text[at : match.start() + 1] if match else text[at:]
            if not self._fast(event) and not self._lenient(event):
                end = Brackets().follow(event).end
                closes = end >= 0 and _is_end(text, at + end, is_last=is_last)
                if closes and (self._fast(event[:end]) or self._lenient(event[:end])):
                    return _List.CLOSED, text[at + end + 1 :]
                if not (is_last and match is None):
                    self._leave_out()
            at = match.end() if match else len(text)
        return _List.OPEN, b""

    def _long(self, text: bytes) -> tuple[_List, bytes]:
        """Decode what can be decoded of a text in which no two events visibly meet."""
        shape = Brackets().follow(text)
        if shape.end >= 0 and _is_end(text, shape.end, is_last=False):
            self._elements(text[: shape.end], shape)
            return _List.CLOSED, text[shape.end + 1 :]
        if len(shape.commas):
            last = int(shape.commas[-1])
            self._elements(text[:last], shape)
            return _List.OPEN, text[last + 1 :]
        if shape.is_whole:  # one event, with only blanks behind it so far
            self._elements(text, shape)
            return _List.OPEN, b""
        cut = _last_between(text)
        if cut is not None:  # a bracket is missing, so the count is wrong from there on
            state, after = self._one_by_one(text[: cut[0]], is_last=False)
            rest = text[cut[1] :] if state is _List.OPEN else after + text[cut[0] :]
            return state, rest
        return _List.OPEN, text if len(text) <= _MOST_EVENT else self._skipped(text)

    def _skipped(self, text: bytes) -> bytes:
        """Read to the end of an event that is too long; return the text behind it."""
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
        """Decode events strictly; ``inf`` and ``nan`` are allowed for.

        Returns:
            Whether that succeeded; if not, no event has been taken.
        """
        if self._decoded(text):
            return True
        numbers = with_numbers(text)
        return numbers is not text and self._decoded(numbers)

    def _decoded(self, text: bytes) -> bool:
        try:
            decode = decode_in_detail if self._in_detail else decode_events
            events = decode(b"[" + text + b"]")
        except _BAD:
            return False
        self._take(events)
        return True

    def _lenient(self, text: bytes) -> bool:
        """Decode events slowly and tolerantly, as ``_fast`` does otherwise."""
        if len(text) > _MOST_LENIENT:
            return False
        try:
            raw = json.loads("[" + text.decode("utf-8", "replace") + "]", strict=False)
        except _BAD:
            return False
        self._take(self._converted(raw))
        return True

    def _converted(self, raw: list[object]) -> list[Event]:
        events: list[Event] = []
        convert = convert_in_detail if self._in_detail else convert_event
        for item in raw:
            try:
                events.append(convert(item))
            except (*_BAD, SystemError):  # msgspec before 0.22, for an integer beyond a float
                self._leave_out()
        return events

    def _take(self, events: Sequence[Event]) -> None:
        self.seen += len(events)
        self.impossible += gather(events, self.columns)

    def _leave_out(self) -> None:
        self.malformed += 1
        if self.malformed >= _BEYOND_USE and not len(self.columns):
            raise NotATraceError(
                f"{self._source} is broken beyond use: none of its first {self.malformed:,} events "
                "can be read"
            )

    def _look(self, text: bytes) -> None:
        """Search text around the events for the tables of the live half."""
        for table in self._tables:
            table.look(text)

    def _read_tables(self) -> None:
        lines, graphs = (table.found() for table in self._tables)
        self.columns.lines = source_lines.find_lines(lines) or self.columns.lines
        if graphs:
            self.columns.compiled = compiled.find_compiled(graphs)


def _is_end(text: bytes, bracket: int, *, is_last: bool) -> bool:
    """Whether the list of events can end with a bracket.

    Args:
        text: in which no other list is open at the bracket.
        bracket: the position of the bracket.
        is_last: whether no text follows this one.
    """
    if _AFTER.match(text, bracket + 1):
        return True
    return is_last and _BETWEEN.search(text, bracket) is None


def first_between(text: bytes) -> tuple[int, int] | None:
    """Return where the first event of ``text`` starts: (end of the one before, its own start)."""
    match = _BETWEEN.search(text)
    return (match.start() + 1, match.end()) if match else None


def _last_between(text: bytes, since: int = 0) -> tuple[int, int] | None:
    """Return where the last event of ``text`` starts: (end of the one before, its own start).

    Args:
        text: searched from the back.
        since: the part of the text that is known to have no event's start.
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
    """Return the cut, or the last one before it if brackets show that it is within an event."""
    piece = text[: cut[0]]
    if piece.count(b"{") == piece.count(b"}") and piece.count(b"[") == piece.count(b"]"):
        return cut
    shape = Brackets().follow(piece)
    if shape.is_whole or shape.end >= 0:
        return cut
    last = int(shape.commas[-1]) if len(shape.commas) else 0
    return (last, last + 1) if last else None
