"""``hooks="call"``: one wrapper around ``torch.nn.Module.__call__``, while a profiler records.

The wrapper is installed when a profiler has started and removed when it stops. At all other times
PyTorch is as it was, and nothing is ever on the model. A dictionary from the ``id`` of a module to
its owner tells which calls have a label.

Most calls need nothing but a range: their label is the module's first within the outermost call,
and the trace itself has their sequence numbers. Such a range is in its thread's list until it ends.
The outermost call, repeated calls and, with markers, all calls go through ``Thread`` as with hooks.

A class with a ``__call__`` of its own that never gets to PyTorch's has a wrapper around that.

Some modules have node hooks instead, as long as the wrapper is installed. Another class with a
``__call__`` of its own calls PyTorch's somewhere within. Around a module with full backward hooks
PyTorch makes nodes after the forward hooks, and a trace does not show which kind of label those
nodes are in.

Where a layer calls ``super().__call__``, as those of transformers do, the guards of compiled code
check ``torch.nn.Module.__call__``. If a model has such modules, the wrapper is put on the classes
of the other modules instead, which guards do not check, and is taken off while Dynamo compiles.
Such a module inside a compiled one has no hooks, as guards check those too.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from backspot.imports import unseen_by_warnings
from backspot.interrupts import contained
from backspot.live.calls import Call, Thread, calls_that_fail, local as _local, wrapper_codes
from backspot.live.class_calls import ClassCalls, passes_to_common, put_hook
from backspot.live.hooks import end_plain_copies, keep_copies_plain, mark_backward_hooks
from backspot.live.markers import mark_inputs, mark_output
from backspot.live.owner import Owner, Scope
from backspot.live.sessions import sessions
from backspot.live.torch_internals import autograd, dynamo, profiler
from backspot.live.torch_internals.lookup import Watch
from backspot.live.torch_internals.modules import (
    MODULE_CALL,
    REPLICATE,
    only_chooses,
    take_away,
    wraps_in_backward_hooks,
)

# A global is found faster than an attribute of a module.
_is_dynamo_compiling, _new_range = dynamo.is_dynamo_compiling, profiler.new_range
_innermost_transform = autograd.innermost_transform
_next_number = autograd.sequence_number

# From Python 3.13 on a class that was changed a thousand times is slow for good. Each session
# changes ``torch.nn.Module`` twice.
_MOST_SESSIONS = 250


class ModuleReference(weakref.ref):  # type: ignore[type-arg]  # generic for type checkers alone
    """A weak reference to a module, which gives up the module's ``id`` when the module dies."""

    __slots__ = ("module_id",)

    module_id: int

    def __new__(cls, module: torch.nn.Module) -> ModuleReference:
        """Return a new reference."""
        reference = super().__new__(cls, module, _forget)
        reference.module_id = id(module)
        return reference

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module, _forget)  # type: ignore[call-arg]


def _forget(reference: Any) -> None:
    if call_wrapper is not None:  # as it is while the interpreter ends
        call_wrapper.owners.pop(reference.module_id, None)


class CallWrapper:
    """The wrapper, installed and removed.

    Each step of that can be repeated after an interrupt.

    Attributes:
        owners: the owners of the modules with labels, by ``id`` of the module; empty while nothing
            records.
        direct: whether the wrapper calls what PyTorch's ``__call__`` would call. Under
            ``with_stack``, Kineto finds modules by the frames of that ``__call__``.
        compiled_class: the class of what ``torch.compile(module)`` returns.
        listed: how many calls were listed so far; it grows with each outermost call of a model.
    """

    direct = False
    compiled_class: type | None = None
    listed = 0

    def __init__(self) -> None:
        self.owners: dict[int, Owner] = {}
        self._replicate = Watch(REPLICATE, self._replicating)
        self._hooked: list[Scope] = []  # the instrumentations with modules that have hooks
        self._references: list[ModuleReference] = []  # to replicas
        self._modules_before: set[str] = set()  # the names of the Python modules
        self._is_inside_another = False  # a tool had wrapped the wrapper when it was to be removed
        self._count = 0
        self._class_calls: ClassCalls | None = None  # where ``torch.nn.Module`` has no wrapper
        self._listed_before = 0  # when an optimizer's last step ended

    def begin(self) -> None:
        """Label the modules of all instrumentations that want it: a profiler has started."""
        for scope in sessions.live_scopes():
            self.add(scope)

    def add(self, scope: Scope) -> None:
        """Label the modules of an instrumentation, if it wants that: a profiler records."""
        if scope.hooks != "call":
            return
        installed = self._install()
        classes = self._class_calls
        inside = classes.inside(scope) if classes is not None else ()
        hooked = []
        for owner, module in scope.live_modules():
            if (installed and _is_wrapped(module, classes)) or id(module) in inside:
                self.owners[id(module)] = owner
            else:
                hooked.append((owner, module))
        if hooked:
            self._hooked.append(scope)
            keep_copies_plain(scope, ())
            for owner, module in hooked:
                put = put_hook if classes is None else classes.hook
                put(owner, module)
                with contained():
                    mark_backward_hooks(owner, module)

    @property
    def is_on_classes(self) -> bool:
        """Whether the wrapper is on the classes of modules at this moment."""
        return self._class_calls is not None

    def passes_on(self, module: torch.nn.Module) -> bool:
        """Return whether another tool passes on a call of its own that has a label already.

        It had taken the wrapper for the ``__call__`` of a class, and kept it.
        """
        return self._class_calls is not None and self._class_calls.has_own(type(module))

    def after_step(self) -> None:
        """Have node hooks label modules where another tool's call has taken the wrapper's place.

        An optimizer has taken a step. That call stays. One that has the wrapper inside is no
        matter: calls went through it since the step before.
        """
        current = MODULE_CALL.get()
        is_listed, self._listed_before = self.listed > self._listed_before, self.listed
        if not sessions.wraps_calls or self._class_calls is not None or current is labelled_call:
            return
        if is_listed and not only_chooses(current):
            return
        self.owners.clear()
        for scope in sessions.live_scopes():
            if scope.hooks == "call" and scope not in self._hooked:
                self._hooked.append(scope)
                keep_copies_plain(scope, ())
                for owner, module in scope.live_modules():
                    put_hook(owner, module)

    def drop(self, scope: Scope) -> None:
        """Label the modules of an instrumentation no more."""
        for owner, reference in scope.modules:
            if (
                isinstance(reference, ModuleReference)
                and self.owners.get(reference.module_id) is owner
            ):
                del self.owners[reference.module_id]
        for module_id, owner in list(self.owners.items()):  # replicas
            if owner.scope is scope:
                del self.owners[module_id]
        if scope in self._hooked:
            self._take_hooks(scope)
        if not any(scope.hooks == "call" for scope in sessions.live_scopes()):
            self.end()

    def end(self) -> None:
        """Leave PyTorch as it was: the profiler has stopped."""
        self.owners.clear()
        while self._hooked:
            self._take_hooks(self._hooked[-1])
        if self._class_calls is not None:
            self._class_calls.end()
            self._class_calls = None
            self._replicate.end()
            self._references.clear()
        elif sessions.wraps_calls:
            current = MODULE_CALL.get()
            # A tool that has gone can have put back what was there before it and the wrapper.
            self._is_inside_another = current not in (labelled_call, _original) and not (
                only_chooses(current)
            )
            if current is labelled_call:
                MODULE_CALL.set(_original)
            self._replicate.end()
            self._correct_imports()
            self._references.clear()
        sessions.wraps_calls = False
        sessions.make_room()

    def _install(self) -> bool:
        """Install the wrapper; return whether module calls go through it."""
        global _original
        if sessions.wraps_calls:
            return True
        if sys.version_info >= (3, 13) and self._count >= _MOST_SESSIONS:
            return False
        current = MODULE_CALL.get()
        if current is not labelled_call and current is not _original:
            if self._is_inside_another:
                return False  # it may still be inside, and would be called twice
            _original = current
        self._modules_before = set(sys.modules)
        self.direct = only_chooses(_original) and sys.getprofile() is None
        self.compiled_class = dynamo.compiled_class()
        self._count += 1
        sessions.wraps_calls = True
        sessions.make_room()
        self._replicate.begin()
        if all(
            passes_to_common(module)
            for scope in sessions.live_scopes()
            for _, module in scope.live_modules()
        ):
            MODULE_CALL.set(labelled_call)
            self._listed_before = self.listed
        else:
            self._class_calls = ClassCalls(labelled_on_class, labelled_compiled, labelled_own)
        return True

    def _replicating(self, replicate: partial[Any]) -> Any:
        replica = replicate()
        with contained():  # at worst the replica has no label
            owner = self.owners.get(id(replicate.args[0]))
            if owner is not None:
                self._references.append(ModuleReference(replica))
                self.owners[id(replica)] = owner
        return replica

    def _take_hooks(self, scope: Scope) -> None:
        failing = calls_that_fail()
        for _, module in scope.live_modules():
            take_away(module, keep_after=id(module) in failing)
        end_plain_copies(scope)
        self._hooked[:] = [hooked for hooked in self._hooked if hooked is not scope]

    def _correct_imports(self) -> None:
        """Correct what was imported meanwhile: Dynamo keeps ``Module.__call__`` in a global."""
        for name in set(sys.modules) - self._modules_before:
            for attribute, value in list(vars(sys.modules.get(name) or sys).items()):
                if value is labelled_call:
                    setattr(sys.modules[name], attribute, _original)


def _is_wrapped(module: torch.nn.Module, classes: ClassCalls | None) -> bool:
    """Have the wrapper label a module; return whether it can."""
    if wraps_in_backward_hooks(module):
        return False
    return passes_to_common(module) if classes is None else classes.put(module)


# What the wrapper calls. A global, as Dynamo would compile a region again whose guards found that
# ``Module.__call__`` has a closure no more.
_original: Any = MODULE_CALL.get()
_Module = torch.nn.Module


def labelled_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module, as ``torch.nn.Module.__call__`` while a profiler records."""
    if _is_dynamo_compiling():  # asked first and alone: Dynamo folds it
        return _original(self, *args, **kwargs)
    owners = call_wrapper.owners
    owner = owners.get(id(self))
    if owner is None:
        if not owners or type(self) is call_wrapper.compiled_class:
            return _other_call(self, args, kwargs)
        return _original(self, *args, **kwargs)
    if _innermost_transform() is not None:
        autograd.pass_over()
        return _original(self, *args, **kwargs)
    thread = _local.thread
    number = sessions.number
    if thread.brief != number or not thread.calls or owner in thread.counts:
        return _listed_call(self, args, kwargs, thread, owner)
    thread.counts[owner] = 1
    # No local variable holds the range: an exception that is kept would keep it open.
    ranges = thread.ranges
    depth = len(ranges)
    ranges.append(_new_range(owner.forward))
    try:
        ranges[depth].__enter__()
        if call_wrapper.direct and self._compiled_call_impl is None:
            return self._call_impl(*args, **kwargs)
        return _original(self, *args, **kwargs)
    finally:
        if number != sessions.number:
            sessions.put_ranges_aside(ranges)
        elif len(ranges) - depth == 1:
            ranges.pop()  # frees the range, which ends it
        else:  # also the ranges that an interrupt left in it
            del ranges[depth:]


labelled_call.__name__ = "__call__"  # by which pickle finds a bound method


def labelled_on_class(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module as ``labelled_call``, where the wrapper is on its class.

    It hides the ``__call__`` of all modules, which another tool may replace meanwhile.
    """
    current = _Module.__call__
    if not call_wrapper.is_on_classes:
        with contained():
            # Another tool has put it back since.
            if vars(type(self)).get("__call__") is labelled_on_class:
                del type(self).__call__
        return current(self, *args, **kwargs)
    if current is _original:
        return labelled_call(self, *args, **kwargs)
    return labelled_own(self, current, args, kwargs)


labelled_on_class.__name__ = "__call__"


@unseen_by_warnings
def _listed_call(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    thread: Thread,
    owner: Owner,
    original: Callable[..., Any] | None = None,
) -> Any:
    """Run a call that is listed in its thread, as a call with hooks is."""
    ending = sessions.ending
    if (ending is not None and ending()) or (original is None and call_wrapper.passes_on(module)):
        return (_original if original is None else original)(module, *args, **kwargs)
    call = Call(owner, None, id(module))
    marks = owner.scope.marks_nodes
    try:
        with contained():  # a label is never worth a failed forward
            if not _is_passed_on(thread, call) and not autograd.exporting():
                number = thread.enter(call, module)
                call_wrapper.listed += 1
                if marks:
                    mark_inputs(thread, owner, args, kwargs, number)
        if original is not None:
            result = original(module, *args, **kwargs)
        elif call_wrapper.direct and module._compiled_call_impl is None:
            result = module._call_impl(*args, **kwargs)
        else:
            result = _original(module, *args, **kwargs)
        with contained():
            number = _next_number() if sessions.marking else -1
            if marks and call in thread.calls:
                mark_output(thread, owner, result, number)
            thread.leave_if_listed(call, number)
    except BaseException:
        with contained():
            thread.leave_if_listed(call, _next_number() if sessions.marking else -1)
        raise
    return result


def _is_passed_on(thread: Thread, call: Call) -> bool:
    """Return whether ``torch.compile(module)`` passes its own call on to the module."""
    around = thread.calls[-1] if thread.calls else None
    return (
        around is not None
        and around.owner is call.owner
        and around.module_id != call.module_id
        and not around.kwargs_id
    )


def _other_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call of a module without a label of its own."""
    owner = None
    with contained():
        if not sessions.wraps_calls:
            # Another tool had wrapped the wrapper, and has put it back since.
            if MODULE_CALL.get() is labelled_call:
                MODULE_CALL.set(_original)
        elif _innermost_transform() is None:
            # ``torch.compile(module)`` keeps the ``__call__`` of the time when it was made.
            inner = dynamo.compiled_module(module)
            owner = call_wrapper.owners.get(id(inner))
    if owner is None:
        return _original(module, *args, **kwargs)
    return _listed_call(module, args, kwargs, _local.thread, owner)


def labelled_compiled(
    self: torch.nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call what ``torch.compile(module)`` returned, where the wrapper is on classes."""
    owner = None
    with contained():
        if _innermost_transform() is None:
            owner = call_wrapper.owners.get(id(dynamo.compiled_module(self)))
    if owner is None:
        return original(self, *args, **kwargs)
    return _listed_call(self, args, kwargs, _local.thread, owner, original)


def labelled_own(
    self: torch.nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a module by the ``__call__`` of its class, which never gets to PyTorch's."""
    owner = call_wrapper.owners.get(id(self))
    if owner is None or _is_dynamo_compiling():
        return original(self, *args, **kwargs)
    if _innermost_transform() is not None:
        autograd.pass_over()
        return original(self, *args, **kwargs)
    return _listed_call(self, args, kwargs, _local.thread, owner, original)


call_wrapper = CallWrapper()
sessions.when_started = call_wrapper.begin
sessions.when_ending = call_wrapper.end
sessions.when_stepped = call_wrapper.after_step
wrapper_codes.add(_listed_call.__code__)

# Every frame that a call can open, but for those that node hooks open too.
dynamo.keep_from_dynamo(
    labelled_call,
    labelled_on_class,
    labelled_compiled,
    labelled_own,
    _listed_call,
    _other_call,
    _is_passed_on,
    contained.__enter__,
    contained.__exit__,
)
