"""Run a training script unchanged, and report what makes its step slow.

SCRIPT runs as with python: its arguments, exit code, output and results are the
same. Backspot waits for some optimizer steps, times some without the profiler,
records some more, and writes the report, which it also prints on standard
error. The script then goes on as if nothing had happened.

Processes that the script starts are observed too, each from its first optimizer
or backward on. In a job of several ranks, also under torchrun, rank 0 says
which rank is slow, where, and who waits.

On Linux and macOS, kill -USR1 PID asks a running script for a report now.

All steps are noted until the script ends, without a profiler: how long they
take, what recurs in some of them, whether they become slower. The report is
completed then; training.json has it each minute, for a job that is killed.

A script that dies of memory leaves who held what, in which module.

Example:
  backspot run train.py --epochs 3
  backspot run --at 1000 --steps 20 train.py
  backspot run --exit -o slow-run -m package.train --config a.yaml
  torchrun --nproc-per-node 2 -m backspot run train.py
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backspot.commands._console import (
    add_preview,
    add_width,
    complain,
    count,
    use_color,
    write_error,
    write_text,
)
from backspot.commands._parts import (
    add_options_of_parts,
    asked_of_parts,
    check_parts,
    with_values,
)
from backspot.errors import BackspotError, OutputExistsError, UsageError
from backspot.formatting import quoted, visible
from backspot.interrupts import contained, pass_on
from backspot.progress import is_terminal

if TYPE_CHECKING:
    from concurrent.futures import Future

    from backspot.commands._processes import Process
    from backspot.live.acts import Act, Joint, Rest
    from backspot.live.out_of_memory import OutOfMemoryWatch
    from backspot.live.recorder import Recorded
    from backspot.live.running import Observer
    from backspot.live.saving import Saved
    from backspot.live.termination import Termination
    from backspot.results.out_of_memory import OutOfMemory
    from backspot.results.report import Report
    from backspot.results.training import Training

EXIT_CODES = (3, 6, 7)

_FOLDER = "backspot"
_OUT_OF_MEMORY = "backspot.out-of-memory"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--warmup",
        type=count,
        default=5,
        metavar="N",
        help="how many steps to wait for first (default: 5)",
    )
    parser.add_argument(
        "--steps",
        type=count,
        default=10,
        metavar="N",
        help="how many steps to time without the profiler, and how many to record (default: 10)",
    )
    parser.add_argument(
        "--at", type=count, metavar="STEP", help="the first step to record, in place of --warmup"
    )
    parser.add_argument("--every", type=count, metavar="N", help="make another report each N steps")
    parser.add_argument("--exit", action="store_true", help="end the script after the first report")
    parser.add_argument(
        "--depth", type=count, metavar="D", help="the deepest level that is labelled (default: all)"
    )
    parser.add_argument(
        "--shapes",
        action="store_true",
        help="record the inputs of operators too, for operations per second, in three further "
        "steps",
    )
    parser.add_argument(
        "--stacks",
        action="store_true",
        help="record which lines of Python run and wait too, in the same steps",
    )
    add_options_of_parts(parser)
    add_preview(parser)
    parser.add_argument(
        "--no-compiled",
        dest="compiled",
        action="store_false",
        help="keep out of torch.compile: the modules inside compiled code are then unknown",
    )
    parser.add_argument(
        "--no-log",
        dest="log",
        action="store_false",
        help="leave the training alone after the report: its other steps are then unknown",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="folder for report.html, report.json and trace.json.gz (default: backspot, or the "
        "next free name)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite files in --output")
    add_width(parser)
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE [ARGUMENT ...]",
        help="run a module, as python -m does",
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGUMENT ...]",
        help="the script, and its own arguments; options of Backspot come before it",
    )


def worded(words: Sequence[str]) -> list[str]:
    """Return the words with a value for each option that may stand alone."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    prepare_parser(parser)
    return [*words[:1], *with_values(words[1:], parser)]


def run(args: argparse.Namespace) -> Callable[[], int]:
    """Prepare all for the script, and return what runs it and observes its training."""
    from backspot import children
    from backspot.commands._processes import Process
    from backspot.commands._script import Script
    from backspot.imports import when_imported

    # A ``--`` may end the options before the script. After -m, argparse ends the module's arguments
    # at it, and gives the rest to the script.
    words = args.module + args.script if args.module else args.script[args.script[:1] == ["--"] :]
    if not words:
        raise UsageError("backspot run: name a script, or a module after -m")
    if args.steps < 1 or args.every == 0:
        raise UsageError("--steps and --every: give a whole number of at least 1")
    check_parts(args)
    folder = _folder(args.output, args.force)
    script = Script(words[0], words[1:], is_module=bool(args.module))
    process = Process()
    observer = _Observation(words, args, folder, process)
    process.begin(observer.settings())
    stop_waiting = when_imported("torch", observer.begin)
    stop_following = _nothing
    if process.register:
        stop_following = children.follow(__name__, process.register, stop_waiting)

    def ended(raised: BaseException | None) -> None:
        if process.is_copied:  # which ends as the script does
            return
        stop_waiting()
        try:
            observer.end(raised)
        except Exception as error:
            pass_on(error)
            complain(f"no report: {error}")
        finally:
            stop_following()

    return lambda: script.run(ended)


def _nothing() -> None:
    pass


def observe(register: str) -> None:
    """Observe this process, which the script has started, or which is a copy of one.

    Args:
        register: the file in which the processes of this run tell each other.
    """
    import atexit
    import weakref
    from multiprocessing.util import Finalize

    from backspot.commands._processes import MOST, Process

    process = Process(register)
    settings = process.settings
    if not settings or process.children()[0] >= MOST:
        return
    words, options, folder = json.loads(settings)
    options["exit"] = False  # what waits for this process would wait forever
    process.begin()
    if _observed and not _observed.pop().leave_copy():
        complain(process.said("no report: it was forked while a report was recorded or made"))
        process.end()
        return
    observer = _Observation(words, argparse.Namespace(**options), Path(folder), process)
    observer.begin()
    has_ended: list[bool] = []

    def ended() -> None:
        if has_ended or process.is_copied:
            return
        has_ended.append(True)
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        try:
            observer.end(error)
        except Exception as error:
            pass_on(error)
            complain(process.said(f"no report: {error}"))

    # A process of multiprocessing ends without the end of the interpreter. What is called there is
    # called in the reverse order: before folders are removed that ``weakref`` removes.
    Finalize(None, ended, exitpriority=1000)
    weakref.finalize(process, bool).detach()
    atexit.register(ended)


def _once_children_end(action: Callable[[], None], *, last: bool = False) -> None:
    """Call a function once the processes have ended that Python waits for at its end.

    Args:
        last: after the other functions.
    """
    import multiprocessing
    from multiprocessing.util import Finalize

    if any(not child.daemon for child in multiprocessing.active_children()):
        # What is below 0 comes after Python has waited.
        Finalize(None, action, exitpriority=-2 if last else -1)
    else:
        action()


_observed: list[_Observation] = []
"""The observation of this process, or of the one that this is a copy of."""


class _Observation:
    """What happens around the script: the observer, the signal, and the reports."""

    def __init__(
        self, words: Sequence[str], args: argparse.Namespace, folder: Path, process: Process
    ) -> None:
        self.process = process
        self._args = args
        self._given = words
        self._folder = folder
        self._recorded = 0
        self._observer: Observer | None = None
        self._acts: Sequence[Act] = ()
        self._ended = False
        self._termination: Termination | None = None
        self._out_of_memory: OutOfMemoryWatch | None = None
        self._last: Saved | None = None
        """The newest report, to be completed when the training ends."""
        _observed[:] = [self]

    def settings(self) -> str:
        """Return what ``observe`` needs in another process."""
        plain = (str, int, bool, type(None))
        options = {
            name: value for name, value in vars(self._args).items() if isinstance(value, plain)
        }
        options["module"] = bool(self._args.module)
        return json.dumps([self._given, options, str(self._folder)])

    def leave_copy(self) -> bool:
        """Remove what observes, in a copy of the process that is observed.

        Returns:
            Whether the copy can be observed, as ``Observer.leave_copy`` says.
        """
        self._ignore()
        return self._observer is None or self._observer.leave_copy()

    def begin(self) -> None:
        """Start to observe; torch has been imported."""
        try:
            from backspot.live.acts import records_of
            from backspot.live.out_of_memory import OutOfMemoryWatch
            from backspot.live.parts import ASKING, FURTHER, acts_of, load_joint
            from backspot.live.recorder import Schedule
            from backspot.live.running import Observer
            from backspot.live.saving import save  # noqa: F401 - with all that a delivery needs
            from backspot.live.termination import Termination
            from backspot.render.formats import all_formats

            all_formats()
            load_joint()
            # A copy of this process waits forever for what a thread is importing meanwhile.
            import numpy.ma  # noqa: F401 - which numpy.median imports

            from backspot.analysis.findings import all_rules

            all_rules()
            self._acts = acts_of(asked_of_parts(self._args), (*ASKING, *FURTHER))
        except Exception as error:  # the script may still run
            self._complain(f"no report: {error}")
            return
        args = self._args
        warmup = args.warmup if args.at is None else max(args.at - args.steps - 2, 0)
        schedule = Schedule(
            warmup=warmup,
            steps=args.steps,
            every=args.every,
            ends=args.exit,
            depth=args.depth,
            records=records_of(self._acts),
            shapes=args.shapes,
            stacks=args.stacks,
            compiled=args.compiled,
            waits=args.at is None,
            keeps_live=any(act.needs_living for act in self._acts)
            and (self.process.is_child or _is_rank_0()),
            log=args.log,
        )
        if args.at is not None and args.at < schedule.first_step and _is_rank_0():
            complain(
                f"--at {args.at}: records from step {schedule.first_step} on, as some steps come "
                "before for timing and preparation; a smaller --steps makes it earlier"
            )
        self._observer = Observer(schedule, self._deliver, self._complain, self._stepped)
        self._observer.recorder.log.each_minute = self._save_training
        self._termination = Termination(self._save_training)
        self._out_of_memory = OutOfMemoryWatch(history="profile_memory" in schedule.records)
        self._out_of_memory.begin()
        self._observer.begin()

    def end(self, error: BaseException | None) -> None:
        """Stop observing; say so if no report was made. ``error`` is what the script raised."""
        try:
            self._end(error)
        finally:
            _once_children_end(self._leave, last=True)

    def _leave(self) -> None:
        more = 0 if self.process.is_child or self.process.is_copied else self.process.unlisted
        if more:
            text = f"{more} more process has a report" if more == 1 else ""
            text = text or f"{more} more processes have reports"
            complain(f"{text} in {self._shown()}{os.sep}")
        self.process.end()

    def _complain(self, sentence: str) -> None:
        complain(self.process.said(sentence))

    def _complain_if_alone(self, sentence: str) -> None:
        """Say why there is no report, unless a process that still runs leaves one."""

        def say() -> None:
            # A server of processes outlives the first one, whose end has told all.
            outlives = self.process.is_child and not self.process.settings
            if not (outlives or self.process.children()[0]):
                self._complain(sentence)

        _once_children_end(say)

    def _end(self, error: BaseException | None) -> None:
        others, killed = self.process.children()
        for pid in [] if self.process.is_child else killed:
            complain(f"no report of process {pid}: it was killed, or ended by os._exit")
        if self._observer is None:
            if others:  # they have reports, or have said why not
                return
            ending = f"{_how_it_ended(error)} before it imported" if error else ""
            self._complain_if_alone(f"no report: {ending or 'the script did not import'} torch")
            return
        recorder = self._observer.recorder
        if recorder.is_child:
            return
        death = self._death(error)  # the tensors still live, as the frames of the error hold them
        self._ignore()
        if self._termination is not None:
            self._termination.end()
        before = recorder.reports
        self._recorded = 0
        self._ended = True
        recorder.end()
        self._complete(recorder.log.training())
        if death is not None:
            self._tell(death)
        if not before and not recorder.reports:
            why = "" if others and not recorder.steps else self._why_none(error)
            if why and _is_rank_0():
                of_steps = why.replace("no report:", "no report of steps:", 1)
                say = self._complain if recorder.steps else self._complain_if_alone
                say(of_steps if death else why)
        elif not self.process.is_first:
            return
        elif recorder.reports > before and self._recorded:
            fitting = None if error or before else recorder.schedule.fitting(recorder.in_one_go)
            more = fitting and fitting[1] > self._recorded
            how = f"; for more of them: {self._command(*fitting)}" if fitting and more else ""
            complain(
                f"{_how_it_ended(error)} after {recorder.steps_said}, and the report is of "
                f"{self._recorded} of them{how}"
            )

    def _complete(self, steps: Training | None) -> None:
        """Write the newest report once more, with all steps of the training in it."""
        before = self._last
        saved = before and before.completed(steps, self._title, self._folder)
        if saved is not None and not saved.problem:
            self._last = saved
        if saved is None or steps is None or not self.process.is_first:
            return
        if saved.problem:
            complain(f"the report is not completed: {saved.problem}")
            return
        from backspot.render.training import rescaled, training_line

        names = [name for name in saved.names if not name.endswith(".json.gz")]
        since = rescaled(before.report, saved.report) if before else ""
        line = training_line(steps, has_gpu=saved.report.has_gpu)
        complain(f"{line} {' and '.join(names)} have all of it{since}.")

    def _death(self, error: BaseException | None) -> OutOfMemory | None:
        """Return how the training died of memory, if it did."""
        if error is None or self._out_of_memory is None or self._observer is None:
            return None
        with contained():
            return self._out_of_memory.died(error, self._observer.models, self._observer.step)
        return None

    def _tell(self, death: OutOfMemory) -> None:
        """Print how the training died of memory, and add it to its report, or write it alone."""
        from backspot.live.saving import save_death
        from backspot.render.out_of_memory import headline, render_out_of_memory
        from backspot.results.report import changed

        if self.process.is_first:
            color = use_color(sys.stderr)
            text = render_out_of_memory(death, width=_width(self._args.width), color=color)
            write_error(f"\n{text}\n")
        else:
            self._complain(headline(death))
        names: tuple[str, ...] = ()
        if self._last is not None and not self._last.problem:
            report = self._last.report
            warnings = (headline(death), *report.warnings)
            report = changed(report, out_of_memory=death, warnings=warnings)
            self._last = self._last.again(report, self._folder)
            names = tuple(name for name in self._last.names if not name.endswith(".json.gz"))
        try:
            wrote = names or save_death(death, self._folder, self.process.part)
        except (BackspotError, OSError) as error:
            self._complain(f"no files: {error}")
            return
        self._complain(
            f"wrote {' and '.join(wrote)} into {self._shown()}{os.sep}, with who held memory"
        )

    def _why_none(self, error: BaseException | None) -> str:
        """Why there is no report; empty if that was said."""
        assert self._observer is not None  # noqa: S101 - for type checkers
        recorder = self._observer.recorder
        ending = _how_it_ended(error)
        if recorder.steps:
            return recorder.why_none(ending, self._command)
        if error is not None:
            return f"no report: {ending} before its first step"
        if self._observer.saw_backwards:
            return (
                "no report: no optimizer took a step in this process, and no parameter was updated "
                "between two backwards; use backspot.profile(step, model)"
            )
        return (
            "no report: no optimizer took a step, and nothing called backward(), here or in a "
            "process of this Python that the script started. If it trains with another Python, or "
            "on another machine, put backspot run there. If its whole step is compiled, use "
            "backspot.profile(step, model) with the backward outside of torch.compile"
        )

    def _command(self, warmup: int, steps: int) -> str:
        """The command that makes a complete report with these numbers."""
        module = ["-m"] if self._args.module else []
        return (
            f"backspot run --warmup {warmup} --steps {steps} {shlex.join([*module, *self._given])}"
        )

    @property
    def _title(self) -> str:
        """What was recorded."""
        process_name = self.process.part
        return (
            self._given[0]
            if not process_name or process_name.startswith("rank")
            else f"{self._given[0]} {process_name}"
        )

    # The signal ----------------------------------------------------------------------------------

    def _stepped(self, step: int) -> None:
        """Take the signal, if the script has no handler for it after its first step."""
        if step > 1:
            return
        from backspot.live.parts import note_presence

        note_presence()
        self.process.note_trains()
        with suppress(AttributeError, ValueError):  # Windows; not the main thread
            if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
                signal.signal(signal.SIGUSR1, self._on_signal)
        if self._termination is not None and self._args.log and not self._args.exit:
            self._termination.begin()

    def _on_signal(self, _: int, frame: Any) -> None:
        if self._observer is not None:
            self._observer.request(frame)

    def _ignore(self) -> None:
        with suppress(AttributeError, ValueError):
            if signal.getsignal(signal.SIGUSR1) == self._on_signal:
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def _save_training(self) -> None:
        """Write what is known of the steps so far, as the training may end before its report."""
        if self._observer is None or self._args.exit:
            return
        from backspot.live.saving import save_training

        training = self._observer.recorder.log.training()
        if training is not None:
            with suppress(BackspotError, OSError):  # a full disk: the report says so
                save_training(training, self._folder, self.process.part)

    # Reports -------------------------------------------------------------------------------------

    def _deliver(self, recorded: Recorded) -> Rest | None:
        """Make the report: in a thread while the training goes on, if nothing waits for it.

        An interpreter that ends starts no thread: a training in another thread may outlive it.
        """
        from backspot.live.parts import joint_of
        from backspot.live.saving import save, save_beside

        self._recorded = recorded.count
        # Other ranks may record nothing when this one was asked to.
        joint = None if recorded.requested else joint_of(f"run {recorded.first}")
        of_main = threading.current_thread() is threading.main_thread()
        if joint is None and of_main and not (self._ended or self._args.exit):
            try:
                process_name = self.process.part
                saved = save_beside(recorded, self._title, self._folder, process=process_name)
            except (BackspotError, OSError) as error:
                self._recorded = 0
                self._complain(f"no report: {error}")
                return None
            return partial(self._when_made, recorded, saved)

        def make() -> Saved:
            with joint or nullcontext():
                leave = joint.use if joint else None
                return save(
                    recorded,
                    self._title,
                    self._folder,
                    leave,
                    preview=self._args.preview,
                    process=self.process.part,
                )

        return self._made(recorded, joint, make)

    def _when_made(self, recorded: Recorded, saved: Future[Saved], now: bool) -> Rest | None:
        if not (now or saved.done()):
            return partial(self._when_made, recorded, saved)
        return self._made(recorded, None, saved.result)

    def _made(
        self, recorded: Recorded, joint: Joint | None, make: Callable[[], Saved]
    ) -> Rest | None:
        from backspot.live.acts import hand_on
        from backspot.live.ranks import rank_and_ranks

        try:
            saved = make()
        except (BackspotError, OSError) as error:
            self._recorded = 0
            self._complain(f"no report: {error}")
            if self.process.is_first:
                self._answer(recorded, joint)
            return None
        self.process.note_done(report=True)
        if not self.process.is_first:
            if saved.problem:
                self._complain(f"no files: {saved.problem}")
            elif not rank_and_ranks()[0] and self.process.is_listed:
                self._list(saved)
            self._last = saved
            return None
        # What the other ranks wait for comes before what this rank does by itself.
        answered = self._answer(recorded, joint)
        if recorded.live is None:
            self._show(saved, after_answer=answered)
            return None

        def show(report: Report) -> None:
            self._show(saved.again(report, self._folder), after_answer=answered)

        return hand_on(self._acts, saved.report, recorded.live, show)

    def _show(self, saved: Saved, *, after_answer: bool) -> None:
        """Print the report, and where its files are."""
        self._last = saved
        if saved.problem:
            complain(f"no files: {saved.problem}")
        if after_answer:
            write_error("\nRank 0 by itself:")
        if saved.problem:  # what is printed is all there is
            _print(saved.report, self._args, None)
            return
        name = next(name for name in saved.names if name.endswith(".json"))
        more = f"backspot show {self._shown()}{os.sep}{name} --full"
        _print(saved.report, self._args, more)
        self._wrote(*saved.names)

    def _list(self, saved: Saved) -> None:
        """Say in one line what this process has, as another one has the screen."""
        from backspot.formatting import duration, labelled

        report = saved.report
        most = next(iter(report.top(1)), None)
        named = f", most of it in {labelled(most.path, most.class_name)}" if most else ""
        self._complain(
            f"a backward of {duration(1e6 * report.wall_ms)} a {report.per}{named}; "
            f"{self._shown()}{os.sep}{saved.names[1]}"
        )

    def _answer(self, recorded: Recorded, joint: Joint | None) -> bool:
        """Print what all ranks answer together, if there are several; return whether they did."""
        from backspot.live.ranks import rank_and_ranks

        if joint is None:
            if rank_and_ranks()[1] > 1:
                complain(f"for all ranks together: backspot ranks {self._shown()}")
            return False
        try:
            answer = joint.collect()
        except (BackspotError, OSError) as error:
            complain(f"no report of all ranks: {error}")
            return False
        from backspot.render import write
        from backspot.render.formats import text_of

        # The page that is written has the rest.
        text = text_of(type(answer))(answer, width=_width(self._args.width), more=())
        write_error(f"\n{text}\n")
        of_job = [job_part] if (job_part := self.process.part_of_job) else []
        names = [recorded.file_name(joint.file_name, *of_job, end) for end in ("html", "json")]
        try:
            for name in names:
                write(answer, self._folder / name, force=True)
        except BackspotError as error:
            complain(f"no files of all ranks: {error}")
        else:
            self._wrote(*names)
        return True

    def _wrote(self, *names: str) -> None:
        folder = f"{self._shown()}{os.sep}"
        complain(f"wrote {', '.join(names)} into {folder}")
        page = next(name for name in names if name.endswith(".html"))
        traces = any(name.endswith(".json.gz") for name in names)
        trace = ", the trace in ui.perfetto.dev" if traces else ""
        complain(f"open {folder}{page} in a browser{trace}")

    def _shown(self) -> str:
        try:
            return os.path.relpath(self._folder)
        except ValueError:  # another drive of Windows
            return str(self._folder)


# What other verbs ask of this one -----------------------------------------------------------------


def show_other(source: str, args: argparse.Namespace) -> bool:
    """Print how a training died of memory, if that is all that a file has; or return false."""
    from backspot.commands._source import is_report

    if is_report(source) or not is_report(source, _OUT_OF_MEMORY):
        return False
    from backspot.render.out_of_memory import render_out_of_memory
    from backspot.results.out_of_memory import OutOfMemory

    is_given = args.depth is not None or args.match or args.by or args.sort or args.top is not None
    is_given = is_given or args.anonymous
    if is_given or args.output is not None or args.format != "table":
        raise UsageError(
            f"{visible(source)} says how a training died of memory, and has no rows: show takes "
            "--width for it"
        )
    write_text(render_out_of_memory(OutOfMemory.load(source), width=args.width))
    return True


# Words --------------------------------------------------------------------------------------------


def _print(report: Report, args: argparse.Namespace, more: str | None) -> None:
    """Print the report on standard error: standard output is the script's own.

    ``more`` is the command for what does not fit on a screen; ``None`` prints everything.
    """
    from backspot.render.parts import first_view
    from backspot.render.text import render_text

    text = render_text(
        report,
        replace(first_view(report), preview=args.preview),
        width=_width(args.width),
        color=use_color(sys.stderr),
        full=more is None,
        more=more or "",
    )
    write_error(f"\n{text}\n")


def _width(wanted: int | None) -> int | None:
    """The width of what is printed on standard error, as ``render_text`` takes it."""
    if wanted is None and is_terminal(sys.stderr):
        return shutil.get_terminal_size().columns
    return wanted


def _how_it_ended(error: BaseException | None) -> str:
    """How the script ended."""
    if error is None:
        return "the script ended"
    if isinstance(error, SystemExit):
        return f"the script called sys.exit({quoted(error.code)})"
    if isinstance(error, KeyboardInterrupt):
        return "the script was interrupted"
    return f"the script raised {type(error).__name__}"


def _is_rank_0() -> bool:
    from backspot.live.ranks import rank_and_ranks

    return rank_and_ranks()[0] == 0


def _folder(wanted: str | None, force: bool) -> Path:
    """Return the folder to write to, before the script changes the working folder.

    All ranks of a job start before one of them writes, so all find the same name free.
    """
    from backspot.render.files import check_folder

    if wanted is not None:
        folder = Path(wanted).absolute()
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--output {wanted} is not a folder")
        check_folder(wanted, "--output")
        existing = [*folder.glob("report.*"), *folder.glob("trace.*")]
        if existing and not force:
            raise OutputExistsError(f"{existing[0]} exists: use --force or another --output")
        return folder
    try:
        folder, number = Path(_FOLDER).absolute(), 2
    except OSError:
        raise UsageError(
            "the folder for the report: the working folder is not there any more; name another "
            "one with --output"
        ) from None
    while folder.exists():
        folder, number = folder.with_name(f"{_FOLDER}-{number}"), number + 1
    check_folder(folder, "the folder for the report:")
    return folder
