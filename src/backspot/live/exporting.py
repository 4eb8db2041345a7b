"""Backward labels come when a trace is exported: they are written into the exported file.

While the profiler records, they would cost more than all else that is recorded. The exact spans
are known only afterwards, and from the trace alone: so the model need not live, nor be labelled.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from backspot.errors import BackspotError, NoBackwardError
from backspot.formatting import size, visible
from backspot.interrupts import contained, pass_on
from backspot.live.free_memory import ranks_here, spaces
from backspot.live.torch_internals.profiler import Export, Exports
from backspot.pipeline import label_export
from backspot.trace.profiler import is_plain_export
from backspot.trace.stream import GZIP

_MOST = 1 << 30
"""Bytes of a trace that is labelled. A larger one would hold up the training for 10 s or more."""
_INTERRUPTED = "writing them was interrupted"
_LATER = "`backspot show {} -o labelled.json.gz` writes them"

_said: set[str] = set()  # what is true of every trace of this process is said once


def _labelled(export: Export) -> Any:
    """Run an export; then replace its file by the same one with backward labels.

    Returns:
        What the export returns. If it raises, nothing else happens.
    """
    if is_plain_export():
        return export.run()
    path = _path(export.path)
    before = _state(path)
    result = export.run()
    # Kineto raises nothing if it cannot write: a file that is as it was is not of this export.
    if path is None or _state(path) in (None, before):
        return result
    if export.other_writer:
        if export.other_writer not in _said:
            _said.add(export.other_writer)
            _say(path, f"with {export.other_writer} PyTorch completes the file itself")
        return result
    _complete(path)
    return result


class _GivenUp(BaseException):
    """Backward labels are not wanted any more. No handler of errors catches it."""


def _complete(path: Path) -> None:
    """Write backward labels into a file, or say why there are none.

    Another thread does it: the handlers of signals run in the main thread alone, where they find
    nothing half done, and none has to be replaced meanwhile. What they raise leaves this function
    once the other thread has cleared up.
    """
    given_up, ended = threading.Event(), threading.Event()
    reasons: list[str] = []

    def check() -> None:
        if given_up.is_set():
            raise _GivenUp

    def run() -> None:
        try:
            check()
            _label(path, check)
        except _GivenUp:
            reasons.append(_INTERRUPTED)
        except Exception as error:
            reasons.append(_reason(error))
        finally:
            ended.set()

    thread = threading.Thread(target=run, name="backspot labels", daemon=True)
    try:
        thread.start()
        # Not ``join``: once it is interrupted, some Pythons believe that the thread has ended.
        ended.wait()
    except BaseException as error:
        given_up.set()
        if thread.ident is not None:
            ended.wait()
        else:  # the thread will do nothing, if it still starts
            reasons.append(_INTERRUPTED)
        if not isinstance(error, Exception):
            raise
        pass_on(error)
        reasons[:] = [_reason(error)]  # no thread can start
    finally:
        if reasons:
            _say(path, reasons[0])


def _path(target: Any) -> Path | None:
    """Return the path that Kineto writes to, which takes the URL of a file too."""
    with contained():  # the export itself raises what is wrong with it
        return Path(os.fsdecode(target).removeprefix("file://"))
    return None


def _state(path: Path | None) -> tuple[int, ...] | None:
    """Return what changes when a file is written; ``None`` if there is none, as for a pipe."""
    with contained():
        if path is not None and path.is_file():
            about = path.stat()
            return about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size
    return None


def _label(path: Path, check: Callable[[], None]) -> None:
    length = path.stat().st_size
    if length > _MOST:
        raise BackspotError(f"it has {size(length)}, and at most {size(_MOST)} are labelled")
    with path.open("rb") as file:
        if file.read(len(GZIP)) == GZIP:
            raise BackspotError("other code has packed it already")
    # Reading takes about as much as the file has, and the ranks of a machine export together.
    needed = length * ranks_here()
    free = min((space.free for space in spaces()), default=needed)
    if free < needed:
        raise BackspotError(f"{size(needed)} of memory are needed, and {size(free)} are free")
    _check_disk(path, length)
    with suppress(NoBackwardError):
        label_export(path, check)


def _check_disk(path: Path, length: int) -> None:
    """Refuse to fill a disk that the training writes to: as much again is to be left of it."""
    disk = shutil.disk_usage(path.resolve().parent)
    if disk.total and disk.free < 2 * length:  # some systems of files do not say
        raise BackspotError(
            f"{size(2 * length)} of the disk are needed, and {size(disk.free)} free"
        )


def _reason(error: Exception) -> str:
    if isinstance(error, (BackspotError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _say(path: Path, reason: str) -> None:
    """Say in one line why a trace has no backward labels."""
    if sys.stderr is None:  # ``print`` would take standard output
        return
    with contained():  # a stream that is closed
        # PyTorch packs a file in the temporary folder, and removes it then.
        lasts = path.exists() and path.parent != Path(gettempdir())
        name, file = [visible(os.fspath(path))] * 2 if lasts else ("the exported trace", "TRACE")
        line = f"{name} stays as PyTorch wrote it, without backward labels: {reason}"
        print(f"backspot: {line}. {_LATER.format(file)}", file=sys.stderr, flush=True)


label_the_export_of: Callable[[Any], None] = Exports(_labelled).add
"""Have the export of the results of a session, which has stopped, write backward labels."""
