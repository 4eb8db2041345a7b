"""The labels that the live half writes into a trace and the offline half reads back.

One grammar serves both halves, so that a trace recorded on one machine means the same on another::

    forward: blocks.3.attn (Attention)          a call's forward, a range
    forward: blocks.3.attn (Attention) #2       the second call within one outermost forward
    backward: blocks.3.attn (Attention)         from here on autograd works for this module: with
                                                markers; an exported file has spans instead
    backward end: blocks.3.attn (Attention)     written by ``hooks="module"`` only
    unmarked: blocks.3.attn (Attention)         a tensor here has no marker: adding one is not safe
    unused gradient: blocks.3.attn (Attention)  parameters with a gradient that no optimizer has
    unused gradient: blocks.3.attn (Attention) #11  some of them, with 11% of their numbers
    float64: blocks.3.attn (Attention)          the module has parameters in double precision
    forward: (VisionTransformer)                the root: its path is empty

In names, some characters are percent-encoded as UTF-8: those that the grammar uses, that JSON
writers get wrong (quotes, backslashes) or that no viewer can show. The live half encodes all that
is not ASCII too, because PyTorch exports a range with such a name as ``unknown``. In the spans that
Backspot itself writes, letters of any script stay as they are and can be searched for.
Reading takes both forms.
"""

from __future__ import annotations

import re
from enum import Enum
from urllib.parse import quote, unquote

import msgspec


class Kind(str, Enum):
    """What a label marks in the trace."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_END = "backward end"
    UNMARKED = "unmarked"
    UNUSED = "unused gradient"
    DOUBLE = "float64"


class Label(msgspec.Struct, frozen=True):
    """One label.

    Attributes:
        kind: what the label marks.
        path: the module path as ``named_modules()`` gives it; ``""`` is the root.
        class_name: the module's class, without its package.
        call: 1 for the first call of this module within one outermost forward, 2 for the next, …;
            of unused gradients see ``unused_part``.
    """

    kind: Kind
    path: str
    class_name: str
    call: int = 1


_RESERVED = frozenset(" %\"'\\()#")
_ASCII = "".join(map(chr, range(128)))
_PATTERN = re.compile(
    rf"(?P<kind>{'|'.join(map(re.escape, Kind))}): "
    r"(?:(?P<path>[^ ()#]+) )?\((?P<class_name>[^ ()#]*)\)(?: #(?P<call>[1-9][0-9]{0,8}))?\Z"
)


def format_label(label: Label) -> str:
    """Return the label as text for a profiler, all ASCII; ``parse_label`` is the exact inverse."""
    return quote(readable_label(label), safe=_ASCII)


def readable_label(label: Label) -> str:
    """Return the label as text for people; ``parse_label`` is the exact inverse of this too."""
    path = f"{_escape(label.path)} " if label.path else ""
    call = f" #{label.call}" if label.call > 1 else ""
    return f"{label.kind.value}: {path}({_escape(label.class_name)}){call}"


def _escape(name: str) -> str:
    """Percent-encode characters that the grammar uses or that a trace cannot have."""
    if name.isprintable() and _RESERVED.isdisjoint(name):
        return name
    return "".join(
        quote(character, safe="", errors="surrogatepass")
        if character in _RESERVED or not character.isprintable()
        else character
        for character in name
    )


def unused_label(path: str, class_name: str, share: float) -> Label:
    """Return the label of unused gradients, which are a part of those of a module's parameters."""
    percent = round(100 * share)
    return Label(Kind.UNUSED, path, class_name, 1 if percent >= 100 else max(_LEAST, percent))


def unused_part(label: Label) -> float:
    """Return of which part of a module's parameters no optimizer has the gradients: 0 to 1."""
    return 1.0 if label.call < _LEAST else min(1.0, label.call / 100)


_LEAST = 2  # percent: 1 is no number in a label, which stands for all


def parse_label(text: str) -> Label | None:
    """Return the label that ``text`` is; ``None`` if it is none."""
    match = _PATTERN.match(text)
    if match is None:
        return None
    try:
        path = unquote(match["path"] or "", errors="surrogatepass")
        class_name = unquote(match["class_name"], errors="surrogatepass")
    except UnicodeDecodeError:  # percent signs that these functions did not write
        return None
    return Label(Kind(match["kind"]), path, class_name, int(match["call"] or 1))
