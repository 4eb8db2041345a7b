"""One copy beside another: how long both take, in turns, and how far their results are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from backspot.live.plan.copies import Copy, relative
from backspot.live.plan.watching import random_states
from backspot.live.trials.measuring import Clock, measure, verdict_of
from backspot.live.trials.trial import AS_IT_IS, Trial
from backspot.live.trials.twins import Refused
from backspot.results.plan import Difference, PlanVerdict, Rung
from backspot.results.trials import Variant

_NEW = "with it"
_CHUNK = 1 << 28
"""In such blocks memory is taken and given back to have PyTorch's statistics as they were."""


def timed(now: Copy, new: Copy, step_ns: int, seconds: float) -> tuple[int, Variant]:
    """Return what a copy takes in a step, and another one beside it.

    Raises:
        Refused: If that takes too long.
    """
    clock = Clock(now.device, whole=True)
    times = now.at_once
    variants = {AS_IT_IS: now.pieces(times), _NEW: new.pieces(times)}
    trial = Trial("", variants, first_is_slow=True)
    tried = measure(trial, clock, step_ns, seconds, lambda saved: [host for host, _ in saved])
    as_it_is, variant = tried.variants
    if variant.verdict == "fails":
        raise Refused(variant.note)
    if not variant.ns:
        raise Refused("no time was left")
    return as_it_is.ns, variant


def predicted(rung: Rung, before: float, saves: Sequence[float], measured: str) -> Rung:
    """Return a rung with the step as it is without what it saves.

    Args:
        before: the step without it.
        saves: the middle, the lower and the upper end.
        measured: what the measurement says; ``"undecided"`` stays so, whatever the step is.
    """
    step, high, low = (max(1, round(before - ns)) for ns in saves)
    said = cast(PlanVerdict, measured if measured == "undecided" else verdict_of(saves, before))
    if said == "undecided" and low == high:  # of too few rounds for an interval
        low = high = 0
    return replace(
        rung, before_ns=round(before), step_ns=step, low_ns=low, high_ns=high, verdict=said
    )


class Results:
    """What a run of the copy as it is gives, to hold those of other copies against.

    Attributes:
        draws: whether the models draw random numbers.
    """

    def __init__(self, base: Copy) -> None:
        self._first = _results(base)
        before, after = base.watched.calls[0].random, random_states()
        pairs = zip([before[0], *(before[1] or ())], [after[0], *(after[1] or ())], strict=True)
        self.draws = any(not torch.equal(one, other) for one, other in pairs)
        self._again = _apart(_results(base), self._first)

    def difference(self, new: Copy) -> Difference:
        """Return how far the results of another copy are from those of the copy as it is."""
        far = _apart(_results(new), self._first)
        return Difference(*far, *self._again)


_All = list[tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]]


def _results(one: Copy) -> _All:
    """Return outputs, gradients and losses of each call, as copies."""
    one.reset()
    found: _All = []
    for call in one.watched.calls:
        outputs = [each.detach().clone() for each in one.run(call, seen={})]
        gradients = [p.grad for p in one.parameters() if p.grad is not None]
        one.forget_gradients()
        losses = [each for each in outputs if not each.dim()]
        found.append((outputs, gradients, losses))
    return found


def _apart(ones: _All, others: _All) -> tuple[float, float, float | None]:
    """Return the largest difference of outputs, of gradients, and of losses if there are any."""
    pairs = list(zip(ones, others, strict=True))
    if any(len(a[1]) != len(b[1]) for a, b in pairs):
        raise Refused("with it, other parameters get gradients")
    far = [max(relative(a[kind], b[kind]) for a, b in pairs) for kind in range(3)]
    return far[0], far[1], far[2] if any(losses for *_, losses in others) else None


def memory_of(one: Copy) -> int:
    """Return the most that a run of a copy has on its GPU at once; 0 on a CPU.

    PyTorch's statistics of the process have the same peak afterwards as before.
    """
    if one.device.type != "cuda":
        return 0
    cuda, device = torch.cuda, one.device
    peak = cuda.max_memory_allocated(device)
    one.forget_gradients()
    cuda.reset_peak_memory_stats(device)
    before = cuda.memory_allocated(device)
    one.run_all()
    most = int(cuda.max_memory_allocated(device) - before)
    one.forget_gradients()
    _raise_peak(device, peak)
    return most


def _raise_peak(device: torch.device, peak: int) -> None:
    """Have the statistics say a peak that was before; as near to it as memory allows."""
    blocks: list[Any] = []
    while (missing := peak - torch.cuda.memory_allocated(device)) > 0:
        if torch.cuda.max_memory_allocated(device) >= peak:
            break
        try:
            size = min(missing, _CHUNK)
            blocks.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            break
