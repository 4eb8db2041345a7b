"""What do the notes of modules add to the time that ``torch.compile`` takes?

    python -m benchmarks.cost.compile_time

The same model is compiled with Backspot and without, in turns, each time from nothing: Dynamo is
reset and Inductor's caches are empty. Timed is the first step, with forward and backward. The first
compilation of the process loads most of the compiler and is left out. Medians over the rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from benchmarks.common import (
    Budget,
    choose,
    command_line,
    parse,
    print_machine,
    print_table,
    script,
    spread,
    synchronize,
    write_results,
)

_CASES = ("vit", "gpt", "unet", "vit, by blocks")
_SMALL = ("vit, by blocks",)


def _built(name: str, device: str, small: bool) -> tuple[Any, Callable[[Any], Any]]:
    """Return a model, and its loss as a function of what is called."""
    import torch
    from torch.nn import functional

    from benchmarks import models

    context = models.Context(device, small)
    if name == "gpt":
        gpt = models.gpt(context)
        tokens = context.randint(gpt.vocabulary, 2, len(gpt.wpe.weight))
        return gpt, lambda called: functional.cross_entropy(
            called(tokens).flatten(0, 1).float(), tokens.flatten()
        )
    if name == "unet":
        unet, images = models.unet(context), context.randn(2, 3, 64, 64)
        return unet, lambda called: called(images).square().mean()
    vit = models.vit(context)
    side = context.pick(224, 32)
    batch = context.randn(2, 3, side, side).to(torch.bfloat16)
    return vit, lambda called: called(batch).float().square().mean()


def _compiled(name: str, device: str, small: bool, *, noted: bool) -> float:
    """Return the seconds of the first step of a compiled model."""
    import torch
    from torch._inductor.utils import fresh_inductor_cache

    import backspot

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, loss = _built(name, device, small)
    called = model
    if name.endswith("by blocks"):
        for block in model.blocks:
            block.compile()
    else:
        called = torch.compile(model)
    synchronize(device)
    with backspot.instrument(model) if noted else nullcontext(), fresh_inductor_cache():
        begin = time.perf_counter()
        loss(called).backward()
        synchronize(device)
        return time.perf_counter() - begin


def _case(name: str, device: str, small: bool, seconds: float) -> dict[str, Any]:
    budget = Budget(seconds)
    measure = partial(_compiled, name, device, small)
    measure(noted=True)
    found: dict[bool, list[float]] = {True: [], False: []}
    for number in range(1 if small else 20):
        for noted in (True, False) if number % 2 else (False, True):
            found[noted].append(measure(noted=noted))
        if not budget.left and number >= 1:
            break
    ratios = [with_ / without for with_, without in zip(found[True], found[False], strict=True)]
    return {
        "without_s": spread(found[False]),
        "with_s": spread(found[True]),
        "added_percent": spread([100 * (ratio - 1) for ratio in ratios]),
        "rounds": len(ratios),
    }


@script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = command_line(__doc__, out="compile_time_{device}.json", seconds=300)
    arguments = parse(parser, argv)
    names = choose(arguments, dict.fromkeys(_CASES, ""), _SMALL)
    results = {
        name: _case(name, arguments.device, arguments.small, arguments.seconds / len(names))
        for name in names
    }
    print_machine(arguments.device)
    head = ("model", "s without", "with", "added %, median", "middle half", "rounds")
    print_table(
        head,
        [
            (
                name,
                one["without_s"]["median"],
                one["with_s"]["median"],
                one["added_percent"]["median"],
                f"{one['added_percent']['low']:.1f} to {one['added_percent']['high']:.1f}",
                one["rounds"],
            )
            for name, one in results.items()
        ],
    )
    write_results(arguments, {"cases": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
