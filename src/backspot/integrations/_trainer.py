"""What the callbacks of all trainers share: when to record, the files, and the loggers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from backspot.checks import check_flag, check_whole
from backspot.formatting import visible
from backspot.interrupts import contained, pass_on
from backspot.live.ranks import rank_and_ranks
from backspot.live.recorder import Models, Recorded, Recorder, Schedule
from backspot.live.saving import Saved, save
from backspot.progress import is_terminal
from backspot.render.markdown import to_markdown
from backspot.render.text import render_text
from backspot.render.training import training_line
from backspot.results.report import Report
from backspot.results.training import Training

_WIDE = 100_000


@dataclass(frozen=True)
class Written:
    """A report that was written into the trainer's folder.

    Attributes:
        report: the report.
        paths: its files: the labelled trace, the page and the JSON.
    """

    report: Report
    paths: tuple[Path, ...]

    @property
    def page(self) -> Path:
        """The HTML file."""
        return next(path for path in self.paths if path.suffix == ".html")

    @property
    def scalars(self) -> dict[str, float]:
        """What is worth a curve, in milliseconds per step."""
        report = self.report
        curves = {"backspot/step_ms": report.step_ns / 1e6, "backspot/backward_ms": report.wall_ms}
        if report.has_gpu:
            curves["backspot/backward_gpu_ms"] = report.gpu_ns / 1e6
        return curves

    @property
    def text(self) -> str:
        """The report in Markdown."""
        return to_markdown(self.report).decode()


def schedule_of(
    warmup: int, steps: int, every: int | None, depth: int | None, compiled: bool, stacks: bool
) -> Schedule:
    """Return the schedule that the arguments of a callback ask for.

    Raises:
        UsageError: If an argument is invalid.
    """
    check_whole("warmup", warmup, 0)
    check_whole("steps", steps, 1)
    check_whole("every", every, 1, "None")
    check_whole("depth", depth, 0, "None")
    check_flag("compiled", compiled)
    check_flag("stacks", stacks)
    return Schedule(warmup, steps, every, depth=depth, compiled=compiled, stacks=stacks)


class RecordsSteps:
    """The base of each trainer's callback: its arguments, and the recording of one training."""

    def __init__(
        self,
        *,
        warmup: int = 5,
        steps: int = 10,
        every: int | None = None,
        depth: int | None = None,
        compiled: bool = True,
        stacks: bool = False,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self._schedule = schedule_of(warmup, steps, every, depth, compiled, stacks)
        self._folder = folder
        self._recorder: Recorder | None = None
        self._complete: Callable[[Training | None], None] = _nothing

    def _begin(
        self, trainer: str, model: Any, parent: str, to_loggers: Callable[[Written], None]
    ) -> None:
        """Prepare to record, as a training has begun.

        Args:
            trainer: the name of the trainer, for the report.
            parent: the folder in which the report's own is by default.
            to_loggers: called with each report on rank zero, to hand it to the loggers.
        """
        folder = Path(parent) / "backspot" if self._folder is None else Path(self._folder)
        folder = folder.absolute()
        name = f"training by {trainer}"

        def deliver(recorded: Recorded) -> None:
            try:
                saved = save(recorded, name, folder)
            except Exception as error:  # no report is worth a failed training
                pass_on(error)
                _say_first(f"no report: {error}")
                return
            self._complete = partial(complete, saved)
            if rank_and_ranks()[0] == 0:
                say(render_text(saved.report, width=_WIDE).partition("\n")[0])
                if saved.problem:
                    say(f"no files: {saved.problem}")
                    return
                paths = tuple(folder / name for name in saved.names)
                say(f"the report is in {paths[1]}")
                to_loggers(Written(saved.report, paths))

        def complete(saved: Saved, steps: Training | None) -> None:
            try:
                completed = saved.completed(steps, name, folder)
            except Exception as error:
                pass_on(error)
                _say_first(f"the report is not completed: {error}")
                return
            if completed is not None and steps is not None:
                _say_first(training_line(steps, has_gpu=completed.report.has_gpu))

        self._recorder = Recorder(self._schedule, Models({"": model}), deliver, _say_first)
        self._recorder.watch()

    def _step_ended(self) -> None:
        """Count a step of the optimizer that has ended."""
        recorder = self._recorder
        if recorder is not None and not recorder.is_child and recorder.count():
            recorder.advance()

    def _end(self) -> None:
        """Remove everything, because the training has ended; say so if there is no report."""
        recorder, self._recorder = self._recorder, None
        if recorder is None or recorder.is_child:
            return
        recorder.end()
        complete, self._complete = self._complete, _nothing  # the recording goes with the first
        complete(recorder.log.training())
        del complete
        if not recorder.reports and (
            why := recorder.why_none("the training ended", "warmup={}, steps={}".format)
        ):
            _say_first(why)


def _nothing(_: Training | None) -> None:
    """Complete no report."""


def _say_first(sentence: str) -> None:
    if rank_and_ranks()[0] == 0:
        say(sentence)


def say(sentence: str) -> None:
    """Print one line on standard error, below the trainer's progress bar."""
    start = "\n" if is_terminal(sys.stderr) else ""
    with contained():  # the training may have closed it, or put any object in its place
        print(f"{start}backspot: {visible(sentence)}", file=sys.stderr, flush=True)


def hand_to_each(loggers: Iterable[Any], hand_over: Callable[[Any], None]) -> None:
    """Hand a report to each logger; one that does not take the report does not end the training."""
    for logger in loggers:
        try:
            hand_over(logger)
        except Exception as error:
            pass_on(error)
            say(f"{type(logger).__name__} did not take the report: {error}")


def to_wandb(run: Any, written: Written) -> None:
    """Hand the page to a run of Weights & Biases."""
    wandb: Any = sys.modules["wandb"]
    page = wandb.Html(written.page.read_text(encoding="utf-8"))
    run.log({"backspot/report": page})
