"""The settings of a plan: what each changes, the code to write, and where it is worth trying."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint

from backspot.live.plan.watching import Watching
from backspot.live.torch_internals.attention import (
    AttentionWatch,
    can_be_fused,
    fuse,
    is_written_out,
)
from backspot.live.trials.chains import tensors_of
from backspot.live.trials.untouched import signals_later

AS_IT_IS = "in use already"


def _same(module: torch.nn.Module) -> torch.nn.Module:
    return module


@dataclass(frozen=True, eq=False)
class Setting:
    """Something that a training can set.

    Attributes:
        name: what is set.
        axis: what kind of setting that is; of most kinds only one can be made.
        code: what to write for it.
        change: makes it on a copy of a model.
        around: makes it for the process, as a context around forward and backward.
        dtype: the type of autocast.
        memory_format: the format of the inputs that have ``dims`` dimensions.
        dims: as above.
        order: settings of a lower number are made first.
        compiles: whether the first run compiles.
        replaces: the name of the setting in whose place it is made, and only where that helps.
        note: what else is true of it.
        why_not: why it is not tried in this training, or ``""``.
    """

    name: str
    axis: str
    code: str
    change: Callable[[Any], Any] = _same
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    dtype: torch.dtype | None = None
    memory_format: torch.memory_format = torch.contiguous_format
    dims: int = -1
    order: int = 0
    compiles: bool = False
    replaces: str = ""
    note: str = ""
    why_not: str = ""


def settings_of(watched: Watching, device: torch.device) -> list[Setting]:
    """Return what to try, cheap settings first, and what is not tried with the reason."""
    makers = (_precisions, _layouts, _attention, _checkpoints, _libraries, _compilers)
    return [setting for maker in makers for setting in maker(watched, device)]


def _precisions(watched: Watching, device: torch.device) -> Iterator[Setting]:
    kind = device.type
    # An autocast to float32, as of a script whose type is an option, casts nothing down.
    in_autocast = any(
        on and dtype != torch.float32 for _, on, dtype in (call.autocast for call in watched.calls)
    )
    singles = any(p.dtype == torch.float32 for p in _parameters(watched))
    why = AS_IT_IS if in_autocast else "" if singles else "the parameters are no float32"
    modern = kind != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    if kind == "cuda" and modern:
        set_already = torch.get_float32_matmul_precision() != "highest"
        yield Setting(
            "TF32",
            "precision",
            'torch.set_float32_matmul_precision("high")',
            around=_tf32,
            why_not=AS_IT_IS if set_already else why,
        )
    cast = f'with torch.autocast("{kind}", torch.{{}}):\n    loss = ...  # the forward and the loss'
    if modern:
        yield Setting(
            "bf16", "precision", cast.format("bfloat16"), dtype=torch.bfloat16, why_not=why
        )
        return
    code = f"{cast.format('float16')}\nscaler = torch.amp.GradScaler()  # scale, unscale, step"
    yield Setting("fp16", "precision", code, dtype=torch.float16, why_not=why)


def _layouts(watched: Watching, _: torch.device) -> Iterator[Setting]:
    for dims, name in ((4, "channels_last"), (5, "channels_last_3d")):
        memory_format = getattr(torch, name)
        weights = [p for p in _parameters(watched) if p.dim() == dims and p[0, 0].numel() > 1]
        inputs = [tensor for tensor in _given(watched) if tensor.dim() == dims]
        if not weights or not inputs:
            continue
        last = all(p.is_contiguous(memory_format=memory_format) for p in weights)
        yield Setting(
            name,
            "layout",
            f"model = model.to(memory_format=torch.{name})\n"
            f"x = x.to(memory_format=torch.{name})  # each batch",
            change=partial(_arranged, memory_format),
            memory_format=memory_format,
            dims=dims,
            order=1,
            why_not=AS_IT_IS if last else "",
        )


def _arranged(memory_format: torch.memory_format, module: torch.nn.Module) -> torch.nn.Module:
    # As the code of the setting has it. contiguous() leaves the strides of a 1x1 kernel alone, and
    # a convolution chooses its layout by them.
    for submodule in module.modules():  # a format is of tensors with so many dimensions
        tensors = [*submodule.parameters(recurse=False), *submodule.buffers(recurse=False)]
        for tensor in tensors:
            if tensor.dim() == (4 if memory_format is torch.channels_last else 5):
                tensor.data = tensor.data.to(memory_format=memory_format)
    return module


def _attention(watched: Watching, _: torch.device) -> Iterator[Setting]:
    """PyTorch's attention, where models of Transformers compute theirs operator by operator."""
    modules = (submodule for module in watched.copies.values() for submodule in module.modules())
    written_out = [module for module in modules if is_written_out(module)]
    if written_out:
        yield Setting(
            "sdpa attention",
            "attention",
            'model.set_attn_implementation("sdpa")',
            change=_fused,
            why_not="" if all(map(can_be_fused, written_out)) else "the model has no other",
        )


def _fused(module: torch.nn.Module) -> torch.nn.Module:
    for submodule in module.modules():
        if is_written_out(submodule):
            fuse(submodule)
    return module


_BACKENDS = {
    "cuda": {
        "flash attention": SDPBackend.FLASH_ATTENTION,
        "memory-efficient attention": SDPBackend.EFFICIENT_ATTENTION,
        "cuDNN attention": SDPBackend.CUDNN_ATTENTION,
    },
    "cpu": {
        "flash attention": SDPBackend.FLASH_ATTENTION,
        "math attention": SDPBackend.MATH,
    },
}


def backends_of(run: Callable[[], object], device: torch.device) -> list[Setting]:
    """Return the kernels of attention that a run could take; none where it calls no attention.

    They depend on the type of what attention gets, and so on the settings that are made already.
    """
    backends = _BACKENDS.get(device.type, {})
    with AttentionWatch([*backends.values()]) as watch:
        run()
    return [
        Setting(
            name,
            "attention",
            "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
            f"with sdpa_kernel(SDPBackend.{backend.name}):\n    loss = ...  # the forward",
            around=partial(sdpa_kernel, backend),
            why_not=AS_IT_IS
            if watch.takes(backend)
            else "no kernel for these inputs"
            if backend not in watch.possible
            else "",
        )
        for name, backend in backends.items()
        if watch.calls
    ]


def _checkpoints(watched: Watching, _: torch.device) -> Iterator[Setting]:
    """Without activation checkpointing, where a step calls ``checkpoint``.

    ``checkpoint`` calls its function then, under whatever name a module of Python has it.
    """
    if not (watched.checkpoints or any(map(_partial_checkpoints, watched.copies.values()))):
        return
    yield Setting(
        "no checkpointing",
        "checkpoint",
        "call the module itself, not torch.utils.checkpoint.checkpoint(module, ...)",
        change=_unchecked,
        around=partial(replaced, watched.checkpoints, through),
        note="for more memory",
    )


def _partial_checkpoints(module: torch.nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Return where modules keep ``checkpoint`` with some of its arguments, as trainers have it."""
    return [
        (vars(submodule), name, value)
        for submodule in module.modules()
        for name, value in vars(submodule).items()
        if isinstance(value, partial) and value.func is checkpoint.checkpoint
    ]


def _unchecked(module: torch.nn.Module) -> torch.nn.Module:
    for home, name, value in _partial_checkpoints(module):
        home[name] = partial(through, *value.args, **value.keywords)
    return module


def _libraries(watched: Watching, device: torch.device) -> Iterator[Setting]:
    """What a running process cannot try without a trace."""
    if device.type == "cuda" and any(p.dim() in (4, 5) for p in _parameters(watched)):
        benchmark = torch.backends.cudnn.benchmark
        yield Setting(
            "cudnn.benchmark",
            "cudnn",
            "torch.backends.cudnn.benchmark = True",
            why_not=AS_IT_IS
            if benchmark
            else "PyTorch keeps what was chosen for these shapes as long as the process lives",
        )


def _compilers(watched: Watching, device: torch.device) -> Iterator[Setting]:
    default = Setting(
        "torch.compile",
        "compile",
        "model = torch.compile(model)",
        change=torch.compile,
        order=2,
        compiles=True,
        why_not=watched.why_not_compiled,
    )
    yield default
    if device.type == "cuda":  # it chooses among kernels of Triton
        mode = "max-autotune-no-cudagraphs"
        yield replace(
            default,
            name="max-autotune",
            code=f'model = torch.compile(model, mode="{mode}")  # in place of torch.compile(model)',
            change=partial(torch.compile, mode=mode),
            replaces=default.name,
        )


def _parameters(watched: Watching) -> Sequence[torch.Tensor]:
    return [p for module in watched.copies.values() for p in module.parameters()]


def _given(watched: Watching) -> Sequence[torch.Tensor]:
    return [tensor for call in watched.calls for tensor in tensors_of((call.args, call.kwargs))]


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


def through(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function as ``checkpoint`` does, without checkpointing it."""
    return function(*args, **{key: value for key, value in kwargs.items() if key not in _OPTIONS})


Names = Sequence[tuple[dict[str, Any], str]]


def names_of_checkpoint() -> Names:
    """Return where modules of Python have ``checkpoint``, under whatever name."""
    return [
        (vars(module), name)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is checkpoint.checkpoint
    ]


@contextmanager
def replaced(names: Names, value: Any) -> Iterator[None]:
    """Let names that are ``checkpoint`` have another value for a while."""
    before = checkpoint.checkpoint
    try:
        for home, name in names:
            home[name] = value
        yield
    finally:
        with signals_later():
            for home, name in names:
                home[name] = before


@contextmanager
def counted_checkpoints(names: Names) -> Iterator[list[int]]:
    """Count the calls of ``checkpoint``; the list has one entry for each."""
    calls: list[int] = []
    before = checkpoint.checkpoint

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return before(*args, **kwargs)

    with replaced(names, count):
        yield calls
