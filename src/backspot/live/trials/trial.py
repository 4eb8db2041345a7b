"""What a remedy is given, what it returns, and how it copies tensors; and the list of remedies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

import torch

from backspot.results.findings import Finding
from backspot.results.report import Report

if TYPE_CHECKING:
    from backspot.live.trials.chains import Chains

Run = Callable[[], object]
AS_IT_IS = "as it is"

_MOST_BYTES = 1 << 30
"""What the copies of one trial may take, however much is free."""


class Refused(Exception):  # noqa: N818 - it is no error
    """Why this cannot be tried; a sentence without its end."""


@dataclass(frozen=True)
class Piece:
    """Some work that is measured.

    Attributes:
        run: the work.
        calls: how often a step does it.
        before: what to do before, outside of what is measured.
    """

    run: Run
    calls: float = 1.0
    before: Run | None = None


@dataclass(frozen=True)
class Trial:
    """What is to be measured.

    Attributes:
        what: what that is, in words.
        variants: the pieces of the code as it is, first, and of each other way to write it.
        cold: whether the step runs it with other data in the caches, as an optimizer.
        known_ns: what the recorded steps take for exactly this; 0 where that is not known.
        notes: what else is different with a variant, by its name.
        allowed_s: how long it may take if more than usual, as where code is compiled.
    """

    what: str
    variants: Mapping[str, Sequence[Piece]]
    cold: bool = False
    known_ns: int = 0
    notes: Mapping[str, str] = field(default_factory=dict)
    allowed_s: float = 0.0


@dataclass(frozen=True)
class Live:
    """What still lives of a training after it was recorded. A remedy copies what it uses.

    Attributes:
        models: the models by name.
        optimizers: those that took a step.
        chains: the operators of one more step, with what they were given; ``None`` if no step was
            watched.
        why_no_chains: why none was watched; ``""`` if no step came.
        loader: where the batches come from, if that is known.
    """

    models: Mapping[str, torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    chains: Chains | None = None
    why_no_chains: str = ""
    loader: Any = None


@dataclass(frozen=True)
class Asked:
    """What a remedy is a function of."""

    finding: Finding
    report: Report
    live: Live

    @property
    def step_ns(self) -> int:
        """How long a step takes without the profiler, as far as that is known."""
        replayed = self.report.replayed_step
        return self.report.unprofiled_step_ns or (replayed.ns if replayed else self.report.whole_ns)

    @property
    def known_ns(self) -> int:
        """What the finding is about takes in a step without the profiler."""
        share = self.finding.wall_ns / max(1, self.report.whole_ns)
        return round(min(1.0, share) * self.step_ns)


Remedy = Callable[[Asked], Trial | None]


@dataclass(frozen=True)
class Entry:
    """A remedy in the list.

    Attributes:
        prepare: return what to measure, or ``None`` if there is nothing to try in this case; it
            raises ``Refused`` with the reason why it cannot be tried.
        chains: whether it needs the operators of one more step.
        runs_code: whether it runs code of the user's, on copies.
    """

    prepare: Remedy
    chains: bool = False
    runs_code: bool = False


_entries: dict[str, list[Entry]] = {}


def remedy(
    *rules: str, chains: bool = False, runs_code: bool = False
) -> Callable[[Remedy], Remedy]:
    """Register the decorated function as what to try for the findings of some rules."""

    def register(prepare: Remedy) -> Remedy:
        for rule in rules:
            _entries.setdefault(rule, []).append(Entry(prepare, chains, runs_code))
        return prepare

    return register


@cache
def _imported() -> dict[str, list[Entry]]:
    package = import_module("backspot.live.trials.remedies")
    for module in iter_modules(package.__path__, f"{package.__name__}."):
        import_module(module.name)
    return _entries


def remedies_of(rule: str, *, all_of_them: bool) -> list[Entry]:
    """Return what can be tried for a rule, without those that run the user's code first."""
    found = _imported().get(rule, [])
    return [one for one in found if all_of_them or not one.runs_code]


# Copies ------------------------------------------------------------------------------------------


def check_plain(*tensors: torch.Tensor) -> None:
    """Refuse tensors of a class of their own, which may belong to other ranks.

    Raises:
        Refused: If a tensor is of another class, or not strided.
    """
    for one in tensors:
        if type(one) not in (torch.Tensor, torch.nn.Parameter):
            raise Refused(f"a {type(one).__name__} cannot be copied apart from the training")
        if one.layout is not torch.strided or one.device.type == "meta":
            raise Refused("sparse tensors cannot be copied with their layout")


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a copy with the same strides."""
    if not tensor.numel():
        return 0
    reach = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return int((1 + reach) * tensor.element_size())


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf with the same values, strides and dtype, in memory of its own."""
    source = tensor.detach()
    for dim, (size, stride) in enumerate(zip(source.size(), source.stride(), strict=True)):
        if size > 1 and stride == 0:  # expanded: one of them is all there is
            source = source.narrow(dim, 0, 1)
    with torch.no_grad():
        copy = torch.empty_strided(
            source.size(), source.stride(), dtype=source.dtype, device=source.device
        )
        copy = copy.copy_(source).expand(tensor.size())
    return copy.detach().requires_grad_(tensor.requires_grad)


def free_bytes(device: torch.device) -> int:
    """Return how much memory the copies of a trial may take: half of what is free, and a limit."""
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
    else:
        free = min(_available(), _left_to_container())
    return min(free // 2, _MOST_BYTES)


def check_fits(tensors: Iterable[torch.Tensor], times: float = 1.0) -> None:
    """Refuse copies that take more than half of the memory that is free.

    Raises:
        Refused: with how much it would take.
    """
    tensors = list(tensors)
    if not tensors:
        return
    needed = int(times * sum(map(size_of, tensors)))
    if needed > free_bytes(tensors[0].device):
        raise Refused(f"copies would take {needed >> 20:,} MiB, and too little memory is free")


def _available() -> int:
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except (OSError, ValueError):
        return _MOST_BYTES
    found = [line.split() for line in text.splitlines() if line.startswith("MemAvailable")]
    return int(found[0][1]) << 10 if found else pages


def _left_to_container() -> int:
    group = Path("/sys/fs/cgroup")
    try:
        most = int((group / "memory.max").read_text(encoding="ascii"))
        return most - int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no container, or "max"
        return 1 << 62
