"""Write into each node of Inductor's graphs for which module it works, as a frame of its trace."""

from __future__ import annotations

import hashlib
import math
import operator

import torch

from backspot.live.frames import Frame, with_frame
from backspot.live.modules import written_class_name
from backspot.live.torch_internals.graphs import (
    forward_number_of,
    hint_of,
    module_stack_of,
    number_without_forward,
)
from backspot.live.torch_internals.launch_sites import launch_sites_so_far

__all__ = ["bytes_of", "digest_of_modules", "write_frames"]

_MOST_USERS = 64  # more consumers are surely in other kernels, too

_Stacks = dict[torch.fx.Node, tuple[list[tuple[str, type]], bool]]


def write_frames(graph: torch.fx.Graph, forward: dict[int, list[tuple[str, type]]]) -> None:
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
        class_name, place = _named(stack)
        reads: dict[int, int] = {}
        users: list[int] = []
        amount = 0
        if not _is_view(node):
            amount = bytes_of(node)
            reads = {number[_source(one)]: bytes_of(one) for one in node.all_input_nodes}
            if str(node.target).startswith(_LOOK_UPS):  # not more than what is looked up
                reads = {source: min(size, amount) for source, size in reads.items()}
            users = [number[one] for one in _users(node)]
        frame = Frame(class_name, place, backward, base, number[node], amount, reads, users)
        node.meta["stack_trace"] = with_frame(node.meta.get("stack_trace") or "", frame)


def _named(stack: list[tuple[str, type]]) -> tuple[str, str]:
    """Return the class of the innermost module, as written, and Dynamo's expression for it."""
    if not stack:
        return "", ""
    place, cls = stack[-1]
    return written_class_name(cls), place


def _modules_of(graph: torch.fx.Graph, forward: dict[int, list[tuple[str, type]]]) -> _Stacks:
    """Return the modules around each node of a graph; ``forward`` as in ``write_frames``."""
    modules = {node: module_stack_of(node) for node in graph.nodes}
    _find_modules_of_changes_in_place(modules, forward)
    return modules


def digest_of_modules(owner: torch.nn.Module, forward: dict[int, list[tuple[str, type]]]) -> bytes:
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


_LOOK_UPS = ("aten.embedding.", "aten.gather.", "aten.index.", "aten.index_select.")
_VIEWS = ("aten.reshape.", "aten._unsafe_view.", "aten.lift_fresh")


def _is_view(node: torch.fx.Node) -> bool:
    """Return whether a node makes no data of its own."""
    if node.target is operator.getitem:
        return True
    return getattr(node.target, "is_view", False) is True or str(node.target).startswith(_VIEWS)


def _source(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node that made the data of a node."""
    while node.op == "call_function" and _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _users(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the nodes that read what a node makes, through views; at most some."""
    found: dict[torch.fx.Node, None] = {}
    pending = list(node.users)
    while pending and len(found) < _MOST_USERS:
        user = pending.pop()
        if user.op == "call_function" and _is_view(user):
            pending.extend(user.users)
        else:
            found[user] = None
    return list(found)


def bytes_of(node: torch.fx.Node) -> int:
    """Return the bytes of a node's tensors; of symbolic sizes the example's."""
    values = node.meta.get("val")
    amount = 0
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, torch.Tensor):
            sizes = (hint_of(size) for size in value.shape)
            amount += math.prod(sizes) * value.dtype.itemsize
    return amount
