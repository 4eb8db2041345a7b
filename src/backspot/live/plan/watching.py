"""The calls of models in one real step, with what they were given and the gradients they got."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch

from backspot.interrupts import pass_on
from backspot.live.plan.losses import Loss, LossWatch
from backspot.live.plan.room import FIXED, check_room, fits, sample_of
from backspot.live.torch_internals.autograd import in_backward
from backspot.live.torch_internals.dynamo import compilations
from backspot.live.torch_internals.process import hooks_of, tree_flatten, tree_map
from backspot.live.trials.chains import autocast_of, tensors_of
from backspot.live.trials.measuring import reason
from backspot.live.trials.twins import Autocast, Refused, check_plain, twin

_MOST_CALLS = 8
"""Calls of different kinds in a step: each is kept with its inputs, and run in each comparison."""
_DEEPEST = 6
"""How deep tensors are looked for in an output, which may refer to itself."""
_COPIES = 6
"""How many times the model must fit into free memory: three copies, each with gradients."""


@dataclass(eq=False)
class Call:
    """A call of a model in the step, and how often calls like it came.

    Attributes:
        module: which of the models, by its number.
        args: copies of what it was given.
        kwargs: likewise.
        autocast: the autocast around it.
        grad: whether gradients were on.
        random: the states of random generators before it.
        sizes: the shape of each tensor in its output.
        samples: some numbers of each.
        gradients: the gradient of each that got one, by its place.
        seeded: some numbers of those that were too large to keep, by their place.
        loss: what follows it up to the backward, if that can run again.
        reached: the names of the parameters that a backward from its outputs reaches.
        count: how often a step makes such a call.
        problem: why it cannot be made again, or ``""``.
    """

    module: int
    args: Any
    kwargs: Any
    autocast: Autocast
    grad: bool
    random: tuple[Any, ...]
    sizes: list[torch.Size] = field(default_factory=list)
    samples: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    seeded: dict[int, torch.Tensor] = field(default_factory=dict)
    loss: Loss | None = None
    reached: frozenset[str] = frozenset()
    count: int = 1
    problem: str = ""

    @property
    def ends(self) -> list[int]:
        """The places of the outputs that a backward begins at."""
        return sorted({*self.gradients, *self.seeded})


Kept = tuple[int, int, str]
"""An attribute of a part of a model: numbers of both, and its name."""


class Watching:
    """Sees the calls of models on this thread, from ``begin`` to ``end``.

    Attributes:
        models: the models and their direct parts, by number; what is called within another call is
            a part of that.
        copies: a copy of each that was called, as it was before its first call.
        calls: the calls, each kind once.
        why_not: why they cannot be made again, or ``""``.
        why_not_compiled: why copies cannot be compiled, or ``""``.
        why_no_loss: why the loss does not run after the copies, or ``""``.
        checkpoints: where modules of Python have ``checkpoint``, if the models call it.
        has_loss: whether what follows the calls runs again too; not with another batch, of whose
            size its functions may know.
        until: when the time of the plan is up, in seconds of ``time.monotonic``.
        keeps: bytes of the host's memory that a copy keeps from forward to backward; 0: not known.
        kept: what a call leaves other than it was, as a state that goes from call to call.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        roots = list(dict.fromkeys(models.values()))
        # Some trainers call a method of theirs, and the parts of the model in it.
        children = [child for root in roots for child in root.children()]
        self.models = list(dict.fromkeys([*roots, *children]))
        self.copies: dict[int, torch.nn.Module] = {}
        self.calls: list[Call] = []
        self.why_not = self.why_not_compiled = self.why_no_loss = ""
        self.checkpoints: Sequence[tuple[dict[str, Any], str]] = ()
        self.has_loss = False
        self.until = math.inf
        self.keeps = 0
        self.kept: frozenset[Kept] = frozenset()
        self._handles: list[Any] = []
        self._thread = 0
        self._running: list[tuple[Call | None, bool]] = []
        self._losses = LossWatch(self.models, self.copies)
        self._kinds: dict[object, Call] = {}

    def begin(self) -> None:
        """See calls until ``end``."""
        self._thread = threading.get_ident()
        for number, model in enumerate(self.models):
            before, after = partial(self._before, number), partial(self._after, number)
            self._handles += [
                model.register_forward_pre_hook(before, with_kwargs=True),
                model.register_forward_hook(after, with_kwargs=True, always_call=True),
            ]
        if not self.why_no_loss:
            self._losses.begin()

    def end(self) -> None:
        """See no more."""
        self._losses.end()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if compilations() and not self.why_not_compiled:  # the step's own code, for the first time
            self.why_not_compiled = self.why_no_loss = "the step has compiled code"
        problems = [call.problem for call in self.calls if call.problem]
        self.why_not = self.why_not or next(iter(problems), "")
        if not self.calls and not self.why_not:
            self.why_not = "no step came that called the model"
        self.why_no_loss = self.why_no_loss or self._losses.why_not
        for call in self.calls:
            call.loss = self._losses.losses.get(call)
        self.has_loss = bool(self._losses.losses) and not self.why_no_loss

    def _before(self, number: int, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread or self.why_not:
            return
        self._losses.rests = True
        try:
            # A checkpoint runs its part again in the backward.
            inside = self._running or in_backward()
            outermost = (None, False) if inside else self._noted(number, module, args, kwargs)
            self._running.append(outermost)
        except Refused as refused:
            self.why_not = str(refused)
        except Exception as error:
            pass_on(error)
            self.why_not = reason(error)

    def _noted(
        self, number: int, module: torch.nn.Module, args: Any, kwargs: Any
    ) -> tuple[Call, bool]:
        """Return the call, or the one like it that was seen, and whether it is the first."""
        inputs = list(tensors_of((args, kwargs)))
        check_plain(*inputs)
        tensors = [*module.parameters(), *module.buffers()]
        device = next((tensor.device for tensor in (*tensors, *inputs)), torch.device("cpu"))
        autocast = autocast_of(device)
        grad = torch.is_grad_enabled()
        shapes = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in inputs)
        key = number, module.training, grad, autocast, shapes
        if key in self._kinds:
            self._kinds[key].count += 1
            return self._kinds[key], False
        if len(self.calls) == _MOST_CALLS:
            raise Refused(f"a step calls the models in more than {_MOST_CALLS} different ways")
        random = random_states()
        if number not in self.copies:
            check_plain(*tensors)
            check_room([*tensors, *inputs], _COPIES)
            try:
                self.copies[number] = copied_module(module)
            finally:
                set_random_states(random)  # a module may draw numbers when it is copied
        check_room(inputs, 3)
        args, kwargs = copied_input((args, dict(kwargs)))
        call = Call(number, args, kwargs, autocast, grad, random)
        self._kinds[key] = call
        self.calls.append(call)
        return call, True

    def _after(
        self, number: int, module: torch.nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        if threading.get_ident() != self._thread or not self._running:
            return
        call, is_first = self._running.pop()
        if call is None:
            return
        if output is None:  # the call raised an error, as one that is made again with less
            if is_first:
                self.calls.remove(call)
                self._kinds = {
                    key: other for key, other in self._kinds.items() if other is not call
                }
            return
        try:
            outputs = outputs_of(output)
            if is_first:
                self._fill(call, module, outputs)
            self._losses.follow(call, outputs, is_first=is_first)
            self._losses.rests = False
        except Exception as error:
            pass_on(error)
            call.problem = reason(error)

    def _fill(self, call: Call, module: torch.nn.Module, outputs: list[torch.Tensor]) -> None:
        call.sizes = [output.shape for output in outputs]
        call.samples = [sample_of(output) for output in outputs]
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        leaves = reached_from(outputs)
        call.reached = frozenset(names[id(leaf)] for leaf in leaves if id(leaf) in names)
        for place, output in enumerate(outputs):
            if output.requires_grad and not output.is_leaf:
                note = partial(self._got, call, place)
                self._handles.append(output.register_hook(note))

    def _got(self, call: Call, place: int, gradient: torch.Tensor) -> None:
        self._losses.rests = True
        try:
            if place in call.ends:
                call.problem = "an output of the model goes through more than one backward"
            elif fits([gradient], 2):
                call.gradients[place] = twin(gradient.detach())
            else:
                call.seeded[place] = sample_of(gradient)
        except Exception as error:
            pass_on(error)
            call.problem = reason(error)


def copied_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy without the hooks of the user's; those of PyTorch's norms belong to it.

    Raises:
        Refused: If a function that is put on the module refers to the module itself: its copy
            would train the original.
    """
    modules = list(module.modules())
    own = {*map(id, modules), *map(id, module.parameters())}
    for submodule in modules:
        for name, value in vars(submodule).items():
            if isinstance(value, FunctionType) and not own.isdisjoint(_refers_to(value)):
                raise Refused(
                    f"{type(submodule).__name__}.{name} was replaced, and trains the original"
                )
    computed = (  # such as the weight of a legacy norm, which cannot be copied as part of a graph
        value
        for module in modules
        for value in tensors_of([*vars(module).values()])
        if not value.is_leaf
    )
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in computed}
    for submodule in modules:
        for hooks in hooks_of(submodule):
            torchs = {key: hook for key, hook in hooks.items() if _is_torchs(hook)}
            memo[id(hooks)] = type(hooks)(torchs)
    return copy.deepcopy(module, memo)


def objects_in(inputs: Any) -> list[Any]:
    """Return what a call is given that is no tensor, and that its forward could write to."""
    return [
        leaf
        for leaf in tree_flatten(inputs)[0]
        if not isinstance(leaf, (torch.Tensor, *FIXED)) and not callable(leaf)
    ]


def copied_input(inputs: Any) -> Any:
    """Return what a call is given, with copies of all that its forward could write to.

    Raises:
        Refused: If something of it cannot be copied.
    """

    def of(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return twin(leaf)
        if isinstance(leaf, FIXED) or callable(leaf):
            return leaf
        try:
            return copy.deepcopy(leaf)
        except Exception as error:
            pass_on(error)
            raise Refused(f"a {type(leaf).__name__} that is given cannot be copied") from None

    return tree_map(of, inputs)


def _refers_to(function: FunctionType) -> Iterator[int]:
    """Return the ids of what a function closes over, and of what those methods belong to."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    for value in (*cells, *(function.__defaults__ or ())):
        yield id(value)
        yield id(getattr(value, "__self__", None))


def _is_torchs(hook: object) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils")


def outputs_of(output: Any, depth: int = _DEEPEST) -> list[torch.Tensor]:
    """Return the tensors in an output: of sequences, dictionaries, dataclasses, objects."""
    tensors: dict[int, torch.Tensor] = {}
    pending = [(output, depth)]
    # An inner function that calls itself would hold the tensors until garbage is collected.
    while pending:
        item, left = pending.pop()
        if isinstance(item, torch.Tensor):
            tensors.setdefault(id(item), item)
        elif left:
            pending += [(inner, left - 1) for inner in reversed([*_parts(item)])]
    return list(tensors.values())


def _parts(item: Any) -> Iterator[Any]:
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, (list, tuple)):
        yield from item
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        yield from (getattr(item, attribute.name) for attribute in dataclasses.fields(item))
    elif hasattr(item, "__dict__") and not isinstance(item, (type, torch.nn.Module)):
        yield from vars(item).values()


def reached_from(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves that a backward from these tensors writes gradients of."""
    pending = [
        output.grad_fn for output in outputs if output.requires_grad and output.grad_fn is not None
    ]
    visited, leaves = set[Any](pending), []
    while pending:
        node: Any = pending.pop()
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.append(variable)
        for other, _ in node.next_functions:
            if other is not None and other not in visited:
                visited.add(other)
                pending.append(other)
    return leaves


def random_states() -> tuple[Any, ...]:
    """Return the states of the generators that a model may draw from."""
    numpy: Any = sys.modules.get("numpy")
    return (
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
        random.getstate(),
        numpy.random.get_state() if numpy is not None else None,
    )


def set_random_states(states: tuple[Any, ...]) -> None:
    """Have the generators draw again what they drew after ``random_states``."""
    on_cpu, on_gpu, of_python, of_numpy = states
    torch.set_rng_state(on_cpu)
    if on_gpu is not None:
        torch.cuda.set_rng_state_all(on_gpu)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
