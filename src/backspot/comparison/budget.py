"""What is said where the noise is too large to tell whether a change is within a limit."""

from __future__ import annotations

from backspot.formatting import MINUS, duration
from backspot.results.comparison import Change

__all__ = ["measured", "too_noisy"]


def too_noisy(change: Change, percent: float) -> str:
    """Return why nobody can tell whether something got slower by more than a limit, and a remedy.

    Args:
        change: what ``Change.too_noisy_for`` says yes to.
        percent: the limit, in percent of the time before.
    """
    asked = f"whether {change.title} got more than {percent:g}% slower"
    noise, before = change.noise_ms, change.judged_ms[0]
    if noise is None:
        return f"too few steps to tell {asked}: record ten steps or more on both sides"
    larger = noise > before * percent / 100
    why = "too noisy to tell" if larger else "cannot tell"
    machine = "" if larger else ", which may be the machine"
    return (
        f"{why} {asked}: {measured(change)}{machine}; record both on an idle machine and, on a "
        "CPU, with OMP_NUM_THREADS=1, or allow more"
    )


def measured(change: Change) -> str:
    """Return what was measured: ``22.0 ms, then 61.4 ms (+179%), noise ±39.1 ms (±178%)``."""
    before, after, _ = change.judged_ms
    times = [duration(ms * 1e6) for ms in (before, after)]
    said = f"{times[0]}, then {times[1]}"
    if change.judged_percent is not None:
        by = f"{change.judged_percent:+.0f}%".replace("-", MINUS)
        said += f" ({by})" if by[1:] != "0%" else " (0%)"
    if change.noise_ms is not None:
        said += f", noise ±{duration(change.noise_ms * 1e6)}"
        said += f" (±{change.noise_ms / before:.0%})" if before else ""
    return said
