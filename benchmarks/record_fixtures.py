"""Record the traces that the tests read: small steps of many kinds, with what is known of each.

    python benchmarks/record_fixtures.py --out fixtures --tar fixtures.tar        # one GPU
    python benchmarks/record_fixtures.py --cases ddp,fsdp2,model_parallel …       # two GPUs

Each case runs in a process of its own (distributed ones in one a rank) and leaves
``NAME.trace.json.gz``, trimmed, and ``NAME.expect.json``: what is true of it by construction, and
counts taken before the trimming.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _common import Budget, add_common_arguments, machine, write_json
from _processes import Child, choose, rank_environments, resolve_device, run_children, turn
from trim_trace import read_trace, trim, write_trace

if TYPE_CHECKING:
    from _fixture_cases import Context, Recipe

_EVALUATE = "autograd::engine::evaluate_function: "
_LARGE = 300_000


def _record(recipe: Recipe, context: Context, shapes: bool, folder: Path) -> list[Path]:
    """Profile two steps (or two cycles of two) and export; returns what was written."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

    activities = [ProfilerActivity.CPU]
    if context.device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)

    def settle() -> None:
        if context.device.startswith("cuda"):
            torch.cuda.synchronize()

    for _ in range(recipe.warmup):
        recipe.step()
    settle()
    if recipe.how == "scheduled":
        plan, count = schedule(wait=1, warmup=1, active=2, repeat=2), 8
        ready = tensorboard_trace_handler(str(folder), worker_name="worker", use_gzip=True)
    else:
        plan, count = schedule(wait=0, warmup=1, active=2, repeat=1), 3

        def ready(prof: Any) -> None:  # noqa: ANN401 - torch's profile
            prof.export_chrome_trace(str(folder / "trace.json"))

    with profile(
        activities=activities,
        schedule=plan,
        on_trace_ready=ready,
        record_shapes=shapes,
        with_stack=recipe.how == "stack",
    ) as prof:
        for _ in range(count):
            recipe.step()
            prof.step()
    settle()
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def _counts(document: dict[str, Any]) -> dict[str, Any]:
    """What the whole trace holds, counted plainly."""
    events = [e for e in document["traceEvents"] if e.get("ph") == "X"]
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    nodes = Counter(
        e["name"].removeprefix(_EVALUATE) for e in events if e["name"].startswith(_EVALUATE)
    )
    return {
        "evaluate_function_events": sum(nodes.values()),
        "nodes": dict(nodes.most_common()),
        "device_work": dict(Counter(e["cat"] for e in work)),
        "devices": sorted({e["args"].get("device", 0) for e in work}),
        "streams": sorted({e["args"].get("stream", 0) for e in work}),
        "steps": sum(
            e["name"].startswith("ProfilerStep#")
            for e in events
            if e.get("cat") == "user_annotation"
        ),
        "forward_labels": sum(e["name"].startswith("forward: ") for e in events),
        "backward_markers": sum(e["name"].startswith("backward: ") for e in events),
        "flows": sum(e.get("cat") == "fwdbwd" and e["ph"] == "s" for e in document["traceEvents"]),
        "events": len(events),
    }


def _save(name: str, path: Path, out: Path, expect: dict[str, Any]) -> None:
    document = read_trace(path)
    counted = _counts(document)
    target = out / f"{name}.trace.json.gz"
    size = write_trace(trim(document), target)
    write_json(out / f"{name}.expect.json", {**expect, "counted": counted, "bytes": size})
    large = " LARGE" if size > _LARGE else ""
    print(f"  {target.name}: {counted['events']} events, {size / 1e3:.0f} kB{large}")
    try:
        import backspot

        report = backspot.locate(target)
        for row in report.modules[:4]:
            print(
                f"    {row.label or row.path}: wall {row.wall_ms_per_step:.3f} "
                f"gpu {row.gpu_ms_per_step:.3f} cpu {row.cpu_ms_per_step:.3f} ms/step "
                f"recompute {row.recompute_ns / 1e6:.3f} {row.nodes[0].name if row.nodes else ''}"
            )
        print(
            f"    {len(report.passes)} passes, {len(report.step_ns)} steps, wall "
            f"{report.wall_ns / 1e6:.3f} ms, coverage {report.coverage.wall:.4f} "
            f"(gpu {report.coverage.gpu:.4f}, cpu {report.coverage.cpu:.4f})"
        )
        for warning in report.warnings:
            print(f"    ! {warning}")
    except Exception as error:
        print(f"    locate: {type(error).__name__}: {error}")


def _child(name: str, arguments: argparse.Namespace) -> None:
    import torch

    import _fixture_cases_host  # noqa: F401 - registers its cases
    import _fixture_cases_special  # noqa: F401 - as above
    import backspot
    from _fixture_cases import CASES, Context

    chosen = CASES[name]
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    distributed = chosen.needs == "2 ranks"
    device = arguments.device
    if distributed:
        if device == "cuda":
            device = f"cuda:{rank}"
            torch.cuda.set_device(rank)
        import torch.distributed as dist

        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    torch.manual_seed(rank)
    context = Context(device, arguments.small, rank, world)
    recipe = chosen.build(context)
    stack = recipe.how == "stack"
    handles = [] if stack else [backspot.instrument(m, name=n) for m, n in recipe.modules]
    expect: dict[str, Any] = {
        "case": name,
        "steps": 2,
        "passes": 2,
        "source": "backspot",
        "hardware": machine(device),
        "rank": rank,
        "world": world,
        "labelled_modules": sum(len(handle.paths) for handle in handles),
        **recipe.expect,
    }
    with tempfile.TemporaryDirectory() as folder:
        written = _record(recipe, context, chosen.shapes, Path(folder))
        for number, path in enumerate(written):
            suffix = f".rank{rank}" if distributed else ""
            if recipe.how == "scheduled":
                suffix += f".cycle{number}"
            _save(name + suffix, path, arguments.out, expect)
    for handle in handles:
        handle.remove()
    if distributed:
        dist.barrier()
        dist.destroy_process_group()


def _available(arguments: argparse.Namespace) -> dict[str, str]:
    """Each case, and why it is left out ('' where it is not)."""
    import torch

    import _fixture_cases_host  # noqa: F401 - registers its cases
    import _fixture_cases_special  # noqa: F401 - as above
    from _fixture_cases import CASES

    gpus = torch.cuda.device_count() if arguments.device == "cuda" else 0
    reasons = {}
    for name, chosen in CASES.items():
        needed = {"cpu": 0, "cuda": 1, "2 gpus": 2, "2 ranks": 2 if gpus else 0}[chosen.needs]
        reasons[name] = f"needs {chosen.needs}" if gpus < needed else ""
    return reasons


def _command(name: str, arguments: argparse.Namespace) -> list[str]:
    script = str(Path(__file__).resolve())
    command = [sys.executable, "-u", script, "--child", name, "--device", arguments.device]
    return [*command, "--out", str(arguments.out), *(["--small"] if arguments.small else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_arguments(parser, seconds=520, out="fixtures")
    parser.add_argument("--tar", type=Path, help="also pack all of it into this file, as it grows")
    arguments = parser.parse_args()
    resolve_device(arguments)
    if arguments.child:
        arguments.out.mkdir(parents=True, exist_ok=True)
        if "RANK" in os.environ:
            _child(arguments.child, arguments)
        else:
            with turn(("torch", "torch._dynamo", "torchvision")):
                _child(arguments.child, arguments)
        return
    _drive(arguments)


def _drive(arguments: argparse.Namespace) -> None:
    budget = Budget(arguments.seconds)
    reasons = _available(arguments)
    wanted = choose(arguments, list(reasons))
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, str] = {}
    began = time.monotonic()

    def done(name: str, status: str, output: str) -> None:
        results[name] = status
        print(f"[{time.monotonic() - began:5.0f} s] {name}: {status}", flush=True)
        lines = output.strip().splitlines()
        for line in lines if status == "ok" else lines[-40:]:
            if status != "ok" or line.startswith("  "):
                print(line, flush=True)
        try:
            write_json(arguments.out / "results.json", results)
            if arguments.tar:
                _pack(arguments.out, arguments.tar)
        except OSError:
            traceback.print_exc()

    for name in wanted:
        if reasons[name]:
            done(name, reasons[name], "")
    from _fixture_cases import CASES

    ready = [name for name in wanted if not reasons[name]]
    single = [name for name in ready if CASES[name].needs != "2 ranks"]
    ranked = [name for name in ready if CASES[name].needs == "2 ranks"]
    for names, jobs in ((ranked, 1), (single, arguments.jobs)):
        children = []
        for name in names:
            environments = rank_environments(2) if names is ranked else [{}]
            commands = [_command(name, arguments)] * len(environments)
            children.append(Child(name, commands, environments, limit=240))
        run_children(children, jobs=jobs, budget=budget, done=done)
    bad = [name for name, status in results.items() if status not in ("ok", reasons[name])]
    print(f"{len(results) - len(bad)} of {len(results)} fine or left out; not: {bad or 'none'}")


def _pack(folder: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    with tarfile.open(part, "w") as archive:
        for path in sorted(folder.iterdir()):
            if path != part and path.suffix in (".gz", ".json"):
                archive.add(path, arcname=path.name)
    part.replace(target)


if __name__ == "__main__":
    main()
