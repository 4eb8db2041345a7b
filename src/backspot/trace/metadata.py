"""Read the text around a trace's events: what precedes them, and the tables of the live half.

Both may have any length, and the text may turn out to be no trace at all. So it is searched piece
by piece, and only the tables are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from backspot.errors import NotATraceError
from backspot.trace.names import (
    BASE_TIME,
    DEVICE_PROPERTIES,
    HAS_MEMORY,
    HAS_SHAPES,
    OWN_HEAD,
    TRACE_EVENTS,
)

_PIECE = 1 << 18
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HEAD = re.compile(TRACE_EVENTS + rb"\s*:\s*\[")
_HEAD_BEGUN = re.compile(TRACE_EVENTS + rb"\s*(?:(:)\s*)?\Z")
_BASE_TIME = re.compile(re.escape(BASE_TIME) + rb"\s*:\s*(\d{1,19})")
_DEVICE = re.compile(rb'"id"\s*:\s*(\d{1,3})\s*,\s*"name"\s*:\s*"([^"\\]*)"')
_SAVED = re.compile(rb'"backspot\.(\w{1,32})/')
"""The schema of what Backspot saves; the first one of a file says what the file is."""
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\Z)|[][{}]', re.DOTALL)
_OVERLAP = 64
"""Bytes of the previous piece that are searched again: more than any of these words has."""


def find_events(
    read: Callable[[int], bytes], source: str, note: Callable[[bytes], object]
) -> bytes:
    """Read up to the list of events, or further.

    Args:
        read: returns the next bytes, at most as many as asked for; ``b""`` at the end.
        source: what is read, for messages.
        note: called with the text before the first event, piece by piece.

    Returns:
        The text that was read behind the bracket that opens the list of events.

    Raises:
        NotATraceError: If the text is no trace at all.
    """
    text = _first(read, source, note)
    if text[:1] == b"[":
        note(text[:1])
        return text[1:]
    if text[:1] != b"{":
        kind = "HTML" if text[:1] == b"<" else "not JSON"
        raise NotATraceError(
            f"{source} is no Kineto trace: it is {kind}; give a file that export_chrome_trace wrote"
        )
    before, saved = b"", None
    while text:
        text_so_far = before + text
        match = _HEAD.search(text_so_far)
        if match is not None:
            end = match.end() - len(before)
            note(text[:end])
            return text[end:]
        note(text)
        saved = saved or _SAVED.search(text_so_far)
        begun = _HEAD_BEGUN.search(text_so_far)
        # Any number of blanks may follow the key: the next piece continues from here.
        before = TRACE_EVENTS + (begun[1] or b"") if begun else text_so_far[-_OVERLAP:]
        text = read(_PIECE)
    if saved:
        raise NotATraceError(
            f"{source} is a {saved[1].decode()} that Backspot saved, no trace: backspot show "
            "prints saved reports, backspot diff compares them, and the method load of their "
            "class (backspot.Report.load) reads them"
        )
    cut = "" if before.rstrip().endswith(b"}") else "is cut short, and "
    raise NotATraceError(
        f"{source} is no Kineto trace: it {cut}has no traceEvents; "
        "give a file that export_chrome_trace wrote"
    )


def _first(read: Callable[[int], bytes], source: str, note: Callable[[bytes], object]) -> bytes:
    """Return the first piece that is not blank, without the blanks at its beginning."""
    text = read(_PIECE)
    while (
        text
        and _BYTE_ORDER_MARK.startswith(text[: len(_BYTE_ORDER_MARK)])
        and len(text) < len(_BYTE_ORDER_MARK)
    ):
        more = read(_PIECE)
        if not more:
            break
        text += more
    if text.startswith(_BYTE_ORDER_MARK):
        note(_BYTE_ORDER_MARK)
        text = text[len(_BYTE_ORDER_MARK) :] or read(_PIECE)
    while text:
        stripped = text.lstrip()
        note(text[: len(text) - len(stripped)])
        if stripped:
            return stripped
        text = read(_PIECE)
    raise NotATraceError(f"{source} is empty: export the trace again")


def has_details(head: bytes) -> bool:
    """Whether memory or shapes may be recorded, by the text before the events.

    Tools that save a trace again may leave out what Kineto writes there.
    """
    return HAS_MEMORY in head or HAS_SHAPES in head or OWN_HEAD not in head


def device_names(head: bytes) -> dict[int, str]:
    """Return the names of the devices by index, from the text before the events."""
    properties = head.partition(DEVICE_PROPERTIES)[2]
    return {
        int(match[1]): match[2].decode("utf-8", "replace") for match in _DEVICE.finditer(properties)
    }


def base_time(head: bytes) -> int:
    """Return what times are relative to, in nanoseconds, from the text before the events."""
    match = _BASE_TIME.search(head)
    return int(match[1]) if match else 0


class TableFinder:
    """Searches the text around the events for the value under a key, of at most so many bytes."""

    def __init__(self, key: str, most: int) -> None:
        self._key = re.compile(rb'"' + re.escape(key.encode()) + rb'"\s*:')
        self._most = most
        self._before = b""
        self._found: list[bytes] = []
        self._size = 0

    def look(self, text: bytes) -> None:
        """Search the next piece."""
        text_so_far = self._before + text
        keys = list(self._key.finditer(text_so_far))
        if keys:  # the last one counts, as in every JSON object
            text = text_so_far[keys[-1].start() :]
            self._found, self._size = [text], len(text)
        elif self._found and self._size <= self._most:
            self._found.append(text)
            self._size += len(text)
        self._before = text_so_far[-_OVERLAP:]

    def found(self) -> bytes:
        """Return the text from the last such key on; ``b""`` if there is none."""
        return b"".join(self._found)


def last_value(text: bytes, key: str, most: int) -> bytes | None:
    """Return the object or list under the last occurrence of a key, as in every JSON object.

    ``None`` if there is no such key; ``b""`` if the value has more than ``most`` bytes.
    """
    matches = list(re.finditer(rb'"' + re.escape(key.encode()) + rb'"\s*:\s*(?=[{\[])', text))
    if not matches:
        return None
    value = text[matches[-1].end() :][:most]
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(value):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token[0], 0)
        if not depth:
            return value[: token.end()]
    return b""
