"""The loss that follows a call of a model: PyTorch's functions of one step, to run them again.

``LossWatch`` sees the functions between a call and the backward. It keeps which of them the
tensor at which the backward begins is made by, and copies of the tensors that they were given. Only
these functions run again: nothing that the training's own code does beside them, and none that
writes to a tensor from before the loss.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from backspot.interrupts import pass_on
from backspot.live.plan.room import fits, sample_of
from backspot.live.torch_internals.process import innermost_mode, tree_flatten, tree_map, version_of
from backspot.live.trials.chains import autocast_of, tensors_of
from backspot.live.trials.measuring import reason
from backspot.live.trials.twins import Autocast, Refused, check_plain, twin

_NO_CHAIN = "its backward begins at a tensor that no function after the model has made"


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
    """A function that the step called after a model; its tensors are values."""

    number: int
    function: Any
    args: Any
    kwargs: Any
    modes: tuple[bool, Autocast]
    writes: bool


@dataclass(eq=False)
class _Value:
    """A tensor of the step, and where a further run has it from: one of the attributes.

    Attributes:
        made: the operation that makes it, and which of its results it is.
        output: the call that returned it, its place among the outputs, and whether the call was
            the first of its kind.
        parameter: the model and the name of a parameter.
        given: a copy.
        why_not: why there is none.
    """

    memory: _Memory
    requires_grad: bool
    made: tuple[_Operation, int] | None = None
    output: tuple[Hashable, int, bool] | None = None
    parameter: tuple[int, str] | None = None
    given: torch.Tensor | None = None
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
    _leaves: Sequence[_Value]

    def run(
        self,
        outputs: Sequence[torch.Tensor],
        modules: Mapping[int, torch.nn.Module],
        autocast: Autocast | None,
    ) -> torch.Tensor:
        """Return the loss of other outputs.

        Args:
            modules: the copies of the models, by number.
            autocast: the autocast around all of it; ``None``: that of the step.
        """
        made: dict[Any, Any] = {}
        for value in self._leaves:
            if value.output is not None:
                made[value] = outputs[value.output[1]]
            elif value.parameter is not None:
                number, name = value.parameter
                made[value] = modules[number].get_parameter(name)
            elif value.given is not None:
                value.given.grad = None
                made[value] = value.given

        def of(one: Any) -> Any:
            if not isinstance(one, _Value):
                return one
            if one.made is None:
                return made[one]
            operation, place = one.made
            return made[operation][place]

        for (grad, own), several in groupby(self._operations, key=lambda one: one.modes):
            kind, on, dtype = autocast or own
            with (
                torch.set_grad_enabled(grad),
                torch.autocast(kind, enabled=on, dtype=dtype),
            ):
                for one in several:
                    args, kwargs = tree_map(of, (one.args, one.kwargs))
                    made[one] = tree_flatten(one.function(*args, **kwargs))[0]
        loss: torch.Tensor = of(self._root)
        return loss


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
        self._known: Any = WeakTensorKeyDictionary()
        self._writes: list[_Operation] = []
        self._copies: list[torch.Tensor] = []
        self._numbers = count()
        self._thread = 0

    def begin(self) -> None:
        """See functions until ``end``, on this thread."""
        self._thread = threading.get_ident()
        self.__enter__()

    def end(self) -> None:
        """See no more functions.

        Where another mode was entered since, or on another thread, this one stays there and does
        nothing: PyTorch would take the other one away.
        """
        if threading.get_ident() == self._thread and innermost_mode() is self:
            self.__exit__(None, None, None)
        self.rests = True
        self._known.clear()

    def follow(self, call: Hashable, outputs: Sequence[torch.Tensor], *, is_first: bool) -> None:
        """See what follows a call.

        Args:
            outputs: the tensors that it returns.
            is_first: whether no call of its kind was before.
        """
        for place, one in enumerate(outputs):
            if one.requires_grad:
                memory = _Memory(version_of(one), is_own=True)
                value = _Value(memory, True, output=(call, place, is_first))
                if type(one) is not torch.Tensor:
                    value.why_not = f"the model returns a {type(one).__name__}"
                self._known[one] = value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function as it is, and note what a loss needs."""
        kwargs = kwargs or {}
        if self.rests:
            return func(*args, **kwargs)
        before: list[tuple[torch.Tensor, int]] = []
        try:
            if func is torch.Tensor.backward:
                self._ends(*args, **kwargs)
                self.rests = True
            else:
                before = [(one, version_of(one)) for one in tensors_of((args, kwargs))]
        except Exception as error:
            pass_on(error)
            self.why_not = self.why_not or reason(error)
        output = func(*args, **kwargs)
        if self.rests:
            return output
        try:
            self._note(func, args, kwargs, output, before)
        except Exception as error:  # then nothing has made what it returns
            pass_on(error)
        return output

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        output: Any,
        before: Sequence[tuple[torch.Tensor, int]],
    ) -> None:
        results = tree_flatten(output)[0]
        if not any(isinstance(one, torch.Tensor) for one in (*results, *self._written(before))):
            return
        why_not = ""
        if func is torch.autograd.grad or any(
            isinstance(one, torch.Generator) for one in tree_flatten((args, kwargs))[0]
        ):
            why_not = f"{func.__name__} cannot run again apart from the training"
        given = {id(one): self._value(one, version) for one, version in before}
        written = [given[id(one)] for one in self._written(before)]
        if any(not one.memory.is_own for one in written):
            why_not = f"{func.__name__} writes to a tensor that the loss has not made"
        device = next((one.device for one, _ in before), torch.device("cpu"))
        args, kwargs = tree_map(lambda one: given.get(id(one), one), (args, kwargs))
        modes = torch.is_grad_enabled(), autocast_of(device)
        operation = _Operation(next(self._numbers), func, args, kwargs, modes, bool(written))
        for one, _ in before:
            given[id(one)].memory.version = version_of(one)
        if written and not why_not:
            self._writes.append(operation)
        forgotten = set()
        for one in self._written(before):
            if not given[id(one)].memory.is_own:
                self._known.pop(one, None)  # what it has now is copied once that is used
                forgotten.add(id(one))
            elif one.requires_grad != given[id(one)].requires_grad:
                given[id(one)].requires_grad = one.requires_grad
        homes = {one.untyped_storage().data_ptr(): given[id(one)].memory for one, _ in before}
        for place, one in enumerate(results):
            if not isinstance(one, torch.Tensor) or id(one) in forgotten:
                continue
            memory = homes.get(one.untyped_storage().data_ptr()) if one.numel() else None
            memory = memory or _Memory(version_of(one), is_own=True)
            made = (operation, place)
            self._known[one] = _Value(memory, one.requires_grad, made, why_not=why_not)

    @staticmethod
    def _written(before: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
        return [one for one, version in before if version_of(one) != version]

    def _value(self, tensor: torch.Tensor, version: int) -> _Value:
        """Return the value of a tensor that was written so often when the function began."""
        found: _Value | None = self._known.get(tensor)
        if found is None:
            found = self._known[tensor] = self._begun(tensor, version)
        elif found.memory.version != version:
            if not found.memory.is_own and found.made is None:  # its copy is of another time
                found = self._known[tensor] = self._begun(tensor, version)
            else:
                found.why_not = "a tensor of the loss is written by what is not seen"
        elif found.requires_grad != tensor.requires_grad:
            found.why_not = "an autograd function of its own is part of it"
        return found

    def _begun(self, tensor: torch.Tensor, version: int) -> _Value:
        """Return the value of a tensor that the loss has not made."""
        value = _Value(_Memory(version, is_own=False), tensor.requires_grad)
        try:
            value.parameter = self._place(tensor)
            if value.parameter is not None:
                return value
            if tensor.requires_grad and not tensor.is_leaf:
                raise Refused("it follows from more than the outputs of a model")
            check_plain(tensor)
            if not fits([*self._copies, tensor], 2):
                raise Refused("copies of what it is given do not fit into the free memory")
            value.given = twin(tensor)
            self._copies.append(value.given)
        except Refused as refused:
            value.why_not = str(refused)
        return value

    def _place(self, tensor: torch.Tensor) -> tuple[int, str] | None:
        """Return the number of the model, and the name, of a parameter that copies have."""
        if not isinstance(tensor, torch.nn.Parameter):
            return None
        return next(
            (
                (number, name)
                for number in self._copied
                for name, one in self._models[number].named_parameters()
                if one is tensor
            ),
            None,
        )

    def _ends(
        self,
        root: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Keep what has made the tensor that a backward begins at."""
        values, operations = self._behind(self._value(root, version_of(root)))
        self._writes.clear()
        calls = {one.output[::2] for one in values if one.output is not None}
        if calls and not any(is_first for _, is_first in calls):
            return  # as the first call of that kind
        why_not = next((one.why_not for one in values if one.why_not), "")
        if create_graph or inputs is not None:
            why_not = "its backward is another one than that of a training"
        elif not calls:
            why_not = why_not or _NO_CHAIN
        elif len(calls) > 1:
            why_not = "it follows from several calls of the models"
        elif len(self.losses.keys() & {call for call, _ in calls}):
            why_not = "a backward comes more than once after a call"
        self.why_not = self.why_not or why_not
        if self.why_not or not operations:  # a model may return its loss
            return
        begins = None if gradient is None else twin(gradient)
        root_value = self._known[root]
        (call, _), *_ = calls
        self.losses[call] = Loss(sample_of(root), begins, root_value, operations, values)

    def _behind(self, root: _Value) -> tuple[list[_Value], list[_Operation]]:
        """Return all values and operations that a value is made by, and those that write."""
        values, operations = {root: None}, dict[_Operation, None]()
        pending = [root]
        for one in self._writes:
            operations[one] = None
            pending += _values_of(one)
        while pending:
            value = pending.pop()
            values[value] = None
            if value.made is not None and value.made[0] not in operations:
                operations[value.made[0]] = None
                pending += _values_of(value.made[0])
        return [*values], sorted(operations, key=lambda one: one.number)


def _values_of(operation: _Operation) -> list[_Value]:
    leaves = tree_flatten((operation.args, operation.kwargs))[0]
    return [one for one in leaves if isinstance(one, _Value)]
