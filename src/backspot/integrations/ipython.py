"""``%%backspot``: a cell of a notebook that trains runs as ever, and shows a report."""

from __future__ import annotations

import argparse
import gc
import shlex
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from IPython.core.error import UsageError as WrongLine
from IPython.display import HTML, display

from backspot.checks import read_seconds
from backspot.errors import BackspotError
from backspot.integrations._trainer import say, schedule_of
from backspot.live.acts import Rest, hand_on
from backspot.live.parts import ASKING, FURTHER, acts_of
from backspot.live.recorder import Recorded
from backspot.live.running import Observer
from backspot.live.saving import Saved, save
from backspot.progress import Progress
from backspot.render.files import check_folder
from backspot.render.notebook import report_html
from backspot.results.report import Report

_CELL = "the training in a cell"


class CellMagic:
    """The magic command that ``%load_ext backspot`` adds.

    Args:
        shell: IPython's shell.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def backspot(self, line: str, cell: str) -> None:
        """Run a cell that trains, and show what makes its backward slow.

            %%backspot [NAME] [--warmup N] [--steps N] [--depth D] [--no-compiled] [-o DIR]
                [--plan[=SECONDS]] [--preview]

        The models and the steps are found as by ``backspot run``. The report appears as soon as
        enough steps are recorded, and the cell goes on as if nothing had happened.

        NAME: the variable that gets the report. --warmup N: how many steps to wait for first
        (default: 5). --steps N: how many steps to time without the profiler, and how many to record
        (default: 10). --depth D: the deepest level that is labelled (default: all). --no-compiled:
        keep out of torch.compile. -o DIR: also write report.html, report.json and trace.json.gz
        into this folder. --plan: try settings on a copy of the model too, within a minute or so
        many seconds, in which the training stands still. --preview: show the findings of preview
        rules too.
        """
        try:
            words = shlex.split(line)
        except ValueError as error:  # a quote that is not closed
            raise WrongLine(f"{line}: {error} (see %%backspot?)") from None
        # A word behind it is the report's name, and no number of seconds.
        words = ["--plan=" if word == "--plan" else word for word in words]
        args = _parser().parse_args(words)
        if args.name and not args.name.isidentifier():
            raise WrongLine(f"{args.name}: no name of a variable (see %%backspot?)")
        try:
            if args.output is not None:
                check_folder(args.output, "-o")
            schedule = schedule_of(args.warmup, args.steps, None, args.depth, args.compiled, False)
            acts = acts_of(args.tries, (*ASKING, *FURTHER)) if args.tries else []
        except BackspotError as error:
            raise WrongLine(str(error)) from None
        schedule = replace(schedule, keeps_live=any(act.needs_living for act in acts))
        stack = ExitStack()

        def deliver(recorded: Recorded) -> Rest | None:
            stack.close()
            saved: Saved | None = None
            try:
                if args.output is None:
                    report = recorded.locate(_CELL)
                else:
                    saved = save(recorded, _CELL, Path(args.output), preview=args.preview)
                    report = saved.report
                    if saved.problem:
                        say(f"no files: {saved.problem}")
            except (BackspotError, OSError) as error:
                say(f"no report: {error}")
                return None

            def show(report: Report) -> None:
                if saved is not None and acts:
                    again = saved.again(report, Path(args.output))
                    if again.problem:
                        say(f"no files: {again.problem}")
                if args.name:
                    self._shell.user_ns[args.name] = report
                put: Any = display  # untyped
                page: Any = HTML  # untyped
                put(page(report_html(report, preview=True)) if args.preview else report)

            if recorded.live is None:
                show(report)
                return None
            return hand_on(acts, report, recorded.live, show)

        gc.collect()  # optimizers of earlier cells would be waited for
        with stack:
            bar = stack.enter_context(Progress("recording", "steps", total=schedule.needed))
            observer = Observer(
                schedule,
                deliver,
                say,
                lambda step: bar.update(min(step, schedule.needed), schedule.needed),
            )
            observer.begin()
            try:
                self._shell.run_cell(cell)  # shows the cell's errors itself
            finally:
                recorder = observer.recorder
                recorder.end()
        if not recorder.reports and (
            why := recorder.why_none("the cell ended", "--warmup {} --steps {}".format)
        ):
            say(why)


class _Parser(argparse.ArgumentParser):
    """Raises errors, which IPython prints in one line."""

    def error(self, message: str) -> NoReturn:
        raise WrongLine(f"{message} (see %%backspot?)")


def _parser() -> _Parser:
    parser = _Parser(prog="%%backspot", add_help=False, allow_abbrev=False)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--no-compiled", dest="compiled", action="store_false")
    parser.add_argument("-o", "--output")
    parser.add_argument("--plan", dest="tries", type=_plan, metavar="SECONDS")
    parser.add_argument("--preview", action="store_true")
    return parser


def _plan(word: str) -> dict[str, Any]:
    """What is asked for with so many seconds, or as many as a plan takes by itself."""
    if not word:
        return {"trials": "plan"}
    try:
        return {"plan": read_seconds(word)}
    except BackspotError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
