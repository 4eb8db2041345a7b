"""``instrument``: label the modules of a model, and the handle that removes the labels."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from backspot.checks import check_choice, check_flag, check_whole
from backspot.errors import AlreadyInstrumentedError, UsageError
from backspot.live.call_wrapper import ModuleReference, call_wrapper
from backspot.live.calls import calls_that_fail, current_thread
from backspot.live.compiled import compiled_book
from backspot.live.hooks import (
    BackwardEnd,
    BackwardStart,
    Enter,
    Leave,
    LeaveAndExplain,
    end_plain_copies,
    keep_copies_plain,
)
from backspot.live.modules import class_name, find_modules, is_called, unwrap
from backspot.live.owner import Owner, Scope
from backspot.live.sessions import sessions
from backspot.live.torch_internals.modules import (
    full_backward_flag,
    has_hooks,
    put_after,
    put_around_backward,
    put_before,
    take_away,
    unset_full_backward_flag,
)
from backspot.live.torch_internals.profiler import recording
from backspot.results.grouping import Patterns, patterns_of

NO_FUNCTION = ": functions have no labels, but modules such as nn.CrossEntropyLoss() do"
"""The end of an error message when a function is given instead of a module."""

# Node hooks are for a PyTorch that is not known, and full backward hooks are markers themselves.
_DEFAULT_MARKERS = {"call": None, "node": True, "module": True}


class Instrumentation:
    """A labelled model, as ``instrument`` returns it; a context manager that removes the labels.

    It does not keep the model alive. Copies and pickles of the model have no labels. Entering the
    context manager does nothing; leaving it calls ``remove``.

    Attributes:
        name: the first part of all its paths; ``""`` for none.
        depth: the deepest level that is labelled; ``None`` for no limit.
        match: the patterns of the paths that are labelled; ``None`` for all paths.
        hooks: ``"call"`` or ``"module"``; ``"node"`` where the start of a profiler cannot be
            noticed.
        markers: Whether backward labels are written while a profiler records; ``None``: when its
            trace is exported.
        lines: Whether source lines are recorded.
        compiled: Whether the modules of compiled code are recorded.
        paths: The labelled paths, parents first; ``""`` is the model without a name.
        skipped: the paths that could not be labelled, each with the reason.

    Example:
        >>> import backspot, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> instrumentation = backspot.instrument(model, name="net")
        >>> instrumentation.paths
        ('net', 'net.0', 'net.1')
        >>> instrumentation.remove()
        >>> instrumentation.active
        False
    """

    __module__ = "backspot"

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        name: str,
        depth: int | None,
        patterns: Patterns | None,
        hooks: str,
        markers: bool | None,
        lines: bool,
        compiled: bool,
    ) -> None:
        self.name = name
        self.depth = depth
        self.match = None if patterns is None else patterns.texts
        self.hooks = hooks
        self.markers = markers
        self.lines = lines
        self.compiled = compiled
        self.skipped: dict[str, str] = {}
        _check_plain(model)
        chosen = self._find(model, patterns)
        self.paths = tuple(path for path, _, _ in chosen)
        _check_paths(self.paths, model)
        self._scope = Scope(
            unwrap(model), frozenset(self.paths), hooks=hooks, markers=markers, lines=lines
        )
        owners: dict[int, Owner] = {}
        for path, module, labelled in chosen:
            outer = owners.get(id(labelled))
            ancestors = outer.ancestors | {outer} if outer else frozenset()
            owners[id(module)] = Owner(self._scope, path, class_name(module), ancestors)
        reference = ModuleReference if hooks == "call" else weakref.ref
        self._scope.modules = [(owners[id(module)], reference(module)) for _, module, _ in chosen]
        self._removed = False
        self._model_gone: weakref.finalize[..., Any] | None = None
        # Modules with a flag that a full backward hook sets and its removal does not reset.
        self._flagged: list[weakref.ref[torch.nn.Module]] = []

    def _find(
        self, model: torch.nn.Module, patterns: Patterns | None
    ) -> list[tuple[str, torch.nn.Module, torch.nn.Module | None]]:
        """Return the path of each module to label, and the nearest labelled module around it."""
        chosen: list[tuple[str, torch.nn.Module, torch.nn.Module | None]] = []
        # For the modules directly in each module: their level, and that labelled module.
        inside: dict[int, tuple[int, torch.nn.Module | None]] = {}
        for inner_path, module, parent in find_modules(model):
            level, around = inside.get(id(parent), (0, None))
            level_inside = level + (parent is None or is_called(module))
            inside[id(module)] = level_inside, around
            if self.depth is not None and level > self.depth:
                continue
            path = _path(self.name, inner_path)
            if patterns is not None and inner_path and not patterns.matches(path):
                continue
            if reason := _refusal(module, self.hooks, bool(self.markers)):
                self.skipped[path] = reason
            elif not (inner_path and self.hooks != "module" and _passes_on(module)):
                chosen.append((path, module, around))
                inside[id(module)] = level_inside, module
        if not chosen:
            raise UsageError(
                f"{type(model).__name__} is a scripted module, which takes no hooks: "
                "instrument the model before scripting it"
            )
        return chosen

    @property
    def active(self) -> bool:
        """Whether the model is labelled: true until ``remove``."""
        return self._scope.active

    def remove(self) -> None:
        """Remove the labels, at any time; the model is as before. A second call does nothing."""
        if self._removed:
            return
        # Each part can be repeated: after an interrupt the next call completes the removal.
        self._scope.active = False
        if self.hooks == "call":
            call_wrapper.drop(self._scope)
        else:
            failing = calls_that_fail()
            for _, module in self._scope.live_modules():
                take_away(module, keep_after=id(module) in failing)
        for reference in self._flagged:
            module = reference()
            if module is not None:
                unset_full_backward_flag(module)
        current_thread().drop(self._scope)
        _forget(self._scope)
        if self._model_gone is not None:
            self._model_gone.detach()
        sessions.depart(self._scope)
        self._removed = True

    def __enter__(self) -> Instrumentation:
        """Return the handle itself.

        Raises:
            UsageError: If the labels were removed.
        """
        if not self._scope.active:
            raise UsageError("this instrumentation was removed; call instrument(model) again")
        return self

    def __exit__(self, *exception: object) -> None:
        """Call ``remove``."""
        self.remove()

    def __repr__(self) -> str:
        fields = [f"{len(self.paths)} modules", f"hooks={self.hooks!r}"]
        if self.name:
            fields.append(f"name={self.name!r}")
        if self.depth is not None:
            fields.append(f"depth={self.depth}")
        if self.match is not None:
            fields.append(f"match={list(self.match)!r}")
        if self.markers is not _DEFAULT_MARKERS[self.hooks]:
            fields.append(f"markers={self.markers}")
        if self.lines:
            fields.append("lines=True")
        if not self.compiled:
            fields.append("compiled=False")
        if self.skipped:
            fields.append(f"{len(self.skipped)} skipped")
        if not self.active:
            fields.append("removed")
        return f"Instrumentation({', '.join(fields)})"

    def _put_hooks(self) -> None:
        for owner, module in self._scope.live_modules():
            if self.hooks == "module":
                if self.markers:
                    if full_backward_flag(module) is None:
                        self._flagged.append(weakref.ref(module))
                    put_around_backward(
                        module, BackwardStart(owner).__call__, BackwardEnd(owner).__call__
                    )
                leave = LeaveAndExplain(owner)
                put_after(module, leave.__call__)
                put_before(module, Enter(owner, leave).__call__)
            else:
                put_before(module, Enter(owner, Leave(owner)).__call__)

    def _begin(self) -> None:
        """Put the labels on. If this is interrupted, ``remove`` undoes what was done."""
        scope = self._scope
        sessions.join(scope)  # first: a range may be opened only while sessions are counted
        self._model_gone = weakref.finalize(scope.model(), _forget, scope)
        if self.compiled:
            compiled_book.join(scope)
        if self.hooks == "call":
            if recording():
                call_wrapper.add(scope)
            return
        classes = {type(module) for _, module in scope.live_modules()}
        flagged = classes if self.hooks == "module" and self.markers else ()
        keep_copies_plain(scope, flagged)
        self._put_hooks()


def _forget(scope: Scope) -> None:
    """Undo what an instrumentation changed outside of its model."""
    end_plain_copies(scope)
    compiled_book.leave(scope)


def instrument(
    model: torch.nn.Module,
    *,
    depth: int | None = None,
    match: str | Sequence[str] | None = None,
    name: str = "",
    hooks: Literal["call", "module"] = "call",
    markers: bool | None = None,
    lines: bool = False,
    compiled: bool = True,
) -> Instrumentation:
    """Label the forward and the backward of every module of a model in a profiler's trace.

    The labels are ``forward: blocks.3.attn (Attention)`` and ``backward: blocks.3.attn
    (Attention)``, written only while a profiler records. Loss, gradients and autograd graph stay as
    they are. Record with ``torch.profiler`` and give the profiler, or its trace, to
    ``backspot.locate``.

    Nothing is on the model: while a profiler records, a wrapper replaces
    ``torch.nn.Module.__call__``; modules that it cannot label have hooks then. A profiler that
    starts without PyTorch's Python code, such as Kineto's daemon, is not noticed.
    ``hooks="module"``, full backward hooks, is for comparison: it changes the graph, fails on
    in-place operations, and breaks compiled graphs.

    Backward labels are for trace viewers; the report needs none. They come when the trace is
    exported, as tracks of nested spans, also after ``remove``: ``export_chrome_trace`` writes
    PyTorch's file and then the labelled one in its place, which takes about twice as long as to
    read it. Where that fails, PyTorch's file stays, and one line on standard error says why. So
    ``key_averages()`` and ``events()`` have nothing of a module's backward, unless ``markers=True``
    writes labels while the profiler records: a marker says where autograd starts on a module. A
    view of memory that was changed in place gets none; labels ``unmarked: …`` count these.
    ``emit_nvtx``, ``emit_itt`` and ``hooks="module"`` write labels at once in any case.

    A shared module has the first of its paths. A plain ``torch.nn.Identity`` gets no label, and
    neither do modules that are added later. Paths leave out the parts that wrappers add, such as
    ``torch.compile``. ``torch.jit.script`` refuses a model with hooks: call ``remove()`` before.

    Args:
        model: the model, or any other ``torch.nn.Module``, such as a loss function.
        depth: the deepest level that is labelled; 0 labels the model alone. Modules without a
            forward, such as ``ModuleList``, are no level: ``model.layers.3`` is at depth 2.
            ``None`` (default): all.
        match: pattern of the paths to label, with ``name`` in them, or a list. ``*`` matches any
            part of a name, ``**`` any number of names: ``model.layers.*``, ``**.attn``. The model
            itself always has a label. With ``depth``, both must hold. ``None`` (default): all.
        name: the first part of all paths, which distinguishes several models. Default ``""``.
        hooks: ``"call"`` (default) or ``"module"``.
        markers: ``True`` writes backward labels while the profiler records, by hooks on autograd's
            nodes, at up to a third of a profiled step; ``False`` writes none for
            this model; another one's export labels all that the trace shows. ``None`` (default):
            when the trace is exported.
        lines: whether to record the line of source that creates each node, at about 3 µs a node.
            Before torch 2.14: the line that calls the module, for PyTorch's own. Default false.
        compiled: whether to record for which modules compiled code works, if ``instrument`` is
            called before the code is compiled or ``torch.compiler.reset()`` after. The code stays
            the same; the first run compiles again. Default true.

    Returns:
        A handle with ``remove()``, which is also a context manager that calls ``remove()``.

    Raises:
        UsageError: If an argument is invalid, a pattern matches no module with a forward, or
            another labelled model has one of the paths.
        AlreadyInstrumentedError: If the model or a part of it is labelled already.

    Example:
        >>> import backspot, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
        >>> with backspot.instrument(model), torch.profiler.profile() as profiler:
        ...     model(torch.randn(32, 64)).sum().backward()
        >>> report = backspot.locate(profiler)
        >>> report["1"].row.class_name
        'Linear'
    """
    check_arguments(model, depth, name)
    check_choice("hooks", hooks, ("call", "module"))
    for word, value in (("lines", lines), ("compiled", compiled)):
        check_flag(word, value)
    if markers is not None:
        check_flag("markers", markers)
    kind = "node" if hooks == "call" and not sessions.watches_starts else hooks
    patterns = _checked_patterns(match, model, name)
    instrumentation = None
    try:
        # At 50,000 modules the garbage collector would take half of the time.
        with _without_collecting():
            instrumentation = Instrumentation(
                model,
                name=name,
                depth=depth,
                patterns=patterns,
                hooks=kind,
                markers=_DEFAULT_MARKERS[kind] if markers is None else markers,
                lines=lines,
                compiled=compiled,
            )
            instrumentation._begin()
        return instrumentation  # noqa: TRY300 - an interrupt can come before it
    except BaseException:  # an interrupt too: all hooks are registered, or none
        if instrumentation is not None:
            instrumentation.remove()
        raise


def _checked_patterns(match: object, model: torch.nn.Module, name: str) -> Patterns | None:
    """Return the patterns of a ``match=`` argument.

    Raises:
        UsageError: If the argument is invalid, or a pattern matches no module with a forward.
    """
    if match is None:
        return None
    patterns = patterns_of(match)
    called = [path for path, module, _ in find_modules(model) if is_called(module)]
    patterns.check([_path(name, path) for path in called])
    return patterns


def _path(name: str, inner_path: str) -> str:
    return ".".join(name_part for name_part in (name, inner_path) if name_part)


def check_arguments(model: object, depth: object, name: object) -> None:
    """Check the arguments that ``instrument`` and ``profile`` share."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"instrument() takes a torch.nn.Module, not {type(model).__name__}"
            f"{NO_FUNCTION if callable(model) else ''}"
        )
    check_whole("depth", depth, 0, "None for all")
    if not isinstance(name, str):
        raise UsageError(f"name must be a str, not {type(name).__name__}")
    if name and not all(name.split(".")):
        raise UsageError(f"name must be a module path such as 'loss' or 'heads.a', not {name!r}")


def _check_plain(model: torch.nn.Module) -> None:
    owners = {
        id(module): owner
        for scope in sessions.live_scopes()
        for owner, module in scope.live_modules()
    }
    for path, module, _ in find_modules(model):
        owner = owners.get(id(module))
        if owner is not None:
            place = f"its module {path!r}" if path else "it"
            raise AlreadyInstrumentedError(
                f"{type(model).__name__} cannot be instrumented: {place} "
                f"({type(module).__name__}) is instrumented already, as "
                f"{owner.path!r}; remove() that instrumentation first"
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


def _passes_on(module: torch.nn.Module) -> bool:
    """Return whether calls of the module do nothing: a third of the modules of some models."""
    is_plain = type(module) is torch.nn.Identity and "forward" not in vars(module)
    return is_plain and not has_hooks(module)


def _refusal(module: torch.nn.Module, hooks: str, markers: bool) -> str:
    """Return why a module cannot have labels; empty if it can."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted modules take no hooks"
    if hooks == "module" and markers and full_backward_flag(module) is False:
        return "it has a backward hook of the old kind, which excludes full backward hooks"
    return ""


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Disable garbage collection inside the block, as nothing that is made there is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
