"""Copies of models that run the calls of a step again, and whether such a copy can be trusted."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import torch

from backspot.formatting import percent
from backspot.interrupts import pass_on
from backspot.live.free_memory import resident
from backspot.live.plan.room import sample_of
from backspot.live.plan.settings import Setting
from backspot.live.plan.watching import (
    Call,
    Kept,
    Watching,
    copied_input,
    objects_in,
    outputs_of,
    reached_from,
    set_random_states,
)
from backspot.live.torch_internals.process import tree_map
from backspot.live.trials.chains import tensors_of
from backspot.live.trials.measuring import reason
from backspot.live.trials.twins import Refused, copied, numbers_like

_FAR = 0.02
"""A copy whose outputs differ by more than this share of their size is another model."""
NO_TIME = "no time was left"
_SCALE = 1024.0
"""A power of two, which changes no digit; as a ``GradScaler`` has after some steps."""
_AS_GOOD_AS_ZERO = 1e-3
"""Gradients so much smaller than the largest are, to float32's digits, what rounding leaves."""


class Copy:
    """Copies of the models, with settings, that run forward and backward of the watched calls.

    Attributes:
        modules: the copies by number, without what compiles them.
        settings: what is set, in the order in which that is made.
        first_ns: how long the first run of all calls took.
    """

    def __init__(
        self, watched: Watching, settings: Sequence[Setting] = (), *, times: int = 1
    ) -> None:
        """Copy the models and make the settings.

        Args:
            times: how many times the batch; 1 or 2.
        """
        self.settings = sorted(settings, key=lambda one: one.order)
        self.watched = watched
        self.modules = copy.deepcopy(watched.copies)
        self._called: dict[int, Any] = dict(self.modules)
        for one in self.settings:
            self._called = {number: one.change(each) for number, each in self._called.items()}
        found = self._attributes() if watched.kept else {}
        self._state = [(*found[key], contents_of(found[key][-1])) for key in watched.kept]
        self._before = [one.detach().clone() for one in self._held()]
        self._given = {call: copied_input((call.args, call.kwargs)) for call in watched.calls}
        self._seeds = {call: dict(call.gradients) for call in watched.calls}
        if times > 1:
            for call in watched.calls:
                batch = batch_of(call)
                more = partial(_repeated, batch=batch)
                self._given[call] = copied(self._given[call], more)
                self._seeds[call] = {place: more(one) for place, one in self._seeds[call].items()}
        self.first_ns = 0
        self._scaler: Any = None
        if any(one.dtype == torch.float16 for one in self.settings):
            self._scaler = torch.amp.GradScaler(self.device.type, init_scale=_SCALE)
            self._scaled = torch.optim.SGD(self.parameters(), lr=0.0)

    @cached_property
    def device(self) -> torch.device:
        """Where the first parameter is, or else the first tensor that a call is given."""
        held = [*self.parameters(), *tensors_of([*self._given.values()])]
        return held[0].device if held else torch.device("cpu")

    def parameters(self) -> list[torch.Tensor]:
        """All parameters of the copies, in an order that all copies have."""
        return [p for module in self.modules.values() for p in module.parameters()]

    def _held(self) -> list[torch.Tensor]:
        return [one for module in self.modules.values() for one in module.buffers()]

    def _attributes(self) -> dict[Kept, tuple[dict[str, Any], str, Any]]:
        """Return what modules have beside parameters, buffers, parts and hooks."""
        return {
            (number, place, name): (vars(part), name, value)
            for number, module in self.modules.items()
            for place, part in enumerate(module.modules())
            for name, value in vars(part).items()
            if name not in _OF_ALL_MODULES
        }

    def reset(self) -> None:
        """Put the buffers back, and have random generators draw what they drew in the step."""
        with torch.no_grad():
            for one, was in zip(self._held(), self._before, strict=True):
                one.copy_(was)
        set_random_states(self.watched.calls[0].random)

    def run_all(self) -> None:
        """Run each watched call once, forward and backward."""
        begin = time.perf_counter_ns()
        for call in self.watched.calls:
            self.run(call)
        self.wait()
        self.first_ns = self.first_ns or time.perf_counter_ns() - begin

    def wait(self) -> None:
        """Have the GPU end all that was issued; nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forget_gradients(self) -> None:
        """Have no gradients, as at the beginning of a step."""
        for one in self.parameters():
            one.grad = None

    def run(
        self, call: Call, *, backward: bool = True, seen: dict[int, torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Run a call forward and backward, with the loss that follows it where that runs again.

        Args:
            seen: takes the gradients of the outputs, by place. Without it a run holds what the step
                held, and lets go of the other outputs.

        Returns:
            The tensors in its output, and the loss.
        """
        if time.monotonic() > self.watched.until:
            raise Refused(NO_TIME)
        args, kwargs = self._given[call]
        leaves = [one for one in tensors_of((args, kwargs)) if one.requires_grad]
        for leaf in leaves:
            leaf.grad = None
        self.forget_gradients()
        for home, name, value, contents in self._state:
            home[name] = value
            if contents is not None:
                put_back(value, contents)
        kind, on, dtype = call.autocast
        with ExitStack() as around:
            for one in self.settings:
                around.enter_context(one.around())
                if one.dtype is not None:
                    on, dtype = True, one.dtype
            with (
                torch.set_grad_enabled(call.grad),
                torch.autocast(kind, enabled=on, dtype=dtype),
            ):
                args, kwargs = tree_map(self._fed, (args, kwargs))
                outputs = outputs_of(self._called[call.module](*args, **kwargs))
            if seen is not None:
                for place, one in enumerate(outputs):
                    if one.requires_grad and not one.is_leaf:
                        one.register_hook(partial(seen.__setitem__, place))
            if backward and call.loss is not None and self.watched.has_loss:
                everywhere = (kind, on, dtype) if (on, dtype) != call.autocast[1:] else None
                resided = resident()
                held = outputs if seen is None else [*outputs]
                loss, rest = call.loss.run(held, self.modules, everywhere)
                if seen is not None:
                    self.watched.keeps += max(0, resident() - resided)
                self._end_at([loss], [call.loss.gradient])
                del rest
                outputs.append(loss)
            elif backward:
                self._backward(call, outputs)
        return outputs

    def _fed(self, one: Any) -> Any:
        """Return a tensor as a step has it: no leaf, and in the memory format that is set."""
        if not isinstance(one, torch.Tensor):
            return one
        for setting in self.settings:
            if one.dim() == setting.dims:
                one = one.contiguous(memory_format=setting.memory_format)
        return one.view_as(one) if one.requires_grad else one

    def _backward(self, call: Call, outputs: list[torch.Tensor]) -> None:
        if not call.ends:
            return
        if max(call.ends) >= len(outputs):
            raise Refused("the outputs of a copy are others than the model's")
        seeds = self._seeds[call]
        ends = [outputs[place] for place in call.ends]
        for place, end in zip(call.ends, ends, strict=True):
            if place not in seeds:
                seeds[place] = numbers_like(end)
        self._end_at(ends, [seeds[place] for place in call.ends])

    def _end_at(
        self, ends: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Run a backward from some tensors."""
        got = [
            torch.ones_like(end) if one is None else one.to(end.dtype)
            for end, one in zip(ends, gradients, strict=True)
        ]
        torch.autograd.backward(ends, got if self._scaler is None else self._scaler.scale(got))
        if self._scaler is not None:
            self._scaler.unscale_(self._scaled)
            self._scaler.update()

    def check(self) -> None:
        """Run each call once, and compare with the step what that gives.

        Raises:
            Refused: If the copy is not like the model: it reaches the parameters of the training,
                trains others than the step does, gives other outputs, or is on several devices.
        """
        own = {id(one) for one in self.parameters()}
        devices = sorted({str(one.device) for one in self.parameters()})
        if len(devices) > 1:  # each would be timed as if it waited for no other
            raise Refused(f"the model is on several devices: {', '.join(devices)}")
        known = set[int]()
        self.reset()
        before = {key: one[-1] for key, one in self._attributes().items()}
        contents = {key: contents_of(one) for key, one in before.items()}
        for call in self.watched.calls:
            module, first = self.modules[call.module], call.module not in known
            known.add(call.module)
            set_random_states(call.random)
            resided = resident()
            outputs = self.run(call, backward=False)
            self.watched.keeps = max(self.watched.keeps, resident() - resided)
            given = {id(one) for one in tensors_of(self._given[call])}
            found = reached_from(outputs)
            if not (own | given).issuperset(map(id, found)):
                raise Refused("a copy of the model trains the model itself")
            names = {id(one): name for name, one in module.named_parameters()}
            reached = {names[id(one)] for one in found if id(one) in names}
            if reached != call.reached:
                other = min(reached ^ call.reached)
                raise Refused(f"a copy of the model trains other parameters, such as {other}")
            if [one.shape for one in outputs] != call.sizes:
                raise Refused("a copy of the model has outputs of other sizes")
            if not first:  # the optimizer may have taken a step since
                continue
            for mine, real in zip(outputs, call.samples, strict=True):
                far = relative([sample_of(mine)], [real])
                if not far < _FAR:
                    raise Refused(f"the outputs of a copy differ by {percent(far)}")
            self._check_objects(call)
        after = self._attributes()
        self.watched.kept = frozenset(
            key
            for key, value in before.items()
            if key not in after
            or after[key][-1] is not value
            or _ids(contents_of(value)) != _ids(contents[key])
        )
        self._state = [
            (*after[key][:2], before[key], contents[key])
            for key in self.watched.kept
            if key in after
        ]
        try:
            self._check_losses()
        except Exception as error:
            pass_on(error)
            self.watched.why_no_loss = str(error) if isinstance(error, Refused) else reason(error)
        self.watched.has_loss = self.watched.has_loss and not self.watched.why_no_loss

    def _check_losses(self) -> None:
        """Refuse to run losses again where one, or a gradient from it, is other than the step's."""
        self.reset()
        for call in self.watched.calls:
            if call.loss is None or not self.watched.has_loss:
                continue
            seen: dict[int, torch.Tensor] = {}
            set_random_states(call.random)
            *_, loss = self.run(call, seen=seen)
            if sorted(seen) != call.ends:
                raise Refused("other outputs get gradients from it when it runs again")
            real = [
                call.seeded[one] if one in call.seeded else sample_of(call.gradients[one])
                for one in call.ends
            ]
            far = relative([sample_of(seen[one]) for one in call.ends], real)
            if not max(far, relative([sample_of(loss)], [call.loss.sample])) < _FAR:
                raise Refused("it gives another loss, or other gradients, when it runs again")

    def _check_objects(self, call: Call) -> None:
        """Refuse a call that writes to an object that it is given: the next run would find that."""
        pairs = zip(
            objects_in(self._given[call]), objects_in((call.args, call.kwargs)), strict=True
        )
        for mine, given in pairs:
            held, was = outputs_of(mine), outputs_of(given)
            if len(held) != len(was) or not all(map(torch.equal, held, was)):
                raise Refused(f"the model writes to the {type(given).__name__} that it is given")


_OF_ALL_MODULES = {*vars(torch.nn.Module())} - {"training"}


def contents_of(value: Any) -> Any:
    """Return what a list, a dictionary, a set or a queue has; ``None`` of anything else."""
    return copy.copy(value) if isinstance(value, (list, dict, set, deque)) else None


def put_back(value: Any, contents: Any) -> None:
    """Have a list, a dictionary, a set or a queue hold what it held."""
    value.clear()
    (value.update if isinstance(value, (dict, set)) else value.extend)(contents)


def _ids(contents: Any) -> list[int] | None:
    values = contents.values() if isinstance(contents, dict) else contents
    return None if values is None else [id(one) for one in values]


def relative(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Return the largest ``|a - b| / |b|`` of pairs of tensors, in norms.

    What is as good as zero, as the gradient of a bias before a norm, counts as a share of the
    largest: its own digits are noise.
    """
    pairs = [(a, b) for a, b in zip(ones, others, strict=True) if b.is_floating_point()]
    if not pairs:
        return 0.0
    sizes = torch.stack([b.detach().double().norm().cpu() for _, b in pairs])
    apart = [(a.detach().double() - b.detach().double()).norm().cpu() for a, b in pairs]
    least = float(sizes.max()) * _AS_GOOD_AS_ZERO + 1e-30
    return float((torch.stack(apart) / sizes.clamp_min(least)).max())


def batch_of(call: Call) -> int:
    """Return the size of the first dimension that all inputs and gradients have.

    Raises:
        Refused: If they do not have the same.
    """
    given = [one for one in tensors_of((call.args, call.kwargs)) if one.dim()]
    got = [one for one in call.gradients.values() if one.dim()]
    sizes = {len(one) for one in (*given, *got)}
    if len(sizes) != 1 or call.seeded:
        raise Refused("the inputs of the model have no first dimension in common")
    return sizes.pop()


def _repeated(one: torch.Tensor, batch: int) -> torch.Tensor:
    repeats = one.dim() and len(one) == batch
    twice = torch.cat([one.detach(), one.detach()]) if repeats else one.detach().clone()
    return twice.requires_grad_(one.requires_grad)
