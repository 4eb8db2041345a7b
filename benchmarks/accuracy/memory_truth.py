"""Are memory, operations and the effect of checkpointing true? Compares them with PyTorch's own.

    python -m benchmarks memory_truth

For each model: (a) the peak of a recorded step against ``torch.cuda.max_memory_allocated``, which
must agree to the byte, and the sum of its parts; (b) what each module keeps for the backward,
against the allocator's own snapshot of the same step, in which hooks of this benchmark name the
module of each block: within 1%; (c) the operations of all modules against
``torch.utils.flop_counter`` (see ``limit_truth``), which must agree exactly; (d) what checkpointing
the module that keeps the most would free and cost, as ``backspot.profile(memory=True)`` predicts
it, against the model with that module checkpointed: bytes kept from forward to backward in a
recording, and the step's time without a profiler, in turns with that of the plain model. On a CPU
there is no allocator to compare with: (a) checks the sum alone, and (b) is left out.

``python -m benchmarks memory_ranks`` does (a) and (b) on each of two ranks.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Figures, Run, done, each
from benchmarks.measuring import interleaved, record_trace, synchronize
from benchmarks.workers import Job, Record, Stage

_NEAR, _NEAR_SPLIT = 0.05, 0.01
_COMPILED = ("compiled_blocks",)
"""What Inductor fuses has no shapes and no formula, and is not checkpointed."""
_HEALTHY = ("hf-llama", "hf-bert", "hf-t5", "hf-mixtral", "hf-gpt_neox", "unet", "vae")
"""The cases of ``healthy.py`` that are looked at besides those of ``truth_models.py``."""

Step = Callable[[], None]
Found = dict[str, Any]


def _recorded(
    step: Step, model: Any, device: str, path: Path, steps: int = 2, **options: bool
) -> Any:
    import backspot

    options = {"profile_memory": True, "record_shapes": True, **options}
    with backspot.instrument(model, markers=False):
        record_trace(step, device, path, steps=steps, warmup=1, **options)
    return backspot.locate(path)


def _peak(step: Step, model: Any, device: str, path: Path) -> Found:
    """(a): the peak of one step, recorded and as the allocator has it."""
    import torch

    measured = None

    def watched() -> None:
        nonlocal measured
        if device != "cuda":
            return step()
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        step()
        measured = torch.cuda.max_memory_allocated()
        return None

    first = _recorded(watched, model, device, path, 1, record_shapes=False).memory[0]
    return {
        "peak": first.peak_bytes,
        "measured": first.peak_bytes if measured is None else measured,
        "summed": sum(share.bytes for share in first.live),
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


def _split(step: Step, model: Any, device: str, path: Path) -> Found | None:
    """(b): what each module keeps for the backward; ``None`` where PyTorch cannot note modules."""
    import torch

    if device != "cuda" or not hasattr(torch.cuda.memory, "_set_memory_metadata"):
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
        with _named_blocks(model):
            report = _recorded(watched, model, "cuda", path, 1, record_shapes=False)
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    rows = [row for row in report.modules if row.is_module and row.memory]
    ours = {row.path or "(model)": row.memory.kept_bytes for row in rows}
    off = {name: (ours.get(name, 0), kept[name]) for name in {*ours, *kept}}
    apart = sum(abs(mine - real) for mine, real in off.values())
    worst = max(off, key=lambda name: abs(off[name][0] - off[name][1]), default="")
    found = {"modules": len(kept), "kept": kept.total(), "apart": apart}
    return {**found, "worst": [worst, *off[worst]] if apart else []}


def operations(step: Step, report: Any) -> dict[str, int] | None:
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


@contextmanager
def _checkpointed(model: Any, path: str) -> Iterator[None]:
    """Checkpoint a module."""
    from torch.utils.checkpoint import checkpoint

    module = model.get_submodule(path)
    forward = module.forward
    on_gpu = next(model.parameters()).device.type == "cuda"

    def again(*args: Any, **kwargs: Any) -> Any:
        # On a CPU, the state of the random numbers would count as kept memory.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=on_gpu, **kwargs)

    module.forward = again
    try:
        yield
    finally:
        del module.forward


def _checkpointing(
    step: Step, model: Any, device: str, path: Path, report: Any, small: bool
) -> Found | None:
    """(d): predicted and real effect of checkpointing one module.

    ``None`` if no module keeps anything, or if the model cannot be checkpointed: its forward
    depends on a setting around it that the backward does not have.
    """
    from torch.utils.checkpoint import CheckpointError

    import backspot

    # The module below the root that checkpointing would free the most of, called once a step.
    once = [r for r in report.modules if r.is_module and r.path and r.calls == 1 and r.memory]
    row = max(once, key=lambda r: r.memory.checkpoint_frees_bytes, default=None)
    if row is None or not row.memory.checkpoint_frees_bytes:
        return None
    # Its times are those of steps in which no memory is recorded.
    steps = {"steps": 2, "warmup": 1, "unprofiled": 0} if small else {}
    predicted = backspot.profile(step, model, memory=True, **steps)[row.path].row
    root = report[next(r.path for r in report.modules if r.is_module and r.path == r.root)].row
    try:
        with _checkpointed(model, row.path):
            after = _recorded(step, model, device, path)
    except CheckpointError:
        return None
    real = root.memory.total_kept_bytes - after[root.path].row.memory.total_kept_bytes

    def checkpointed() -> None:
        with _checkpointed(model, row.path):
            step()

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


def _cases(context: Any) -> dict[str, Callable[[], tuple[Any, Step]]]:
    """Return what makes each case: a model, and a step of its training."""
    from benchmarks.accuracy.healthy import HEALTHY
    from benchmarks.accuracy.truth_models import MODELS

    def of_truth(name: str) -> tuple[Any, Step]:
        build = MODELS[name](context)
        return build.model, build.step

    def healthy(name: str) -> tuple[Any, Step]:
        made = HEALTHY[name](context)
        return made.modules[0][0], made.step

    truth = [name for name in MODELS if not name.endswith("_host")]
    cases = {name: partial(of_truth, name) for name in truth}
    return {**cases, **{name: partial(healthy, name) for name in _HEALTHY}}


def answer(run: Run) -> Figures:
    def handle(job: Job, _: Stage) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            return _examine(job["name"], run, path)

    cases = each(
        run, lambda: _cases(run.context), handle, small=("mlp_launch_bound",), timeout_s=300
    )
    keys = {
        "memory": ("peak", "measured"), "split": ("kept", "apart"),
        "operations": ("ours", "counted"),
        "checkpointing": (
            "module", "predicted_bytes", "real_bytes", "predicted_ms", "real_ms",
            "real_ms_quartiles", "step_ms",
        ),
    }  # fmt: skip
    rows = [
        {"model": name, **{k: (case.get(of) or {}).get(k) for of, ks in keys.items() for k in ks}}
        for name, case in cases.items()
    ]
    ended = done(cases)
    wrong = any(map(_is_wrong, ended.values()))
    return {"cases": cases, "rows": rows, "summary": _summary([*ended.values()]), "wrong": wrong}


def _summary(found: Sequence[Found]) -> Found:
    """Count what is true, and how far the effects of checkpointing are off."""
    counted = [one["operations"] for one in found if one["operations"]]
    split = [one["split"] for one in found if one["split"]]
    again = [one["checkpointing"] for one in found if one["checkpointing"]]
    peaks = [one["memory"]["peak"] == one["memory"]["measured"] for one in found]
    freed = [abs(one["predicted_bytes"] / one["real_bytes"] - 1) for one in again]
    costs = [abs(one["predicted_ms"] - one["real_ms"]) / one["step_ms"] for one in again]
    return {
        "models": len(found),
        "peak to the byte": sum(peaks),
        "split": len(split),
        "split to the byte": sum(not one["apart"] for one in split),
        "operations": len(counted),
        "operations equal": sum(one["ours"] == one["counted"] for one in counted),
        "checkpointed": len(again),
        "freed bytes, worst error": max(freed, default=None),
        "cost, median error of the step": statistics.median(costs) if costs else None,
        "cost, worst error of the step": max(costs, default=None),
    }


def _examine(name: str, run: Run, path: Path) -> Found:
    import torch

    model, step = _cases(run.context)[name]()
    step()
    report = _recorded(step, model, run.device, path)
    found = {"memory": _peak(step, model, run.device, path)}
    found["split"] = _split(step, model, run.device, path)
    found |= {"operations": None, "checkpointing": None}
    if name not in _COMPILED:
        found["operations"] = operations(step, report)
        found["checkpointing"] = _checkpointing(step, model, run.device, path, report, run.small)
    torch.use_deterministic_algorithms(False)
    return found


def _is_true(found: Found) -> bool:
    """Whether peak and split of a case agree with the allocator."""
    memory, kept = found["memory"], found["split"]
    exact: bool = memory["peak"] == memory["measured"] == memory["summed"]
    return exact and (kept is None or kept["apart"] <= _NEAR_SPLIT * kept["kept"])


def _is_wrong(found: Found) -> bool:
    counted, checkpoint = found["operations"], found["checkpointing"]
    wrong = not _is_true(found)
    if counted is not None:
        wrong |= counted["ours"] != counted["counted"]
    if checkpoint is not None:
        off = abs(checkpoint["predicted_bytes"] - checkpoint["real_bytes"])
        wrong |= off > _NEAR * checkpoint["real_bytes"]
    return wrong


# Ranks -------------------------------------------------------------------------------------------


def _train(rank: int, kind: str, folder: str, names: Sequence[str], small: bool) -> None:
    """What each of the two processes does; rank 0 writes the records of both."""
    import torch.distributed as dist

    from benchmarks.ranks import RANKS, member, training

    found = {}
    with member(rank, kind, folder) as device:
        path = Path(folder) / f"rank{rank}.json"
        for name in names:
            model, step = training(name, device, small)
            step()
            found[name] = {"memory": _peak(step, model, kind, path)}
            found[name]["split"] = _split(step, model, kind, path)
            del model, step
        every = [None] * RANKS
        dist.all_gather_object(every, found)
        if rank == 0:
            (Path(folder) / "records.json").write_text(json.dumps(every))


def of_ranks(run: Run) -> Figures:
    """Compare peak and split on two ranks."""
    from benchmarks.ranks import CASES, run_ranks

    names = run.choose(CASES, ("ddp",))
    records = json.loads(run_ranks(_train, run.device, names, run.small))
    rows = [
        {"case": name, "rank": rank, **one["memory"], **(one["split"] or {})}
        for rank, of_rank in enumerate(records)
        for name, one in of_rank.items()
    ]
    true = [_is_true(one) for of_rank in records for one in of_rank.values()]
    summary = {"trainings and ranks": len(true), "to the byte": sum(true)}
    return {"ranks": records, "rows": rows, "summary": summary, "wrong": not all(true)}
