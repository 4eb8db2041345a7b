"""Which modules each launch of compiled code works for, recorded while Inductor generates the code.

A pass over each graph writes a *frame* of its own into the stack trace of each node: the module,
and the bytes that the node reads and writes. Inductor keeps the stack traces by launch site, also
in its caches, so the frames come back in another process, where the pass does not run. Nothing
else of the graph is touched, so the code is the same. When a profiler stops, the frames of all
compiled graphs in memory become the table that goes into its trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from backspot.interrupts import contained, pass_on
from backspot.live.frames import IN_REDUCTION, SiteTables, digest_of_modules, write_frames
from backspot.live.modules import class_name, is_called, unwrap
from backspot.live.owner import Scope
from backspot.live.source_lines import file_name
from backspot.live.torch_internals import dynamo, profiler
from backspot.live.torch_internals.inductor import (
    InductorSettings,
    compiled_code,
    complete_sites,
    graph_for_key,
    inductor_settings,
    when_inductor_loads,
)
from backspot.live.torch_internals.modules import children_of, parameters_of
from backspot.trace.compiled import (
    KEY,
    Compilation,
    KnownModule,
    Parameters,
    format_compiled,
    live_compiled,
)

_LEVEL = 2  # of Inductor's provenance tracking: the stack traces by launch site, and no more
_MOST_MODULES = 1 << 17
_BEFORE = re.compile(r"^\d+/\d+: ")
_LONGEST = 200


# The modules of models ---------------------------------------------------------------------------


def _known_modules(scope: Scope) -> Iterator[tuple[KnownModule, torch.nn.Module]]:
    """Yield each module of an instrumented model, with the one that owns its time.

    A shared module comes with each of its paths.
    """
    owners = {id(module): owner.path for owner, module in scope.live_modules()}
    model = scope.model()
    if model is None:
        return
    root = unwrap(model)
    top = owners.get(id(root), "")
    pending: list[tuple[str, torch.nn.Module, str, frozenset[int]]] = [
        (top, root, top, frozenset())
    ]
    count = 0
    while pending and count < _MOST_MODULES:
        path, module, around, outer = pending.pop()
        module = unwrap(module)
        if id(module) in outer:
            continue
        count += 1
        # A ModuleList never runs, so it owns nothing.
        owner = owners.get(id(module), around) if is_called(module) else around
        yield KnownModule(path, class_name(module), owner), module
        pending.extend(
            (f"{path}.{name}" if path else name, child, owner, outer | {id(module)})
            for name, child in children_of(module).items()
            if child is not None
        )


def _parameters(
    scope: Scope, modules: list[tuple[KnownModule, torch.nn.Module]], visited: set[int]
) -> Iterator[Parameters]:
    """Yield what an optimizer may update, by the module that owns its time.

    Gradients that are sparse are left out: their updates take as long as there are rows in a batch.

    Args:
        visited: ids of parameters that are counted already.
    """
    numbers_of: dict[str, list[int]] = {}
    for known_module, module in modules:
        if getattr(module, "sparse", False) is True:
            continue
        for parameter in parameters_of(module):
            if parameter.requires_grad and id(parameter) not in visited:
                visited.add(id(parameter))
                numbers_of.setdefault(known_module.owner, []).append(parameter.numel())
    classes = {owner.path: owner.class_name for owner, _ in scope.live_modules()}
    for path, numbers in numbers_of.items():
        if path in classes:
            yield Parameters(path, classes[path], len(numbers), sum(numbers))


# The pass ----------------------------------------------------------------------------------------


def _make_pass(settings: InductorSettings, user_passes: Any) -> Any:
    """Return a pass that runs the user's passes, and then writes the frames.

    A cached graph has its frames, too. So the key of the cache has the modules that they name: two
    models with equal code can have other names.
    """
    forward: dict[int, list[tuple[str, type]]] = {}
    passes: list[Any] = (
        list(user_passes)
        if isinstance(user_passes, (list, tuple))
        else [user_passes]
        if user_passes
        else []
    )

    class Frames(settings.pass_class):  # type: ignore[name-defined,misc]
        def __call__(self, graph: Any, is_inference: bool = False) -> None:
            for graph_pass in passes:
                if settings.knows_inference and issubclass(type(graph_pass), settings.pass_class):
                    graph_pass(graph, is_inference)
                else:
                    graph_pass(graph)
            try:
                write_frames(graph, forward)
            except Exception as error:
                pass_on(error)
                return  # the region has one owner

        def uuid(self) -> Any:
            inner = []
            for graph_pass in passes:
                uuid = (
                    graph_pass.uuid() if issubclass(type(graph_pass), settings.base_class) else None
                )
                if not uuid:
                    return None  # as without Backspot: the graph cannot be cached
                inner.append(uuid)
            try:
                graph = graph_for_key()
                return graph and ("backspot", 4, digest_of_modules(graph, forward), *inner)
            except Exception as error:
                pass_on(error)
                return None  # it costs a compilation, and no wrong name

    return Frames()


def _first(reasons: str) -> str:
    """Return the first line of what Dynamo says, without the number of the code from before."""
    return " ".join(_BEFORE.sub("", reasons.strip().partition("\n")[0])[:_LONGEST].split())


class CompiledBook:
    """Has Inductor keep the modules of launch sites while models are instrumented, or will be."""

    def __init__(self) -> None:
        self._scopes: list[Scope] = []
        self._watches = 0
        self._stop_watching: list[Callable[[], None]] = []
        self._stop_keeping: Callable[[], None] | None = None
        self._pass: Any = None
        self._before: tuple[Any, int] = (None, 0)
        self._waiting: str | None = None
        self._of_optimizers: set[str] = set()
        """The regions in which Dynamo met an optimizer."""

    @property
    def is_open(self) -> bool:
        """Whether there is a table that is in no trace yet."""
        return self._waiting is not None

    def watch(self) -> None:
        """Set up Inductor, once it is loaded: a model that compiles now is instrumented later."""
        self._watches += 1
        self._begin()

    def unwatch(self) -> None:
        """Take a ``watch`` back; with the last one, restore Inductor's settings."""
        self._watches -= 1
        self._end()

    def join(self, scope: Scope) -> None:
        """Add an instrumentation; with the first one, set up Inductor, once it is loaded."""
        self._scopes.append(scope)
        self._begin()

    def leave(self, scope: Scope) -> None:
        """Remove an instrumentation; with the last one, restore Inductor's settings."""
        if scope not in self._scopes:
            return
        if profiler.recording():
            with contained():  # at worst the trace has no such table
                self._waiting = self._table()
        self._scopes.remove(scope)
        self._end()

    def _begin(self) -> None:
        if not self._stop_watching:
            self._stop_watching = [
                when_inductor_loads(self._install),
                dynamo.watch_optimizers(self._of_optimizers.add),
            ]

    def _end(self) -> None:
        if not self._scopes and not self._watches and self._stop_watching:
            while self._stop_watching:
                self._stop_watching.pop()()
            self._restore()

    def write(self) -> str | None:
        """Put the table into the trace that is being recorded, just before the recording stops.

        Returns:
            The table as text, for ``keep``; ``None`` if there is nothing to say.
        """
        form, self._waiting = self._waiting or (self._table() if self._scopes else None), None
        if form is not None:
            profiler.add_metadata(KEY, form)
        return form

    def keep(self, results: Any, form: str) -> None:
        """Keep a stopped profile's table for as long as its results live."""
        live_compiled[results] = form

    def _table(self) -> str | None:
        code = compiled_code()
        tables = SiteTables()
        graphs = [tables.graph(graph_code) for graph_code in code]
        modules = [(scope, list(_known_modules(scope))) for scope in self._scopes]
        visited: set[int] = set()
        parameters = [
            parameter
            for scope, known_modules in modules
            for parameter in _parameters(scope, known_modules, visited)
        ]
        compilations = [
            Compilation(
                region,
                function,
                file_name(file),
                line,
                _first(reasons),
                region in self._of_optimizers,
            )
            for region, function, file, line, reasons in dynamo.compilations()
        ]
        if not code and not parameters and not compilations:
            return None
        all_modules: list[KnownModule] = []
        if any(graph.sites for graph in graphs):
            all_modules = [
                known_module for _, known_modules in modules for known_module, _ in known_modules
            ]
        return format_compiled(graphs, all_modules, list(tables.lines), compilations, parameters)

    def _install(self) -> None:
        with contained():  # it can run within an import of the user's
            self._set_up()

    def _set_up(self) -> None:
        settings = inductor_settings()
        if settings is None or self._pass is not None:
            return
        config = settings.config
        user_passes, level = (
            config.post_grad_custom_post_pass,
            config.trace.provenance_tracking_level,
        )
        self._before = user_passes, level
        self._pass = _make_pass(settings, user_passes)
        config.post_grad_custom_post_pass = self._pass
        if not level:
            config.trace.provenance_tracking_level = _LEVEL
        self._stop_keeping = complete_sites(IN_REDUCTION)

    def _restore(self) -> None:
        settings = inductor_settings()
        if settings is None or self._pass is None:
            return
        if self._stop_keeping is not None:
            self._stop_keeping()
            self._stop_keeping = None
        config, (user_passes, level) = settings.config, self._before
        if config.post_grad_custom_post_pass is self._pass:  # else other code has set another
            config.post_grad_custom_post_pass = user_passes
        if not level and config.trace.provenance_tracking_level == _LEVEL:
            config.trace.provenance_tracking_level = level
        self._pass, self._before = None, (None, 0)


compiled_book = CompiledBook()
