"""How a training died of memory: in which module, who held what, and how much was asked for.

Nothing is done in a step. On a CUDA device, the allocator calls ``OutOfMemoryWatch`` at the moment
at which there is no memory left, while all tensors still live, and it keeps numbers alone. A
training that catches the error goes on, and they are never used. Only where the error ends the
script do they become a result, with the names of the modules.

The host's memory has no such moment: there the frames of the exception tell the module, and sizes
are those of the process when the error has ended the script.
"""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from backspot.interrupts import contained
from backspot.live import discovery
from backspot.live.free_memory import GPU, resident, spaces
from backspot.live.memory_history import Models, NamedModules, allocated_by, held_by_kind
from backspot.live.torch_internals.allocator import (
    NodeAtWork,
    OutOfMemoryError,
    Snapshot,
    errors_caught,
    looked_at,
    node_at_work,
    snapshot_of,
    watch_allocator,
)
from backspot.live.torch_internals.engine import is_engine
from backspot.live.torch_internals.modules import is_call
from backspot.results.out_of_memory import HeldKind, HeldMemory, OutOfMemory, Phase
from backspot.results.quantities import HOST

_OF_HOST = re.compile(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes", re.DOTALL)
_OF_DRIVER = re.compile(r"(?:CUDA|HIP) error: out of memory|(?:CUBLAS|HIPBLAS)_STATUS_ALLOC_FAILED")
"""What PyTorch says where it raises a plain ``RuntimeError``: of a CPU's memory, and of a GPU's
that its allocator was not asked for."""
_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)")
"""What PyTorch says of a GPU's memory that its allocator was asked for."""
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_OF_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")
"""How an error of another process begins, which its loader raises in this one."""
_IN_OTHER = re.compile(r"Caught \w+ .*\.\nOriginal Traceback")
"""How PyTorch begins an error of another process or thread. It is a plain ``RuntimeError`` where
the class of the original takes other arguments than one text, as that of NumPy does."""
_RAISED = re.compile(
    r"Traceback \(most recent call last\):\n(?: .*\n)+([\w.]+)\.(\w+)(?=:|$)", re.M
)
"""What a traceback ends with: the module and the name of a class that is not Python's own."""
_OWNERS = torch.nn.Module, torch.optim.Optimizer, BackwardCFunction
"""Whose methods tell where memory was asked for."""
_CAUSES = 20
"""How many causes of an exception are looked at: more than programs nest; a circle has an end."""


class _Place(NamedTuple):
    """Where memory was asked for; a weak reference keeps no module alive."""

    phase: Phase
    module: weakref.ref[torch.nn.Module] | None
    node: NodeAtWork | None = None


@dataclass(frozen=True)
class _Moment:
    """A CUDA device without memory left; ``asked`` is ``None`` when the error has ended all."""

    device: int
    asked: int | None
    total: int
    free: int
    place: _Place
    snapshot: Snapshot


class OutOfMemoryWatch:
    """Knows how a training died of memory, if it did.

    Args:
        history: whether CUDA's allocator is to keep the stack of each live block, which tells the
            modules of activations.
    """

    def __init__(self, *, history: bool) -> None:
        self._history = history
        self._last: _Moment | None = None
        self._process = os.getpid()

    def begin(self) -> None:
        """Listen to the allocator from the moment on at which CUDA is initialized."""
        watch_allocator(self._short, history=self._history)

    def died(
        self, error: BaseException | None, models: Models, step: int | None
    ) -> OutOfMemory | None:
        """Return how the training died of memory; ``None`` if it did not.

        Args:
            error: what the script raised, if anything.
            models: those that are trained, by name; if none are known, they are searched for.
            step: in which step it was raised, from 1; ``None`` if that is not known.
        """
        cause = error_of_memory(error)
        if cause is None:
            return None
        place = _place_of(_frames_of(cause.__traceback__))
        of_host = _is_of_host(cause)
        moment = self._last if _is_of(cause, self._last) else None
        if moment is None and not of_host:
            moment = _now(place)
            if moment is None:
                return None
        names = NamedModules(models or _found(place))
        if moment is None:
            return _on_host(cause, place, names, step)
        if moment.place.module is None and moment.place.node is None:
            moment = replace(moment, place=place)
        return _on_gpu(cause, moment, names, step)

    def _short(self, device: int, requested: int, total: int, free: int) -> None:
        """Note the moment; numbers and weak references alone.

        They stay until the next such moment: some 100 bytes for each live block.
        """
        self._last = None  # an earlier one is not told as this one, whatever is raised here
        if os.getpid() != self._process:
            return
        place = _place_of(_frames_around(sys._getframe(1)))
        node = node_at_work()
        # Else a module runs again in the backward, or a hook has an optimizer make its step there.
        if node is not None and place.module is None and place.phase != "optimizer":
            place = _Place("backward", None, node)
        snapshot = snapshot_of(device)
        # What a process may take can be less than what the device has.
        free = min(free, max(total - snapshot.reserved, 0))
        self._last = _Moment(device, requested, total, free, place, snapshot)


def _now(place: _Place) -> _Moment | None:
    """Return what the current CUDA device has now; ``None`` where no such device is in use.

    A library has asked the driver by itself, or the allocator told nobody.
    """
    if not torch.cuda.is_initialized():
        return None
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    return _Moment(device, None, total, free, place, snapshot_of(device))


def _is_of(error: BaseException, moment: _Moment | None) -> bool:
    """Return whether a moment is that of an error: both say how much was asked for."""
    match = _ASKED.search(str(error)) if isinstance(error, OutOfMemoryError) else None
    if match is None or moment is None or moment.asked is None:
        return False
    # Two decimals are written.
    return abs(moment.asked / _UNITS[match[2]] - float(match[1])) < 0.006


def error_of_memory(error: BaseException | None) -> BaseException | None:
    """Return the error of memory that has led to an exception; ``None`` if none has.

    What was raised while another error was handled, without naming it as its cause, may come long
    after a training that has survived that one.
    """
    for _ in range(_CAUSES):
        if error is None:
            return None
        if isinstance(error, (MemoryError, OutOfMemoryError)):
            return error
        if isinstance(error, RuntimeError) and (
            _is_of_host(error) or _OF_DRIVER.search(str(error))
        ):
            return error
        error = error.__cause__
    return None


def _is_of_host(error: BaseException) -> bool:
    """Return whether an error is one of the host's memory."""
    return issubclass(_class_of(error), MemoryError) or bool(_OF_HOST.search(str(error)))


def _class_of(error: BaseException) -> type[BaseException]:
    """Return the class of an error, or of the one of another process that it stands for."""
    message = str(error)
    is_of_other = type(error) is RuntimeError and _IN_OTHER.match(message)
    raised = _RAISED.findall(message) if is_of_other else []
    module, name = raised[-1] if raised else ("", "")
    # It has come from the other process, which has imported its module here.
    original = getattr(sys.modules.get(module), name, None)
    if isinstance(original, type) and issubclass(original, BaseException):
        return original
    return type(error)


# Where ------------------------------------------------------------------------------------------


def _frames_of(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _frames_around(frame: FrameType | None) -> Iterator[FrameType]:
    """Iterate over a frame and those that have called it, the outermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    yield from reversed(frames)


def _place_of(frames: Iterable[FrameType]) -> _Place:
    """Return what the innermost of some frames works for, from the outermost on."""
    phase: Phase = "other"
    called = module = node = None
    for frame in frames:
        code, owner = frame.f_code, _self_of(frame)
        if is_engine(code):
            phase, module = "backward", None
        elif isinstance(owner, torch.optim.Optimizer):
            phase, module = "optimizer", None
        elif isinstance(owner, BackwardCFunction) and phase == "backward":
            module, node = None, looked_at(owner)
        elif isinstance(owner, torch.nn.Module):
            module, node = owner, None
            is_forward = code.co_name == "forward" or is_call(code)
            if is_forward and phase != "backward":  # else it runs again
                called = called or owner
                phase = "forward" if called.training else "evaluation"
    return _Place(phase, None if module is None else weakref.ref(module), node)


def _self_of(frame: FrameType) -> object:
    """Return the object whose method a frame runs; ``None`` for a function of its own."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":  # a model is often handed over, too
        return None
    owner = discovery.locals_of(frame).get("self")
    # Not isinstance: the ``__class__`` of a proxy can be computed.
    return owner if issubclass(type(owner), _OWNERS) else None


# Who --------------------------------------------------------------------------------------------


def _found(place: _Place) -> Models:
    """Return the models that optimizers hold; without an optimizer, the one at work."""
    roots = discovery.outermost()
    trained = discovery.updated_by(discovery.other_optimizers(()), roots)
    module = place.module and place.module()
    if not trained and module is not None:
        trained = [root for root in roots if any(one is module for one in root.modules())]
    return discovery.named(trained, ())


def _place_in(place: _Place, names: NamedModules) -> dict[str, Any]:
    """Return the fields of a result that say where."""
    path, kind = names.of(place.module and place.module())
    node = place.node
    if node is None:
        return {"phase": place.phase, "path": path, "class_name": kind}
    path, kind = names.with_parameter(node.parameter and node.parameter())
    near = node.is_nearby and bool(kind)
    place_fields = {"phase": place.phase, "path": path, "class_name": kind}
    return place_fields | {"node": node.name, "is_nearby": near}


def _tensors(names: NamedModules) -> Iterator[tuple[HeldKind, torch.Tensor]]:
    """Iterate over what models and optimizers hold; what is held twice may come twice."""
    optimizers = discovery.other_optimizers(())
    parameters = [parameter for model in names.models.values() for parameter in model.parameters()]
    for optimizer in optimizers:
        parameters += [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
    for parameter in parameters:
        yield "parameter", parameter
        if parameter.grad is not None:
            yield "gradient", parameter.grad
    for model in names.models.values():
        for buffer in model.buffers():
            yield "buffer", buffer
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield "optimizer", value


class _Storage(NamedTuple):
    kind: HeldKind
    address: int
    bytes: int


def _storages(names: NamedModules, device: int) -> dict[int, _Storage]:
    """Return the memory of models and optimizers on a device, by address, without empty ones."""
    storages: dict[int, _Storage] = {}
    for kind, tensor in _tensors(names):
        with suppress(Exception):  # a tensor of a strange kind has no storage
            of_tensor: Any = tensor
            local = of_tensor.to_local() if hasattr(tensor, "to_local") else tensor
            index = HOST if local.device.type == "cpu" else local.device.index
            if index == device:
                storage = local.untyped_storage()
                address = storage.data_ptr()
                if storage.nbytes():
                    storages.setdefault(address, _Storage(kind, address, storage.nbytes()))
    return storages


def _largest_first(holders: Iterable[HeldMemory]) -> tuple[HeldMemory, ...]:
    return tuple(sorted(holders, key=lambda holder: (-holder.bytes, holder.kind, holder.path)))


def _batch_size() -> int | None:
    loader = discovery.only_loader()
    size_of_loader = getattr(loader, "batch_size", None)
    return size_of_loader if isinstance(size_of_loader, int) and size_of_loader > 0 else None


# The host and the devices -----------------------------------------------------------------------


def _on_host(
    error: BaseException, place: _Place, names: NamedModules, step: int | None
) -> OutOfMemory:
    is_here = not _OF_WORKER.match(str(error))
    tightest = min(spaces() if is_here else (), key=lambda space: space.free, default=None)
    match = _OF_HOST.search(str(error))
    storages = _storages(names, HOST).values() if is_here else ()
    holders = held_by_kind((storage.kind, storage.bytes) for storage in storages)
    return OutOfMemory(
        device=HOST,
        source="process",
        error=_class_of(error).__name__,
        step=step,
        **_place_in(place, names),
        asked_bytes=int(match[1]) if match else None,
        total_bytes=tightest.total if tightest else 0,
        free_bytes=tightest.free if tightest else 0,
        limit=tightest.of if tightest else "the machine",
        in_use_bytes=max(resident() if is_here else 0, sum(holder.bytes for holder in holders)),
        held=_largest_first(holders),
        batch_size=_batch_size(),
    )


def _on_gpu(
    error: BaseException, moment: _Moment, names: NamedModules, step: int | None
) -> OutOfMemory:
    snapshot, device = moment.snapshot, moment.device
    storages = _storages(names, device)
    sizes = {block.address: block.bytes for block in snapshot.blocks}
    left = [block for block in snapshot.blocks if block.address not in storages]
    # What no block tells is there all the same: not every allocator tells its blocks.
    holders = held_by_kind(
        (storage.kind, sizes.get(address, storage.bytes)) for address, storage in storages.items()
    )
    has_history = any(block.stack for block in snapshot.blocks)
    layers: list[HeldMemory] = []
    if has_history:
        allocated, layers = allocated_by(left, names)
        holders += allocated
    else:
        holders += held_by_kind(("other", block.bytes) for block in left)
    in_use = max(snapshot.in_use, sum(holder.bytes for holder in holders))
    if rest := in_use - sum(holder.bytes for holder in holders):
        holders.append(HeldMemory("other", rest, 0))
    earlier = 0
    with contained():
        earlier = errors_caught(device) - (moment.asked is not None)  # without this one
    return OutOfMemory(
        device=device,
        source="process" if moment.asked is None else "history" if has_history else "snapshot",
        error=type(error).__name__,
        step=step,
        **_place_in(moment.place, names),
        asked_bytes=moment.asked,
        total_bytes=moment.total,
        free_bytes=moment.free,
        limit=f"{GPU}{device}",
        in_use_bytes=in_use,
        reserved_bytes=snapshot.reserved,
        pieces_bytes=snapshot.pieces,
        largest_piece_bytes=snapshot.largest_piece,
        held=_largest_first(holders),
        layers=_largest_first(layers),
        batch_size=_batch_size(),
        earlier=max(earlier, 0),
    )
