"""The modules over the ranks: the time of each one on each rank, and where it takes longer.

A module's time on a rank is compared with the median of its times on the other ranks that have the
module. The stages of a pipeline have different modules, even if these have the same paths: ranks
that transfer to each other are compared only if modules have collectives in common. A module of one
rank alone is compared with none.

The time of the host outside of modules is compared as modules are: each place in the training loop
stands for one, and all ranks have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from backspot.job.noise import Limits
from backspot.job.scatter import Others, is_clear, least, middle, shift_of
from backspot.job.summary import ModuleTimes, Summary
from backspot.results.job import ModuleSpread, Part
from backspot.trace.events import Ints, Mask
from backspot.trace.names import POINT_TO_POINT

PARTS: tuple[Part, ...] = get_args(Part)
_ON_GPU = [kind.endswith("_gpu") for kind in PARTS]
_ON_HOST = [place for place, kind in enumerate(PARTS) if kind.endswith("_host")]
_HIDDEN = ("forward_hidden", "backward_hidden")
_BESIDE = ("forward_beside", "backward_beside")
"""What collectives hide of the parts on the host, and what runs beside kernels, in their order."""


class Table:
    """The times of all modules on all ranks, in the steps that all ranks have.

    Args:
        at: for each rank, where its summary has these steps.

    Attributes:
        times: clock time in nanoseconds, by rank, module, part and step.
        taken: the same, with what the host executes while collectives hide it.
        work: the same, with what the host executes beside kernels.
        has: whether a rank has a module, by rank and module.
        by_step: ``taken`` by module and step, all parts together: median of the ranks that have the
            module.
        peers: modules that the same ranks have, two or more, and the rows of these ranks.
        has_gpu: whether kernels of any module run on a GPU.
    """

    def __init__(self, ranks: Mapping[int, Summary], steps_of: Mapping[int, Sequence[int]]) -> None:
        self.ranks = tuple(ranks)
        compared = _compared(ranks)
        by_path = {module.path: module for of_rank in compared for module in of_rank}
        self.modules: tuple[ModuleTimes, ...] = tuple(by_path[path] for path in sorted(by_path))
        place = {module.path: index for index, module in enumerate(self.modules)}
        steps = len(next(iter(steps_of.values())))
        self.times = np.zeros((len(ranks), len(self.modules), len(PARTS), steps), np.int64)
        self.taken, self.work = np.zeros_like(self.times), np.zeros_like(self.times)
        self.has = np.zeros((len(ranks), len(self.modules)), bool)
        for row, (rank, of_rank) in enumerate(zip(ranks, compared, strict=True)):
            if not of_rank:
                continue
            index = [place[module.path] for module in of_rank]
            none = (0,) * ranks[rank].steps
            numbers = np.array(
                [
                    [getattr(module, kind) or none for kind in (*PARTS, *_HIDDEN, *_BESIDE)]
                    for module in of_rank
                ]
            )
            clock, hidden, beside = np.split(
                numbers[:, :, steps_of[rank]], (len(PARTS), len(PARTS) + len(_HIDDEN)), axis=1
            )
            self.times[row, index] = self.taken[row, index] = clock
            self.taken[row, np.array(index)[:, None], _ON_HOST] += hidden
            self.work[row, index] = self.taken[row, index]
            self.work[row, np.array(index)[:, None], _ON_HOST] += beside
            self.has[row, index] = True
        self.has_gpu = bool(self.times[:, :, _ON_GPU].any())
        self.by_step = np.zeros((len(self.modules), steps), np.int64)
        for modules, rows in _groups(self.has):
            self.by_step[modules] = np.median(self.taken[rows][:, modules].sum(axis=2), axis=0)
        self.peers = [
            (modules, rows)
            for stage in _stages(ranks)
            for modules, rows in _groups(self.has & stage[:, None])
            if len(rows) > 1
        ]
        self._others = [
            (Others(self.taken[rows][:, modules]), Others(self.work[rows][:, modules]))
            for modules, rows in self.peers
        ]

    def others(self, rank: int, own: Ints | None = None) -> Ints:
        """Return the median over the other ranks, by module, part and step.

        The host of a rank that waits works beside the collective, and holds up nothing. This time
        counts here: the rank that they wait for does the same work, and holds up its device. What
        the others' hosts do beside kernels counts as far as the rank's own host takes as long: it
        does the same work, and its device happens to have nothing to run.

        For modules that no other rank has, this is the rank's own time: nothing is compared.

        Args:
            rank: the rank.
            own: what it takes, ``times`` by default.
        """
        row = self.ranks.index(rank)
        own = self.times[row] if own is None else own
        others_times: Ints = own.copy()
        for (modules, rows), (taken, work) in zip(self.peers, self._others, strict=True):
            if row in rows:
                least, most = taken.of(self.taken[row, modules]), work.of(self.work[row, modules])
                others_times[modules] = np.clip(own[modules], least, most)
        return others_times

    def peers_of(self, rank: int, path: str) -> tuple[int, ...]:
        """Return the other ranks that a rank's module is compared with."""
        module, row = [module.path for module in self.modules].index(path), self.ranks.index(rank)
        return tuple(
            self.ranks[other]
            for modules, rows in self.peers
            if module in modules and row in rows
            for other in rows.tolist()
            if other != row
        )

    def longer(self, rank: int) -> Ints:
        """Return by how much a rank exceeds the median of the others, by module, part and step."""
        excess: Ints = self.times[self.ranks.index(rank)] - self.others(rank)
        return excess


def _compared(ranks: Mapping[int, Summary]) -> list[list[ModuleTimes]]:
    """Return the modules of each rank, and the places outside of modules that any rank has."""
    # Summaries of earlier versions do not have them.
    outside_known = all(summary.outside for summary in ranks.values())
    places = {
        outside.place for summary in ranks.values() for outside in summary.outside if outside_known
    }
    return [
        [module for module in summary.modules if module.is_module]
        + [_outside(summary, place) for place in sorted(places)]
        for summary in ranks.values()
    ]


def _outside(summary: Summary, place: str) -> ModuleTimes:
    """Return what the host does in one place outside of modules."""
    none = (0,) * summary.steps
    outside_times = [outside for outside in summary.outside if outside.place == place]
    host, hidden, beside = (
        tuple(map(sum, zip(none, *times, strict=True)))
        for times in (
            [outside.host for outside in outside_times],
            [outside.hidden for outside in outside_times],
            [outside.beside or none for outside in outside_times],
        )
    )
    return ModuleTimes(place, "", False, none, host, hidden, none, none, none, beside)


def _groups(has_module: Mask) -> list[tuple[Ints, Ints]]:
    """Return the modules by which ranks have them: the modules, and the rows of the ranks."""
    sets, pattern = np.unique(has_module, axis=1, return_inverse=True)
    return [
        (np.flatnonzero(pattern.ravel() == number), np.flatnonzero(sets[:, number]))
        for number in range(sets.shape[1])
    ]


def _stages(ranks: Mapping[int, Summary]) -> list[Mask]:
    """Return the ranks of each stage of a pipeline; all ranks if there is none.

    Of two ranks that exchange gradients, parameters or activations in collectives, both have the
    same modules.
    """
    if not any(any(hints.stalled) for hints in ranks.values()):
        return [np.ones(len(ranks), bool)]
    stage = list(range(len(ranks)))
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    for row, summary in enumerate(ranks.values()):
        for group in summary.groups:
            if any(call.purpose and call.kind != POINT_TO_POINT for call in group.calls):
                before, now = stage[first.setdefault((group.name, group.ranks), row)], stage[row]
                stage = [before if number == now else number for number in stage]
    return [np.array(stage) == number for number in dict.fromkeys(stage)]


@dataclass(frozen=True, slots=True)
class Claim:
    """A module, or place outside of modules, that takes longer on a rank beyond the noise.

    Times are nanoseconds of a typical step: usually on the other ranks, and taken on this one.
    ``part`` is where it takes longer most.
    """

    rank: int
    module: ModuleTimes
    part: Part
    usual_ns: int
    taken_ns: int


def find_spreads(table: Table, step_ns: int) -> tuple[tuple[ModuleSpread, ...], list[Claim]]:
    """Return each module with its worst rank, costliest first; and what is longer for certain."""
    total = middle(table.taken.sum(axis=2))  # by rank and module
    typical = middle(table.times.sum(axis=2))
    usual = np.array([middle(table.others(rank).sum(axis=1)) for rank in table.ranks])
    gaps = typical - usual
    worst = np.where(table.has, gaps, np.iinfo(np.int64).min).argmax(axis=0)
    usually, worth = total.max(axis=0), np.full(total.shape[1], np.inf)
    for modules, rows in table.peers:
        times = total[rows][:, modules]
        usually[modules] = np.median(times, axis=0)
        worth[modules] = least(times, total.size, step_ns)
    spreads, claims = [], []
    for row, rank in enumerate(table.ranks):
        gap, large = gaps[row], gaps[row] >= worth
        chosen = np.flatnonzero(large | (worst == row)).tolist()
        if not chosen:
            continue
        # Again, for few ranks: those of all ranks would take as much memory as the table.
        before, after = table.others(rank), table.times[row]
        earlier, now = before.sum(axis=1), after.sum(axis=1)
        # What the modules have in common is seen where neither side leaves out what is hidden.
        shift = None
        if large.any():
            taken = table.taken[row]
            shift = shift_of(table.others(rank, taken).sum(axis=1), taken.sum(axis=1))
        for index in chosen:
            module = table.modules[index]
            kind = PARTS[int((middle(after[index]) - middle(before[index])).argmax())]
            limits = Limits(least=float(worth[index]))
            clear = bool(large[index]) and is_clear(earlier[index], now[index], shift, limits)
            if clear:
                taken_ns = int(typical[row, index])
                claims.append(Claim(rank, module, kind, int(usual[row, index]), taken_ns))
            if worst[index] == row:
                spreads.append(
                    ModuleSpread(
                        path=module.path,
                        class_name=module.class_name,
                        median_ns=int(usually[index]),
                        worst_ns=int(total[row, index]),
                        worst_rank=rank,
                        part=kind,
                        cost_ns=max(int(gap[index]), 0),
                        clear=clear,
                        ns_by_rank=tuple(total[:, index].tolist()),
                        ns_by_step=tuple(table.by_step[index].tolist()),
                    )
                )
    return tuple(sorted(spreads, key=lambda spread: (-spread.cost_ns, spread.path))), claims
