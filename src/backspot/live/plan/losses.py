"""The loss that follows a call of a model: PyTorch's functions of one step, to run them again.

``LossWatch`` sees the functions between a call and the backward. It keeps which of them the
tensor at which the backward begins is made by, and copies of the tensors that they were given. Only
these functions run again: nothing that the training's own code does beside them, and none that
writes to a tensor from before the loss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from backspot.interrupts import contained, pass_on
from backspot.live.plan.room import FIXED, room_on, sample_of
from backspot.live.torch_internals.process import (
    autocasts,
    take_mode_away,
    tree_flatten,
    tree_map,
    version_of,
)
from backspot.live.torch_internals.references import by_tensor, swaps
from backspot.live.trials.chains import autocast_of, tensors_of
from backspot.live.trials.measuring import reason
from backspot.live.trials.twins import Autocast, Refused, check_plain, size_of, twin


@dataclass(eq=False)
class _Memory:
    """What a tensor and its views share.

    Attributes:
        version: how often it was written when it was last seen.
        is_own: whether the loss has made it, and may write to it.
    """

    version: int
    is_own: bool


@dataclass(eq=False)
class _Operation:
    """A function that the step called after a model; its tensors are values.

    Attributes:
        modes: whether gradients were on, the autocast, and whether that is of the loss alone.
    """

    number: int
    function: Any
    args: Any
    kwargs: Any
    modes: tuple[bool, Autocast, bool]


Source = Callable[[Sequence[torch.Tensor], Mapping[int, torch.nn.Module]], torch.Tensor]
"""Returns a tensor, given the outputs of a call and the copies of the models by number."""


def _nowhere(*_: object) -> torch.Tensor:
    raise Refused("a tensor that it is made of was not kept")


@dataclass(eq=False)
class _Value:
    """A tensor of the step, and where a further run has it from.

    Attributes:
        made: the operation that makes it, and which of its results it is.
        source: what returns it, if no operation of the loss makes it.
        place: that among the outputs of a call.
        call: which call of a model has returned it, and whether that was the first of its kind.
        why_not: why a further run has it from nowhere, or ``""``.
    """

    memory: _Memory
    requires_grad: bool
    made: tuple[_Operation, int] | None = None
    source: Source = _nowhere
    place: int = 0
    call: tuple[Hashable, bool] | None = None
    why_not: str = ""


@dataclass(frozen=True, eq=False)
class Loss:
    """What makes a loss again from the outputs of a call.

    Attributes:
        sample: some numbers of the step's.
        gradient: what its backward began with; ``None``: one.
    """

    sample: torch.Tensor
    gradient: torch.Tensor | None
    _root: _Value
    _operations: Sequence[_Operation]
    _let_go: Mapping[_Operation, Sequence[_Value]]

    def run(
        self,
        outputs: list[Any],
        modules: Mapping[int, torch.nn.Module],
        autocast: Autocast | None,
    ) -> tuple[torch.Tensor, object]:
        """Return the loss of other outputs, and what the step held until the end of its backward.

        Args:
            outputs: of a call; those that the step let go after their last use are ``None`` then.
            modules: the copies of the models, by number.
            autocast: the autocast around all of it, but for what has one of its own, such as one
                that is off; ``None``: that of the step.
        """
        results: dict[_Operation, list[Any]] = {}

        def of(one: Any) -> Any:
            if not isinstance(one, _Value):
                return one
            if one.made is not None:
                operation, place = one.made
                return results[operation][place]
            return one.source(outputs, modules)

        for (grad, own, inner), several in groupby(self._operations, key=lambda one: one.modes):
            kind, on, dtype = own if inner else autocast or own
            with torch.set_grad_enabled(grad), torch.autocast(kind, enabled=on, dtype=dtype):
                for one in several:
                    args, kwargs = tree_map(of, (one.args, one.kwargs))
                    results[one] = tree_flatten(one.function(*args, **kwargs))[0]
                    del args, kwargs
                    for value in self._let_go.get(one, ()):
                        home, place = (
                            (results[value.made[0]], value.made[1])
                            if value.made
                            else (outputs, value.place)
                        )
                        home[place] = None
        loss: torch.Tensor = of(self._root)
        return loss, results


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_GIVEN = (torch.Tensor, *FIXED)
"""What a function may be given to run again: neither the user's own code nor memory."""


class LossWatch(TorchFunctionMode):  # type: ignore[misc] # untyped
    """Sees the functions of a step on this thread, while it is entered.

    Args:
        models: what is called, by number.
        copies: a copy of each that was called; their parameters count in a further run.

    Attributes:
        losses: what follows each call, as far as that was seen.
        why_not: why a loss cannot run again, or ``""``.
        rests: whether functions are of a model, or Backspot's own.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], copies: Mapping[int, torch.nn.Module]
    ) -> None:
        super().__init__()
        self.losses: dict[Hashable, Loss] = {}
        self.why_not = ""
        self.rests = True
        self._models, self._copied = models, copies
        self._known = by_tensor()
        self._swaps = 0
        self._writes: list[_Operation] = []
        self._named = 0
        self._parameters_of: dict[int, tuple[int, str]] = {}
        """The model and the name of each parameter, by its ``id``."""
        self._numbers = count()
        self._thread = self._autocasts = 0
        self._room: dict[torch.device, float] = {}
        """What copies may take, as it was after the last call."""

    def begin(self) -> None:
        """See functions until ``end``, on this thread."""
        self._thread, self._swaps = threading.get_ident(), swaps()
        self.__enter__()

    def end(self) -> None:
        """See no more functions.

        On another thread this mode stays where it was entered, and does nothing.
        """
        if threading.get_ident() == self._thread:
            take_mode_away(self)
        if swaps() != self._swaps:
            self.why_not = self.why_not or "the step swaps tensors (torch.utils.swap_tensors)"
        self.rests = True
        self._known.clear()
        self._writes.clear()

    def follow(self, call: Hashable, outputs: Sequence[torch.Tensor], *, is_first: bool) -> None:
        """See what follows a call.

        Args:
            outputs: the tensors that it returns.
            is_first: whether no call of its kind was before.
        """
        self._autocasts = autocasts()
        self._room.clear()
        for place, one in enumerate(outputs):
            if one.requires_grad:
                memory = _Memory(version_of(one), is_own=True)
                value = _Value(memory, True, None, partial(_output, place), place, (call, is_first))
                if type(one) is not torch.Tensor:
                    value.why_not = f"the model returns a {type(one).__name__}"
                self._known[one] = value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function as it is, and note what a loss needs."""
        kwargs = kwargs or {}
        if func is torch.Tensor.backward and not self.rests:
            try:
                self._ends(*args, **kwargs)
            except Exception as error:
                pass_on(error)
                self.why_not = self.why_not or reason(error)
            self.rests = True
        if self.rests or self.why_not:
            return func(*args, **kwargs)
        if other := next((one for one in types if one not in _PLAIN), None):
            self.why_not = f"it has a {other.__name__}"  # which may answer nothing but its own
            return func(*args, **kwargs)
        before = [(one, version_of(one)) for one in tensors_of((args, kwargs))]
        output = func(*args, **kwargs)
        with contained():  # at worst nothing has made what it returns
            self._note(func, args, kwargs, output, before)
        return output

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        output: Any,
        before: Sequence[tuple[torch.Tensor, int]],
    ) -> None:
        """Note a function.

        Args:
            before: the tensors that it was given, and how often each was written until then.
        """
        written = {id(one) for one, version in before if version_of(one) != version}
        results = tree_flatten(output)[0]
        if not written and not any(isinstance(one, torch.Tensor) for one in results):
            return
        given = {id(one): self._value(one, version) for one, version in before}
        foreign = {one for one in written if not given[one].memory.is_own}
        leaves = tree_flatten((args, kwargs))[0]
        why_not = ""
        if func is torch.autograd.grad or not all(isinstance(one, _GIVEN) for one in leaves):
            why_not = f"{func.__name__} cannot run again apart from the training"
            foreign |= written
        elif foreign:
            why_not = f"{func.__name__} writes to a tensor that the loss has not made"
        device = next((one.device for one, _ in before), torch.device("cpu"))
        modes = torch.is_grad_enabled(), autocast_of(device), autocasts() > self._autocasts
        args, kwargs = tree_map(lambda one: given.get(id(one), one), (args, kwargs))
        operation = _Operation(next(self._numbers), func, args, kwargs, modes)
        if written and not foreign:
            self._writes.append(operation)
        homes = dict[int, _Memory]()
        for one, _ in before:
            value = given[id(one)]
            value.memory.version = version_of(one)
            homes[one.untyped_storage().data_ptr()] = value.memory
            if id(one) in foreign:
                del self._known[one]  # what it has now is copied once that is used
            elif id(one) in written:
                value.requires_grad = one.requires_grad
        for place, one in enumerate(results):
            if isinstance(one, torch.Tensor) and id(one) not in foreign:
                home = homes.get(one.untyped_storage().data_ptr()) if one.numel() else None
                # What is made of the user's own memory, as of an array, is no tensor of the loss.
                memory = home or _Memory(version_of(one), is_own=not why_not)
                made = operation, place
                self._known[one] = _Value(memory, one.requires_grad, made, why_not=why_not)

    def _value(self, tensor: torch.Tensor, version: int) -> _Value:
        """Return the value of a tensor that was written so often when the function began."""
        found: _Value | None = self._known.get(tensor)
        if found is not None and found.memory.version != version:
            if found.memory.is_own or found.made is not None:
                found.why_not = "a tensor of the loss is written by what is not seen"
            else:
                found = None  # its copy is of another time
        elif found is not None and found.requires_grad != tensor.requires_grad:
            found.why_not = "an autograd function of its own is part of it"
        if found is None:
            found = self._known[tensor] = self._begun(tensor, version)
        return found

    def _begun(self, tensor: torch.Tensor, version: int) -> _Value:
        """Return the value of a tensor that the loss has not made."""
        value = _Value(_Memory(version, is_own=False), tensor.requires_grad)
        try:
            value.source = self._parameter(tensor) or self._copy(tensor)
        except Refused as refused:
            value.why_not = str(refused)
        return value

    def _parameter(self, tensor: torch.Tensor) -> Source | None:
        """Return what a parameter of the models is in a copy of them."""
        if len(self._copied) != self._named:  # a model was called for the first time
            self._named = len(self._copied)
            self._parameters_of = {
                id(one): (number, name)
                for number in self._copied
                for name, one in self._models[number].named_parameters()
            }
        if (found := self._parameters_of.get(id(tensor))) is None:
            return None
        number, name = found
        return lambda _, modules: modules[number].get_parameter(name)

    def _copy(self, tensor: torch.Tensor) -> Source:
        """Return a copy of what else the loss is given."""
        if tensor.requires_grad and not tensor.is_leaf:
            raise Refused("it follows from more than the outputs of a model")
        check_plain(tensor)
        if tensor.device not in self._room:  # to read it takes longer than many a loss
            self._room[tensor.device] = room_on(tensor.device)
        self._room[tensor.device] -= 2 * size_of(tensor)
        if self._room[tensor.device] < 0:
            raise Refused("copies of what it is given do not fit into the free memory")
        copy = twin(tensor)

        def given(*_: object) -> torch.Tensor:
            copy.grad = None
            return copy

        return given

    def _ends(
        self,
        root: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Keep what has made the tensor that a backward begins at."""
        value = self._value(root, version_of(root))
        values, operations = self._behind(value)
        self._writes.clear()
        calls = {one.call for one in values if one.call is not None}
        if calls and not any(is_first for _, is_first in calls):
            return  # as after the first call of that kind
        why_not = next((one.why_not for one in values if one.why_not), "")
        if create_graph or inputs is not None:
            why_not = "its backward is another one than that of a training"
        elif not calls:
            why_not = why_not or "its backward begins at what no function after a model has made"
        elif len(calls) > 1:
            why_not = "it follows from several calls of the models"
        elif any(call in self.losses for call, _ in calls):
            why_not = "a backward comes more than once after a call"
        self.why_not = self.why_not or why_not
        if operations and not self.why_not:  # a model may return its loss
            ((call, _),) = calls
            begins = None if gradient is None else twin(gradient)
            let_go = self._let_go(operations, value)
            self.losses[call] = Loss(sample_of(root), begins, value, operations, let_go)

    def _let_go(
        self, operations: Sequence[_Operation], root: _Value
    ) -> Mapping[_Operation, Sequence[_Value]]:
        """Return after which operation nobody holds which values, as far as the loss has made them.

        What the step's own code holds at the beginning of the backward takes memory until its end.
        """
        last = {value: one for one in operations for value in _values_of(one)}
        held = {root, *self._known.values()}
        found: dict[_Operation, list[_Value]] = {}
        for value, one in last.items():
            if value not in held and (value.made or value.call):
                found.setdefault(one, []).append(value)
        return found

    def _behind(self, root: _Value) -> tuple[list[_Value], list[_Operation]]:
        """Return all values and operations that a value is made by, and those that write."""
        operations = dict.fromkeys(self._writes)
        values = dict.fromkeys([root, *(each for one in self._writes for each in _values_of(one))])
        pending = [*values]
        while pending:
            made = pending.pop().made
            if made is not None and made[0] not in operations:
                operations[made[0]] = None
                more = _values_of(made[0])
                values.update(dict.fromkeys(more))
                pending += more
        return [*values], sorted(operations, key=lambda one: one.number)


def _output(place: int, outputs: Sequence[torch.Tensor], _: object) -> torch.Tensor:
    return outputs[place]


def _values_of(operation: _Operation) -> list[_Value]:
    leaves = tree_flatten((operation.args, operation.kwargs))[0]
    return [one for one in leaves if isinstance(one, _Value)]
