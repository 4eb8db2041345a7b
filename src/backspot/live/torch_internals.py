"""PyTorch internals that Backspot depends on: no other file uses a private name of PyTorch.

The policy of this file:

- Each private name is looked up once, at import, and bound to a global of this file. Other files
  bind these globals again, so that they cost no attribute lookup on the path of a module call.
- Each name has a comment that says what Backspot uses the name for, and what happens without it. A
  missing name costs a label, a line or some speed. It never causes an error.
- The hook dictionaries of ``torch.nn.Module`` and a few attributes of tensors and autograd nodes
  have no fallback: every supported version has them, and PyTorch cannot work without them. Other
  files use the functions of this file.
- ``call_wrapper`` has two of these attributes itself, as a function here would cost every call.
- What differs between versions is decided here. The other files ask for a capability
  (``push_node_hook is None``) and never for a version.

The public API of PyTorch is used everywhere in ``live``, directly.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import attrgetter
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler as _profiler
from torch.profiler import record_function

__all__ = [
    "JOINS",
    "KEY",
    "MODULE_CALL",
    "PROFILER_STARTS",
    "PROFILER_STOPPED",
    "PROFILER_STOPS",
    "REPLICATE",
    "WRAPPED_CHILD",
    "CompiledCode",
    "InductorSettings",
    "PassedOver",
    "Place",
    "add_metadata",
    "at_end_of_backward",
    "children_of",
    "compilations",
    "compiled_class",
    "compiled_code",
    "compiled_module",
    "compiled_modules",
    "compiles_itself",
    "default_store",
    "emit",
    "exporting",
    "forward_hooks_of",
    "full_backward_flag",
    "graph_for_key",
    "guards_check_hooks",
    "has_hooks",
    "hint_of",
    "ignore_torch_function",
    "in_backward",
    "inductor_settings",
    "innermost_transform",
    "is_call",
    "is_dynamo_compiling",
    "is_view",
    "keep_from_dynamo",
    "labelling",
    "launch_sites_so_far",
    "module_stack_of",
    "new_range",
    "node_hooker",
    "number_of",
    "only_chooses",
    "parameters_of",
    "pass_over",
    "pop_node_hook",
    "privateuse1_name",
    "push_node_hook",
    "put_after",
    "put_around_backward",
    "put_before",
    "recording",
    "sequence_number",
    "take_away",
    "torch_function_mode_enabled",
    "unset_full_backward_flag",
    "version_of",
    "watch_compilations",
    "when_dynamo_loads",
    "when_inductor_loads",
    "without_backward_flag",
    "without_cuda_graphs",
    "wraps_in_backward_hooks",
]


def _find(*path: str) -> Any:
    """Return the part of torch at this path, ``None`` if there is none."""
    found = torch
    for name in path:
        found = getattr(found, name, None)
        if found is None:
            return None
    return found


def _no() -> bool:
    return False


def _nothing() -> None:
    return None


# The profiler ------------------------------------------------------------------------------------

# Whether a profiler records on this thread. Where all threads are profiled
# (``profile_all_threads``) PyTorch answers no on every one of them, so both this and the flag below
# are needed. Without it only the flag counts.
_enabled_here: Callable[[], bool] = _find("autograd", "_profiler_enabled") or _no

# Python's flag for the whole process: reading it costs no call. A thread that the profiler does not
# record writes labels for nothing. Without it only ``_enabled_here`` counts.
_profiling: Any = (
    _profiler
    if hasattr(_profiler, "_is_profiler_enabled")
    else SimpleNamespace(_is_profiler_enabled=False)
)


def recording() -> bool:
    """Return whether a profiler records, on this thread or on all threads."""
    return _profiling._is_profiler_enabled or _enabled_here()  # the flag first: it costs no call


class Place:
    """An attribute of a module or class of PyTorch that Backspot replaces for a while.

    Args:
        holder: the module or class; ``None`` if this PyTorch has none.
        name: the attribute, which need not exist.
    """

    def __init__(self, holder: Any, name: str) -> None:
        self._holder = holder
        self._name = name

    def exists(self) -> bool:
        """Return whether PyTorch has the attribute."""
        return self.get() is not None

    def get(self) -> Any:
        """Return the attribute; ``None`` if there is none."""
        return getattr(self._holder, self._name, None)

    def set(self, value: Any) -> None:
        """Replace the attribute."""
        setattr(self._holder, self._name, value)


# Functions that ``sessions`` wraps to notice that a profiler starts, stops, and has stopped. The
# first pair is behind ``torch.profiler``, ``torch.autograd.profiler`` and its ``emit_nvtx`` and
# ``emit_itt``. Without the first, ``hooks="call"`` falls back to node hooks; without the others,
# ranges that outlive their session are not noticed at that moment.
_legacy = _find("autograd", "profiler_legacy")
PROFILER_STARTS = (
    Place(_profiler, "_enable_profiler"),
    Place(_legacy, "_enable_profiler_legacy"),
)
PROFILER_STOPS = (
    Place(_profiler, "_disable_profiler"),
    Place(_legacy, "_disable_profiler_legacy"),
)
PROFILER_STOPPED = Place(_profiler, "_run_on_profiler_stop")


# A range, opened by ``__enter__`` and closed by ``__exit__``, at a tenth of the cost of the public
# ``record_function``, which is used without it.
new_range: Callable[[str], Any] = _find("_C", "_profiler", "_RecordFunctionFast") or record_function


def emit(label: str) -> None:
    """Write a marker: a range that is closed at once, so that none can be left open."""
    with new_range(label):
        pass


# Adds a key to the trace: the table of source lines. Without it the exported trace has no lines.
_add_metadata = _find("autograd", "_add_metadata_json")
# The kind of profiler. NVTX and ITT write no trace, and warn about metadata. Without it, they warn.
_profiler_type = _find("_C", "_autograd", "_profiler_type")


def add_metadata(key: str, value: str) -> None:
    """Put JSON under a key of the trace that is being recorded."""
    if _add_metadata is None:
        return
    if _profiler_type is None or "KINETO" in _profiler_type().name:
        _add_metadata(key, value)


# Many ranks --------------------------------------------------------------------------------------

# The store by which the ranks of a job found each other. Without it a running job has no report of
# all its ranks.
_default_store: Callable[[], Any] | None = _find(
    "distributed", "distributed_c10d", "_get_default_store"
)


def default_store() -> Any:
    """Return the store of ``torch.distributed``; ``None`` if this process is not part of a job."""
    distributed = torch.distributed
    if _default_store is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return _default_store()


# Compilers and transforms ------------------------------------------------------------------------

# Public, but chosen with care: Dynamo knows this function by identity and folds it to True while it
# traces. Elsewhere it is a plain ``return False``.
is_dynamo_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling

# The flag that the public ``is_compiling()`` returns after it has called another function. Without
# it non-strict export is labelled.
_compiler: Any = (
    torch.compiler
    if hasattr(torch.compiler, "_is_compiling_flag")
    else SimpleNamespace(_is_compiling_flag=False)
)

# The innermost of ``torch.func.grad``, ``vmap`` and the like that is at work on this thread, or
# None. Without it their calls are labelled, with owners that can be wrong.
innermost_transform: Callable[[], Any] = (
    _find("_C", "_functorch", "peek_interpreter_stack") or _nothing
)


def labelling() -> bool:
    """Return whether a profiler records and tensors are what they seem to be.

    They are not during non-strict export and in the transforms of ``torch.func``.
    """
    return (
        (_profiling._is_profiler_enabled or _enabled_here())  # recording(), without the call
        and not _compiler._is_compiling_flag
        and (innermost_transform() is None or pass_over())
    )


class PassedOver:
    """What was not labelled because of a transform.

    Attributes:
        calls: how many module calls, in this process so far.
    """

    calls = 0


def pass_over() -> bool:
    """Count a call that is not labelled because of a transform; return False."""
    PassedOver.calls += 1
    return False


def exporting() -> bool:
    """Return whether non-strict export is at work."""
    return bool(_compiler._is_compiling_flag)


def keep_from_dynamo(*functions: Callable[..., Any]) -> None:
    """Have Dynamo run the frames of these functions as they are.

    On a compiled root, Dynamo would compile a hook as a frame of its own, in which
    ``is_dynamo_compiling()`` is true, and the label would vanish. Without the private names used
    here that happens. ``torch._dynamo`` is not imported, as that takes seconds.
    """
    frames = _find("_C", "_dynamo", "eval_frame")
    strategy = getattr(frames, "set_code_exec_strategy", None)
    skip_code = getattr(frames, "skip_code", None)  # of older versions
    try:
        if strategy is not None:
            action = frames._FrameAction
            skip = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
            for function in functions:
                strategy(function.__code__, skip)
        elif skip_code is not None:
            for function in functions:
                skip_code(function.__code__)
    except Exception:  # noqa: S110 - one label less on a compiled root
        pass


# Whether a ``__torch_function__`` mode of the user's is at work. Without it the mode sees that
# Backspot reads ``.grad_fn``.
torch_function_mode_enabled: Callable[[], bool] = (
    _find("_C", "_is_torch_function_mode_enabled") or _no
)

# A context in which no ``__torch_function__`` runs: a user's mode or tensor subclass does not see
# that Backspot reads ``.grad_fn``. Public only by name; every supported version has it.
ignore_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction


# Tensors and autograd nodes ----------------------------------------------------------------------

# The sequence number of the next node that this thread makes. -1 without it: no marker is written,
# and the report relies on the sequence numbers in the trace.
sequence_number: Callable[[], int] = _find("_C", "_autograd", "_get_sequence_nr") or (lambda: -1)


def number_of(node: torch.autograd.graph.Node) -> int:
    """Return the sequence number of an autograd node."""
    return node._sequence_nr()  # type: ignore[no-any-return]  # each class of nodes has its own


# The engine's run that this thread is in, -1 outside. Without it forward code that checkpointing
# runs again is timed as forward.
_graph_task: Callable[[], int] = _find("_C", "_current_graph_task_id") or (lambda: -1)


def in_backward() -> bool:
    """Return whether autograd's engine runs on this thread."""
    return _graph_task() >= 0


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Call a function when the engine's run that this thread is in has ended without an error.

    Data parallelism ends its communication in the same way.
    """
    torch.autograd.Variable._execution_engine.queue_callback(action)


# From torch 2.14 on autograd calls a hook with each node that a thread makes. None before: then the
# line of a node is the line that called the module.
push_node_hook: Callable[[Callable[..., None]], None] | None = _find(
    "_C", "_autograd", "_push_node_creation_hook"
)
pop_node_hook: Callable[[], None] = _find("_C", "_autograd", "_pop_node_creation_hook") or _nothing

# How often a tensor's memory was changed in place, and whether the tensor is a view of another's
# memory: reading ``.grad_fn`` of a changed view can raise, or make a node.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view

# The classes of nodes that join tensors. Without them what is joined has no marker of its own.
JOINS: frozenset[type] = frozenset(
    cls
    for cls in (
        _find("_C", "_functions", "CatBackward0"),
        _find("_C", "_functions", "StackBackward0"),
    )
    if cls is not None
)

# Whether ``Node._register_hook_dict`` is there. Without it ``Node.register_prehook`` is used, which
# makes a dictionary and a handle for each node, in Python, at ten times the cost.
_takes_dictionaries = hasattr(_find("_C", "_FunctionBase"), "_register_hook_dict")
# How many ``__torch_dispatch__`` modes are at work. Without it they see one operator of Backspot.
_dispatch_modes: Callable[[], int] = _find("_C", "_len_torch_dispatch_stack") or (lambda: 0)
_empty = torch.empty(0, device="cpu")


def node_hooker(hook: Callable[..., None]) -> Callable[[torch.autograd.graph.Node], None]:
    """Return a function that makes autograd call ``hook`` before a node.

    ``Tensor.register_hook`` hooks a node by handing over the dictionary of the tensor's hooks, in
    C. The function does the same: a tensor that it makes once carries the hook for all nodes.
    """
    carrier: Any = None

    def put(node: torch.autograd.graph.Node) -> None:
        nonlocal carrier
        if carrier is None:
            carrier = _carrier_of(hook)
            if carrier is None:
                node.register_prehook(hook)
                return
        node._register_hook_dict(carrier)

    return put


def _carrier_of(hook: Callable[..., None]) -> torch.Tensor | None:
    """Return a tensor that carries a hook; ``None`` if none can be made here."""
    if not _takes_dictionaries or _dispatch_modes():  # a mode of the user's would see the tensor
        return None
    carrier: Any = _empty.data  # no operator, which the profiler would record
    carrier._backward_hooks = {0: hook}
    return carrier


# Module calls ------------------------------------------------------------------------------------

# What a call of any module runs, unless its class has a ``__call__`` of its own.
MODULE_CALL = Place(torch.nn.Module, "__call__")

# Makes the copies of a module that data parallelism calls. Without it they have no label.
REPLICATE = Place(torch.nn.Module, "_replicate_for_data_parallel")


def only_chooses(call: Any) -> bool:
    """Return whether a ``__call__`` does nothing but call one of two attributes of the module.

    PyTorch's does: ``_compiled_call_impl``, which ``module.compile()`` sets, else ``_call_impl``.
    The wrapper can then call the attribute itself, which saves a frame.
    """
    names = getattr(getattr(call, "__code__", None), "co_names", ())
    return names == ("_compiled_call_impl", "_call_impl")


def compiled_class() -> type | None:
    """Return the class of what ``torch.compile(module)`` returns; ``None`` if nothing compiles."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return getattr(frames, "OptimizedModule", None)


def compiled_module(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that ``torch.compile`` has made an instance of ``compiled_class()`` of."""
    return module._modules.get(WRAPPED_CHILD["OptimizedModule"])


def compiled_modules() -> list[torch.nn.Module]:
    """Return the modules that ``torch.compile(module)`` was called with, as far as these live."""
    cls = compiled_class()
    found = [one for one in gc.get_referrers(cls) if type(one) is cls] if cls is not None else []
    inner = [compiled_module(one) for one in found if "_modules" in vars(one)]
    return [module for module in inner if module is not None]


def compiles_itself(module: torch.nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


# Whether Dynamo's guards check the hooks of a module with a ``__call__`` of its own. Found on 2.15,
# and not on 2.13 and before.
guards_check_hooks = (*map(int, torch.__version__.split(".")[:2]),) >= (2, 14)


def is_dynamos(module: torch.nn.Module) -> bool:
    """Return whether Dynamo made this module, as the graph of a region that it compiled.

    Up to torch 2.4 it holds the parameters and children of the module that is compiled. Where no
    graph has the attribute, no module counts as one.
    """
    return isinstance(module, torch.fx.GraphModule) and "compile_subgraph_reason" in vars(module)


# Modules -----------------------------------------------------------------------------------------

# PyTorch would number each hook, and Dynamo's guards for a block check the numbers of the block's
# hooks. No block could then use the code that was compiled for an equal block, and a model compiled
# block by block would run into the recompile limit. One key also makes removal safe: whatever
# interrupts the registration, there is no handle to lose.
KEY = -0xBAC5

# A hook is registered after its flags and removed before them: PyTorch asks for the flags of the
# hooks that it finds.
_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")

# The dictionary of a module's forward hooks, by key.
forward_hooks_of: Callable[[torch.nn.Module], dict[int, Any]] = attrgetter("_forward_hooks")


def put_before(module: torch.nn.Module, hook: Callable[..., None]) -> None:
    """Register a forward pre-hook that runs before all others of the module."""
    module._forward_pre_hooks_with_kwargs[KEY] = True
    module._forward_pre_hooks[KEY] = hook
    module._forward_pre_hooks.move_to_end(KEY, last=False)


def put_after(module: torch.nn.Module, hook: Callable[..., None]) -> None:
    """Register a forward hook that runs after all others of the module, even after an error."""
    module._forward_hooks_with_kwargs[KEY] = True
    module._forward_hooks_always_called[KEY] = True
    module._forward_hooks[KEY] = hook


def put_around_backward(
    module: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> None:
    """Register a full backward pre-hook and a full backward hook."""
    module._backward_pre_hooks[KEY] = before
    module._is_full_backward_hook = True
    module._backward_hooks[KEY] = after


def take_away(
    module: torch.nn.Module, *, only_after: bool = False, keep_after: bool = False
) -> None:
    """Remove Backspot's hooks from a module; without any, do nothing.

    Args:
        module: any module.
        only_after: remove only the forward hook.
        keep_after: keep the forward hook, as PyTorch may be iterating over its dictionary.
    """
    after = () if keep_after else _AFTER
    for name in after if only_after else (*_BEFORE, *_BACKWARD, *after):
        getattr(module, name, {}).pop(KEY, None)


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module has a hook of any kind."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )


_globals: Any = sys.modules[torch.nn.Module.__module__]


def wraps_in_backward_hooks(module: torch.nn.Module) -> bool:
    """Return whether PyTorch puts nodes for full backward hooks around calls of a module."""
    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or getattr(_globals, "_global_backward_hooks", None)
        or getattr(_globals, "_global_backward_pre_hooks", None)
    )


def full_backward_flag(module: torch.nn.Module) -> bool | None:
    """Return the flag for backward hooks: True for full ones, False for old ones, or None.

    A module takes one of the two kinds. PyTorch never resets the flag.
    """
    return getattr(module, "_is_full_backward_hook", None)


def unset_full_backward_flag(module: torch.nn.Module) -> None:
    """Reset the flag of a module that has no backward hook left."""
    if not module._backward_hooks:
        module._is_full_backward_hook = None


def without_backward_flag(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a module, with the flag reset if only Backspot's hook set the flag."""
    hooks = state.get("_backward_hooks", ())
    return {**state, "_is_full_backward_hook": None} if list(hooks) == [KEY] else state


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the direct children of a module by name.

    Not by attribute: wrappers forward ``__getattr__`` to the module that they wrap.
    """
    children = vars(module).get("_modules")
    return children if isinstance(children, dict) else {}


def parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return a module's own parameters, without a method that a wrapper may override."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


# Wrappers by the name of a class among their base classes, so that none has to be imported, and the
# name of the child that they wrap. A wrapper that is not listed adds a part to each path.
WRAPPED_CHILD = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}

_module_file: str = _globals.__file__ or ""


def is_call(code: CodeType) -> bool:
    """Return whether this is the code of ``Module._call_impl``, which runs every module call.

    The stack is searched for its frames to tell running calls from stale ones. Compared by name, as
    libraries replace the method by wrappers. Without it any method of the module counts.
    """
    return code.co_name == "_call_impl" and code.co_filename == _module_file


# Devices -----------------------------------------------------------------------------------------

# The name that a backend from outside of PyTorch has given to its device. Without it: PyTorch's
# name for a device without one.
privateuse1_name: Callable[[], str] = _find("_C", "_get_privateuse1_backend_name") or (
    lambda: "privateuseone"
)


# Inductor ----------------------------------------------------------------------------------------

# Importing any of it takes seconds, so all of it is looked up once a program has loaded it.
_INDUCTOR_CONFIG = "torch._inductor.config"
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


class _Watcher:
    """A finder of modules that finds nothing, but hears of one module being loaded."""

    def __init__(self, watched: str, loaded: Callable[[], None]) -> None:
        self._watched = watched
        self._loaded = loaded

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Wrap the loader of the watched module; ``None`` for all other modules."""
        if name != self._watched:
            return None
        for finder in sys.meta_path:
            found = getattr(finder, "find_spec", None)
            spec = found(name, path, target) if found and finder is not self else None
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._loaded()

        loader.exec_module = exec_module
        return spec


def when_inductor_loads(call: Callable[[], None]) -> Callable[[], None]:
    """Call a function once Inductor's settings are loaded, at once if they are.

    Returns:
        A function that takes this back.
    """
    return _when_loaded(_INDUCTOR_CONFIG, call)


def _when_loaded(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Call a function once a module is loaded; return a function that takes this back."""
    if name in sys.modules:
        call()
        return _nothing
    watcher = _Watcher(name, call)
    sys.meta_path.insert(0, watcher)

    def stop() -> None:
        if watcher in sys.meta_path:
            sys.meta_path.remove(watcher)

    return stop


def when_dynamo_loads(call: Callable[[], None]) -> Callable[[], None]:
    """Call a function once Dynamo is loaded, at once if it is.

    Returns:
        A function that takes this back.
    """
    return _when_loaded("torch._dynamo", call)


# Public: ``torch._dynamo.on_compile_start`` registers with it, but nothing public takes that back.
# Without it, code that is compiled while a profiler records may be compiled once more afterwards.
_CALLBACKS = "torch._dynamo.callback"


def watch_compilations(
    begins: Callable[..., None], ended: Callable[..., None]
) -> Callable[[], None]:
    """Call functions before and after each compilation by Dynamo, once it is loaded.

    Returns:
        A function that takes this back.
    """

    def handler() -> Any:
        return getattr(sys.modules.get(_CALLBACKS), "callback_handler", None)

    def register() -> None:
        with suppress(Exception):  # it can run within an import of the user's
            handler().register_start_callback(begins)
            handler().register_end_callback(ended)

    stop_waiting = _when_loaded(_CALLBACKS, register)

    def stop() -> None:
        stop_waiting()
        with suppress(Exception):  # not there, or ``torch.compiler.reset()`` has cleared all
            handler().remove_start_callback(begins)
        with suppress(Exception):
            handler().remove_end_callback(ended)

    return stop


_SCHEDULING = "torch._inductor.codegen.triton"
_PATTERNS = "torch._inductor.pattern_matcher"
_REPLACED = "backspot_fwd_nn_module_stack"


def complete_sites(note: str) -> Callable[[], None]:
    """Have Inductor keep what it leaves out of the launch sites; the generated code stays the same.

    It keeps no site of a Triton kernel that reduces in two directions
    (``_codegen_mix_order_reduction``), and no module of a backward node that it replaces by a
    pattern, as where it pads a product of matrices.

    Args:
        note: what to add to the stack traces of a kernel that reduces in two directions.

    Returns:
        A function that takes this back.
    """
    taken_back: list[Callable[[], None]] = []

    def replacing(name: str, replace: Callable[[Any], None]) -> Callable[[], None]:
        def now() -> None:
            with suppress(Exception):  # it can run within an import of the user's
                replace(sys.modules[name])

        return _when_loaded(name, now)

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
    ]

    def stop() -> None:
        for one in (*waiting, *taken_back):
            one()

    return stop


_Put = Callable[[Any, str, Callable[..., Any]], None]


def _keep_forward(patterns: Any, put: _Put) -> None:
    transfer = patterns._transfer_meta

    def transfer_meta(new_meta: Any, old_node: Any, *args: Any, **kwargs: Any) -> Any:
        result = transfer(new_meta, old_node, *args, **kwargs)
        stack = old_node.meta.get("fwd_nn_module_stack") or old_node.meta.get(_REPLACED)
        if stack:
            new_meta[_REPLACED] = stack
        return result

    put(patterns, "_transfer_meta", transfer_meta)


def _keep_unnamed(scheduling: Any, note: str, put: _Put) -> None:
    define, comment = scheduling.define_kernel, scheduling.codegen_comment
    last = threading.local()

    def define_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        last.name = define(self, *args, **kwargs)
        return last.name

    def codegen_comment(self: Any, node_schedule: Any, *args: Any, **kwargs: Any) -> Any:
        result = comment(self, node_schedule, *args, **kwargs)
        if not any((*args, *kwargs.values())):
            with suppress(Exception):  # the launch has no site, as before
                debug: Any = sys.modules["torch._inductor.debug"]
                number = debug.set_kernel_post_grad_provenance_tracing(node_schedule, last.name)
                debug._inductor_kernel_stack_trace[f"{last.name}:{number}"].append(note)
        return result

    put(scheduling, "define_kernel", define_kernel)
    put(scheduling, "codegen_comment", codegen_comment)


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


def launch_sites_so_far() -> int:
    """Return how many launch sites Inductor has numbered; 0 without its counter.

    The graph that is compiled next has the following numbers. Some versions go on counting from one
    graph to the next, and keep the sites of the graphs before in its table.
    """
    debug = sys.modules.get("torch._inductor.debug")
    return int(getattr(debug, "_inductor_kernel_provenance_debug_handle", 0))


def module_stack_of(node: Any) -> tuple[list[tuple[str, type]], bool]:
    """Return the modules around a node of a graph, outermost first, and whether it is a backward's.

    Dynamo writes them for forward nodes, and AOTAutograd copies them to the backward nodes. Each is
    an expression (``L['self'].blocks.0``) and a class.
    """
    stack = node.meta.get("nn_module_stack")
    backward = not stack
    stack = stack or node.meta.get("fwd_nn_module_stack") or node.meta.get(_REPLACED) or {}
    return [(place, cls) for place, cls in stack.values() if isinstance(cls, type)], backward


def forward_number_of(node: Any) -> int | None:
    """Return the number that a forward node shares with its backward nodes; ``None`` without."""
    is_forward = node.meta.get("partitioner_tag", "is_backward") != "is_backward"
    return node.meta.get("seq_nr") if is_forward else None


def number_without_forward(node: Any) -> int | None:
    """Return the number of a backward node for which AOTAutograd has found no forward node.

    A sum of gradients has none, and ``None`` is returned for it.
    """
    found = "fwd_nn_module_stack" in node.meta or node.meta.get("is_gradient_acc")
    is_backward = node.meta.get("partitioner_tag") == "is_backward"
    return node.meta.get("seq_nr") if is_backward and not found else None


def hint_of(size: Any) -> int:
    """Return a size, or the example of a symbolic one; 1 without. No guard is made."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "_hint", None)
    return hint if isinstance(hint, int) else 1


class CompiledCode(NamedTuple):
    """A compiled graph in memory.

    Attributes:
        key: the key in the names of its calls.
        backward: whether it is a backward graph.
        sites: the stack traces of each launch site, as JSON; ``None`` if they were not kept.
    """

    key: str
    backward: bool
    sites: str | None


def compiled_code() -> list[CompiledCode]:
    """Return the compiled graphs in memory: compiled here, or loaded from a cache.

    The garbage collector knows them all, also those from before Backspot was imported.
    """
    output_code = sys.modules.get("torch._inductor.output_code")
    graph_class = getattr(output_code, "CompiledFxGraph", None)
    if _SITES not in getattr(graph_class, "__annotations__", ()):
        return []
    return [
        CompiledCode(
            str(getattr(graph, "_fx_graph_cache_key", None)),
            bool(getattr(graph, "fx_kwargs", {}).get("is_backward")),
            getattr(graph, _SITES, None),
        )
        for graph in gc.get_referrers(graph_class)
        if type(graph) is graph_class
    ]


def compilations() -> list[tuple[str, str, str, int, str]]:
    """Return what Dynamo compiled last: region, function, file, line, and why it did so again."""
    utils = sys.modules.get("torch._dynamo.utils")
    found: list[Any] = getattr(utils, "get_compilation_metrics", list)()
    return [
        (
            str(one.compile_id),
            str(one.co_name),
            one.co_filename,
            int(getattr(one, "co_firstlineno", None) or 0),
            str(getattr(one, "recompile_reason", None) or ""),
        )
        for one in found
        if getattr(one, "compile_id", None) and getattr(one, "co_filename", None)
    ]


@contextmanager
def without_cuda_graphs() -> Iterator[None]:
    """Run compiled code without recording or replaying CUDA graphs, as PyTorch itself falls back.

    The code is the same, and nothing is compiled again. Without the place where PyTorch decides,
    graphs are replayed.
    """
    manager: Any = None
    if torch.cuda.is_available():
        with suppress(ImportError):
            from torch._inductor import cudagraph_trees

            manager = getattr(cudagraph_trees, "CUDAGraphTreeManager", None)
    original = getattr(manager, "_run", None)
    if original is None:
        yield
        return

    def run(self: Any, new_inputs: Any, function_id: Any) -> Any:
        return self.ids_to_funcs[function_id].model(new_inputs)

    manager._run = run
    try:
        yield
    finally:
        manager._run = original
