"""The operators of one real step that a remedy can replace, with copies of what they were given.

``Chains`` sees the functions that the training calls, and runs them as they are. Of those that a
remedy may need it makes a graph of *nodes*, one for each tensor. A file of a remedy says with
``@seen`` which functions end a chain of its kind, and keeps it. What is kept are copies, of the
first chain of each kind alone, up to half of the memory that is free. Until then a node holds no
tensor alive that its views do not hold.

A chain begins with what its tensors are views of, so that its backward writes gradients as the step
does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from backspot.imports import modules_of
from backspot.interrupts import pass_on
from backspot.live.torch_internals.autograd import is_view_of
from backspot.live.torch_internals.process import take_mode_away, tree_flatten
from backspot.live.torch_internals.references import TensorRef, by_tensor, swaps
from backspot.live.trials.twins import (
    Autocast,
    Refused,
    check_plain,
    free_bytes,
    size_of,
    twin,
)
from backspot.trace.operations import ACTIVATIONS, Kind, names_of

_T = torch.Tensor
Function = Callable[..., Any]


_IN_PYTHON = {"div": "truediv"}


def _named(*names: str, homes: Iterable[Any] = (torch, _T, functional)) -> set[Function]:
    """Return PyTorch's functions of these names, also in place and as operators of Python."""
    spelled = set[str]()
    for name in names:
        operator = _IN_PYTHON.get(name, name)
        spelled |= {name, f"{name}_", *(f"__{way}{operator}__" for way in ("", "r", "i"))}
    return {getattr(home, name) for home in homes for name in spelled if hasattr(home, name)}


PRODUCTS = _named("matmul", "bmm") - {_T.__rmatmul__}
TIMES = _named("mul")
DIVIDED = _named("div") - {_T.__rtruediv__}
ADDED = _named("add")
FILLED = _named("masked_fill")
CHOSEN = _named("where")
SOFTMAX = _named("softmax")
LOGARITHM = _named("log")
LIMITED = _named("clamp", "clamp_min", "clip", "maximum")
DROPOUT = _named("dropout")
CAST = _named(*names_of(Kind.CAST), homes=(_T,))
POINTWISE = _named(*names_of(Kind.POINTWISE) - ACTIVATIONS, "mean", "var") | CAST
"""Of what people write functions out, such as norms and activations."""
LAID_OUT = _named(*names_of(Kind.VIEW, Kind.PERMUTE) - {"detach"}, "contiguous")
_RECORDED = PRODUCTS | SOFTMAX | DROPOUT | LAID_OUT | POINTWISE | {functional.leaky_relu}
_DEEPEST = 40
"""What more functions have made is a beginning: else the first node of a step lived as long."""


@dataclass(eq=False)
class Node:
    """A tensor of the step, and what has made it.

    Attributes:
        number: in the order in which they were seen; what a node is made of comes before it.
        tensor: returns it while it lives.
        held: what a view is a view of, what a softmax was given until that is looked at, and a
            mask, which may be smaller than what it is added to.
        function: what has made it; ``None`` if that was not recorded.
        parts: what that was given: nodes and other values.
        item: which of several results it is.
        is_view: whether it is a view of its first part.
        depth: how many functions in a row have made it.
        is_used: whether what a chain of pointwise functions has made was used.
        uses: how many functions were given it.
        replaced: the chains that another form replaces with this node in them, unless a second
            function uses it; each with the number of its last node.
    """

    number: int
    tensor: Callable[[], torch.Tensor | None]
    shape: torch.Size
    function: Function | None = None
    parts: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    item: int | None = None
    is_view: bool = False
    depth: int = 0
    held: torch.Tensor | None = None
    is_used: bool = False
    uses: int = 0
    replaced: list[tuple[Chain, int]] = field(default_factory=list)

    @property
    def root(self) -> Node:
        """What it is a view of, or itself."""
        node = self
        while node.is_view:
            node = node.parts[0]
        return node

    @property
    def inner(self) -> list[Node]:
        """The nodes among its parts."""
        return [argument for argument in self.parts if isinstance(argument, Node)]

    def option(self, name: str, place: int, default: Any) -> Any:
        """Return what its function was given by name or by place."""
        value = self.parts[place] if len(self.parts) > place else default
        return self.kwargs.get(name, value)


@dataclass
class Chain:
    """Functions that make one thing.

    Attributes:
        kind: what they make, such as ``"attention"`` or ``"index"``.
        end: the last node.
        given: nodes and other values by what they are for.
        copies: copies of the tensors that the chain begins with.
        autocast: that of the step.
        after: the last node that only lays out what the chain has made.
        count: how often a step does that.
        staying: the numbers of last nodes, of which what comes before is used by others, too.
    """

    kind: str
    end: Node
    given: Mapping[str, Any]
    copies: Mapping[Node, torch.Tensor]
    autocast: Autocast
    after: Node
    count: int = 1
    staying: set[int] = field(default_factory=set)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The copies that need gradients."""
        return [copy for copy in self.copies.values() if copy.requires_grad]

    def again(
        self, *ends: Node, given: Collection[Node] = (), without: Collection[Function] = ()
    ) -> Callable[..., list[torch.Tensor]]:
        """Return what makes some nodes again, as directly as the step did.

        Args:
            given: nodes that the returned function takes.
            without: functions that are left out.
        """
        reached, order = {*self.copies, *given}, dict[Node, None]()
        pending = [*ends]
        while pending:
            node = pending.pop()
            if node not in reached:
                if node.function is None:
                    raise Refused("a tensor that the chain begins with was not kept")
                order[node] = None
                pending += node.inner
        calls = [
            (node, node.function, node.parts, node.kwargs, node.item)
            for node in sorted(order, key=lambda made_node: made_node.number)
        ]

        def run(*values: torch.Tensor) -> list[torch.Tensor]:
            results: dict[Any, Any] = {**self.copies, **dict(zip(given, values, strict=True))}
            for node, function, arguments, kwargs, item in calls:
                args = [
                    results[argument] if isinstance(argument, Node) else argument
                    for argument in arguments
                ]
                skips = function in without
                out = args[0] if skips else function(*args, **kwargs)  # type: ignore[misc]
                results[node] = out if item is None else out[item]
            return [results[end] for end in ends]

        return run


Watcher = Callable[["Chains", Node], None]
_watchers: dict[Function | None, dict[str, Watcher]] = {}


def seen(*functions: Function) -> Callable[[Watcher], Watcher]:
    """Register what is known of each node that one of these functions, or any, has made."""

    def register(watcher: Watcher) -> Watcher:
        for function in functions or (None,):
            # By name: an import that was interrupted is made again.
            name = f"{watcher.__module__}.{watcher.__qualname__}"
            _watchers.setdefault(function, {})[name] = watcher
        return watcher

    return register


_HOMES = (functional, torch.functional, torch.Tensor, torch.autograd)
_OTHERS = {*sys.stdlib_module_names, "torch", "typing_extensions"}
"""Where functions come from that are in modules of PyTorch by themselves."""


def replaced_function() -> str:
    """Return a function of PyTorch's in whose place another one stands, ``""`` if there is none.

    PyTorch hands a mode what its own name is bound to now. To call that runs the other one's code
    twice, as it calls PyTorch's within.
    """
    for home in _HOMES:
        for name, value in list(vars(home).items()):
            is_partial = isinstance(value, partial)
            origin = getattr(value, "__globals__", {}).get("__name__", "torch")
            if is_partial or origin.partition(".")[0] not in _OTHERS:
                return f"{home.__name__}.{name}"
    return ""


class Chains(TorchFunctionMode):  # type: ignore[misc] # untyped
    """Sees the functions of a step on this thread, while it is entered.

    Attributes:
        functions: how many functions gave a tensor that needs a backward.
        missed: why chains were seen that are not among them, by kind.
        uses: how often each table of embeddings is used in another way.
        last: what the last linear layer made, its call, the type of its numbers, and its inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.functions = 0
        self.missed: dict[str, str] = {}
        self.uses = by_tensor()
        self.last: tuple[Node, Node, torch.dtype, list[Any]] | None = None
        self._thread = 0
        self._found: dict[object, Chain] = {}
        self._nodes = by_tensor()
        self._swaps = swaps()
        self._ends: dict[Node, Chain] = {}
        self._numbers = count()
        self._holding: WeakSet[Node] = WeakSet()
        self._left: dict[torch.device, int] = {}

    def begin(self) -> None:
        """See functions until ``end``, on this thread."""
        modules_of("backspot.live.trials")  # they register what is seen
        self._thread = threading.get_ident()
        self.__enter__()

    def end(self) -> None:
        """See no more functions, and forget what is not complete.

        On another thread this mode stays where it was entered, and does nothing.
        """
        if threading.get_ident() == self._thread:
            take_mode_away(self)
        self._thread = 0
        if swaps() != self._swaps:  # what a tensor holds is no longer what made it
            self._found.clear()
        self._nodes.clear()
        self._ends.clear()
        self.last = None
        for node in self._holding:  # what was kept has copies
            node.held = None

    def of(self, kind: str) -> list[Chain]:
        """Return the chains of a kind."""
        return [chain for chain in self._found.values() if chain.kind == kind]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function as it is, and note what a chain needs."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not self._thread:
            return output
        try:
            several = isinstance(output, (tuple, list))
            outputs = {
                item: tensor
                for item, tensor in enumerate(output if several else (output,))
                if isinstance(tensor, torch.Tensor)
            }
            if outputs and not (func in CAST and args[0] is output):
                self._use(args, kwargs)
            for item, tensor in outputs.items():
                self._note(func, args, kwargs, tensor, item if several else None)
        except Exception as error:  # a form that is not known: nothing to try
            pass_on(error)
        return output

    def _use(self, *arguments: object) -> None:
        """Count a use of each tensor in these."""
        for tensor in tensors_of(arguments):
            node = self.node(tensor)
            node.uses += 1
            if node.uses > 1:
                for chain, number in node.replaced:
                    chain.staying.add(number)

    def _note(
        self, func: Function, args: Any, kwargs: Any, out: torch.Tensor, item: int | None
    ) -> None:
        self.functions += out.requires_grad
        if func in CAST and args[0] is out:
            return
        source = args[0] if args else None
        is_view = (
            isinstance(source, torch.Tensor)
            and source is not out
            and len(list(tensors_of(args))) == 1
            and is_view_of(out, source)
        )
        arguments = tuple(
            self.node(argument) if isinstance(argument, torch.Tensor) else argument
            for argument in args
        )
        node = Node(
            next(self._numbers), TensorRef(out), out.shape, func, arguments, kwargs, item, is_view
        )
        node.depth = 1 + max((inner.depth for inner in node.inner), default=0)
        if is_view or func in SOFTMAX:
            node.held = source
        elif func in ADDED:
            node.held = next(
                (tensor for tensor in tensors_of(args) if tensor.shape != out.shape), None
            )
        if node.held is not None:
            self._holding.add(node)
        for watcher in (*_watchers.get(func, {}).values(), *_watchers.get(None, {}).values()):
            watcher(self, node)
        if not (is_view or func in _RECORDED) or node.depth > _DEEPEST:
            return
        self._nodes[out] = node
        chain = self._ends.get(arguments[0]) if func in LAID_OUT else None
        if chain is not None:
            chain.after = node
            self._ends[node] = chain

    def node(self, tensor: torch.Tensor) -> Node:
        """Return the node of a tensor."""
        if tensor not in self._nodes:
            self._nodes[tensor] = Node(next(self._numbers), TensorRef(tensor), tensor.shape)
        node: Node = self._nodes[tensor]
        return node

    def keep(
        self,
        kind: str,
        end: Node,
        arguments: Mapping[str, Any],
        *,
        key: object = None,
        replaced: Sequence[Node] = (),
    ) -> None:
        """Count a complete chain, and copy what the first of its kind begins with.

        Args:
            kind: what the chain makes.
            end: its last node.
            arguments: nodes and other values.
            key: what tells it from others of its kind, beside the shapes.
            replaced: the nodes before the last one that another form does not make. Where a second
                function uses one of them, they stay, and so does their backward.
        """
        output = end.tensor()
        roots = [node.root for node in nodes_of(arguments)]
        tensors = {root: tensor for root in roots if (tensor := root.tensor()) is not None}
        if output is None or len(tensors) < len(set(roots)):
            return
        alike = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors.values())
        earlier = self._found.get(identity := (kind, end.function, end.shape, alike, key))
        if earlier is not None:
            earlier.count += 1
            _replace(replaced, earlier, end)
            return
        check_plain(*tensors.values())
        needed = sum(map(size_of, tensors.values()))
        if not self._fits(output.device, needed):
            self.missed[kind] = f"copies take {needed >> 20:,} MiB, more than is left for trials"
            return
        copies = {node: twin(tensor) for node, tensor in tensors.items()}
        chain = Chain(kind, end, arguments, copies, autocast_of(output.device), end)
        self._found[identity] = self._ends[end] = chain
        _replace(replaced, chain, end)

    def _fits(self, device: torch.device, needed: int) -> bool:
        left = self._left.setdefault(device, free_bytes(device))
        self._left[device] = left - needed if needed <= left else left
        return needed <= left


def _replace(nodes: Sequence[Node], chain: Chain, end: Node) -> None:
    """Have a second use of these nodes, before this or after it, be noted in the chain."""
    for node in nodes:
        node.replaced.append((chain, end.number))
    if any(node.uses > 1 for node in nodes):
        chain.staying.add(end.number)


def autocast_of(device: torch.device) -> Autocast:
    """Return the autocast that is on for a kind of device."""
    kind = device.type
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def nodes_of(tree: object) -> list[Node]:
    """Return the nodes in a tree."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Node)]


def tensors_of(tree: object) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in a tree."""
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor))
