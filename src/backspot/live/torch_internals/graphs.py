"""The graphs that Inductor compiles: what Dynamo and AOTAutograd note on their nodes."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = [
    "REPLACED",
    "forward_number_of",
    "graph_for_key",
    "hint_of",
    "module_stack_of",
    "number_without_forward",
]

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
    found = "fwd_nn_module_stack" in node.meta or node.meta.get("is_gradient_acc")
    is_backward = node.meta.get("partitioner_tag") == "is_backward"
    return node.meta.get("seq_nr") if is_backward and not found else None


def hint_of(size: Any) -> int:
    """Return a size, or the example of a symbolic one; 1 without. No guard is made."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "_hint", None)
    return hint if isinstance(hint, int) else 1
