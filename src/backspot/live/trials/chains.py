"""The operators of one real step that a remedy can replace, with copies of what they were given.

``Chains`` sees the functions that the training calls, and runs them as they are. Tensors are told
by identity: a chain goes on where a function is given the very tensor that the chain has made. What
is kept until the chain is complete, autograd keeps too. What is kept afterwards are copies, of the
first of each kind alone, up to half of the memory that is free.

A tensor that is a view is kept as what it is a view of, and as the functions that make it: its
backward then writes gradients as the step does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from backspot.interrupts import pass_on
from backspot.live.torch_internals.process import innermost_mode, tree_flatten, tree_map
from backspot.live.trials.twins import Autocast, check_plain, free_bytes, size_of, twin

_Function = Callable[..., Any]
_T = torch.Tensor

PRODUCTS = {torch.matmul, torch.bmm, _T.matmul, _T.bmm, _T.__matmul__}
_TIMES = {torch.mul, _T.mul, _T.__mul__, _T.__rmul__, _T.mul_, _T.__imul__}
_DIVIDED = {torch.div, _T.div, _T.__truediv__, _T.div_, _T.__itruediv__}
_ADDED = {torch.add, _T.add, _T.__add__, _T.__radd__, _T.add_, _T.__iadd__}
_FILLED = {torch.masked_fill, _T.masked_fill, _T.masked_fill_}
_CHOSEN = {torch.where, _T.where}
_SOFTMAX = {torch.softmax, _T.softmax, functional.softmax}
_DROPOUT = {functional.dropout, torch.dropout}
_CAST = {_T.to, _T.type_as, _T.float, _T.half, _T.bfloat16}
_LAID_OUT = {
    *(_T.view, _T.reshape, _T.transpose, _T.permute, _T.flatten, _T.contiguous, _T.unflatten),
    *(torch.reshape, torch.transpose, torch.permute, torch.flatten),
}
_MOVED = {_T.to, _T.cuda}
_POINTWISE = {
    *(_TIMES | _DIVIDED | _ADDED | _CAST),
    *(torch.sub, _T.sub, _T.__sub__, _T.__rsub__, _T.__rtruediv__, _T.__pow__, _T.__neg__),
    *(
        getattr(home, name)
        for home in (torch, _T)
        for name in ("pow", "square", "sqrt", "rsqrt", "mean", "var", "tanh", "erf", "exp", "log1p")
    ),
    *(torch.sigmoid, _T.sigmoid, functional.sigmoid, functional.softplus, functional.tanh),
}
_VERY_LOW = -1e4
"""A mask fills in such a number or a lower one, so that the softmax gives 0."""
_TINY = 4
"""A product of so few numbers each is rather a sum of element-wise products."""
_CHAIN, _LONGEST = 3, 24
"""How many pointwise functions make a chain."""


class _Value:
    """Stands for what the function before has returned."""


VALUE = _Value()


@dataclass(frozen=True)
class Call:
    """A function that was called, with ``VALUE`` in place of what the call before has made.

    Where it returned several tensors, ``item`` is the one that the chain goes on with.
    """

    function: _Function
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    item: int | None = None

    def again(self, value: Any) -> Any:
        """Call it with another value, as directly as the step did."""
        args = [_put(one, value) for one in self.args]
        out = self.function(*args, **{key: _put(one, value) for key, one in self.kwargs.items()})
        return out if self.item is None else out[self.item]


@dataclass(frozen=True)
class View:
    """A tensor that the step made of another one by views alone, and how."""

    root: torch.Tensor
    shape: torch.Size
    calls: tuple[Call, ...] = ()

    def made(self) -> torch.Tensor:
        """Make it again."""
        return through(self.calls, self.root)


def through(calls: Iterable[Call], value: Any) -> torch.Tensor:
    """Return what calls make of a value, one after the other."""
    for call in calls:
        value = call.again(value)
    made: torch.Tensor = value
    return made


def _put(one: Any, value: Any) -> Any:
    return value if one is VALUE else one.made() if isinstance(one, View) else one


@dataclass(frozen=True)
class Chain:
    """Functions that make one thing.

    Attributes:
        kind: what they make, such as ``"attention"``, ``"index"`` or ``"pointwise"``.
        calls: the functions in turn; with a ``View`` for each tensor once the chain is complete.
        autocast: that of the step.
        given: tensors and numbers by what they are for; tensors as in ``calls``.
        after: what only lays out what the chain has made.
        count: how often a step does that.
    """

    kind: str
    calls: tuple[Call, ...]
    autocast: Autocast
    given: Mapping[str, Any] = field(default_factory=dict)
    after: tuple[Call, ...] = ()
    count: int = 1

    def further(self, call: Call, **given: Any) -> Chain:
        """Return the chain with one more call."""
        return replace(self, calls=(*self.calls, call), given={**self.given, **given})


@dataclass(eq=False)
class Node:
    """A tensor of which pointwise functions make others, or that one of them has made.

    Attributes:
        number: in the order in which they were seen; what a node is made of comes before it.
        tensor: a weak reference.
        function: what has made it; ``None`` if that is no pointwise function.
        parts: what that was given: nodes and numbers.
        is_weight: whether it is a parameter.
    """

    number: int
    tensor: ref[torch.Tensor]
    function: _Function | None = None
    parts: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_weight: bool = False
    is_kept: bool = False

    def made(self) -> tuple[list[Node], dict[Node, int]]:
        """Return the nodes that make it, the last one first, and each tensor that is enough for it.

        With each of these comes how many of the nodes it takes from there.
        """
        nodes, enough, edge = list[Node](), dict[Node, int](), {self}
        while inner := [one for one in edge if one.function is not None]:
            last = max(inner, key=lambda one: one.number)
            edge.remove(last)
            nodes.append(last)
            parts = (one for one in last.parts if isinstance(one, Node))
            edge.update(one for one in parts if not one.is_weight)
            if len(edge) == 1 and len(nodes) >= _CHAIN:
                enough[next(iter(edge))] = len(nodes)
            if len(nodes) == _LONGEST:
                break
        return nodes, enough


@dataclass
class ModuleCall:
    """The first call of a module in the step, with copies of what it was given."""

    module: torch.nn.Module
    args: Any
    kwargs: Any
    autocast: Autocast
    count: int = 1


class Chains(TorchFunctionMode):  # type: ignore[misc] # untyped
    """Sees the functions of a step on this thread, while it is entered.

    Args:
        modules: those whose calls are copied too.

    Attributes:
        functions: how many functions gave a tensor that needs a backward.
        calls: the calls of the modules.
        missed: why chains were seen that are not among them, by kind.
    """

    def __init__(self, modules: Collection[torch.nn.Module] = ()) -> None:
        super().__init__()
        self.functions = 0
        self.calls: dict[int, ModuleCall] = {}
        self.missed: dict[str, str] = {}
        self._watched, self._handles, self._thread = modules, list[Any](), 0
        self._found: dict[object, Chain] = {}
        self._open: Any = WeakTensorKeyDictionary()
        self._views: Any = WeakTensorKeyDictionary()
        self._ends: Any = WeakTensorKeyDictionary()  # the keys of chains that were found just now
        # What comes of products with a single column: sums of such are no product of q and k.
        self._narrow: Any = WeakTensorKeyDictionary()
        self._tables: Any = WeakIdKeyDictionary()  # how often each table is used, and by what
        self._nodes: Any = WeakTensorKeyDictionary()
        self._left: dict[torch.device, int] = {}

    def begin(self) -> None:
        """See functions until ``end``, on this thread."""
        self._thread = threading.get_ident()
        self._handles += [
            one.register_forward_pre_hook(self._before_call, with_kwargs=True)
            for one in self._watched
        ]
        self.__enter__()

    def end(self) -> None:
        """See no more functions, and forget what is not complete.

        Where another mode was entered since, or on another thread, this one stays there and does
        nothing: PyTorch would take the other one away.
        """
        if threading.get_ident() == self._thread and innermost_mode() is self:
            self.__exit__(None, None, None)
        self._thread = 0
        for kept in (self._open, self._views, self._ends, self._nodes):
            kept.clear()
        for handle in self._handles:
            handle.remove()

    def of(self, *kinds: str) -> list[Chain]:
        """Return the chains of some kinds."""
        return [chain for chain in self._found.values() if chain.kind in kinds]

    def other_uses(self, table: torch.Tensor) -> int:
        """Return how often the step has used a table of embeddings in another way."""
        return int(self._tables.get(table, 0))

    def _before_call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread or not torch.is_grad_enabled():
            return
        if id(module) in self.calls:
            self.calls[id(module)].count += 1
            return
        try:
            given = list(tensors_of((args, kwargs)))
            check_plain(*given)
            device = next((one.device for one in (*given, *module.parameters())), None)
            if device is None or not self._fits(device, sum(map(size_of, given))):
                return
            args, kwargs = tree_map(
                lambda one: twin(one) if isinstance(one, torch.Tensor) else one, (args, kwargs)
            )
            self.calls[id(module)] = ModuleCall(module, args, kwargs, _autocast(device))
        except Exception as error:
            pass_on(error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function as it is, and note what a chain needs."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not self._thread:
            return output
        try:
            if isinstance(output, torch.Tensor):
                self.functions += output.requires_grad
                self._see(func, args, kwargs, output)
                self._note_view(func, args, kwargs, output)
                self._note_pointwise(func, args, kwargs, output)
            elif isinstance(output, tuple):
                for item, one in enumerate(output):
                    if isinstance(one, torch.Tensor):
                        self._note_view(func, args, kwargs, one, item)
        except Exception as error:  # a form that is not known: nothing to try
            pass_on(error)
        return output

    def _note_view(
        self, func: _Function, args: Any, kwargs: Any, out: torch.Tensor, item: int | None = None
    ) -> None:
        """Note how a view is made of what is none; and what lays out the end of a chain."""
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if source is None or source is out:
            return
        if source in self._ends and func in _LAID_OUT:
            key = self._ends[source]
            chain = self._found[key]
            self._found[key] = replace(
                chain, after=(*chain.after, _call(func, args, kwargs, source))
            )
            self._ends[out] = key
        elif out._is_view() and not any(isinstance(one, _T) for one in tree_flatten(args[1:])[0]):
            before = self._views.get(source) or View(source, source.shape)
            call = replace(_call(func, args, kwargs, source), item=item)
            self._views[out] = View(before.root, out.shape, (*before.calls, call))

    def _note_pointwise(self, func: _Function, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        """Note how pointwise functions make a tensor, and keep a chain where it is used."""
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        if func in _CAST and args[0] is out:
            return
        if func not in _POINTWISE or any(one is out for one in tensors):
            for one in tensors:
                node = self._nodes.pop(one, None)
                if node is not None and node.function is not None and not node.is_kept:
                    node.is_kept = True
                    self._keep_pointwise(node)
        elif out.requires_grad:
            parts = tuple(self._node(one) if isinstance(one, torch.Tensor) else one for one in args)
            self._nodes[out] = Node(self.functions, ref(out), func, parts, kwargs)

    def _node(self, tensor: torch.Tensor) -> Node:
        if tensor not in self._nodes:
            weight = isinstance(tensor, torch.nn.Parameter)
            self._nodes[tensor] = Node(self.functions, ref(tensor), is_weight=weight)
        found: Node = self._nodes[tensor]
        return found

    def _keep_pointwise(self, last: Node) -> None:
        nodes, enough = last.made()
        made = last.tensor()
        if not enough or made is None:
            return
        functions = tuple(one.function for one in nodes[: next(iter(enough.values()))])
        key = "pointwise", functions, made.shape, made.dtype
        if key in self._found:
            self._found[key] = replace(self._found[key], count=self._found[key].count + 1)
            return
        wanted = {
            *enough,
            *(p for n in nodes for p in n.parts if isinstance(p, Node) and p.is_weight),
        }
        living = {node: one for node in wanted if (one := node.tensor()) is not None}
        check_plain(*living.values())
        if self._fits(made.device, sum(map(size_of, living.values()))):
            given = {
                "nodes": nodes,
                "from": {node: count for node, count in enough.items() if node in living},
                "copies": {node: twin(one).requires_grad_() for node, one in living.items()},
            }
            self._found[key] = Chain("pointwise", (), _autocast(made.device), given)

    def _see(self, func: _Function, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        if func in PRODUCTS or func is functional.linear:
            if out.dim() >= 2 and out.shape[-1] == 1:
                self._narrow[out] = True
        elif func not in _SOFTMAX and any(one in self._narrow for one in tensors):
            self._narrow[out] = True
        if func in PRODUCTS and args[0].shape[-1] <= _TINY and out.dim() >= 3:
            self._keep_two("product", func, args, kwargs, out)
        if func is torch.cdist:
            p = kwargs.get("p", args[2] if len(args) > 2 else 2.0)
            self._keep_two("distance", func, args, kwargs, out, p=p)
        elif func in PRODUCTS:
            weights = self._open.get(args[0])
            if weights is not None and "softmax" in weights.given:
                self._keep(weights.further(_call(func, args, kwargs, args[0]), v=args[1]), out)
            elif out.dim() >= 3 and out.requires_grad:
                given = {"q": args[0], "kt": args[1], "scale": 1.0, "masks": (), "scores": out}
                call = Call(func, args, kwargs)
                self._open[out] = Chain("attention", (call,), _autocast(out.device), given)
        elif func is functional.embedding and args[1].requires_grad:
            given = {"index": args[0], "options": args[2:], **kwargs}
            chain = Chain("embedding", (), _autocast(out.device), given)
            self._keep(chain, out, table=args[1])
        elif func is functional.linear:
            if args[1] in self._tables or args[1].is_leaf:
                self._tables[args[1]] = self._tables.get(args[1], 0) + 1
        elif func is _T.__getitem__ and not out._is_view():
            index = args[1][0] if isinstance(args[1], tuple) and len(args[1]) == 1 else args[1]
            if isinstance(index, torch.Tensor) and index.dtype == torch.long and out.requires_grad:
                given = {"table": args[0], "index": index}
                self._keep(Chain("index", (), _autocast(out.device), given), out)
        elif func in _MOVED and out.device.type == "cuda" and args[0].device.type == "cpu":
            given = {"shape": tuple(out.shape), "dtype": out.dtype, "strides": out.stride()}
            given |= {"pinned": args[0].is_pinned(), "device": out.device}
            self._keep(Chain("copy", (), _autocast(out.device), given), out)
        else:
            self._go_on(func, args, kwargs, out)

    def _go_on(self, func: _Function, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        """Go on with a chain of attention, if one of the arguments is its value."""
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        value = next((one for one in tensors if one in self._open), None)
        if value is None and func in _SOFTMAX and out.dim() >= 3 and out.requires_grad:
            if args[0] not in self._narrow:
                self.missed["attention"] = "how the scores of a softmax are made was not recognised"
                return
            given = {"scores": args[0]}
            self._open[args[0]] = Chain("attention", (), _autocast(out.device), given)
            value = args[0]
        if value is None:
            return
        chain = self._open[value]
        said = _meaning(func, args, kwargs, value, out, chain)
        if said is not None:
            self._open[out] = chain.further(_call(func, args, kwargs, value), **said)

    def _keep(self, chain: Chain, out: torch.Tensor, **more: Any) -> None:
        """Count a complete chain, and copy what the first of its kind was given."""
        given = {key: value for key, value in chain.given.items() if key != "softmax"}
        if "q" in given:
            del given["scores"]
        leaves = [one for one in tree_flatten(given)[0] if isinstance(one, torch.Tensor)]
        key = (
            chain.kind,
            tuple((tuple(one.shape), one.stride(), one.dtype) for one in leaves),
            tuple(id(one) for one in more.values()),
            tuple(call.function for call in chain.calls),
            given.get("shape"),
        )
        if key in self._found:
            self._found[key] = replace(self._found[key], count=self._found[key].count + 1)
            return
        views = {id(one): self._views.get(one) or View(one, one.shape) for one in leaves}
        roots = {id(view.root): view.root for view in views.values()}
        check_plain(*roots.values())
        # A table is copied by its trial: the training has it then, too.
        needed = sum(map(size_of, roots.values()))
        if leaves and not self._fits(leaves[0].device, needed):
            self.missed[chain.kind] = f"copies would take {needed >> 20:,} MiB, too little is free"
            return
        copies = {at: twin(root) for at, root in roots.items()}

        def copied(one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            view = views[id(one)]
            return replace(view, root=copies[id(view.root)])

        calls = tuple(
            replace(call, args=tree_map(copied, call.args), kwargs=tree_map(copied, call.kwargs))
            for call in chain.calls
        )
        self._found[key] = replace(chain, calls=calls, given=tree_map(copied, given) | more)
        self._ends[out] = key

    def _keep_two(
        self, kind: str, func: _Function, args: Any, kwargs: Any, out: torch.Tensor, **more: Any
    ) -> None:
        given = {"a": args[0], "b": args[1], **more}
        self._keep(Chain(kind, (Call(func, args, kwargs),), _autocast(out.device), given), out)

    def _fits(self, device: torch.device, needed: int) -> bool:
        left = self._left.setdefault(device, free_bytes(device))
        self._left[device] = left - needed if needed <= left else left
        return needed <= left


def _autocast(device: torch.device) -> Autocast:
    kind = device.type
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _call(func: _Function, args: Any, kwargs: Any, value: torch.Tensor) -> Call:
    args = tuple(VALUE if one is value else one for one in args)
    return Call(func, args, {k: VALUE if one is value else one for k, one in kwargs.items()})


def _meaning(
    func: _Function, args: Any, kwargs: Any, value: torch.Tensor, out: torch.Tensor, chain: Chain
) -> dict[str, Any] | None:
    """Return what a function adds to what is known of a chain; ``None`` if that ends the chain."""
    if "softmax" in chain.given:
        if func in _DROPOUT:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            on = kwargs.get("training", args[2] if len(args) > 2 else True)
            return {"p": p if on else 0.0}
        return {} if func in _CAST and out.shape == value.shape else None
    if func in _SOFTMAX:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return {"softmax": True, "p": 0.0} if dim in (-1, out.dim() - 1) else None
    if "q" not in chain.given or out.shape != value.shape:
        return None
    other = [one for one in args if one is not value]
    if func in _TIMES | _DIVIDED and isinstance(other[0], (int, float)):
        factor = float(other[0])
        scale = chain.given["scale"] * (factor if func in _TIMES else 1 / factor)
        return {"scale": scale}
    masks = chain.given["masks"]
    if func in _ADDED and isinstance(other[0], torch.Tensor) and not kwargs:
        return {"masks": (*masks, ("add", other[0]))}
    if func in _FILLED and args[0] is value and _is_low(args[2]):
        return {"masks": (*masks, ("drop", args[1]))}
    if func in _CHOSEN and len(args) == 3:
        # torch.where(condition, a, b), and a.where(condition, b)
        condition, one, two = args if func is torch.where else (args[1], args[0], args[2])
        if one is value and _is_low(two):
            return {"masks": (*masks, ("keep", condition))}
        if two is value and _is_low(one):
            return {"masks": (*masks, ("drop", condition))}
    return {} if func in _CAST and out.shape == value.shape else None


def _is_low(fill: object) -> bool:
    if isinstance(fill, torch.Tensor):  # to read it would have the host wait for a GPU
        return fill.device.type == "cpu" and float(fill.max()) <= _VERY_LOW
    return isinstance(fill, (int, float)) and fill <= _VERY_LOW


def tensors_of(tree: object) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in calls and in what a chain was given."""
    for one in tree_flatten(tree)[0]:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, View):
            yield one.root
        elif isinstance(one, Call):
            yield from tensors_of((one.args, dict(one.kwargs)))
