"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from backspot.errors import BackspotError, OutputExistsError, SourceNotFoundError, UsageError
from backspot.formatting import visible
from backspot.paths import check_force, path_text, refuse_sources

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # on Windows, where nobody can remove a file that is open
    fcntl = None

__all__ = ["Sources", "check_target", "writing"]

Sources = Iterable["str | os.PathLike[str] | int"]
"""Paths, or open file descriptors, of what an output is made of."""

_PART = re.compile(r"\.backspot-[0-9a-f]{12}\.part")
_SECONDS = 60


def check_target(
    path: str | os.PathLike[str], *, force: bool, sources: Sources = (), what: str = "save"
) -> Path:
    """Complain about a path that cannot be written, before the work whose result goes there.

    Args:
        path: where to.
        force: overwrite what is there.
        sources: what the output is made of, which it never overwrites.
        what: what the path was given for.

    Returns:
        The file to write: where ``path`` is a link and ``force`` is true, what it leads to.

    Raises:
        OutputExistsError: where the file exists and ``force`` is false.
        SourceNotFoundError: where the folder does not exist.
        UsageError: where ``path`` is a folder, one of the sources, or no path at all.
        BackspotError: where the system does not let it be looked at.
    """
    shown = visible(path_text(path, what))
    check_force(force)
    target = Path(path)
    try:
        refuse_sources(path, sources)
        if target.is_dir():
            raise UsageError(f"{shown or 'an empty path'} is a folder: name a file in it")
        if os.path.lexists(target) and not force:
            raise OutputExistsError(
                f"{shown} is there already: choose another name, or overwrite it with --force "
                "(force=True in Python)"
            )
        if not target.parent.is_dir():
            raise SourceNotFoundError(f"{shown}: there is no folder {visible(str(target.parent))}")
    except OSError as error:
        if isinstance(error, BackspotError):
            raise
        raise _unwritable(shown, error) from error
    return Path(os.path.realpath(target)) if force else target


@contextmanager
def writing(
    path: str | os.PathLike[str], *, force: bool, sources: Sources = ()
) -> Iterator[BinaryIO]:
    """Give a file to write, which takes its name only once it is complete.

    Whatever fails on the way, what was there before is still there, whole, and nothing new is. What
    a killed process left of its own, the next that writes into the folder takes away.

    Raises:
        BackspotError: where the disk refuses; otherwise as ``check_target``.
    """
    target = check_target(path, force=force, sources=sources)
    # In the same folder, because only within one file system does a name change hands at once.
    part = target.with_name(f".backspot-{os.urandom(6).hex()}.part")
    shown = visible(os.fspath(path))
    try:
        with part.open("xb") as file:
            _hold(file.fileno())
            _clear(part, os.fstat(file.fileno()).st_mtime)
            yield file
            file.flush()
            os.fsync(file.fileno())
        if force:
            with suppress(OSError):
                shutil.copymode(target, part)
            part.replace(target)
        else:
            _name_exclusively(part, target, shown)
    except OSError as error:
        if isinstance(error, BackspotError):
            raise
        raise _unwritable(shown, error) from error
    finally:
        with suppress(OSError):
            part.unlink()


def _unwritable(shown: str, error: OSError) -> BackspotError:
    return BackspotError(f"{shown} cannot be written: {error.strerror or error}")


def _hold(file: int) -> bool:
    """Lock a file for as long as this process has it open; whether it was free.

    A process that dies, however it dies, gives its locks back: so what is free is nobody's. A
    number of a process in the name would tell less, for numbers are used again, and another
    machine, or another container, has the same ones.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        return False
    return True


def _clear(part: Path, now: float) -> None:
    """Remove what killed processes left in the folder of ``part``.

    Only our user's files of our names that nobody holds, and that nobody wrote to for a while: a
    file is not locked in the moment in which it comes into being. The clock is the file system's.
    """
    with suppress(OSError):
        for entry in os.scandir(part.parent):
            if _PART.fullmatch(entry.name) and entry.name != part.name:
                with suppress(OSError):
                    _clear_one(Path(entry.path), now)


def _clear_one(left: Path, now: float) -> None:
    about = left.lstat()
    if not stat.S_ISREG(about.st_mode) or now - about.st_mtime < _SECONDS:
        return
    if hasattr(os, "geteuid") and about.st_uid != os.geteuid():
        return
    if fcntl is None:
        left.unlink()
        return
    file = os.open(left, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _hold(file):
            left.unlink()
    finally:
        os.close(file)


def _name_exclusively(part: Path, target: Path, shown: str) -> None:
    """Name the file unless the name was taken in the meantime."""
    try:
        os.link(part, target)
    except FileExistsError:
        raise OutputExistsError(f"{shown} came into being in the meantime: it stays") from None
    except OSError:
        # A file system without hard links: a name taken from here on would be overwritten.
        if os.path.lexists(target):
            raise OutputExistsError(f"{shown} came into being in the meantime: it stays") from None
        part.replace(target)
