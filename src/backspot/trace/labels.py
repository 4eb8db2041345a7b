"""The labels that the live half writes into a trace and the offline half reads back.

One grammar serves both halves, so that a trace recorded on one machine means the same on another::

    forward: blocks.3.attn (Attention)          a call's forward, a range
    forward: blocks.3.attn (Attention) #2       the second call within one outermost forward
    backward: blocks.3.attn (Attention)         from here on autograd works for this module
    backward end: blocks.3.attn (Attention)     written by ``hooks="module"`` only
    unmarked: blocks.3.attn (Attention)         a tensor here bears no marker: not safe to ask
    unused gradient: blocks.3.attn (Attention)  no optimizer holds parameters of its that have one
    forward: (VisionTransformer)                the root: its path is empty

Characters that the grammar uses, that JSON writers get wrong (quotes, backslashes) or that no
viewer can show are percent-encoded (as UTF-8) in names; everything else, in any script, stays as
it is and can be searched for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from urllib.parse import unquote

__all__ = ["Kind", "Label", "escape", "format_label", "parse_label"]


class Kind(str, Enum):
    """What a label says about the moment at which it stands in the trace."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_END = "backward end"
    UNMARKED = "unmarked"
    UNUSED = "unused gradient"


@dataclass(frozen=True)
class Label:
    """One label.

    Attributes:
        kind: what the label marks.
        path: the module path as ``named_modules()`` gives it; ``""`` is the root.
        class_name: the module's class, without its package.
        call: 1 for the first call of this module within one outermost forward, 2 for the next, …
    """

    kind: Kind
    path: str
    class_name: str
    call: int = 1


_RESERVED = frozenset(" %\"'\\()#")
_PATTERN = re.compile(
    r"(?P<kind>forward|backward|backward end|unmarked|unused gradient): "
    r"(?:(?P<path>[^ ()#]+) )?\((?P<class_name>[^ ()#]*)\)(?: #(?P<call>[1-9][0-9]{0,8}))?\Z"
)


def escape(name: str) -> str:
    """Percent-encode what the grammar uses or a trace cannot carry; ``blocks.3`` stays as it is."""
    if name.isprintable() and _RESERVED.isdisjoint(name):
        return name
    return "".join(
        "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))
        if character in _RESERVED or not character.isprintable()
        else character
        for character in name
    )


def format_label(label: Label) -> str:
    """The label as it stands in a trace; ``parse_label`` is its exact inverse."""
    path = f"{escape(label.path)} " if label.path else ""
    call = f" #{label.call}" if label.call > 1 else ""
    return f"{label.kind.value}: {path}({escape(label.class_name)}){call}"


@lru_cache(maxsize=65536)
def parse_label(text: str) -> Label | None:
    """Read a label, or ``None`` where ``text`` is something else."""
    match = _PATTERN.match(text)
    if match is None:
        return None
    try:
        path = unquote(match["path"] or "", errors="surrogatepass")
        class_name = unquote(match["class_name"], errors="surrogatepass")
    except UnicodeDecodeError:  # percent signs that no label of ours wrote
        return None
    return Label(Kind(match["kind"]), path, class_name, int(match["call"] or 1))
