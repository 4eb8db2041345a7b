"""Text from a trace in Markdown, in which no name is markup, a link or a call upon anybody."""

from __future__ import annotations

import re
from collections.abc import Sequence

from backspot.render._story import Part
from backspot.words import visible

__all__ = ["as_code", "as_sentence", "as_table", "as_text"]

# What a code span can hold in any reader of Markdown, in a table too.
_PLAIN = re.compile(r"[\w .,:()*/+#%=^-]+\Z")


def as_text(text: str) -> str:
    """Text without any markup."""
    return re.sub(r"[\\`*_\[\]{}<>&|~@$#!^]", lambda found: f"&#{ord(found[0])};", visible(text))


def as_code(name: str) -> str:
    """A name as code; one that a code span cannot hold everywhere, as text without any markup."""
    shown = visible(name)
    if _PLAIN.match(shown) and shown == shown.strip():
        return f"`{shown}`"
    return "".join(
        character if character.isalnum() or character == " " else f"&#{ord(character)};"
        for character in shown
    )


def as_sentence(parts: Sequence[Part]) -> str:
    """A sentence whose names are code."""
    return "".join(
        as_code(text) if kind in ("name", "node") else as_text(text) for kind, text in parts
    )


def as_table(head: Sequence[str], body: Sequence[Sequence[str]], *, names: set[int]) -> list[str]:
    """A table's lines; the columns at ``names`` are set to the left, numbers to the right."""
    rule = ["---" if index in names else "--:" for index in range(len(head))]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *body)]
