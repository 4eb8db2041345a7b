"""A computer with macOS or Windows, as far as Linux can pretend to be one.

``pytest --without-posix`` takes away what such a system lacks, and torch, and runs the quick tests
of the half that reads traces; ``pytest --live-without-posix`` leaves torch, and runs those of the
half that records. On Windows itself nothing needs to be taken away; the same command runs the same
tests there. What only Windows has, such as backslashes in paths, is tested nowhere else.
"""

from __future__ import annotations

import builtins
import io
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["FOLDERS", "LIVE_FOLDERS", "take_away"]

FOLDERS = ("trace", "analysis", "results", "comparison", "render", "job", "commands")
"""The rooms of the half that reads traces."""
LIVE_FOLDERS = ("live", "training", "trials", "plan", "integrations")
"""Those of the half that records."""

_LACKING = {
    os: (
        *(
            "register_at_fork",
            "fork",
            "forkpty",
            "posix_spawn",
            "posix_spawnp",
            "memfd_create",
            "mkfifo",
            "killpg",
        ),
        *("posix_fadvise", "posix_fallocate", "sendfile", "sysconf", "statvfs", "pread"),
        *(
            "sched_getaffinity",
            "sched_setaffinity",
            "geteuid",
            "O_NOFOLLOW",
            "O_CLOEXEC",
            "O_DIRECTORY",
        ),
    ),
    signal: (
        *("SIGUSR1", "SIGUSR2", "SIGALRM", "SIGHUP", "SIGPIPE", "SIGKILL", "SIGCHLD"),
        *("setitimer", "getitimer", "alarm", "pthread_sigmask", "pthread_kill", "sigwait"),
    ),
    time: ("clock_gettime", "tzset"),
}
_MODULES = ["fcntl", "termios", "resource", "pty", "tty", "grp", "pwd"]
_OF_LIBRARIES = ("sysconf", "SIGKILL", "SIGCHLD")
"""What libraries for training ask for on Linux."""
_WITH_TORCH = "BACKSPOT_TEST_WITH_TORCH"
_DEVICES = re.compile(r"/(proc|sys)/|/dev/(?!null$|urandom$)")
_DESCRIPTORS = "/dev/fd"
_FORBIDDEN = re.compile(r'[<>:"|?*]|[ .]$')
_SITE = Path(__file__).with_name("laptop")
_OPEN, _STAT = io.open, os.stat
_CREATING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def take_away(*, torch_too: bool | None = None) -> None:
    """Take away from this process what such a system lacks, and from those that it will start.

    Args:
        torch_too: whether torch goes, too. Default: as in the process that has started this one.
    """
    if sys.platform == "win32":
        return
    if torch_too is not None:
        os.environ[_WITH_TORCH] = "" if torch_too else "yes"
    has_torch = bool(os.environ.get(_WITH_TORCH))
    if has_torch:
        # It asks for the system itself, by its name, and takes what that has.
        import torch._dynamo
        import torch._inductor.async_compile
        import torch.distributed
        import torch.multiprocessing.spawn
        import torch.utils.data  # noqa: F401
    else:
        _MODULES.append("torch")
    assert "backspot.render" not in sys.modules, "too late: the package has what it wants"
    for module, names in _LACKING.items():
        for name in names:
            if hasattr(module, name) and not (has_torch and name in _OF_LIBRARIES):
                delattr(module, name)
    for name in _MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Missing())
    shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]
    builtins.open = io.open = _open  # type: ignore[assignment]
    os.stat = _stat  # type: ignore[assignment]
    os.environ["PYTHONIOENCODING"] = "cp1252"
    others = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(others))
    sys.addaudithook(_audit)


class _Missing:
    """Finds that some modules are not there."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name in _MODULES and not _asked_by_library():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _asked_by_library() -> bool:
    """Whether a library imports this, which asks for the system by name and takes what that has."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None and "site-packages" in frame.f_code.co_filename


def _stat(path: Any, **how: Any) -> os.stat_result:
    """As where there are no such files."""
    if not isinstance(path, int) and _DEVICES.match(os.fsdecode(path)):
        raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
    return _STAT(path, **how)


def _open(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    *more: Any,
    **named: Any,
) -> Any:
    """As on Windows: text is cp1252 unless something else is said, and lines end with CR LF."""
    if "b" not in mode:
        encoding = "cp1252" if encoding in (None, "locale") else encoding
        if newline is None and mode != "r":
            newline = "\r\n"
    return _OPEN(file, mode, buffering, encoding, errors, newline, *more, **named)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Refuse what Windows refuses. Python calls this before it does any of it."""
    if event == "open" and isinstance(args[0], (str, bytes)):
        name = os.fsdecode(args[0])
        if _DEVICES.match(name):
            raise FileNotFoundError(2, "No such file or directory", name)
        if args[2] & _CREATING and _FORBIDDEN.search(os.path.basename(name)):  # noqa: PTH119
            raise OSError(22, "The file name is incorrect", name)
    elif event in ("os.listdir", "os.scandir") and isinstance(args[0], (str, bytes)):
        if _DEVICES.match(os.fsdecode(args[0])) and args[0] != _DESCRIPTORS:
            raise FileNotFoundError(2, "No such file or directory", args[0])
    elif event == "os.symlink":
        raise OSError(1, "A required privilege is not held by the client", args[1])
    elif event == "os.rename" or (event == "os.remove" and not _by_tempfile()):
        for name in args[: 2 if event == "os.rename" else 1]:
            if _is_open(name):
                raise PermissionError(13, "The file is used by another process", name)


def _by_tempfile() -> bool:
    """Whether tempfile removes an open file, which it only does on POSIX."""
    return sys._getframe(2).f_code.co_filename.endswith("tempfile.py")


def _is_open(name: Any) -> bool:
    try:
        about = Path(os.fsdecode(name)).stat()
    except OSError:
        return False
    for number in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - numbers
        try:
            found = os.fstat(int(number))
        except OSError:
            continue
        if os.path.samestat(found, about):
            return True
    return False
