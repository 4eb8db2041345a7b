"""Launches of device work by phase and module, and those that the device waits for."""

from __future__ import annotations

import numpy as np

from backspot.analysis.accounting.activity import NAMES
from backspot.analysis.accounting.ledger import Ledger
from backspot.analysis.attribution.ownership import Special
from backspot.analysis.timeline import NOTHING, grouped, numbered
from backspot.analysis.typical import TypicalStep
from backspot.results.costs import Launches
from backspot.trace.events import Ints

_LAUNCHING = 200_000  # nanoseconds: what keeps a device waiting for longer is no launching


def find_launches(ledger: Ledger, phase: Ints, typical: TypicalStep) -> tuple[Launches, ...]:
    """Count the device work that each module launches in each phase; what idles longest is first.

    Args:
        ledger: the clock time of the steps.
        phase: the phase of each piece of device work, an index into ``activity.NAMES``.
        typical: the steps that count.
    """
    ownership, steps = ledger.ownership, ledger.steps
    work = ownership.work
    before = np.full(len(work.start), NOTHING)
    for _, members in grouped(work.device):
        members = members[np.argsort(work.start[members], kind="stable")]
        before[members] = np.append(NOTHING, np.maximum.accumulate(work.end[members])[:-1])
    idle = work.start - before
    late = (before >= 0) & (work.launch >= before) & (idle >= 0) & (idle <= _LAUNCHING)
    idle = ledger.elapsed(before, work.start)
    step = steps.at(work.launch)
    inside = (step >= 0) & (work.launch >= 0)
    owner = np.maximum(ownership.work_owner, Special.OUTSIDE)
    key = (phase * len(ownership.owners) + owner)[inside]
    least = int(key.min(initial=0))  # negative where a phase is not known
    codes, place = numbered(key - least)
    sums = np.zeros((3, len(codes), len(typical.weight)), np.int64)
    for into, amount in zip(sums, (np.ones_like(idle), late, np.where(late, idle, 0)), strict=True):
        np.add.at(into, (place, step[inside]), amount[inside])
    counts, times = typical.count(sums[:2]), typical.mean(sums[2])
    launches = []
    for index, code in enumerate((codes + least).tolist()):
        of_phase, of_owner = divmod(code, len(ownership.owners))
        count, late_ones = counts[:, index].tolist()
        named = NAMES[of_phase], *ownership.owners.named(of_owner)
        launches.append(Launches(*named, count=count, late=late_ones, idle_ns=int(times[index])))
    return tuple(sorted(launches, key=lambda row: (-row.idle_ns, -row.count, row.phase, row.path)))
