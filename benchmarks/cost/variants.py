"""The models that ``overhead.py`` times, and the variants of labels on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from benchmarks.models import Context, gpt2, gpt2_loss, timm_model, training_step


@dataclass(frozen=True)
class Training:
    """A model and one optimizer step of it."""

    model: torch.nn.Module
    step: Callable[[], None]


@dataclass(frozen=True)
class Case:
    """A model, and the device that it is trained on."""

    device: str
    build: Callable[[Context], Training]
    what: str


def _train(context: Context, model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Training:
    cuda = context.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=cuda or None)
    return Training(model, training_step(model, loss, optimizer, around=lambda: context.bf16(cuda)))


def _images(
    name: str, batch: int, *, size: int = 224, channels_last: bool = False, **options: Any
) -> Callable[[Context], Training]:
    def build(context: Context) -> Training:
        torch.manual_seed(0)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        model = timm_model(context, name, num_classes=100, **options).to(memory_format=layout)
        number, side = context.pick(batch, min(batch, 4)), context.pick(size, 64)
        images = context.randn(number, 3, side, side).to(memory_format=layout)
        labels = context.randint(100, number)
        loss = torch.nn.CrossEntropyLoss()
        return _train(context, model, lambda: loss(model(images), labels))

    return build


def _gpt2(context: Context) -> Training:
    torch.manual_seed(0)
    model = gpt2(context, layers=context.pick(12, 2), words=50257, length=1024)
    return _train(context, model, gpt2_loss(context, model, 8, 512))


def _layers(context: Context) -> Training:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16) for _ in range(context.pick(120, 8))]
    model = torch.nn.Sequential(*layers).to(context.device)
    rows = context.randn(8, 16)
    return _train(context, model, lambda: model(rows).square().mean())


_VIT, _TINY, _CONV = "vit_base_patch16_224", "vit_tiny_patch16_224", "resnet50"
CASES: Mapping[str, Case] = {
    "vit": Case("cuda", _images(_VIT, 128), "ViT-B/16, batch 128, bf16 autocast"),
    "resnet50": Case(
        "cuda", _images(_CONV, 128, channels_last=True), "ResNet-50, batch 128, channels_last, bf16"
    ),
    "gpt2": Case("cuda", _gpt2, "GPT-2 small, 8 × 512 tokens, bf16 autocast"),
    "vit-launch": Case("cuda", _images(_VIT, 2), "ViT-B/16, batch 2, bf16 autocast"),
    "tiny-vit": Case(
        "cpu",
        _images(_TINY, 4, size=64, img_size=64),
        "ViT-Ti/16 at 64 pixels, batch 4, one thread",
    ),
    "convnet": Case(
        "cpu", _images("resnet18", 4, size=64), "ResNet-18 at 64 pixels, batch 4, one thread"
    ),
    "layers": Case("cpu", _layers, "120 linear layers of 16 features, batch 8, one thread"),
}


# Variants ----------------------------------------------------------------------------------------

Put = Callable[[torch.nn.Module], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Variant:
    """One way to have a step labelled.

    Attributes:
        around: what is put on the model while its steps are timed.
        profiler: further arguments of ``torch.profiler.profile``.
        without_profiler: whether a step with the profiler off says anything.
        profiled: whether a profiler records, in the rounds with profiler.
    """

    around: Put
    profiler: Mapping[str, Any] = field(default_factory=dict)
    without_profiler: bool = True
    profiled: bool = True


def _plain(model: torch.nn.Module) -> AbstractContextManager[Any]:
    return nullcontext(model)


def _instrumented(**options: Any) -> Put:
    def around(model: torch.nn.Module) -> AbstractContextManager[Any]:
        import backspot
        from backspot.testing import sessions

        if options.get("hooks") != "node":
            return backspot.instrument(model, **options)
        # As where no profiler's start is noticed.
        before, sessions.watches_starts = sessions.watches_starts, False
        try:
            return backspot.instrument(model, **{**options, "hooks": "call"})
        finally:
            sessions.watches_starts = before

    return around


@contextmanager
def _lightning_labels(model: torch.nn.Module) -> Iterator[None]:
    """Forward labels as Lightning's profiler writes them: a record function a module call."""
    open_ranges: dict[str, Any] = {}

    def start(label: str, *_: object) -> None:
        opened = record_function(label)
        opened.__enter__()
        open_ranges[label] = opened

    def stop(label: str, *_: object) -> None:
        opened = open_ranges.pop(label, None)
        if opened is not None:
            opened.__exit__(None, None, None)

    handles = []
    for path, module in model.named_modules():
        label = f"[pl][module]{type(module).__module__}.{type(module).__name__}: {path}"
        handles.append(module.register_forward_pre_hook(partial(start, label)))
        handles.append(module.register_forward_hook(partial(stop, label)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


PLAIN, UNPROFILED = "nothing", "no profiler"
LABELS: dict[str, dict[str, Any]] = {
    "call, no markers": {"hooks": "call", "markers": False},
    "call": {"hooks": "call", "markers": True},
    "default": {},  # backward labels come with the export, which is not timed here
    "node, no markers": {"hooks": "node", "markers": False},
    "module": {"hooks": "module"},
}
_RECORDED = {
    "memory": {"profile_memory": True},
    "shapes": {"record_shapes": True},
}
_UNMARKED = _instrumented(hooks="call", markers=False)
VARIANTS: dict[str, Variant] = {
    PLAIN: Variant(_plain),
    UNPROFILED: Variant(_plain, without_profiler=False, profiled=False),
    **{name: Variant(_instrumented(**options)) for name, options in LABELS.items()},
    "default, depth=2": Variant(_instrumented(depth=2)),
    "call, depth=2": Variant(_instrumented(depth=2, **LABELS["call"])),
    "call, no markers, depth=2": Variant(_instrumented(depth=2, **LABELS["call, no markers"])),
    "call, no markers, lines": Variant(_instrumented(hooks="call", markers=False, lines=True)),
    # ``profile(memory=True, shapes=True)`` records these in steps of their own.
    **{
        f"call, no markers, {name}": Variant(_UNMARKED, options, without_profiler=False)
        for name, options in _RECORDED.items()
    },
    "Lightning's labels": Variant(_lightning_labels),
    "with_stack=True": Variant(_plain, {"with_stack": True}, without_profiler=False),
}
