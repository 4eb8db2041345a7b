"""The same transfer on its two ranks: which receive waits for which send.

Transfers between two ranks do not overtake each other, as in MPI: in a step, the k-th send of one
rank to another in a process group is the k-th receive there. Tags do not count. Each trace says of
its own transfers where they go. Where it does not, or where the ranks disagree on their number,
nothing is matched, because any choice could be wrong.

A receive never ends before its send begins. Transfers in both directions bound the difference of
two clocks by that from both sides, and where ranks wait for each other the bounds are close. So
ranks that share no collective get their clocks, as from the exchanges of NTP (RFC 5905).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from backspot.job.align import RankClock
from backspot.job.summary import Call, Group, Summary
from backspot.trace.events import Ints
from backspot.trace.names import POINT_TO_POINT


class Own(NamedTuple):
    """The transfers of one rank, on its own clock; those that are launched together can be one."""

    call: tuple[Call, ...]
    start: Ints
    end: Ints
    exposed: Ints


class Transfers(NamedTuple):
    """The transfers of each rank; and of each sender and receiver, a row for each transfer.

    A row has the index of the transfer among those of the sender, and of the receiver.
    """

    of: Mapping[int, Own]
    links: Mapping[tuple[int, int], Ints]


def match_transfers(ranks: Mapping[int, Summary], numbers: Sequence[int]) -> Transfers | None:
    """Match the transfers in the steps of these numbers; ``None`` if that fails for any of them."""
    by_rank: dict[int, Own] = {}
    ends: dict[tuple[Any, ...], tuple[list[int], list[int]]] = {}
    for rank, summary in ranks.items():
        own: list[tuple[Group, int]] = []
        for group in summary.groups:
            for index, (step, call) in enumerate(zip(group.step, group.call, strict=True)):
                transfer, number = group.calls[call], summary.step_numbers[step]
                if transfer.kind != POINT_TO_POINT or number not in numbers:
                    continue
                if not transfer.to and not transfer.of:
                    return None
                pairs = [
                    *((0, rank, to) for to in transfer.to),
                    *((1, sender, rank) for sender in transfer.of),
                ]
                for side, *pair in pairs:
                    key = (group.name, *pair, number)
                    ends.setdefault(key, ([], []))[side].append(len(own))
                own.append((group, index))
        times = [
            (group.start[index], group.end[index], group.exposed[index]) for group, index in own
        ]
        start, end, exposed = np.array(times, np.int64).reshape(-1, 3).T
        calls = tuple(group.calls[group.call[index]] for group, index in own)
        by_rank[rank] = Own(calls, start + summary.origin_ns, end + summary.origin_ns, exposed)
    links: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (_, sender, receiver, number), (sent, received) in ends.items():
        count = min(len(sent), len(received))
        if len(sent) != len(received):
            # A recording can begin within the first step, and end within the last one.
            if number not in (numbers[0], numbers[-1]) or not count:
                return None
            first = number == numbers[0]
            sent, received = (
                side_events[-count:] if first else side_events[:count]
                for side_events in (sent, received)
            )
        links.setdefault((sender, receiver), []).extend(zip(sent, received, strict=True))
    return Transfers(
        by_rank, {pair: np.array(sorted(pairs_of)) for pair, pairs_of in links.items()}
    )


def aligned_by(transfers: Transfers, clocks: Mapping[int, RankClock]) -> dict[int, RankClock]:
    """Return the clocks with those of ranks that transfer to and from a rank with a clock."""
    aligned = dict(clocks)
    growing = True
    while growing:
        growing = False
        for sender, receiver in transfers.links:
            if (
                sender in aligned
                and receiver not in aligned
                and (receiver, sender) in transfers.links
            ):
                clock, sending, other = (
                    aligned[sender],
                    transfers.of[sender],
                    transfers.of[receiver],
                )
                sent, received = transfers.links[sender, receiver].T
                least = int((clock.to_job(sending.start[sent]) - other.end[received]).max())
                sent, received = transfers.links[receiver, sender].T
                most = int((clock.to_job(sending.end[received]) - other.start[sent]).min())
                doubt = math.hypot(clock.uncertainty_ns, (most - least) / 2)
                aligned[receiver] = RankClock((least + most) // 2, 0.0, 0, doubt)
                growing = True
    return aligned
