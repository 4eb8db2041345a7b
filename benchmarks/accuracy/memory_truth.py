"""Are memory, operations and the effect of checkpointing true? Compares them with PyTorch's own.

    python -m benchmarks.accuracy.memory_truth

For each model: (a) the peak of a recorded step against ``torch.cuda.max_memory_allocated``, which
must agree to the byte, and the sum of its parts; (b) the operations of all modules against
``torch.utils.flop_counter``, which must agree exactly; (c) what checkpointing the module that keeps
the most would free and cost, as predicted by the plain recording, against a recording of the model
with that module checkpointed: bytes kept from forward to backward, and the step's time without a
profiler. On a CPU there is no allocator to compare with, so (a) checks the sum alone.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
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
_SMALL = ("mlp_launch_bound",)


def _recorded(step: Callable[[], None], model: Any, device: str, path: Path) -> Any:
    import backspot

    with backspot.instrument(model, markers=False):
        record_trace(step, device, path, steps=2, warmup=1, profile_memory=True, record_shapes=True)
    return backspot.locate(path)


def _peak(step: Callable[[], None], model: Any, device: str, path: Path) -> dict[str, Any]:
    """(a): the peak of one step, recorded and as the allocator has it."""
    import torch

    import backspot

    with backspot.instrument(model, markers=False):
        measured = 0

        def watched() -> None:
            nonlocal measured
            if device == "cuda":
                synchronize(device)
                torch.cuda.reset_peak_memory_stats()
            step()
            if device == "cuda":
                measured = torch.cuda.max_memory_allocated()

        record_trace(watched, device, path, steps=1, warmup=1, profile_memory=True)
    first = backspot.locate(path).memory[0]
    whole = sum(share.bytes for share in first.live)
    return {
        "peak": first.peak_bytes,
        "measured": measured if device == "cuda" else first.peak_bytes,
        "summed": whole,
        "unaccounted": sum(s.bytes for s in first.live if s.path == "(not accounted for)"),
    }


def _operations(step: Callable[[], None], report: Any) -> dict[str, int]:
    """(b): the operations of a step. Rows leave out owners without any time in backward."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step()
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
    """(c): predicted and real effect of checkpointing one module.

    ``None`` if no module keeps anything, or if the model cannot be checkpointed: its forward
    depends on a setting around it that the backward does not have.
    """
    from torch.utils.checkpoint import CheckpointError

    row = _best(report)
    if row is None:
        return None
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

    times = interleaved([step, checkpointed], device, rounds=2 if small else 10)
    plain, again = map(statistics.median, times)
    return {
        "module": row.path,
        "predicted_bytes": row.memory.checkpoint_frees_bytes,
        "real_bytes": real,
        "predicted_ms": row.total_forward_ns / 1e6,
        "real_ms": again - plain,
    }


@script
def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print and write."""
    parser = command_line(__doc__, out="memory_truth.json")
    arguments = parse(parser, argv)

    from benchmarks.accuracy.truth_models import MODELS
    from benchmarks.models import Context

    names = choose(arguments, dict.fromkeys(MODELS, ""), _SMALL)
    context = Context(arguments.device, arguments.small)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            build = MODELS[name](context)

            def step(build: Any = build) -> None:
                build.model.zero_grad()
                build.loss().backward()

            path = Path(folder) / "trace.json"
            step()
            report = _recorded(step, build.model, arguments.device, path)
            results[name] = {
                "memory": _peak(step, build.model, arguments.device, path),
                "operations": _operations(step, report),
                "checkpointing": _checkpointing(
                    step, build.model, arguments.device, path, report, arguments.small
                ),
            }
            write_results(arguments, {"cases": results}, last=False)
    _print(results)
    write_results(arguments, {"cases": results})
    return int(any(map(_is_wrong, results.values())))


def _is_wrong(found: dict[str, Any]) -> bool:
    memory, operations, checkpoint = (
        found[part] for part in ("memory", "operations", "checkpointing")
    )
    wrong = not memory["peak"] == memory["measured"] == memory["summed"]
    wrong |= operations["ours"] != operations["counted"]
    if checkpoint is not None:
        off = abs(checkpoint["predicted_bytes"] - checkpoint["real_bytes"])
        wrong |= off > _NEAR * checkpoint["real_bytes"]
    return wrong


def _print(results: dict[str, Any]) -> None:
    head = ("model", "peak", "measured", "FLOPs", "counted")
    head += ("module", "frees", "really", "ms", "really ms")
    rows = []
    for name, found in results.items():
        memory, operations = found["memory"], found["operations"]
        one = found["checkpointing"] or {}
        rows.append(
            (
                name,
                memory["peak"],
                memory["measured"],
                operations["ours"],
                operations["counted"],
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
