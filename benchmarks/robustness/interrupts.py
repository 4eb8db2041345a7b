"""Interrupt recorded training at random moments for some minutes, and see the process live.

A timer's signal raises KeyboardInterrupt in a recorded step, wherever the step is at that moment.
The exceptions are kept, and let go at random while a later profiler records: that is when a range
that outlived its session would corrupt memory. After each interrupt a whole step is recorded, and
its labels are compared with those of a step that nobody interrupted.

Checkpointing and optimizers are left out: PyTorch itself does not survive an interrupt in them (an
optimizer's own ``record_function`` range, the hooks of checkpointing stay behind). ``--hooks none``
is the control without Backspot.

    python -m benchmarks.robustness.interrupts --minutes 10
"""

from __future__ import annotations

import argparse
import faulthandler
import platform
import random
import signal
import sys
import time

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import backspot


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


def main() -> int:
    """Run until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hooks", choices=("node", "module", "none"), default="node")
    options = parser.parse_args()
    faulthandler.enable()
    chance = random.Random(options.seed)
    model, x = build(), torch.randn(4, 16)

    def step() -> None:
        hidden, cell = model(x)
        (hidden + cell).sum().backward()
        model.zero_grad()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    if options.hooks != "none":
        backspot.instrument(model, lines=True, hooks=options.hooks)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
        began = time.perf_counter()
        step()
        step_length = time.perf_counter() - began
    whole = labels(profiler)
    whole = whole[len(whole) // 2 :]
    kept: list[BaseException] = []
    rounds = hit = wrong = 0
    end = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end:
        rounds += 1
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
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
    print(
        f"alive after {options.minutes:g} minutes: {rounds} recordings, {hit} interrupted, "
        f"{wrong} whole steps with wrong labels; torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
    return 1 if wrong or not hit else 0


if __name__ == "__main__":
    sys.exit(main())
