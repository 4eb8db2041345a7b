"""Are memory, operations and the effect of checkpointing true? Compares them with PyTorch's own.

    python -m benchmarks.accuracy.memory_truth

For each model: (a) the peak of a recorded step against ``torch.cuda.max_memory_allocated``, which
must agree to the byte, and the sum of its parts; (b) what each module keeps for the backward,
against the allocator's own snapshot of the same step, in which hooks of this benchmark name the
module of each block: within 1%; (c) the operations of all modules against
``torch.utils.flop_counter`` (see ``limit_truth``), which must agree exactly; (d) what checkpointing
the module that keeps the most would free and cost, as ``backspot.profile(memory=True)`` predicts
it, against the model with that module checkpointed: bytes kept from forward to backward in a
recording, and the step's time without a profiler, in turns with that of the plain model. On a CPU
there is no allocator to compare with: (a) checks the sum alone, and (b) is left out.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import (
    Budget,
    choose,
    command_line,
    interleaved,
    parse,
    print_table,
    record_trace,
    script,
    synchronize,
    write_results,
)

_NEAR = 0.05
_NEAR_SPLIT = 0.01
_SMALL = ("mlp_launch_bound",)
_COMPILED = ("compiled_blocks",)
"""What Inductor fuses has no shapes and no formula, and is not checkpointed."""
_HEALTHY = ("hf-llama", "hf-bert", "hf-t5", "hf-mixtral", "hf-gpt_neox", "unet", "vae")
"""The cases of ``healthy.py`` that are looked at besides those of ``truth_models.py``."""


def _recorded(step: Callable[[], None], model: Any, device: str, path: Path) -> Any:
    import backspot

    with backspot.instrument(model, markers=False):
        record_trace(step, device, path, steps=2, warmup=1, profile_memory=True, record_shapes=True)
    return backspot.locate(path)


def peak(step: Callable[[], None], model: Any, device: str, path: Path) -> dict[str, Any]:
    """(a): the peak of one step, recorded and as the allocator has it."""
    import torch

    import backspot

    measured = 0

    def watched() -> None:
        nonlocal measured
        if device == "cuda":
            synchronize(device)
            torch.cuda.reset_peak_memory_stats()
        step()
        if device == "cuda":
            measured = torch.cuda.max_memory_allocated()

    with backspot.instrument(model, markers=False):
        record_trace(watched, device, path, steps=1, warmup=1, profile_memory=True)
    first = backspot.locate(path).memory[0]
    whole = sum(share.bytes for share in first.live)
    return {
        "peak": first.peak_bytes,
        "measured": measured if device == "cuda" else first.peak_bytes,
        "summed": whole,
        "unaccounted": sum(s.bytes for s in first.live if s.path == "(not accounted for)"),
    }


@contextmanager
def _named_blocks(model: Any) -> Iterator[None]:
    """Have the allocator note the module in whose forward it gives out a block."""
    import torch

    name = torch.cuda.memory._set_memory_metadata
    open_modules = [""]

    def enters(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            open_modules.append(path)
            name(path)

        return hook

    def leaves(*_: Any) -> None:
        open_modules.pop()
        name(open_modules[-1])

    hooks = []
    model = getattr(model, "module", model)  # rows have no DistributedDataParallel in their paths
    for path, module in model.named_modules():
        # Before the hooks of FSDP2, which gather the parameters.
        hooks.append(module.register_forward_pre_hook(enters(path or "(model)"), prepend=True))
        hooks.append(module.register_forward_hook(leaves, always_call=True))
    try:
        yield
    finally:
        name("")
        for hook in hooks:
            hook.remove()


def _kept_by_module() -> Counter[str]:
    """Return what is allocated now since the allocator's history began, by the noted module."""
    import torch

    snapshot = torch.cuda.memory._snapshot()
    module: dict[int, str] = {}
    for entry in snapshot["device_traces"][torch.cuda.current_device()]:
        if entry["action"] == "alloc":
            module[entry["addr"]] = entry.get("user_metadata", "")
        elif entry["action"] == "free_completed":
            module.pop(entry["addr"], None)
    kept: Counter[str] = Counter()
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block["address"] in module:
                kept[module[block["address"]]] += block["size"]
    kept.pop("", None)
    return kept


def split(step: Callable[[], None], model: Any, path: Path) -> dict[str, Any] | None:
    """(b): what each module keeps for the backward; ``None`` where PyTorch cannot note modules."""
    import torch

    import backspot

    if not hasattr(torch.cuda.memory, "_set_memory_metadata"):
        return None
    kept: Counter[str] = Counter()
    backward = torch.Tensor.backward

    def looking(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        nonlocal kept
        synchronize("cuda")
        kept = _kept_by_module()
        torch.cuda.memory._record_memory_history(None)
        backward(loss, *args, **kwargs)

    def watched() -> None:
        synchronize("cuda")
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
        step()

    torch.Tensor.backward = looking  # type: ignore[method-assign]
    try:
        with _named_blocks(model), backspot.instrument(model, markers=False):
            record_trace(watched, "cuda", path, steps=1, warmup=1, profile_memory=True)
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    rows = [row for row in backspot.locate(path).modules if row.is_module and row.memory]
    ours = {row.path or "(model)": row.memory.kept_bytes for row in rows}
    off = {name: (ours.get(name, 0), kept[name]) for name in {*ours, *kept}}
    apart = sum(abs(mine - real) for mine, real in off.values())
    worst = max(off, key=lambda name: abs(off[name][0] - off[name][1]), default="")
    return {
        "modules": len(kept),
        "kept": kept.total(),
        "apart": apart,
        "worst": [worst, *off[worst]] if apart else [],
    }


def _operations(step: Callable[[], None], report: Any) -> dict[str, int] | None:
    """(c): the operations of a step. Rows leave out owners without any time in backward.

    ``None`` if PyTorch cannot count: its counter refuses attention with fewer heads of keys.
    """
    from benchmarks.operations import operations_counter

    try:
        with operations_counter() as counter:
            step()
    except AssertionError:
        return None
    kinds = ("forward_flops", "recompute_flops", "flops")
    ours = sum(getattr(row.work, kind) or 0 for row in report.modules if row.work for kind in kinds)
    return {"ours": ours, "counted": counter.get_total_flops()}


def _checkpointed(model: Any, path: str) -> Callable[[], None]:
    """Checkpoint a module; return what undoes it."""
    from torch.utils.checkpoint import checkpoint

    module = model.get_submodule(path)
    forward = module.forward
    on_gpu = next(model.parameters()).device.type == "cuda"

    def again(*args: Any, **kwargs: Any) -> Any:
        # On a CPU, the state of the random numbers would count as kept memory.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=on_gpu, **kwargs)

    module.forward = again
    return lambda: delattr(module, "forward")


def _best(report: Any) -> Any:
    """The module below the root that checkpointing would free the most of, called once a step."""
    rows = [
        row
        for row in report.modules
        if row.is_module and row.path and row.calls == 1 and row.memory is not None
    ]
    best = max(rows, key=lambda row: row.memory.checkpoint_frees_bytes, default=None)
    return best if best is not None and best.memory.checkpoint_frees_bytes else None


def _checkpointing(
    step: Callable[[], None], model: Any, device: str, path: Path, report: Any, small: bool
) -> dict[str, Any] | None:
    """(d): predicted and real effect of checkpointing one module.

    ``None`` if no module keeps anything, or if the model cannot be checkpointed: its forward
    depends on a setting around it that the backward does not have.
    """
    from torch.utils.checkpoint import CheckpointError

    import backspot

    row = _best(report)
    if row is None:
        return None
    # Its times are those of steps in which no memory is recorded.
    steps = {"steps": 2, "warmup": 1, "unprofiled": 0} if small else {}
    predicted = backspot.profile(step, model, memory=True, **steps)[row.path].row
    root = report[next(r.path for r in report.modules if r.is_module and r.path == r.root)].row
    undo = _checkpointed(model, row.path)
    try:
        after = _recorded(step, model, device, path)
    except CheckpointError:
        return None
    finally:
        undo()
    real = root.memory.total_kept_bytes - after[root.path].row.memory.total_kept_bytes

    def checkpointed() -> None:
        undo = _checkpointed(model, row.path)
        try:
            step()
        finally:
            undo()

    times = interleaved([step, checkpointed], device, rounds=2 if small else 12)
    more = [again - plain for plain, again in zip(*times, strict=True)]
    return {
        "module": row.path,
        "predicted_bytes": predicted.memory.checkpoint_frees_bytes,
        "real_bytes": real,
        "predicted_ms": predicted.total_forward_ns / 1e6,
        "real_ms": statistics.median(more),
        "real_ms_quartiles": statistics.quantiles(more, n=4)[::2],
        "step_ms": statistics.median(times[0]),
    }


def _cases(context: Any) -> dict[str, Callable[[], tuple[Any, Callable[[], None]]]]:
    """Return what makes each case: a model, and a step of its training."""
    from benchmarks.accuracy.healthy import HEALTHY
    from benchmarks.accuracy.truth_models import MODELS

    def of_truth(name: str) -> tuple[Any, Callable[[], None]]:
        build = MODELS[name](context)

        def step() -> None:
            build.model.zero_grad()
            build.loss().backward()

        return build.model, step

    def healthy(name: str) -> tuple[Any, Callable[[], None]]:
        made = HEALTHY[name](context)
        return made.modules[0][0], made.step

    return {
        **{name: partial(of_truth, name) for name in MODELS},
        **{name: partial(healthy, name) for name in _HEALTHY},
    }


@script
def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print and write."""
    parser = command_line(__doc__, out="memory_truth.json", seconds=900)
    arguments = parse(parser, argv)

    import torch

    from benchmarks.models import Context

    device = arguments.device
    cases = _cases(Context(device, arguments.small))
    names = choose(arguments, dict.fromkeys(cases, ""), _SMALL)
    budget = Budget(arguments.seconds)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if not budget.left:
                print(f"no time for {', '.join(names[len(results) :])}")
                break
            model, step = cases[name]()
            path = Path(folder) / "trace.json"
            step()
            report = _recorded(step, model, device, path)
            found: dict[str, Any] = {"memory": peak(step, model, device, path)}
            found["split"] = split(step, model, path) if device == "cuda" else None
            found["operations"] = found["checkpointing"] = None
            if name not in _COMPILED:
                found["operations"] = _operations(step, report)
                found["checkpointing"] = _checkpointing(
                    step, model, device, path, report, arguments.small
                )
            results[name] = found
            del model, step, report
            torch.use_deterministic_algorithms(False)
            write_results(arguments, {"cases": results}, last=False)
    _print(results)
    write_results(arguments, {"cases": results})
    if any(map(_is_wrong, results.values())):
        return 1
    return 3 if len(results) < len(names) else 0


def is_true(found: dict[str, Any]) -> bool:
    """Whether peak and split of a case agree with the allocator."""
    memory, kept = found["memory"], found["split"]
    exact: bool = memory["peak"] == memory["measured"] == memory["summed"]
    return exact and (kept is None or kept["apart"] <= _NEAR_SPLIT * kept["kept"])


def _is_wrong(found: dict[str, Any]) -> bool:
    operations, checkpoint = found["operations"], found["checkpointing"]
    wrong = not is_true(found)
    if operations is not None:
        wrong |= operations["ours"] != operations["counted"]
    if checkpoint is not None:
        off = abs(checkpoint["predicted_bytes"] - checkpoint["real_bytes"])
        wrong |= off > _NEAR * checkpoint["real_bytes"]
    return wrong


def _print(results: dict[str, Any]) -> None:
    head = ("model", "peak", "measured", "kept", "apart", "FLOPs", "counted")
    head += ("module", "frees", "really", "ms", "really ms")
    rows = []
    for name, found in results.items():
        memory, operations = found["memory"], found["operations"] or {}
        split, one = found["split"] or {}, found["checkpointing"] or {}
        rows.append(
            (
                name,
                memory["peak"],
                memory["measured"],
                split.get("kept", ""),
                split.get("apart", ""),
                operations.get("ours", ""),
                operations.get("counted", ""),
                one.get("module", ""),
                one.get("predicted_bytes", 0),
                one.get("real_bytes", 0),
                one.get("predicted_ms", 0.0),
                one.get("real_ms", 0.0),
            )
        )
    print_table(head, rows)


if __name__ == "__main__":
    sys.exit(main())
