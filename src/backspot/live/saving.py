"""Writes what was recorded into a folder, and has the report also where nothing can be written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backspot.errors import BackspotError
from backspot.live.parts import as_before
from backspot.live.ranks import rank_and_ranks
from backspot.live.recorder import Recorded
from backspot.trace.profiler import Export

if TYPE_CHECKING:
    import torch

    from backspot.analysis.recording import Recording
    from backspot.results.out_of_memory import OutOfMemory
    from backspot.results.report import Report
    from backspot.results.training import Training

_WORTH_COMPLETING = 20
"""Steps more than a report knows, from which it is written once more when the training ends."""


@dataclass(frozen=True)
class Saved:
    """A report, and what became of its files.

    Attributes:
        recorded: what the report was made of, exported.
        names: the files in the folder; none if one of them could not be written.
        problem: why they could not be written; ``""`` if they were.
        preview: whether the page has the findings of preview rules.
    """

    recorded: Recorded
    report: Report
    names: tuple[str, ...]
    problem: str = ""
    preview: bool = False

    def again(self, report: Report, folder: Path) -> Saved:
        """Write the reports once more, with what was found since; the trace stays."""
        try:
            for name in self.names:
                if not name.endswith(".json.gz"):
                    report.save(folder / name, force=True, preview=self.preview)
        except (BackspotError, OSError) as error:
            return replace(self, report=report, names=(), problem=str(error))
        return replace(self, report=report)

    def completed(self, steps: Training | None, training: str, folder: Path) -> Saved | None:
        """Write the reports once more, with all steps of the training in them.

        Args:
            steps: all steps, as the training has ended; ``None`` if they were not noted.
            training: as in ``Recorded.locate``.

        Returns:
            ``None`` if there are no files, or hardly more steps than the report knows.
        """
        before = self.recorded.training
        steps_known = before.steps if before is not None else 0
        if steps is None or self.problem or steps.steps < steps_known + _WORTH_COMPLETING:
            return None
        recorded = replace(self.recorded, training=steps)
        report = as_before(recorded.locate(training), self.report)
        return replace(self, recorded=recorded).again(report, folder)


def save_beside(
    recorded: Recorded, training: str, folder: Path, *, process: str | None = None
) -> Future[Saved]:
    """Write as ``save`` does, in a thread while the training goes on. The export comes before.

    Raises:
        UsageError: If the profiler has been exported already.
    """
    kept_recording = _kept(recorded)
    cuda: Any = sys.modules["torch"].cuda
    beside = ThreadPoolExecutor(1, "backspot")
    if cuda.is_initialized():  # each thread has a current device of its own
        beside.submit(cuda.set_device, cuda.current_device())
    saved = beside.submit(save, kept_recording, training, folder, process=process)
    beside.shutdown(wait=False)
    return saved


def save(
    recorded: Recorded,
    training: str,
    folder: Path,
    use: Callable[[Path, Recording], None] | None = None,
    *,
    preview: bool = False,
    process: str | None = None,
) -> Saved:
    """Write the labelled trace and the report into a folder.

    Args:
        training: as in ``Recorded.locate``.
        use: as in ``Recorded.locate``; called again if the files cannot be written.
        preview: whether the page has the findings of preview rules.
        process: the part of the names of files that is no other process's; ``None``: its rank.

    Raises:
        NoBackwardError: If the steps had no backward.
    """
    kept_recording = _kept(recorded)
    try:
        return _written(kept_recording, training, folder, use, preview, process)
    except OSError as error:
        problem = f"{error.filename or folder} cannot be written: {error.strerror or error}"
    except BackspotError as error:
        problem = str(error)
    return Saved(kept_recording, kept_recording.locate(training, use=use), (), problem)


def _written(
    recorded: Recorded,
    training: str,
    folder: Path,
    use: Callable[[Path, Recording], None] | None,
    preview: bool,
    process: str | None,
) -> Saved:
    of_process = (
        [process_name] if (process_name := _of_rank() if process is None else process) else []
    )
    trace, *reports = (
        recorded.file_name(stem, *of_process, suffix)
        for stem, suffix in (("trace", "json.gz"), ("report", "html"), ("report", "json"))
    )
    folder.mkdir(parents=True, exist_ok=True)
    report = recorded.locate(training, folder / trace, use)
    for name in reports:
        report.save(folder / name, force=True, preview=preview)
    return Saved(recorded, report, (trace, *reports), preview=preview)


def _of_rank() -> str:
    rank, ranks = rank_and_ranks()
    return f"rank{rank}" if ranks > 1 else ""


def save_death(death: OutOfMemory, folder: Path, process: str) -> tuple[str, ...]:
    """Write how a training died of memory into a folder, where there is no report that has it.

    Args:
        process: as in ``save``.

    Returns:
        The names of the files.

    Raises:
        BackspotError: If one cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = tuple(_name("out-of-memory", process, suffix) for suffix in ("html", "json"))
    for name in names:
        death.save(folder / name, force=True)
    return names


def save_training(training: Training, folder: Path, process: str) -> None:
    """Write what is known of all steps into a folder, beside a report or before there is one.

    Args:
        process: as in ``save``.

    Raises:
        BackspotError: If the file cannot be written.
    """
    from backspot.render.files import writing
    from backspot.render.training import to_json

    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder / _name("training", process, "json"), force=True) as file:
        file.write(to_json(training))


def _name(stem: str, process: str, suffix: str) -> str:
    return ".".join(name_part for name_part in (stem, process, suffix) if name_part)


def _kept(recorded: Recorded) -> Recorded:
    """Return the recording with exports: a profiler can be exported once, by its own thread."""
    changed: Any = {"profiler": _export(recorded.profiler), "live": None}
    if recorded.in_detail is not None:
        changed["in_detail"] = _export(recorded.in_detail)
    return replace(recorded, **changed)


def _export(profiler: torch.profiler.profile | Export) -> Export:
    return profiler if isinstance(profiler, Export) else Export(profiler)
