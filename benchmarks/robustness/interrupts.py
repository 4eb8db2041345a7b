"""Does training survive interrupts at random moments of recorded steps?

A timer's signal raises KeyboardInterrupt in a recorded step, wherever the step is at that moment.
The exceptions are kept, and dropped at random while a later profiler records: at that time a range
that outlived its session would corrupt memory. After each interrupt a whole step is recorded, and
its labels are compared with those of a step without an interrupt.

Checkpointing and optimizers are left out: PyTorch itself does not survive an interrupt in them (an
optimizer's own ``record_function`` range, the hooks of checkpointing stay behind). ``--hooks none``
is the control without Backspot.

    python -m benchmarks.robustness.interrupts --minutes 10
"""

from __future__ import annotations

import faulthandler
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.profiler import profile

import backspot
from benchmarks.common import command_line, parse, profiling, script, write_results


def build() -> nn.Module:
    """A small model of several kinds of call: nested, repeated, with two outputs."""
    shared = nn.Linear(16, 16)
    block = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    return nn.Sequential(nn.Linear(16, 16), shared, nn.Tanh(), shared, block, nn.LSTMCell(16, 16))


def labels(profiler: profile) -> list[str]:
    """The labels of a recording in their order."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    names = (event.name() for event in events)
    return [name for name in names if name.startswith(("forward: ", "backward: "))]


@script
def main(argv: Sequence[str] | None = None) -> int:
    """Run until the time is over."""
    parser = command_line(__doc__, device=False, cases=False)
    parser.add_argument("--minutes", type=float, help="default: 10; with --small 0.02")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hooks", choices=("node", "module", "none"), default="node")
    options = parse(parser, argv)
    minutes = options.minutes or (0.02 if options.small else 10)
    if not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # sys.stderr may be no file
    chance = random.Random(options.seed)
    model, x = build(), torch.randn(4, 16)

    def step() -> None:
        hidden, cell = model(x)
        (hidden + cell).sum().backward()
        model.zero_grad()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    instrumented = (
        nullcontext()
        if options.hooks == "none"
        else backspot.instrument(model, lines=True, hooks=options.hooks)
    )
    with instrumented:
        with profiling("cpu") as profiler:
            step()
            began = time.perf_counter()
            step()
            step_length = time.perf_counter() - began
        whole = labels(profiler)
        whole = whole[len(whole) // 2 :]
        kept: list[BaseException] = []
        rounds = hit = wrong = 0
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            rounds += 1
            with profiling("cpu") as profiler:
                if chance.random() < 0.5:
                    kept.clear()
                try:
                    signal.setitimer(signal.ITIMER_REAL, max(chance.random() * step_length, 1e-6))
                    step()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt as error:
                    hit += 1
                    kept.append(error)
                torch.set_grad_enabled(True)  # an interrupt may have come within ``no_grad``
                step()
            wrong += labels(profiler)[-len(whole) :] != whole
    signal.signal(signal.SIGALRM, previous)
    found = {"recordings": rounds, "interrupted": hit, "wrong": wrong}
    print(
        f"alive after {minutes:g} minutes: {rounds} recordings, {hit} interrupted, "
        f"{wrong} whole steps with wrong labels"
    )
    write_results(options, {"minutes": minutes, "hooks": options.hooks, **found})
    return 1 if wrong or not hit else 0


if __name__ == "__main__":
    sys.exit(main())
