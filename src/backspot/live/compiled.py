"""Which modules each launch of compiled code works for, recorded while Inductor generates the code.

A pass over each graph writes a *frame* of its own into the stack trace of each node: the module,
and the bytes that the node reads and writes. Inductor keeps the stack traces by launch site, also
in its caches, so the frames come back in another process, where the pass does not run. Nothing
else of the graph is touched, so the code is the same. When a profiler stops, the frames of all
compiled graphs in memory become the table that goes into its trace.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import torch

from backspot.live.line_names import file_name
from backspot.live.modules import class_name, is_called, unwrap, written_class_name
from backspot.live.owner import Scope
from backspot.live.torch_internals import dynamo, profiler
from backspot.live.torch_internals.graphs import (
    forward_number_of,
    graph_for_key,
    hint_of,
    module_stack_of,
    number_without_forward,
)
from backspot.live.torch_internals.inductor import (
    CompiledCode,
    InductorSettings,
    compiled_code,
    inductor_settings,
    when_inductor_loads,
)
from backspot.live.torch_internals.launch_sites import complete_sites, launch_sites_so_far
from backspot.live.torch_internals.modules import children_of
from backspot.trace.compiled import (
    KEY,
    Compilation,
    CompiledGraph,
    KnownModule,
    Part,
    Place,
    Site,
    format_compiled,
    live_compiled,
)
from backspot.trace.names import is_library_call
from backspot.trace.source_lines import SourceLine

__all__ = ["CompiledBook", "compiled_book"]

_LEVEL = 2  # of Inductor's provenance tracking: the stack traces by launch site, and no more
_THEN = '  File "backspot:then", line 0, in reduction\n'
_MOST_MODULES = 1 << 17
_MOST_USERS = 64  # more consumers are surely in other kernels, too
_FRAME = re.compile(
    r'  File "backspot:(?P<direction>[fb]):(?P<class_name>[^:"]*):(?P<place>[^"]*)", '
    r"line (?P<bytes>\d+), in (?P<base>\d+)/(?P<node>\d+)<(?P<reads>[^>]*)>(?P<users>[\d,]*)\n"
)
_LINE = re.compile(
    r'  File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.*)\n(?: +(?P<text>.*))?'
)
_ROOT = re.compile(r"[A-Za-z_]\w*(\[[^\]]*\])?(\.__self__\b)?")  # a method's module is one, too
_WRAPPERS = re.compile(r"\.(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")
_BEFORE = re.compile(r"^\d+/\d+: ")
_REASON = re.compile(r"\s+")
_LONGEST = 200
_ITEM = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")


# Writing frames ----------------------------------------------------------------------------------


_Stacks = dict[torch.fx.Node, tuple[list[tuple[str, type]], bool]]


def write_frames(graph: Any, forward: dict[int, list[tuple[str, type]]]) -> None:
    """Write into the stack trace of each node of a graph for which module it works.

    Args:
        graph: the graph.
        forward: the modules of forward nodes by their sequence number: this graph's are added, and
            those of graphs before are used.
    """
    base = launch_sites_so_far()
    number = {node: at for at, node in enumerate(graph.nodes)}
    modules = _modules_of(graph, forward)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        stack, backward = modules[node]
        if not stack and str(node.target) == "aten.add.Tensor":
            # A sum of gradients: it belongs to whoever adds the last one, as in eager mode.
            last = _source(max(node.all_input_nodes, key=number.__getitem__))
            if modules[last][1]:
                stack, backward = modules[last]
        place, cls = stack[-1] if stack else ("", object)
        named = f"{written_class_name(cls)}:{quote(place, safe=_SAFE)}" if stack else ":"
        reads = users = ""
        amount = 0
        if not _is_view(node):
            amount = _bytes_of(node)
            inputs = {number[_source(one)]: _bytes_of(one) for one in node.all_input_nodes}
            if str(node.target).startswith(_LOOK_UPS):  # not more than what is looked up
                inputs = {source: min(size, amount) for source, size in inputs.items()}
            reads = ",".join(f"{source}.{size}" for source, size in inputs.items())
            users = ",".join(str(number[one]) for one in _users(node))
        frame = (
            f'  File "backspot:{"b" if backward else "f"}:{named}", '
            f"line {amount}, in {base}/{number[node]}<{reads}>{users}\n"
        )
        # First: messages show the innermost frame, which stays the user's.
        node.meta["stack_trace"] = frame + _FRAME.sub("", node.meta.get("stack_trace") or "")


def _modules_of(graph: Any, forward: dict[int, list[tuple[str, type]]]) -> _Stacks:
    """Return the modules around each node of a graph; ``forward`` as in ``write_frames``."""
    modules = {node: module_stack_of(node) for node in graph.nodes}
    _find_modules_of_changes_in_place(modules, forward)
    return modules


def _digest(owner: torch.nn.Module, forward: dict[int, list[tuple[str, type]]]) -> bytes:
    """Return a digest of the modules that frames in a graph, and in those inside of it, name.

    Args:
        owner: the module with the graph.
        forward: as in ``write_frames``, but it stays as it is.
    """
    digest = hashlib.sha256()
    for part in owner.modules():
        if issubclass(type(part), torch.fx.GraphModule):
            for stack, backward in _modules_of(part.graph, dict(forward)).values():
                place, cls = stack[-1] if stack else ("", object)
                line = f"{place}\0{written_class_name(cls)}\0{backward}\n"
                digest.update(line.encode(errors="surrogatepass"))
    return digest.digest()


def _find_modules_of_changes_in_place(
    modules: _Stacks, forward: dict[int, list[tuple[str, type]]]
) -> None:
    """Find the modules of backward nodes for operators that change a tensor in place.

    The forward nodes of such an operator have the sequence number after that of its backward nodes,
    so AOTAutograd does not find them.
    """
    own: dict[int, list[tuple[str, type]]] = {}
    without = {}
    for node, (stack, _) in modules.items():
        number = forward_number_of(node)
        if number is not None:
            own.setdefault(number, stack)
        number = number_without_forward(node)
        if number is not None and not stack:
            without[node] = number
    # A backward graph repeats some forward nodes, not always the first one of a number.
    forward.update({**own, **forward} if without else own)
    for node, number in without.items():
        if number not in forward:
            modules[node] = forward.get(number + 1, []), True


_SAFE = "[]'.() "
_LOOK_UPS = ("aten.embedding.", "aten.gather.", "aten.index.", "aten.index_select.")
_VIEWS = ("aten.reshape.", "aten._unsafe_view.", "aten.lift_fresh")


def _is_view(node: Any) -> bool:
    """Return whether a node makes no data of its own."""
    if node.target is operator.getitem:
        return True
    return getattr(node.target, "is_view", False) is True or str(node.target).startswith(_VIEWS)


def _source(node: Any) -> Any:
    """Return the node that made the data of a node."""
    while node.op == "call_function" and _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _users(node: Any) -> list[Any]:
    """Return the nodes that read what a node makes, through views; at most some."""
    found: dict[Any, None] = {}
    pending = list(node.users)
    while pending and len(found) < _MOST_USERS:
        user = pending.pop()
        if user.op == "call_function" and _is_view(user):
            pending.extend(user.users)
        else:
            found[user] = None
    return list(found)


def _bytes_of(node: Any) -> int:
    """Return the bytes of a node's tensors; of symbolic sizes the example's."""
    values = node.meta.get("val")
    amount = 0
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, torch.Tensor):
            sizes = (hint_of(size) for size in value.shape)
            amount += math.prod(sizes) * value.dtype.itemsize
    return amount


# Reading frames ----------------------------------------------------------------------------------


class _Worked(NamedTuple):
    """What a frame says of one node of a kernel."""

    place: Place | None
    backward: bool
    base: int
    node: int
    bytes: int
    reads: dict[int, int]
    users: frozenset[int]
    line: SourceLine | None


def _place_of(class_name: str, expression: str) -> Place | None:
    """Return the place that Dynamo's expression for a module names; ``None`` for none."""
    root = _ROOT.match(expression)
    if root is None:
        return None
    path = _WRAPPERS.sub("", expression[root.end() :].replace("._modules[", "["))
    path = _ITEM.sub(r".\1", path).replace("..", ".").strip(".")
    return Place(root[0], path, class_name)


def _worked(trace: str) -> _Worked | None:
    """Return what the frame in a stack trace says; ``None`` if there is none."""
    frame = _FRAME.search(trace)
    if frame is None:
        return None
    reads = {
        int(source): int(size)
        for source, _, size in (one.partition(".") for one in frame["reads"].split(",") if one)
    }
    return _Worked(
        _place_of(frame["class_name"], unquote(frame["place"])),
        frame["direction"] == "b",
        int(frame["base"]),
        int(frame["node"]),
        int(frame["bytes"]),
        reads,
        frozenset(int(one) for one in frame["users"].split(",") if one),
        _line_of(trace[frame.end() :]),
    )


def _line_of(trace: str) -> SourceLine | None:
    """Return the innermost line of a stack trace."""
    found = list(_LINE.finditer(trace))
    if not found:
        return None
    last = found[-1]
    return SourceLine(
        file_name(last["file"]), int(last["line"]), last["function"], (last["text"] or "").strip()
    )


def _ran(name: str, worked: list[_Worked | None]) -> list[_Worked]:
    """Return the nodes that a site runs.

    A call of a library is one node of the graph, the last one. The nodes before it made its inputs,
    in other kernels.
    """
    known = [one for one in worked if one is not None]
    return [max(known, key=lambda one: one.node)] if known and is_library_call(name) else known


def _weights(
    kernel: list[_Worked],
) -> dict[tuple[Place | None, bool], tuple[int, SourceLine | None]]:
    """Return the bytes of a kernel by module and direction, each with the line of most of them.

    What one node of a kernel makes and another one reads stays in registers, and is not counted.
    """
    inside = {one.node for one in kernel}
    amounts: dict[tuple[Place | None, bool], int] = {}
    lines: dict[tuple[Place | None, bool], tuple[int, SourceLine | None]] = {}
    read: set[tuple[Place | None, int]] = set()
    for one in kernel:
        key = one.place, one.backward
        amount = 0 if one.users and one.users <= inside else one.bytes
        for source, size in one.reads.items():
            if source not in inside and (one.place, source) not in read:
                read.add((one.place, source))
                amount += size
        amounts[key] = amounts.get(key, 0) + amount
        if amount > lines.get(key, (-1, None))[0]:
            lines[key] = amount, one.line
    some = any(amounts.values())
    return {key: (amount, lines[key][1]) for key, amount in amounts.items() if amount or not some}


class _Tables:
    """The graphs of one table, with their lines."""

    def __init__(self) -> None:
        self.lines: dict[SourceLine, int] = {}

    def graph(self, code: CompiledCode) -> CompiledGraph:
        """Return a compiled graph as the table has it."""
        kernels = sorted(_kernels(code.sites or ""), key=lambda kernel: kernel[1])
        worked = [(name, at, [_worked(trace) for trace in traces]) for name, at, traces in kernels]
        known = [one for _, _, some in worked for one in some if one is not None]
        if not known:
            return CompiledGraph(code.key, code.backward, (), None)
        base = max(one.base for one in known)
        reductions = {at for _, at, traces in kernels if _THEN in traces}
        places: dict[Place, int] = {}
        sites = []
        for name, at, some in worked:
            if at <= base:
                continue
            parts = [
                Part(
                    -1 if place is None else places.setdefault(place, len(places)),
                    amount,
                    code.backward and not of_backward,
                    -1 if line is None else self.lines.setdefault(line, len(self.lines)),
                )
                for (place, of_backward), (amount, line) in _weights(_ran(name, some)).items()
            ]
            then = at in reductions
            sites.append(Site(name, tuple(sorted(parts, key=lambda part: -part.weight)), then))
        return CompiledGraph(code.key, code.backward, tuple(places), tuple(sites))


def _kernels(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yield each launch site's name, number and stack traces."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return
    for key, traces in found.items():
        name, _, number = key.rpartition(":")
        if name and number.isdigit() and isinstance(traces, list):
            yield name, int(number), [trace for trace in traces if isinstance(trace, str)]


# The modules of models ---------------------------------------------------------------------------


def _known_modules(scope: Scope) -> Iterator[KnownModule]:
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
        yield KnownModule(path, class_name(module), owner)
        pending.extend(
            (f"{path}.{name}" if path else name, child, owner, outer | {id(module)})
            for name, child in children_of(module).items()
            if child is not None
        )


# The pass ----------------------------------------------------------------------------------------


def _make_pass(settings: InductorSettings, theirs: Any) -> Any:
    """Return a pass that runs the user's passes, and then writes the frames.

    A cached graph has its frames, too. So the key of the cache has the modules that they name: two
    models with equal code can have other names.

    Args:
        settings: Inductor's settings.
        theirs: the user's setting: ``None``, a pass, or several.
    """
    forward: dict[int, list[tuple[str, type]]] = {}
    passes: list[Any] = (
        list(theirs) if isinstance(theirs, (list, tuple)) else [theirs] if theirs else []
    )

    class Frames(settings.pass_class):  # type: ignore[name-defined,misc]
        def __call__(self, graph: Any, is_inference: bool = False) -> None:
            for each in passes:
                if settings.knows_inference and issubclass(type(each), settings.pass_class):
                    each(graph, is_inference)
                else:
                    each(graph)
            try:
                write_frames(graph, forward)
            except Exception:
                return  # the region has one owner

        def uuid(self) -> Any:
            inner = []
            for each in passes:
                uuid = each.uuid() if issubclass(type(each), settings.base_class) else None
                if not uuid:
                    return None  # as without Backspot: the graph cannot be cached
                inner.append(uuid)
            try:
                graph = graph_for_key()
                return graph and ("backspot", 4, _digest(graph, forward), *inner)
            except Exception:
                return None  # it costs a compilation, and no wrong name

    return Frames()


def _compilations() -> list[Compilation]:
    """Return the latest compilations, with the first of the reasons for each."""
    return [
        Compilation(region, function, file_name(file), line, _REASON.sub(" ", _first(reasons)))
        for region, function, file, line, reasons in dynamo.compilations()
    ]


def _first(reasons: str) -> str:
    """Return the first line of what Dynamo says, without the number of the code from before."""
    return _BEFORE.sub("", reasons.strip().partition("\n")[0])[:_LONGEST]


class CompiledBook:
    """Has Inductor keep the modules of launch sites while models are instrumented, or will be."""

    def __init__(self) -> None:
        self._scopes: list[Scope] = []
        self._watches = 0
        self._stop_watching: Callable[[], None] | None = None
        self._stop_keeping: Callable[[], None] | None = None
        self._pass: Any = None
        self._before: tuple[Any, int] = (None, 0)
        self._waiting: str | None = None

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
            with suppress(Exception):  # at worst the trace has no such table
                self._waiting = self._table()
        self._scopes.remove(scope)
        self._end()

    def _begin(self) -> None:
        if self._stop_watching is None:
            self._stop_watching = when_inductor_loads(self._install)

    def _end(self) -> None:
        if not self._scopes and not self._watches and self._stop_watching is not None:
            self._stop_watching()
            self._stop_watching = None
            self._restore()

    def write(self) -> str | None:
        """Put the table into the trace that is being recorded, just before the recording stops.

        Returns:
            The table as text, for ``keep``; ``None`` if there are no compiled graphs.
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
        if not code:
            return None
        tables = _Tables()
        graphs = [tables.graph(one) for one in code]
        known: Iterable[KnownModule] = ()
        if any(graph.sites for graph in graphs):
            known = (module for scope in self._scopes for module in _known_modules(scope))
        return format_compiled(graphs, list(known), list(tables.lines), _compilations())

    def _install(self) -> None:
        with suppress(Exception):  # it can run within an import of the user's
            self._set_up()

    def _set_up(self) -> None:
        settings = inductor_settings()
        if settings is None or self._pass is not None:
            return
        config = settings.config
        theirs, level = config.post_grad_custom_post_pass, config.trace.provenance_tracking_level
        self._before = theirs, level
        self._pass = _make_pass(settings, theirs)
        config.post_grad_custom_post_pass = self._pass
        if not level:
            config.trace.provenance_tracking_level = _LEVEL
        self._stop_keeping = complete_sites(_THEN)

    def _restore(self) -> None:
        settings = inductor_settings()
        if settings is None or self._pass is None:
            return
        if self._stop_keeping is not None:
            self._stop_keeping()
            self._stop_keeping = None
        config, (theirs, level) = settings.config, self._before
        if config.post_grad_custom_post_pass is self._pass:  # else other code has set another
            config.post_grad_custom_post_pass = theirs
        if not level and config.trace.provenance_tracking_level == _LEVEL:
            config.trace.provenance_tracking_level = level
        self._pass, self._before = None, (None, 0)


compiled_book = CompiledBook()
