"""The outcomes of many broken inputs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

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

    def show(self, seed: object) -> dict[str, Any]:
        """Print the bad cases and the outcomes, and return what the results hold."""
        for number, wrong in self.bad:
            print(f"case {number} of seed {seed}: {wrong}")
        ends = ", ".join(f"{count:,} {end}" for end, count in self.outcomes.most_common())
        seconds, number = self.slowest
        print(f"{self.outcomes.total():,} cases of seed {seed}: {ends}")
        print(f"{len(self.bad)} bad; the slowest {seconds:.2f} s (case {number})")
        return {"seed": seed, "outcomes": self.outcomes, "bad": self.bad, "slowest": self.slowest}
