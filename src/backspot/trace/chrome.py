"""Decode an exported Kineto trace (Chrome's JSON trace event format) piece by piece.

A trace of gigabytes is read a few hundred kilobytes at a time. Each piece becomes typed structs,
which live for that piece only, and their values go into columns. There are two ways to decode a
piece:

    fast          cut where two events visibly meet (``}, {"ph":``), and decoded as one list
    one by one    Python's own decoder reads event after event: where two events do not visibly
                  meet, for the end of the list, and for text that is not quite JSON (control
                  characters, bytes that are no text, numbers in quotes). A broken event is left
                  out, up to where two events visibly meet again.

No more text is kept than the longest event that is read (``_LONGEST_EVENT`` bytes). A trace whose
list of events does not end is cut short.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence

from backspot.trace import compiled, source_lines
from backspot.trace.columns import Columns
from backspot.trace.json_events import (
    Event,
    Gatherer,
    convert_event,
    convert_in_detail,
    decode_events,
    decode_in_detail,
)
from backspot.trace.metadata import (
    TableFinder,
    base_time,
    device_names,
    find_events,
    has_details,
)
from backspot.trace.numbers import with_numbers

# The structs of a piece stay in the processor's caches; ten times as much takes half again as long.
_PIECE = 1 << 18
# Between two events. A quote in a JSON string is escaped, so this cannot match inside a string. It
# can match in a list of objects within an event's args; then decoding the piece fails.
_BEFORE = r',\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|bp|s)"\s*:)'
_BETWEEN = re.compile(rb"\}\s*" + _BEFORE.encode())
_FOLLOWING = re.compile(_BEFORE)
_SURELY_FOLLOWING = re.compile(rb',\s*(?=\{\s*"ph"\s*:)')
"""The comma before an event, whatever is left out before it."""
_BLANKS = re.compile(r"[\s,]*")
_COMMA_AND_BLANKS = b", \t\r\n"
_NEXT = re.compile(r"\s*(?:[,\]]|\Z)")
"""What follows an event."""
# What follows the list of events: nothing, the end of the object, or its next key.
_END = re.compile(r'\](?=\s*(?:\Z|\}\s*\Z|,\s*(?:\Z|")))')
# Where a value is cut: in a string, or in a word or number, which are short.
_CUT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*\\?\Z|.{0,8}\Z', re.DOTALL)
_USUAL_EVENT = 1 << 12
"""Bytes of one event: most are shorter."""
_LONG = 1 << 19
"""Bytes without a visible boundary between two events, after which events are read one by one."""
_LONGEST_EVENT = 1 << 20
"""Bytes of one event: a longer one is skipped and counted as malformed."""
_MOST_HEAD = 1 << 20
"""Bytes before the events that are searched for what is recorded."""
_TOGETHER = 1 << 13
"""Events that are read one by one before they are put into columns."""
_MOST_TRIES = 8
"""For how many broken events of a piece all of the piece may be read in vain."""
# Errors of the decoders: of JSON, of text (half a surrogate pair), of numbers, of nesting.
_BAD = (ValueError, OverflowError, RecursionError)
_TOLERANT = json.JSONDecoder(strict=False)


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
        self._gatherer = Gatherer(self.columns)
        self.seen = 0
        self.malformed = 0
        self.impossible = 0
        self.truncated = False

    def run(self) -> None:
        """Read to the end.

        Raises:
            NotATraceError: If the text is no trace at all.
        """
        after = self._events(self._begin())
        self.truncated = after is None
        while after:
            self._look(after)
            after = self._read(_PIECE)
        self._finish()

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
            if len(rest) > (_LONGEST_EVENT if last else _LONG):
                return False
        if last:
            after = self._one_by_one(rest, is_last=True)[1]
            if after is None or self.malformed:
                return False
            self._look(after)
        elif not self._fast(rest):
            return False
        self._finish()
        return True

    def extend(self, columns: Columns, count: int, impossible: int) -> None:
        """Add the part that another decoder read of the following stretch."""
        self.columns.extend(columns)
        self.seen += count
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

    def _events(self, rest: bytes) -> bytes | None:
        """Decode the list of events to its end, or to the end of the text.

        Args:
            rest: the part of the list that was read already.

        Returns:
            What was read of the text behind the list; ``None`` if the text ends within the list.
        """
        while block := self._next(len(rest)):
            buffer = rest + block
            cut = _last_between(buffer, len(rest))
            if cut is not None and self._fast(buffer[: cut[0]]):
                rest = buffer[cut[1] :]
                continue
            rest = buffer
            if cut is not None or len(rest) > _LONG:
                end = len(rest) if cut is None else cut[0]
                still_open, after = self._one_by_one(rest[:end], is_last=False)
                if after is not None:
                    return after + rest[end:]
                if len(still_open) > _LONGEST_EVENT:
                    self.malformed += 1
                    still_open = self._skip_event() if cut is None else b""
                rest = (still_open + rest[end:]).lstrip(_COMMA_AND_BLANKS)
        return self._one_by_one(rest, is_last=True)[1]

    def _skip_event(self) -> bytes:
        """Read to the end of an event that is too long, and return what was read behind it."""
        text_read = b""
        while block := self._read(_PIECE):
            text_read = text_read[-_USUAL_EVENT:] + block
            if following := _SURELY_FOLLOWING.search(text_read):
                return text_read[following.start() :]
        return b""

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

    def _one_by_one(self, text: bytes, *, is_last: bool) -> tuple[bytes, bytes | None]:
        """Decode event after event, slowly and tolerantly.

        Args:
            text: from the beginning of an event, or from a comma before one.
            is_last: whether no text follows; then an event that is cut short is not malformed.

        Returns:
            The text of an event that does not end in this text, and the text behind the list of
            events, ``None`` if the list does not end.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        shown = decoder.decode(with_numbers(text), is_last)
        begun = decoder.getstate()[0]  # a character that is cut in two
        items: list[object] = []
        texts: list[str] = []
        position, tries = 0, _MOST_TRIES
        following = _FOLLOWING.search(shown)
        still_open, after = begun, None
        while (position := _skipped(shown, position)) < len(shown):
            if end := _END.match(shown, position):
                after = shown[end.end() :].encode() + begun
                break
            if following is not None and following.start() <= position:
                following = _FOLLOWING.search(shown, position + 1)
            item, size, is_cut = _value(
                shown, position, following.start() if following else len(shown)
            )
            if is_cut and following is not None:  # is it within the event?
                is_cut = tries > 0
                if tries:
                    item, size, is_cut = _value(shown, position, len(shown))
                    tries -= not size
            if len(items) >= _TOGETHER:
                self._take_either(texts, items)
                texts, items = [], []
            if size and _NEXT.match(shown, position + size):
                items.append(item)
                texts.append(shown[position : position + size])
                position += size
                continue
            may_end = is_cut and len(shown) - position <= _LONGEST_EVENT
            if not is_last and (following is None or may_end):
                still_open = shown[position:].encode() + begun
                break
            if following is not None:
                position = following.end()
            elif not is_cut and (end := _END.search(shown, position)):
                position = end.start()
            else:  # cut short
                break
            self.malformed += 1
        self._take_either(texts, items)
        return still_open, after

    def _take_either(self, texts: list[str], items: list[object]) -> None:
        """Take events as their texts are decoded strictly, else as Python has decoded them."""
        if not self._fast(",".join(texts).encode()):
            self._take(self._converted(items))

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
            events = decode(b"".join((b"[", text, b"]")))
        except _BAD:
            return False
        self._take(events)
        return True

    def _converted(self, items: list[object]) -> list[Event]:
        events: list[Event] = []
        convert = convert_in_detail if self._in_detail else convert_event
        for item in items:
            try:
                events.append(convert(item))
            except (*_BAD, SystemError):  # msgspec before 0.22, for an integer beyond a float
                self.malformed += 1
        return events

    def _take(self, events: Sequence[Event]) -> None:
        self.seen += len(events)
        self._gatherer.take(events)

    def _look(self, text: bytes) -> None:
        """Search text around the events for the tables of the live half."""
        for table in self._tables:
            table.look(text)

    def _finish(self) -> None:
        self._gatherer.flush()
        self.impossible += self._gatherer.impossible
        lines, graphs = (table.found() for table in self._tables)
        self.columns.lines = source_lines.find_lines(lines) or self.columns.lines
        if graphs:
            self.columns.compiled = compiled.find_compiled(graphs)


def _value(text: str, begin: int, end: int) -> tuple[object, int, bool]:
    """Return the JSON value that begins somewhere in a text.

    Returns:
        The value, its length, and whether the text to ``end`` ends within it. The length is 0 if
        there is no value.
    """
    size = _USUAL_EVENT
    while True:
        piece = text[begin : min(begin + size, end)]
        try:
            return *_TOLERANT.raw_decode(piece), False
        except _BAD as error:
            is_cut = _CUT.match(piece, getattr(error, "pos", 0)) is not None
        if not is_cut or begin + size >= end:
            return None, 0, is_cut
        size *= 8


def _skipped(text: str, position: int) -> int:
    """Return where the next value or bracket begins, behind blanks and commas."""
    blanks = _BLANKS.match(text, position)
    return blanks.end() if blanks else position


def first_between(text: bytes) -> tuple[int, int] | None:
    """Return where the first event of ``text`` starts: (end of the one before, its own start)."""
    match = _BETWEEN.search(text)
    return (match.start() + 1, match.end()) if match else None


def _last_between(text: bytes, since: int = 0) -> tuple[int, int] | None:
    """Return where the last event of ``text`` starts: (end of the one before, its own start).

    The text before ``since`` is known to have no event's start.
    """
    window = _USUAL_EVENT
    while True:
        position = max(0, len(text) - window)
        last = None
        for match in _BETWEEN.finditer(text, position):
            last = match
        if last is not None:
            return last.start() + 1, last.end()
        if position <= since - _USUAL_EVENT or not position:
            return None
        window *= 8
