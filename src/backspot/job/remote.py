"""Traces that are not files of this machine: found, copied and told apart by ``fsspec``.

A source with a protocol, such as ``s3://bucket/traces``, is remote. ``fsspec`` finds the file
system; each one needs its own package, such as ``s3fs``, and has its credentials from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from backspot.errors import (
    BackspotError,
    MissingDependencyError,
    SourceNotFoundError,
    UsageError,
)
from backspot.formatting import visible

_SUFFIXES = (".json", ".json.gz")


def is_remote(source: str) -> bool:
    """Return whether a source names a protocol."""
    return "://" in source


def remote_traces(source: str) -> list[str]:
    """Return the traces of a remote folder, or the source itself if it is none.

    Raises:
        SourceNotFoundError: If the folder has no trace, or cannot be listed.
    """
    system, path = _found(source)
    try:
        if not system.isdir(path):
            return [source]
        names = [name for name in system.ls(path, detail=False) if name.endswith(_SUFFIXES)]
    except Exception as error:  # each file system has errors of its own
        raise _unreadable(source, error) from error
    if not names:
        raise SourceNotFoundError(
            f"{visible(source)} has no trace: there is no .json or .json.gz directly in it"
        )
    return sorted(system.unstrip_protocol(name) for name in names)


@contextmanager
def copied(source: str) -> Iterator[Path]:
    """Yield a temporary copy of a remote trace, under its own name.

    Raises:
        SourceNotFoundError: If it cannot be read.
    """
    system, path = _found(source)
    with TemporaryDirectory(prefix="backspot-") as folder:
        copy = Path(folder) / PurePosixPath(path).name
        try:
            system.get_file(path, str(copy))
        except Exception as error:
            raise _unreadable(source, error) from error
        yield copy


def version(source: str, head: int) -> str:
    """Return what changes when a remote trace is written again.

    Args:
        head: how many bytes of its beginning count.

    Raises:
        SourceNotFoundError: If it cannot be read.
    """
    system, path = _found(source)
    try:
        return f"{system.ukey(path)} {sha256(system.cat_file(path, 0, head)).hexdigest()}"
    except Exception as error:
        raise _unreadable(source, error) from error


def _found(source: str) -> tuple[Any, str]:
    """Return the file system, and the path on it."""
    try:
        import fsspec
    except ModuleNotFoundError:
        raise MissingDependencyError(
            f"{visible(source)} is read by fsspec, which is not installed: "
            "pip install 'backspot[remote]'"
        ) from None
    try:
        system, path = fsspec.core.url_to_fs(source)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{visible(source)}: {error}") from None
    return system, str(path)


def _unreadable(source: str, error: Exception) -> BackspotError:
    if isinstance(error, FileNotFoundError):
        return SourceNotFoundError(f"{visible(source)} is not there: check the trace's path")
    return SourceNotFoundError(f"{visible(source)} cannot be read: {error}")
