"""Inside torch.compile: does the ranked list name the module that was made slow?

    python -m benchmarks compiled_truth
    python -m benchmarks compiled_truth --cases vit/whole,llama/regional

Each case compiles a model whole, block by block, or with activation checkpointing, after slow work
was planted into one random module: an extra product of matrices, a wide hidden layer, or a chain of
elementwise operations and reductions. A hit is a first row that names this module; hits by GPU time
are counted too, as a region's host time belongs to the region. Also measured: the share of the
compiled backward's GPU time with a module inside the region, what of it was not split, and for how
many extern calls (products, convolutions, attention) the recorded module is that of the one node of
the graph that Inductor names as their origin.

The case is compiled three times with empty caches: with Backspot, without, and without again as the
control. The generated code, the kernels, the loss and the gradients must be equal with and without,
as far as they are in the control, and the times of the compilations are compared. Inductor chooses
kernels without measuring them, as measurements come out otherwise each time. Gradients that differ
between two steps without Backspot are not compared. A first recording counts the graphs that are
compiled again as a profiler starts; the second one is examined. Only recordings wait for their
turn, so times of compilation are exact with ``--jobs 1`` alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.harness import CannotRunError, Figures, Run, done, each, turn
from benchmarks.measuring import record_trace, synchronize
from benchmarks.workers import Job, Record, Stage

_TIMM = {
    "vit": ("vit_small_patch16_224", {"depth": 6}),
    "deit3": ("deit3_small_patch16_224", {"depth": 6}),
    "resnet": ("resnet26", {}),
    "convnext": ("convnext_atto", {}),
    "swin": ("swin_tiny_patch4_window7_224", {"depths": (2, 2)}),
    "mixer": ("mixer_s16_224", {}),
    "efficientnet": ("efficientnet_lite0", {}),
    "regnet": ("regnety_002", {}),
}
_BLOCKS = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
_TEXT: dict[str, tuple[str, str, dict[str, int]]] = {
    "llama": (
        "Llama", "ForCausalLM", {**_BLOCKS, "intermediate_size": 1376, "num_key_value_heads": 4}
    ),
    "gpt2": ("GPT2", "LMHeadModel", {"n_embd": 512, "n_layer": 4, "n_head": 8}),
    "bert": ("Bert", "ForMaskedLM", {**_BLOCKS, "intermediate_size": 2048}),
    "t5": (
        "T5", "ForConditionalGeneration",
        {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 3, "num_heads": 8,
         "decoder_start_token_id": 0},
    ),
}  # fmt: skip
_MODELS = (*_TIMM, *_TEXT, "unet")
_HOW = ("whole", "regional", "checkpointed")
_PLANTS = ("product", "hidden", "chain")
_SMALL = ("vit/regional",)
_TINY = {"vit": {"depth": 2, "embed_dim": 48, "num_heads": 3, "img_size": 64}}
_SUBSET = (
    "vit/whole", "llama/whole", "resnet/whole", "bert/regional", "mixer/regional",
    "gpt2/checkpointed", "vit/checkpointed", "unet/whole",
)  # fmt: skip


# Models ------------------------------------------------------------------------------------------


def _build(name: str, device: str, small: bool) -> tuple[Any, Callable[[Any], Any], list[Any]]:
    """Return a model, its loss as a function of what is called, and the blocks that repeat."""
    import torch
    from torch.nn import functional

    if name in _TIMM:
        import timm

        arch, options = _TIMM[name]
        if small:
            options = {**options, **_TINY.get(name, {})}
        model = timm.create_model(arch, num_classes=100, **options).to(device)
        side = options.get("img_size", 224)
        images = torch.randn(2 if small else 96, 3, side, side, device=device)
        labels = torch.randint(0, 100, (len(images),), device=device)
        blocks = _repeated(model)
        return model, lambda called: functional.cross_entropy(called(images), labels), blocks
    if name == "unet":
        from benchmarks.models import DiffusionUnet

        unet = DiffusionUnet(8 if small else 64).to(device)
        batch, side = (2, 16) if small else (64, 64)
        noise, noisy = torch.randn(2, batch, 3, side, side, device=device)
        when = torch.randint(0, 1000, (batch,), device=device)
        return unet, lambda called: functional.mse_loss(called(noisy, when), noise), unet.blocks()
    import transformers

    words = 1000 if small else 8000
    family, kind, options = _TEXT[name]
    # A cache of keys would grow where a checkpointed block runs again.
    config = getattr(transformers, f"{family}Config")(vocab_size=words, use_cache=False, **options)
    model = getattr(transformers, family + kind)(config).to(device)
    shape = (1, 32) if small else (16, 512)
    tokens = torch.randint(0, words, shape, device=device)
    return model, lambda called: called(input_ids=tokens, labels=tokens).loss, _repeated(model)


def _repeated(model: Any) -> list[Any]:
    """Return the blocks of a model: the children, of equal classes, of one module."""
    blocks: list[Any] = []
    for module in model.modules():
        children = list(module.children())
        if (
            len(children) > 1
            and len({type(child) for child in children}) == 1
            and any(child.children() for child in children)
        ):
            inner = {id(m) for block in blocks for m in block.modules()}
            blocks += [child for child in children if id(child) not in inner]
    return blocks


# Plants ------------------------------------------------------------------------------------------


def _plant(model: Any, blocks: list[Any], step: Callable[[], Any], seed: int) -> tuple[str, str]:
    """Plant slow work into a random module; return its path and the kind of work."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    shapes: dict[str, tuple[int, ...]] = {}
    calls: Counter[str] = Counter()
    handles = []
    inside = {id(m) for block in blocks for m in block.modules()}

    def note(path: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            calls[path] += 1
            if isinstance(output, torch.Tensor) and output.requires_grad and output.dim() > 1:
                shapes[path] = tuple(output.shape)

        return hook

    for path, module in model.named_modules():
        if path and id(module) in inside:
            handles.append(module.register_forward_hook(note(path)))
    step()  # not under the flop counter: checkpointing and hooks are not its matter
    for handle in handles:
        handle.remove()
    # Of fused attention with grouped queries, the counter of some versions knows nothing.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step()
    synchronize("cuda" if torch.cuda.is_available() else "cpu")
    flops = counter.get_total_flops() / 3  # the forward's third
    large = max(math.prod(shape) for path, shape in shapes.items())
    chosen = random.Random(seed)
    paths = sorted(p for p in shapes if calls[p] == 1 and 4 * math.prod(shapes[p]) >= large)
    path, kind = chosen.choice(paths), _PLANTS[seed % len(_PLANTS)]
    module = model.get_submodule(path)
    channels_first = len(shapes[path]) == 4 and any(
        isinstance(m, torch.nn.Conv2d) for m in module.modules()
    )
    width = shapes[path][1 if channels_first else -1]
    # Twice the work of the whole forward: more than the host takes to start a compiled graph.
    hidden = int(min(max(256, flops / (2 * math.prod(shapes[path]))), 65536)) // 64 * 64
    device = next(model.parameters()).device
    if kind != "chain":
        for name, size in (("planted_in", (width, hidden)), ("planted_out", (hidden, width))):
            weight = torch.randn(size, device=device) / size[0] ** 0.5
            module.register_parameter(name, torch.nn.Parameter(weight))
    original = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original.forward(self, *args, **kwargs)
        more = output.movedim(1, -1) if channels_first else output
        if kind == "chain":
            for _ in range(12):  # over two dimensions in turn, which no kernel can fuse
                more = torch.sin(more * torch.softmax(more, -1))
                more = torch.sin(more * torch.softmax(more, -2))
        else:
            more = more @ self.planted_in
            if kind == "hidden":
                more = torch.nn.functional.gelu(more)
            more = more @ self.planted_out
        return output + 0.01 * (more.movedim(-1, 1) if channels_first else more)

    module.__class__ = type(original.__name__, (original,), {"forward": forward})
    return path, kind


def _checkpoint(blocks: list[Any]) -> None:
    """Have the blocks run again in the backward."""
    from torch.utils.checkpoint import checkpoint

    for block in blocks:
        original = type(block)

        def forward(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            return checkpoint(_original.forward, self, *args, use_reentrant=False, **kwargs)

        block.__class__ = type(original.__name__, (original,), {"forward": forward})


# A case ------------------------------------------------------------------------------------------


class _Case:
    """One model with its plant, compiled from nothing."""

    def __init__(self, name: str, device: str, small: bool, seed: int) -> None:
        import torch

        torch._dynamo.reset()
        torch.manual_seed(0)
        self.device, self.seed = device, seed
        model, how = name.split("/")
        self.model, self.loss, blocks = _build(model, device, small)
        self.model.train()
        self.path, self.kind = _plant(self.model, blocks, lambda: self._run(self.model), seed)
        if how == "checkpointed":
            _checkpoint(blocks)
        self.called = self.model
        if how == "regional":
            for block in blocks:
                block.compile()
        else:
            self.called = torch.compile(self.model)

    def _run(self, called: Any) -> Any:
        import torch

        self.model.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.loss(called)
        loss.backward()
        return loss.detach()

    def step(self) -> Any:
        """One step, always with the same random numbers."""
        import torch

        torch.manual_seed(self.seed)
        return self._run(self.called)

    def results(self) -> list[Any]:
        """The loss and all gradients of a step."""
        loss = self.step()
        gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        synchronize(self.device)
        return [loss, *gradients]


def _examine(name: str, device: str, small: bool, stage: Stage) -> Record:
    import torch

    number = (*(f"{m}/{h}" for m in _MODELS for h in _HOW),).index(name)
    torch.compile(lambda x: (x * 2).sum())(torch.ones(8, device=device))  # what starts once
    torch.set_float32_matmul_precision("high")
    record: Record = {}
    results: dict[str, _Compiled] = {}
    for how in ("with", "without", "control") if number % 2 else ("without", "with", "control"):
        results[how] = _compiled(name, device, small, number, how, record)
        stage(how, record)
        gc.collect()
    without = results["without"]
    record["gradients"] = len(without.gradients)
    for how, prefix in (("with", ""), ("control", "control_")):
        other = results[how]
        equal = [torch.equal(a, b) for a, b in zip(without.gradients, other.gradients, strict=True)]
        record[f"{prefix}equal"] = sum(equal)
        steady = zip(without.steady, equal, strict=True)
        record[f"{prefix}differ"] = sum(s and not e for s, e in steady)
        record[f"{prefix}same_code"] = without.code == other.code
        record[f"{prefix}same_kernels"] = without.kernels == other.kernels
    record["compile_ratio"] = record["compile_with_s"] / record["compile_without_s"]
    return record


class _Compiled(NamedTuple):
    """What one compilation came to: the normalised code of each graph, and what it computes."""

    code: list[list[str]]
    gradients: list[Any]
    steady: list[bool]
    kernels: Counter[str]


_NO_CODE = re.compile(r"(#|//)[^\n]*|graph_\d+")


def _compiled(
    name: str, device: str, small: bool, number: int, how: str, record: Record
) -> _Compiled:
    """Compile, step and record one case; fills in the record."""
    import torch
    from torch._dynamo.utils import counters
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import fresh_inductor_cache

    import backspot

    case = _Case(name, device, small, number)
    instrumented = how == "with"
    handle = backspot.instrument(case.model, markers=False) if instrumented else None
    settings = {"deterministic": True} if hasattr(config, "deterministic") else {}
    origins = _Origins()
    code: list[list[str]] = []

    def keep(text: str) -> None:
        lines = (line.rstrip() for line in _NO_CODE.sub("", text).splitlines())
        code.append([line for line in lines if line])

    with handle or nullcontext(), config.patch(settings), fresh_inductor_cache():
        with (
            origins if instrumented else nullcontext(),
            mock.patch.object(GraphLowering, "save_output_code", keep),
        ):
            begin = time.perf_counter()
            case.step()
            synchronize(device)
        record[f"compile_{how}_s"] = time.perf_counter() - begin
        first, second = case.results(), case.results()
        steady = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            with turn():
                before = counters["stats"]["unique_graphs"]
                record_trace(case.step, device, path, steps=1, warmup=0)
                record[f"compiled_again_{how}"] = counters["stats"]["unique_graphs"] - before
                record_trace(case.step, device, path, steps=5, warmup=3, settled=3)
            kernels = _kernels(path)
            if instrumented:
                record |= _judge(path, case)
                record |= {"extern_calls": origins.count, "extern_right": origins.right}
    return _Compiled(code, second, steady, kernels)


class _Origins:
    """Compares the module that is recorded of each extern call with that of its origin."""

    def __init__(self) -> None:
        self.count = self.right = 0
        self._patch: Any = None

    def __enter__(self) -> None:
        from torch._inductor import debug

        original = debug.set_kernel_post_grad_provenance_tracing

        def noting(node: Any, name: str, is_extern: bool = False) -> Any:
            number = original(node, name, is_extern)
            if is_extern and number and node.origin_node is not None:
                self._compare(node.origin_node, debug._inductor_kernel_stack_trace, name, number)
            return number

        self._patch = mock.patch.object(debug, original.__name__, noting)
        self._patch.start()

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def _compare(self, origin: Any, traces: dict[str, list[str]], name: str, number: int) -> None:
        from backspot.testing import SiteTables, inductor, place_of, written_class_name

        stack, _ = inductor.module_stack_of(origin)
        if not stack:
            return
        code = inductor.CompiledCode(
            "", False, json.dumps({f"{name}:{number}": traces.get(f"{name}:{number}", [])})
        )
        graph = SiteTables().graph(code)
        parts = [part for site in graph.sites or () for part in site.parts]
        expression, cls = stack[-1]
        self.count += 1
        self.right += (
            bool(parts)
            and parts[0].place >= 0
            and graph.places[parts[0].place] == place_of(written_class_name(cls), expression)
        )


def _kernels(path: Path) -> Counter[str]:
    from backspot.testing import Category, read_events

    events = read_events(path)
    of_devices = events.name[events.of(Category.KERNEL)].tolist()
    return Counter(events.names[name] for name in of_devices)


def _judge(path: Path, case: _Case) -> Record:
    """Return what the report says, and how much of the compiled backward has a module inside."""
    import numpy as np

    import backspot
    from backspot.testing import attribute, names, read_events

    report = backspot.locate(path)
    ranked = [row.path for row in report.modules if row.is_module]
    first = ranked[0] if ranked else ""
    by_gpu = max((r for r in report.modules if r.is_module), key=lambda r: r.gpu_ns).path
    events = read_events(path)
    ownership = attribute(events)
    work, compiled = ownership.work, ownership.compiled
    is_compiled = np.array(
        [name.startswith(names.COMPILED_FUNCTION) for name in ownership.spans.node_names] + [False]
    )
    node = np.where(work.span >= 0, ownership.spans.node[work.span], -1)
    backward = np.flatnonzero(is_compiled[node] & (work.run >= 0) & (node >= 0))
    amount = work.end[backward] - work.start[backward]
    launch = compiled.of_work[backward]
    known = np.flatnonzero(launch >= 0)
    _, share, parts = compiled.shares.split(launch[known], amount[known])
    inside = compiled.shares.owner[share] >= 0
    alone = compiled.shares.count[launch[known]] == 1
    total = max(1, int(amount.sum()))
    return {
        "planted": case.path,
        "kind": case.kind,
        "first": first,
        "hit": first == case.path,
        "hit_gpu": by_gpu == case.path,
        "rank": next((at for at, path in enumerate(ranked, 1) if path == case.path), None),
        "attributed": float(parts[inside].sum() / total),
        "exact": float(amount[known][alone].sum() / total),
        "backward_gpu_ms": total / 1e6,
        "warnings": list(report.warnings),
        "top": [(row.path, round(row.wall_ms, 3)) for row in report.modules[:5]],
    }


# The run -----------------------------------------------------------------------------------------


_COUNTED = (
    "hit", "hit_gpu", "extern_calls", "extern_right", "same_code", "control_same_code",
    "same_kernels", "control_same_kernels", "differ", "control_differ", "compiled_again_with",
)  # fmt: skip


def _summary(done: Sequence[Record]) -> Record:
    medians = ("attributed", "exact", "compile_ratio") if done else ()
    return {
        "cases": len(done),
        **{key: sum(case[key] for case in done) for key in _COUNTED},
        **{f"{key}_median": statistics.median(case[key] for case in done) for key in medians},
    }


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--subset", action="store_true", help="eight cases: four minutes")


def answer(run: Run) -> Figures:
    def known() -> dict[str, str]:
        if run.device == "cpu" and not (run.cases or run.listed):
            raise CannotRunError("needs a GPU; on a CPU a case takes minutes: --cases names one")
        every = [f"{model}/{how}" for model in _MODELS for how in _HOW]
        return dict.fromkeys(_SUBSET if run.subset and not run.cases else every, "")

    def handle(job: Job, stage: Stage) -> Record:
        return _examine(job["name"], run.device, run.small, stage)

    cases = each(run, known, handle, small=_SMALL, timeout_s=300)
    shown = ("planted", "kind", "first", "attributed", *_COUNTED)
    rows = [
        {"case": name, "end": case["end"], **{key: case[key] for key in shown if key in case}}
        for name, case in cases.items()
    ]
    return {"cases": cases, "rows": rows, "summary": _summary([*done(cases).values()])}
