"""Files that stay open while the script runs, which may close them without our knowledge.

A script that becomes a daemon closes every file, and its next file gets the number of one of ours.
So a number says nothing about a file: before something is done with it, the file is compared with
the one that was opened.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from weakref import WeakSet


class Descriptor:
    """An open file: its number, and whether the number is still that of this file.

    Args:
        number: of a file that is open: a pipe, or a file that is only read from now on, and whose
            name is removed, if it is to be removed. A file that is removed and closed leaves its
            inode to the next file, but neither its size nor its times.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._identity = _identity(number)

    def keep_from_copies(self) -> None:
        """Have it closed in copies of this process, which would keep its space on the disk."""
        _kept_from_copies.add(self)

    @property
    def is_open(self) -> bool:
        """Whether nobody has closed it; the number may be another file's since."""
        return self._identity is not None and _identity(self.number) == self._identity

    def close(self) -> None:
        """Close the file, unless somebody has."""
        if self.is_open:
            with suppress(OSError):
                os.close(self.number)


def _identity(number: int) -> tuple[int, ...] | None:
    """Return what no other file has in common with this one; ``None`` if no file is open."""
    try:
        about = os.fstat(number)
    except OSError:
        return None
    same = about.st_dev, about.st_ino, about.st_mode, about.st_nlink
    if stat.S_ISREG(about.st_mode):
        return *same, about.st_size, about.st_mtime_ns
    return same  # the times of a pipe are those of its use


_kept_from_copies: WeakSet[Descriptor] = WeakSet()


def _close_in_copy() -> None:
    for descriptor in list(_kept_from_copies):
        descriptor.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_copy)
