"""Observe the training of a script that knows nothing of Backspot.

A global hook of PyTorch counts the optimizer steps, and calls the recorder at the end of each
iteration. Where no hook is called, as the step is compiled or the optimizer is not PyTorch's, the
first backward after an update ends an iteration. Where no update is seen either, or all optimizers
step inside the backward, each backward does. The models are found among the live objects.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from types import FrameType
from typing import Any

import torch

from backspot.interrupts import pass_on
from backspot.live import discovery
from backspot.live.acts import Rest
from backspot.live.host_marks import counts_calls
from backspot.live.recorder import Models, Recorded, Recorder, Schedule
from backspot.live.torch_internals import autograd
from backspot.live.torch_internals.dynamo import keep_from_dynamo, run_uncompiled
from backspot.live.torch_internals.engine import others_run_backward, outermost_call, watch_backward
from backspot.live.torch_internals.lookup import Turn
from backspot.live.torch_internals.process import hook_steps, outermost_step, step_around
from backspot.live.torch_internals.profiler import recording as is_recording
from backspot.live.torch_internals.references import TensorRef
from backspot.live.updates import Holder, Updates

_LONGEST_SEARCH_S = 5.0
"""What holds the parameters is found sooner, among millions of live objects."""


class Cycle:
    """Which optimizer's step ends an iteration.

    A GAN's optimizers take turns. When an optimizer steps that has stepped before another one, a
    new iteration has begun, and the optimizer before it ends iterations from then on.

    Optimizers of the same parameters count as one: a script may make a new one for each
    step.

    An optimizer that steps for long without another one has replaced the others, as after a head's
    warm-up. Long is twice its longest turn so far, within these limits.

    Attributes:
        replaced: whether the optimizer that stepped last, a new one, has replaced others with that
            step.
    """

    _PATIENCE = range(12, 64)

    def __init__(self) -> None:
        self._seen: list[Hashable] = []
        self._closing: Hashable = None
        self._last: Hashable = None
        self._turn = 0
        self._turns: dict[Hashable, int] = {}
        self.replaced = False

    def ends_with(self, optimizer: Hashable, alone: Callable[[], bool] = bool) -> bool:
        """Return whether an iteration ends with this step.

        Args:
            alone: whether no other optimizer is left, as each fold of a cross-validation has its
                own; asked when one steps for the first time.
        """
        if optimizer not in self._seen:
            self._seen.append(optimizer)
        elif optimizer != self._seen[-1]:
            self._closing = self._seen[-1]
            self._seen = [optimizer]
        if optimizer != self._last:
            if self._last is not None:
                self._turns[self._last] = max(self._turn, self._turns.get(self._last, 0))
            self._last, self._turn = optimizer, 0
        self._turn += 1
        is_first = optimizer not in self._turns  # of its turns
        ends = self._turn > self._patience(optimizer) or (is_first and self._turn == 1 and alone())
        others = (self._closing or optimizer, *self._seen) != (optimizer,) * 2
        self.replaced = ends and is_first and others
        if ends:
            self._closing, self._seen = None, [optimizer]
        return optimizer == self._closing if self._closing else len(self._seen) == 1

    def again(self) -> None:
        """Note one more step of the optimizer that stepped last, while ``is_of_one``."""
        self._turn += 1

    @property
    def is_of_one(self) -> bool:
        """Whether each step of the optimizer that stepped last ends an iteration."""
        return self._closing is None and len(self._seen) == 1

    def _patience(self, optimizer: Hashable) -> int:
        wanted = 2 * self._turns.get(optimizer, 0)
        return min(max(wanted, self._PATIENCE.start), self._PATIENCE.stop)


class _Stepped:
    """The optimizers that have taken a step, each in its thread.

    Attributes:
        threads: the threads that have taken one.
    """

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self._found: dict[tuple[int, int], weakref.ref[torch.optim.Optimizer]] = {}

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step that this thread has taken."""
        thread = threading.get_ident()
        self.threads.add(thread)
        self._found[thread, id(optimizer)] = weakref.ref(optimizer)

    def living(self, *, anywhere: bool = False) -> list[torch.optim.Optimizer]:
        """Return the optimizers that have taken a step in this thread, or in any."""
        thread_id = threading.get_ident()
        # The list of items is made at once, whatever other threads add.
        seen_optimizers = list(self._found.items())
        optimizers = [
            ref() for (thread, _), ref in seen_optimizers if anywhere or thread == thread_id
        ]
        return [optimizer for optimizer in optimizers if optimizer is not None]


class _FoundModels(Models):
    """The models of a script: what its optimizers update, their copies, and the loss modules.

    Where no optimizer tells what is trained, gradients do. While several threads train, no gradient
    is looked at: PyTorch gives up Python's lock in the middle of freeing one. There, a thread
    trains what it calls.

    Args:
        say: called with a sentence if no model is found because of ``gc.freeze``.
        looking: held while gradients are looked at.
        are_several: returns whether several threads train.
    """

    def __init__(
        self,
        optimizers: _Stepped,
        say: Callable[[str], None],
        looking: Turn,
        are_several: Callable[[], bool],
    ) -> None:
        super().__init__({})
        self._optimizers = optimizers
        self._say = say
        self._looking = looking
        self._are_several = are_several
        self._watch: discovery.CallWatch | None = None
        self._newest: weakref.WeakValueDictionary[str, torch.nn.Module] = (
            weakref.WeakValueDictionary()
        )

    def are_known(self) -> bool:
        """Return whether each optimizer has taken a step.

        A generator's may wait for several steps of its critic.
        """
        return not discovery.other_optimizers(self._optimizers.living(anywhere=True))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return those that have taken a step in this thread."""
        return self._optimizers.living()

    def trained(self) -> list[torch.nn.Module]:
        """Return the models that are trained, as far as steps or gradients tell."""
        return self._search()[1]

    def begin(self) -> None:
        """Watch which modules are called that no optimizer updates."""
        roots, trained = self._search()
        elsewhere = discovery.updated_by(self._optimizers.living(anywhere=True), roots)
        updated = {id(root) for root in (*trained, *elsewhere)}
        others = [root for root in roots if id(root) not in updated]
        by_calls = not trained and self._are_several()
        self._watch = discovery.CallWatch(others, trained, in_training=by_calls)

    def named(self) -> Mapping[str, torch.nn.Module]:
        """Return the models by the names of the variables that hold them."""
        _, trained = self._search()
        called = self._watch.end() if self._watch else []
        if not trained and self._watch and self._are_several():
            trained = [*self._watch.trained]  # before others were heard of
            trained = trained or [model for model in called if discovery.is_trainable(model)]
            called = [model for model in called if model not in trained]
        if not trained and gc.get_freeze_count():
            self._say(
                "no module is labelled: none was found, and gc.freeze() can hide them; call it "
                "after the report, or use backspot.instrument"
            )
        models = discovery.named(trained, called)
        self._newest.clear()
        self._newest.update(models)
        return models

    def newest(self) -> Mapping[str, torch.nn.Module]:
        """Return what ``named`` returned last, without a search; nothing before that."""
        return dict(self._newest)

    def _search(self) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
        """Return the outermost modules, and those of them that are known to be trained."""
        with self._looking:
            find = discovery.updated_by if self._are_several() else discovery.trained_by
            roots = discovery.outermost()
            trained = find(self._optimizers.living(), roots)
            if not trained and gc.get_freeze_count():
                roots = discovery.outermost(discovery.held_by_variables())
                trained = find(self._optimizers.living(), roots)
        return roots, trained

    def end(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.end()
        self._watch = None


class Observer:
    """Observes the training of this process and records some of its steps.

    Args:
        deliver: as in ``Recorder``.
        say: called with a sentence if something does not work.
        stepped: called with the number of each step, from 1, while steps are counted.
    """

    def __init__(
        self,
        schedule: Schedule,
        deliver: Callable[[Recorded], Rest | None],
        say: Callable[[str], None],
        stepped: Callable[[int], None],
    ) -> None:
        self._stepped = stepped
        self._optimizers = _Stepped()
        self._looking = Turn(_LONGEST_SEARCH_S)
        """Held while gradients are looked at: a backward, which writes them, begins later."""
        self._models = _FoundModels(self._optimizers, say, self._looking, self._are_several)
        self.recorder = Recorder(schedule, self._models, deliver, say, self._end_counting)
        self._cycles: defaultdict[int, Cycle] = defaultdict(Cycle)  # by thread
        # The first parameters of optimizers, by id, each with what no other one has.
        self._first: dict[int, tuple[TensorRef, object]] = {}
        self._steps_inside = False
        """Whether an optimizer has stepped inside a backward, and none outside."""
        self._steps_outside = False
        self._unhook: Callable[[], None] | None = None
        self._heard = _Stepped()
        """The optimizers whose hook was called."""
        # For updates that no hook tells of.
        self._updates: defaultdict[int, Updates] = defaultdict(Updates)  # by thread
        self._several = False
        """Whether several threads run backwards: then gradients can be written at any moment."""
        self._into_grad = False
        """Whether a backward has put gradients into ``.grad``."""
        self._unwatch: Callable[[], None] | None = None
        self._last: tuple[weakref.ref[torch.optim.Optimizer], int, Cycle] | None = None
        """The optimizer whose step ended an iteration, and will again, with its thread."""

    def begin(self) -> None:
        """Start counting. Not while an optimizer takes a step."""
        if self._unhook is None:
            self.recorder.watch()
            self._unhook = hook_steps(self._after_step)
            if self._unwatch is None and self._may_be_unheard():
                self._several |= others_run_backward()
                self._unwatch = watch_backward(self._before_backward, self._after_backward)

    def leave_copy(self) -> bool:
        """Remove all hooks, in a copy of the process; return whether the copy can be observed.

        Not if it was made while steps were recorded, as a profiler cannot be ended there, or while
        a report was made.
        """
        self._end_counting()
        return self.recorder.leave_copy()

    def request(self, frame: FrameType | None) -> None:
        """Make a report as soon as possible; for a signal's handler."""
        if self.recorder.is_child:
            return
        self.recorder.request()
        if self._unhook is None:
            outermost = outermost_step(frame)
            # PyTorch may be iterating over the hooks.
            after_return(outermost, self.begin) if outermost else self.begin()

    def _end_counting(self) -> None:
        self._end_watching()
        if self._unhook is not None:
            self._unhook()
            self._unhook = None

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        recorder = self.recorder
        if recorder.is_child:
            return
        try:
            if self._is_again(optimizer):
                self._count()
                return
            self._last = None
            self._optimizers.add(optimizer)
            self._heard.add(optimizer)
            if autograd.in_backward():
                # A profiler that starts or stops there crashes. The end of the backward is the end
                # of the step, unless another optimizer steps later.
                self._steps_inside = not self._steps_outside
                return
            self._hear(optimizer)
            frame = step_around(sys._getframe())
            if frame is None or outermost_step(frame) is not frame:
                return  # a part of another optimizer's step, as in SAM
            ends = self._ends_with(self._updated_by(optimizer))
            cycle = self._cycles[threading.get_ident()]
            if ends and cycle.is_of_one and self._unwatch is None:
                self._last = weakref.ref(optimizer), threading.get_ident(), cycle
            # PyTorch is iterating over the hooks: nothing can be registered here.
            if ends and self._count() and not after_return(frame, recorder.advance):
                recorder.complain("a Python profiler is running, so no step is recorded")
        except Exception as error:
            pass_on(error)
            recorder.give_up(error)

    def _is_again(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the only optimizer has stepped as before, and no step is to be recorded.

        So it is for most steps of a training, which need no further look.
        """
        if self._last is None or not self.recorder.is_idle:
            return False
        last, thread, cycle = self._last
        log = self.recorder.log
        is_again = (
            last() is optimizer
            and thread == threading.get_ident()
            and self._unwatch is None
            and not autograd.in_backward()
            and log.is_on  # else it is unknown whether another optimizer is at work
            and not log.is_in_optimizer
        )
        if is_again:
            cycle.again()
        return is_again

    def _updated_by(self, optimizer: torch.optim.Optimizer) -> Hashable:
        """Return what tells apart the parameters that optimizers update, without a look at each."""
        groups = [group["params"] for group in optimizer.param_groups if group["params"]]
        if not groups:
            return id(optimizer)
        first = groups[0][0]
        entry = self._first.get(id(first))
        if entry is None or entry[0]() is not first:  # another one had this id before
            entry = self._first[id(first)] = TensorRef(first), object()
        return entry[1], *((id(group[0]), id(group[-1]), len(group)) for group in groups)

    @property
    def models(self) -> Mapping[str, torch.nn.Module]:
        """The models by name, as far as they were recorded."""
        return self._models.newest()

    @property
    def step(self) -> int | None:
        """The number of the step that runs, from 1; ``None`` where steps are not counted."""
        return None if self._unhook is None else self.recorder.steps + 1

    # Updates that no hook tells of ---------------------------------------------------------------

    @property
    def saw_backwards(self) -> bool:
        """Whether autograd ran a backward."""
        return bool(self._updates)

    @property
    def _updates_here(self) -> Updates:
        return self._updates[threading.get_ident()]

    def _hear(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer's hook is called outside of a backward."""
        if self._steps_outside and self._unwatch is None:
            return
        with nullcontext() if self._several else self._looking:
            if not self._steps_outside:
                self._steps_inside, self._steps_outside = False, True
                updates = self._updates_here
                if not self._are_several():
                    with self.recorder.own_work():
                        updates.found(self._unheard())
            key = self._updated_by(optimizer)
            for updates in [*self._updates.values()]:
                updates.holders = [holder for holder in updates.holders if holder.key != key]
            if not self._may_be_unheard():
                self._end_watching()

    def _are_several(self) -> bool:
        """Whether several threads train, as far as they were heard of."""
        if not self._several and max(len(self._updates), len(self._optimizers.threads)) > 1:
            self._several = True
            for thread_updates in [*self._updates.values()]:
                thread_updates.holders = []
        return self._several

    def _may_be_unheard(self) -> bool:
        """Whether there may be updates that no hook tells of."""
        waiting = any(updates.holders for updates in [*self._updates.values()])
        return waiting or not self._steps_outside

    def _end_watching(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def _unheard(self) -> list[Holder]:
        """Return the optimizers whose hook was not called so far."""
        return [
            Holder(
                self._updated_by(optimizer),
                optimizer,
                (parameter for group in optimizer.param_groups for parameter in group["params"]),
                by_gradients=False,
            )
            for optimizer in discovery.other_optimizers(self._heard.living(anywhere=True))
        ]

    def _holders(self, updates: Updates) -> list[Holder]:
        """Return what may hold the parameters that this thread trains."""
        holders_found = self._unheard()
        if not self._steps_outside and (not holders_found or updates.no_optimizer_steps):
            holders_found += [
                Holder(id(model), model, model.parameters(), by_gradients=True)
                for model in self._models.trained()
            ]
        return holders_found

    def _before_backward(self, _: bool) -> None:
        if self._several or self.recorder.is_child:
            return
        try:
            with self._looking:
                updates = self._updates_here
                if not self._are_several():
                    updates.begin_backward()
        except Exception as error:
            pass_on(error)
            self.recorder.give_up(error)

    def _after_backward(self, into_grad: bool) -> None:
        recorder = self.recorder
        if recorder.is_child or self._unhook is None:
            return
        try:
            with nullcontext() if self._several else self._looking:
                ends = self._ends_with_backward(into_grad)
            if not (ends and self._count()):
                return
        except Exception as error:
            pass_on(error)
            recorder.give_up(error)
            return
        # ``__torch_function__`` and the transforms of ``torch.func`` are at work here.
        call = outermost_call(sys._getframe())
        if call is None or not after_return(call, recorder.advance):
            recorder.advance()

    def _ends_with_backward(self, into_grad: bool) -> bool:
        """Return whether an iteration ends with this backward."""
        if self._steps_inside:
            return into_grad
        updates, several = self._updates_here, self._are_several()
        recorder, updated = self.recorder, updates.count_backward()
        if several:
            if self._steps_outside or (recorder.steps == 0 and self._may_step(updates)):
                return False
        else:
            updates.note()
            ends = [self._ends_with_update(holder) for holder in updated]
            if updates.may_be_others and not self._steps_outside:
                holders_known = updates.holders
                with recorder.own_work():
                    holders = self._holders(updates)
                    updates.found(holders)
                # A model without an optimizer is updated after this backward, too.
                if not holders_known and any(
                    isinstance(holder.owner(), torch.nn.Module) for holder in holders
                ):
                    ends.append(True)
            if updates.holders or self._steps_outside:
                recorder.by_backwards = False
                return any(ends)
        # Nothing is known of updates: each backward is a step, but for the gradients that a loss
        # is made of.
        recorder.by_backwards = True
        self._into_grad |= into_grad
        return into_grad or not self._into_grad

    def _may_step(self, updates: Updates) -> bool:
        """Whether an optimizer may take its first step yet; to search for one takes long."""
        heard = self._heard.living(anywhere=True)
        return not updates.may_be_others or bool(discovery.other_optimizers(heard))

    def _ends_with_update(self, holder: Holder) -> bool:
        """Return whether an iteration ended with an update before this backward."""
        owner = holder.owner()
        if owner is None or outermost_step(sys._getframe()):
            return False  # a closure's backward, as LBFGS calls it
        if not isinstance(owner, torch.optim.Optimizer):
            return self._ends_with(holder.key, lambda: len(self._updates_here.holders) == 1)
        if holder.updates == 1:  # the weights may have been loaded
            return False
        self._optimizers.add(owner)
        return self._ends_with(holder.key)

    def _ends_with(self, key: Hashable, alone: Callable[[], bool] | None = None) -> bool:
        cycle = self._cycles[threading.get_ident()]
        ends = cycle.ends_with(key, alone or (lambda: len(self._optimizers.living()) == 1))
        if cycle.replaced:
            self.recorder.renew()
        return ends

    def _count(self) -> bool:
        wanted = self.recorder.count()
        self._stepped(self.recorder.steps)
        return wanted


def after_return(frame: FrameType, action: Callable[[], None]) -> bool:
    """Call a function when a running frame returns.

    While stacks are recorded or calls counted, Python's profiling function is not free.

    Returns:
        Whether that is possible: not while the script's own profiler and debugger are in use.
    """
    watch: Callable[[Any], None]
    if sys.getprofile() is None:
        watch = sys.setprofile
    elif (is_recording() or counts_calls()) and sys.gettrace() is None:
        watch = sys.settrace
    else:
        return False

    def on_event(current: FrameType, event: str, _: object) -> Any:
        if event == "return" and current is frame:
            watch(None)
            # As code outside of this function runs: within it Python traces nothing, and for
            # PyTorch compiles nothing (from Python 3.12 on), not even what asks for it.
            sys.call_tracing(run_uncompiled, (action,))
        return None

    keep_from_dynamo(on_event)  # where the frame that returns is within compiled code
    if watch is sys.settrace:
        frame.f_trace, frame.f_trace_lines = on_event, False
    watch(on_event)
    return True
