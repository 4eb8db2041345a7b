"""What the parts of a step take as it is, before anything is tried."""

from __future__ import annotations

from dataclasses import dataclass

from backspot.analysis.attribution.ownership import Special
from backspot.live.trials.trial import step_of
from backspot.results.report import Report


@dataclass(frozen=True)
class Account:
    """The time of a step, in nanoseconds, as it is without the profiler.

    Attributes:
        step: all of it.
        model: forward and backward of the models.
        loss: forward and backward of a loss outside of the models.
        data: the wait for a batch.
        optimizer: clipping is not part of it.
    """

    step: int
    model: int
    loss: int
    data: int
    optimizer: int

    @classmethod
    def of(cls, report: Report) -> Account:
        """Return the account of a report's step."""
        step = step_of(report)
        scale = step / max(1, report.whole_ns)
        phases = {one.name: round(scale * one.wall_ns) for one in report.phases}
        forward, backward, loss, data, optimizer = (
            phases.get(name, 0) for name in ("forward", "backward", "loss", "data", "optimizer")
        )
        rows = (row.wall_ns for row in report.modules if row.path == Special.OUTSIDE.path)
        outside = round(scale * sum(rows))
        return cls(step, forward + backward - outside, loss + outside, data, optimizer)

    @property
    def fixed(self) -> int:
        """What of the step does not grow with the batch."""
        return self.step - self.model - self.loss - self.data
