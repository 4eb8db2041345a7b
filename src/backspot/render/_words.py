"""What every output says with: the parts of a sentence, and what things are called in words.

A sentence is a list of parts, so that each output can style names and numbers in its own way, and
can escape them: every name comes from a trace.
"""

from __future__ import annotations

from typing import Literal

from backspot.results.costs import LineCost

Part = tuple[Literal["text", "name", "node", "number"], str]


WITHOUT_PROFILER = "without the profiler"
"""Whose times those of a report with real times are."""


def said(text: str, *parts: Part | str) -> list[Part]:
    """A sentence in which each ``{}`` stands for the next part: a number if it is a text alone."""
    first, *others = text.split("{}")
    clauses: list[Part] = [("text", first)]
    for clause, after in zip(parts, others, strict=True):
        clauses += [("number", clause) if isinstance(clause, str) else clause, ("text", after)]
    return [clause for clause in clauses if clause[1]]


KINDS = {
    "gpu": "GPU busy",
    "communication": "communication",
    "queued": "queued on the GPU",
    "sync": "after a host-device sync",
    "host": "GPU waits for the host",
}
"""What wall time is spent on: the fields of ``WallKinds``, in words."""


def made_by(line: LineCost) -> str:
    """The source line that made a node, or that called the code that made it."""
    return line.place if line.exact else f"called at {line.place}"
