"""Where and how a trace was recorded: on which device, when and by which command."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

from backspot.analysis.attribution.ownership import Ownership
from backspot.formatting import counted, gigabytes
from backspot.threads import thread_count_of_process
from backspot.trace import Events

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
    facts = {
        "device": ", ".join(devices),
        "time": _time(events.clock_ns),
        "torch": str(getattr(torch, "__version__", "")),
        "command": _command() if live else "",
        "host": _host() if torch else "",
        "memory": gigabytes(*reserved) if (reserved := reserved_bytes(live=live)) else "",
    }
    return {name: text for name, text in facts.items() if text}


def _host() -> str:
    """How busy the machine is at the end of a recording: its load, and threads for its CPUs."""
    load = f"load {os.getloadavg()[0]:.1f}, " if hasattr(os, "getloadavg") else ""
    threads = counted(thread_count_of_process(), "thread")
    return f"{load}{threads} of PyTorch, {counted(os.cpu_count() or 1, 'CPU')}"


def reserved_bytes(*, live: bool) -> tuple[int, int] | None:
    """Return how many bytes of the current GPU were reserved at most, and how many it has.

    ``None`` if the trace is of another process, or this one uses no GPU.
    """
    torch = sys.modules.get("torch") if live else None
    if torch is None or not torch.cuda.is_initialized():
        return None
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return int(torch.cuda.max_memory_reserved()), int(total)


def _time(nanoseconds: int) -> str:
    if nanoseconds < _FIRST:
        return ""
    try:
        moment = datetime.fromtimestamp(nanoseconds // 10**9, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return ""
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _command() -> str:
    """The command line of this process, without secrets; a notebook's says nothing."""
    script, *arguments = sys.argv or [""]
    if not script or "ipykernel" in script or script == "-c":
        return ""
    text = _SECRET.sub(r"\1…", shlex.join([Path(script).name, *arguments]))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
