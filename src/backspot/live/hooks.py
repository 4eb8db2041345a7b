"""The hooks that stand on a module. They hold its names, and no module, tensor or node."""

from __future__ import annotations

import sys
from contextlib import nullcontext, suppress
from types import FunctionType, MethodType
from typing import Any

from backspot.live import calls, markers, source_lines, torch_internals
from backspot.live.calls import calls_that_fail
from backspot.live.calls import local as _local
from backspot.live.owner import Owner, Scope, marker
from backspot.live.sessions import Sessions, sessions
from backspot.trace.labels import Kind

__all__ = [
    "KEY",
    "BackwardEnd",
    "BackwardStart",
    "Enter",
    "Hook",
    "Leave",
    "LeaveAndExplain",
    "hook_of",
    "put_after",
    "put_around_backward",
    "put_before",
    "take_away",
]


# PyTorch would give each hook a number, and Dynamo's code for a block asks for that number: then no
# block could use the code that was compiled for its like, and a model compiled block by block would
# run into the recompile limit. Besides, what is under one key can be taken away whatever interrupts
# its placing: there is no handle to lose.
KEY = -0xBAC5

# A hook comes after its flags and goes before them: PyTorch asks for the flags of hooks it finds.
_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")


def put_before(module: Any, hook: Any) -> None:
    """Run this hook before all others of the module's."""
    module._forward_pre_hooks_with_kwargs[KEY] = True
    module._forward_pre_hooks[KEY] = hook
    module._forward_pre_hooks.move_to_end(KEY, last=False)


def put_after(module: Any, hook: Any) -> None:
    """Run this hook after all others of the module's that there are, errors or not."""
    module._forward_hooks_with_kwargs[KEY] = True
    module._forward_hooks_always_called[KEY] = True
    module._forward_hooks[KEY] = hook


def put_around_backward(module: Any, before: Any, after: Any) -> None:
    """Add a full backward pre-hook and a full backward hook."""
    module._backward_pre_hooks[KEY] = before
    module._is_full_backward_hook = True
    module._backward_hooks[KEY] = after


def take_away(module: Any, *, only_after: bool = False, keep_after: bool = False) -> None:
    """Take our hooks away; a module without any is left as it is.

    Args:
        module: any module.
        only_after: take away just the hook that runs after the call.
        keep_after: leave that one, for PyTorch may be going through its dictionary.
    """
    after = () if keep_after else _AFTER
    for name in after if only_after else (*_BEFORE, *_BACKWARD, *after):
        getattr(module, name, {}).pop(KEY, None)


# A global is found faster than an attribute of a module.
_is_dynamo_compiling, _labelling = torch_internals.is_dynamo_compiling, torch_internals.labelling
_next_number = torch_internals.sequence_number
_mark_nodes, _mark_output = markers.mark_nodes, markers.mark_output


class Hook:
    """What every hook of Backspot on a module is, so that it can be told from others'."""

    __slots__ = ("owner",)

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies leave our hooks out (copies.py). Should one be copied nevertheless, by a class with
        # ways of its own, then what comes out is idle, and loads where Backspot is not installed:
        # it is the standard library's, takes anything and returns None.
        return getattr, (nullcontext(), "__exit__")


class Enter(Hook):
    """The forward pre-hook: opens the label of the call and marks the nodes of its inputs.

    Args:
        owner: whose calls it labels.
        leave: what is to end them. It is put beside this hook with the first call that a profiler
            records, and taken away when the profiler stops: a module with one hook is called at
            half the cost of one with two. Modules that Dynamo has compiled never come here, so
            that what it knows of their hooks stays true. ``None`` if it stands there already.
    """

    __slots__ = ("_leave",)

    def __init__(self, owner: Owner, leave: Leave | None = None) -> None:
        super().__init__(owner)
        self._leave = leave.__call__ if leave is not None else None

    def __call__(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Do nothing unless a profiler records; never raises.

        PyTorch asks while it calls the hooks which of them take keyword arguments: a hook that was
        taken away in between is called without.
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
            if self._leave is not None and KEY not in module._forward_hooks:
                put_after(module, self._leave)
                if not owner.scope.active:  # removed meanwhile, on another thread
                    take_away(module)
                    return
            thread = _local.thread
            number = thread.enter(owner, module, kwargs)
            if scope.marks_nodes:
                # Most often the input is what the module before gave, looked at a moment ago.
                if thread.seen_at != number or len(args) != 1 or thread.seen_id != id(args[0]):
                    _mark_nodes(thread, owner, args, number)
                if kwargs:
                    _mark_nodes(thread, owner, tuple(kwargs.values()), number)
        except Exception:
            return  # a label is never worth a failed forward


class Leave(Hook):
    """The forward hook, ``always_call``: closes exactly what the pre-hook of its call opened."""

    __slots__ = ()

    def __call__(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: Any = None,
        output: Any = None,
    ) -> None:
        """Do nothing unless a call of this module is open; never raises."""
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
                found = thread.find(owner, kwargs, failed)
                if found is None:
                    return
                call = found
            number = _next_number()
            try:
                if (
                    output is not None
                    and (thread.seen_at != number or thread.seen_id != id(output))
                    and owner.scope.marks_nodes
                ):
                    _mark_output(thread, owner, output, number)
            finally:
                thread.leave(call, number)
        except Exception:
            return

    def _retire(self, module: Any, output: Any) -> None:
        """Go, if removal had to leave this hook behind while PyTorch went through an error's hooks.

        After a call that succeeds PyTorch goes through a copy.
        """
        if output is not None and hook_of(module._forward_hooks.get(KEY)) is self:
            take_away(module, only_after=True)


class LeaveAndExplain(Leave):
    """As ``Leave``, for ``hooks="module"``: says what to do where full backward hooks fail."""

    __slots__ = ()

    def __call__(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: Any = None,
        output: Any = None,
    ) -> None:
        """Close the label; to an in-place error of PyTorch's backward hooks, add the way out."""
        if _is_dynamo_compiling():
            return
        if output is None:
            with suppress(Exception):  # of more use without the advice than with another error
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
        """Mark that autograd is through with the module."""
        self._marker()


def hook_of(registered: Any) -> Hook | None:
    """The hook of ours that this is; ``None`` for others'.

    What is registered is ``hook.__call__``: Python calls a bound method faster than an object.
    """
    bound = type(registered) is MethodType
    hook: object = getattr(registered, "__self__", None) if bound else registered
    return hook if isinstance(hook, Hook) else None


def _withdraw(scope: Scope) -> None:
    """A profiler stopped: calls cost again what a module with one hook costs."""
    _local.thread.drop(scope)  # it may have stopped within a forward
    if scope.marks_nodes:
        failing = calls_that_fail()  # theirs go when the next profiler stops
        for _, module in scope.live_modules():
            if id(module) not in failing:
                take_away(module, only_after=True)


sessions.when_stopped = _withdraw


def _explain(owner: Owner, error: BaseException | None) -> None:
    if not isinstance(error, RuntimeError) or "BackwardHookFunction" not in str(error):
        return
    advice = (
        f"Backspot: this comes from instrument(..., hooks='module'), at "
        f"{owner.path or 'the model'!r} ({owner.class_name}): PyTorch's full backward hooks "
        "do not bear in-place operations. Use hooks='node' (the default), which leaves the "
        "graph as it is."
    )
    if "Backspot:" in "".join([str(error), *getattr(error, "__notes__", ())]):
        return  # told by a module further in, which is nearer to the cause
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
torch_internals.keep_from_dynamo(
    *_functions_of(
        torch_internals, markers, calls, calls.Thread, calls.Call, calls._Local, Owner, Scope
    ),
    *_functions_of(source_lines, source_lines.Recorder, source_lines.Store, source_lines.Book),
    *_functions_of(Sessions, Enter, Leave, LeaveAndExplain, BackwardStart, BackwardEnd),
    marker(Scope.__new__(Scope), ""),  # all markers are of one code
    put_after,
    put_before,
    take_away,
    _explain,
)
