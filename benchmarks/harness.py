"""The harness of all benchmarks: command line, cases in worker processes, tables, results.

A question is a function that takes a ``Run`` (what the command line says) and returns its figures,
a dictionary that can be stored as JSON. The harness prints and stores them with commit, hardware
and versions. Five keys have a meaning: ``cases`` (records by name), ``rows`` (the table to print;
default: the plain values of the cases), ``lines`` (what ``kept.py`` keeps of each case; default:
the rows), ``summary``, and ``wrong`` (whether a fault was found).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.measuring import busy, machine, profile_default
from benchmarks.questions import QUESTIONS
from benchmarks.workers import NO_TIME, Handler, Job, Phase, Record, run_jobs, serve, worker_command

if TYPE_CHECKING:
    import torch

    import backspot
    from benchmarks.models import Context

RESULTS = Path(__file__).parent / "results"
OUT = Path(__file__).parent / "out"
"""Where a run writes that is not told where; git ignores it."""
TEST_DATA = Path(__file__).parents[1] / "tests" / "data"
_OPTIONAL = ("torch", "timm", "torchvision", "transformers", "pandas")
_PATHS = ("-o", "--out", "--keep", "--checkouts", "--foreign", "--book")
_BEGAN = time.monotonic()

Figures = dict[str, Any]

DEFAULTS: dict[str, Any] = {
    "device": "cpu", "worker": 0, "jobs": 0, "seconds": float("inf"), "busy": None, "cases": "",
    "listed": False,
}  # fmt: skip
"""Of a run whose command has no such option."""


class UsageError(Exception):
    """The command asks for something that does not exist."""

    code = 2


class CannotRunError(Exception):
    """The machine lacks something that the benchmark needs."""

    code = 4


# A run -------------------------------------------------------------------------------------------


class Run(argparse.Namespace):
    """What the command line says, with the defaults of this machine and size.

    Attributes:
        question: the name in ``questions.py``.
        argv: the options, as they were given; workers get the same.
        small: tiny sizes and few cases.
        out: where the results go, if anywhere.
        device: ``cpu`` or ``cuda``.
        worker: the number of workers, if this process is one of them; else 0.
    """

    question: str
    argv: list[str]
    small: bool
    out: Path | None
    device: str
    worker: int
    jobs: int
    seconds: float
    busy: int | None
    cases: str
    listed: bool

    @property
    def context(self) -> Context:
        """Device and size, as the models take them."""
        from benchmarks.models import Context

        return Context(self.device, self.small)

    def choose(self, known: Mapping[str, Any], small: Sequence[str] = ()) -> list[str]:
        """Return the names of the cases to run.

        Args:
            known: each case; where its value is a text, that says in a few words what it is.
            small: the cases of a small run for which no cases are named.

        Raises:
            UsageError: If there is no case of a given name.
            SystemExit: With ``--list``, after the cases are printed.
        """
        if self.listed:
            for name, about in known.items():
                print(f"{name}: {about}" if about and isinstance(about, str) else name)
            raise SystemExit(0)
        if not self.cases:
            return [*small] if self.small and small else [*known]
        wanted = self.cases.split(",")
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise UsageError(f"there is no case {', '.join(unknown)}; --list prints the cases")
        return wanted


def _parse(name: str, module: Any, argv: Sequence[str]) -> Run:
    question = QUESTIONS[name]
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}", description=(module.__doc__ or "").partition("\n")[0]
    )
    parser.set_defaults(**DEFAULTS)
    add = parser.add_argument
    add("--small", action="store_true", help="tiny sizes and few cases: seconds")
    where = "in benchmarks/out, not with --small or --cases" if question.stores else "nowhere"
    add("-o", "--out", type=Path, help=f"where the results go (default: {where})")
    if question.device:
        add("--device", choices=("cpu", "cuda"), default=None, help="default: cuda if there is")
    if question.cases:
        add("--cases", default="", help="comma-separated names (default: all)")
        add("--list", dest="listed", action="store_true", help="print the cases and end")
    if question.seconds:
        add("--seconds", type=float, default=question.seconds, help="time limit of the run")
    if question.jobs:
        told = f"worker processes at a time; 0: none (default: {question.jobs}; with --small 0)"
        add("--jobs", type=int, default=None, help=told)
        add("--worker", type=int, default=0, help=argparse.SUPPRESS)
    if question.load:
        add("--busy", type=int, metavar="N", help="other processes that keep a core busy each")
    if hasattr(module, "options"):
        module.options(parser)
    run = parser.parse_args(argv, Run(question=name, argv=[*argv]))
    if run.small:
        # Tiny operations on several threads of a busy machine spend their time waiting.
        os.environ["OMP_NUM_THREADS"] = "1"  # for a torch that is imported later
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
    if run.device is None:
        import torch

        run.device = "cuda" if torch.cuda.device_count() else "cpu"
    if question.jobs and run.jobs is None:
        run.jobs = 0 if run.small else question.jobs
    if run.out is None and question.stores and not (run.small or run.cases):
        run.out = OUT / f"{name}_{run.device}.json"
    return run


def answer(name: str, argv: Sequence[str]) -> int:
    """Answer one question, and print and store its figures.

    Returns:
        The exit code: 0, 1 if a fault was found or a case failed, 2 for a wrong command, 3 if time
        ran out before all cases were done, 4 where the machine lacks something.
    """
    try:
        where, _, function = QUESTIONS[name].where.partition(":")
        module = importlib.import_module(f"benchmarks.{where}")
        run = _parse(name, module, argv)
        found = getattr(module, function or "answer")(run)
        return found if isinstance(found, int) else _finish(run, found)
    except (UsageError, CannotRunError) as error:
        said, code = str(error), error.code
    except OSError as error:
        said, code = str(error), UsageError.code
    except ModuleNotFoundError as error:
        # A module of Backspot's that is missing is a fault of the benchmark.
        if (error.name or "").partition(".")[0] not in _OPTIONAL:
            raise
        said, code = f"needs {error.name}, which is not installed", CannotRunError.code
    print(f"error: {said}", file=sys.stderr)
    return code


def _finish(run: Run, figures: Figures) -> int:
    cases = figures.get("cases", {})
    records = list(cases.values()) if isinstance(cases, dict) else []
    plain = [{"case": name, **case} for name, case in cases.items()]
    print_rows(figures.get("rows", plain))
    for key, value in figures.get("summary", {}).items():
        print(f"{key}: {value}")
    if run.out is not None:
        write_results(run, figures)
        print(f"written to {run.out}")
    ends = {record.get("end", "done") for record in records}
    if NO_TIME in ends:
        return 3
    if run.out is not None:
        _lines_of(run.out).unlink(missing_ok=True)
    return int(bool(figures.get("wrong") or ends - {"done"}))


# Results -----------------------------------------------------------------------------------------


@functools.cache
def commit() -> str:
    """Return the last commit of the code that is measured, and of the code that measures.

    Documents and results do not count. Empty where there is no checkout; then
    ``BENCHMARKS_COMMIT`` of the environment says it.
    """
    code = [":/src", ":/benchmarks", ":!/benchmarks/results", ":!/benchmarks/*.md"]
    code += [":!/benchmarks/claims.*"]
    said = []
    for asked in (["log", "-1", "--format=%h"], ["status", "--porcelain"]):
        command = ["git", *asked, "--", *code]
        try:
            done = subprocess.run(
                command, cwd=RESULTS, capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.SubprocessError):
            done = subprocess.CompletedProcess(command, 1, "")
        said.append(done.stdout.strip() if done.returncode == 0 else "")
    found, changed = said
    if not found:
        return os.environ.get("BENCHMARKS_COMMIT", "")
    return f"{found}-dirty" if changed else found


def write_json(path: Path, document: Any) -> None:
    """Write a file whole or not at all, so that a run that is cut off leaves what it had."""
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def write_results(run: Run, figures: Figures) -> None:
    """Write figures with commit, hardware and versions to where the command line says, if so."""
    if run.out is not None:
        header = {"benchmark": run.question, "commit": commit(), "small": run.small}
        header["command"] = command_of(run)
        header["seconds"] = round(time.monotonic() - _BEGAN)
        write_json(run.out, {**header, "hardware": machine(run.device), **figures})


def command_of(run: Run) -> str:
    """Return the command that answers the question again, without the paths of this machine."""
    words: list[str] = []
    for word in run.argv:
        is_path = os.sep in word or (words and words[-1] in _PATHS)
        if is_path and words and words[-1].startswith("-"):
            words.pop()
        if not is_path:
            words.append(word)
    return shlex.join(["python", "-m", "benchmarks", run.question, *words])


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table in Markdown: their plain values, or lists of a few."""
    plain = [{k: v for k, v in row.items() if _text(v) is not None} for row in rows]
    head = list(dict.fromkeys(key for row in plain for key in row))
    cells = [head, *([_text(row.get(key, "—")) or "—" for key in head] for row in plain)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for number, row in enumerate(cells if head else []):
        parts = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("| " + " | ".join(parts) + " |", flush=True)
        if number == 0:
            print("| " + " | ".join("-" * width for width in widths) + " |")


def _text(cell: Any) -> str | None:
    """A value as a cell; ``None`` for what is too large for one."""
    if isinstance(cell, float):
        return f"{cell:.4g}"
    if isinstance(cell, (list, tuple)) and len(cell) <= 4:
        parts = [_text(part) for part in cell]
        return None if None in parts else " / ".join(map(str, parts))
    if isinstance(cell, (dict, list, tuple)):
        return None
    return "—" if cell is None else str(cell)


# Cases in worker processes -----------------------------------------------------------------------


def each(
    run: Run,
    known: Callable[[], Mapping[str, Any]],
    handle: Handler,
    *,
    small: Sequence[str] = (),
    timeout_s: float = 200,
    phases: Sequence[Phase] = (),
    set_up: Callable[[int], None] = lambda _: None,
    fresh: bool = True,
    late: Callable[[Job], bool] = lambda _: False,
    resumes: bool = True,
    **more: Any,
) -> dict[str, Record]:
    """Do each case in a worker process; one that crashes or hangs costs its case alone.

    A line for each case is kept beside the results until all are done, and a run that was ended
    before goes on from there. In a worker, this serves the driver and ends.

    Args:
        run: the parsed command line.
        known: gives the cases: a dictionary is a part of the case's job, else it says what it is.
        handle: does one.
        small: the cases of a small run.
        timeout_s: time limit of one case.
        phases: from crowded to lonely; default: one with the ``jobs`` of the run.
        set_up: prepares a process for cases; takes the number of workers.
        fresh: whether each case has a process of its own; a CUDA error then poisons no other.
        late: which cases wait for the second phase.
        resumes: whether a run that was ended goes on; not where files of its cases are gone then.
        **more: a part of each job.

    Returns:
        The record of each case by its name, in the order of ``known``.
    """
    if run.worker:
        set_up(run.worker)
        serve(handle)
        raise SystemExit(0)
    cases = known()
    chosen = run.choose(cases, small) if QUESTIONS[run.question].cases else [*cases]
    with _kept(run.out if resumes else None, run) as (records, keep):

        def ended(job: Job, record: Record) -> None:
            keep(job["name"], record)
            records[job["name"]] = record

        def start() -> Handler:
            set_up(1)
            return handle

        jobs = [
            {"name": name, **more, **(cases[name] if isinstance(cases[name], dict) else {})}
            for name in chosen
            if name not in records
        ]
        with busy(run.busy):
            run_jobs(
                jobs,
                worker_command(run),
                start,
                phases or [Phase(run.jobs, timeout_s)],
                seconds=run.seconds,
                fresh=fresh,
                late=late,
                ended=ended,
                quiet=len(jobs) > 1500,
            )
    return {name: records.get(name, {"end": NO_TIME}) for name in chosen}


def _lines_of(out: Path) -> Path:
    return out.with_suffix(".jsonl")


class _Keep(Protocol):
    def __call__(self, name: str, record: Record) -> None: ...


@contextmanager
def _kept(out: Path | None, run: Run) -> Iterator[tuple[dict[str, Record], _Keep]]:
    """The records of an earlier run of the same command and commit, and what keeps one more."""
    if out is None:
        yield {}, lambda name, record: None
        return
    path = _lines_of(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {
        k: v
        for k, v in vars(run).items()
        if k not in ("argv", "seconds", "jobs", "listed", "cases")
    }
    head = json.dumps([commit(), told], default=str)
    first, *lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else [""]
    records: dict[str, Record] = {}
    for line in lines if first == head else ():
        try:
            record = json.loads(line)
        except ValueError:  # cut short
            continue
        records[record.pop("name")] = record
    with path.open("a" if first == head else "w", encoding="utf-8") as file:
        file.write("\n" if first == head else head + "\n")

        def keep(name: str, record: Record) -> None:
            file.write(json.dumps({"name": name, **record}, default=str) + "\n")
            file.flush()

        yield records, keep


def done(cases: Mapping[str, Record]) -> dict[str, Record]:
    """Return the cases that came to their end."""
    return {name: record for name, record in cases.items() if record["end"] == "done"}


# One worker at a time ----------------------------------------------------------------------------


@contextmanager
def turn(*imports: str) -> Iterator[None]:
    """Import what is slow while other workers of the driver run; then wait for one's turn."""
    for name in imports:
        try:
            __import__(name)
        except ImportError:
            print(f"{name} is not installed")
    import fcntl  # only POSIX systems have it

    with _turns().open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # a loader's workers that a case has started hold the file, and the lock with it
            fcntl.flock(file, fcntl.LOCK_UN)


def profile_in_turn(
    step: Callable[[], None],
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    *,
    steps: int,
    **options: Any,
) -> backspot.Report:
    """Run ``backspot.profile`` with its defaults when it is this worker's turn.

    The turn ends with the last step: the analysis of one recording runs beside the steps of the
    next. The arguments are those of ``backspot.profile``.
    """
    import backspot
    from backspot.testing import STEPS_IN_DETAIL

    said = {"steps": steps, **options}

    def value(argument: str) -> int:
        return int(said.get(argument, profile_default(argument)))

    left = value("warmup") + value("unprofiled") + steps
    if any(map(value, ("memory", "shapes", "stacks"))):
        left += STEPS_IN_DETAIL
    import fcntl  # only POSIX systems have it

    with _turns().open("w") as file:

        def counted() -> None:
            nonlocal left
            step()
            left -= 1
            if not left:
                fcntl.flock(file, fcntl.LOCK_UN)

        fcntl.flock(file, fcntl.LOCK_EX)
        return backspot.profile(counted, model, steps=steps, **options)


def _turns() -> Path:
    """Return the lock among the workers of one driver."""
    return Path(tempfile.gettempdir()) / f"benchmark-{os.getppid()}.lock"


# Recordings that are judged again ----------------------------------------------------------------


def judged_again(parser: argparse.ArgumentParser) -> None:
    """Add the options of a question whose recordings can be kept."""
    parser.add_argument("verb", nargs="?", choices=("record", "judge"), default="record")
    parser.add_argument("folder", nargs="?", type=Path, help="judge: what --keep has saved")
    parser.add_argument("--steps", type=int, help="steps to record (default: that of profile)")
    parser.add_argument("--keep", type=Path, help="keep the recordings here")


@contextmanager
def recordings(run: Any) -> Iterator[tuple[Path, bool]]:
    """The folder of the recordings, and whether they are to be made.

    Raises:
        UsageError: If the recordings that are to be judged are not there.
    """
    if run.verb == "judge":
        if run.folder is None or not run.folder.is_dir():
            raise UsageError("judge needs the folder of the recordings")
        yield run.folder, False
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = run.keep.absolute() if run.keep else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder, True
