"""Is it found what concerns all ranks? Small buckets, late gathers and bubbles, each done well too.

Two processes train (a) a deep model with DistributedDataParallel, in buckets of 10 kB and of 25 MB;
(b) a wide model with FSDP2, of which the host waits before each block, so that no gather begins
early, and without these waits; (c) the stages of a pipeline, with two microbatches, with eight, and
with a second stage that is longer. On a CPU, (c) alone can be judged: gloo does not say how many
bytes it moves, and FSDP2 gathers nothing in advance.

    python -m benchmarks.accuracy.planted_transfers
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import backspot
from benchmarks.common import (
    choose,
    command_line,
    parse,
    print_machine,
    print_table,
    script,
    write_results,
)
from benchmarks.models import ResidualMlp
from benchmarks.ranks import RANKS, member, run_ranks

CASES = {
    "buckets/small": "small-buckets",
    "buckets/default": "",
    "gathers/late": "late-gather",
    "gathers/default": "",
    "pipeline/few": "pipeline-bubble",
    "pipeline/unequal": "pipeline-bubble",
}
_ON_CPU = ("pipeline/few", "pipeline/unequal")

_Training = tuple[nn.Module, Callable[[], Any]]


class _Stack(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualMlp(width, 2) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _buckets(how: str, device: torch.device, small: bool) -> _Training:
    width = 16 if small else 256
    ids = [device.index] if device.type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(
        _Stack(width, 4 if small else 64).to(device),
        device_ids=ids,
        bucket_cap_mb=0.01 if how == "small" else 25,
    )
    x = torch.randn(64, width, device=device)
    return model, lambda: model(x).square().mean().backward()


def _gathers(how: str, device: torch.device, small: bool) -> _Training:
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

    width, batch = (64, 64) if small else (2048, 4096)
    parts = 2 if how == "few" else 8
    model = _Stack(width, 4 + 6 * rank if how == "unequal" else 4).to(device)
    x = torch.randn(batch, width, device=device)
    stage = PipelineStage(model, rank, RANKS, device, input_args=(x[: batch // parts],))
    schedule = ScheduleGPipe(stage, parts, loss_fn=lambda out, to: (out - to).square().mean())
    return model, lambda: schedule.step(x) if rank == 0 else schedule.step(target=x)


def _train(rank: int, kind: str, folder: str, names: Sequence[str], small: bool) -> None:
    """What each of the two processes does; rank 0 writes the records."""
    done: dict[str, Any] = {}
    with member(rank, kind, folder) as device:
        for name in names:
            what, _, how = name.partition("/")
            if what == "pipeline":
                model, pass_through = _pipeline(how, device, rank, small)
            else:
                model, pass_through = {"buckets": _buckets, "gathers": _gathers}[what](
                    how, device, small
                )
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

            def step(
                once: Callable[[], Any] = pass_through,
                optimizer: torch.optim.Optimizer = optimizer,
            ) -> None:
                once()
                optimizer.step()
                optimizer.zero_grad()

            report = backspot.profile(step, model, steps=6, warmup=4, unprofiled=0, ranks="all")
            del model, pass_through, step, optimizer
            if kind == "cuda":
                torch.cuda.empty_cache()
            if report.job is not None:
                done[name] = _judge(report.job, name)
        if rank == 0:
            (Path(folder) / "records.json").write_text(json.dumps(done))


def _judge(job: backspot.JobReport, name: str) -> dict[str, Any]:
    said = [
        {"rule": one.rule, "rank": one.rank, "path": one.path, "ns": one.cost_ns, "seen": one.seen}
        for one in job.findings
    ]
    right = [one["rule"] for one in said] == [CASES[name]] if CASES[name] else not said
    if name == "pipeline/unequal":
        right = right and said[0]["rank"] == 1
    return {"right": right, "findings": said, "step_ns": job.step_ns}


@script
def main(argv: Sequence[str] | None = None) -> int:
    """Train, judge, print and write."""
    parser = command_line(__doc__, out="planted_transfers_{device}.json")
    arguments = parse(parser, argv)
    names = choose(arguments, CASES, _ON_CPU)
    if arguments.device == "cpu":
        names = [name for name in names if name in _ON_CPU]
    print_machine(arguments.device)
    records = json.loads(run_ranks(_train, arguments.device, names, arguments.small))
    print_table(
        ("case", "right", "finding", "rank", "its ms", "step ms"),
        [
            (
                name,
                "yes" if one["right"] else "NO",
                *(
                    (found["rule"], str(found["rank"]), found["ns"] / 1e6)
                    if (found := next(iter(one["findings"]), None))
                    else ("", "", 0.0)
                ),
                one["step_ns"] / 1e6,
            )
            for name, one in records.items()
        ],
    )
    write_results(arguments, {"cases": records})
    return 0


if __name__ == "__main__":
    sys.exit(main())
