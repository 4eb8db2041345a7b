"""For which module each node and each launch of compiled code works, as *frames* of stack traces.

A *frame* says for which module a node of a graph works, and what the node reads and writes. It
looks like a frame of Python, so that Inductor keeps it with the others. ``write_frames`` writes it
into the graph that Inductor compiles; ``SiteTables`` reads it from the compiled code.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

import torch

from backspot.live.modules import written_class_name
from backspot.live.source_lines import file_name
from backspot.live.torch_internals.inductor import (
    CompiledCode,
    forward_number_of,
    hint_of,
    launch_sites_so_far,
    module_stack_of,
    number_without_forward,
)
from backspot.trace.compiled import CompiledGraph, ModuleRef, Part, Site
from backspot.trace.names import is_library_call
from backspot.trace.operations import is_view
from backspot.trace.source_lines import SourceLine

IN_REDUCTION = '  File "backspot:then", line 0, in reduction\n'
"""In the stack traces of a kernel behind which another one finishes the reduction."""
_FRAME = re.compile(
    r'  File "backspot:(?P<direction>[fb]):(?P<class_name>[^:"]*):(?P<place>[^"]*)", '
    r"line (?P<bytes>\d+), in (?P<base>\d+)/(?P<node>\d+)<(?P<reads>[^>]*)>(?P<users>[\d,]*)\n"
)
_LINE = re.compile(
    r'  File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.*)\n(?: +(?P<text>.*))?'
)
_SAFE = "[]'.() "


class Frame(NamedTuple):
    """What a node of a graph works for.

    Attributes:
        class_name: the class of its module, as it is written; empty without a module.
        place: Dynamo's expression for the module; empty without one.
        backward: whether it is work of the backward.
        base: how many launch sites there were before the graph was compiled.
        node: the number of the node.
        bytes: the bytes that it makes.
        reads: the bytes that it reads, by the number of the node that made them.
        users: the numbers of the nodes that read what it makes.
    """

    class_name: str
    place: str
    backward: bool
    base: int
    node: int
    bytes: int
    reads: Mapping[int, int]
    users: Sequence[int]


def format_frame(frame: Frame) -> str:
    """Return a frame as text."""
    reads = ",".join(f"{source}.{size}" for source, size in frame.reads.items())
    users = ",".join(map(str, frame.users))
    direction = "b" if frame.backward else "f"
    return (
        f'  File "backspot:{direction}:{frame.class_name}:{quote(frame.place, safe=_SAFE)}", '
        f"line {frame.bytes}, in {frame.base}/{frame.node}<{reads}>{users}\n"
    )


def parse_frame(trace: str) -> tuple[Frame, SourceLine | None] | None:
    """Return the first frame in a stack trace, and the innermost line of the program behind it.

    ``None`` if there is no frame.
    """
    match = _FRAME.search(trace)
    if match is None:
        return None
    pairs = (read.partition(".") for read in match["reads"].split(",") if read)
    frame = Frame(
        match["class_name"],
        unquote(match["place"]),
        match["direction"] == "b",
        int(match["base"]),
        int(match["node"]),
        int(match["bytes"]),
        {int(source): int(size) for source, _, size in pairs},
        tuple(int(user) for user in match["users"].split(",") if user),
    )
    return frame, _line_of(trace[match.end() :])


def with_frame(trace: str, frame: Frame) -> str:
    """Return a stack trace with this frame and no other.

    It comes first: messages show the innermost frame, which stays the user's.
    """
    return format_frame(frame) + _FRAME.sub("", trace)


def _line_of(trace: str) -> SourceLine | None:
    """Return the innermost line of a stack trace."""
    lines = list(_LINE.finditer(trace))
    if not lines:
        return None
    last = lines[-1]
    return SourceLine(
        file_name(last["file"]), int(last["line"]), last["function"], (last["text"] or "").strip()
    )


_MOST_USERS = 64  # more consumers are surely in other kernels, too

_Stacks = dict[torch.fx.Node, tuple[list[tuple[str, type]], bool]]


def write_frames(graph: torch.fx.Graph, forward: dict[int, list[tuple[str, type]]]) -> None:
    """Write into the stack trace of each node of a graph for which module it works.

    Args:
        forward: the modules of forward nodes by their sequence number: this graph's are added, and
            those of graphs before are used.
    """
    base = launch_sites_so_far()
    number = {node: index for index, node in enumerate(graph.nodes)}
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
            reads = {
                number[_source(input_node)]: bytes_of(input_node)
                for input_node in node.all_input_nodes
            }
            if str(node.target).startswith(_LOOK_UPS):  # not more than what is looked up
                reads = {source: min(size, amount) for source, size in reads.items()}
            users = [number[user] for user in _users(node)]
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
        forward: as in ``write_frames``, but it stays as it is.
    """
    digest = hashlib.sha256()
    for inner_module in owner.modules():
        if issubclass(type(inner_module), torch.fx.GraphModule):
            for stack, backward in _modules_of(inner_module.graph, dict(forward)).values():
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


def _is_view(node: torch.fx.Node) -> bool:
    """Return whether a node makes no data of its own."""
    if node.target is operator.getitem:
        return True
    if getattr(node.target, "is_view", False) is True:  # so PyTorch says
        return True
    namespace, _, name = str(node.target).partition(".")
    return is_view(f"{namespace}::{name.partition('.')[0]}")


def _source(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node that made the data of a node."""
    while node.op == "call_function" and _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _users(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the nodes that read what a node makes, through views; at most some."""
    users: dict[torch.fx.Node, None] = {}
    pending = list(node.users)
    while pending and len(users) < _MOST_USERS:
        user = pending.pop()
        if user.op == "call_function" and _is_view(user):
            pending.extend(user.users)
        else:
            users[user] = None
    return list(users)


def bytes_of(node: torch.fx.Node) -> int:
    """Return the bytes of a node's tensors; of symbolic sizes the example's."""
    values = node.meta.get("val")
    amount = 0
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, torch.Tensor):
            sizes = (hint_of(size) for size in value.shape)
            amount += math.prod(sizes) * value.dtype.itemsize
    return amount


_ROOT = re.compile(r"[A-Za-z_]\w*(\[[^\]]*\])?(\.__self__\b)?")  # a method's module is one, too
_WRAPPERS = re.compile(r"\.(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")
_ITEM = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")


class _Worked(NamedTuple):
    """What a kernel does for one node of a graph, and the line of the program that made it."""

    frame: Frame
    place: ModuleRef | None
    line: SourceLine | None


def place_of(class_name: str, expression: str) -> ModuleRef | None:
    """Return the place that Dynamo's expression for a module names; ``None`` for none."""
    root = _ROOT.match(expression)
    if root is None:
        return None
    path = _WRAPPERS.sub("", expression[root.end() :].replace("._modules[", "["))
    path = _ITEM.sub(r".\1", path).replace("..", ".").strip(".")
    return ModuleRef(root[0], path, class_name)


def _worked(trace: str) -> _Worked | None:
    """Return what the frame in a stack trace says; ``None`` if there is none."""
    frame_and_line = parse_frame(trace)
    if frame_and_line is None:
        return None
    frame, line = frame_and_line
    return _Worked(frame, place_of(frame.class_name, frame.place), line)


def _ran(name: str, worked: list[_Worked | None]) -> list[_Worked]:
    """Return the nodes that a site runs.

    A call of a library is one node of the graph, the last one. The nodes before it made its inputs,
    in other kernels.
    """
    with_frames = [work for work in worked if work is not None]
    return (
        [max(with_frames, key=lambda work: work.frame.node)]
        if with_frames and is_library_call(name)
        else with_frames
    )


def _weights(
    kernel: list[_Worked],
) -> dict[tuple[ModuleRef | None, bool], tuple[int, SourceLine | None]]:
    """Return the bytes of a kernel by module and direction, each with the line of most of them.

    What one node of a kernel makes and another one reads stays in registers, and is not counted.
    """
    inside = {work.frame.node for work in kernel}
    amounts: dict[tuple[ModuleRef | None, bool], int] = {}
    lines: dict[tuple[ModuleRef | None, bool], tuple[int, SourceLine | None]] = {}
    read: set[tuple[ModuleRef | None, int]] = set()
    for work in kernel:
        frame = work.frame
        key = work.place, frame.backward
        amount = 0 if frame.users and inside.issuperset(frame.users) else frame.bytes
        for source, size in frame.reads.items():
            if source not in inside and (work.place, source) not in read:
                read.add((work.place, source))
                amount += size
        amounts[key] = amounts.get(key, 0) + amount
        if amount > lines.get(key, (-1, None))[0]:
            lines[key] = amount, work.line
    has_bytes = any(amounts.values())
    return {
        key: (amount, lines[key][1]) for key, amount in amounts.items() if amount or not has_bytes
    }


class SiteTables:
    """The graphs of one table, with their lines."""

    def __init__(self) -> None:
        self.lines: dict[SourceLine, int] = {}

    def graph(self, code: CompiledCode) -> CompiledGraph:
        """Return a compiled graph as the table has it."""
        kernels = sorted(_kernels(code.sites or ""), key=lambda kernel: kernel[1])
        worked = [
            (name, number, [_worked(trace) for trace in traces]) for name, number, traces in kernels
        ]
        all_work = [work for _, _, works in worked for work in works if work is not None]
        if not all_work:
            return CompiledGraph(code.key, code.backward, (), None)
        base = max(work.frame.base for work in all_work)
        reductions = {number for _, number, traces in kernels if IN_REDUCTION in traces}
        places: dict[ModuleRef, int] = {}
        sites = []
        for name, number, works in worked:
            if number <= base:
                continue
            shares = [
                Part(
                    -1 if place is None else places.setdefault(place, len(places)),
                    amount,
                    code.backward and not of_backward,
                    -1 if line is None else self.lines.setdefault(line, len(self.lines)),
                )
                for (place, of_backward), (amount, line) in _weights(_ran(name, works)).items()
            ]
            then = number in reductions
            sites.append(Site(name, tuple(sorted(shares, key=lambda share: -share.weight)), then))
        return CompiledGraph(code.key, code.backward, tuple(places), tuple(sites))


def _kernels(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yield each launch site's name, number and stack traces."""
    try:
        table = json.loads(text or "{}")
    except ValueError:
        return
    for key, traces in table.items():
        name, _, number = key.rpartition(":")
        if name and number.isdigit() and isinstance(traces, list):
            yield name, int(number), [trace for trace in traces if isinstance(trace, str)]
