"""The outcomes of many broken inputs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import Run, each
from benchmarks.workers import NO_TIME, Handler, Phase

Outcome = tuple[int, str, str, float]
"""A case's number, how it ended, what is wrong with that (``""``: nothing), and seconds."""


@dataclass
class Found:
    """How often each end came; the number of each case that is wrong, and why; the slowest one."""

    outcomes: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[int, str]] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)

    def add(self, outcome: Outcome) -> None:
        """Count one more case."""
        number, end, wrong, seconds = outcome
        self.outcomes[end] += 1
        if wrong:
            self.bad.append((number, wrong))
        self.slowest = max(self.slowest, (seconds, number))

    def figures(self, seed: object) -> dict[str, Any]:
        """Return what the results hold."""
        rows = [{"case": number, "of seed": seed, "wrong": wrong} for number, wrong in self.bad]
        seconds, number = self.slowest
        of_seed = {"seed": seed, "outcomes": self.outcomes.total(), **self.outcomes}
        of_seed |= {"slowest": f"{seconds:.2f} s (case {number})"}
        lines = [of_seed, *({"seed": seed, **row} for row in rows)]
        summary = summary_of_lines(lines)
        return {"rows": rows, "lines": lines, "summary": summary, "wrong": rows}


_NO_OUTCOME = ("seed", "outcomes", "slowest", "case", "of seed", "wrong")


def summary_of_lines(lines: Sequence[Mapping[str, Any]], _: str = "") -> dict[str, Any]:
    """Return how many cases of all seeds ended in which way, and how many of them are wrong."""
    counts: Counter[str] = Counter()
    for line in lines:
        if line.get("outcomes") is not None:
            counts.update({k: v for k, v in line.items() if k not in _NO_OUTCOME and v is not None})
    slowest = [line["slowest"] for line in lines if line.get("slowest")]
    return {
        "seed": ", ".join(str(line["seed"]) for line in lines if line.get("outcomes") is not None),
        "broken": counts.total(),
        **counts,
        "bad": sum(line.get("wrong") is not None for line in lines),
        "slowest": max(slowest, key=lambda text: float(text.partition(" ")[0]), default=""),
    }


def found_in(run: Run, count: int, handle: Handler, seconds: float) -> Found:
    """Run cases by number in workers, and return what came of those for which there was time.

    Args:
        handle: returns the ``outcome`` of the case of a ``number``.
        seconds: after how long a case counts as one that hangs.
    """
    known = {str(number): {"number": number} for number in range(count)}
    found = Found()
    phases = [Phase(run.jobs, seconds)]
    for name, record in each(run, lambda: known, handle, phases=phases, fresh=False).items():
        lost = int(name), "no end", record.get("error", record["end"]), 0.0
        if record["end"] != NO_TIME:
            found.add(tuple(record.get("outcome", lost)))
    return found


_CALLS = ("/engine.py", "/call_wrapper.py")
"""The files whose frames are the last where C++ has called the script, which failed."""


def own_error(errors: str) -> str:
    """Return the frame of Backspot in which an error was raised, by what a script printed.

    A frame of Backspot's further up is one that calls the script.
    """
    frame = ""
    for line in errors.splitlines():
        if at := re.match(r'\s*File "([^"]*)", line \d+, in ', line):
            frame = at[1]
        elif line[:1].strip():
            if "/src/backspot/" in frame and not frame.endswith(_CALLS):
                return f"{frame}: {line}"
            frame = ""
    return ""
