"""Modules chosen by patterns of their paths, such as ``model.layers.*``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from backspot.errors import UsageError
from backspot.formatting import quoted
from backspot.results.grouping import numberless
from backspot.results.subtrees import near_names

__all__ = ["Patterns", "is_pattern", "patterns_of"]

_WILDCARD = re.compile(r"(?<![^.])\*\*\.|\*\*|\*|\?|\[!?[^]]+\]")
_MEANING = {"**.": r"(?:.*\.)?", "**": ".*", "*": r"[^.]*", "?": r"[^.]"}


@dataclass(frozen=True)
class Patterns:
    """Patterns of module paths. A path matches if one of the patterns matches all of it.

    ``*`` and ``?`` match within a name, ``**`` matches any number of names, and ``[0-3]`` matches
    one character of a set.

    Attributes:
        texts: the patterns.
    """

    texts: tuple[str, ...]

    @cached_property
    def _expressions(self) -> tuple[re.Pattern[str], ...]:
        return tuple(map(_expression, self.texts))

    def matches(self, path: str) -> bool:
        """Return whether a path matches."""
        return any(one.fullmatch(path) for one in self._expressions)

    def check(self, paths: Collection[str]) -> None:
        """Raise an error if a pattern matches none of these paths.

        Raises:
            UsageError: If so. The message suggests near patterns.
        """
        for text, expression in zip(self.texts, self._expressions, strict=True):
            if not any(map(expression.fullmatch, paths)):
                kinds = Counter(map(numberless, paths))
                known = dict.fromkeys(
                    path if kinds[numberless(path)] == 1 else numberless(path) for path in paths
                )
                near = near_names(text, known) or f"; among the modules are {_some(known)}"
                raise UsageError(f"match={quoted(text)} matches no module{near}")


def _some(known: Iterable[str]) -> str:
    """Return the first names for a message; the root has none."""
    return ", ".join(quoted(name) for name in list(filter(None, known))[:3]) or "none with a name"


def is_pattern(text: str) -> bool:
    """Whether a text has a wildcard, so that it is more than one path."""
    return _WILDCARD.search(text) is not None


def patterns_of(match: object) -> Patterns:
    """Return the patterns of a ``match=`` argument: one, or several in a list.

    Raises:
        UsageError: If it is neither, or a pattern is invalid.
    """
    texts = (match,) if isinstance(match, str) else match
    if not isinstance(texts, (list, tuple)) or not texts:
        raise UsageError(
            f"match={quoted(match)}: give a pattern of module paths, such as 'model.layers.*', or "
            "a list of patterns"
        )
    return Patterns(tuple(_checked(text) for text in texts))


def _checked(text: object) -> str:
    if not isinstance(text, str):
        raise UsageError(f"match={quoted(text)}: a pattern of module paths must be a str")
    try:
        _expression(text)
    except re.error as error:
        raise UsageError(f"match={quoted(text)} is not a pattern: {error.msg}") from None
    return text


def _expression(text: str) -> re.Pattern[str]:
    parts, at = [], 0
    for found in _WILDCARD.finditer(text):
        parts += [re.escape(text[at : found.start()]), _meaning(found[0])]
        at = found.end()
    return re.compile("".join([*parts, re.escape(text[at:])]), re.DOTALL)


def _meaning(wildcard: str) -> str:
    if wildcard[0] == "[":
        others = wildcard[1] == "!" and len(wildcard) > 3
        inside = re.escape(wildcard[1 + others : -1]).replace(r"\-", "-")
        return f"[{'^' * others}{inside}]"
    return _MEANING[wildcard]
