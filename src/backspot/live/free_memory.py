"""How much memory is left, and what the C library's heap holds.

Linux says the first, for the machine and for the groups and limits of this process; glibc the
second. Elsewhere nothing is known, and both are empty.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from backspot.live.cgroups import groups_of

resource: Any
try:
    import resource
except ImportError:  # Windows
    resource = None

GPU = "GPU "
"""How the names of devices begin."""

_PROCESS, _MACHINE = Path("/proc/self"), Path("/proc/meminfo")


class Space(NamedTuple):
    """Memory that can run out, in bytes."""

    of: str
    free: int
    total: int


class Heap(NamedTuple):
    """What glibc's ``malloc`` has from the system, in bytes; of use are differences of two.

    Attributes:
        used: in blocks that are in use, but for the largest, which are not taken from the heap.
        freed: in blocks that are free, whether the system has their memory back or not.
    """

    used: int
    freed: int


def spaces() -> list[Space]:
    """Return what limits the host's memory of this process: machine, cgroups, resource limits.

    What the system can take back at any time, as copies of files, is free.
    """
    all_spaces: list[Space] = []
    for read in (_machine, _groups, _limits):
        with suppress(OSError, ValueError):
            all_spaces.extend(read())
    return all_spaces


def ranks_here() -> int:
    """Return how many ranks on this machine do the same at the same time, as a launcher says."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(ranks), 1) if ranks.isdecimal() else 1


def resident() -> int:
    """Return how much memory this process has from the system, in bytes; 0 if that is unknown."""
    with suppress(OSError, ValueError):
        return _pages(1)
    return 0


def device_spaces(devices: Iterable[torch.device]) -> list[Space]:
    """Return the memory of GPUs; not while a step is recorded, as the call would be a part of it.

    What PyTorch keeps for later tensors is not free.
    """
    return [
        Space(f"{GPU}{device.index or 0}", *torch.cuda.mem_get_info(device))
        for device in devices
        if device.type == "cuda"
    ]


def _number(text: str, name: str) -> int:
    """Return what a line such as ``MemFree:  123 kB`` or ``file 12`` says; 0 without it."""
    line = re.search(rf"^{name}:?\s+(\d+)( kB)?$", text, re.MULTILINE)
    return int(line[1]) * (1024 if line[2] else 1) if line else 0


def _machine() -> Iterator[Space]:
    content = _MACHINE.read_text("utf-8")
    yield Space("the machine", _number(content, "MemAvailable"), _number(content, "MemTotal"))


_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}
"""The files of a group with its limit and its usage, by its version."""


@functools.cache
def _limited() -> list[tuple[str, Path, Path, Path]]:
    """Return the groups with a limit: name, and the files with limit, usage and statistics."""
    groups = []
    for group in groups_of("memory"):
        name = f"the cgroup {group.name}".rstrip()
        limit, usage = (group.folder / file for file in _FILES[group.version])
        with suppress(OSError, ValueError):  # "max"; the outermost group has no such file
            if int(limit.read_text()) < _UNLIMITED:
                groups.append((name, limit, usage, group.folder / "memory.stat"))
    return groups


_UNLIMITED = 1 << 60
"""The first version writes the largest multiple of a page where there is no limit."""


def _groups() -> Iterator[Space]:
    for name, limit, usage, statistics in _limited():
        with suppress(OSError, ValueError):  # the limit was lifted since
            total, used = int(limit.read_text()), int(usage.read_text())
            content = statistics.read_text()
            files = sum(
                _number(content, f"total_{kind}")
                or _number(content, kind)  # the first version has both
                for kind in ("inactive_file", "active_file")
            )
            yield Space(name, max(total - used + files, 0), total)


def _limits() -> Iterator[Space]:
    if resource is None:
        return
    total, _ = resource.getrlimit(resource.RLIMIT_AS)
    if total != resource.RLIM_INFINITY:
        yield Space("ulimit -v", max(total - _pages(0), 0), total)


def _pages(field: int) -> int:
    return int((_PROCESS / "statm").read_text().split()[field]) * mmap.PAGESIZE


# The heap -----------------------------------------------------------------------------------------

_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
_trim: Any = getattr(_libc, "malloc_trim", None)
# Before glibc 2.33 the numbers have 32 bits, and begin again from 0.
_new, _old = getattr(_libc, "mallinfo2", None), getattr(_libc, "mallinfo", None)
_field, _difference = (ctypes.c_size_t, ctypes.c_int64) if _new else (ctypes.c_uint, ctypes.c_int32)


class _Info(ctypes.Structure):
    _fields_ = [
        (name, _field)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"),
            *("fordblks", "keepcost"),
        )
    ]


_info: Any = (_new or _old) if _trim is not None else None
if _info is not None:
    _info.restype = _Info


def heap() -> Heap | None:
    """Return what the heap holds; ``None`` without glibc.

    It takes some 0.1 µs for each free block: 20 µs, or some milliseconds in a process with many.
    """
    if _info is None:
        return None
    info = _info()
    return Heap(info.uordblks, info.fordblks)


def grown(before: Heap | None, after: Heap | None) -> Heap:
    """Return by how much a heap has grown; by nothing where that is not known."""
    if before is None or after is None:
        return Heap(0, 0)
    used, freed = (_difference(b - a).value for a, b in zip(before, after, strict=True))
    return Heap(used, freed)


def give_back() -> None:
    """Give the memory of free blocks back to the system: about 0.1 s for a gigabyte."""
    if _trim is not None:
        _trim(0)
