"""Is the slow rank named, with its module and its price, and is nothing claimed of even ranks?

    python -m benchmarks planted_ranks
    python -m benchmarks planted_transfers

Processes train a model with DistributedDataParallel or FSDP2. Something slow is planted on rank
1: in a module on the host, in a module as a kernel, in the loader, or longer sequences. Between the
plants, the same training runs with nothing planted. On GPUs, the time that rank 0 waits in a
collective is then compared with CUDA events of each rank's own.

``planted_transfers`` plants what concerns all ranks, and trains the same done well: (a) a deep
model with DistributedDataParallel, in buckets of 10 kB and of 25 MB; (b) a wide model with FSDP2,
of which the host waits before each block, so that no gather begins early, and without these waits;
(c) the stages of a pipeline, with two microbatches, and with a second stage that is longer. What
the replay promises of equal stages is compared with a pipeline whose stages are equal. On a CPU,
(c) alone can be judged: gloo does not say how many bytes it moves, and FSDP2 gathers nothing in
advance.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import backspot
from benchmarks.harness import Figures, Run
from benchmarks.models import ResidualMlp
from benchmarks.ranks import RANKS, distributed, gpt, member, run_ranks

_PLANTS = (
    ("host", "h.2.mlp.fc2"), ("kernel", "h.2.mlp.fc2"), ("data", ""), ("length", ""),
    ("host", "h.1.attn"), ("kernel", "h.3.attn"),
)  # fmt: skip
CASES = {
    f"{how}/{number}-{plant}": (how, plant, path)
    for how in ("ddp", "fsdp2")
    for number, (plant, path) in enumerate(
        one for planted in _PLANTS for one in (("even", ""), planted)
    )
}
_KERNEL_S, _HOST_S = 0.010, 0.040
"""The host is ahead of the GPU, so what holds it up has to take longer to cost anything."""
_TICKS = 1.98e9
"""``torch.cuda._sleep`` in one second, at the clock of an H200."""
_PROFILE: dict[str, Any] = {"steps": 6, "warmup": 4, "unprofiled": 0, "ranks": "all"}

Found = dict[str, Any]


def _spin(seconds: float, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * _TICKS))
    else:
        time.sleep(seconds)


def _slow_down(module: nn.Module, plant: str, device: torch.device) -> None:
    forward = module.forward

    def slow(x: torch.Tensor) -> torch.Tensor:
        if plant == "host":
            time.sleep(_HOST_S)
        else:
            _spin(_KERNEL_S, device)
        return forward(x)

    module.forward = slow  # type: ignore[method-assign]


def _slow_rank(name: str, device: torch.device, _: int, small: bool) -> backspot.Report:
    how, plant, path = CASES[name]
    slow = plant if dist.get_rank() == 1 else "even"
    model = gpt(device, small)
    if slow in ("host", "kernel"):
        _slow_down(model.get_submodule(path), slow, device)
    trained = distributed(model, how)
    optimizer = torch.optim.AdamW(trained.parameters(), fused=device.type == "cuda")
    batch, length = (2, 32) if small else (32, 512)
    length = length * 3 // 2 if slow == "length" else length
    tokens = torch.randint(128, (batch, length), device=device)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            if slow == "data":
                time.sleep(_HOST_S)
            yield tokens

    def step(tokens: torch.Tensor) -> None:
        optimizer.zero_grad()
        scores = trained(tokens)
        functional.cross_entropy(scores.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return backspot.profile(step, trained, data=batches(), **_PROFILE)


def _is_slow_rank_named(name: str, said: list[Found], kind: str) -> bool:
    _, plant, path = CASES[name]
    if plant == "even":
        return not said
    on_gpu = plant in ("kernel", "length") and kind == "cuda"
    expected: Found = {"rank": 1, "kind": "gpu" if on_gpu else "host"}
    if plant == "data":
        expected = {"rank": 1, "rule": "slow-data"}
    elif path:
        expected["path"] = path
    return bool(said) and expected.items() <= said[0].items()


def _wait(seconds: float, device: torch.device) -> dict[str, float] | None:
    """Return how long rank 0 waits for rank 1, by Backspot and by the ranks' own events."""
    linear = nn.Linear(1024, 1024).to(device)
    x, moved = torch.randn(64, 1024, device=device), torch.zeros(1 << 22, device=device)
    events: list[Any] = []

    def step() -> None:
        linear(x).square().mean().backward()
        _spin(seconds if dist.get_rank() == 1 else 0.0005, device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        dist.all_reduce(moved)
        end.record()
        events.append((begin, end))

    report = backspot.profile(step, linear, **{**_PROFILE, "steps": 8})
    torch.cuda.synchronize()
    every: list[Any] = [None, None]
    dist.all_gather_object(every, [begin.elapsed_time(end) for begin, end in events[-8:]])
    if report.job is None:
        return None
    # The last rank to enter does not wait: what it takes is the transfer.
    real = median(ours - min(ours, theirs) for ours, theirs in zip(*every, strict=True))
    return {"planted": seconds * 1e3, "real": real, "found": report.job.ranks[0].wait_ns / 1e6}


# What concerns all ranks -------------------------------------------------------------------------

TRANSFERS = {
    "buckets/small": "small-buckets",
    "buckets/default": "",
    "gathers/late": "late-gather",
    "gathers/default": "",
    "pipeline/few": "pipeline-bubble",
    "pipeline/unequal": "pipeline-bubble",
    "pipeline/balanced": "pipeline-bubble",
}
_ON_CPU = ("pipeline/few", "pipeline/unequal", "pipeline/balanced")

_Training = tuple[nn.Module, Callable[[], Any]]


class _Stack(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualMlp(width, 2) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _buckets(how: str, device: torch.device, _: int, small: bool) -> _Training:
    width, depth = (16, 4) if small else (256, 64)
    ids = [device.index] if device.type == "cuda" else None
    inner = _Stack(width, depth).to(device)
    size = 0.01 if how == "small" else 25
    model = nn.parallel.DistributedDataParallel(inner, device_ids=ids, bucket_cap_mb=size)
    x = torch.randn(64, width, device=device)
    return model, lambda: model(x).square().mean().backward()


def _gathers(how: str, device: torch.device, _: int, small: bool) -> _Training:
    from torch.distributed.fsdp import fully_shard

    width = 16 if small else 8192
    model = _Stack(width, 2 if small else 8).to(device, torch.bfloat16)
    for block in model.blocks:
        if how == "late" and device.type == "cuda":
            block.register_forward_pre_hook(lambda *_: torch.cuda.synchronize(), prepend=True)
        fully_shard(block)
    fully_shard(model)
    x = torch.randn(4 if small else 2048, width, device=device, dtype=torch.bfloat16)
    return model, lambda: model(x).square().mean().backward()


def _pipeline(how: str, device: torch.device, rank: int, small: bool) -> _Training:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    width, batch = (64, 64) if small else (2048, 4096) if device.type == "cuda" else (512, 1024)
    parts = 2 if how == "few" else 4 if small else 8
    depth = {"few": 4, "unequal": 4 + 6 * rank, "balanced": 7}[how] // (3 if small else 1)
    model = _Stack(width, depth).to(device)
    x = torch.randn(batch, width, device=device)
    stage = PipelineStage(model, rank, RANKS, device, input_args=(x[: batch // parts],))
    schedule = ScheduleGPipe(stage, parts, loss_fn=lambda out, to: (out - to).square().mean())
    return model, lambda: schedule.step(x) if rank == 0 else schedule.step(target=x)


def _transfer(name: str, device: torch.device, rank: int, small: bool) -> backspot.Report:
    what, _, how = name.partition("/")
    make = {"buckets": _buckets, "gathers": _gathers, "pipeline": _pipeline}[what]
    model, once = make(how, device, rank, small)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        once()
        optimizer.step()
        optimizer.zero_grad()

    return backspot.profile(step, model, **_PROFILE)


def _is_transfer_found(name: str, said: list[Found], _: str) -> bool:
    right = [one["rule"] for one in said] == ([TRANSFERS[name]] if TRANSFERS[name] else [])
    return right and (name != "pipeline/unequal" or said[0]["rank"] == 1)


# The run -----------------------------------------------------------------------------------------


def _train(
    rank: int, kind: str, folder: str, names: Sequence[str], small: bool, ranks: int
) -> None:
    """What each process does; rank 0 writes the records."""
    done: Found = {}
    with member(rank, kind, folder, ranks) as device:
        for name in names:
            of_transfer = name in TRANSFERS
            report = (_transfer if of_transfer else _slow_rank)(name, device, rank, small)
            if kind == "cuda":
                torch.cuda.empty_cache()
            if report.job is not None:
                keys = ("rule", "kind", "rank", "path", "seen")
                said = [
                    {
                        **{key: getattr(one, key) for key in keys},
                        "ns": one.cost_ns,
                        "saves_ns": one.saves_ns,
                    }
                    for one in report.job.findings
                ]
                right = (_is_transfer_found if of_transfer else _is_slow_rank_named)(
                    name, said, kind
                )
                done[name] = {"right": right, "findings": said, "step_ns": report.job.step_ns}
                done[name]["replayed_ns"] = report.job.replayed_step_ns
                done[name] |= {f"first {key}": value for key, value in (said or [{}])[0].items()}
        slow = kind == "cuda" and names[0] in CASES
        waits = [_wait(seconds, device) for seconds in (0.003, 0.010)] if slow else []
        if rank == 0:
            records = {"cases": done, "waits": waits}
            (Path(folder) / "records.json").write_text(json.dumps(records))


def _answer(
    run: Run, cases: Mapping[str, Any], small: Sequence[str], ranks: int = RANKS
) -> Figures:
    names = run.choose(cases, small)
    if cases is TRANSFERS and run.device == "cpu":
        names = [name for name in names if name in _ON_CPU]
    figures: Figures = json.loads(
        run_ranks(_train, run.device, names, run.small, ranks, ranks=ranks)
    )
    right = {
        name: found["right"]
        for name, found in figures["cases"].items()
        if name != "pipeline/balanced"
    }
    even = [name for name in right if "even" in name or "default" in name]
    figures["summary"] = {
        "plants": len(right) - len(even),
        "named": sum(right.values()) - sum(right[name] for name in even),
        "without a plant": len(even),
        "silent": sum(right[name] for name in even),
        "waits, worst µs apart": max(
            (abs(one["real"] - one["found"]) * 1e3 for one in figures["waits"] if one),
            default=None,
        ),
    }
    return figures


def answer(run: Run) -> Figures:
    figures = _answer(
        run, CASES, ("ddp/0-even", "ddp/1-host"), RANKS if run.small or run.device == "cuda" else 4
    )
    _price(figures["cases"])
    return figures


def _price(cases: dict[str, Found]) -> None:
    """Put beside what the replay of all ranks says that a plant costs what it really costs."""
    for name, found in cases.items():
        how, plant, _ = CASES[name]
        even = [one["step_ns"] for other, one in cases.items() if CASES[other][:2] == (how, "even")]
        if plant != "even" and even and (found["findings"] or [{}])[0].get("saves_ns") is not None:
            step, saves = found["step_ns"], found["findings"][0]["saves_ns"]
            found["gain_ns"] = round(step - median(even))
            found["price_error"] = (saves - found["gain_ns"]) / step
        if found["replayed_ns"]:
            found["replay_error"] = found["replayed_ns"] / found["step_ns"] - 1


def transfers(run: Run) -> Figures:
    figures = _answer(run, TRANSFERS, _ON_CPU)
    cases, summary = figures["cases"], figures["summary"]
    unequal, balanced = (cases.get(f"pipeline/{how}") for how in ("unequal", "balanced"))
    if unequal and balanced and (saves := unequal.get("first saves_ns")) is not None:
        said, real = unequal["step_ns"] - saves, balanced["step_ns"]
        summary |= {"unequal stages, ms": unequal["step_ns"] / 1e6, "equal stages, ms": real / 1e6}
        summary |= {"equal stages, said ms": said / 1e6}
        summary["equal stages, error of the step"] = abs(said - real) / unequal["step_ns"]
    return figures
