"""Is the device's limit true? Layers of known work against a clock of their own, and operations.

    python -m benchmarks limit_truth

(a) A model that is nothing but large products of matrices, copies or layer norms: achieved TFLOP/s
and GB/s of the backward, its share of the peak and what bounds it, against the same backward timed
with CUDA events without a profiler, and the operations and bytes that follow from its sizes. Within
5%. The MFU of a step of products, against the same clock.

(b) Small models of all families of timm: the operations of all modules against
``torch.utils.flop_counter``, with its formula for convolutions in groups corrected
(``benchmarks/operations.py``). Equal, or more where a model has recurrent layers, which PyTorch
does not count.

(c) Four of these compiled: the operations of each module against those of the eager model. Equal.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.module_clock import between, moment
from benchmarks.harness import Figures, Run, done, each
from benchmarks.measuring import record_trace, synchronize
from benchmarks.workers import Job, Phase, Record, Stage

_NEAR = 0.05
_LAYERS = ("bf16_product", "fp16_product", "tf32_product", "copy", "layer_norm", "gelu")
_MORE = (
    "resnet50", "resnext50_32x4d", "regnety_004", "mobilenetv3_small_100", "mobilevit_s", "vgg11",
    "deit3_small_patch16_224", "maxvit_nano_rw_256", "cpubone_b0_bfrobust", "csatv2", "cspnext_s",
    "deepseek_vit_412m", "efficientformerv2_s0", "efficientvim_m1", "efficientvit_m0",
    "fasternet_t0", "gemma4_vit_167m", "hiera_tiny_224", "hieradet_small", "iformer_s",
    "inception_next_atto", "inception_resnet_v2", "inception_v4", "lcnetv2_small", "lowformer_b0",
    "mambaout_femto", "mobilenetv5_300m", "naflexvit_base_patch16_gap", "nasnetalarge",
    "nextvit_small", "pnasnet5large", "qwen3_vit_306m", "rdnet_tiny", "repghostnet_050",
    "repvit_m0_9", "resnetv2_50", "selecsls42", "legacy_seresnet18", "shvit_s1", "swiftformer_xs",
    "swinv2_tiny_window8_256", "tnt_s_patch16_224", "tresnet_m", "vit_tiny_r_s16_p8_224",
    "test_vit_relpos", "samvit_base_patch16_224", "vitamin_small_224", "ese_vovnet19b_dw",
    "legacy_xception",
)  # fmt: skip
"""Models of the families of timm that ``architectures.py`` has none of, and some others."""
_COMPILED = "compiled "
_REGIONS = tuple(
    _COMPILED + name
    for name in ("resnet18", "vit_tiny_patch16_224", "convnext_atto", "mixer_s32_224")
)
_SMALL = ("layer_norm", "convnext_atto")


@dataclass
class _Layer:
    """A model of one kind of layer, its input, and what the backward does with it.

    Attributes:
        model: the layers.
        batch: its input.
        flops: operations of the backward.
        moved: bytes that the backward moves at least.
        bound: which limit decides.
    """

    model: Any
    batch: Any
    flops: int
    moved: int
    bound: str

    def step(self, device: str) -> list[Any]:
        """Forward and backward; the moments before, between and after."""
        self.model.zero_grad()
        self.batch.grad = None
        marks = [moment(device)]
        result = self.model(self.batch)
        gradient = result.detach()
        marks.append(moment(device))
        result.backward(gradient)
        return [*marks, moment(device)]


def _layer(name: str, device: str, small: bool) -> _Layer:
    import torch
    from torch import nn

    from benchmarks.models import Layer

    if name.endswith("_product"):
        size, count = (32, 2) if small else (8192, 4)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}[name[:4]]
        layers = (nn.Linear(size, size, bias=False) for _ in range(count))
        model = nn.Sequential(*layers).to(device, dtype)
        batch = torch.randn(size, size, device=device, dtype=dtype, requires_grad=True)
        moved = 2 * count * 3 * size * size * dtype.itemsize
        return _Layer(model, batch, 2 * count * 2 * size**3, moved, "compute")
    shape = (4, 64) if small else (65536, 4096)
    where = {"device": device, "dtype": torch.bfloat16}
    batch = torch.randn(shape, requires_grad=True, **where)
    layer, bytes_each = {
        "layer_norm": (nn.LayerNorm(shape[1], **where), 3 * 2),
        "gelu": (nn.GELU(), 3 * 2),
        "copy": (Layer(lambda x: x.float()), 4 + 2),
    }[name]
    return _Layer(nn.Sequential(layer), batch, 0, bytes_each * batch.numel(), "memory")


def _backward_ms(layer: _Layer, device: str, rounds: int) -> tuple[float, float]:
    """Return the median times of a backward and of a step, by CUDA events on a GPU."""
    backward, whole = [], []
    for _ in range(rounds):
        first, middle, last = layer.step(device)
        synchronize(device)
        backward.append(between(middle, last))
        whole.append(between(first, last))
    return statistics.median(backward), statistics.median(whole)


def _recorded(step: Any, model: Any, device: str, path: Path, **how: int) -> Any:
    import backspot

    with backspot.instrument(model, markers=False):
        record_trace(step, device, path, record_shapes=True, **how)
    return backspot.locate(path)


def _limit(name: str, device: str, small: bool, path: Path) -> dict[str, Any]:
    """(a): one layer, as the report has it and as the clock has it."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = name.startswith("tf32")
    layer = _layer(name, device, small)
    real_ms, step_ms = _backward_ms(layer, device, rounds=2 if small else 12)
    steps = 2 if small else 6
    report = _recorded(lambda: layer.step(device), layer.model, device, path, steps=steps, warmup=2)
    row = next(row for row in report.top(depth=0) if row.is_module)
    found: dict[str, Any] = {
        "device": report.peaks.device if report.peaks else "",
        "flops": [row.work.flops, layer.flops],
        "bytes": [row.work.bytes, layer.moved],
        "gpu_ms": [row.gpu_ns / 1e6, real_ms],
        "unknown_share": row.work.unknown_share,
        "expected_bound": layer.bound,
    }
    limit, kind = report.limit(row), name[:4]
    if limit is not None:
        found |= {
            "tflops": [limit.tflops, layer.flops / real_ms / 1e9],
            "gbps": [limit.gbps, layer.moved / real_ms / 1e6],
            "of_peak": limit.of_peak,
            "bound": limit.bound,
            "headroom_ms": None if limit.headroom_ns is None else limit.headroom_ns / 1e6,
        }
        if report.mfu is not None and report.peaks and kind in report.peaks.tflops:
            real = 1.5 * layer.flops / step_ms / 1e9 / report.peaks.tflops[kind]
            found["mfu"] = [report.mfu, real]
    return found


def _operations(name: str, device: str, path: Path) -> dict[str, Any]:
    """(b): the operations of a step of a timm model."""
    import torch

    from benchmarks.accuracy.memory_truth import operations
    from benchmarks.accuracy.steps import build_timm, loss_of

    model, batch = build_timm(name, device)

    def step() -> None:
        model.zero_grad()
        loss_of(model(batch)).backward()

    report = _recorded(step, model, device, path, steps=1, warmup=1)
    recurrent = any(isinstance(module, torch.nn.RNNBase) for module in model.modules())
    return {**(operations(step, report) or {}), "recurrent": recurrent}


def _in_regions(name: str, device: str, path: Path) -> dict[str, Any]:
    """(c): the modules of a compiled timm model whose operations are not those in eager mode."""
    import timm
    import torch

    model = timm.create_model(name.removeprefix(_COMPILED), num_classes=10).to(device).train()
    batch = torch.randn(2, *model.default_cfg["input_size"], device=device)
    found: list[dict[str, tuple[int | None, int | None]]] = []
    for called in (model, torch.compile(model)):

        def step(called: Any = called) -> None:
            model.zero_grad()
            called(batch).float().square().mean().backward()

        rows = _recorded(step, model, device, path, steps=1, warmup=2).modules
        found.append(
            {
                row.path: (row.work.forward_flops, row.work.flops)
                for row in rows
                if row.work and row.work.flops
            }
        )
    eager, compiled = found
    differ = sorted(
        one for one in eager.keys() | compiled.keys() if eager.get(one) != compiled.get(one)
    )
    return {"modules": len(eager), "differ": differ}


def answer(run: Run) -> Figures:
    def known() -> dict[str, str]:
        from benchmarks.accuracy.architectures import TIMM

        # Layers of a GPU's size take a CPU minutes, and it has no peak to compare with.
        layers = _LAYERS if run.device == "cuda" or run.small else ()
        return dict.fromkeys((*layers, *TIMM, *_MORE, *_REGIONS), "")

    def handle(job: Job, _: Stage) -> Record:
        name = job["name"]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            if name in _LAYERS:
                return _limit(name, run.device, run.small, path)
            if name.startswith(_COMPILED):
                return _in_regions(name, run.device, path)
            return _operations(name, run.device, path)

    # Layers are timed, by one process alone.
    phases = [Phase(run.jobs, 300), Phase(min(run.jobs, 1), 300)]
    how: Any = {"phases": phases, "late": lambda job: job["name"] in _LAYERS, "fresh": False}
    cases = each(run, known, handle, small=_SMALL, **how)
    ended = done(cases)
    wrong = [name for name, one in ended.items() if "ours" in one and _is_counted_otherwise(one)]
    wrong += [name for name, one in ended.items() if one.get("differ")]
    if not run.small and run.device == "cuda":
        wrong += [name for name, one in ended.items() if name in _LAYERS and _is_wrong(one)]
    counted = [one for one in ended.values() if "ours" in one]
    same = sum(one["ours"] == one["counted"] for one in counted)
    summary = {"models": len(counted), "with the operations that are counted": same}
    timed = [one["gpu_ms"] for one in ended.values() if "gpu_ms" in one]
    errors = [abs(ours / real - 1) for ours, real in timed if real]
    summary |= {"time, worst error": max(errors)} if errors and run.device == "cuda" else {}
    return {"cases": cases, "summary": summary | {"wrong": wrong}, "wrong": wrong}


def _is_counted_otherwise(found: dict[str, Any]) -> bool:
    if found["recurrent"]:
        return bool(found["ours"] <= found["counted"])
    return bool(found["ours"] != found["counted"])


def _is_wrong(found: dict[str, Any]) -> bool:
    pairs = (found["gpu_ms"], *([found["mfu"]] if "mfu" in found else []))
    wrong = any(abs(ours - real) > _NEAR * real for ours, real in pairs)
    wrong |= (found["flops"][0] or 0) != found["flops"][1]
    wrong |= abs((found["bytes"][0] or 0) - found["bytes"][1]) > _NEAR * found["bytes"][1]
    return wrong or found.get("bound") not in (found["expected_bound"], None)
