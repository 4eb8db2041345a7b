"""Single settings first, then the best ones together, each in turns with the best so far."""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import nullcontext
from dataclasses import replace

import torch

from backspot.formatting import duration, size
from backspot.interrupts import pass_on
from backspot.live.plan.account import Account
from backspot.live.plan.again import lost_before
from backspot.live.plan.comparing import Results, memory_of, predicted, timed
from backspot.live.plan.copies import NO_TIME, Copy, batch_of
from backspot.live.plan.room import room_on
from backspot.live.plan.settings import (
    Setting,
    backends_of,
    counted_checkpoints,
    names_of_checkpoint,
    settings_of,
)
from backspot.live.plan.time_limit import TimeUp, ended_after
from backspot.live.plan.watching import Watching
from backspot.live.ranks import rank_and_ranks
from backspot.live.torch_internals.collectives import NoCollectives
from backspot.live.torch_internals.dynamo import compilations
from backspot.live.trials.measuring import reason
from backspot.live.trials.twins import Refused
from backspot.results.plan import Difference, Plan, Rung
from backspot.results.trials import Variant

_TOO_LONG = 2.5
"""A copy that takes so many times the step does not run what the step runs."""
_MORE_KEPT, _KEEPING = 10, ("checkpoint", "attention")
"""How many times as much a model may keep without its checkpoints, or with another attention. That
is not known before it runs: a block of a transformer keeps some ten times its input."""
_SAMPLES = 24
"""How many samples one comparison takes at least, about: six rounds of three, and the first."""
_LONGEST_S = 4.0
"""How long a comparison may go on once it has what it needs: a dozen fit into a minute then."""
_AUTOTUNING = 4
"""How many times as long compiling takes that measures each kernel, about."""
_RESERVED = 2
"""Comparisons for which compiling leaves time."""
_FOR_COMPILING = 0.4
"""Share of the time that is kept for compiling, which comes last: on an H200, with 40 s, 21 of 23
models had none left after all else, and of a minute this leaves what most of them take to
compile."""
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
        account: what the step takes as it is.
        of_loader: samples in a batch of the loader, 0 where that is not known.
        earlier: what was tried of this model before, with these inputs.
        until: when the time is up, in seconds of ``time.monotonic``.

    Attributes:
        base_ns: what forward and backward of the copy as it is take; 0 until that is known.
        step_ns: the step with all of the ladder.
        batch: samples in a step, 0 where that is not known.
    """

    def __init__(
        self,
        watched: Watching,
        account: Account,
        until: float,
        of_loader: int = 0,
        earlier: Plan | None = None,
    ) -> None:
        self._watched, self._account = watched, account
        self._until = watched.until = until
        self._of_loader, self._earlier = of_loader, earlier
        self.base_ns = self.batch = 0
        self.step_ns = account.step
        self._ladder: list[Rung] = []
        self._tried: dict[Setting, Rung] = {}
        self._not_tried: dict[Setting, str] = {}
        self._of_batch = Rung("batch", "batch", note=NO_TIME)
        self._kept_s = 0.0  # for compiling

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
        talks = Refused("the model talks to other ranks, which do not run its copy")
        alone = NoCollectives(talks) if rank_and_ranks()[1] > 1 else nullcontext()
        with counted_checkpoints(names) as calls, alone:
            base.check()
            base.run_all()
        self._watched.checkpoints = names if calls else ()
        settings = settings_of(self._watched, base.device)
        self._not_tried = {one: one.why_not or NO_TIME for one in settings}
        self._lost = lost_before(self._earlier, settings)
        begin = time.perf_counter_ns()
        self._results = Results(base)
        self._best_memory = memory_of(base)
        self.base_ns = self._takes(base, begin)
        if self.base_ns > _TOO_LONG * (step := self._account.step):
            takes = f"takes {duration(self.base_ns)}, and the whole step {duration(step)}"
            raise Refused(f"forward and backward of a copy {takes}")
        worth = [one for one in settings if not one.why_not]
        cheap = [one for one in worth if not one.compiles]
        self._kept_s = _FOR_COMPILING * self._left_s if len(cheap) < len(worth) else 0.0
        singles = [one for one in cheap if self._try(one, alone=True)]
        for one in sorted(singles, key=lambda one: -self._tried[one].saves_ns):
            self._climb(one)
        self._try_backends()
        self._try_batch()
        self._kept_s = 0.0
        for one in worth:
            if one.compiles:
                self._try(one)

    def close(self) -> None:
        """Let go of the copies."""
        vars(self).pop("_best", None)
        vars(self).pop("_results", None)
        gc.collect()

    def _takes(self, base: Copy, begin: int) -> int:
        """Return what a step's calls take, by a few runs within a second."""
        took: list[int] = []
        while len(took) < 2 or (time.perf_counter_ns() - begin < 10**9 and len(took) < 9):
            took.append(base.timed_ns())
        return round(statistics.median(took))

    def _try_backends(self) -> None:
        """Try other kernels of attention, once it is known what attention gets."""
        try:
            backends = backends_of(self._best.run_all, self._best.device)
        except Exception as error:
            pass_on(error)
            return
        self._not_tried |= {one: one.why_not or NO_TIME for one in backends}
        for one in backends:
            if not one.why_not:
                self._try(one)

    def _climb(self, setting: Setting) -> None:
        """Try a setting on top of the best so far, where that may help."""
        single = self._tried[setting]
        taken = {one.axis for one in self._ladder}
        hopeless = single.saves_ns < -_HOPELESS * self._account.step
        if setting.axis in taken or hopeless or (not self._ladder and single.verdict != "helps"):
            return
        self._try(setting)

    def _try(self, setting: Setting, *, alone: bool = False) -> bool:
        """Try a setting on top of the best so far, and keep it there if it helps.

        Args:
            alone: only to know what it gives, before the best ones are put together.
        """
        on = frozenset(one.setting for one in self._ladder)
        if (lost := self._lost.get((setting.name, on))) is not None:
            self._tried[setting] = lost
            return True
        new: Copy | None = None
        failed = True
        try:
            left = self._left_s
            if left < self._needs_s:
                raise Refused(NO_TIME)
            settings = [one for one in self._best.settings if one.name != setting.replaces]
            settings.append(setting)
            if setting.compiles:
                left -= _RESERVED * self._needs_s
                if left < max(self._needs_s, self._compiles_s(setting)):
                    raise Refused(NO_TIME)
                before = compilations()
                with ended_after(left):
                    new = Copy(self._watched, settings)
                    new.run_all()
                if compilations() == before:
                    raise Refused("PyTorch compiled nothing of it here")
            else:
                self._check_memory(_MORE_KEPT if setting.axis in _KEEPING else 1)
                new = Copy(self._watched, settings)
                new.run_all()
            rung, memory = self._compared(setting, new)
        except TimeUp:
            self._not_tried[setting] = f"compiling takes more than the {left:.0f} s that were left"
        except Exception as error:
            pass_on(error)
            self._not_tried[setting] = why(error)
        else:
            failed = False
            self._tried[setting] = rung
            if rung.verdict == "helps" and not alone:
                self._ladder.append(replace(rung, kept=True))
                self.step_ns, self._best, self._best_memory = rung.step_ns, new, memory
            return True
        finally:
            del new
            gc.collect()
            if failed and torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        return False

    def _compiles_s(self, setting: Setting) -> float:
        """Return how many seconds compiling may take, as the setting before it took.

        Raises:
            Refused: If that does not help, or was not tried.
        """
        if not setting.replaces:
            return 0.0
        before = [one for one in self._ladder if one.setting == setting.replaces]
        if not before:
            raise Refused(f"{setting.replaces} is no part of the plan")
        return _AUTOTUNING * before[0].compile_ns / 1e9

    def _compared(self, setting: Setting, new: Copy) -> tuple[Rung, int]:
        """Return the rung of a setting, and the memory of a copy that has it."""
        first = new.first_ns
        again = min(new.timed_ns(), new.timed_ns())
        difference: Difference | None = self._results.difference(new)
        note = setting.note
        if self._results.draws and setting.compiles:  # it draws other numbers
            difference, note = None, "compiled code draws other random numbers"
        memory = memory_of(new)
        takes, variant = timed(self._best, new, self.step_ns, self._seconds())
        scale = self._scale(takes)
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
        scaled = [scale * ns for ns in saves]
        rung = predicted(rung, self.step_ns, scaled, variant.verdict)
        return self._with_loss(rung), memory

    def _with_loss(self, rung: Rung) -> Rung:
        """Return a rung that is as uncertain as what its setting does to a loss outside of a copy.

        That can take half as long in another precision, or half as long again with the casts.
        """
        loss, has_loss = self._account.loss, self._watched.has_loss
        if rung.axis != "precision" or has_loss or loss < _LOSS * rung.before_ns:
            return rung
        unknown = loss // 2
        low, high = max(1, rung.low_ns - unknown), rung.high_ns + unknown
        said = self._watched.why_no_loss or "no backward of it was seen"
        not_tried = f"the loss, {duration(loss)} outside of the model, was not tried: {said}"
        sure = rung.verdict != "helps" or high < rung.before_ns
        verdict = rung.verdict if sure else "undecided"
        note = "; ".join(filter(None, (rung.note, not_tried)))
        return replace(rung, low_ns=low, high_ns=high, verdict=verdict, note=note)

    def _scale(self, takes: int) -> float:
        """Return how much shorter times are in the step than now.

        A machine that is busier now than it was shows in all copies alike.

        Args:
            takes: what the best copy takes now.
        """
        return min(1.0, max(self.step_ns - self.rest_ns, 0) / max(1, takes))

    @property
    def rest_ns(self) -> int:
        """What of the step no copy runs."""
        with_loss = self._account.loss if self._watched.has_loss else 0
        return self._account.step - self._account.model - with_loss

    def _check_memory(self, times: float) -> None:
        """Refuse what keeps so many times what a copy keeps, where the host's memory ends.

        A GPU's allocator raises an error, and Linux ends the process.
        """
        device = self._best.device
        if device.type == "cpu" and times * self._watched.keeps > (room := room_on(device)):
            free = size(round(2 * room))
            raise Refused(f"it could take more than the {free} of memory that are free")

    @property
    def _left_s(self) -> float:
        """How much time is left, without what is kept for compiling."""
        return self._until - time.monotonic() - self._kept_s

    @property
    def _needs_s(self) -> float:
        """How long a comparison takes at least, in seconds."""
        return _SAMPLES * self._best.at_once * self.base_ns / 1e9

    def _seconds(self, times: float = 1.0) -> float:
        """Return how long a comparison may take: an even share of what is left, or what it needs.

        Args:
            times: how many times as long it takes as one of copies that take as long as the first.

        Raises:
            Refused: If that is not left.
        """
        left = self._left_s
        waiting = {one for one, said in self._not_tried.items() if said == NO_TIME}
        pending = len(waiting - self._tried.keys())
        needs = times * self._needs_s
        if needs > left:
            raise Refused(NO_TIME)
        return min(max(left / (2 * max(1, pending)), needs), max(_LONGEST_S, needs), left)

    def _try_batch(self) -> None:
        """Try twice the batch, for as many samples as a step has now, before all is compiled."""
        rung = Rung("batch", "batch", tuple(one.setting for one in self._ladder), note=NO_TIME)
        has_loss, self._watched.has_loss = self._watched.has_loss, False
        try:
            sizes = {batch_of(call): call.count for call in self._watched.calls}
            if len(sizes) != 1:
                raise Refused("the models are called with several sizes of batches")
            batch, calls = sizes.popitem()
            if self._of_loader not in (0, batch) or self._second_is_batch():
                raise Refused("the first dimension of the inputs is not the batch's")
            self.batch = batch * calls
            rung = replace(rung, setting=f"batch {2 * batch:,}", code=f"batch_size={2 * batch}")
            seconds = self._seconds(1.5)
            self._check_memory(2)
            twice = Copy(self._watched, self._best.settings, times=2)
            twice.run_all()
            memory = memory_of(twice)
            takes, variant = timed(self._best, twice, self.step_ns, seconds)
            rung = self._with_batch(rung, takes, variant)
            rung = replace(rung, memory_bytes=memory, before_memory_bytes=self._best_memory)
        except Exception as error:
            pass_on(error)
            rung = replace(rung, note=why(error))
        finally:
            self._watched.has_loss = has_loss
        self._of_batch = rung

    def _second_is_batch(self) -> bool:
        """Whether a part takes batches whose second dimension is that of the samples."""
        parts = (part for one in self._watched.copies.values() for part in one.modules())
        return any(getattr(part, "batch_first", True) is False for part in parts)

    def _with_batch(self, rung: Rung, takes: int, variant: Variant) -> Rung:
        """Return what twice the batch saves, for as many samples as a step has now.

        Twice the samples take ``takes - saves`` of the copy, and twice the rest of the step but for
        what does not grow.
        """
        scale = self._scale(takes)
        ends = variant.saves_ns, variant.saves_low_ns, variant.saves_high_ns
        saved = [(scale * (takes + saves) + self._account.fixed) / 2 for saves in ends]
        rung = replace(rung, note="for as many samples as a step has now")
        # Of a verdict on the copies, only that there were too few rounds is one on this.
        measured = "undecided" if ends[1] == ends[2] else ""
        return predicted(rung, self.step_ns, saved, measured)
