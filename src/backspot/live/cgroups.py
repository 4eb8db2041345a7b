"""The control groups of Linux that limit this process: its own, and those around them.

In a container the paths can be those of the machine around it, and then its own groups are not
found, but what is mounted for it is: the outermost folder. Elsewhere there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROCESS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class Group(NamedTuple):
    """A control group.

    Attributes:
        folder: where its files are.
        name: its path among the groups, such as ``/job``; ``""`` for the outermost one.
        version: 1, with a tree of groups for each controller, or 2, with one tree.
    """

    folder: Path
    name: str
    version: int


def groups_of(controller: str) -> list[Group]:
    """Return the groups that can have a controller, such as ``memory``, the innermost first.

    A group need not have all files of the controller; in version 2, it can have none of them.
    """
    lines: list[str] = []
    with suppress(OSError, ValueError):
        lines = PROCESS.read_text(encoding="utf-8").splitlines()
    return [group for line in lines for group in _groups_in(line, controller)]


def _groups_in(line: str, controller: str) -> Iterator[Group]:
    """Yield the groups of a line ``number:controllers:path``; version 2 names no controllers."""
    _, controllers, path = line.split(":", 2)
    if controllers and controller not in controllers.split(","):
        return
    home, version = (GROUPS / controller, 1) if controllers else (GROUPS, 2)
    inner = home / path.lstrip("/")
    for folder in (inner, *inner.parents):
        if folder.is_relative_to(home):
            name = "" if folder == home else f"/{folder.relative_to(home)}"
            yield Group(folder, name, version)
