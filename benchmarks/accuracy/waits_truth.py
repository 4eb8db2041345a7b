"""Are the waits for a GPU those that PyTorch itself warns of, by line and count?

    python -m benchmarks waits_truth --device cuda

``torch.cuda.set_sync_debug_mode`` warns at each operator that makes the host wait, at its line.
Each training (``waiting.py``) takes one step with it, and is profiled. Warnings of a backward's
nodes come when it returns, so there the numbers are compared and not the lines; those of a hook
come at its line. PyTorch warns not of calls that only wait, such as ``torch.cuda.synchronize()``;
these are listed.
"""

from __future__ import annotations

import sys
import sysconfig
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.harness import CannotRunError, Figures, Run, done, each
from benchmarks.workers import Job, Record, Stage

_WARNING = "called a synchronizing"


def _is_others(file: str) -> bool:
    """Whether a file is PyTorch's or Python's own."""
    import torch

    if "-packages" in file:
        return file.startswith(str(Path(torch.__file__).parent))
    return file.startswith((sysconfig.get_paths()["stdlib"], "<"))


def _line(frame: FrameType | None) -> tuple[str, bool]:
    """Return the innermost line outside of PyTorch, and whether it runs a backward."""
    backward = False
    while frame is not None and _is_others(frame.f_code.co_filename):
        backward |= frame.f_code.co_name == "backward"
        frame = frame.f_back
    name = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""
    return name, backward


def _warned(step: Any) -> Counter[tuple[str, bool]]:
    """Return the lines of a step at which PyTorch warns, and whether each runs a backward."""
    import torch

    found: Counter[tuple[str, bool]] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if str(message).startswith(_WARNING):
            found[_line(sys._getframe(1).f_back)] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def _examine(job: Job, stage: Stage, run: Run) -> Record:
    import torch

    import backspot
    from benchmarks.accuracy.waiting import CASES

    stage("build", {})
    torch.manual_seed(0)
    model, step = CASES[job["name"]](run.context)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    stage("truth", {})
    truth = _warned(step)
    lines = Counter({line: count for (line, backward), count in truth.items() if not backward})
    stage("profile", {})
    report = backspot.profile(step, model, steps=4, warmup=2, unprofiled=4, trials="none")
    found: Counter[str] = Counter()
    silent = 0
    for wait in report.waits:
        if wait.operator.startswith(("cuda", "hip")):
            silent += wait.count
        elif wait.phase != "backward" or Path(wait.line).name in lines:  # in a hook on its thread
            found[Path(wait.line).name] += wait.count
    of_backward = sum(count for (_, backward), count in truth.items() if backward)
    seen = sum(one.count for one in report.waits) - silent - sum(found.values())
    rule = next((one for one in report.findings if one.rule == "host-waits"), None)
    return {
        "warned": sum(truth.values()),
        "same lines": found == lines,
        "in a backward": [of_backward, seen],
        "same": found == lines and of_backward == seen,
        "silent": silent,
        "phases": sorted({one.phase for one in report.waits}),
        "rule": rule is not None,
        "missing": sorted((lines - found).items()),
        "more": sorted((found - lines).items()),
        "step_ms": round((report.unprofiled_step_ns or 0) / 1e6, 2),
        "saves_ms": round(report.without_waits.ns / 1e6, 2) if report.without_waits else 0.0,
        "found": [
            [one.phase, one.path, one.operator, one.line, one.count, round(one.wall_ns / 1e6, 3)]
            for one in report.waits
        ],
    }


def answer(run: Run) -> Figures:
    def known() -> dict[str, Any]:
        from benchmarks.accuracy.waiting import CASES

        return dict.fromkeys(CASES)

    if not run.listed and run.device == "cpu":
        raise CannotRunError("the host waits for a GPU, and there is none: give --device cuda")
    cases = each(run, known, lambda job, stage: _examine(job, stage, run), fresh=False)
    ended = done(cases)
    same = sum(case["same"] for case in ended.values())
    summary = {
        "lines and counts as PyTorch warns": f"{same} of {len(ended)}",
        "warnings": sum(case["warned"] for case in ended.values()),
        "differ": {name: [c["missing"], c["more"]] for name, c in ended.items() if not c["same"]},
    }
    return {"cases": cases, "summary": summary, "wrong": same < len(ended)}
