"""A training that died of memory: where, who held it, and how much was asked for.

All sizes are whole bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from backspot import presented
from backspot.formatting import labelled, size
from backspot.presented import Presented, public
from backspot.results.quantities import HOST, SELDOM, Count

SCHEMA = "backspot.out-of-memory/1"
"""Version of the JSON form."""

HeldKind: TypeAlias = Literal[
    "parameter", "buffer", "gradient", "optimizer", "activation", "no_stack", "other"
]
_MUCH = 0.1
"""Share of a GPU that is free, from which on it has not run out of memory."""
Phase: TypeAlias = Literal["forward", "evaluation", "backward", "optimizer", "other"]


@public
@dataclass(frozen=True, slots=True)
class HeldMemory:
    """What one owner holds of one kind.

    Attributes:
        kind: ``parameter``, ``buffer``, ``gradient`` (of parameters), ``optimizer`` (states),
            ``activation`` (allocated in the forward of modules), ``no_stack`` (allocated where no
            Python ran, as in autograd's threads, or before the allocator kept a history) or
            ``other``, which is all that is not known better.
        bytes: Size of the blocks.
        blocks: Number of blocks.
        path: Path of the module, or of repeated layers (``blocks.*.mlp``); ``""`` where it is of
            the whole model, or not known.
        class_name: Class of the module, or ``""``.
        members: How many modules these are, 0 where it is of no module.
    """

    kind: HeldKind
    bytes: Count
    blocks: Count
    path: str = ""
    class_name: str = ""
    members: Count = 0


@public
@dataclass(frozen=True, slots=True)
class OutOfMemory(Presented):
    """How a training ran out of memory and ended.

    Attributes:
        device: Index of the GPU, -1 for the host.
        source: How it is known. ``history``: the allocator's history at that moment
            (``--memory``, or the script's own); ``snapshot``: the allocator's blocks at that
            moment; ``process``: what the process had when the error had ended the script, of the
            host, or of a GPU where PyTorch's allocator was not asked.
        error: Class of the exception.
        phase: In what: ``forward``, ``evaluation`` (a forward in evaluation mode), ``backward``,
            ``optimizer`` or ``other``.
        step: In which step, from 1; ``None`` if steps were not counted any more.
        path: Path of the module that asked last; ``""`` for the model itself, or if none is known.
        class_name: Class of that module, ``""`` if none is known.
        node: Node of the backward that asked, such as ``AddmmBackward0``, if that is known.
        is_nearby: Whether that node is not the module's own, but next to it in the graph.
        asked_bytes: How much was asked for; ``None`` if not known.
        total_bytes: How much memory there is: of the device, or of what limits the host's.
        free_bytes: How much of that is free.
        limit: What limits it: ``GPU 0``, ``the machine``, ``the cgroup``, …
        in_use_bytes: What tensors have of PyTorch's allocator, with what is freed and still used by
            a stream, and what models and optimizers have beside it; of the host, what the process
            has, 0 where the error is of another process.
        reserved_bytes: What PyTorch's allocator has from the device; 0 for the host, and where the
            allocator does not tell.
        pieces_bytes: How much of that is free, in pieces of segments that cannot grow, outside of
            the pools of CUDA graphs.
        largest_piece_bytes: The largest of these.
        held: Who has ``in_use_bytes``, the most first; sums to it exactly on a GPU, and at most to
            it on the host.
        layers: What all activations of repeated layers are, by their outermost pattern
            (``blocks.*``), the most first; none where a checkpoint runs in the model.
        batch_size: Samples in a batch of the only loader; ``None`` if not known.
        earlier: How often the allocator had run out of memory before, on this GPU.
        schema: Version of the JSON form.
    """

    device: int
    source: Literal["history", "snapshot", "process"]
    error: str
    phase: Phase
    step: Count | None
    path: str
    class_name: str
    asked_bytes: Count | None
    total_bytes: Count
    free_bytes: Count
    limit: str
    in_use_bytes: Count
    reserved_bytes: Count = 0
    pieces_bytes: Count = 0
    largest_piece_bytes: Count = 0
    held: tuple[HeldMemory, ...] = ()
    layers: tuple[HeldMemory, ...] = ()
    node: str = ""
    is_nearby: bool = False
    batch_size: Count | None = None
    earlier: Count = 0
    schema: str = SCHEMA

    def _made_of(self) -> list[str]:
        return []

    def __repr__(self) -> str:
        request = "" if self.asked_bytes is None else f", asked for {size(self.asked_bytes)}"
        return f"<OutOfMemory of {self.limit}: {self.phase} {self.label}{request}>"

    @property
    def label(self) -> str:
        """The module that asked last, with its class; ``""`` if none is known."""
        return labelled(self.path, self.class_name) if self.class_name else ""

    @property
    def is_host(self) -> bool:
        """Whether it is the host's memory."""
        return self.device == HOST

    @property
    def others_bytes(self) -> int:
        """What of a GPU is neither free nor PyTorch's: CUDA, libraries, other processes."""
        explained = max(self.reserved_bytes, self.in_use_bytes)
        return 0 if self.is_host else max(self.used_bytes - explained, 0)

    @property
    def is_elsewhere(self) -> bool:
        """Whether CUDA had no memory left while the GPU had: pinned memory, or a library's.

        True where PyTorch's allocator was not asked, and over a tenth of the GPU was free.
        """
        was_asked = self.source != "process" or self.error == "OutOfMemoryError"
        if self.is_host or was_asked or not self.reserved_bytes:
            return False
        return self.free_bytes > _MUCH * self.total_bytes

    @property
    def used_bytes(self) -> int:
        """What is in use of ``total_bytes``, by whomever."""
        return max(self.total_bytes - self.free_bytes, 0)

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write it as ``.html``, ``.json`` or ``.txt``; the suffix of ``path`` decides.

        Args:
            path: Where to write.
            force: Whether to overwrite a file. Default false.

        Returns:
            The path of the file.

        Raises:
            OutputExistsError: If the file exists, without ``force``.
            UsageError: If the suffix names no format.

        Example:
            >>> death.save("out-of-memory.html")
            PosixPath('out-of-memory.html')
        """
        return presented.forms().write(self, path, force=force)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> OutOfMemory:
        """Read what ``save`` wrote as JSON.

        Args:
            path: The ``.json`` file.

        Returns:
            An equal result.

        Raises:
            SourceNotFoundError: If the file is missing or cannot be read.
            NotATraceError: If it is no such result, or has another schema.
            UsageError: If ``path`` is not a path.

        Example:
            >>> path = death.save("out-of-memory.json")
            >>> backspot.results.OutOfMemory.load(path)
            <OutOfMemory of GPU 0: backward blocks.3.mlp (Mlp), asked for 2.10 GB>
        """
        read: OutOfMemory = presented.forms().read(path, cls)
        return read


@dataclass(frozen=True, kw_only=True)
class InReport:
    """What each report has.

    Attributes:
        out_of_memory: How the training died of memory after these steps; ``None`` if it did not.
    """

    __slots__ = ()

    out_of_memory: OutOfMemory | None = field(default=None, metadata=SELDOM)
