"""What hooks and autograd nodes refer to: the names of a module, and whether to label it.

Nothing here refers strongly to a module, a tensor or a node, so that a label keeps nothing alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch

from backspot.interrupts import pass_on
from backspot.live.torch_internals import autograd, dynamo, profiler
from backspot.trace.labels import Kind, Label, format_label, unused_label

_is_dynamo_compiling, _recording = dynamo.is_dynamo_compiling, profiler.recording
_new_range = profiler.new_range
_MOST_REPEATED = 1024  # labels kept for each module; an RNN cell can be called any number of times


class Scope:
    """One instrumentation, as its hooks see it.

    Attributes:
        active: false once it was removed: hooks that are still on the nodes of a graph then do
            nothing.
        hooks: ``"call"``, ``"node"`` or ``"module"``.
        markers: whether there are backward markers; ``None``: where no trace is exported.
        marks_nodes: whether backward markers are on boundary nodes in this session.
    """

    __slots__ = (
        "active",
        "hooks",
        "lines",
        "markers",
        "marks_nodes",
        "model",
        "modules",
        "paths",
    )

    def __init__(
        self,
        model: torch.nn.Module,
        paths: frozenset[str],
        *,
        hooks: str,
        markers: bool | None,
        lines: bool,
    ) -> None:
        self.active = True
        self.hooks = hooks
        self.lines = lines
        self.markers = markers
        self.marks_nodes = bool(markers) and hooks != "module"
        self.paths = paths
        self.model = weakref.ref(model)
        self.modules: list[tuple[Owner, weakref.ref[torch.nn.Module]]] = []

    def live_modules(self) -> Iterator[tuple[Owner, torch.nn.Module]]:
        """Iterate over the labelled modules that still exist, with their owners."""
        for owner, reference in self.modules:
            module = reference()
            if module is not None:
                yield owner, module


def marker(scope: Scope, label: str) -> Callable[..., None]:
    """Return the prehook of boundary nodes: from here on the engine works for one module."""

    def mark(*_: object) -> None:
        # Never raises, and returns None so that gradients stay as they are.
        if _is_dynamo_compiling():  # compiled autograd traces prehooks
            return
        if scope.active and _recording():
            try:
                with _new_range(label):
                    return
            except Exception as error:
                pass_on(error)  # a label is never worth a failed backward

    return mark


class Owner:
    """One instrumented module: its names, and its labels, which are formatted once.

    Attributes:
        hook: registers ``on_node`` on a node.
    """

    __slots__ = (
        "_repeated",
        "ancestors",
        "class_name",
        "forward",
        "hook",
        "on_node",
        "path",
        "scope",
        "unmarked",
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
        self.on_node = marker(scope, self.label(Kind.BACKWARD))
        self.hook = autograd.node_hooker(self.on_node)
        self._repeated: dict[int, str] = {}

    def label(self, kind: Kind, call: int = 1) -> str:
        """Return the label of a kind, as it is written into a trace."""
        return format_label(Label(kind, self.path, self.class_name, call))

    def unused(self, share: float) -> str:
        """Return the label for a part of the module's gradients that no optimizer uses: 0 to 1."""
        return format_label(unused_label(self.path, self.class_name, share))

    def repeated(self, call: int) -> str:
        """Return the forward label of a call after the first within one outermost forward."""
        label = self._repeated.get(call)
        if label is None:
            label = self.label(Kind.FORWARD, call)
            if len(self._repeated) < _MOST_REPEATED:
                self._repeated[call] = label
        return label
