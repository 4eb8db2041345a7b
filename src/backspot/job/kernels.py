"""The kernels of a module that take longer on one rank than on the others.

A module's time on a rank is its middle over the steps that all ranks have. So its kernels are
compared in the steps whose times make that middle: what ran in another step is no cause of it, and
no kernel takes longer than its module.

A summary names the longest kernels of each module, and has the time of the longest other one. So
the time of a kernel that it does not name is known to be 0, or to be at most that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from backspot.job.modules import PARTS
from backspot.job.scatter import in_middle_steps
from backspot.job.summary import KernelTimes, Summary

_MOST = 0.5
"""Share of a module's difference from which its kernels explain it: the larger part."""
_REPLACED = 0.1
"""Share of a module's kernels on the other ranks from which one that is missing here matters."""
_NAMED = 2
"""How many kernels are named at most: as many as a sentence holds."""


@dataclass(frozen=True, slots=True)
class LongerKernel:
    """A kernel that takes longer on a rank, in nanoseconds a step.

    Attributes:
        name: its name, as the summary has it.
        taken_ns: how long it takes there.
        usual_ns: median over the other ranks.
        is_alone: whether it runs on no other rank; ``None`` if no other rank names it, and one of
            them has kernels that it does not name.
        is_bound: whether the median may be less than ``usual_ns``, because a rank does not name it.
    """

    name: str
    taken_ns: int
    usual_ns: int
    is_alone: bool | None
    is_bound: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """What makes most of a module's difference.

    Attributes:
        longer: the kernels that do, the one with the largest difference first.
        replaced: kernels of most other ranks that take less than half as long on this rank. Where
            a library chooses its kernels by the shapes and types of inputs, these are what it chose
            otherwise.
        is_instead: whether this rank runs none of those that are replaced.
        known: the names of all kernels of the module that any of these ranks names.
    """

    longer: tuple[LongerKernel, ...]
    replaced: tuple[str, ...]
    is_instead: bool
    known: tuple[str, ...]


class KernelsOfRanks:
    """The kernels of all modules on all ranks, in the steps that all ranks have.

    Args:
        ranks: the summaries.
        steps_of: for each rank, where its summary has these steps.
    """

    def __init__(self, ranks: Mapping[int, Summary], steps_of: Mapping[int, Sequence[int]]) -> None:
        self._are_known = {rank: bool(summary.kernels) for rank, summary in ranks.items()}
        self._ranks = {
            rank: _KernelsOfRank(summary, steps_of[rank]) for rank, summary in ranks.items()
        }

    def difference(
        self, path: str, backward: bool, rank: int, peers: Sequence[int], longer_ns: int
    ) -> Difference | None:
        """Return the kernels by which a module takes longer on a rank.

        Args:
            path: the module.
            backward: whether its backward takes longer, and not its forward.
            rank: the rank that takes longer.
            peers: the ranks that it is compared with.
            longer_ns: by how much the module takes longer.

        Returns:
            ``None`` if a summary of an earlier version names no kernels, or if no few kernels make
            most of the difference.
        """
        if not peers or not all(self._are_known[number] for number in (rank, *peers)):
            return None
        here, *others = (self._ranks[number].of(path, backward) for number in (rank, *peers))
        named = _longer(here, others, longer_ns)
        if not named:
            return None
        names = sorted({name for other in others for name in other.times})
        usual = {name: median(other.times.get(name, 0) for other in others) for name in names}
        least = _REPLACED * sum(usual.values())
        replaced = [name for name, time in usual.items() if time > max(least, 2 * here.most(name))]
        replaced = sorted(replaced, key=lambda name: -usual[name])[:_NAMED]
        is_instead = here.names_all and not any(name in here.times for name in replaced)
        known = tuple(sorted({*here.times, *names}))
        return Difference(named, tuple(replaced), is_instead, known)


def _longer(here: _Kernels, others: Sequence[_Kernels], longer_ns: int) -> tuple[LongerKernel, ...]:
    """Return the few kernels that make most of a difference; none if no few do."""
    longer = sorted(
        (_compared(name, taken_ns, others) for name, taken_ns in here.times.items()),
        key=lambda kernel: (kernel.usual_ns - kernel.taken_ns, kernel.name),
    )
    named: list[LongerKernel] = []
    explained_ns = 0
    for kernel in longer[:_NAMED]:
        if explained_ns < _MOST * longer_ns and kernel.taken_ns > kernel.usual_ns:
            named.append(kernel)
            explained_ns += kernel.taken_ns - kernel.usual_ns
    return tuple(named) if explained_ns >= _MOST * longer_ns else ()


def _compared(name: str, taken_ns: int, others: Sequence[_Kernels]) -> LongerKernel:
    usual_ns = int(median(other.most(name) for other in others))
    least_ns = int(median(other.times.get(name, 0) for other in others))
    is_named, all_named = (
        any(name in other.times for other in others),
        all(other.names_all for other in others),
    )
    is_alone = False if is_named else True if all_named else None
    return LongerKernel(name, taken_ns, usual_ns, is_alone, least_ns < usual_ns)


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The kernels of one module in one direction on one rank, in nanoseconds a step.

    Attributes:
        times: those that its summary names, by name.
        unnamed_ns: the longest other one.
        names_all: whether there are no others in any step.
    """

    times: Mapping[str, int]
    unnamed_ns: int
    names_all: bool

    def most(self, name: str) -> int:
        """Return how long a kernel takes at most."""
        return self.times.get(name, self.unnamed_ns)


class _KernelsOfRank:
    def __init__(self, summary: Summary, steps: Sequence[int]) -> None:
        self._summary, self._steps = summary, list(steps)
        self._number = {
            module.path: number for number, module in enumerate(summary.modules) if module.is_module
        }
        self._kernels: dict[tuple[int, bool], KernelTimes] = {
            (kernels.module, kernels.backward): kernels for kernels in summary.kernels
        }

    def of(self, path: str, backward: bool) -> _Kernels:
        """Return the kernels of a module in one direction."""
        number = self._number.get(path, -1)
        kernels = self._kernels.get((number, backward))
        if kernels is None:
            return _Kernels({}, 0, True)
        module = self._summary.modules[number]
        taken = self._chosen(getattr(module, part) for part in PARTS).sum(axis=0)
        by_step = self._chosen((*kernels.time, kernels.unnamed))
        *times, unnamed_ns = in_middle_steps(by_step, taken).tolist()
        names = (self._summary.kernel_names[kernel] for kernel in kernels.kernel)
        named = dict(zip(names, times, strict=True))
        return _Kernels(named, unnamed_ns, not any(kernels.unnamed))

    def _chosen(self, columns: Iterable[Sequence[int]]) -> np.ndarray:
        return np.array(list(columns), np.int64)[:, self._steps]
