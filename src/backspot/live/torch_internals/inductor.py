"""Inductor: its settings, the graphs that it compiles, and the launch sites of its code.

Importing any of it takes seconds, so all of it is looked up once a program has loaded it.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from backspot.imports import when_imported
from backspot.interrupts import contained

_INDUCTOR_CONFIG = "torch._inductor.config"
_OUTPUT = "torch._inductor.output_code"
_SITES = "inductor_provenance_stack_traces_str"


class InductorSettings(NamedTuple):
    """What Inductor has for recording the launch sites of the code that it generates.

    Attributes:
        config: the module with the setting ``post_grad_custom_post_pass``: a pass over each graph
            just before code is generated. ``config.trace`` has ``provenance_tracking_level``: with
            2, the stack traces of the graph's nodes are kept by launch site.
        pass_class: the base class of such a pass that knows of inference.
        base_class: the base class of all such passes: only these can be cached.
    """

    config: Any
    pass_class: type
    base_class: type

    @property
    def knows_inference(self) -> bool:
        """Whether a pass can be told that the graph is for inference."""
        return self.pass_class is not self.base_class


def inductor_settings() -> InductorSettings | None:
    """Return Inductor's settings; ``None`` if it is not loaded or lacks one of them.

    Without them a compiled region has one owner.
    """
    config = sys.modules.get(_INDUCTOR_CONFIG)
    if not hasattr(config, "post_grad_custom_post_pass"):
        return None
    if not hasattr(getattr(config, "trace", None), "provenance_tracking_level"):
        return None
    try:
        from torch._inductor import custom_graph_pass
    except ImportError:
        return None
    base = getattr(custom_graph_pass, "CustomGraphPass", None)
    if base is None:
        return None
    inference = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", base)
    return InductorSettings(config, inference, base)


def when_inductor_loads(call: Callable[[], None]) -> Callable[[], None]:
    """Call a function once Inductor's settings are loaded, at once if they are.

    Returns:
        A function that takes this back.
    """
    return when_imported(_INDUCTOR_CONFIG, call)


class CompiledCode(NamedTuple):
    """A compiled graph in memory.

    Attributes:
        sites: the stack traces of each launch site, as JSON; ``None`` if they were not kept.
    """

    key: str
    backward: bool
    sites: str | None


def compiled_code() -> list[CompiledCode]:
    """Return the compiled graphs in memory: compiled here, or loaded from a cache.

    The garbage collector knows them all, also those from before Backspot was imported. Those that
    ``gc.freeze`` hides from it are known if ``complete_sites`` has been in effect since before.
    """
    output_code = sys.modules.get(_OUTPUT)
    graph_class = getattr(output_code, "CompiledFxGraph", None)
    if _SITES not in getattr(graph_class, "__annotations__", ()):
        return []
    graphs = [
        referrer for referrer in gc.get_referrers(graph_class) if type(referrer) is graph_class
    ]
    return [
        CompiledCode(
            str(getattr(graph, "_fx_graph_cache_key", None)),
            bool(getattr(graph, "fx_kwargs", {}).get("is_backward")),
            getattr(graph, _SITES, None),
        )
        for graph in {
            id(graph_object): graph_object for graph_object in (*graphs, *_noted.values())
        }.values()
    ]


_noted: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Compiled graphs by ``id``, which does not need them to be hashable."""

# Where ``launch_sites`` notes the modules of a backward node that a pattern has replaced.
REPLACED = "backspot_fwd_nn_module_stack"

_MOST_FRAMES = 32


def graph_for_key() -> torch.nn.Module | None:
    """Return the graph for which Inductor or AOTAutograd makes the key of its cache at this moment.

    A pass is asked for its part of the key without being told the graph. It is in a variable of a
    calling function, in all versions that keep launch sites. ``None`` without: the graph cannot be
    cached.
    """
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        code = frame.f_code
        if "gm" in code.co_varnames or "gm" in code.co_cellvars:
            graph = frame.f_locals.get("gm")
            if issubclass(type(graph), torch.fx.GraphModule):
                return graph
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def module_stack_of(node: Any) -> tuple[list[tuple[str, type]], bool]:
    """Return the modules around a node of a graph, outermost first, and whether it is a backward's.

    Dynamo writes them for forward nodes, and AOTAutograd copies them to the backward nodes. Each is
    an expression (``L['self'].blocks.0``) and a class.
    """
    stack = node.meta.get("nn_module_stack")
    backward = not stack
    stack = stack or node.meta.get("fwd_nn_module_stack") or node.meta.get(REPLACED) or {}
    return [(place, cls) for place, cls in stack.values() if isinstance(cls, type)], backward


def forward_number_of(node: Any) -> int | None:
    """Return the number that a forward node shares with its backward nodes; ``None`` without."""
    is_forward = node.meta.get("partitioner_tag", "is_backward") != "is_backward"
    return node.meta.get("seq_nr") if is_forward else None


def number_without_forward(node: Any) -> int | None:
    """Return the number of a backward node for which AOTAutograd has found no forward node.

    A sum of gradients has none, and ``None`` is returned for it.
    """
    has_forward = "fwd_nn_module_stack" in node.meta or node.meta.get("is_gradient_acc")
    is_backward = node.meta.get("partitioner_tag") == "is_backward"
    return node.meta.get("seq_nr") if is_backward and not has_forward else None


def hint_of(size: Any) -> int:
    """Return a size, or the example of a symbolic one; 1 without. No guard is made."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "_hint", None)
    return hint if isinstance(hint, int) else 1


_SCHEDULING = "torch._inductor.codegen.triton"
_PATTERNS = "torch._inductor.pattern_matcher"


def complete_sites(note: str) -> Callable[[], None]:
    """Have Inductor keep what it leaves out of the launch sites; the generated code stays the same.

    Each graph is noted, too.

    It keeps no site of a Triton kernel that reduces in two directions
    (``_codegen_mix_order_reduction``), and no module of a backward node that it replaces by a
    pattern, as where it pads a product of matrices, or joins one with a sum of gradients.

    Args:
        note: what to add to the stack traces of a kernel that reduces in two directions.

    Returns:
        A function that takes this back.
    """
    taken_back: list[Callable[[], None]] = []

    def replacing(name: str, replace: Callable[[Any], None]) -> Callable[[], None]:
        def now() -> None:
            with contained():  # it can run within an import of the user's
                replace(sys.modules[name])

        return when_imported(name, now)

    def put(holder: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(holder, name)
        setattr(holder, name, replacement)

        def restore() -> None:
            if getattr(holder, name) is replacement:  # else other code has replaced it, too
                setattr(holder, name, original)

        taken_back.append(restore)

    waiting = [
        replacing(_SCHEDULING, lambda module: _keep_unnamed(module.TritonScheduling, note, put)),
        replacing(_PATTERNS, lambda module: _keep_forward(module, put)),
        replacing(_OUTPUT, lambda module: _note_graphs(module, put)),
    ]

    def stop() -> None:
        for undo in (*waiting, *taken_back):
            undo()
        _noted.clear()

    return stop


_Put = Callable[[Any, str, Callable[..., Any]], None]


def _note_graphs(module: Any, put: _Put) -> None:
    """Note each graph that is compiled or loaded from a cache."""
    graph_class = module.CompiledFxGraph
    original = graph_class.post_compile

    @wraps(original)
    def post_compile(graph: Any, *args: Any, **kwargs: Any) -> Any:
        with contained():
            _noted[id(graph)] = graph
        return original(graph, *args, **kwargs)

    put(graph_class, "post_compile", post_compile)


def _keep_forward(patterns: Any, put: _Put) -> None:
    transfer = patterns._transfer_meta

    def transfer_meta(new_meta: Any, old_node: Any, *args: Any, **kwargs: Any) -> Any:
        result = transfer(new_meta, old_node, *args, **kwargs)
        stack = _stack_of(old_node) or _stack_of_product(new_meta, old_node)
        if stack:
            new_meta[REPLACED] = stack
        return result

    put(patterns, "_transfer_meta", transfer_meta)


def _stack_of(node: Any) -> Any:
    return node.meta.get("fwd_nn_module_stack") or node.meta.get(REPLACED)


def _stack_of_product(new_meta: Any, old_node: Any) -> Any:
    """Return the modules of the product that becomes an ``addmm`` with a sum of gradients.

    The sum itself has no modules.
    """
    new = old_node.prev
    if new.meta is not new_meta or str(new.target) != "aten.addmm.default":
        return None
    products = [
        input_node for input_node in old_node.all_input_nodes if input_node.args == new.args[1:]
    ]
    return _stack_of(products[0]) if products else None


def _keep_unnamed(scheduling: Any, note: str, put: _Put) -> None:
    define, comment = scheduling.define_kernel, scheduling.codegen_comment
    last = threading.local()

    def define_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        last.name = define(self, *args, **kwargs)
        return last.name

    def codegen_comment(self: Any, node_schedule: Any, *args: Any, **kwargs: Any) -> Any:
        result = comment(self, node_schedule, *args, **kwargs)
        if not any((*args, *kwargs.values())):
            with contained():  # the launch has no site, as before
                debug: Any = sys.modules["torch._inductor.debug"]
                number = debug.set_kernel_post_grad_provenance_tracing(node_schedule, last.name)
                debug._inductor_kernel_stack_trace[f"{last.name}:{number}"].append(note)
        return result

    put(scheduling, "define_kernel", define_kernel)
    put(scheduling, "codegen_comment", codegen_comment)


def launch_sites_so_far() -> int:
    """Return how many launch sites Inductor has numbered; 0 without its counter.

    The graph that is compiled next has the following numbers. Some versions go on counting from one
    graph to the next, and keep the sites of the graphs before in its table.
    """
    debug = sys.modules.get("torch._inductor.debug")
    return int(getattr(debug, "_inductor_kernel_provenance_debug_handle", 0))
