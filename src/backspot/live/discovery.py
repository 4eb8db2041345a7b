"""Which modules a running script trains, without an edit to the script and without a hook.

The garbage collector knows every live object. The models are the outermost modules with a parameter
that an optimizer updates. Loss modules have no such parameter: they are the other outermost modules
that are called with a tensor that requires a gradient, for which their calls are watched for some
steps. So are copies of the models, which run without gradients: a reference, a teacher.

``gc.freeze`` hides objects from the collector's list. If it was called and no model is found, the
search goes from the variables of the running functions to what they refer to.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, compress, repeat, starmap
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from backspot.live.modules import class_name, unwrap
from backspot.live.optimizers import ids_updated_by
from backspot.live.torch_internals.dynamo import is_dynamos
from backspot.live.torch_internals.modules import children_of, is_made, parameters_of


def _living(kind: type) -> list[Any]:
    """Return the live objects of a class and its subclasses.

    While there is a list of all objects, no other thread may run: a tuple that another thread is
    about to fill is in it, and filling one that somebody else refers to raises ``SystemError``. So
    one call into C fills the list, searches it and empties it, and makes no object meanwhile that
    could have the collector begin. All threads wait for it: a third of a second for a million
    objects.
    """
    kinds: dict[int, type] = {id(kind): kind}  # no class is asked for its hash
    pending = [kind]
    while pending:
        subclasses: list[type] = type.__subclasses__(pending.pop())
        for subclass in subclasses:
            if id(subclass) not in kinds:
                kinds[id(subclass)] = subclass
                pending.append(subclass)
    return list(_search(frozenset(kinds)))


def _search(kinds: frozenset[int]) -> Iterator[Any]:
    """Return what finds the objects of some types, once it is asked.

    By the ``id`` of their type, as the ``__class__`` of a proxy can be computed in Python.
    """
    every: list[Any] = []
    filled = map(every.extend, starmap(gc.get_objects, ((),)))
    emptied = map(list.clear, (every,))
    wanted = map(kinds.__contains__, map(id, map(type, iter(every))))
    return compress(chain(filled, iter(every), emptied), chain((False,), wanted, repeat(False)))


def outermost(extra: Iterable[torch.nn.Module] = ()) -> list[torch.nn.Module]:
    """Return the live modules that no other live module contains.

    The graphs that Dynamo made do not count, nor do the copies of modules that it put into them.
    Nor do modules that a thread is about to make.

    Args:
        extra: modules that may be hidden from the garbage collector.
    """
    modules = list({id(module): module for module in (*_living(torch.nn.Module), *extra)}.values())
    modules = [module for module in modules if is_made(module)]
    graphs = [module for module in modules if is_dynamos(module)]
    submodules = {id(submodule) for graph in graphs for submodule in graph.modules()}
    parameters_inside = {
        id(parameter)
        for module in modules
        if id(module) not in submodules
        for parameter in parameters_of(module)
    }
    modules = [
        module
        for module in modules
        if not (
            id(module) in submodules
            and all(id(p) in parameters_inside for p in module.parameters())
        )
    ]
    inside = {id(child) for module in modules for child in children_of(module).values()}
    return [module for module in modules if id(module) not in inside]


_MOST_VISITED = 300_000
_NOT_ENTERED = (ModuleType, type, FunctionType, BuiltinFunctionType, CodeType, torch.Tensor)


def held_by_variables() -> list[torch.nn.Module]:
    """Return the modules that variables of the running functions of all threads lead to."""
    pending: deque[Any] = deque()
    for frame in sys._current_frames().values():
        above: FrameType | None = frame
        while above is not None:
            if not _is_of_library(above):
                pending.extend(locals_of(above).values())
                pending.extend(above.f_globals.values())
            above = above.f_back
    visited: dict[int, Any] = {}  # what is here cannot be freed, so the numbers stay
    while pending and len(visited) < _MOST_VISITED:
        value = pending.popleft()
        if id(value) not in visited and not issubclass(type(value), _NOT_ENTERED):
            visited[id(value)] = value
            pending.extend(gc.get_referents(value))
    return [value for value in visited.values() if issubclass(type(value), torch.nn.Module)]


def trained_by(
    optimizers: Iterable[torch.optim.Optimizer], roots: Collection[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Return the modules with a parameter that one of the optimizers updates.

    Some optimizers update copies of their own, in another precision or in partitions. If none of
    the modules has an updated parameter, the modules with a parameter that has a gradient count.
    """
    updated = updated_by(optimizers, roots)
    if updated:
        return updated
    return [root for root in roots if any(p.grad is not None for p in root.parameters())]


def is_trainable(module: torch.nn.Module) -> bool:
    """Return whether a parameter of a module takes a gradient."""
    return any(parameter.requires_grad for parameter in module.parameters())


def updated_by(
    optimizers: Iterable[torch.optim.Optimizer], roots: Collection[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Return the modules of which one of the optimizers holds a parameter."""
    updated = ids_updated_by(optimizers)
    return [root for root in roots if not updated.isdisjoint(map(id, root.parameters()))]


def other_optimizers(
    known_optimizers: Collection[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    """Return the live optimizers with a parameter that none of the known ones updates."""
    updated = ids_updated_by(known_optimizers)
    return [
        optimizer
        for optimizer in _living(torch.optim.Optimizer)
        if hasattr(optimizer, "param_groups") and not ids_updated_by([optimizer]) <= updated
    ]


def only_loader() -> Any:
    """Return the live ``DataLoader``; ``None`` if there are several, or none."""
    data: Any = sys.modules.get("torch.utils.data")
    loaders = _living(data.DataLoader) if data is not None else []
    return loaders[0] if len(loaders) == 1 else None


def profilers() -> list[torch.profiler.profile]:
    """Return the live profilers of the script."""
    return _living(torch.profiler.profile)


class CallWatch:
    """Observes which of some modules this thread calls that belong to the training.

    These are called with a tensor that requires a gradient, or are copies of a trained model: a
    reference, a teacher, a target network.

    Args:
        modules: those to observe.
        trained: the models that are trained.
        in_training: note those, too, whose parameters a call may give gradients to.

    Attributes:
        trained: as given.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        trained: Sequence[torch.nn.Module],
        *,
        in_training: bool = False,
    ) -> None:
        self._called: dict[int, torch.nn.Module] = {}
        self.trained = trained
        self._shapes = {_shape(model) for model in trained}
        self._thread = threading.get_ident()
        self._in_training = in_training
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True)
            for module in modules
            if not isinstance(module, torch.jit.ScriptModule)
        ]

    def end(self) -> list[torch.nn.Module]:
        """Stop observing, and return the modules that were called in this way."""
        for handle in self._handles:
            handle.remove()
        called = list(self._called.values())
        self._called.clear()
        return called

    def _before(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if threading.get_ident() != self._thread or id(module) in self._called:
            return
        needs_gradient = any(_needs_gradient(value) for value in (*args, *kwargs.values()))
        if self._in_training and torch.is_grad_enabled():
            needs_gradient |= is_trainable(module)
        if needs_gradient or _shape(module) in self._shapes:
            self._called[id(module)] = module


def _shape(model: torch.nn.Module) -> tuple[tuple[str, type], ...]:
    """Return what a copy of a model has in common with it: the names and classes of its modules."""
    return tuple((path, type(module)) for path, module in unwrap(model).named_modules())


def _needs_gradient(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_needs_gradient(item) for item in value)
    if isinstance(value, dict):
        return any(_needs_gradient(item) for item in value.values())
    return isinstance(value, torch.Tensor) and value.requires_grad


# Names -------------------------------------------------------------------------------------------


def named(
    models: Collection[torch.nn.Module], others: Collection[torch.nn.Module]
) -> dict[str, torch.nn.Module]:
    """Give each module the name of the variable or attribute that holds it on the calling stack.

    One that no variable holds has the name that it has itself, as Keras's layers do, or that of its
    class.

    Args:
        models: the models. A single one has the empty name, so that its paths are those of
            ``named_modules``.
    """
    # The outermost variable counts: the script's name for a module, not that of a library.
    variables = {id(module): name for name, module in _variables(sys._getframe(1))}
    named_modules: dict[str, torch.nn.Module] = {}
    for module in (*models, *others):
        single = len(models) == 1 and module in models
        name = "" if single else variables.get(id(module), "") or _own_name(module)
        if not (name or single):
            name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name(unwrap(module))).lower()
        names_taken = {
            *named_modules,
            *(
                child
                for module_named in named_modules.values()
                for child in children_of(unwrap(module_named))
            ),
        }
        number, free = 2, name
        while free in names_taken:
            number, free = number + 1, f"{name}_{number}"
        named_modules[free] = module
    return named_modules


def _own_name(module: torch.nn.Module) -> str:
    """Return the name that a module's author gave it, ``""`` for none."""
    name = vars(module).get("name")
    return name if isinstance(name, str) and _NAME.fullmatch(name) else ""


_NAME = re.compile(r"[\w./-]{1,80}")


def _variables(frame: FrameType | None) -> Iterator[tuple[str, torch.nn.Module]]:
    """Iterate over the modules that variables hold, and attributes of ``self``, innermost first."""
    while frame is not None:
        if not _is_of_library(frame):
            values = locals_of(frame)
            owner = values.get("self")
            attributes = getattr(owner, "__dict__", {}) if owner is not None else {}
            for name, value in (*values.items(), *attributes.items()):
                if issubclass(type(value), torch.nn.Module) and name != "self":
                    yield name, value
            values.clear()
            owner = attributes = value = None
        frame = frame.f_back


def _is_of_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(("torch.", "backspot."))


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame, which keeps no copy of them."""
    mapping = frame.f_locals
    values = dict(mapping)
    is_copy = type(mapping) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    # The frame would keep the copy, and with it the tensors of this step. A debugger would write an
    # empty copy back, so the copy stays then.
    if is_copy and sys.gettrace() is None:
        mapping.clear()
    return values
