"""The kernels of a module that take longer on one rank than on the others.

A summary has the longest kernels of each module, and how long all of its kernels take. So the time
of a kernel that it does not name is known to be 0, or to be at most that of the shortest one named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from backspot.job.summary import KERNELS, Summary

_MOST = 0.5
"""Share of a module's difference from which its kernels explain it."""
_REPLACED = 0.1
"""Share of a module's kernels on the other ranks from which one that is missing here matters."""
_NAMED = 2
"""How many kernels are named at most."""


@dataclass(frozen=True, slots=True)
class LongerKernel:
    """A kernel that takes longer on a rank, in nanoseconds a step.

    Attributes:
        name: its name, as the summary has it.
        taken_ns: how long it takes there.
        usual_ns: median over the other ranks.
        is_alone: whether it runs on no other rank.
    """

    name: str
    taken_ns: int
    usual_ns: int
    is_alone: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """What makes most of a module's difference.

    Attributes:
        longer: the kernels that do, the one with the largest difference first.
        replaced: kernels of most other ranks that this rank does not run. Where a library chooses
            its kernels by the shapes and types of inputs, these are what it chose otherwise.
    """

    longer: tuple[LongerKernel, ...]
    replaced: tuple[str, ...]


def difference(
    path: str,
    backward: bool,
    rank: int,
    peers: Sequence[int],
    ranks: Mapping[int, Summary],
    longer_ns: int,
) -> Difference | None:
    """Return the kernels by which a module takes longer on a rank.

    Args:
        path: the module.
        backward: whether its backward takes longer, and not its forward.
        rank: the rank that takes longer.
        peers: the ranks that it is compared with.
        ranks: the summaries.
        longer_ns: by how much the module takes longer.

    Returns:
        ``None`` if a summary of an earlier version names no kernels, or if no few kernels make most
        of the difference.
    """
    if not peers or not all(ranks[number].kernels for number in (rank, *peers)):
        return None
    here = _Kernels(ranks[rank], path, backward)
    others = [_Kernels(ranks[peer], path, backward) for peer in peers]
    longer = []
    for name, taken_ns in here.times.items():
        usual_ns = int(median(other.most(name) for other in others))
        is_alone = not any(other.most(name) for other in others)
        longer.append(LongerKernel(name, taken_ns, usual_ns, is_alone))
    longer.sort(key=lambda kernel: (kernel.usual_ns - kernel.taken_ns, kernel.name))
    named: list[LongerKernel] = []
    explained_ns = 0
    for kernel in longer[:_NAMED]:
        if explained_ns < _MOST * longer_ns and kernel.taken_ns > kernel.usual_ns:
            named.append(kernel)
            explained_ns += kernel.taken_ns - kernel.usual_ns
    if not named or explained_ns < _MOST * longer_ns:
        return None
    usual = {
        name: median(other.times.get(name, 0) for other in others)
        for name in sorted({name for other in others for name in other.times})
    }
    least = _REPLACED * sum(usual.values())
    replaced = [name for name, time in usual.items() if time > max(least, 2 * here.most(name))]
    replaced.sort(key=lambda name: -usual[name])
    return Difference(tuple(named), tuple(replaced[:_NAMED]))


class _Kernels:
    """The kernels of one module in one direction on one rank.

    Attributes:
        times: the longest kernels with their nanoseconds a step, by name.
    """

    def __init__(self, summary: Summary, path: str, backward: bool) -> None:
        self.times: dict[str, int] = {}
        self._unnamed_ns = 0
        for number, module in enumerate(summary.modules):
            if module.path == path and module.is_module:
                self._unnamed_ns += module.gpu_ns(backward)
                for kernels in summary.kernels:
                    if kernels.module == number and kernels.backward == backward:
                        self._add(summary, kernels.kernel, kernels.time)
        self._unnamed_ns //= summary.steps

    def _add(self, summary: Summary, kernel: Sequence[int], time: Sequence[int]) -> None:
        for number, time_ns in zip(kernel, time, strict=True):
            name = summary.kernel_names[number]
            self.times[name] = self.times.get(name, 0) + time_ns // summary.steps
            self._unnamed_ns -= time_ns

    def most(self, name: str) -> int:
        """Return how long a kernel takes at most, in nanoseconds a step."""
        if name in self.times or len(self.times) < KERNELS:
            return self.times.get(name, 0)
        return min(min(self.times.values()), self._unnamed_ns)
