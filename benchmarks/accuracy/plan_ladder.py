"""How far does a person come who does nothing but what Backspot prints, one thing after the other?

    python -m benchmarks plan_ladder --device cuda
    python -m benchmarks plan_ladder --device cuda --seconds 290 --keep FOLDER

``ladder_training.py`` is a training as tutorials have it, slow in each way that they know. In each
state of it, ``backspot run --plan`` makes a report. What a reader would do first is done: what the
finding of the headline says; else the rung of the plan that saves most; else the other findings,
and at last a larger batch. What that is in the training's options is read from the words of the
remedy or the code of the rung alone (``_WORDS``). The training without it and with it then run in
turns, without Backspot, each by its own clock. A change that makes it slower by 2% is undone. It
ends where Backspot advises nothing that was not made or undone yet.

``said`` and ``real`` are how many times as fast the training becomes by one change, ``error`` is
said over real, less 1. A change that makes it faster by less than 2% ``gained nothing``.

``--keep FOLDER`` keeps the reports and what is known so far; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.accuracy.ladder_process import Training, command
from benchmarks.accuracy.ladder_reader import Advice, State, first_advice
from benchmarks.harness import CannotRunError, Figures, Run, print_rows, write_json
from benchmarks.workers import NO_TIME

_NOTHING = 0.02
_ROUNDS = 3
_BEGAN = time.monotonic()


def options(parser: argparse.ArgumentParser) -> None:
    """Add how long a plan may take, how far to go, and where to keep what is known so far."""
    parser.add_argument("--plan", type=int, help="seconds of each plan (default: 20; small: 5)")
    parser.add_argument("--states", type=int, help="how many changes to make (default: 15)")
    parser.add_argument("--keep", type=Path, help="a folder for reports and what is known so far")


class _TimeUpError(Exception):
    """The time of the run is up."""


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Raise ``_TimeUpError`` so long after this process began."""

    def end(*_: object) -> None:
        raise _TimeUpError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, seconds - (time.monotonic() - _BEGAN)))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# The ladder --------------------------------------------------------------------------------------


def answer(run: Run) -> Figures:
    """Climb, and return what each state was advised, what was said of it, and what it gave."""
    import torchvision  # noqa: F401 - which the training needs

    with ExitStack() as stack:
        keep = run.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        images = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_images(images, *((16, 64) if run.small else (256, 256)))
        return Ladder(run, keep, images, stack).climbed(run.states or (1 if run.small else 15))


def make_images(folder: Path, count: int, side: int) -> None:
    """Write images of smooth colours with some noise, which take as long to decode as photos."""
    import torch
    from torchvision.transforms.functional import to_pil_image

    draw = torch.Generator().manual_seed(0)
    for number in range(count):
        colours = torch.rand(1, 3, 8, 8, generator=draw)
        image = torch.nn.functional.interpolate(colours, size=(side, side), mode="bicubic")[0]
        image += 0.05 * torch.randn(image.shape, generator=draw)
        to_pil_image(image.clamp(0, 1)).save(folder / f"{number:05}.jpg", quality=90)


class Ladder:
    """The states of the training so far, each with what a reader did next."""

    def __init__(self, run: Run, keep: Path, images: Path, stack: ExitStack) -> None:
        self._run, self._keep, self._images, self._stack = run, keep, images, stack
        side = 224 if run.device == "cuda" and not run.small else 32
        self._fixed = ["--device", run.device, "--side", str(side)]
        self._fixed += ["--log", str(2 if run.small else 5)]
        self._file = keep / "ladder.json"
        self._rows: list[dict[str, Any]] = []
        self._last: dict[str, Any] = {}
        if self._file.exists():
            self._rows = json.loads(self._file.read_text(encoding="utf-8"))

    def _training(self, state: State) -> Training:
        training = Training(command(self._images, state, self._fixed))
        self._stack.callback(training.end)
        training.settle((2 if self._run.small else 10) + 3 * state["workers"])
        return training

    def climbed(self, states: int) -> Figures:
        """Go on until nothing is advised, the states are made, or the time is up."""
        state: State = {"batch": 4 if self._run.small else 32, "workers": 0}
        undone: list[State] = []
        for row in self._rows:
            changed = {**state, row["option"]: row["value"]}
            undone, state = ([*undone, changed], state) if row["undone"] else (undone, changed)
        end = NO_TIME
        before: Training | None = None
        with ended_after(self._run.seconds), suppress(_TimeUpError):
            while advice := self._asked(state, undone):
                before = before or self._training(state)
                changed = {**state, advice.option: advice.value}
                row, after = self._made(advice, before, changed)
                if row["undone"]:
                    undone.append(changed)
                if not row["undone"] and after is not None:
                    before, after, state = after, before, changed
                if after is not None:
                    after.end()
                self._rows.append(row)
                write_json(self._file, self._rows)
                if len(self._rows) >= states:
                    end = "enough states"
                    break
            else:
                end = "nothing more is advised"
        return self._figures(end)

    def _asked(self, state: State, undone: list[State]) -> Advice | None:
        """Have Backspot make a report of the training, and return what to do first."""
        from backspot import Report

        run, folder = self._run, self._keep / f"state{len(self._rows)}"
        seconds = run.plan or (5 if run.small else 20)
        fewer = ["--warmup=2", "--steps=3"] if run.small else []
        done = subprocess.run(
            [sys.executable, "-m", "backspot", "run", f"--plan={seconds}", *fewer, "--exit",
             "--force", "-o", str(folder), *command(self._images, state, self._fixed)],
            capture_output=True, text=True, timeout=120 + seconds, check=False,
        )  # fmt: skip
        if not (folder / "report.json").exists():
            raise CannotRunError(f"no report: {done.stderr.strip()[-300:]}")
        (folder / "printed.txt").write_text(done.stderr, encoding="utf-8")
        (folder / "trace.json.gz").unlink(missing_ok=True)
        report = Report.load(folder / "report.json")
        answer = report.answer
        self._last = {
            "headline": f"{answer.path or answer.rule or answer.kind} {answer.share:.0%}",
            "step_ms": (report.unprofiled_step_ns or report.whole_ns) / 1e6,
            "why_not": report.plan.why_not if report.plan else "no plan",
        }
        return first_advice(report, state, undone)

    def _made(
        self, advice: Advice, before: Training, changed: State
    ) -> tuple[dict[str, Any], Training | None]:
        """Make a change, and return what it gives with the training that has it, if that runs."""
        seconds, rounds = (0.1, 1) if self._run.small else (1.0, _ROUNDS)
        speeds: tuple[list[float], list[float]] = ([], [])
        after, fails = None, ""
        try:
            after = self._training(changed)
            both = before, after
            for number in range(rounds):
                for at in (0, 1) if number % 2 == 0 else (1, 0):
                    speeds[at].append(both[at].speed(seconds))
        except CannotRunError as error:
            fails, speeds = str(error), ([1.0], [0.0])
        each = [new / old for old, new in zip(*speeds, strict=True)]
        real = statistics.median(each)
        row = {
            "state": len(self._rows),
            **self._last,
            "advice": advice.source,
            "option": advice.option,
            "value": advice.value,
            "said": advice.times,
            "bound": advice.bound,
            "real": real,
            "real_low": min(each),
            "real_high": max(each),
            "error": advice.times / real - 1 if advice.times and real else None,
            "gained": "nothing" if real < 1 + _NOTHING else "",
            "undone": real < 1 - _NOTHING,
            "images_s": statistics.median(speeds[0]),
            "after_images_s": statistics.median(speeds[1]),
            "fails": fails,
        }
        print_rows([row])
        return row, after

    def _figures(self, end: str) -> Figures:
        gain = 1.0
        for row in self._rows:
            gain *= 1.0 if row["undone"] else row["real"]
            row["gain so far"] = gain
        errors = [abs(row["error"]) for row in self._rows if row["error"] is not None]
        return {
            "cases": {"ladder": {"end": NO_TIME if end == NO_TIME else "done"}},
            "rows": self._rows,
            "last": self._last,
            "summary": {
                "changes": len(self._rows),
                "of these, gained nothing": sum(row["gained"] != "" for row in self._rows),
                "undone": sum(row["undone"] for row in self._rows),
                "times as fast in the end": gain,
                "median error of what is said": statistics.median(errors) if errors else None,
                "ended as": end,
            },
        }
