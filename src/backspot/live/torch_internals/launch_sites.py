"""The launch sites of the code that Inductor generates."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from backspot.interrupts import contained
from backspot.live.torch_internals.graphs import REPLACED
from backspot.live.torch_internals.loading import when_loaded

__all__ = ["complete_sites", "launch_sites_so_far"]

_SCHEDULING = "torch._inductor.codegen.triton"
_PATTERNS = "torch._inductor.pattern_matcher"


def complete_sites(note: str) -> Callable[[], None]:
    """Have Inductor keep what it leaves out of the launch sites; the generated code stays the same.

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

        return when_loaded(name, now)

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
    products = [one for one in old_node.all_input_nodes if one.args == new.args[1:]]
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
