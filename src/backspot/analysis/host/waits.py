"""Where the host waits for a device: the phase, the module, the operator and the line."""

from __future__ import annotations

import numpy as np

from backspot.analysis.accounting.activity import NAMES
from backspot.analysis.recording import Recording, once
from backspot.results.host import Wait
from backspot.trace.columns import Index
from backspot.trace.events import Ints


@once
def places_in(recording: Recording) -> tuple[list[Wait], list[Ints]]:
    """Return the places of waits, the longest wait first, and for each the calls that wait.

    Returns:
        The places, and for each of them the calls as indices into the events.
    """
    events, waits, typical = recording.events, recording.waits, recording.typical
    operator = np.where(waits.caller >= 0, waits.caller, waits.event)
    line_of = Index()
    line = np.array([line_of[line] for line in recording.lines_of_waits], np.int64)
    keys = np.stack([waits.phase, waits.owner, events.name[operator], line])
    distinct_keys, place = np.unique(keys, axis=1, return_inverse=True)
    place = place.reshape(-1)  # numpy 2.0 keeps the axis
    lines = list(line_of)
    count, steps = distinct_keys.shape[1], len(typical.weight)
    times = np.zeros((3, count, steps), np.int64)
    for into, ns in zip(times, (waits.first, waits.ns, waits.idle), strict=True):
        np.add.at(into, (place, waits.step), ns)
    number = typical.count(times[0])
    wall, idle = typical.mean(times[1]), typical.mean(times[2])
    order = sorted(
        range(count), key=lambda number: (-int(wall[number]), distinct_keys[:, number].tolist())
    )
    places = [
        Wait(
            NAMES[distinct_keys[0, one]],
            *recording.ownership.owners.named(int(distinct_keys[1, one])),
            operator=events.names[distinct_keys[2, one]],
            line=lines[distinct_keys[3, one]],
            count=int(number[one]),
            wall_ns=int(wall[one]),
            idle_ns=int(idle[one]),
        )
        for one in order
    ]
    return places, [waits.event[place == number] for number in order]
