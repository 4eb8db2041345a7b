"""How names and numbers look to people, whatever the form: one place, so that all forms agree."""

from __future__ import annotations

__all__ = ["counted", "decimals_for", "duration", "milliseconds", "percent", "quoted", "visible"]


def visible(text: str) -> str:
    r"""Show what has no shape, or acts on its reader, as an escape: ``\x1b``, ``\u202e``.

    Names come from a trace, and a trace from anywhere: an escape sequence must not reach a
    terminal, a bidirectional override must not turn a line around, and half a surrogate pair
    cannot even be encoded. Everything printable, in any script, stays.
    """
    if text.isprintable():
        return text
    hidden = (character for character in set(text) if not character.isprintable())
    return text.translate({ord(character): _escape(character) for character in hidden})


def _escape(character: str) -> str:
    code = ord(character)
    if code <= 0xFF:
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def quoted(value: object) -> str:
    """Anything that somebody gave, for a complaint about it: short, and whatever it is."""
    try:
        text = visible(repr(value))
    except Exception:  # an object of the user's, or a number of too many digits
        return f"a {type(value).__name__}"
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED - 1]}…"


_QUOTED = 120


def duration(ns: float) -> str:
    """A time within a sentence: ``5.2 ms``, ``24.5 ms``, ``83 µs``."""
    if ns >= 9.995e9:
        return f"{ns / 1e9:.1f} s"
    ms = ns / 1e6
    if ms >= 99.95:
        return f"{ms:.0f} ms"
    if ms >= 0.995:
        return f"{ms:.1f} ms"
    if ms >= 0.0995:
        return f"{ms:.2f} ms"
    if ns >= 995:
        return f"{ns / 1e3:.0f} µs"
    return f"{ns:.0f} ns" if ns else "0 ms"


def decimals_for(largest_ns: float) -> int:
    """How many decimals of a millisecond a column of times needs for its largest to read well."""
    ms = largest_ns / 1e6
    return 0 if ms >= 1000 else 1 if ms >= 100 else 2 if ms >= 1 else 3


def milliseconds(ns: float, decimals: int) -> str:
    """A time within a column; nothing at all is a bare ``0``, told apart from very little."""
    shown = f"{ns / 1e6:.{decimals}f}"
    return "0" if not ns else "0.0" if shown == "0" else shown


def percent(share: float) -> str:
    """A share of 0 to 1: ``21%``, ``4.2%``; only nothing is ``0%`` and only all is ``100%``."""
    hundredths = share * 100
    if hundredths <= 0:
        return "0%"
    if hundredths < 0.1:
        return "<0.1%"
    if hundredths < 9.95:
        return f"{hundredths:.1f}%"
    if hundredths >= 100:
        return f"{hundredths:.0f}%"
    return f"{hundredths:.0f}%" if hundredths < 99 else f"{min(hundredths, 99.9):.1f}%"


def counted(number: int, thing: str, things: str = "") -> str:
    """``1 module``, ``12 modules``."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"
