"""What the benchmarks share: the machine's description, timing, tables and results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = [
    "RESULTS",
    "Budget",
    "add_common_arguments",
    "interleaved",
    "machine",
    "print_table",
    "spread",
    "synchronize",
    "write_json",
]

RESULTS = Path(__file__).parent / "results"
_SRC = Path(__file__).parents[1] / "src"

# Before torch is imported: deterministic cuBLAS needs it, and it does nothing otherwise.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if str(_SRC) not in sys.path:
    sys.path.insert(0, str(_SRC))


class Budget:
    """A time limit that is asked, not enforced."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())


def add_common_arguments(parser: argparse.ArgumentParser, *, seconds: int, out: str) -> None:
    parser.add_argument("--device", default="", help="cuda or cpu (default: cuda where there is)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--cases", default="", help="comma-separated names (default: all)")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--seconds", type=float, default=seconds, help="time for the whole run")
    parser.add_argument("--out", type=Path, default=RESULTS / out, help="where the results go")
    parser.add_argument("--jobs", type=int, default=2, help="processes that prepare at a time")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)


def machine(device: str) -> dict[str, Any]:
    """Hardware and versions, as every result states them."""
    import torch

    described: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "device": "cpu",
    }
    for name in ("timm", "torchvision", "transformers"):
        with suppress(PackageNotFoundError):
            described[name] = version(name)
    if device.startswith("cuda"):
        described["device"] = torch.cuda.get_device_name()
        described["gpus"] = torch.cuda.device_count()
        described["cuda"] = torch.version.cuda
        described["cudnn"] = torch.backends.cudnn.version()
        try:
            described["driver"] = subprocess.run(
                ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            described["driver"] = ""
    return described


def write_json(path: Path, document: Any) -> None:  # noqa: ANN401 - whatever JSON holds
    """Write whole or not at all, so that a run that is cut off leaves what it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1, ensure_ascii=False, default=str) + "\n")
    part.replace(path)


def print_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table in Markdown: it reads in a terminal and in a document."""
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


def _text(cell: Any) -> str:  # noqa: ANN401 - a table's cell
    if cell is None:
        return "—"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


# Timing ------------------------------------------------------------------------------------------


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    ordered = sorted(values)
    if len(ordered) < 2:
        value = ordered[0] if ordered else float("nan")
        return {"median": value, "low": value, "high": value, "n": len(ordered)}
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return {"median": statistics.median(ordered), "low": low, "high": high, "n": len(ordered)}


def interleaved(
    steps: Sequence[Callable[[], None]],
    device: str,
    *,
    rounds: int,
    inner: int = 3,
    warmup: int = 3,
    seconds: float = 60.0,
) -> list[list[float]]:
    """Milliseconds a step of each of ``steps``, measured in turn: A B A B …, the order alternating.

    Each measurement is the mean of ``inner`` steps between two synchronisations, so that the host
    runs ahead as it does in training.
    """
    for step in steps:
        for _ in range(warmup):
            step()
    synchronize(device)
    times: list[list[float]] = [[] for _ in steps]
    budget = Budget(seconds)
    for number in range(rounds):
        order = range(len(steps)) if number % 2 == 0 else range(len(steps) - 1, -1, -1)
        for index in order:
            steps[index]()  # the first after a change pays for what the other left in caches
            synchronize(device)
            begin = time.perf_counter()
            for _ in range(inner):
                steps[index]()
            synchronize(device)
            times[index].append((time.perf_counter() - begin) * 1e3 / inner)
        if budget.left <= 0 and number >= 2:
            break
    return times
