"""Single settings first, then the best ones together, each in turns with the best so far."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import torch

from backspot.formatting import duration
from backspot.interrupts import pass_on
from backspot.live.plan.comparing import Results, TimeUp, ended_after, memory_of, predicted, timed
from backspot.live.plan.copies import Copy, batch_of
from backspot.live.plan.settings import (
    Setting,
    counted_checkpoints,
    names_of_checkpoint,
    settings_of,
)
from backspot.live.plan.watching import Watching
from backspot.live.trials.measuring import reason
from backspot.live.trials.twins import Refused
from backspot.results.plan import Difference, Rung

NO_TIME = "no time was left"
_TOO_LONG = 2.5
"""A copy that takes so many times the step does not run what the step runs."""
_SAMPLES = 24
"""How many samples one comparison takes at least, about: six rounds of three, and the first."""
_LONGEST_S = 4.0
_RESERVED = 2
"""Comparisons for which compiling leaves time."""
_LOSS = 0.05
"""A loss of a smaller share of the step changes little, whatever a setting does to it."""
_HOPELESS = 0.05
"""A setting by which a step takes so much longer is not tried on top of others."""


def why(error: Exception) -> str:
    """Return why something could not be run."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    return str(error) if isinstance(error, Refused) else reason(error)


class Search:
    """Tries settings on copies until the time is up; what is known by then is in its attributes.

    Args:
        step_ns: the step as it is.
        fixed_ns: what of the step does not grow with the batch.
        loss_ns: what of the step is a loss outside of the models, forward and backward.
        until: when the time is up, in seconds of ``time.monotonic``.

    Attributes:
        base_ns: what forward and backward of the copy as it is take; 0 until that is known.
        step_ns: the step with all of the ladder.
        batch: samples in a call, 0 where that is not known.
    """

    def __init__(
        self, watched: Watching, step_ns: int, fixed_ns: int, loss_ns: int, until: float
    ) -> None:
        self._watched, self._as_it_is = watched, step_ns
        self._fixed_ns, self._loss_ns = fixed_ns, loss_ns
        self._until = until
        self.base_ns = self.batch = 0
        self.step_ns = step_ns
        self._ladder: list[Rung] = []
        self._tried: dict[Setting, Rung] = {}
        self._not_tried: dict[Setting, str] = {}
        self._of_batch = Rung("batch", "batch", note=NO_TIME)

    def rungs(self) -> list[Rung]:
        """Return the ladder, then what else was tried, then what was not, with the reason."""
        names = {one.name for one in self._watched_ladder()}
        others = [rung for one, rung in self._tried.items() if one.name not in names]
        missing = [
            Rung(one.name, one.axis, code=one.code, note=said)
            for one, said in self._not_tried.items()
            if one not in self._tried
        ]
        return [*self._ladder, *others, *missing, self._of_batch]

    def _watched_ladder(self) -> list[Setting]:
        taken = {rung.setting for rung in self._ladder}
        return [one for one in self._tried if one.name in taken]

    def go(self) -> None:
        """Try everything.

        Raises:
            Refused: If a copy cannot be trusted.
        """
        self._best = base = Copy(self._watched)
        names = names_of_checkpoint()
        with counted_checkpoints(names) as calls:
            base.check()
        self._watched.checkpoints = names if calls else ()
        settings = settings_of(self._watched, base.device)
        self._not_tried = {one: one.why_not or NO_TIME for one in settings}
        begin = time.perf_counter_ns()
        self._results = Results(base)
        self._best_memory = memory_of(base)
        self.base_ns = self._quickest(base, begin)
        if self.base_ns > _TOO_LONG * self._as_it_is:
            takes = f"takes {duration(self.base_ns)}, and the whole step {duration(self._as_it_is)}"
            raise Refused(f"forward and backward of a copy {takes}")
        # A machine that is busier now than it was shows in all copies alike.
        self._scale = min(1.0, (self._as_it_is - self._fixed_ns) / self.base_ns)
        worth = [one for one in settings if not one.why_not]
        cheap = [one for one in worth if not one.compiles]
        singles = [one for one in cheap if self._try(one, alone=True)]
        for one in sorted(singles, key=lambda one: -self._tried[one].saves_ns):
            self._climb(one)
        self._try_batch()
        for one in worth:
            if one.compiles:
                self._try(one)

    def close(self) -> None:
        """Let go of the copies."""
        vars(self).pop("_best", None)
        vars(self).pop("_results", None)
        gc.collect()

    def _quickest(self, base: Copy, begin: int) -> int:
        """Return what a step's calls take, of a few runs within a second."""
        took: list[int] = []
        while len(took) < 2 or (time.perf_counter_ns() - begin < 10**9 and len(took) < 9):
            took.append(base.timed_ns())
        return min(took)

    def _climb(self, setting: Setting) -> None:
        """Try a setting on top of the best so far, where that may help."""
        single = self._tried[setting]
        taken = {one.axis for one in self._ladder}
        hopeless = single.saves_ns < -_HOPELESS * self._as_it_is
        if setting.axis in taken or hopeless or (not self._ladder and single.verdict != "helps"):
            return
        self._try(setting)

    def _try(self, setting: Setting, *, alone: bool = False) -> bool:
        """Try a setting on top of the best so far, and keep it there if it helps.

        Args:
            alone: only to know what it gives, before the best ones are put together.
        """
        new: Copy | None = None
        try:
            left = self._until - time.monotonic()
            if left < self._needs_s:
                raise Refused(NO_TIME)
            settings = [*self._best.settings, setting]
            if setting.compiles:
                left -= _RESERVED * self._needs_s
                if left < self._needs_s:
                    raise Refused(NO_TIME)
                with ended_after(left):
                    new = Copy(self._watched, settings)
                    new.run_all()
            else:
                new = Copy(self._watched, settings)
                new.run_all()
            rung, memory = self._compared(setting, new)
        except TimeUp:
            self._not_tried[setting] = f"compiling takes more than the {left:.0f} s that were left"
        except Exception as error:
            pass_on(error)
            self._not_tried[setting] = why(error)
        else:
            self._tried[setting] = rung
            if rung.verdict == "helps" and not alone:
                self._ladder.append(replace(rung, kept=True))
                self.step_ns, self._best, self._best_memory = rung.step_ns, new, memory
            return True
        finally:
            del new
            gc.collect()
            if setting in self._not_tried and torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        return False

    def _compared(self, setting: Setting, new: Copy) -> tuple[Rung, int]:
        """Return the rung of a setting, and the memory of a copy that has it."""
        first = new.first_ns
        again = min(new.timed_ns(), new.timed_ns())
        difference: Difference | None = self._results.difference(new)
        note = setting.note
        if self._results.draws and setting.compiles:  # it draws other numbers
            difference, note = None, "compiled code draws other random numbers"
        memory = memory_of(new)
        _, variant = timed(self._best, new, self.step_ns, self._seconds())
        rung = Rung(
            setting.name,
            setting.axis,
            tuple(one.setting for one in self._ladder),
            setting.code,
            memory_bytes=memory,
            before_memory_bytes=self._best_memory,
            compile_ns=max(0, first - again) if setting.compiles else 0,
            difference=difference,
            note=note,
        )
        saves = variant.saves_ns, variant.saves_low_ns, variant.saves_high_ns
        scaled = [self._scale * ns for ns in saves]
        rung = predicted(rung, self.step_ns, scaled, variant.verdict)
        return self._with_loss(rung), memory

    def _with_loss(self, rung: Rung) -> Rung:
        """Return a rung that is as uncertain as what its setting does to a loss outside of a copy.

        That can take half as long in another precision, or half as long again with the casts.
        """
        if rung.axis != "precision" or self._loss_ns < _LOSS * rung.before_ns:
            return rung
        unknown = self._loss_ns // 2
        low, high = max(1, rung.low_ns - unknown), rung.high_ns + unknown
        saved = f"the loss, {duration(self._loss_ns)} outside of the model, was not tried"
        sure = rung.verdict != "helps" or high < rung.before_ns
        verdict = rung.verdict if sure else "undecided"
        note = "; ".join(filter(None, (rung.note, saved)))
        return replace(rung, low_ns=low, high_ns=high, verdict=verdict, note=note)

    @property
    def _needs_s(self) -> float:
        """How long a comparison takes at least, in seconds."""
        return _SAMPLES * self._best.at_once * self.base_ns / 1e9

    def _seconds(self) -> float:
        """Return how long a comparison may take: an even share of what is left, or what it needs.

        Raises:
            Refused: If that is not left.
        """
        left = self._until - time.monotonic()
        waiting = {one for one, said in self._not_tried.items() if said == NO_TIME}
        pending = len(waiting - self._tried.keys())
        needs = self._needs_s
        if needs > left:
            raise Refused(NO_TIME)
        return min(max(left / (2 * max(1, pending)), needs), max(_LONGEST_S, needs), left)

    def _try_batch(self) -> None:
        """Try twice the batch, for as many samples as a step has now, before all is compiled."""
        rung = Rung("batch", "batch", tuple(one.setting for one in self._ladder), note=NO_TIME)
        try:
            sizes = {batch_of(call) for call in self._watched.calls}
            if len(sizes) != 1:
                raise Refused("the models are called with several sizes of batches")
            self.batch = sizes.pop()
            rung = replace(rung, setting=f"batch {2 * self.batch:,}")
            rung = replace(rung, code=f"batch_size={2 * self.batch}")
            twice = Copy(self._watched, self._best.settings, times=2)
            twice.run_all()
            memory = memory_of(twice)
            takes, variant = timed(self._best, twice, self.step_ns, self._seconds())
            rung = self._with_batch(rung, takes, variant.saves_ns, variant.saves_low_ns)
            rung = replace(rung, memory_bytes=memory, before_memory_bytes=self._best_memory)
        except Exception as error:
            pass_on(error)
            rung = replace(rung, note=why(error))
        self._of_batch = rung

    def _with_batch(self, rung: Rung, takes: int, saves: int, saves_low: int) -> Rung:
        """Return what twice the batch saves, for as many samples as a step has now.

        Twice the samples take ``takes - saves`` of the copy, and twice the rest of the step but for
        what does not grow.
        """
        middle = (self._scale * (takes + saves) + self._fixed_ns) / 2
        spread = self._scale * abs(saves - saves_low) / 2
        note = "for as many samples as a step has now"
        saved = middle, middle - spread, middle + spread
        return predicted(replace(rung, note=note), self.step_ns, saved)
