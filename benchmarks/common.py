"""What the benchmarks share: command line, tables, results, timing and profiling."""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.questions import QUESTIONS

RESULTS = Path(__file__).parent / "results"
TEST_DATA = Path(__file__).parents[1] / "tests" / "data"

_OPTIONAL = ("torch", "timm", "torchvision", "transformers", "pandas")
_PACKAGES = ("torch", "timm", "torchvision", "transformers", "numpy", "msgspec", "orjson")


# The command line --------------------------------------------------------------------------------


class UsageError(Exception):
    """The command asks for something that does not exist."""

    code = 2


class CannotRunError(Exception):
    """The machine lacks something that the benchmark needs."""

    code = 4


Main = Callable[[Sequence[str] | None], int]


def script(main: Main) -> Callable[..., int]:
    """Give ``main`` errors of one line.

    The exit code is 0, or what ``main`` returns (1: a fault was found, 3: time ran out before all
    cases were done), 2 for a wrong command, 4 where the machine lacks something.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
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

    return run


def command_line(
    doc: str | None,
    question: str = "",
    *,
    device: bool = True,
    cases: bool = True,
    seconds: float | None = None,
    jobs: int | None = None,
    load: bool = False,
) -> argparse.ArgumentParser:
    """Return a parser with the options that the benchmarks share.

    Args:
        doc: the script's docstring, of which the first line is the help.
        question: its name in ``questions.py``, which says where a full run writes.
        device: whether the script runs on a GPU too.
        cases: whether it has cases to choose from.
        seconds: the default time limit for the whole run; ``None``: no limit.
        jobs: the default number of worker processes; ``None``: the script starts none.
        load: whether other processes can keep the machine busy.
    """
    out = QUESTIONS[question].out if question else ""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes and few cases: seconds")
    where = f"benchmarks/results/{out}; not with --small" if out else "nowhere"
    parser.add_argument("-o", "--out", type=Path, help=f"where the results go (default: {where})")
    parser.set_defaults(question=question, default_out=out, default_jobs=jobs)
    if device:
        parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is")
    if cases:
        parser.add_argument("--cases", default="", help="comma-separated names (default: all)")
        parser.add_argument("--list", action="store_true", help="print the cases and end")
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help="time limit of the run")
    if jobs is not None:
        told = f"worker processes at a time; 0: none (default: {jobs}; with --small 0)"
        parser.add_argument("--jobs", type=int, help=told)
        parser.add_argument("--worker", type=int, default=0, help=argparse.SUPPRESS)
    if load:
        told = "other processes that keep a core busy each meanwhile"
        parser.add_argument("--busy", type=int, metavar="N", help=told)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and fill in the defaults that depend on machine and size."""
    arguments = parser.parse_args(argv)
    if arguments.small:
        # Tiny operations on several threads of a busy machine spend their time waiting.
        os.environ["OMP_NUM_THREADS"] = "1"  # for a torch that is imported later
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
    if getattr(arguments, "device", "cpu") is None:
        import torch

        arguments.device = "cuda" if torch.cuda.device_count() else "cpu"
    arguments.default_out = arguments.default_out.format(**vars(arguments))
    if getattr(arguments, "busy", None):
        path = Path(arguments.default_out)
        arguments.default_out = f"{path.stem}_busy{path.suffix}"
    if arguments.out is None and arguments.default_out and not arguments.small:
        arguments.out = RESULTS / arguments.default_out
    if arguments.default_jobs is not None and arguments.jobs is None:
        arguments.jobs = 0 if arguments.small else arguments.default_jobs
    return arguments


def choose(
    arguments: argparse.Namespace, known: Mapping[str, Any], small: Sequence[str] = ()
) -> list[str]:
    """Return the names of the cases to run.

    Args:
        arguments: the parsed command line.
        known: each case; where its value is a text, that says in a few words what it is.
        small: the cases of a small run for which no cases are named.

    Raises:
        UsageError: If there is no case of a given name.
        SystemExit: With ``--list``, after the cases are printed.
    """
    if arguments.list:
        for name, about in known.items():
            print(f"{name}: {about}" if about and isinstance(about, str) else name)
        raise SystemExit(0)
    if not arguments.cases:
        return list(small) if arguments.small and small else list(known)
    wanted = arguments.cases.split(",")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(f"there is no case {', '.join(unknown)}; --list prints the cases")
    return wanted


# Results -----------------------------------------------------------------------------------------


@functools.cache
def machine(device: str = "cpu") -> dict[str, Any]:
    """Return hardware and versions, as every result states them.

    Torch is imported only where ``device`` is a GPU, and no CUDA context is made.
    """
    described: dict[str, Any] = {"python": platform.python_version(), "processor": _processor()}
    described |= {"cpus": os.cpu_count(), "cpus_used": usable_cores()}
    described["memory_gb"] = round(available_bytes() / 1e9)
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            described[name] = version(name)
    described |= {"date": time.strftime("%Y-%m-%d"), "device": "cpu"}
    if device.startswith("cuda"):
        import torch

        name, driver = _gpu()
        described |= {"device": name, "driver": driver, "gpus": torch.cuda.device_count()}
        described |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return described


def print_machine(device: str = "cpu") -> None:
    print(", ".join(f"{key} {value}" for key, value in machine(device).items()), flush=True)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpu() -> tuple[str, str]:
    """Name and driver of the first GPU."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    said = ""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
        said = done.stdout.strip()
    name, _, driver = said.partition(",")
    return name.strip() or "cuda", driver.strip()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_bytes() -> int:
    """Return the memory that is free, within the control group's limit too."""
    available = 1 << 62
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return available
    return min(available, int(limit) - used) if limit.isdecimal() else available


def write_json(path: Path, document: Any) -> None:
    """Write a file whole or not at all, so that a run that is cut off leaves what it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1, ensure_ascii=False, default=str) + "\n")
    part.replace(path)


def write_results(
    arguments: argparse.Namespace, document: Mapping[str, Any], *, last: bool = True
) -> None:
    """Write ``document`` with hardware and versions to where the command line says, if anywhere.

    Args:
        arguments: the parsed command line.
        document: what was measured.
        last: whether it is complete; then the file's path is printed.
    """
    if arguments.out is None:
        return
    header = {
        "benchmark": Path(arguments.default_out or arguments.out).stem,
        "hardware": machine(getattr(arguments, "device", "cpu")),
        "small": arguments.small,
    }
    write_json(arguments.out, {**header, **document})
    if last:
        print(f"written to {arguments.out}")


def print_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table in Markdown, which reads well in a terminal and in a document."""
    cells = [[_text(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    numeric = [all(not isinstance(row[i], str) for row in rows) for i in range(len(head))]
    for number, row in enumerate(cells):
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        print("| " + " | ".join(parts) + " |", flush=True)
        if number == 0:
            ends = (":" if right else "-" for right in numeric)
            rules = ("-" * (w - 1) + end for w, end in zip(widths, ends, strict=True))
            print("| " + " | ".join(rules) + " |")


def _text(cell: Any) -> str:
    if cell is None:
        return "—"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


# Timing ------------------------------------------------------------------------------------------


class Budget:
    """A time limit that the code asks for; nothing enforces it."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())


def synchronize(device: str) -> None:
    """Wait until the GPU has finished, where there is one."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles (``low``, ``high``) and count."""
    ordered = sorted(values)
    if len(ordered) < 2:
        value = ordered[0] if ordered else float("nan")
        return {"median": value, "low": value, "high": value, "n": len(ordered)}
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return {"median": statistics.median(ordered), "low": low, "high": high, "n": len(ordered)}


def quartiles(of: Mapping[str, float]) -> str:
    """Return the quartiles of ``spread`` as a cell of a table."""
    return f"{of['low']:.2f}–{of['high']:.2f}"


def milliseconds(step: Callable[[], object], device: str, count: int) -> float:
    """Return what a step takes, from several in a row between two synchronisations."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3 / count


def interleaved(
    steps: Sequence[Callable[[], None]],
    device: str,
    *,
    rounds: int,
    inner: int = 3,
    warmup: int = 3,
    seconds: float = 60.0,
) -> list[list[float]]:
    """Return milliseconds a step of each of ``steps``, measured in turn (A B B A A B).

    Each measurement is the mean of ``inner`` steps in a row, so that the host runs ahead as it
    does in training.
    """
    for step in steps:
        for _ in range(warmup):
            step()
    times: list[list[float]] = [[] for _ in steps]
    budget = Budget(seconds)
    for number in range(rounds):
        order = range(len(steps)) if number % 2 == 0 else range(len(steps) - 1, -1, -1)
        for index in order:
            steps[index]()  # the first after a change pays for what the other left in caches
            times[index].append(milliseconds(steps[index], device, inner))
        if budget.left <= 0 and number >= 2:
            break
    return times


# A process whose parent is gone ends itself, so that a run that is killed leaves none behind.
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy(count: int | None) -> Iterator[None]:
    """Keep ``count`` cores busy with a process each."""
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count or 0)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


# Profiling ---------------------------------------------------------------------------------------


def profile_default(argument: str) -> int:
    """Return the default of an argument of ``backspot.profile``: what a user gets."""
    import backspot

    default: int = inspect.signature(backspot.profile).parameters[argument].default
    return default


@contextmanager
def profiling(device: str, **options: Any) -> Iterator[Any]:
    """Profile host and device; the profiler ends when the device has finished."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, **options) as prof:
        yield prof
        synchronize(device)


def record_trace(
    step: Callable[[], object],
    device: str,
    path: Path,
    *,
    steps: int,
    warmup: int,
    settled: int = 0,
    **options: Any,
) -> None:
    """Profile ``steps`` steps after ``warmup`` steps and export the trace to ``path``.

    The host waits for the device after each of the first ``settled`` steps: a step that it does
    not wait for leaves work on the device whose launch is not in the next step's trace.
    """
    from torch.profiler import schedule

    with profiling(
        device,
        schedule=schedule(wait=0, warmup=warmup, active=steps, repeat=1),
        on_trace_ready=lambda prof: prof.export_chrome_trace(str(path)),
        **options,
    ) as prof:
        for number in range(warmup + steps):
            step()
            if number < settled:
                synchronize(device)
            prof.step()
