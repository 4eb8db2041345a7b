"""Format names and numbers for people, in the same way for every form of output."""

from __future__ import annotations

from collections.abc import Iterable

MINUS = "\N{MINUS SIGN}"


def visible(text: str) -> str:
    r"""Replace unprintable characters by escapes: ``\x1b``, ``\u202e``.

    A trace may come from anywhere, and so may its names. An escape sequence must not reach a
    terminal, a bidirectional override must not reverse a line, and half a surrogate pair cannot be
    encoded. Printable characters stay, in any script.
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


def labelled(name: str, class_name: str) -> str:
    """Return a module's name with its class, ``blocks.3.attn (Attention)``, if both are known."""
    return f"{name} ({class_name})" if class_name not in ("", name) else name


def place_of(file: str, line: int, last_line: int) -> str:
    """Return ``file:line``, or ``file:line-last_line``."""
    return f"{file}:{line}" + (f"-{last_line}" if last_line > line else "")


def quoted(value: object) -> str:
    """Return the ``repr`` of an argument for an error message, at most 120 characters."""
    try:
        text = visible(repr(value))
    except Exception:  # the user's own ``__repr__``, or a number with too many digits
        return f"a {type(value).__name__}"
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED - 1]}…"


_QUOTED = 120


def failures(failed: Iterable[tuple[str, str]], joint: str = " ") -> list[str]:
    """Say which inputs failed: each reason once, with the inputs that it holds for.

    Args:
        failed: the name of each input, and why it failed.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in failed:
        by_reason.setdefault(visible(reason), []).append(visible(name))
    sentences = []
    for reason, (first, *others) in by_reason.items():
        named = ", ".join(others[:_NAMED]) + (", …" if len(others) > _NAMED else "")
        more = f" (and {len(others):,} more: {named})" if others else ""
        sentences.append(f"{first}{more}{joint}{reason}")
    return sentences


_NAMED = 2


def duration(ns: float) -> str:
    """Format nanoseconds for a sentence: ``5.2 ms``, ``24.5 ms``, ``83 µs``."""
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


def between(low_ns: float, high_ns: float, doubt: str = "uncertain") -> str:
    """Format a range: ``4.0 ms to 6.4 ms``; one wider than twice its start says so in a word."""
    range_text = f"{duration(low_ns)} to {duration(high_ns)}"
    return f"{doubt}, {range_text}" if high_ns > 2 * low_ns else range_text


def decimals_for(largest_ns: float) -> int:
    """Return how many decimals of a millisecond suit a column with this largest time."""
    ms = largest_ns / 1e6
    return 0 if ms >= 1000 else 1 if ms >= 100 else 2 if ms >= 1 else 3


def milliseconds(ns: float, decimals: int) -> str:
    """Format nanoseconds for a column; zero is ``0``, very little is ``0.0``."""
    shown = f"{ns / 1e6:.{decimals}f}"
    return "0" if not ns else "0.0" if shown == "0" else shown


def percent(share: float) -> str:
    """Format a share of 0 to 1: ``21%``, ``4.2%``; only 0 is ``0%`` and only 1 is ``100%``."""
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


MANY_PERCENT = 1_000
"""A change in percent from which ``times_as_long`` says it."""
_MOST_TIMES = 1_000_000
"""Above it, what was before is as good as nothing, and digits would say the opposite."""


def times_as_long(change_percent: float) -> str:
    """Format a change of at least 1,000 percent: ``×194``, ``>×1,000,000``; of less, ``""``."""
    if change_percent < MANY_PERCENT:
        return ""
    times = 1 + change_percent / 100
    return f">×{_MOST_TIMES:,}" if times > _MOST_TIMES else f"×{times:,.0f}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a count: ``1 module``, ``12 modules``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def gigabytes(used: int, total: int) -> str:
    """Format a part of memory: ``12.3 of 79.6 GB``."""
    return f"{used / 1e9:.1f} of {total / 1e9:.1f} GB"


def size(count: int) -> str:
    """Format bytes in powers of 1,000: ``3.56 GB``, ``651 MB``, ``12.3 kB``, ``512 bytes``."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if abs(count) >= 0.9995 * unit:
            amount = count / unit
            decimals = 2 if abs(amount) < 9.995 else 1 if abs(amount) < 99.95 else 0
            return f"{amount:,.{decimals}f} {name}"
    return f"{count:,} bytes" if abs(count) != 1 else f"{count} byte"
