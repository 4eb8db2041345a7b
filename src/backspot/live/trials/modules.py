"""Copies of modules: channels_last, precision of products, autocast, compiled, no checkpoints.

These run the user's code, with the inputs of a real step, and so only where that is asked for.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils import checkpoint

from backspot.live.torch_internals.dynamo import forget_compilations
from backspot.live.torch_internals.process import hooks_of, tree_flatten, tree_map
from backspot.live.trials.chains import ModuleCall, tensors_of
from backspot.live.trials.trial import AS_IT_IS, Asked, Piece, Trial, remedy
from backspot.live.trials.twins import (
    Refused,
    Run,
    check_fits,
    check_plain,
    copied,
    numbers_like,
    twin,
)

_TALKS = {
    *("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"),
    "SyncBatchNorm",
}
_RUNS_S, _COMPILES_S = 4.0, 60.0
"""How long such a trial may take: a module is as slow as the step."""


@remedy("layout-copies", "backward-ratio", chains=True, runs_code=True)
def channels_last(asked: Asked) -> Trial | None:
    """Try the memory format in which tensor cores and the newest CPUs convolve."""
    if asked.finding.rule == "backward-ratio" and not _begins(asked, "Conv"):
        return None
    last = {"memory_format": torch.channels_last}

    def arrange(one: torch.Tensor) -> torch.Tensor:
        arranged = one.detach().clone(**last) if one.dim() == 4 else twin(one)
        return arranged.requires_grad_(one.requires_grad)

    change = lambda module: module.to(**last)  # noqa: E731
    return _whole(asked, channels_last={"change": change, "arrange": arrange})


@remedy("no-tensor-cores", chains=True, runs_code=True)
def precision(asked: Asked) -> Trial | None:
    """Try products in TF32, and autocast."""
    ways: dict[str, Any] = {
        "float32_matmul_precision('high')": {"around": _tf32},
        "autocast, bf16": {"bf16": True},
    }
    return _whole(asked, **ways)


@remedy("recompute", chains=True, runs_code=True)
def no_checkpoints(asked: Asked) -> Trial | None:
    """Try the model without activation checkpointing, which takes more memory.

    ``checkpoint`` calls its function then, under whatever name a module of Python has it.
    """
    original = checkpoint.checkpoint
    # Thousands of modules take milliseconds to search, which no call of a variant may count.
    named = [
        (vars(module), name)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is original
    ]
    around = partial(_set, named, _through, original)
    return _whole(asked, **{"no checkpointing, for more memory": {"around": around}})


@remedy("launch-bound", "backward-ratio", "pointwise-chain", chains=True, runs_code=True)
def compiled(asked: Asked) -> Trial | None:
    """Try ``torch.compile`` of the module that takes most."""
    if asked.finding.rule == "backward-ratio" and _begins(asked, "Conv", "Index", "Embedding"):
        return None
    trial = _whole(asked, **{"torch.compile": {"change": torch.compile}})
    return replace(trial, allowed_s=_COMPILES_S, first_is_slow=True, after=forget_compilations)


def _begins(asked: Asked, *kinds: str) -> bool:
    return bool(asked.finding.nodes) and asked.finding.nodes[0].startswith(kinds)


def _whole(asked: Asked, **ways: dict[str, Any]) -> Trial:
    """Return a trial of the model whose call was seen, with what ``_run`` is given in each way."""
    calls = asked.live.chains.calls if asked.live.chains else {}
    call = next(iter(calls.values()), None)
    if call is None:
        raise Refused("no call of the model was seen in the step")
    for part in call.module.modules():
        if not _TALKS.isdisjoint(one.__name__ for one in type(part).__mro__):
            raise Refused(f"{type(part).__name__} talks to other ranks")
    held = [*call.module.parameters(), *call.module.buffers()]
    check_plain(*held)
    check_fits([*held, *tensors_of((call.args, call.kwargs))], 2.0 * (1 + len(ways)))
    each = {AS_IT_IS: {}, **ways}
    variants = {name: [Piece(_run(call, **way), call.count)] for name, way in each.items()}
    what = f"a copy of {type(call.module).__name__}, forward and backward"
    return Trial(what, variants, allowed_s=_RUNS_S)


def _copied(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy without the hooks of the user's; those of PyTorch's norms belong to it."""
    computed = (  # such as the weight of a legacy norm, which cannot be copied as part of a graph
        value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    )
    made = copy.deepcopy(module, {id(one): one.detach().clone() for one in computed})
    for part in made.modules():
        for hooks in hooks_of(part):
            for key, hook in list(hooks.items()):
                if not type(hook).__module__.startswith("torch.nn.utils"):
                    del hooks[key]
    return made


def _run(
    call: ModuleCall,
    change: Callable[[torch.nn.Module], Any] = lambda module: module,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    arrange: Callable[[torch.Tensor], torch.Tensor] = twin,
    bf16: bool = False,
) -> Run:
    """Return what runs forward and backward of a copy, on copies of its inputs."""
    module = change(_copied(call.module))
    given = copied((call.args, dict(call.kwargs)), arrange)
    leaves = [*module.parameters(), *(one for one in tensors_of(given) if one.requires_grad)]
    kind, on, dtype = (call.autocast[0], True, torch.bfloat16) if bf16 else call.autocast
    seeds: list[torch.Tensor] = []

    def view(one: Any) -> Any:  # a leaf cannot be written in place, and an input can
        return one.view_as(one) if isinstance(one, torch.Tensor) and one.requires_grad else one

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        with torch.autocast(kind, enabled=on, dtype=dtype), around():
            args, kwargs = tree_map(view, given)
            out = module(*args, **kwargs)
            if not isinstance(out, torch.Tensor) and hasattr(out, "values"):
                out = tuple(out.values())
            found = (one for one in tree_flatten(out)[0] if isinstance(one, torch.Tensor))
            ends = [one for one in found if one.requires_grad]
        if not seeds:
            seeds.extend(numbers_like(one) for one in ends)
        if ends:
            with around():
                torch.autograd.backward(ends, seeds)

    return run


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


_OPTIONS = {
    *("use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state"),
    "early_stop",
}


def _through(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **{key: one for key, one in kwargs.items() if key not in _OPTIONS})


@contextmanager
def _set(named: Sequence[tuple[dict[str, Any], str]], value: Any, before: Any) -> Iterator[None]:
    """Let names of modules have another value for a while."""
    for names, name in named:
        names[name] = value
    try:
        yield
    finally:
        for names, name in named:
            names[name] = before
