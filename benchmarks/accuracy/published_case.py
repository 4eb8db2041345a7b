"""The published case, today: timm's PatchDropout with gather and with indexing.

    python -m benchmarks.accuracy.published_case

Published for torch 2.0 on an A10G: with deterministic algorithms the backward of ``torch.gather``
waits for the GPU. Measured here on what is installed: step times of gather and index in turn, with
and without deterministic algorithms, in fp32 and bf16; Backspot's ranking before and after; and the
host's waits and the sort within ``patch_drop``'s backward, counted plainly from the trace.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import (
    add_common_arguments,
    interleaved,
    print_table,
    spread,
    synchronize,
    write_json,
)
from benchmarks.traces.plain import Plain, busy, read_plain
from benchmarks.traces.trim import read_trace
from benchmarks.workers import choose, resolve_device, run_cases, turn

CASES = {
    f"{precision}_{algorithms}": (precision, algorithms)
    for algorithms in ("deterministic", "default")
    for precision in ("fp32", "bf16")
}
_PATH = "patch_drop"


def _build(device: str, small: bool) -> Any:  # noqa: ANN401 - a torch module
    import torch
    from timm.models.vision_transformer import VisionTransformer

    size = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    with torch.device(device):
        return VisionTransformer(patch_drop_rate=0.5, **(size if small else {})).train()


def index_drop(rate: float) -> Any:  # noqa: ANN401 - a torch module
    """What timm's PatchDropout does, by indexing: the same patches for the same random numbers."""
    import torch

    class IndexPatchDropout(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            prefix, patches = x[:, :1], x[:, 1:]
            batch, count = patches.shape[:2]
            order = torch.argsort(torch.randn(batch, count, device=x.device), dim=-1)
            kept = order[:, : max(1, int(count * (1.0 - rate)))]
            rows = torch.arange(batch, device=x.device).unsqueeze(1)
            return torch.cat((prefix, patches[rows, kept]), dim=1)

    return IndexPatchDropout()


def _step(model: Any, images: Any, labels: Any, device: str, bf16: bool) -> Callable[[], None]:  # noqa: ANN401 - torch's
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def _profile(model: Any, step: Callable[[], None], device: str, path: Path) -> None:  # noqa: ANN401 - a module
    from torch.profiler import ProfilerActivity, profile, schedule

    import backspot

    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with (
        backspot.instrument(model),
        profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=2, active=3, repeat=1),
            on_trace_ready=lambda prof: prof.export_chrome_trace(str(path)),
        ) as prof,
    ):
        for _ in range(5):
            step()
            prof.step()
    synchronize(device)


def _ranking(path: Path) -> dict[str, Any]:
    """Where patch_drop stands, by Backspot."""
    import backspot

    report = backspot.locate(path)
    modules = [row for row in report.modules if row.is_module]
    rank, row = next((i, r) for i, r in enumerate(modules, 1) if r.path == _PATH)
    return {
        "rank": rank,
        "of": len(modules),
        "wall_ms": row.wall_ms_per_step,
        "wall_share": row.wall_ns / report.wall_ns,
        "gpu_ms": row.gpu_ms_per_step,
        "cpu_ms": row.cpu_ms_per_step,
        "forward_ms": row.forward_ms_per_step,
        "heaviest_node": row.nodes[0].name if row.nodes else "",
        "heaviest_node_ms": row.nodes[0].wall_ns / 1e6 / row.steps if row.nodes else 0.0,
        "backward_ms": report.wall_ns / 1e6 / row.steps,
        "backward_gpu_ms": report.gpu_ns / 1e6 / row.steps,
        "coverage": report.coverage.wall,
        "first_five": [(r.label, r.wall_ms_per_step) for r in modules[:5]],
        "warnings": list(report.warnings),
    }


def _counted(path: Path) -> dict[str, Any]:
    """What the trace says, plainly: waits of the host and sorting kernels, per step."""
    plain: Plain = read_plain(read_trace(path))
    steps = max(1, len(plain.step))
    kernels = {name: ns for (owner, name), ns in plain.kernels.items() if owner == _PATH}
    sorting = {n: ns for n, ns in kernels.items() if "sort" in n.lower() or "radix" in n.lower()}
    return {
        "host_waits_in_patch_drop": sum(
            count for (owner, _), count in plain.syncs.items() if owner == _PATH
        )
        / steps,
        "host_waits_in_backward": {f"{o}: {n}": c / steps for (o, n), c in plain.syncs.items()},
        "sort_ms": sum(sorting.values()) / 1e6 / steps,
        "kernels_ms": {
            name[:120]: ns / 1e6 / steps
            for name, ns in sorted(kernels.items(), key=lambda item: -item[1])[:8]
        },
        "busy": busy(plain.intervals) / max(1, plain.backward),
    }


def _child(name: str, arguments: argparse.Namespace) -> None:
    import torch

    precision, algorithms = CASES[name]
    device, small = arguments.device, arguments.small
    result: dict[str, Any] = {"precision": precision, "algorithms": algorithms}
    with turn(("torch", "timm")), tempfile.TemporaryDirectory() as folder:
        torch.use_deterministic_algorithms(algorithms == "deterministic")
        torch.manual_seed(0)
        model = _build(device, small)
        other = copy.deepcopy(model)
        other.patch_drop = index_drop(0.5)
        side, batch = (32, 4) if small else (224, 128)
        images = torch.randn(batch, 3, side, side, device=device)
        labels = torch.randint(1000, (batch,), device=device)
        models = {"gather": model, "index": other}
        steps = {
            kind: _step(m, images, labels, device, precision == "bf16")
            for kind, m in models.items()
        }
        times = interleaved(
            list(steps.values()), device, rounds=3 if small else 21, inner=1 if small else 4,
            seconds=60,
        )  # fmt: skip
        for kind, measured in zip(models, times, strict=True):
            result[kind] = {"step_ms": spread(measured), "all_ms": measured}
        pairs = [a - b for a, b in zip(*times, strict=True)]
        result["saving_ms"] = spread(pairs)
        write_json(arguments.out, result)
        for kind, m in models.items():
            path = Path(folder) / f"{kind}.json"
            _profile(m, steps[kind], device, path)
            result[kind]["ranking"] = _ranking(path)
            result[kind]["counted"] = _counted(path)
            write_json(arguments.out, result)
    gather = result["gather"]
    print(f"  gather: rank {gather['ranking']['rank']}, waits {gather['counted']}")


def _statement(cases: dict[str, Any]) -> dict[str, Any]:
    """The plain statement, as far as what was measured carries it."""
    found = cases.get("bf16_deterministic") or cases.get("fp32_deterministic") or {}
    if not found.get("gather", {}).get("counted", {}).get("busy"):
        return {}  # no GPU: nothing to wait for
    counted = found["gather"]["counted"]
    waits, sort = counted["host_waits_in_patch_drop"], counted["sort_ms"]
    first = (
        "The published wait of the host is gone: patch_drop's backward makes no synchronising call."
        if not waits
        else f"patch_drop's backward waits for the GPU {waits:g} times a step."
    )
    second = (
        f" The sort remains: {sort:.2f} ms of sorting kernels a step."
        if sort
        else " No sorting kernel runs in it."
    )
    return {"statement": first + second}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_arguments(parser, seconds=480, out="published_case.json")
    arguments = parser.parse_args()
    resolve_device(arguments)
    if arguments.child:
        _child(arguments.child, arguments)
        return
    names = choose(arguments, list(CASES))
    cases = run_cases("benchmarks.accuracy.published_case", names, arguments, _statement)
    head = ("algorithms", "precision", "PatchDropout", "step ms", "quartiles", "rank", "share %",
            "wall ms", "heaviest node", "node ms", "host waits", "sort ms")  # fmt: skip
    rows = []
    for case in cases.values():
        for kind in ("gather", "index"):
            if "ranking" not in case.get(kind, {}):
                continue
            ranking, counted, step = (case[kind][k] for k in ("ranking", "counted", "step_ms"))
            rows.append((
                case["algorithms"], case["precision"], kind, step["median"],
                f"{step['low']:.2f}–{step['high']:.2f}", ranking["rank"],
                ranking["wall_share"] * 100, ranking["wall_ms"], ranking["heaviest_node"],
                ranking["heaviest_node_ms"], counted["host_waits_in_patch_drop"],
                counted["sort_ms"],
            ))  # fmt: skip
    if rows:
        print_table(head, rows)
    for name, case in cases.items():
        if "saving_ms" in case:
            saved = case["saving_ms"]
            print(
                f"{name}: index saves {saved['median']:.2f} ms a step "
                f"({saved['low']:.2f} to {saved['high']:.2f})"
            )
    print(_statement(cases).get("statement", ""))


if __name__ == "__main__":
    main()
