"""What hooks and graph nodes hold on to: who a module is, and whether its labels are still wanted.

Nothing here refers to a module, a tensor or a node, so that nothing is kept alive by a label.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from backspot.labels import Kind, Label, format_label
from backspot.live import gates

__all__ = ["Marker", "Owner", "Scope"]

_is_dynamo_compiling, _recording, _emit = gates.is_dynamo_compiling, gates.recording, gates.emit


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
        model: Any,  # noqa: ANN401 - a torch module
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


class Marker:
    """The prehook of a boundary node: from here on the engine works for one module."""

    __slots__ = ("label", "scope")

    def __init__(self, scope: Scope, label: str) -> None:
        self.scope = scope
        self.label = label

    def __call__(self, *_: object) -> None:
        """Write the label; never raises, and returns nothing so that gradients stay as they are."""
        if _is_dynamo_compiling():  # compiled autograd traces prehooks
            return
        if self.scope.active and _recording():
            try:
                _emit(self.label)
            except Exception:
                return  # a label is never worth a failed backward


class Owner:
    """One instrumented module by its names, with its labels written beforehand.

    Attributes:
        ancestors: the owners of the modules around it.
        on_node: the prehook of its boundary nodes: it writes ``marker``.
        open: one entry for each labelled call of it that is not yet closed, on any thread. Used as
            a counter, for appending and popping are atomic: a post-hook with nothing to close has
            this one thing to ask.
    """

    __slots__ = (
        "_repeated",
        "ancestors",
        "class_name",
        "forward",
        "marker",
        "on_node",
        "open",
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
        self.open: list[None] = []
        self.forward = self.label(Kind.FORWARD)
        self.unmarked = self.label(Kind.UNMARKED)
        self.unused = self.label(Kind.UNUSED)
        self.marker = Marker(scope, self.label(Kind.BACKWARD))
        self.on_node = self.marker.__call__  # PyTorch calls a bound method faster than an object
        self._repeated: dict[int, str] = {}

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
