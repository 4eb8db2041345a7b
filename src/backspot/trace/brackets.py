"""Find where the values of a JSON text begin and end, by counting brackets outside strings.

This looks at every byte. The fast level of ``chrome.py`` does without: it cuts the text where two
events visibly meet. Counting brackets is for text without such a place, and for text that cannot be
decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Brackets", "Shape", "value_end", "with_numbers"]

_Ints = NDArray[np.int64]

_QUOTE, _COMMA, _LIST_END = b'",]'
# "[" and "{" differ in this bit only, and so do "]" and "}".
_BIT, _OPENS, _CLOSES = 0x20, ord("{"), ord("}")
_BLOCK = 1 << 18

# What C and Python's json print for infinities and for what is no number; JSON has none of these.
_WORD = re.compile(rb"-?(?:[Ii]nf(?:inity)?|[Nn]a[Nn](?:\([a-z]*\))?)(?=\s*[,}\]])")
# No time, count or size is this large, so it is refused wherever it is used.
_NO_NUMBER = b"1e308"


@dataclass(frozen=True, slots=True)
class Shape:
    """The elements of a list in a piece of its text.

    Attributes:
        commas: the positions of the commas between two elements.
        end: the position of the bracket that closes the list, -1 for none.
        is_whole: whether the list is open at the end of the piece, and no element is.
    """

    commas: _Ints
    end: int
    is_whole: bool

    def stretches(self, length: int, most: int) -> Iterator[tuple[int, int]]:
        """Cut the first ``length`` bytes at commas into stretches of at most ``most`` bytes.

        An element that is longer is a stretch of its own.

        Yields:
            Where each stretch begins and ends, without the commas between them.
        """
        begin = 0
        while length - begin > most:
            at = np.searchsorted(self.commas, [begin, begin + most])
            chosen = max(
                int(at[1]) - 1, int(at[0])
            )  # the last comma within ``most``, else the next
            if chosen >= len(self.commas) or self.commas[chosen] >= length:
                break
            end = int(self.commas[chosen])
            yield begin, end
            begin = end + 1
        yield begin, length


class Brackets:
    """Counts the brackets of a list piece by piece, from behind the bracket that opens it."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def follow(self, text: bytes) -> Shape:
        """Count the next piece, up to the end of the list."""
        commas: list[_Ints] = []
        for at in range(0, len(text), _BLOCK):
            marks, kinds, depth = self._marks(text[at : at + _BLOCK])
            left = np.flatnonzero(depth < 0)
            inside = left[0] if len(left) else len(marks)
            parts = (depth[:inside] == 0) & (kinds[:inside] == _COMMA)
            commas.append(marks[:inside][parts] + at)
            if len(left):
                closed = kinds[inside] == _LIST_END
                end = at + int(marks[inside]) if closed else -1
                return Shape(np.concatenate(commas), end, is_whole=False)
        is_whole = not self._in_string and not self._depth
        return Shape(np.concatenate([np.empty(0, np.int64), *commas]), -1, is_whole)

    def first_close(self, text: bytes) -> int:
        """Return where the first value that opens in these pieces closes; -1 if not in this one."""
        for at in range(0, len(text), _BLOCK):
            marks, kinds, depth = self._marks(text[at : at + _BLOCK])
            closed = np.flatnonzero((depth <= 0) & (kinds | _BIT == _CLOSES))
            if len(closed):
                return at + int(marks[closed[0]])
        return -1

    def _marks(self, text: bytes) -> tuple[_Ints, NDArray[np.uint8], _Ints]:
        """Return the positions, codes and depths behind of brackets and commas outside strings."""
        if self._escaped:
            text = b" " + text[1:]
        plain = _without_escapes(text)
        self._escaped = plain.endswith(b"\\")
        codes = np.frombuffer(plain, np.uint8)
        folded = codes | _BIT
        quotes = np.flatnonzero(codes == _QUOTE)
        marks = np.flatnonzero((folded == _OPENS) | (folded == _CLOSES) | (codes == _COMMA))
        marks = marks[(np.searchsorted(quotes, marks) + self._in_string) % 2 == 0]
        self._in_string = (len(quotes) + self._in_string) % 2 == 1
        kinds = codes[marks]
        folded = kinds | _BIT
        steps = (folded == _OPENS).astype(np.int64) - (folded == _CLOSES)
        depth = self._depth + np.cumsum(steps)
        if len(depth):
            self._depth = int(depth[-1])
        return marks, kinds, depth


def value_end(text: bytes) -> int:
    """Return where the object or list at the beginning of ``text`` ends; -1 if it does not."""
    close = Brackets().first_close(text) if text[:1] in (b"{", b"[") else -1
    return close + 1 if close >= 0 else -1


def last_value(text: bytes, key: str, most: int) -> bytes | None:
    """Return the object or list under the last occurrence of a key, as in every JSON object.

    Args:
        text: any part of an object.
        key: the key.
        most: the most bytes that the value may have.

    Returns:
        The value; ``None`` if there is no such key; ``b""`` if the value does not end in time.
    """
    at = list(re.finditer(rb'"' + re.escape(key.encode()) + rb'"\s*:\s*', text))
    if not at:
        return None
    value = text[at[-1].end() :][: most + 1]
    end = value_end(value)
    return value[:end] if 0 <= end <= most else b""


def with_numbers(text: bytes) -> bytes:
    """Return the text with an impossibly large number for each bare ``inf`` and ``nan``.

    Args:
        text: events; it must begin outside a string.
    """
    found = [match.span() for match in _WORD.finditer(text)]
    if not found:
        return text
    spans = np.array(found, np.int64)
    quotes = np.flatnonzero(np.frombuffer(_without_escapes(text), np.uint8) == _QUOTE)
    spans = spans[np.searchsorted(quotes, spans[:, 0]) % 2 == 0]
    parts, at = [], 0
    for begin, end in spans.tolist():
        parts += [text[at:begin], _NO_NUMBER]
        at = end
    return b"".join([*parts, text[at:]])


def _without_escapes(text: bytes) -> bytes:
    """Blank the escaped quotes and backslashes; the length stays."""
    if b"\\" not in text:
        return text
    return text.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
