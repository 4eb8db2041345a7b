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
        self.settings = sorted(settings, key=lambda setting: setting.order)
        self.watched = watched
        self.modules = copy.deepcopy(watched.copies)
        self._called: dict[int, Any] = dict(self.modules)
        for setting in self.settings:
            self._called = {
                number: setting.change(tensor) for number, tensor in self._called.items()
            }
        attributes = self._attributes() if watched.kept else {}
        self._state = [(*attributes[key], contents_of(attributes[key][-1])) for key in watched.kept]
        self._before = [buffer.detach().clone() for buffer in self._held()]
        self._given = {call: copied_input((call.args, call.kwargs)) for call in watched.calls}
        self._seeds = {call: dict(call.gradients) for call in watched.calls}
        if times > 1:
            for call in watched.calls:
                batch = batch_of(call)
                more = partial(_repeated, batch=batch)
                self._given[call] = copied(self._given[call], more)
                self._seeds[call] = {place: more(seed) for place, seed in self._seeds[call].items()}
        self.first_ns = 0
        self._scaler: Any = None
        if any(setting.dtype == torch.float16 for setting in self.settings):
            self._scaler = torch.amp.GradScaler(self.device.type, init_scale=_SCALE)
            self._scaled = torch.optim.SGD(self.parameters(), lr=0.0)

    @cached_property
    def device(self) -> torch.device:
        """Where the first parameter is, or else the first tensor that a call is given."""
        tensors = [*self.parameters(), *tensors_of([*self._given.values()])]
        return tensors[0].device if tensors else torch.device("cpu")

    def parameters(self) -> list[torch.Tensor]:
        """All parameters of the copies, in an order that all copies have."""
        return [p for module in self.modules.values() for p in module.parameters()]

    def _held(self) -> list[torch.Tensor]:
        return [buffer for module in self.modules.values() for buffer in module.buffers()]

    def _attributes(self) -> dict[Kept, tuple[dict[str, Any], str, Any]]:
        """Return what modules have beside parameters, buffers, parts and hooks."""
        return {
            (number, place, name): (vars(submodule), name, value)
            for number, module in self.modules.items()
            for place, submodule in enumerate(module.modules())
            for name, value in vars(submodule).items()
            if name not in _OF_ALL_MODULES
        }

    def reset(self) -> None:
        """Put the buffers back, and have random generators draw what they drew in the step."""
        with torch.no_grad():
            for buffer, saved in zip(self._held(), self._before, strict=True):
                buffer.copy_(saved)
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
        for parameter in self.parameters():
            parameter.grad = None

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
        leaves = [tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad]
        for leaf in leaves:
            leaf.grad = None
        self.forget_gradients()
        for home, name, value, contents in self._state:
            home[name] = value
            if contents is not None:
                put_back(value, contents)
        kind, on, dtype = call.autocast
        with ExitStack() as around:
            for setting in self.settings:
                around.enter_context(setting.around())
                if setting.dtype is not None:
                    on, dtype = True, setting.dtype
            with (
                torch.set_grad_enabled(call.grad),
                torch.autocast(kind, enabled=on, dtype=dtype),
            ):
                args, kwargs = tree_map(self._fed, (args, kwargs))
                outputs = outputs_of(self._called[call.module](*args, **kwargs))
            if seen is not None:
                for place, setting in enumerate(outputs):
                    if setting.requires_grad and not setting.is_leaf:
                        setting.register_hook(partial(seen.__setitem__, place))
            if backward and call.loss is not None and self.watched.has_loss:
                everywhere = (kind, on, dtype) if (on, dtype) != call.autocast[1:] else None
                resided = resident()
                ends = outputs if seen is None else [*outputs]
                loss, rest = call.loss.run(ends, self.modules, everywhere)
                if seen is not None:
                    self.watched.keeps += max(0, resident() - resided)
                self._end_at([loss], [call.loss.gradient])
                del rest
                outputs.append(loss)
            elif backward:
                self._backward(call, outputs)
        return outputs

    def _fed(self, value: Any) -> Any:
        """Return a tensor as a step has it: no leaf, and in the memory format that is set."""
        if not isinstance(value, torch.Tensor):
            return value
        for setting in self.settings:
            if value.dim() == setting.dims:
                value = value.to(memory_format=setting.memory_format)
        return value.view_as(value) if value.requires_grad else value

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
        seeds = [
            torch.ones_like(end) if gradient is None else gradient.to(end.dtype)
            for end, gradient in zip(ends, gradients, strict=True)
        ]
        torch.autograd.backward(ends, seeds if self._scaler is None else self._scaler.scale(seeds))
        if self._scaler is not None:
            self._scaler.unscale_(self._scaled)
            self._scaler.update()

    def check(self) -> None:
        """Run each call once, and compare with the step what that gives.

        Raises:
            Refused: If the copy is not like the model: it reaches the parameters of the training,
                trains others than the step does, gives other outputs, or is on several devices.
        """
        own = {id(parameter) for parameter in self.parameters()}
        devices = sorted({str(parameter.device) for parameter in self.parameters()})
        if len(devices) > 1:  # each would be timed as if it waited for no other
            raise Refused(f"the model is on several devices: {', '.join(devices)}")
        checked = set[int]()
        self.reset()
        before = {key: entry[-1] for key, entry in self._attributes().items()}
        contents = {key: contents_of(value) for key, value in before.items()}
        for call in self.watched.calls:
            module, first = self.modules[call.module], call.module not in checked
            checked.add(call.module)
            set_random_states(call.random)
            resided = resident()
            outputs = self.run(call, backward=False)
            self.watched.keeps = max(self.watched.keeps, resident() - resided)
            inputs = {id(tensor) for tensor in tensors_of(self._given[call])}
            leaves = reached_from(outputs)
            if not (own | inputs).issuperset(map(id, leaves)):
                raise Refused("a copy of the model trains the model itself")
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            reached = {names[id(leaf)] for leaf in leaves if id(leaf) in names}
            if reached != call.reached:
                other = min(reached ^ call.reached)
                raise Refused(f"a copy of the model trains other parameters, such as {other}")
            if [output.shape for output in outputs] != call.sizes:
                raise Refused("a copy of the model has outputs of other sizes")
            if not first:  # the optimizer may have taken a step since
                continue
            for output, real in zip(outputs, call.samples, strict=True):
                far = relative([sample_of(output)], [real])
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
            gradients: dict[int, torch.Tensor] = {}
            set_random_states(call.random)
            *_, loss = self.run(call, seen=gradients)
            if sorted(gradients) != call.ends:
                raise Refused("other outputs get gradients from it when it runs again")
            real = [
                call.seeded[end] if end in call.seeded else sample_of(call.gradients[end])
                for end in call.ends
            ]
            far = relative([sample_of(gradients[end]) for end in call.ends], real)
            if not max(far, relative([sample_of(loss)], [call.loss.sample])) < _FAR:
                raise Refused("it gives another loss, or other gradients, when it runs again")

    def _check_objects(self, call: Call) -> None:
        """Refuse a call that writes to an object that it is given: the next run would find that."""
        pairs = zip(
            objects_in(self._given[call]), objects_in((call.args, call.kwargs)), strict=True
        )
        for copied_object, original in pairs:
            tensors, originals = outputs_of(copied_object), outputs_of(original)
            if len(tensors) != len(originals) or not all(map(torch.equal, tensors, originals)):
                raise Refused(f"the model writes to the {type(original).__name__} that it is given")


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
    return None if values is None else [id(value) for value in values]


def relative(actual: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Return the largest ``|a - b| / |b|`` of pairs of tensors, in norms.

    What is as good as zero, as the gradient of a bias before a norm, counts as a share of the
    largest: its own digits are noise.
    """
    pairs = [(a, b) for a, b in zip(actual, others, strict=True) if b.is_floating_point()]
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
    inputs = [tensor for tensor in tensors_of((call.args, call.kwargs)) if tensor.dim()]
    gradients = [gradient for gradient in call.gradients.values() if gradient.dim()]
    sizes = {len(tensor) for tensor in (*inputs, *gradients)}
    if len(sizes) != 1 or call.seeded:
        raise Refused("the inputs of the model have no first dimension in common")
    return sizes.pop()


def _repeated(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    repeats = tensor.dim() and len(tensor) == batch
    twice = torch.cat([tensor.detach(), tensor.detach()]) if repeats else tensor.detach().clone()
    return twice.requires_grad_(tensor.requires_grad)
