"""Numbers that programs write and that JSON does not have: infinities, and what is no number."""

from __future__ import annotations

import re

import numpy as np

# What C and Python's json print, behind its sign. Each spelling is written out, because ``re``
# searches for the first letters of a choice between plain words twenty times as fast.
_WORD = re.compile(
    rb"(?:inf(?:inity)?|Inf(?:inity)?|nan(?:\([a-z]*\))?|NaN(?:\([a-z]*\))?)(?=\s*[,}\]])"
)
# No time, count or size is this large, with either sign, so it is refused wherever it is used.
_NO_NUMBER = b"1e308"


def with_numbers(text: bytes) -> bytes:
    """Return the text with an impossibly large number for each bare ``inf`` and ``nan``.

    It must begin outside a string.
    """
    matches = [match.span() for match in _WORD.finditer(text)]
    if not matches:
        return text
    spans = np.array(matches, np.int64)
    # Escaped quotes and backslashes are blanked; the length stays.
    plain = text.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    quotes = np.flatnonzero(np.frombuffer(plain, np.uint8) == ord('"'))
    spans = spans[np.searchsorted(quotes, spans[:, 0]) % 2 == 0]
    pieces, at = [], 0
    for begin, end in spans.tolist():
        pieces += [text[at:begin], _NO_NUMBER]
        at = end
    return b"".join([*pieces, text[at:]])
