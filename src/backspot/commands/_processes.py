"""The processes of one ``backspot run``: which of them this is, and what its files are called.

They tell each other in a file of a line for each thing that one of them says, which the process
that was started first makes and removes.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_BEGUN, _TRAINS, _NAMED, _DONE, _SETTINGS = "begun", "trains", "named", "done", "settings"
_REPORT = "report"
_KINDS = (_BEGUN, _TRAINS, _DONE)
MOST = 32
"""How many processes are observed, beside the first one.

More than the ranks that a node has. A report takes seconds of a core: a sweep of hundreds of short
trainings is not to become one of reports.
"""
LISTED = 4
"""How many of them have a line each, beside the report of the first one, which fills a screen."""
_PREFIX = "backspot-processes-"


class Process:
    """This process, among those that are observed.

    Args:
        register: the file in which they tell each other; ``None`` makes it, for the first process.
    """

    def __init__(self, register: str | None = None) -> None:
        self.is_child = register is not None
        if register is None:
            with suppress(OSError):  # no folder for temporary files: one process is all there is
                register = _new_register()
        self.register = register or ""
        self._pid = os.getpid()
        self._id = f"{self._pid}.{time.time_ns()}"  # another one may get this number later
        self._named: str | None = None

    def begin(self, settings: str = "") -> None:
        """Note that this process is observed, and how, if it is the first."""
        if self.is_child:
            self._tell(_BEGUN)
        else:
            self._tell(_SETTINGS, settings)

    @property
    def settings(self) -> str:
        """How the first process is observed; empty once it has ended."""
        return next((about for _, kind, about in self._lines() if kind == _SETTINGS), "")

    @property
    def name(self) -> str:
        """What people call it."""
        name = multiprocessing.current_process().name
        if name == "MainProcess":
            name = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "python"
        return name

    @property
    def is_first(self) -> bool:
        """Whether it speaks for all: rank 0 of a job, or the first process with a report."""
        rank, ranks = _rank_and_ranks()
        return rank == 0 if ranks > 1 else not self.part

    @property
    def part(self) -> str:
        """The part of the names of its files that is no other process's; empty for the first.

        It is decided when it is asked for: a process may join a job long after its start.
        """
        if self._named is None:
            self._named = self._find_name()
        return self._named

    @property
    def part_of_job(self) -> str:
        """What tells the files of its job from those of an earlier one."""
        return self.part.partition(".")[2] if _rank_and_ranks()[1] > 1 else ""

    def said(self, sentence: str) -> str:
        """Return a sentence with the name of the process that says it, where there are several."""
        if not self.is_child or _rank_and_ranks()[1] > 1:
            return sentence
        return f"{self.name} (process {self._pid}): {sentence}"

    @property
    def is_copied(self) -> bool:
        """Whether this is a copy of the process."""
        return os.getpid() != self._pid

    def note_trains(self) -> None:
        """Note that this process has taken a step."""
        if self.is_child:
            self._tell(_TRAINS)

    def note_done(self, *, report: bool = False) -> None:
        """Note that this process has a report, or has said why not."""
        if self.is_child:
            self._tell(_DONE, _REPORT if report else "")

    @property
    def is_listed(self) -> bool:
        """Whether it is one of the first with a report, which say so in a line each."""
        return self._id in self._reported()[:LISTED]

    @property
    def unlisted(self) -> int:
        """How many others have a report, and no line that says so."""
        names = {process: about for process, kind, about in self._lines() if kind == _NAMED}
        rest = [names.get(process, "") for process in self._reported()[LISTED:]]
        # Without a name it has the screen, and ranks answer together.
        return sum(bool(name) and not name.startswith("rank") for name in rest)

    def _reported(self) -> list[str]:
        processes = (process for process, *line in self._lines() if line == [_DONE, _REPORT])
        return list(dict.fromkeys(processes))

    def end(self) -> None:
        """Note that this process ends."""
        if self.is_copied:
            return
        self.note_done()
        if not self.is_child or self._stands_for_the_first:
            with suppress(OSError):
                Path(self.register).unlink()

    @property
    def _stands_for_the_first(self) -> bool:
        """Whether the first process has become this one, by ``execv``."""
        return Path(self.register).name.startswith(f"{_PREFIX}{self._pid}-")

    def children(self) -> tuple[int, list[int]]:
        """Return how many others were observed, and which of them were killed before a report.

        One that took no step has no report to lose, such as the server of ``forkserver``.
        """
        lines = self._lines()
        by_kind = {kind: [process for process, what, _ in lines if what == kind] for kind in _KINDS}
        left = [process for process in by_kind[_TRAINS] if process not in by_kind[_DONE]]
        pids = [int(process.partition(".")[0]) for process in left]
        return len(by_kind[_BEGUN]), [pid for pid in pids if not _runs(pid)]

    def _find_name(self) -> str:
        rank, ranks = _rank_and_ranks()
        unique = f"pid{self._pid}"
        name = re.sub(r"[^\w-]+", "-", self.name)[:64]
        wanted = [f"rank{rank}"] if ranks > 1 else ["", name]
        for one in wanted:
            self._tell(_NAMED, one)
            # Of several that ask at the same moment, the one whose line came first.
            owner = next((who for who, *rest in self._lines() if rest == [_NAMED, one]), None)
            if owner == self._id or (owner is None and (ranks > 1 or not self.is_child)):
                return one
        return f"{wanted[-1]}.{unique}"

    def _tell(self, kind: str, about: str = "") -> None:
        with suppress(OSError):  # the first process has ended, and all files are its own
            # One write to the end of the file comes in one piece, whoever else writes.
            file = os.open(self.register, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(file, f"{self._id}\t{kind}\t{about}\n".encode())
            finally:
                os.close(file)

    def _lines(self) -> list[tuple[str, str, str]]:
        with suppress(OSError, ValueError):
            lines = Path(self.register).read_text(encoding="utf-8")
            return [tuple(line.split("\t")) for line in lines.splitlines()]  # type: ignore[misc]
        return []


def _new_register() -> str:
    """Make the file, and remove those that processes have left that were killed."""
    before = tempfile.tempdir
    try:
        file, register = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}-")
    finally:
        tempfile.tempdir = before  # the script may choose another folder
    os.close(file)
    for other in Path(register).parent.glob(f"{_PREFIX}*"):
        pid = other.name.removeprefix(_PREFIX).partition("-")[0]
        with suppress(OSError):
            if pid.isdecimal() and not _runs(int(pid)):
                other.unlink()
    return register


def _rank_and_ranks() -> tuple[int, int]:
    from backspot.live.ranks import rank_and_ranks

    return rank_and_ranks()


def _runs(pid: int) -> bool:
    if os.name == "nt":  # no signal asks there
        return True
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True
