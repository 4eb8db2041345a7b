"""File formats: what each one can hold, and which one a file's name asks for.

A renderer's file lists its formats in ``FORMATS``, and in ``TEXTS`` what prints a kind of result
that only it knows. They are found by importing the public modules of this folder when somebody
first asks, so a new format, or a new kind of result, is one new file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from backspot.errors import UsageError
from backspot.formatting import visible
from backspot.imports import modules_of
from backspot.paths import path_text

Renderer = Callable[..., bytes]
"""Makes a file's bytes from a result. If the format has a name, it also takes a ``View``."""

Text = Callable[..., str]
"""Prints a result for a terminal; it also takes a ``width``."""


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        suffix: how the names of its files end.
        renderers: the renderer for each kind of result that it can hold.
        name: what ``--format`` calls it; empty if it is only written to files.
        top: how many rows it shows by default; ``None`` shows all.
        has_warnings: whether the file also holds the result's warnings.
    """

    suffix: str
    renderers: Mapping[type, Renderer]
    name: str = ""
    top: int | None = None
    has_warnings: bool = True

    def renderer(self, kind: type) -> Renderer:
        """The renderer for a kind of result."""
        return next(
            renderer for kind_of, renderer in self.renderers.items() if issubclass(kind, kind_of)
        )


@cache
def all_formats() -> tuple[Format, ...]:
    """All formats, sorted by suffix."""
    modules = modules_of("backspot.render")
    formats = [form for module in modules for form in getattr(module, "FORMATS", ())]
    return tuple(sorted(formats, key=lambda form: form.suffix))


def text_of(kind: type) -> Text:
    """What prints a kind of result, from the ``TEXTS`` of its module.

    Raises:
        TypeError: If no module of ``render`` lists the kind.
    """
    texts = (text for kind_of, text in _texts().items() if issubclass(kind, kind_of))
    if (text := next(texts, None)) is None:
        raise TypeError(f"{kind.__name__} is in the TEXTS of no module of backspot.render")
    return text


@cache
def _texts() -> Mapping[type, Text]:
    texts: dict[type, Text] = {}
    for module in modules_of("backspot.render"):
        texts |= getattr(module, "TEXTS", {})
    return texts


def formats_of(kind: type) -> tuple[Format, ...]:
    """The formats that can hold a kind of result, sorted by suffix."""
    return tuple(form for form in all_formats() if issubclass(kind, tuple(form.renderers)))


def format_for(path: str | os.PathLike[str], kind: type) -> Format:
    """The format that a file's name asks for; if two suffixes fit, the longer one.

    Raises:
        UsageError: If ``path`` is not a path, or its suffix is not that of such a format.
    """
    name = path_text(path, "save")
    formats = formats_of(kind)
    fitting = [form for form in formats if name.lower().endswith(form.suffix)]
    if not fitting:
        *others, last = [form.suffix for form in formats]
        raise UsageError(
            f"{visible(name)}: the suffix decides the format; "
            f"use one of {', '.join(others)} or {last}"
        )
    return max(fitting, key=lambda form: len(form.suffix))
