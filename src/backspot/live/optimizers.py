"""Parameters that no optimizer updates, or in double precision, and needless groups of others.

Gradients of parameters that no optimizer updates are computed for nothing.

A trace does not say which parameters an optimizer holds. So after each recorded optimizer step, a
module gets a label if a parameter of its own has a gradient and belongs to no optimizer that took a
step so far. A module also gets one if all its gradients are gone when its optimizer takes a step.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from backspot.interrupts import pass_on
from backspot.live.owner import Scope
from backspot.live.torch_internals import autograd, profiler
from backspot.live.torch_internals.modules import parameters_of
from backspot.live.torch_internals.process import hook_steps
from backspot.trace.labels import Kind
from backspot.trace.names import NO_FORMS, OPTIMIZER_FORMS, groups_mark

_FORMS = ("fused", "foreach")
_MANY_GROUPS = 10
"""Groups of parameters from which it is looked at whether they could be fewer."""


def ids_updated_by(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the ``id`` of each parameter that one of some optimizers holds."""
    return {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


class OptimizerWatch:
    """Observes the steps of every optimizer of the process.

    Args:
        scopes: returns the active instrumentations.
        recorded: called after each step while a profiler records.
    """

    def __init__(self, scopes: Callable[[], list[Scope]], recorded: Callable[[], None]) -> None:
        self._scopes = scopes
        self._recorded = recorded
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._unhook: Callable[[], None] | None = None

    def start(self) -> None:
        """Start observing."""
        if self._unhook is None:
            self._unhook = hook_steps(self._after_step)

    def stop(self) -> None:
        """Stop observing, and forget the optimizers."""
        if self._unhook is not None:
            self._unhook()
            self._unhook = None
        self._known.clear()

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        try:
            self._known.add(optimizer)
            if profiler.recording():
                self._recorded()
                with autograd.ignore_torch_function():  # a mode of the script sees only its own
                    self._label_parameters(optimizer)
                _mark_groups(optimizer)
                _mark_forms(optimizer)
        except Exception as error:
            pass_on(error)  # a label is never worth a failed step

    def _label_parameters(self, stepped: torch.optim.Optimizer) -> None:
        own_ids, all_ids = ids_updated_by([stepped]), ids_updated_by(self._known)
        for scope in self._scopes():
            model = scope.model()
            # An optimizer that holds its own copies (in another precision) says nothing. A model
            # that another thread trains is left alone: PyTorch may write its gradients right now.
            if model is None or not any(id(p) in own_ids for p in model.parameters()):
                continue
            # After each step, as parameters can be added, removed and frozen.
            for owner, module in scope.live_modules():
                parameters = parameters_of(module)
                if unused := _unused_part(parameters, all_ids, own_ids):
                    profiler.emit(owner.unused(unused))
                if _are_double(parameters):
                    profiler.emit(owner.label(Kind.DOUBLE))


def _are_double(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether most of what a module trains is in double precision.

    A number or a few beside others say nothing of what the module computes.
    """
    sizes = [(p.numel(), p.dtype is torch.float64) for p in parameters]
    doubles = [numel for numel, is_double in sizes if is_double]
    return max(doubles, default=0) > 1 and 2 * sum(doubles) > sum(numel for numel, _ in sizes)


def _mark_groups(optimizer: torch.optim.Optimizer) -> None:
    """Mark how many groups an optimizer has, and how many different settings; not if few."""
    groups = optimizer.param_groups
    if len(groups) < _MANY_GROUPS:
        return
    settings = {
        tuple((key, _setting(value)) for key, value in sorted(group.items()) if key != "params")
        for group in groups
    }
    if len(settings) < len(groups):
        profiler.emit(groups_mark(len(groups), len(settings)))


def _mark_forms(optimizer: torch.optim.Optimizer) -> None:
    """Mark whose forms an optimizer has that is none of PyTorch's, though it may be called so."""
    cls = type(optimizer)
    if _is_of_torch(cls):
        return
    if cls not in _known_forms:
        _known_forms[cls] = _forms_of(cls)
    profiler.emit(OPTIMIZER_FORMS + (_known_forms[cls] or NO_FORMS))


_known_forms: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
"""What ``_forms_of`` says of each class: to find that takes 40 to 150 us, in each recorded step."""


def _forms_of(cls: type) -> str:
    """Return the class of PyTorch's whose forms a class derived from it has, ``""`` if none.

    It has them if it takes their arguments, or any, and runs the step of that class.
    """
    base = next(filter(_is_of_torch, cls.__mro__), torch.optim.Optimizer)
    parameters = inspect.signature(cls).parameters
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    forms_of_base = [form for form in _FORMS if form in inspect.signature(base).parameters]
    if not forms_of_base or not all(takes_any or form in parameters for form in forms_of_base):
        return ""
    derived = cls.__mro__[: cls.__mro__.index(base)]
    steps = [
        inspect.unwrap(vars(base_class)["step"])
        for base_class in derived
        if "step" in vars(base_class)
    ]
    codes = [getattr(step, "__code__", None) for step in steps]
    goes_on = all(
        code is not None and {"step"} < {*code.co_names} & {"step", "super", base.__name__}
        for code in codes
    )
    return base.__name__ if goes_on else ""


def _is_of_torch(cls: type) -> bool:
    return f"{cls.__module__}.".startswith("torch.optim.")  # some say to be of the package itself


def _setting(value: object) -> object:
    """Return what two groups can have in common: a number or a few; of tensors, which one it is.

    To read a tensor would wait for the device. A text is a name, which changes nothing.
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(_setting, value))
    if isinstance(value, str):
        return ""
    return value if isinstance(value, (int, float, type(None))) else id(value)


def _unused_part(
    parameters: Sequence[torch.nn.Parameter], all_ids: set[int], own_ids: set[int]
) -> float:
    """Return which part of the gradients of a module's own parameters no optimizer uses: 0 to 1.

    Either a parameter with a gradient is in no optimizer, or all parameters of the optimizer that
    took a step have lost theirs. The latter counts only if the trace shows that gradients were
    computed, which the offline half checks.

    Args:
        all_ids: ids of the parameters of all known optimizers.
        own_ids: ids of the parameters of the optimizer that took a step.
    """
    computed = [p for p in parameters if p.grad is not None]
    needless = sum(int(p.numel()) for p in computed if id(p) not in all_ids)
    if needless:
        return needless / sum(int(p.numel()) for p in computed)
    trainable = [p for p in parameters if id(p) in own_ids and p.requires_grad]
    return float(bool(trainable) and all(p.grad is None for p in trainable))


@contextmanager
def stepping() -> Iterator[list[torch.optim.Optimizer]]:
    """Collect the optimizers that take a step inside the block, on any thread."""
    stepped: list[torch.optim.Optimizer] = []

    def note(optimizer: torch.optim.Optimizer) -> None:
        if all(stepped_before is not optimizer for stepped_before in stepped):
            stepped.append(optimizer)

    unhook = hook_steps(note)
    try:
        yield stepped
    finally:
        unhook()
