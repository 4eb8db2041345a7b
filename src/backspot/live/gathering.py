"""Gather the summaries of all ranks of a running job, and answer on rank 0.

Each rank leaves its summary in the store of ``torch.distributed``, by which the ranks found each
other. A collective would need a backend for the host, and would fail or block on all ranks if one
of them died. From the store, rank 0 takes what there is, waits for the rest up to a limit, and
names the ranks that are missing.
"""

from __future__ import annotations

import itertools
import socket
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from backspot.analysis.recording import Recording
from backspot.errors import BackspotError, NotATraceError, UsageError
from backspot.interrupts import pass_on
from backspot.job.answer import answer
from backspot.job.identity import identify
from backspot.job.reduce import reduce_trace
from backspot.job.summary import Summary, from_bytes, to_bytes
from backspot.live.acts import Joint, Living
from backspot.live.ranks import rank_and_ranks
from backspot.live.torch_internals.store import default_store
from backspot.presented import with_beside
from backspot.results.job import JobReport, LostRank
from backspot.results.report import Report, changed

LIMIT_S = 120.0
"""How long rank 0 waits for the summaries of the others, after its own is there."""
_ABSENT_S = 10.0
"""How long it waits for one that has not said that it is observed.

Long enough for one that takes its first step late, and short beside the time limits of process
groups, as the others wait in their step.
"""
_PIECE = 1 << 22
"""Bytes of a value: the store refuses values of 8 MiB."""
_SUMMARY, _REASON = b"S", b"R"


_profiles = itertools.count()


def note_presence() -> None:
    """Tell the other ranks that this one is observed, and will leave its summaries."""
    store = default_store()
    if store is not None:
        with suppress(RuntimeError):
            store.set(_presence(rank_and_ranks()[0]), b"1")


def joint_of(name: str) -> Joint | None:
    """Return what the ranks of this job answer together; ``None`` once the group is gone."""
    with suppress(UsageError):
        return Gathering(name, of_present=True)
    return None


def _presence(rank: int) -> str:
    return f"backspot/present/{rank}"


def gathering_of(ranks: object) -> Gathering:
    """Return what puts the ranks of a profile together.

    Args:
        ranks: as in ``profile``.

    Raises:
        UsageError: If it is not ``"all"``, or this process is not part of a job.
    """
    if ranks != "all":
        raise UsageError(f'ranks={ranks!r}: give "all", or None')
    return Gathering(f"profile {next(_profiles)}")


class Gathering(Joint):
    """One exchange of summaries. All ranks of the job create it with the same name.

    Around what may raise before the summary is left, use it as a context manager.

    Args:
        of_present: whether some ranks may not be observed, which have not called
            ``note_presence``.

    Raises:
        UsageError: If this process is not part of a job.
    """

    file_name = "job"

    def __init__(self, name: str, *, of_present: bool = False) -> None:
        store = default_store()
        if store is None:
            raise UsageError(
                "the ranks of a job are put together by torch.distributed, which is not set up: "
                "call torch.distributed.init_process_group before"
            )
        self._store: Any = store
        self._name = name
        self.rank, self._ranks = rank_and_ranks()
        self._has_left = False
        self._of_present = of_present

    def use(self, path: Path, recording: Recording) -> None:
        """Leave the summary of this rank's recording for rank 0; a second call does nothing."""
        if self._has_left:
            return
        identity = replace(
            identify(path), rank=self.rank, world_size=self._ranks, host=socket.gethostname()
        )
        summary = reduce_trace(recording, identity)
        named = msgspec.structs.replace(summary, source=f"rank {self.rank}")
        self._leave(_SUMMARY + to_bytes(named))

    def __enter__(self) -> Gathering:
        return self

    def __exit__(
        self,
        _: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave for rank 0 why this rank has no summary, if an error came before it."""
        if error is not None and not self._has_left:
            with suppress(RuntimeError):  # the error that is passed on says more
                self._leave(_REASON + f"{type(error).__name__}: {error}".encode())

    def _leave(self, value: bytes) -> None:
        self._has_left = True
        pieces = [value[offset : offset + _PIECE] for offset in range(0, len(value), _PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(self._key(self.rank, number), piece)
        self._store.set(self._key(self.rank), str(len(pieces)))

    def _key(self, rank: int, piece: int | None = None) -> str:
        return f"backspot/{self._name}/{rank}" + ("" if piece is None else f"/{piece}")

    def after(self, report: Report, live: Living) -> Report:
        """Return the report with the answer for all ranks, on rank 0."""
        if self.rank:
            return report
        try:
            return with_beside(changed(report), {"job": self.collect()})
        except UsageError as error:
            reason = f"The ranks have no report: {error}."
            return changed(report, warnings=(*report.warnings, reason))

    def collect(self) -> JobReport:
        """Return the answer for all ranks that left a summary; on rank 0.

        Raises:
            UsageError: If fewer than two did, or their steps differ.
        """
        read: list[Summary] = []
        lost = []
        begin = time.monotonic()
        for rank in range(self._ranks):
            try:
                value = self._take(rank, begin + self._limit_s(rank))
                if value.startswith(_REASON):
                    raise NotATraceError(value[1:].decode(errors="replace"))
                read.append(from_bytes(value[1:]))
            except (BackspotError, RuntimeError, ValueError) as error:  # stores have their own
                lost.append(LostRank(f"rank {rank}", str(error)))
        return answer(read, lost)

    def _limit_s(self, rank: int) -> float:
        """Return how long to wait for a rank. The others wait in their step for this one."""
        is_absent = False
        with suppress(RuntimeError):
            is_absent = self._of_present and not self._store.check([_presence(rank)])
        return _ABSENT_S if is_absent else LIMIT_S

    def _take(self, rank: int, until: float) -> bytes:
        """Return what a rank has left, and remove it from the store."""
        key = self._key(rank)
        try:
            left = max(until - time.monotonic(), 0.01)
            self._store.wait([key], timedelta(seconds=left))
        except Exception as error:
            pass_on(error)
            waited = self._limit_s(rank)
            reason = f"it left nothing within {waited:.0f} s after rank 0: it may have ended"
            raise NotATraceError(reason) from error
        count = int(self._store.get(key))
        keys = [self._key(rank, number) for number in range(count)]
        value = b"".join(self._store.get(piece) for piece in keys)
        for piece in (key, *keys):
            self._store.delete_key(piece)
        return value
