"""What a step needs of host and device as it is, and with another copy in place of a part of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from backspot.analysis.attribution.ownership import Special
from backspot.interrupts import pass_on
from backspot.live.trials.trial import step_of
from backspot.results.report import Report, predictor_of


class Times(NamedTuple):
    """What something needs, in nanoseconds.

    Attributes:
        host: until all is issued; on a CPU with one thread that thread's own time, which other
            programs do not lengthen.
        device: the device's own time, as if all were issued before; 0 on a CPU.
        whole: clock time, until the device has ended.
    """

    host: float
    device: float = 0.0
    whole: float = 0.0


NOTHING = Times(0.0)
_LEAST_SHARE = 0.1
"""Share of the host's time below which a copy says nothing of the rest."""


@dataclass(frozen=True)
class Step:
    """A step as what it needs, in nanoseconds: the larger of host and device, and what is beside.

    Attributes:
        host: the host's time, without what it waits for the device.
        device: the device's time; 0 on a CPU, and where it is not known.
        beside: what neither explains, such as waits of one for the other, or for a batch.
        outside: what of the host's time no copy runs; 0 where that is not known.
    """

    host: float
    device: float = 0.0
    beside: float = 0.0
    outside: float = 0.0

    @property
    def ns(self) -> int:
        """How long it takes."""
        return max(1, round(max(self.host, self.device) + self.beside))

    def with_copy(self, now: Times, new: Times, more: Times = NOTHING) -> Step:
        """Return the step with a copy that needs ``new`` in place of one that needs ``now``.

        ``more`` is what it then needs beside the copy.

        Where ``now`` is more than the step itself has for that, the copy ran on a machine that is
        busier than the step's was, or each of host and device waited for the other. That holds for
        both copies alike, so that their difference counts by as much less.
        """
        host, device = now.host - new.host, now.device - new.device
        of_host, of_device = now.host, now.device
        if not of_device and of_host:  # of a thread's own time, and a step is clock time
            of_host, host = now.whole, host * now.whole / of_host
        host *= min(1.0, max(0.0, self.host - self.outside) / max(1.0, of_host))
        device *= min(1.0, self.device / max(1.0, of_device))
        return replace(
            self, host=self.host - host + more.host, device=self.device - device + more.device
        )

    def share_of(self, times: Times, rest: Times) -> Times:
        """Return what a part of a copy takes of the step: of the host the share it has of the copy.

        A host may be slower in the step than now, or faster. What a copy runs on a device takes as
        long in the step, which runs more there.

        Args:
            times: what the copy needs.
            rest: what it needs without that part.
        """
        host, device = (
            max(0.0, times[index] - rest[index]) / max(1.0, times[index]) for index in (0, 1)
        )
        of_copy = max(0.0, self.host - self.outside)
        return Times(of_copy * host, min(self.device, times.device) * device)


@dataclass(frozen=True)
class Account:
    """The time of a step, in nanoseconds, as it is without the profiler.

    Attributes:
        step: all of it.
        model: forward and backward of the models.
        loss: forward and backward of a loss outside of the models.
        data: the wait for a batch.
        optimizer: clipping is not part of it.
        apart: what host and device need for it, each without the other; ``None`` on a CPU, and
            where the recording cannot be replayed.
        of_models: the models' share of the host's time, without their loss and with it; 0 where
            that is not known.
    """

    step: int
    model: int
    loss: int
    data: int
    optimizer: int
    apart: tuple[float, float] | None = None
    of_models: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, report: Report) -> Account:
        """Return the account of a report's step."""
        step = step_of(report)
        scale = step / max(1, report.whole_ns)
        phases = {phase.name: round(scale * phase.wall_ns) for phase in report.phases}
        forward, backward, loss, data, optimizer = (
            phases.get(name, 0) for name in ("forward", "backward", "loss", "data", "optimizer")
        )
        rows = (row.wall_ns for row in report.modules if row.path == Special.OUTSIDE.path)
        outside = round(scale * sum(rows))
        predictor = predictor_of(report) if report.has_gpu else None
        account = cls(step, forward + backward - outside, loss + outside, data, optimizer)
        if predictor is None:
            return account
        try:
            without, with_loss = (
                predictor.of_models(with_loss=loss_too) for loss_too in (False, True)
            )
            return replace(account, apart=predictor.apart(), of_models=(without, with_loss))
        except Exception as error:  # a recording that cannot be replayed is no reason for no plan
            pass_on(error)
            return account

    def needs(self, copy: Times, has_loss: bool) -> Step:
        """Return what the step needs.

        Of a step that the device limits, a recording says too little of the host: it takes the
        profiler's cost out of a host that was hardly ever seen at work alone. A copy shows that.

        Args:
            copy: what a copy of the models needs as it is.
            has_loss: whether the copy runs the loss, too.
        """
        if not copy.device:
            return Step(self.step, outside=self.rest(has_loss))
        share = self.of_models[has_loss] or 1 - self.rest(has_loss) / max(1, self.step)
        of_copy = copy.host / max(_LEAST_SHARE, share)
        host, device = self.apart or (
            (self.step, copy.device) if copy.host > copy.device else (0.0, self.step)
        )
        host, device = min(max(host, of_copy), self.step), min(device, self.step)
        return Step(host, device, self.step - max(host, device), (1 - share) * host)

    def rest(self, has_loss: bool) -> int:
        """Return what of the step no copy runs."""
        return max(0, self.step - self.model - self.loss * has_loss)

    def more(self, has_device: bool, loss: Times | None = None) -> Times:
        """Return what a step with twice the batch needs more, beside its models.

        Of a loss, a device works twice as long, and the host issues as much as before.

        Args:
            has_device: whether the loss runs on a device.
            loss: what the loss takes with the settings that are made; ``None`` where none of them
                changes it, or none was tried with it.
        """
        if has_device:
            return Times(self.data, self.loss if loss is None else loss.device)
        return Times(self.data + (self.loss if loss is None else loss.host))
