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

        def of(node: Any) -> Any:
            if not isinstance(node, _Value):
                return node
            if node.made is not None:
                operation, place = node.made
                return results[operation][place]
            return node.source(outputs, modules)

        for (grad, own, inner), several in groupby(
            self._operations, key=lambda operation: operation.modes
        ):
            kind, on, dtype = own if inner else autocast or own
            with torch.set_grad_enabled(grad), torch.autocast(kind, enabled=on, dtype=dtype):
                for operation in several:
                    args, kwargs = tree_map(of, (operation.args, operation.kwargs))
                    results[operation] = tree_flatten(operation.function(*args, **kwargs))[0]
                    del args, kwargs
                    for value in self._let_go.get(operation, ()):
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
        for place, output in enumerate(outputs):
            if output.requires_grad:
                memory = _Memory(version_of(output), is_own=True)
                value = _Value(memory, True, None, partial(_output, place), place, (call, is_first))
                if type(output) is not torch.Tensor:
                    value.why_not = f"the model returns a {type(output).__name__}"
                self._known[output] = value

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
        if other := next((kind for kind in types if kind not in _PLAIN), None):
            self.why_not = f"it has a {other.__name__}"  # which may answer nothing but its own
            return func(*args, **kwargs)
        before = [(tensor, version_of(tensor)) for tensor in tensors_of((args, kwargs))]
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
        written = {id(tensor) for tensor, version in before if version_of(tensor) != version}
        results = tree_flatten(output)[0]
        if not written and not any(isinstance(result, torch.Tensor) for result in results):
            return
        values = {id(tensor): self._value(tensor, version) for tensor, version in before}
        foreign = {key for key in written if not values[key].memory.is_own}
        leaves = tree_flatten((args, kwargs))[0]
        why_not = ""
        if func is torch.autograd.grad or not all(isinstance(leaf, _GIVEN) for leaf in leaves):
            why_not = f"{func.__name__} cannot run again apart from the training"
            foreign |= written
        elif foreign:
            why_not = f"{func.__name__} writes to a tensor that the loss has not made"
        device = next((tensor.device for tensor, _ in before), torch.device("cpu"))
        modes = torch.is_grad_enabled(), autocast_of(device), autocasts() > self._autocasts
        args, kwargs = tree_map(lambda leaf: values.get(id(leaf), leaf), (args, kwargs))
        operation = _Operation(next(self._numbers), func, args, kwargs, modes)
        if written and not foreign:
            self._writes.append(operation)
        homes = dict[int, _Memory]()
        for tensor, _ in before:
            value = values[id(tensor)]
            value.memory.version = version_of(tensor)
            homes[tensor.untyped_storage().data_ptr()] = value.memory
            if id(tensor) in foreign:
                del self._known[tensor]  # what it has now is copied once that is used
            elif id(tensor) in written:
                value.requires_grad = tensor.requires_grad
        for place, tensor in enumerate(results):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in foreign:
                home = homes.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
                # What is made of the user's own memory, as of an array, is no tensor of the loss.
                memory = home or _Memory(version_of(tensor), is_own=not why_not)
                origin = operation, place
                self._known[tensor] = _Value(memory, tensor.requires_grad, origin, why_not=why_not)

    def _value(self, tensor: torch.Tensor, version: int) -> _Value:
        """Return the value of a tensor that was written so often when the function began."""
        value: _Value | None = self._known.get(tensor)
        if value is not None and value.memory.version != version:
            if value.memory.is_own or value.made is not None:
                value.why_not = "a tensor of the loss is written by what is not seen"
            else:
                value = None  # its copy is of another time
        elif value is not None and value.requires_grad != tensor.requires_grad:
            value.why_not = "an autograd function of its own is part of it"
        if value is None:
            value = self._known[tensor] = self._begun(tensor, version)
        return value

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
                id(parameter): (number, name)
                for number in self._copied
                for name, parameter in self._models[number].named_parameters()
            }
        if (place := self._parameters_of.get(id(tensor))) is None:
            return None
        number, name = place
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
        calls = {value.call for value in values if value.call is not None}
        if calls and not any(is_first for _, is_first in calls):
            return  # as after the first call of that kind
        why_not = next((value.why_not for value in values if value.why_not), "")
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
        last = {value: operation for operation in operations for value in _values_of(operation)}
        kept_values = {root, *self._known.values()}
        let_go: dict[_Operation, list[_Value]] = {}
        for value, operation in last.items():
            if value not in kept_values and (value.made or value.call):
                let_go.setdefault(operation, []).append(value)
        return let_go

    def _behind(self, root: _Value) -> tuple[list[_Value], list[_Operation]]:
        """Return all values and operations that a value is made by, and those that write."""
        operations = dict.fromkeys(self._writes)
        values = dict.fromkeys(
            [root, *(value for write in self._writes for value in _values_of(write))]
        )
        pending = [*values]
        while pending:
            origin = pending.pop().made
            if origin is not None and origin[0] not in operations:
                operations[origin[0]] = None
                more = _values_of(origin[0])
                values.update(dict.fromkeys(more))
                pending += more
        return [*values], sorted(operations, key=lambda operation: operation.number)


def _output(place: int, outputs: Sequence[torch.Tensor], _: object) -> torch.Tensor:
    return outputs[place]


def _values_of(operation: _Operation) -> list[_Value]:
    leaves = tree_flatten((operation.args, operation.kwargs))[0]
    return [leaf for leaf in leaves if isinstance(leaf, _Value)]
