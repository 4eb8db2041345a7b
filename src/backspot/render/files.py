"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import BinaryIO

from backspot.errors import BackspotError, OutputExistsError, SourceNotFoundError, UsageError
from backspot.formatting import visible
from backspot.paths import check_force, path_text, refuse_sources

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # on Windows, where an open file cannot be removed
    fcntl = None

Sources = Iterable["str | os.PathLike[str] | int"]
"""Paths or open file descriptors of the files that an output is made of."""

_PART = re.compile(r"\.backspot-[0-9a-f]{12}\.part")
_SECONDS = 60


def check_target(
    path: str | os.PathLike[str], *, force: bool, sources: Sources = (), what: str = "save"
) -> Path:
    """Check that a path can be written, before the work on its content starts.

    Args:
        sources: the files that the output is made of, which are never overwritten.
        what: what the path is for, for the error message.

    Returns:
        The file to write; if ``path`` is a link and ``force`` is true, the file it points to.

    Raises:
        OutputExistsError: If the file exists and ``force`` is false.
        SourceNotFoundError: If the folder does not exist.
        UsageError: If ``path`` is a folder, one of the sources, or not a path.
        BackspotError: If the system does not allow to look at the path.
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
                f"{shown} already exists: choose another name, or overwrite it with --force "
                "(force=True in Python)"
            )
        if not target.parent.is_dir():
            raise SourceNotFoundError(f"{shown}: there is no folder {visible(str(target.parent))}")
    except OSError as error:
        if isinstance(error, BackspotError):
            raise
        raise _unwritable(shown, error) from error
    return Path(os.path.realpath(target)) if force else target


def check_folder(path: str | os.PathLike[str], option: str) -> None:
    """Check that files can be written into a folder, which need not be there yet.

    Only trying tells: permissions do not show that a system of files refuses. What is made for this
    is removed at once. Raises ``UsageError`` for what is no path, else ``BackspotError``.
    """
    folder = Path(path_text(path, option)).absolute()
    there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    try:
        Path(mkdtemp(prefix=".backspot-", dir=there)).rmdir()
    except OSError as error:
        reason = error.strerror or error
        raise BackspotError(
            f"{option} {visible(os.fspath(path))}: nothing can be written there: {reason}. Name "
            "another folder"
        ) from error


@contextmanager
def writing(
    path: str | os.PathLike[str], *, force: bool, sources: Sources = (), synced: bool = True
) -> Iterator[BinaryIO]:
    """Open a temporary file, which gets its real name only once it is complete.

    If anything fails, an older file stays as it was, and no new one appears. Temporary files that a
    killed process left behind are removed by the next process that writes into the folder.

    Args:
        synced: whether the content is on the disk before, and so outlasts a crash of the system.

    Raises:
        BackspotError: If the file cannot be written; otherwise as ``check_target``.
    """
    target = check_target(path, force=force, sources=sources)
    # In the same folder, because renaming is atomic only within one file system.
    temporary = target.with_name(f".backspot-{os.urandom(6).hex()}.part")
    shown = visible(os.fspath(path))
    try:
        with temporary.open("xb") as file:
            _hold(file.fileno())
            _clear(temporary, os.fstat(file.fileno()).st_mtime)
            yield file
            file.flush()
            if synced:
                os.fsync(file.fileno())
        if force:
            with suppress(OSError):
                shutil.copymode(target, temporary)
            temporary.replace(target)
        else:
            _name_exclusively(temporary, target, shown)
    except OSError as error:
        if isinstance(error, BackspotError):
            raise
        raise _unwritable(shown, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _unwritable(shown: str, error: OSError) -> BackspotError:
    return BackspotError(f"{shown} cannot be written: {error.strerror or error}")


def _hold(file: int) -> bool:
    """Lock a file while this process has it open; return whether it was free.

    A process that dies releases its locks, so a file that is free has no owner. A process number in
    the name would prove less: numbers are reused, and other machines and containers have the same.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        return False
    return True


def _clear(temporary: Path, now: float) -> None:
    """Remove temporary files that killed processes left in the folder of ``temporary``.

    Only files with our names that belong to this user, that no process has locked, and that were
    not written to for a while, because a new file is unlocked for a moment. ``now`` is the file
    system's clock.
    """
    with suppress(OSError):
        for entry in os.scandir(temporary.parent):
            if _PART.fullmatch(entry.name) and entry.name != temporary.name:
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


def _name_exclusively(temporary: Path, target: Path, shown: str) -> None:
    """Rename the file, unless the name was taken in the meantime."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise OutputExistsError(f"{shown} was created in the meantime: it stays") from None
    except OSError:
        # A file system without hard links: a file created from here on would be overwritten.
        if os.path.lexists(target):
            raise OutputExistsError(f"{shown} was created in the meantime: it stays") from None
        temporary.replace(target)
