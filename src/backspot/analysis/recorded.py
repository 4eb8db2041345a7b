"""What was recorded: the events with their owners, on which device, when and by which command."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType

from backspot.analysis.attribution.ownership import Ownership, attribute
from backspot.analysis.attribution.partial import without_partial
from backspot.analysis.caveats import why_no_backward
from backspot.errors import NoBackwardError
from backspot.formatting import counted
from backspot.trace import Events, read_events

__all__ = ["find_recorded", "owned", "read_whole", "whole"]


def read_whole(path: Path) -> tuple[Events, Ownership]:
    """Read a trace file in this process alone.

    Returns:
        The events without passes and steps that were recorded in part, and their owners.

    Raises:
        SourceNotFoundError: If the file is missing or cannot be read.
        NotATraceError: If the file is not a trace, or is too broken to use.
        NoBackwardError: If the trace has no backward pass.
    """
    events = read_events(path, jobs=1)
    return whole(events, owned(events))


def owned(events: Events) -> Ownership:
    """Return the owners of events.

    Raises:
        NoBackwardError: If the trace has no backward pass.
    """
    ownership = attribute(events)
    if not len(ownership.passes.start):
        raise NoBackwardError(why_no_backward(events))
    return ownership


def whole(events: Events, ownership: Ownership) -> tuple[Events, Ownership]:
    """Leave out what was recorded in part, as ``without_partial`` says, if a pass is left then."""
    complete = without_partial(events, ownership)
    if complete is events:
        return events, ownership
    found = attribute(complete)
    return (complete, found) if len(found.passes.start) else (events, ownership)


_FIRST = 1_400_000_000_000_000_000  # nanoseconds; PyTorch is younger, and clocks since boot less
_LONGEST = 200
_SECRET = re.compile(r"(?i)((?:key|token|secret|password)\S*?[= ])\S+")


def find_recorded(events: Events, ownership: Ownership, *, live: bool) -> dict[str, str]:
    """Return what is known, as ``Report.recorded`` has it.

    Args:
        live: whether this process recorded the trace.
    """
    names = Counter(
        events.device_names.get(device, "")
        for device in set(ownership.work.device.tolist())
        if device >= 0
    )
    devices = [f"{count} × {name}" if count > 1 else name for name, count in names.items() if name]
    torch = sys.modules.get("torch") if live else None
    found = {
        "device": ", ".join(devices),
        "time": _time(events.clock_ns),
        "torch": str(getattr(torch, "__version__", "")),
        "command": _command() if live else "",
        "host": _host(torch) if torch else "",
    }
    return {name: text for name, text in found.items() if text}


def _host(torch: ModuleType) -> str:
    """How busy the machine is at the end of a recording: its load, and threads for its CPUs."""
    load = f"load {os.getloadavg()[0]:.1f}, " if hasattr(os, "getloadavg") else ""
    threads = counted(int(torch.get_num_threads()), "thread")
    return f"{load}{threads} of PyTorch, {counted(os.cpu_count() or 1, 'CPU')}"


def _time(nanoseconds: int) -> str:
    if nanoseconds < _FIRST:
        return ""
    try:
        found = datetime.fromtimestamp(nanoseconds // 10**9, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return ""
    return f"{found:%Y-%m-%d %H:%M} UTC"


def _command() -> str:
    """The command line of this process, without secrets; a notebook's says nothing."""
    script, *arguments = sys.argv or [""]
    if not script or "ipykernel" in script or script == "-c":
        return ""
    text = _SECRET.sub(r"\1…", shlex.join([Path(script).name, *arguments]))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
