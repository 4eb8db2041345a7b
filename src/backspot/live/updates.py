"""Which parameters were updated since the last backward, where no hook of an optimizer tells.

PyTorch calls a hook after each step of its optimizers, but not where the step is compiled, and not
for an optimizer that is not PyTorch's, or an update by hand. There the parameters tell: between a
backward and the next one, their memory was written, or their gradients were dropped or written.
While gradients are accumulated, neither happens.

Autograd writes gradients without Python's lock. So they are looked at only while no thread runs a
backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from typing import Any, TypeAlias

import torch

from backspot.live.torch_internals.autograd import ignore_torch_function
from backspot.live.torch_internals.process import version_of
from backspot.live.torch_internals.references import TensorRef

_MOST_PARAMETERS = 4
"""So many parameters of each holder are looked at. An update leaves out none, or whole layers."""

_State: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""How often each parameter was written; which gradient it has, and how often that was written."""


class Holder:
    """What holds parameters: an optimizer of PyTorch's whose hook is silent, or a model.

    Args:
        parameters: what may be updated.
        by_gradients: whether gradients that were dropped or written tell of an update, too. Those
            of an optimizer of PyTorch's do not: a gradient scaler may leave its step out.

    Attributes:
        key: what tells it from others.
        owner: a reference to the optimizer, or the model.
        updates: how many updates were seen.
    """

    def __init__(
        self, key: Hashable, owner: Any, parameters: Iterable[torch.Tensor], *, by_gradients: bool
    ) -> None:
        self.key = key
        self.owner: weakref.ref[Any] = weakref.ref(owner)
        self.updates = 0
        self._held = [*map(TensorRef, parameters)]
        self._watched: list[TensorRef] = []
        self._by_gradients = by_gradients
        self._before: _State | None = None
        self._after: _State | None = None

    def look(self) -> bool:
        """Return whether there was an update since the last backward that made a gradient here.

        To be called when a backward begins.
        """
        self._before = now = self._state()
        previous = self._after
        if previous is None or len(previous[0]) != len(now[0]):
            return False
        updated = previous != now if self._by_gradients else previous[0] != now[0]
        if updated:
            self.updates += 1
            self._after = None  # until the next gradient, which may be another backward's
        return updated

    def note(self) -> None:
        """Note how the parameters are when a backward has ended, if it made gradients for them."""
        if not self._watched:
            self._watch()
        now = self._state()
        if self._before is None or self._before[1] != now[1]:
            self._after = now

    def _watch(self) -> None:
        """Choose the first parameters with a gradient."""
        for ref in self._held:
            parameter = ref()
            if parameter is not None and parameter.grad is not None:
                self._watched.append(ref)
                if len(self._watched) == _MOST_PARAMETERS:
                    return

    def _state(self) -> _State:
        written: list[int] = []
        gradients: list[int] = []
        for ref in self._watched:
            parameter = ref()
            if parameter is not None:
                grad = parameter.grad
                written.append(version_of(parameter))
                gradients += (id(grad), 0 if grad is None else version_of(grad))
        return tuple(written), tuple(gradients)


class Updates:
    """The updates of a training on one thread, as far as its backwards tell."""

    _PATIENCE = 16
    """Backwards without an update after which what holds the parameters may be something else."""

    def __init__(self) -> None:
        self.holders: list[Holder] = []
        self._updated: list[Holder] = []
        self._backwards = self._since = 0
        self._patience = self._PATIENCE

    def begin_backward(self) -> None:
        """Look for updates."""
        with ignore_torch_function():
            self._updated = [holder for holder in self.holders if holder.look()]

    def count_backward(self) -> list[Holder]:
        """Count a backward that has ended; return what was updated just before it."""
        self._backwards += 1
        self._since = 0 if self._updated else self._since + 1
        return self._updated

    def note(self) -> None:
        """Note how the parameters are at the end of a backward."""
        with ignore_torch_function():
            for holder in self.holders:
                holder.note()

    @property
    def may_be_others(self) -> bool:
        """Whether to search for what holds the parameters; a search takes long."""
        early = not self.holders or self._backwards < self._PATIENCE
        if early and self._backwards.bit_count() == 1:
            return True
        return self._since >= self._patience or any(
            holder.owner() is None for holder in self.holders
        )

    @property
    def no_optimizer_steps(self) -> bool:
        """Whether there were so many backwards that an optimizer would have taken a step."""
        return self._backwards >= self._PATIENCE

    def found(self, holders: list[Holder]) -> None:
        """Take what a search has found, at the end of a backward."""
        known_holders = {
            holder.key: holder for holder in self.holders if holder.owner() is not None
        }
        self.holders = [known_holders.get(holder.key, holder) for holder in holders]
        self._patience = max(self._PATIENCE, 2 * self._since)
        self.note()
