"""Dynamo: the modules that it compiles, and when it does so."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from backspot.imports import when_imported
from backspot.interrupts import contained
from backspot.live.torch_internals.lookup import Location, Watch, find, nothing
from backspot.live.torch_internals.modules import WRAPPED_CHILD

# Public, but chosen with care: Dynamo knows this function by identity and folds it to True while it
# traces. Elsewhere it is a plain ``return False``.
is_dynamo_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling


def keep_from_dynamo(*functions: Callable[..., Any], inside: bool = False) -> None:
    """Have Dynamo run the frames of these functions as they are.

    On a compiled root, Dynamo would compile a hook as a frame of its own, in which
    ``is_dynamo_compiling()`` is true, and the label would vanish. Without the private names used
    here that happens. ``torch._dynamo`` is not imported, as that takes seconds.

    Args:
        inside: also the frames of what these functions call; not with old versions of PyTorch,
            which then compile these.
    """
    frames = find("_C", "_dynamo", "eval_frame")
    strategy = getattr(frames, "set_code_exec_strategy", None)
    skip_code = getattr(frames, "skip_code", None)  # of older versions
    with contained():  # at worst a compiled root has one label less
        if strategy is not None:
            action = frames._FrameAction
            within = action.SKIP if inside else action.DEFAULT
            skip = frames._FrameExecStrategy(action.SKIP, within)
            for function in functions:
                strategy(function.__code__, skip)
        elif skip_code is not None:
            for function in functions:
                skip_code(function.__code__)


# Where the frames go that this thread opens: a function of Dynamo's while it compiles them. Without
# it nothing counts as compiled.
_frames_go_to: Callable[[], Any] = find(
    "_C", "_dynamo", "eval_frame", "get_eval_frame_callback"
) or (lambda: None)


# Sets where they go, and returns where they went. Without it they are compiled if the caller is.
_send_frames: Callable[[Any], Any] = find("_C", "_dynamo", "eval_frame", "set_eval_frame") or (
    lambda _: None
)


def run_uncompiled(action: Callable[[], None]) -> None:
    """Call a function, and have Dynamo compile nothing that it calls, unless it asks for that."""
    before = _send_frames(None)
    try:
        action()
    finally:
        _send_frames(before)


keep_from_dynamo(run_uncompiled)


def compiles_frames() -> bool:
    """Return whether Dynamo may compile the next function that this thread calls."""
    return callable(_frames_go_to())


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
    referrers = (
        [referrer for referrer in gc.get_referrers(cls) if type(referrer) is cls]
        if cls is not None
        else []
    )
    inner = [compiled_module(referrer) for referrer in referrers if "_modules" in vars(referrer)]
    return [module for module in inner if module is not None]


def compiles_itself(module: torch.nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


class _CompiledCall:
    """A compiled call with a function before and after; ``remove`` takes both away."""

    def __init__(
        self, module: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]
    ) -> None:
        self._module = ref(module)
        self._before, self._call, self._after = before, module._compiled_call_impl, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before(None, args, kwargs)
        output = self._call(*args, **kwargs)
        self._after(None, args, output)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # as PyTorch has it, a copy is not compiled

    def remove(self) -> None:
        module = self._module()
        if module is not None and module._compiled_call_impl is self:
            module._compiled_call_impl = self._call


def around_compiled_call(
    module: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> _CompiledCall:
    """Have functions called before and after the calls of a module that compiles itself.

    Its hooks are part of the code that is compiled. This is not, so nothing is compiled again.

    Returns:
        A handle with ``remove``.
    """
    call = _CompiledCall(module, before, after)
    module._compiled_call_impl = call
    return call


# Whether Dynamo's guards check the hooks of a module with a ``__call__`` of its own. Found on 2.15,
# and not on 2.13 and before.
guards_check_hooks = (*map(int, torch.__version__.split(".")[:2]),) >= (2, 14)


def is_dynamos(module: torch.nn.Module) -> bool:
    """Return whether Dynamo or AOTAutograd made this module, as the graph of a compiled region.

    Up to torch 2.4 it holds the parameters and children of the module that is compiled. Where no
    graph has the attribute, no module counts as one.
    """
    if not issubclass(type(module), torch.fx.GraphModule):
        return False
    return "compile_subgraph_reason" in vars(module) or _is_of_operators(module)


def _is_of_operators(module: torch.nn.Module) -> bool:
    """Return whether a graph calls operators of ATen with what it is given, as AOTAutograd's do."""
    attributes = vars(module)
    if any(attributes.get(name) for name in ("_parameters", "_buffers", "_modules")):
        return False
    targets = [node.target for node in attributes["_graph"].nodes if node.op == "call_function"]
    return any(isinstance(target, torch._ops.OpOverload) for target in targets)


def when_dynamo_loads(call: Callable[[], None]) -> Callable[[], None]:
    """Call a function once Dynamo is loaded, at once if it is.

    Returns:
        A function that takes this back.
    """
    return when_imported("torch._dynamo", call)


# Public: ``torch._dynamo.on_compile_start`` registers with it, but nothing public takes that back.
# Without it, code that is compiled while a profiler records may be compiled once more afterwards.
_CALLBACKS = "torch._dynamo.callback"


def watch_compilations(
    begins: Callable[..., None], ended: Callable[..., None]
) -> Callable[[], None]:
    """Call functions before and after each compilation by Dynamo, once it is loaded.

    Dynamo holds a lock while it calls them, which a compilation takes. So it compiles nothing that
    they call.

    Returns:
        A function that takes this back.
    """
    keep_from_dynamo(begins, ended, inside=True)

    def handler() -> Any:
        return getattr(sys.modules.get(_CALLBACKS), "callback_handler", None)

    def register() -> None:
        with contained():  # it can run within an import of the user's
            handler().register_start_callback(begins)
            handler().register_end_callback(ended)

    stop_waiting = when_imported(_CALLBACKS, register)

    def stop() -> None:
        stop_waiting()
        with contained():  # not there, or ``torch.compiler.reset()`` has cleared all
            handler().remove_start_callback(begins)
        with contained():
            handler().remove_end_callback(ended)

    return stop


def compilations() -> list[tuple[str, str, str, int, str]]:
    """Return what Dynamo compiled last: region, function, file, line, and why it did so again."""
    utils = sys.modules.get("torch._dynamo.utils")
    metrics: list[Any] = getattr(utils, "get_compilation_metrics", list)()
    return [
        (
            str(metric.compile_id),
            str(metric.co_name),
            metric.co_filename,
            int(getattr(metric, "co_firstlineno", None) or 0),
            str(getattr(metric, "recompile_reason", None) or ""),
        )
        for metric in metrics
        if getattr(metric, "compile_id", None) and getattr(metric, "co_filename", None)
    ]


# How Dynamo represents an optimizer that the code uses which it compiles. Without it an optimizer's
# step that is compiled in one graph with other code counts as that code.
_OPTIMIZERS = "torch._dynamo.variables.optimizer"
_compile_id: Callable[[], Any] = find("_guards", "CompileContext", "current_compile_id") or nothing


def watch_optimizers(met: Callable[[str], None]) -> Callable[[], None]:
    """Have a function called with the region in which Dynamo meets an optimizer, once it is loaded.

    Returns:
        A function that takes this back.
    """

    def around(make: Callable[[], Any]) -> Any:
        with contained():
            met(str(_compile_id()))
        return make()

    watch: Watch | None = None

    def begin() -> None:
        nonlocal watch
        with contained():  # it can run within an import of the user's
            variable_class = sys.modules[_OPTIMIZERS].OptimizerVariable
            watch = Watch(Location(variable_class, "__init__"), around)
            watch.begin()

    stop_waiting = when_imported(_OPTIMIZERS, begin)

    def stop() -> None:
        stop_waiting()
        if watch is not None:
            watch.end()

    return stop


def end_compile_workers() -> None:
    """End the processes in which Inductor compiles; a later compilation starts others.

    A thread waits for them, as what they compile may take long.
    """
    home: Any = sys.modules.get("torch._inductor.async_compile")
    # Without it the processes end with the program.
    pools = list(getattr(home, "_pool_set", ()))
    if pools:
        with contained():
            home.AsyncCompile._ready_future = None
            home.after_fork()  # forgets them
            for pool in pools:
                threading.Thread(target=pool.shutdown, daemon=True).start()


# Functions of Dynamo, FX and Inductor that run often while something compiles, and in which an
# error is expected: an operator that cannot be traced, lowered, fused or measured. Python calls
# them. What C++ calls, as an operator of a fake tensor, is not among them: some of its callers end
# the process at an error. Without one of them a compilation ends a little later.
_FUNCTIONS_OF_COMPILING = {
    "torch._dynamo.symbolic_convert": ("InstructionTranslatorBase.step",),
    "torch.fx.graph": ("Graph.eliminate_dead_code", "Graph.python_code"),
    "torch.fx.interpreter": ("Interpreter.run_node",),
    "torch._inductor.graph": ("GraphLowering.run_node",),
    "torch._inductor.pattern_matcher": ("CallFunction._match", "PatternExpr.find_anchor_nodes"),
    "torch._inductor.scheduler": ("Scheduler.can_fuse", "SchedulerNode.codegen"),
    "torch._inductor.select_algorithm": (
        "ExternKernelCaller.benchmark",
        "TritonTemplateCaller.benchmark",
    ),
    "torch._inductor.runtime.triton_heuristics": (
        "CachingAutotuner.bench",
        "CachingAutotuner.precompile",
    ),
}


def functions_of_compiling() -> dict[str, Location]:
    """Return where the functions are that a compilation calls often, and may fail in, by name.

    Those of a module that is not imported yet are not among them.
    """
    places: dict[str, Location] = {}
    for home, names in _FUNCTIONS_OF_COMPILING.items():
        for class_name, name in (path.split(".") for path in names):
            holder = _holder(getattr(sys.modules.get(home), class_name, None), name)
            if holder is not None:
                places[f"{home}.{class_name}.{name}"] = Location(holder, name)
    return places


def _holder(cls: type | None, name: str) -> type | None:
    """Return the class in which a method of a class is defined, if it is a plain function."""
    line = getattr(cls, "__mro__", ())
    return next((one for one in line if inspect.isfunction(vars(one).get(name))), None)


def forget_compilations() -> None:
    """Take back what was compiled so far; where a trial compiled copies and nothing else was.

    Whoever hears of compilations hears of those to come.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        heard: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        lists = [getattr(heard, name, []) for name in ("start_callbacks", "end_callbacks")]
        callbacks = [list(callback_list) for callback_list in lists]
        dynamo.reset()
        for callback_list, before in zip(lists, callbacks, strict=True):
            callback_list[:] = before
    end_compile_workers()
    getattr(sys.modules.get("torch._dynamo.utils"), "clear_compilation_metrics", lambda: None)()


keep_from_dynamo(_CompiledCall.__call__)
