"""Summaries of ranks: recorded ones, and many that are made of one of these."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from backspot.job.summary import KERNELS, KernelTimes, ModuleTimes, Summary, from_json
from backspot.trace.columns import Index

__all__ = ["many", "recorded", "waiting_for", "with_kernels"]

RANKS = Path(__file__).parents[1] / "data" / "ranks"


def recorded(name: str) -> list[Summary]:
    return [from_json((RANKS / f"{name}.rank{rank}.json").read_bytes()) for rank in (0, 1)]


def many(count: int) -> list[Summary]:
    """Even ranks with a little noise."""
    first = recorded("fsdp_even")[0]
    return [
        msgspec.structs.replace(
            first,
            rank=rank,
            world_size=count,
            source=f"rank{rank}",
            modules=tuple(_noisy(module, random.Random(rank)) for module in first.modules),
            groups=tuple(
                msgspec.structs.replace(group, ranks=tuple(range(count))) for group in first.groups
            ),
        )
        for rank in range(count)
    ]


def _noisy(module: ModuleTimes, chance: random.Random) -> ModuleTimes:
    parts = {
        part: tuple(round(time * chance.uniform(0.99, 1.01)) for time in getattr(module, part))
        for part in ("forward_gpu", "forward_host", "backward_gpu", "backward_host")
    }
    return msgspec.structs.replace(module, **parts)


def waiting_for(slow: Collection[int], ranks: Sequence[Summary], by_ns: int) -> list[Summary]:
    """The ranks in steps that take so much longer, as all wait for the slow ones.

    These enter the first collective of each step later. The others enter it as before.
    """
    return [_waiting(one, by_ns, is_slow=one.rank in slow) for one in ranks]


def _waiting(summary: Summary, by_ns: int, *, is_slow: bool) -> Summary:
    (group,) = summary.groups
    first = [index for index, step in enumerate(group.step) if step not in group.step[:index]]

    def later(times: Sequence[int], *, already: bool) -> tuple[int, ...]:
        return tuple(
            time + by_ns * (step + (already or index not in first))
            for index, (time, step) in enumerate(zip(times, group.step, strict=True))
        )

    def longer(times: Sequence[int], places: Collection[int]) -> tuple[int, ...]:
        more = 0 if is_slow else by_ns
        return tuple(time + more * (at in places) for at, time in enumerate(times))

    steps = range(summary.steps)
    group = msgspec.structs.replace(
        group,
        launch=later(group.launch, already=is_slow),
        start=later(group.start, already=is_slow),
        end=later(group.end, already=True),
        exposed=longer(group.exposed, first),
    )
    return msgspec.structs.replace(
        summary,
        begin=tuple(time + by_ns * step for step, time in enumerate(summary.begin)),
        end=tuple(time + by_ns * (step + 1) for step, time in enumerate(summary.end)),
        exposed=longer(summary.exposed, steps),
        groups=(group,),
    )


def with_kernels(summary: Summary, by_module: dict[str, dict[str, int]]) -> Summary:
    """The summary with these kernels in the forwards of modules, nanoseconds a step.

    It names the longest ones, as that of a trace does.
    """
    kernel_names, kernels, modules = Index(), [], list(summary.modules)
    for number, module in enumerate(modules):
        times = by_module.get(module.path)
        if times:
            modules[number] = msgspec.structs.replace(
                module, forward_gpu=(sum(times.values()),) * summary.steps
            )
            longest = sorted(times, key=lambda name: -times[name])[:KERNELS]
            kernels.append(
                KernelTimes(
                    number,
                    False,
                    tuple(kernel_names[name] for name in longest),
                    tuple((times[name],) * summary.steps for name in longest),
                    (max((times[name] for name in times if name not in longest), default=0),)
                    * summary.steps,
                )
            )
    return msgspec.structs.replace(
        summary,
        modules=tuple(modules),
        kernel_names=tuple(kernel_names),
        kernels=tuple(kernels),
    )
