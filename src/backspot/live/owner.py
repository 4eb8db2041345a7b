"""What hooks and graph nodes hold on to: who a module is, and whether its labels are still wanted.

Nothing here refers to a module, a tensor or a node, so that nothing is kept alive by a label.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from backspot.live import torch_internals
from backspot.trace.labels import Kind, Label, format_label

__all__ = ["Owner", "Scope", "marker"]

_is_dynamo_compiling, _recording = torch_internals.is_dynamo_compiling, torch_internals.recording
_new_range = torch_internals.new_range


class Scope:
    """One instrumentation, as its hooks see it.

    Attributes:
        active: false once it was removed; hooks that live graphs still hold then do nothing.
        lines: whether the source line of each node is wanted.
        marks_nodes: whether boundary nodes bear the backward markers (``hooks="node"``).
        paths: the module paths that it labels.
        model: a weak reference to the model.
        modules: each labelled module's owner, and a weak reference to it.
    """

    __slots__ = ("active", "lines", "marks_nodes", "model", "modules", "paths")

    def __init__(
        self,
        model: Any,
        paths: frozenset[str],
        marks_nodes: bool,
        lines: bool = False,
    ) -> None:
        self.active = True
        self.lines = lines
        self.marks_nodes = marks_nodes
        self.paths = paths
        self.model = weakref.ref(model)
        self.modules: list[tuple[Owner, weakref.ref[Any]]] = []

    def live_modules(self) -> Iterator[tuple[Owner, Any]]:
        """The labelled modules that are not gone, with their owners."""
        for owner, reference in self.modules:
            module = reference()
            if module is not None:
                yield owner, module


def marker(scope: Scope, label: str) -> Callable[..., None]:
    """The prehook of boundary nodes: from here on the engine works for one module."""

    def mark(*_: object) -> None:
        # Never raises, and returns nothing so that gradients stay as they are.
        if _is_dynamo_compiling():  # compiled autograd traces prehooks
            return
        if scope.active and _recording():
            try:
                with _new_range(label):
                    return
            except Exception:
                return  # a label is never worth a failed backward

    return mark


class Owner:
    """One instrumented module by its names, with its labels written beforehand.

    Attributes:
        ancestors: the owners of the modules around it.
        on_node: the prehook of its boundary nodes.
    """

    __slots__ = (
        "_carrier",
        "_repeated",
        "ancestors",
        "class_name",
        "forward",
        "on_node",
        "path",
        "scope",
        "unmarked",
        "unused",
    )

    def __init__(
        self, scope: Scope, path: str, class_name: str, ancestors: frozenset[Owner]
    ) -> None:
        self.scope = scope
        self.path = path
        self.class_name = class_name
        self.ancestors = ancestors
        self.forward = self.label(Kind.FORWARD)
        self.unmarked = self.label(Kind.UNMARKED)
        self.unused = self.label(Kind.UNUSED)
        self.on_node = marker(scope, self.label(Kind.BACKWARD))
        self._carrier: Any = None
        self._repeated: dict[int, str] = {}

    def hook(self, node: Any) -> None:
        """Have autograd call ``on_node`` before the node."""
        carrier = self._carrier
        if carrier is None:
            carrier = self._carrier = torch_internals.carrier_of(self.on_node)
        if carrier is None:
            node.register_prehook(self.on_node)
        else:
            node._register_hook_dict(carrier)

    def label(self, kind: Kind, call: int = 1) -> str:
        """The label of this kind, as it stands in a trace."""
        return format_label(Label(kind, self.path, self.class_name, call))

    def repeated(self, call: int) -> str:
        """The forward label of the second and every later call within one outermost forward."""
        label = self._repeated.get(call)
        if label is None:
            label = self.label(Kind.FORWARD, call)
            # An RNN cell can be called as often as it likes: what is kept has a bound.
            if len(self._repeated) < 1024:
                self._repeated[call] = label
        return label
