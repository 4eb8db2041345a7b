"""``instrument``: what it takes, what it refuses, and the handle that undoes it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from backspot.errors import AlreadyInstrumentedError, UsageError
from backspot.live.calls import calls_that_fail, current_thread
from backspot.live.copies import end_plain_copies, keep_copies_plain
from backspot.live.hooks import (
    BackwardEnd,
    BackwardStart,
    Enter,
    Leave,
    LeaveAndExplain,
    hook_of,
    put_after,
    put_around_backward,
    put_before,
    take_away,
)
from backspot.live.modules import class_name, find_modules, unwrap
from backspot.live.owner import Owner, Scope
from backspot.live.sessions import sessions

__all__ = ["NO_FUNCTION", "Instrumentation", "instrument"]

NO_FUNCTION = ": a function bears no labels; nn.CrossEntropyLoss() and its like do"
"""What to say to whoever gives a function where a module is wanted."""

_MODES = ("node", "module")


class Instrumentation:
    """The hooks that ``instrument`` put on a model; a context manager that takes them off again.

    Attributes:
        name: the name that its paths begin with.
        depth: how many parts a labelled path has at most, or ``None``.
        hooks: ``"node"`` or ``"module"``.
        lines: whether the source line of each node is recorded.
        paths: the labelled module paths, parents first.
        skipped: the paths that could not be labelled, with the reason.
    """

    __module__ = "backspot"

    def __init__(
        self,
        scope: Scope,
        *,
        name: str,
        depth: int | None,
        hooks: str,
        lines: bool,
        paths: tuple[str, ...],
        skipped: dict[str, str],
    ) -> None:
        self.name = name
        self.depth = depth
        self.hooks = hooks
        self.lines = lines
        self.paths = paths
        self.skipped = skipped
        self._scope = scope
        self._removed = False
        self._model_gone: weakref.finalize[..., Any] | None = None
        # Modules with a flag that a full backward hook sets and its removal does not unset.
        self._flagged: list[weakref.ref[Any]] = []

    @property
    def active(self) -> bool:
        """Whether the hooks are on the model still."""
        return self._scope.active

    def remove(self) -> None:
        """Take every hook off the model; it is then as it was. A second call does nothing.

        Works at any time, between a forward and its backward too: what graphs still hold of
        Backspot does nothing from now on.
        """
        if self._removed:
            return
        # Each part can be repeated: a call that was interrupted is finished by the next one.
        self._scope.active = False
        failing = calls_that_fail()
        for _, module in self._scope.live_modules():
            take_away(module, keep_after=id(module) in failing)
        for reference in self._flagged:
            module = reference()
            if module is not None and not module._backward_hooks:
                module._is_full_backward_hook = None
        current_thread().drop(self._scope)
        end_plain_copies(self._scope)
        if self._model_gone is not None:
            self._model_gone.detach()
        sessions.depart(self._scope)
        self._removed = True

    def __enter__(self) -> Instrumentation:
        if not self._scope.active:
            raise UsageError("this instrumentation was removed; call instrument(model) again")
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        parts = [f"{len(self.paths)} modules", f"hooks={self.hooks!r}"]
        if self.name:
            parts.append(f"name={self.name!r}")
        if self.depth is not None:
            parts.append(f"depth={self.depth}")
        if self.lines:
            parts.append("lines=True")
        if self.skipped:
            parts.append(f"{len(self.skipped)} skipped")
        if not self.active:
            parts.append("removed")
        return f"Instrumentation({', '.join(parts)})"

    def _put_hooks(self) -> None:
        for owner, module in self._scope.live_modules():
            if self.hooks == "module":
                if module._is_full_backward_hook is None:
                    self._flagged.append(weakref.ref(module))
                put_around_backward(
                    module, BackwardStart(owner).__call__, BackwardEnd(owner).__call__
                )
                put_after(module, LeaveAndExplain(owner).__call__)
                put_before(module, Enter(owner).__call__)
            else:
                put_before(module, Enter(owner, Leave(owner)).__call__)

    def _begin(self) -> None:
        """Put the hooks on. Whatever ends this early, ``remove`` undoes what was done."""
        scope = self._scope
        sessions.join(scope)  # first: no range may be opened while sessions are not counted
        classes = {type(module) for _, module in scope.live_modules()}
        flagged = classes if self.hooks == "module" else ()
        self._model_gone = weakref.finalize(scope.model(), end_plain_copies, scope)
        keep_copies_plain(scope, flagged)
        self._put_hooks()


def instrument(
    model: Any,  # noqa: ANN401 - a torch.nn.Module; anything else is refused
    *,
    depth: int | None = None,
    name: str = "",
    hooks: Literal["node", "module"] = "node",
    lines: bool = False,
) -> Instrumentation:
    """Have every module of a model label its forward and its backward in a profiler's trace.

    The labels read ``forward: blocks.3.attn (Attention)`` and
    ``backward: blocks.3.attn (Attention)``. They are written while a profiler records, and at no
    other time does a hook do more than ask whether one does. Loss and gradients are the same, bit
    for bit, with labels and without.

    With ``hooks="node"`` the autograd graph stays as it is: a backward label is a marker at the
    moment when autograd turns to nodes of that module. A view of memory that was changed in place
    bears no marker, for it is not safe to ask for its node; ``unmarked: …`` counts these. What a
    marker leaves out costs nothing in the report, which goes by autograd's own sequence numbers.

    With ``hooks="module"`` the markers come from ``register_full_backward_pre_hook`` and
    ``register_full_backward_hook``, as is the widely published technique. These wrap what goes into
    and comes out of each module in nodes of their own, so that the graph is another one, in-place
    operations on such tensors fail (``ReLU(inplace=True)``, ``x += shortcut``), outputs in dicts or
    dataclasses bear no marker, and a compiled model's graph breaks. It is there for comparison.

    With ``lines=True`` the trace also tells which line of source made each node, and the report
    names it beside the node. From torch 2.14 on this is the line itself, for about 3 µs a node
    while a profiler records; before, it is the line that called the module, for modules of
    PyTorch's own.

    ``torch.jit.script`` refuses a model while it is instrumented: ``remove()`` before scripting.

    A traced call of a shared module bears its first path. Paths leave out the parts that wrappers
    add (``torch.compile``, data parallelism, activation checkpointing). A ``torch.nn.Identity`` on
    which no hook stands makes no node and launches nothing: it bears no label, which saves its
    cost.

    Args:
        model: the model, or any ``torch.nn.Module``, a loss function too.
        depth: how many parts a path may have, counted within ``model``; 0 labels the model alone,
            ``None`` labels every module.
        name: what the paths begin with; tells several instrumented modules apart.
        hooks: ``"node"`` or ``"module"``.
        lines: whether to record the source line of each node.

    Returns:
        A handle with ``remove()``, and a context manager that calls it.

    Raises:
        UsageError: an argument that cannot be meant, or a path that another instrumented model has.
        AlreadyInstrumentedError: the model, or a part of it, is instrumented already.
    """
    _check_arguments(model, depth, name, hooks, lines)
    instrumentation = None
    try:
        # Half of the time that a model of 50,000 modules takes would be the collector's.
        with _without_collecting():
            instrumentation = _instrumentation_of(
                model, depth=depth, name=name, hooks=hooks, lines=lines
            )
            instrumentation._begin()
        return instrumentation  # noqa: TRY300 - an interrupt may come before it
    except BaseException:  # an interrupt too: all of the hooks, or none
        if instrumentation is not None:
            instrumentation.remove()
        raise


def _instrumentation_of(
    model: Any,  # noqa: ANN401 - a torch module
    *,
    depth: int | None,
    name: str,
    hooks: Literal["node", "module"],
    lines: bool,
) -> Instrumentation:
    _check_plain(model)
    found: list[tuple[str, Any, Any]] = []
    skipped: dict[str, str] = {}
    for inner_path, module, parent in find_modules(model):
        parts = inner_path.count(".") + 1 if inner_path else 0
        if depth is not None and parts > depth:
            continue
        path = ".".join(part for part in (name, inner_path) if part)
        reason = _refusal(module, hooks)
        if reason:
            skipped[path] = reason
        elif not (inner_path and hooks == "node" and _passes_on(module)):
            found.append((path, module, parent))
    if not found:
        raise UsageError(
            f"{type(model).__name__} is a scripted module, which takes no hooks: "
            "instrument the model before scripting it"
        )
    paths = tuple(path for path, _, _ in found)
    _check_paths(paths, model)

    scope = Scope(unwrap(model), frozenset(paths), marks_nodes=hooks == "node", lines=lines)
    owners: dict[int, Owner] = {}
    for path, module, parent in found:
        around = owners.get(id(parent))
        ancestors = around.ancestors | {around} if around else frozenset()
        owners[id(module)] = Owner(scope, path, class_name(module), ancestors)
    instrumentation = Instrumentation(
        scope, name=name, depth=depth, hooks=hooks, lines=lines, paths=paths, skipped=skipped
    )
    scope.modules = [(owners[id(module)], weakref.ref(module)) for _, module, _ in found]
    return instrumentation


def _check_arguments(
    model: object, depth: object, name: object, hooks: object, lines: object
) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"instrument() takes a torch.nn.Module, not {type(model).__name__}"
            f"{NO_FUNCTION if callable(model) else ''}"
        )
    if depth is not None and (type(depth) is not int or depth < 0):
        raise UsageError(f"depth must be None, 0 or a positive int, not {depth!r}")
    if not isinstance(name, str):
        raise UsageError(f"name must be a str, not {type(name).__name__}")
    if name and not all(name.split(".")):
        raise UsageError(f"name must be a module path such as 'loss' or 'heads.a', not {name!r}")
    if hooks not in _MODES:
        raise UsageError(f"hooks must be 'node' or 'module', not {hooks!r}")
    if not isinstance(lines, bool):
        raise UsageError(f"lines must be True or False, not {lines!r}")


def _check_plain(model: Any) -> None:  # noqa: ANN401 - a torch module
    for path, module, _ in find_modules(model):
        # A scripted module may keep its hooks elsewhere; it cannot bear one of ours.
        for registered in vars(module).get("_forward_pre_hooks", {}).values():
            hook = hook_of(registered)
            if hook is not None and hook.owner.scope.active:
                where = f"its module {path!r}" if path else "it"
                raise AlreadyInstrumentedError(
                    f"{type(model).__name__} cannot be instrumented: {where} "
                    f"({type(module).__name__}) is instrumented already, as "
                    f"{hook.owner.path!r}; remove() that instrumentation first"
                )


def _check_paths(paths: tuple[str, ...], model: object) -> None:
    for scope in sessions.live_scopes():
        shared = scope.paths.intersection(paths)
        if shared:
            path = min(shared)
            called = f"the path {path!r}" if path else "the empty path of a root"
            raise UsageError(
                f"{called} is in use by another instrumented model: pass name=, for instance "
                f"instrument({type(model).__name__.lower()}, name='second')"
            )


def _passes_on(module: Any) -> bool:  # noqa: ANN401 - a torch module
    """Whether nothing can come of its calls: a third of the modules of many a model is so."""
    return type(module) is torch.nn.Identity and not (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )


def _refusal(module: Any, hooks: str) -> str:  # noqa: ANN401 - a torch module
    """Why this module cannot bear the hooks; empty if it can."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted modules take no hooks"
    if hooks == "module" and getattr(module, "_is_full_backward_hook", None) is False:
        return "it has a backward hook of the old kind, which excludes full backward hooks"
    return ""


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Switch the collector off for a while: it would walk each new generation in vain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
