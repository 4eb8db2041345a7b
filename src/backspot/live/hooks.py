"""The hooks that ``instrument`` registers on modules. They hold no module, tensor or node."""

from __future__ import annotations

import copyreg
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch

from backspot.interrupts import contained, pass_on
from backspot.live import calls, markers, source_lines
from backspot.live.calls import Call, Intervals, calls_that_fail, local as _local
from backspot.live.owner import Owner, Scope, marker
from backspot.live.sessions import Sessions, sessions
from backspot.live.torch_internals import autograd, dynamo, lookup, modules, profiler
from backspot.live.torch_internals.modules import (
    KEY,
    put_after,
    take_away,
    without_backward_flag,
)
from backspot.trace.labels import Kind
from backspot.trace.names import BACKWARD_HOOK_FUNCTION, backward_hook_mark

# A global is found faster than an attribute of a module.
_is_dynamo_compiling, _labelling = dynamo.is_dynamo_compiling, autograd.labelling
_next_number = autograd.sequence_number
_forward_hooks_of = modules.forward_hooks_of
_mark_inputs, _mark_output = markers.mark_inputs, markers.mark_output


class Hook:
    """The base of every hook that Backspot registers on a module."""

    __slots__ = ("owner",)

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies leave Backspot's hooks out (below). If a class with its own way of copying
        # copies one all the same, the copy does nothing, and loads where Backspot is not
        # installed: this method of the standard library takes any arguments and returns None.
        return getattr, (nullcontext(), "__exit__")


class Enter(Hook):
    """The forward pre-hook: opens the label of the call and marks the nodes of its inputs.

    Args:
        leave: the hook that ends them. The first call that a profiler records registers it, and it
            is removed when the profiler stops: a module with one hook is called at half the cost of
            one with two. Modules that Dynamo has compiled never run this hook, so what Dynamo knows
            of their hooks stays true.
    """

    __slots__ = ("_leave",)

    def __init__(self, owner: Owner, leave: Leave) -> None:
        super().__init__(owner)
        self._leave = leave.__call__

    def __call__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Do nothing unless a profiler records; never raise.

        PyTorch asks during the call which hooks take keyword arguments: a hook that was removed in
        between is called without them.
        """
        if _is_dynamo_compiling():  # asked first and alone: Dynamo folds it
            return
        if not _labelling():
            return
        try:
            owner = self.owner
            scope = owner.scope
            if not scope.active:
                return
            if KEY not in _forward_hooks_of(module):
                put_after(module, self._leave)
                if not owner.scope.active:  # removed meanwhile, on another thread
                    take_away(module)
                    return
            thread = _local.thread
            number = thread.enter(Call(owner, None, id(module), id(kwargs)), module)
            if scope.marks_nodes:
                _mark_inputs(thread, owner, args, kwargs, number)
        except Exception as error:
            pass_on(error)  # a label is never worth a failed forward


class Leave(Hook):
    """The forward hook, ``always_call``: ends exactly the label that the call's pre-hook opened."""

    __slots__ = ()

    def __call__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Any = None,  # the output, if PyTorch passes no keyword arguments
        output: Any = None,
    ) -> None:
        """Do nothing unless a call of this module is open; never raise."""
        if _is_dynamo_compiling():
            return
        try:
            thread = _local.thread
            if not thread.calls:
                if not self.owner.scope.active:
                    self._retire(module, output)
                return
            owner = self.owner
            call = thread.calls[-1]
            if call.kwargs_id != id(kwargs) or call.owner is not owner:
                failed = output is None and sys.exc_info()[0] is not None
                open_call = thread.find(owner, kwargs, failed)
                if open_call is None:
                    return
                call = open_call
            number = _next_number() if sessions.marking else -1
            try:
                if output is not None and owner.scope.marks_nodes:
                    _mark_output(thread, owner, output, number)
            finally:
                thread.leave(call, number)
        except Exception as error:
            pass_on(error)

    def _retire(self, module: torch.nn.Module, output: Any) -> None:
        """Unregister, if removal left this hook while PyTorch iterated over an error's hooks.

        After a call that succeeds PyTorch iterates over a copy.
        """
        if output is not None and hook_of(_forward_hooks_of(module).get(KEY)) is self:
            take_away(module, only_after=True)


class LeaveAndExplain(Leave):
    """As ``Leave``, for ``hooks="module"``: adds advice to the errors of full backward hooks."""

    __slots__ = ()

    def __call__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Any = None,  # as above
        output: Any = None,
    ) -> None:
        """End the label; add advice to an in-place error of PyTorch's backward hooks."""
        if _is_dynamo_compiling():
            return
        if output is None:
            with contained():  # the error alone is worth more than another error
                _explain(self.owner, sys.exc_info()[1])
        super().__call__(module, args, kwargs, output)


class BackwardStart(Hook):
    """The full backward pre-hook of ``hooks="module"``."""

    __slots__ = ("_marker",)

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._marker = owner.on_node

    def __call__(self, *_: object) -> None:
        """Mark that autograd starts on the module."""
        self._marker()


class BackwardEnd(Hook):
    """The full backward hook of ``hooks="module"``."""

    __slots__ = ("_marker",)

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._marker = marker(owner.scope, owner.label(Kind.BACKWARD_END))

    def __call__(self, *_: object) -> None:
        """Mark that autograd is done with the module."""
        self._marker()


def mark_backward_hooks(owner: Owner, module: torch.nn.Module) -> None:
    """Mark which full backward hooks of its own a module has: a profiler has started."""
    for hook in modules.full_backward_hooks_of(module):
        profiler.emit(backward_hook_mark(source_lines.name_of(hook), owner.path))


def hook_of(registered: object) -> Hook | None:
    """Return the hook of Backspot that this is; ``None`` for hooks of others.

    ``hook.__call__`` is registered, as Python calls a bound method faster than an object.
    """
    bound = type(registered) is MethodType
    hook: object = getattr(registered, "__self__", None) if bound else registered
    return hook if isinstance(hook, Hook) else None


# Copies ------------------------------------------------------------------------------------------
#
# Copies of an instrumented model are plain models. PyTorch keeps a module's hooks in ordered
# dictionaries. While a model is instrumented, ``copy`` and ``pickle`` reduce these with a function
# that leaves Backspot's hooks out. So the class of a module does not matter: lazy, parametrized and
# sharded modules change theirs.

_classes: dict[Scope, tuple[type, ...]] = {}  # the classes that an instrumentation needs reduced
_installed: dict[type, Callable[[Any], Any]] = {}


def keep_copies_plain(scope: Scope, flagged: Iterable[type]) -> None:
    """Leave Backspot's hooks out of copies until ``end_plain_copies(scope)``."""
    _classes[scope] = (OrderedDict, *flagged)
    _install()


def end_plain_copies(scope: Scope) -> None:
    """Undo ``keep_copies_plain``; a second call does nothing."""
    _classes.pop(scope, None)
    _install()


def _install() -> None:
    """Make ``copyreg`` agree with ``_classes``; after an interrupt the next call completes it."""
    wanted = {cls for classes in _classes.values() for cls in classes}
    for cls in wanted:
        reducer = _installed.setdefault(
            cls, _reduce_hooks if cls is OrderedDict else _reduce_module
        )
        copyreg.dispatch_table.setdefault(cls, reducer)  # a class with its own reducer keeps it
    for cls in _installed.keys() - wanted:
        if copyreg.dispatch_table.get(cls) is _installed[cls]:
            del copyreg.dispatch_table[cls]
        del _installed[cls]


def _reduce_hooks(dictionary: OrderedDict[Any, Any]) -> str | tuple[Any, ...]:
    ours = dictionary.get(KEY)  # a hook of Backspot, or the flag of one
    if ours is not True and hook_of(ours) is None:
        return dictionary.__reduce_ex__(4)
    plain = OrderedDict((key, value) for key, value in dictionary.items() if key != KEY)
    vars(plain).update(vars(dictionary))
    return plain.__reduce_ex__(4)


def _reduce_module(module: torch.nn.Module) -> str | tuple[Any, ...]:
    reduced: str | tuple[Any, ...] = module.__reduce_ex__(4)
    if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
        return (*reduced[:2], without_backward_flag(reduced[2]), *reduced[3:])
    return reduced


# When a profiler stops ---------------------------------------------------------------------------


def _withdraw(scope: Scope) -> None:
    """Remove the forward hooks after a profiler stopped: a call with one hook costs less."""
    _local.thread.drop(scope)  # it may have stopped within a forward
    if scope.hooks == "node":
        failing = calls_that_fail()  # their hooks go when the next profiler stops
        for _, module in scope.live_modules():
            if id(module) not in failing:
                take_away(module, only_after=True)


sessions.when_stopped = _withdraw


def _explain(owner: Owner, error: BaseException | None) -> None:
    if not isinstance(error, RuntimeError) or BACKWARD_HOOK_FUNCTION not in str(error):
        return
    advice = (
        f"Backspot: this comes from instrument(..., hooks='module'), at "
        f"{owner.path or 'the model'!r} ({owner.class_name}): PyTorch's full backward hooks "
        "do not work with in-place operations. Use hooks='call' (the default), which leaves the "
        "graph as it is."
    )
    if "Backspot:" in "".join([str(error), *getattr(error, "__notes__", ())]):
        return  # a module further in added it, which is nearer to the cause
    if hasattr(error, "add_note"):
        error.add_note(advice)
    else:
        error.args = (f"{error}\n{advice}", *error.args[1:])


def _functions_of(*holders: object) -> list[FunctionType]:
    return [
        value
        for holder in holders
        for value in vars(holder).values()
        if isinstance(value, FunctionType) and value.__module__.startswith("backspot.live")
    ]


# Every frame that a hook can open while a profiler records.
dynamo.keep_from_dynamo(
    *_functions_of(autograd, dynamo, lookup, modules, profiler),
    *_functions_of(
        markers,
        calls,
        calls.Thread,
        calls.Call,
        calls.Local,
        Intervals,
        Owner,
        Scope,
    ),
    *_functions_of(
        source_lines,
        source_lines.Inside,
        source_lines.LineRecorder,
        source_lines.ExactLineRecorder,
        source_lines.Store,
        source_lines.Book,
    ),
    *_functions_of(Sessions, Enter, Leave, LeaveAndExplain, BackwardStart, BackwardEnd),
    marker(Scope.__new__(Scope), ""),  # all markers share one code object
    autograd.node_hooker(print),  # and all that hook nodes
    _explain,
)
