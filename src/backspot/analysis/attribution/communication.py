"""What communication between ranks is for: gradients, parameters or something else."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from backspot.analysis.attribution.launches import DeviceWork, Precedence
from backspot.analysis.attribution.spans import Spans
from backspot.analysis.timeline import NOTHING, enclosing, take
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask

_UNKNOWN = "collective"
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_GATHERING = ("all_gather",)


class Communication(msgspec.Struct, frozen=True):
    """What communication is for; arrays with one entry for each piece of device work.

    Attributes:
        collective: index into ``names``, ``NOTHING`` for work that is no communication.
        of_gradients: whether the work reduces gradients over the ranks.
        of_parameters: whether the work gathers parameters that are sharded over the ranks.
        group: index into ``Events.groups``: the process group, ``NOTHING`` where none is known.
        bytes: what the rank puts in, -1 where that is not known.
        gather: index into ``Events.names``: FSDP2's mark around a gather of parameters, ``NOTHING``
            for none.
        names: the collectives, as ``torch.distributed`` calls them, with the process group if the
            recording has several.
    """

    collective: Ints
    of_gradients: Mask
    of_parameters: Mask
    group: Ints
    bytes: Ints
    gather: Ints
    names: Sequence[str]


def find_communication(events: Events, spans: Spans, work: DeviceWork) -> Communication:
    """Find what each piece of communication is for.

    A reduction is an exchange of gradients if FSDP launches it, if a hook of ``AccumulateGrad``
    does, or a callback of the engine: so do data-parallel wrappers. A reduction in any other node
    is that node's own work, such as in tensor parallelism. A gather is one of parameters if FSDP
    launches it.
    """
    work_of_ranks = np.flatnonzero(work.precedence == Precedence.COMMUNICATION)
    collectives, collective_of = _collectives(events, work, work_of_ranks)
    calls = events.chosen(events.prefix_mask(names.COLLECTIVE_CALL), Category.OPERATOR)
    thread, launch = work.thread[work_of_ranks], work.launch[work_of_ranks]
    call = enclosing(events, calls, thread, launch)
    shown, group, groups = collectives, take(events.group, call), len(events.groups)
    if groups > 1:
        pairs, collective_of = np.unique(
            collective_of * (groups + 1) + group + 1, return_inverse=True
        )
        collectives = [collectives[number] for number in (pairs // (groups + 1)).tolist()]
        labels = ["", *(f" [{name}]" for name in events.groups)]
        shown = [f"{a}{labels[b]}" for a, b in zip(collectives, pairs % (groups + 1), strict=True)]
    gathering = events.names_where(lambda name: names.gathered_module(name) is not None)
    gather = enclosing(events, events.chosen(gathering, Category.ANNOTATION), thread, launch)

    def of_work(values: Ints) -> Ints:
        column = np.full(len(work.start), NOTHING, np.int64)
        column[work_of_ranks] = values
        return column

    collective = of_work(collective_of)
    accumulates = np.array([names.is_accumulate_grad(name) for name in spans.node_names], bool)
    node = take(spans.node, work.span)
    by_sharding = np.zeros(len(work.start), bool)
    marks = events.chosen(events.names_where(names.is_sharding_mark), Category.ANNOTATION)
    by_sharding[work_of_ranks] = enclosing(events, marks, thread, launch) >= 0
    by_engine = (work.span < 0) & (work.run >= 0) & (work.launch >= 0)
    reduces, gathers = (
        take(np.array([name in wanted for name in collectives], bool), collective, False)
        for wanted in (_REDUCING, _GATHERING)
    )
    return Communication(
        collective=collective,
        of_gradients=reduces & (by_sharding | by_engine | take(accumulates, node, False)),
        of_parameters=gathers & by_sharding,
        group=of_work(group),
        bytes=of_work(take(events.size, call)),
        gather=of_work(take(events.name, gather)),
        names=shown,
    )


def _collectives(events: Events, work: DeviceWork, pieces: Ints) -> tuple[Sequence[str], Ints]:
    """Return all collectives, and the one that each of these pieces of work is part of."""
    name = work.name[pieces]
    operators = events.chosen(
        events.prefix_mask(*names.LAUNCHES_OF_COLLECTIVES), Category.OPERATOR, Category.ANNOTATION
    )
    # All-to-all runs as sends, and RCCL has one kernel for all: the operator says which it is.
    operator = enclosing(events, operators, work.thread[pieces], work.launch[pieces])
    around = take(events.name, operator)
    in_names = [names.collective_in(name) for name in events.names]
    spellings = [
        (in_names[operator] if operator >= 0 else "") or in_names[kernel] or _UNKNOWN
        for kernel, operator in zip(name.tolist(), around.tolist(), strict=True)
    ]
    distinct_spellings = sorted(set(spellings))
    return distinct_spellings, np.array(
        [distinct_spellings.index(spelling) for spelling in spellings], np.int64
    )
