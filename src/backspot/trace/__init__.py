"""Read a Kineto trace, from a file or from a live profiler, into columns of numbers.

In: a path, a folder, a stream or a ``torch.profiler.profile``. Out: one ``Events``, with arrays of
integer nanoseconds and of indices, one entry for each event. This room knows what the names in a
trace are, but not what a module or a backward pass is; it imports no torch.

The way of a trace::

    source.py      what a source may be
    read.py        decides what the source is, and what of it is usable
    stream.py      a file as plain bytes, unpacked if it is gzip
    parallel.py    a large plain file, cut into stretches for several processes
    chrome.py      the text, piece by piece: where events begin and end
    metadata.py      the text before the events, and the tables behind them
    numbers.py       numbers that JSON does not have: infinities, and what is no number
    json_events.py   a piece of text as structs, and their values as columns
    frames.py        calls of Python functions, where stacks were recorded
    profiler.py    a live profiler's events, without its one export
    columns.py     the columns as they grow, joined into ``Events`` in the end
    unknown_categories.py   a warning of events that are left out
    events.py      ``Events`` and ``Category``: what the other rooms use

Five files are contracts with whoever writes the trace: ``names.py`` for PyTorch, Kineto and others,
and ``operations.py`` for what PyTorch's operations and optimizers do; ``labels.py``,
``source_lines.py`` and ``compiled.py`` for Backspot's own live half.

Terms: a *piece* is some hundred kilobytes of text that are decoded at once; a *stretch* is the part
of a file that one process decodes; a *flow* or *arrow* joins a forward operator with its backward
node.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backspot.trace.events import Category, Events, Flows
    from backspot.trace.read import Progress, read_events

__all__ = ["Category", "Events", "Flows", "Progress", "read_events"]


def __getattr__(name: str) -> Any:
    """Import a name on first use: renderers need PyTorch's names and labels, but no NumPy."""
    if name not in __all__:
        raise AttributeError(f"module 'backspot.trace' has no attribute {name!r}")
    home = "read" if name in ("Progress", "read_events") else "events"
    return getattr(import_module(f"backspot.trace.{home}"), name)
