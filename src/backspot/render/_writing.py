"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from backspot.errors import BackspotError, OutputExistsError, SourceNotFoundError, UsageError
from backspot.words import visible

__all__ = ["check_target", "writing"]


def check_target(path: str | os.PathLike[str], *, force: bool) -> Path:
    """Complain about a path that cannot be written, before the work whose result goes there.

    Returns:
        The file to write: where ``path`` is a link and ``force`` is true, what it leads to.

    Raises:
        OutputExistsError: where the file exists and ``force`` is false.
        SourceNotFoundError: where the folder does not exist.
        UsageError: where ``path`` is a folder.
    """
    target = Path(path)
    shown = visible(os.fspath(path))
    if target.is_dir():
        raise UsageError(f"{shown} is a folder: name a file in it")
    if os.path.lexists(target) and not force:
        raise OutputExistsError(
            f"{shown} is there already: choose another name, or overwrite it with --force "
            "(force=True in Python)"
        )
    if not target.parent.is_dir():
        raise SourceNotFoundError(f"{shown}: there is no folder {visible(str(target.parent))}")
    return Path(os.path.realpath(target)) if force else target


@contextmanager
def writing(path: str | os.PathLike[str], *, force: bool) -> Iterator[BinaryIO]:
    """Give a file to write, which takes its name only once it is complete.

    Whatever fails on the way, what was there before is still there, whole, and nothing new is.

    Raises:
        BackspotError: where the disk refuses; otherwise as ``check_target``.
    """
    target = check_target(path, force=force)
    # In the same folder, because only within one file system does a name change hands at once.
    part = target.with_name(f".backspot-{os.urandom(6).hex()}.part")
    shown = visible(os.fspath(path))
    try:
        with part.open("xb") as file:
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
        raise BackspotError(f"{shown} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink()


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
