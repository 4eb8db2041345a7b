"""Leaves the training as it was: random numbers, modes and hooks are put back, writes are found."""

from __future__ import annotations

import gc
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from backspot.live.torch_internals.batches import loading_of
from backspot.live.torch_internals.engine import hears, set_hearing
from backspot.live.torch_internals.process import GLOBAL_HOOKS, hooks_of, version_of
from backspot.live.trials.trial import Live
from backspot.threads import thread_count

Put = Callable[[Any], object]


class TouchedError(RuntimeError):
    """A trial changed something of the training."""


@contextmanager
def untouched(live: Live) -> Iterator[None]:
    """Whatever runs inside the block, the training finds what it left.

    Hooks on all modules and optimizers of the process do not run inside, and nobody hears of a
    backward.

    Raises:
        TouchedError: If a parameter, a buffer, a gradient, a state, a hook or an option of the
            training is another one afterwards.
    """
    before = _fingerprint(live)
    generators = list(_generators_of(live))
    devices = {tensor.device.type for tensor in live.tensors()}
    undo = [*_random_states(generators), *_modes(devices)]
    undo += [(_filled(hooks), dict(hooks)) for hooks in GLOBAL_HOOKS]
    undo.append((set_hearing, hears()))
    try:
        set_hearing(False)
        for hooks in GLOBAL_HOOKS:
            hooks.clear()
        gc.disable()
        with torch.inference_mode(mode=False), torch.enable_grad():
            yield
    finally:
        with signals_later(), ExitStack() as stack:  # each is put back, whatever another raises
            for put, value in undo:
                stack.callback(put, value)
    if _fingerprint(live) != before:
        raise TouchedError("a trial changed the training")


def _generators_of(live: Live) -> Iterator[Any]:
    """Return the random generators of the loader, of modules, and of the files that define them."""
    loading = loading_of(live.loader)
    for holder in (live.loader, getattr(loading and loading.sampler, "sampler", None)):
        yield getattr(holder, "generator", None)
    homes: dict[int, Mapping[str, Any]] = {}
    for module in (module for model in live.models.values() for module in model.modules()):
        kind = type(module)
        if kind.__module__.startswith("torch."):
            continue
        file = sys.modules.get(kind.__module__)
        for home in (vars(module), vars(kind), getattr(file, "__dict__", {})):
            homes[id(home)] = home
    for home in homes.values():
        yield from list(home.values())


def _random_states(generators: Iterable[Any]) -> Iterator[tuple[Put, Any]]:
    yield random.setstate, random.getstate()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield numpy.random.set_state, numpy.random.get_state()
    yield torch.set_rng_state, torch.get_rng_state()
    if torch.cuda.is_initialized():
        yield torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()
    for generator in generators:
        if isinstance(generator, torch.Generator):
            yield generator.set_state, generator.get_state()
        elif isinstance(generator, random.Random):
            yield generator.setstate, generator.getstate()
        elif numpy is not None and isinstance(generator, numpy.random.RandomState):
            yield generator.set_state, generator.get_state()
        elif numpy is not None and isinstance(generator, numpy.random.Generator):
            yield partial(setattr, generator.bit_generator, "state"), generator.bit_generator.state


def _modes(devices: set[str]) -> Iterator[tuple[Put, Any]]:
    """Modes of PyTorch and of Python, which are put back only where they differ.

    Dynamo guards several of them: to set one to what it is has the training compiled again.
    """
    pairs: list[tuple[Callable[[], Any], Put]] = [
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.get_default_dtype, torch.set_default_dtype),
        (thread_count, torch.set_num_threads),
        (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    ]
    for kind in {"cpu", *devices} - {"meta"}:
        pairs += [
            (partial(get, kind), partial(put, kind))
            for get, put in (
                (torch.is_autocast_enabled, torch.set_autocast_enabled),
                (torch.get_autocast_dtype, torch.set_autocast_dtype),
            )
        ]
    for get, put in pairs:
        yield partial(_put_back, get, put), get()


def _put_back(get: Callable[[], Any], put: Put, value: Any) -> None:
    if get() != value:
        put(value)


def _filled(hooks: Any) -> Put:
    def fill(items: Any) -> None:
        hooks.clear()
        hooks.update(items)

    return fill


@contextmanager
def signals_later() -> Iterator[None]:
    """Have signals come after the block: one in the middle would leave the rest undone."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# What must be the same afterwards ---------------------------------------------------------------


def _fingerprint(live: Live) -> Sequence[object]:
    """Return what tells a change; no data is read, as each write in place is counted."""
    modules = [module for model in live.models.values() for module in model.modules()]
    return (
        [_of_tensor(tensor) for tensor in live.tensors()],
        [(module.training, *map(tuple, hooks_of(module))) for module in modules],
        [
            [(key, repr(value)) for key, value in group.items() if key != "params"]
            for optimizer in live.optimizers
            for group in optimizer.param_groups
        ],
        [list(optimizer.state) for optimizer in live.optimizers],
    )


def _of_tensor(tensor: torch.Tensor) -> object:
    grad = tensor.grad if tensor.is_leaf else None
    states = tuple(_state(value) for value in (tensor, grad) if value is not None)
    return (*states, tensor.requires_grad)


def _state(tensor: torch.Tensor) -> object:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    address = tensor.data_ptr() if plain and tensor.layout is torch.strided else 0
    return id(tensor), address, version_of(tensor)
