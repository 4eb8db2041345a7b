"""Single settings first, then the best ones together, each in turns with the best so far."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from backspot.formatting import duration, size
from backspot.interrupts import pass_on
from backspot.live.plan.account import Account, Step, Times
from backspot.live.plan.again import lost_before
from backspot.live.plan.comparing import (
    LEAST_ROUNDS,
    Results,
    host_limits,
    in_turns,
    loss_of,
    memory_of,
    times_of,
    with_copy,
    with_unknown_loss,
)
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

_TOO_LONG = 2.5
"""A copy that takes so many times the step does not run what the step runs."""
_MORE_KEPT, _KEEPING = 10, ("checkpoint", "attention")
"""How many times as much a model may keep without its checkpoints, or with another attention. That
is not known before it runs: a block of a transformer keeps some ten times its input."""
_RUNS = 2 * (LEAST_ROUNDS + 1)
"""How many runs of copies one comparison takes at least: those of six rounds, and the first."""
_ON_GPU, _HOST_LIMITS = 2.5, 4.5
"""How many times as long times take on a GPU, apart: two runs, and a sleep before the second; two
more where the host takes the longer time."""
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
_TWICE, _WITH_LOSS = 1.5, 2.5
"""How many times as long as another comparison that of twice the batch takes, without what the loss
takes and with it."""
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
        as_it_is: what the step as it is needs; ``None`` until that is known.
        compiling_s: how long compiling took.
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
        self.batch = 0
        self.as_it_is: Step | None = None
        self.compiling_s = 0.0
        self._ladder: list[Rung] = []
        self._tried: dict[Setting, Rung] = {}
        self._not_tried: dict[Setting, str] = {}
        self._alone: dict[Setting, Step] = {}  # what a step needs with it
        self._of_batch = Rung("batch", "batch", note=NO_TIME)
        self._kept_s = self._needs_s = 0.0  # for compiling, and what a comparison needs

    def rungs(self) -> list[Rung]:
        """Return the ladder, then what else was tried, then what was not, with the reason."""
        names = {setting.name for setting in self._watched_ladder()}
        others = [rung for setting, rung in self._tried.items() if setting.name not in names]
        missing = [
            Rung(setting.name, setting.axis, code=setting.code, note=because)
            for setting, because in self._not_tried.items()
            if setting not in self._tried
        ]
        return [*self._ladder, *others, *missing, self._of_batch]

    def _watched_ladder(self) -> list[Setting]:
        taken_settings = {rung.setting for rung in self._ladder}
        return [setting for setting in self._tried if setting.name in taken_settings]

    def go(self, give_back: Callable[[], None]) -> None:
        """Try everything.

        Args:
            give_back: gives back the memory that no copy holds.

        Raises:
            Refused: If a copy cannot be trusted.
        """
        self._give_back = give_back
        self._best = base = Copy(self._watched)
        names = names_of_checkpoint()
        talks = Refused("the model talks to other ranks, which do not run its copy")
        alone = NoCollectives(talks) if rank_and_ranks()[1] > 1 else nullcontext()
        with counted_checkpoints(names) as calls, alone:
            base.check()
            base.run_all()
        self._watched.checkpoints = names if calls else ()
        settings = settings_of(self._watched, base.device)
        self._not_tried = {setting: setting.why_not or NO_TIME for setting in settings}
        self._lost = lost_before(self._earlier, settings)
        begin = time.perf_counter_ns()
        self._results = Results(base)
        self._best_memory = memory_of(base)
        needs = self._needed(base, begin)
        if needs.whole > _TOO_LONG * (step := self._account.step):
            takes = f"takes {duration(needs.whole)}, and the whole step {duration(step)}"
            raise Refused(f"forward and backward of a copy {takes}")
        runs = 1.0 if not needs.device else _HOST_LIMITS if host_limits(needs) else _ON_GPU
        self._needs_s = _RUNS * runs * needs.whole / 1e9
        self.as_it_is = self._step = self._account.needs(needs, self._watched.has_loss)
        worth = [setting for setting in settings if not setting.why_not]
        cheap = [setting for setting in worth if not setting.compiles]
        self._kept_s = _FOR_COMPILING * self._left_s if len(cheap) < len(worth) else 0.0
        singles = [setting for setting in cheap if self._try(setting, alone=True)]
        for setting in sorted(singles, key=lambda setting: -self._tried[setting].saves_ns):
            self._climb(setting)
        self._try_backends()
        self._try_batch()
        self._kept_s = 0.0
        for setting in worth:
            if setting.compiles:
                self._try(setting)

    def close(self) -> None:
        """Let go of the copies."""
        vars(self).pop("_best", None)
        vars(self).pop("_results", None)
        gc.collect()

    def _needed(self, base: Copy, begin: int) -> Times:
        """Return what a step's calls need, by a few runs within a second."""
        times: list[Times] = []
        while len(times) < 3 or (time.perf_counter_ns() - begin < 10**9 and len(times) < 9):
            times.append(times_of(base))
        return Times(*map(statistics.median, zip(*times[1:], strict=True)))

    def _try_backends(self) -> None:
        """Try other kernels of attention, once it is known what attention gets."""
        try:
            backends = backends_of(self._best.run_all, self._best.device)
        except Exception as error:
            pass_on(error)
            return
        self._not_tried |= {backend: backend.why_not or NO_TIME for backend in backends}
        for backend in backends:
            if not backend.why_not:
                self._try(backend)

    def _climb(self, setting: Setting) -> None:
        """Try a setting on top of the best so far, where that may help."""
        single = self._tried[setting]
        axes = {rung.axis for rung in self._ladder}
        hopeless = single.saves_ns < -_HOPELESS * self._account.step
        if setting.axis in axes or hopeless or (not self._ladder and single.verdict != "helps"):
            return
        if not self._try(setting) and single.verdict == "helps":
            why_not = self._not_tried[setting]
            if not self._ladder and why_not == NO_TIME and self._take(setting):
                return
            notes = filter(None, [single.note, f"no part of the ladder: {why_not}"])
            self._tried[setting] = replace(single, note="; ".join(notes))

    def _take(self, setting: Setting) -> bool:
        """Make a setting the first rung by what it gave alone, where no time is left for more."""
        new: Copy | None = None
        failed = True
        try:
            if time.monotonic() + self._needs_s / _RUNS > self._until:
                raise Refused(NO_TIME)
            self._check_memory(1)
            new = Copy(self._watched, [*self._best.settings, setting])
            new.run_all()
        except Exception as error:
            pass_on(error)
        else:
            failed = False
            rung = self._tried[setting]
            self._ladder.append(replace(rung, kept=True))
            self._step, self._best = self._alone[setting], new
            self._best_memory = rung.memory_bytes
        finally:
            del new
            self._let_go(failed)
        return not failed

    def _try(self, setting: Setting, *, alone: bool = False) -> bool:
        """Try a setting on top of the best so far, and keep it there if it helps.

        Args:
            alone: only to know what it gives, before the best ones are put together.
        """
        on = frozenset(rung.setting for rung in self._ladder)
        if (lost := self._lost.get((setting.name, on))) is not None:
            self._tried[setting] = lost
            return True
        new: Copy | None = None
        failed = True
        try:
            left = self._left_s
            if left < self._needs_s:
                raise Refused(NO_TIME)
            settings = [chosen for chosen in self._best.settings if chosen.name != setting.replaces]
            settings.append(setting)
            if setting.compiles:
                left -= _RESERVED * self._needs_s
                if left < max(self._needs_s, self._compiles_s(setting)):
                    raise Refused(NO_TIME)
                before, begin = compilations(), time.monotonic()
                try:
                    with ended_after(left):
                        new = Copy(self._watched, settings)
                        new.run_all()
                finally:
                    self.compiling_s += time.monotonic() - begin
                if compilations() == before:
                    raise Refused("PyTorch compiled nothing of it here")
            else:
                self._check_memory(_MORE_KEPT if setting.axis in _KEEPING else 1)
                new = Copy(self._watched, settings)
                new.run_all()
            rung, step, memory = self._compared(setting, new)
        except TimeUp:
            self._not_tried[setting] = f"compiling takes more than the {left:.0f} s that were left"
        except Exception as error:
            pass_on(error)
            self._not_tried[setting] = why(error)
        else:
            failed = False
            self._tried[setting] = rung
            if alone:
                self._alone[setting] = step
            if rung.verdict == "helps" and not alone:
                self._ladder.append(replace(rung, kept=True))
                self._step, self._best, self._best_memory = step, new, memory
            return True
        finally:
            del new
            self._let_go(failed)
        return False

    def _let_go(self, failed: bool) -> None:
        """Free a copy that nothing refers to; after a failure its memory goes back, too."""
        gc.collect()
        if failed:
            self._give_back()

    def _compiles_s(self, setting: Setting) -> float:
        """Return how many seconds compiling may take, as the setting before it took.

        Raises:
            Refused: If that does not help, or was not tried.
        """
        if not setting.replaces:
            return 0.0
        before = [rung for rung in self._ladder if rung.setting == setting.replaces]
        if not before:
            raise Refused(f"{setting.replaces} is no part of the plan")
        return _AUTOTUNING * before[0].compile_ns / 1e9

    def _compared(self, setting: Setting, new: Copy) -> tuple[Rung, Step, int]:
        """Return the rung of a setting, its step, and the memory of a copy that has it."""
        first = new.first_ns
        again = min(times_of(new).whole for _ in range(2))
        difference: Difference | None = self._results.difference(new)
        note = setting.note
        if self._results.draws and setting.compiles:  # it draws other numbers
            difference, note = None, "compiled code draws other random numbers"
        memory = memory_of(new)
        rung = Rung(
            setting.name,
            setting.axis,
            tuple(rung.setting for rung in self._ladder),
            setting.code,
            memory_bytes=memory,
            before_memory_bytes=self._best_memory,
            compile_ns=max(0, round(first - again)) if setting.compiles else 0,
            difference=difference,
            note=note,
        )
        turns = in_turns(self._best, new, self._step.ns, self._seconds())
        rung, step = with_copy(rung, self._step, turns)
        loss, has_loss = self._account.loss, self._watched.has_loss
        if rung.axis == "precision" and not has_loss and loss >= _LOSS * rung.before_ns:
            why_not = self._watched.why_no_loss or "no backward of it was seen"
            rung = with_unknown_loss(rung, loss, why_not)
        return rung, step, memory

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

    def _seconds(self, times: float = 1.0) -> float:
        """Return how long a comparison may take: an even share of what is left, or what it needs.

        Args:
            times: how many times as long it takes as one of copies that take as long as the first.

        Raises:
            Refused: If that is not left.
        """
        left = self._left_s
        waiting = {setting for setting, because in self._not_tried.items() if because == NO_TIME}
        pending = len(waiting - self._tried.keys())
        needs = times * self._needs_s
        if needs > left:
            raise Refused(NO_TIME)
        return min(max(left / (2 * max(1, pending)), needs), max(_LONGEST_S, needs), left)

    def _try_batch(self) -> None:
        """Try twice the batch, for as many samples as a step has now, before all is compiled."""
        rung = Rung("batch", "batch", tuple(rung.setting for rung in self._ladder), note=NO_TIME)
        has_loss = self._watched.has_loss
        twice: Copy | None = None
        try:
            sizes = {batch_of(call): call.count for call in self._watched.calls}
            if len(sizes) != 1:
                raise Refused("the models are called with several sizes of batches")
            batch, calls = sizes.popitem()
            if self._of_loader not in (0, batch) or self._second_is_batch():
                raise Refused("the first dimension of the inputs is not the batch's")
            self.batch = batch * calls
            rung = replace(rung, setting=f"batch {2 * batch:,}", code=f"batch_size={2 * batch}")
            loss: Times | None = None
            if has_loss and self._ladder:
                self._seconds(_WITH_LOSS)
                loss = loss_of(self._best, self._step)
            seconds = self._seconds(_TWICE)
            self._check_memory(2)
            self._watched.has_loss = False  # its target has the batch that a step has
            twice = Copy(self._watched, self._best.settings, times=2)
            twice.run_all()
            memory = memory_of(twice)
            turns = in_turns(self._best, twice, self._step.ns, seconds)
            more = self._account.more(self._best.device.type != "cpu", loss)
            doubled, _ = with_copy(rung, self._step, turns, more, steps=2)
            self._of_batch = replace(
                doubled,
                memory_bytes=memory,
                before_memory_bytes=self._best_memory,
                note="for as many samples as a step has now",
            )
        except Exception as error:
            pass_on(error)
            self._of_batch = replace(rung, note=why(error))
        finally:
            del twice
            self._watched.has_loss = has_loss
            self._let_go(not self._of_batch.step_ns)

    def _second_is_batch(self) -> bool:
        """Whether a part takes batches whose second dimension is that of the samples."""
        modules = (module for copy in self._watched.copies.values() for module in copy.modules())
        return any(getattr(module, "batch_first", True) is False for module in modules)
